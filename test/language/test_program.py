# SPDX-License-Identifier: Apache-2.0
"""T.prim_func and T.macro. Annotations are strings here, as `from __future__ import annotations` makes them."""

from __future__ import annotations

import runpy

import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.diagnostics.errors import LaunchError, TileError
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Var
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import If, Let
from torch_tile.simulator.tile.interpreter import evaluate

WIDTH = 6


def test_annotations_see_the_names_around_the_definition():
    def make(rows, dtype):
        n = T.dynamic("n")
        shape = (rows, n)

        @T.prim_func
        def kernel(A: T.Tensor(shape, dtype), B: T.Tensor((WIDTH, n), "int32"), k: T.int64, x: float, f: bool):
            with T.Kernel(1) as _:
                T.clear(A)

        return kernel, n

    kernel, n = make(3, "float16")
    a, b, k, x, f = kernel.program.params
    assert isinstance(a, Buffer) and (a.name, repr(a.shape[0]), a.dtype.name) == ("A", "3", "float16")
    assert a.shape[1] is n and b.shape[1] is n and b.shape[0].value == WIDTH
    assert all(isinstance(v, Var) for v in (k, x, f))
    assert [v.dtype.name for v in (k, x, f)] == ["int64", "float32", "bool"]


def test_closures_and_defaults():
    scale = 3.0

    @T.prim_func
    def kernel(out: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            for i in T.Parallel(4):
                out[i] = scale * i

    scale = 5.0  # the kernel was traced when it was defined
    out = torch.zeros(4)
    evaluate(kernel, out)
    assert out.tolist() == [0, 3, 6, 9] and scale == 5.0


def test_a_name_that_shadows_the_closure_is_pythons_business():
    size = 4

    @T.prim_func
    def kernel(out: T.Tensor((size,), "float32")):
        with T.Kernel(1) as _:
            width = size * 2
            for i in T.Parallel(size):
                out[i] = width

    out = torch.zeros(4)
    evaluate(kernel, out)
    assert out.tolist() == [8] * 4


def test_variadic_parameters():
    types = [T.Tensor((2,), "float32"), T.Tensor((3,), "float32")]

    @T.prim_func
    def kernel(out: T.Tensor((2,), "float32"), *xs: types):
        with T.Kernel(1) as _:
            for i, x in enumerate(xs):
                out[i] = x[x.shape[0] - 1]

    assert [p.name for p in kernel.program.params] == ["out", "xs_0", "xs_1"]
    out = torch.zeros(2)
    evaluate(kernel, out, torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0]))
    assert out.tolist() == [2, 5]


def test_outputs_and_workspaces():
    @T.prim_func
    def kernel(x: T.Tensor((4,), "float32")):
        first = T.empty((4,), "float32")
        second = T.empty(2, dtype="int32")
        scratch = T.alloc_global((4,), "float32")
        with T.Kernel(4) as b:
            scratch[b] = x[b] + 1.0
        with T.Kernel(4) as b:
            first[b] = scratch[3 - b]
            if b < 2:
                second[b] = b + 7
        return second, first

    program = kernel.program
    assert [b.dtype.name for b in program.outputs] == ["int32", "float32"]
    assert [b.origin for b in program.workspaces] == ["workspace"] and len(program.kernels) == 2
    second, first = evaluate(kernel, torch.arange(4.0))
    assert first.tolist() == [4, 3, 2, 1] and second.tolist() == [7, 8]


def test_the_function_stays_reachable():
    @T.prim_func
    def kernel(x: T.Tensor((4,), "float32")):
        """What it does."""
        with T.Kernel(1) as _:
            x[0] = 1.0

    assert kernel.__name__ == "kernel" and kernel.__doc__ == "What it does."
    assert kernel.script() == repr(kernel) and "x[0] = 1.0" in kernel.script()


def test_decorators_with_options():
    @T.prim_func(check_well_formed=False)
    def kernel(x: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            double(x)

    @T.macro()
    def unused(x):
        x[0] = 2.0

    x = torch.ones(4)
    evaluate(kernel, x)
    assert x.tolist() == [2] * 4


@T.macro
def double(x, by=2.0):
    for i in T.Parallel(x.shape[0]):
        x[i] = x[i] * by


def test_macros_are_inlined_with_device_control_flow():
    @T.macro
    def clamp(x, i, low, *, high=10.0):
        if x[i] < low:
            x[i] = low
        elif x[i] > high:
            x[i] = high

    @T.prim_func
    def kernel(x: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(4):
                clamp(x, i, 2.0)
            double(x, by=0.5)
            clamp(x, 0, 3.0, high=4.0)

    assert len([n for n in walk(kernel.program) if isinstance(n, If)]) == 4
    x = torch.tensor([0.0, 5.0, 20.0, 2.0])
    evaluate(kernel, x)
    assert x.tolist() == [3, 2.5, 5, 1]


def test_macros_may_say_where_their_buffers_are():
    @T.macro
    def twice(x: T.SharedBuffer((8,), "float32"), y: T.FragmentBuffer((8,), "float32")):
        for i in T.Parallel(8):
            y[i] = x[i] * 2

    @T.prim_func
    def kernel(a: T.Tensor((8,), "float32"), b: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            s, f = T.alloc_shared((8,), "float32"), T.alloc_fragment((8,), "float32")
            T.copy(a, s)
            twice(s, f)
            T.copy(f, b)

    a, b = torch.randn(8), torch.zeros(8)
    evaluate(kernel, a, b)
    assert torch.equal(b, a * 2)


def test_macros_return_values():
    @T.macro
    def dot(a, b, n):
        total = T.alloc_var("float32", 0.0)
        for i in range(n):
            total += a[i] * b[i]
        return total

    @T.macro
    def both(a, b):
        return dot(a, b, 4), dot(a, a, 2)

    @T.prim_func
    def kernel(a: T.Tensor((4,), "float32"), b: T.Tensor((4,), "float32"), out: T.Tensor((2,), "float32")):
        with T.Kernel(1) as _:
            x, y = both(a, b)
            out[0] = x
            out[1] = y

    a, b, out = torch.randn(4), torch.randn(4), torch.zeros(2)
    evaluate(kernel, a, b, out)
    torch.testing.assert_close(out, torch.stack([a @ b, a[:2] @ a[:2]]))


def test_arguments_by_value_and_by_reference():
    @T.macro
    def by_value(v, out):
        v = v + 1.0
        out[0] = v

    @T.macro
    def by_reference(v: T.Ref, out):
        v += 1.0
        v *= 2
        out[1] = v

    @T.prim_func
    def kernel(out: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            v = T.alloc_var("float32", 5.0)
            by_value(v, out)
            out[2] = v
            by_reference(v, out)
            out[3] = v

    out = torch.zeros(4)
    evaluate(kernel, out)
    assert out.tolist() == [6, 12, 5, 12]


def test_an_argument_is_its_value_at_the_call():
    @T.macro
    def later(v, x):
        x[0] = 9.0
        x[1] = v

    @T.prim_func
    def kernel(x: T.Tensor((2,), "float32")):
        with T.Kernel(1) as _:
            v = T.alloc_var("float32", 3.0)
            later(v + x[0], x)

    x = torch.ones(2)
    evaluate(kernel, x)
    assert x.tolist() == [9, 4]


def test_an_element_is_a_place_for_a_macro():
    """What is passed as A[i, j] may be the head address of a copy inside."""

    @T.macro
    def load(head, tile):
        T.copy(head, tile)

    @T.prim_func
    def kernel(x: T.Tensor((8,), "float32"), out: T.Tensor((3,), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((3,), "float32")
            load(x[4], tile)
            T.copy(tile, out)

    out = torch.zeros(3)
    evaluate(kernel, torch.arange(8.0), out)
    assert out.tolist() == [4, 5, 6]


def test_macros_outside_kernels_are_refused():
    from torch_tile.diagnostics.errors import TileError

    with pytest.raises(TileError) as caught:
        double(None)
    assert caught.value.code == "not_in_kernel"


def test_kernels_may_be_defined_inside_tracing():
    """A kernel that builds another one while it is traced does not mix them up."""

    @T.prim_func
    def outer(x: T.Tensor((2,), "float32")):
        with T.Kernel(1) as _:
            before = x[0] + 1.0

            @T.prim_func
            def inner(y: T.Tensor((2,), "float32")):
                with T.Kernel(1) as _:
                    y[1] = 5.0

            x[1] = before + len(inner.program.kernels)

    x = torch.zeros(2)
    evaluate(outer, x)
    assert x.tolist() == [0, 2]
    assert len([n for n in walk(outer.program) if isinstance(n, Let)]) == 1


@tilelang.jit
def scaled(A, factor: T.float32, rows_per_block: int = 2, dtype: T.dtype = T.float32):
    M, N = T.const("M, N")
    A: T.Tensor((M, N), dtype)
    B = T.empty((M, N), dtype)
    with T.Kernel(T.ceildiv(M, rows_per_block)) as b:
        for i, j in T.Parallel(rows_per_block, N):
            B[b * rows_per_block + i, j] = A[b * rows_per_block + i, j] * factor
    return B


def test_constants_come_from_the_arguments():
    for shape in ((3, 4), (5, 2), (3, 4)):
        a = torch.randn(shape)
        assert torch.equal(scaled(a, 2.0), a * 2.0)
    assert len(scaled.kernels) == 2


def test_compile_time_arguments_specialise():
    a = torch.randn(5, 3)
    before = len(scaled.kernels)
    assert torch.equal(scaled(a, 3.0, rows_per_block=4), a * 3.0)
    assert torch.equal(scaled(a, 4.0, rows_per_block=4), a * 4.0)
    assert torch.equal(scaled(a.half(), 2.0, 4, T.float16), a.half() * 2.0)
    assert len(scaled.kernels) == before + 2


def test_annotated_parameters_and_several_results():
    n = T.dynamic("n")

    @tilelang.jit
    def split(A: T.Tensor((n,), "float32")):
        low, high = T.empty((n,), "float32"), T.empty((n,), "float32")
        with T.Kernel(n) as i:
            low[i] = T.min(A[i], 0.0)
            high[i] = T.max(A[i], 0.0)
        return low, high

    for length in (1, 7):
        a = torch.randn(length)
        low, high = split(a)
        assert torch.equal(low, a.clamp(max=0)) and torch.equal(high, a.clamp(min=0))
    assert len(split.kernels) == 1


def test_constants_steer_python():
    @tilelang.jit
    def kernel(A):
        N = T.const("N")
        A: T.Tensor((N,), "int32")
        with T.Kernel(1) as _:
            if N > 3:
                A[0] = N
            for i in [x for x in range(N) if x % 2]:
                A[i] = -1

    for n in (3, 5):
        a = torch.zeros(n, dtype=torch.int32)
        kernel(a)
        assert a.tolist() == ([0, -1, 0] if n == 3 else [5, -1, 0, -1, 0])


@pytest.mark.parametrize("constant", [False, True])
def test_none_for_tensors_that_an_eager_kernel_does_not_use(constant):
    @tilelang.jit(target="cpu")
    def kernel(bias, A, scale: T.float32, with_bias, B):
        n = T.const("n") if constant else T.dynamic("n")
        bias: T.Tensor((n,), "float32")
        A: T.Tensor((n,), "float32")
        B: T.Tensor((n,), "float32")
        with T.Kernel(1):
            for i in T.Parallel(n):
                B[i] = A[i] * scale
                if with_bias:
                    B[i] += bias[i]

    a, bias = torch.randn(5), torch.randn(5)
    for given, with_bias in ((bias, True), (None, False), (bias, False)):
        b = torch.zeros(5)
        kernel(given, a, 2.0, with_bias, b)
        torch.testing.assert_close(b, a * 2 + bias if with_bias else a * 2)
    with pytest.raises(LaunchError, match="argument `bias` must be a tensor, got NoneType"):
        kernel(None, a, 2.0, True, torch.zeros(5))
    with pytest.raises(LaunchError, match="must be a tensor, got NoneType"):
        kernel(None, None, 2.0, False, None)


def test_wrong_arguments():
    with pytest.raises(LaunchError, match="argument `A` must have 2 dimensions"):
        scaled(torch.randn(3), 1.0)
    with pytest.raises(LaunchError, match="argument `A` must have dtype"):
        scaled(torch.randn(3, 3).double(), 1.0)
    for value, got in ((None, "NoneType"), ([[1.0]], "list"), (2.0, "float")):
        with pytest.raises(LaunchError, match=f"argument `A` must be a tensor, got {got}"):
            scaled(value, 1.0)

    @tilelang.jit
    def unannotated(A, B):
        M = T.const("M")
        A: T.Tensor((M,), "float32")
        with T.Kernel(1) as _:
            A[0] = 1.0

    with pytest.raises(TileError) as caught:
        unannotated(torch.zeros(3), torch.zeros(3))
    assert caught.value.code == "tensor_not_annotated"


LATER = """
from __future__ import annotations
import torch_tile
import torch_tile.language as T

N = 8

@torch_tile.jit
def outside(A: T.Tensor((N,), "float32"), factor: T.float32, add: int = 2):
    B = T.empty((N,), "float32")
    with T.Kernel(1) as _:
        for i in T.Parallel(N):
            B[i] = A[i] * factor + add
    return B

def inside(size):
    @torch_tile.jit
    def fill(A: T.Tensor((size,), "float32")):
        with T.Kernel(1) as _:
            for i in T.Parallel(size):
                A[i] = 1.0
    return fill
"""


def test_annotations_as_text(tmp_path):
    path = tmp_path / "later.py"
    path.write_text(LATER)
    kernels = runpy.run_path(str(path))
    a = torch.randn(8)
    torch.testing.assert_close(kernels["outside"](a, 3.0), a * 3 + 2)
    kernels["inside"](8)(a)
    assert torch.equal(a, torch.ones(8))


@tilelang.jit
def increased(A, B, n: T.int32, block: int = 32, dtype=T.float32):
    N = T.const("N")
    A: T.Tensor[[N], dtype]
    B: T.Tensor[[N], dtype]
    with T.Kernel(T.ceildiv(N, block)) as b:
        for i in T.Parallel(block):
            B[b * block + i] = A[b * block + i] + n


def test_sizes_by_name_compile_without_tensors():
    a, b = torch.randn(50), torch.empty(50)
    for kernel in (
        increased.compile(N=50),
        increased.compile(N=50, block=16),
        increased.compile(a),
        increased.compile(T.Tensor((50,), "float32")),
    ):
        b.zero_()
        kernel(a, b, 3)
        assert torch.equal(b, a + 3)
    assert increased.compile(N=50) is increased.compile(N=50) is not increased.compile(N=51)
    assert "float16" in str(increased.get_tir(N=50, dtype="float16"))
    assert increased.get_kernel_source(N=50) == increased.compile(N=50).get_kernel_source()


@tilelang.jit
def strided_rows(A, columns: int = 5):
    M, N, S = T.const("M, N, S")
    A: T.StridedTensor((M, N), (S, 1), "float32")
    B = T.empty((M,), "float32")
    with T.Kernel(M) as row:
        B[row] = A[row, T.min(columns, N) - 1] + S
    return B


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_80"])
def test_each_size_and_stride_of_given_tensors_has_its_kernel(target):
    """Tensors of other sizes or strides, as tensors or types, never get the kernel of those before."""
    function, made = strided_rows.on(target), {}
    for rows, columns, stride in [(4, 6, 6), (5, 6, 6), (4, 3, 6), (4, 6, 9), (4, 6, 6)]:
        a = torch.randn(rows, stride)[:, :columns]
        kernel = made.setdefault((rows, columns, stride), function.compile(a))
        assert kernel is function.compile(a) is function.compile(torch.randn(rows, stride)[:, :columns])
        (b,) = (kernel(a),) if target == "cpu" else kernel.interpret(a).outputs
        torch.testing.assert_close(b, a[:, min(5, columns) - 1] + stride)
        assert kernel.get_kernel_source() == function.get_kernel_source(a)
    assert len(set(made.values())) == 4
    for size in (50, 51):
        assert f"({size},)" in increased.compile(T.Tensor((size,), "float32")).script()


def test_a_kernel_without_tensor_parameters_compiles_for_sizes():
    @tilelang.jit
    def count(block=16):
        N = T.const("N")
        C = T.empty((N,), "int32")
        with T.Kernel(T.ceildiv(N, block)) as b:
            for i in T.Parallel(block if N > 1 else 1):
                C[b * block + i] = b * block + i
        return C

    assert torch.equal(count.compile(N=37)(), torch.arange(37, dtype=torch.int32))


@pytest.mark.parametrize(
    "given, text",
    [
        ({}, "needs the size `N`"),
        ({"N": 5, "Q": 1}, "got the size `Q`"),
        ({"N": 5.0}, "takes a size as `N`"),
        ({"N": -1}, "takes a size as `N`"),
        ({"N": True}, "takes a size as `N`"),
    ],
)
def test_sizes_that_do_not_fit(given, text):
    with pytest.raises(TypeError, match=text):
        increased.compile(**given)


def test_a_compile_time_argument_left_out_is_named():
    @tilelang.jit
    def filled(A, value):
        N = T.const("N")
        A: T.Tensor((N,), "float32")
        with T.Kernel(N) as b:
            A[b] = value

    with pytest.raises(TypeError, match="missing the argument `value`"):
        filled.compile(N=3)


def test_the_profiler_of_a_jitted_function():
    @tilelang.jit
    def doubled(A):
        N = T.const("N")
        A: T.Tensor((N,), "float32")
        B = T.empty((N,), "float32")
        with T.Kernel(N) as b:
            B[b] = A[b] * 2
        return B

    doubled.get_profiler(N=20).assert_allclose(lambda a: a * 2)


def test_functions_without_a_kernel_are_one_block(way):
    @T.prim_func
    def kernel(A: T.Tensor((8, 6), "float32"), B: T.Tensor((8, 6), "float32"), n: T.int32):
        total = T.alloc_var("float32", 0.0)
        row = T.alloc_local((6,), "float32")
        for i in range(8):
            for j in T.Parallel(6):
                B[i, j] = A[i, j] + 1.0
        for i, j in T.grid(n, 6):
            if i == 0:
                row[j] = A[i, j]
            if A[i, j] > 0:
                total += A[i, j] * row[j]
        B[0, 0] = total

    (block,) = kernel.program.kernels
    assert block.threads == (1,)
    a, b = torch.randn(8, 6), torch.zeros(8, 6)
    way(kernel, a, b, 5)
    want = a + 1
    want[0, 0] = (a[:5].clamp(min=0) * a[0]).sum()
    torch.testing.assert_close(b, want)


@pytest.mark.parametrize("body", [lambda A: T.alloc_shared((4,), "float32"), lambda A: T.clear(A), lambda A: None])
def test_functions_without_a_kernel_have_no_tiles(body):
    """What is for the threads of a block together asks for T.Kernel, whose grid and threads only the author knows."""
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((4,), "float32")):
            body(A)

    assert caught.value.code == "not_in_kernel"


def test_eager_functions_without_a_kernel():
    @tilelang.jit
    def doubled(A):
        N = T.const("N")
        A: T.Tensor((N,), "float32")
        B = T.empty((N,), "float32")
        for i in T.serial(N):
            B[i] = A[i] * 2.0
        return B

    a = torch.randn(9)
    assert torch.equal(doubled(a), a * 2)


def test_a_function_may_do_nothing(way):
    @T.prim_func
    def nothing(A: T.Tensor((4,), "float32"), n: T.int32):
        """An author wrote `pass`."""
        pass  # noqa: PIE790

    a = torch.ones(4)
    way(nothing, a, 3)
    assert a.eq(1).all()
    with pytest.raises(TileError, match="not_in_kernel"):

        @T.prim_func
        def forgotten(A: T.Tensor((4,), "float32")):
            T.alloc_shared((4,), "float32")
