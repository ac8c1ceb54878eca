# SPDX-License-Identifier: Apache-2.0
"""Offsets of shared buffers: never two live buffers in one byte, memory of dead ones used again."""

import itertools
import random

import pytest

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.intrinsics.memory import cp_async
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address, Load, Var, const
from torch_tile.ir.layout import Digit, Layout, Swizzle
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Alloc, Block, For, Kernel, LoopKind, Program, Store
from torch_tile.kernels.library_jit import library_jit
from torch_tile.lowering.threads.allocate_shared import allocate_shared, lives_of, shared_size


def place(program):
    """Offsets by name, and the bytes of the first kernel."""
    build = Build(Target.of("cuda:sm_90a"))
    placed = allocate_shared(program, build)
    assert allocate_shared(placed, build) is placed
    found = {n.buffer.name: n.buffer.offset for n in walk(placed) if isinstance(n, Alloc)}
    used = {n.buffer for n in walk(placed) if isinstance(n, Load | Store) and n.buffer.scope == "shared"}
    assert used <= {n.buffer for n in walk(placed) if isinstance(n, Alloc)}
    return found, placed.kernels[0].shared_bytes


def test_memory_is_used_again():
    @T.prim_func
    def kernel(x: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32) as _:
            a = T.alloc_shared((640,), "float32")
            b = T.alloc_shared((400,), "float32")
            c = T.alloc_shared((320, 2), "float16")
            d = T.alloc_shared((32,), "float16")
            T.alloc_shared((1000,), "float32")
            a[0] = x[0]
            b[0] = a[0]
            c[0, 0] = T.cast(b[0], "float16")
            d[0] = c[0, 0]
            x[1] = T.cast(d[0], "float32")

    found, size = place(kernel.program)
    assert found == {"a": 0, "b": 2560, "c": 0, "d": 4224}, "small ones have bytes of their own"
    assert size == 4224 + 64


def test_what_other_blocks_read_is_alive_until_they_have_met():
    def kernel_of(conflicts):
        @T.prim_func
        def kernel(x: T.Tensor((64,), "float32")):
            with T.Kernel(2, threads=32, cluster_dims=2) as bx:
                lent = T.alloc_shared((512,), "float32")
                lent[0] = x[bx]
                T.cluster_sync()
                x[bx] = T.at_rank(lent[0], 1 - bx)
                before = T.alloc_shared((512,), "float32")
                before[0] = x[bx]
                x[bx + 2] = before[0]
                if conflicts:
                    T.cluster_sync()
                after = T.alloc_shared((512,), "float32")
                after[0] = x[bx]
                x[bx + 4] = after[0]

        return kernel.program

    assert place(kernel_of(True)) == ({"lent": 0, "before": 2048, "after": 0}, 4096)
    assert place(kernel_of(False)) == ({"lent": 0, "before": 2048, "after": 2048}, 4096)


def test_what_outlives_an_iteration_lives_through_the_loop():
    @T.prim_func
    def kernel(x: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32) as _:
            carried = T.alloc_shared((512,), "float32")
            late = T.alloc_shared((512,), "float32")
            for i in T.serial(4):
                one = T.alloc_shared((512,), "float32")
                two = T.alloc_shared((512,), "float32")
                one[0] = x[i]
                x[i] = one[0]
                two[0] = carried[0]
                x[i] = two[0]
                carried[0] = x[i]
            late[0] = 1.0

    found, size = place(kernel.program)
    assert found["one"] == found["two"] != found["carried"]  # inner allocations hold nothing from before
    assert found["late"] == 0
    assert size == 4096


def test_a_swizzled_tile_starts_where_its_pattern_does():
    layout = Layout(((Digit(8, 64, "m"),), (Digit(64, 1, "m"),)), swizzle=Swizzle(3, 3, 3))
    plain = Buffer("plain", (const(400, dt.int32),), dt.float32, "shared")
    tile = Buffer("tile", (const(8, dt.int32), const(64, dt.int32)), dt.float16, "shared", layout=layout)
    zero = const(0, dt.int32)
    body = Block((
        Alloc(plain), Alloc(tile),
        Store(plain, (zero,), const(0.0, dt.float32)), Store(tile, (zero, zero), const(0.0, dt.float16)),
        Store(plain, (zero,), const(0.0, dt.float32)),
    ))  # fmt: skip
    kernel = Kernel((const(1, dt.int32),), (Var("b", role="block"),), (32,), body)
    found, size = place(Program("made", (), (kernel,), (), ()))
    assert found == {"plain": 0, "tile": 2048} and size == 2048 + 1024


def test_random_lives(seed):
    """No byte is given to two buffers alive at once, and lives cover every access that a run could make."""
    rng = random.Random(seed)
    zero = const(0, dt.int32)
    for _ in range(30):
        buffers = [
            Buffer(f"b{n}", (const(rng.choice((1, 3, 64, 200, 1000)), dt.int32),), dt.float32, "shared")
            for n in range(rng.randint(1, 9))
        ]

        def body(depth, buffers=buffers):
            stmts = []
            for _ in range(rng.randint(1, 5)):
                if depth and rng.random() < 0.4:
                    var = Var("i", role="loop")
                    stmts.append(For(LoopKind.SERIAL, (var,), (zero,), (const(2, dt.int32),), body(depth - 1)))
                else:
                    stmts.append(Store(rng.choice(buffers), (zero,), const(0.0, dt.float32)))
            return Block(tuple(stmts))

        whole = Block((*(Alloc(b) for b in buffers), body(3)))
        kernel = Kernel((const(1, dt.int32),), (Var("b", role="block"),), (32,), whole)
        offsets, size = place(Program("made", (), (kernel,), (), ()))
        lives = lives_of(kernel)
        trace = _trace(whole)
        for n, a in enumerate(lives):
            start = offsets[a.buffer.name]
            assert start % 128 == 0 and start + shared_size(a.buffer) <= size
            for b in lives[n + 1 :]:
                apart = start + shared_size(a.buffer) <= offsets[b.buffer.name] or (
                    offsets[b.buffer.name] + shared_size(b.buffer) <= start
                )
                mixed = _interleave(trace, a.buffer, b.buffer)
                assert apart or not mixed


def _trace(block):
    """Buffers in the order in which a run touches them."""
    found = []
    for s in block.stmts:
        if isinstance(s, For):
            found += _trace(s.body) * int(s.stops[0].value)
        elif isinstance(s, Store):
            found.append(s.buffer)
    return found


def _interleave(trace, a, b):
    """Whether a run comes back to one of the two after the other."""
    seen = [x for x in trace if x is a or x is b]
    return sum(x is not y for x, y in itertools.pairwise(seen)) > 1


def test_a_first_value_reads_where_its_buffer_lies():
    @T.prim_func
    def kernel(x: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32) as _:
            a = T.alloc_shared((64,), "float32")
            a[0] = x[0]
            first = T.alloc_var("float32", a[0])
            first += 1.0
            x[1] = first

    assert place(kernel.program)[0]["a"] == 0


def test_mbarriers_have_bytes_of_their_own():
    @T.prim_func
    def kernel(x: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32) as _:
            first = T.alloc_barrier(1, 3)
            a = T.alloc_shared((1000,), "float32")
            b = T.alloc_shared((1000,), "float32")
            T.alloc_barrier(1)
            last = T.alloc_barrier(2)
            T.evaluate(T.call("mbarrier_arrive", T.address_of(first[0])))
            a[0] = x[0]
            x[0] = a[0]
            b[0] = x[0]
            T.evaluate(T.call("mbarrier_arrive", T.address_of(last[0])))

    found, size = place(kernel.program)
    assert found == {"a": 0, "b": 0, "first": 4000, "last": 4024}, "one that nobody uses is gone"
    assert size == 4032


@pytest.mark.parametrize("threads", [32, 1024])
def test_tiles_that_an_author_fills_by_bulk_copies_have_bytes_of_their_own(threads):
    """Their copies are ordered by mbarriers, not by barriers that insert_barriers could place.

    Tiles that bulk stores read take the place of earlier tiles, and give it to none. They do so only where more blocks
    fit on a multiprocessor then, so not in blocks of 1024 threads.
    """

    @T.prim_func
    def kernel(x: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=threads) as _:
            ready = T.alloc_barrier(1)
            before = T.alloc_shared((32, 32), "float32")
            a = T.alloc_shared((32, 32), "float32")
            after = T.alloc_shared((32, 64), "float32")
            c, late = T.alloc_shared((32, 32), "float32"), T.alloc_shared((32, 32), "float32")
            before[0, 0] = x[0, 0]
            x[0, 0] = before[0, 0]
            box = T.tensor_map(x, (64, 64), (64, 1), box=(32, 32), swizzle=128)
            T.evaluate(T.call("tma_load", T.address_of(a[0, 0]), box, T.address_of(ready[0]), 0, 0, options=("",)))
            x[0, 0] = a[0, 0]
            after[0, 0] = x[0, 0]
            x[0, 0] = after[0, 0]
            T.evaluate(T.call("tma_store", box, T.address_of(c[0, 0]), 0, 0, options=("",)))
            late[0, 0] = x[0, 0]
            x[0, 0] = late[0, 0]

    found, size = place(kernel.program)
    if threads == 32:
        assert found == {"after": 0, "before": 0, "a": 8192, "c": 0, "late": 4096, "ready": 12288} and size == 12296
    else:
        assert found == {"after": 0, "before": 0, "a": 8192, "c": 12288, "late": 0, "ready": 16384} and size == 16392


def test_tiles_of_bulk_stores_in_loops_are_alive_in_all_of_the_loop():
    """The next turn may begin while a store of this one still reads."""

    @T.prim_func
    def kernel(x: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=32) as _:
            box = T.tensor_map(x, (64, 64), (64, 1), box=(32, 32), swizzle=128)
            for i in T.serial(2):
                first, c = T.alloc_shared((32, 32), "float32"), T.alloc_shared((32, 32), "float32")
                first[0, 0] = x[0, 0]
                x[0, i] = first[0, 0]
                T.evaluate(T.call("tma_store", box, T.address_of(c[0, 0]), 0, 0, options=("",)))

    found, size = place(kernel.program)
    assert found["first"] != found["c"] and size == 8192


def test_roles_use_their_tiles_at_the_same_time():
    def offsets(apart):
        @T.prim_func
        def kernel(x: T.Tensor((64,), "float32")):
            with T.Kernel(1, threads=64) as _:
                a = T.alloc_shared((1000,), "float32")
                b = T.alloc_shared((1000,), "float32")
                own = T.alloc_shared((1000,), "float32")
                with T.role(0, 32):
                    a[0] = x[0]
                    x[0] = a[0]
                    own[0] = x[0]
                if apart:
                    x[1] = 0.0
                with T.role(32, 32):
                    b[0] = x[0]

        return place(kernel.program)[0]

    together = offsets(False)
    assert together["a"] == together["own"] != together["b"]
    assert len(set(offsets(True).values())) == 1


def test_what_nobody_reads_may_still_be_on_its_way():
    """Copies of a loop whose products are never made."""
    tiles = [Buffer(name, (const(1024, dt.int32),), dt.float32, "shared") for name in "abc"]
    source = Buffer("x", (const(1024, dt.int32),), dt.float32, "global")
    zero = const(0, dt.int32)
    copies = [cp_async(Address(t, (zero,)), Address(source, (zero,)), const(16, dt.int32), 16) for t in tiles]
    body = Block((*map(Alloc, tiles), *copies, Store(source, (zero,), Load(tiles[2], (zero,)))))
    kernel = Kernel((const(1, dt.int32),), (Var("b", dt.int32, "block"),), (32,), body)
    found, _ = place(Program("made", (source,), (kernel,), (), ()))
    assert sorted(found.values()) == [0, 4096, 8192]


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_measured_tilings_ask_for_the_bytes_of_bulk_copies(blocks):
    """96 KB have room for two blocks, and 64 KB for three. More than fit change nothing."""

    @library_jit
    def build(blocks):
        @T.prim_func
        def kernel(
            A: T.Tensor((64, 512), "float16"), B: T.Tensor((512, 64), "float16"), C: T.Tensor((64, 64), "float32")
        ):
            with T.Kernel(1, threads=128):
                T.annotate_min_blocks_per_sm(blocks)
                a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
                c, late = T.alloc_fragment((64, 64), "float32"), T.alloc_shared((64, 128), "float32")
                T.clear(c)
                for k in T.Pipelined(8, num_stages=4):
                    T.copy(A[0, k * 64], a)
                    T.copy(B[k * 64, 0], b)
                    T.gemm(a, b, c)
                T.copy(c, late[0:64, 0:64])
                for i, j in T.Parallel(64, 64):
                    C[i, j] = late[j, i]

        return kernel

    found = build.on(Target("cuda", 90))(blocks).lowered.kernels[0].shared_bytes
    assert (found > 96 * 1024) == (blocks < 3) and found > 64 * 1024


@pytest.mark.parametrize("turns", [0, 1])
def test_a_tile_that_is_loaded_and_not_read_has_a_place(turns):
    """Loads of a loop that never runs stay: a producer warp makes the first one ahead of it."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.clear(c)
            for _ in T.Pipelined(turns, num_stages=2):
                T.copy(B, b)
                T.gemm(a, b, c)
            T.copy(c, C)

    lowered = tilelang.compile(kernel, target="cuda:sm_90a").lowered
    bound = {n.buffer for n in walk(lowered) if isinstance(n, Alloc)}
    for node in walk(lowered):
        if isinstance(node, Address) and node.buffer.scope == "shared":
            assert node.buffer in bound, node.buffer.name
