# SPDX-License-Identifier: Apache-2.0
"""`attn_implementation="tile"` for models of transformers; importing this module registers it.

A mask is None only where "causal, the last query at the last key" says everything; otherwise it is a bool tensor that
says everything itself. For a packed batch it is an int32 tensor of the first key that each query sees
(packed_batches.py). Models that read masks by themselves get whole ones. `attention_forward` relies on that.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import and_masks, causal_mask_function, eager_mask, sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_MAPPING

import torch_tile.ops  # noqa: F401 - registers torch.ops.tile
from torch_tile.integrations import continuous_batching, packed_batches
from torch_tile.integrations.experts import register_experts
from torch_tile.nn.decoder_keywords import DecoderKeywords
from torch_tile.nn.functional import attend, attend_varlen, visible

Tensor = torch.Tensor
log: logging.Logger = logging.getLogger("torch_tile")
_told: set[str] = set()
AND = and_masks(causal_mask_function).__name__  # of functions that `and_masks` makes


def register_with_transformers() -> None:
    """Make `attn_implementation="tile"` known to transformers, and to its continuous batching; may be called again."""
    AttentionInterface.register("tile", attention_forward)
    AttentionMaskInterface.register("tile", attention_mask)
    continuous_batching.allow("tile")
    register_experts()


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
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' models call it.

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
        indices: int `[B, Sq, n]`, positions that a query sees if the mask shows them (DeepSeek-V3.2); negative: none.
        block_indices: blocks of keys that a query sees (MiniMax-M3), of which the layer's indexer makes a mask.
        **kwargs: `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k` of a packed batch; what a paged
            cache needs. Others have no effect; those that models do not pass to all layers are logged once.

    Returns:
        `[B, Sq, H, Dv]`, and None in place of the weights, which are not computed.
    """
    tell_without_effect(kwargs, cache)
    if indices is not None or block_indices is not None:
        attention_mask = listed_mask(module, query, key, attention_mask, cache, indices, block_indices, kwargs)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    if cache is not None:
        if position_bias is not None:
            raise ValueError('position_bias with a paged cache; attn_implementation="tile" has no kernel for both')
        given = module.layer_idx, query, key, value, cache, sliding_window or 0, kwargs
        return continuous_batching.attend_cached(*given, **options), None
    mask = attention_mask
    first = mask if packed_batches.is_first_keys(mask) else None
    own = sliding_window or 0 if causal or first is not None else 0
    packed = packed_batches.given_sequences(kwargs, query, key, own)
    if packed is None and first is not None and position_bias is None and not is_tracing():
        packed = packed_batches.sequences_of(first)
    if packed is not None and mask is first and position_bias is None:
        causal = causal or first is not None
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        found = attend_varlen(q, k, v, *packed[:4], causal=causal, window=packed.window, dropout=dropout, **options)
        return found.view(query.shape[0], query.shape[2], *found.shape[1:]), None
    if packed is not None:  # what else hides keys has no kernel over sequences
        if query.shape[0] != 1:
            raise ValueError("cu_seq_lens_q with a mask or position_bias, and several rows; expected one row")
        sequences = visible(*packed[:2], query.shape[2], key.shape[2], causal or mask is not None, packed.window)
        mask = hidden_too(mask, sequences)
    elif first is not None:
        mask = packed_batches.as_mask(first)
    if mask is not None:
        if mask.dim() != 4:
            raise ValueError(f'attention_mask is {tuple(mask.shape)}; attn_implementation="tile" wants four dimensions')
        mask, causal = mask[..., : key.shape[2]], False
    if position_bias is not None:
        mask = biased(position_bias[..., : key.shape[2]], mask)
    window = sliding_window or 0 if causal else 0
    attended = attend(query, key, value, mask, causal=causal, window=window, dropout=dropout, **options)
    return attended.transpose(1, 2).contiguous(), None


def tell_without_effect(kwargs: Mapping[str, Any], cache: Any) -> None:
    """Tell of keywords of an attention call that have no effect here; a paged cache reads keywords of its own.

    Raises:
        ValueError: on `sinks`, scores of each query (Inkling 2), for which there is no kernel.
    """
    if kwargs.get("output_attentions", False):
        tell('attn_implementation="tile" does not compute attention weights; use "eager" for output_attentions=True')
    if kwargs.get("sinks") is not None:
        raise ValueError(
            'sinks of each query; attn_implementation="tile" takes one for each head as s_aux: use "eager"'
        )
    for name, value in kwargs.items() if cache is None else ():
        if name not in DecoderKeywords.__annotations__ and value is not None and value is not False:
            tell(f'attn_implementation="tile" computes attention without {name}=, which it does not know')


def biased(bias: Tensor, mask: Tensor | None) -> Tensor:
    """Return a bias of scores under a mask, bool or added."""
    if mask is None:
        return bias
    return bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else bias + mask


def listed_mask(
    module: Any,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    cache: Any,
    indices: Tensor | None,
    block_indices: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """Return the mask that shows a query what its list names, as far as the given mask shows it, too. Without a mask
    a query sees itself and what is before it.
    """
    if cache is not None:
        raise ValueError('a paged cache with lists of positions; attn_implementation="tile" has no kernel for both')
    keys = key.shape[2]
    if mask is None:
        last = torch.arange(query.shape[2], device=query.device) + (keys - query.shape[2])
        mask = (torch.arange(keys, device=query.device) <= last[:, None])[None, None]
    elif packed_batches.is_first_keys(mask):
        mask = packed_batches.as_mask(mask)
    if block_indices is not None:
        options = mask, keys, query.dtype, query.device, kwargs.get("position_ids")
        made: Tensor = module.indexer.build_block_mask(block_indices, *options)
        return made
    assert indices is not None
    place = torch.where((indices >= 0) & (indices < keys), indices, keys).long()
    seen = torch.zeros((*indices.shape[:2], keys + 1), dtype=torch.bool, device=query.device)
    return hidden_too(mask, seen.scatter(-1, place, True)[:, None, :, :keys])


def hidden_too(mask: Tensor | None, seen: Tensor) -> Tensor:
    """Return a mask as `attention_forward` takes it that also hides what is not `seen`, bool `[Sq, Skv]`, or
    `[B, 1, Sq, Skv]`.
    """
    if mask is None or packed_batches.is_first_keys(mask):
        return seen[(None,) * (4 - seen.dim())]
    mask = mask[..., : seen.shape[-1]]
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))


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
    """Build the mask of a forward pass, or return None where plain causal attention says the same.

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
        None; or bool `[B, 1, Sq, Skv]`, True where a query sees a key; or for a packed batch int32 `[B, 1, Sq, 1]`, the
        first key that each query sees. For a model that computes attention by itself, and adds the mask to its scores,
        what `eager_mask` makes.
    """
    config = kwargs.get("config")
    kwargs |= {
        "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset,
        "kv_offset": kv_offset, "mask_function": mask_function, "attention_mask": attention_mask,
    }  # fmt: skip
    if computes_itself(type(config)):
        name = type(config).__name__
        tell(f'models of {name} compute attention by themselves: attn_implementation="tile" changes nothing')
        numbers: Tensor = eager_mask(**kwargs)
        return numbers
    if allow_is_causal_skip and (local_size is None or kv_length < local_size):
        ends = not has_unknown_value(q_offset, kv_offset) and bool(q_offset + q_length == kv_offset + kv_length)
        if ends and not has_padding(attention_mask, kv_length, int(kv_offset)):
            return None
    packed = attention_mask is None and is_packed(mask_function, config, allow_is_causal_skip, local_size, kwargs)
    if packed and not reads_masks(type(config)):
        return packed_batches.first_keys(mask_function, batch_size, q_length, kwargs.get("device"), local_size)
    mask: Tensor | None = sdpa_mask(local_size=local_size, allow_is_causal_skip=False, **kwargs)
    return mask


def is_packed(
    mask_function: Callable[..., Any], config: Any, may_skip: bool, local_size: int | None, kwargs: dict[str, Any]
) -> bool:
    """Return whether a pattern is causal, with at most a window, inside of sequences that restart their positions.

    transformers says it by the last function that it put around the pattern: "and" is the one for sequences, unless a
    model gave its own (`use_vmap`). Under chunks a query sees other keys than in a window.
    """
    if kwargs.get("use_vmap", True) or may_skip or not 1 < kwargs["q_length"] == kwargs["kv_length"]:
        return False
    # The tracer of torch 2.11 knows no qualified name; and getattr with a default gives the default under 2.13.
    if not isinstance(mask_function, FunctionType) or mask_function.__name__ != AND:
        return False
    return local_size is None or local_size == getattr(config, "sliding_window", None)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # it reads source files
def computes_itself(config: type) -> bool:
    """Return whether models of a configuration never ask for an attention function, unchecked by transformers."""
    model: Any = MODEL_MAPPING.get(config, None)
    return hasattr(model, "_can_set_attn_implementation") and not model._can_set_attn_implementation()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # it reads source files
def reads_masks(config: type) -> bool:
    """Return whether models of a configuration read masks by themselves, as indexers do (DeepSeek-V3.2).

    Their text asks for a mask where attention needs none.
    """
    names = [one.__module__.replace("configuration_", "modeling_") for one in config.__mro__]
    modules = [sys.modules[name] for name in names if ".modeling_" in name and name in sys.modules]
    return any("allow_is_causal_skip" in inspect.getsource(module) for module in modules)


def has_unknown_value(*values: int | Tensor) -> bool:
    """Return whether a position is a tensor without a readable value. A static cache has one under capture."""
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
