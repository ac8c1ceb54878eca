# SPDX-License-Identifier: Apache-2.0
"""Keywords that decoder layers of transformers pass to their attention, beside what `Attention` has as arguments.

Most have no effect on attention. A value that would change the result is refused, as is each other keyword.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from difflib import get_close_matches
from typing import Any, TypedDict

import torch

Tensor = torch.Tensor


class DecoderKeywords(TypedDict, total=False):
    """Keywords of transformers 5 that our attention layers take."""

    # Without effect here: angles are in `position_embeddings`, a cache counts its positions, a model reads the rest.
    position_ids: Tensor | None
    cache_position: Tensor | None
    use_cache: bool | None
    num_items_in_batch: Tensor | int | None
    output_hidden_states: bool | None
    output_router_logits: bool | None
    max_length_q: int | None
    max_length_k: int | None
    # Refused if true, as no weights are computed.
    output_attentions: bool | None
    # Without a mask, refused if it is not what the layer does.
    is_causal: bool | None
    # Sequences of a packed batch. Without a mask that keeps them apart they are refused.
    cu_seq_lens_q: Tensor | None
    cu_seq_lens_k: Tensor | None
    seq_idx: Tensor | None


ARGUMENTS = "position_embeddings", "attention_mask", "cache", "past_key_values"
MASKS = "attn_mask", "mask", "key_padding_mask", "encoder_attention_mask"
SEQUENCES = "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"


def check_decoder_keywords(owner: str, given: Mapping[str, Any], causal: bool, mask: Tensor | None) -> None:
    """Check the further keywords of a call of the layer class `owner`, which is `causal` where it gets no mask.

    Raises:
        TypeError: on a keyword that decoder layers of transformers do not pass.
        ValueError: on a value that would change the result.
    """
    for name, value in given.items():
        if name not in DecoderKeywords.__annotations__:
            raise TypeError(f"{owner}.forward() takes no {name}=, which would have no effect{_hint(name, value)}")
    if given.get("output_attentions"):
        raise ValueError(f"output_attentions is True; {owner} computes no attention weights: leave it out")
    if mask is not None:
        return
    is_causal = given.get("is_causal")
    if is_causal is not None and bool(is_causal) is not causal:
        does = "is causal" if causal else "is not causal"
        raise ValueError(f"is_causal is {is_causal}, but this {owner} {does}; give an attention_mask, or leave it out")
    for name in SEQUENCES:
        if given.get(name) is not None:
            raise ValueError(
                f"{name} without an attention_mask; {owner} keeps the sequences of a packed batch apart by a mask only"
            )


def _hint(name: str, value: Any) -> str:
    """Return what to give in the place of a keyword, as the end of a sentence."""
    if name in MASKS:
        return "; give it as attention_mask="
    if hasattr(value, "update") and not isinstance(value, Mapping | Set):
        return "; it looks like a cache: give it as cache="
    if name in ("sliding_window", "window", "dropout", "scaling", "scale", "softcap"):
        own = {"sliding_window": "window", "scaling": "scale"}.get(name, name)
        return f"; a layer gets its {own} when it is made" if own in ("window", "scale") else "; no layer here has one"
    near = get_close_matches(name, (*ARGUMENTS, *DecoderKeywords.__annotations__), 1)
    return f"; did you mean {near[0]}=?" if near else ""
