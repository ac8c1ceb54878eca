# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import torch_tile.ops as ops
from torch_tile.ops import sharding

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
A, B = torch.ones(5, 300).to(E4M3), torch.ones(300, 9).to(E4M3)
ONE = torch.ones(1, 1)


@pytest.mark.parametrize("group", [0, 128])
def test_a_layer_in_float8_is_close_to_it(group, seed):
    x, weight, bias = torch.randn(2, 7, 300), torch.randn(33, 300), torch.randn(33)
    (a, scale_a), (w, scale_w) = ops.quantize_fp8(x.flatten(0, 1), group), ops.quantize_fp8(weight, group)
    got = ops.scaled_gemm(a, w.mT, scale_a, scale_w.mT, bias, torch.float32)
    want = F.linear(x, weight, bias).flatten(0, 1)
    assert (got - want).norm() < 0.05 * want.norm()


def test_scales_as_torch_takes_them(seed):
    a, b = torch.randn(16, 64).to(E4M3), torch.randn(32, 64).to(E4M3).mT
    for scales in ((torch.tensor(0.5), torch.tensor(2.0)), (torch.rand(16, 1), torch.rand(1, 32))):
        bias = torch.randn(32).to(BF16)
        try:
            want = torch._scaled_mm(a, b, *scales, bias=bias, out_dtype=BF16)
        except RuntimeError as problem:  # oneDNN multiplies by one scale alone
            assert "per-tensor" in str(problem) and scales[0].numel() > 1
            want = ((a.float() * scales[0]) @ (b.float() * scales[1]) + bias).to(BF16)
        got = ops.scaled_gemm(a, b, *(x.reshape(x.shape or (1, 1)) for x in scales), bias)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((A.float(), B, ONE, ONE), TypeError, "a has dtype torch.float32; expected float8_e4m3fn, float8_e5m2 or int8"),
        (
            (A.view(torch.int8), B, ONE, ONE),
            TypeError,
            "a has dtype torch.int8 and b torch.float8_e4m3fn; expected both",
        ),
        ((A[0], B, ONE, ONE), RuntimeError, r"a has 1 dimensions \[300\]; expected 2"),
        ((A, B[:8], ONE, ONE), RuntimeError, r"b has size 8 in dimension 0 .* expected 300"),
        ((A, B, ONE[0], ONE), RuntimeError, r"scale_a has 1 dimensions \[1\]; expected 2"),
        ((A, B, torch.ones(4, 1), ONE), RuntimeError, r"scale_a has shape \[4, 1\]; expected \[1, M or M / 128, "),
        ((A, B, torch.ones(5, 2), ONE), RuntimeError, r"scale_a has shape \[5, 2\]; .* for 5 x 300 numbers"),
        ((A, B, ONE, torch.ones(9, 1)), RuntimeError, r"scale_b has shape \[9, 1\]; expected \[1 or K / 128, "),
        ((A, B, ONE, ONE.int()), TypeError, "scale_b has dtype torch.int32"),
        ((A, B, ONE, ONE, None, torch.int8), TypeError, "dtype is torch.int8; expected a floating dtype"),
        ((A, B, ONE, ONE, torch.ones(8)), RuntimeError, r"aux\[0\] has size 8 in dimension 0"),
        ((A, B, ONE, ONE, torch.ones(9), BF16, [], "", "ret acc0"), ValueError, "bias and epilogue are given"),
    ],
)
def test_refuses(args, error, message):
    with pytest.raises(error, match=f"tile.scaled_gemm: {message}"):
        ops.scaled_gemm(*args)


def test_gradients_are_refused():
    bias = torch.ones(9, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"tile\.scaled_gemm has no gradient"):
        ops.scaled_gemm(A, B, ONE, ONE, bias).sum().backward()
    x = torch.ones(3, 5, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"tile\.quantize_fp8 has no gradient"):
        ops.quantize_fp8(x)[1].sum().backward()


@pytest.mark.parametrize(
    ("of_a", "of_b", "free"),
    [
        ((1, 1), (1, 1), ("m", "n")),
        ((300, 1), (1, 9), ("m", "n")),
        ((300, 2), (2, 9), ("m", "n")),
        ((3, 2), (1, 1), ("n",)),
        ((300, 2), (2, 2), ("m",)),
    ],
)
def test_rows_and_columns_are_sharded_where_no_scale_spans_several(of_a, of_b, free):
    """gloo sends no float8, so the rule is looked at alone."""
    n = 9 if of_b[1] in (1, 9) else 200
    shapes = [SimpleNamespace(shape=shape) for shape in ((300, 200), (200, n), of_a, of_b)]
    op = torch.ops.tile.scaled_gemm.default
    assert sharding.rule_of(op, (*shapes, [], "", "", BF16)).free == free


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((ONE.int(),), TypeError, "x has dtype torch.int32"),
        ((torch.tensor(1.0),), RuntimeError, r"x has shape \[\]; expected a last dimension"),
        ((torch.ones(3, 0),), RuntimeError, r"x has shape \[3, 0\]; expected a last dimension that is not empty"),
        ((ONE, -1), ValueError, "group is -1; expected a number of columns, or 0"),
        ((ONE, 128, BF16), TypeError, "dtype is torch.bfloat16; expected torch.float8_e4m3fn"),
    ],
)
def test_quantize_fp8_refuses(args, error, message):
    with pytest.raises(error, match=f"tile.quantize_fp8: {message}"):
        ops.quantize_fp8(*args)


def test_rows_in_int8_are_close_and_exact_where_they_are_whole(seed):
    x, w = torch.randn(3, 5, 300), torch.randn(33, 300)
    (a, scale_a), (b, scale_b) = ops.quantize_int8(x.flatten(0, 1)), ops.quantize_int8(w)
    got, want = ops.scaled_gemm(a, b.mT, scale_a, scale_b.mT, None, torch.float32), x.flatten(0, 1) @ w.T
    assert (got - want).norm() < 0.02 * want.norm()
    row = torch.tensor([[127.0, -127.0, 2.5, 3.5, 0.0]])  # halves go to even numbers
    assert ops.quantize_int8(row)[0].tolist() == [[127, -127, 2, 4, 0]]
    values, scale = ops.quantize_int8(torch.tensor([[1.0, float("nan")], [0.0, 0.0]]))
    assert scale[0].isnan() and values[1].eq(0).all()
    with pytest.raises(TypeError, match=r"tile\.quantize_int8: x has dtype torch.int32"):
        ops.quantize_int8(ONE.int())
    with pytest.raises(NotImplementedError, match=r"tile\.quantize_int8 has no gradient"):
        ops.quantize_int8(torch.ones(3, 5, requires_grad=True))[1].sum().backward()
