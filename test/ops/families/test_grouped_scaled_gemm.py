# SPDX-License-Identifier: Apache-2.0
"""Products of groups of rows of float8: what they refuse, and how they are sharded."""

from types import SimpleNamespace

import pytest
import torch

import torch_tile.ops as ops
from torch_tile.ops import sharding

E4M3, F32 = torch.float8_e4m3fn, torch.float32
A, B = torch.ones(5, 300).to(E4M3), torch.ones(2, 300, 9).to(E4M3)
ONE, ONES, ENDS = torch.ones(1, 1), torch.ones(2, 1, 1), torch.tensor([2, 5], dtype=torch.int32)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (
            (A.float(), B, ONE, ONES, ENDS),
            TypeError,
            "a has dtype torch.float32; expected float8_e4m3fn or float8_e5m2",
        ),
        ((A, B[0], ONE, ONES, ENDS), RuntimeError, r"b has 2 dimensions .* expected 3: \[G, K, N\]"),
        ((A, B[:, :8], ONE, ONES, ENDS), RuntimeError, r"b has size 8 in dimension 1 .* expected 300"),
        ((A, B, torch.ones(5, 2), ONES, ENDS), RuntimeError, r"scale_a has shape \[5, 2\]; expected \[1 or S, "),
        ((A, B, ONE, ONE, ENDS), RuntimeError, r"scale_b has 2 dimensions \[1, 1\]; expected 3"),
        ((A, B, ONE, torch.ones(3, 1, 9), ENDS), RuntimeError, r"scale_b has size 3 in dimension 0 .* expected 2"),
        ((A, B, ONE, torch.ones(2, 1, 4), ENDS), RuntimeError, r"scale_b has shape \[2, 1, 4\]; expected \[G, 1 or K"),
        ((A, B, ONE, ONES, ENDS.long()), TypeError, "offsets has dtype torch.int64; expected torch.int32"),
        ((A, B, ONE, ONES, ENDS[:1]), RuntimeError, r"offsets has size 1 in dimension 0 .* expected 2, as many groups"),
        ((A, B, ONE, ONES, ENDS.flip(0)), RuntimeError, "offsets has values from 2 to 5, not sorted"),
        ((A, B, ONE, ONES, ENDS, [torch.ones(3, 9)], "g"), RuntimeError, r"aux\[0\] has size 3 .* kind 'g': \[G, N\]"),
        ((A, B, ONE, ONES, ENDS, [ONE], "x"), ValueError, ".*expected 't', 'r', 'c', 's' or 'g' for each"),
    ],
)
def test_scaled_refuses(args, error, message):
    with pytest.raises(error, match=f"tile.grouped_scaled_gemm: {message}"):
        ops.grouped_scaled_gemm(*args)


def test_scales_of_several_rows_are_refused_as_groups_may_end_there():
    a, scale = torch.ones(300, 300).to(E4M3), torch.ones(3, 3)
    with pytest.raises(RuntimeError, match=r"scale_a has shape \[3, 3\]; expected \[1 or S, 1 or K / 128\]"):
        ops.grouped_scaled_gemm(a, B, scale, ONES, ENDS)


def test_gradients_of_float8_are_refused():
    weight = torch.ones(5, 1, requires_grad=True)
    out = ops.grouped_scaled_gemm(A, B, ONE, ONES, ENDS, [weight], "c", "v=mul(acc0,x0);ret v")
    with pytest.raises(NotImplementedError, match=r"tile\.grouped_scaled_gemm has no gradient"):
        out.sum().backward()


@pytest.mark.parametrize(("columns", "free"), [(1, ("n",)), (200, ("n",)), (2, ())])
def test_columns_are_sharded_where_no_scale_spans_several(columns, free):
    """gloo sends no float8, so the rule is looked at alone."""
    shapes = [SimpleNamespace(shape=x) for x in ((9, 200), (3, 200, 200), (9, 2), (3, 2, columns), (3,))]
    assert sharding.rule_of(torch.ops.tile.grouped_scaled_gemm.default, (*shapes, [], "", "", F32)).free == free
