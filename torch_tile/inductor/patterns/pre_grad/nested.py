# SPDX-License-Identifier: Apache-2.0
"""Capture attention of nested tensors (`layout=torch.jagged`) as `tile.attention_varlen`.

The call is one node on nested tensors before autograd, which the new node takes, too: it reads their rows and offsets
when AOTAutograd takes the subclass apart.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from torch_tile.inductor import compat
from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.nodes import Miss, aten, known, val

FIELDS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
CALLS = F.scaled_dot_product_attention, aten.scaled_dot_product_attention.default
JAGGED = 2  # the dimension of different lengths of [B, H, j, D]


@family("attention", "pre_grad", 25)
def capture_nested(context: Context) -> None:
    """Replace every attention of nested tensors that a tile op can compute; report why the others stay."""
    for node in list(context.graph.nodes):
        if node.op != "call_function" or node.target not in CALLS or not is_nested(node):
            continue
        with context.recording_miss("attention", node):
            _capture(context, node)


def is_nested(node: Node) -> bool:
    """Return whether a call takes nested tensors."""
    return any(getattr(_value(x), "is_nested", False) for x in node.all_input_nodes)


def _value(node: Node) -> Any:
    """Return what a node of Dynamo's graph holds: a fake tensor, or None."""
    return node.meta.get("example_value", node.meta.get("val"))


def _capture(context: Context, node: Node) -> None:
    """Replace SDPA over jagged tensors by `tile.attention_varlen`. Raises Miss if it does not fit."""
    given: dict[str, Any] = DEFAULTS | dict(zip(FIELDS, node.args, strict=False)) | node.kwargs
    tensors = [given[name] for name in FIELDS[:3]]
    q, k, v = map(val, tensors)
    if not all(x.is_nested and x.layout == torch.jagged for x in (q, k, v)):
        raise Miss("some of q, k and v are no jagged tensors", "make all of them torch.nested with layout=torch.jagged")
    if any(x.dim() != 4 or x._ragged_idx != JAGGED or x.lengths() is not None for x in (q, k, v)):
        raise Miss("nested tensors of another form", "make them [batch, heads, lengths, head size] without gaps")
    if given["attn_mask"] is not None or given["dropout_p"] != 0.0:
        raise Miss("a mask, or dropout, over nested tensors", "leave attn_mask away, and pass dropout_p=0.0")
    causal, scale = bool(given["is_causal"]), given["scale"]
    if causal and not known(q.shape[JAGGED] == k.shape[JAGGED]):
        raise Miss("causal attention of queries and keys of other lengths", "give both the same offsets")
    if scale is not None and not isinstance(scale, int | float):
        raise Miss("scale is not a Python number", "pass scale as a float")
    if context.settings.select == "fastest" and q.is_cuda:
        raise Miss("not timed against torch's kernel", 'give options={"select": "tile"}, which takes the tile kernel')
    with context.graph.inserting_before(node):
        new = context.graph.call_function(attend_jagged, (*tensors, causal, None if scale is None else float(scale)))
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    context.graph.erase_node(node)
    context.captured("attention", "tile.attention_varlen", new)


def attend_jagged(q: Any, k: Any, v: Any, causal: bool, scale: float | None) -> Any:
    """Compute attention of jagged tensors `[B, H, j, D]`, `[B, Hkv, i, D]` and `[B, Hkv, i, Dv]`; `[B, H, j, Dv]`."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    starts = (x.offsets().int() for x in (q, k))
    rows = [x.values() for x in (q, k, v)]
    most = (_most(x, x_rows) for x, x_rows in zip((q, k), rows, strict=False))
    out = torch.ops.tile.attention_varlen.default(*rows, *starts, *most, causal, scale)
    return compat.jagged_like(q, out).transpose(1, 2)


def _most(x: Any, rows: torch.Tensor) -> Any:
    """Return the most rows of one sequence, or a bound of it where the tensor does not know it."""
    return rows.shape[0] if x._maybe_max_seqlen is None else x._maybe_max_seqlen
