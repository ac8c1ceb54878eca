# SPDX-License-Identifier: Apache-2.0
"""Bounds by condition hold what float32 computes, and no more than that."""

import pytest
import torch
from rounding import Rounding

FUNCTIONS = {
    "products": lambda a, b: a * b + 1,
    "a sum that cancels": lambda a, b: (a * 1e4 + b) - a * 1e4,
    "decays from a running sum": lambda a, b: (lambda sums: torch.exp(sums[1:] - sums[:-1]))((-20 * a.abs()).cumsum(0)),
    "written in place": lambda a, b: a.new_zeros(a.shape).index_copy_(0, torch.arange(len(a)), a @ b.mT @ a),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bounds_hold_errors_of_float32_and_little_more(name, seed):
    torch.manual_seed(seed)
    function, (a, b) = FUNCTIONS[name], torch.randn(2, 40, 30)
    bound = Rounding(function, a.double(), b.double())[0]().max()
    error = (function(a, b).double() - function(a.double(), b.double())).abs().max()
    assert 0 < error <= bound <= 200 * error
