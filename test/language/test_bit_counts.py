# SPDX-License-Identifier: Apache-2.0
"""Counts and places of bits against Python's integers."""

import pytest
import torch

import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError

FFS, FNS = getattr(T, "__ffs"), getattr(T, "__fns")  # names that Python would mangle in a class


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint8", "int16"])
def test_counts(dtype, way, seed):
    @T.prim_func
    def kernel(x: T.Tensor((64,), dtype), ones: T.Tensor((64,), dtype), places: T.Tensor((2, 64), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                ones[i] = T.popcount(x[i])
                places[0, i] = T.clz(x[i])
                places[1, i] = FFS(x[i])

    kind = getattr(torch, dtype)
    width = kind.itemsize * 8
    numbers = [int(n) for n in torch.randint(0, 2**62, (64,)) >> torch.randint(0, 62, (64,))]
    numbers = [n | (1 << (width - 1)) if i % 3 == 0 else n for i, n in enumerate(numbers)]
    numbers[:3] = [0, 2**width - 1, 1 << (width - 1)]
    numbers = [n % 2**width for n in numbers]
    signed = [n - 2**width if kind.is_signed and n >= 2 ** (width - 1) else n for n in numbers]
    x, ones, places = torch.tensor(signed, dtype=kind), torch.zeros(64, dtype=kind), torch.zeros(2, 64).int()
    way(kernel, x, ones, places)
    assert ones.tolist() == [n.bit_count() for n in numbers]
    assert places[0].tolist() == [width - n.bit_length() for n in numbers]
    assert places[1].tolist() == [(n & -n).bit_length() for n in numbers]


def nth_set(mask, base, offset):
    """CUDA's __fns, bit by bit."""
    if offset == 0:
        return base if mask >> base & 1 else 0xFFFFFFFF
    places = range(base, 32) if offset > 0 else range(base, -1, -1)
    found = [p for p in places if mask >> p & 1]
    return found[abs(offset) - 1] if abs(offset) <= len(found) else 0xFFFFFFFF


def test_places_of_set_bits(way, seed):
    @T.prim_func
    def kernel(mask: T.Tensor((256,), "uint32"), at: T.Tensor((2, 256), "int32"), out: T.Tensor((256,), "uint32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(256):
                out[i] = FNS(mask[i], at[0, i], at[1, i])

    masks = torch.randint(0, 2**32, (256,)) & torch.randint(0, 2**32, (256,))
    masks[:8] = torch.tensor([0, 2**32 - 1] * 4)
    at = torch.stack((torch.randint(0, 32, (256,)), torch.randint(-8, 9, (256,)))).int()
    at[:, :4] = torch.tensor([[0, 31, 31, 0], [1, 1, -32, 32]])
    out = torch.zeros(256, dtype=torch.uint32)
    way(kernel, masks.to(torch.uint32), at, out)
    assert out.tolist() == [nth_set(m, *a) for m, a in zip(masks.tolist(), at.mT.tolist(), strict=True)]


def test_floats_have_no_count():
    with pytest.raises(TileError, match=r"T\.reinterpret"):

        @T.prim_func
        def kernel(x: T.Tensor((1,), "float32"), out: T.Tensor((1,), "int32")):
            with T.Kernel(1):
                out[0] = T.clz(x[0])
