# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.nn.functional as F

import torch_tile.ops as ops

A, WORDS = torch.zeros(5, 64), torch.zeros(9, 64, dtype=torch.int8)
CODES = WORDS[:, :32].view(torch.uint8)


def int4(weight, group):
    """Rounds a weight to 4 bits: bytes of two columns, scales, zeros, and what they stand for."""
    grouped = weight.unflatten(1, (-1, group))
    low, high = grouped.amin(-1, True), grouped.amax(-1, True)
    scale = (high - low) / 15
    zero = (-low / scale).round()
    q = ((grouped / scale).round() + zero).clamp(0, 15)
    even, odd = q.flatten(1).to(torch.uint8).unflatten(1, (-1, 2)).unbind(-1)
    return even | odd << 4, scale[..., 0], zero[..., 0], ((q - zero) * scale).flatten(1)


@pytest.mark.parametrize("seed", range(3))
def test_it_is_a_linear_layer_of_rounded_weights(seed, maker):
    t = maker(seed, torch.float64)
    x, bias = t(7, 128), t(11)
    words, scale, zero, weight = int4(t(11, 128), 32)
    text = "v=add(acc0,x0);w=silu(v);ret w"
    got = ops.dequant_gemm(x, [words], [scale], [zero], 4, aux=[bias], kinds="r", epilogue=text, dtype=x.dtype)
    torch.testing.assert_close(got, F.silu(F.linear(x, weight, bias)))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_and_its_gradients(dtype, maker):
    t = maker(1, torch.float64, True)
    x, scale = t(7, 64), t(9, 1)
    words = t(9, 64).detach().to(dtype)

    def gradients(f):
        out = f()
        return out, *torch.autograd.grad(out.square().sum(), (x, scale))

    got = gradients(lambda: ops.dequant_gemm(x, [words], [scale], dtype=torch.float64))
    want = gradients(lambda: x @ (words.double() * scale).T)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_frozen_weights_need_no_product_in_the_backward(maker):
    from torch.utils.flop_counter import FlopCounterMode

    x = maker(2, torch.float32, True)(5, 64)
    out = ops.dequant_gemm(x, [WORDS], [torch.ones(9, 1)], dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * 5 * 64 * 9 and x.grad is not None


def s(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("args", "format", "error", "message"),
    [
        ((A, []), "", ValueError, "bs is empty"),
        ((A[0], [WORDS]), "", RuntimeError, r"a has 1 dimensions \[64\]; expected 2"),
        ((A, [WORDS.float()]), "", TypeError, r"bs\[0\] has dtype torch.float32; expected int8, uint8, float8_e4m3fn"),
        ((A, [WORDS, WORDS.view(torch.uint8)]), "", TypeError, r"bs\[1\] has dtype torch.uint8; expected torch.int8"),
        ((A, [WORDS, WORDS[:8]]), "", RuntimeError, r"bs\[1\] has size 8 in dimension 0 .* as bs\[0\]"),
        ((A, [WORDS], [], [], 4), "", RuntimeError, r"bs\[0\] has shape \[9, 64\]; expected 4 bits for each of a's 64"),
        ((A, [WORDS], [], [], 3), "", ValueError, "bits is 3, but bs.* has dtype torch.int8; expected 8, or 1"),
        (
            (A, [WORDS.to(torch.float8_e5m2)], [], [], 4),
            "",
            ValueError,
            "bits is 4, but bs.* has dtype torch.float8_e5m2",
        ),
        (
            (A, [WORDS], [s(9, 1), s(9, 1)]),
            "",
            ValueError,
            "scales has 2 tensors; expected none, or one for each of 1 bs",
        ),
        ((A, [WORDS], [s(9)]), "", RuntimeError, r"scales\[0\] has 1 dimensions \[9\]; expected 2: \[N, G\]"),
        ((A, [WORDS], [s(8, 1)]), "", RuntimeError, r"scales\[0\] has size 8 in dimension 0 .* expected 9"),
        ((A, [WORDS], [s(9, 1, dtype=torch.int8)]), "", TypeError, r"scales\[0\] has dtype torch.int8"),
        (
            (A, [WORDS], [s(9, 2)], [s(9, 1)]),
            "",
            RuntimeError,
            r"zeros\[0\] has size 1 in dimension 1 .* expected 2, G",
        ),
        (
            (A, [WORDS], [s(9, 3)]),
            "",
            RuntimeError,
            r"scales\[0\] has 3 groups for K = 64; expected 1, or groups of 16",
        ),
        ((A, [WORDS], [s(9, 8)]), "", RuntimeError, r"scales\[0\] has 8 groups for K = 64"),
        ((A, [WORDS], [], [], 8, False, 0, [s(8)], "r"), "", RuntimeError, r"aux\[0\] has size 8 in dimension 0"),
        ((A, [WORDS], [], [], 8, False, 0, [], "r"), "", ValueError, "kinds is 'r' for 0 aux operands"),
        ((A, [WORDS]), "nf3", ValueError, "format is 'nf3'; expected '' or one of 'nf4', 'fp4', 'e2m1'"),
        ((A, [WORDS], [], [], 4), "nf4", ValueError, "bits is 4 of torch.int8 for format 'nf4'; expected 4 of uint8"),
        ((A, [CODES], [], [], 4, False, 8), "nf4", ValueError, "offset is 8, and there are 0 zeros; format 'nf4' has"),
        ((A, [CODES], [], [s(9, 1)], 4), "e2m1", ValueError, "offset is 0, and there are 1 zeros"),
    ],
)
def test_refuses(args, format, error, message):
    with pytest.raises(error, match=f"tile.dequant_gemm: {message}"):
        ops.dequant_gemm(*args, dtype=torch.float32, format=format)
