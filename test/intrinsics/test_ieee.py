# SPDX-License-Identifier: Apache-2.0
"""Directed roundings against exact fractions, everywhere a kernel can run."""

import math
from fractions import Fraction

import pytest
import torch

import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.intrinsics.ieee import ARITY, MODES

EDGES = [0.0, -0.0, 1.0, -1.0, 1e-45, -3e-45, 1.17549435e-38, 3.4028235e38, -3.4028235e38, 1 / 3, 2**-24, 1 + 2**-23]
EXACT = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "fmaf": lambda a, b, c: a * b + c,
    "frcp": lambda a: 1 / a, "fdiv": lambda a, b: a / b,
}  # fmt: skip


BITS = {"float32": torch.int32, "float64": torch.int64}


def steps(value, count, dtype="float32"):
    """The float `count` steps further from zero or nearer."""
    kind = getattr(torch, dtype)
    return (torch.tensor(value, dtype=kind).view(BITS[dtype]) + count).view(kind).item()


def is_right(found, exact, mode, dtype="float32"):
    """Whether `found` is the rounding of a fraction that is not 0; `exact(x)` compares it to a number."""
    if math.isinf(found):
        sign = 1 if found > 0 else -1
        greatest = math.copysign(torch.finfo(getattr(torch, dtype)).max, found)
        return mode in ("rn", "ru" if found > 0 else "rd") and exact(greatest) == sign
    side = exact(found)  # 1: the exact result is greater
    if side == 0:
        return True
    if found == 0:
        up, down = steps(0.0, 1, dtype), -steps(0.0, 1, dtype)
    else:
        up, down = (steps(found, n if found > 0 else -n, dtype) for n in (1, -1))
    other = up if side > 0 else down
    if mode == "ru":
        return side < 0 and (math.isinf(other) or exact(other) > 0)
    if mode == "rd":
        return side > 0 and (math.isinf(other) or exact(other) < 0)
    if mode == "rz":
        inward = (found >= 0 and side > 0) or (found <= 0 and side < 0)
        return inward and (math.isinf(other) or exact(other) == -side)
    if math.isinf(other):
        return True
    middle = (Fraction(found) + Fraction(other)) / 2
    return exact(middle) in (0, -side)


def comparer(name, args):
    if name in ("fsqrt", "frsqrt"):
        square = Fraction(args[0]) if name == "fsqrt" else 1 / Fraction(args[0])

        def compare(x):
            x = Fraction(x)
            return 1 if x < 0 else (square > x * x) - (square < x * x)

        return compare
    exact = EXACT[name](*map(Fraction, args))
    return lambda x: (exact > Fraction(x)) - (exact < Fraction(x))


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("name", ARITY)
def test_directions(name, dtype, way, seed):
    if (name, dtype) == ("frsqrt", "float64"):
        pytest.skip("two roundings")
    count, modes = 96, MODES if name != "frsqrt" else ("rn",)

    @T.prim_func
    def kernel(x: T.Tensor((3, count), dtype), out: T.Tensor((len(modes), count), dtype)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(count):
                for row, mode in enumerate(modes):
                    given = {} if name == "frsqrt" else {"rounding_mode": mode}
                    out[row, i] = getattr(T, f"ieee_{name}")(*[x[n, i] for n in range(ARITY[name])], **given)

    kind = getattr(torch, dtype)
    edges = EDGES if dtype == "float32" else [*EDGES[:6], 5e-324, 1.7976931348623157e308, 1e308, -1e308, 2**-53, 1e-160]
    x = torch.randn(3, count, dtype=kind) * torch.exp2(torch.randint(-30, 30, (3, count)).to(kind))
    x[:, : len(edges)] = torch.tensor([edges, edges[::-1], edges[5:] + edges[:5]], dtype=kind)
    if "sqrt" in name:
        x = x.abs()
    out = torch.zeros(len(modes), count, dtype=kind)
    way(kernel, x, out)
    for i in range(count):
        args = x[: ARITY[name], i].tolist()
        if (name in ("frcp", "frsqrt") and args[0] == 0) or (name == "fdiv" and args[1] == 0):
            continue
        compare = comparer(name, args)
        for row, mode in enumerate(modes):
            found = out[row, i].item()
            if compare(0) == 0:
                assert found == 0, (name, mode, args, found)
            else:
                assert is_right(found, compare, mode, dtype), (name, mode, args, found)


def test_zeros_and_what_is_no_number(way):
    zeros, inf = [(1.0, -1.0), (0.0, 0.0), (-0.0, -0.0), (0.0, -0.0)], math.inf
    cases = [*zeros, (inf, 1.0), (math.nan, 1.0), (inf, -inf)]

    @T.prim_func
    def kernel(x: T.Tensor((2, 7), "float32"), out: T.Tensor((2, 7), "float32"), wide: T.Tensor((7,), "float64")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(7):
                out[0, i] = T.ieee_add(x[0, i], x[1, i], "rd")
                out[1, i] = T.fmul(x[0, i], x[1, i])
                wide[i] = T.ieee_fdiv(T.cast(x[0, i], "float64"), 3.0)

    x, out, wide = torch.tensor(cases).mT.contiguous(), torch.zeros(2, 7), torch.zeros(7).double()
    way(kernel, x, out, wide)
    assert out[0, :4].tolist() == [0.0] * 4 and out[0, :4].signbit().tolist() == [True, False, True, True]
    assert out[0, 4] == inf and out[0, 5:].isnan().all()
    torch.testing.assert_close(out[1], x[0] * x[1], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(wide, x[0].double() / 3, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype, mode", [("float16", "rz"), ("int32", "rn"), ("bfloat16", "ru"), ("float32", "near")])
def test_what_is_refused(dtype, mode):
    with pytest.raises(TileError, match="ieee_add"):

        @T.prim_func
        def kernel(x: T.Tensor((2,), dtype)):
            with T.Kernel(1):
                x[0] = T.ieee_add(x[0], x[1], mode)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_small_types_are_computed_in_float32(dtype, way):
    @T.prim_func
    def kernel(x: T.Tensor((3, 64), dtype), out: T.Tensor((3, 64), dtype)):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                out[0, i] = T.ieee_frsqrt(x[0, i])
                out[1, i] = T.ieee_fmaf(x[0, i], x[1, i], x[2, i])
                out[2, i] = T.ieee_fdiv(x[1, i], x[0, i])

    kind = getattr(torch, dtype)
    x = torch.randn(3, 64).to(kind)
    x[0] = x[0].abs() + 0.5
    out = torch.full((3, 64), torch.nan).to(kind)
    way(kernel, x, out)
    a, b, c = x.double()
    wanted = torch.stack([a.rsqrt().float(), (a * b + c).float(), (b / a).float()]).to(kind)
    assert torch.equal(out, wanted)
    with pytest.raises(TileError, match="float16"):

        @T.prim_func
        def other(x: T.Tensor((4,), dtype)):
            with T.Kernel(1):
                x[0] = T.ieee_add(x[0], x[1], "rz")
