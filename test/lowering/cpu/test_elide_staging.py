# SPDX-License-Identifier: Apache-2.0
"""Right operands of products: read where they lie if that gives the same, else copied, with zeros beyond the bounds."""

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.lowering.cpu.elide_staging import read_in_place


def product(n, k, dtype="bfloat16", turned=True, columns=32, depth=32, b_type=None):
    """out[16, n] = a @ b by tiles of 16 x columns x depth."""
    shape, tile = ((n, k), (columns, depth)) if turned else ((k, n), (depth, columns))

    @T.prim_func
    def kernel(a: T.Tensor((16, k), dtype), b: b_type or T.Tensor(shape, dtype), out: T.Tensor((16, n), "float32")):
        with T.Kernel(T.ceildiv(n, columns)) as bx:
            left, right = T.alloc_shared((16, depth), dtype), T.alloc_shared(tile, dtype)
            sums = T.alloc_fragment((16, columns), "float32")
            T.clear(sums)
            for step in T.Pipelined(T.ceildiv(k, depth)):
                T.copy(a[0, step * depth], left)
                T.copy(b[bx * columns, step * depth] if turned else b[step * depth, bx * columns], right)
                T.gemm(left, right, sums, transpose_B=turned)
            T.copy(sums, out[0, bx * columns])

    return kernel


def test_what_lies_inside_is_read_in_place():
    @T.prim_func
    def before(b: T.Tensor((32, 32), "bfloat16"), out: T.Tensor((16, 32), "float32")):
        with T.Kernel(1) as _:
            left, right = T.alloc_shared((16, 32), "bfloat16"), T.alloc_shared((32, 32), "bfloat16")
            sums = T.alloc_fragment((16, 32), "float32")
            T.copy(b[0:32, 0:32], right)
            T.gemm(left, right, sums)
            T.copy(sums, out)

    assert "T.gemm(left, b, sums)" in repr(read_in_place(before.program))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_edges_are_zeros(dtype, turned, seed):
    """Sizes at run time, in and off the tiles' multiples: both forms of the product run, next to poison."""
    n, k = T.dynamic("n, k")
    kernel = torch_tile.compile(product(n, k, dtype, turned), target="cpu")
    assert kernel.get_kernel_source().count("tile::gemm<") == (2 if turned or dtype != "float32" else 1)
    kind = getattr(torch, dtype)
    for columns, depth in [(64, 64), (65, 64), (64, 65), (31, 33), (97, 1), (1, 97)]:
        whole = torch.full((columns * depth + 64,), torch.nan).to(kind)
        shape = (columns, depth) if turned else (depth, columns)
        b = whole[: columns * depth].view(shape)
        b.copy_(torch.randn(shape))
        a, out = torch.randn(16, depth).to(kind), torch.full((16, columns), torch.nan)
        kernel(a, b, out)
        want = a.double() @ (b.double().mT if turned else b.double())
        bound = (a.double().abs() @ (b.double().mT if turned else b.double()).abs()) * 2.0**-20
        assert ((out.double() - want).abs() <= bound).all(), (columns, depth)


def test_rows_that_are_not_packed_are_copied(keeps):
    """float32 in the order of the micro-kernel: a tile has its rows close together."""
    keeps(read_in_place, product(64, 64, "float32", turned=False))


def test_strided_elements_are_copied(keeps):
    n, k = T.dynamic("n, k")
    keeps(read_in_place, product(n, k, b_type=T.StridedTensor((n, k), (1, T.dynamic("s")), "bfloat16")))


def test_what_is_read_twice_or_written_is_copied(keeps):
    def kernel(twice: bool, writes: bool):
        @T.prim_func
        def kernel(b: T.Tensor((32, 32), "bfloat16"), out: T.Tensor((16, 32), "float32")):
            with T.Kernel(1) as _:
                left, right = T.alloc_shared((16, 32), "bfloat16"), T.alloc_shared((32, 32), "bfloat16")
                sums = T.alloc_fragment((16, 32), "float32")
                T.copy(b, right)
                if twice:
                    for i, j in T.Parallel(16, 32):
                        left[i, j] = right[i, j]
                if writes:
                    b[0, 0] = T.cast(1.0, "bfloat16")
                T.gemm(left, right, sums)
                T.copy(sums, out)

        return kernel

    keeps(read_in_place, kernel(True, False))
    keeps(read_in_place, kernel(False, True))
    text = repr(read_in_place(kernel(False, False).program))
    assert "T.gemm(left, b, sums)" in text
