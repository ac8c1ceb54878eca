# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.simulator.tile.interpreter import evaluate


def run(kernel, *args):
    evaluate(kernel, *args)
    return args[-1]


def test_blocks_run_with_x_fastest():
    @T.prim_func
    def kernel(count: T.Tensor((1,), "int32"), order: T.Tensor((24, 3), "int32")):
        with T.Kernel(2, 3, 4, threads=32) as (bx, by, bz):
            order[count[0], 0] = bx
            order[count[0], 1] = by
            order[count[0], 2] = bz
            count[0] = count[0] + 1

    order = run(kernel, torch.zeros(1, dtype=torch.int32), torch.zeros(24, 3, dtype=torch.int32))
    assert order.tolist() == [[x, y, z] for z in range(4) for y in range(3) for x in range(2)]


def test_kernels_run_one_after_another():
    @T.prim_func
    def kernel(a: T.Tensor((4,), "float32"), out: T.Tensor((1,), "float32")):
        with T.Kernel(4) as b:
            a[b] = a[b] * 2.0
        with T.Kernel(1) as _:
            out[0] = 0.0
            for i in T.serial(4):
                out[0] += a[i]

    a = torch.randn(4)
    wanted = 2 * a.sum()
    torch.testing.assert_close(run(kernel, a, torch.zeros(1))[0], wanted)


def test_global_edges_read_zero_and_drop_writes():
    """By tile ops, by element in lanes, and by element alone, on every side."""

    @T.prim_func
    def kernel(a: T.Tensor((5, 6), "float32"), out: T.Tensor((5, 6), "float32"), seen: T.Tensor((8, 8), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((8, 8), "float32")
            T.copy(a[-1, -1], tile)  # a negative index counts from the end, as in Python
            T.copy(tile, out[4:12, 5:13])
            for i, j in T.Parallel(8, 8):
                seen[i, j] = a[i - 1, j - 1]
            for i in T.serial(-2, 9):
                out[i, i] = a[i, i] + 100.0

    a, out, seen = torch.randn(5, 6), torch.zeros(5, 6), torch.full((8, 8), math.nan)
    evaluate(kernel, a, out, seen)
    wanted = torch.zeros(8, 8)
    wanted[1:6, 1:7] = a
    assert torch.equal(seen, wanted)
    edges = torch.zeros(5, 6)
    edges[4, 5] = a[4, 5]
    edges.diagonal().copy_(a.diagonal() + 100)
    assert torch.equal(out, edges)


def test_global_reads_outside_are_zero_for_every_kind():
    @T.prim_func
    def kernel(i8: T.Tensor((2,), "int8"), bf: T.Tensor((2,), "bfloat16"), ok: T.Tensor((2,), "bool"),
               out: T.Tensor((3, 4), "float32")):  # fmt: skip
        with T.Kernel(1) as _:
            for i in T.Parallel(4):
                out[0, i] = i8[i]
                out[1, i] = bf[i]
                out[2, i] = T.if_then_else(ok[i], 1.0, 0.0)

    args = torch.tensor([3, -4], dtype=torch.int8), torch.tensor([0.5, 2.0]).bfloat16(), torch.tensor([True, True])
    out = run(kernel, *args, torch.full((3, 4), math.nan))
    assert out.tolist() == [[3, -4, 0, 0], [0.5, 2, 0, 0], [1, 1, 0, 0]]


def place(problem):
    return problem.span.line, problem.span.source()[problem.span.column : problem.span.end_column]


def test_on_chip_index_outside_is_an_error_at_the_line():
    @T.prim_func
    def kernel(n: T.int32, out: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((4,), "float32")
            T.clear(tile)
            for i in T.Parallel(8):
                if i < n:
                    out[i] = tile[i]

    evaluate(kernel, 4, torch.zeros(8))  # a mask hides what lies outside
    with pytest.raises(TileError) as caught:
        evaluate(kernel, 6, torch.zeros(8))
    assert caught.value.code == "out_of_bounds"
    assert "index 0 of `tile` is 4" in str(caught.value)
    assert place(caught.value)[1] == "tile[i]"


def test_on_chip_region_outside_is_an_error_at_the_line():
    @T.prim_func
    def kernel(n: T.int32, out: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((6,), "float32")
            T.clear(tile)
            T.copy(tile[n : n + 4], out[0:4])

    evaluate(kernel, 2, torch.zeros(8))
    with pytest.raises(TileError) as caught:
        evaluate(kernel, 3, torch.zeros(8))
    assert caught.value.code == "out_of_bounds" and "3:7" in str(caught.value)
    assert place(caught.value)[1] == "T.copy(tile[n : n + 4], out[0:4])"


def test_tile_ops_are_checked_first():
    @T.prim_func
    def kernel(out: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            out[0] = 1.0
            T.copy(out[0:3], out[4:8])
            T.reduce_sum(out, out)

    out = torch.zeros(8)
    with pytest.raises(TileError) as caught:
        evaluate(kernel, out)
    assert [d.code for d in caught.value.diagnostics] == ["copy_shape", "reduce_shape"]
    assert not out.any()


@pytest.mark.parametrize("lanes", [False, True])
def test_assertions(lanes):
    @T.prim_func
    def kernel(limit: T.int32, out: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            if lanes:
                for i in T.Parallel(4):
                    if i > 1:
                        T.device_assert(i < limit, "too large")
                    out[i] = 1.0
            else:
                assert limit > 3, "too large"
                T.clear(out)

    evaluate(kernel, 4, torch.zeros(4))
    with pytest.raises(TileError, match="device assertion failed: too large") as caught:
        evaluate(kernel, 3, torch.zeros(4))
    assert caught.value.code == "device_assert"
    assert place(caught.value)[1].split("(")[0] in ("T.device_assert", 'assert limit > 3, "too large"')


def test_print(capsys):
    @T.prim_func
    def kernel(a: T.Tensor((2, 2), "float32")):
        with T.Kernel(2) as b:
            T.print(b, msg="block")
            T.print(a[0:1, :])
            for i in T.Parallel(2):
                T.print(a[i, 1])
            T.print(msg="alone")

    evaluate(kernel, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    text = capsys.readouterr().out
    assert text.count("block: ") == text.count("alone\n") == 2 and "block: 1" in text
    assert 'T.print(msg="alone")' in kernel.script()
    torch_tile.compile(kernel, target="cuda:sm_80").interpret(torch.zeros(2, 2))
    assert capsys.readouterr().out.count("alone\n") == 2
    assert text.count("tensor([[1., 2.]])") == 2 and text.count("4.0") == 2


def test_fresh_memory_is_not_read():
    @T.prim_func
    def kernel(out: T.Tensor((2,), "float32"), which: T.int32):
        with T.Kernel(1) as _:
            tile = T.alloc_fragment((2,), "float32")
            count = T.alloc_local((2,), "float32")
            count[which] = 1.0
            if which == 0:
                T.fill(tile, 2.0)
            T.copy(tile, out)
            out[0] = count[0]

    out = torch.zeros(2)
    evaluate(kernel, out, 0)
    assert out.tolist() == [1.0, 2.0]
    with pytest.raises(TileError, match="an element of `tile` is read here") as caught:
        evaluate(kernel, out, 1)
    assert place(caught.value)[1] == "T.copy(tile, out)"


def test_buffers_of_a_loop_are_fresh_in_each_iteration():
    @T.prim_func
    def kernel(out: T.Tensor((3,), "float32"), first: T.int32):
        with T.Kernel(1) as _:
            for i in T.serial(3):
                tile = T.alloc_fragment((1,), "float32")
                if i <= first:
                    tile[0] = 1.0
                out[i] = tile[0]

    evaluate(kernel, torch.zeros(3), 2)
    with pytest.raises(TileError, match="an element of `tile` is read here"):
        evaluate(kernel, torch.zeros(3), 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_stores_round_as_torch_does(dtype):
    @T.prim_func
    def kernel(a: T.Tensor((64,), "float32"), out: T.Tensor((2, 64), dtype)):
        with T.Kernel(1) as _:
            tile = T.alloc_fragment((64,), dtype)
            T.copy(a, tile)
            T.copy(tile, out[0, :])
            for i in T.Parallel(64):
                out[1, i] = a[i]

    a = torch.randn(64) * 10
    out = run(kernel, a, torch.zeros(2, 64).to(getattr(torch, dtype)))
    assert torch.equal(out[0].float(), a.to(out.dtype).float())
    assert torch.equal(out[1].float(), out[0].float())


def test_loops_of_every_kind():
    @T.prim_func
    def kernel(out: T.Tensor((5, 20), "int32")):
        with T.Kernel(1) as _:
            T.clear(out)
            for i in T.serial(2, 17, 5):
                out[0, i] = i
            for i in T.unroll(3, 6):
                out[1, i] = i
            for i in T.vectorized(4):
                out[2, i] = i
            for i in T.Pipelined(1, 4, num_stages=2):
                out[3, i] = i
            for _ in range(out[0, 17], 0):
                out[4, 0] = 1  # never
            n = T.alloc_var("int32", 0)
            while n * n < 50:
                n += 1
            out[4, 1] = n

    out = run(kernel, torch.full((5, 20), -1, dtype=torch.int32))
    assert [row.nonzero().flatten().tolist() for row in out] == [[2, 7, 12], [3, 4, 5], [1, 2, 3], [1, 2, 3], [1]]
    assert out[4, 1] == 8


def test_break_and_continue_leave_their_own_loop():
    @T.prim_func
    def kernel(out: T.Tensor((4, 6), "int32")):
        with T.Kernel(1) as _:
            T.clear(out)
            for i in T.serial(4):
                if i == 1:
                    continue
                for j in T.serial(6):
                    if j > i:
                        break
                    out[i, j] = 1
                out[i, 5] = 2
                if i >= 2:
                    break

    out = run(kernel, torch.zeros(4, 6, dtype=torch.int32))
    assert out.tolist() == [[1, 0, 0, 0, 0, 2], [0] * 6, [1, 1, 1, 0, 0, 2], [0] * 6]


def test_break_out_of_a_parallel_loop_is_in_order():
    @T.prim_func
    def kernel(a: T.Tensor((8,), "float32"), out: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            for i in T.Parallel(8):
                if a[i] < 0.0:
                    break
                out[i] = a[i]

    out = run(kernel, torch.tensor([1.0, 2, 3, -1, 5, 6, 7, 8]), torch.zeros(8))
    assert out.tolist() == [1, 2, 3, 0, 0, 0, 0, 0]


def test_zero_trips():
    @T.prim_func
    def kernel(n: T.int32, out: T.Tensor((4,), "float32")):
        with T.Kernel(T.max(n, 0)) as _:
            out[0] = 1.0
        with T.Kernel(1) as _:
            for _, j in T.Parallel(n, 3):
                out[j] = 2.0

    assert run(kernel, 0, torch.zeros(4)).tolist() == [0] * 4
    assert run(kernel, 1, torch.zeros(4)).tolist() == [2, 2, 2, 0]


def test_two_hundred_small_attention_kernels_take_seconds(seed):
    """The interpreter is the oracle of kernel tests, so it must be quick on small shapes."""
    import random
    import time

    draw, start = random.Random(seed), time.process_time()
    for _ in range(20):
        rows, keys, dim = draw.randint(1, 40), draw.randint(1, 40), draw.choice([8, 16, 24])
        q, k, v = torch.randn(rows, dim), torch.randn(keys, dim), torch.randn(keys, dim)
        out = torch.full((rows, dim), math.nan)
        evaluate(attention(dim, 16, 16), q, k, v, out)
        wanted = torch.softmax(q.double() @ k.double().T, -1) @ v.double()
        torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    assert time.process_time() - start < 20  # a tenth of the 200, with a wide margin


def attention(dim, block_m, block_n):
    rows, keys = T.dynamic("rows"), T.dynamic("keys")

    @T.prim_func
    def kernel(Q: T.Tensor((rows, dim), "float32"), K: T.Tensor((keys, dim), "float32"),
               V: T.Tensor((keys, dim), "float32"), O: T.Tensor((rows, dim), "float32")):  # fmt: skip
        with T.Kernel(T.ceildiv(rows, block_m)) as bx:
            q = T.alloc_shared((block_m, dim), "float32")
            k = T.alloc_shared((block_n, dim), "float32")
            v = T.alloc_shared((block_n, dim), "float32")
            s = T.alloc_fragment((block_m, block_n), "float32")
            o = T.alloc_fragment((block_m, dim), "float32")
            top = T.alloc_fragment((block_m,), "float32")
            old = T.alloc_fragment((block_m,), "float32")
            total = T.alloc_fragment((block_m,), "float32")
            part = T.alloc_fragment((block_m,), "float32")
            T.copy(Q[bx * block_m, 0], q)
            T.clear(o)
            T.clear(total)
            T.fill(top, -T.infinity("float32"))
            for n in T.Pipelined(T.ceildiv(keys, block_n), num_stages=2):
                T.copy(K[n * block_n, 0], k)
                T.copy(V[n * block_n, 0], v)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(block_m, block_n):
                    s[i, j] = T.if_then_else(n * block_n + j < keys, s[i, j], -T.infinity("float32"))
                T.copy(top, old)
                T.reduce_max(s, top, dim=1, clear=False)
                for i, j in T.Parallel(block_m, block_n):
                    s[i, j] = T.exp(s[i, j] - top[i])
                T.reduce_sum(s, part, dim=1)
                for i in T.Parallel(block_m):
                    total[i] = total[i] * T.exp(old[i] - top[i]) + part[i]
                for i, j in T.Parallel(block_m, dim):
                    o[i, j] *= T.exp(old[i] - top[i])
                T.gemm(s, v, o)
            for i, j in T.Parallel(block_m, dim):
                o[i, j] = o[i, j] / total[i]
            T.copy(o, O[bx * block_m, 0])

    return kernel


@pytest.mark.parametrize("by_hand", [False, True])
def test_roles_are_refused_with_their_line(by_hand):
    @T.prim_func
    def kernel(a: T.Tensor((64,), "float32"), b: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=256):
            tile = T.alloc_shared((64,), "float32")
            if by_hand:
                if T.get_thread_binding() < 128:
                    T.copy(a, tile)
            else:
                with T.ws(0):
                    T.copy(a, tile)
            T.copy(tile, b)

    with pytest.raises(TileError, match="the interpreter of tiles") as caught:
        run(kernel, torch.zeros(64), torch.zeros(64))
    (found,) = caught.value.diagnostics
    assert found.code == "unsupported_on_target" and found.span is not None
