# SPDX-License-Identifier: Apache-2.0
import re

import pytest
import torch
import torch.nn.functional as F

import torch_tile.ops as ops
from torch_tile.ops import matrix_units
from torch_tile.ops.families import conv as conv_family, gemm as gemm_family
from torch_tile.ops.families.gemm import LinearArgs

ACTIVATIONS = {
    "none": lambda t: t,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
    "silu": F.silu,
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear_and_swiglu_are_the_torch_expressions(activation, seed, maker):
    t = maker(seed, torch.float64)
    act = ACTIVATIONS[activation]
    x, w, u, b, r = t(3, 5, 17), t(11, 17), t(11, 17), t(11), t(3, 5, 11)
    torch.testing.assert_close(ops.linear(x, w, b, r, activation), act(F.linear(x, w, b)) + r)
    torch.testing.assert_close(ops.swiglu(x, w, u, activation), act(F.linear(x, w)) * F.linear(x, u))


def test_linear_promotes_with_the_residual(maker):
    t = maker(0, torch.bfloat16)
    out = ops.linear(t(5, 7), t(9, 7), None, t(5, 9, dtype=torch.float32))
    assert out.dtype == torch.float32


@pytest.mark.parametrize("shape", [(0, 7), (3, 0, 7), (3, 0), (0,)])
def test_linear_of_nothing(shape, maker):
    t = maker(0, torch.float32)
    x, w, b = t(*shape), t(9, shape[-1]), t(9)
    torch.testing.assert_close(ops.linear(x, w, b), F.linear(x, w, b))
    torch.testing.assert_close(ops.linear(x, w[:0], b[:0], t(*shape[:-1], 0)), F.linear(x, w[:0], b[:0]))
    assert ops.swiglu(x, w, w).shape == (*shape[:-1], 9)


def test_gradients_are_eagers_in_low_precision(maker):
    """As close to the float64 gradient as torch's own backward is, within a factor of two."""
    t = maker(2, torch.float64)
    exact = [t(6, 33), t(17, 33), t(17)]

    def gradients(f, dtype):
        leaves = [e.detach().to(dtype, copy=True).requires_grad_() for e in exact]
        f(*leaves).double().square().sum().backward()
        return [leaf.grad.double() for leaf in leaves]

    def torchs(x, w, b):
        return F.gelu(F.linear(x, w, b))

    want = gradients(torchs, torch.float64)
    eager = gradients(torchs, torch.bfloat16)
    ours = gradients(lambda x, w, b: ops.linear(x, w, b, None, "gelu"), torch.bfloat16)
    for a, b, c in zip(want, eager, ours, strict=True):
        assert (c - a).norm() <= 2 * (b - a).norm()


@pytest.mark.parametrize("frozen", ["x", "w", "b"])
def test_frozen_arguments_get_no_gradient_and_no_product(frozen, maker):
    from torch.utils.flop_counter import FlopCounterMode

    t = maker(4, torch.float32, True)
    leaves = {"x": t(6, 33), "w": t(17, 33), "b": t(17)}
    leaves[frozen].requires_grad_(False)
    out = ops.linear(*leaves.values())
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * 6 * 33 * 17 * ((frozen != "x") + (frozen != "w"))
    assert [k for k, leaf in leaves.items() if leaf.grad is None] == [frozen]
    gemm = ops.gemm(leaves["x"], [leaves["w"].mT], [leaves["b"]], "r", "v=add(acc0,x0);ret v", dtype=torch.float32)
    for leaf, grad in zip(
        (leaf for k, leaf in leaves.items() if k != frozen),
        torch.autograd.grad(gemm.sum(), [leaf for k, leaf in leaves.items() if k != frozen]),
        strict=True,
    ):
        torch.testing.assert_close(grad, leaf.grad)


@pytest.mark.parametrize(("shape", "kind"), [((6, 9), "t"), ((9,), "r"), ((6, 1), "c"), ((1,), "s")])
def test_truth_values_as_operands(shape, kind, maker):
    """They choose, or count as 1 and 0, in both directions."""
    t = maker(5, torch.float64, True)
    a, b = t(6, 7), t(7, 9)
    where = maker(6, torch.float32)(*shape) > 0
    text = "v=where(x0,-1.0,acc0);w=mul(v,x0);y=add(w,acc0);ret y"
    got = ops.gemm(a, [b], [where], kind, text, dtype=torch.float64)
    want = torch.where(where, -1.0, a @ b) * where + a @ b
    torch.testing.assert_close(got, want)
    for x, y in zip(*(torch.autograd.grad(out.square().sum(), (a, b)) for out in (got, want)), strict=True):
        torch.testing.assert_close(x, y)


def linear_errors():
    def t(*shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype)

    half = torch.float16
    return [
        (
            (t(5, 7), t(9, 8)),
            RuntimeError,
            r"weight has size 8 in dimension 1 \(shape \[9, 8\]\); expected 7, x's last",
        ),
        ((t(5, 7), t(7)), RuntimeError, r"weight has 1 dimensions \[7\]; expected 2: \[N, K\]"),
        ((t(), t(9, 7)), RuntimeError, "x has 0 dimensions"),
        ((t(5, 7), t(9, 7), t(8)), RuntimeError, "bias has size 8 in dimension 0 .* expected 9, weight's first"),
        ((t(5, 7), t(9, 7), t(1, 9)), RuntimeError, "bias has 2 dimensions"),
        ((t(5, 7), t(9, 7), None, t(9)), RuntimeError, "residual has 1 dimensions"),
        ((t(5, 7), t(9, 7), None, t(4, 9)), RuntimeError, "residual has size 4 in dimension 0 .* expected 5"),
        ((t(5, 7), t(9, 7), None, None, "swish"), ValueError, "activation is 'swish'; expected one of 'none', 'relu'"),
        ((t(5, 7), t(9, 7, dtype=half)), TypeError, "weight has dtype torch.float16; expected torch.float32, as x"),
        ((t(5, 7, dtype=torch.int64), t(9, 7)), TypeError, "x has dtype torch.int64; expected float16, bfloat16"),
        ((t(5, 7), t(9, 7), t(9, dtype=half)), TypeError, "bias has dtype torch.float16"),
        ((t(5, 7), t(9, 7).to("meta")), (RuntimeError, NotImplementedError), "weight is on meta; expected cpu, as x"),
        ((t(5, 7), t(9, 7).to_sparse()), TypeError, None),
    ]


@pytest.mark.parametrize(("args", "error", "message"), linear_errors())
def test_linear_refuses(args, error, message):
    with pytest.raises(error, match=message and f"tile.linear: {message}"):
        ops.linear(*args)


def gemm_errors():
    def t(*shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype)

    a, b, f32 = t(5, 7), t(7, 9), torch.float32
    return [
        ((a, []), ValueError, "bs is empty"),
        ((t(7), [b]), RuntimeError, r"a has shape \[7\]; expected 2 or 3 dimensions"),
        ((a, [t(8, 9)]), RuntimeError, r"bs\[0\] has size 8 in dimension -2 .* expected 7, a's last"),
        ((a, [b, t(7, 8)]), RuntimeError, r"bs\[1\] has size 8 in dimension -1 .* expected 9, as bs\[0\]"),
        ((t(2, 5, 7), [b]), RuntimeError, r"bs\[0\] has 2 dimensions"),
        ((t(2, 5, 7), [t(3, 7, 9)]), RuntimeError, r"bs\[0\] has shape \[3, 7, 9\], which does not broadcast"),
        ((a, [b], [t(9)], ""), ValueError, "kinds is '' for 1 aux operands"),
        ((a, [b], [t(9)], "q"), ValueError, "kinds is 'q' for 1 aux operands; expected 't', 'r', 'c' or 's'"),
        ((a, [b], [t(8)], "r"), RuntimeError, r"aux\[0\] has size 8 in dimension 0 .* by kind 'r'"),
        ((a, [b], [t(9), t(5)], "rc"), RuntimeError, r"aux\[1\] has shape \[5\]; kind 'c' expects \[\*batch, M, 1\]"),
        ((a, [b], [t(2)], "s"), RuntimeError, r"aux\[0\] has shape \[2\]; kind 's' expects one element"),
        ((a, [b], [t(9, dtype=torch.int32)], "r"), TypeError, r"aux\[0\] has dtype torch.int32; expected .* or bool"),
        ((a, [b.double()]), TypeError, r"bs\[0\] has dtype torch.float64; expected torch.float32, as a"),
        ((a, [b], [], "", "v=relu(x0);ret v"), ValueError, None),
        ((a, [b], [], "", "", torch.int32), TypeError, "dtype is torch.int32"),
        ((a, [b], [t(5, 9)], "t", "v=frob(x0);ret v"), ValueError, None),
    ], f32


@pytest.mark.parametrize(("args", "error", "message"), gemm_errors()[0])
def test_gemm_refuses(args, error, message):
    dtype = args[5] if len(args) > 5 else gemm_errors()[1]
    with pytest.raises(error, match=f"tile.gemm: {message}" if message else "epilogue: "):
        ops.gemm(*args[:5], dtype=dtype)


@pytest.mark.parametrize("shape, fix", [((8, 16), ": bs[0].mT?"), ((7, 9), "")])
def test_errors_of_sizes_counted_from_the_end_name_the_transposed(shape, fix):
    with pytest.raises(RuntimeError, match=re.escape(f"expected 16, a's last dimension{fix}") + "$"):
        torch.ops.tile.gemm(torch.randn(4, 16), [torch.randn(shape)], [], "", "", torch.float32)


def test_swiglu_refuses():
    x, w = torch.zeros(5, 7), torch.zeros(9, 7)
    for args, error, message in (
        ((x, w, w[:8]), RuntimeError, "up_weight has size 8 in dimension 0 .* expected 9, as gate_weight"),
        ((x, w[:, :6], w), RuntimeError, "gate_weight has size 6 in dimension 1 .* expected 7"),
        ((x, w, w.half()), TypeError, "up_weight has dtype torch.float16"),
        ((x, w, w, "tanh"), ValueError, "activation is 'tanh'"),
    ):
        with pytest.raises(error, match=f"tile.swiglu: {message}"):
            ops.swiglu(*args)


HAS_BF16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.fixture
def with_matrix_units(monkeypatch):
    """A CPU with AMX, as far as choosing goes: our own products raise."""
    monkeypatch.setattr(matrix_units, "torch_has_matrix_units", lambda: True)
    for family in (gemm_family, conv_family):
        monkeypatch.setattr(family, "kernels", lambda name: pytest.fail(f"{name} runs"))


@pytest.mark.skipif(not HAS_BF16, reason="torch's oneDNN has no bf16 here")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(64,), (7, 64), (2, 5, 64)])
def test_products_left_to_torch_are_rounded_once(activation, shape, with_matrix_units):
    """On a CPU with AMX torch's own bf16 product runs; its results have one rounding, as ours."""
    x, weight, bias = torch.randn(shape).bfloat16(), torch.randn(33, 64).bfloat16(), torch.randn(33).bfloat16()
    for rest in ((None, None, activation), (bias, None, activation), (bias, torch.randn(*shape[:-1], 33).bfloat16())):
        with torch.no_grad():
            got = torch.ops.tile.linear(x, weight, *rest)
        exact = LinearArgs(*(v.double() if isinstance(v, torch.Tensor) else v for v in (x, weight, *rest)))
        want = ACTIVATIONS[exact.activation](torch.nn.functional.linear(exact.x, exact.weight, exact.bias))
        want = want + (0 if exact.residual is None else exact.residual)
        assert got.shape == want.shape and got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-3)


@pytest.mark.skipif(not HAS_BF16, reason="torch's oneDNN has no bf16 here")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 70)])
def test_gated_layers_left_to_torch_round_product_and_gate(activation, shape, with_matrix_units):
    x, gate, up = (torch.randn(s).bfloat16() for s in (shape, (33, shape[-1]), (33, shape[-1])))
    with torch.no_grad():
        got = torch.ops.tile.swiglu(x, gate, up, activation)
    want = ACTIVATIONS[activation](x.double() @ gate.double().T) * (x.double() @ up.double().T)
    assert got.shape == want.shape and got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=1e-2)


@pytest.mark.skipif(not HAS_BF16, reason="torch's oneDNN has no bf16 here")
@pytest.mark.parametrize("a, b", [((7, 33), (33, 20)), ((3, 7, 33), (3, 33, 20)), ((3, 7, 33), (1, 33, 20))])
def test_plain_products_left_to_torch(a, b, with_matrix_units):
    a, b = torch.randn(a).bfloat16(), torch.randn(b).bfloat16()
    for epilogue in ("", "ret acc0"):
        with torch.no_grad():
            got = torch.ops.tile.gemm(a, [b], [], "", epilogue, torch.bfloat16)
        torch.testing.assert_close(got.double(), a.double() @ b.double(), rtol=2**-8, atol=1e-3)


@pytest.mark.skipif(not HAS_BF16, reason="torch's oneDNN has no bf16 here")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("sizes, taps", [((13, 10), (3, 3)), ((5, 9, 8), (3, 1, 2))])
def test_convolutions_left_to_torch_are_rounded_once(activation, sizes, taps, with_matrix_units):
    x, weight = torch.randn(2, *sizes, 17).bfloat16(), torch.randn(11, *taps, 17).bfloat16()
    steps = {"stride": [2] * len(sizes), "padding": [1] * len(sizes), "dilation": [1] * (len(sizes) - 1) + [2]}
    convolution = torch.nn.functional.conv2d if len(sizes) == 2 else torch.nn.functional.conv3d
    for bias in (None, torch.randn(11).bfloat16()):
        with torch.no_grad():
            got = torch.ops.tile.conv(x, weight, bias, None, *steps.values(), activation)
        wide = [t if t is None else t.double() for t in (x.movedim(-1, 1), weight.movedim(-1, 1), bias)]
        want = ACTIVATIONS[activation](convolution(*wide, **steps)).movedim(1, -1)
        torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-3)


def test_what_torch_has_no_fast_product_for_stays_ours(monkeypatch):
    """Other dtypes, one row of a gated layer, residuals of a convolution and uneven padding."""
    monkeypatch.setattr(matrix_units, "torch_has_matrix_units", lambda: True)
    ran = []
    original = gemm_family.kernels
    for family in (gemm_family, conv_family):
        monkeypatch.setattr(family, "kernels", lambda name: ran.append(name) or original(name))
    ops_, bf16 = torch.ops.tile, torch.bfloat16
    x, w = torch.randn(1, 16), torch.randn(8, 16)
    image, filters = torch.randn(1, 5, 6, 8).bfloat16(), torch.randn(4, 3, 3, 8).bfloat16()
    with torch.no_grad():
        ops_.linear(x, w)
        ops_.swiglu(x.bfloat16(), w.bfloat16(), w.bfloat16(), "silu")
        ops_.gemm(x.bfloat16(), [w.T.bfloat16()], [], "", "v=relu(acc0);ret v", bf16)
        ops_.conv(image, filters, None, torch.randn(1, 3, 4, 4).bfloat16())
        ops_.conv(image, filters, None, None, [], [1, 0, 0, 0])
    assert ran == ["gemm.gemm"] * 3 + ["conv.conv"] * 2
