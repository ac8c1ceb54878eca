# SPDX-License-Identifier: Apache-2.0
"""Kernels of two roles, all passes run: the values are those of the tile program, no thread races, nothing spills."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mutation import removals

import torch_tile
import torch_tile.language as T
from torch_tile.lowering.hopper.async_wgmma import LEFT_OUT
from torch_tile.simulator.interpret import interpret
from torch_tile.simulator.tile.interpreter import evaluate

H, F, E, I8, I32 = "float16", "float32", "float8_e4m3fn", "int8", "int32"


def numbers(*shape, dtype=torch.float16):
    return torch.randint(-3, 4, shape).to(dtype)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def check(kernel, *args, **options):
    """Small whole numbers, so that every order of sums gives the same."""
    want, got = ([x.clone() for x in args] for _ in range(2))
    evaluate(kernel, *want)
    made = torch_tile.compile(kernel, target="cuda:sm_90a", **options)
    assert "with T.role(" in repr(made.lowered), made.schedule
    findings = made.interpret(*got)
    assert not findings, findings.report()
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.float(), y.float(), rtol=0, atol=0)
    assert not made.cubin.warnings and not any(r.spills for r in made.resources.values())


def test_heads_narrower_than_their_tiles() -> None:
    """40 of 64 columns and 100 of 128 rows exist; the rest reads 0."""

    @T.prim_func
    def kernel(Q: T.Tensor((2, 100, 3, 40), H), K: T.Tensor((2, 100, 3, 40), H), S: T.Tensor((2, 100, 3, 100), F)):
        with T.Kernel(2, 3, 2, threads=128) as (bx, by, bz):
            q, k, s = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H), T.alloc_fragment((64, 64), F)
            T.copy(Q[bz, bx * 64 : (bx + 1) * 64, by, 0:64], q)
            for j in T.Pipelined(2, num_stages=2):
                T.copy(K[bz, j * 64 : (j + 1) * 64, by, 0:64], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                T.copy(s, S[bz, bx * 64 : (bx + 1) * 64, by, j * 64 : (j + 1) * 64])

    check(kernel, numbers(2, 100, 3, 40), numbers(2, 100, 3, 40), zeros(2, 100, 3, 100))


def test_copies_under_conditions() -> None:
    @T.prim_func
    def kernel(A: T.Tensor((128, 256), H), C: T.Tensor((64, 128), F)):
        with T.Kernel(2, threads=128) as bx:
            a, b, c = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H), T.alloc_fragment((64, 64), F)
            T.clear(c)
            for k in T.Pipelined(4, num_stages=3):
                if k % 2 == 0:
                    T.copy(A[0, k * 64], a)
                else:
                    T.copy(A[64, k * 64], a)
                if k != bx:
                    T.copy(A[bx * 64, k * 64], b)
                    T.gemm(a, b, c)
            T.copy(c, C[0, bx * 64])

    check(kernel, numbers(128, 256), zeros(64, 128))


@pytest.mark.parametrize("length", [0, 1, 200, 512])
def test_block_tables(length: int) -> None:
    @T.prim_func
    def kernel(
        A: T.Tensor((512, 64), H), pages: T.Tensor((2, 8), I32), sizes: T.Tensor((2,), I32), C: T.Tensor((2, 64, 64), F)
    ):
        with T.Kernel(2, threads=128) as bx:
            a, b, c = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H), T.alloc_fragment((64, 64), F)
            T.clear(c)
            size = sizes[bx]
            for k in T.Pipelined(T.ceildiv(size, 64), num_stages=3):
                page = pages[bx, k]
                T.copy(A[page * 64, 0], a)
                T.copy(A[k * 64, 0], b)
                T.gemm(a, b, c)
            T.copy(c, C[bx, :, :])

    sizes = torch.tensor([length, 300], dtype=torch.int32)
    check(kernel, numbers(512, 64), torch.randint(0, 8, (2, 8), dtype=torch.int32), sizes, zeros(2, 64, 64))


def test_tile_after_tile() -> None:
    """Two loops of varying length for each, some empty, and results by way of shared memory."""

    @T.prim_func
    def kernel(A: T.Tensor((256, 256), H), C: T.Tensor((256, 128), H)):
        with T.Kernel(2, threads=128) as bx:
            q, a, b = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H)
            c, s = T.alloc_fragment((64, 64), F), T.alloc_shared((64, 64), H)
            for tile in T.serial(bx + 2):
                T.copy(A[tile * 64, bx * 64], q)
                T.clear(c)
                for k in T.Pipelined(tile * 5 % 4, num_stages=3):
                    T.copy(A[k * 64, tile * 64], a)
                    T.gemm(q, a, c)
                for k in T.Pipelined(1, 1 + tile, num_stages=2):
                    T.copy(A[k * 64, tile * 64], b)
                    T.gemm(q, b, c)
                T.copy(c, s)
                T.copy(s, C[tile * 64, bx * 64])

    check(kernel, numbers(256, 256), zeros(256, 128, dtype=torch.float16))


def ping_pong_call(groups: int, runs: int, ping_pong: bool = True):
    """Probabilities of `groups` warpgroups; the loop is run again and again, without a turn in the first run."""

    @T.prim_func
    def kernel(
        Q: T.Tensor((64 * groups * runs, 64), H), K: T.Tensor((512, 64), H), C: T.Tensor((64 * groups * runs, 64), F)
    ):
        with T.Kernel(1, threads=128 * groups):
            q, k, v = (T.alloc_shared((n, 64), H) for n in (64 * groups, 64, 64))
            s, c = T.alloc_fragment((64 * groups, 64), F), T.alloc_fragment((64 * groups, 64), F)
            p = T.alloc_fragment((64 * groups, 64), H)
            for run in T.serial(runs):
                T.copy(Q[run * 64 * groups, 0], q)
                T.clear(c)
                for j in T.Pipelined(2 * run, num_stages=2, ping_pong=ping_pong):
                    T.copy(K[j * 64, 0], k)
                    T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                    for x, y in T.Parallel(64 * groups, 64):
                        p[x, y] = T.max(T.min(s[x, y], 8), -8)
                    T.copy(K[j * 64 + 64, 0], v)
                    T.gemm(p, v, c)
                T.copy(c, C[run * 64 * groups, 0])

    return kernel


@pytest.mark.parametrize(("groups", "runs"), [(1, 2), (2, 3), (3, 2)])
def test_warpgroups_that_take_turns(groups: int, runs: int) -> None:
    kernel, rows = ping_pong_call(groups, runs), 64 * groups * runs
    check(kernel, numbers(rows, 64), numbers(512, 64), zeros(rows, 64))
    made = torch_tile.compile(kernel, target="cuda:sm_90a")
    (note,) = [n for n in made.schedule.remarks if "turns of warpgroups" in n.became]
    assert ("turn_take" in made.source) == (not note.why_not) == (groups > 1)
    plain = torch_tile.compile(ping_pong_call(groups, runs, ping_pong=False), target="cuda:sm_90a")
    assert "turn_" not in plain.source


def test_warpgroups_that_meet_take_no_turns() -> None:
    """Probabilities that threads write to shared memory, just before the product that reads them."""

    @T.prim_func
    def kernel(Q: T.Tensor((128, 64), H), K: T.Tensor((256, 64), H), C: T.Tensor((128, 64), F)):
        with T.Kernel(1, threads=256):
            q, k, v, p = (T.alloc_shared((n, 64), H) for n in (128, 64, 64, 128))
            s, c = T.alloc_fragment((128, 64), F), T.alloc_fragment((128, 64), F)
            T.copy(Q, q)
            T.clear(c)
            for j in T.Pipelined(3, num_stages=2, ping_pong=True):
                T.copy(K[j * 64, 0], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                T.copy(s, p)
                T.copy(K[j * 64 + 64, 0], v)
                T.gemm(p, v, c)
            T.copy(c, C)

    check(kernel, numbers(128, 64), numbers(256, 64), zeros(128, 64))
    made = torch_tile.compile(kernel, target="cuda:sm_90a")
    assert "turn_" not in made.source and "no turns of warpgroups" in str(made.schedule)


@pytest.mark.parametrize("name", ["turn_open", "turn_pass"])
def test_a_turn_that_is_not_passed_on(name: str) -> None:
    made = torch_tile.compile(ping_pong_call(2, 3), target="cuda:sm_90a")
    for removal in removals(made.lowered, (name,)):
        findings = interpret(removal.program, made.program, [numbers(384, 64), numbers(512, 64), zeros(384, 64)])
        assert "deadlock" in findings.kinds


def causal_call(groups: int, keys: int, ping_pong: bool, multiply: Callable[..., None]):
    """Two blocks of queries under a causal mask. `multiply` adds up the tiles of keys that a block sees."""
    rows = 64 * groups

    @T.prim_func
    def kernel(
        Q: T.Tensor((2 * rows, 64), H), K: T.Tensor((512, 64), H), C: T.Tensor((2 * rows, 64), F), offset: T.int32
    ):
        with T.Kernel(2, threads=128 * groups) as bx:
            q, k, v = (T.alloc_shared((n, 64), H) for n in (rows, keys, keys))
            s, c = T.alloc_fragment((rows, keys), F), T.alloc_fragment((rows, 64), F)
            p = T.alloc_fragment((rows, keys), H)
            T.copy(Q[bx * rows, 0], q)
            T.clear(c)
            steps = T.min(512 // keys, (bx * rows + rows - 1 + offset) // keys + 1)
            multiply(K, (q, k, v), (s, p, c), bx * rows, offset, steps, ping_pong)
            T.copy(c, C[bx * rows, 0])

    return kernel


def hidden_call(groups: int, keys: int, ping_pong: bool = True, exchange: bool = False):
    """Products under a causal mask, the last keys first; each warpgroup leaves out the tiles that it sees nothing of.

    With `exchange`, columns are scaled by their sums over all rows of the block.
    """
    rows = 64 * groups

    @T.macro
    def multiply(K, shared, fragments, row, offset, steps, ping_pong):
        (q, k, v), (s, p, c) = shared, fragments
        sums = T.alloc_fragment((keys,), F)
        begin, end = T.own_rows(rows)
        first, last = row + begin + offset, row + end - 1 + offset
        seen = T.min(512 // keys, last // keys + 1)
        for j in T.Pipelined(steps, num_stages=2, ping_pong=ping_pong, skip=steps - seen):
            step = steps - 1 - j
            T.copy(K[step * keys, 0], k)
            T.gemm(q, k, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
            if step * keys + keys - 1 > first:
                for x, y in T.Parallel(rows, keys):
                    s[x, y] = T.if_then_else(row + x + offset >= step * keys + y, s[x, y], 0)
            if exchange:
                T.reduce_sum(s, sums, dim=0)
            for x, y in T.Parallel(rows, keys):
                p[x, y] = T.max(T.min(s[x, y] + (0 * sums[y] if exchange else 0), 8), -8)
            T.copy(K[step * keys, 0], v)
            T.gemm(p, v, c, policy=T.GemmWarpPolicy.FullRow)

    return causal_call(groups, keys, ping_pong, multiply)


# Offsets put the diagonal anywhere in a tile: some warpgroups see nothing at all, or have two masked tiles.
@pytest.mark.parametrize(("groups", "keys"), [(2, 64), (2, 128), (3, 128)])
@pytest.mark.parametrize("offset", [0, 17, 64, 200, -130, -300, -1000])
def test_warpgroups_leave_out_tiles(groups: int, keys: int, offset: int) -> None:
    args = numbers(128 * groups, 64), numbers(512, 64), zeros(128 * groups, 64), offset
    want = zeros(128 * groups, 64)
    queries, seen = args[0].double(), torch.arange(128 * groups)[:, None] + offset >= torch.arange(512)
    scores = torch.where(seen, queries @ args[1].double().mT, 0.0).clamp(-8, 8)
    want = (scores @ args[1].double()).float()
    made = torch_tile.compile(hidden_call(groups, keys), target="cuda:sm_90a")
    assert LEFT_OUT in str(made.schedule) and "turn_take" in made.source
    evaluate(hidden_call(groups, keys), *args)
    torch.testing.assert_close(args[2], want, rtol=0, atol=0)
    args[2].fill_(7)
    findings = made.interpret(*args)
    assert not findings, findings.report()
    torch.testing.assert_close(args[2], want, rtol=0, atol=0)
    assert not made.cubin.warnings and not any(r.spills for r in made.resources.values())


def test_tiles_are_left_out_by_releases_and_turns() -> None:
    """A warpgroup goes on releasing tiles and passing turns in iterations that it leaves out."""
    made = torch_tile.compile(hidden_call(2, 64), target="cuda:sm_90a")
    left_out = list(removals(made.lowered, ("turn_pass", "mbarrier_arrive")))[:3]  # these iterations come first
    assert [removal.name for removal in left_out] == ["mbarrier_arrive", "mbarrier_arrive", "turn_pass"]
    for removal in left_out:
        findings = interpret(removal.program, made.program, [numbers(256, 64), numbers(512, 64), zeros(256, 64), 200])
        assert findings, f"{removal.name} {removal.number}"


def test_warpgroups_that_exchange_leave_nothing_out() -> None:
    made = torch_tile.compile(hidden_call(2, 64, exchange=True), target="cuda:sm_90a")
    report = str(made.schedule)
    assert LEFT_OUT not in report
    args = numbers(256, 64), numbers(512, 64), zeros(256, 64), 33
    want = zeros(256, 64)
    evaluate(hidden_call(2, 64), *args[:2], want, 33)
    assert not made.interpret(*args)
    torch.testing.assert_close(args[2], want, rtol=0, atol=0)


def halved_call(groups: int, keys: int, ping_pong: bool, less: int = 0):
    """Products under a causal mask, the first keys first. Columns of weights from `used` on are zeros, or are taken for
    zeros: `less` makes the promise wrong.
    """
    rows = 64 * groups

    @T.macro
    def multiply(K, shared, fragments, row, offset, steps, ping_pong):
        (q, k, v), (s, p, c) = shared, fragments
        past = row + T.own_rows(rows)[1] + offset - less
        for j in T.Pipelined(steps, num_stages=2, ping_pong=ping_pong):
            T.copy(K[j * keys, 0], k)
            T.gemm(q, k, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
            if j * keys + keys - 1 > row + offset:
                for x, y in T.Parallel(rows, keys):
                    s[x, y] = T.if_then_else(row + x + offset >= j * keys + y, s[x, y], 0)
            for x, y in T.Parallel(rows, keys):
                p[x, y] = T.max(T.min(s[x, y], 8), -8)
            T.copy(K[j * keys, 0], v)
            T.gemm(p, v, c, policy=T.GemmWarpPolicy.FullRow, used=past - j * keys)

    return causal_call(groups, keys, ping_pong, multiply)


@pytest.mark.parametrize(
    ("groups", "keys", "ping_pong"), [(1, 64, False), (2, 64, True), (2, 128, True), (3, 32, False)]
)
@pytest.mark.parametrize("offset", [0, 17, 64, 200, -70])
def test_halves_of_products_are_left_out(groups: int, keys: int, ping_pong: bool, offset: int) -> None:
    args = numbers(128 * groups, 64), numbers(512, 64), zeros(128 * groups, 64), offset
    queries, seen = args[0].double(), torch.arange(128 * groups)[:, None] + offset >= torch.arange(512)
    scores = torch.where(seen, queries @ args[1].double().mT, 0.0).clamp(-8, 8)
    want = (scores @ args[1].double()).float()
    made = torch_tile.compile(halved_call(groups, keys, ping_pong), target="cuda:sm_90a")
    assert f"_rs_x{keys // 32}<" in made.source or keys == 32, "no product is cut in halves"
    evaluate(halved_call(groups, keys, ping_pong), *args)
    torch.testing.assert_close(args[2], want, rtol=0, atol=0)
    args[2].fill_(7)
    findings = made.interpret(*args)
    assert not findings, findings.report()
    torch.testing.assert_close(args[2], want, rtol=0, atol=0)
    assert not made.cubin.warnings and not any(r.spills for r in made.resources.values())


def test_a_wrong_promise_of_zeros_loses_values() -> None:
    """So a half that is not used is surely left out."""
    args = numbers(256, 64), numbers(512, 64).abs() + 1, zeros(256, 64), 0
    wrong = torch_tile.compile(halved_call(2, 128, True, less=64), target="cuda:sm_90a")
    want = args[2].clone()
    evaluate(halved_call(2, 128, True), *args[:2], want, 0)
    wrong.interpret(*args)
    lost = (args[2] != want).any(1).view(2, 2, 64).any(2)  # by block and warpgroup
    assert lost[:, 1].all() and not lost[:, 0].any()  # the first half is multiplied in any case


@pytest.mark.parametrize("used", [1.5, True, "all"])
def test_columns_in_use_are_a_number(used: object) -> None:
    with pytest.raises(torch_tile.TileError) as found:

        @T.prim_func
        def kernel(A: T.Tensor((64, 64), H), C: T.Tensor((64, 64), F)):
            with T.Kernel(1, threads=128):
                a, c = T.alloc_shared((64, 64), H), T.alloc_fragment((64, 64), F)
                T.copy(A, a)
                T.gemm(a, a, c, clear_accum=True, used=used)
                T.copy(c, C)

    assert found.value.code == "bad_argument" and "used" in str(found.value)


def test_operands_by_way_of_shared_memory() -> None:
    """Warpgroups that share rows exchange what they computed; one tile is an operand of both products."""

    @T.prim_func
    def kernel(Q: T.Tensor((64, 64), H), K: T.Tensor((256, 64), H), C: T.Tensor((64, 64), F)):
        with T.Kernel(1, threads=256):
            q, k, p = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H)
            s, c = T.alloc_fragment((64, 64), F), T.alloc_fragment((64, 64), F)
            T.copy(Q, q)
            T.clear(c)
            for j in T.Pipelined(4, num_stages=2):
                T.copy(K[j * 64, 0], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullCol)
                for x, y in T.Parallel(64, 64):
                    s[x, y] = T.max(T.min(s[x, y], 8), -8)
                T.copy(s, p)
                T.gemm(p, k, c, policy=T.GemmWarpPolicy.FullCol)
            T.copy(c, C)

    check(kernel, numbers(64, 64), numbers(256, 64), zeros(64, 64))


def test_probabilities_of_8_bits() -> None:
    """Their registers lie otherwise than accumulators do, so that they are exchanged between threads."""

    @T.prim_func
    def kernel(
        Q: T.Tensor((64, 64), E), K: T.Tensor((128, 64), E), V: T.Tensor((64, 128), E), C: T.Tensor((64, 64), F)
    ):
        with T.Kernel(1, threads=128):
            q, k, v = T.alloc_shared((64, 64), E), T.alloc_shared((64, 64), E), T.alloc_shared((64, 64), E)
            s, p, c = T.alloc_fragment((64, 64), F), T.alloc_fragment((64, 64), E), T.alloc_fragment((64, 64), F)
            T.copy(Q, q)
            T.clear(c)
            for j in T.Pipelined(2, num_stages=2):
                T.copy(K[j * 64, 0], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                for x, y in T.Parallel(64, 64):
                    p[x, y] = T.max(T.min(s[x, y], 4), -4)
                T.copy(V[0, j * 64], v)
                T.gemm(p, v, c, transpose_B=True)
            T.copy(c, C)

    made = [numbers(*shape, dtype=torch.float8_e4m3fn) for shape in ((64, 64), (128, 64), (64, 128))]
    check(kernel, *made, zeros(64, 64))


def test_weights_that_become_operands_in_registers() -> None:
    @T.prim_func
    def kernel(A: T.Tensor((64, 256), H), W: T.Tensor((128, 256), I8), C: T.Tensor((128, 64), F)):
        with T.Kernel(1, threads=128):
            a, packed = T.alloc_shared((64, 64), H), T.alloc_shared((128, 64), I8)
            w, c = T.alloc_fragment((128, 64), H), T.alloc_fragment((128, 64), F)
            T.clear(c)
            for k in T.Pipelined(4, num_stages=3):
                T.copy(A[0, k * 64], a)
                T.copy(W[0, k * 64], packed)
                T.copy(packed, w)
                T.gemm(w, a, c, transpose_B=True)
            T.copy(c, C)

    check(kernel, numbers(64, 256), numbers(128, 256, dtype=torch.int8), zeros(128, 64))


def test_tiles_that_are_stored_and_read_besides() -> None:
    @T.prim_func
    def kernel(A: T.Tensor((256, 64), H), B: T.Tensor((64,), H), C: T.Tensor((256, 64), H), D: T.Tensor((64, 64), F)):
        with T.Kernel(1, threads=128):
            a, b, c = T.alloc_shared((64, 64), H), T.alloc_shared((64,), H), T.alloc_fragment((64, 64), F)
            T.copy(B, b)
            T.clear(c)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[k * 64, 0], a)
                T.gemm(a, a, c, transpose_B=True)
                T.copy(a, C[k * 64, 0])
                for i, j in T.Parallel(64, 64):
                    c[i, j] += a[i, j] + b[j]
            T.copy(c, D)

    check(kernel, numbers(256, 64), numbers(64), zeros(256, 64, dtype=torch.float16), zeros(64, 64))


@pytest.mark.parametrize(
    ("m", "n", "threads", "policy"), [(192, 96, 384, "Square"), (64, 512, 256, "FullCol"), (64, 8, 128, "Square")]
)
def test_splits(m: int, n: int, threads: int, policy: str) -> None:
    how = T.GemmWarpPolicy(policy)

    @T.prim_func
    def kernel(A: T.Tensor((m, 128), H), B: T.Tensor((n, 128), H), C: T.Tensor((m, n), F)):
        with T.Kernel(1, threads=threads):
            a, b, c = T.alloc_shared((m, 32), H), T.alloc_shared((n, 32), H), T.alloc_fragment((m, n), F)
            T.clear(c)
            for k in T.Pipelined(4, num_stages=3):
                T.copy(A[0, k * 32], a)
                T.copy(B[0, k * 32], b)
                T.gemm(a, b, c, transpose_B=True, policy=how)
            T.copy(c, C)

    check(kernel, numbers(m, 128), numbers(n, 128), zeros(m, n))


def test_threads_that_write_what_a_bulk_copy_brought() -> None:
    """Mbarriers order threads with the copy, not among each other: a barrier is added."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), F), B: T.Tensor((64, 64), F)):
        with T.Kernel(1, threads=160):
            s, ready = T.alloc_shared((64, 64), F), T.alloc_barrier(1)
            thread = T.get_thread_binding()
            with T.role(128, 32):
                T.tma_copy(A, s, barrier=ready[0])
                if thread == 128:
                    T.evaluate(T.call("mbarrier_arrive", T.address_of(ready[0]), dtype=T.int32))
            with T.role(0, 128):
                T.evaluate(T.call("mbarrier_wait", T.address_of(ready[0]), 0, dtype=T.int32))
                for i, j in T.Parallel(64, 64):
                    s[i, j] = s[i, j] * 2
                for i, j in T.Parallel(64, 64):
                    B[i, j] = s[63 - i, j]

    a, b = numbers(64, 64, dtype=torch.float32), zeros(64, 64)
    made = torch_tile.compile(kernel, target="cuda:sm_90a")
    findings = made.interpret(a, b)
    assert not findings, findings.report()
    torch.testing.assert_close(b, 2 * a.flip(0), rtol=0, atol=0)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_tile_that_threads_change_before_a_product(stages):
    """Arithmetic waits for it, and releases it behind the product: a turned loop would wait before it is free."""

    @T.prim_func
    def kernel(Q: T.Tensor((128, 64), H), K: T.Tensor((512, 64), H), O: T.Tensor((128, 64), F)):
        with T.Kernel(2, threads=128) as bx:
            q, k, v = (T.alloc_shared((64, 64), H) for _ in range(3))
            s, o, p = T.alloc_fragment((64, 64), F), T.alloc_fragment((64, 64), F), T.alloc_fragment((64, 64), H)
            T.copy(Q[bx * 64, 0], q)
            T.clear(o)
            for j in T.Pipelined(8, num_stages=stages):
                T.copy(K[j * 64, 0], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                for x, y in T.Parallel(64, 64):
                    p[x, y] = T.min(s[x, y], 4)
                T.copy(K[j * 64, 0], v)
                for x, y in T.Parallel(64, 64):
                    v[x, y] = T.min(v[x, y], T.cast(1, H))
                T.gemm(p, v, o)
            T.copy(o, O[bx * 64, 0])

    check(kernel, numbers(128, 64), numbers(512, 64), zeros(128, 64))
