# SPDX-License-Identifier: Apache-2.0
"""Small programs after further reports: values at the ends of their types, functions at their edges, products, blocks.

Numbers behind a name are those of the report.
"""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from reported import Case, Cases, whole, zeros

import torch_tile.language as T

case = Cases()


@case
def relaxation_until_nothing_changes() -> Case:
    @T.prim_func
    def kernel(E: T.Tensor((20, 20), "int32"), O: T.Tensor((20,), "int32"), R: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=32):
            d, go, n = T.alloc_shared((20,), "int32"), T.alloc_shared((1,), "int32"), T.alloc_var("int32", 0)
            new, f = T.alloc_fragment((20, 20), "int32"), T.alloc_fragment((20,), "int32")
            for i in T.Parallel(20):
                d[i] = T.if_then_else(i == 0, 0, 1000000)
            T.fill(go, 1)
            while go[0] != 0:
                for i, j in T.Parallel(20, 20):
                    new[i, j] = d[j] + E[j, i]
                T.reduce_min(new, f, dim=1)
                T.fill(go, 0)
                for i in T.Parallel(20):
                    if f[i] < d[i]:
                        d[i] = f[i]
                        T.atomic_max(go[0], 1)
                n += 1
            T.copy(d, O)
            R[0] = n

    e = torch.randint(1, 100, (20, 20))
    e[torch.rand(20, 20) < 0.7] = 1000000
    d, n = torch.full((20,), 1000000), 0
    d[0] = 0
    while True:
        n += 1
        new = torch.minimum(d, (d[:, None] + e).amin(0))
        if torch.equal(new, d):
            break
        d = new
    return (
        kernel,
        [e.int(), zeros(20, dtype=torch.int32), zeros(1, dtype=torch.int32)],
        {1: d.int(), 2: torch.tensor([n], dtype=torch.int32)},
    )


@case
def shifts_as_wide_as_the_type() -> Case:
    @T.prim_func
    def kernel(A: T.Tensor((32,), "int32"), O: T.Tensor((32, 4), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(32):
                O[i, 0] = T.cast(T.cast(A[i], "uint32") >> T.cast(i, "uint32"), "int32")
                O[i, 1] = A[i] >> i
                O[i, 2] = T.cast(T.cast(A[i], "uint32") << T.cast(i, "uint32"), "int32") | T.cast(
                    T.cast(A[i], "uint32") >> T.cast((32 - i) % 32, "uint32"), "int32"
                )
                O[i, 3] = T.cast((T.cast(A[i], "int64") * T.cast(A[i], "int64")) >> 32, "int32")

    a = torch.randint(-(2**31), 2**31 - 1, (32,))
    u, i = a % 2**32, torch.arange(32)

    def s(x):
        return ((x + 2**31) % 2**32 - 2**31).int()

    return (
        kernel,
        [a.int(), zeros(32, 4, dtype=torch.int32)],
        {
            1: torch.stack(
                [s(u >> i), (a >> i).int(), s(((u << i) % 2**32) | (u >> ((32 - i) % 32))), s((a * a) >> 32)], 1
            )
        },
    )


@case.rounded(1e-6)
def functions_at_their_edges() -> Case:
    vals = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        math.inf,
        -math.inf,
        math.nan,
        1e-40,
        -2.5,
        2.5,
        0.5,
        1.5,
        3.4e38,
        -1e-8,
        88.9,
        -104.0,
        1e10,
    ]

    @T.prim_func
    def kernel(A: T.Tensor((17,), "float32"), O: T.Tensor((17, 12), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(17):
                O[i, 0] = T.sqrt(A[i])
                O[i, 1] = T.rsqrt(A[i])
                O[i, 2] = T.floor(A[i])
                O[i, 3] = T.ceil(A[i])
                O[i, 4] = T.trunc(A[i])
                O[i, 5] = T.nearbyint(A[i])
                O[i, 6] = T.exp(A[i])
                O[i, 7] = T.log(A[i])
                O[i, 8] = T.tanh(A[i])
                O[i, 9] = T.abs(A[i])
                O[i, 10] = T.atan2(A[i], A[16 - i])
                O[i, 11] = T.copysign(2.0, A[i])

    a = torch.tensor(vals)
    d = a.double()
    w = torch.stack(
        [
            d.sqrt(),
            d.rsqrt(),
            d.floor(),
            d.ceil(),
            d.trunc(),
            d.round(),
            d.exp(),
            d.log(),
            d.tanh(),
            d.abs(),
            torch.atan2(d, d.flip(0)),
            torch.copysign(torch.full_like(d, 2.0), d),
        ],
        1,
    ).float()
    return kernel, [a, zeros(17, 12)], {1: w}


@case
def halves_that_are_tested() -> Case:
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float16"), B: T.Tensor((8,), "bfloat16"), O: T.Tensor((8, 8), "bool")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                O[i, 0] = T.isnan(A[i])
                O[i, 1] = T.isinf(A[i])
                O[i, 2] = T.isfinite(A[i])
                O[i, 3] = T.isnan(B[i])
                O[i, 4] = A[i] < T.float16(1.0)
                O[i, 5] = A[i] == A[i]
                O[i, 6] = T.Not(B[i] >= T.bfloat16(0.0))
                O[i, 7] = A[i] * T.float16(2.0) > 65504.0

    v = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 65504, 6e-8, -1])
    a, b = v.half(), v.bfloat16()
    return (
        kernel,
        [a, b, zeros(8, 8, dtype=torch.bool)],
        {2: torch.stack([a.isnan(), a.isinf(), a.isfinite(), b.isnan(), a < 1, a == a, ~(b >= 0), a * 2 > 65504], 1)},
    )


@case
def division_of_wide_integers() -> Case:
    @T.prim_func
    def kernel(A: T.Tensor((64,), "int64"), B: T.Tensor((64,), "int64"), O: T.Tensor((64, 4), "int64")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                O[i, 0] = A[i] // B[i]
                O[i, 1] = A[i] % B[i]
                O[i, 2] = T.truncdiv(A[i], 1000003)
                O[i, 3] = A[i] * B[i] - (A[i] // 65536) * 65536

    a, b = torch.randint(-(2**62), 2**62, (64,)), torch.randint(1, 2**40, (64,)) * (torch.randint(0, 2, (64,)) * 2 - 1)
    return (
        kernel,
        [a, b, zeros(64, 4, dtype=torch.int64)],
        {
            2: torch.stack(
                [a // b, a % b, torch.div(a, 1000003, rounding_mode="trunc"), a * b - (a // 65536) * 65536], 1
            )
        },
    )


@case
def truths_over_a_tile() -> Case:
    @T.prim_func
    def kernel(A: T.Tensor((6, 40), "int32"), O: T.Tensor((6, 3), "int32")):
        with T.Kernel(1, threads=64):
            p, q = T.alloc_fragment((6, 40), "int32"), T.alloc_fragment((6,), "int32")
            r, s = T.alloc_fragment((6,), "int32"), T.alloc_fragment((6,), "int32")
            for i, j in T.Parallel(6, 40):
                p[i, j] = T.cast(A[i, j] > 0, "int32") ^ T.cast((A[i, j] & 1) == 0, "int32")
            T.reduce_max(p, q, dim=1)
            T.reduce_min(p, r, dim=1)
            T.reduce_bitxor(p, s, dim=1)
            for i in T.Parallel(6):
                O[i, 0] = q[i]
                O[i, 1] = r[i]
                O[i, 2] = s[i]

    a = whole(6, 40, dtype=torch.int32)
    a[0] = 2
    a[1] = 1
    p = ((a > 0) ^ (a % 2 == 0)).int()
    return (
        kernel,
        [a, zeros(6, 3, dtype=torch.int32)],
        {1: torch.stack([p.amax(1), p.amin(1), (p.sum(1) % 2).int()], 1)},
    )


@case
def neighbours_round_a_ring() -> Case:
    @T.prim_func
    def kernel(A: T.Tensor((37,), "float32"), O: T.Tensor((37,), "float32"), n: T.int32):
        with T.Kernel(1, threads=32):
            s = T.alloc_shared((37,), "float32")
            T.copy(A, s)
            for i in T.Parallel(37):
                O[i] = s[(i - 1) % 37] * 2.0 + s[(i + n) % 37] - s[(i * 5 - n) % 37]

    a, i, n = whole(37), torch.arange(37), 40
    return kernel, [a, zeros(37), n], {1: a[(i - 1) % 37] * 2 + a[(i + n) % 37] - a[(i * 5 - n) % 37]}


@case
def workspace_between_kernels() -> Case:
    @T.prim_func
    def kernel(A: T.Tensor((70, 33), "float32"), W: T.Tensor((3, 33), "float32"), O: T.Tensor((33,), "float32")):
        with T.Kernel(3, threads=64) as b:
            f, g = T.alloc_fragment((32, 33), "float32"), T.alloc_fragment((33,), "float32")
            for i, j in T.Parallel(32, 33):
                f[i, j] = T.if_then_else(b * 32 + i < 70, A[T.min(b * 32 + i, 69), j], 0.0)
            T.reduce_sum(f, g, dim=0)
            T.copy(g, W[b, 0:33])
        with T.Kernel(1, threads=64):
            f, g = T.alloc_fragment((3, 33), "float32"), T.alloc_fragment((33,), "float32")
            T.copy(W, f)
            T.reduce_sum(f, g, dim=0)
            T.copy(g, O)

    a = whole(70, 33)
    return kernel, [a, zeros(3, 33), zeros(33)], {2: a.sum(0)}


@case
def blocks_in_three_dimensions() -> Case:
    @T.prim_func
    def kernel(O: T.Tensor((3, 5, 7, 4), "int32")):
        with T.Kernel(7, 5, 3, threads=32) as (x, y, z):
            for i in T.Parallel(4):
                O[z, y, x, i] = x + 10 * y + 100 * z + 1000 * i

    z, y, x, i = torch.meshgrid(torch.arange(3), torch.arange(5), torch.arange(7), torch.arange(4), indexing="ij")
    return kernel, [zeros(3, 5, 7, 4, dtype=torch.int32)], {0: (x + 10 * y + 100 * z + 1000 * i).int()}


@case
def reductions_of_a_middle_dimension() -> Case:
    @T.prim_func
    def kernel(
        A: T.Tensor((5, 12, 9), "int64"),
        O: T.Tensor((5, 9), "int64"),
        P: T.Tensor((12, 9), "int64"),
        Q: T.Tensor((5, 12), "int64"),
    ):
        with T.Kernel(1, threads=96):
            a = T.alloc_fragment((5, 12, 9), "int64")
            o, p, q = (
                T.alloc_fragment((5, 9), "int64"),
                T.alloc_fragment((12, 9), "int64"),
                T.alloc_fragment((5, 12), "int64"),
            )
            T.copy(A, a)
            T.reduce_max(a, o, dim=1)
            T.reduce_sum(a, p, dim=0)
            T.reduce_abssum(a, q, dim=-1)
            T.copy(o, O)
            T.copy(p, P)
            T.copy(q, Q)

    a = torch.randint(-(2**40), 2**40, (5, 12, 9))
    return (
        kernel,
        [a] + [zeros(*s, dtype=torch.int64) for s in ((5, 9), (12, 9), (5, 12))],
        {1: a.amax(1), 2: a.sum(0), 3: a.abs().sum(2)},
    )


@case
def other_shape_of_a_shared_tile() -> Case:
    @T.prim_func
    def kernel(A: T.Tensor((6, 20), "float32"), O: T.Tensor((15, 8), "float32"), P: T.Tensor((15, 8), "int32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((6, 20), "float32")
            T.copy(A, s)
            r, v = T.reshape(s, (15, 8)), T.view(s, (15, 8), "int32")
            for i, j in T.Parallel(15, 8):
                O[i, j] = r[14 - i, j] + 1.0
                P[i, j] = v[i, 7 - j]

    a = whole(6, 20)
    r = a.view(15, 8)
    return (
        kernel,
        [a, zeros(15, 8), zeros(15, 8, dtype=torch.int32)],
        {1: r.flip(0) + 1, 2: r.flip(1).contiguous().view(torch.int32)},
    )


@case
def products_under_a_condition() -> Case:
    @T.prim_func
    def kernel(
        A: T.Tensor((64, 128), "float16"),
        B: T.Tensor((128, 64), "float16"),
        M: T.Tensor((4,), "int32"),
        C: T.Tensor((64, 64), "float32"),
    ):
        with T.Kernel(1, threads=128):
            a, b, c = (
                T.alloc_shared((64, 32), "float16"),
                T.alloc_shared((32, 64), "float16"),
                T.alloc_fragment((64, 64), "float32"),
            )
            T.clear(c)
            for k in T.serial(4):
                if M[k] > 0:
                    T.copy(A[0:64, k * 32 : k * 32 + 32], a)
                    T.copy(B[k * 32 : k * 32 + 32, 0:64], b)
                    T.gemm(a, b, c)
                elif M[k] < 0:
                    T.clear(c)
                else:
                    for i, j in T.Parallel(64, 64):
                        c[i, j] *= 0.5
            T.copy(c, C)

    a, b, m = whole(64, 128), whole(128, 64), torch.randint(-1, 2, (4,))
    c = torch.zeros(64, 64)
    for k in range(4):
        c = (
            c + a[:, k * 32 : k * 32 + 32] @ b[k * 32 : k * 32 + 32]
            if m[k] > 0
            else torch.zeros(64, 64)
            if m[k] < 0
            else c * 0.5
        )
    return kernel, [a.half(), b.half(), m.int(), zeros(64, 64)], {3: c}


@case
def rows_sorted_in_local_memory() -> Case:
    @T.prim_func
    def kernel(A: T.Tensor((40, 9), "int32"), O: T.Tensor((40, 9), "int32")):
        with T.Kernel(40, threads=1) as b:
            r = T.alloc_local((9,), "int32")
            for i in range(9):
                r[i] = A[b, i]
            for i in range(1, 9):
                key, j = T.alloc_var("int32", r[i]), T.alloc_var("int32", i - 1)
                while j >= 0 and r[T.max(j, 0)] > key:
                    r[j + 1] = r[j]
                    j -= 1
                r[j + 1] = key
            for i in range(9):
                O[b, i] = r[i]

    a = whole(40, 9, dtype=torch.int32, most=20)
    return kernel, [a, zeros(40, 9, dtype=torch.int32)], {1: a.sort(1).values}


@case
def guards_before_loads() -> Case:
    @T.prim_func
    def kernel(A: T.Tensor((40,), "int32"), O: T.Tensor((40,), "int32")):
        with T.Kernel(1, threads=40):
            for i in T.Parallel(40):
                if i > 0 and A[i - 1] > A[i]:
                    O[i] = A[i - 1] - A[i]
                elif not (i < 39 and A[i + 1] >= A[i]) or 10 < i < 20:
                    O[i] = -1

    a = whole(40, dtype=torch.int32, most=20)
    w = torch.zeros(40, dtype=torch.int32)
    for i in range(40):
        if i > 0 and a[i - 1] > a[i]:
            w[i] = a[i - 1] - a[i]
        elif not (i < 39 and a[i + 1] >= a[i]) or 10 < i < 20:
            w[i] = -1
    return kernel, [a, zeros(40, dtype=torch.int32)], {1: w}


@case
def every_assignment_with_an_operator() -> Case:
    @T.prim_func
    def kernel(A: T.Tensor((20, 9), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(20):
                A[i, 0] //= -3
                A[i, 1] %= 7
                A[i, 2] <<= 3
                A[i, 3] >>= 2
                A[i, 4] &= 0x55
                A[i, 5] |= -8
                A[i, 6] ^= 1023
                A[i, 7] -= A[i, 8] * 2
                A[i, 8] *= A[i, 8]

    a = whole(20, 9, dtype=torch.int32, most=99)
    c = a.unbind(1)
    w = torch.stack(
        [c[0] // -3, c[1] % 7, c[2] << 3, c[3] >> 2, c[4] & 0x55, c[5] | -8, c[6] ^ 1023, c[7] - c[8] * 2, c[8] * c[8]],
        1,
    )
    return kernel, [a], {0: w.int()}


@case
def whole_numbers_beside_floats() -> Case:
    @T.prim_func
    def kernel(
        A: T.Tensor((6,), "int32"),
        B: T.Tensor((6,), "float32"),
        O: T.Tensor((6, 4), "float32"),
        P: T.Tensor((6, 2), "bool"),
    ):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(6):
                O[i, 0] = A[i] + B[i]
                O[i, 1] = A[i] / 2
                O[i, 2] = A[i] * 0.1
                O[i, 3] = T.cast(A[i], "float64") / 3
                P[i, 0] = T.cast(A[i], "float32") == B[i]
                P[i, 1] = A[i] < B[i]

    a = torch.tensor([2**24 + 1, -7, 0, 3, 2**31 - 1, -(2**31)], dtype=torch.int32)
    b = torch.tensor([2.0**24, -7.5, 0.0, 3.0, 2.0**31, -(2.0**31)])
    f = a.float()
    w = torch.stack([f + b, f / 2, f * torch.tensor(0.1), (a.double() / 3).float()], 1)
    return kernel, [a, b, zeros(6, 4), zeros(6, 2, dtype=torch.bool)], {2: w, 3: torch.stack([f == b, f < b], 1)}


@case
def strides_of_rows_apart() -> Case:
    @T.prim_func
    def kernel(
        A: T.StridedTensor((9, 12), (40, 1), "float32"),
        B: T.StridedTensor((12, 9), (1, 17), "float32"),
        O: T.Tensor((9, 12), "float32"),
    ):
        with T.Kernel(1, threads=32):
            s, u = T.alloc_shared((9, 12), "float32"), T.alloc_fragment((12, 9), "float32")
            T.copy(A, s)
            T.copy(B, u)
            for i, j in T.Parallel(9, 12):
                O[i, j] = s[i, j]
            for j, i in T.Parallel(12, 9):
                T.atomic_add(O[i, j], u[j, i])

    a, b = whole(9, 40)[:, :12], whole(9, 17).t()[:12]
    return kernel, [a, b, zeros(9, 12)], {2: a + b.t()}


@case
def sizes_that_only_the_call_tells() -> Case:
    m, n = T.dynamic("m"), T.dynamic("n")

    @T.prim_func
    def kernel(A: T.Tensor((m, n), "float32"), O: T.Tensor((n, m), "float32"), S: T.Tensor((m,), "float32")):
        with T.Kernel(T.ceildiv(n, 32), T.ceildiv(m, 16), threads=64) as (bx, by):
            s = T.alloc_shared((16, 32), "float32")
            T.copy(A[by * 16, bx * 32], s)
            for j, i in T.Parallel(32, 16):
                if bx * 32 + j < n and by * 16 + i < m:
                    O[bx * 32 + j, by * 16 + i] = s[i, j] + m * 100 + n
            f, g = T.alloc_fragment((16, 32), "float32"), T.alloc_fragment((16,), "float32")
            T.copy(s, f)
            T.reduce_sum(f, g, dim=1)
            for i in T.Parallel(16):
                if by * 16 + i < m:
                    T.atomic_add(S[by * 16 + i], g[i])

    a = whole(37, 70)
    return kernel, [a, zeros(70, 37), zeros(37)], {1: a.t() + 3700 + 70, 2: a.sum(1)}


@case
def macro_with_defaults_and_returns() -> Case:
    @T.macro
    def horner(x, a, b=2.0, *, c=3.0):
        y = x * a
        return y * x + b * x + c

    @T.macro
    def put(O, i, v):
        if v > 0.0:
            O[i] = v
        else:
            O[i] = -v * 10.0

    @T.prim_func
    def kernel(A: T.Tensor((40,), "float32"), O: T.Tensor((40,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(40):
                put(O, i, horner(A[i], 2.0, c=-5.0) + horner(A[39 - i], 1.0))

    a = whole(40)
    v = 2 * a * a + 2 * a - 5 + (a * a + 2 * a + 3).flip(0)
    return kernel, [a, zeros(40)], {1: torch.where(v > 0, v, -v * 10)}


@case
def numbers_that_leave_narrow_types() -> Case:
    @T.prim_func
    def kernel(
        A: T.Tensor((8,), "float32"),
        O: T.Tensor((8,), "int8"),
        P: T.Tensor((8,), "float16"),
        Q: T.Tensor((8,), "int32"),
        R: T.Tensor((8,), "uint16"),
    ):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                O[i] = T.cast(T.cast(A[i], "int32"), "int8")
                P[i] = T.cast(A[i], "float16")
                Q[i] = T.cast(A[i], "int32")
                R[i] = T.cast(T.cast(A[i], "int64"), "uint16")

    a = torch.tensor([-1.9, 1.9, 300.5, -129.0, 70000.0, 65519.9, 1e-9, 2.5])
    i = a.trunc().long()
    return (
        kernel,
        [
            a,
            zeros(8, dtype=torch.int8),
            zeros(8, dtype=torch.float16),
            zeros(8, dtype=torch.int32),
            zeros(8, dtype=torch.uint16),
        ],
        {1: i.to(torch.int8), 2: a.half(), 3: i.int(), 4: (i % 65536).to(torch.uint16)},
    )


@case
def dot_products_of_long_rows() -> Case:
    @T.prim_func
    def kernel(A: T.Tensor((3, 1000), "float64"), B: T.Tensor((1000,), "float64"), O: T.Tensor((3,), "float64")):
        with T.Kernel(3, threads=96) as b:
            f, g = T.alloc_fragment((1000,), "float64"), T.alloc_fragment((1,), "float64")
            for i in T.Parallel(1000):
                f[i] = A[b, i] * B[i]
            T.reduce_sum(f, g, dim=0)
            T.copy(g, O[b : b + 1])

    a, b = whole(3, 1000).double() / 8, whole(1000).double() + 2.0**40
    return kernel, [a, b, zeros(3, dtype=torch.float64)], {2: a @ b}


@case
def sum_of_a_tile_into_part_of_another() -> Case:  # tilelang 1374
    @T.prim_func
    def kernel(B: T.Tensor((16, 448), "int32"), A: T.Tensor((16, 14), "int32")):
        with T.Kernel(1, threads=128):
            b, a = T.alloc_fragment((16, 14, 32), "int32"), T.alloc_fragment((16, 14), "int32")
            for i, j, k in T.Parallel(16, 14, 32):
                b[i, j, k] = B[i, j * 32 + k]
            T.reduce_sum(b, a, dim=2)
            for i, j in T.Parallel(16, 14):
                A[i, j] += a[i, j]

    b, a = whole(16, 448, dtype=torch.int32), whole(16, 14, dtype=torch.int32)
    return kernel, [b, a], {1: (a + b.view(16, 14, 32).sum(2)).int()}


@case
def histogram_by_two_passes() -> Case:
    @T.prim_func
    def kernel(A: T.Tensor((300,), "int32"), O: T.Tensor((300,), "int32"), C: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=64):
            c, p = T.alloc_shared((8,), "int32"), T.alloc_fragment((8,), "int32")
            n = T.alloc_shared((8,), "int32")
            T.clear(c)
            for i in T.Parallel(300):
                T.atomic_add(c[A[i]], 1)
            T.copy(c, p)
            T.copy(c, C)
            T.cumsum(p, dim=0)
            for i in T.Parallel(8):
                n[i] = p[i] - c[i]
            for i in T.Parallel(300):
                at = T.atomic_add(n[A[i]], 1, return_prev=True)
                O[at] = A[i]

    a = torch.randint(0, 8, (300,))
    return (
        kernel,
        [a.int(), zeros(300, dtype=torch.int32), zeros(8, dtype=torch.int32)],
        {1: a.sort().values.int(), 2: a.bincount(minlength=8).int()},
    )


@case
def product_with_a_long_epilogue() -> Case:
    @T.prim_func
    def kernel(
        A: T.Tensor((50, 70), "bfloat16"),
        B: T.Tensor((70, 90), "bfloat16"),
        S: T.Tensor((90,), "float32"),
        C: T.Tensor((50, 90), "bfloat16"),
        M: T.Tensor((50,), "float32"),
    ):
        with T.Kernel(1, threads=128):
            a, b, c = (
                T.alloc_shared((64, 80), "bfloat16"),
                T.alloc_shared((80, 96), "bfloat16"),
                T.alloc_fragment((64, 96), "float32"),
            )
            m = T.alloc_fragment((64,), "float32")
            T.copy(A[0, 0], a)
            T.copy(B[0, 0], b)
            T.clear(c)
            T.gemm(a, b, c)
            for i, j in T.Parallel(64, 96):
                c[i, j] = T.max(c[i, j] * T.if_then_else(j < 90, S[T.min(j, 89)], 0.0), 0.0)
            T.reduce_max(c, m, dim=1)
            for i, j in T.Parallel(64, 96):
                if i < 50 and j < 90:
                    C[i, j] = T.cast(c[i, j], "bfloat16")
            for i in T.Parallel(50):
                M[i] = m[i]

    a, b, s = whole(50, 70, most=1), whole(70, 90, most=1), whole(90)
    w = ((a @ b) * s).clamp(min=0)
    return (
        kernel,
        [a.bfloat16(), b.bfloat16(), s, zeros(50, 90, dtype=torch.bfloat16), zeros(50)],
        {3: w.bfloat16(), 4: w.amax(1)},
    )


test_reported_values = case.test()
