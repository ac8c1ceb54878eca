# SPDX-License-Identifier: Apache-2.0
"""One file per family of ops: checks, device and fake forms, backward. Importing this package registers all of them."""

from torch_tile.ops.families import (
    attention,
    dequant_gemm,
    fused_norm,
    gemm,
    grouped_gemm,
    mla_decode,
    mla_schedule,
    norm,
    softmax,
)

__all__ = [
    "attention",
    "dequant_gemm",
    "fused_norm",
    "gemm",
    "grouped_gemm",
    "mla_decode",
    "mla_schedule",
    "norm",
    "softmax",
]
