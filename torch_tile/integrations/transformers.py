# SPDX-License-Identifier: Apache-2.0
"""`attn_implementation="tile"` for models of transformers; importing this module registers it.

A mask is None only where "causal, the last query at the last key" says everything; otherwise it is a bool tensor that
says everything itself. `attention_forward` relies on that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_MAPPING

import torch_tile.ops  # noqa: F401 - registers torch.ops.tile
from torch_tile.nn.functional import attend

Tensor = torch.Tensor
log: logging.Logger = logging.getLogger("torch_tile")
_told: set[str] = set()


def register_with_transformers() -> None:
    """Make `attn_implementation="tile"` known to transformers; may be called again."""
    AttentionInterface.register("tile", attention_forward)
    AttentionMaskInterface.register("tile", attention_mask)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' models call it.

    Args:
        module: the attention layer, whose `is_causal` counts if the argument is None.
        query: `[B, H, Sq, D]`.
        key: `[B, Hkv, Skv, D]`, not repeated.
        value: `[B, Hkv, Skv, Dv]`.
        attention_mask: as `attention_mask` below makes it, or floating and added to the scores.
        dropout: probability of dropping a weight.
        scaling: default `D ** -0.5`.
        is_causal: whether a position sees only itself and earlier ones; with a mask, the mask says so.
        sliding_window: how many positions a causal query sees, without a mask.
        softcap: bound of the scores (Gemma 2).
        s_aux: `[H]`, attention sinks (GPT-OSS).
        position_bias: broadcastable to `[B, H, Sq, Skv]`, added to the scores (T5).
        cache: a paged cache of continuous batching, which transformers' own sdpa takes.
        **kwargs: what other implementations use.

    Returns:
        `[B, Sq, H, Dv]`, and None in place of the weights, which are not computed.
    """
    if cache is not None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        tell('a paged cache is not supported by attn_implementation="tile": transformers\' sdpa is used')
        more = {"position_bias": position_bias, "cache": cache, "sliding_window": sliding_window, **kwargs}
        more |= {"softcap": softcap, "s_aux": s_aux}
        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **more
        )
        return out
    if kwargs.get("output_attentions", False):
        tell('attn_implementation="tile" does not compute attention weights; use "eager" for output_attentions=True')
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    mask = attention_mask
    if mask is not None:
        if mask.dim() != 4:
            raise ValueError(f'attention_mask is {tuple(mask.shape)}; attn_implementation="tile" wants four dimensions')
        mask, causal = mask[..., : key.shape[2]], False
    if position_bias is not None:
        bias = position_bias[..., : key.shape[2]]
        if mask is not None:
            bias = bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else bias + mask
        mask = bias
    window = sliding_window or 0 if causal else 0
    attended = attend(
        query, key, value, mask,
        causal=causal, scale=scaling, window=window, dropout=dropout, softcap=softcap, sinks=s_aux,
    )  # fmt: skip
    return attended.transpose(1, 2).contiguous(), None


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of a forward pass, or None where plain causal attention that ends with the keys says the same.

    Args:
        batch_size: B.
        q_length: Sq.
        kv_length: Skv.
        q_offset: position of the first query.
        kv_offset: position of the first key.
        mask_function: the pattern, given indices.
        attention_mask: `[B, positions]`, False at padding.
        local_size: of a sliding window or a chunk.
        allow_is_causal_skip: whether the pattern is causal with at most a window or chunks.
        **kwargs: what transformers' own `sdpa_mask` takes.

    Returns:
        None or bool `[B, 1, Sq, Skv]`, True where a query sees a key; for a model that computes attention by itself,
        and adds the mask to its scores, what `eager_mask` makes.
    """
    config = type(kwargs.get("config"))
    kwargs |= {
        "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset,
        "kv_offset": kv_offset, "mask_function": mask_function, "attention_mask": attention_mask,
    }  # fmt: skip
    if computes_itself(config):
        tell(f'models of {config.__name__} compute attention by themselves: attn_implementation="tile" changes nothing')
        numbers: Tensor = eager_mask(**kwargs)
        return numbers
    if allow_is_causal_skip and (local_size is None or kv_length < local_size):
        ends = not has_unknown_value(q_offset, kv_offset) and bool(q_offset + q_length == kv_offset + kv_length)
        if ends and not has_padding(attention_mask, kv_length, int(kv_offset)):
            return None
    mask: Tensor | None = sdpa_mask(local_size=local_size, allow_is_causal_skip=False, **kwargs)
    return mask


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # it reads source files
def computes_itself(config: type) -> bool:
    """Return whether models of a configuration never ask for an attention function, unchecked by transformers."""
    model: Any = MODEL_MAPPING.get(config, None)
    return hasattr(model, "_can_set_attn_implementation") and not model._can_set_attn_implementation()


def has_unknown_value(*values: int | Tensor) -> bool:
    """Return whether a position is a tensor without a readable value, as in a static cache while a graph is
    captured.
    """
    return is_tracing() and any(isinstance(value, torch.Tensor) for value in values)


def has_padding(mask: Tensor | None, length: int, offset: int) -> bool:
    """Return whether some of the keys may be padding; what cannot be known without reading values of a graph may be."""
    if mask is None:
        return False
    if is_tracing() or not isinstance(mask, torch.Tensor) or mask.is_meta:
        return True
    part = mask[:, offset : offset + length]
    return part.shape[-1] < length or not bool(part.all())


def is_tracing() -> bool:
    """Return whether values of tensors may not be read now."""
    return torch.compiler.is_compiling() or bool(torch._C._get_tracing_state())


def tell(message: str) -> None:
    """Warn once with a message."""
    if not torch.compiler.is_compiling() and message not in _told:
        _told.add(message)
        log.warning(message)


register_with_transformers()
