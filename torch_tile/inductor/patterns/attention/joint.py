# SPDX-License-Identifier: Apache-2.0
"""Attention written out in training: forward and backward become the two kernels, and the scores are never stored.

The forward is read as in inference (matcher.py). The backward is what autograd made of it: the gradients of its two
products are found by their form (backward_matcher.py), what lies between them is tried on a few numbers
(gradient_check.py), so that a gradient that a model changed on its way is never taken for attention's own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.fx import Graph, Node

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.axes import Group, trace, views_of
from torch_tile.inductor.graph.extract import copied
from torch_tile.inductor.graph.nodes import (
    TIMES,
    TOLD,
    Miss,
    Rewrite,
    arg,
    aten,
    erase_dead,
    is_call,
    is_tensor,
    ordered,
    same_shape,
    shape,
)
from torch_tile.inductor.patterns.attention import score_program
from torch_tile.inductor.patterns.attention.backward_matcher import (
    FIX,
    OfProduct,
    backward_of,
    of_product,
)
from torch_tile.inductor.patterns.attention.gradient_check import is_gradient
from torch_tile.inductor.patterns.attention.joint_kernels import Found, Side, build
from torch_tile.inductor.patterns.attention.matcher import Operand, keys_on_left, read
from torch_tile.inductor.patterns.attention.rewrite import SOFTMAX, signature
from torch_tile.inductor.patterns.attention.scores import NoMatch
from torch_tile.inductor.patterns.attention.sinks import LSE
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
    """Each softmax of the forward as a `tile.softmax`, and the node that it stands for, if it was another."""
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
    """The attention around a softmax; raises Miss where it is none, or its gradients are not those of attention."""
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
    """The gradient of a learned mask: what is made of the weights' gradient on the way to that of the scores, and read
    besides, while all else is `needless` with attention's kernels; raises NoMatch where there is none.
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
    """Left and right of a product, or right and left."""
    a, b = product.args
    *batch, m, n = groups
    left = Side(Operand(a, [*batch, m, inner]), gradients.left)  # type: ignore[arg-type]
    right = Side(Operand(b, [*batch, inner, n]), gradients.right)  # type: ignore[arg-type]
    return (right, left) if swapped else (left, right)


def _replace(context: Context, found: Found) -> bool:
    """Let the kernels stand for what was found, unless Inductor's code for it is faster."""
    try:
        rewrite, pairs = build(found, in_text=found.of_mask is None)
    except score_program.Unwritable:
        rewrite, pairs = build(found, in_text=False)
    op = next(n for n in rewrite.nodes if is_call(n, LSE))
    what, why, outcome = f"tile.attention{signature(op)} with its backward", context.select.refused(rewrite.nodes), None
    # Of plain scores Inductor may know the spelling, and call torch's attention.
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
    """Times of the kernels, and of what is `inside`, each with the views in front of it: Inductor looks for these."""
    made, position = set(rewrite.nodes), ordered(context.graph)
    views, inputs = views_of({x for n in (*inside, *made) for x in n.all_input_nodes} - made - inside)
    olds, news = (sorted(views | nodes, key=position.__getitem__) for nodes in (inside, made))
    inputs.sort(key=position.__getitem__)
    old, new = copied(olds, inputs, [old for old, _ in pairs]), copied(news, inputs, [new for _, new in pairs])
    return context.select.of_graphs(new, old)
