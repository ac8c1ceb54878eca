# SPDX-License-Identifier: Apache-2.0
"""From TileLang: run a file as it stands, then change its import lines.

`torch_tile.compat.install()` serves `tilelang` and its modules to files that import them. Where TileLang itself is
installed and imported already, `install` raises ImportError.
"""

# %%
# A kernel in TileLang's words, with TileLang's imports.

import torch

from torch_tile.compat import install

install()

import tilelang
import tilelang.language as T


@tilelang.jit(out_idx=[-1])
def matmul_relu(M, N, K, block_M=64, block_N=64, block_K=32, dtype="float32", accum_dtype="float32"):
    @T.prim_func
    def main(A: T.Tensor((M, K), dtype), B: T.Tensor((K, N), dtype), C: T.Tensor((M, N), dtype)):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), dtype)
            B_shared = T.alloc_shared((block_K, block_N), dtype)
            C_local = T.alloc_fragment((block_M, block_N), accum_dtype)
            T.clear(C_local)
            for ko in T.Pipelined(T.ceildiv(K, block_K), num_stages=3):
                T.copy(A[by * block_M, ko * block_K], A_shared)
                T.copy(B[ko * block_K, bx * block_N], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            for i, j in T.Parallel(block_M, block_N):
                C_local[i, j] = T.max(C_local[i, j], 0)
            T.copy(C_local, C[by * block_M, bx * block_N])

    return main


a, b = torch.randn(100, 130), torch.randn(130, 90)
kernel = matmul_relu(100, 90, 130)
torch.testing.assert_close(kernel(a, b), torch.relu(a @ b), rtol=1e-4, atol=1e-4)

# %%
# The same objects under our own names: `import torch_tile as tilelang` is the only change that a file needs.

import torch_tile
import torch_tile.language

assert T is torch_tile.language
print(f"{type(kernel).__module__}.{type(kernel).__name__} for {kernel.target}")

# %%
# What there is more than in TileLang: errors with your line and a fix, runs on a CPU, and a simulator of threads.

checked = torch_tile.compile(matmul_relu.make(64, 64, 64), target="cuda:sm_80")
c = torch.empty(64, 64)
findings = checked.interpret(torch.randn(64, 64), torch.randn(64, 64), c)
print(f"threads of sm_80 in the simulator: {len(findings)} findings")
assert not findings
