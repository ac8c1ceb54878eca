# SPDX-License-Identifier: Apache-2.0
import functools
import random

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.simulator.tile.interpreter import evaluate
from torch_tile.tileop.reduce.op import REDUCTIONS

BITWISE = {"bitand": torch.bitwise_and, "bitor": torch.bitwise_or, "bitxor": torch.bitwise_xor}


def wanted(kind, tensor, dim):
    """In float64 or int64."""
    if kind in BITWISE:
        return functools.reduce(BITWISE[kind], tensor.unbind(dim))
    tensor = tensor.abs() if kind.startswith("abs") else tensor
    return {"sum": tensor.sum, "max": tensor.amax, "min": tensor.amin}[kind.removeprefix("abs")](dim)


def merged(kind, old, new):
    return (
        wanted(kind, torch.stack([old, new]), 0)
        if not kind.startswith("abs")
        else wanted(kind[3:], torch.stack([old, new]), 0)
    )


def reduction(kind, shape, dim, dtype, out_type, clear, keep, **options):
    out_shape = [n for d, n in enumerate(shape) if d != dim] if not keep else [*shape[:dim], 1, *shape[dim + 1 :]]

    @T.prim_func
    def kernel(A: T.Tensor(shape, dtype), B: T.Tensor(out_shape, out_type)):
        with T.Kernel(1) as _:
            a = T.alloc_fragment(shape, dtype)
            b = T.alloc_fragment(out_shape, out_type)
            T.copy(A, a)
            T.copy(B, b)
            getattr(T, f"reduce_{kind}")(a, b, dim=dim, clear=clear, **options)
            T.copy(b, B)

    return kernel, out_shape


@pytest.mark.parametrize("case", range(3))
@pytest.mark.parametrize("kind", REDUCTIONS)
def test_kinds(kind, case, launch, seed):
    draw = random.Random(seed)
    shape = [draw.randint(1, 70 if case == 0 else 9) for _ in range(2 + (case == 2))]
    dim, keep, clear = draw.randrange(len(shape)), draw.random() < 0.3, draw.random() < 0.5
    floats = kind not in BITWISE and draw.random() < 0.7
    dtype, out_type = draw.choice(
        [("float32", "float32"), ("float64", "float64"), ("float16", "float32"), ("bfloat16", "float32")]
        if floats else [("int32", "int32"), ("int8", "int32"), ("int64", "int64")]
    )  # fmt: skip
    kernel, out_shape = reduction(kind, shape, dim, dtype, out_type, clear, keep)
    a = (
        torch.randn(shape).to(getattr(torch, dtype))
        if floats
        else torch.randint(-99, 99, shape).to(getattr(torch, dtype))
    )
    b = torch.randn(out_shape) if floats else torch.randint(-99, 99, out_shape)
    b = (b.abs() if kind.startswith("abs") else b).to(getattr(torch, out_type))
    wide = torch.float64 if floats else torch.int64
    expected = wanted(kind, a.to(wide), dim).reshape(out_shape)
    expected = expected if clear else merged(kind, b.to(wide), expected)
    launch(kernel, a, b)
    torch.testing.assert_close(b.to(wide), expected, rtol=1e-5 * floats, atol=1e-5 * floats)


def test_slices(launch):
    @T.prim_func
    def kernel(A: T.Tensor((4, 6, 10), "float32"), B: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            a = T.alloc_shared((4, 6, 10), "float32")
            b = T.alloc_fragment((8,), "float32")
            T.copy(A, a)
            T.clear(b)
            T.reduce_max(a[2, 1:5, 3:9], b[2:6], dim=-1)
            T.reduce_sum(a[1:3, 5, 0:1], b[7:8], dim=0)
            T.copy(b, B)

    a, b = torch.randn(4, 6, 10), torch.zeros(8)
    launch(kernel, a, b)
    expected = torch.zeros(8)
    expected[2:6] = a[2, 1:5, 3:9].amax(-1)
    expected[7] = a[1:3, 5, 0].sum()
    torch.testing.assert_close(b, expected)


def test_a_row_of_any_length_to_one_element(launch):
    @T.prim_func
    def kernel(A: T.Tensor((77,), "float32"), B: T.Tensor((2,), "float32")):
        with T.Kernel(1) as _:
            a = T.alloc_fragment((77,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.copy(A, a)
            T.reduce_sum(a, total)
            B[0] = total[0]
            T.reduce(a, total, "min", dim=0)
            B[1] = total[0]

    a, b = torch.randn(77), torch.zeros(2)
    launch(kernel, a, b)
    torch.testing.assert_close(b, torch.stack([a.sum(), a.min()]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("clear", [False, True])
def test_infinities(clear, launch):
    """Masked rows: the maximum of nothing but -inf is -inf."""

    @T.prim_func
    def kernel(A: T.Tensor((3, 40), "float32"), B: T.Tensor((3,), "float32")):
        with T.Kernel(1) as _:
            a = T.alloc_fragment((3, 40), "float32")
            b = T.alloc_fragment((3,), "float32")
            T.copy(A, a)
            T.fill(b, -T.infinity("float32"))
            T.reduce_max(a, b, dim=1, clear=clear)
            T.copy(b, B)

    a, b = torch.full((3, 40), -torch.inf), torch.zeros(3)
    a[1, 37] = -5.0
    launch(kernel, a, b)
    assert b.tolist() == [-torch.inf, -5.0, -torch.inf]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("kind", ["sum", "max", "min", "absmax", "abssum"])
def test_nan_stays(kind, dim, launch, seed):
    """In whichever place of a row it stands, and in what was there before."""
    shape = (37, 21)
    draw = random.Random(seed)
    a, b = torch.randn(shape), torch.randn(shape[1 - dim]).abs()
    a[draw.randrange(37), draw.randrange(21)] = torch.nan
    b[draw.randrange(shape[1 - dim])] = torch.nan
    expected = merged(kind, b.double(), wanted(kind, a.double(), dim))
    options = {} if kind.endswith("sum") else {"nan_propagate": True}
    launch(reduction(kind, shape, dim, "float32", "float32", False, False, **options)[0], a, b)
    torch.testing.assert_close(b.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("src", "dst", "dim"), [((4, 8), (8,), 1), ((4, 8), (4, 2), 1), ((4, 8), (4, 8), 0), ((4,), (2,), 0)]
)
def test_shapes_must_fit(src, dst, dim, complaint):
    @T.prim_func
    def kernel(A: T.Tensor((1,), "float32")):
        with T.Kernel(1) as _:
            a = T.alloc_fragment(src, "float32")
            b = T.alloc_fragment(dst, "float32")
            T.reduce_sum(a, b, dim=dim)  # here

    assert f"reduced over dim {dim}" in complaint(kernel, "reduce_shape")


@pytest.mark.parametrize("dim", [2, -3])
def test_dim_must_exist(dim):
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((4, 4), "float32"), B: T.Tensor((4,), "float32")):
            with T.Kernel(1) as _:
                T.reduce_max(A, B, dim=dim)

    assert caught.value.code == "reduce_dim" and f"dim {dim} is outside" in str(caught.value)


def test_bitwise_reductions_take_integers(complaint):
    @T.prim_func
    def kernel(A: T.Tensor((1,), "float32")):
        with T.Kernel(1) as _:
            a = T.alloc_fragment((4, 4), "float32")
            b = T.alloc_fragment((4,), "float32")
            T.reduce_bitor(a, b, dim=1)  # here

    assert "has dtype float32" in complaint(kernel, "bad_argument")


def test_operands_are_memory():
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((4, 4), "float32")):
            with T.Kernel(1) as _:
                T.reduce_max(A, 3.0)

    assert caught.value.code == "bad_argument" and "argument `out` is float" in str(caught.value)


@pytest.mark.parametrize("kind", ["abssum", "absmax"])
def test_what_was_there_counts_as_it_is(kind):
    """It may be negative, and sums of small integers may have wrapped."""

    @T.prim_func
    def kernel(A: T.Tensor((4, 64), "int8"), B: T.Tensor((4,), "int8")):
        with T.Kernel(1, threads=32) as _:
            a, b = T.alloc_shared((4, 64), "int8"), T.alloc_fragment((4,), "int8")
            T.copy(A, a)
            T.copy(B, b)
            getattr(T, f"reduce_{kind}")(a, b, dim=1, clear=False)
            T.copy(b, B)

    a = torch.randint(-127, 128, (4, 64), dtype=torch.int8)
    a[0], before = a[0] // 8, torch.tensor([-100, -128, 0, 77], dtype=torch.int8)
    sizes = a.long().abs()
    want = before + sizes.sum(1) if kind == "abssum" else torch.maximum(before.long(), sizes.amax(1))
    runs = [
        lambda b: evaluate(kernel, a, b),
        lambda b: torch_tile.compile(kernel, target="cpu")(a, b),
        lambda b: torch_tile.compile(kernel, target="cuda:sm_80").interpret(a, b),
    ]
    for run in runs:
        b = before.clone()
        run(b)
        assert torch.equal(b, want.to(torch.int8))


@pytest.mark.parametrize("batch", [0, -1, 1.5, "2", True, None])
@pytest.mark.parametrize("op", ["sum", "max", "bitand"])
def test_batches_are_positive_integers(op, batch):
    """The hint changes nothing; what TileLang refuses is refused."""
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((4, 4), "int32")):
            with T.Kernel(1):
                tile, out = T.alloc_fragment((4, 4), "int32"), T.alloc_fragment((4,), "int32")
                T.copy(A, tile)
                T.reduce(tile, out, op, dim=1, batch=2)
                getattr(T, f"reduce_{op}")(tile, out, dim=1, batch=batch)

    assert caught.value.code == "bad_argument" and "`batch`" in str(caught.value)
