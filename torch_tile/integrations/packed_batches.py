# SPDX-License-Identifier: Apache-2.0
"""Read where the sequences of a packed batch lie, as transformers says it: by positions that restart, or by kwargs.

A packed batch has its sequences one after the other in each row. No mask of all pairs is made for it: a tensor of the
first key that each query sees, `first_keys`, stands for the mask. Attention runs over the sequences themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

Tensor = torch.Tensor
STARTS = "cu_seq_lens_q", "cu_seq_lens_k"
MOST = "max_length_q", "max_length_k"


class Packed(NamedTuple):
    """Where sequences of queries and of keys begin, int32 `[n + 1]`, the most rows of one, and the window (0: none)."""

    q_starts: Tensor
    k_starts: Tensor
    most_queries: int
    most_keys: int
    window: int


def first_keys(mask_function: Callable[..., Any], batch: int, length: int, device: Any, window: int | None) -> Tensor:
    """Return int32 `[B, 1, S, 1]`: the first key that each query of a packed batch sees; the last one is itself.

    Args:
        mask_function: whether a query sees a key, given indices: causal inside of each sequence.
        batch: B.
        length: S.
        device: of the result.
        window: how many keys a query sees at most; None for all.
    """
    place = torch.arange(length, device=device)
    row, head = torch.arange(batch, device=device)[:, None], torch.zeros((), dtype=torch.long, device=device)
    # A sequence goes on where a query sees the key before its own.
    goes_on = mask_function(row, head, place[None, 1:], place[None, :-1]).expand(batch, max(length - 1, 0))
    begins = torch.where(goes_on, 0, place[1:])
    starts = torch.nn.functional.pad(begins, (1, 0)).cummax(-1).values
    seen = starts if window is None else torch.maximum(starts, place - (window - 1))
    return seen.int()[:, None, :, None]


def is_first_keys(mask: Tensor | None) -> bool:
    """Return whether a mask is one of `first_keys`."""
    return mask is not None and mask.dtype == torch.int32


def as_mask(first: Tensor) -> Tensor:
    """Return the mask that `first_keys` stands for, bool `[B, 1, S, S]`, True where a query sees a key."""
    place = torch.arange(first.shape[2], device=first.device)
    return (place >= first) & (place <= place[:, None])


_sequences: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # of the layers of one forward pass


def sequences_of(first: Tensor) -> Packed:
    """Return the sequences of a packed batch, whose rows lie one after the other. Waits for the device once a pass."""
    found: Packed | None = _sequences.get(first)
    if found is None:
        behind = torch.arange(first.shape[2], device=first.device) - first[:, 0, :, 0]
        starts = torch.nn.functional.pad((behind.flatten() == 0).nonzero()[:, 0], (0, 1), value=behind.numel())
        most, seen = torch.stack([starts.diff().max(), behind.max() + 1]).tolist()
        starts = starts.int()
        found = _sequences[first] = Packed(starts, starts, most, most, 0 if seen >= most else seen)
    return found


def given_sequences(kwargs: Mapping[str, Any], query: Tensor, key: Tensor, window: int) -> Packed | None:
    """Return the sequences that kwargs of a forward pass say, None if they say nothing.

    Args:
        kwargs: `cu_seq_lens_q` and `cu_seq_lens_k`, integers `[n + 1]`, and `max_length_q` and `max_length_k`, which
            without a known value are the rows of all sequences.
        query: `[B, H, Sq, D]`.
        key: `[B, Hkv, Skv, D]`.
        window: how many keys a query sees, 0 for all.

    Raises:
        ValueError: if one of the first two is given without the other one.
    """
    starts: list[Any] = [kwargs.get(name) for name in STARTS]
    if all(x is None for x in starts):
        return None
    if any(x is None for x in starts):
        raise ValueError(f"one of {' and '.join(STARTS)} is None; give both for a packed batch, or none")
    q_starts, k_starts = (x.to(query.device, torch.int32) for x in starts)
    queries, keys = (
        _most(kwargs.get(name), x.shape[0] * x.shape[2]) for name, x in zip(MOST, (query, key), strict=True)
    )
    return Packed(q_starts, k_starts, queries, keys, window)


def _most(given: Any, rows: int) -> Any:
    """Return the most rows of a sequence. A tensor's value is not read while a graph is captured."""
    unknown = given is None or (isinstance(given, torch.Tensor) and torch.compiler.is_compiling())
    return rows if unknown else given if isinstance(given, int | torch.SymInt) else int(given)
