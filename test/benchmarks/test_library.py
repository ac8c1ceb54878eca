# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from benchmarks.library import Case, catalogue, compiled
from torch_tile.hardware import Target
from torch_tile.kernels.norm.softmax import softmax


def test_every_family_and_dtype():
    names = [case.name for case in catalogue()]
    assert len(set(names)) == len(names) > 100
    for family in (
        "gemm",
        "grouped_gemm",
        "k_grouped_gemm",
        "dequant_gemm",
        "attention",
        "mla",
        "rms_norm",
        "layer_norm",
        "softmax",
        "cross_entropy",
    ):
        assert {n.split()[1] for n in names if n.startswith(family)} >= {"fp16", "bf16", "fp32"}


def test_kernels_are_compiled_and_not_run():
    shapes = []

    def call(make):
        shapes.append(make((3, 77), torch.float32).shape)
        return softmax(make((3, 77), torch.float32))

    (kernel,) = compiled(Case("softmax", call), Target("cpu"))
    assert shapes == [(3, 77)] and kernel.__name__ == "softmax" and kernel.target == Target("cpu")
    x = torch.randn(3, 77)  # afterwards kernels run again
    torch.testing.assert_close(softmax(x), x.softmax(-1))


def test_cases_without_kernels():
    """Tensors that no kernel takes are left to torch."""
    case = Case("meta", lambda make: softmax(make((3, 77), torch.float32).to("meta")))
    assert compiled(case, Target("cpu")) == []


@pytest.mark.parametrize("name", ["gemm fp32 row", "layer_norm bf16 1000"])
def test_cases_of_the_catalogue(name):
    case = next(case for case in catalogue() if case.name == name)
    assert len(compiled(case, Target("cpu"))) == 1
