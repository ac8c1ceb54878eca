# SPDX-License-Identifier: Apache-2.0
"""Pipelined loops compute what plain ones do, whatever they hold; and their schedules are the ones that are wanted."""

import pytest
import torch

import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.ir.expr import Binary
from torch_tile.ir.node import alike, walk
from torch_tile.ir.printer import to_text
from torch_tile.ir.stmt import Alloc, Do, For, If, LoopKind
from torch_tile.ir.verify import Stage, verify
from torch_tile.lowering import cuda_passes, lower
from torch_tile.lowering.pipelining.software_pipeline import pipeline_loops
from torch_tile.simulator.interpret import interpret
from torch_tile.simulator.tile.interpreter import evaluate
from torch_tile.tileop.copy.cp_async import AsyncCopy, AsyncLoop


def pipelined(kernel):
    """The program after the pass, and its schedule report."""
    build = Build(Target.of("cuda:sm_80"))
    program = pipeline_loops(kernel.program, build)
    verify(program, Stage.TILE)
    loops = [n for n in walk(program) if isinstance(n, For)]
    assert not any(f.kind is LoopKind.PIPELINED for f in loops)
    assert pipeline_loops(program, build) is program
    return program, build.remarks


def waits(program):
    """The counts of all waits, in order of the text."""
    return [n.call.options[0] for n in walk(program) if isinstance(n, Do) and n.call.name == "cp_async_wait"]


def early(program):
    """How many copies run ahead."""
    return len([n for n in walk(program) if isinstance(n, AsyncCopy)])


def same(kernel, *args):
    """Interpret the kernel before and after the pass; every tensor must come out the same."""
    program, notes = pipelined(kernel)
    before, after = ([a.clone() if isinstance(a, torch.Tensor) else a for a in args] for _ in range(2))
    evaluate(kernel.program, *before)
    evaluate(program, *after)
    for x, y in zip(before, after, strict=True):
        if isinstance(x, torch.Tensor):
            assert torch.equal(x, y), (x - y).abs().max()
    return program, notes


@pytest.mark.parametrize("stages", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_matrix_product(stages, steps):
    @T.prim_func
    def kernel(
        a: T.Tensor((16, 8 * 7), "float16"), b: T.Tensor((8 * 7, 24), "float16"), c: T.Tensor((16, 24)), n: T.int32
    ):
        with T.Kernel(1, threads=32) as _:
            a_tile = T.alloc_shared((16, 8), "float16")
            b_tile = T.alloc_shared((8, 24), "float16")
            total = T.alloc_fragment((16, 24), "float32")
            T.clear(total)
            for k in T.Pipelined(n, num_stages=stages):
                T.copy(a[0, k * 8], a_tile)
                T.copy(b[k * 8, 0], b_tile)
                T.gemm(a_tile, b_tile, total)
            T.copy(total, c)

    args = torch.randn(16, 56).half(), torch.randn(56, 24).half(), torch.zeros(16, 24)
    program, notes = same(kernel, *args, steps)
    assert not any(n.why_not for n in notes)
    if stages < 2:
        assert early(program) == 0
        return
    assert early(program) == 4  # two before the loop, two in it
    assert waits(program) == [stages - 2]
    tiles = {n.buffer.name: n.buffer.static_shape for n in walk(program) if isinstance(n, Alloc)}
    assert tiles["a_tile"] == (stages, 16, 8) and tiles["b_tile"] == (stages, 8, 24)


@pytest.mark.parametrize("stages", [2, 3])
def test_tiles_used_apart_are_waited_for_apart(stages):
    """As K and V of attention: V may still be on its way while K is used."""

    @T.prim_func
    def kernel(k: T.Tensor((40, 16)), v: T.Tensor((40, 16)), out: T.Tensor((8, 16)), first: T.int32, last: T.int32):
        with T.Kernel(1, threads=32) as _:
            k_tile = T.alloc_shared((8, 16), "float32")
            v_tile = T.alloc_shared((8, 16), "float32")
            s = T.alloc_fragment((8, 16), "float32")
            o = T.alloc_fragment((8, 16), "float32")
            T.clear(o)
            for step in T.Pipelined(first, last, num_stages=stages):
                row = step * 8
                T.copy(k[row, 0], k_tile)
                for i, j in T.Parallel(8, 16):
                    s[i, j] = k_tile[i, j] * 2.0
                for i, j in T.Parallel(8, 16):
                    s[i, j] = T.exp(-s[i, j] * s[i, j])
                T.copy(v[row, 0], v_tile)
                for i, j in T.Parallel(8, 16):
                    o[i, j] += s[i, j] * v_tile[i, j]
            T.copy(o, out)

    for first, last in ((0, 5), (1, 4), (2, 3), (3, 3), (4, 1)):
        program, _ = same(kernel, torch.randn(40, 16), torch.randn(40, 16), torch.zeros(8, 16), first, last)
    assert waits(program) == [2 * (stages - 2) + 1, 2 * (stages - 1)]


@pytest.mark.parametrize("stages", [2, 3])
def test_a_tile_is_waited_for_before_a_branch_changes_it(stages):
    """As attention clears values past the end of a sequence: the copy must not land on what was written."""

    @T.prim_func
    def kernel(a: T.Tensor((8 * 7, 64), "float16"), c: T.Tensor((8, 64)), n: T.int32):
        with T.Kernel(1, threads=32) as _:
            tile = T.alloc_shared((8, 64), "float16")
            total = T.alloc_fragment((8, 64), "float32")
            T.clear(total)
            for k in T.Pipelined(7, num_stages=stages):
                T.copy(a[k * 8, 0], tile)
                if k * 8 + 8 > n:
                    for i, j in T.Parallel(8, 64):
                        if k * 8 + i >= n:
                            tile[i, j] = 0
                for i, j in T.Parallel(8, 64):
                    total[i, j] += tile[i, j]
            T.copy(total, c)

    a, c = torch.randn(56, 64).half(), torch.zeros(8, 64)
    a[37:] = float("nan")
    program, _ = pipelined(kernel)
    flat = lower(kernel.program, cuda_passes(Build(Target.of("cuda:sm_80"))))
    assert early(program) and not interpret(flat, kernel.program, (a, c, 37))
    torch.testing.assert_close(c, torch.cat([a[:37], a.new_zeros(3, 64)]).float().view(5, 8, 64).sum(0))


def test_copies_in_branches_run_ahead_under_their_condition():
    @T.prim_func
    def kernel(x: T.Tensor((48, 16)), y: T.Tensor((48, 16)), which: T.Tensor((6,), "int32"), out: T.Tensor((8, 16))):
        with T.Kernel(1, threads=32) as _:
            tile = T.alloc_shared((8, 16), "float32")
            other = T.alloc_shared((8, 16), "float32")
            o = T.alloc_fragment((8, 16), "float32")
            T.clear(o)
            for step in T.Pipelined(6, num_stages=3):
                if which[step] > 0:
                    T.copy(x[step * 8, 0], tile)
                    for i, j in T.Parallel(8, 16):
                        o[i, j] += tile[i, j]
                    T.copy(y[step * 8, 0], other)
                    for i, j in T.Parallel(8, 16):
                        o[i, j] *= 0.5
                    for i, j in T.Parallel(8, 16):
                        o[i, j] += other[i, j]
                else:
                    page = which[step] + 5
                    T.copy(y[page * 8, 0], tile)
                    for i, j in T.Parallel(8, 16):
                        o[i, j] -= tile[i, j]
            T.copy(o, out)

    which = torch.randint(-5, 2, (6,), dtype=torch.int32)
    program, notes = same(kernel, torch.randn(48, 16), torch.randn(48, 16), which, torch.zeros(8, 16))
    assert early(program) == 6 and not any(n.why_not for n in notes)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("which", [(0, 0, 0, 0, 0, 0), (1, 0, 0, 0, 0, 1), (0, 1, 0, 1, 1, 0)])
def test_copies_that_no_branch_has_waited_for_are_there_before_their_tile_is_filled_again(stages, which):
    @T.prim_func
    def kernel(x: T.Tensor((48, 16)), which: T.Tensor((6,), "int32"), out: T.Tensor((8, 16))):
        with T.Kernel(1, threads=32) as _:
            tile, o = T.alloc_shared((8, 16), "float32"), T.alloc_fragment((8, 16), "float32")
            T.clear(o)
            for turn in T.serial(3):
                for step in T.Pipelined(turn * 2, num_stages=stages):
                    T.copy(x[step * 8, 0], tile)
                    for i, j in T.Parallel(8, 16):
                        o[i, j] *= 0.5
                    if which[step] > 0:
                        for i, j in T.Parallel(8, 16):
                            o[i, j] += tile[7 - i, j]
            T.copy(o, out)

    args = torch.randn(48, 16), torch.tensor(which, dtype=torch.int32), torch.zeros(8, 16)
    same(kernel, *args)
    flat = lower(kernel.program, cuda_passes(Build(Target.of("sm_80"))))
    findings = interpret(flat, kernel.program, args)
    assert not findings, findings.report()


def test_both_arms_fill_what_is_used_after_them():
    @T.prim_func
    def kernel(x: T.Tensor((48, 16)), y: T.Tensor((48, 16)), out: T.Tensor((8, 16)), n: T.int32):
        with T.Kernel(1, threads=32) as _:
            tile = T.alloc_shared((8, 16), "float32")
            o = T.alloc_fragment((8, 16), "float32")
            T.clear(o)
            for step in T.Pipelined(6, num_stages=2):
                if step < n:
                    T.copy(x[step * 8, 0], tile)
                else:
                    T.copy(y[step * 8, 0], tile)
                for i, j in T.Parallel(8, 16):
                    o[i, j] = o[i, j] * 0.5 + tile[i, j]
            T.copy(o, out)

    program, notes = same(kernel, torch.randn(48, 16), torch.randn(48, 16), torch.zeros(8, 16), 3)
    assert early(program) == 4 and not any(n.why_not for n in notes)


def test_addresses_from_a_table():
    """The table is read for the iteration that is loaded, the vars around it are recomputed."""

    @T.prim_func
    def kernel(x: T.Tensor((32, 16)), table: T.Tensor((9,), "int32"), out: T.Tensor((9 * 4, 16)), n: T.int32):
        with T.Kernel(1, threads=32) as _:
            tile = T.alloc_shared((4, 16), "float32")
            for step in T.Pipelined(n, num_stages=4):
                entry = table[step]
                page = entry % 8
                T.copy(x[page * 4, 0], tile)
                T.copy(tile, out[step * 4, 0])

    table = torch.randint(-100, 100, (9,), dtype=torch.int32)
    for n in (0, 1, 9):
        program, notes = same(kernel, torch.randn(32, 16), table, torch.zeros(36, 16), n)
    assert early(program) == 2 and not any(n.why_not for n in notes)


def read_early(program):
    """How many numbers a loop reads an iteration before the copies that they place."""
    return len([n for n in walk(program) if isinstance(n, Alloc) and n.buffer.name == "early"])


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize(
    "form, numbers", {"plain": 1, "shared": 1, "chain": 1, "two": 2, "branch": 0, "many": 0}.items()
)
def test_numbers_that_place_copies_are_read_before(form, numbers, stages):
    """A number that several copies need is read once; one under a condition, or one of too many, is not."""
    count = {"two": 2, "many": 17}.get(form, 1)

    @T.prim_func
    def kernel(
        x: T.Tensor((32, 16)), table: T.Tensor((180,), "int32"), out: T.Tensor((9 * 4, 16)), n: T.int32, m: T.int32
    ):
        with T.Kernel(1, threads=32) as _:
            tile = T.alloc_shared((4 * count, 16), "float32")
            other = T.alloc_shared((4, 16), "float32")
            for step in T.Pipelined(n, num_stages=stages):
                if form == "branch":
                    if step < m:
                        entry = table[step]
                        T.copy(x[entry * 4, 0], tile)
                    else:
                        T.copy(x[0, 0], tile)
                else:
                    for i in tuple(range(count)):
                        at = step if count == 1 else step * count + i
                        entry = table[table[at]] if form == "chain" else table[at]
                        T.copy(x[entry % 8 * 4, 0], tile[i * 4 : i * 4 + 4, :])
                T.copy(tile[0:4, :], out[step * 4, 0])
                if form == "shared":
                    again = table[step]
                    T.copy(x[again % 8 * 4, 0], other)
                    for i, j in T.Parallel(4, 16):
                        out[step * 4 + i, j] += other[i, j]

    table = torch.randint(0, 8, (180,), dtype=torch.int32)
    for n in (0, 1, 2, 9):
        program, _ = same(kernel, torch.randn(32, 16), table, torch.zeros(36, 16), n, n // 2)
    assert early(program) == (4 if form in ("shared", "branch") else 2 * count) and read_early(program) == numbers


def test_rows_gathered_by_a_loop():
    """A T.Parallel loop that only fills a tile runs ahead as a copy does, its condition with it."""

    @T.prim_func
    def kernel(x: T.Tensor((32, 16)), table: T.Tensor((9 * 4,), "int32"), out: T.Tensor((9 * 4, 16)), n: T.int32):
        with T.Kernel(1, threads=32) as _:
            tile = T.alloc_shared((4, 16), "float32")
            for step in T.Pipelined(9, num_stages=3):
                for i, j in T.Parallel(4, 16):
                    row = table[step * 4 + i] % 32
                    tile[i, j] = T.if_then_else(step * 4 + i < n, x[row, j], 0.0)
                T.copy(tile, out[step * 4, 0])

    table = torch.randint(0, 100, (36,), dtype=torch.int32)
    program, notes = same(kernel, torch.randn(32, 16), table, torch.zeros(36, 16), 30)
    assert len([n for n in walk(program) if isinstance(n, AsyncLoop)]) == 2 and not any(n.why_not for n in notes)


def test_tiles_used_outside_the_loop_keep_their_values():
    @T.prim_func
    def kernel(x: T.Tensor((32, 16)), out: T.Tensor((24, 16)), n: T.int32):
        with T.Kernel(1, threads=32) as _:
            tile = T.alloc_shared((4, 16), "float32")
            free = T.alloc_shared((4, 16), "float32")
            T.fill(tile, 3.0)
            T.copy(tile, out[20:24, 0:16])
            for step in T.Pipelined(n, num_stages=3):
                T.copy(x[step * 4, 0], tile)
                T.copy(x[step * 4, 0], free)
                for i, j in T.Parallel(4, 16):
                    out[i, j] += tile[i, j] * free[i, j]
            T.copy(tile, out[4:8, 0:16])
            T.fill(free, 1.0)
            T.copy(free, out[8:12, 0:16])

    for n in (0, 1, 2, 7):
        program, _ = same(kernel, torch.randn(32, 16), torch.zeros(24, 16), n)
    tiles = [n.buffer for n in walk(program) if isinstance(n, Alloc)]
    assert sorted((b.name, b.static_shape) for b in tiles) == [
        ("free", (3, 4, 16)), ("free", (4, 16)), ("tile", (3, 4, 16)), ("tile", (4, 16)),
    ]  # fmt: skip
    assert len([n for n in walk(program) if getattr(n, "op_name", "") == "copy"]) == 4  # one more: only `tile` is read


def test_nested_loops():
    @T.prim_func
    def kernel(x: T.Tensor((32, 16)), y: T.Tensor((32, 16)), out: T.Tensor((4, 16)), n: T.int32):
        with T.Kernel(1, threads=32) as _:
            outer = T.alloc_shared((4, 16), "float32")
            inner = T.alloc_shared((4, 16), "float32")
            o = T.alloc_fragment((4, 16), "float32")
            T.clear(o)
            for a in T.Pipelined(5, num_stages=2):
                T.copy(x[a * 4, 0], outer)
                for b in T.Pipelined(a, n, num_stages=3):
                    T.copy(y[b * 4, 0], inner)
                    for i, j in T.Parallel(4, 16):
                        o[i, j] += inner[i, j] * outer[i, j]
                T.copy(x[a * 4 + 4, 0], inner)
                for i, j in T.Parallel(4, 16):
                    o[i, j] -= inner[i, j]
            T.copy(o, out)

    for n in (0, 3, 6):
        program, notes = same(kernel, torch.randn(32, 16), torch.randn(32, 16), torch.zeros(4, 16), n)
    assert early(program) == 6 and not any(n.why_not for n in notes)


REFUSED = {
    "converts": "it converts float16 to float32 on its way",
    "writes": "the loop writes `x`",
    "depends": "where it reads depends on `place`, which the loop writes",
    "again": "`tile` is filled again after it was used",
    "carried": "`tile` holds values of an earlier iteration",
    "part": "`tile` holds values of an earlier iteration",
    "inner": "it is inside an inner loop",
    "leaves": "`break` or `continue` decides which copies are needed",
    "unread": "`tile` is not read in the loop",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_run_ahead_is_reported(what):
    @T.prim_func
    def kernel(x: T.Tensor((32, 16)), h: T.Tensor((32, 16), "float16"), out: T.Tensor((32, 16))):
        with T.Kernel(1, threads=32) as _:
            tile = T.alloc_shared((4, 16), "float32")
            place = T.alloc_var("int32", 0)
            T.clear(tile)
            for step in T.Pipelined(6, num_stages=2):
                if what == "converts":
                    T.copy(h[step * 4, 0], tile)
                elif what == "depends":
                    T.copy(x[place * 4, 0], tile)
                    place = (place + 3) % 8
                elif what == "carried":
                    T.copy(tile, out[step * 4, 0])
                    T.copy(x[step * 4, 0], tile)
                elif what == "part":
                    T.copy(x[step * 4 : step * 4 + 4, 0:8], tile[0:4, 0:8])
                elif what == "inner":
                    for half in T.serial(2):
                        T.copy(x[step * 4, 0], tile)
                        T.copy(tile, out[step * 4 + half, 0])
                else:
                    T.copy(x[step * 4, 0], tile)
                if what == "again":
                    T.copy(tile, out[step * 4, 0])
                    T.copy(x[step * 2, 0], tile)
                if what == "leaves" and step > 3:
                    break
                if what == "writes":
                    T.copy(tile, x[step * 4 + 4, 0])
                if what != "unread":
                    T.copy(tile, out[step * 4, 0])

    program, notes = same(kernel, torch.randn(32, 16), torch.randn(32, 16).half(), torch.zeros(32, 16))
    assert early(program) == 0
    assert REFUSED[what] in [n.why_not for n in notes]


def test_parts_of_a_tile_that_together_fill_it():
    @T.prim_func
    def kernel(x: T.Tensor((32, 16)), out: T.Tensor((32, 16))):
        with T.Kernel(1, threads=32) as _:
            tile = T.alloc_shared((4, 16), "float32")
            for step in T.Pipelined(6, num_stages=2):
                T.copy(x[step * 4 : step * 4 + 4, 8:16], tile[0:4, 0:8])
                T.copy(x[step * 4 : step * 4 + 4, 0:8], tile[0:4, 8:16])
                for i, j in T.Parallel(4, 16):
                    tile[i, j] = tile[i, j] + 1.0
                T.copy(tile, out[step * 4, 0])

    program, notes = same(kernel, torch.randn(32, 16), torch.zeros(32, 16))
    assert early(program) == 4 and not any(n.why_not for n in notes)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("trips", [1, 8])
def test_every_stage_traces_back_alike(tmp_path, trips, stages):
    @T.prim_func
    def kernel(
        A: T.Tensor((64, 32 * trips), "float16"), B: T.Tensor((32 * trips, 64), "float16"),
        C: T.Tensor((64, 64), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=128) as _:
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(trips, num_stages=stages):
                T.copy(A[0, k * 32], a)
                T.copy(B[k * 32, 0], b)
                T.gemm(a, b, c)
            T.copy(c, C)

    program = kernel.program
    for step, _ in cuda_passes(Build(Target.of("cuda:sm_80"))):
        program = step(program)
        text = to_text(program)
        path = tmp_path / f"{step.__name__}.py"
        path.write_text(text)
        space = {"T": T}
        exec(compile(text, str(path), "exec"), space)
        back = space["kernel"].program
        assert alike(back, program), f"after {step.__name__}:\n{text}"


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("bounded", [False, True])
def test_copies_ahead_wait_for_no_division_by_a_size(stages, bounded):
    """Blocks take rows in turns. Guards of copies compare products with what is divided at the loop's end."""
    rows, blocks = T.dynamic("rows, blocks")

    def end_of(rows, blocks, block):
        own = (T.max(rows - block, 0) + (blocks - 1)) // blocks
        return T.min(own, rows) if bounded else own

    @T.prim_func
    def kernel(a: T.Tensor((rows, 32), "float16"), c: T.Tensor((blocks, 32), "float32")):
        with T.Kernel(blocks, threads=32) as block:
            tile = T.alloc_shared((32,), "float16")
            total = T.alloc_fragment((32,), "float32")
            T.clear(total)
            for n in T.Pipelined(end_of(rows, blocks, block), num_stages=stages):
                T.copy(a[block + n * blocks, 0], tile)
                for i in T.Parallel(32):
                    total[i] += tile[i]
            T.copy(total, c[block, 0])

    for sizes in ((1, 1), (1, 3), (7, 3), (9, 3), (11, 4), (5, 8)):
        a, c = torch.randn(sizes[0], 32).half(), torch.full((sizes[1], 32), torch.nan)
        program, _ = same(kernel, a, c)
        evaluate(program, a, c)
        for block in range(sizes[1]):
            torch.testing.assert_close(c[block], a[block :: sizes[1]].float().sum(0))
    operators = [
        n.op for guard in walk(program) if isinstance(guard, If) for n in walk(guard.condition) if isinstance(n, Binary)
    ]
    assert "//" not in operators and ("*" in operators) == (stages > 1)
