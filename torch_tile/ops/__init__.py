# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.tile.*`: PyTorch operators over our kernels.

Importing this registers every op; `torch_tile.ops.X(...)` is the documented Python form of `torch.ops.tile.X(...)`.
"""

from torch_tile.ops import families as families
from torch_tile.ops.functional import (
    add_rms_norm,
    attention,
    attention_backward,
    attention_lse,
    layer_norm,
    mla_decode,
    mla_decode_lse,
    mla_schedule,
    rms_norm,
    softmax,
)
from torch_tile.ops.products import dequant_gemm, gemm, grouped_gemm, k_grouped_gemm, linear, swiglu
from torch_tile.ops.sharding import register_when_imported

register_when_imported()

__all__ = [
    "add_rms_norm",
    "attention",
    "attention_backward",
    "attention_lse",
    "dequant_gemm",
    "gemm",
    "grouped_gemm",
    "k_grouped_gemm",
    "layer_norm",
    "linear",
    "mla_decode",
    "mla_decode_lse",
    "mla_schedule",
    "rms_norm",
    "softmax",
    "swiglu",
]
