# SPDX-License-Identifier: Apache-2.0
"""From Triton: the same kernel, and what each of Triton's ideas is called here.

| Triton | here |
|---|---|
| `tl.program_id(0)` | `with T.Kernel(blocks) as bx` |
| `tl.arange(0, B)` and pointers | `for i in T.Parallel(B)` and indices, `A[bx * B + i]` |
| `tl.load(p, mask=m, other=0)` | `A[i]`, `T.copy(A[i], tile)`: outside a tensor reads give 0 |
| `tl.store(p, x, mask=m)` | `A[i] = x`, `T.copy(tile, A[i])`: outside writes are dropped |
| `tl.dot(a, b, acc)` | `T.gemm(a, b, acc)` |
| `tl.sum(x, 1)`, `tl.max(x, 1)` | `T.reduce_sum(x, out, dim=1)`, `T.reduce_max(x, out, dim=1)` |
| `tl.where(c, a, b)` | `T.if_then_else(c, a, b)`, or `a if c else b` |
| `num_warps=4` | `threads=128` |
| `num_stages=3` of a launch | `T.Pipelined(n, num_stages=3)` of a loop |
| `tl.constexpr` | an argument of the outer function, or `T.const` |
| values in registers | `T.alloc_fragment`; shared memory is named as well: `T.alloc_shared` |
"""

# %%
# In Triton, the fused softmax of a matrix's rows reads
#
# ```python
# @triton.jit
# def softmax(y, x, stride, n, BLOCK: tl.constexpr):
#     row = tl.program_id(0)
#     cols = tl.arange(0, BLOCK)
#     v = tl.load(x + row * stride + cols, mask=cols < n, other=-float("inf"))
#     e = tl.exp(v - tl.max(v, axis=0))
#     tl.store(y + row * stride + cols, e / tl.sum(e, axis=0), mask=cols < n)
# ```
#
# Here tensors have shapes, so the mask is the shape's. BLOCK need not be a power of two.

import torch

import torch_tile
import torch_tile.language as T


@torch_tile.jit
def softmax(X):
    M, N = T.const("M, N")
    X: T.Tensor((M, N), "float32")
    Y = T.empty((M, N), "float32")
    with T.Kernel(M, threads=128) as row:
        v = T.alloc_fragment((N,), "float32")
        row_max = T.alloc_fragment((1,), "float32")
        row_sum = T.alloc_fragment((1,), "float32")
        T.copy(X[row, 0:N], v)
        T.reduce_max(v, row_max, dim=0)
        for i in T.Parallel(N):
            v[i] = T.exp(v[i] - row_max[0])
        T.reduce_sum(v, row_sum, dim=0)
        for i in T.Parallel(N):
            Y[row, i] = v[i] / row_sum[0]
    return Y


x = torch.randn(40, 777)
y = softmax(x)
torch.testing.assert_close(y, x.softmax(-1))
print(f"fused softmax of {tuple(x.shape)}: error {(y - x.double().softmax(-1)).abs().max():.1e}")

# %%
# An accumulation over blocks, `tl.atomic_add` in Triton, is `T.atomic_add`.


@torch_tile.jit
def total_of(X, S, block=256):
    N = T.const("N")
    X: T.Tensor((N,), "float32")
    S: T.Tensor((1,), "float32")
    with T.Kernel(T.ceildiv(N, block), threads=128) as bx:
        v = T.alloc_fragment((block,), "float32")
        part = T.alloc_fragment((1,), "float32")
        T.copy(X[bx * block], v)
        T.reduce_sum(v, part, dim=0)
        T.atomic_add(S[0], part[0])


x, s = torch.randn(5000), torch.zeros(1)
total_of(x, s)
torch.testing.assert_close(s[0], x.sum(), rtol=1e-4, atol=1e-3)
print(f"sum over {5000 // 256 + 1} blocks: error {abs(s[0].double() - x.double().sum()):.1e}")
