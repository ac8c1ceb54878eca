# SPDX-License-Identifier: Apache-2.0
"""What reads outside of a tensor give."""

import pytest
import torch

import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError


@pytest.mark.parametrize("n, m", [(20, 30), (32, 32)])
def test_copies_and_elements(n, m, way):
    @T.prim_func
    def kernel(
        A: T.Tensor((n, m), "float32"), B: T.Tensor((n,), "int32"), C: T.Tensor((32, 32), "float16"),
        D: T.Tensor((36,), "int32"),
    ):  # fmt: skip
        with T.Kernel(2, threads=64) as bx:
            T.annotate_safe_value({A: -T.infinity("float32"), B: 7})
            tile, part = T.alloc_shared((16, 32), "float32"), T.alloc_fragment((16, 32), "float32")
            T.copy(A[bx * 16, 0], tile)
            T.copy(tile, part)
            T.copy(part, C[bx * 16, 0])
            if bx == 0:
                for i in T.Parallel(36):
                    D[i] = B[i - 2] + B[0]

    a, b = torch.randn(n, m), torch.arange(1, n + 1).int()
    c, d = torch.zeros(32, 32).half(), torch.zeros(36).int()
    way(kernel, a, b, c, d)
    wanted = torch.full((32, 32), -torch.inf)
    wanted[:n, :m] = a
    assert torch.equal(c, wanted.half())
    assert d.tolist() == [(b[i - 2].item() if 0 <= i - 2 < n else 7) + 1 for i in range(36)]


def test_a_kernel_annotates_its_own(way):
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32"), B: T.Tensor((2, 8), "float32")):
        with T.Kernel(1, threads=32):
            T.annotate_safe_value({A: 5})
            for i in T.Parallel(8):
                B[0, i] = A[i]
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                B[1, i] = A[i]

    b = torch.zeros(2, 8)
    way(kernel, torch.ones(4), b)
    assert b.tolist() == [[1.0] * 4 + [5.0] * 4, [1.0] * 4 + [0.0] * 4]


def test_only_tensors_have_an_outside():
    with pytest.raises(TileError, match="keys are tensors"):

        @T.prim_func
        def kernel(A: T.Tensor((4,), "float32")):
            with T.Kernel(1):
                T.annotate_safe_value({T.alloc_shared((4,), "float32"): 1.0})
