# SPDX-License-Identifier: Apache-2.0
"""Replace written-out attention in training, forward and backward, by two kernels that never store the scores.

The forward is read as in inference (matcher.py). The backward is the graph that autograd made. The gradients of its two
products are found by their form (backward_matcher.py). The nodes between the products are evaluated on random numbers
(backward_matcher.py). So a gradient that a model changes on its way is never taken for attention's own.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.fx import Graph, Node

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.axes import Group, arrange, axes_of, extent, leaves, read_views, trace, views_of
from torch_tile.inductor.graph.extract import copied
from torch_tile.inductor.graph.nodes import (
    CAST,
    PARTITIONING,
    TIMES,
    TOLD,
    Miss,
    Rewrite,
    arg,
    aten,
    backward_of,
    bind,
    dtype,
    erase_dead,
    is_call,
    is_tensor,
    known,
    ordered,
    same_shape,
    shape,
)
from torch_tile.inductor.graph.strip_copies import bare, laid_out
from torch_tile.inductor.patterns.attention import score_program
from torch_tile.inductor.patterns.attention.backward_matcher import FIX, OfProduct, is_gradient, of_product, only_for
from torch_tile.inductor.patterns.attention.masks import LSE
from torch_tile.inductor.patterns.attention.matcher import Operand, Pattern, keys_on_left, place, read
from torch_tile.inductor.patterns.attention.rewrite import (
    BACKWARD,
    SOFTMAX,
    arguments_for,
    attention_args,
    read_mask,
    roles,
    signature,
    ungrouped,
)
from torch_tile.inductor.patterns.attention.scores import NoMatch
from torch_tile.inductor.patterns.norm import softmax
from torch_tile.inductor.report import rows as report
from torch_tile.inductor.select import cost_rules

if TYPE_CHECKING:
    from torch_tile.inductor.report.rows import Outcome


@family("attention", "written_out", 10)
def match(context: Context) -> None:
    """Replace attention that is written out, forward and backward together."""
    backward = backward_of(context.graph)
    for probabilities, written in _softmaxes(context.graph, backward):
        made, told = False, True
        try:
            made = _replace(context, _find(probabilities, written, backward))
        except Miss as reason:
            told = getattr(reason, "near", True)
            if told:
                context.miss("attention", probabilities, reason)
        if told and not made:
            (written or probabilities).meta[TOLD] = True
        if written is not None and made:
            erase_dead(written)
        elif written is not None:
            probabilities.replace_all_uses_with(written)
            context.graph.erase_node(probabilities)


def _softmaxes(graph: Graph, backward: Collection[Node]) -> Iterator[tuple[Node, Node | None]]:
    """Yield each softmax of the forward as a `tile.softmax`, and the node that it replaces, if it was written out."""
    if not backward:
        return
    for node in list(graph.nodes):
        if node._erased or node in backward or not node.users:
            continue
        if is_call(node, SOFTMAX):
            yield node, None
        elif (new := softmax.as_one(node)) is not None:
            yield new, node


def _find(probabilities: Node, written: Node | None, backward: set[Node]) -> Found:
    """Find the attention around a softmax. Raises Miss where there is none, or where its gradients differ."""
    pattern = read(probabilities, backward)
    if len(pattern.terms) != 1 or pattern.terms[0].factors or pattern.sink is not None:
        raise NoMatch("in training there is a kernel for scores of one product, under numbers, masks and texts", FIX)
    product, inner, keys = pattern.scores.products[0], pattern.terms[0].inner, pattern.dims[-1]
    output, on_left = pattern.output, pattern.values_on_left()
    if not is_call(product.node, aten.bmm.default) or not is_call(output, aten.bmm.default):
        raise NoMatch("in training attention's products are to be batched ones, without an addend", FIX)
    scores = of_product(product.node, product.groups, inner, backward)
    outputs = of_product(output, pattern.output_dims, keys, backward)
    value, weights = _sides(output, pattern.output_dims, keys, outputs, swapped=not on_left)
    as_weights, as_scores = (weights.operand.root, weights.operand.groups), (product.node, product.groups)
    if weights.gradient is None or not is_gradient(
        scores.result, as_scores, (weights.gradient, weights.operand.groups), as_weights, keys
    ):
        raise NoMatch("the gradient of the scores is not what autograd makes of their softmax", FIX)
    query, key = _sides(product.node, product.groups, inner, scores, swapped=keys_on_left(product, keys))
    found = Found(pattern, query, key, value, outputs.result, written)
    needless = {product.node, probabilities, scores.result, weights.gradient}
    if not needless <= found.inside():
        found.of_mask = _of_mask(found, weights, scores.result, needless, backward)
    return found


def _of_mask(found: Found, weights: Side, of_scores: Node, needless: set[Node], backward: Collection[Node]) -> Node:
    """Find the gradient of a learned mask, on the path from the weights' gradient to the scores' gradient.

    With this gradient given, attention's kernels must make all nodes in `needless` needless. Raises NoMatch where there
    is no such gradient.
    """
    assert weights.gradient is not None
    pattern, seen = found.pattern, {weights.gradient}
    last = arg(pattern.softmax, "dim") in (-1, len(shape(pattern.softmax)) - 1)
    masks = [trace(m.node, m.groups, casts=True) for m in pattern.masks if m.additive and m.scale == 1]
    pending = [of_scores]
    while pending and masks and last:
        node = pending.pop()
        seen.add(node)
        pending += [x for x in node.all_input_nodes if x in backward and x not in seen]
        if not is_tensor(node) or not same_shape(shape(node), shape(pattern.softmax)):
            continue
        if not needless <= replace(found, of_mask=node).inside():
            continue
        of, as_weights = ((x, weights.operand.groups) for x in (weights.gradient, weights.operand.root))
        if any(is_gradient(node, mask, of, as_weights, pattern.dims[-1], pattern.dims) for mask in masks):
            return node
    raise NoMatch("the scores, the weights, or gradients of these are read besides", FIX)


def _sides(product: Node, groups: list[Group], inner: Group, gradients: OfProduct, swapped: bool) -> tuple[Side, Side]:
    """Return the left and right sides of a product; the right side first if `swapped`."""
    a, b = product.args
    *batch, m, n = groups
    left = Side(Operand(a, [*batch, m, inner]), gradients.left)  # type: ignore[arg-type]
    right = Side(Operand(b, [*batch, inner, n]), gradients.right)  # type: ignore[arg-type]
    return (right, left) if swapped else (left, right)


def _replace(context: Context, found: Found) -> bool:
    """Replace the attention found by the kernels, unless Inductor's code is faster; return whether it was replaced."""
    try:
        rewrite, pairs = build(found, in_text=found.of_mask is None)
    except score_program.Unwritable:
        rewrite, pairs = build(found, in_text=False)
    op = next(n for n in rewrite.nodes if is_call(n, LSE))
    what, why, outcome = f"tile.attention{signature(op)} with its backward", context.select.refused(rewrite.nodes), None
    # Inductor may know the spelling of plain scores, and call torch's attention.
    sure = "" if found.pattern.scores.modified is None else cost_rules.of_scores(rewrite.nodes)
    if not why and context.select.times and (not sure or context.settings.thorough):
        outcome = _contest(context, rewrite, pairs, found.inside([old for old, _ in pairs]))
        why = "" if outcome is None or outcome.tile_wins else str(outcome)
    if why:
        context.note("attention", report.KEPT, what, found.pattern.output, why, [op], outcome)
        rewrite.discard()
        return False
    for node in rewrite.nodes if outcome is not None else ():
        node.meta[TIMES] = outcome
    for old, new in pairs:
        old.replace_all_uses_with(new)
        erase_dead(old)
    return True


def _contest(
    context: Context, rewrite: Rewrite, pairs: Sequence[tuple[Node, Node]], inside: set[Node]
) -> Outcome | None:
    """Time the kernels against the nodes `inside`, with the views in front that Inductor's patterns match."""
    made, position = set(rewrite.nodes), ordered(context.graph)
    views, inputs = views_of({x for n in (*inside, *made) for x in n.all_input_nodes} - made - inside)
    olds, news = (sorted(views | nodes, key=position.__getitem__) for nodes in (inside, made))
    inputs.sort(key=position.__getitem__)
    old, new = copied(olds, inputs, [old for old, _ in pairs]), copied(news, inputs, [new for _, new in pairs])
    return context.select.of_graphs(new, old)


# Insert the calls of both kernels for attention that was found in forward and backward.
#
# Operands and results are views: the copies of the model are dropped.


@dataclass
class Side:
    """An operand of a product, with its copied heads, and the gradient of the operand, if it is wanted."""

    operand: Operand
    gradient: Node | None


@dataclass
class Found:
    """Attention found in forward and backward; `grad` is the gradient of its output."""

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
        """Return the gradients that are wanted."""
        found = self.query.gradient, self.key.gradient, self.value.gradient, self.of_mask
        return [x for x in found if x is not None]

    def inside(self, ends: Sequence[Node] = ()) -> set[Node]:
        """Return the nodes that only the output and the gradients need, or only `ends`, views of these."""
        olds = ends or [self.pattern.output, *self.gradients]
        return only_for([*olds, *([self.written] if self.written is not None else [])])


def build(found: Found, in_text: bool) -> tuple[Rewrite, list[tuple[Node, Node]]]:
    """Insert both kernels' calls; return the rewrite and pairs (old, new). `in_text` as for `masks.combine`."""
    rewrite = Rewrite(found.pattern.output)
    try:
        return rewrite, list(_calls(rewrite, found, in_text))
    except Miss:
        rewrite.discard()
        raise


def _calls(rewrite: Rewrite, found: Found, in_text: bool) -> Iterator[tuple[Node, Node]]:
    """Insert both calls; yield (old, new) pairs of the output and of the wanted gradients."""
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
    yield from _replaced_views(rewrite, out, have, Operand(pattern.output, pattern.output_dims))
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
        yield from _replaced_views(rewrite, of_mask, dims, Operand(found.of_mask, pattern.dims))
    for side, gradient, want in zip(sides, new, wanted, strict=True):
        if side.gradient is not None:
            yield from _replaced_views(rewrite, gradient, want, Operand(side.gradient, side.operand.groups))
    _belongs_to(found.gradients[0], rewrite.nodes[forward:])


def _replaced_views(rewrite: Rewrite, new: Node, have: list[Group], old: Operand) -> Iterator[tuple[Node, Node]]:
    """Yield pairs (view of the old tensor that is read, same view of `new`); `new` has dimensions `have`."""
    for end, dims in read_views(old.root, old.groups):
        rewrite.anchor = end
        node = arrange(rewrite, new, have, dims)
        if node is None:
            raise NoMatch("the output has other dimensions than attention's", FIX)
        node = node if dtype(node) == dtype(end) else rewrite.call(CAST, node, dtype(end))
        yield end, laid_out(rewrite, node, end)


def _belongs_to(old: Node, nodes: Sequence[Node]) -> None:
    """Copy the partition metadata of `old` to the nodes: same side of the graph, same recomputation."""
    for node in nodes:
        node.meta.update({key: old.meta[key] for key in PARTITIONING if key in old.meta})


# Joint: forward and backward in one graph, as AOTAutograd traces them, before it is partitioned.
#
# Only here can a mask of attention in training be read: afterwards it is a tensor that the forward passes on. Both
# kernels compute rules and texts, so the mask is neither kept nor read, and hidden tiles are skipped. Heads of keys and
# values may be copied for each head of queries: only here both the copies and the sums of their gradients are visible.


@family("attention", "joint", 10)
def share_heads(context: Context) -> None:
    """Drop the copies of key and value heads for each query head, and the sums of their gradients over copies."""
    for target in (LSE, BACKWARD):
        for node in context.graph.find_nodes(op="call_function", target=target):
            rewrite, args = Rewrite(node), bind(node)
            given = args.k, args.v
            shared = ungrouped(rewrite, *given)
            results = [x for x in node.users if target is BACKWARD and x.args[1] in (1, 2)]  # dk and dv
            sums = [_sum_of_copies(x, shape(shared[0])[1]) for x in results]
            if shared == given or None in sums:
                rewrite.discard()
                continue
            new = rewrite.call(target, *args._replace(k=shared[0], v=shared[1]))
            for result, found in zip(results, sums, strict=True):
                assert found is not None
                total, have, want = found
                instead = Rewrite(total)
                summed = arrange(instead, instead.call(operator.getitem, new, result.args[1]), have, want)
                assert summed is not None
                total.replace_all_uses_with(instead.reshape(summed, shape(total)))
                erase_dead(total)
            _replace_mask(node, new)


def _sum_of_copies(gradient: Node, heads: int) -> tuple[Node, list[Group], list[Group]] | None:
    """Find the sum over the copies of each of `heads`, if it is the only use of `gradient`.

    `gradient` is `[B, heads * copies, S, D]`. Returns the sum and the dimensions of `[B, heads, S, D]`, in the
    gradient's order and in the sum's. None if there is no such sum.
    """
    total = gradient
    while len(total.users) == 1 and not is_call(total, aten.sum.dim_IntList):
        (total,) = total.users
    if not is_call(total, aten.sum.dim_IntList) or dtype(total) != dtype(gradient):
        return None
    dims = axes_of(shape(total.args[0]))
    root, have = trace(total.args[0], dims)
    copies = [axis for d in total.args[1] for axis in leaves(dims[d])]  # type: ignore[union-attr,index]
    kept = [axis for axis in have[1] if axis not in copies] if root is gradient else []
    if root is not gradient or have[1] != [*kept, *copies] or not known(extent(kept) == heads):
        return None
    return total, [have[0], kept, *have[2:]], [[axis for axis in leaves(g) if axis not in copies] for g in dims]


def _replace_mask(node: Node, new: Node) -> None:
    """Replace the call `node` by `new`, which takes over its metadata."""
    new.meta.update({key: value for key, value in node.meta.items() if key != "val"})
    node.replace_all_uses_with(new)
    erase_dead(node)


@family("attention", "joint", 20)
def read_masks(context: Context) -> None:
    """Replace masks by rules and texts in calls whose mask gets no gradient."""
    for target in (LSE, BACKWARD):
        for node in context.graph.find_nodes(op="call_function", target=target):
            args = bind(node)
            kept = args.keep if target is BACKWARD else ""
            if isinstance(args.mask, Node) and not (args.causal or args.window or args.score or kept):
                _read_mask(node, args)


def _read_mask(node: Node, args: Any) -> None:
    """Replace one call by a call with its mask read; leave it alone if the mask stays as it is."""
    rewrite, target = Rewrite(node), node.target
    assert callable(target)
    try:
        read = read_mask(rewrite, attention_args(node))
    except Miss:
        rewrite.discard()
        return
    if read.mask is args.mask and not (read.causal or read.window or read.score):
        rewrite.discard()
        return
    _replace_mask(node, rewrite.call(target, *args._replace(**read._asdict())))
