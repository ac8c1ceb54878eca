# SPDX-License-Identifier: Apache-2.0
"""Conversions equal torch's `.to` on every value that torch defines."""

import pytest
import torch

SMALL = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
FLOATS = [*SMALL, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
ALL = [torch.bool, *INTEGERS, *FLOATS]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Before 2.12 or so, torch made NaN of what e4m3 cannot hold; ours saturates, as torch does since.
TORCH_SATURATES = torch.tensor(1e4).to(torch.float8_e4m3fn).float().item() == 448


def codes(dtype: torch.dtype) -> torch.Tensor:
    """Every value of an 8- or 16-bit type."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    raw = (
        torch.arange(256, dtype=torch.uint8) if dtype.itemsize == 1 else torch.arange(-32768, 32768, dtype=torch.int16)
    )
    return raw.view(dtype)


def values(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Every value of a small type; else random bits, numbers of all magnitudes, and the places where roundings turn."""
    if dtype.itemsize <= 2:
        return codes(dtype)
    generator = torch.Generator().manual_seed(seed)
    bits = BITS[dtype.itemsize]
    low, high = torch.iinfo(bits).min, torch.iinfo(bits).max
    raw = torch.randint(low, high, (200_000,), generator=generator, dtype=bits)
    if dtype not in FLOATS:
        edges = torch.tensor([0, 1, -1, low, high], dtype=bits)
        small = torch.randint(-70_000, 70_000, (10_000,), generator=generator).to(bits)
        return torch.cat([raw, small, edges]).view(dtype)
    around = []
    for small_type in SMALL:
        finite = codes(small_type).double()
        finite = finite[finite.isfinite()].sort().values
        middle = ((finite[1:] + finite[:-1]) / 2).to(dtype)
        far = torch.tensor([torch.inf], dtype=dtype)
        around += [finite.to(dtype), middle, middle.nextafter(far), middle.nextafter(-far)]
    edges = torch.tensor([0.0, torch.inf, torch.nan, 448, 464, 464.5, 480, 57344, 61440, 65504, 65520, 3e38])
    magnitude = 10 ** torch.empty(100_000, dtype=torch.float64).uniform_(-9, 6, generator=generator)
    spread = torch.randn(100_000, generator=generator, dtype=torch.float64) * magnitude
    return torch.cat([raw.view(dtype), *around, edges.to(dtype), -edges.to(dtype), spread.to(dtype)])


def defined(x: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    """Without the values whose conversion to `to` C++ leaves undefined."""
    if x.dtype in FLOATS and to in INTEGERS:
        wide, info = x.double(), torch.iinfo(to)
        return x[(wide > info.min - (to.itemsize < 8)) & (wide < float(info.max))]
    if to == torch.float8_e4m3fn and not TORCH_SATURATES:
        return x[~(x.double().abs() > 448)]
    return x


@pytest.mark.parametrize("source", ALL, ids=str)
def test_convert(source, library, c_names, seed):
    declarations = "".join(
        f'extern "C" void to_{c_names[to]}(const {c_names[source]}* x, {c_names[to]}* y, int64_t n) {{\n'
        f"#pragma omp simd\nfor (int64_t i = 0; i < n; ++i) y[i] = convert<{c_names[to]}>(x[i]);\n}}\n"
        for to in ALL
    )
    built = library(f'#include "cpu_types.h"\nusing namespace tile;\n{declarations}')
    for to in ALL:
        x = defined(values(source, seed), to)
        got = torch.empty(x.shape, dtype=to)
        built(f"to_{c_names[to]}", x, got, x.numel())
        want = x.to(to)
        got_bits, want_bits = got.view(BITS[to.itemsize]), want.view(BITS[to.itemsize])
        same = got_bits == want_bits
        if to in FLOATS:
            same |= got.double().isnan() & want.double().isnan()
        bad = (~same).nonzero().flatten()[:4]
        assert same.all(), f"{source} -> {to}: {x[bad].tolist()} gave {got_bits[bad]}, torch gives {want_bits[bad]}"


def test_limits(library, c_names):
    body = "".join(
        f'extern "C" void limits_{c}({c}* x) {{ x[0] = lowest<{c}>(); x[1] = highest<{c}>(); }}\n'
        for c in (c_names[t] for t in ALL)
    )
    built = library(f'#include "cpu_types.h"\nusing namespace tile;\n{body}')
    for t in ALL:
        got = torch.empty(2, dtype=t)
        built(f"limits_{c_names[t]}", got)
        if t == torch.bool:
            want = [False, True]
        elif t in INTEGERS:
            want = [torch.iinfo(t).min, torch.iinfo(t).max]
        else:
            want = [-448.0, 448.0] if t == torch.float8_e4m3fn else [-torch.inf, torch.inf]
        assert got.tolist() == want, t


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_rounded(dtype, library, c_names, seed):
    """Rounding in place is narrowing and widening again."""
    built = library(
        '#include "cpu_types.h"\nusing namespace tile;\nextern "C" void f(const float* x, float* y, int64_t n) {\n'
        f"#pragma omp simd\nfor (int64_t i = 0; i < n; ++i) y[i] = rounded<{c_names[dtype]}>(x[i]);\n}}\n"
    )
    x = defined(values(torch.float32, seed), dtype)
    got = torch.empty_like(x)
    built("f", x, got, x.numel())
    want = x.to(dtype).float()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.view(torch.int32)[~want.isnan()], want.view(torch.int32)[~want.isnan()])
