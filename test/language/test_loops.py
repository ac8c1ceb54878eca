# SPDX-License-Identifier: Apache-2.0
"""Blocks that take tile after tile: each tile is taken once, whatever the sizes."""

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import For, LoopKind


def loops(body):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), n: T.int32):
        with T.Kernel(1) as _:
            body(A, n)

    return [node for node in walk(kernel.program) if isinstance(node, For)]


def test_kinds_and_bounds():
    @T.macro
    def body(A, n):
        for i in T.serial(3):
            A[i] = 1.0
        for i in T.Serial(1, n, 2):
            A[i] = 1.0
        for i in T.unroll(2, 4, step=1, explicit=True):
            A[i] = 1.0
        for i in T.vectorized(8):
            A[i] = 1.0
        for i in range(n):
            A[i] = 1.0
        for i in T.unroll(8, unroll_factor=2):
            A[i] = 1.0

    found = loops(body)
    assert [f.factor for f in found] == [0, 0, 0, 0, 0, 2]
    assert [(f.kind, repr(f.starts[0]), repr(f.stops[0]), f.step) for f in found] == [
        (LoopKind.SERIAL, "0", "3", 1), (LoopKind.SERIAL, "1", "n", 2), (LoopKind.UNROLLED, "2", "4", 1),
        (LoopKind.VECTOR, "0", "8", 1), (LoopKind.SERIAL, "0", "n", 1),
        (LoopKind.SERIAL, "0", "8", 1),
    ]  # fmt: skip


def test_parallel_nests():
    @T.macro
    def body(A, n):
        for i, j, k in T.Parallel(2, n, 4, coalesced_width=2):
            A[i * 16 + j * 4 + k] = 1.0
        for index in T.Parallel(2, 3):
            A[index[0] * 3 + index[1]] = 1.0
        for (i,) in T.Parallel(5):
            A[i] = 1.0

    found = loops(body)
    assert [len(f.vars) for f in found] == [3, 2, 1] and all(f.kind is LoopKind.PARALLEL for f in found)
    assert [v.name for v in found[0].vars] == ["i", "j", "k"]


def test_pipelines_keep_their_schedule():
    @T.macro
    def body(A, n):
        for i in T.Pipelined(n, num_stages=3):
            A[i] = 1.0
        for i in T.Pipelined(1, n, num_stages=2, order=[1, 0], stage=[0, 1]):
            A[i] = 1.0

    first, second = loops(body)
    assert (first.kind, first.stages, first.order, first.stage) == (LoopKind.PIPELINED, 3, (), ())
    assert (second.stages, second.order, second.stage, repr(second.starts[0])) == (2, (1, 0), (0, 1), "1")


def test_grids_are_nested_loops_of_the_device():
    @T.macro
    def body(A, n):
        for i, j in T.grid(48, n):
            A[i * n + j] = 1.0
        for i in T.grid(4):
            A[i] = 1.0

    outer, inner, single = loops(body)
    assert all(loop.kind is LoopKind.SERIAL and len(loop.vars) == 1 for loop in (outer, inner, single))
    assert [v.name for v in (*outer.vars, *inner.vars)] == ["i", "j"]
    assert [repr(loop.stops[0]) for loop in (outer, inner, single)] == ["48", "n", "4"]


@pytest.mark.parametrize("m", [0, 1, 5, 48])
def test_grids_run(way, m):
    @T.prim_func
    def kernel(A: T.Tensor((48, 6), "int32"), m: T.int32):
        with T.Kernel(1, threads=32) as _:
            for at in T.grid(m, 3, 2):
                i, j, k = at
                if i == 2:
                    continue
                A[i, j * 2 + k] = i * 100 + j * 10 + k

    a = torch.full((48, 6), -1, dtype=torch.int32)
    way(kernel, a, m)
    want = torch.full((48, 6), -1, dtype=torch.int32)
    for i in (i for i in range(m) if i != 2):
        want[i] = i * 100 + torch.tensor([0, 1, 10, 11, 20, 21])
    assert torch.equal(a, want)


def test_a_grid_is_left_as_one_loop_or_not_at_all():
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((4, 4), "int32")):
            with T.Kernel(1) as _:
                for i, j in T.grid(4, 4):
                    if A[i, j] > 0:
                        break

    assert caught.value.code == "break_of_nest"

    @T.prim_func
    def single(A: T.Tensor((4,), "int32")):
        with T.Kernel(1) as _:
            for i in T.grid(4):
                if A[i] > 0:
                    break


WRONG = {
    "serial of a float": (lambda n: T.serial(2.5), "bad_loop_range"),
    "parallel of nothing": (lambda n: T.Parallel(), "bad_argument"),
    "parallel of a float": (lambda n: T.Parallel(2, 1.5), "bad_loop_range"),
    "parallel of a float expression": (lambda n: T.Parallel(n * 0.5), "bad_loop_range"),
    "unrolled never": (lambda n: T.unroll(4, unroll_factor=0), "bad_argument"),
    "unrolled by a half": (lambda n: T.unroll(4, unroll_factor=0.5), "bad_argument"),
    "step zero": (lambda n: T.serial(0, 4, 0), "bad_argument"),
    "step of an expression": (lambda n: T.serial(0, 4, n), "bad_argument"),
    "half a stage": (lambda n: T.Pipelined(4, num_stages=1.5), "bad_argument"),
    "a grid of nothing": (lambda n: T.grid(), "bad_argument"),
    "a grid of a float": (lambda n: T.grid(n, 2.5), "bad_loop_range"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_loops(name):
    make, code = WRONG[name]

    @T.macro
    def body(A, n):
        for _ in make(n):
            A[0] = 1.0

    with pytest.raises(TileError) as caught:
        loops(body)
    assert caught.value.code == code


def counted(sizes, blocks, group):
    """How often each tile of a domain of known sizes is taken, and of one of sizes known at run time only."""
    a, b, c = (*sizes, 1, 1)[:3]

    @T.prim_func
    def known(count: T.Tensor((a, b, c), "int32")):
        with T.Kernel(blocks) as block:
            for x, y, z in T.Persistent([a, b, c], blocks, block, group_size=group):
                T.atomic_add(count[x, y, z], 1)

    m, n, k = T.dynamic("m, n, k")

    @T.prim_func
    def unknown(count: T.Tensor((m, n, k), "int32")):
        with T.Kernel(blocks) as block:
            for x, y, z in T.Persistent((m, n, k), blocks, block, group):
                T.atomic_add(count[x, y, z], 1)

    found = []
    for program in (known, unknown):
        found.append(torch.zeros(a, b, c, dtype=torch.int32))
        torch_tile.compile(program, target="cpu")(found[-1])
    return found


@pytest.mark.parametrize(
    ("sizes", "blocks", "group"),
    [((5, 7), 3, 2), ((4, 8), 5, 8), ((3, 9), 40, 4), ((2, 3, 10), 4, 4), ((1, 1, 1), 2, 8), ((6, 3, 1), 7, 1)],
)
def test_each_tile_once(sizes, blocks, group):
    for count in counted(sizes, blocks, group):
        assert count.eq(1).all()


def test_panels_come_one_after_the_other():
    @T.prim_func
    def kernel(order: T.Tensor((3, 5), "int32")):
        with T.Kernel(1) as block:
            turn = T.alloc_var("int32", 0)
            for x, y in T.Persistent([3, 5], 1, block, group_size=2):
                order[x, y] = turn
                turn += 1

    order = torch.zeros(3, 5, dtype=torch.int32)
    torch_tile.compile(kernel, target="cpu")(order)
    assert order.tolist() == [[0, 1, 6, 7, 12], [2, 3, 8, 9, 13], [4, 5, 10, 11, 14]]


def test_one_dimension_and_no_tiles():
    n = T.dynamic("n")

    @T.prim_func
    def kernel(count: T.Tensor((n,), "int32")):
        with T.Kernel(4) as block:
            for tile in T.Persistent([n], 4, block):
                count[tile] = count[tile] + 1 + tile

    made = torch_tile.compile(kernel, target="cpu")
    for size in (0, 1, 11):
        count = torch.zeros(size, dtype=torch.int32)
        made(count)
        assert count.tolist() == [1 + i for i in range(size)]


def test_products_by_roles():
    """A plain persistent product: a warp copies the next tile's operands while results of the last one leave."""
    m, (n, k) = T.dynamic("m"), T.dynamic("n, k", multiple_of=8)

    @T.prim_func
    def kernel(A: T.Tensor((m, k), "float16"), B: T.Tensor((n, k), "float16"), C: T.Tensor((m, n), "float16")):
        with T.Kernel(3, threads=128) as block:
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            for x, y in T.Persistent([T.ceildiv(m, 64), T.ceildiv(n, 64)], 3, block, group_size=2):
                T.clear(c)
                for step in T.Pipelined(T.ceildiv(k, 64), num_stages=2):
                    T.copy(A[x * 64, step * 64], a)
                    T.copy(B[y * 64, step * 64], b)
                    T.gemm(a, b, c, transpose_B=True)
                T.copy(c, C[x * 64, y * 64])

    made = torch_tile.compile(kernel, target="cuda:sm_90a")
    assert "a warp of its own" in str(made.schedule) and not made.cubin.warnings
    x, y = (torch.randint(-3, 4, shape).half() for shape in ((200, 136), (264, 136)))
    out = torch.full((200, 264), torch.nan, dtype=torch.float16)
    findings = made.interpret(x, y, out)
    assert not findings, findings.report()
    assert torch.equal(out, x @ y.t())


WRONG_persistent = {
    "no domain": lambda block: T.Persistent([], 4, block),
    "a number": lambda block: T.Persistent(8, 4, block),
    "half a tile": lambda block: T.Persistent([2.5], 4, block),
    "panels of nothing": lambda block: T.Persistent([8], 4, block, group_size=0),
}


@pytest.mark.parametrize("make", WRONG_persistent.values(), ids=WRONG_persistent)
def test_wrong_domains(make):
    with pytest.raises(TileError, match=r"T\.Persistent"):

        @T.prim_func
        def kernel(A: T.Tensor((8,), "int32")):
            with T.Kernel(4) as block:
                for _ in make(block):
                    A[0] = 1


@pytest.mark.parametrize(
    ("sizes", "workers", "panel", "column_major", "cluster"),
    [
        ((5, 7), 3, 1, True, 1), ((4, 9), 5, 4, True, 1), ((7, 3), 2, 2, False, 1), ((5, 4), 6, 3, True, 2),
        ((1, 1), 4, 8, True, 1),
    ],
)  # fmt: skip
def test_a_scheduler_takes_each_tile_once(sizes, workers, panel, column_major, cluster, way):
    """In a loop as long as there are tiles, and by their numbers; turns are counted."""
    m, n = sizes
    rows = -(-m // cluster)
    most = -(-rows * n // (workers // cluster))

    @T.prim_func
    def kernel(
        count: T.Tensor((rows, n), "int32"), turns: T.Tensor((rows, n), "int32"), again: T.Tensor((rows, n), "int32")
    ):
        with T.Kernel(workers, threads=32) as block:
            tiles = T.PersistentTileScheduler(
                "tiles", m, n, swizzle_size=panel, column_major=column_major, cluster_size=cluster
            )
            tiles.init(block // cluster)
            while tiles.valid():
                bm, bn = tiles.m_idx[0], tiles.n_idx[0]
                T.atomic_add(count[bm, bn], 1)
                T.atomic_max(turns[bm, bn], tiles.current_iter[0])
                tiles.next_tile()
            plain = T.PersistentTileScheduler(
                m, n, workers, swizzle_size=panel, column_major=column_major, cluster_size=cluster, stateful=False,
                name="plain",
            )  # fmt: skip
            for turn in T.serial(most * cluster):
                number = turn * workers + block
                if number < rows * n:
                    x, y = plain.coord(number)
                    T.atomic_add(again[x, y], 1)

    count, turns, again = (torch.zeros(rows, n, dtype=torch.int32) for _ in range(3))
    way(kernel, count, turns, again)
    assert count.eq(cluster).all() and again.eq(1).all() and turns.max() == most - 1


def test_a_persistent_product(way):
    """A matrix product in the spelling of TileLang's examples."""
    M, N, K, bm, bn, bk = 72, 56, 48, 32, 32, 16

    @T.prim_func
    def kernel(A: T.Tensor((M, K), "float16"), B: T.Tensor((K, N), "float16"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(4, threads=64) as block:
            a, b = T.alloc_shared((bm, bk), "float16"), T.alloc_shared((bk, bn), "float16")
            c = T.alloc_fragment((bm, bn), "float32")
            sched = T.PersistentTileScheduler(T.ceildiv(M, bm), T.ceildiv(N, bn), swizzle_size=2, name="sched")
            sched.init(block)
            while sched.valid():
                by, bx = sched.m_idx, sched.n_idx
                T.clear(c)
                for k in T.Pipelined(K // bk, num_stages=2):
                    T.copy(A[by * bm, k * bk], a)
                    T.copy(B[k * bk, bx * bn], b)
                    T.gemm(a, b, c)
                T.copy(c, C[by * bm, bx * bn])
                sched.next_tile()

    a, b, c = torch.randn(M, K).half(), torch.randn(K, N).half(), torch.full((M, N), torch.nan)
    way(kernel, a, b, c)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "use",
    [
        lambda: T.PersistentTileScheduler("s", 4, 4, swizzle_size=0),
        lambda: T.PersistentTileScheduler("s", 4, 4, cluster_size="2"),
        lambda: T.PersistentTileScheduler("s", 4, 4).m_idx[1],
        lambda: T.PersistentTileScheduler("s", 4),
        lambda: T.PersistentTileScheduler("s", 4, 4, name="t"),
    ],
)
def test_schedulers_that_cannot_be(use):
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((4,), "int32")):
            with T.Kernel(1):
                use()

    assert caught.value.code == "bad_argument"


@pytest.mark.parametrize("nested", [False, True])
def test_operations_of_all_threads_in_parallel_loops_run_one_by_one(way, nested):
    """Each iteration copies, multiplies and adds with all threads; the tile is the next one's as well."""

    @T.prim_func
    def kernel(A: T.Tensor((2, 3, 16, 16), "float16"), C: T.Tensor((2, 3, 16, 16), "float32")):
        with T.Kernel(1, threads=32):
            a = T.alloc_shared((16, 16), "float16")
            c = T.alloc_fragment((16, 16), "float32")
            count = T.alloc_var("int32", 0)
            if nested:
                for m in T.Parallel(2):
                    for n in T.Parallel(3):
                        T.copy(A[m, n, :, :], a)
                        T.gemm(a, a, c, clear_accum=True)
                        for i, j in T.Parallel(16, 16):
                            C[m, n, i, j] = c[i, j] + m
            else:
                for m, n in T.Parallel(2, 3):
                    T.copy(A[m, n, :, :], a)
                    T.gemm(a, a, c, clear_accum=(count < 100))
                    count += 1
                    for i, j in T.Parallel(16, 16):
                        C[m, n, i, j] = c[i, j] + m

    a, c = torch.randn(2, 3, 16, 16).half(), torch.zeros(2, 3, 16, 16)
    way(kernel, a, c)
    want = a.float() @ a.float() + torch.arange(2)[:, None, None, None]
    torch.testing.assert_close(c, want, rtol=1e-2, atol=1e-2)


def test_loop_break_is_break(way):
    """By its name as by T's; a helper of that name in the author's own file is called as ever."""
    from torch_tile.language import loop_break as leave

    @T.prim_func
    def kernel(A: T.Tensor((8,), "int32"), B: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=32):
            total = T.alloc_var("int32", 0)
            for i in T.serial(8):
                if A[i] < 0:
                    T.loop_break()
                total += A[i]
            B[0] = total
            i = T.alloc_var("int32", 0)
            while total > -1:
                if A[i] < 0:
                    leave()
                i += 1
            B[1] = i

    a, b = torch.tensor([1, 2, 3, -1, 5, 6, 7, 8], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    way(kernel, a, b)
    assert b.tolist() == [6, 3]
    with pytest.raises(TileError, match="stands in no loop"):
        T.loop_break()


def test_copies_and_fills_of_elements_in_parallel(way):
    """T.copy and T.fill of single elements inside T.Parallel are stores, one for each iteration."""

    @T.prim_func
    def kernel(A: T.Tensor((40, 24), "float32"), B: T.Tensor((40, 24), "float16"), C: T.Tensor((40, 24), "int32")):
        with T.Kernel(2, 2, threads=64) as (bx, by):
            for i, j in T.Parallel(32, 16):
                T.copy(A[bx * 32 + i, by * 16 + j], B[bx * 32 + i, by * 16 + j])
                T.fill(C[bx * 32 + i, by * 16 + j], i * 16 + j)

    a, b, c = torch.randn(40, 24), torch.zeros(40, 24).half(), torch.full((40, 24), -1, dtype=torch.int32)
    way(kernel, a, b, c)
    assert torch.equal(b, a.half())
    rows, columns = torch.arange(40)[:, None] % 32, torch.arange(24) % 16
    assert torch.equal(c, (rows * 16 + columns).int())


@pytest.mark.parametrize("start", [-5, 3, 9])
def test_while_by_its_name(start, way):
    """`with T.While(condition):` asks the condition before each turn."""

    @T.prim_func
    def kernel(A: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=32):
            state = T.alloc_var("int32", A[0])
            turns = T.alloc_var("int32", 0)
            with T.While(state < 7):
                state = state + 2
                turns = turns + 1
                if turns == 3:
                    T.loop_break()
            A[0] = state
            A[1] = turns

    expected, turns = start, 0
    while expected < 7 and turns < 3:
        expected, turns = expected + 2, turns + 1
    a = torch.tensor([start, 0], dtype=torch.int32)
    way(kernel, a)
    assert a.tolist() == [expected, turns]
