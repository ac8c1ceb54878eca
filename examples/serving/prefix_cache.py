# SPDX-License-Identifier: Apache-2.0
"""Share a prefix: several answers to one prompt read the same pages of latents, and write pages of their own."""

import torch

import torch_tile  # noqa: F401 - makes torch.ops.tile known

HEADS, PAGE, PROMPT, ANSWERS = 8, 16, 48, 3

shared = PROMPT // PAGE  # whole pages, which nobody writes again
pages = shared + ANSWERS
kv, k_pe = torch.randn(pages, PAGE, 512), torch.randn(pages, PAGE, 64)
table = torch.empty(ANSWERS, shared + 1, dtype=torch.int32)
table[:, :shared] = torch.arange(shared)
table[:, shared] = shared + torch.arange(ANSWERS)
lengths = PROMPT + torch.tensor([1, 9, 16], dtype=torch.int32)

q, q_pe = torch.randn(ANSWERS, 1, HEADS, 512), torch.randn(ANSWERS, 1, HEADS, 64)
out = torch.ops.tile.mla_decode(q, q_pe, kv, k_pe, table, lengths, scale=192**-0.5)
print("answer  positions  error against float64")
for n, length in enumerate(lengths.tolist()):
    latents = kv[table[n]].flatten(0, 1)[:length].double()
    keys = k_pe[table[n]].flatten(0, 1)[:length].double()
    scores = (q[n, 0].double() @ latents.T + q_pe[n, 0].double() @ keys.T) * 192**-0.5
    exact = scores.softmax(-1) @ latents
    torch.testing.assert_close(out[n, 0].double(), exact, rtol=1e-4, atol=1e-4)
    print(f"{n:6}  {length:9}  {(out[n, 0] - exact).abs().max():.1e}")
print(f"pages: {pages} instead of {ANSWERS * (shared + 1)}")
