# SPDX-License-Identifier: Apache-2.0
"""bf16 products by pairs, without them, and in float64: orders, odd depths, edges, infinities, denormals."""

import pytest
import torch

ORDERS = [(False, False), (False, True), (True, False), (True, True)]
SWITCHED_OFF = "#define TILE_NO_PAIRS\n"


def source(defined: str = "", c_type: str = "float") -> str:
    calls = "".join(
        f'extern "C" void gemm_{int(ta)}{int(tb)}(const bf16* a, int64_t lda, const bf16* b, int64_t ldb, {c_type}* c, '
        f"int64_t ldc, int64_t m, int64_t n, int64_t k) {{ gemm<bf16, bf16, {c_type}, {str(ta).lower()}, "
        f"{str(tb).lower()}>(a, lda, b, ldb, c, ldc, m, n, k); }}\n"
        for ta, tb in ORDERS
    )
    told = 'extern "C" void has_pairs(int32_t* out) { *out = TILE_PAIRS; }\n'
    return f'{defined}#include "cpu_gemm.h"\nusing namespace tile;\n{calls}{told}'


def has_pairs(built) -> bool:
    out = torch.full((1,), -1, dtype=torch.int32)
    built("has_pairs", out)
    return bool(out.item())


@pytest.fixture(scope="module")
def both(library):
    """The header compiled with and without pairs; skipped where the machine has no such instruction."""
    by_pairs, by_elements = library(source()), library(source(SWITCHED_OFF))
    assert not has_pairs(by_elements)
    if not has_pairs(by_pairs):
        pytest.skip("no AVX512_BF16 here")
    return by_pairs, by_elements


def stored(x: torch.Tensor, turned: bool, gap: int) -> torch.Tensor:
    """`x`, or its transpose, with `gap` NaN behind each row."""
    x = x.mT if turned else x
    whole = torch.full((x.shape[0], x.shape[1] + gap), torch.nan, dtype=torch.bfloat16)
    whole[:, : x.shape[1]] = x
    return whole[:, : x.shape[1]]


def product(built, a: torch.Tensor, b: torch.Tensor, order: tuple[bool, bool], gap: int = 0) -> torch.Tensor:
    """a @ b from operands stored in an order, into a tile of 1s whose surroundings must stay."""
    (m, k), n = a.shape, b.shape[1]
    left, right = stored(a, order[0], gap), stored(b, order[1], gap)
    whole = torch.ones(m, n + gap)
    c = whole[:, :n]
    built(f"gemm_{int(order[0])}{int(order[1])}", left, left.stride(0), right, right.stride(0), c, c.stride(0), m, n, k)
    assert (whole[:, n:] == 1).all()
    return c


@pytest.mark.parametrize("order", ORDERS)
def test_small_integers_are_exact(both, order, seed):
    """Sums of small integers are the same in any order of addition."""
    dim = lambda high: int(torch.randint(1, high, ()))  # noqa: E731
    shapes = [(1, 1, 1), (8, 32, 2), (8, 32, 3), (13, 47, 31), (16, 48, 33), (130, 33, 257), (7, 65, 513)]
    shapes += [(dim(140), dim(140), dim(600)) for _ in range(8)]
    for m, n, k in shapes:
        a, b = (torch.randint(-8, 9, shape).bfloat16() for shape in ((m, k), (k, n)))
        want = 1 + a.double() @ b.double()
        for built in both:
            assert torch.equal(product(built, a, b, order, dim(9) - 1).double(), want), (m, n, k)


@pytest.mark.parametrize("order", ORDERS)
def test_sums_are_rounded_as_floats(both, order, seed):
    m, n, k = (int(x) for x in torch.randint(1, 150, (3,)))
    a, b = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16()
    want = 1 + a.double() @ b.double()
    bound = (1 + a.double().abs() @ b.double().abs()) * 2.0**-23 * (2 * k**0.5 + 8)
    for built in both:
        assert ((product(built, a, b, order).double() - want).abs() <= bound).all(), (m, n, k)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("k", [20, 21])
def test_nan_and_infinity_stay_in_their_rows(both, order, k):
    """Also in the last element of an odd depth, beside which the pair has a zero."""
    a, b = torch.randn(9, k).bfloat16(), torch.randn(k, 35).bfloat16()
    a[3, k - 1], a[5, k - 1], a[6, 2] = torch.nan, torch.inf, -torch.inf
    b[[2, k - 1]] = 1.0
    for built in both:
        c = product(built, a, b, order)
        assert c[3].isnan().all()
        assert (c[5] == torch.inf).all()
        assert (c[6] == -torch.inf).all()
        assert c[[0, 1, 2, 4, 7, 8]].isfinite().all()


def test_infinity_times_zero_and_overflow(both):
    a, b = torch.zeros(1, 3).bfloat16(), torch.zeros(3, 4).bfloat16()
    a[0], b[0, 0], b[1, 1], b[2, 2] = 3e38, torch.inf, 3e38, torch.nan
    a[0, 0] = 0.0
    for built in both:
        c = product(built, a, b, (False, False))[0]
        assert c[0].isnan()
        assert c[1] == torch.inf
        assert c[2].isnan()
        assert c[3] == 1


def test_denormals_are_zero_by_pairs_and_kept_without(both):
    """What the header promises: operands below 2^-126 only; C is added by an ordinary addition."""
    tiny, large = torch.full((1, 2), 2.0**-130).bfloat16(), torch.full((2, 1), 2.0**126).bfloat16()
    assert tiny.all()
    by_pairs, by_elements = (product(built, tiny, large, (False, False)).item() for built in both)
    assert by_pairs == 1
    assert by_elements == 1 + 2 * 2.0**-4


def test_small_results(library, both, seed):
    """C of bf16: sums are rounded once for each block of the depth."""
    built = library(source(c_type="bf16"))
    a, b = torch.randn(19, 300).bfloat16(), torch.randn(300, 45).bfloat16()
    c = torch.zeros(19, 45, dtype=torch.bfloat16)
    built("gemm_00", a, 300, b, 45, c, 45, 19, 45, 300)
    want = a.double() @ b.double()
    assert ((c.double() - want).abs() <= 2 * 2.0**-8 * (a.double().abs() @ b.double().abs())).all()
