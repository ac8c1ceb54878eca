# SPDX-License-Identifier: Apache-2.0
"""Small programs after reports on Triton, TVM, Halide, XLA, MLIR and CUTLASS: folded quotients, histograms, ties of
argmax, windows, gathers with clamped places, tables in shared memory, products with little K.
"""

import itertools
import math
import sys
from pathlib import Path

import torch
from torch.nn.functional import max_pool1d, pad

sys.path.insert(0, str(Path(__file__).parent))
from reported import Case, Cases, whole, zeros

import torch_tile.language as T

case = Cases()
I32, I64 = torch.int32, torch.int64


def floordiv(a: torch.Tensor, b: int) -> torch.Tensor:
    return torch.div(a, b, rounding_mode="floor")


@case
def quotients_that_fold() -> Case:
    """Halide: (x * 4 + y) // 4 is x + y // 4, and x // 2 * 2 is not x, whatever the signs."""

    @T.prim_func
    def kernel(X: T.Tensor((64,), "int32"), Y: T.Tensor((64,), "int32"), O: T.Tensor((6, 64), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                O[0, i] = (X[i] * 4 + Y[i]) // 4
                O[1, i] = X[i] // 2 * 2
                O[2, i] = (X[i] + 1) // 2 - X[i] // 2
                O[3, i] = (X[i] * 6) // 4
                O[4, i] = (X[i] // 3) // 5
                O[5, i] = (X[i] * 6 + 3) % 3 + (X[i] * 6 + 5) % 4

    x, y = whole(64, dtype=I32, most=90), whole(64, dtype=I32, most=90)
    six = x * 6
    wanted = [floordiv(x * 4 + y, 4), floordiv(x, 2) * 2, floordiv(x + 1, 2) - floordiv(x, 2), floordiv(six, 4)]
    wanted += [floordiv(floordiv(x, 3), 5), (six + 3) % 3 + (six + 5) % 4]
    return kernel, [x, y, zeros(6, 64, dtype=I32)], {2: torch.stack(wanted).int()}


@case
def negative_constants_as_divisors() -> Case:
    """TVM: `x // -3` and `x % -3` round as Python's."""

    @T.prim_func
    def kernel(X: T.Tensor((64,), "int32"), O: T.Tensor((4, 64), "int32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                O[0, i] = X[i] // -3
                O[1, i] = X[i] % -3
                O[2, i] = (i - 30) // -4
                O[3, i] = (i - 30) % -4

    x, i = whole(64, dtype=I32, most=50), torch.arange(64) - 30
    wanted = [floordiv(x, -3), torch.remainder(x, -3), floordiv(i, -4), torch.remainder(i, -4)]
    return kernel, [x, zeros(4, 64, dtype=I32)], {1: torch.stack([w.int() for w in wanted])}


@case
def histogram_of_a_shared_tile() -> Case:
    """Triton: bins in shared memory, some elements masked, more elements than threads."""

    @T.prim_func
    def kernel(X: T.Tensor((500,), "int32"), O: T.Tensor((16,), "int32"), n: T.int32):
        with T.Kernel(1, threads=64):
            bins = T.alloc_shared((16,), "int32")
            T.clear(bins)
            for i in T.Parallel(500):
                if i < n:
                    T.atomic_add(bins[X[i] % 16], 1)
            for j in T.Parallel(16):
                O[j] = bins[j]

    x = whole(500, dtype=I32, most=40)
    return kernel, [x, zeros(16, dtype=I32), 377], {1: torch.bincount((x[:377] % 16).long(), minlength=16).int()}


@case
def first_of_equal_maxima() -> Case:
    """Triton: argmax takes the first of equal elements, across threads and registers."""

    @T.prim_func
    def kernel(X: T.Tensor((9, 70), "float32"), O: T.Tensor((9,), "int32")):
        with T.Kernel(1, threads=64):
            x, m = T.alloc_fragment((9, 70), "float32"), T.alloc_fragment((9,), "float32")
            at, first = T.alloc_fragment((9, 70), "int32"), T.alloc_fragment((9,), "int32")
            T.copy(X, x)
            T.reduce_max(x, m, dim=1)
            for i, j in T.Parallel(9, 70):
                at[i, j] = T.if_then_else(x[i, j] == m[i], j, 70)
            T.reduce_min(at, first, dim=1)
            T.copy(first, O)

    x = whole(9, 70, most=3)
    return kernel, [x, zeros(9, dtype=I32)], {1: (x == x.amax(1, True)).int().argmax(1).int()}


@case
def windows_of_maxima() -> Case:
    """XLA: a reduce-window with padding of the least value, whose windows overlap."""

    @T.prim_func
    def kernel(X: T.Tensor((101,), "float32"), O: T.Tensor((51,), "float32")):
        with T.Kernel(2, threads=32) as b:
            for i in T.Parallel(32):
                m = T.alloc_var("float32", -T.infinity("float32"))
                for k in T.serial(5):
                    at = (b * 32 + i) * 2 + k - 2
                    if at >= 0 and at < 101:
                        m = T.max(m, X[at])
                if b * 32 + i < 51:
                    O[b * 32 + i] = m

    x = -whole(101, most=9).abs() - 1
    return kernel, [x, zeros(51)], {1: max_pool1d(x[None], 5, 2, 2)[0]}


@case
def gather_with_clamped_places() -> Case:
    """XLA: places outside are clamped, negative ones included, and never read outside."""

    @T.prim_func
    def kernel(X: T.Tensor((40, 8), "float32"), P: T.Tensor((33,), "int64"), O: T.Tensor((33, 8), "float32")):
        with T.Kernel(1, threads=64):
            for i, j in T.Parallel(33, 8):
                O[i, j] = X[T.clamp(P[i], 0, 39), j]

    x, p = whole(40, 8), torch.randint(-60, 100, (33,))
    p[:2] = torch.tensor([2**62, -(2**62)])
    return kernel, [x, p, zeros(33, 8)], {2: x[p.clamp(0, 39)]}


@case
def update_of_a_slice_that_overlaps() -> Case:
    """XLA: a dynamic-update-slice reads what it overwrites."""

    @T.prim_func
    def kernel(X: T.Tensor((64,), "float32"), s: T.int32):
        with T.Kernel(1, threads=32):
            part = T.alloc_fragment((40,), "float32")
            for i in T.Parallel(40):
                part[i] = X[i] * 2
            for i in T.Parallel(40):
                X[s + i] = part[i]

    x = whole(64)
    wanted = x.clone()
    wanted[7:47] = x[:40] * 2
    return kernel, [x, 7], {0: wanted}


@case
def masks_of_unsigned_differences() -> Case:
    """MLIR: `a - b < c` of unsigned numbers wraps before it compares."""

    @T.prim_func
    def kernel(X: T.Tensor((64,), "uint32"), Y: T.Tensor((64,), "uint32"), O: T.Tensor((3, 64), "int32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                O[0, i] = T.cast(X[i] - Y[i] < T.uint32(5), "int32")
                O[1, i] = T.cast(X[i] - Y[i] >= T.uint32(0), "int32")
                O[2, i] = T.cast((X[i] - T.uint32(1)) > X[i], "int32")

    x, y = torch.randint(0, 8, (64,)), torch.randint(0, 8, (64,))
    d = (x - y) % 2**32
    wanted = torch.stack([(d < 5).int(), torch.ones(64, dtype=I32), (x == 0).int()])
    return kernel, [x.to(torch.uint32), y.to(torch.uint32), zeros(3, 64, dtype=I32)], {2: wanted}


@case
def products_with_little_k() -> Case:
    """CUTLASS: K below the tile's, with NaN in memory behind the operands' rows."""

    @T.prim_func
    def kernel(
        A: T.Tensor((37, 24), "float16"), B: T.Tensor((24, 41), "float16"), C: T.Tensor((37, 41), "float32"), k: T.int32
    ):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for i, j in T.Parallel(64, 32):
                a[i, j] = T.if_then_else(i < 37 and j < k, A[i, j], T.float16(0))
            for i, j in T.Parallel(32, 64):
                b[i, j] = T.if_then_else(i < k and j < 41, B[i, j], T.float16(0))
            T.gemm(a, b, c)
            T.copy(c, C[0, 0])

    a, b = whole(37, 24, dtype=torch.float16), whole(24, 41, dtype=torch.float16)
    wanted = a[:, :9].float() @ b[:9].float()
    a[:, 9:], b[9:] = math.nan, math.nan
    return kernel, [a, b, zeros(37, 41), 9], {2: wanted}


@case
def product_with_one_row() -> Case:
    """CUTLASS: M of 1, in a tile of 16 rows, added to what was there."""

    @T.prim_func
    def kernel(A: T.Tensor((1, 64), "float16"), B: T.Tensor((48, 64), "float16"), C: T.Tensor((1, 48), "float32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((16, 64), "float16"), T.alloc_shared((48, 64), "float16")
            c = T.alloc_fragment((16, 48), "float32")
            T.copy(A[0, 0], a)
            T.copy(B, b)
            T.copy(C[0, 0], c)
            T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[0, 0])

    a, b, c = whole(1, 64, dtype=torch.float16), whole(48, 64, dtype=torch.float16), whole(1, 48)
    return kernel, [a, b, c], {2: c + a.float() @ b.float().T}


@case
def table_in_shared_memory() -> Case:
    """Triton: a table of 16 numbers is looked up by nibbles, low and high."""

    @T.prim_func
    def kernel(Q: T.Tensor((50,), "uint8"), L: T.Tensor((16,), "float32"), O: T.Tensor((50, 2), "float32")):
        with T.Kernel(1, threads=32):
            table = T.alloc_shared((16,), "float32")
            T.copy(L, table)
            for i in T.Parallel(50):
                O[i, 0] = table[T.cast(Q[i] & 15, "int32")]
                O[i, 1] = table[T.cast(Q[i] >> 4, "int32")]

    q, t = torch.randint(0, 256, (50,), dtype=torch.uint8), whole(16, most=90)
    return kernel, [q, t, zeros(50, 2)], {2: torch.stack([t[(q & 15).long()], t[(q >> 4).long()]], 1)}


@case
def running_state_between_chunks() -> Case:
    """Triton: a scan of chunks, whose last element is the next chunk's start."""

    @T.prim_func
    def kernel(X: T.Tensor((3, 100), "float32"), O: T.Tensor((3, 100), "float32")):
        with T.Kernel(3, threads=32) as b:
            tile, state = T.alloc_shared((32,), "float32"), T.alloc_shared((1,), "float32")
            T.clear(state)
            for c in T.serial(4):
                for i in T.Parallel(32):
                    tile[i] = T.if_then_else(c * 32 + i < 100, X[b, c * 32 + i], 0.0)
                T.cumsum(tile, dim=0)
                for i in T.Parallel(32):
                    if c * 32 + i < 100:
                        O[b, c * 32 + i] = tile[i] + state[0]
                for i in T.Parallel(1):
                    state[i] = state[i] + tile[31]

    x = whole(3, 100)
    return kernel, [x, zeros(3, 100)], {1: x.cumsum(1)}


@case
def segments_of_unequal_length() -> Case:
    """Triton: sums of segments that offsets in memory bound; some are empty."""

    @T.prim_func
    def kernel(X: T.Tensor((200,), "float32"), S: T.Tensor((9,), "int32"), O: T.Tensor((8,), "float32")):
        with T.Kernel(8, threads=32) as b:
            part, total = T.alloc_fragment((32,), "float32"), T.alloc_fragment((1,), "float32")
            T.clear(part)
            for c in T.serial(T.ceildiv(S[b + 1] - S[b], 32)):
                for i in T.Parallel(32):
                    if S[b] + c * 32 + i < S[b + 1]:
                        part[i] += X[S[b] + c * 32 + i]
            T.reduce_sum(part, total, dim=0)
            O[b] = total[0]

    x, s = whole(200), torch.tensor([0, 0, 5, 40, 41, 140, 140, 199, 200], dtype=I32)
    return kernel, [x, s, zeros(8)], {2: torch.stack([x[a:b].sum() for a, b in itertools.pairwise(s)])}


@case
def flags_that_stop_a_loop() -> Case:
    """Taichi: a loop ends by a flag that its body's last branch sets."""

    @T.prim_func
    def kernel(X: T.Tensor((12,), "int32"), O: T.Tensor((12,), "int32")):
        with T.Kernel(12, threads=32) as b:
            done, n, v = T.alloc_var("bool", False), T.alloc_var("int32", 0), T.alloc_var("int32", 0)
            v = X[b]
            while not done:
                v = T.if_then_else(v % 3 == 0, v // 3, v - 1)
                n += 1
                if v <= 0 or n > 50:
                    done = True
            O[b] = n

    x = torch.arange(12, dtype=I32) * 7

    def turns(v: int) -> int:
        n = 0
        while True:
            v = v // 3 if v % 3 == 0 else v - 1
            n += 1
            if v <= 0 or n > 50:
                return n

    return kernel, [x, zeros(12, dtype=I32)], {1: torch.tensor([turns(v) for v in x.tolist()], dtype=I32)}


@case
def matrix_by_its_own_transpose() -> Case:
    """TVM: one tile is both operands, as it is and transposed."""

    @T.prim_func
    def kernel(A: T.Tensor((32, 48), "float16"), C: T.Tensor((32, 32), "float32")):
        with T.Kernel(1, threads=128):
            a, c = T.alloc_shared((32, 48), "float16"), T.alloc_fragment((32, 32), "float32")
            T.copy(A, a)
            T.clear(c)
            T.gemm(a, a, c, transpose_B=True)
            T.copy(c, C)

    a = whole(32, 48, dtype=torch.float16)
    return kernel, [a, zeros(32, 32)], {1: a.float() @ a.float().T}


@case
def alternating_signs_by_parity() -> Case:
    """Numba: (-1) ** i by arithmetic of the index."""

    @T.prim_func
    def kernel(X: T.Tensor((77,), "float32"), O: T.Tensor((77,), "float32")):
        with T.Kernel(2, threads=64) as b:
            for i in T.Parallel(64):
                n = b * 64 + i
                if n < 77:
                    O[n] = X[76 - n] * (1 - 2 * (n & 1))

    x = whole(77)
    return kernel, [x, zeros(77)], {1: x.flip(0) * (1 - 2 * (torch.arange(77) & 1))}


@case
def stencil_with_wrapped_edges() -> Case:
    """Halide: neighbours around both edges by remainders of negative numbers."""

    @T.prim_func
    def kernel(X: T.Tensor((9, 13), "float32"), O: T.Tensor((9, 13), "float32")):
        with T.Kernel(1, threads=64):
            for i, j in T.Parallel(9, 13):
                O[i, j] = X[(i - 1) % 9, j] + X[(i + 1) % 9, j] + X[i, (j - 1) % 13] + X[i, (j + 1) % 13] - 4 * X[i, j]

    x = whole(9, 13)
    return kernel, [x, zeros(9, 13)], {1: x.roll(1, 0) + x.roll(-1, 0) + x.roll(1, 1) + x.roll(-1, 1) - 4 * x}


@case
def triangle_of_a_tile() -> Case:
    """Triton: the lower triangle, with the diagonal of a shifted block, elsewhere a constant."""

    @T.prim_func
    def kernel(X: T.Tensor((70, 70), "float32"), O: T.Tensor((70, 70), "float32")):
        with T.Kernel(3, 3, threads=64) as (bx, by):
            t = T.alloc_fragment((32, 32), "float32")
            T.copy(X[by * 32, bx * 32], t)
            for i, j in T.Parallel(32, 32):
                t[i, j] = T.if_then_else(by * 32 + i >= bx * 32 + j + 3, t[i, j], -1.0)
            T.copy(t, O[by * 32, bx * 32])

    x = whole(70, 70)
    return kernel, [x, zeros(70, 70)], {1: torch.where(torch.ones(70, 70).tril(-3) > 0, x, -1.0)}


@case
def rotation_of_halves() -> Case:
    """Triton: rotary pairs of elements half a row apart, in place."""

    @T.prim_func
    def kernel(X: T.Tensor((5, 64), "float32"), C: T.Tensor((32,), "float32"), S: T.Tensor((32,), "float32")):
        with T.Kernel(5, threads=32) as b:
            for i in T.Parallel(32):
                lo, hi = T.alloc_var("float32", X[b, i]), T.alloc_var("float32", X[b, i + 32])
                X[b, i] = lo * C[i] - hi * S[i]
                X[b, i + 32] = hi * C[i] + lo * S[i]

    x, c, s = whole(5, 64), whole(32), whole(32)
    lo, hi = x[:, :32], x[:, 32:]
    return kernel, [x.clone(), c, s], {0: torch.cat([lo * c - hi * s, hi * c + lo * s], 1)}


@case
def sums_in_two_widths() -> Case:
    """Inductor: a mean of bfloat16 sums in float32, its count in int32."""

    @T.prim_func
    def kernel(X: T.Tensor((6, 96), "bfloat16"), O: T.Tensor((6,), "float32"), N: T.Tensor((6,), "int32")):
        with T.Kernel(1, threads=64):
            x, s = T.alloc_fragment((6, 96), "float32"), T.alloc_fragment((6,), "float32")
            one, n = T.alloc_fragment((6, 96), "int32"), T.alloc_fragment((6,), "int32")
            T.copy(X, x)
            for i, j in T.Parallel(6, 96):
                one[i, j] = T.cast(x[i, j] > 0, "int32")
                x[i, j] = T.max(x[i, j], 0.0)
            T.reduce_sum(x, s, dim=1)
            T.reduce_sum(one, n, dim=1)
            T.copy(s, O)
            T.copy(n, N)

    x = whole(6, 96, dtype=torch.bfloat16)
    return kernel, [x, zeros(6), zeros(6, dtype=I32)], {1: x.float().relu().sum(1), 2: (x > 0).sum(1).int()}


@case
def blocks_that_meet_in_atomics() -> Case:
    """TVM: maxima and sums of all blocks in one place, started from what memory holds."""

    @T.prim_func
    def kernel(X: T.Tensor((300,), "int32"), O: T.Tensor((3,), "int32")):
        with T.Kernel(10, threads=32) as b:
            for i in T.Parallel(30):
                T.atomic_add(O[0], X[b * 30 + i])
                T.atomic_max(O[1], X[b * 30 + i])
                T.atomic_min(O[2], X[b * 30 + i])

    x, o = whole(300, dtype=I32, most=500), torch.tensor([7, -9, 9], dtype=I32)
    wanted = torch.stack([x.sum().int() + 7, x.max().clamp(min=-9), x.min().clamp(max=9)]).int()
    return kernel, [x, o], {1: wanted}


@case
def copies_of_one_column() -> Case:
    """TileLang: a column of a matrix goes to a row of shared memory and back to another column."""

    @T.prim_func
    def kernel(X: T.Tensor((40, 7), "float32"), O: T.Tensor((40, 7), "float32")):
        with T.Kernel(7, threads=32) as b:
            s = T.alloc_shared((40,), "float32")
            T.copy(X[:, b], s)
            for i in T.Parallel(40):
                s[i] = s[i] * (b + 1)
            T.copy(s, O[:, 6 - b])

    x = whole(40, 7)
    return kernel, [x, zeros(40, 7)], {1: (x * torch.arange(1, 8)).flip(1)}


@case
def exchange_between_two_tiles() -> Case:
    """Taichi: two shared tiles swap through a third, in a loop of an odd number of turns."""

    @T.prim_func
    def kernel(X: T.Tensor((2, 48), "int32"), n: T.int32):
        with T.Kernel(1, threads=32):
            a, b, t = T.alloc_shared((48,), "int32"), T.alloc_shared((48,), "int32"), T.alloc_fragment((48,), "int32")
            T.copy(X[0, :], a)
            T.copy(X[1, :], b)
            for _ in T.serial(n):
                T.copy(a, t)
                for i in T.Parallel(48):
                    a[i] = b[47 - i] + 1
                T.copy(t, b)
            T.copy(a, X[0, :])
            T.copy(b, X[1, :])

    x = whole(2, 48, dtype=I32)
    a, b = x
    for _ in range(5):
        a, b = b.flip(0) + 1, a
    return kernel, [x.clone(), 5], {0: torch.stack([a, b])}


@case
def padding_in_front() -> Case:
    """Inductor: constant_pad with negative and positive widths."""

    @T.prim_func
    def kernel(X: T.Tensor((20,), "float32"), O: T.Tensor((22,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(22):
                O[i] = T.if_then_else(T.And(i - 5 >= 0, i - 5 < 17), X[T.clamp(i - 5, 0, 19)], 2.5)

    x = whole(20)
    return kernel, [x, zeros(22)], {1: pad(x[:17], (5, 0), value=2.5)}


@case
def bits_gathered_by_a_loop() -> Case:
    """Numba: 64 truth values become one unsigned word, the last one its sign."""

    @T.prim_func
    def kernel(X: T.Tensor((4, 64), "bool"), O: T.Tensor((4,), "uint64")):
        with T.Kernel(4, threads=32) as b:
            v = T.alloc_var("uint64", T.uint64(0))
            for i in T.serial(64):
                v = v | (T.cast(X[b, i], "uint64") << i)
            O[b] = v

    x = torch.rand(4, 64) > 0.5
    bits = [sum(int(v) << i for i, v in enumerate(row)) for row in x.tolist()]
    wanted = torch.tensor([v - 2**64 if v >= 2**63 else v for v in bits]).view(torch.uint64)
    return kernel, [x, torch.zeros(4, dtype=I64).view(torch.uint64)], {1: wanted}


@case
def powers_by_squaring() -> Case:
    """MLIR: a loop over the bits of an exponent, modulo a prime, in 64 bits."""

    @T.prim_func
    def kernel(X: T.Tensor((20,), "int32"), E: T.Tensor((20,), "int32"), O: T.Tensor((20,), "int64")):
        with T.Kernel(20, threads=32) as b:
            base, e, r = T.alloc_var("int64", 0), T.alloc_var("int32", 0), T.alloc_var("int64", 1)
            base = T.cast(X[b], "int64")
            e = E[b]
            while e > 0:
                if e & 1 == 1:
                    r = r * base % 1000003
                base = base * base % 1000003
                e >>= 1
            O[b] = r

    x, e = torch.randint(2, 1000, (20,), dtype=I32), torch.randint(0, 500, (20,), dtype=I32)
    return (
        kernel,
        [x, e, zeros(20, dtype=I64)],
        {2: torch.tensor([pow(a, b, 1000003) for a, b in zip(x.tolist(), e.tolist(), strict=True)])},
    )


@case
def merge_of_sorted_halves() -> Case:
    """Triton: the rank of each element by comparisons sorts a row, ties by their place."""

    @T.prim_func
    def kernel(X: T.Tensor((5, 32), "float32"), O: T.Tensor((5, 32), "float32")):
        with T.Kernel(5, threads=32) as b:
            s = T.alloc_shared((32,), "float32")
            T.copy(X[b, :], s)
            for i in T.Parallel(32):
                rank = T.alloc_var("int32", 0)
                for j in T.serial(32):
                    if s[j] < s[i] or (s[j] == s[i] and j < i):
                        rank += 1
                O[b, rank] = s[i]

    x = whole(5, 32, most=6)
    return kernel, [x, zeros(5, 32)], {1: x.sort(1).values}


@case
def logical_chains_of_loads() -> Case:
    """Halide: `a or b and not c` of loaded truth values, and their exclusive or."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64,), "bool"), B: T.Tensor((64,), "bool"), C: T.Tensor((64,), "bool"), O: T.Tensor((2, 64), "bool")
    ):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                O[0, i] = A[i] or (B[i] and not C[i])
                O[1, i] = (A[i] != B[i]) != C[i]

    a, b, c = (torch.rand(64) > 0.5 for _ in range(3))
    return kernel, [a, b, c, zeros(2, 64, dtype=torch.bool)], {3: torch.stack([a | (b & ~c), a ^ b ^ c])}


@case
def outer_product_into_a_fragment() -> Case:
    """TVM: a column and a row of shared memory meet in one nest, accumulated over turns."""

    @T.prim_func
    def kernel(A: T.Tensor((4, 20), "float32"), B: T.Tensor((4, 24), "float32"), O: T.Tensor((20, 24), "float32")):
        with T.Kernel(1, threads=64):
            a, b = T.alloc_shared((20,), "float32"), T.alloc_shared((24,), "float32")
            f = T.alloc_fragment((20, 24), "float32")
            T.clear(f)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[k, :], a)
                T.copy(B[k, :], b)
                for i, j in T.Parallel(20, 24):
                    f[i, j] += a[i] * b[j]
            T.copy(f, O)

    a, b = whole(4, 20), whole(4, 24)
    return kernel, [a, b, zeros(20, 24)], {2: a.T @ b}


@case
def norms_of_rows_by_two_reductions() -> Case:
    """Triton: max of absolute values, then counts of those that reach it."""

    @T.prim_func
    def kernel(X: T.Tensor((11, 50), "float32"), O: T.Tensor((11, 2), "float32")):
        with T.Kernel(1, threads=128):
            x, m = T.alloc_fragment((11, 50), "float32"), T.alloc_fragment((11,), "float32")
            c, n = T.alloc_fragment((11, 50), "float32"), T.alloc_fragment((11,), "float32")
            T.copy(X, x)
            T.reduce_absmax(x, m, dim=1)
            for i, j in T.Parallel(11, 50):
                c[i, j] = T.if_then_else(T.abs(x[i, j]) == m[i], 1.0, 0.0)
            T.reduce_sum(c, n, dim=1)
            for i in T.Parallel(11):
                O[i, 0] = m[i]
                O[i, 1] = n[i]

    x = whole(11, 50)
    m = x.abs().amax(1)
    return kernel, [x, zeros(11, 2)], {1: torch.stack([m, (x.abs() == m[:, None]).sum(1).float()], 1)}


@case
def dynamic_extent_of_zero() -> Case:
    """XLA: nothing is done for a size of 0 in one dimension, and what was there stays."""
    n = T.dynamic("n")

    @T.prim_func
    def kernel(X: T.Tensor((n, 4), "float32"), O: T.Tensor((5,), "float32")):
        with T.Kernel(1, threads=32):
            for k in T.serial(n):
                for i in T.Parallel(4):
                    O[i] = O[i] + X[k, i]
            O[4] = T.cast(n, "float32")

    o = whole(5)
    return kernel, [zeros(0, 4), o.clone()], {1: torch.cat([o[:4], torch.zeros(1)])}


test_reported_shapes = case.test()
