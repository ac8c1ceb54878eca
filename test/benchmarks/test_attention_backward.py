# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
import torch

from benchmarks import attention_backward
from benchmarks.attention import Shape
from benchmarks.problem import error_of, tolerance_of, wrong

GROUPED = Shape(1, 4, 2, 70, 70, 32, True, dtype=torch.float64)
SHAPES = [
    GROUPED,
    replace(GROUPED, batch=2, heads=2, causal=False, v_d=16),
    *(replace(GROUPED, causal=False, mask=m) for m in ("bool", "bias")),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_ours_and_torch_are_what_is_expected(shape):
    case = attention_backward.case(shape, "cpu")
    want = case.expected()
    assert error_of(case.sample(case.read(case.ours())), want) < 1e-9
    assert error_of(case.sample(case.read(case.rivals["torch"]()())), want) < 1e-9


@pytest.mark.parametrize("which", range(3))
def test_each_gradient_is_looked_at(which):
    case = attention_backward.case(replace(GROUPED, queries=64, keys=64), "cpu")  # all rows of the pairs are sampled

    def spoilt():
        return [1.001 * x if n == which else x for n, x in enumerate(case.ours())]

    assert wrong(case, spoilt, case.expected(), tolerance_of(torch.float64))[1]
    assert not wrong(case, case.ours, case.expected(), tolerance_of(torch.float64))[1]


def test_work():
    found = {p.name: p for p in attention_backward.problems("cuda")}
    wide = found["gradients b1 s4096 h16/8 d256 causal bf16"]
    assert wide.flops == 16 * 4096**2 / 2 * 2.0 * 5 * 256 and wide.asked == {"cuDNN": 1.0}
    latent = found["gradients b2 s4096 h16 d192/128 causal bf16"]
    assert latent.flops == 2 * 16 * 4096**2 / 2 * 2.0 * (3 * 192 + 2 * 128)
    assert latent.bytes == 2 * 2 * 2 * 2 * 16 * 4096 * (192 + 128.0)
