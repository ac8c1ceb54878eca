# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMM: rows that a router sorted by expert, each run of rows times its expert's matrix."""

import torch

import torch_tile
import torch_tile.language as T


@torch_tile.jit(out_idx=[-1])
def grouped_of(experts, N, K, block_M=32, block_N=64, block_K=32):
    M, tiles = T.dynamic("M, tiles")

    @T.prim_func
    def grouped(
        X: T.Tensor((M, K), "float32"),
        W: T.Tensor((experts, K, N), "float32"),
        expert_of: T.Tensor((tiles,), "int32"),  # of each tile of rows
        first: T.Tensor((tiles,), "int32"),  # row of each tile
        stop: T.Tensor((tiles,), "int32"),  # end of the expert's rows
        Y: T.Tensor((M, N), "float32"),
    ):
        with T.Kernel(T.ceildiv(N, block_N), tiles, threads=128) as (bx, by):
            x = T.alloc_shared((block_M, block_K), "float32")
            w = T.alloc_shared((block_K, block_N), "float32")
            y = T.alloc_fragment((block_M, block_N), "float32")
            T.clear(y)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                T.copy(X[first[by], k * block_K], x)
                T.copy(W[expert_of[by], k * block_K, bx * block_N], w)
                T.gemm(x, w, y)
            for i, j in T.Parallel(block_M, block_N):
                if first[by] + i < stop[by] and bx * block_N + j < N:
                    Y[first[by] + i, bx * block_N + j] = y[i, j]

    return grouped


def tiles_of(counts, block=32):
    """The expert, the first row and the end of each tile."""
    found, row = [], 0
    for expert, count in enumerate(counts):
        found += [(expert, row + start, row + count) for start in range(0, count, block)]
        row += count
    return torch.tensor(found, dtype=torch.int32).T.contiguous()


counts = [40, 0, 7, 65]
x, w = torch.randn(sum(counts), 70), torch.randn(len(counts), 70, 90)
y = grouped_of(len(counts), 90, 70)(x, w, *tiles_of(counts))
exact = torch.cat([rows.double() @ m.double() for rows, m in zip(x.split(counts), w, strict=True)])
torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-3)
print(f"rows of each expert  error against float64\n{counts!s:<19}  {(y - exact).abs().max():.1e}")
