# SPDX-License-Identifier: Apache-2.0
"""Our kernels, in our language, by family.

The module of a family has its entry functions and a plain-torch `reference`.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch

FAMILIES = {
    "attention": "attention.forward",
    "attention_backward": "attention.backward",
    "attention_block_sparse": "attention.block_sparse",
    "attention_fp8": "attention.fp8",
    "attention_paged": "attention.paged",
    "attention_varlen": "attention.varlen",
    "causal_conv1d": "ssm.conv",
    "cross_entropy": "loss.cross_entropy",
    "dequant_gemm": "gemm.dequant",
    "fused_norm": "norm.fused",
    "fused_norm_quantize": "norm.fused_quantize",
    "gated_delta_rule": "linear_attention.delta",
    "gated_delta_rule_backward": "linear_attention.delta_backward",
    "gated_delta_rule_step": "linear_attention.step",
    "gated_linear_attention": "linear_attention.linear",
    "gemm": "gemm.gemm",
    "group_tokens": "moe.group",
    "grouped_dequant_gemm": "gemm.grouped_dequant",
    "grouped_gemm": "gemm.grouped",
    "grouped_scaled_gemm": "gemm.grouped_scaled",
    "k_grouped_gemm": "gemm.grouped_wgrad",
    "lightning_index": "mla.indexer",
    "linear_cross_entropy": "loss.linear_cross_entropy",
    "masked_scaled_gemm": "gemm.masked_scaled",
    "mla_decode": "mla.decode",
    "mla_packed": "mla.packed",
    "mla_schedule": "mla.scheduler",
    "norm": "norm.norm",
    "nsa_select": "attention.nsa",
    "quantize_fp8": "norm.quantize",
    "route": "moe.route",
    "rwkv7": "linear_attention.rwkv7",
    "scaled_gemm": "gemm.scaled",
    "selective_state_update": "ssm.update",
    "softmax": "norm.softmax",
    "ssd_chunk_scan": "ssm.ssd",
}
"""Families of kernels, and the module of each with its entry functions and its `reference`."""


@functools.cache
def kernels(family: str) -> ModuleType:
    """Import the module of a family when it is first asked for."""
    return importlib.import_module(f"torch_tile.kernels.{FAMILIES[family]}")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float64 for float64 operands, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
