# SPDX-License-Identifier: Apache-2.0
"""Small programs after the kinds of silent faults that users of Triton, TileLang, TVM, Halide and Numba reported.

Each is written anew for our language, and compared with what torch or plain Python makes of it.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from reported import Case, Cases, whole, zeros

import torch_tile.language as T

case = Cases()


# -- indices that go round or reverse ----------------------------------------------------------------------------------


@case
def remainder_that_does_not_divide() -> Case:
    """A table whose length divides no row of the nest is read through a remainder."""

    @T.prim_func
    def kernel(A: T.Tensor((32, 32), "float32"), B: T.Tensor((7,), "float32"), C: T.Tensor((32, 32), "float32")):
        with T.Kernel(1, threads=64):
            for i, j in T.Parallel(32, 32):
                C[i, j] = A[i, j] * B[j % 7] + B[(i * 32 + j) % 7]

    a, b, at = whole(32, 32), whole(7), torch.arange(1024).view(32, 32)
    return kernel, [a, b, zeros(32, 32)], {2: a * b[at % 32 % 7] + b[at % 7]}


@case
def quotient_and_remainder_of_a_fused_index() -> Case:
    """A flat index is taken apart by sizes that do not nest."""

    @T.prim_func
    def kernel(A: T.Tensor((5, 9), "int32"), B: T.Tensor((45,), "int32"), C: T.Tensor((9, 5), "int32")):
        with T.Kernel(1, threads=32):
            for k in T.Parallel(45):
                B[k] = A[k // 9, k % 9]
                C[k // 5, k % 5] = A[k % 5, k // 5]

    a = whole(5, 9, dtype=torch.int32, most=99)
    return kernel, [a, zeros(45).int(), zeros(9, 5).int()], {1: a.flatten(), 2: a.t().contiguous()}


@case
def reversed_fragment() -> Case:
    """A fragment is read from its end."""

    @T.prim_func
    def kernel(A: T.Tensor((48,), "float32"), B: T.Tensor((48,), "float32")):
        with T.Kernel(1, threads=32):
            f, g = T.alloc_fragment((48,), "float32"), T.alloc_shared((48,), "float32")
            T.copy(A, f)
            T.copy(f, g)
            for i in T.Parallel(48):
                B[i] = g[47 - i] - f[i]

    a = whole(48)
    return kernel, [a, zeros(48)], {1: a.flip(0) - a}


@case
def rotation_in_place() -> Case:
    """Each turn moves a shared row by one, in place."""

    @T.prim_func
    def kernel(A: T.Tensor((37,), "int32"), B: T.Tensor((37,), "int32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((37,), "int32")
            T.copy(A, s)
            for _ in T.serial(5):
                f = T.alloc_fragment((37,), "int32")
                for i in T.Parallel(37):
                    f[i] = s[(i + 1) % 37]
                T.copy(f, s)
            T.copy(s, B)

    a = whole(37, dtype=torch.int32, most=99)
    return kernel, [a, zeros(37).int()], {1: a.roll(-5)}


@case
def last_row_of_a_ragged_transpose() -> Case:
    """A tile is transposed at the edge of a matrix."""

    @T.prim_func
    def kernel(A: T.Tensor((33, 17), "float32"), B: T.Tensor((17, 33), "float32")):
        with T.Kernel(2, 3, threads=32) as (bx, by):
            s = T.alloc_shared((16, 16), "float32")
            t = T.alloc_shared((16, 16), "float32")
            T.copy(A[by * 16, bx * 16], s)
            T.transpose(s, t)
            T.copy(t, B[bx * 16, by * 16])

    a = whole(33, 17)
    return kernel, [a, zeros(17, 33)], {1: a.t().contiguous()}


@case
def gather_by_another_gather() -> Case:
    """The index of an index."""

    @T.prim_func
    def kernel(
        A: T.Tensor((20,), "float32"), I: T.Tensor((20,), "int64"), J: T.Tensor((20,), "uint8"),
        B: T.Tensor((20,), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=32):
            for i in T.Parallel(20):
                B[i] = A[I[J[i]]]

    a, i, j = whole(20), torch.randperm(20), torch.randperm(20).to(torch.uint8)
    return kernel, [a, i, j, zeros(20)], {3: a[i[j.long()]]}


@case
def scatter_of_a_permutation() -> Case:
    """Stores to places that memory names."""

    @T.prim_func
    def kernel(A: T.Tensor((50,), "float16"), I: T.Tensor((50,), "int32"), B: T.Tensor((50,), "float16")):
        with T.Kernel(2, threads=32) as b:
            for i in T.Parallel(25):
                B[I[b * 25 + i]] = A[b * 25 + i]

    a, i = whole(50).half(), torch.randperm(50)
    wanted = torch.zeros_like(a)
    wanted[i] = a
    return kernel, [a, i.int(), torch.zeros_like(a)], {2: wanted}


@case
def index_beyond_32_bits_on_the_way() -> Case:
    """A product of two int32 of memory exceeds int32 before a division brings it back."""

    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32"), I: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                B[i] = A[T.cast(I[i], "int64") * 1000000 // 1000000]

    a, i = whole(64, dtype=torch.int32), torch.randperm(64).int()
    return kernel, [a, i, zeros(64).int()], {2: a[i.long()]}


# -- reductions and scans ----------------------------------------------------------------------------------------------


@case.of_threads
def warp_sums_of_wide_integers() -> Case:
    """The upper half of 64 bits takes part."""

    @T.prim_func
    def kernel(A: T.Tensor((32,), "int64"), B: T.Tensor((3, 32), "int64")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            B[0, t] = T.warp_reduce_sum(A[t])
            B[1, t] = T.warp_reduce_max(A[t])
            B[2, t] = T.warp_reduce_min(A[t])

    a = torch.randint(-(2**61), 2**61, (32,)) // 32
    ends = torch.stack([a.sum(), a.max(), a.min()])
    return kernel, [a, zeros(3, 32).long()], {1: ends[:, None].expand(3, 32).contiguous()}


@case
def sum_and_scan_of_one_tile() -> Case:
    """A tile is summed along one dimension and scanned along the other."""

    @T.prim_func
    def kernel(A: T.Tensor((16, 24), "float32"), B: T.Tensor((16,), "float32"), C: T.Tensor((16, 24), "float32")):
        with T.Kernel(1, threads=64):
            f, s = T.alloc_fragment((16, 24), "float32"), T.alloc_shared((16, 24), "float32")
            o = T.alloc_fragment((16,), "float32")
            T.copy(A, f)
            T.copy(f, s)
            T.reduce_sum(f, o, dim=1)
            T.cumsum(s, dim=0)
            T.copy(o, B)
            T.copy(s, C)

    a = whole(16, 24)
    return kernel, [a, zeros(16), zeros(16, 24)], {1: a.sum(1), 2: a.cumsum(0)}


@case
def reductions_of_small_integers() -> Case:
    """int8 sums wrap in their own type, as the scan's do, whatever type the machine adds in."""

    @T.prim_func
    def kernel(
        A: T.Tensor((4, 40), "int8"), B: T.Tensor((4,), "int8"), C: T.Tensor((4,), "int32"),
        D: T.Tensor((4, 40), "int8"),
    ):  # fmt: skip
        with T.Kernel(1, threads=32):
            f, s = T.alloc_fragment((4, 40), "int8"), T.alloc_shared((4, 40), "int8")
            o, p = T.alloc_fragment((4,), "int8"), T.alloc_fragment((4,), "int32")
            T.copy(A, f)
            T.copy(A, s)
            T.reduce_sum(f, o, dim=1)
            T.reduce_sum(f, p, dim=1)
            T.cumsum(s, dim=1)
            T.copy(o, B)
            T.copy(p, C)
            T.copy(s, D)

    a = whole(4, 40, dtype=torch.int8, most=120)
    sums, scan = a.long().sum(1), a.long().cumsum(1)
    wanted = {1: sums.to(torch.int8), 2: sums.int(), 3: scan.to(torch.int8)}
    return kernel, [a, zeros(4).to(torch.int8), zeros(4).int(), zeros(4, 40).to(torch.int8)], wanted


@case
def maximum_of_negative_numbers_at_an_edge() -> Case:
    """What a ragged tile is padded with must not win."""

    @T.prim_func
    def kernel(A: T.Tensor((3, 21), "float32"), B: T.Tensor((3,), "float32"), C: T.Tensor((3,), "float32")):
        with T.Kernel(1, threads=32):
            f, o = T.alloc_fragment((3, 32), "float32"), T.alloc_fragment((3,), "float32")
            for i, j in T.Parallel(3, 32):
                f[i, j] = T.if_then_else(j < 21, A[i, T.min(j, 20)], -T.infinity("float32"))
            T.reduce_max(f, o, dim=1)
            T.copy(o, B)
            for i, j in T.Parallel(3, 32):
                f[i, j] = T.if_then_else(j < 21, -A[i, T.min(j, 20)], T.infinity("float32"))
            T.reduce_min(f, o, dim=1)
            T.copy(o, C)

    a = -torch.rand(3, 21) - 5
    return kernel, [a, zeros(3), zeros(3)], {1: a.amax(1), 2: (-a).amin(1)}


@case
def reduction_into_what_is_there() -> Case:
    """Without clear, what the result holds takes part once, not once for each copy of it."""

    @T.prim_func
    def kernel(A: T.Tensor((8, 64), "float32"), B: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=128):
            f, o = T.alloc_fragment((8, 64), "float32"), T.alloc_fragment((8,), "float32")
            T.copy(A, f)
            T.copy(B, o)
            for _ in T.serial(3):
                T.reduce_sum(f, o, dim=1, clear=False)
            T.copy(o, B)

    a, b = whole(8, 64), whole(8)
    return kernel, [a, b.clone()], {1: b + 3 * a.sum(1)}


@case
def reduction_of_the_first_dimension_in_halves() -> Case:
    """Columns are summed in float32 and stored as halves."""

    @T.prim_func
    def kernel(A: T.Tensor((30, 24), "float16"), B: T.Tensor((24,), "float16")):
        with T.Kernel(1, threads=96):
            f, o = T.alloc_fragment((30, 24), "float16"), T.alloc_fragment((24,), "float32")
            T.copy(A, f)
            T.reduce_sum(f, o, dim=0)
            T.copy(o, B)

    a = whole(30, 24).half()
    return kernel, [a, zeros(24).half()], {1: a.float().sum(0).half()}


@case
def scan_from_the_end() -> Case:
    """A reversed scan of a part, its neighbours untouched."""

    @T.prim_func
    def kernel(A: T.Tensor((6, 33), "int32"), B: T.Tensor((6, 33), "int32")):
        with T.Kernel(1, threads=32):
            s = T.alloc_shared((6, 33), "int32")
            T.copy(A, s)
            T.cumsum(s, dim=1, reverse=True)
            T.copy(s, B)

    a = whole(6, 33, dtype=torch.int32)
    return kernel, [a, zeros(6, 33).int()], {1: a.flip(1).cumsum(1).flip(1).int()}


@case
def bitwise_reductions() -> Case:
    """The neutral element of `and` is all ones, also of unsigned types."""

    @T.prim_func
    def kernel(A: T.Tensor((5, 19), "uint8"), B: T.Tensor((3, 5), "uint8")):
        with T.Kernel(1, threads=32):
            f, o = T.alloc_fragment((5, 19), "uint8"), T.alloc_fragment((5,), "uint8")
            T.copy(A, f)
            T.reduce_bitand(f, o, dim=1)
            T.copy(o, B[0, 0:5])
            T.reduce_bitor(f, o, dim=1)
            T.copy(o, B[1, 0:5])
            T.reduce_bitxor(f, o, dim=1)
            T.copy(o, B[2, 0:5])

    a = torch.randint(0, 256, (5, 19)).to(torch.uint8) | 16
    wanted = torch.zeros(3, 5, dtype=torch.uint8)
    for row in range(5):
        both, any_, odd = 255, 0, 0
        for x in a[row].tolist():
            both, any_, odd = both & x, any_ | x, odd ^ x
        wanted[:, row] = torch.tensor([both, any_, odd])
    return kernel, [a, torch.zeros_like(wanted)], {1: wanted}


@case
def products_of_two_reductions() -> Case:
    """Two results of one tile meet in an expression: their threads hold different copies."""

    @T.prim_func
    def kernel(A: T.Tensor((16, 20), "float32"), B: T.Tensor((16, 20), "float32")):
        with T.Kernel(1, threads=64):
            f = T.alloc_fragment((16, 20), "float32")
            rows, columns = T.alloc_fragment((16,), "float32"), T.alloc_fragment((20,), "float32")
            T.copy(A, f)
            T.reduce_sum(f, rows, dim=1)
            T.reduce_max(f, columns, dim=0)
            for i, j in T.Parallel(16, 20):
                B[i, j] = rows[i] * columns[j] + f[i, j]

    a = whole(16, 20)
    return kernel, [a, zeros(16, 20)], {1: a.sum(1)[:, None] * a.amax(0) + a}


@case
def nan_that_a_reduction_keeps() -> Case:
    """One NaN in a row, at a random place."""

    @T.prim_func
    def kernel(A: T.Tensor((8, 40), "float32"), B: T.Tensor((3, 8), "float32")):
        with T.Kernel(1, threads=64):
            f, o = T.alloc_fragment((8, 40), "float32"), T.alloc_fragment((8,), "float32")
            T.copy(A, f)
            T.reduce_max(f, o, dim=1, nan_propagate=True)
            T.copy(o, B[0, 0:8])
            T.reduce_min(f, o, dim=1, nan_propagate=True)
            T.copy(o, B[1, 0:8])
            T.reduce_absmax(f, o, dim=1, nan_propagate=True)
            T.copy(o, B[2, 0:8])

    a = torch.randn(8, 40)
    a[torch.arange(0, 8, 2), torch.randint(0, 40, (4,))] = float("nan")
    return kernel, [a, zeros(3, 8)], {1: torch.stack([a.amax(1), a.amin(1), a.abs().amax(1)])}


# -- loops, branches and variables -------------------------------------------------------------------------------------


@case
def sum_inside_a_condition() -> Case:
    """Numba #4922: an update under a condition beside one that always takes place."""

    @T.prim_func
    def kernel(L: T.Tensor((9,), "int32"), B: T.Tensor((9,), "int32")):
        with T.Kernel(9, threads=32) as b:
            c = T.alloc_var("int32", 0)
            for i in T.serial(L[b]):
                c += 1
                if i > 10:
                    c += 1
            B[b] = c

    lengths = torch.tensor([0, 1, 10, 11, 12, 13, 20, 31, 5]).int()
    return kernel, [lengths, zeros(9).int()], {1: lengths + (lengths - 11).clamp(min=0)}


@case
def repeated_floor_division() -> Case:
    """Numba #7867: `//=` in a loop is no reduction."""

    @T.prim_func
    def kernel(B: T.Tensor((8,), "int32")):
        with T.Kernel(8, threads=1) as b:
            c = T.alloc_var("int32", -10000)
            for _ in T.serial(b):
                c //= 3
            B[b] = c

    wanted, c = [], -10000
    for _ in range(8):
        wanted.append(c)
        c //= 3
    return kernel, [zeros(8).int()], {0: torch.tensor(wanted).int()}


@case
def difference_as_a_reduction() -> Case:
    """Numba #9518: one sum grows and one falls in the same loop."""

    @T.prim_func
    def kernel(A: T.Tensor((40,), "int32"), B: T.Tensor((2,), "int32"), n: T.int32):
        with T.Kernel(1, threads=32):
            up, down = T.alloc_var("int32", 0), T.alloc_var("int32", 5)
            for k in T.serial(n):
                up = up + A[k]
                down = down - A[k]
            for k in T.serial(n, 40):
                up = A[k] - up
            B[0] = up
            B[1] = down

    a, up, down = whole(40, dtype=torch.int32, most=50), 0, 5
    for k, x in enumerate(a.tolist()):
        up, down = (up + x, down - x) if k < 23 else (x - up, down)
    return kernel, [a, zeros(2).int(), 23], {1: torch.tensor([up, down]).int()}


@case
def two_paths_with_loops() -> Case:
    """Numba #7630: each arm of a branch has a loop on the same variable."""

    @T.prim_func
    def kernel(F: T.Tensor((6,), "bool"), B: T.Tensor((6,), "int32")):
        with T.Kernel(6, threads=32) as b:
            r = T.alloc_var("int32", 0)
            if F[b]:
                for i in T.serial(10):
                    r += i
            else:
                for i in T.serial(7):
                    r -= 3 * i
            B[b] = r

    flags = torch.rand(6) > 0.5
    return kernel, [flags, zeros(6).int()], {1: torch.where(flags, 45, -63).int()}


@case
def swap_of_variables() -> Case:
    """Fibonacci's numbers by a simultaneous assignment."""

    @T.prim_func
    def kernel(B: T.Tensor((20,), "int64")):
        with T.Kernel(20, threads=1) as n:
            a, b = T.alloc_var("int64", 0), T.alloc_var("int64", 1)
            for _ in T.serial(n * 4):
                c = T.alloc_var("int64", 0)
                c = a + b
                a = b
                b = c
            B[n] = a

    wanted, a, b = [], 0, 1
    for n in range(77):
        wanted += [a] if n % 4 == 0 else []
        a, b = b, a + b
    return kernel, [zeros(20).long()], {0: torch.tensor(wanted)}


@case
def value_of_a_variable_before_it_changes() -> Case:
    """A name keeps what the variable held when it was made."""

    @T.prim_func
    def kernel(A: T.Tensor((16,), "int32"), B: T.Tensor((16,), "int32")):
        with T.Kernel(1, threads=1):
            v = T.alloc_var("int32", 1)
            for i in T.serial(16):
                before = v + 0
                v = v * 3 + A[i]
                B[i] = before - v

    a, v, wanted = whole(16, dtype=torch.int32, most=2), 1, []
    for x in a.tolist():
        new = v * 3 + x
        wanted.append(v - new)
        v = new
    return kernel, [a, zeros(16).int()], {1: torch.tensor(wanted).int()}


@case
def nested_breaks() -> Case:
    """A break of the inner loop leaves the outer one alone; the first match of each row is found."""

    @T.prim_func
    def kernel(A: T.Tensor((7, 13), "int32"), B: T.Tensor((7,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.serial(7):
                at = T.alloc_var("int32", -1)
                for j in T.serial(13):
                    if A[i, j] == 3:
                        at = j
                        break
                B[i] = at

    a = torch.randint(0, 8, (7, 13)).int()
    first = [row.index(3) if 3 in row else -1 for row in a.tolist()]
    return kernel, [a, zeros(7).int()], {1: torch.tensor(first).int()}


@case
def while_over_halves() -> Case:
    """Collatz: a loop whose turns only the data tells."""

    @T.prim_func
    def kernel(B: T.Tensor((30,), "int32")):
        with T.Kernel(30, threads=32) as b:
            n, turns = T.alloc_var("int32", 0), T.alloc_var("int32", 0)
            n = b + 1
            while n != 1:
                if n % 2 == 0:
                    n = n // 2
                else:
                    n = 3 * n + 1
                turns += 1
            B[b] = turns

    wanted = []
    for n in range(1, 31):
        turns = 0
        while n != 1:
            n, turns = n // 2 if n % 2 == 0 else 3 * n + 1, turns + 1
        wanted.append(turns)
    return kernel, [zeros(30).int()], {0: torch.tensor(wanted).int()}


@case
def guarded_division() -> Case:
    """The arm that is not taken divides by zero."""

    @T.prim_func
    def kernel(A: T.Tensor((40,), "int32"), B: T.Tensor((40,), "int32"), C: T.Tensor((40,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(40):
                C[i] = T.if_then_else(B[i] != 0, A[i] // B[i] * 100 + A[i] % B[i], -1)

    a, b = torch.randint(-50, 50, (40,)).int(), torch.randint(-3, 4, (40,)).int()
    safe = torch.where(b == 0, 1, b)
    return kernel, [a, b, zeros(40).int()], {2: torch.where(b != 0, a // safe * 100 + a % safe, -1).int()}


@case
def guarded_load_beyond_a_tensor() -> Case:
    """The guard is written behind the load in the expression."""

    @T.prim_func
    def kernel(A: T.Tensor((19,), "float32"), B: T.Tensor((64,), "float32"), n: T.int32):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                B[i] = T.if_then_else(i + n < 19, A[i + n], -5.0)

    a = whole(19)
    wanted = torch.full((64,), -5.0)
    wanted[:12] = a[7:]
    return kernel, [a, zeros(64), 7], {1: wanted}


@case
def chain_of_conditions_over_a_nest() -> Case:
    """Each element takes one of five arms, some of which store nothing."""

    @T.prim_func
    def kernel(A: T.Tensor((60,), "int32"), B: T.Tensor((60,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(60):
                if A[i] < -2:
                    B[i] = 1
                elif A[i] == 0:
                    B[i] = B[i] + 10
                elif A[i] % 2 == 1:
                    if i % 3 == 0:
                        B[i] = -A[i]
                elif A[i] > 2:
                    B[i] = A[i] * A[i]

    a, b, wanted = whole(60, dtype=torch.int32), whole(60, dtype=torch.int32), []
    for i, (x, old) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        if x < -2:
            old = 1
        elif x == 0:
            old += 10
        elif x % 2 == 1:
            old = -x if i % 3 == 0 else old
        elif x > 2:
            old = x * x
        wanted.append(old)
    return kernel, [a, b.clone()], {1: torch.tensor(wanted).int()}


@case
def shared_memory_over_turns() -> Case:
    """Jacobi's iteration between two shared rows that change places."""

    @T.prim_func
    def kernel(A: T.Tensor((34,), "float32"), B: T.Tensor((34,), "float32")):
        with T.Kernel(1, threads=32):
            s = T.alloc_shared((2, 34), "float32")
            T.copy(A, s[0, 0:34])
            T.copy(A, s[1, 0:34])
            for t in T.serial(5):
                for i in T.Parallel(32):
                    s[(t + 1) % 2, i + 1] = s[t % 2, i] + s[t % 2, i + 2]
            T.copy(s[1, 0:34], B)

    a = whole(34)
    rows = [a.clone(), a.clone()]
    for t in range(5):
        rows[(t + 1) % 2][1:33] = rows[t % 2][:32] + rows[t % 2][2:]
    return kernel, [a, zeros(34)], {1: rows[1]}


@case
def pipelined_sum_with_a_tail() -> Case:
    """Tiles of a pipeline whose last one is ragged, with a branch on the turn."""

    @T.prim_func
    def kernel(A: T.Tensor((8, 75), "float32"), B: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=64):
            s, o = T.alloc_shared((8, 16), "float32"), T.alloc_fragment((8,), "float32")
            f, p = T.alloc_fragment((8, 16), "float32"), T.alloc_fragment((8,), "float32")
            T.clear(o)
            for k in T.Pipelined(5, num_stages=3):
                T.copy(A[0:8, k * 16 : k * 16 + 16], s)
                T.copy(s, f)
                T.reduce_sum(f, p, dim=1)
                for i in T.Parallel(8):
                    o[i] += T.if_then_else(k % 2 == 0, p[i], -p[i])
            T.copy(o, B)

    a = whole(8, 75)
    wanted = sum((1 if k % 2 == 0 else -1) * a[:, 16 * k : 16 * k + 16].sum(1) for k in range(5))
    return kernel, [a, zeros(8)], {1: wanted}


@case
def pipeline_without_a_turn() -> Case:
    """The number of turns is known at run time only, and may be 0 or 1."""

    @T.prim_func
    def kernel(A: T.Tensor((5, 4, 32), "float32"), L: T.Tensor((5,), "int32"), B: T.Tensor((5, 32), "float32")):
        with T.Kernel(5, threads=32) as b:
            s, o = T.alloc_shared((32,), "float32"), T.alloc_fragment((32,), "float32")
            T.fill(o, 1.0)
            for k in T.Pipelined(L[b], num_stages=2):
                T.copy(A[b, k, 0:32], s)
                for i in T.Parallel(32):
                    o[i] += s[i]
            T.copy(o, B[b, 0:32])

    a, lengths = whole(5, 4, 32), torch.tensor([0, 4, 1, 2, 3]).int()
    kept = torch.arange(4)[None, :, None] < lengths[:, None, None]
    return kernel, [a, lengths, zeros(5, 32)], {2: 1 + (a * kept).sum(1)}


test_reported_kinds = case.test()
