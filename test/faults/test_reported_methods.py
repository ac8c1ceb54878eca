# SPDX-License-Identifier: Apache-2.0
"""Small programs for what reported ones share: pipelines, products, lanes, and indices that a method computes."""

import datetime
import sys
import zlib
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from reported import Case, Cases, any_ints, counts, ints, whole, zeros

import torch_tile.language as T

case = Cases()
I8, I32, I64, U8, U32, U64, HALF = (
    torch.int8, torch.int32, torch.int64, torch.uint8, torch.uint32, torch.uint64, torch.float16,
)  # fmt: skip


# Pipelines and shared memory.


@case
def pipeline_whose_copies_follow_a_list() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((9, 32), "float32"), rows: T.Tensor((14,), "int32"), O: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32):
            s, acc = T.alloc_shared((32,), "float32"), T.alloc_fragment((32,), "float32")
            T.clear(acc)
            for k in T.Pipelined(14, num_stages=3):
                T.copy(X[rows[k], 0], s)
                for j in T.Parallel(32):
                    acc[j] = acc[j] * -1 + s[(j + k) % 32]
            T.copy(acc, O)

    x, rows = whole(9, 32), counts(14, 9)
    acc = torch.zeros(32)
    for k, r in enumerate(rows.tolist()):
        acc = -acc + x[r].roll(-k)
    return kernel, [x, rows, zeros(32)], {2: acc}


@case
def pipeline_that_ends_where_a_row_says() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((6, 8, 32), "float32"), N: T.Tensor((6,), "int32"), O: T.Tensor((6, 32), "float32")):
        with T.Kernel(6, threads=32) as b:
            s, acc = T.alloc_shared((32,), "float32"), T.alloc_fragment((32,), "float32")
            T.fill(acc, 1.0)
            for k in T.Pipelined(N[b], num_stages=2):
                T.copy(X[b, k, 0:32], s)
                for j in T.Parallel(32):
                    acc[j] += s[31 - j]
            T.copy(acc, O[b, 0:32])

    x, n = whole(6, 8, 32), counts(6, 9)
    y = torch.stack([1 + x[b, : n[b]].sum(0).flip(0) for b in range(6)])
    return kernel, [x, n, zeros(6, 32)], {2: y}


@case
def two_pipelines_over_one_tile() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((7, 64), "float16"), O: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((64,), "float16")
            m, acc = T.alloc_fragment((64,), "float32"), T.alloc_fragment((64,), "float32")
            T.fill(m, -100.0)
            T.clear(acc)
            for k in T.Pipelined(7, num_stages=2):
                T.copy(X[k, 0], s)
                for j in T.Parallel(64):
                    m[j] = T.max(m[j], T.cast(s[j], "float32"))
            for k in T.Pipelined(7, num_stages=3):
                T.copy(X[6 - k, 0], s)
                for j in T.Parallel(64):
                    acc[j] = acc[j] * 2 + (m[j] - T.cast(s[63 - j], "float32"))
            T.copy(acc, O)

    x = whole(7, 64, dtype=HALF)
    m, acc = x.float().amax(0), torch.zeros(64)
    for k in range(7):
        acc = acc * 2 + (m - x[6 - k].float().flip(0))
    return kernel, [x, zeros(64)], {1: acc}


@case
def ring_of_rows_in_shared_memory() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((10, 48), "int32"), O: T.Tensor((10, 48), "int32")):
        with T.Kernel(1, threads=48):
            ring = T.alloc_shared((3, 48), "int32")
            T.clear(ring)
            for k in T.serial(10):
                T.copy(X[k, 0:48], ring[k % 3, 0:48])
                for j in T.Parallel(48):
                    O[k, j] = ring[k % 3, j] * 100 + ring[(k + 2) % 3, 47 - j] * 10 + ring[(k + 1) % 3, j]

    x = whole(10, 48, dtype=I32)
    p = torch.cat([zeros(2, 48, dtype=I32), x])
    return kernel, [x, zeros(10, 48, dtype=I32)], {1: x * 100 + p[1:11].flip(1) * 10 + p[:10]}


@case
def wave_front_over_a_shared_tile() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((12,), "int32"), Y: T.Tensor((15,), "int32"), O: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=32):
            d = T.alloc_shared((13, 16), "int32")
            for i, j in T.Parallel(13, 16):
                d[i, j] = T.if_then_else(i == 0, j, i)
            for front in T.serial(2, 28):
                for i in T.Parallel(13):
                    j = front - i
                    if i >= 1 and j >= 1 and j <= 15:
                        d[i, j] = T.min(
                            T.min(d[i - 1, j], d[i, j - 1]) + 1,
                            d[i - 1, j - 1] + T.if_then_else(X[i - 1] == Y[j - 1], 0, 1),
                        )
            O[0] = d[12, 15]

    x, y = counts(12, 3), counts(15, 3)
    d = [[j if i == 0 else i for j in range(16)] for i in range(13)]
    for i in range(1, 13):
        for j in range(1, 16):
            d[i][j] = min(min(d[i - 1][j], d[i][j - 1]) + 1, d[i - 1][j - 1] + int(x[i - 1] != y[j - 1]))
    return kernel, [x, y, zeros(1, dtype=I32)], {2: ints([d[12][15]])}


@case
def elimination_with_pivots() -> Case:
    @T.prim_func
    def kernel(A: T.Tensor((8, 9), "float64"), O: T.Tensor((8,), "float64")):
        with T.Kernel(1, threads=64):
            s, row = T.alloc_shared((8, 9), "float64"), T.alloc_shared((9,), "float64")
            factor = T.alloc_shared((8,), "float64")
            T.copy(A, s)
            for k in T.serial(8):
                p, best = T.alloc_var("int32", k), T.alloc_var("float64", 0.0)
                for i in T.serial(8):
                    if i >= k and T.abs(s[i, k]) > best:
                        best = T.abs(s[i, k])
                        p = i
                for j in T.Parallel(9):
                    row[j] = s[p, j]
                for j in T.Parallel(9):
                    s[p, j] = s[k, j]
                for j in T.Parallel(9):
                    s[k, j] = row[j] / row[k]
                for i in T.Parallel(8):
                    factor[i] = T.if_then_else(i == k, 0.0, s[i, k])
                for i, j in T.Parallel(8, 9):
                    s[i, j] -= factor[i] * s[k, j]
            for i in T.Parallel(8):
                O[i] = T.round(s[i, 8] * 1000)

    a, x = torch.randn(8, 8, dtype=torch.float64) + 3 * torch.eye(8, dtype=torch.float64), whole(8, dtype=torch.float64)
    return kernel, [torch.cat([a, (a @ x)[:, None]], 1), torch.zeros(8, dtype=torch.float64)], {1: x * 1000 + 0.0}


@case
def game_of_life_for_some_turns() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((16, 16), "uint8"), O: T.Tensor((16, 16), "uint8"), turns: T.int32):
        with T.Kernel(1, threads=128):
            s, f = T.alloc_shared((16, 16), "uint8"), T.alloc_fragment((16, 16), "uint8")
            T.copy(X, s)
            for _turn in T.serial(turns):
                for i, j in T.Parallel(16, 16):
                    n = T.alloc_var("int32", 0)
                    for a, b in T.grid(3, 3):
                        if a != 1 or b != 1:
                            n += T.cast(s[(i + a + 15) % 16, (j + b + 15) % 16], "int32")
                    f[i, j] = T.if_then_else(n == 3 or (n == 2 and s[i, j] == 1), T.uint8(1), T.uint8(0))
                T.copy(f, s)
            T.copy(s, O)

    x, turns = counts(256, 2, U8).view(16, 16), int(torch.randint(0, 5, ()))
    y = x.int()
    for _ in range(turns):
        n = sum(y.roll((a, b), (0, 1)) for a in (-1, 0, 1) for b in (-1, 0, 1)) - y
        y = ((n == 3) | ((n == 2) & (y == 1))).int()
    return kernel, [x, zeros(16, 16, dtype=U8), turns], {1: y.to(U8)}


# Products.


@case
def product_added_to_what_is_in_memory() -> Case:
    @T.prim_func
    def kernel(A: T.Tensor((33, 40), "float16"), B: T.Tensor((40, 20), "float16"), O: T.Tensor((33, 20), "float32")):
        with T.Kernel(1, threads=128):
            a, b, acc = (
                T.alloc_shared((48, 48), "float16"),
                T.alloc_shared((48, 32), "float16"),
                T.alloc_fragment((48, 32), "float32"),
            )
            T.copy(O[0, 0], acc)
            T.copy(A[0, 0], a)
            T.copy(B[0, 0], b)
            T.gemm(a, b, acc)
            T.gemm(a, b, acc)
            for i, j in T.Parallel(48, 32):
                acc[i, j] = acc[i, j] * 0.5
            T.copy(acc, O[0, 0])

    a, b, o = whole(33, 40, dtype=HALF), whole(40, 20, dtype=HALF), whole(33, 20)
    return kernel, [a, b, o.clone()], {2: o * 0.5 + a.float() @ b.float()}


@case
def products_of_both_orders_from_one_tile() -> Case:
    @T.prim_func
    def kernel(A: T.Tensor((32, 48), "bfloat16"), O: T.Tensor((32, 32), "float32"), P: T.Tensor((48, 48), "float32")):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((32, 48), "bfloat16")
            o, p = T.alloc_fragment((32, 32), "float32"), T.alloc_fragment((48, 48), "float32")
            T.copy(A, a)
            T.gemm(a, a, o, transpose_B=True, clear_accum=True)
            T.gemm(a, a, p, transpose_A=True, clear_accum=True)
            T.copy(o, O)
            T.copy(p, P)

    a = whole(32, 48, dtype=torch.bfloat16)
    return kernel, [a, zeros(32, 32), zeros(48, 48)], {1: a.float() @ a.float().t(), 2: a.float().t() @ a.float()}


@case
def product_of_decoded_nibbles_and_scales() -> Case:
    @T.prim_func
    def kernel(
        X: T.Tensor((16, 64), "float16"),
        Q: T.Tensor((24, 32), "uint8"),
        S: T.Tensor((24, 2), "float16"),
        O: T.Tensor((16, 24), "float32"),
    ):
        with T.Kernel(1, threads=64):
            x, w = T.alloc_shared((16, 32), "float16"), T.alloc_shared((24, 32), "float16")
            acc = T.alloc_fragment((16, 24), "float32")
            T.clear(acc)
            for k in T.serial(2):
                T.copy(X[0, k * 32], x)
                for i, j in T.Parallel(24, 32):
                    byte = T.cast(Q[i, k * 16 + j // 2], "int32")
                    w[i, j] = T.cast(((byte >> (j % 2 * 4)) & 15) - 8, "float16") * S[i, k]
                T.gemm(x, w, acc, transpose_B=True)
            T.copy(acc, O)

    x, q, s = (
        whole(16, 64, dtype=HALF),
        any_ints(U8, 24, 32),
        torch.tensor([0.5, 1, 2])[counts(48, 3).long()].view(24, 2).half(),
    )
    w = torch.stack([q.int() & 15, q.int() >> 4], 2).view(24, 64) - 8
    return kernel, [x, q, s, zeros(16, 24)], {3: x.float() @ (w * s.float().repeat_interleave(32, 1)).t()}


@case
def product_chosen_by_experts_of_rows() -> Case:
    @T.prim_func
    def kernel(
        X: T.Tensor((20, 32), "float16"),
        W: T.Tensor((3, 32, 16), "float16"),
        E: T.Tensor((20,), "int32"),
        O: T.Tensor((20, 16), "float32"),
    ):
        with T.Kernel(3, threads=64) as e:
            x, w, acc = (
                T.alloc_shared((32, 32), "float16"),
                T.alloc_shared((32, 16), "float16"),
                T.alloc_fragment((32, 16), "float32"),
            )
            for i, j in T.Parallel(32, 32):
                x[i, j] = T.if_then_else(i < 20, X[T.min(i, 19), j], T.float16(0))
                if i >= 20 or E[T.min(i, 19)] != e:
                    x[i, j] = 0
            T.copy(W[e, 0:32, 0:16], w)
            T.gemm(x, w, acc, clear_accum=True)
            for i, j in T.Parallel(32, 16):
                if i < 20 and E[T.min(i, 19)] == e:
                    O[i, j] = acc[i, j]

    x, w, e = whole(20, 32, dtype=HALF), whole(3, 32, 16, dtype=HALF), counts(20, 3)
    return kernel, [x, w, e, zeros(20, 16)], {3: torch.einsum("ik,ikj->ij", x.float(), w.float()[e.long()])}


# Threads.


@case.of_threads
def sums_of_lanes_by_halves() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((64,), "int64"), O: T.Tensor((64,), "int64")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            v = T.alloc_var("int64", X[tx])
            for step in T.unroll(5):
                v += T.shfl_xor(v, 16 >> step)
            O[tx] = v

    x = any_ints(I64, 64) // 64
    return kernel, [x, zeros(64, dtype=I64)], {1: x.view(2, 32).sum(1).repeat_interleave(32)}


@case.of_threads
def counts_of_threads_that_agree() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((96,), "int32"), O: T.Tensor((2, 96), "int32")):
        with T.Kernel(1, threads=96):
            tx = T.get_thread_binding()
            O[0, tx] = T.syncthreads_count(X[tx] > 0)
            O[1, tx] = T.if_then_else(T.any_sync(4294967295, X[tx] == 4), 1, 0)

    x = whole(96, dtype=I32)
    n = (x > 0).sum().int().expand(96)
    return (
        kernel,
        [x, zeros(2, 96, dtype=I32)],
        {1: torch.stack([n, (x.view(3, 32) == 4).any(1).repeat_interleave(32).int()])},
    )


@case.of_threads
def scan_over_warps_by_hand() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((128,), "int32"), O: T.Tensor((128,), "int32")):
        with T.Kernel(1, threads=128):
            tx = T.get_thread_binding()
            ends = T.alloc_shared((4,), "int32")
            v = T.alloc_var("int32", X[tx])
            for step in T.unroll(5):
                below = T.shfl_up(v, 1 << step)
                if tx % 32 >= 1 << step:
                    v += below
            if tx % 32 == 31:
                ends[tx // 32] = v
            for k in T.serial(4):
                if k < tx // 32:
                    v += ends[k]
            O[tx] = v

    x = whole(128, dtype=I32)
    return kernel, [x, zeros(128, dtype=I32)], {1: x.cumsum(0).int()}


# Indices.


@case
def triangle_from_one_index() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((12, 12), "float32"), O: T.Tensor((78,), "float32")):
        with T.Kernel(1, threads=32):
            for t in T.Parallel(78):
                row = T.alloc_var("int32", 0)
                left = T.alloc_var("int32", t)
                while left > row:
                    row += 1
                    left -= row
                O[t] = X[row, left]

    x = whole(12, 12)
    i, j = torch.tril_indices(12, 12)
    return kernel, [x, zeros(78)], {1: x[i, j]}


@case
def curve_that_interleaves_bits() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((16, 16), "int32"), O: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=64):
            for i, j in T.Parallel(16, 16):
                at = T.alloc_var("int32", 0)
                for b in T.unroll(4):
                    at |= ((i >> b) & 1) << (2 * b + 1) | ((j >> b) & 1) << (2 * b)
                O[at] = X[i, j]

    x = whole(16, 16, dtype=I32)
    o = zeros(256, dtype=I32)
    for i in range(16):
        for j in range(16):
            o[sum((i >> b & 1) << 2 * b + 1 | (j >> b & 1) << 2 * b for b in range(4))] = x[i, j]
    return kernel, [x, zeros(256, dtype=I32)], {1: o}


@case
def place_by_bisection_in_sorted_rows() -> Case:
    @T.prim_func
    def kernel(S: T.Tensor((4, 37), "float32"), V: T.Tensor((4, 25), "float32"), O: T.Tensor((2, 4, 25), "int64")):
        with T.Kernel(4, threads=32) as b:
            for i in T.Parallel(25):
                for right in T.unroll(2):
                    low, high = T.alloc_var("int32", 0), T.alloc_var("int32", 37)
                    while low < high:
                        mid = (low + high) // 2
                        if S[b, mid] < V[b, i] or (right == 1 and S[b, mid] == V[b, i]):
                            low = mid + 1
                        else:
                            high = mid
                    O[right, b, i] = low

    s, v = whole(4, 37).sort(1).values, whole(4, 25, most=5)
    return (
        kernel,
        [s, v, zeros(2, 4, 25, dtype=I64)],
        {2: torch.stack([torch.searchsorted(s, v), torch.searchsorted(s, v, right=True)])},
    )


@case
def labels_that_spread_until_none_changes() -> Case:
    @T.prim_func
    def kernel(E: T.Tensor((30, 2), "int32"), L: T.Tensor((24,), "int32")):
        with T.Kernel(1, threads=32):
            s, changed = T.alloc_shared((24,), "int32"), T.alloc_shared((1,), "int32")
            for i in T.Parallel(24):
                s[i] = i
            changed[0] = 1
            while changed[0] != 0:
                changed[0] = 0
                for e in T.Parallel(30):
                    ends = [T.atomic_load(s[E[e, k]], memory_order="relaxed") for k in (0, 1)]
                    low = T.min(ends[0], ends[1])
                    for side in T.unroll(2):
                        if T.atomic_load(s[E[e, side]], memory_order="relaxed") > low:
                            T.atomic_min(s[E[e, side]], low)
                            T.atomic_max(changed[0], 1)
            T.copy(s, L)

    e = counts(60, 24).view(30, 2)
    label = list(range(24))
    for _ in range(24):
        for a, b in e.tolist():
            label[a] = label[b] = min(label[a], label[b])
    return kernel, [e, zeros(24, dtype=I32)], {1: ints(label)}


@case
def rows_that_another_row_names_in_turn() -> Case:
    @T.prim_func
    def kernel(next: T.Tensor((20,), "int32"), V: T.Tensor((20,), "int32"), O: T.Tensor((20,), "int32")):
        with T.Kernel(1, threads=32):
            p, v = T.alloc_shared((20,), "int32"), T.alloc_shared((20,), "int32")
            q, w = T.alloc_fragment((20,), "int32"), T.alloc_fragment((20,), "int32")
            T.copy(next, p)
            T.copy(V, v)
            for _step in T.serial(5):
                for i in T.Parallel(20):
                    w[i] = v[i] + T.if_then_else(p[i] != i, v[p[i]], 0)
                    q[i] = p[p[i]]
                T.copy(q, p)
                T.copy(w, v)
            T.copy(v, O)

    order, v = torch.randperm(20), whole(20, dtype=I32)
    v[order[-1]] = 0
    following = torch.empty(20, dtype=I32)
    following[order[:-1]], following[order[-1]] = order[1:].int(), order[-1].int()
    o = torch.empty(20, dtype=I32)
    o[order] = v[order].flip(0).cumsum(0).flip(0).int()
    return kernel, [following, v, zeros(20, dtype=I32)], {2: o}


@case
def dates_from_numbers_of_days() -> Case:
    @T.prim_func
    def kernel(D: T.Tensor((60,), "int32"), O: T.Tensor((3, 60), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(60):
                z = D[i] + 719468
                era = z // 146097
                doe = z - era * 146097
                yoe = (doe - doe // 1460 + doe // 36524 - doe // 146096) // 365
                doy = doe - (365 * yoe + yoe // 4 - yoe // 100)
                mp = (5 * doy + 2) // 153
                m = mp + T.if_then_else(mp < 10, 3, -9)
                O[0, i] = yoe + era * 400 + T.if_then_else(m <= 2, 1, 0)
                O[1, i] = m
                O[2, i] = doy - (153 * mp + 2) // 5 + 1

    d = torch.randint(-700000, 2900000, (60,), dtype=I32)
    dates = [datetime.date(1970, 1, 1) + datetime.timedelta(days=int(v)) for v in d]
    return (
        kernel,
        [d, zeros(3, 60, dtype=I32)],
        {1: ints([[t.year for t in dates], [t.month for t in dates], [t.day for t in dates]])},
    )


@case
def checks_of_bytes_by_a_table() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((3, 41), "uint8"), N: T.Tensor((3,), "int32"), O: T.Tensor((3,), "uint32")):
        with T.Kernel(3, threads=32) as b:
            table = T.alloc_shared((256,), "uint32")
            for i in T.Parallel(256):
                c = T.alloc_var("uint32", T.cast(i, "uint32"))
                for _k in T.unroll(8):
                    c = T.if_then_else((c & 1) != 0, T.uint32(3988292384) ^ (c >> 1), c >> 1)
                table[i] = c
            crc = T.alloc_var("uint32", T.uint32(4294967295))
            for i in T.serial(N[b]):
                crc = table[T.cast((crc ^ T.cast(X[b, i], "uint32")) & 255, "int32")] ^ (crc >> 8)
            O[b] = ~crc

    x, n = any_ints(U8, 3, 41), counts(3, 42)
    return (
        kernel,
        [x, n, zeros(3, dtype=U32)],
        {2: ints([zlib.crc32(bytes(x[b, : n[b]].tolist())) for b in range(3)], U32)},
    )


@case
def words_that_mix_in_rounds() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((16, 4), "uint32"), O: T.Tensor((16, 4), "uint32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(16):
                s = T.alloc_local((4,), "uint32")
                for k in T.unroll(4):
                    s[k] = X[i, k]
                for _r in T.serial(5):
                    for a, d, n in ((0, 3, 16), (2, 1, 12), (0, 3, 8), (2, 1, 7)):
                        s[a] += s[(a + 1) % 4]
                        s[d] ^= s[a]
                        s[d] = (s[d] << n) | (s[d] >> (32 - n))
                for k in T.unroll(4):
                    O[i, k] = s[k] + X[i, 3 - k]

    x = any_ints(U32, 16, 4)
    rows = []
    for v in x.long().tolist():
        s = list(v)
        for _ in range(5):
            for a, d, n in ((0, 3, 16), (2, 1, 12), (0, 3, 8), (2, 1, 7)):
                s[a] = (s[a] + s[(a + 1) % 4]) % 2**32
                s[d] ^= s[a]
                s[d] = (s[d] << n | s[d] >> 32 - n) % 2**32
        rows.append([p + q for p, q in zip(s, v[::-1], strict=True)])
    return kernel, [x, zeros(16, 4, dtype=U32)], {1: ints(rows, U32)}


@case
def best_of_two_ways_through_a_trellis() -> Case:
    @T.prim_func
    def kernel(C: T.Tensor((9, 8, 8), "int32"), O: T.Tensor((10,), "int32")):
        with T.Kernel(1, threads=32):
            cost, new = T.alloc_shared((8,), "int32"), T.alloc_fragment((8,), "int32")
            came = T.alloc_shared((9, 8), "int32")
            T.clear(cost)
            for k in T.serial(9):
                for j in T.Parallel(8):
                    best, at = T.alloc_var("int32", 1000000), T.alloc_var("int32", 0)
                    for i in T.serial(8):
                        if cost[i] + C[k, i, j] < best:
                            best = cost[i] + C[k, i, j]
                            at = i
                    new[j] = best
                    came[k, j] = at
                T.copy(new, cost)
            at = T.alloc_var("int32", 0)
            for j in T.serial(8):
                if cost[j] < cost[at]:
                    at = j
            O[9] = at
            for k in T.serial(9):
                at = came[8 - k, at]
                O[8 - k] = at

    c = torch.randperm(9 * 64).view(9, 8, 8).int()
    cost, came = [0] * 8, []
    for k in range(9):
        came.append([min(range(8), key=lambda i: cost[i] + int(c[k, i, j])) for j in range(8)])
        cost = [cost[came[k][j]] + int(c[k, came[k][j], j]) for j in range(8)]
    path = [min(range(8), key=cost.__getitem__)]
    for k in range(8, -1, -1):
        path.append(came[k][path[-1]])
    return kernel, [c, zeros(10, dtype=I32)], {1: ints(path[::-1])}


@case
def small_and_large_digits_of_a_decimal_number() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((20,), "uint64"), O: T.Tensor((20, 20), "uint8"), N: T.Tensor((20,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(20):
                x, n = T.alloc_var("uint64", X[i]), T.alloc_var("int32", 0)
                while x > 0 or n == 0:
                    O[i, n] = T.cast(x % 10, "uint8") + T.uint8(48)
                    x = x // 10
                    n += 1
                N[i] = n

    values = [0, 2**64 - 1, 2**63, 10**19, 9] + [int(v) for v in torch.randint(0, 2**62, (15,))]
    o = zeros(20, 20, dtype=U8)
    for k, v in enumerate(values):
        text = str(v)[::-1].encode()
        o[k, : len(text)] = torch.tensor(list(text), dtype=U8)
    return (
        kernel,
        [ints(values, U64), zeros(20, 20, dtype=U8), zeros(20, dtype=I32)],
        {1: o, 2: ints([len(str(v)) for v in values])},
    )


@case
def moving_extrema_of_windows_by_a_queue() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((3, 40), "int32"), O: T.Tensor((3, 40), "int32"), width: T.int32):
        with T.Kernel(3, threads=32) as b:
            queue = T.alloc_local((40,), "int32")
            first, last = T.alloc_var("int32", 0), T.alloc_var("int32", 0)
            for i in T.serial(40):
                while last > first and X[b, queue[T.max(last - 1, 0)]] <= X[b, i]:
                    last -= 1
                queue[last] = i
                last += 1
                if queue[first] <= i - width:
                    first += 1
                O[b, i] = X[b, queue[first]]

    x, width = whole(3, 40, dtype=I32), int(torch.randint(1, 12, ()))
    y = torch.stack([x[:, max(0, i - width + 1) : i + 1].amax(1) for i in range(40)], 1)
    return kernel, [x, zeros(3, 40, dtype=I32), width], {1: y}


@case
def equal_neighbours_counted_in_runs() -> Case:
    @T.prim_func
    def kernel(
        X: T.Tensor((90,), "int8"), V: T.Tensor((90,), "int8"), L: T.Tensor((90,), "int32"), N: T.Tensor((1,), "int32")
    ):
        with T.Kernel(1, threads=64):
            start = T.alloc_shared((90,), "int32")
            for i in T.Parallel(90):
                start[i] = 1
                if i > 0:  # noqa: SIM102
                    if X[i] == X[i - 1]:
                        start[i] = 0
            T.cumsum(start)
            for i in T.Parallel(90):
                V[start[i] - 1] = X[i]
                T.atomic_add(L[start[i] - 1], 1)
            N[0] = start[89]

    x = counts(90, 2, I8)
    v, n = torch.unique_consecutive(x, return_counts=True)
    values, lengths = zeros(90, dtype=I8), zeros(90, dtype=I32)
    values[: len(v)], lengths[: len(v)] = v, n.int()
    return (
        kernel,
        [x, zeros(90, dtype=I8), zeros(90, dtype=I32), zeros(1, dtype=I32)],
        {1: values, 2: lengths, 3: ints([len(v)])},
    )


test_reported_methods = case.test()
