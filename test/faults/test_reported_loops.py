# SPDX-License-Identifier: Apache-2.0
"""Small programs after reports on TileLang, MLIR, Numba and Triton: narrow numbers, loops, tiles in groups."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from reported import Case, Cases, any_ints, counts, ints, whole, zeros

import torch_tile.language as T

case = Cases()
I8, I16, I32, I64, U8, U16, U32, HALF = (
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.float16,
)  # fmt: skip


@case
def nibbles_by_two_shifts() -> Case:
    """Tile-ai/tilelang #2961: C++ shifts narrow numbers as int."""

    @T.prim_func
    def kernel(
        X: T.Tensor((64,), "int8"), Y: T.Tensor((64,), "uint8"), O: T.Tensor((64,), "int8"), P: T.Tensor((64,), "uint8")
    ):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                O[i] = (X[i] << T.int8(4)) >> T.int8(4)
                P[i] = (Y[i] << T.uint8(3)) >> T.uint8(3)

    x, y = any_ints(I8, 64), any_ints(U8, 64)
    low = x.int() & 15
    return (
        kernel,
        [x, y, zeros(64, dtype=I8), zeros(64, dtype=U8)],
        {2: torch.where(low > 7, low - 16, low).to(I8), 3: (y.int() & 31).to(U8)},
    )


@case
def constants_cast_to_types_that_do_not_hold_them() -> Case:
    """Tile-ai/tilelang #3000: the compiler failed on a literal beyond the type."""

    @T.prim_func
    def kernel(O: T.Tensor((4,), "int8"), P: T.Tensor((4,), "uint16")):
        with T.Kernel(1, threads=32):
            O[0] = T.cast(300, "int8")
            O[1] = T.cast(-129, "int8")
            O[2] = T.cast(T.int32(128), "int8")
            O[3] = T.cast(T.int64(2**40 + 5), "int8")
            P[0] = T.cast(70000, "uint16")
            P[1] = T.cast(-1, "uint16")
            P[2] = T.cast(T.int64(-(2**33) - 2), "uint16")
            P[3] = T.cast(T.cast(300, "int8"), "uint16")

    return (
        kernel,
        [zeros(4, dtype=I8), zeros(4, dtype=U16)],
        {0: ints([300, -129, 128, 5], I8), 1: ints([70000, -1, -2, 44], U16)},
    )


@case
def unsigned_bytes_become_wider() -> Case:
    """Tile-ai/tilelang #2974: the sign was extended."""

    @T.prim_func
    def kernel(
        X: T.Tensor((48,), "uint8"), Y: T.Tensor((48,), "uint16"), O: T.Tensor((48,), "int32"),
        P: T.Tensor((48,), "int64"), Q: T.Tensor((48,), "float32"), R: T.Tensor((48,), "int16"),
    ):  # fmt: skip
        with T.Kernel(1, threads=32):
            x, y = T.alloc_fragment((48,), "uint8"), T.alloc_shared((48,), "uint16")
            T.copy(X, x)
            T.copy(Y, y)
            for i in T.Parallel(48):
                O[i] = x[i]
                P[i] = y[47 - i]
                Q[i] = y[i]
                R[i] = x[i]

    x, y = any_ints(U8, 48), any_ints(U16, 48)
    return (
        kernel,
        [x, y, zeros(48, dtype=I32), zeros(48, dtype=I64), zeros(48), zeros(48, dtype=I16)],
        {2: x.int(), 3: y.long().flip(0), 4: y.float(), 5: x.short()},
    )


@case
def negative_numbers_filled_into_all_widths() -> Case:
    """Tile-ai/tilelang #2427, #2489: packing did not mask the sign."""

    @T.prim_func
    def kernel(
        O: T.Tensor((70,), "int8"),
        P: T.Tensor((70,), "int16"),
        Q: T.Tensor((70,), "int32"),
        R: T.Tensor((70,), "int64"),
        v: T.int32,
    ):
        with T.Kernel(1, threads=32):
            o, p = T.alloc_shared((70,), "int8"), T.alloc_fragment((70,), "int16")
            T.fill(o, -7)
            T.fill(p, T.cast(v, "int16"))
            T.copy(o, O)
            T.copy(p, P)
            for i in T.Parallel(70):
                Q[i] = -2
            T.fill(R, T.cast(v, "int64") - 2**40)

    return (
        kernel,
        [zeros(70, dtype=I8), zeros(70, dtype=I16), zeros(70, dtype=I32), zeros(70, dtype=I64), -12345],
        {
            0: torch.full((70,), -7, dtype=I8),
            1: torch.full((70,), -12345, dtype=I16),
            2: torch.full((70,), -2, dtype=I32),
            3: torch.full((70,), -12345 - 2**40),
        },
    )


@case
def two_branches_on_what_the_first_one_changes() -> Case:
    """Tile-ai/tilelang #2538: branches on equal conditions were merged."""

    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=32):
            v = T.alloc_fragment((64,), "int32")
            T.copy(A, v)
            for i in T.Parallel(64):
                O[i] = 0
                if A[i] == 0:
                    A[i] = 7
                if A[i] == 0:
                    O[i] += 5
                if v[i] > 0:
                    v[i] = -v[i]
                if v[i] > 0:
                    O[i] += 100
                if v[i] < 0:
                    O[i] += v[i]

    a = whole(64, dtype=I32)
    return kernel, [a, zeros(64, dtype=I32)], {0: torch.where(a == 0, 7, a), 1: -a.abs()}


@case
def invariant_condition_around_copies_of_a_loop() -> Case:
    """Tile-ai/tilelang #1804: loops were split by an invariant condition, and lost what stood beside it."""

    @T.prim_func
    def kernel(X: T.Tensor((5, 64), "float32"), flags: T.Tensor((2,), "int32"), O: T.Tensor((2, 64), "float32")):
        with T.Kernel(2, threads=64) as b:
            s, acc = T.alloc_shared((64,), "float32"), T.alloc_fragment((64,), "float32")
            T.clear(acc)
            for k in T.serial(5):
                if flags[b] > 0:
                    T.copy(X[k, 0], s)
                else:
                    T.fill(s, 1.0)
                for i in T.Parallel(64):
                    acc[i] += s[63 - i]
                if flags[b] > 1:
                    for i in T.Parallel(64):
                        acc[i] *= 2
            T.copy(acc, O[b, 0:64])

    x, flags = whole(5, 64), counts(2, 3)
    rows = []
    for flag in flags.tolist():
        acc = torch.zeros(64)
        for k in range(5):
            acc = acc + (x[k].flip(0) if flag else 1)
            acc = acc * 2 if flag > 1 else acc
        rows.append(acc)
    return kernel, [x, flags, zeros(2, 64)], {2: torch.stack(rows)}


@case
def scan_from_shared_memory_into_registers() -> Case:
    """Tile-ai/tilelang #3011: the two scopes were no pair that a scan took."""

    @T.prim_func
    def kernel(X: T.Tensor((6, 50), "float32"), O: T.Tensor((6, 50), "float32")):
        with T.Kernel(1, threads=64):
            s, f = T.alloc_shared((6, 50), "float32"), T.alloc_fragment((6, 50), "float32")
            T.copy(X, s)
            T.cumsum(s, f, dim=1)
            T.copy(f, O)

    x = whole(6, 50)
    return kernel, [x, zeros(6, 50)], {1: x.cumsum(1)}


@case
def reductions_of_parts_of_fragments() -> Case:
    """Tile-ai/tilelang #3022: a slice as the operand of a reduction."""

    @T.prim_func
    def kernel(X: T.Tensor((16, 48), "float32"), O: T.Tensor((16,), "float32"), P: T.Tensor((20,), "float32")):
        with T.Kernel(1, threads=64):
            f, r, c = (
                T.alloc_fragment((16, 48), "float32"),
                T.alloc_fragment((16,), "float32"),
                T.alloc_fragment((20,), "float32"),
            )
            T.copy(X, f)
            T.reduce_max(f[0:16, 5:31], r, dim=1)
            T.reduce_sum(f[3:9, 20:40], c, dim=0)
            T.copy(r, O)
            T.copy(c, P)

    x = whole(16, 48)
    return kernel, [x, zeros(16), zeros(20)], {1: x[:, 5:31].amax(1), 2: x[3:9, 20:40].sum(0)}


@case
def neighbours_of_a_fragment_read_at_two_places() -> Case:
    """Tile-ai/tilelang #3005: a fragment was read at the index of one of its loads."""

    @T.prim_func
    def kernel(X: T.Tensor((96,), "float32"), O: T.Tensor((96,), "float32")):
        with T.Kernel(1, threads=32):
            f, g = T.alloc_fragment((96,), "float32"), T.alloc_shared((96,), "float32")
            T.copy(X, g)
            for i in T.Parallel(96):
                f[i] = g[i] + g[(i + 1) % 96] - g[(i + 95) % 96]
            for i in T.Parallel(96):
                O[95 - i] = f[i]

    x = whole(96)
    return kernel, [x, zeros(96)], {1: (x + x.roll(-1) - x.roll(1)).flip(0)}


@case
def loops_of_many_extents_over_one_fragment() -> Case:
    """Tile-ai/tilelang #2957: the shortest loop of a fragment cut all others."""

    @T.prim_func
    def kernel(X: T.Tensor((256,), "float32"), O: T.Tensor((256,), "float32")):
        with T.Kernel(1, threads=64):
            f = T.alloc_fragment((256,), "float32")
            T.clear(f)
            for i in T.Parallel(100):
                f[i] = 5
            for i in T.Parallel(37):
                f[i] += X[i]
            for i in T.Parallel(200):
                f[i] = f[i] * 2 + 1
            for i in T.Parallel(256):
                O[i] = f[i] + 1

    x = whole(256)
    n = torch.arange(256)
    f = torch.where(n < 100, 5.0, 0.0) + torch.where(n < 37, x, 0)
    return kernel, [x, zeros(256)], {1: torch.where(n < 200, f * 2 + 1, f) + 1}


@case
def columns_that_no_power_of_two_counts() -> Case:
    """Tile-ai/tilelang #2394, #2398: 48 and 229 columns were not laid out."""

    @T.prim_func
    def kernel(
        X: T.Tensor((20, 48), "float32"),
        d: T.Tensor((48,), "float32"),
        O: T.Tensor((20, 48), "float32"),
        L: T.Tensor((229,), "float32"),
    ):
        with T.Kernel(1, threads=128):
            x, own, long = (
                T.alloc_fragment((20, 48), "float32"),
                T.alloc_fragment((48,), "float32"),
                T.alloc_fragment((229,), "float32"),
            )
            T.copy(X, x)
            T.copy(d, own)
            T.copy(L, long)
            for i, j in T.Parallel(20, 48):
                x[i, j] = x[i, j] + own[j] * 2
            for i in T.Parallel(229):
                long[i] = long[i] * 3 - 1
            T.copy(x, O)
            T.copy(long, L)

    x, d, long = whole(20, 48), whole(48), whole(229)
    return kernel, [x, d, zeros(20, 48), long.clone()], {2: x + d * 2, 3: long * 3 - 1}


@case
def product_whose_second_operand_is_in_registers() -> Case:
    """Tile-ai/tilelang #2627: the accumulator was cleared in each step."""

    @T.prim_func
    def kernel(A: T.Tensor((32, 64), "float16"), B: T.Tensor((64, 32), "float16"), O: T.Tensor((32, 32), "float32")):
        with T.Kernel(1, threads=64):
            a, b = T.alloc_shared((32, 64), "float16"), T.alloc_fragment((64, 32), "float16")
            acc = T.alloc_fragment((32, 32), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.fill(acc, 1e6)
            T.gemm(a, b, acc, clear_accum=True)
            T.copy(acc, O)

    a, b = whole(32, 64, dtype=HALF), whole(64, 32, dtype=HALF)
    return kernel, [a, b, zeros(32, 32)], {2: a.float() @ b.float()}


@case
def products_of_24_and_40_columns() -> Case:
    """Tile-ai/tilelang #2593: 8 columns behind a multiple of 16."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64, 80), "float16"), B: T.Tensor((80, 24), "float16"), C: T.Tensor((80, 40), "float16"),
        O: T.Tensor((64, 24), "float32"), P: T.Tensor((64, 40), "float16"),
    ):  # fmt: skip
        with T.Kernel(1, threads=128):
            a, b, c = (
                T.alloc_shared((64, 16), "float16"),
                T.alloc_shared((16, 24), "float16"),
                T.alloc_shared((16, 40), "float16"),
            )
            o, p = T.alloc_fragment((64, 24), "float32"), T.alloc_fragment((64, 40), "float32")
            T.clear(o)
            T.clear(p)
            for k in T.Pipelined(5, num_stages=2):
                T.copy(A[0, k * 16], a)
                T.copy(B[k * 16, 0], b)
                T.copy(C[k * 16, 0], c)
                T.gemm(a, b, o)
                T.gemm(a, c, p)
            T.copy(o, O)
            T.copy(p, P)

    a, b, c = whole(64, 80, dtype=HALF), whole(80, 24, dtype=HALF, most=2), whole(80, 40, dtype=HALF, most=2)
    return (
        kernel,
        [a, b, c, zeros(64, 24), zeros(64, 40, dtype=HALF)],
        {3: a.float() @ b.float(), 4: (a.float() @ c.float()).half()},
    )


@case
def value_that_a_loop_passes_on_twice() -> Case:
    """Llvm/llvm-project #219456: one result of a branch was passed on in two places of a while loop."""

    @T.prim_func
    def kernel(X: T.Tensor((40,), "int32"), O: T.Tensor((3, 40), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(40):
                state, old, first = T.alloc_var("int32", 0), T.alloc_var("int32", 0), T.alloc_var("int32", 0)
                while state < X[i]:
                    value = T.if_then_else(state < 3, state + 2, 20)
                    old = state
                    first = value
                    state = value
                O[0, i] = state
                O[1, i] = old
                O[2, i] = first

    x = counts(40, 21)
    rows = []
    for limit in x.tolist():
        state = old = first = 0
        while state < limit:
            state, old, first = (state + 2 if state < 3 else 20), state, (state + 2 if state < 3 else 20)
        rows.append((state, old, first))
    return kernel, [x, zeros(3, 40, dtype=I32)], {1: torch.tensor(rows, dtype=I32).t().contiguous()}


@case
def loops_from_beyond_zero_times_negative_numbers() -> Case:
    """Llvm/llvm-project #56235: a factor was moved into the bounds of a loop."""

    @T.prim_func
    def kernel(X: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32"), low: T.int32, high: T.int32):
        with T.Kernel(1, threads=32):
            total = T.alloc_var("int32", 0)
            for i in T.serial(low, high):
                total += X[i * -2 + 40] * i
                for j in T.serial(i * 2, i * 3 + 1, 2):
                    total += X[j] - j * -3
            for i in T.Parallel(64):
                O[i] = total + i

    x, low = whole(64, dtype=I32), int(torch.randint(1, 6, ()))
    high = low + int(torch.randint(0, 9, ()))
    total = 0
    for i in range(low, high):
        total += int(x[i * -2 + 40]) * i
        for j in range(i * 2, i * 3 + 1, 2):
            total += int(x[j]) + j * 3
    return kernel, [x, zeros(64, dtype=I32), low, high], {1: torch.arange(64, dtype=I32) + total}


@case
def differences_compared_with_zero() -> Case:
    """Llvm/llvm-project #216042: x - y <= 0 was taken for x <= y where the difference wraps."""

    @T.prim_func
    def kernel(
        X: T.Tensor((64,), "uint32"), Y: T.Tensor((64,), "uint32"), P: T.Tensor((64,), "int64"), Q: T.Tensor((64,), "int64"),  # noqa: E501
        O: T.Tensor((4, 64), "int32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                O[0, i] = T.if_then_else(X[i] - Y[i] <= 0, 1, 0)
                O[1, i] = T.if_then_else(X[i] - Y[i] > 5, 1, 0)
                O[2, i] = T.if_then_else(P[i] - Q[i] < 0, 1, 0)
                O[3, i] = T.if_then_else(P[i] - Q[i] >= 1, 1, 0)

    x, y = any_ints(U32, 64), any_ints(U32, 64)
    p, q = any_ints(I64, 64), any_ints(I64, 64).flip(0)
    y.view(I32)[10:20] = x.view(I32)[10:20]
    d, e = (x.long() - y.long()) % 2**32, p - q
    return kernel, [x, y, p, q, zeros(4, 64, dtype=I32)], {4: torch.stack([d <= 0, d > 5, e < 0, e >= 1]).int()}


@case
def shifts_by_more_than_a_narrower_type_has() -> Case:
    """Llvm/llvm-project #218191: a shift was narrowed with its result, and its amount was not."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64,), "int64"),
        O: T.Tensor((64,), "int32"),
        P: T.Tensor((64,), "int16"),
        Q: T.Tensor((64,), "uint8"),
    ):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                O[i] = T.cast(T.int64(4) >> (A[i] & 63), "int32")
                P[i] = T.cast(T.int64(1) << (A[i] & 63), "int16")
                Q[i] = T.cast((A[i] & 1023) >> (A[i] & 31), "uint8")

    a = any_ints(I64, 64)
    values = a.tolist()
    return (
        kernel,
        [a, zeros(64, dtype=I32), zeros(64, dtype=I16), zeros(64, dtype=U8)],
        {
            1: ints([4 >> (v & 63) for v in values]),
            2: ints([1 << (v & 63) for v in values], I16),
            3: ints([(v & 1023) >> (v & 31) for v in values], U8),
        },
    )


@case
def words_of_products_by_any_shift() -> Case:
    """Llvm/llvm-project #144844, #88732: any shift of a wide product was taken for its upper word."""

    @T.prim_func
    def kernel(
        X: T.Tensor((50,), "uint32"),
        Y: T.Tensor((50,), "uint32"),
        P: T.Tensor((50,), "int32"),
        O: T.Tensor((4, 50), "uint32"),
        Q: T.Tensor((2, 50), "int32"),
    ):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(50):
                m = T.cast(X[i], "uint64") * T.cast(Y[i], "uint64")
                O[0, i] = T.cast(m >> 1, "uint32")
                O[1, i] = T.cast(m >> 31, "uint32")
                O[2, i] = T.cast(m >> 32, "uint32")
                O[3, i] = T.cast(m >> 33, "uint32")
                n = T.cast(P[i], "int64") * P[49 - i]
                Q[0, i] = T.cast(n >> 32, "int32")
                Q[1, i] = T.cast(n >> 7, "int32")

    x, y, p = any_ints(U32, 50), any_ints(U32, 50), any_ints(I32, 50)
    m = [int(a) * int(b) for a, b in zip(x, y, strict=True)]
    n = [int(a) * int(b) for a, b in zip(p, p.flip(0), strict=True)]
    return (
        kernel,
        [x, y, p, zeros(4, 50, dtype=U32), zeros(2, 50, dtype=I32)],
        {
            3: torch.stack([ints([v >> s for v in m], U32) for s in (1, 31, 32, 33)]),
            4: torch.stack([ints([v >> s for v in n]) for s in (32, 7)]),
        },
    )


@case
def quotients_of_doubled_numbers_of_both_signs() -> Case:
    """Llvm/llvm-project #82168: a floored quotient was expanded with the wrong correction."""

    @T.prim_func
    def kernel(X: T.Tensor((80,), "int32"), O: T.Tensor((4, 80), "int32"), d: T.int32):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(80):
                O[0, i] = (X[i] * 2) // 8
                O[1, i] = -(-(X[i] * 2) // 8)
                O[2, i] = (X[i] * 2) // d
                O[3, i] = T.ceildiv(X[i] * 2, d)

    x, d = torch.randint(-50, 50, (80,), dtype=I32), int(torch.tensor([-7, -8, 3, 8])[torch.randint(4, ())])
    v = x.tolist()
    return (
        kernel,
        [x, zeros(4, 80, dtype=I32), d],
        {
            1: ints(
                [
                    [a * 2 // 8 for a in v],
                    [-(-a * 2 // 8) for a in v],
                    [a * 2 // d for a in v],
                    [-(-(a * 2) // d) for a in v],
                ]
            )
        },
    )


@case
def last_values_of_a_loop_that_may_not_run() -> Case:
    """Llvm/llvm-project #216956, triton-lang/triton #2672: what a loop carries, if it runs 0, 1 or more times."""

    @T.prim_func
    def kernel(X: T.Tensor((16,), "float32"), N: T.Tensor((16,), "int32"), O: T.Tensor((3, 16), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(16):
                last, before, ratio = (
                    T.alloc_var("float32", -1.0),
                    T.alloc_var("float32", -2.0),
                    T.alloc_var("float32", X[i]),
                )
                for k in T.serial(N[i]):
                    before = last
                    last = T.cast(k, "float32") * X[i]
                    ratio = 1.0 / 4.0 * (last - before)
                O[0, i] = last
                O[1, i] = before
                O[2, i] = ratio

    x, n = whole(16), counts(16, 4)
    rows = []
    for a, m in zip(x.tolist(), n.tolist(), strict=True):
        last, before, ratio = -1.0, -2.0, a
        for k in range(m):
            before, last = last, k * a
            ratio = (last - before) / 4
        rows.append((last, before, ratio))
    return kernel, [x, n, zeros(3, 16)], {2: torch.tensor(rows).t().contiguous()}


@case
def index_that_starts_again_at_the_end() -> Case:
    """Numba/numba #6597: an index that a branch sets back was taken for its first value."""

    @T.prim_func
    def kernel(X: T.Tensor((7,), "int32"), O: T.Tensor((4, 20), "int32")):
        with T.Kernel(4, threads=32) as b:
            row = T.alloc_var("int32", b)
            for k in T.serial(20):
                O[b, k] = X[row] + k
                row += b + 1
                if row >= 7:
                    row -= 7

    x = whole(7, dtype=I32)
    rows = [[int(x[(b + (b + 1) * k) % 7]) + k for k in range(20)] for b in range(4)]
    return kernel, [x, zeros(4, 20, dtype=I32)], {1: ints(rows)}


@case
def second_loop_reads_what_the_first_counted() -> Case:
    """Numba/numba #8515: two loops of equal bounds were merged."""

    @T.prim_func
    def kernel(N: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((64,), "int32")
            for i in T.Parallel(64):
                s[i] = 0
                for _j in T.serial(N[i]):
                    s[i] += i
            for i in T.Parallel(64):
                if i > 0:
                    O[i] = s[i] - s[i - 1]
                else:
                    O[i] = -1

    n = counts(64, 9)
    c = n * torch.arange(64, dtype=I32)
    return kernel, [n, zeros(64, dtype=I32)], {1: torch.cat([ints([-1]), c.diff()])}


@case
def chunks_whose_last_one_is_short() -> Case:
    """Numba/numba #7676: slices of chunks of a loop were empty."""

    @T.prim_func
    def kernel(
        X: T.Tensor((53,), "float32"), p: T.Tensor((3,), "float32"), O: T.Tensor((3, 53), "float32"), parts: T.int32
    ):
        with T.Kernel(1, threads=32):
            size = T.ceildiv(53, parts)
            for c in T.serial(parts):
                for r in T.serial(3):
                    for i in T.Parallel(T.max(T.min(size, 53 - c * size), 0)):
                        O[r, c * size + i] = X[c * size + i] * p[r]

    x, p = whole(53), whole(3)
    return kernel, [x, p, zeros(3, 53), int(torch.randint(1, 12, ()))], {2: p[:, None] * x}


@case
def loops_between_negative_bounds() -> Case:
    """Numba/numba #4489: a parallel loop from a negative number, with another inside."""

    @T.prim_func
    def kernel(X: T.Tensor((15,), "int32"), O: T.Tensor((15,), "int32"), n: T.int32):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(15):
                total = T.alloc_var("int32", 0)
                for k in T.serial(-n, 15 - n):
                    if k < 0 or i > k:
                        total += X[k + n] * k
                O[i] = total - n

    x, n = whole(15, dtype=I32), int(torch.randint(0, 15, ()))
    rows = [sum(int(x[k + n]) * k for k in range(-n, 15 - n) if k < 0 or i > k) - n for i in range(15)]
    return kernel, [x, zeros(15, dtype=I32), n], {1: ints(rows)}


@case
def scan_of_a_product_that_does_not_commute() -> Case:
    """Triton-lang/triton #2359, #4362: a scan changed the order of its operands."""

    @T.prim_func
    def kernel(
        F: T.Tensor((64,), "float32"), X: T.Tensor((64,), "float32"), O: T.Tensor((64,), "float32"), back: T.bool
    ):
        with T.Kernel(1, threads=64):
            f, x = T.alloc_shared((64,), "float32"), T.alloc_shared((64,), "float32")
            g, y = T.alloc_fragment((64,), "float32"), T.alloc_fragment((64,), "float32")
            for i in T.Parallel(64):
                f[i] = F[T.if_then_else(back, 63 - i, i)]
                x[i] = X[T.if_then_else(back, 63 - i, i)]
            for step in T.serial(6):
                for i in T.Parallel(64):
                    at = i - (1 << step)
                    g[i] = T.if_then_else(at >= 0, f[T.max(at, 0)] * f[i], f[i])
                    y[i] = T.if_then_else(at >= 0, x[T.max(at, 0)] * f[i] + x[i], x[i])
                T.copy(g, f)
                T.copy(y, x)
            T.copy(x, O)

    f, x, back = torch.randint(-1, 2, (64,)).float(), whole(64), bool(torch.randint(2, ()))
    order = range(63, -1, -1) if back else range(64)
    h, rows = 0.0, []
    for i in order:
        h = h * float(f[i]) + float(x[i])
        rows.append(h)
    return kernel, [f, x, zeros(64), back], {2: torch.tensor(rows)}


@case
def tiles_of_a_product_in_groups() -> Case:
    """Triton-lang/triton #713: outer bounds of the call, and an order of tiles in groups."""
    m, n, k = T.dynamic("m, n, k")

    @T.prim_func
    def kernel(A: T.Tensor((m, k), "float16"), B: T.Tensor((k, n), "float16"), O: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(m, 16) * T.ceildiv(n, 16), threads=32) as pid:
            a, b, acc = (
                T.alloc_shared((16, 16), "float16"),
                T.alloc_shared((16, 16), "float16"),
                T.alloc_fragment((16, 16), "float32"),
            )
            wide = 3 * T.ceildiv(n, 16)
            first = pid // wide * 3
            rows = T.min(T.ceildiv(m, 16) - first, 3)
            by = first + pid % wide % rows
            bx = pid % wide // rows
            T.clear(acc)
            for step in T.serial(T.ceildiv(k, 16)):
                T.copy(A[by * 16, step * 16], a)
                T.copy(B[step * 16, bx * 16], b)
                T.gemm(a, b, acc)
            T.copy(acc, O[by * 16, bx * 16])

    m, n, k = (int(v) for v in torch.randint(1, 90, (3,)))
    a, b = whole(m, k, dtype=HALF), whole(k, n, dtype=HALF)
    return kernel, [a, b, zeros(m, n)], {2: a.float() @ b.float()}


@case
def variable_that_outgrows_the_first_bound_of_a_loop() -> Case:
    """Triton-lang/triton #11313: the range of what a loop carries was that of few turns, and comparisons folded."""

    @T.prim_func
    def kernel(N: T.Tensor((32,), "int32"), O: T.Tensor((3, 32), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(32):
                v, hits, inner = T.alloc_var("int32", 0), T.alloc_var("int32", 0), T.alloc_var("int32", 1)
                for _a in T.serial(N[i]):
                    for b in T.serial(3):
                        if v < 7:
                            hits += 1
                        v += b
                        if inner < 100:
                            inner += inner
                O[0, i] = v
                O[1, i] = hits
                O[2, i] = T.if_then_else(inner > 64, 1, 0)

    n = counts(32, 6)
    rows = []
    for m in n.tolist():
        v, hits, inner = 0, 0, 1
        for _ in range(m):
            for b in range(3):
                hits, v, inner = hits + (v < 7), v + b, inner * 2 if inner < 100 else inner
        rows.append((v, hits, int(inner > 64)))
    return kernel, [n, zeros(3, 32, dtype=I32)], {1: ints(rows).t().contiguous()}


@case
def store_of_one_block_beside_a_sort_of_all() -> Case:
    """Triton-lang/triton #11153: a store of the first block alone spoiled another tensor."""

    @T.prim_func
    def kernel(
        X: T.Tensor((3, 32), "float32"),
        flag: T.Tensor((1,), "int32"),
        O: T.Tensor((3, 32), "float32"),
        S: T.Tensor((4,), "float32"),
    ):
        with T.Kernel(3, threads=32) as b:
            s = T.alloc_shared((32,), "float32")
            r = T.alloc_fragment((32,), "float32")
            T.copy(X[b, 0:32], s)
            if flag[0] > 0:
                for i in T.Parallel(4):
                    if b == 0:
                        S[i] = s[i] * 2
            for i in T.Parallel(32):
                rank = T.alloc_var("int32", 0)
                for j in T.serial(32):
                    if s[j] > s[i] or (s[j] == s[i] and j < i):
                        rank += 1
                r[i] = T.cast(rank, "float32")
            for i in T.Parallel(32):
                O[b, T.cast(r[i], "int32")] = s[i]

    x, flag = whole(3, 32), counts(1, 2)
    return kernel, [x, flag, zeros(3, 32), zeros(4)], {2: x.sort(1, descending=True).values, 3: x[0, :4] * 2 * flag}


@case
def rows_of_all_lengths_packed_behind_one_another() -> Case:
    """Triton-lang/triton #11378: counts and places of a loop whose turns the call tells."""
    tokens = T.dynamic("tokens")

    @T.prim_func
    def kernel(
        X: T.Tensor((tokens, 8), "int32"),
        L: T.Tensor((tokens,), "int32"),
        P: T.Tensor((tokens,), "int32"),
        O: T.Tensor((tokens * 8,), "int32"),
    ):
        with T.Kernel(1, threads=32):
            at = T.alloc_var("int32", 0)
            r, f = T.alloc_fragment((1,), "int32"), T.alloc_fragment((8,), "int32")
            for t in T.serial(tokens):
                for j in T.Parallel(8):
                    f[j] = T.if_then_else(X[t, j] > 0, 1, 0)
                T.reduce_sum(f, r, dim=0)
                L[t] = r[0]
                P[t] = at
                for j in T.Parallel(8):
                    if j < r[0]:
                        O[at + j] = t * 10 + j
                at += r[0]

    n = int(torch.randint(0, 7, ()))
    x = whole(n, 8, dtype=I32)
    found = (x > 0).sum(1).int()
    o = zeros(n * 8, dtype=I32)
    packed = [t * 10 + j for t in range(n) for j in range(int(found[t]))]
    o[: len(packed)] = ints(packed) if packed else o[:0]
    return (
        kernel,
        [x, zeros(n, dtype=I32), zeros(n, dtype=I32), zeros(n * 8, dtype=I32)],
        {1: found, 2: (found.cumsum(0) - found).int(), 3: o},
    )


test_reported_loops = case.test()
