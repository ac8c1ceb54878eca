# SPDX-License-Identifier: Apache-2.0
"""Conversions of the GPU: they compile for every chip, and those in software equal torch's `.to`."""

import itertools

import pytest
import torch
from cuda_shim import HOST, compile_everywhere

SMALL = ("f16", "bf16", "e4m3", "e5m2")
NATIVE = (
    "bool",
    "int8_t",
    "int16_t",
    "int32_t",
    "int64_t",
    "uint8_t",
    "uint16_t",
    "uint32_t",
    "uint64_t",
    "float",
    "double",
)


def test_every_conversion_compiles():
    """All in one kernel, since starting the compiler takes longer than compiling."""
    names = [f"tile::{name}" for name in SMALL] + list(NATIVE)
    lines = [
        f"*({b}*)(out + {16 * n}) = tile::convert<{b}>(*(const {a}*)(in + {16 * n}));"
        for n, (a, b) in enumerate(itertools.product(names, names))
    ]
    compile_everywhere(
        f'#include "cuda_types.h"\nextern "C" __global__ void all(const char* in, char* out) {{{"".join(lines)}}}'
    )


@pytest.mark.parametrize("kind", SMALL)
def test_pairs_and_rounding_compile(kind):
    compile_everywhere(f"""
#include "cuda_types.h"
extern "C" __global__ void pairs(const float* in, tile::{kind}* out, float* same) {{
  alignas(16) tile::{kind} local[8];
#pragma unroll
  for (int i = 0; i < 8; i += 2) tile::narrow_pair(&local[i], in[i], in[i + 1]);
  for (int i = 0; i < 8; ++i) out[i] = local[i];
  same[0] = tile::rounded<tile::{kind}>(in[9]) + tile::infinity() + tile::nan();
}}
""")


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_operations_on_pairs_compile(kind):
    compile_everywhere(f"""
#include "cuda_types.h"
extern "C" __global__ void pairs(const tile::{kind}* in, tile::{kind}* out) {{
  alignas(16) tile::{kind} a[2], b[2], c[2];
  for (int i = 0; i < 2; ++i) a[i] = in[i], b[i] = in[2 + i];
  using T = tile::{kind};
  const unsigned x = tile::pair_at(a), y = tile::pair_of(b[0], b[1]);
  const unsigned z = tile::pair_sum<T>(tile::pair_product<T>(x, y), tile::pair_narrowed<T>(1.5f, 2.5f));
  tile::store_pair(c, tile::pair_difference<T>(z, y));
  for (int i = 0; i < 2; ++i) out[i] = c[i];
}}
""")


SOFTWARE = (
    HOST
    + """
#include "cuda_types.h"
using namespace tile;
extern "C" void narrow_e4m3(const float* x, uint8_t* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = narrow<e4m3>(x[i]).bits;
}
extern "C" void narrow_e5m2(const float* x, uint8_t* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = narrow<e5m2>(x[i]).bits;
}
extern "C" void pair_e4m3(const float* x, uint8_t* y, int64_t n) {
  for (int64_t i = 0; i < n; i += 2) narrow_pair((e4m3*)(y + i), x[i], x[i + 1]);
}
extern "C" void pair_e5m2(const float* x, uint8_t* y, int64_t n) {
  for (int64_t i = 0; i < n; i += 2) narrow_pair((e5m2*)(y + i), x[i], x[i + 1]);
}
extern "C" void widen_e4m3(const uint8_t* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = widen(e4m3{x[i]});
}
"""
)
LIMITS = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, None)}


def floats(kind: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits, every number of the type, and the middle between each two, a little more and a little less."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).to(torch.int32).view(torch.float32)
    codes = torch.arange(256, dtype=torch.uint8).view(kind).float()
    numbers = torch.sort(codes[codes.isfinite()]).values
    middle = (numbers[1:] + numbers[:-1]) / 2
    top = numbers[-1] + (numbers[-1] - numbers[-2]) / 2
    edges = torch.cat([numbers, middle, torch.stack([top, -top])])
    near = torch.cat([torch.nextafter(edges, torch.tensor(side)) for side in (float("inf"), -float("inf"))])
    small = torch.randn(50_000, generator=generator) * 2.0 ** torch.randint(-20, 18, (50_000,), generator=generator)
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0])
    found = torch.cat([raw, edges, near, small, special])
    return found[: len(found) // 2 * 2].contiguous()


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("function", ["narrow", "pair"])
def test_fp8_in_software(library, name, function, seed):
    kind, limit = LIMITS[name]
    x = floats(kind, seed)
    got = torch.zeros(len(x), dtype=torch.uint8)
    library(SOFTWARE)(f"{function}_{name}", x, got, len(x))
    clipped = x if limit is None else torch.where(x.isnan(), x, x.clamp(-limit, limit))
    wanted = clipped.to(kind)
    nan = x.isnan()
    assert got.view(kind)[nan].float().isnan().all()
    assert torch.equal(got[~nan], wanted.view(torch.uint8)[~nan])


def test_codes_of_e4m3_compile():
    compile_everywhere("""
#include "cuda_types.h"
extern "C" __global__ void codes(const float* in, tile::e4m3* out, float* one) {
  alignas(16) tile::e4m3 four[4];
  alignas(16) tile::f16 halves[4];
  tile::narrow_positive_pair(halves, in[0], in[1]);
  tile::narrow_positive_pair(halves + 2, in[2], in[3]);
  tile::store_codes(four, halves, halves + 2);
  for (int i = 0; i < 4; ++i) out[i] = four[i];
  one[0] = tile::float8_of_code(in[4]) + tile::positive_half(in[5]);
}
""")


def test_pairs_of_e4m3_compile():
    compile_everywhere("""
#include "cuda_types.h"
extern "C" __global__ void pairs(const uint32_t* in, uint32_t* out) {
  alignas(16) tile::e4m3 from[8];
  alignas(16) tile::f16 pair[2];
  for (int i = 0; i < 2; ++i) reinterpret_cast<uint32_t*>(from)[i] = in[i];
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      tile::widen_pair(pair, from, i, j);
      out[i * 8 + j] = *reinterpret_cast<uint32_t*>(pair);
    }
}
""")


def test_e4m3_is_widened_in_software(library):
    codes = torch.arange(256, dtype=torch.uint8)
    got = torch.zeros(256)
    library(SOFTWARE)("widen_e4m3", codes, got, 256)
    torch.testing.assert_close(got, codes.view(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True)
