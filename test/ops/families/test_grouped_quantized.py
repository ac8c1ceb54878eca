# SPDX-License-Identifier: Apache-2.0
"""Products of groups of rows by matrices of few bits and of float8: what they refuse, and how they are sharded."""

from types import SimpleNamespace

import pytest
import torch

import torch_tile.ops as ops
from torch_tile.ops import sharding

E4M3, F32 = torch.float8_e4m3fn, torch.float32
A, B = torch.ones(5, 300).to(E4M3), torch.ones(2, 300, 9).to(E4M3)
ONE, ONES, ENDS = torch.ones(1, 1), torch.ones(2, 1, 1), torch.tensor([2, 5], dtype=torch.int32)
X, WORDS, SCALE = torch.ones(5, 64), torch.ones(2, 9, 32, dtype=torch.uint8), torch.ones(2, 9, 2)


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


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ((X.int(), [WORDS], [], [], ENDS, 4), {}, TypeError, "a has dtype torch.int32"),
        ((X, [], [], [], ENDS, 4), {}, ValueError, "bs is empty"),
        ((X, [WORDS[0]], [], [], ENDS, 4), {}, RuntimeError, r"bs\[0\] has 2 dimensions .* \[G, N, K \* bits / 8\]"),
        ((X, [WORDS[..., :8]], [], [], ENDS, 4), {}, RuntimeError, ".*expected 4 bits for each of a's 64 columns"),
        ((X, [WORDS, WORDS[:1]], [], [], ENDS, 4), {}, RuntimeError, r"bs\[1\] has size 1 in dimension 0"),
        ((X, [WORDS], [SCALE[0]], [], ENDS, 4), {}, RuntimeError, r"scales\[0\] has 2 .* expected 3: \[G, N, runs\]"),
        ((X, [WORDS], [SCALE[:1]], [], ENDS, 4), {}, RuntimeError, r"scales\[0\] has size 1 in dimension 0"),
        ((X, [WORDS], [], [SCALE], ENDS, 4), {"format": "e2m1"}, ValueError, ".*there are 1 zeros"),
        ((X, [WORDS], [], [], ENDS.long(), 4), {}, TypeError, "offsets has dtype torch.int64"),
        ((X, [WORDS], [], [], ENDS[:1], 4), {}, RuntimeError, r"offsets has size 1 in dimension 0"),
    ],
)
def test_few_bits_refuse(args, options, error, message):
    with pytest.raises(error, match=f"tile.grouped_dequant_gemm: {message}"):
        ops.grouped_dequant_gemm(*args, dtype=F32, **options)


@pytest.mark.parametrize(("columns", "free"), [(1, ("n",)), (200, ("n",)), (2, ())])
def test_columns_are_sharded_where_no_scale_spans_several(columns, free):
    """gloo sends no float8, so the rule is looked at alone."""
    shapes = [SimpleNamespace(shape=x) for x in ((9, 200), (3, 200, 200), (9, 2), (3, 2, columns), (3,))]
    assert sharding.rule_of(torch.ops.tile.grouped_scaled_gemm.default, (*shapes, [], "", "", F32)).free == free


@pytest.mark.parametrize("format", ["", "e2m1", "nf4"])
def test_activations_have_gradients_through_frozen_experts(format, seed):
    """As of a product with the widened weights, and under torch.compile."""
    x = torch.randn(5, 64, requires_grad=True)
    words = torch.randint(0, 256, (2, 9, 32), dtype=torch.uint8)

    def loss(x):
        out = ops.grouped_dequant_gemm(x, [words], [SCALE / 8], [], ENDS, 4, dtype=F32, format=format)
        return out.square().sum()

    from torch_tile.kernels.gemm.dequant import dequantize

    wide = dequantize(words, SCALE / 8, None, 4, False, 0, F32, format)
    want = torch.cat([x[:2] @ wide[0].T, x[2:] @ wide[1].T]).square().sum()
    (wanted,) = torch.autograd.grad(want, x)
    torch.testing.assert_close(torch.autograd.grad(loss(x), x)[0], wanted, rtol=1e-4, atol=1e-3)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], wanted, rtol=1e-4, atol=1e-3)
