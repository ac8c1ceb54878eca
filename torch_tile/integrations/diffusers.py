# SPDX-License-Identifier: Apache-2.0
"""`model.set_attention_backend("tile")` for models of diffusers; importing this module registers it.

diffusers names its backends by an Enum and calls them by a registry. Both get one more entry, so the context manager
`attention_backend("tile")` works, too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models import attention_dispatch

import torch_tile.ops  # noqa: F401 - registers torch.ops.tile

Tensor = torch.Tensor
NAME = "tile"


def register_with_diffusers() -> None:
    """Make the backend "tile" known to diffusers; may be called again."""
    names, registry = attention_dispatch.AttentionBackendName, attention_dispatch._AttentionBackendRegistry
    if NAME not in names._value2member_map_:
        _add_member(names, NAME.upper(), NAME)
    registry.register(names(NAME))(attention)


def _add_member(names: Any, name: str, value: str) -> None:
    """Give an Enum of strings one more member."""
    member = str.__new__(names, value)
    member._name_, member._value_, member._sort_order_ = name, value, len(names.__members__)
    names._member_map_[name] = names._value2member_map_[value] = member
    names._member_names_.append(name)
    type.__setattr__(names, name, member)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """Compute attention as diffusers' dispatcher calls a backend.

    Args:
        query: `[B, Sq, H, D]`.
        key: `[B, Skv, Hkv, D]`; Hkv differs from H only with `enable_gqa`.
        value: `[B, Skv, Hkv, Dv]`.
        attn_mask: broadcastable to `[B, H, Sq, Skv]`, or `[B, Skv]`; bool (True: visible) or floating (added).
        dropout_p: probability of dropping a weight; torch's own attention then computes.
        is_causal: query `i` sees the keys `j <= i`, as torch has it.
        scale: of the scores; default `D ** -0.5`.
        enable_gqa: whether query heads may share a key head.
        return_lse: must be False.
        _parallel_config: must be None.

    Returns:
        `[B, Sq, H, Dv]`, contiguous if the query is.

    Raises:
        ValueError: for `return_lse`, for context parallelism, and for heads that differ without `enable_gqa`.
    """
    if return_lse:
        raise ValueError('the attention backend "tile" does not return log-sum-exps: return_lse must be False')
    if _parallel_config is not None:
        raise ValueError('the attention backend "tile" has no context parallelism: choose "native" with it')
    if query.shape[2] != key.shape[2] and not enable_gqa:
        raise ValueError(f"query has {query.shape[2]} heads and key {key.shape[2]}; pass enable_gqa=True")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]  # of keys
    if dropout_p:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    else:
        out = torch.ops.tile.attention.default(q, k, v, attn_mask, is_causal, scale)
    return out.transpose(1, 2)


register_with_diffusers()
