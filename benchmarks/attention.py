# SPDX-License-Identifier: Apache-2.0
"""Attention and MLA decoding against torch. `python benchmarks/attention.py [--only NAME]`."""

import torch
import torch.nn.functional as F
from timer import arguments, report

from torch_tile.kernels.attention import attention
from torch_tile.kernels.mla_decode import mla_decode, reference

PROBLEMS = [  # name, dtype, batch, heads, key heads, queries, keys, head dim, causal
    ("prefill", torch.float32, 1, 8, 8, 1024, 1024, 64, False),
    ("prefill_causal", torch.float32, 1, 8, 8, 1024, 1024, 64, True),
    ("prefill_128", torch.float32, 1, 8, 2, 512, 512, 128, True),
    ("prefill_bf16", torch.bfloat16, 1, 8, 8, 512, 512, 64, True),
    ("decode", torch.float32, 1, 32, 8, 1, 2048, 128, False),
]


def main() -> None:
    options = arguments(__doc__)
    for name, dtype, batch, heads, kv_heads, q_len, kv_len, d, causal in PROBLEMS:
        if options.only not in name:
            continue
        q = torch.randn(batch, heads, q_len, d, dtype=dtype)
        k, v = (torch.randn(batch, kv_heads, kv_len, d, dtype=dtype) for _ in range(2))
        rivals = {
            "torch": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True),
            "tile": lambda: attention(q, k, v, causal=causal),
        }
        flops = 4.0 * batch * heads * q_len * kv_len * d * (0.5 if causal else 1.0)
        report(f"{name} {batch}x{heads}x{q_len}x{kv_len}x{d}", rivals, flops, seconds=options.seconds)
    if options.only in "mla_decode":
        q, q_pe = torch.randn(2, 1, 16, 512), torch.randn(2, 1, 16, 64)
        kv, k_pe = torch.randn(2, 1024, 512), torch.randn(2, 1024, 64)
        rivals = {"torch": lambda: reference(q, q_pe, kv, k_pe), "tile": lambda: mla_decode(q, q_pe, kv, k_pe)}
        report("mla_decode 2x16x1024x(512+64)", rivals, 2.0 * 2 * 16 * 1024 * (2 * 512 + 64), seconds=options.seconds)


if __name__ == "__main__":
    main()
