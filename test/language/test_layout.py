# SPDX-License-Identifier: Apache-2.0
import random

import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import TileError
from torch_tile.hardware import Target
from torch_tile.ir.layout import Layout, row_major, shared_tile
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Alloc, For
from torch_tile.language.layout import make_gemm_fragment_8x8, make_gemm_fragment_8x8_transposed
from torch_tile.lowering import cuda_passes, lower
from torch_tile.simulator.interpret import interpret
from torch_tile.simulator.tile.interpreter import evaluate

P = Layout.parse


def test_layouts_by_name():
    made = {}

    @T.prim_func
    def kernel(A: T.Tensor((16, 64), "float16")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((16, 64), "float16")
            made["128"] = T.make_swizzled_layout(tile, k_major=True)
            made["64"] = T.make_half_bank_swizzled_layout(tile)
            made["linear"] = tilelang.layout.make_linear_layout(tile)
            T.clear(tile)

    assert made["128"] == shared_tile((16, 64), 16) == P("[16:64m | 64:1m] ^(3,3,3)")
    assert made["64"] == P("[16:32m | 2:512m 32:1m] ^(2,3,3)")
    assert made["linear"] == row_major((16, 64))


def test_functions_of_indices():
    assert T.Layout((64, 64), lambda i, j: i * 64 + ((j // 8) ^ (i % 8)) * 8 + j % 8) == shared_tile((64, 64), 16)
    assert T.Layout((8, 64), lambda i, j: [j // 8, i, j % 8]) == P("[8:8m | 8:64m 8:1m]")
    assert T.Layout((9, 6), lambda i, j: j * 9 + i) == P("[9:1m | 6:9m]")
    assert T.Fragment((16, 8), lambda i, j: (i % 8 * 4 + j // 2, i // 8 * 2 + j % 2)) == P("[2:2r 8:4t | 4:1t 2:1r]")
    row = T.Fragment(
        (16,), forward_thread_fn=lambda i, r: i % 8 * 4 + r, replicate=4, forward_index_fn=lambda i: i // 8
    )
    assert row == P("[2:1r 8:4t] x[4:1t]")
    assert T.Fragment((6, 4), forward_thread_fn=lambda i, j: j) == P("[6:1r | 4:1t]")


def test_random_layouts_come_back(seed):
    for _ in range(20):
        sizes = [random.choice([2, 3, 4, 8]) for _ in range(4)]
        stride, strides = 1, [0] * 4
        for k in random.sample(range(4), 4):
            strides[k], stride = stride, stride * sizes[k]
        text = " | ".join(" ".join(f"{sizes[k]}:{strides[k]}m" for k in pair) for pair in ((0, 1), (2, 3)))
        swizzle = f" ^({random.choice(['1,0,2', '2,1,2', '1,2,3'])})" if stride % 64 == 0 else ""
        layout = P(f"[{text}]{swizzle}")
        assert T.Layout(layout.shape, lambda i, j, at=layout: at.apply((i, j))["m"]) == layout


WRONG = [
    (lambda: T.Layout((8,), lambda i: i - 1), "natural numbers"),
    (lambda: T.Layout((8,), lambda i: i / 2), "no integer"),
]


@pytest.mark.parametrize(("make", "why"), WRONG)
def test_functions_that_are_no_layout(make, why):
    with pytest.raises(TileError, match=why) as caught:
        make()
    assert caught.value.code == "bad_layout"


def kernel_with(annotate, shape=(64, 64), scope="shared", threads=128):
    @T.prim_func
    def kernel(A: T.Tensor(shape, "float32"), B: T.Tensor(shape, "float32")):
        with T.Kernel(1, threads=threads) as _:
            tile = T.alloc_buffer(shape, "float32", scope=scope)
            T.annotate_layout({tile: annotate})
            T.copy(A, tile)
            T.copy(tile, B)

    return kernel


def layout_in(kernel):
    return next(n.buffer.layout for n in walk(kernel.program) if isinstance(n, Alloc))


def test_annotations_are_kept_on_buffers():
    assert layout_in(kernel_with(lambda i, j: i * 64 + (j ^ (i % 4 * 4)))) == P("[64:64m | 64:1m] ^(2,2,4)")
    assert layout_in(kernel_with("[64:1m | 64:64m]")) == P("[64:1m | 64:64m]")
    assert layout_in(kernel_with(T.Layout((64, 64), lambda i, j: j * 64 + i))) == P("[64:1m | 64:64m]")
    assert layout_in(kernel_with(None)) is None
    fragment = kernel_with(lambda i: (i, 0), (64,), "fragment", threads=256)
    assert layout_in(fragment) == P("[64:1t] x[4:64t]")
    assert layout_in(kernel_with(lambda i: (0, 0), (1,), "fragment", threads=(8, 4))) == P("[1] x[32:1t]")


@pytest.mark.parametrize("wanted", ["[64:1m | 64:64m]", lambda i, j: i * 64 + (j ^ (i % 4 * 4))])
def test_a_layout_changes_no_result_on_the_cpu(wanted):
    kernel = kernel_with(wanted)
    x = torch.randn(64, 64)
    for run in (lambda y: evaluate(kernel, x, y), lambda y: tilelang.compile(kernel, target="cpu")(x, y)):
        y = torch.full_like(x, float("nan"))
        run(y)
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ("[32:64m | 64:1m]", "its shape"),
        ("[64:64m]", "its shape"),
        ("[64:64r | 64:1m]", "shared memory"),
        (lambda i, j: i + j, "both map to physical"),
        (3, "digits"),
    ],
)
def test_annotations_that_do_not_fit(wanted, why):
    with pytest.raises(TileError, match=why) as caught:
        kernel_with(wanted)
    assert caught.value.code == "bad_layout" and "test_layout.py" in str(caught.value)
    with pytest.raises(TileError, match="for 64 threads"):
        kernel_with(lambda i: (i, 0), (64,), "fragment", threads=96)


def test_layouts_of_loops():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=256) as _:
            for i, j in T.Parallel(64, 64, loop_layout=T.Fragment((64, 64), lambda i, j: (i % 2 * 64 + j, i // 2))):
                A[i, j] = 1
            for i in T.Parallel(64, loop_layout=lambda i: (i % 32, i // 32)):
                A[i, 0] = 2

    first, second = (n.layout for n in walk(kernel.program) if isinstance(n, For))
    assert first == P("[32:1r 2:64t | 64:1t] x[2:128t]") and second == P("[2:1r 32:1t] x[8:32t]")
    with pytest.raises(TileError, match="its shape"):

        @T.prim_func
        def wrong(A: T.Tensor((64,), "float32")):
            with T.Kernel(1, threads=32) as _:
                for i in T.Parallel(64, loop_layout=lambda i: (i, 0) if i < 2 else (i % 32, i // 32)):
                    A[i] = 1
                for i in T.Parallel(64, loop_layout="[32:1t]"):
                    A[i] = 1


def test_threads_keep_to_what_is_asked():
    """Layouts of memory, registers and the loop, none of which the compiler would have chosen."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as _:
            tile, f = T.alloc_shared((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            registers = T.Fragment((64, 64), lambda i, j: (i % 32 * 4 + j % 4, i // 32 * 16 + j // 4))
            T.annotate_layout({tile: lambda i, j: i * 64 + (j ^ (i % 8 * 4)), f: registers})
            T.copy(A, tile)
            T.copy(tile, f)
            for i, j in T.Parallel(64, 64, loop_layout=lambda i, j: (i // 2 * 4 + j // 16, i % 2 * 16 + j % 16)):
                f[i, j] = f[i, j] * 2
            T.copy(f, B)

    build = Build(Target.of("cuda:sm_80"))
    flat = lower(kernel.program, cuda_passes(build))
    assert [(p.layout, p.why) for p in build.placements] == [
        ("[64:64m | 64:1m] ^(3,2,4)", "annotated"),
        ("[2:16r 32:4t | 16:1r 4:1t]", "annotated"),
    ]
    x, y = torch.randn(64, 64), torch.full((64, 64), float("nan"))
    assert not interpret(flat, kernel.program, (x, y), (), None).found
    assert torch.equal(y, 2 * x)


PERMUTATIONS = [
    lambda i, j: (i * 64 + j) * 5 % 4096,
    lambda i, j: [i, (j + i * 5) % 64],
    lambda i, j: [i, (7 * j + 3) % 61 if j < 61 else j],
    T.Layout((64, 64), lambda i, j: 4095 - i * 64 - j),
]


@pytest.mark.parametrize("wanted", PERMUTATIONS)
def test_a_layout_may_be_any_function(wanted, way):
    x, y = torch.randn(64, 64), torch.full((64, 64), float("nan"))
    way(kernel_with(wanted), x, y)
    assert torch.equal(x, y)


def test_a_fragment_may_be_any_function(way):
    x, y = torch.randn(128), torch.full((128,), float("nan"))
    way(kernel_with(lambda i: (i * 5 % 128, 0), (128,), "fragment"), x, y)
    assert torch.equal(x, y)


@pytest.mark.parametrize(
    "wanted",
    [None, "[64:1m | 64:64m]", lambda i, j: (i * 64 + j) * 5 % 4096, lambda i, j: [j // 8, i, j % 8]],
)
def test_layouts_of_tensors_are_hints(wanted, way):
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as _:
            T.annotate_layout({A: wanted, B: T.Layout(B.shape, lambda i, j: i * 64 + j)})
            T.copy(A, B)

    x, y = torch.randn(64, 64), torch.zeros(64, 64)
    way(kernel, x, y)
    assert torch.equal(x, y)


def test_functions_over_tensors_are_not_evaluated():
    asked = []
    T.Layout((8, 2048, 32, 64), lambda b, l, h, d: asked.append(b))
    rows = T.dynamic("rows")
    assert T.Layout((rows, 64), lambda i, j: asked.append(i)).shape[0] is rows
    assert not asked
    count = []
    whole = T.Layout((1024, 512), lambda i, j: count.append(1) or i * 512 + j)
    assert whole == row_major((1024, 512)) and len(count) < 100


def test_layouts_are_compared_by_their_places():
    linear = T.Layout((8, 4), lambda i, j: i * 4 + j)
    assert linear.is_equal(T.Layout((8, 4), lambda a, b: [a, b]))
    assert not linear.is_equal(T.Layout((8, 4), lambda i, j: [j, i]))
    assert not linear.is_equal(T.Layout((8, 2), lambda i, j: i * 4 + j))

    def fragment(register, turns=3, replicate=1):
        return T.Fragment(
            (8, 4), forward_thread_fn=lambda i, j, r=0: (i * 4 + j) * turns % 32 + 32 * r,
            forward_index_fn=register, replicate=replicate,
        )  # fmt: skip

    free = fragment(lambda i, j: i)
    assert "without digits" in repr(free)
    assert free.is_equal(fragment(lambda a, b: a))
    for other in (fragment(lambda i, j: j), fragment(lambda i, j: i, 5), fragment(None), linear):
        assert not free.is_equal(other)
    assert not free.is_equal(fragment(lambda i, j: i, replicate=2))


@pytest.mark.parametrize(
    ("scope", "wanted", "text"),
    [
        (
            "shared",
            T.Layout((64, 64), lambda i, j: i + j),
            r"buffer `tile`.* be injective: elements \(0, 1\) and \(1, 0\) both map to physical coordinates \(1,\)",
        ),
        ("shared", lambda i, j: i * 64 + j // 8, r"elements \(0, 0\) and \(0, 1\) both map"),
        ("fragment", T.Fragment((64, 64), lambda i, j: (i % 4, 0)), "two elements into one register"),
        ("shared", T.PartialFragment((64, 64), lambda i, j: (i, j)), "no reducer"),
    ],
)
def test_a_tile_has_a_place_for_each_element(scope, wanted, text):
    with pytest.raises(TileError, match=text):
        kernel_with(wanted, scope=scope)


def test_loops_have_a_thread_for_each_iteration():
    with pytest.raises(TileError, match="two elements into one register"):

        @T.prim_func
        def kernel(A: T.Tensor((64,), "float32")):
            with T.Kernel(1, threads=32):
                for i in T.Parallel(64, loop_layout=T.Fragment((64,), lambda i: (i // 4, i - i))):
                    A[i] = 1


def test_layouts_that_are_not_one_to_one_are_compared():
    shared = T.Layout((32, 4), lambda i, j: j * 4 + i)
    assert shared.is_equal(T.Layout((32, 4), lambda a, b: a + b * 4)) and shared.get_output_shape() == [44]
    assert not shared.is_equal(T.Layout((32, 4), lambda i, j: i * 4 + j))
    assert T.Layout((8,), lambda i: i // 8).is_equal(T.Layout((8,), lambda i: i - i))
    assert not T.Layout((8,), lambda i: i // 8).is_equal(T.Layout((8,), lambda i: i // 4))


def test_layouts_grow_by_dimensions_and_copies():
    linear = T.Layout((16, 128), lambda j, k: j * 128 + k)
    grown = linear.expand([4])
    assert grown.get_input_shape() == [4, 16, 128] and grown.get_output_shape() == [4, 2048]
    assert grown.is_equal(T.Layout((4, 16, 128), lambda i, j, k: [i, j * 128 + k]))
    assert linear.expand(()) is linear and linear.repeat(0, 1) is linear
    twice = linear.repeat(-1, 2)
    assert twice.get_output_shape() == [2, 2048] and twice.map_forward_index((3, 130)) == [1, 3 * 128 + 2]
    for wrong in (0, [-1]):
        with pytest.raises(ValueError, match="positive"):
            linear.expand(wrong)
    with pytest.raises(TypeError):
        linear.expand("4")
    for wrong in ((2, 2), (0, 0)):
        with pytest.raises(ValueError, match="dimension"):
            linear.repeat(*wrong)


def test_inverses_of_layouts():
    split = T.Layout((96,), lambda i: [i % 8, i // 8])
    back = split.inverse()
    assert back.get_input_shape() == [8, 12] and back.get_output_shape() == [96]
    assert all(back.map_forward_index(split.map_forward_index((i,))) == [i] for i in range(96))
    with pytest.raises(TileError, match="no inverse"):
        T.Layout((8,), lambda i: i * 2).inverse()
    turned = T.Layout((2, 32), lambda i, j: [j, i])
    assert str(turned.get_linearized_forward_index()) == str(T.Layout((2, 32), lambda i, j: j * 2 + i).index[0])


@pytest.mark.parametrize("combine", [None, 4])
def test_layouts_of_partial_sums_are_hints(combine, way):
    plan = T.PartialFragment((8,), forward_thread_fn=lambda i, rep: i * 16 + rep, replicate=16, combine=combine)
    assert plan.combine_size == (combine or 16) and f"combine {plan.combine_size} x copy" in repr(plan)

    @T.prim_func
    def kernel(A: T.Tensor((8, 40), "float32"), B: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=128):
            acc = T.alloc_reducer((8,), "float32", op="sum")
            T.annotate_layout({acc: plan})
            T.reducer_init(acc)
            for i, k in T.Parallel(8, 40):
                T.reducer_update(acc[i], A[i, k])
            result = T.alloc_fragment((8,), "float32")
            T.finalize_reducer(acc, result)
            T.copy(result, B)

    a, b = torch.randn(8, 40), torch.full((8,), torch.nan)
    way(kernel, a, b)
    torch.testing.assert_close(b.double(), a.double().sum(1), rtol=1e-5, atol=1e-5)


def test_layouts_of_reducers_are_those_of_partial_sums():
    with pytest.raises(ValueError, match="does not divide"):
        T.PartialFragment((8,), forward_thread_fn=lambda i, rep: rep, replicate=8, combine=3)
    with pytest.raises(TileError, match="PartialFragment"):

        @T.prim_func
        def kernel(A: T.Tensor((8,), "float32")):
            with T.Kernel(1, threads=32):
                acc = T.alloc_reducer((8,), "float32")
                T.annotate_layout({acc: T.Fragment((8,), forward_thread_fn=lambda i: i)})


def test_fragments_of_a_matrix():
    """Two neighbours of a row, or of a column, lie in one thread, as mma accumulates them."""
    assert make_gemm_fragment_8x8() == P("[8:4t | 4:1t 2:1r]")
    assert make_gemm_fragment_8x8_transposed() == P("[4:1t 2:1r | 8:4t]")
