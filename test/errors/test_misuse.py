# SPDX-License-Identifier: Apache-2.0
"""One kernel for each mistake that Python itself, or the language's name space, finds on an author's line."""

import math
import warnings

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.compat.tvm import tirx
from torch_tile.diagnostics.errors import TileError


def kernel_of(compute):
    """A kernel that computes `compute(A[0], A)`, in the author's line of `compute`."""

    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            A[1] = compute(A[0], A)

    return kernel


def misspelt():
    kernel_of(lambda x, A: T.sqrtt(x))  # here


def outside_kernels():
    T.Tensr((4,), "float32")  # here


def of_tilelang():
    kernel_of(lambda x, A: T.tcgen05_gemm(A, A, A))  # here


def rounded():
    kernel_of(lambda x, A: round(x))  # here


def of_math():
    def compute(x, A):
        return math.exp(x)  # here

    kernel_of(compute)


def of_torch():
    kernel_of(lambda x, A: torch.exp(x))  # here


def method_of_tensors():
    kernel_of(lambda x, A: A.sum())  # here


def item():
    kernel_of(lambda x, A: x.item())  # here


def too_few():
    kernel_of(lambda x, A: T.copy(A))  # here


def too_few_for_an_update():
    kernel_of(lambda x, A: T.atomic_max(A[0]))  # here


def none_for_a_warp():
    kernel_of(lambda x, A: T.warp_reduce_sum())  # here


def unknown_keyword():
    kernel_of(lambda x, A: T.alloc_shared((4,), "float32", colour=1))  # here


def misspelt_product():
    kernel_of(lambda x, A: T.gemm(A, A, A, transpose_b=True))  # here


def misspelt_reduction():
    kernel_of(lambda x, A: T.reduce_sum(A, A, cler=False))  # here


def chosen_buffers():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32"), n: T.int32):
        with T.Kernel(1) as _:
            x = T.alloc_shared((4,), "float32")
            z = T.alloc_shared((4,), "float32")
            y = x if n > 0 else z  # here
            T.clear(y)


def indexed_tensor():
    weights = torch.ones(4)

    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(4):
                A[i] = weights[i]  # here


def shape_assigned():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            A.shape = (2, 2)  # here


def too_many_names():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1, 2) as (bx, by, bz):  # here
            A[bx] = by + bz


def too_few_extents():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            for i, j in T.Parallel(4):  # here
                A[i] = j


def compared_buffer():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            if A == 0:  # here
                A[0] = 1.0


@T.macro
def endless(x):
    x[0] += 1.0
    endless(x)  # here


def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)  # here


def recursive_helper():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "int32")):
        with T.Kernel(1) as _:
            for i in T.Parallel(4):
                A[i] = fibonacci(A[i])


def endless_macro():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            endless(A)


def vote_on_a_float():
    @T.prim_func
    def kernel(A: T.Tensor((32,), "float32"), B: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32) as _:
            tx = T.get_thread_binding()
            B[tx] = T.any_sync(A[tx])  # here


def products_in_packs_of_three():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128) as _:
            a, c = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.gemm(a, a, c, k_pack=3, clear_accum=True)  # here


def integer_in_fast_function():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32"), B: T.Tensor((4,), "int32")):
        with T.Kernel(1) as _:
            A[0] = T.__exp(B[0])  # here


def of_tvm():
    tirx.For(4)  # here


def list_of_tiles():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            tiles = [T.alloc_shared((4,), "float32") for _ in range(3)]
            for k in range(3):
                T.copy(A, tiles[k])  # here


def nothing_added():
    kernel_of(lambda x, A: None + 1)  # here


def division_by_zero():
    kernel_of(lambda x, A: x + 1 // 0)  # here


def absent_key():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            A[0] = {"present": 1.0}["absent"]  # here


def absent_attribute():
    kernel_of(lambda x, A: math.teleport)  # here


def inside_a_library():
    kernel_of(lambda x, A: torch.nn.functional.softmax([1.0], 0))  # here


def dtype_of_torch():
    kernel_of(lambda x, A: torch.float16(x))  # here


def shape_called():
    kernel_of(lambda x, A: x + A.shape(0))  # here


def opened_tensor():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with A as a:  # here
            a[0] = 1.0


def text_for_a_lane():
    kernel_of(lambda x, A: T.shfl_xor(x, "1"))  # here


def element_that_is_none():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            A[1] = 1.0 if A[2] is None else A[0]  # here


def sum_that_is_not_none():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            x = A[0] + 1 is not None  # here
            A[1] = x


def deleted_tile():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((4,), "float32")
            T.copy(A, tile)
            del tile  # here


def deleted_element():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            del A[0]  # here


def number_in_a_text():
    kernel_of(lambda x, A: float(str(x)))  # here


def integer_in_a_text():
    kernel_of(lambda x, A: int(f"{x}"))  # here


def infinity_of_a_number():
    kernel_of(lambda x, A: T.infinity(3))  # here


def limit_of_a_value():
    kernel_of(lambda x, A: T.max_value(x))  # here


def too_much_for_a_macro():
    kernel_of(lambda x, A: endless(A, x))  # here


def layout_of_too_few_indices():
    kernel_of(lambda x, A: T.Layout((4, 4), lambda i: i))  # here


def sign_behind_equals():
    def compute(x, A):
        total = T.alloc_var("float32", init=0.0)
        total =+ x  # fmt: skip  # here
        A[2] = total
        return x

    kernel_of(T.macro(compute))


def loop_over_a_tensor():
    def compute(x, A):
        for i in torch.arange(4):  # here
            A[i] = x
        return x

    kernel_of(T.macro(compute))


def function_without_a_call():
    def compute(x, A):
        T.fill(A, -T.infinity)  # here

    kernel_of(compute)


def misspelt_member():
    kernel_of(lambda x, A: T.gemm(A, A, A, policy=T.GemmWarpPolicy.FullColumns))  # here


def fraction_for_a_counter():
    def compute(x, A):
        return T.alloc_var("int32", init=float("nan"))  # here

    kernel_of(compute)


def indices_beside_a_value():
    def compute(x, A):
        for i in T.Parallel(2, 2):
            A[A.shape[0] * T.cast(x, "int32") + i] = x  # here
        return x

    kernel_of(T.macro(compute))


CASES = {
    sign_behind_equals: ("sign_behind_equals", "total =+ x"),
    loop_over_a_tensor: ("python_value", "for i in torch.arange(4):"),
    function_without_a_call: ("python_error", "-T.infinity"),
    misspelt_member: ("python_error", "T.GemmWarpPolicy.FullColumns"),
    fraction_for_a_counter: ("bad_argument", 'T.alloc_var("int32", init=float("nan"))'),
    indices_beside_a_value: ("tuple_as_index", 'A.shape[0] * T.cast(x, "int32") + i'),
    element_that_is_none: ("python_value", "A[2] is None"),
    sum_that_is_not_none: ("python_value", "A[0] + 1 is not None"),
    deleted_tile: ("python_value", "del tile"),
    deleted_element: ("python_value", "del A[0]"),
    number_in_a_text: ("python_value", "float(str(x))"),
    integer_in_a_text: ("python_value", 'int(f"{x}")'),
    infinity_of_a_number: ("bad_argument", "T.infinity(3)"),
    limit_of_a_value: ("bad_argument", "T.max_value(x)"),
    too_much_for_a_macro: ("bad_kernel_call", "endless(A, x)"),
    layout_of_too_few_indices: ("bad_call", "T.Layout((4, 4), lambda i: i)"),
    shape_called: ("python_value", "A.shape(0)"),
    opened_tensor: ("python_value", "with A as a:"),
    text_for_a_lane: ("bad_argument", 'T.shfl_xor(x, "1")'),
    nothing_added: ("python_error", "None + 1"),
    division_by_zero: ("python_error", "1 // 0"),
    absent_key: ("python_error", '{"present": 1.0}["absent"]'),
    absent_attribute: ("python_error", "math.teleport"),
    inside_a_library: ("python_error", "torch.nn.functional.softmax([1.0], 0)"),
    dtype_of_torch: ("python_value", "torch.float16(x)"),
    list_of_tiles: ("python_value", "tiles[k]"),
    products_in_packs_of_three: ("wrong_value", "T.gemm(a, a, c, k_pack=3, clear_accum=True)"),
    vote_on_a_float: ("float_predicate", "T.any_sync(A[tx])"),
    integer_in_fast_function: ("only_floats", "T.__exp(B[0])"),
    of_tvm: ("absent_name", "tirx.For(4)"),
    recursive_helper: ("recursive_helper", "n < 2"),
    endless_macro: ("endless_macro", "endless(x)"),
    indexed_tensor: ("python_value", "weights[i]"),
    shape_assigned: ("python_value", "A.shape"),
    too_many_names: ("bad_argument", "T.Kernel(1, 2)"),
    too_few_extents: ("bad_argument", "for i, j in T.Parallel(4):"),
    compared_buffer: ("region_as_value", "A == 0"),
    misspelt: ("unknown_name", "T.sqrtt"),
    outside_kernels: ("unknown_name", "T.Tensr"),
    of_tilelang: ("unknown_name", "T.tcgen05_gemm"),
    rounded: ("python_value", "round(x)"),
    of_math: ("python_value", "math.exp(x)"),
    of_torch: ("python_value", "torch.exp(x)"),
    method_of_tensors: ("python_value", "A.sum"),
    item: ("python_value", "x.item"),
    too_few: ("bad_call", "T.copy(A)"),
    too_few_for_an_update: ("bad_call", "T.atomic_max(A[0])"),
    none_for_a_warp: ("bad_call", "T.warp_reduce_sum()"),
    unknown_keyword: ("unknown_keyword", 'T.alloc_shared((4,), "float32", colour=1)'),
    misspelt_product: ("unknown_keyword", "T.gemm(A, A, A, transpose_b=True)"),
    misspelt_reduction: ("unknown_keyword", "T.reduce_sum(A, A, cler=False)"),
    chosen_buffers: ("bad_choice", "x if n > 0 else z"),
}
FIXES = {
    function_without_a_call: "write its call, T.infinity(...)",
    misspelt_member: "did you mean `FullCol`",
    list_of_tiles: "for tile in tiles",
    indexed_tensor: "as a parameter",
    misspelt: "did you mean T.sqrt",
    outside_kernels: "did you mean T.Tensor",
    rounded: "write T.round(...)",
    of_math: "write T.exp(...)",
    too_few: "(src, dst",
    unknown_keyword: "shape, dtype",
    misspelt_product: "did you mean `transpose_B`",
    misspelt_reduction: "did you mean `clear`",
    method_of_tensors: "T.reduce_sum",
    dtype_of_torch: "write T.float16(x)",
    too_much_for_a_macro: "its parameters are x",
    shape_called: "write A.shape[0]",
    opened_tensor: "T.Kernel(...)",
    text_for_a_lane: "give a number",
}


@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_refused(case, refused):
    problem = refused(case, *CASES[case])
    assert FIXES.get(case, "") in problem.diagnostics[0].fix
    assert "Load" not in str(problem) and "Handle" not in str(problem)  # classes of the compiler


def test_what_may_be_none_is_asked_and_objects_of_python_are_deleted():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            bias, values = None, [A[2], None]
            if bias is None and A is not None and values[1] is None and values[0] is not None:
                A[1] = values[0] + 1.0
            del values[1], bias

    a = torch.arange(4.0)
    torch_tile.compile(kernel, target="cpu")(a)
    assert a.tolist() == [0, 3, 2, 3]


def test_signs_that_stand_apart_from_the_equals_are_operators():
    @T.prim_func
    def kernel(A: T.Tensor((5,), "float32")):
        with T.Kernel(1) as _:
            # fmt: off
            A[0]= - A[0]
            A[1] =-A[1]
            A[2] = - A[2]
            A[3]  = +A[3]
            A[4] = \
                   - A[4]
            # fmt: on

    a = torch.ones(5)
    torch_tile.compile(kernel, target="cpu")(a)
    assert a.tolist() == [-1, -1, -1, 1, -1]


def test_names_that_are_missing_can_be_asked_for():
    assert not hasattr(T, "teleport") and getattr(T, "teleport", 3) == 3


def test_errors_that_the_author_raises_stay_as_they_are():
    def refuse(x, A):
        raise KeyError("of mine")

    with pytest.raises(KeyError, match="of mine"):
        kernel_of(refuse)


def test_python_maximum_says_what_to_use():
    with pytest.raises(TileError, match=r"T\.max\(x, y\)"):
        kernel_of(lambda x, A: max(x, 0.0))


@pytest.mark.parametrize(
    "wrong",
    [lambda tile: tile.sum(), lambda tile: T.exp(), lambda tile: len[0], lambda tile: gone],  # noqa: F821
)
def test_an_error_in_a_macro_names_the_calls_of_it(wrong):
    @T.macro
    def inner(tile):
        tile[0] = wrong(tile)

    def helper(tile):
        inner(tile)  # by a helper

    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((4,), "float32")):
            with T.Kernel(1) as _:
                helper(A)  # by the kernel

    at, text = caught.value.span, str(caught.value)
    assert "wrong" in at.source() or "lambda" in at.source()
    assert text.index("by a helper") < text.index("by the kernel") and text.count("called here") >= 2


def test_what_many_calls_deep_is_wrong_names_three_of_them():
    @T.macro
    def deep(tile, n):
        tile[n] = 1.0 if n else tile.sum()
        deep(tile, n - 1)

    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((9,), "float32")):
            with T.Kernel(1) as _:
                deep(A, 8)

    assert str(caught.value).count("called here") == 3


UNDEFINED = {
    "exp": "write T.exp",
    "float32": "write T.float32",
    "__syncthreads": "T.sync_threads()",
    "threadIdx": "write elements in T.Parallel",
    "blockIdx": "with T.Kernel(...) as",
    "valeu": "did you mean `value`",
    "mathh": "did you mean `math`",
    "qqqq": "define it before this line",
}


@pytest.mark.parametrize("name", UNDEFINED)
def test_an_undefined_name_is_told_what_it_may_stand_for(name):
    def compute(value, A):
        return eval(name)

    with pytest.raises(TileError) as caught:
        kernel_of(compute)
    (found,) = caught.value.diagnostics
    assert found.code == "undefined_name" and UNDEFINED[name] in found.fix


@pytest.mark.parametrize("name", ["threadIdx", "blockDim", "float4", "half2", "__expf"])
def test_names_of_cuda_are_told_what_to_write(name):
    with pytest.raises(TileError) as caught:
        getattr(T, name)
    fix = caught.value.diagnostics[0].fix
    assert "did you mean" not in fix and "docs/writing-kernels.md" not in fix


def test_an_operation_of_the_block_that_no_turn_names_is_warned_of():
    def repeated(turns, named):
        @T.prim_func
        def kernel(A: T.Tensor((4, 16, 16), "float32")):
            with T.Kernel(1) as _:
                a, c = T.alloc_shared((16, 16), "float32"), T.alloc_fragment((16, 16), "float32")
                T.clear(c)
                for i in T.Parallel(turns):
                    T.copy(A[i if named else 0, 0, 0], a)
                    T.gemm(a, a, c)
                T.copy(c, A[0, 0, 0])

    with pytest.warns(UserWarning, match=r"runs for each iteration of T.Parallel\(4\), and names none of i"):
        repeated(4, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        repeated(4, True)
        repeated(1, False)
