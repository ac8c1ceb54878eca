# SPDX-License-Identifier: Apache-2.0
"""Forms of newer TileLang: plans of partial sums, layouts made of layouts, tile schedulers, tiles sized by a call."""

import tilelang
import tilelang.language as T
from tilelang.cuda.intrinsics.sparse_layout import get_e_factor
from tilelang.language.dtypes import dtype as as_dtype
from tvm import tirx


@tilelang.jit(out_idx=[-1])
def planned_row_sums(M, K, lanes=4, threads=128):
    """Row sums whose author says how many threads add up a row."""

    @T.prim_func
    def main(A: T.Tensor((M, K), T.float32), B: T.Tensor((M,), T.float32)):
        with T.Kernel(1, threads=threads):
            rows = T.alloc_fragment((M, K), T.float32)
            sums = T.alloc_reducer((M,), T.float32, op="sum")
            plan = T.PartialFragment(
                (M,), forward_thread_fn=lambda i, rep: i % (threads // lanes) * lanes + rep, replicate=lanes
            )
            T.annotate_layout({sums: plan})
            T.copy(A, rows)
            T.reducer_init(sums)
            for i, k in T.Parallel(M, K):
                T.reducer_update(sums[i], rows[i, k])
            result = T.alloc_fragment((M,), T.float32)
            T.finalize_reducer(sums, result)
            T.copy(result, B)

    return main


@tilelang.jit(out_idx=[-1])
def largest_by_copy_groups(N, threads=64):
    """One maximum, of which each group of eight threads keeps a copy."""

    @T.prim_func
    def main(A: T.Tensor((N,), T.float32), B: T.Tensor((1,), T.float32)):
        with T.Kernel(1, threads=threads):
            most = T.alloc_reducer((1,), T.float32, op="max")
            T.annotate_layout({most: T.PartialFragment((1,), lambda i, rep: (rep, 0), replicate=threads, combine=8)})
            T.reducer_init(most)
            for i in T.Parallel(N):
                T.reducer_update(most[0], A[i])
            T.finalize_reducer(most)
            T.copy(most, B)

    return main


@tilelang.jit(out_idx=[-1])
def persistent_scale(M, N, workers=3, block=16):
    """Blocks that stay take tile after tile; the name of the scheduler comes last."""

    @T.prim_func
    def main(A: T.Tensor((M, N), T.float32), B: T.Tensor((M, N), T.float32)):
        with T.Kernel(workers, threads=64) as (worker,):
            tile = T.alloc_fragment((block, block), T.float32)
            sched = T.PersistentTileScheduler(
                T.ceildiv(M, block), T.ceildiv(N, block), num_workers=workers, swizzle_size=2, name="sched"
            )
            sched.init(worker)
            while sched.valid():
                by, bx = sched.m_idx, sched.n_idx
                T.copy(A[by * block, bx * block], tile)
                for i, j in T.Parallel(block, block):
                    tile[i, j] = tile[i, j] * 2.0
                T.copy(tile, B[by * block, bx * block])
                sched.next_tile()

    return main


@tilelang.jit(out_idx=[-1])
def turned_by_tile_numbers(M, N, block=16):
    """A scheduler without state gives the place of each tile's number."""

    @T.prim_func
    def main(A: T.Tensor((M, N), T.float16), B: T.Tensor((N, M), T.float16)):
        with T.Kernel(T.ceildiv(M, block) * T.ceildiv(N, block), threads=64) as (number,):
            sched = T.PersistentTileScheduler(
                T.ceildiv(M, block), T.ceildiv(N, block), column_major=False, stateful=False
            )
            by, bx = sched.coord(number)
            tile = T.alloc_shared((block, block), T.float16)
            T.copy(A[by * block, bx * block], tile)
            for i, j in T.Parallel(block, block):
                if tirx.all(bx * block + i < N, by * block + j < M):
                    B[bx * block + i, by * block + j] = tile[j, i]

    return main


@tilelang.jit(out_idx=[-1])
def stages_of_one_layout(M, N, rows=16, columns=64):
    """A layout of one stage grows by the number of the stage."""
    stage = T.Layout((rows, columns), lambda i, j: i * columns + (j // 8 ^ i % 8) * 8 + j % 8)

    @T.prim_func
    def main(A: T.Tensor((M, N), T.float16), S: T.Tensor((rows, columns), T.float32)):
        with T.Kernel(1, threads=128):
            tiles = T.alloc_shared((2, rows, columns), T.float16)
            T.annotate_layout({tiles: stage.expand(2)})
            total = T.alloc_fragment((rows, columns), T.float32)
            T.clear(total)
            for k in T.serial(M // rows):
                T.copy(A[k * rows : (k + 1) * rows, 0:columns], tiles[k % 2, :, :])
                T.sync_threads()
                for i, j in T.Parallel(rows, columns):
                    total[i, j] += tiles[k % 2, i, j]
            T.copy(total, S)

    return main


@tilelang.jit(out_idx=[-1])
def places_and_back(N):
    """A tile lies as the inverse of another layout says. Results do not depend on it."""
    split = T.Layout((N,), lambda i: [i % 8, i // 8])
    assert split.inverse().get_input_shape() == split.get_output_shape() == [8, N // 8]

    @T.prim_func
    def main(A: T.Tensor((8, N // 8), T.float32), B: T.Tensor((8, N // 8), T.float32)):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((8, N // 8), T.float32)
            T.annotate_layout({tile: split.inverse()})
            T.copy(A, tile)
            for i, j in T.Parallel(8, N // 8):
                B[i, j] = tile[7 - i, N // 8 - 1 - j]

    return main


@tilelang.jit(out_idx=[-1])
def saturated_rows(M, N):
    """Rows of float8: numbers beyond its range become its greatest ones, in a fill as in a conversion."""

    @T.prim_func
    def main(A: T.Tensor((M, N), T.float32), B: T.Tensor((M + 1, N), T.float8_e4m3fn)):
        with T.Kernel(M + 1, threads=32) as row:
            tile = T.alloc_fragment((N,), T.float8_e4m3fn)
            T.fill(tile, 1e6)
            if row < M:
                for j in T.Parallel(N):
                    tile[j] = T.cast(A[row, j], T.float8_e4m3fn)
            T.copy(tile, B[row, 0:N])

    return main


@tilelang.jit(out_idx=[-1])
def shifted_rows_of_any_length():
    """A shared tile as long as the rows of the call: the kernel is compiled once for each length."""
    rows, length = T.dynamic("rows, length")

    @T.prim_func
    def main(A: T.Tensor((rows, length), T.float32), B: T.Tensor((rows, length), T.float32)):
        with T.Kernel(rows, threads=64) as row:
            held = T.alloc_shared((length,), T.float32)
            T.copy(A[row, 0:length], held)
            for j in T.Parallel(length):
                B[row, j] = held[(j + 1) % length]

    return main


@tilelang.jit(out_idx=[-1])
def half_of_the_columns(M, N, K, word="int16"):
    """A 2:4 sparse product, whose metadata is counted by TileLang's function."""
    factor = get_e_factor(T.float16, as_dtype(word))

    @T.prim_func
    def main(
        A: T.Tensor((M, K // 2), T.float16), E: T.Tensor((M, K // factor), word), B: T.Tensor((K, N), T.float16),
        C: T.Tensor((M, N), T.float32),
    ):  # fmt: skip
        with T.Kernel(1, threads=128):
            a, e = T.alloc_shared((M, K // 2), T.float16), T.alloc_shared((M, K // factor), word)
            b, c = T.alloc_shared((K, N), T.float16), T.alloc_fragment((M, N), T.float32)
            T.clear(c)
            T.copy(A, a)
            T.copy(E, e)
            T.copy(B, b)
            T.gemm_sp(a, e, b, c)
            T.copy(c, C)

    return main


@tilelang.jit(out_idx=[-1])
def counted_signs(N):
    """Integers get whole numbers that are written as floats; the first block says that it has begun."""

    @T.prim_func
    def main(A: T.Tensor((N,), T.float32), B: T.Tensor((N,), T.int32)):
        with T.Kernel(T.ceildiv(N, 32), threads=32) as block:
            if block == 0:
                T.print(msg="counted_signs has begun")
            for i in T.Parallel(32):
                at = block * 32 + i
                if at < N:
                    B[at] = 0.0
                    if A[at] > 0:
                        B[at] = 1.0
                    elif A[at] < 0:
                        B[at] = -1.0

    return main
