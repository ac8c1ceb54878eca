# SPDX-License-Identifier: Apache-2.0
"""gemm on tiles against float64: every operand order, type and raggedness; only C's own elements change."""

import pytest
import torch

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
# (A, B, C); float sums of these are compared within k roundings, integer sums exactly.
TYPES = [
    *((t, t, torch.float32) for t in FLOATS if t != torch.float64),
    (torch.float64, torch.float64, torch.float64),
    (torch.float32, torch.bfloat16, torch.float32),
    (torch.float16, torch.float32, torch.float32),
    (torch.float32, torch.float32, torch.float64),
    (torch.int8, torch.int8, torch.int32),
    (torch.uint8, torch.uint8, torch.int32),
    (torch.int8, torch.uint8, torch.int64),
    (torch.int32, torch.int32, torch.int32),
    (torch.float16, torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
]
EPSILON = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def source(types: list[str]) -> str:
    calls = "".join(
        f'extern "C" void gemm_{int(ta)}{int(tb)}(const {types[0]}* a, int64_t lda, const {types[1]}* b, int64_t ldb, '
        f"{types[2]}* c, int64_t ldc, int64_t m, int64_t n, int64_t k) {{ "
        f"gemm<{types[0]}, {types[1]}, {types[2]}, {str(ta).lower()}, {str(tb).lower()}>"
        "(a, lda, b, ldb, c, ldc, m, n, k); }\n"
        for ta in (False, True)
        for tb in (False, True)
    )
    return f'#include "cpu_gemm.h"\nusing namespace tile;\n{calls}'


def operand(rows: int, columns: int, pitch: int, dtype: torch.dtype) -> torch.Tensor:
    """A random `rows` by `columns` tile with `pitch` elements between rows; what lies between rows is poison."""
    if dtype.is_floating_point:
        storage = torch.full((rows, pitch), torch.nan, dtype=torch.float64)
        storage[:, :columns] = torch.randn(rows, columns, dtype=torch.float64)
        return storage.to(dtype)[:, :columns]
    info = torch.iinfo(dtype)
    low, high = (info.min, info.max) if dtype.itemsize == 1 else (-30_000, 30_000)
    return torch.randint(low, high + 1, (rows, pitch)).to(dtype)[:, :columns]


@pytest.mark.parametrize("types", TYPES, ids=lambda types: "-".join(str(t).removeprefix("torch.") for t in types))
def test_gemm(types, library, c_names, seed):
    built = library(source([c_names[t] for t in types]))
    dim = lambda high: int(torch.randint(1, high, ()))  # noqa: E731
    shapes = [(64, 64, 64), (1, 1, 1), (8, 32, 128), (129, 33, 257), (7, 100, 576)]
    shapes += [(dim(140), dim(140), dim(300)) for _ in range(5)]
    for m, n, k in shapes:
        for ta, tb in [(False, False), (False, True), (True, False), (True, True)]:
            (ra, ca), (rb, cb) = ((k, m) if ta else (m, k)), ((n, k) if tb else (k, n))
            a = operand(ra, ca, ca + dim(9) - 1, types[0])
            b = operand(rb, cb, cb + dim(9) - 1, types[1])
            c = operand(m, n, n + dim(9) - 1, types[2])
            around = c.untyped_storage().nbytes()
            before = c.clone()
            whole = torch.empty(0, dtype=types[2]).set_(c.untyped_storage())
            outside = torch.ones_like(whole, dtype=torch.bool)
            outside.as_strided(c.shape, c.stride()).fill_(False)
            kept = whole[outside].clone()
            built(f"gemm_{int(ta)}{int(tb)}", a, a.stride(0), b, b.stride(0), c, c.stride(0), m, n, k)
            left, right = (a.mT if ta else a), (b.mT if tb else b)
            torch.testing.assert_close(whole[outside], kept, rtol=0, atol=0, equal_nan=True)
            assert around == c.untyped_storage().nbytes()
            if not types[2].is_floating_point:
                want = before.long() + (left[:, :, None].long() * right[None].long()).sum(1)
                assert torch.equal(c.long(), want.to(types[2]).long()), (m, n, k, ta, tb)
                continue
            want = before.double() + left.double() @ right.double()
            bound = before.double().abs() + left.double().abs() @ right.double().abs()
            # Sums are float or double inside; a small C is rounded once per block of k besides.
            inner = EPSILON[torch.float64 if torch.float64 in types else torch.float32]
            limit = bound * (inner * (2 * k**0.5 + 8) + EPSILON[types[2]] * (1 + k // 128))
            assert ((c.double() - want).abs() <= limit).all(), (m, n, k, ta, tb)


def test_bytes_are_exact_for_any_depth(library):
    """The largest byte products summed far past 2^24, where a float accumulator would lose units."""
    built = library(source(["uint8_t", "uint8_t", "int32_t"]))
    k = 5000
    a, b = torch.full((8, k), 255, dtype=torch.uint8), torch.full((k, 32), 255, dtype=torch.uint8)
    b[-1] = 254
    c = torch.ones(8, 32, dtype=torch.int32)
    built("gemm_00", a, k, b, 32, c, 32, 8, 32, k)
    assert (c == 1 + 255 * 255 * k - 255).all()


def test_nan_and_infinity_stay_in_their_rows(library):
    built = library(source(["float", "float", "float"]))
    a, b = torch.randn(9, 20), torch.randn(20, 35)
    a[3, 4], a[5, 6] = torch.nan, torch.inf
    b[6] = 1.0
    c = torch.zeros(9, 35)
    built("gemm_00", a, 20, b, 35, c, 35, 9, 35, 20)
    assert c[3].isnan().all()
    assert (c[5] == torch.inf).all()
    assert c[[0, 1, 2, 4, 6, 7, 8]].isfinite().all()


def test_empty(library):
    built = library(source(["float", "float", "float"]))
    c = torch.randn(4, 4)
    before = c.clone()
    for m, n, k in [(0, 4, 4), (4, 0, 4), (4, 4, 0)]:
        built("gemm_01", torch.randn(4, 4), 4, torch.randn(4, 4), 4, c, 4, m, n, k)
    assert torch.equal(c, before)
