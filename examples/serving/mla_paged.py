# SPDX-License-Identifier: Apache-2.0
"""Serve MLA with a paged cache: sequences of different lengths, pages given out as they grow, one step for all."""

import torch

from torch_tile.nn import MLAAttention, PagedLatents

HEADS, LATENT, ROPE, PAGE, PAGES = 8, 64, 16, 16, 24


class Pages:
    """The owner of the table: which page holds which positions of which sequence."""

    def __init__(self, sequences, most):
        self.free = list(torch.randperm(PAGES).tolist())  # any order does
        self.table = torch.full((sequences, most), -1, dtype=torch.int32)

    def grow(self, sequence, positions):
        """Give pages to a sequence until it has room for so many positions."""
        for n in range(-(-positions // PAGE)):
            if self.table[sequence, n] < 0:
                self.table[sequence, n] = self.free.pop()


def angles(start, length):
    """cos and sin of positions from `start` on, `[1, length, ROPE]`."""
    rates = 10000.0 ** (-torch.arange(ROPE // 2) / (ROPE // 2))
    turned = (torch.arange(start, start + length)[:, None] * rates).repeat(1, 2)[None]
    return turned.cos(), turned.sin()


layer = MLAAttention(
    128, HEADS, q_lora_rank=48, kv_lora_rank=LATENT, qk_nope_head_dim=32, qk_rope_head_dim=ROPE, v_head_dim=32
).eval()
lengths, new = [19, 5, 33], 6
inputs = [torch.randn(1, n + new, 128) for n in lengths]

with torch.no_grad():
    # What each sequence gives by itself, without a cache: ordinary attention over expanded keys and values.
    exact = [layer(x, angles(0, x.shape[1]))[0] for x in inputs]

    pages = Pages(len(lengths), 4)
    cache = PagedLatents(1, PAGES, PAGE, LATENT, ROPE, pages.table)
    errors = []
    for n, length in enumerate(lengths):  # prompts come one by one
        pages.grow(n, length)
        cache.block_table[n] = pages.table[n]
        own = cache.sequences(slice(n, n + 1))
        out = layer(inputs[n][:, :length], angles(0, length), cache=own)[0]
        own.advance(length)
        errors.append((out - exact[n][:, :length]).abs().max().item())
    cache.is_empty = False
    for step in range(new):  # then all sequences decode together
        for n, length in enumerate(lengths):
            pages.grow(n, length + step + 1)
        cache.block_table.copy_(pages.table)
        x = torch.cat([inputs[n][:, length + step :][:, :1] for n, length in enumerate(lengths)])
        each = [angles(length + step, 1) for length in lengths]
        rope = tuple(torch.cat(part) for part in zip(*each, strict=True))
        out = layer(x, rope, cache=cache)[0]
        cache.advance(1)
        wanted = torch.cat([exact[n][:, length + step :][:, :1] for n, length in enumerate(lengths)])
        torch.testing.assert_close(out, wanted, rtol=1e-3, atol=1e-4)
        errors.append((out - wanted).abs().max().item())
print("sequence  positions  pages")
for n, length in enumerate(cache.seq_lens.tolist()):
    print(f"{n:8}  {length:9}  {[page for page in pages.table[n].tolist() if page >= 0]}")
print(f"largest difference from attention without a cache: {max(errors):.1e}")
