# SPDX-License-Identifier: Apache-2.0
"""A diffusion transformer's block in plain torch: adaptive norms, attention and gates, sampled for a few steps."""

import torch
from torch import nn

import torch_tile.nn

WIDTH, HEADS = 96, 4


class DiTBlock(nn.Module):
    """Peebles and Xie's block with adaLN-Zero (arXiv:2212.09748)."""

    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH))
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(c)[:, None].chunk(6, dim=-1)
        h = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(h).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        h = self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + gate1 * h
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


def sample(block, noise, steps):
    """A few Euler steps along the block's velocity; each time has an embedding of its own."""
    x = noise
    for step in range(steps):
        angles = (step / steps) * torch.arange(WIDTH // 2) * 0.1
        c = torch.cat([angles.cos(), angles.sin()]).expand(len(x), -1)
        x = x - block(x, c) / steps
    return x


block, noise = DiTBlock().eval(), torch.randn(2, 64, WIDTH)
with torch.no_grad():
    print(torch_tile.explain(block, noise, torch.randn(2, WIDTH)))
    exact = sample(block, noise, 4)
    ours = sample(torch.compile(block, backend="tile", options={"select": "tile"}), noise, 4)
torch.testing.assert_close(ours, exact, rtol=1e-3, atol=1e-4)
print(f"4 steps: largest difference from eager {(ours - exact).abs().max():.1e}")
