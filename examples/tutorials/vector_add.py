# SPDX-License-Identifier: Apache-2.0
"""Vector add: a first kernel, block by block.

A kernel says what one block does. This one adds 256 numbers; the grid has as many blocks as the vectors need.
"""

# %%
# Import the language as `T`. The decorator compiles the function at its first call.

import torch

import torch_tile
import torch_tile.language as T


@torch_tile.jit
def add(A, B, block=256):
    N = T.const("N")  # a size that the compiler learns from the tensors
    A: T.Tensor((N,), "float32")
    B: T.Tensor((N,), "float32")
    C = T.empty((N,), "float32")  # allocated at each call, and returned
    with T.Kernel(T.ceildiv(N, block), threads=128) as bx:
        for i in T.Parallel(block):  # iterations are shared out to the threads of the block
            C[bx * block + i] = A[bx * block + i] + B[bx * block + i]
    return C


# %%
# 1000 is no multiple of 256. Reads past the end give 0 and writes there are dropped, so the last block needs no code.

a, b = torch.randn(1000), torch.randn(1000)
c = add(a, b)
torch.testing.assert_close(c, a + b)
print(f"largest difference from torch: {(c - (a + b)).abs().max():.0e}")

# %%
# A compiled kernel shows itself: as the language, and as the C++ (or CUDA C++) that was generated from it.

kernel = add.compile(N=1000)
print(kernel.script())
print(f"{len(kernel.get_kernel_source().splitlines())} lines of C++")
