# SPDX-License-Identifier: Apache-2.0
"""Vectorised loops: what they become, and that kernels still compute the same, inside and outside of their tensors."""

import random

import pytest
import torch

from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.intrinsics.memory import barrier
from torch_tile.ir import dtype as dt
from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Call, Expr, Load, Select, Var, binary, cast, const
from torch_tile.ir.layout import Digit, Layout, shared_tile
from torch_tile.ir.node import walk
from torch_tile.ir.scope_facts import Known
from torch_tile.ir.stmt import Alloc, Block, For, If, Kernel, Let, LoopKind, Program, Store
from torch_tile.ir.verify import Stage, verify
from torch_tile.lowering.common.flatten import flatten
from torch_tile.lowering.common.guard_bounds import guard_bounds
from torch_tile.lowering.common.simplify import simplify_program
from torch_tile.lowering.threads.vectorize import in_all_steps, vectorize
from torch_tile.simulator.simt.interpreter import run_threads
from torch_tile.tileop.base import aligned_run

BUILD = Build(Target("cuda", 90))
b, t = Var("b", dt.int32, "block"), Var("t", dt.int32, "thread")
n, m = Var("n", dt.int32, "dim"), Var("m", dt.int32, "dim", 8)


def number(x):
    return x if isinstance(x, Expr) else const(x, dt.int32)


def tensor(name, shape, kind="float16", scope="global", **more):
    return Buffer(name, tuple(map(number, shape)), dt.to_dtype(kind), scope, **more)


def load(buffer, *indices):
    return Load(buffer, tuple(map(number, indices)))


def put(buffer, *indices_and_value):
    *indices, value = indices_and_value
    return Store(buffer, tuple(map(number, indices)), value)


def vector(count, body, kind=LoopKind.VECTOR, name="v"):
    var = Var(name, dt.int32, "loop")
    made = body(var)
    return For(kind, (var,), (number(0),), (number(count),), Block(made if isinstance(made, tuple) else (made,)))


def program(params, *stmts, grid=1, threads=128):
    kernel = Kernel((number(grid),), (b,), (threads,), Block(stmts), thread=t)
    return Program("demo", tuple(params), (kernel,), (), ())


def widths(source):
    """Bytes of each wide copy, and whether vectorised loops are gone."""
    new = vectorize(source, BUILD)
    verify(new, Stage.THREAD)
    assert not any(isinstance(x, For) and x.kind is LoopKind.VECTOR for x in walk(new))
    return [x.options[0] for x in walk(new) if isinstance(x, Call) and x.name == "vector_copy"]


r = tensor("r", (16,), scope="local")
x, y, z = tensor("x", (n, 64)), tensor("y", (n, 64), "float32"), tensor("z", (n, 70))
by_eight, any_width = tensor("by_eight", (n, m)), tensor("any_width", (m, n))
swizzled = tensor("swizzled", (16, 64), scope="shared", layout=shared_tile((16, 64), 16))
padded = tensor("padded", (16, 72), scope="shared")
odd = tensor("odd", (16, 65), scope="shared")
row, column = b * 16 + t // 8, t % 8 * 8

WIDE = {
    "into registers": (lambda v: put(r, v, load(x, row, column + v)), [16]),
    "out of registers": (lambda v: put(x, row, column + v, load(r, v + 8)), [16]),
    "registers not aligned": (lambda v: put(x, row, column + v, load(r, v + 3)), [16]),
    "through registers": (lambda v: put(swizzled, t // 8, column + v, load(x, row, column + v)), [16, 16]),
    "rows of a known multiple": (lambda v: put(padded, t // 8, column + v, load(by_eight, row, column + v)), [16, 16]),
    "rows of any size": (lambda v: put(padded, t // 8, column + v, load(any_width, row, column + v)), [16]),
    "rows of 70": (lambda v: put(padded, t // 8, column + v, load(z, row, column + v)), [4, 16]),
    "an odd row in shared memory": (lambda v: put(odd, t // 8, column + v, load(x, row, column + v)), [16]),
    "two types": (lambda v: put(y, row, column + v, cast(load(x, row, column + v), "float32")), [16, 16]),
    "read twice": (lambda v: put(x, row, column + v, load(x, row, column + v) / load(x, row, column + v)), [16, 16]),
    "start not aligned": (lambda v: put(r, v, load(x, row, t % 8 * 4 + 2 + v)), [4]),
    "not neighbours": (lambda v: put(r, v, load(x, row, v * 2)), []),
    "down a column": (lambda v: put(r, v, load(x, row + v, column)), []),
    "backwards": (lambda v: put(r, v, load(x, row, column + 7 - v)), []),
    "its own neighbour": (lambda v: put(x, row, column + v, load(x, row, column + v + 1)), []),
    "split by shift": (lambda v: put(r, v, load(x, b * 16 + (t * 8 + v) // 64, (t * 8 + v) % 64)), [16]),
}  # fmt: skip


@pytest.mark.parametrize("case", WIDE)
def test_widths(case):
    body, wanted = WIDE[case]
    buffers = [Alloc(each) for each in (r, swizzled, padded, odd)]
    assert widths(program([x, y, z, by_eight, any_width], *buffers, vector(8, body))) == wanted


def test_chunks_of_the_widest_access():
    source = program(
        [y], Alloc(f := tensor("f", (8,), "float32", "local")), vector(8, lambda v: put(f, v, load(y, row, column + v)))
    )
    assert "for chunk in T.unroll(2):" in repr(vectorize(source, BUILD)) and widths(source) == [16]


def branch(condition):
    """A row of eight written where a condition holds."""
    body = vector(8, lambda v: If(condition(v), Block((put(x, row, column + v, load(r, v)),)), Block(())))
    return program([x, by_eight], Alloc(r), body)


def test_a_branch_that_all_steps_take():
    for condition in (lambda v: t < 64, lambda v: column + v < m, lambda v: m > column + v):
        source = branch(condition)
        (taken,) = vectorize(source, BUILD).kernels[0].body.stmts[1:]
        assert widths(source) == [16] and isinstance(taken, If) and not taken.otherwise.stmts


def test_a_branch_that_some_steps_may_take():
    """One question for all steps; where the answer is no, each step asks for itself."""
    new = vectorize(branch(lambda v: binary("and", b < 3, column + v < n)), BUILD)
    (taken,) = new.kernels[0].body.stmts[1:]
    assert repr(taken).splitlines()[0] == "if b < 3 and t % 8 * 8 + 7 < n:"
    (single,) = taken.otherwise.stmts
    assert single.kind is LoopKind.UNROLLED and isinstance(single.body.stmts[0], If)
    assert widths(branch(lambda v: column + v < n)) == [16]
    assert widths(branch(lambda v: load(r, v) > const(0, dt.float16))) == []
    assert widths(branch(lambda v: (column + v) * v < n)) == []


def test_names_of_indices_and_values():
    at, value = Var("at", dt.int32), Var("value", dt.float16)
    source = program([x], vector(8, lambda v: (
        Let(at, column + v), Let(value, load(x, row, at) * 2), put(x, row, at, value)
    )))  # fmt: skip
    assert widths(source) == [16, 16]


@pytest.mark.parametrize("multiple, wanted", [(8, [16]), (4, []), (1, [])])
def test_names_of_indices_outside_of_the_loop(multiple, wanted):
    """What a name stands for tells that the steps stay in one row of a tile of 64 columns."""
    base = Var("base", dt.int32)
    made = vector(8, lambda v: put(r, v, load(x, (base + v) // 64, (base + v) % 64)))
    assert widths(program([x], Alloc(r), Let(base, t * multiple), made)) == wanted


@pytest.mark.parametrize("align, wanted", [(None, [16]), (16, [16]), (48, [16]), (4, [4]), (2, [])])
def test_where_tensors_begin(align, wanted):
    z = tensor("z", (n, 64), align=align)
    assert widths(program([z], Alloc(r), vector(8, lambda v: put(r, v, load(z, row, column + v))))) == wanted


def test_names_of_what_is_read():
    """A row found in a table stands before the wide access to it, unless it differs from step to step."""
    table = tensor("table", (n,), "int32")
    for same in (True, False):
        at, value = Var("at", dt.int32), Var("value", dt.float16)
        source = program([x, table], Alloc(r), vector(8, lambda v, at=at, value=value, same=same: (
            Let(at, load(table, b if same else t + v)), Let(value, load(x, at, column + v)),
            put(r, v, value * 2),
        )))  # fmt: skip
        assert widths(source) == ([16] if same else [])
    total, old = tensor("total", (1,), "int32", "local"), Var("old", dt.int32)
    counted = program([x], Alloc(total), Alloc(r), vector(8, lambda v: (
        Let(old, load(total, 0)), put(r, v, load(x, row, column + v) * 2), put(total, 0, old + 1)
    )))  # fmt: skip
    (*_, loop) = [s for s in walk(vectorize(counted, BUILD)) if isinstance(s, For)]
    assert any(isinstance(s, Let) for s in loop.body.stmts)  # counts in every step


def test_what_a_condition_protects():
    """A choice may read outside of a shared tile, whose bounds no guard checks; global memory is guarded later."""

    def protected(buffer):
        return program([x], Alloc(swizzled), Alloc(r), vector(8, lambda v: put(
            r, v, Call("maximum", (choose(b, load(buffer, t // 8, column + v)), const(0, dt.float16)), dt.float16)
        )))  # fmt: skip

    def choose(condition, value):
        return Select(condition < 3, value, const(1, dt.float16))

    assert widths(protected(x)) == [16] and widths(protected(swizzled)) == []


def test_loops_of_other_lengths():
    assert widths(program([x], Alloc(r), vector(6, lambda v: put(r, v, load(x, row, column + v))))) == [4]
    assert widths(program([x], Alloc(r), vector(5, lambda v: put(r, v, load(x, row, column + v))))) == []
    unknown = vectorize(program([x], vector(n, lambda v: put(x, b, v, const(0, dt.float16)))), BUILD)
    assert "T.serial(n)" in repr(unknown)


def test_nothing_to_do():
    source = program([x], Alloc(r), vector(8, lambda v: put(r, v, load(x, row, column + v)), LoopKind.UNROLLED))
    assert vectorize(source, BUILD) is source


def test_aligned_run():
    def rows(size, stride):
        return tile(size, Layout(((Digit(16, stride, "m"),), (Digit(size, 1, "m"),))))

    def tile(size, layout):
        shape = tuple(const(n, dt.int32) for n in (16, size))
        return Buffer("tile", shape, dt.float16, "shared", layout=layout)

    assert aligned_run(tile(64, shared_tile((16, 64), 16))) == 8
    assert aligned_run(rows(64, 64)) == 64 and aligned_run(rows(64, 72)) == 8 and aligned_run(rows(64, 65)) == 1


def through_shared_memory(kind, width, rows):
    """dst = src + 1, by way of a swizzled tile."""
    src, dst = tensor("src", (rows, width), kind), tensor("dst", (rows, width), kind)
    tile = tensor("tile", (16, 64), kind, "shared", offset=0, layout=shared_tile((16, 64), src.dtype.bits))
    at = Var("at", dt.int32, "loop")
    line, column = b * 16 + t // 8, at * 64 + t % 8 * 8
    one = const(1, src.dtype)
    body = Block((
        vector(8, lambda v: put(tile, t // 8, t % 8 * 8 + v, load(src, line, column + v))),
        barrier(),
        vector(8, lambda v: put(dst, line, column + v, load(tile, t // 8, t % 8 * 8 + v) + one)),
        barrier(),
    ))  # fmt: skip
    columns = For(LoopKind.SERIAL, (at,), (number(0),), (number(-(-width // 64)),), body)
    return program([src, dst], Alloc(tile), columns, grid=(rows + 15) // 16)


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "int8"])
def test_same_values_inside_and_nothing_outside(kind, seed):
    """All widths and ragged ends, in the interpreter of threads, which sees whoever leaves a tensor."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(6):
        height, rows = random.randrange(1, 40), Var("rows", dt.int32, "dim")
        by_two, by_eight = random.randrange(1, 30) * 2, random.randrange(1, 16) * 8
        width = random.choice([64, 128, random.randrange(1, 130), by_two, by_eight])
        flat = flatten(simplify_program(guard_bounds(vectorize(through_shared_memory(kind, width, rows), BUILD))))
        verify(flat, Stage.FLAT)
        given = torch.randint(-60, 60, (height, width), generator=generator).to(dt.to_dtype(kind).as_torch())
        got = torch.full_like(given, 77)
        ids = dict(zip(flat.params, (given, got), strict=True))
        findings = run_threads(flat, ids, {rows: height})
        assert not findings, findings
        assert torch.equal(got, given + 1), (height, width)


v, t_vector_conditions, n_vector_conditions = (
    Var("v", dt.int32, "loop"),
    Var("t", dt.int32, "thread"),
    Var("n", dt.int32, "dim", 4),
)
COUNT = 4


def known():
    found = Known()
    found.ranges = found.ranges.loop(t_vector_conditions, 0, 16).loop(v, 0, COUNT)
    return found


def random_term():
    left = (
        t_vector_conditions * random.choice([1, 2, 4, 4, 4])
        + v * random.choice([-2, -1, 0, 1, 1, 1, 3])
        + random.choice([0, 0, 4, 1, -3])
    )
    right = random.choice([n_vector_conditions, n_vector_conditions + 1, const(random.randrange(40), dt.int32)])
    return binary(random.choice(["<", "<=", ">", ">="]), *random.sample([left, right], 2))


def test_random_conditions():
    understood = alike = 0
    while understood < 200 or alike < 10:
        condition = random_term()
        if random.random() < 0.3:
            condition = binary("and", condition, random_term())
        found = in_all_steps(condition, v, COUNT, known())
        if found is None:
            continue
        understood += 1
        alike += found[1]
        for _ in range(20):
            env = {t_vector_conditions: random.randrange(16), n_vector_conditions: 4 * random.randrange(10)}
            steps = [bool(evaluate(condition, {**env, v: step})) for step in range(COUNT)]
            assert bool(evaluate(found[0], env)) == all(steps), condition
            assert not found[1] or all(steps) or not any(steps), condition


def test_not_understood():
    for condition in (
        v * v < n_vector_conditions,
        binary("==", v, t_vector_conditions),
        binary("or", v < n_vector_conditions, t_vector_conditions < n_vector_conditions),
        v // 2 < n_vector_conditions,
    ):
        assert in_all_steps(condition, v, COUNT, known()) is None
