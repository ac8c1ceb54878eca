# SPDX-License-Identifier: Apache-2.0
import math
import random

import pytest
from hypothesis import given, settings, strategies as st

from torch_tile.diagnostics.errors import InternalError
from torch_tile.ir import dtype as dt, printer  # noqa: F401  the printer writes what tests compare
from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.expr import Var, const
from torch_tile.ir.layout import (
    Digit,
    Layout,
    Swizzle,
    local,
    points,
    replicated,
    row_major,
    shared_tile,
    spread,
)  # fmt: skip
from torch_tile.ir.layout_ops import offset_of, owner_of
from torch_tile.ir.mixed_radix import Digits, MixedRadix

t, r = Var("t", dt.int32, "thread"), Var("r", dt.int32, "loop")
P = Layout.parse
ACCUMULATOR = local(2, 1) * P("[8:4t | 4:1t]") * local(1, 2)  # mma m16n8
WGMMA = P("[4:32t 2:2r 8:4t | 16:4r 4:1t 2:1r]")  # m64n128


def shuffled_strides(sizes: list[tuple[int, str]], draw) -> list[Digit]:
    """Digits that fill each axis without holes, in any order."""
    strides = dict.fromkeys("trm", 1)
    found: dict[int, Digit] = {}
    for k in draw(st.permutations(range(len(sizes)))):
        size, axis = sizes[k]
        found[k] = Digit(size, strides[axis], axis)
        strides[axis] *= size
    return [found[k] for k in range(len(sizes))]


@st.composite
def layouts(draw, axes="tr"):
    sizes = draw(st.lists(st.tuples(st.sampled_from([1, 2, 2, 3, 4, 8]), st.sampled_from(axes)), max_size=6))
    digits = shuffled_strides(sizes, draw)
    cuts = sorted(draw(st.lists(st.integers(0, len(digits)), min_size=1, max_size=2)))
    dims = [tuple(digits[a:b]) for a, b in zip([0, *cuts], [*cuts, len(digits)], strict=True)]
    replicated_part = dims.pop() if draw(st.booleans()) and "t" in axes else ()
    dims[0] = (*dims[0], *(d for d in replicated_part if d.axis != "t"))
    return Layout(tuple(dims), tuple(d for d in replicated_part if d.axis == "t"))


def some_points(layout, count=20):
    return [tuple(map(random.randrange, layout.shape)) for _ in range(count)]  # of compositions, too many to list


def element_of(layout, thread, register, ranges=None):
    """The element that `register` of `thread` holds."""
    radix = MixedRadix(ranges)
    extents = {axis: layout.extent(axis) for axis in ("t", "r")}
    source = {a: radix.below(radix.of(e), extents[a]) for a, e in (("t", thread), ("r", register))}
    found = []
    for digits in layout.dims:
        total, weight = Digits(), 1
        for digit in reversed(digits):
            top = digit.stride * digit.size >= extents[digit.axis]
            part = radix.quotient(source[digit.axis], digit.stride, None if top else digit.size)
            total += radix.below(part, digit.size).scaled(weight)
            weight *= digit.size
        found.append(total.expr())
    return tuple(found)


@settings(max_examples=150)
@given(layouts(), st.booleans())
def test_places_and_elements_are_inverse(layout, known):
    ranges = Ranges().within(t, 0, layout.extent("t") - 1).within(r, 0, layout.extent("r") - 1) if known else None
    element = element_of(layout, t, r, ranges)
    register, thread = offset_of(layout, "r", element, ranges), offset_of(layout, "t", element, ranges)
    owner = owner_of(layout, t)
    held: dict[tuple[int, ...], int] = {}
    for a in range(layout.extent("t")):
        for b in range(layout.extent("r")):
            env = {t: a, r: b}
            index = tuple(evaluate(e, env) for e in element)
            place = layout.apply(index)
            first = owner is None or bool(evaluate(owner, env))
            assert place["r"] == b and first == (place["t"] == a)
            assert evaluate(register, env) == b and evaluate(thread, env) == place["t"]
            held[index] = held.get(index, 0) + first
    assert held == dict.fromkeys(points(layout.shape), 1)
    if known:
        assert not any(n is t for n in walk_of(register)), register


def walk_of(e):
    from torch_tile.ir.node import walk

    return list(walk(e))


@settings(max_examples=100)
@given(layouts("m"), st.sampled_from([(0, 0, 0), (1, 1, 2), (2, 0, 2), (3, 3, 3), (2, 3, 3)]), st.data())
def test_memory_offsets_in_factored_form(layout, swizzle, data):
    layout = Layout(layout.dims, (), Swizzle(*swizzle))
    index = data.draw(st.sampled_from([(t % n, r % n, t // 4 % n, r) for n in (2, 8)]))
    chosen = [data.draw(st.sampled_from(index)) for _ in layout.dims]
    symbolic = offset_of(layout, "m", [e % n for e, n in zip(chosen, layout.shape, strict=True)])
    (first,) = some_points(layout, 1)
    plain = offset_of(layout, "m", [const(i, dt.int32) for i in first])
    assert evaluate(plain, {}) == layout.apply(first)["m"] < layout.extent("m")
    for _ in range(10):
        env = {t: random.randrange(128), r: random.randrange(64)}
        concrete = [evaluate(e, env) % n for e, n in zip(chosen, layout.shape, strict=True)]
        assert evaluate(symbolic, env) == layout.apply(concrete)["m"]


@settings(max_examples=100)
@given(layouts(), layouts())
def test_equal_means_that_elements_lie_alike(a, b):
    def table(x):
        return x.shape, [x.apply(p) for p in points(x.shape)], x.extent("t")

    assert (a == b) == (table(a) == table(b) and a.canonical.replicas == b.canonical.replicas)
    assert a == a.canonical and hash(a) == hash(a.canonical) and a.canonical.canonical == a
    assert P(str(a)) == a and str(P(str(a))) == str(a)


@settings(max_examples=60)
@given(layouts(), layouts())
def test_composition(outer, inner):
    if outer.rank != inner.rank:
        with pytest.raises(InternalError, match="do not compose"):
            outer * inner
        return
    both = outer * inner
    assert both.shape == tuple(a * b for a, b in zip(outer.shape, inner.shape, strict=True))
    for index in some_points(both):
        high, low = zip(*(divmod(i, n) for i, n in zip(index, inner.shape, strict=True)), strict=True)
        a, b = outer.apply(high), inner.apply(low)
        assert both.apply(index) == {axis: a[axis] * inner.extent(axis) + b[axis] for axis in "trm"}


@settings(max_examples=60)
@given(layouts(), st.data())
def test_drop(layout, data):
    dim = data.draw(st.integers(0, layout.rank - 1))
    left = layout.drop(dim)
    assert left.extent("t") == layout.extent("t")
    kept = [n for k, n in enumerate(layout.shape) if k != dim]
    assert left.shape == tuple(kept)
    registers = {left.apply(p)["r"] for p in points(kept)}
    assert registers == set(range(left.extent("r")))
    for index in some_points(layout):  # whoever held a part of a row holds its sum
        place, rest = layout.apply(index), tuple(i for k, i in enumerate(index) if k != dim)
        element = element_of(left, const(place["t"], dt.int32), const(left.apply(rest)["r"], dt.int32))
        assert tuple(evaluate(e, {}) for e in element) == rest


def table(layout, thread, register):
    """Which element each register of each thread holds, by `row(l, v)` and `col(l, v)`."""
    for a in range(layout.extent("t")):
        for v in range(layout.extent("r")):
            i, j = (evaluate(e, {}) for e in element_of(layout, const(a, dt.int32), const(v, dt.int32)))
            assert (i, j) == (thread(a, v), register(a, v)), (a, v)


TABLES = [  # the PTX tables: layout, row of value v in lane l, column
    (ACCUMULATOR, lambda l, v: l // 4 + 8 * (v // 2), lambda l, v: 2 * (l % 4) + v % 2),
    (
        P("[2:2r 8:4t | 2:4r 4:1t 2:1r]"),  # A, 16 bits
        lambda l, v: l // 4 + 8 * (v // 2 % 2),
        lambda l, v: 2 * (l % 4) + v % 2 + 8 * (v // 4),
    ),
    (P("[2:2r 4:1t 2:1r | 8:4t]"), lambda l, v: 2 * (l % 4) + v % 2 + 8 * (v // 2), lambda l, v: l // 4),  # B
    (
        P("[2:4r 8:4t | 2:8r 4:1t 4:1r]"),  # A, 8 bits, k32
        lambda l, v: l // 4 + 8 * (v // 4 % 2),
        lambda l, v: 4 * (l % 4) + v % 4 + 16 * (v // 8),
    ),
    (P("[2:4r 4:1t 4:1r | 8:4t]"), lambda l, v: 4 * (l % 4) + v % 4 + 16 * (v // 4), lambda l, v: l // 4),
    (P("[2:1r 8:4t | 2:2r 4:1t]"), lambda l, v: l // 4 + 8 * (v % 2), lambda l, v: l % 4 + 4 * (v // 2)),  # tf32 A
    (P("[2:1r 4:1t | 8:4t]"), lambda l, v: l % 4 + 4 * v, lambda l, v: l // 4),  # tf32 B
    (
        WGMMA,
        lambda l, v: 16 * (l // 32) + l % 32 // 4 + 8 * (v // 2 % 2),
        lambda l, v: 8 * (v // 4) + 2 * (l % 4) + v % 2,
    ),
    (
        P("[4:32t 2:2r 8:4t | 72:4r 4:1t 2:1r]"),  # 64 x 576, of MLA
        lambda l, v: 16 * (l // 32) + l % 32 // 4 + 8 * (v // 2 % 2),
        lambda l, v: 8 * (v // 4) + 2 * (l % 4) + v % 2,
    ),
]


@pytest.mark.parametrize(("layout", "row", "column"), TABLES, ids=lambda x: str(x) if isinstance(x, Layout) else "")
def test_the_tables_of_ptx(layout, row, column):
    table(layout, row, column)
    element = element_of(layout, t, r)
    known = Ranges().within(t, 0, layout.extent("t") - 1).within(r, 0, layout.extent("r") - 1)
    assert offset_of(layout, "r", element, known) is not None and repr(offset_of(layout, "r", element, known)) == "r"
    assert repr(offset_of(layout, "t", element, known)) == "t"
    assert P(str(layout)) == layout


def test_an_accumulator_is_a_16_bit_operand_in_place():
    tile = local(1, 8)  # k16 blocks of a row of A tiles
    a = Layout(tile.dims) * P("[4:32t 2:2r 8:4t | 2:4r 4:1t 2:1r]")
    assert a == WGMMA
    assert a != P("[4:32t 2:4r 8:4t | 4:8r 2:64t 4:1t 4:1r]")


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("span", [32, 64, 128])
@pytest.mark.parametrize("panels", [1, 3])
def test_shared_tiles_have_the_bytes_of_tma(bits, span, panels):
    rows, columns = random.choice([8, 12, 64]), panels * span * 8 // bits
    if panels * span % (2 * span) == 0 and span < 128:
        return
    layout = shared_tile((2, rows, columns), bits)
    padded = -(-rows // 8) * 8
    mask = {32: 0x10, 64: 0x30, 128: 0x70}[span]
    wide = max(s for s in (32, 64, 128) if columns * bits // 8 % s == 0)
    assert wide == span
    for s, i, j in random.choices(list(points((2, rows, columns))), k=200):
        byte = j * bits // 8
        plain = (s * padded * panels + byte // span * padded + i) * span + byte % span
        assert layout.apply((s, i, j))["m"] * bits // 8 == plain ^ ((plain >> 3) & mask)
    assert layout.vector_width() == 128 // bits
    assert P(str(layout)) == layout


def test_shared_tiles_are_free_of_conflicts():
    tile, plain = shared_tile((64, 64), 16), row_major((64, 64))
    column = [(lane % 16, lane // 16 * 8) for lane in range(32)]  # ldmatrix.x4: 16 rows, two chunks
    assert tile.conflicts(column, 16, 16) == 1 and plain.conflicts(column, 16, 16) == 8
    assert shared_tile((64, 8), 16) == row_major((64, 8))
    assert shared_tile((300,), 16) == row_major((300,))


def test_a_row_of_the_swizzled_tile_adds_constants():
    tile = shared_tile((128, 64), 16)

    def of(row):
        return offset_of(tile, "m", (t % 16 + row, t // 16 % 2 * 8))

    base = of(0)
    for row in range(16, 128, 16):
        assert repr(of(row)) == f"{base!r} + {row * 64}"


@settings(max_examples=150)
@given(
    st.lists(st.integers(1, 80), min_size=1, max_size=3),
    st.sampled_from([1, 32, 96, 128, 256, 384]),
    st.sampled_from([1, 2, 4, 8]),
)
def test_spread(shape, threads, vector):
    layout = spread(shape, threads, vector)
    assert layout.extent("t") == threads
    assert all(a >= b for a, b in zip(layout.shape, shape, strict=True))
    assert layout.extent("r") % vector == 0 and layout.vector_width() % vector == 0
    total = math.prod(layout.shape)
    replicas = math.prod(d.size for d in layout.canonical.replicas)
    assert total * replicas == threads * layout.extent("r")
    if shape[-1] % vector == 0 and shape[-1] // vector % threads == 0:
        assert layout.shape == tuple(shape) and not layout.canonical.replicas


def test_spread_examples():
    assert str(spread((64, 128), 128, 8)) == "[8:8r 8:16t | 16:1t 8:1r]"
    assert str(spread((64,), 128, 1)) == "[64:1t] x[2:64t]"
    assert str(spread((64, 576), 128, 8)) == "[4:72r 16:8t | 9:8r 8:1t 8:1r]"
    assert spread((), 128, 1) == replicated((), 128)


def test_replicas():
    layout = replicated((4, 8), 96)
    assert str(layout) == "[4:8r | 8:1r] x[96:1t]"
    assert layout.apply((3, 2)) == {"t": 0, "r": 26, "m": 0}
    assert repr(owner_of(layout, t)) == "t < 1"
    assert owner_of(WGMMA, t) is None
    assert repr(owner_of(WGMMA.drop(1), t)) == "t % 4 == 0"
    assert repr(owner_of(P("[8:1t] x[4:8t]"), t)) == "t < 8"


def test_vector_width():
    assert WGMMA.vector_width() == 2
    assert row_major((4, 24)).vector_width() == 24
    assert P("[64:1m | 64:64m]").vector_width() == 1
    assert P("[8:12m | 12:1m] ^(1,3,3)").vector_width() == 4
    assert P("[1]").vector_width() == 1


def test_permuted():
    assert WGMMA.permute((1, 0)).apply((5, 9)) == WGMMA.apply((9, 5))


@pytest.mark.parametrize("text", ["", "64", "[64]", "[64:1x]", "[64:1m] ^(3,3)", "[64:1m] y[1]", "[a|b]"])
def test_text_that_is_no_layout(text):
    from torch_tile.diagnostics.errors import TileError

    with pytest.raises(TileError, match="bad_layout"):
        P(text)
