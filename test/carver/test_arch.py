# SPDX-License-Identifier: Apache-2.0
"""Generations of GPUs by TileLang's names."""

import pytest
import torch

from torch_tile.carver.arch import CUDA, cuda, driver
from torch_tile.carver.roller.hint import IntrinInfo

KINDS = {"cuda:sm_80": "ampere", "cuda:sm_89": "ada", "cuda:sm_90a": "hopper", "cuda:sm_120": ""}


@pytest.mark.parametrize("target", KINDS)
def test_generations(target):
    arch = CUDA(target)
    for kind in ("volta", "ampere", "ada", "hopper"):
        assert getattr(cuda, f"is_{kind}_arch")(arch) == (KINDS[target] == kind)
    assert cuda.has_mma_support(arch)


@pytest.mark.parametrize(
    "text,number",
    [("sm_90a", 90), ("sm_120", 120), ("80", 80), ("sm_103f", 103), ("gfx90a", -1), ("sm_", -1), ("", -1),
     ("sm_sm_90", -1), ("90sm_", -1)],
)  # fmt: skip
def test_numbers_of_architectures(text, number):
    assert cuda.check_sm_version(text) == number


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_properties_are_those_of_the_driver():
    assert driver.get_num_sms() == driver.get_device_attribute(16)
    assert driver.get_shared_memory_per_block() == driver.get_device_attribute(8)
    assert driver.get_max_dynamic_shared_size_bytes() >= driver.get_shared_memory_per_block()


def test_a_suggestion_tells_its_products():
    text = repr(IntrinInfo("float16", "float32", True, weight_transform_kind=3))
    assert "float16" in text and "weight_transform_kind=3" in text
