# SPDX-License-Identifier: Apache-2.0
"""The queries that see a block of keys under causal and window rules, for attention's gradients."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch_tile.language as T
from torch_tile.kernels.attention.spec import Config, Spec

PADDING = 384  # rows: a multiple of each `block_q`, so that no block reads statistics past their end


def query_blocks(spec: Spec, config: Config, first_key: Any, q_offset: Any, window: Any, q_len: Any) -> Any:
    """Return the range of query blocks that can see one of the `block_kv` keys from `first_key` on."""
    q_offset = q_offset if spec.shifted else 0
    first: Any = 0
    end = T.ceildiv(q_len, config.block_q)
    if spec.causal:
        first = T.max(0, (first_key - q_offset) // config.block_q)
    if spec.windowed:
        last_query = first_key + config.block_kv - 2 + window - q_offset
        end = T.min(end, last_query // config.block_q + 1)
    return first, end


def masks_queries(spec: Spec, config: Config, step: Any, first_key: Any, q_offset: Any, window: Any, q_len: Any) -> Any:
    """Return whether query block `step` needs a causal or window mask for the keys from `first_key` on.

    It may also be padding, where `spec.masks_padding`.
    """
    q_offset = q_offset if spec.shifted else 0
    parts: list[Any] = []
    if spec.masks_padding:
        parts.append(step * config.block_q + config.block_q > q_len)
    if spec.causal:
        parts.append(step * config.block_q + q_offset < first_key + config.block_kv - 1)
    if spec.windowed:
        parts.append(step * config.block_q + config.block_q - 1 + q_offset - window >= first_key)
    return reduce(T.logical_or, parts) if parts else False


def seen_by(spec: Spec, key: Any, first: Any, query: Any, block_q: int, q_offset: Any, window: Any, q_len: Any) -> Any:
    """Return whether the query at `query` of a block sees a key, masks aside. The block of queries begins at `first`.

    None if all are. What a key is seen by is known before a block's queries, in numbers that fit in 32 bits.
    """
    q_offset = q_offset if spec.shifted else 0
    seen = None
    if spec.causal:
        seen = query >= T.max(T.min(key - q_offset - first, block_q), 0)
    if spec.windowed:
        inside = query < T.max(T.min(key - q_offset + window - first, block_q), 0)
        seen = inside if seen is None else T.logical_and(seen, inside)
    if spec.masks_padding:
        given = query < T.min(q_len - first, block_q)
        seen = given if seen is None else T.logical_and(seen, given)
    return seen
