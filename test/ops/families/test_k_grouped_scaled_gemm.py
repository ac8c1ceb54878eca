# SPDX-License-Identifier: Apache-2.0
"""Gradients of experts' matrices from float8 operands: what they refuse, and how they are sharded."""

from types import SimpleNamespace

import pytest
import torch

import torch_tile.ops as ops
from torch_tile.ops import sharding

E4M3, F32 = torch.float8_e4m3fn, torch.float32
A, B = torch.ones(5, 300).to(E4M3), torch.ones(300, 9).to(E4M3)
ONE, ENDS = torch.ones(1, 1, 1), torch.tensor([20, 300], dtype=torch.int32)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((A.float(), B, ONE, ONE, ENDS), TypeError, "a has dtype torch.float32; expected float8_e4m3fn or float8_e5m2"),
        ((A, B[None], ONE, ONE, ENDS), RuntimeError, r"b has 3 dimensions .* expected 2: \[K, N\]"),
        ((A, B[:8], ONE, ONE, ENDS), RuntimeError, r"b has size 8 in dimension 0 .* expected 300"),
        ((A, B, ONE[0], ONE, ENDS), RuntimeError, r"scale_a has 2 dimensions \[1, 1\]; expected 3"),
        ((A, B, torch.ones(3, 5, 1), ONE, ENDS), RuntimeError, r"scale_a has shape \[3, 5, 1\]; expected \[1 or G, 1"),
        ((A, B, torch.ones(2, 5, 3), ONE, ENDS), RuntimeError, r"scale_a has shape \[2, 5, 3\]; expected \[1 or G, 1"),
        ((A, B, ONE, torch.ones(2, 1, 8), ENDS), RuntimeError, r"scale_b has shape \[2, 1, 8\]; expected \[1 or G, 1,"),
        ((A, B, ONE, torch.ones(1, 3, 9), ENDS), RuntimeError, r"offsets are \[20\]; expected multiples of 128"),
        ((A, B, ONE, ONE, ENDS.long()), TypeError, "offsets has dtype torch.int64; expected torch.int32"),
        ((A, B, ONE, ONE, ENDS.flip(0)), RuntimeError, "offsets has values from 20 to 300, not sorted"),
        ((A, B, ONE, ONE, ENDS + 1), RuntimeError, "offsets has values from 21 to 301; expected ends of groups"),
    ],
)
def test_refuses(args, error, message):
    with pytest.raises(error, match=f"tile.k_grouped_scaled_gemm: {message}"):
        ops.k_grouped_scaled_gemm(*args)


def test_gradients_of_float8_are_refused():
    scale = torch.ones(1, 1, 1, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"tile\.k_grouped_scaled_gemm has no gradient"):
        ops.k_grouped_scaled_gemm(A, B, scale, ONE, ENDS).sum().backward()


@pytest.mark.parametrize("runs", [1, 3])
def test_rows_and_columns_are_sharded(runs):
    """gloo sends no float8, so the rule is looked at alone."""
    shapes = [SimpleNamespace(shape=x) for x in ((5, 300), (300, 9), (1, 5, runs), (1, runs, 1), (2,))]
    rule = sharding.rule_of(torch.ops.tile.k_grouped_scaled_gemm.default, (*shapes, F32))
    assert rule.free == ("m", "n")
