# SPDX-License-Identifier: Apache-2.0
"""Barriers: enough of them, shown by running all threads together, and none too many."""

import itertools
import random
import sys
from pathlib import Path

import pytest
import torch
from mutation import removals

import torch_tile
import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import TileError
from torch_tile.hardware import Target
from torch_tile.intrinsics.memory import barrier, cp_async, cp_async_commit, cp_async_wait, warp_barrier
from torch_tile.intrinsics.wgmma import Descriptor, wgmma, wgmma_commit, wgmma_wait
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address, Binary, Call, Load, Var, const
from torch_tile.ir.node import walk
from torch_tile.ir.polynomial import structure
from torch_tile.ir.stmt import (
    Alloc,
    Block,
    Break,
    Continue,
    Do,
    For,
    If,
    Kernel,
    Let,
    LoopKind,
    Program,
    Role,
    Store,
    While,
)
from torch_tile.lowering import cuda_passes, lower
from torch_tile.lowering.sync.accesses import Hazards
from torch_tile.lowering.sync.insert_barriers import Walk, insert_barriers
from torch_tile.simulator.interpret import interpret

sys.path.insert(0, str(Path(__file__).parents[1]))
from sync_oracle import is_barrier, races

THREADS = 4
TX = Var("tx", role="thread")
ZERO = const(0.0, dt.float32)


def shared(name, *shape, offset=None):
    return Buffer(name, tuple(const(n, dt.int32) for n in shape), dt.float32, "shared", offset=offset)


def number(value):
    return const(value, dt.int32) if isinstance(value, int) else value


def put(buffer, *indices):
    return Store(buffer, tuple(map(number, indices)), ZERO)


REGISTER = Buffer("x", (const(1, dt.int32),), dt.float32, "local")
GLOBAL = Buffer("g", (const(4096, dt.int32),), dt.float32, "global")


def get(buffer, *indices):
    return Store(REGISTER, (const(0, dt.int32),), Load(buffer, tuple(map(number, indices))))


def fly(buffer, *indices):
    """Start an asynchronous copy of one element for each thread."""
    source = Address(GLOBAL, (TX,))
    return cp_async(Address(buffer, tuple(map(number, indices))), source, 4, 4)


def loop(trips, body, name="k", kind=LoopKind.SERIAL):
    var = Var(name, role="loop")
    stmts = body(var)
    return For(kind, (var,), (number(0),), (number(trips),), Block(tuple(stmts)))


def when(condition, then, otherwise=()):
    return If(condition, Block(tuple(then)), Block(tuple(otherwise)))


def program(*stmts, threads=THREADS):
    buffers = {n.buffer: n.buffer for s in stmts for n in walk(s) if hasattr(n, "buffer")}
    body = Block((*(Alloc(b) for b in buffers.values() if b.scope != "global"), *stmts))
    kernel = Kernel((number(1),), (Var("b", role="block"),), (threads,), body, thread=TX)
    return Program("made", (GLOBAL,), (kernel,), (), ())


def synchronised(made):
    """The program with barriers, checked to be enough, and not to change when looked at again."""
    done = insert_barriers(made)
    assert not races(done), done
    assert insert_barriers(done) is done
    return done


def barriers(done):
    return sum(map(is_barrier, walk(done)))


def neighbour(n=1):
    return (TX + n) % THREADS


# Straight code.


def test_what_a_neighbour_wrote():
    s = shared("s", THREADS)
    done = synchronised(program(put(s, TX), get(s, neighbour())))
    assert barriers(done) == 1


def test_own_elements_need_no_barrier():
    s = shared("s", 2 * THREADS, 8)
    own = [put(s, TX * 2 + 1, 3), get(s, TX * 2 + 1, 3), put(s, TX * 2, 5)]
    assert barriers(synchronised(program(*own))) == 0


def test_one_barrier_orders_many():
    a, b, c = (shared(n, THREADS) for n in "abc")
    stmts = [put(a, TX), put(b, TX), put(c, TX), get(c, neighbour()), get(a, neighbour()), get(b, neighbour(2))]
    assert barriers(synchronised(program(*stmts))) == 1


def test_a_barrier_of_the_author_counts():
    s = shared("s", THREADS)
    made = program(put(s, TX), barrier(), get(s, neighbour()))
    assert insert_barriers(made) is made


def test_reads_then_writes_and_writes_then_writes():
    s = shared("s", THREADS)
    assert barriers(synchronised(program(get(s, neighbour()), put(s, TX)))) == 1
    assert barriers(synchronised(program(put(s, neighbour()), put(s, TX)))) == 1
    assert barriers(synchronised(program(get(s, neighbour()), get(s, TX)))) == 0


def test_buffers_that_share_bytes():
    a, b, c = shared("a", 4, offset=0), shared("b", 4, offset=8), shared("c", 4, offset=16)
    assert barriers(synchronised(program(put(a, TX), put(b, TX)))) == 1
    assert barriers(synchronised(program(put(a, TX), put(c, TX)))) == 0
    assert barriers(synchronised(program(get(c, TX), put(a, TX), put(b, TX)))) == 1


def test_names_are_looked_through():
    s = shared("s", THREADS)
    mine, other = Var("mine"), Var("other")
    own = [Let(mine, TX + 0), put(s, mine), Let(other, mine + 0), get(s, other)]
    assert barriers(synchronised(program(*own))) == 0
    name = Var("next")
    assert barriers(synchronised(program(put(s, TX), Let(name, neighbour()), get(s, name)))) == 1


def test_one_thread_writes_all_read():
    s, t = shared("s", 2), shared("t", 2)
    made = program(when(TX == 0, [put(s, 0)]), when(TX == 0, [put(s, 0), put(t, 1)]), get(s, 0), get(t, 1))
    assert barriers(synchronised(made)) == 1


# Loops.


def test_across_iterations():
    s = shared("s", THREADS)
    done = synchronised(program(loop(5, lambda k: [put(s, TX), get(s, neighbour())])))
    assert barriers(done) == 2
    s = shared("s", 2, THREADS)
    done = synchronised(program(loop(5, lambda k: [put(s, k % 2, TX), get(s, k % 2, neighbour())])))
    assert barriers(done) == 1, "versions let one barrier do"


def test_a_hazard_with_what_was_before_the_loop_is_ordered_in_front_of_it():
    s = shared("s", THREADS)
    done = synchronised(program(put(s, TX), loop(5, lambda k: [get(s, neighbour())])))
    assert barriers(done) == 1 and any(map(is_barrier, done.kernels[0].body.stmts))


@pytest.mark.parametrize(("trips", "wanted"), [(1, 1), (2, 2)])
def test_a_single_iteration_has_none_after_it(trips, wanted):
    s = shared("s", THREADS)
    assert barriers(synchronised(program(loop(trips, lambda k: [put(s, TX), get(s, neighbour())])))) == wanted


def test_a_barrier_in_the_loop_serves_what_was_before_it_too():
    s, q = shared("s", 2, THREADS), shared("q", THREADS)
    done = synchronised(
        program(put(q, TX), loop(5, lambda k: [put(s, k % 2, TX), get(s, k % 2, neighbour()), get(q, neighbour())]))
    )
    assert barriers(done) == 1


def test_loops_of_one_tile_stay_whole():
    s = shared("s", 8, THREADS)
    done = synchronised(
        program(
            loop(8, lambda r: [put(s, r, TX)], "r", LoopKind.UNROLLED),
            loop(8, lambda r: [get(s, r, TX), put(s, r, TX)], "r", LoopKind.UNROLLED),
            loop(8, lambda r: [get(s, 7 - r, neighbour())], "r", LoopKind.UNROLLED),
        )
    )
    assert barriers(done) == 1 and any(map(is_barrier, done.kernels[0].body.stmts))


def test_the_start_of_a_loop_is_not_the_best_place_to_count_from():
    a, b = shared("a", THREADS), shared("b", THREADS)
    done = synchronised(program(loop(4, lambda k: [put(a, TX), get(b, neighbour()), get(a, neighbour()), put(b, TX)])))
    assert barriers(done) == 2


# Branches.


def test_a_guard_is_not_entered_by_a_barrier():
    s = shared("s", 2, THREADS)
    done = synchronised(
        program(loop(5, lambda k: [when(k + 1 < 5, [put(s, (k + 1) % 2, TX)]), get(s, k % 2, neighbour())]))
    )
    assert barriers(done) == 1 and not any(is_barrier(n) for f in walk(done) if isinstance(f, If) for n in walk(f))


def test_uniform_branches_may_have_barriers_of_their_own():
    s = shared("s", THREADS)
    done = synchronised(program(loop(4, lambda k: [when(k < 2, [put(s, TX), get(s, neighbour())])])))
    assert barriers(done) == 2


def test_what_a_rare_branch_leaves_is_ordered_in_it():
    s, t = shared("s", THREADS), shared("t", THREADS)
    body = [barrier(), get(t, TX), when(Var("n", role="param") < 1, [put(s, TX)]), get(s, neighbour())]
    done = insert_barriers(program(loop(4, lambda k: body)))
    branch = next(n for n in walk(done) if isinstance(n, If))
    assert is_barrier(branch.then.stmts[-1]) and barriers(done) == 2


def test_no_barrier_where_threads_part():
    s = shared("s", THREADS)
    with pytest.raises(TileError, match="divergent_hazard"):
        synchronised(program(when(TX < 2, [put(s, TX), get(s, neighbour())])))
    fine = program(put(s, TX), when(TX < 2, [get(s, neighbour())]))
    assert barriers(synchronised(fine)) == 1
    fine = program(when(TX < 2, [put(s, TX), get(s, TX)]))
    assert barriers(synchronised(fine)) == 0


# Iterations left early.


def test_what_was_done_before_a_break_is_ordered_after_the_loop():
    s = shared("s", THREADS)
    early = program(loop(4, lambda k: [put(s, TX), when(k >= 2, [Break()]), get(s, neighbour())]), get(s, neighbour(2)))
    assert barriers(synchronised(early)) == 3


def test_what_was_done_before_a_continue_meets_the_next_iteration():
    s = shared("s", 5, THREADS)

    def body(k):
        return [put(s, k, TX), when(k < 2, [Continue()]), get(s, k - 1, neighbour()), get(s, k - 2, neighbour())]

    assert barriers(synchronised(program(loop(5, body)))) == 1


def test_no_barrier_in_a_loop_that_threads_leave_one_by_one():
    s = shared("s", THREADS)
    parts = when(TX < 2, [Break()])
    assert barriers(synchronised(program(loop(4, lambda k: [put(s, TX), parts]), get(s, neighbour())))) == 1
    with pytest.raises(TileError, match="divergent_hazard"):
        synchronised(program(loop(4, lambda k: [parts, put(s, TX), get(s, neighbour())])))


# Asynchronous copies.


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_one_barrier_a_step_of_a_pipeline(stages):
    s = shared("s", stages, THREADS)
    start = loop(stages - 1, lambda p: [fly(s, p, TX), cp_async_commit()], "p", LoopKind.UNROLLED)

    def step(k):
        ahead = k + stages - 1
        more = when(ahead < 9, [fly(s, ahead % stages, TX)])
        return [cp_async_wait(stages - 2), more, cp_async_commit(), get(s, k % stages, neighbour())]

    done = synchronised(program(start, loop(9, step)))
    assert barriers(done) == 1
    body = next(n for n in walk(done) if isinstance(n, For) and n.kind is LoopKind.SERIAL).body
    assert is_barrier(body.stmts[1]), "between the wait and the next copies"


def test_two_waits_two_barriers():
    k_tile, v_tile = shared("k", 2, THREADS), shared("v", 2, THREADS)
    start = [fly(k_tile, 0, TX), cp_async_commit(), fly(v_tile, 0, TX), cp_async_commit()]

    def step(k):
        ahead = (k + 1) % 2
        more = [
            when(k + 1 < 6, [fly(k_tile, ahead, TX)]), cp_async_commit(),
            when(k + 1 < 6, [fly(v_tile, ahead, TX)]), cp_async_commit(),
        ]  # fmt: skip
        use = [get(k_tile, k % 2, neighbour()), cp_async_wait(2), get(v_tile, k % 2, neighbour())]
        return [cp_async_wait(1), *more, *use]

    assert barriers(synchronised(program(*start, loop(6, step)))) == 2


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("trips", [1, 2, 7])
@pytest.mark.parametrize("stages", [2, 3, 6, 9])
def test_a_pipeline_may_be_longer_than_its_loop(stages, trips, groups):
    tiles = [shared(f"s{n}", stages, THREADS) for n in range(groups)]

    def copies(step):
        some = [(tile, step % stages if trips > 1 else 0) for tile in tiles]
        return [x for t, at in some for x in (when(step < trips, [fly(t, at, TX)]), cp_async_commit())]

    def step(k):
        uses = [
            [cp_async_wait(groups * (stages - 1) - 1), get(tile, k % stages if trips > 1 else 0, neighbour())]
            for tile in tiles
        ]
        return [*uses[0][:1], *copies(k + stages - 1), uses[0][1], *[x for use in uses[1:] for x in use]]

    start = loop(stages - 1, copies, "p", LoopKind.UNROLLED)
    assert barriers(synchronised(program(start, loop(trips, step)))) == groups


def test_a_barrier_before_the_wait_does_not_count():
    s = shared("s", THREADS)
    made = program(fly(s, TX), cp_async_commit(), barrier(), cp_async_wait(0), get(s, neighbour()))
    assert barriers(synchronised(made)) == 2


@pytest.mark.parametrize("pending", [0, 1])
def test_a_barrier_before_the_wait_for_products_does_not_count(pending):
    """Other warpgroups still read the operands of theirs."""
    a, b, other = shared("a", 64, 8), shared("b", 8, 8), shared("other", 128)
    walks = Descriptor(32, 1, 1), Descriptor(32, 1, 1)
    start = [Address(x, (number(0), number(0))) for x in (a, b)]
    total = Address(Buffer("c", (number(4),), dt.float32, "local"), (number(0),))
    product = [wgmma(total, *start, 8, ("tf32", "tf32", "float32"), *walks), wgmma_commit()]
    more = [wgmma(total, start[1], start[1], 8, ("tf32", "tf32", "float32"), *walks), wgmma_commit()]
    made = program(
        *product, *(more if pending else ()), put(other, TX), get(other, (TX + 1) % 128), wgmma_wait(pending),
        put(a, TX // 8, TX % 8), threads=128,
    )  # fmt: skip
    done = insert_barriers(made)
    assert barriers(done) == 2, done


@pytest.mark.parametrize("versions", [1, 2, 3])
def test_a_product_reads_one_version_of_a_tile(versions):
    """Another warpgroup may still read the version before; with one version alone the next one waits for it."""
    a, b = shared("a", versions, 64, 8), shared("b", 8, 8)
    walks = Descriptor(32, 1, 1), Descriptor(32, 1, 1)
    total = Address(Buffer("c", (number(4),), dt.float32, "local"), (number(0),))

    def iteration(k):
        version = k % versions
        start = Address(a, (version, number(0), number(0))), Address(b, (number(0), number(0)))
        product = wgmma(total, *start, 8, ("tf32", "tf32", "float32"), *walks)
        return [put(a, version, TX // 8, TX % 8), product, wgmma_commit(), wgmma_wait(0)]

    done = insert_barriers(program(loop(9, iteration), threads=128))
    assert barriers(done) == (2 if versions == 1 else 1), done


def test_a_barrier_in_front_of_a_loop_of_products_has_its_fence():
    a, b = shared("a", 64, 8), shared("b", 8, 8)
    walks = Descriptor(32, 1, 1), Descriptor(32, 1, 1)
    total = Address(Buffer("c", (number(4),), dt.float32, "local"), (number(0),))
    start = [Address(x, (number(0), number(0))) for x in (a, b)]
    product = [wgmma(total, *start, 8, ("tf32", "tf32", "float32"), *walks), wgmma_commit(), wgmma_wait(0)]
    made = program(put(a, TX // 8, TX % 8), loop(3, lambda k: product), threads=128)
    done = insert_barriers(made)
    calls = [s.call.name for s in done.kernels[0].body.stmts if isinstance(s, Do)]
    assert calls == ["fence_proxy_async", "barrier"], done


# Everything at once.


def random_program(rng):
    buffers = [shared("a", THREADS), shared("b", 2, THREADS), shared("c", THREADS)]

    def access(k):
        buffer = rng.choice(buffers)
        place = rng.choice([TX, TX, neighbour(), Binary("^", TX, number(1))])
        version = [number(0) if k is None else (k + rng.randint(0, 1)) % 2] if len(buffer.shape) == 2 else []
        return rng.choice([put, get])(buffer, *version, place)

    def block(depth, k, count):
        made = []
        for _ in range(count):
            what = rng.random()
            if depth and what < 0.25:
                made.append(loop(3, lambda v: block(depth - 1, v, rng.randint(1, 4)), f"k{depth}"))
            elif depth and what < 0.35 and k is not None:
                made.append(when(k < 2, block(0, k, 1)))
            else:
                made.append(access(k))
        return made

    return program(*block(2, None, rng.randint(2, 4)))


def test_random_programs_are_ordered_with_no_barrier_to_spare(seed):
    """Without any of them there is a race."""
    rng = random.Random(seed)
    programs = [synchronised(random_program(rng)) for _ in range(150)]
    found = [(done, n) for done in programs for n in walk(done) if is_barrier(n)]
    spare = sum(not races(done, without=n) for done, n in found)
    assert spare <= len(found) // 8  # runs of three iterations do not show every hazard that is there


def test_straight_code_and_single_loops_have_the_least_that_is_enough(seed):
    """Every choice of fewer barriers leaves a race."""
    rng = random.Random(seed)
    buffers = [shared("a", THREADS), shared("b", THREADS), shared("c", THREADS)]
    for _ in range(40):
        picks = [(rng.choice([put, get]), rng.choice(buffers), rng.choice([TX, neighbour()])) for _ in range(5)]
        body = [what(buffer, place) for what, buffer, place in picks[: rng.randint(2, 5)]]
        looped = rng.random() < 0.6

        def made(stmts, looped=looped):
            return program(loop(4, lambda k: stmts)) if looped else program(*stmts)

        count = barriers(synchronised(made(body)))
        for few in range(count):
            for places in itertools.combinations(range(len(body)), few):
                tried = [x for n, s in enumerate(body) for x in ([barrier(), s] if n in places else [s])]
                assert races(made(tried)), (body, few, places)


SHOWN = ("barrier", "named_barrier", "named_barrier_arrive", "fence_proxy_async", "mbarrier_arrive", "wgmma")


def lowered(kernel):
    return lower(kernel.program, cuda_passes(Build(Target.of("cuda:sm_90a"))))


def order(node):
    """What orders the threads of each role, repeated words left out."""
    calls = [n.call for n in walk(node) if isinstance(n, Do) and isinstance(n.call, Call) and n.call.name in SHOWN]
    words = [f"{c.name}{c.options if c.name.startswith('named') else ''}" for c in calls]
    return [w for n, w in enumerate(words) if n == 0 or words[n - 1] != w]


def roles(kernel):
    return [order(n) for n in walk(lowered(kernel)) if isinstance(n, Role)]


def exchange(prepare, own=lambda: None):
    """Two warpgroups turn a row round, each through a tile of its own."""

    @T.prim_func
    def kernel(A: T.Tensor((2, 128), "float32"), B: T.Tensor((2, 128), "float32")):
        with T.Kernel(1, threads=256) as _:
            tiles = T.alloc_shared((2, 128), "float32")
            prepare()
            for group in [0, 1]:
                with T.ws(group):
                    for i in T.Parallel(128):
                        tiles[group, i] = A[group, i]
                    own()
                    for i in T.Parallel(128):
                        B[group, i] = tiles[group, 127 - i]

    return kernel


def runs(kernel):
    x, y = torch.randn(2, 128), torch.full((2, 128), float("nan"))
    findings = interpret(lowered(kernel), kernel.program, (x, y))
    assert not findings.found, findings.report()
    assert torch.equal(y, x.flip(1))


def test_each_role_has_a_barrier_of_its_own():
    kernel = exchange(lambda: None)
    assert roles(kernel) == [["named_barrier(1, 128)"], ["named_barrier(2, 128)"]]
    runs(kernel)


def test_a_barrier_of_the_block_is_the_roles_inside_it():
    kernel = exchange(lambda: None, T.sync_threads)
    assert roles(kernel) == [["named_barrier(1, 128)"], ["named_barrier(2, 128)"]]
    runs(kernel)


def test_numbers_of_the_author_are_left_to_him():
    def prepare():
        T.sync_threads(1, 256)
        T.sync_threads(3, 256)

    kernel = exchange(prepare)
    assert roles(kernel) == [["named_barrier(2, 128)"], ["named_barrier(4, 128)"]]
    runs(kernel)


def test_a_named_barrier_orders_the_role_that_meets_there_besides_others():
    kernel = exchange(lambda: None, lambda: T.sync_threads(5, 256))
    assert roles(kernel) == [["named_barrier(5, 256)"], ["named_barrier(5, 256)"]]
    runs(kernel)


def handed_over(arrive, meet):
    """A warpgroup writes a tile by ordinary stores, another multiplies it."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=256) as _:
            a = T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            ready = T.alloc_barrier(128)
            with T.ws(1):
                T.copy(A, a)
                arrive(ready)
            with T.ws(0):
                T.clear(c)
                meet(ready)
                T.gemm(a, a, c)
                T.copy(c, C)

    return kernel


def after_a_fence(ready):
    T.fence_proxy_async()
    T.mbarrier_arrive(ready)


HANDED = {
    "mbarrier": (T.mbarrier_arrive, lambda b: T.mbarrier_wait_parity(b, 0), ["fence_proxy_async", "mbarrier_arrive"]),
    "by the author": (after_a_fence, lambda b: T.barrier_wait(b, 0), ["fence_proxy_async", "mbarrier_arrive"]),
    "named": (
        lambda b: T.named_barrier_arrive(7, 256), lambda b: T.sync_threads(7, 256),
        ["fence_proxy_async", "named_barrier_arrive(7, 256)"],
    ),
    "named, both wait": (
        lambda b: T.sync_threads(7, 256), lambda b: T.sync_threads(7, 256),
        ["fence_proxy_async", "named_barrier(7, 256)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HANDED)
def test_engines_are_shown_what_is_handed_over(name):
    arrive, meet, want = HANDED[name]
    kernel = handed_over(arrive, meet)
    assert roles(kernel)[0] == want
    x, y = torch.randn(64, 64).half(), torch.empty(64, 64)
    findings = interpret(lowered(kernel), kernel.program, (x, y))
    assert not findings.found, findings.report()
    torch.testing.assert_close(y, x.float() @ x.float(), rtol=1e-3, atol=1e-3)


def refilled(release, turns=4):
    """A warpgroup reads by ordinary loads what another one's bulk copies bring, and lets each tile go."""

    @T.prim_func
    def kernel(A: T.Tensor((turns * 64, 64), "float16"), C: T.Tensor((turns * 64, 64), "float16")):
        with T.Kernel(1, threads=256) as _:
            tile = T.alloc_shared((64, 64), "float16")
            full, empty = T.alloc_barrier(1), T.alloc_barrier([4 if release is by_warps else 128])
            with T.ws(1):
                for turn in T.serial(turns):
                    if release is by_number:
                        T.sync_threads(7, 256)
                    else:
                        T.mbarrier_wait_parity(empty, (turn + 1) % 2)
                    T.tma_copy(A[turn * 64, 0], tile, barrier=full[0])
                    if T.shuffle_elect(128):
                        T.mbarrier_arrive(full)
                if release is by_number:
                    T.sync_threads(7, 256)
            with T.ws(0):
                if release is by_number:
                    T.sync_threads(7, 256)
                for turn in T.serial(turns):
                    T.mbarrier_wait_parity(full, turn % 2)
                    T.copy(tile, C[turn * 64, 0])
                    release(empty)

    return kernel


@pytest.mark.parametrize("apart, met", [(64, 0), (96, 0), (32, 1), (48, 1)])
@pytest.mark.parametrize("across", [True, False])
def test_tiles_at_multiples_of_their_rows(apart, met, across):
    """64 threads write a row each, tile after tile, in an order that is no sum. No barrier of all is needed where a row
    of one tile is never a row of another thread of another tile, with barriers of warps or without.
    """
    rows, unknown = shared("rows", 512, 1), Var("n", role="block")

    def body(k):
        place = k * unknown % 3 * apart + TX
        return [*([warp_barrier()] if across else []), put(rows, place, 0), get(rows, place, 0)]

    done = insert_barriers(program(loop(3, body), threads=64))
    assert barriers(done) == met


def by_threads(empty):
    T.mbarrier_arrive(empty)


@T.macro
def by_warps(empty):
    T.sync_warp()
    if T.get_lane_idx() == 0:
        T.mbarrier_arrive(empty)


def by_author(empty):
    T.fence_proxy_async()
    T.mbarrier_arrive(empty)


def by_number(empty):
    T.sync_threads(7, 256)


@pytest.mark.parametrize("release", [by_threads, by_warps, by_author, by_number])
def test_what_threads_have_read_is_shown_to_copies_that_overwrite_it(release):
    kernel = refilled(release)
    flat = lowered(kernel)
    fences = [n for n in walk(flat) if isinstance(n, Call) and n.name == "fence_proxy_async"]
    assert len(fences) == 1
    x, y = torch.randn(256, 64).half(), torch.full((256, 64), torch.nan).half()
    findings = interpret(flat, kernel.program, (x, y))
    assert not findings.found, findings.report()
    assert torch.equal(x, y)
    (missing,) = (r.program for r in removals(flat) if r.name == "fence_proxy_async")
    assert {f.kind for f in interpret(missing, kernel.program, (x, y)).found.values()} == {"missing_fence"}


def rotated(own, turns=3):
    """A warpgroup writes rows that its threads then read in another order, behind an mbarrier at which all arrived."""

    @T.prim_func
    def kernel(A: T.Tensor((turns, 128), "float32"), C: T.Tensor((turns, 128), "float32")):
        with T.Kernel(1, threads=256) as _:
            tile = T.alloc_shared((2, 128), "float32")
            ready = T.alloc_barrier([128] * 2)
            with T.ws(0):
                for turn in T.serial(turns):
                    T.copy(A[turn, 0], tile[turn % 2, :])
                    T.mbarrier_arrive(ready[turn % 2])
                    T.mbarrier_wait_parity(ready[turn % 2], turn // 2 % 2, own=own)
                    for i in T.Parallel(128):
                        C[turn, i] = tile[turn % 2, (i + 40) % 128]

    return kernel


@pytest.mark.parametrize("own", [True, False])
def test_threads_that_waited_for_each_other_need_no_barrier(own):
    kernel = rotated(own)
    flat = lowered(kernel)
    barriers = [n for n in walk(flat) if isinstance(n, Call) and n.name == "named_barrier"]
    assert bool(barriers) != own and not [n for n in walk(flat) if isinstance(n, Call) and n.name == "own_phase"]
    x, y = torch.randn(3, 128), torch.full((3, 128), torch.nan)
    findings = interpret(flat, kernel.program, (x, y))
    assert not findings.found, findings.report()
    assert torch.equal(x.roll(-40, 1), y)


def test_what_follows_the_last_arrival_needs_a_barrier():
    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32"), C: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=256) as _:
            tile = T.alloc_shared((128,), "float32")
            ready = T.alloc_barrier(128)
            with T.ws(0):
                T.mbarrier_arrive(ready)
                T.copy(A, tile)
                T.mbarrier_wait_parity(ready, 0, own=True)
                for i in T.Parallel(128):
                    C[i] = tile[(i + 40) % 128]

    assert [n for n in walk(lowered(kernel)) if isinstance(n, Call) and n.name == "named_barrier"]


def test_no_fence_for_what_is_copied_once():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128) as _:
            tile = T.alloc_shared((64, 64), "float16")
            full = T.alloc_barrier(1)
            T.tma_copy(A[0, 0], tile, barrier=full[0])
            if T.get_thread_binding() == 0:
                T.mbarrier_arrive(full)
            T.mbarrier_wait_parity(full, 0)
            T.copy(tile, C[0, 0])
            T.sync_threads()

    assert not [n for n in walk(lowered(kernel)) if isinstance(n, Call) and n.name == "fence_proxy_async"]


def test_no_fence_for_what_threads_read():
    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32"), B: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=256) as _:
            tile = T.alloc_shared((128,), "float32")
            ready = T.alloc_barrier(128)
            with T.ws(1):
                T.copy(A, tile)
                T.mbarrier_arrive(ready)
            with T.ws(0):
                T.barrier_wait(ready, 0)
                T.copy(tile, B)

    assert roles(kernel) == [["mbarrier_arrive"], []]


def test_all_numbers_taken():
    def prepare():
        for n in list(range(1, 16)):
            T.sync_threads(n, 256)

    with pytest.raises(TileError, match="leaves no number"):
        lowered(exchange(prepare))


@pytest.mark.parametrize("count", [64, 256])
def test_threads_update_their_own_elements_under_a_condition(count):
    """No barrier is wanted, as each thread reads and writes one element."""

    @T.prim_func
    def kernel(A: T.Tensor((count,), "int32"), B: T.Tensor((count,), "int32")):
        with T.Kernel(1, threads=128):
            s = T.alloc_shared((count,), "int32")
            T.copy(A, s)
            T.sync_threads()
            for i in T.Parallel(count):
                if s[i] > 3:
                    s[i] = -1
            T.sync_threads()
            T.copy(s, B)

    made = torch_tile.compile(kernel, target="cuda:sm_80")
    a, b = torch.randint(-9, 9, (count,), dtype=torch.int32), torch.zeros(count, dtype=torch.int32)
    assert not made.interpret(a, b)
    assert torch.equal(b, torch.where(a > 3, -1, a))


def nested(depth, source):
    """Loops in loops, with stores and loads that threads with other values make in loops and branches of their own."""
    buffers = [Buffer(name, (const(4096, dt.int32),), dt.float32, "global") for name in "xyz"]
    loops = []

    def place():
        buffer, at = source.choice(buffers), sum(loops, number(source.randrange(5)))
        return buffer, TX * source.randrange(3) + at, Load(buffer, (TX,)) > ZERO

    def inner():
        buffer, at, own = place()
        ways = [[get(buffer, at)], [put(buffer, at)], [when(own, [put(buffer, at)])]]
        ways += [[While(own, Block((put(buffer, at), get(buffer, at + 1), when(at > 7, [Continue()]))))]]
        return source.choice(ways)

    def body(var):
        loops.append(var)
        found = [*inner(), *inner(), *([loop(4, body, f"k{len(loops)}")] if len(loops) < depth else inner()), *inner()]
        loops.pop()
        return found

    return program(loop(4, body))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_pair_of_accesses_is_looked_at_once(depth, seed, monkeypatch):
    """Loops in loops are walked a thousand times; 68 seconds went into looking at the same pairs again."""
    looked, alike = [], set()

    def counting(hazards, a, b):
        looked.append((a, b))
        alike.add(tuple((x.key, structure(x.conditions), x.age) for x in (a, b)))
        return between(hazards, a, b)

    between = Hazards._between
    monkeypatch.setattr(Hazards, "_between", counting)
    insert_barriers(nested(depth, random.Random(seed)))
    assert len(looked) <= 2 * len(alike), (len(looked), len(alike))


@pytest.mark.parametrize("seed", range(8))
def test_walks_grow_with_the_square_of_the_depth_at_most(seed, monkeypatch):
    """Each loop around walked an inner loop five times: seven loops took 150 thousand walks."""
    walked = []

    def counting(walk, loop, state):
        walked.append(loop)
        return body(walk, loop, state)

    body = Walk._body
    monkeypatch.setattr(Walk, "_body", counting)
    insert_barriers(nested(2, random.Random(seed)))
    two = len(walked)
    walked.clear()
    insert_barriers(nested(6, random.Random(seed)))
    assert len(walked) <= 3**2 * (two + 50), (two, len(walked))
