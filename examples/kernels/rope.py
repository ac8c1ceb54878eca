# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding in place: each pair of numbers is turned by an angle of its position (arXiv:2104.09864)."""

import torch

import torch_tile
import torch_tile.language as T


@torch_tile.jit
def rotate(X, base=10000.0):
    B, H, S, D = T.const("B, H, S, D")
    X: T.Tensor((B, H, S, D), "float32")
    half = D // 2
    with T.Kernel(S, H, B, threads=64) as (position, head, batch):
        x = T.alloc_fragment((D,), "float32")
        T.copy(X[batch, head, position, 0:D], x)
        for i in T.Parallel(half):
            angle = position * T.exp2(-T.log2(T.float32(base)) * i / half)
            X[batch, head, position, i] = x[i] * T.cos(angle) - x[i + half] * T.sin(angle)
            X[batch, head, position, i + half] = x[i + half] * T.cos(angle) + x[i] * T.sin(angle)


x = torch.randn(2, 3, 50, 64)
angles = torch.arange(50.0).double()[:, None] * 10000.0 ** (-torch.arange(32).double() / 32)
a, b = x.double().chunk(2, dim=-1)
exact = torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)
rotate(x)
torch.testing.assert_close(x.double(), exact, rtol=1e-4, atol=1e-4)
print(f"positions  head size  error against float64\n{50:9}  {64:9}  {(x - exact).abs().max():.1e}")
