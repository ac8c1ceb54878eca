# SPDX-License-Identifier: Apache-2.0
"""A stencil: one step of heat flow on a grid whose border is zero, from a tile with a rim."""

import torch

import torch_tile
import torch_tile.language as T


@torch_tile.jit
def heat_step(U, alpha=0.1, block=32):
    H, W = T.const("H, W")
    U: T.Tensor((H, W), "float32")
    V = T.empty((H, W), "float32")
    with T.Kernel(T.ceildiv(W, block), T.ceildiv(H, block), threads=128) as (bx, by):
        u = T.alloc_shared((block + 2, block + 2), "float32")
        T.copy(U[by * block - 1, bx * block - 1], u)  # outside of the grid reads give 0
        for i, j in T.Parallel(block, block):
            flow = u[i, j + 1] + u[i + 2, j + 1] + u[i + 1, j] + u[i + 1, j + 2] - 4 * u[i + 1, j + 1]
            V[by * block + i, bx * block + j] = u[i + 1, j + 1] + alpha * flow
    return V


u = torch.randn(70, 45)
weights = torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]]).double()
exact = u.double() + 0.1 * torch.nn.functional.conv2d(u.double()[None, None], weights[None, None], padding=1)[0, 0]
v = heat_step(u)
torch.testing.assert_close(v.double(), exact, rtol=1e-5, atol=1e-5)
print(f"grid     error against float64\n70 x 45  {(v - exact).abs().max():.1e}")
