# SPDX-License-Identifier: Apache-2.0
"""Replace absorbed multi-head latent attention, written with einsum or matmul, by `tile.mla_decode`.

    scores = (q @ kv^T + q_pe @ k_pe^T) * scale;  out = softmax(scores) @ kv

One latent vector per position serves all heads, as key and as value. Where every query sees the same keys, queries are
treated as further heads. A mask may give the length of each sequence, or be causal among the last queries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.axes import Group, arrange, extent, leaves, unify
from torch_tile.inductor.graph.nodes import CAST, Rewrite, aten, dtype, equivalent, is_call, known, product, shape
from torch_tile.inductor.graph.score_index import Places
from torch_tile.inductor.graph.strip_copies import remove_identical_copies
from torch_tile.inductor.patterns.attention import masks
from torch_tile.inductor.patterns.attention.matcher import Operand, Pattern, Term, place, place_query, read, same_dtype
from torch_tile.inductor.patterns.attention.scores import NoMatch
from torch_tile.inductor.select import cost_rules

OP = torch.ops.tile.mla_decode.default


@family("mla", "post_grad", 310)
def match(context: Context) -> None:
    """Replace every softmax over a sum of two products if its value is the key of one of them."""
    for node in list(context.graph.find_nodes(op="call_function", target=torch.ops.tile.softmax.default)):
        if not node.users:
            continue
        try:
            pattern = read(node)
        except NoMatch:
            continue  # attention says why
        if len(pattern.terms) != 2:
            continue
        try:
            _replace(context, pattern)
        except NoMatch as reason:
            context.miss("mla", node, reason)
    for node in context.graph.find_nodes(op="call_function", target=OP):
        remove_identical_copies(node)


def _replace(context: Context, pattern: Pattern) -> None:
    """Build `tile.mla_decode` for a pattern and offer it as a replacement; raises NoMatch if it does not fit."""
    if pattern.sink is not None:
        raise NoMatch("a sink takes part in the softmax", "leave it out: the kernel has none")
    latent, rope = _order(pattern)
    if latent.scale != rope.scale:
        raise NoMatch(
            "the two products that make the scores are scaled differently",
            "scale their sum: (q @ kv.mT + q_pe @ k_pe.mT) * scale",
        )
    *outer, keys = pattern.dims
    present = latent.key.axes() | rope.key.axes()
    rows = [a for g in outer for a in leaves(g)]
    batch: Group = [a for a in rows if a in present]
    heads: Group = [a for a in rows if a not in present]
    rewrite = Rewrite(pattern.output)
    try:
        queries, seq_lens = _visible(rewrite, pattern, batch)
        heads = [a for a in heads if a not in queries]
        q = place_query(rewrite, latent, [batch, queries, heads, latent.inner])
        q_pe = place_query(rewrite, rope, [batch, queries, heads, rope.inner])
        kv = place(rewrite, latent.key, [batch, keys, latent.inner])
        k_pe = place(rewrite, rope.key, [batch, keys, rope.inner])
        if not same_dtype([q, q_pe, kv, k_pe]):
            raise NoMatch("queries and cache have different dtypes", "cast the queries to the cache's dtype")
        new = rewrite.call(OP, q, q_pe, kv, k_pe, None, seq_lens, latent.scale)
        arranged = arrange(rewrite, new, [batch, queries, heads, latent.inner], pattern.output_dims)
        if arranged is None:
            raise NoMatch(
                "the output has other dimensions than the latent's",
                "sum over the positions only: softmax(scores) @ kv, and project to values afterwards",
                at=pattern.output,
            )
    except NoMatch:
        rewrite.discard()
        raise
    if dtype(arranged) != dtype(pattern.output):
        arranged = rewrite.call(CAST, arranged, dtype(pattern.output))
    op: Any = next(n for n in rewrite.nodes if is_call(n, OP))
    what = f"tile.mla_decode(q {list(shape(op.args[0]))}, kv {list(shape(op.args[2]))}, rope {shape(op.args[3])[-1]})"
    sure = cost_rules.of_latents(rewrite.nodes)
    context.replace(rewrite, "mla", [(pattern.output, arranged)], what, pattern.output, sure)


def _visible(rewrite: Rewrite, pattern: Pattern, batch: Group) -> tuple[Group, Node | None]:
    """Read the mask; return the query dimension of the op and its sequence lengths."""
    if not pattern.masks:
        return [], None
    if len(pattern.masks) > 1:
        raise NoMatch(
            f"{len(pattern.masks)} masks on the scores", "join the masks into one with &", at=pattern.masks[0].node
        )
    mask, (*outer, keys) = pattern.masks[0], pattern.dims
    count = extent(keys)
    for group in ([], *reversed(outer)):
        said = masks.what_it_says(mask, Places(batch, group, keys))
        if said is None:
            break
        visible, fill = said
        rule = masks.classify(visible, extent(group), count)
        if rule is not None and rule.complete and masks.exact(rule, fill, extent(group), count):
            if not rule.causal and not rule.window:
                return [], None
            if rule.causal and not rule.window and known(rule.offset == count - extent(group)):
                return leaves(group), None
        found = masks.lengths(visible)
        if found is not None and fill == float("-inf"):
            return [], _seq_lens(rewrite, found, extent(batch))
    raise NoMatch(
        "the mask is neither causal among the last queries nor a length for each sequence",
        "compare positions: arange(keys) < lengths[:, None], or leave the mask out where every query sees every key",
        at=mask.node,
    )


def _seq_lens(rewrite: Rewrite, found: tuple[str, int], batch: Any) -> Node:
    """Insert `lens + c` as an int32 tensor [B]."""
    name, shift = found
    lens = next(n for n in rewrite.graph.nodes if n.name == name)
    if not known(product(shape(lens)) == batch):
        raise NoMatch("the lengths are not one for each sequence", "make them an integer tensor [batch]", at=lens)
    lens = rewrite.call(CAST, rewrite.reshape(lens, [batch]), torch.int32)
    return rewrite.call(aten.add.Tensor, lens, shift) if shift else lens


def _order(pattern: Pattern) -> tuple[Term, Term]:
    """Return both terms; the first is the term whose key is also the value."""
    for latent, rope in (pattern.terms, pattern.terms[::-1]):
        if _values_are_keys(latent, pattern.value, pattern.value_inner):
            return latent, rope
    raise NoMatch(
        "the values are not the keys of either product that makes the scores",
        "for latent attention, multiply by the latent cache itself: softmax(scores) @ kv; for ordinary attention, "
        "join both products into one: torch.cat([q, q_pe], -1) @ torch.cat([k, k_pe], -1).mT",
        at=pattern.output,
    )


def _values_are_keys(term: Term, value: Operand, inner: Group) -> bool:
    """Return whether the values equal the term's keys in each dimension, so that both share the latent axis."""
    if not equivalent(term.key.root, value.root) or len(term.key.groups) != len(value.groups):
        return False
    own, other = leaves(term.inner), leaves(inner)
    for a, b in zip(term.key.groups, value.groups, strict=True):
        a, b = leaves(a), leaves(b)
        if set(a) & set(own) or set(b) & set(other):
            if [x for x in a if x not in own] != [x for x in b if x not in other] or not unify(term.inner, inner):
                return False
        elif a != b:
            return False
    return True
