# SPDX-License-Identifier: Apache-2.0
"""Buffers in the author's hands: sizes, indices, slices; and the types that values take."""

import warnings

import pytest
import torch

import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.ir.expr import Cast
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Store
from torch_tile.simulator.tile.interpreter import evaluate


def test_a_handle_tells_its_type():
    n, s = T.dynamic("n, s")
    seen = {}

    @T.prim_func
    def kernel(A: T.Tensor((n, 6, 4), "float16"), B: T.StridedTensor((n, 2), (s, 1), torch.int32)):
        with T.Kernel(1) as _:
            tile = T.alloc_fragment([2, 3], T.float32)
            seen["A"] = A.shape, A.ndim, A.dtype, A.strides, A.scope(), A.name
            seen["B"] = B.shape, B.strides, B.dtype.name
            seen["tile"] = tile.shape, tile.scope(), tile.name, repr(tile)
            T.clear(tile)

    shape, ndim, dtype, strides, scope, name = seen["A"]
    assert shape[0] is n and shape[1:] == (6, 4) and all(type(x) is int for x in shape[1:])
    assert (ndim, dtype, strides, scope, name) == (3, T.float16, (24, 4, 1), "global", "A")
    assert seen["B"][1][0] is s and seen["B"][1][1] == 1 and seen["B"][2] == "int32"
    assert seen["tile"] == ((2, 3), "fragment", "tile", "tile: fragment float32(2, 3)")


def test_negative_indices_and_open_slices():
    n = T.dynamic("n")

    @T.prim_func
    def kernel(A: T.Tensor((n, 6), "float32"), out: T.Tensor((4, 6), "float32")):
        with T.Kernel(1) as _:
            T.clear(out)
            out[0, 0] = A[-1, -2]
            T.copy(A[n - 2 :, 4:], out[1:3, :2])
            T.copy(A[0, :], out[-1, :])
            T.fill(out[:1, -2:], 7.0)
            T.copy(A[1], out[0:1, 1:7])

    a, out = torch.randn(5, 6), torch.zeros(4, 6)
    evaluate(kernel, a, out)
    wanted = torch.zeros(4, 6)
    wanted[1:3, :2], wanted[3], wanted[0, -2:], wanted[0, 0] = a[-2:, 4:], a[0], 7.0, a[-1, -2]
    wanted[0, 1:] = a[1, :5]
    assert torch.equal(out, wanted)


def test_an_ellipsis_is_all_that_is_not_given():
    @T.prim_func
    def kernel(A: T.Tensor((2, 3, 4), "float32"), B: T.Tensor((2, 3, 4), "float32")):
        with T.Kernel(1) as _:
            T.copy(A[0, ...], B[1, ...])
            T.copy(A[..., 2], B[..., 0])
            B[1, 2, ..., 3] = A[1, 2, 3, ...]

    a, b = torch.randn(2, 3, 4), torch.zeros(2, 3, 4)
    evaluate(kernel, a, b)
    wanted = torch.zeros(2, 3, 4)
    wanted[1] = a[0]
    wanted[..., 0] = a[..., 2]
    wanted[1, 2, 3] = a[1, 2, 3]
    assert torch.equal(b, wanted)

    with pytest.raises(TileError, match="twice"):

        @T.prim_func
        def twice(A: T.Tensor((2, 3, 4), "float32")):
            with T.Kernel(1) as _:
                T.clear(A[..., 0, ...])


def test_region_assignment():
    @T.prim_func
    def kernel(A: T.Tensor((4, 4), "float32"), B: T.Tensor((4, 4), "float16")):
        with T.Kernel(1) as _:
            B[0:2, :] = A[2:4, :]
            B[2, :] = 1.5
            B[3, 0:2] = A[0, 1]

    a, b = torch.randn(4, 4), torch.zeros(4, 4).half()
    evaluate(kernel, a, b)
    assert torch.equal(b[:2], a[2:].half()) and b[2].eq(1.5).all()
    assert b[3, 0] == a[0, 1].half()


STORED = {
    # expression on (f16 h, f32 x, int8 b, int32 i, uint8 u, bool ok) -> the type that it has
    "h * 2 + 1.5": "float16", "b * 3": "int32", "b + 0.5": "float32", "h + b": "float16", "h + x": "float32",
    "i + 1": "int32", "b + i": "int32", "u + b": "int16", "i / 2": "float32", "h / 2": "float16", "i // 2": "int32",
    "i > 2": "bool", "-h": "float16", "T.exp(h)": "float16", "T.exp(i)": "float32", "T.pow(h, 2.0)": "float16",
    "T.max(h, 0)": "float16", "T.max(i, 2.5)": "float32", "T.if_then_else(ok, h, 0.0)": "float16", "T.abs(b)": "int8",
    "h ** 2": "float16", "1 + i": "int32", "2.0 * b": "float32", "i + 2**40": "int64", "ok + ok": "int32",
    "T.float32(h) * x": "float32", "h.astype('float64')": "float64", "T.cast(x, 'int64')": "int64", "i << 2": "int32",
    "u << 4": "int32", "b << 20": "int32", "u << u": "uint8", "u >> 4": "int32",
    "u & 15": "int32", "(u & 15) - 8": "int32", "1 - u": "int32", "b // 3": "int32", "u % 7": "int32", "u | 1": "int32",
    "T.uint8(3) + u": "uint8", "T.uint8(3) + 1": "int32", "u * u": "uint8", "u + 2**40": "int64", "-b": "int8",
    "T.max(u, 3)": "int32", "T.min(1, b)": "int32", "T.max(u, -1)": "int32", "T.if_then_else(ok, u, 0)": "int32",
    "u + ok": "uint8", "u + True": "uint8", "u / 2": "float32", "u ** 2": "float32", "T.clamp(b, -3, 3)": "int32",
}  # fmt: skip


@pytest.mark.parametrize("text", STORED)
def test_types_of_expressions(text):
    """Plain numbers take the type of the other operand; mixed types promote. Shifts to the left keep all bits."""
    found = {}

    @T.prim_func
    def kernel(
        hs: T.Tensor((1,), "float16"), xs: T.Tensor((1,), "float32"), bs: T.Tensor((1,), "int8"),
        ns: T.Tensor((1,), "int32"), us: T.Tensor((1,), "uint8"), oks: T.Tensor((1,), "bool"),
    ):  # fmt: skip
        with T.Kernel(1) as _:
            names = {"h": hs[0], "x": xs[0], "b": bs[0], "i": ns[0], "u": us[0], "ok": oks[0], "T": T}
            found["dtype"] = eval(text, names).dtype.name

    assert found["dtype"] == STORED[text]


def test_stores_convert_silently_within_a_kind():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float16"), B: T.Tensor((4,), "int8"), C: T.Tensor((2,), "bool"), x: T.float64):
        with T.Kernel(1) as _:
            A[0] = x
            A[1] = 3
            A[2] = B[0]
            B[1] = T.cast(B[0], "int32") * 100
            B[2] = T.cast(B[0], "int32") * 133 + 1
            C[0] = B[0]
            C[1] = B[0] > 5

    casts = [n for n in walk(kernel.program) if isinstance(n, Store) and isinstance(n.value, Cast)]
    assert len(casts) == 5
    a, b, c = torch.zeros(4).half(), torch.full((4,), 3, dtype=torch.int8), torch.zeros(2, dtype=torch.bool)
    evaluate(kernel, a, b, c, 0.1)
    assert torch.equal(a[:3], torch.tensor([0.1, 3, 3]).half())
    assert b[1:3].tolist() == [300 - 256, 400 - 512] and c.tolist() == [True, False]


def test_annotations():
    assert T.Tensor((2, 3), torch.bfloat16).dtype == T.bfloat16
    assert T.Tensor(4).dtype == T.float32 and len(T.Tensor(4).shape) == 1
    assert T.Buffer is T.Tensor
    with pytest.raises(TileError) as caught:
        T.StridedTensor((2, 3), (3,), "float32")
    assert caught.value.code == "bad_shape"
    with pytest.raises(TileError) as caught:
        T.Tensor((2, -1), "float32")
    assert caught.value.code == "bad_shape"


@pytest.mark.parametrize("align", [0, -4, 2.5, "16"])
def test_alignment_is_a_number_of_bytes(align):
    assert T.Tensor((4,), "float32", align=4).buffer("x").align == 4
    with pytest.raises(TileError, match="align must be a positive number of bytes"):
        T.Tensor((4,), "float32", align=align)
    with pytest.raises(TileError, match="align must be a positive number of bytes"):
        T.StridedTensor((4,), (1,), "float32", align=align)


def test_alignment_is_printed():
    n = T.dynamic("n")

    @T.prim_func
    def kernel(A: T.Tensor((n,), "float32", align=4), B: T.StridedTensor((n,), (1,), "float32", align=16)):
        with T.Kernel(1) as _:
            T.clear(A)
            T.clear(B)

    assert "A: T.Tensor((n,), T.float32, align=4)" in repr(kernel.program)
    assert "B: T.StridedTensor((n,), (1,), T.float32, align=16)" in repr(kernel.program)


def test_annotations_in_brackets():
    n, s = T.dynamic("n, s")
    for short, long in (
        (T.Tensor[(n, 4), T.float16], T.Tensor((n, 4), T.float16)),
        (T.Tensor[[n, 4], "float16"], T.Tensor((n, 4), T.float16)),
        (T.Tensor[n, 4], T.Tensor((n, 4))),
        (T.Tensor[128], T.Tensor((128,))),
        (T.Tensor[4, T.float16], T.Tensor((4,), T.float16)),
        (T.StridedTensor[(n, 4), (s, 1), "int32"], T.StridedTensor((n, 4), (s, 1), "int32")),
    ):
        assert repr(short) == repr(long)
    with pytest.raises(TileError, match="bad_dtype"):
        T.Tensor[(n, 4), "flaot16"]

    @T.prim_func
    def kernel(A: T.Tensor[(8,), T.float32], B: T.Tensor[[8], T.float32]):
        with T.Kernel(1) as _:
            T.copy(A, B)

    a, b = torch.randn(8), torch.empty(8)
    evaluate(kernel, a, b)
    assert torch.equal(a, b)


def test_slices_by_names(way):
    @T.prim_func
    def kernel(A: T.Tensor((8, 64), "float32"), at: T.Tensor((4,), "int32"), B: T.Tensor((8, 64), "float32")):
        with T.Kernel(4, threads=32) as bx:
            tile = T.alloc_shared((2, 16), "float32")
            row = bx * 2
            for k in T.serial(4):
                low = k * 16
                high = low + 16
                end = high
                T.copy(A[row : row + 2, low:end], tile)
                start = at[k]
                stop = start + 16
                T.copy(tile, B[row : row + 2, start:stop])

    a, at, b = torch.randn(8, 64), torch.tensor([16, 0, 48, 32], dtype=torch.int32), torch.zeros(8, 64)
    way(kernel, a, at, b)
    assert torch.equal(b, torch.cat([a[:, k : k + 16] for k in (16, 0, 48, 32)], 1))


def test_a_name_keeps_the_element_that_it_was_given(way):
    @T.prim_func
    def kernel(at: T.Tensor((1,), "int32"), A: T.Tensor((64,), "float32"), B: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=32):
            low = at[0]
            at[0] = 8
            high = at[0] + 4
            T.copy(A[low:high], B)

    a, b = torch.randn(64), torch.empty(16)
    way(kernel, torch.tensor([3], dtype=torch.int32), a, b)
    assert torch.equal(b, torch.cat([a[3:12], torch.zeros(7)]))


def test_slices_with_steps(way):
    @T.prim_func
    def kernel(
        A: T.Tensor((9, 64), "float32"), B: T.Tensor((9, 32), "float16"), C: T.Tensor((9, 64), "float32"), n: T.int32
    ):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((9, 64), "float32")
            T.clear(tile)
            T.copy(A[::2, 1:33:3], tile[0:5, 0:11])
            T.copy(tile[0:5, 0:11], B[4:, 0:11])
            C[::4, ::2] = 2.5
            C[1, 1:64:2] = A[1, 0:32]
            T.fill(C[8, 3::60], 7)
            T.copy(A[2, 0], C[2, n : n + 30 : 10])

    a, b, c = torch.randn(9, 64), torch.zeros(9, 32, dtype=torch.float16), torch.zeros(9, 64)
    way(kernel, a, b, c, 5)
    wanted_b, wanted_c = torch.zeros_like(b), torch.zeros_like(c)
    wanted_b[4:, 0:11] = a[::2, 1:33:3].half()
    wanted_c[::4, ::2] = 2.5
    wanted_c[1, 1:64:2] = a[1, :32]
    wanted_c[8, 3::60] = 7
    wanted_c[2, 5:35:10] = a[2, :3]
    assert torch.equal(b, wanted_b) and torch.equal(c, wanted_c)


@pytest.mark.parametrize("operation", ["reduce", "step", "inside"])
def test_what_takes_no_steps(operation):
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((64,), "float32")):
            with T.Kernel(1):
                tile = T.alloc_fragment((64,), "float32")
                total = T.alloc_fragment((1,), "float32")
                T.copy(A, tile)
                if operation == "reduce":
                    T.reduce_sum(tile[0:64:2], total)
                elif operation == "step":
                    T.copy(A[0:64:-2], tile[0:32])
                else:
                    T.copy(A[0:32:2], A[1:17])

    assert caught.value.code in ("bad_argument", "bad_slice")


def test_slices_by_variables(way):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32):
            low = T.alloc_var("int32")
            tile = T.alloc_shared((16,), "float32")
            for k in T.serial(4):
                low = k * 16
                high = low + 16
                if k < 3:
                    T.copy(A[low:high], tile)
                    T.copy(tile, B[low:high])

    a, b = torch.randn(64), torch.zeros(64)
    way(kernel, a, b)
    assert torch.equal(b[:48], a[:48]) and not b[48:].any()


@pytest.mark.parametrize("place", ["between", "later in the loop"])
def test_a_variable_that_may_have_changed(way, place):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=32):
            low = T.alloc_var("int32", 3)
            high = low + 16
            if place == "between":
                low = 5
                T.copy(A[low:high], B)
            else:
                for _ in T.serial(2):
                    T.copy(A[low:high], B)
                    low = low + 1

    a, b = torch.randn(64), torch.empty(16)
    way(kernel, a, b)
    low = 5 if place == "between" else 4
    assert torch.equal(b, torch.cat([a[low:19], torch.zeros(low - 3)]))


def test_fields_of_narrow_integers_are_joined(way):
    """A shift of 8 or 16 bits by a plain number has 32, so that no field is lost."""

    @T.prim_func
    def kernel(A: T.Tensor((64,), "uint16"), B: T.Tensor((64,), "uint8"), C: T.Tensor((64,), "uint32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                C[i] = T.cast(A[i] << 20, "uint32") | T.cast(B[i] << 12, "uint32") | T.cast(A[i] >> 4, "uint32")

    a, b = torch.randint(0, 2**12, (64,)), torch.randint(0, 2**8, (64,))
    c = torch.zeros(64, dtype=torch.uint32)
    way(kernel, a.to(torch.uint16), b.to(torch.uint8), c)
    assert torch.equal(c.view(torch.int32), ((a << 20) | (b << 12) | (a >> 4)).to(torch.uint32).view(torch.int32))


STORES = {
    "too few": (lambda y, x, i: y.__setitem__(i, x[i] * 2), True),
    "an element": (lambda y, x, i: y.__setitem__(i, x[i]), True),
    "in all": (lambda y, x, i: y.__setitem__((i, 0), x[i]), False),
    "a slice": (lambda y, x, i: y.__setitem__((i, slice(None)), x[i] * 2), False),
    "an ellipsis": (lambda y, x, i: y.__setitem__((i, ...), x[i] * 2), False),
    "a number": (lambda y, x, i: y.__setitem__(i, 0.0), False),
    "a row": (lambda y, x, i: y.__setitem__(i, y[i + 1]), False),
}


@pytest.mark.parametrize("columns", [4, 1])
@pytest.mark.parametrize("store", STORES)
def test_values_stored_by_too_few_indices_are_warned_of(store, columns):
    write, is_warned = STORES[store]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        @T.prim_func
        def kernel(x: T.Tensor((8,), "float32"), y: T.Tensor((8, columns), "float32")):
            with T.Kernel(1, threads=32) as _:
                for i in T.serial(7):
                    write(y, x, i)

    found = [str(each.message) for each in caught if "[missing_index]" in str(each.message)]
    assert len(found) == (is_warned and columns > 1) and all("`y[i]`, 1 of 2" in text for text in found)
