# SPDX-License-Identifier: Apache-2.0
"""Products of groups of rows of which some count: what they refuse, and how they are sharded."""

from types import SimpleNamespace

import pytest
import torch

import torch_tile.ops as ops
from torch_tile.ops import sharding

E4M3, F32 = torch.float8_e4m3fn, torch.float32
A, B, COUNTS = torch.ones(2, 5, 300).to(E4M3), torch.ones(2, 300, 9).to(E4M3), torch.tensor([2, 5], dtype=torch.int32)
ONES = torch.ones(2, 1, 1)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((A.float(), B, ONES, ONES, COUNTS), TypeError, "a has dtype torch.float32; expected float8_e4m3fn or float8"),
        ((A[0], B, ONES, ONES, COUNTS), RuntimeError, r"a has 2 dimensions .* expected 3: \[G, M, K\]"),
        ((A, B[:1], ONES, ONES, COUNTS), RuntimeError, r"b has size 1 in dimension 0 .* expected 2"),
        ((A, B[:, :8], ONES, ONES, COUNTS), RuntimeError, r"b has size 8 in dimension 1 .* expected 300"),
        (
            (A, B, torch.ones(2, 4, 1), ONES, COUNTS),
            RuntimeError,
            r"scale_a has shape \[2, 4, 1\]; expected \[G, 1 or M",
        ),
        (
            (A, B, ONES, torch.ones(2, 1, 4), COUNTS),
            RuntimeError,
            r"scale_b has shape \[2, 1, 4\]; expected \[G, 1 or K",
        ),
        ((A, B, ONES, ONES, COUNTS.long()), TypeError, "counts has dtype torch.int64; expected torch.int32"),
        ((A, B, ONES, ONES, COUNTS[:1]), RuntimeError, r"counts has size 1 in dimension 0 .* expected 2"),
        ((A, B, ONES, ONES, COUNTS + 1), RuntimeError, "counts has values from 3 to 6; expected 0 to 5"),
        ((A, B, ONES, ONES, COUNTS - 3), RuntimeError, "counts has values from -1 to 2; expected 0 to 5"),
        ((A, B, ONES, ONES, COUNTS, [torch.ones(3, 9)], "g"), RuntimeError, r"aux\[0\] has size 3 .* kind 'g'"),
    ],
)
def test_refuses(args, error, message):
    with pytest.raises(error, match=f"tile.masked_scaled_gemm: {message}"):
        ops.masked_scaled_gemm(*args)


@pytest.mark.parametrize(
    ("columns", "aux", "free"), [(1, 0, ("group", "n")), (200, 1, ("n",)), (2, 0, ("group",)), (2, 1, ())]
)
def test_groups_and_columns_are_sharded(columns, aux, free):
    """gloo sends no float8, so the rule is looked at alone."""
    shapes = [SimpleNamespace(shape=x) for x in ((3, 9, 200), (3, 200, 200), (3, 9, 2), (3, 2, columns), (3,))]
    of_aux = [SimpleNamespace(shape=(3, 200))] * aux
    rule = sharding.rule_of(torch.ops.tile.masked_scaled_gemm.default, (*shapes, of_aux, "g" * aux, "", F32))
    assert rule.free == free
