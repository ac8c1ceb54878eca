# SPDX-License-Identifier: Apache-2.0
"""Scalar math against float64: error in units of the last place, the edges, and that the loops are vector code."""

import re
import subprocess

import pytest
import torch

from torch_tile.runtime.host_compiler import csrc_dir, find_compiler

# Greatest error in ulp of the float result. What libm computes is given a margin for other platforms' libm.
OWN = {
    "exp2": 1.5, "exp": 1.5, "log": 1.5, "log2": 1.5, "tanh": 2.5, "erf": 3, "sigmoid": 3, "rsqrt": 1.6, "sqrt": 0.51,
    "floor": 0, "ceil": 0, "trunc": 0, "round": 0,
}  # fmt: skip
LIBM = [
    "log10", "log1p", "expm1", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh",
    "erfc",
]  # fmt: skip
BINARY = ["maximum", "minimum", "pow", "atan2", "fmod", "copysign", "hypot"]
EDGES = [
    0.0,
    -0.0,
    torch.inf,
    -torch.inf,
    torch.nan,
    1.0,
    -1.0,
    1e-45,
    -1e-45,
    1e-38,
    3.4e38,
    -3.4e38,
    88.72284,
    -103.97,
]


def source(names: list[str], type_name: str) -> str:
    loops = "".join(
        f'extern "C" void v_{n}(const {type_name}* x, {type_name}* y, int64_t n) {{\n'
        f"#pragma omp simd\nfor (int64_t i = 0; i < n; ++i) y[i] = tile::{n}(x[i]);\n}}\n"
        for n in names
    )
    return f'#include "cpu_math.h"\nusing namespace tile;\n{loops}'


def ulps(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Error of `got` (float32) in units of the last place of `want` (float64)."""
    magnitude = want.float().abs()
    unit = torch.nextafter(magnitude, torch.tensor(torch.inf)).double() - magnitude.double()
    return (got.double() - want).abs() / unit


@pytest.fixture(scope="module")
def floats(library):
    return library(source([*OWN, *LIBM], "float"))


@pytest.mark.parametrize("name", [*OWN, *LIBM])
def test_float(name, floats, seed):
    """Every exponent and sign with random mantissas, denormals too, and the interval in which most arguments lie."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (1_000_000,), generator=generator).to(torch.int32).view(torch.float32)
    x = torch.cat([bits, torch.empty(500_000).uniform_(-12, 12, generator=generator), torch.tensor(EDGES)])
    got = torch.empty_like(x)
    floats(f"v_{name}", x, got, x.numel())
    want = getattr(torch, name)(x.double())
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf() & ~want.isnan(), want.float().isinf()), "overflow"
    assert torch.equal(torch.signbit(got)[x == 0], torch.signbit(want)[x == 0]), "sign of zero"
    finite = want.float().isfinite()
    error = ulps(got[finite], want[finite])
    worst = error.argmax()
    assert error[worst] <= OWN.get(name, 4), f"{name}({x[finite][worst].item()!r}) is off by {error[worst]:.2f} ulp"


def test_vectorised():
    """The compiler turns each of the own functions' loops into vector code, which is what they are written for."""
    compiler = find_compiler()
    if "g++" not in compiler.command[-1]:
        pytest.skip("reads GCC's report")
    command = [*compiler.command, *compiler.flags, f"-I{csrc_dir()}", "-x", "c++", "-", "-S", "-o", "/dev/null"]
    result = subprocess.run(
        [*command, "-fopt-info-vec-optimized"],
        input=source(list(OWN), "float"),
        capture_output=True,
        text=True,
        check=True,
    )
    lines = {int(line) for line in re.findall(r"<stdin>:(\d+):\d+: optimized: loop vectorized", result.stderr)}
    assert len(lines) == len(OWN), result.stderr


def test_double(library, seed):
    names = [*OWN, *LIBM]
    built = library(source(names, "double"))
    x = torch.cat([torch.randn(10_000, dtype=torch.float64) * 3, torch.tensor(EDGES, dtype=torch.float64)])
    for name in names:
        got = torch.empty_like(x)
        built(f"v_{name}", x, got, x.numel())
        torch.testing.assert_close(got, getattr(torch, name)(x), rtol=1e-13, atol=1e-300, equal_nan=True, msg=name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn], ids=str)
def test_small_floats(dtype, library, c_names):
    """Computed in float, rounded once: the float64 result rounded, or its neighbour if that lies almost halfway."""
    names = ["exp2", "tanh", "sin", "sigmoid", "floor", "abs"]
    built = library(source(names, c_names[dtype]))
    codes = torch.arange(2 ** (8 * dtype.itemsize)).to(torch.uint16 if dtype.itemsize == 2 else torch.uint8)
    x = codes.view(dtype)
    for name in names:
        got = torch.empty_like(x)
        built(f"v_{name}", x, got, x.numel())
        want = getattr(torch, name)(x.float().double()).float().to(dtype)
        exact = (got.double() == want.double()) | (got.double().isnan() & want.double().isnan())
        if dtype == torch.float8_e4m3fn:  # older torch does not saturate
            exact |= want.float().isnan()
        assert (~exact).sum() <= codes.numel() // 1000, name


def test_two_operands(library, seed):
    loops = "".join(
        f'extern "C" void v_{n}(const float* x, const float* y, float* z, int64_t n) '
        f"{{ for (int64_t i = 0; i < n; ++i) z[i] = tile::{n}(x[i], y[i]); }}\n"
        for n in BINARY
    )
    built = library(f'#include "cpu_math.h"\n{loops}')
    edges = torch.tensor(EDGES)
    x = torch.cat([torch.randn(20_000) * 5, edges.repeat_interleave(len(edges))])
    y = torch.cat([torch.randn(20_000) * 3, edges.repeat(len(edges))])
    for name in BINARY:
        got = torch.empty_like(x)
        built(f"v_{name}", x, y, got, x.numel())
        want = getattr(torch, name)(x.double(), y.double()).float()
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-45, equal_nan=True, msg=name)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8], ids=str)
def test_integers(dtype, library, c_names, seed):
    """Quotients rounded down and up, remainders with the divisor's sign, min, max, abs."""
    t = c_names[dtype]
    names = ["floordiv", "floormod", "ceildiv", "min", "max"]
    loops = "".join(
        f'extern "C" void v_{n}(const {t}* x, const {t}* y, {t}* z, int64_t n) '
        f"{{ for (int64_t i = 0; i < n; ++i) z[i] = tile::{n}(x[i], y[i]); }}\n"
        for n in names
    )
    built = library(f'#include "cpu_math.h"\n{loops}')
    info = torch.iinfo(dtype)
    x = torch.randint(max(info.min, -1000), min(info.max, 1000), (20_000,)).to(dtype)
    y = torch.randint(max(info.min, -30), 30, (20_000,)).to(dtype)
    y[y == 0] = 7
    x[(x == info.min) & (y == -1)] = 0  # the one quotient that the type cannot hold
    wide_x, wide_y = x.long(), y.long()
    expected = {
        "floordiv": wide_x.div(wide_y, rounding_mode="floor"),
        "floormod": wide_x.remainder(wide_y),
        "ceildiv": -(-wide_x).div(wide_y, rounding_mode="floor"),
        "min": torch.minimum(wide_x, wide_y),
        "max": torch.maximum(wide_x, wide_y),
    }
    for name, want in expected.items():
        got = torch.empty_like(x)
        built(f"v_{name}", x, y, got, x.numel())
        defined = (
            torch.ones_like(x, dtype=torch.bool)
            if name != "ceildiv"
            else (x >= 0) & (y > 0) & (wide_x + wide_y <= info.max)
        )
        assert torch.equal(got[defined].long(), want[defined]), name


def test_min_max_keep_nan(library):
    """A NaN on either side is given."""
    built = library(
        '#include "cpu_math.h"\nextern "C" void f(float* x) { x[2] = tile::min(x[0], x[1]);'
        " x[3] = tile::max(x[0], x[1]); x[4] = tile::min(x[1], x[0]); x[5] = tile::max(x[1], x[0]); }"
    )
    x = torch.tensor([torch.nan, 2.0, 0, 0, 0, 0])
    built("f", x)
    assert x[2:].isnan().all()
