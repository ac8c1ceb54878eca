# SPDX-License-Identifier: Apache-2.0
"""A vision transformer in plain torch: what the backend replaces in it, and the error against float64."""

import copy

import torch
from torch import nn

import torch_tile

WIDTH, HEADS, PATCH = 96, 4, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, size=32, classes=10):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, (size // PATCH) ** 2 + 1, WIDTH) * 0.02)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


model, images = ViT().eval(), torch.randn(2, 3, 32, 32)
with torch.no_grad():
    print(torch_tile.explain(model, images))
    exact = copy.deepcopy(model).double()(images.double())
    ours = torch.compile(model, backend="tile", options={"select": "tile"})(images)
    error, eager = (ours - exact).abs().max().item(), (model(images) - exact).abs().max().item()
torch.testing.assert_close(ours.double(), exact, rtol=1e-3, atol=1e-4)
print(f"error against float64: tile {error:.1e}, eager {eager:.1e}")
