# SPDX-License-Identifier: Apache-2.0
"""Attention and MLA decoding against torch.

`python benchmarks/attention.py [--only NAME] [--seconds S]`
"""

from functools import partial

import torch
import torch.nn.functional as F
from timer import arguments, report

from torch_tile.kernels.attention import attention
from torch_tile.kernels.mla_decode import mla_decode, reference

PROBLEMS = [  # name, dtype, heads, key heads, queries, keys, head dim, causal, mask
    ("prefill", torch.float32, 8, 8, 1024, 1024, 64, False, None),
    ("prefill_causal", torch.float32, 8, 8, 1024, 1024, 64, True, None),
    ("prefill_bool", torch.float32, 8, 8, 512, 512, 64, False, torch.bool),
    ("prefill_float", torch.float32, 8, 8, 512, 512, 64, False, torch.float32),
    ("prefill_128", torch.float32, 8, 2, 512, 512, 128, True, None),
    ("prefill_bf16", torch.bfloat16, 8, 8, 512, 512, 64, True, None),
    ("decode", torch.float32, 32, 8, 1, 2048, 128, False, None),
]


def time_attention(
    name: str, dtype: torch.dtype, heads: int, kv_heads: int, q_len: int, kv_len: int, d: int, causal: bool,
    mask_dtype: torch.dtype | None, seconds: float,
) -> None:  # fmt: skip
    q, k, v = (torch.randn(1, *s, d, dtype=dtype) for s in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len)))
    mask = None if mask_dtype is None else torch.randn(q_len, kv_len)
    mask = mask > 0 if mask is not None and mask_dtype == torch.bool else mask
    rivals = {
        "torch": partial(F.scaled_dot_product_attention, q, k, v, mask, is_causal=causal, enable_gqa=True),
        "tile": partial(attention, q, k, v, mask, causal),
    }
    flops = 4.0 * heads * q_len * kv_len * d * (0.5 if causal else 1.0)
    report(f"{name} {heads}x{q_len}x{kv_len}x{d}", rivals, flops, seconds=seconds)


def main() -> None:
    options = arguments(__doc__)
    for name, *problem in PROBLEMS:
        if options.only in name:
            time_attention(name, *problem, options.seconds)
    if options.only in "mla_decode":
        q, q_pe = torch.randn(2, 1, 16, 512), torch.randn(2, 1, 16, 64)
        kv, k_pe = torch.randn(2, 1024, 512), torch.randn(2, 1024, 64)
        rivals = {"torch": partial(reference, q, q_pe, kv, k_pe), "tile": partial(mla_decode, q, q_pe, kv, k_pe)}
        report("mla_decode 2x16x1024x(512+64)", rivals, 2.0 * 2 * 16 * 1024 * (2 * 512 + 64), seconds=options.seconds)


if __name__ == "__main__":
    main()
