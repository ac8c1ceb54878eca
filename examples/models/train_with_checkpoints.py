# SPDX-License-Identifier: Apache-2.0
"""Train with gradient checkpointing: layers of torch_tile.nn, AdamW, and the same losses as stock layers."""

import copy

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_tile

WIDTH, HEADS, VOCABULARY = 64, 4, 128


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)  # activations are computed again in the backward
        return self.head(x)


def train(model, ids, steps=5):
    """Next-token losses of AdamW's steps."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(steps):
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


stock, ids = Model(), torch.randint(0, VOCABULARY, (2, 33))
ours = copy.deepcopy(stock)
print("\n".join(str(change) for change in torch_tile.replace_layers(ours)))
wanted, found = train(stock, ids), train(ours, ids)
print("step  stock   tile")
for step, (a, b) in enumerate(zip(wanted, found, strict=True)):
    print(f"{step:4}  {a:.4f}  {b:.4f}")
    assert abs(a - b) < 1e-2
assert found[-1] < found[0]
