# SPDX-License-Identifier: Apache-2.0
"""Tune and measure: let the machine choose tile sizes, then time the winner against torch.

`torch_tile.autotune` compiles the configurations that its cost model does not rule out, checks each against a reference
and times them by turns. The outcome is remembered on disk.
"""

# %%
# The tunable arguments have defaults, so a call may leave them out.

import torch

import torch_tile
import torch_tile.language as T

CONFIGS = [{"block_M": m, "block_N": n} for m in (32, 64) for n in (32, 64)]


@torch_tile.autotune(configs=CONFIGS, warmup=2, rep=10, ref_prog=lambda a, b: a @ b)
@torch_tile.jit(out_idx=[-1])
def matmul(M, N, K, block_M=64, block_N=64, block_K=64):
    @T.prim_func
    def main(A: T.Tensor((M, K), "float32"), B: T.Tensor((K, N), "float32"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            a = T.alloc_shared((block_M, block_K), "float32")
            b = T.alloc_shared((block_K, block_N), "float32")
            c = T.alloc_fragment((block_M, block_N), "float32")
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                T.copy(A[by * block_M, k * block_K], a)
                T.copy(B[k * block_K, bx * block_N], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * block_M, bx * block_N])

    return main


# %%
# The first call searches; `tune` gives the table of all that was tried. The shell does the same for other sizes:
# `python -m torch_tile tune examples/tutorials/tune_and_measure.py:matmul 512 512 512` imports this file.

if __name__ == "__main__":
    kernel = matmul(256, 256, 256)
    print(matmul.tune(256, 256, 256))
    print(f"chosen: {kernel.config}")

    # Measure with `do_bench`, in milliseconds. Say the shape, the machine and the rival with every number.

    a, b = torch.randn(256, 256), torch.randn(256, 256)
    torch.testing.assert_close(kernel(a, b), a @ b, rtol=1e-4, atol=1e-4)
    ours = torch_tile.do_bench(lambda: kernel(a, b), warmup=5, rep=20)
    torchs = torch_tile.do_bench(lambda: a @ b, warmup=5, rep=20)
    print(f"256 x 256 x 256 float32, {torch.get_num_threads()} threads: ours {ours:.3f} ms, torch {torchs:.3f} ms")
