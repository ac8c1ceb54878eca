# SPDX-License-Identifier: Apache-2.0
"""Layers over `torch.ops.tile`, named and parametrised as the stock ones, so that their checkpoints load.

They work in eager mode, under `torch.compile` with any backend, in training and inference.
"""

from typing import Any

import torch_tile.ops  # noqa: F401 - registers torch.ops.tile
from torch_tile.nn.attention import Attention, PagedLatents
from torch_tile.nn.experts import Float8Experts, QuantizedExperts
from torch_tile.nn.linear import GatedMLP, Linear, SwiGLU
from torch_tile.nn.linear_attention import (
    chunk_dplr_delta_rule,
    chunk_gated_delta_rule,
    chunk_gla,
    chunk_kda,
    chunk_lightning_attn,
    chunk_linear_attn,
    chunk_retention,
    chunk_rwkv7,
    chunk_simple_gla,
    fused_mul_recurrent_rwkv7,
    fused_recurrent_dplr_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gla,
    fused_recurrent_kda,
    fused_recurrent_simple_gla,
)
from torch_tile.nn.loss import CrossEntropyLoss, LinearCrossEntropyLoss, cross_entropy, linear_cross_entropy
from torch_tile.nn.mla import MLAAttention
from torch_tile.nn.norm import LayerNorm, RMSNorm
from torch_tile.nn.quantized import Float8Linear, Int8Linear, QuantizedLinear
from torch_tile.nn.scans import (
    causal_conv1d_fn,
    causal_conv1d_update,
    mamba_chunk_scan_combined,
    selective_state_update,
)
from torch_tile.nn.sparse_attention import parallel_nsa

__all__ = [
    "Attention",
    "CrossEntropyLoss",
    "Float8Experts",
    "Float8Linear",
    "GatedMLP",
    "Int8Linear",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropyLoss",
    "MLAAttention",
    "PagedLatents",
    "QuantizedExperts",
    "QuantizedLinear",
    "RMSNorm",
    "SwiGLU",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_dplr_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "chunk_lightning_attn",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_rwkv7",
    "chunk_simple_gla",
    "cross_entropy",
    "fused_mul_recurrent_rwkv7",
    "fused_recurrent_dplr_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gla",
    "fused_recurrent_kda",
    "fused_recurrent_simple_gla",
    "linear_cross_entropy",
    "mamba_chunk_scan_combined",
    "parallel_nsa",
    "selective_state_update",
]


def __getattr__(name: str) -> Any:
    """Name the nearest of `__all__` for a name that is not there."""
    from torch_tile.diagnostics.spelling import missing_name

    raise missing_name(__name__, name, __all__)
