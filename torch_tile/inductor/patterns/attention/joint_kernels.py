# SPDX-License-Identifier: Apache-2.0
"""The calls of both kernels that stand for attention which was found in forward and backward (attention/joint.py).

Operands are read, and results handed on, as views: what a model copied in between is copied no more.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.fx import Node

from torch_tile.inductor.graph.axes import Group, arrange, leaves, read_views
from torch_tile.inductor.graph.look_through import bare, laid_out
from torch_tile.inductor.graph.nodes import CAST, Miss, Rewrite, aten, dtype
from torch_tile.inductor.patterns.attention.backward_matcher import FIX, only_for
from torch_tile.inductor.patterns.attention.matcher import Operand, Pattern, place
from torch_tile.inductor.patterns.attention.rewrite import BACKWARD, arguments_for, roles
from torch_tile.inductor.patterns.attention.scores import NoMatch
from torch_tile.inductor.patterns.attention.sinks import LSE

KEPT_META = ("recompute", "ac_graph_id", "partitioner_tag")
"""Of a node that is replaced: what AOTAutograd parts the graph by."""


@dataclass
class Side:
    """An operand of a product as it is, copied heads and all, and its gradient, if that is wanted."""

    operand: Operand
    gradient: Node | None


@dataclass
class Found:
    """Attention in both directions; `grad` is the gradient of its output."""

    pattern: Pattern
    query: Side
    key: Side
    value: Side
    grad: Node
    written: Node | None
    """The softmax as it is written, which nothing reads: a `tile.softmax` stands for it."""
    of_mask: Node | None = None
    """The gradient of a mask that is added to the scores, for each score, if it is wanted."""

    @property
    def gradients(self) -> list[Node]:
        """Those that are wanted."""
        found = self.query.gradient, self.key.gradient, self.value.gradient, self.of_mask
        return [x for x in found if x is not None]

    def inside(self, ends: Sequence[Node] = ()) -> set[Node]:
        """What is computed for the output and the gradients alone, or for `ends`, which are views of them."""
        olds = ends or [self.pattern.output, *self.gradients]
        return only_for([*olds, *([self.written] if self.written is not None else [])])


def build(found: Found, in_text: bool) -> tuple[Rewrite, list[tuple[Node, Node]]]:
    """Insert both kernels' calls; what is replaced, and by what. `in_text` as for `masks.combine`."""
    rewrite = Rewrite(found.pattern.output)
    try:
        return rewrite, list(_calls(rewrite, found, in_text))
    except Miss:
        rewrite.discard()
        raise


def _calls(rewrite: Rewrite, found: Found, in_text: bool) -> Iterator[tuple[Node, Node]]:
    """Old and new of the output, and of the gradients that are wanted, as they are read."""
    pattern, term = found.pattern, found.pattern.terms[0]
    batch, kv_heads, shared, queries = roles(pattern)
    heads, keys = [*kv_heads, *shared], pattern.dims[-1]
    dims = [batch, heads, queries, keys]
    sides = found.query, found.key, found.value
    # Heads of keys that the model copies have a gradient for each copy; those that its products share have one.
    copied = {a for x in sides[1:] for g in x.operand.groups for a in leaves(g)} & set(shared)
    own = heads if copied else kv_heads
    wanted = [
        [batch, heads, queries, term.inner], [batch, own, keys, term.inner], [batch, own, keys, pattern.value_inner]
    ]  # fmt: skip
    q, k, v = (bare(rewrite, place(rewrite, x.operand, want))[0] for x, want in zip(sides, wanted, strict=True))
    args = arguments_for(rewrite, pattern, (q, k, v), dims, term.scale, in_text)
    both = rewrite.call(LSE, *args)
    out, lse = (rewrite.call(operator.getitem, both, i) for i in range(2))
    have = [batch, heads, queries, pattern.value_inner]
    yield from _ends(rewrite, out, have, Operand(pattern.output, pattern.output_dims))
    _belongs_to(pattern.output, rewrite.nodes)

    forward = len(rewrite.nodes)
    rewrite.anchor = next(n for n in rewrite.graph.nodes if n in found.gradients)
    grad, _ = bare(rewrite, place(rewrite, Operand(found.grad, pattern.output_dims), have))
    grad = grad if dtype(grad) == dtype(out) else rewrite.call(CAST, grad, dtype(out))
    if found.of_mask is not None and (args.mask is None or not dtype(args.mask).is_floating_point):
        raise NoMatch("the mask whose gradient is wanted became no tensor", FIX)
    keep = "" if found.of_mask is None else "mask"
    back = rewrite.call(BACKWARD, *args.backward(grad, out, lse, keep))
    new = [rewrite.call(operator.getitem, back, i) for i in range(3)]
    if found.of_mask is not None:
        of_mask = rewrite.call(aten.select.int, rewrite.call(operator.getitem, back, 3), 0, 0)
        yield from _ends(rewrite, of_mask, dims, Operand(found.of_mask, pattern.dims))
    for side, gradient, want in zip(sides, new, wanted, strict=True):
        if side.gradient is not None:
            yield from _ends(rewrite, gradient, want, Operand(side.gradient, side.operand.groups))
    _belongs_to(found.gradients[0], rewrite.nodes[forward:])


def _ends(rewrite: Rewrite, new: Node, have: list[Group], old: Operand) -> Iterator[tuple[Node, Node]]:
    """The views of an old tensor that are read, or itself, and the same of a new one with dimensions `have`.

    Views of the new one, not of a copy that lies as the old one did.
    """
    for end, dims in read_views(old.root, old.groups):
        rewrite.anchor = end
        node = arrange(rewrite, new, have, dims)
        if node is None:
            raise NoMatch("the output has other dimensions than attention's", FIX)
        node = node if dtype(node) == dtype(end) else rewrite.call(CAST, node, dtype(end))
        yield end, laid_out(rewrite, node, end)


def _belongs_to(old: Node, nodes: Sequence[Node]) -> None:
    """The nodes are on the same side of the graph as `old`, and are computed again where that would be."""
    for node in nodes:
        node.meta.update({key: old.meta[key] for key in KEPT_META if key in old.meta})
