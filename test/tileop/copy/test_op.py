# SPDX-License-Identifier: Apache-2.0
import math
import random

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.simulator.tile.interpreter import evaluate

FLOATS = ["float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2"]
INTEGERS = ["int32", "int8", "int64", "uint8", "int16"]


def random_tensor(shape, dtype):
    dtype = getattr(torch, dtype)
    if dtype.is_floating_point:
        return (torch.randn(shape) * 4).to(dtype)
    return torch.randint(0 if dtype == torch.uint8 else -100, 100, shape).to(dtype)


def exact(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor.to(torch.int64)


def window(tensor, row, column, rows, columns):
    """A box of a matrix as the language reads it: 0 outside."""
    found = torch.zeros(rows, columns, dtype=torch.float64)
    for i in range(rows):
        for j in range(columns):
            if 0 <= row + i < tensor.shape[0] and 0 <= column + j < tensor.shape[1]:
                found[i, j] = tensor[row + i, column + j].double()
    return found.to(tensor.dtype)


def through_tile(shape, tile, types):
    """Copy a box of A to a tile, the tile to another of its kind, and that to a box of B."""
    source, middle, target = types

    @T.prim_func
    def kernel(
        r0: T.int32, c0: T.int32, r1: T.int32, c1: T.int32, A: T.Tensor(shape, source), B: T.Tensor(shape, target)
    ):
        with T.Kernel(1) as _:
            shared = T.alloc_shared(tile, middle)
            fragment = T.alloc_fragment(tile, middle)
            T.copy(A[r0 : r0 + tile[0], c0 : c0 + tile[1]], shared)
            T.copy(shared, fragment)
            T.copy(fragment, B[r1, c1])

    return kernel


@pytest.mark.parametrize("case", range(8))
def test_boxes_with_ragged_edges(case, seed, launch):
    draw = random.Random(seed)
    shape, tile = ([draw.randint(2, 9) for _ in range(2)] for _ in range(2))
    types = [draw.choice(FLOATS if case % 2 else INTEGERS) for _ in range(3)]
    kernel = through_tile(shape, tile, types)
    for _ in range(5):
        r0, c0, r1, c1 = (draw.randint(-4, 9) for _ in range(4))
        a, b = random_tensor(shape, types[0]), random_tensor(shape, types[2])
        box = window(a, r0, c0, *tile).to(getattr(torch, types[1])).to(b.dtype)
        wanted = b.clone()
        for i in range(tile[0]):
            for j in range(tile[1]):
                if 0 <= r1 + i < shape[0] and 0 <= c1 + j < shape[1]:
                    wanted[r1 + i, c1 + j] = box[i, j]
        launch(kernel, r0, c0, r1, c1, a, b)
        torch.testing.assert_close(exact(b), exact(wanted), rtol=0, atol=0, equal_nan=True)


def test_dimensions_of_size_one_are_dropped(launch):
    @T.prim_func
    def kernel(K: T.Tensor((2, 10, 3, 4), "float32"), out: T.Tensor((1, 6, 4), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((6, 4), "float32")
            T.copy(K[1, 3:9, 2, :], tile)
            T.copy(tile, out)

    k, out = torch.randn(2, 10, 3, 4), torch.zeros(1, 6, 4)
    launch(kernel, k, out)
    assert torch.equal(out[0], k[1, 3:9, 2])


def test_head_addresses_take_the_other_extents(launch):
    @T.prim_func
    def kernel(A: T.Tensor((4, 5, 6), "float32"), B: T.Tensor((3, 6, 6), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_fragment((2, 3), "float32")
            row = T.alloc_fragment((3,), "float32")
            T.copy(A[1, 2, 3], tile)
            T.copy(tile, B[0, 1, 2])
            T.copy(A[3, 0, 0], row)
            T.copy(row, B[2, 5, 3])

    a, b = torch.randn(4, 5, 6), torch.zeros(3, 6, 6)
    launch(kernel, a, b)
    wanted = torch.zeros(3, 6, 6)
    wanted[0, 1:3, 2:5] = a[1, 2:4, 3:6]
    wanted[2, 5, 3:6] = a[3, 0, :3]
    assert torch.equal(b, wanted)


def test_elements_and_slices_of_tiles(launch):
    @T.prim_func
    def kernel(A: T.Tensor((8, 8), "float32"), B: T.Tensor((8, 8), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((8, 8), "float32")
            T.copy(A, tile)
            T.copy(tile[2:5, 1:4], B[0:3, 5:8])
            T.copy(A[7, 7], B[7, 0])
            B[4, :] = A[:, 3]
            B[5:7, 0:2] = tile[0:2, 0:2]

    a, b = torch.randn(8, 8), torch.zeros(8, 8)
    launch(kernel, a, b)
    wanted = torch.zeros(8, 8)
    wanted[0:3, 5:8], wanted[7, 0], wanted[4], wanted[5:7, 0:2] = a[2:5, 1:4], a[7, 7], a[:, 3], a[:2, :2]
    assert torch.equal(b, wanted)


def test_strided_tensors(launch):
    m, n, s = T.dynamic("m"), T.dynamic("n"), T.dynamic("s")

    @T.prim_func
    def kernel(A: T.StridedTensor((m, n), (1, s), "float32"), B: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(m, 4), T.ceildiv(n, 4)) as (bx, by):
            tile = T.alloc_shared((4, 4), "float32")
            T.copy(A[bx * 4, by * 4], tile)
            T.copy(tile, B[bx * 4, by * 4])

    a, b = torch.randn(7, 9), torch.zeros(9, 7)
    launch(kernel, a.T, b)
    assert torch.equal(b, a.T)


def test_overlapping_copy_reads_before_it_writes():
    """The meaning of a copy is that of whole tiles, also within one buffer."""

    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            T.copy(A[0:6], A[2:8])

    a = torch.arange(8.0)
    evaluate(kernel, a)
    assert a.tolist() == [0, 1, 0, 1, 2, 3, 4, 5]


def test_scheduling_hints_do_not_matter(launch):
    @T.prim_func
    def kernel(A: T.Tensor((4, 4), "float32"), B: T.Tensor((4, 4), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((4, 4), "float32")
            T.copy(A, tile, coalesced_width=2, disable_tma=True, eviction_policy="evict_first")
            T.copy(tile, B, prefer_instruction="sync", loop_layout=None)

    a, b = torch.randn(4, 4), torch.zeros(4, 4)
    launch(kernel, a, b)
    assert torch.equal(a, b)


def test_extents_must_agree(complaint):
    @T.prim_func
    def kernel(A: T.Tensor((8, 8), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((4, 8), "float32")
            T.copy(A[0:4, 0:7], tile)  # here

    assert "the source `A` (4, 7) and of the destination `tile` (4, 8)" in complaint(kernel, "copy_shape")


def test_only_memory_can_be_copied():
    with pytest.raises(TileError, match="the source \\(float\\) is not a buffer") as caught:

        @T.prim_func
        def kernel(A: T.Tensor((8,), "float32")):
            with T.Kernel(1) as _:
                T.copy(3.0, A)

    assert caught.value.code == "copy_values"


@pytest.mark.parametrize("dtype", ["int32", "float16"])
@pytest.mark.parametrize("sizes", [(16,), (3, 4), (2, 5)])
def test_a_threads_own_array(dtype, sizes):
    """Each thread copies all of its array: between memory and T.alloc_local nothing is shared among threads."""
    count = math.prod(sizes)

    @T.prim_func
    def kernel(A: T.Tensor((50, *sizes), dtype), B: T.Tensor((50, *sizes), dtype)):
        with T.Kernel(2, threads=32) as bx:
            at = bx * 32 + T.get_thread_binding()
            tile = T.alloc_shared((32, *sizes), dtype)
            own, back = T.alloc_local(sizes, dtype), T.alloc_local((count,), dtype)
            if at < 50:
                T.copy(A[(at, *[slice(None)] * len(sizes))], own)
                T.copy(own, tile[(at % 32, *[slice(None)] * len(sizes))])
                flat = T.reshape(tile, (32, count))
                T.copy(flat[at % 32, :], back)
                T.copy(T.reshape(back, sizes), B[(at, *[slice(None)] * len(sizes))])

    a, b = (
        torch.randint(-50, 50, (50, *sizes)).to(getattr(torch, dtype)),
        torch.zeros(50, *sizes).to(getattr(torch, dtype)),
    )
    for target in ("cuda:sm_80", "cuda:sm_90a"):
        findings = torch_tile.compile(kernel, target=target).interpret(a, b.zero_())
        assert not findings, findings.report()
        assert torch.equal(a, b)
