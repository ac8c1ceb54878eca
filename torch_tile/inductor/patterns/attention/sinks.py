# SPDX-License-Identifier: Apache-2.0
"""Attention sinks, as gpt-oss writes them (arXiv:2309.17453): a score of each row that takes part in the softmax, and
brings no value.

    p = softmax(cat([scores, sink], -1))[..., :-1];  out = p @ v

That is attention without the sink, times a share of its weights: with s the log-sum-exp of a row's scores, the weights
shrink by exp(s) / (exp(s) + exp(sink)) = sigmoid(s - sink).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from torch_tile.inductor.graph.nodes import (
    CAST,
    Rewrite,
    arg,
    aten,
    dtype,
    equivalent,
    is_call,
    known,
    same_shape,
    shape,
    uncast,
)
from torch_tile.inductor.patterns.attention.scores import NoMatch
from torch_tile.inductor.patterns.norm.statistics import reduced

LSE = torch.ops.tile.attention_lse.default


@dataclass
class Sunk:
    """A softmax over scores `[..., keys]` and a sink `[..., 1]`, and its probabilities `[..., keys]`."""

    scores: Node
    sink: Node
    probabilities: Node


def read_sink(softmax: Node) -> Sunk | None:
    """The parts of a `tile.softmax` whose last column is a sink that is cut off behind it; None for any other."""
    last = len(shape(softmax)) - 1
    joined: Any = _shifted(softmax.args[0], last)
    if arg(softmax, "dim") not in (-1, last) or not is_call(joined, aten.cat.default):
        return None
    parts: Any = joined.args[0]
    if arg(joined, "dim") not in (-1, last) or len(parts) != 2 or not known(shape(parts[1])[last] == 1):
        return None
    scores, sink = parts
    for node in (softmax, *(u for u in softmax.users if is_call(u, CAST))):
        cut = next((u for u in node.users if is_call(u, aten.slice.Tensor)), None)
        if cut is None or arg(cut, "dim") not in (-1, last) or arg(cut, "start") not in (0, None):
            continue
        if same_shape(shape(cut), shape(scores)):
            if len(node.users) > 1 or len(softmax.users) > 1:
                raise NoMatch(
                    "the attention probabilities are used more than once (saved for the backward?)",
                    "do not return the weights; in training there is no kernel with sinks",
                    at=softmax,
                )
            return Sunk(scores, sink, cut)
    return None


def _shifted(scores: Any, last: int) -> Any:
    """Scores without the maximum of their row that is taken off them."""
    if is_call(scores, aten.sub.Tensor):
        top = reduced(scores.args[1], aten.amax.default, aten.max.dim)
        if top is not None and top[1] == last and equivalent(uncast(top[0]), uncast(scores.args[0])):
            return uncast(scores.args[0])
    return uncast(scores)


def with_sink(rewrite: Rewrite, arguments: Sequence[Any], sink: Node) -> Node:
    """`tile.attention(*arguments)`, `[B, H, Sq, Dv]`, with sinks `[B, H, Sq, 1]`."""
    both = rewrite.call(LSE, *arguments)
    out, lse = (rewrite.call(operator.getitem, both, i) for i in range(2))
    lse = rewrite.call(aten.unsqueeze.default, lse, -1)
    sink = sink if dtype(sink) == dtype(lse) else rewrite.call(CAST, sink, dtype(lse))
    share = rewrite.call(aten.sigmoid.default, rewrite.call(aten.sub.Tensor, lse, sink))
    scaled = rewrite.call(aten.mul.Tensor, out, share)
    return scaled if dtype(scaled) == dtype(out) else rewrite.call(CAST, scaled, dtype(out))
