# SPDX-License-Identifier: Apache-2.0
"""Capture torch's attention over ragged sequences, `torch.nn.attention.varlen.varlen_attn`, as a tile op.

The call is one node before autograd and an opaque operator behind it. Keys in pages become `tile.attention_paged`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.nodes import Miss, val

NAME = "torch_attn::_varlen_attn"
FIELDS = (
    "query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "is_causal", "scale", "window_size",
    "enable_gqa", "seqused_k", "block_table", "num_splits",
)  # fmt: skip
DEFAULTS = {"is_causal": False} | dict.fromkeys(FIELDS[8:])


@family("attention", "pre_grad", 35)
def capture_varlen(context: Context) -> None:
    """Replace every call of torch's operator that a tile op can compute; report why the others stay."""
    for node in list(context.graph.nodes):
        if node.op != "call_function" or _name_of(node.target) != NAME:
            continue
        with context.recording_miss("attention", node):
            _capture(context, node)


def _name_of(target: Any) -> str:
    """Return the name of the operator, of an overload or of its packet; empty for other functions."""
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "_qualified_op_name", ""))


def _capture(context: Context, node: Node) -> None:
    """Replace one call of torch's variable-length attention; raises Miss."""
    given: dict[str, Any] = DEFAULTS | dict(zip(FIELDS, node.args, strict=False)) | node.kwargs
    if context.settings.select == "fastest" and val(given["query"]).is_cuda:
        raise Miss("not timed against torch's kernel", 'give options={"select": "tile"}, which takes the tile kernel')
    results = [user for user in node.users if user.target is operator.getitem]
    if len(results) != len(node.users) or any(user.args[1] not in (0, 1) for user in results):
        raise Miss("its result is used as a whole", "use the first two results alone")
    name, args, options = _replacement(given)
    options |= _visible_options(given["is_causal"], given["window_size"]) | {"scale": _scale(given["scale"])}
    alone = all(user.args[1] == 0 for user in results)
    op = getattr(torch.ops.tile, name if alone else f"{name}_lse").default
    with context.graph.inserting_before(node):
        new = context.graph.call_function(op, args, options)
    new.meta.update(node.meta)
    if alone and isinstance(node.meta.get("example_value"), tuple):
        new.meta["example_value"] = node.meta["example_value"][0]
    for user in results:
        if alone:
            user.replace_all_uses_with(new)
            context.graph.erase_node(user)
        else:
            user.replace_input_with(node, new)
    context.graph.erase_node(node)
    context.captured("attention", str(op), new)


def _replacement(given: dict[str, Any]) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Choose the operator of `torch.ops.tile` for a call, and return its name with its positional and named arguments.

    Raises Miss where no operator takes the call.
    """
    q, k, v, starts, most = (given[x] for x in ("query", "key", "value", "cu_seq_q", "max_q"))
    positions = [given[x] for x in ("cu_seq_q", "cu_seq_k", "seqused_k", "block_table")]
    if any(val(x).dtype != torch.int32 for x in positions if x is not None):
        raise Miss("lengths or pages are not int32", "make cu_seq_q, cu_seq_k, seqused_k and block_table int32")
    pages, used = given["block_table"], given["seqused_k"]
    if pages is not None:
        if used is None:
            raise Miss("keys in pages without seqused_k", "give seqused_k")
        splits = given["num_splits"]
        return "attention_paged", (q, k, v, pages, used, starts, most), {"num_splits": 0 if splits is None else splits}
    if used is not None or given["cu_seq_k"] is None:
        raise Miss("keys are counted by seqused_k", "pack the keys, and give cu_seq_k alone")
    return "attention_varlen", (q, k, v, starts, given["cu_seq_k"], most, given["max_k"]), {}


def _visible_options(causal: Any, window_size: Any) -> dict[str, Any]:
    """Return the options for what a query sees: `left` keys before its own place and `right` keys behind it."""
    left, right = (-1, -1) if window_size is None else window_size
    if not isinstance(left, int) or not isinstance(right, int) or right > 0:
        raise Miss(f"a window of {left} and {right} keys", "let queries see all keys behind their place, or none")
    return {"causal": bool(causal) or right == 0, "window": left + 1 if left >= 0 else 0}


def _scale(scale: Any) -> float | None:
    """Check that a scale is a Python number or None."""
    if scale is not None and not isinstance(scale, int | float):
        raise Miss("scale is not a Python number", "pass scale as a float")
    return None if scale is None else float(scale)
