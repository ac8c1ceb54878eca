# SPDX-License-Identifier: Apache-2.0
"""Vectors: dtypes such as float32x4, T.Ramp, T.Broadcast, T.Shuffle, lanes."""

import pytest
import torch

import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError


def test_names():
    assert T.float32x4 == "float32x4" and T.dtype("float32x4") is T.float32x4 and T.float32x4.lanes == 4
    assert (T.int8x16.bits, T.int8x16.itemsize, T.int8x16.element, T.float16.lanes) == (8, 16, T.int8, 1)
    assert not hasattr(T, "float32x0") and not hasattr(T, "float33x2") and not hasattr(T, "float32x2x2")


@pytest.mark.parametrize("lanes", [2, 4, 8])
def test_neighbours_by_a_ramp(lanes, way):
    @T.prim_func
    def kernel(A: T.Tensor((4, 64), "float32"), B: T.Tensor((4, 64), "float32"), C: T.Tensor((64,), "float16")):
        with T.Kernel(1, threads=64):
            for i, j in T.Parallel(4, 64 // lanes):
                values = A[i, T.Ramp(j * lanes, 1, lanes)]
                scaled = values * T.Broadcast(2.0, lanes) + 1
                B[i, T.Ramp(j * lanes, 1, lanes)] = T.max(T.exp(scaled), 1.0)
            for j in T.Parallel(64 // lanes):
                C[j * lanes : j * lanes + lanes] = A[0, T.Ramp(j * lanes, 1, lanes)].astype(f"float16x{lanes}")

    a, b, c = torch.randn(4, 64), torch.zeros(4, 64), torch.zeros(64, dtype=torch.float16)
    way(kernel, a, b, c)
    torch.testing.assert_close(b, (a * 2 + 1).exp().clamp(min=1))
    assert torch.equal(c, a[0].half())


def test_arrays_of_vectors(way):
    @T.prim_func
    def kernel(A: T.Tensor((16,), "float32x4"), B: T.Tensor((16, 4), "float32"), C: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=16):
            own = T.alloc_local((2,), "float32x4")
            assert own.shape == (2,) and own.dtype == "float32x4" and A.ndim == 1
            for i in T.Parallel(16):
                own[0] = A[i]
                own[1] = own[0] + T.float32x4(i)
                total = own[1]
                for k in range(4):
                    B[i, k] = total[k]
                C[i] = T.extract_lane(own[0], i % 4) + own[1][3]

    a, b, c = torch.randn(16, 4), torch.zeros(16, 4), torch.zeros(16)
    way(kernel, a, b, c)
    i = torch.arange(16)
    assert torch.equal(b, a + i[:, None])
    torch.testing.assert_close(c, a[i, i % 4] + b[:, 3])


def test_tiles_of_vectors(way):
    @T.prim_func
    def kernel(A: T.Tensor((32,), "int8x16"), B: T.Tensor((32,), "int8x16")):
        with T.Kernel(2, threads=16) as bx:
            tile = T.alloc_shared((16,), T.int8x16)
            T.copy(A[bx * 16 : bx * 16 + 16], tile)
            for i in T.Parallel(16):
                tile[i] = tile[i] ^ T.int8x16(5)
            T.copy(tile, B[bx * 16 : bx * 16 + 16])

    a, b = torch.randint(-128, 128, (32, 16), dtype=torch.int8), torch.zeros(32, 16, dtype=torch.int8)
    way(kernel, a, b)
    assert torch.equal(b, a ^ 5)


@pytest.mark.parametrize(("whole", "parts"), [("uint32", "float16x2"), ("uint64", "float32x2"), ("int32", "int8x4")])
def test_bits_of_vectors(whole, parts, way):
    lanes, element = T.dtype(parts).lanes, T.dtype(parts).element

    @T.prim_func
    def kernel(A: T.Tensor((32,), whole), B: T.Tensor((32 * lanes,), element), C: T.Tensor((32,), whole)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(32):
                split = T.reinterpret(A[i], parts)
                B[T.Ramp(i * lanes, 1, lanes)] = split
                C[i] = T.reinterpret(split, whole)

    a = torch.randint(0, 100, (32 * T.dtype(whole).itemsize,), dtype=torch.uint8).view(T.dtype(whole).as_torch())
    b, c = torch.zeros(32 * lanes, dtype=element.as_torch()), torch.zeros(32, dtype=a.dtype)
    way(kernel, a, b, c)
    assert torch.equal(b.view(torch.uint8), a.view(torch.uint8)) and torch.equal(
        c.view(torch.uint8), a.view(torch.uint8)
    )


def test_lanes_change_places(way):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=16):
            for i in T.Parallel(16):
                A[T.Ramp(i * 4, 1, 4)] = T.Shuffle([A[T.Ramp(i * 4, 1, 4)]], [3, 2, 1, 0])
                low, high = T.Shuffle([A[T.Ramp(i * 4, 2, 2)]], [0, 1])
                B[i] = T.if_then_else(low < high, low, T.Shuffle([T.Broadcast(high, 2)], [1]))

    a, b = torch.randn(64), torch.zeros(16)
    wanted = a.view(16, 4).flip(1).clone()
    way(kernel, a, b)
    assert torch.equal(a.view(16, 4), wanted) and torch.equal(b, torch.minimum(wanted[:, 0], wanted[:, 2]))


def test_conversions(way):
    @T.prim_func
    def kernel(A: T.Tensor((32,), "float32"), B: T.Tensor((4, 32), "float32")):
        with T.Kernel(1, threads=8):
            for i in T.Parallel(8):
                at = T.Ramp(i * 4, 1, 4)
                values = A[at]
                B[0, at] = T.cast(T.cast(values, "float16x4"), "float32x4")
                B[1, at] = T.Cast("float32", T.Cast("int32x4", values))
                B[2, at] = T.if_then_else(values > 0, values, T.abs(values) * 2)
                B[3, at] = T.float32x4(T.cast(i, "float32"))

    a, b = torch.randn(32) * 3, torch.zeros(4, 32)
    way(kernel, a, b)
    wanted = [a.half().float(), a.int().float(), torch.where(a > 0, a, a.abs() * 2), (torch.arange(32) // 4).float()]
    assert torch.equal(b, torch.stack(wanted))


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda A: T.Ramp(0, 1, 4) + T.Ramp(0, 1, 2), "bad_operand"),
        (lambda A: A[T.Ramp(0, 1, 4)][4], "bad_operand"),
        (lambda A: T.Shuffle([A[T.Ramp(0, 1, 4)]], [7]), "bad_argument"),
        (lambda A: T.reinterpret(A[0], "float16x4"), "bad_argument"),
        (lambda A: A.__setitem__(T.Ramp(0, 1, 4), T.Broadcast(1.0, 2)), "copy_shape"),
        (lambda A: A.__setitem__(slice(0, 8), T.Broadcast(1.0, 2)), "copy_shape"),
        (lambda A: T.cast(A[T.Ramp(0, 1, 4)], "float16x2"), "bad_operand"),
        (lambda A: bool(A[T.Ramp(0, 1, 4)]), "symbolic_condition"),
        (lambda A: T.Broadcast(1.0, 0), "bad_argument"),
    ],
)
def test_vectors_that_cannot_be(make, code):
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((64,), "float32")):
            with T.Kernel(1, threads=32):
                make(A)

    assert caught.value.code == code


@pytest.mark.parametrize("dtype,lanes", [("float32", 4), ("float16", 2), ("bfloat16", 2), ("int8", 4)])
def test_vectors_in_variables(dtype, lanes, way):
    """They start at 0, are assigned whole or by lanes, carried by loops and branches, and swap."""
    vector = f"{dtype}x{lanes}"

    @T.prim_func
    def kernel(A: T.Tensor((8, lanes), dtype), B: T.Tensor((8, lanes), dtype), C: T.Tensor((3, lanes), dtype)):
        with T.Kernel(1, threads=32):
            total = T.alloc_var(vector)
            last = T.alloc_var(vector, 1)
            for i in T.serial(8):
                total += A[i, T.Ramp(0, 1, lanes)]
                if i > 4:
                    last = A[i, 0:lanes]
                B[i, 0:lanes] = total
            before = total
            total, last = last, total
            last[0] = T.extract_lane(total, 1)
            C[0, 0:lanes] = total
            C[1, 0:lanes] = last
            total = 3
            C[2, 0:lanes] = before + total - 3

    a = torch.randint(-3, 4, (8, lanes)).to(getattr(torch, dtype))
    b, c = torch.zeros_like(a), torch.zeros(3, lanes, dtype=a.dtype)
    way(kernel, a, b, c)
    sums = a.double().cumsum(0)
    assert torch.equal(b.double(), sums) and torch.equal(c[0], a[7]) and torch.equal(c[2].double(), sums[-1])
    assert c[1, 0] == a[7, 1] and torch.equal(c[1, 1:].double(), sums[-1, 1:])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "uint8", "int64", "float32x4", "bool"])
def test_variables_start_at_0_or_their_value_in_each_iteration(dtype, way):
    """Outside and inside of loops and branches, whatever the iteration before left in them."""
    lanes, element = T.dtype(dtype).lanes, str(T.dtype(dtype).element)
    shape = (4, lanes) if lanes > 1 else (4,)

    @T.prim_func
    def kernel(A: T.Tensor((4,), dtype), B: T.Tensor((4,), dtype), C: T.Tensor((4,), dtype)):
        with T.Kernel(1, threads=1):
            one = T.alloc_var(dtype, init=1)
            for i in T.serial(4):
                zero = T.alloc_var(dtype)
                if i % 2 == 0:
                    zero = A[i]
                B[i] = zero
                zero = one
                one = A[i]
                C[i] = zero

    a = torch.randint(0, 2 if dtype == "bool" else 100, shape).to(getattr(torch, element))
    b, c = torch.full_like(a, 1), torch.full_like(a, 0)
    way(kernel, a, b, c)
    wanted = a.clone()
    wanted[1::2] = 0
    assert torch.equal(b, wanted)
    assert torch.equal(c, torch.cat([torch.ones_like(a[:1]), a[:3]]))
