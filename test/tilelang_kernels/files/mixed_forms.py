# SPDX-License-Identifier: Apache-2.0
"""Forms of Python and TileLang mixed in one kernel: objects of tiles, swaps, rings, two launches."""

import tilelang
import tilelang.language as T


@tilelang.jit(out_idx=[-1])
def ring_of_tiles(M, K, block=32):
    """Row sums by tiles that are loaded two turns ahead into a ring, whose places are remainders."""

    @T.prim_func
    def main(A: T.Tensor((M, K), "float32"), B: T.Tensor((M,), "float32")):
        with T.Kernel(1, threads=64):
            ring = T.alloc_shared((3, M, block), "float32")
            tile = T.alloc_fragment((M, block), "float32")
            sums = T.alloc_fragment((M,), "float32")
            T.clear(sums)
            for k in T.serial(2):
                T.copy(A[0, k * block], ring[k, :, :])
            for k in T.serial(K // block):
                if k + 2 < K // block:
                    T.copy(A[0:M, (k + 2) * block : (k + 3) * block], ring[(k + 2) % 3, :, :])
                T.copy(ring[k % 3, :, :], tile)
                T.reduce_sum(tile, sums, dim=1, clear=False)
            T.copy(sums, B)

    return main


@tilelang.jit(out_idx=[-1])
def python_conditions(N):
    """Chained comparisons, `not`, `elif`, assignments with operators and a choice between values."""

    @T.prim_func
    def main(A: T.Tensor((N,), "int32"), B: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(N):
                x = T.alloc_var("int32", A[i])
                x += 3
                x -= i
                x *= 2
                if -5 <= x < 20 and not (x % 3 == 0 or i == 7):
                    x //= 3
                elif x < -30:
                    x %= 7
                else:
                    x ^= 5
                x <<= 1
                x |= 1
                B[i] = x if x > 4 else -x

    return main


class Tiles:
    """Tiles by name."""

    def __init__(self, **tiles):
        self.__dict__.update(tiles)


@tilelang.jit(out_idx=[-1])
def tiles_in_objects(M, N):
    """Column means of squares; Python's objects and dictionaries hold the tiles."""

    @T.prim_func
    def main(A: T.Tensor((M, N), "float32"), B: T.Tensor((N,), "float32")):
        with T.Kernel(1, threads=64):
            tiles = Tiles(rows=T.alloc_fragment(A.shape, A.dtype), means=T.alloc_fragment((A.shape[1],), A.dtype))
            by_name = {"rows": tiles.rows}
            T.copy(A, by_name["rows"])
            for i, j in T.Parallel(*A.shape):
                by_name["rows"][i, j] *= by_name["rows"][i, j]
            T.reduce_sum(tiles.rows, tiles.means, dim=0)
            for j in T.Parallel(N):
                B[j] = tiles.means[j] / A.shape[0]

    return main


@tilelang.jit(out_idx=[-1])
def swapped_variables(N):
    """A sequence in which each number is the sum of the two before it: two variables change places."""

    @T.prim_func
    def main(S: T.Tensor((2,), "int32"), F: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=1):
            a = T.alloc_var("int32")
            b = T.alloc_var("int32")
            a = S[0]
            b = S[1]
            for i in T.serial(N):
                F[i] = a
                a, b = b, a + b

    return main


@tilelang.jit(out_idx=[-1])
def patches(size=7, channels=4):
    """Patches of 3 x 3 at every second place of images with a border of zeros."""

    @T.prim_func
    def main(X: T.Tensor((2, size, size, channels), "float32"), Y: T.Tensor((2, 16, 9 * channels), "float32")):
        with T.Kernel(2, threads=128) as n:
            tile = T.alloc_shared((16, 9 * channels), "float32")
            for p, q in T.Parallel(16, 9 * channels):
                y = p // 4 * 2 + q // (3 * channels) - 1
                x = p % 4 * 2 + q // channels % 3 - 1
                inside = (y >= 0) and (y < size) and (x >= 0) and (x < size)
                tile[p, q] = T.if_then_else(inside, X[n, y, x, q % channels], 0)
            T.copy(tile, Y[n, :, :])

    return main


@tilelang.jit(out_idx=[-1])
def normalized_by_two_launches(M, N):
    """Values less their mean, over their deviation; a tensor of the kernel's own carries sums to the second launch."""

    @T.prim_func
    def main(A: T.Tensor((M, N), "float32"), B: T.Tensor((M, N), "float32")):
        W = T.alloc_global((M, 2), "float32")
        with T.Kernel(M, threads=32) as b:
            row = T.alloc_fragment((N,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.copy(A[b, :], row)
            T.reduce_sum(row, total, dim=0)
            W[b, 0] = total[0]
            for i in T.Parallel(N):
                row[i] *= row[i]
            T.reduce_sum(row, total, dim=0)
            W[b, 1] = total[0]
        with T.Kernel(M, threads=32) as b:
            sums = T.alloc_fragment((M, 2), "float32")
            both = T.alloc_fragment((2,), "float32")
            T.copy(W, sums)
            T.reduce_sum(sums, both, dim=0)
            for i in T.Parallel(N):
                mean = both[0] / (M * N)
                B[b, i] = (A[b, i] - mean) * T.rsqrt(both[1] / (M * N) - mean * mean)

    return main


@tilelang.jit(out_idx=[-1])
def sums_up_to_the_diagonal(blocks=4, rows=16, columns=24):
    """Sums of blocks up to the diagonal; the number of turns is the device's."""

    @T.prim_func
    def main(A: T.Tensor((blocks * rows, blocks * columns), "float16"), B: T.Tensor((blocks,), "float32")):
        with T.Kernel(blocks, threads=64) as b:
            tile = T.alloc_shared((rows, columns), "float16")
            added = T.alloc_fragment((rows, columns), "float32")
            by_row = T.alloc_fragment((rows,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.clear(added)
            for k in T.Pipelined(T.min(b + 1, blocks), num_stages=3):
                T.copy(A[b * rows, k * columns], tile)
                for i, j in T.Parallel(rows, columns):
                    added[i, j] += tile[i, j]
            T.reduce_sum(added, by_row, dim=1)
            T.reduce_sum(by_row, total, dim=0)
            T.copy(total, B[b])

    return main


@tilelang.jit(out_idx=[-1])
def decoded_by_scales(M, N, group=32, per_turn=8, threads=32):
    """Fields of 4 bits times their groups' scales; a serial loop reads each scale from global memory."""

    @T.prim_func
    def main(
        A: T.Tensor((M, N // 2), "uint8"), S: T.Tensor((M, N // group), "float16"), B: T.Tensor((M, N), "float16")
    ):
        with T.Kernel(M, threads=threads) as b:
            for i in T.serial(N // (threads * per_turn)):
                for t in T.Parallel(threads):
                    for v in T.serial(per_turn):
                        at = (i * threads + t) * per_turn + v
                        field = (A[b, at // 2] >> (at % 2 * 4)) & T.uint8(15)
                        B[b, at] = (T.cast(field, "float16") - T.float16(8)) * S[b, at // group]

    return main
