# SPDX-License-Identifier: Apache-2.0
"""One kernel for each statement that does nothing, or never ends, although Python takes it; and results with gaps."""

import warnings

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError


def kernel_of(body, target="cpu", dtype="float32"):
    """Compile a kernel whose body is the macro `body(A, C)`; C is its result."""
    body = T.macro(body)

    @torch_tile.jit(target=target)
    def kernel(A):
        A: T.Tensor((64,), dtype)
        C = T.empty((64,), dtype)
        with T.Kernel(1, threads=128) as _:
            T.fill(C, 0)
            body(A, C)
        return C

    return kernel.compile()


def compared():
    def body(A, C):
        C[0] == 1.0  # noqa: B015  # here

    kernel_of(body)


def read_reducer():
    def body(A, C):
        total = T.alloc_reducer((1,), "float32")
        T.reducer_init(total)
        C[0] = total[0]  # here

    kernel_of(body)


def dropped_value():
    def body(A, C):
        for i in T.Parallel(64):
            T.exp(A[i])  # here

    kernel_of(body)


def dropped_sum():
    def body(A, C):
        A[0] + 1.0  # here

    kernel_of(body)


def without_with():
    @torch_tile.jit(target="cpu")
    def kernel(A):
        A: T.Tensor((64,), "float32")
        C = T.empty((64,), "float32")
        T.Kernel(1, threads=128)  # here
        T.copy(A, C)
        return C

    kernel.compile()


def endless():
    def body(A, C):
        n = T.alloc_var("int32", 0)
        m = T.alloc_var("int32", 0)
        while n < 10:  # here
            m += 1
            C[m] = A[m]

    kernel_of(body)


def nobody_arrives():
    def body(A, C):
        ready = T.alloc_barrier(128)
        T.mbarrier_wait_parity(ready[0], 0)  # here
        T.copy(A, C)

    kernel_of(body, "cuda:sm_90a")


def beyond_the_mbarriers():
    def body(A, C):
        ready = T.alloc_barrier([128] * 2)
        T.mbarrier_arrive(ready[2])  # here

    kernel_of(body, "cuda:sm_90a")


def divided_by_zero():
    def body(A, C):
        for i in T.Parallel(64):
            C[i] = A[i] // 0  # here

    kernel_of(body, dtype="int32")


def index_divided_by_zero():
    def body(A, C):
        for i in T.Parallel(64):
            C[i] = i % 0  # here

    kernel_of(body, dtype="int32")


def shifted_float():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            A[0] = A[1] << 1  # here

    torch_tile.compile(kernel)


def shifted_back():
    def body(A, C):
        for i in T.Parallel(64):
            C[i] = A[i] << -1  # here

    kernel_of(body, dtype="int32")


def half_added_to_integers():
    def body(A, C):
        for i in T.Parallel(64):
            T.atomic_add(C[i], 0.5)  # here

    kernel_of(body, dtype="int32")


def half_filled():
    def body(A, C):
        T.fill(C, 0.5)  # here

    kernel_of(body, dtype="int32")


def dtype_for_a_size():
    def body(A, C):
        T.clear(T.alloc_fragment(64, 64, "float32"))  # here

    kernel_of(body)


def value_for_a_dtype():
    def body(A, C):
        C[0] = T.alloc_var(0.0)  # here

    kernel_of(body)


def torch_for_a_tile():
    def body(A, C):
        T.copy(A, torch.zeros(64))  # here

    kernel_of(body)


def text_for_a_panel():
    def body(A, C):
        T.use_swizzle("row")  # here

    kernel_of(body)


def no_panel():
    def body(A, C):
        T.use_swizzle(0)  # here

    kernel_of(body)


def returned_inside():
    @torch_tile.jit(target="cpu")
    def kernel(A):
        A: T.Tensor((64,), "float32")
        C = T.empty((64,), "float32")
        with T.Kernel(1, threads=128) as _:
            T.copy(A, C)
            return C  # here

    kernel.compile()


def returned_argument():
    @torch_tile.jit(target="cpu")
    def kernel(A):
        A: T.Tensor((64,), "float32")
        with T.Kernel(1, threads=128) as _:
            T.fill(A, 0)
        return A  # here

    kernel.compile()


def indexed_twice():
    def body(A, C):
        B = T.reshape(A, (8, 8))
        C[0] = B[0][1]  # here

    kernel_of(body)


def smallest():
    def body(A, C):
        C[0] = min(A[0], 0.0)  # here

    kernel_of(body)


def no_such_dimension():
    def body(A, C):
        for i in T.serial(A.shape[1]):  # here
            C[i] = A[i]

    kernel_of(body)


def one_row():
    def body(A, C):
        B = T.reshape(A, (8, 8))
        T.copy(B[2], T.alloc_shared((4, 8), "float32"))  # here

    kernel_of(body)


def turned():
    def body(A, C):
        B = T.reshape(A, (4, 16))
        T.copy(B, T.alloc_shared((16, 4), "float32"))  # here

    kernel_of(body)


def without_transpose():
    def body(A, C):
        a, c = T.alloc_shared((32, 64), "float16"), T.alloc_fragment((32, 32), "float32")
        T.clear(a)
        T.clear(c)
        T.gemm(a, a, c)  # here

    kernel_of(body)


def load_without_mbarrier():
    def body(A, C):
        T.tma_copy(A, T.alloc_shared((64,), "float32"))  # here

    kernel_of(body, "cuda:sm_90a")


def quotient_for_a_grid():
    @torch_tile.jit(target="cpu")
    def kernel(A, block=32):
        A: T.Tensor((64,), "float32")
        with T.Kernel(64 / block, threads=128) as b:  # here
            A[b] = 0.0

    kernel.compile()


CASES = {
    read_reducer: ("reducer_protocol", "T.finalize_reducer gives the result"),
    compared: ("unused_value", "`=` assigns"),
    dropped_value: ("unused_value", "C[i] = ..."),
    dropped_sum: ("unused_value", "name it"),
    without_with: ("not_opened", "with T.Kernel(...) as bx:"),
    endless: ("endless_loop", "in the body"),
    nobody_arrives: ("endless_wait", "T.mbarrier_arrive"),
    beyond_the_mbarriers: ("out_of_bounds", "(2)"),
    divided_by_zero: ("bad_operand", "divide by another number"),
    index_divided_by_zero: ("bad_operand", "divide by another number"),
    shifted_float: ("bad_operand", "use numbers"),
    shifted_back: ("bad_operand", ">> to the right"),
    half_added_to_integers: ("wrong_dtype_store", "T.cast(value, int32)"),
    half_filled: ("wrong_dtype_store", "T.cast(value, int32)"),
    dtype_for_a_size: ("bad_argument", "T.alloc_fragment((m, n), 'float32')"),
    value_for_a_dtype: ("bad_dtype", "(dtype, init)"),
    torch_for_a_tile: ("copy_values", "T.alloc_shared"),
    text_for_a_panel: ("bad_argument", "blocks of a panel"),
    no_panel: ("bad_argument", "enable=False"),
    returned_inside: ("return_in_region", "behind the `with`"),
    returned_argument: ("bad_return", "in place"),
    indexed_twice: ("python_value", "A[i, j]"),
    smallest: ("symbolic_condition", "T.min(x, y)"),
    no_such_dimension: ("python_value", "A.ndim"),
    one_row: ("copy_shape", "[i, 0]"),
    turned: ("copy_shape", "T.transpose"),
    without_transpose: ("gemm_shape", "transpose_B=True"),
    load_without_mbarrier: ("bad_argument", "barrier=full[i]"),
    quotient_for_a_grid: ("bad_shape", "T.ceildiv(n, m)"),
}


@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_refused(case):
    """The error has the code, names the line, and its fix says what helps."""
    code, fix = CASES[case]
    with pytest.raises(TileError) as caught:
        case()
    (found,) = caught.value.diagnostics
    assert found.code == code and "# here" in found.span.source() and fix in found.fix


@pytest.mark.parametrize("rows, columns", [(64, 160), (33, 70)])
@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize("rounds_down", [False, True])
def test_gaps_of_results_are_warned_of(rows, columns, exchanged, rounds_down):
    """The warning names elements that are never written, and none that is."""
    block = 16

    @torch_tile.jit(target="cpu")
    def kernel(A):
        M, N = T.const("M, N")
        A: T.Tensor((M, N), "float32")
        C = T.empty((M, N), "float32")
        grid = [(n // block if rounds_down else T.ceildiv(n, block)) for n in (M, N)]
        with T.Kernel(*grid, threads=128) as (bx, by):
            x, y = (by, bx) if exchanged else (bx, by)
            T.copy(A[x * block, y * block], C[x * block : (x + 1) * block, y * block : (y + 1) * block])
        return C

    blocks = [n // block if rounds_down else -(-n // block) for n in (rows, columns)]
    covered = [min(b * block, n) for b, n in zip(blocks[:: -1 if exchanged else 1], (rows, columns), strict=True)]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        kernel.compile(M=rows, N=columns)
    found = [str(each.message) for each in seen if "unwritten_part" in str(each.message)]
    assert bool(found) == (covered != [rows, columns])
    if found:
        part = found[0].split("`C[")[1].split("]`")[0]
        low = [int(each.split(":")[0]) for each in part.split(", ")]
        high = [int(each.split(":")[1]) for each in part.split(", ")]
        assert any(a >= n for a, n in zip(low, covered, strict=True)) and all(
            a < b for a, b in zip(low, high, strict=True)
        )
        assert "T.empty((M, N)" in found[0]


def test_whole_results_are_not_warned_of():
    """Writes by other names, at places known at run time, and under conditions count for all that they may reach."""

    @torch_tile.jit(target="cpu")
    def kernel(A, to):
        N = T.const("N")
        A: T.Tensor((N,), "float32")
        to: T.Tensor((N,), "int32")
        C, D, E = T.empty((N,), "float32"), T.empty((N,), "float32"), T.empty((N, 2), "float32")
        flat = T.reshape(E, (2 * N,))
        with T.Kernel(1, threads=128) as _:
            for i in T.Parallel(N):
                C[to[i]] = A[i]
                flat[i] = A[i]
                if i % 2 == 0:
                    D[N - 1 - i] = A[i]
                else:
                    D[0] = A[i]
        return C, D, E

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel.compile(N=77)


def test_loops_of_no_iteration_are_warned_of():
    def exchanged(A, C):
        for k in T.Pipelined(4, 3):
            C[k] = A[k]

    def no_tiles(A, C):
        for k in T.Pipelined(3, 3):  # the extent, and the width of a tile
            C[k] = A[k]

    def empty(A, C):
        for k in T.serial(3, 3):
            C[k] = A[k]

    with pytest.warns(UserWarning, match=r"(?s)T.Pipelined has no iteration: .*num_stages=3"):
        kernel_of(exchanged)
    with pytest.warns(UserWarning, match=r"(?s)T.Pipelined has no iteration: .*num_stages=3"):
        kernel_of(no_tiles)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel_of(empty)


def test_loops_that_other_threads_or_the_body_end_compile():
    def body(A, C):
        n = T.alloc_var("int32", 0)
        while n < 10:
            n += 1
        while A[0] > 0.0:
            C[0] = 1.0
        while n > 0:
            if A[1] > 0.0:
                break

    kernel_of(body)


def test_unused_values_of_calls_with_effects_are_taken():
    @T.macro
    def touch(C):
        C[0] = 1.0
        return C[0] + 1.0

    def body(A, C):
        touch(C)
        T.atomic_add(C[1], 1.0, return_prev=True)

    kernel_of(body)


def test_fixes_of_calls_fit_the_style():
    """An eager kernel takes tensors, whatever its signature says of them."""

    @torch_tile.jit(target="cpu")
    def eager(A, B, block=4):
        A: T.Tensor((64,), "float32")
        B: T.Tensor((64,), "float32")
        with T.Kernel(1, threads=128) as _:
            T.copy(A, B)

    with pytest.raises(TileError) as caught:
        eager(torch.zeros(64))
    assert "takes no tensors" not in caught.value.diagnostics[0].fix
    with pytest.raises(TileError, match="`block`") as caught:
        eager(torch.zeros(64), torch.zeros(64), blok=3)
    assert caught.value.diagnostics[0].fix == "did you mean `block`?"
