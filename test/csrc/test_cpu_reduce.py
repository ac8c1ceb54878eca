# SPDX-License-Identifier: Apache-2.0
"""Row reductions and scans against torch, over lengths around every unrolling."""

import pytest
import torch

LENGTHS = [0, 1, 2, 31, 32, 63, 64, 65, 127, 128, 200, 255, 256, 257, 1000, 4097]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]


def reductions(ops: list[str], acc: str, t: str) -> str:
    body = "".join(
        f'extern "C" void row_{op}(const {t}* x, {acc}* y, int64_t n) {{ *y = reduce<{op}, {acc}>(x, n); }}\n'
        for op in ops
    )
    return f'#include "cpu_reduce.h"\nusing namespace tile;\n{body}'


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_float_rows(dtype, library, c_names, seed):
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    built = library(reductions(["Sum", "Max", "Min", "AbsMax", "AbsSum"], c_names[accumulator], c_names[dtype]))
    for n in LENGTHS:
        x = torch.randn(n, dtype=torch.float64).to(dtype)
        wide = x.double()
        got = {op: torch.empty(1, dtype=accumulator) for op in ["Sum", "Max", "Min", "AbsMax", "AbsSum"]}
        for op, out in got.items():
            built(f"row_{op}", x, out, n)
        inf = torch.tensor([torch.inf], dtype=torch.float64)
        assert got["Max"].double() == torch.cat([wide, -inf]).max()
        assert got["Min"].double() == torch.cat([wide, inf]).min()
        assert got["AbsMax"].double() == torch.cat([wide.abs(), 0 * inf.nan_to_num()]).max()
        limit = wide.abs().sum() * torch.finfo(accumulator).eps * (4 + n / 32)
        assert abs(got["Sum"].double() - wide.sum()) <= limit
        assert abs(got["AbsSum"].double() - wide.abs().sum()) <= limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nan_and_infinity_anywhere(dtype, library, c_names):
    """In each lane of each vector, and in the rest behind them."""
    built = library(reductions(["Sum", "Max", "Min"], c_names[dtype], c_names[dtype]))
    for n in (64, 131):
        for place in range(n):
            for value in (torch.nan, torch.inf, -torch.inf):
                x, out = torch.ones(n, dtype=dtype), torch.zeros(3, dtype=dtype)
                x[place] = value
                for slot, op in enumerate(("Sum", "Max", "Min")):
                    built(f"row_{op}", x, out[slot:], n)
                want = torch.stack([x.sum(), x.max(), x.min()])
                torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integer_rows(dtype, library, c_names, seed):
    wide = library(reductions(["Sum", "AbsSum", "AbsMax"], "int64_t", c_names[dtype]))
    same = library(reductions(["Max", "Min", "BitAnd", "BitOr", "BitXor"], c_names[dtype], c_names[dtype]))
    info = torch.iinfo(dtype)
    low, high = max(info.min, -(2**40)), min(info.max, 2**40)
    for n in LENGTHS:
        x = torch.randint(low, high + 1, (n,), dtype=torch.int64).to(dtype)
        xs = x.tolist()
        bits = {"BitAnd": -1, "BitOr": 0, "BitXor": 0}
        for value in xs:
            bits = {"BitAnd": bits["BitAnd"] & value, "BitOr": bits["BitOr"] | value, "BitXor": bits["BitXor"] ^ value}
        if info.min == 0:
            bits["BitAnd"] &= info.max
        want = {"Sum": sum(xs), "AbsSum": sum(map(abs, xs)), "AbsMax": max(map(abs, xs), default=0)}
        for op, value in want.items():
            out = torch.empty(1, dtype=torch.int64)
            wide(f"row_{op}", x, out, n)
            assert out.item() == value, (op, n)
        for op, value in {"Max": max(xs, default=info.min), "Min": min(xs, default=info.max), **bits}.items():
            out = torch.empty(1, dtype=dtype)
            same(f"row_{op}", x, out, n)
            assert out.item() == value, (op, n)


def test_nan_in_a_row(library):
    """Every reduction of floats shows it."""
    kinds = ["Sum", "Max", "Min", "AbsMax", "AbsSum"]
    built = library(reductions(kinds, "float", "float"))
    for place in (0, 70, 199):
        x = torch.arange(200.0)
        x[place] = torch.nan
        for op in kinds:
            out = torch.empty(1)
            built(f"row_{op}", x, out, 200)
            assert out.isnan(), (op, place)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int32], ids=str)
def test_scans(dtype, library, c_names, seed):
    t = c_names[dtype]
    acc = torch.float32 if dtype == torch.float16 else dtype
    body = "".join(
        f'extern "C" void row_{f}(const {t}* x, {t}* y, int64_t n, int64_t reverse) '
        f"{{ {f}<{c_names[acc]}>(x, y, n, reverse != 0); }}\n"
        for f in ["cumsum", "cummax"]
    )
    built = library(f'#include "cpu_reduce.h"\nusing namespace tile;\n{body}')
    for n in [0, 1, 2, 33, 500]:
        x = (torch.randn(n, dtype=torch.float64) * 8).to(dtype)
        for reverse in (False, True):
            turned = x.double().flip(0) if reverse else x.double()
            want = {"cumsum": turned.cumsum(0), "cummax": turned.cummax(0).values if n else turned}
            for name, value in want.items():
                got = torch.empty_like(x)
                built(f"row_{name}", x, got, n, int(reverse))
                value = value.flip(0) if reverse else value
                eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0
                scale = x.double().abs().sum() if name == "cumsum" else 0
                torch.testing.assert_close(got.double(), value, rtol=eps, atol=float(scale * eps))
                in_place = x.clone()
                built(f"row_{name}", in_place, in_place, n, int(reverse))
                assert torch.equal(in_place, got)
