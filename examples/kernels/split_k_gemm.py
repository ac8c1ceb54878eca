# SPDX-License-Identifier: Apache-2.0
"""Split-K: where a product has few tiles, several blocks share one, and the last of them adds up the parts."""

import torch

import torch_tile
import torch_tile.language as T


@torch_tile.jit(out_idx=[-1])
def split_k_of(M, N, K, splits=4, block_M=32, block_N=32, block_K=32):
    turns = -(-K // (splits * block_K))

    @T.prim_func
    def split_k(
        A: T.Tensor((M, K), "float32"),
        B: T.Tensor((K, N), "float32"),
        counters: T.Tensor((-(-M // block_M), -(-N // block_N)), "int32"),
        C: T.Tensor((M, N), "float32"),
    ):
        parts = T.alloc_global((splits, M, N), "float32")
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), splits, threads=128) as (bx, by, bz):
            a = T.alloc_shared((block_M, block_K), "float32")
            b = T.alloc_shared((block_K, block_N), "float32")
            c = T.alloc_fragment((block_M, block_N), "float32")
            T.clear(c)
            for k in T.Pipelined(turns, num_stages=2):
                T.copy(A[by * block_M, (bz * turns + k) * block_K], a)
                T.copy(B[(bz * turns + k) * block_K, bx * block_N], b)
                T.gemm(a, b, c)
            T.copy(c, parts[bz, by * block_M, bx * block_N])
            if T.arrive_last(counters[by, bx], splits):
                T.clear(c)
                for s in T.serial(splits):
                    for i, j in T.Parallel(block_M, block_N):
                        c[i, j] += parts[s, by * block_M + i, bx * block_N + j]
                T.copy(c, C[by * block_M, bx * block_N])

    return split_k


a, b = torch.randn(40, 1000), torch.randn(1000, 50)
c = split_k_of(40, 50, 1000)(a, b, torch.zeros(2, 2, dtype=torch.int32))
exact = a.double() @ b.double()
torch.testing.assert_close(c.double(), exact, rtol=1e-4, atol=1e-3)
print(f"M x N x K       splits  error against float64\n40 x 50 x 1000  {4:6}  {(c - exact).abs().max():.1e}")
