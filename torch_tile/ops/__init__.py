# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.tile.*`: PyTorch operators over our kernels.

`torch_tile.ops.X(...)` is the documented Python form of `torch.ops.tile.X(...)`. The modules of `families` declare the
ops. `import torch_tile` imports them all (`all_families`); this module imports none, it looks their forms up.

Common to all: tensors are float16, bfloat16, float32 or float64, of any strides, on one device. Sums are kept in
float32 (float64 for float64). Results are fresh and, but for attention's, contiguous. Empty tensors give empty or zero
results. `scaled_gemm`, `grouped_scaled_gemm`, `k_grouped_scaled_gemm`, `masked_scaled_gemm`, `quantize_fp8`,
`quantize_int8`, `silu_mul_quantize`, `fused_norm_quantize`, `mla_decode_fp8` and `attention_fp8` have no gradients.
Their operands or results are rounded. Log-sum-exps and lists have none either; all other results do. A refused argument
raises RuntimeError (shapes, devices), TypeError (dtypes, None for a tensor), ValueError (strings and numbers) or
IndexError (`dim`). The message names the argument, what was got and what is wanted. Under autocast, products follow its
dtype as `F.linear` does; norms and softmax run in float32 on CUDA.
"""

from typing import TYPE_CHECKING, Any

from torch_tile.ops.registry import FORMS

if TYPE_CHECKING:
    from torch_tile.ops.families.append_to_pages import append_to_pages
    from torch_tile.ops.families.attention import attention, attention_backward, attention_lse
    from torch_tile.ops.families.attention_block_sparse import (
        attention_block_sparse,
        attention_block_sparse_backward,
        attention_block_sparse_lse,
    )
    from torch_tile.ops.families.attention_fp8 import attention_fp8
    from torch_tile.ops.families.attention_paged import attention_paged, attention_paged_lse
    from torch_tile.ops.families.attention_varlen import (
        attention_varlen,
        attention_varlen_backward,
        attention_varlen_lse,
    )
    from torch_tile.ops.families.causal_conv1d import causal_conv1d, causal_conv1d_backward, causal_conv1d_update
    from torch_tile.ops.families.conv import conv
    from torch_tile.ops.families.cross_entropy import cross_entropy, cross_entropy_backward
    from torch_tile.ops.families.delta_rule import gated_delta_rule, gated_delta_rule_backward, gated_delta_rule_step
    from torch_tile.ops.families.dequant_gemm import dequant_gemm
    from torch_tile.ops.families.fused_norm_quantize import fused_norm_quantize
    from torch_tile.ops.families.gemm import gemm, linear, swiglu
    from torch_tile.ops.families.grouped_dequant_gemm import grouped_dequant_gemm
    from torch_tile.ops.families.grouped_gemm import grouped_gemm, k_grouped_gemm
    from torch_tile.ops.families.grouped_scaled_gemm import grouped_scaled_gemm
    from torch_tile.ops.families.k_grouped_scaled_gemm import k_grouped_scaled_gemm
    from torch_tile.ops.families.lightning_index import index_scores, lightning_index
    from torch_tile.ops.families.linear_attention import (
        gated_linear_attention,
        gated_linear_attention_backward,
        gated_linear_attention_step,
    )
    from torch_tile.ops.families.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_gradients
    from torch_tile.ops.families.masked_scaled_gemm import masked_scaled_gemm
    from torch_tile.ops.families.mla_decode import mla_decode, mla_decode_lse, mla_schedule
    from torch_tile.ops.families.mla_packed import append_latents, mla_decode_fp8, mla_sparse, pack_latents
    from torch_tile.ops.families.norm import add_rms_norm, layer_norm, rms_norm, softmax
    from torch_tile.ops.families.nsa_select import nsa_select
    from torch_tile.ops.families.quantize_fp8 import quantize_fp8, quantize_int8
    from torch_tile.ops.families.route import group_tokens, route
    from torch_tile.ops.families.rwkv7 import rwkv7, rwkv7_backward, rwkv7_step
    from torch_tile.ops.families.scaled_gemm import scaled_gemm
    from torch_tile.ops.families.silu_mul_quantize import silu_mul_quantize
    from torch_tile.ops.families.ssd import selective_state_update, ssd_chunk_scan, ssd_chunk_scan_backward

__all__ = [
    "add_rms_norm",
    "append_latents",
    "append_to_pages",
    "attention",
    "attention_backward",
    "attention_block_sparse",
    "attention_block_sparse_backward",
    "attention_block_sparse_lse",
    "attention_fp8",
    "attention_lse",
    "attention_paged",
    "attention_paged_lse",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_varlen_lse",
    "causal_conv1d",
    "causal_conv1d_backward",
    "causal_conv1d_update",
    "conv",
    "cross_entropy",
    "cross_entropy_backward",
    "dequant_gemm",
    "fused_norm_quantize",
    "gated_delta_rule",
    "gated_delta_rule_backward",
    "gated_delta_rule_step",
    "gated_linear_attention",
    "gated_linear_attention_backward",
    "gated_linear_attention_step",
    "gemm",
    "group_tokens",
    "grouped_dequant_gemm",
    "grouped_gemm",
    "grouped_scaled_gemm",
    "index_scores",
    "k_grouped_gemm",
    "k_grouped_scaled_gemm",
    "layer_norm",
    "lightning_index",
    "linear",
    "linear_cross_entropy",
    "linear_cross_entropy_gradients",
    "masked_scaled_gemm",
    "mla_decode",
    "mla_decode_fp8",
    "mla_decode_lse",
    "mla_schedule",
    "mla_sparse",
    "nsa_select",
    "pack_latents",
    "quantize_fp8",
    "quantize_int8",
    "rms_norm",
    "route",
    "rwkv7",
    "rwkv7_backward",
    "rwkv7_step",
    "scaled_gemm",
    "selective_state_update",
    "silu_mul_quantize",
    "softmax",
    "ssd_chunk_scan",
    "ssd_chunk_scan_backward",
    "swiglu",
]


def __getattr__(name: str) -> Any:
    """Return the documented form of an operator; name the nearest of `__all__` for a name that is not there."""
    if name not in FORMS:
        from torch_tile.diagnostics.spelling import missing_name

        raise missing_name(__name__, name, __all__)
    found = globals()[name] = FORMS[name]
    return found
