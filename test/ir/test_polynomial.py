# SPDX-License-Identifier: Apache-2.0
from hypothesis import given, settings, strategies as st

from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Load, Var, cast, const, maximum, minimum
from torch_tile.ir.polynomial import Atoms, Polynomial, number, structure, widens

M, N = (Var(n, dt.int32, "dim") for n in "MN")
i, j = (Var(n, dt.int32, "loop") for n in "ij")

EQUAL = [
    ((i + 3) * (j - 1), i * j - i + j * 3 - 3),
    ((i * 8 + j) // 4, i * 2 + j // 4),
    (i % 4 + i // 4 * 4, i),
    ((i // 4) // 8, i // 32),
    ((i * N + j) // N, i + j // N),
    ((M * N - 1) // N, M - 1),
    (minimum(i + j, 3), minimum(3, j + i)),
    (maximum(i, i), i),
    (i << 3, i * 8),
    (i >> 3, i // 8),
    (i & 7, i % 8),
    (cast(i + 1, dt.int64) * 2, cast(i, dt.int64) * 2 + 2),
    ((i + 128) // 128, i // 128 + 1),
]


def test_equal_values_have_one_form():
    atoms = Atoms()
    for a, b in EQUAL:
        assert atoms.of(a).key == atoms.of(b).key, (a, b)


DIFFERENT = [
    (i, j),
    (i // 4, i // 5),
    (minimum(i, j), maximum(i, j)),
    (cast(cast(i, dt.int8), dt.int32), i),
    ((i - j) // i, 1 - j // i),
]


def test_others_have_not():
    atoms = Atoms()
    for a, b in DIFFERENT:
        assert atoms.of(a).key != atoms.of(b).key, (a, b)


def polynomials() -> st.SearchStrategy[Polynomial]:
    monomials = st.lists(st.integers(0, 2), max_size=2).map(lambda m: tuple(sorted(m)))
    factors = st.integers(-9, 9).filter(bool)
    return st.dictionaries(monomials, factors, max_size=4).map(Polynomial)


def at(p: Polynomial, point: list[int]) -> int:
    total = 0
    for monomial, factor in p.terms.items():
        for atom in monomial:
            factor *= point[atom]
        total += factor
    return total


@settings(max_examples=200)
@given(polynomials(), polynomials(), st.lists(st.integers(-5, 5), min_size=3, max_size=3))
def test_arithmetic(p, q, point):
    assert at(p + q, point) == at(p, point) + at(q, point)
    assert at(p - q, point) == at(p, point) - at(q, point)
    assert at(p * q, point) == at(p, point) * at(q, point)
    assert at(p.scaled(-3), point) == -3 * at(p, point)
    assert (at(p.tightened(), point) >= 0) == (at(p, point) >= 0)
    for atom in range(3):
        parts = p.split(atom)
        if parts is None:
            assert any(m.count(atom) > 1 for m in p.terms)
        else:
            assert at(parts[0], point) * point[atom] + at(parts[1], point) == at(p, point)
            assert atom not in parts[0].atoms() | parts[1].atoms()
    assert (p - p).is_constant and (p - p).constant == 0 and number(4).constant == 4


@given(st.integers(-9, 9), st.integers(-9, 9), st.integers(-40, 40), st.integers(1, 48))
def test_quotients_without_a_common_factor(a, b, constant, divisor):
    """They have one form, of smaller numbers, and the same values."""
    x, y = Var("x"), Var("y")
    atoms = Atoms()
    found = atoms.of((x * a + y * b + constant) // divisor)
    for factor in (2, 3, 8):
        more = factor - 1
        whole = atoms.of((x * (a * factor) + y * (b * factor) + constant * factor + more) // (divisor * factor))
        assert whole.key == found.key


def test_memory_is_mutable():
    atoms = Atoms()
    element = Load(Buffer("A", (N,), dt.int32, "global"), (i,))
    assert atoms.is_mutable(atoms.of(i + minimum(element, 3) // 2)) and not atoms.is_mutable(atoms.of(i // 2))


def test_structure_tells_what_equal_tells():
    assert structure(i + 1) == structure(i + 1) != structure(j + 1)
    assert structure(const(1, dt.int32)) != structure(const(1, dt.int64))
    x = Var("x", dt.float32)
    assert structure(x * 0.0) != structure(x * -0.0) and structure(x * float("nan")) == structure(x * float("nan"))


def test_widens_is_inclusion_of_ranges():
    def values(t: dt.DType) -> tuple[int, int]:
        if t.kind == "bool":
            return 0, 1
        return (0, (1 << t.bits) - 1) if t.kind == "uint" else (-(1 << (t.bits - 1)), (1 << (t.bits - 1)) - 1)

    whole = [t for t in dt.ALL if not t.is_float]
    for a in whole:
        for b in whole:
            inside = values(b)[0] <= values(a)[0] and values(a)[1] <= values(b)[1]
            assert widens(a, b) == (inside and b.is_integer), (a, b)
    assert not widens(dt.float16, dt.int32) and not widens(dt.int8, dt.float32)
