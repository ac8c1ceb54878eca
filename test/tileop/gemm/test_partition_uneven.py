# SPDX-License-Identifier: Apache-2.0
"""Products by numbers of warps that do not share the tile evenly: idle warps, and no element left out."""

import pytest
import torch

import torch_tile
import torch_tile.language as T

SIZES = [(16, 104, 384), (288, 8, 544), (336, 8, 640), (16, 16, 224), (64, 104, 384), (336, 16, 640)]


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
@pytest.mark.parametrize("policy", [T.GemmWarpPolicy.Square, T.GemmWarpPolicy.FullRow, T.GemmWarpPolicy.FullCol])
@pytest.mark.parametrize(("m", "n", "threads"), SIZES)
def test_every_element_is_computed(m, n, threads, policy, target, seed):
    k = 32

    @T.prim_func
    def kernel(A: T.Tensor((m, k), "float16"), B: T.Tensor((k, n), "float16"), C: T.Tensor((m, n), "float32")):
        with T.Kernel(1, threads=threads):
            a, b = T.alloc_shared((m, k), "float16"), T.alloc_shared((k, n), "float16")
            c = T.alloc_fragment((m, n), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.clear(c)
            T.gemm(a, b, c, policy=policy)
            T.copy(c, C)

    a, b, c = torch.randn(m, k).half(), torch.randn(k, n).half(), torch.full((m, n), torch.nan)
    findings = torch_tile.compile(kernel, target=target).interpret(a, b, c)
    assert not findings, findings.report()
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-4)
