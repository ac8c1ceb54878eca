# SPDX-License-Identifier: Apache-2.0
"""Softmax written out, `exp(x - max(x)) / sum(...)`, becomes `tile.softmax`: an anchor for attention, or a kernel."""

from __future__ import annotations

import torch
from torch.fx import Node

from torch_tile.inductor.passes.graph import Rewrite, arg, aten, dtype, equivalent, is_call, shape, uncast
from torch_tile.inductor.passes.manager import Context


def recognise(context: Context) -> None:
    """Turn every written-out softmax whose parts are not used elsewhere into one node."""
    for node in list(context.graph.nodes):
        found = (arg(node, 0), arg(node, 1)) if is_call(node, aten._softmax.default) else _parts(node)
        if found is None:
            continue
        x, dim = found
        rewrite = Rewrite(node)
        plain = uncast(x)
        same = dtype(plain) == dtype(node)
        new = rewrite.call(torch.ops.tile.softmax.default, plain, dim, *([] if same else [dtype(node)]))
        node.replace_all_uses_with(new)
        context.graph.eliminate_dead_code()


def _parts(node: Node) -> tuple[Node, int] | None:
    """`(x, dim)` if `node` is `e / e.sum(dim)` with `e = exp(x - x.amax(dim))`."""
    if not is_call(node, aten.div.Tensor):
        return None
    e, total = arg(node, 0), arg(node, 1)
    if not is_call(total, aten.sum.dim_IntList) or not is_call(e, aten.exp.default) or arg(total, 0) is not e:
        return None
    shifted = arg(e, 0)
    if not is_call(shifted, aten.sub.Tensor):
        return None
    x, top = arg(shifted, 0), arg(shifted, 1)
    if not is_call(top, aten.amax.default) or not equivalent(arg(top, 0), x):
        return None
    if not arg(total, 2, "keepdim", False) or not arg(top, 2, "keepdim", False):
        return None
    rank = len(shape(node))
    dims = [d % rank for d in arg(total, 1)]
    if [d % rank for d in arg(top, 1, "dim", [])] != dims or len(dims) != 1:
        return None
    return (x, dims[0]) if set(e.users) == {node, total} and len(total.users) == 1 else None
