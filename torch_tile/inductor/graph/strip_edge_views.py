# SPDX-License-Identifier: Apache-2.0
"""Parts to be timed, without the views at their edges: parts that differ in these only are one contest.

The same norm stands in a model in front of a product, which reads its rows as a matrix, and in front of something that
reads them as they are; in front of it may stand a view, or not. Views of dense tensors take no time on either side.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from torch_tile.inductor.graph.extract import EXAMPLE
from torch_tile.inductor.graph.nodes import VIEWS, is_call, val


def without_views(new: GraphModule, old: GraphModule) -> tuple[GraphModule, GraphModule]:
    """Both without the views that both begin or end with, changed in place."""
    parts = new, old
    mine, theirs = ({n.target: n for n in part.graph.find_nodes(op="placeholder")} for part in parts)
    for name in mine.keys() & theirs.keys():
        _begin_later((mine[name], theirs[name]))
    ends = [next(iter(part.graph.find_nodes(op="output"))) for part in parts]
    outputs = [_before(pair) for pair in zip(*(end.args[0] for end in ends), strict=True)]
    for end, made in zip(ends, zip(*outputs, strict=True), strict=True):
        end.args = (tuple(made),)
    for part in parts:
        part.graph.eliminate_dead_code()
        part.recompile()
    return parts


def _begin_later(inputs: tuple[Node, ...]) -> None:
    """Let an input, the same on both sides, be the view that is all that is read of it."""
    users = [list(node.users) for node in inputs]
    views = [each[0] for each in users if len(each) == 1 and _is_plain(each[0])]
    if len(views) < len(inputs) or EXAMPLE in inputs[0].meta or not _alike(views):
        return
    for node, view in zip(inputs, views, strict=True):
        node.meta["val"] = val(view)
        view.replace_all_uses_with(node)


def _before(outputs: tuple[Node, ...]) -> tuple[Node, ...]:
    """What an output, the same on both sides, is a view of."""
    while all(map(_is_plain, outputs)):
        sources: Any = tuple(node.args[0] for node in outputs)
        if not _alike(sources):
            break
        outputs = sources
    return outputs


def _is_plain(node: Any) -> bool:
    """Whether a node is a view of a dense tensor, of sizes that are known."""
    if not isinstance(node, Node) or not is_call(node, *VIEWS):
        return False
    return all(map(_is_dense, (node, node.args[0])))


def _is_dense(node: Any) -> bool:
    value = val(node)
    known = isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in (*value.shape, *value.stride()))
    return known and value.is_contiguous()


def _alike(nodes: Any) -> bool:
    """Whether nodes of both sides hold tensors of one form."""
    a, b = (val(node) for node in nodes)
    return all(map(_is_dense, nodes)) and (a.shape, a.dtype) == (b.shape, b.dtype)
