# SPDX-License-Identifier: Apache-2.0
"""Softmax: reductions over a tile, and one compilation for all numbers of rows.

The lazy style: an outer function takes what is known at compile time and returns the kernel.
"""

# %%
# A block takes one row into a fragment, which lies in the registers of its threads. `T.dynamic` names a size that
# stays open until the call.

import torch

import torch_tile
import torch_tile.language as T


@torch_tile.jit(out_idx=[-1])  # the last parameter is allocated and returned
def softmax_of(columns, dtype="float32"):
    rows = T.dynamic("rows")

    @T.prim_func
    def softmax(X: T.Tensor((rows, columns), dtype), Y: T.Tensor((rows, columns), dtype)):
        with T.Kernel(rows, threads=128) as row:
            x = T.alloc_fragment((1, columns), "float32")
            row_max = T.alloc_fragment((1,), "float32")
            row_sum = T.alloc_fragment((1,), "float32")
            T.copy(X[row, 0], x)
            T.reduce_max(x, row_max, dim=1)
            for i, j in T.Parallel(1, columns):
                x[i, j] = T.exp(x[i, j] - row_max[i])  # at most 1, so nothing overflows
            T.reduce_sum(x, row_sum, dim=1)
            for i, j in T.Parallel(1, columns):
                x[i, j] = x[i, j] / row_sum[i]
            T.copy(x, Y[row, 0])

    return softmax


# %%
# One kernel serves 3 rows and 500.

softmax = softmax_of(781)
print("rows  error against float64")
for rows in (3, 500):
    x = torch.randn(rows, 781) * 10
    exact = torch.softmax(x.double(), -1)
    y = softmax(x)
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-7)
    print(f"{rows:4}  {(y - exact).abs().max():.1e}")

# %%
# The library has this kernel tuned: `torch.ops.tile.softmax(x, -1)` takes any dimension and has a gradient.

torch.testing.assert_close(torch.ops.tile.softmax(x, -1), torch.softmax(x, -1))
