# SPDX-License-Identifier: Apache-2.0
"""Which layouts buffers and loops get."""

import pytest
import torch

import torch_tile
import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.ir.layout import Layout, row_major, shared_tile, spread
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Alloc, For, LoopKind
from torch_tile.lowering.threads.infer_layouts import infer_layouts, private_vars
from torch_tile.simulator.tile.interpreter import evaluate

ACCUMULATOR = Layout.parse("[4:32t 2:2r 8:4t | 8:4r 4:1t 2:1r]")


def inferred(kernel):
    """Layouts of the buffers by name, and of the loops in order."""
    program = infer_layouts(kernel.program, Build(Target.of("cuda:sm_90a")))
    buffers = {n.buffer.name: n.buffer.layout for n in walk(program) if isinstance(n, Alloc)}
    loops = [n.layout for n in walk(program) if isinstance(n, For) and n.kind is LoopKind.PARALLEL]
    return buffers, loops


def test_softmax_between_products_stays_in_registers():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), out: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128) as _:
            a = T.alloc_shared((64, 64), "float16")
            s = T.alloc_fragment((64, 64), "float32")
            p = T.alloc_fragment((64, 64), "float16")
            o = T.alloc_fragment((64, 64), "float32")
            peak = T.alloc_fragment((64,), "float32")
            twice = T.alloc_fragment((64,), "float32")
            T.fill(peak, 0.0)
            T.copy(A, a)
            T.gemm(a, a, s, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
            T.reduce_max(s, peak, dim=1)
            for i in T.Parallel(64):
                twice[i] = peak[i] * 2.0
            for i, j in T.Parallel(64, 64):
                s[i, j] = s[i, j] - twice[i]
            T.copy(s, p)
            T.gemm(p, a, o, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
            T.copy(o, out)

    buffers, loops = inferred(kernel)
    assert buffers["s"] == buffers["p"] == buffers["o"] == ACCUMULATOR
    assert buffers["peak"] == buffers["twice"] == ACCUMULATOR.drop(1)
    assert buffers["a"] == shared_tile((64, 64), 16)
    assert loops == [ACCUMULATOR.drop(1), ACCUMULATOR]


@pytest.mark.parametrize("threads", [128, 256])
@pytest.mark.parametrize("multiple, vector", [(8, 8), (2, 2), (1, 1)])
def test_rows_are_read_in_vectors_as_wide_as_is_proved(threads, multiple, vector):
    n = T.dynamic("n", multiple_of=multiple)

    @T.prim_func
    def kernel(A: T.Tensor((16, n), "float16"), B: T.Tensor((16, n), "float16")):
        with T.Kernel(1, threads=threads) as _:
            for i, j in T.Parallel(16, 512):
                B[i, j] = A[i, j] + A[i, j]

    assert inferred(kernel)[1] == [spread((16, 512), threads, vector)]


def test_the_contiguous_variable_need_not_be_the_last():
    @T.prim_func
    def kernel(A: T.Tensor((256, 32), "float32"), B: T.Tensor((256, 32), "float32")):
        with T.Kernel(1, threads=128) as _:
            for i, j in T.Parallel(32, 256):
                B[j, i] = A[j, i]

    assert inferred(kernel)[1] == [spread((256, 32), 128, 4).permute((1, 0))]


def test_a_nest_that_accumulates_keeps_the_sum_in_one_thread():
    @T.prim_func
    def kernel(A: T.Tensor((128, 8), "float32"), B: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128) as _:
            total = T.alloc_fragment((128,), "float32")
            T.clear(total)
            for i, j in T.Parallel(128, 8):
                total[i] += A[i, j]
            T.copy(total, B)

    buffers, loops = inferred(kernel)
    assert loops == [Layout.parse("[128:1t | 8:1r]")]
    assert buffers["total"] == Layout.parse("[128:1t]")


def test_tiles_that_nothing_asks_about():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32) as _:
            s = T.alloc_shared((3, 5), "float32")
            f = T.alloc_fragment((64,), "float32")
            T.clear(s)
            T.clear(f)

    buffers, _ = inferred(kernel)
    assert buffers == {"s": row_major((3, 5)), "f": spread((64,), 32, 1)}


def parts_of_sums(columns, transposed=False):
    """A loop stores half of the sums of a product in shared memory; another adds what it reads to memory."""

    @T.prim_func
    def kernel(
        A: T.Tensor((32, 32), "float16"), B: T.Tensor((32, columns), "float16"), C: T.Tensor((32, columns), "float32")
    ):
        with T.Kernel(1, threads=64):
            a, b = T.alloc_shared((32, 32), "float16"), T.alloc_shared((32, columns), "float16")
            c = T.alloc_fragment((32, columns), "float32")
            half = T.alloc_shared((columns, 16) if transposed else (16, columns), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, c, clear_accum=True)
            for part in T.unroll(2):
                for i, j in T.Parallel(32, columns):
                    if i < 16:
                        if transposed:
                            half[j, i] = c[i + part * 16, j]
                        else:
                            half[i, j] = c[i + part * 16, j]
                for i, j in T.Parallel(16, columns):
                    T.atomic_add(C[i + part * 16, j], half[j, i] if transposed else half[i, j])

    return kernel


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("columns", [32, 48, 64])
def test_loops_store_fragments_in_all_banks(columns, transposed, way, seed):
    torch.manual_seed(seed)
    kernel = parts_of_sums(columns, transposed)
    if not transposed:
        buffers, _ = inferred(kernel)
        assert row_major((16, columns)) != buffers["half"] == shared_tile((16, columns), 32)
    a, b, c = torch.randn(32, 32).half(), torch.randn(32, columns).half(), torch.zeros(32, columns)
    way(kernel, a, b, c)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-4)


def test_layouts_of_a_role_cover_its_threads():
    """What a role alone has in registers is spread over its threads, whatever number the first of them has."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=256):
            with T.role(64, 192):
                x = T.alloc_fragment((64, 64), "float32")
                T.copy(A, x)
            with T.role(0, 64):
                y = T.alloc_fragment((64, 64), "float16")
                T.copy(B, y)

    buffers, _ = inferred(kernel)
    assert buffers["x"] == spread((64, 64), 192, 4) and buffers["x"].extent("t") == 192
    assert buffers["y"] == spread((64, 64), 64, 8) and buffers["y"].extent("t") == 64


@pytest.mark.parametrize("widths", [(64, 8), (32, 40), (8, 64), (48, 24)])
def test_sums_that_loops_use_in_slices_follow_what_they_add(widths):
    """No loop uses all columns of the sums, and no slice divides them; a slice of one register decides nothing."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), B: T.Tensor((72, 64), "float16"), out: T.Tensor((64, 72), "float32")):
        with T.Kernel(1, threads=128) as _:
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((72, 64), "float16")
            part, sums = (T.alloc_fragment((64, 72), "float32") for _ in range(2))
            T.copy(A, a)
            T.copy(B, b)
            T.clear(sums)
            T.gemm(a, b, part, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
            for number, width in enumerate(widths):
                start = number * widths[0]
                for i, j in T.Parallel(64, width):
                    sums[i, start + j] += part[i, start + j] * (number + 2.0)
            T.copy(sums, out)

    buffers, _ = inferred(kernel)
    assert buffers["sums"] == buffers["part"] == Layout.parse("[4:32t 2:2r 8:4t | 9:4r 4:1t 2:1r]")
    made = torch_tile.compile(kernel, target="cuda:sm_90a")
    assert not any("through shared memory" in remark.became for remark in made.build.remarks)
    a, b, result = torch.randn(64, 64).half(), torch.randn(72, 64).half(), torch.zeros(64, 72)
    assert not made.interpret(a, b, result).kinds
    factors = torch.tensor([2.0] * widths[0] + [3.0] * widths[1])
    torch.testing.assert_close(result.double(), (a.double() @ b.double().t()) * factors, rtol=1e-5, atol=1e-4)


def test_products_of_a_warpgroup_ask_for_its_accumulators():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=256), T.role(128, 128):
            a, c = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            p, o = T.alloc_fragment((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.gemm(a, a, c, clear_accum=True)
            T.copy(c, p)
            T.gemm(p, a, o, clear_accum=True)

    buffers, _ = inferred(kernel)
    assert buffers["a"] == shared_tile((64, 64), 16)
    assert buffers["c"] == buffers["p"] == buffers["o"] == ACCUMULATOR


def owned(kernel):
    """How many variables belong to the iterations of nests afterwards."""
    (k,) = kernel.program.kernels
    nests = [n for n in walk(private_vars(k)) if isinstance(n, For) and n.kind is LoopKind.PARALLEL]
    return sum(isinstance(n, Alloc) for nest in nests for n in walk(nest.body))


def test_set_before_it_is_used():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=32) as _:
            x = T.alloc_var("int32", 0)
            for i in T.Parallel(8):
                x = i * 2
                A[i] = x
            for i in T.Parallel(8):
                x = i * 3
                A[i] = A[i] + x

    assert owned(kernel) == 2


def test_used_before_it_is_set_or_after_the_nest():
    @T.prim_func
    def carried(A: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=32) as _:
            x = T.alloc_var("int32", 0)
            for i in T.Parallel(8):
                x = x + A[i]
            A[0] = x

    @T.prim_func
    def last(A: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=32) as _:
            x = T.alloc_var("int32", 0)
            for i in T.Parallel(8):
                x = A[i]
            A[0] = x

    assert owned(carried) == owned(last) == 0


def test_unchanged_kernels_stay_the_same():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=32) as _:
            for i in T.Parallel(8):
                A[i] = i

    (k,) = kernel.program.kernels
    assert private_vars(k) is k


def agree(kernel, shape, seed):
    """Whether the threads of a compiled kernel give what its program says, on fresh numbers."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    want, got = torch.full_like(x, 7.0), torch.full_like(x, 7.0)
    evaluate(kernel.program, x, want)
    assert not tilelang.compile(kernel, target="cuda:sm_90").interpret(x, got)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("flag", [False, True])
def test_made_inside_the_nest_is_declared_once(flag, seed):
    """The name is the iteration's own already: its first value must reach the other uses."""
    shape = (5, 33)

    @T.prim_func
    def static(A: T.Tensor(shape, "float32"), B: T.Tensor(shape, "float32")):
        with T.Kernel(1, threads=64) as _:
            for i, j in T.Parallel(*shape):
                d = A[i, j]
                if not flag:
                    d = T.if_then_else(j < 5 * i, d, 0.0)
                B[i, j] = d

    @T.prim_func
    def dynamic(A: T.Tensor(shape, "float32"), B: T.Tensor(shape, "float32")):
        with T.Kernel(1, threads=64) as _:
            for i, j in T.Parallel(*shape):
                d = A[i, j]
                if j < 5 * i:
                    B[i, j] = 1.0  # a branch that only computes would be a choice
                    d *= 2.0
                    if flag:
                        d += 1.0
                B[i, j] = d

    @T.prim_func
    def loops(A: T.Tensor(shape, "float32"), B: T.Tensor(shape, "float32")):
        with T.Kernel(1, threads=64) as _:
            for i, j in T.Parallel(*shape):
                total = A[i, j] * 0.5
                for k in T.serial(3):
                    e = A[i, (j + k) % shape[1]]
                    if flag:
                        e = T.if_then_else(e > 0.0, e, 0.0)
                    if k > i:
                        B[i, j] = e
                        e += 1.0
                    total += e
                B[i, j] = total

    for kernel, variables in ((static, 0), (dynamic, 1), (loops, 2)):
        assert owned(kernel) == variables
        agree(kernel, shape, seed)
