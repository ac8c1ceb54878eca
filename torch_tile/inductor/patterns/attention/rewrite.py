# SPDX-License-Identifier: Apache-2.0
"""Replace attention by `tile.attention`: written-out softmax(scale * Q K^T + mask) V, ATen's ops, and captured calls.

In every form, the heads of k and v are un-expanded. A causal or sliding-window mask is read as a rule.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.axes import Group, arrange, axes_of, extent, leaves, trace
from torch_tile.inductor.graph.nodes import (
    CAST,
    TOLD,
    Miss,
    Rewrite,
    arg,
    aten,
    bind,
    dtype,
    has_arg,
    is_call,
    known,
    shape,
    val,
)
from torch_tile.inductor.graph.score_index import Places
from torch_tile.inductor.graph.strip_copies import bare, remove_identical_copies, unscaled
from torch_tile.inductor.patterns.attention import masks, score_program
from torch_tile.inductor.patterns.attention.fit import check_attention_shapes
from torch_tile.inductor.patterns.attention.masks import LSE, with_sink
from torch_tile.inductor.patterns.attention.matcher import Operand, Pattern, Term, place, place_query, read, same_dtype
from torch_tile.inductor.patterns.attention.scores import Mask, NoMatch, aligned
from torch_tile.inductor.select import cost_rules
from torch_tile.kernels.attention.args import AttentionArgs, AttentionBackwardArgs, BlockSparseArgs

OP = torch.ops.tile.attention.default
BACKWARD = torch.ops.tile.attention_backward.default
BLOCK_SPARSE = torch.ops.tile.attention_block_sparse.default
SOFTMAX = torch.ops.tile.softmax.default
FUSED = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)


@family("attention", "post_grad", 330)
def match(context: Context) -> None:
    """Replace written-out attention and ATen's fused ops."""
    for node in list(context.graph.nodes):
        try:
            if is_call(node, SOFTMAX) and node.users:
                _written_out(context, node)
            elif is_call(node, *FUSED):
                _fused(context, node)
        except Miss as reason:
            if getattr(reason, "near", True) and TOLD not in node.meta:
                context.miss("attention", node, reason)


def _written_out(context: Context, softmax: Node) -> None:
    """Replace the attention around a softmax; raises NoMatch if there is none."""
    pattern = read(softmax)
    if len(pattern.terms) != 1:
        raise NoMatch(
            f"the scores are a sum of {len(pattern.terms)} products",
            "join them into one: torch.cat([q1, q2], -1) @ torch.cat([k1, k2], -1).mT",
        )
    rewrite = Rewrite(pattern.output)
    try:
        try:
            new = build(rewrite, pattern)
        except score_program.Unwritable:
            rewrite.discard()
            new = build(rewrite, pattern, in_text=False)
    except Miss as reason:
        rewrite.discard()
        reason.near = True  # type: ignore[attr-defined]
        raise
    sure = cost_rules.of_scores(rewrite.nodes)
    context.replace(rewrite, "attention", [(pattern.output, new)], describe(rewrite), pattern.output, sure)


def build(rewrite: Rewrite, pattern: Pattern, in_text: bool = True) -> Node:
    """Insert the op for a pattern; return the replacement of its last product. `in_text` as for `masks.combine`."""
    term = pattern.terms[0]
    batch, kv_heads, shared, queries = roles(pattern)
    heads, keys = [*kv_heads, *shared], pattern.dims[-1]
    term = _unscaled(term)
    q = place_query(rewrite, term, [batch, heads, queries, term.inner])
    k = place(rewrite, term.key, [batch, kv_heads, keys, term.inner])
    v = place(rewrite, pattern.value, [batch, kv_heads, keys, pattern.value_inner])
    dims = [batch, heads, queries, keys]
    arguments = arguments_for(rewrite, pattern, (q, k, v), dims, term.scale, in_text)
    if pattern.sink is None:
        new = rewrite.call(OP, *arguments)
    else:
        new = with_sink(rewrite, arguments, place(rewrite, pattern.sink, [batch, heads, queries, []]))
    have = [batch, heads, queries, pattern.value_inner]
    arranged = arrange(rewrite, new, have, pattern.output_dims)
    if arranged is None:
        raise NoMatch(
            "the output has other dimensions than attention's",
            "sum over the keys only: softmax(...) @ v with v [batch, heads, keys, head size]",
            at=pattern.output,
        )
    return arranged if dtype(arranged) == dtype(pattern.output) else rewrite.call(CAST, arranged, dtype(pattern.output))


def arguments_for(
    rewrite: Rewrite, pattern: Pattern, qkv: tuple[Any, Any, Any], dims: list[Group], scale: Any, in_text: bool
) -> AttentionArgs[Any]:
    """Return the arguments of the op for a pattern whose operands are in place.

    `dims` are the dimensions of the scores. `in_text` as for `masks.combine`.
    """
    if not same_dtype(qkv):
        raise NoMatch("q, k and v have different dtypes", "cast all three to one dtype before the first product")
    places, modified = Places(dims[0], dims[2], dims[3], dims[1]), pattern.scores.modified
    score = score_program.SCORE
    if modified is not None:
        score = score_program.read(modified, pattern.scores.products[0], places, rewrite)
    said = masks.combine(rewrite, pattern.masks, dims, score, places, in_text)
    return arguments_of(rewrite, qkv, said, scale, dims, places)


def call(
    rewrite: Rewrite, qkv: tuple[Any, Any, Any], said: masks.Said, scale: Any, dims: list[Group], places: Places
) -> Node:
    """Insert the op on q, k and v with its masks and score text. With `scale` None, the op uses its default."""
    return rewrite.call(OP, *arguments_of(rewrite, qkv, said, scale, dims, places))


def arguments_of(
    rewrite: Rewrite, qkv: tuple[Any, Any, Any], said: masks.Said, scale: Any, dims: list[Group], places: Places
) -> AttentionArgs[Any]:
    """Return the arguments of the op on q, k and v. With `scale` None, the op uses its default."""
    q, k, v = qkv
    by, score = score_program.split_scale(said.score)
    if by != 1:
        scale = by * (shape(q)[3] ** -0.5 if scale is None else scale)
    rule = said.rule
    if not rule.causal and not rule.window and score_program.reads_sizes(score):
        rule.offset = score_program.last_at_last(dims)
    text = score_program.Text(rewrite, places, dims, rule.offset)
    written = text.write(score)
    far = next((x for x in text.aux if val(x).device != val(q).device), None)
    if far is not None:
        raise score_program.Unwritable("scores read a tensor of another device", "move it to that of q", at=far)
    wide = next((x for x in text.aux if dtype(x) == torch.float64 != dtype(q)), None)
    if wide is not None:
        raise score_program.Unwritable(
            "scores read float64 where they are computed in float32", "cast it before", at=wide
        )
    offset = rule.offset_argument(rewrite, q, k)
    aux = text.aux if written else None
    return AttentionArgs(q, k, v, said.tensor, rule.causal, scale, rule.window, offset, aux, written)


def _unscaled(term: Term) -> Term:
    """Move the numbers that multiply the queries or keys of a term into its scale."""
    q, q_dims, by = unscaled(term.query.root, term.query.groups, casts=True)
    k, k_dims, too = unscaled(term.key.root, term.key.groups, casts=True)
    return replace(term, query=Operand(q, q_dims), key=Operand(k, k_dims), scale=term.scale * by * too)


class Roles(NamedTuple):
    """The dimensions of a softmax: batch, heads of keys and values, query heads that share one, and queries."""

    batch: Group
    kv_heads: Group
    shared: Group
    queries: Group


def roles(pattern: Pattern) -> Roles:
    """Split the dimensions of the softmax by what they count."""
    present = pattern.terms[0].key.axes() | pattern.value.axes()
    *outer, queries = pattern.dims[:-1]
    for i, group in enumerate(outer[1:], 1):  # laid out [batch, query, head, key]: heads of keys behind the queries
        if not set(leaves(group)) & present and any(set(leaves(g)) & present for g in [*outer[i + 1 :], queries]):
            outer, queries = [*outer[:i], *outer[i + 1 :], queries], group
            break
    if not outer:
        return Roles([], [], [], queries)
    batch, heads = outer[0], [a for g in outer[1:] for a in leaves(g)]
    if not heads and len(leaves(batch)) > 1:
        first, *heads = leaves(batch)
        batch = [first]
    return Roles(batch, [a for a in heads if a in present], [a for a in heads if a not in present], queries)


def describe(rewrite: Rewrite) -> str:
    """Return the text of a rewrite for the report: its op and shapes."""
    node = next(n for n in rewrite.nodes if is_call(n, OP, LSE, BLOCK_SPARSE))
    if is_call(node, BLOCK_SPARSE):
        blocks = bind(node, BlockSparseArgs[Any])
        return f"tile.attention_block_sparse{signature(node)} of blocks {blocks.block_q} x {blocks.block_kv}"
    return "tile.attention" + signature(node, " with sinks" if is_call(node, LSE) else "")


def attention_args(node: Node) -> AttentionArgs[Any]:
    """Return the arguments of attention, from a call of it or of its backward."""
    if is_call(node, BACKWARD):
        return bind(node, AttentionBackwardArgs[Any]).forward
    return bind(node, AttentionArgs[Any])


def signature(node: Node, more: str = "") -> str:
    """Return the text of shapes and mask kind of a `tile.attention` or of its backward."""
    args = bind(node, BlockSparseArgs[Any]) if is_call(node, BLOCK_SPARSE) else attention_args(node)
    q, k, v = (list(shape(n)) for n in (args.q, args.k, args.v))
    kind = [word for word, on in (("causal", args.causal), ("mask", getattr(args, "mask", None))) if on]
    if args.window:
        kind.append(f"window {args.window}")
    if args.score:
        kind.append(f"score {args.score}")
    return f"(q {q}, k {k}, v {v}{''.join(', ' + w for w in kind)}){more}"


def _fused(context: Context, node: Node) -> None:
    """Replace ATen's fused attention, which Inductor's own patterns make, if only its output is used."""
    if any(not is_call(u, operator.getitem) or u.args[1] != 0 for u in node.users):
        if context.settings.select == "fastest":
            context.handled.add(node)  # training, of which it was decided before autograd
            return
        raise NoMatch(
            "the log-sum-exp of an ATen attention is used: this is training",
            "call F.scaled_dot_product_attention, which is taken before autograd",
        )
    if len(node.users) != 1:
        raise NoMatch("the output is unpacked more than once", "call F.scaled_dot_product_attention, not the aten op")
    q, k, v = (arg(node, name) for name in ("query", "key", "value"))
    mask = next((arg(node, name) for name in ("attn_bias", "attn_mask") if has_arg(node, name)), None)
    if arg(node, "dropout_p") != 0.0:
        raise NoMatch("dropout", "call model.eval(), or pass dropout_p=0.0")
    check_attention_shapes(q, k, v)
    output = next(iter(node.users))
    rewrite = Rewrite(output)
    causal, scale = bool(arg(node, "is_causal")), arg(node, "scale")
    _attend(rewrite, AttentionArgs(q, k, v, mask, causal, scale))
    context.replace(rewrite, "attention", [(output, rewrite.nodes[-1])], describe(rewrite), node)


@family("attention", "post_grad", 340)
def refine(context: Context) -> None:
    """Improve captured ops: drop copies around them and expanded heads of k and v, and read their masks."""
    for node in context.graph.find_nodes(op="call_function", target=OP):
        if node in context.handled:
            continue
        rewrite = Rewrite(node)
        new = _attend(rewrite, attention_args(node))
        new.meta.update({key: value for key, value in node.meta.items() if key != "val"})
        node.replace_all_uses_with(new)
        context.graph.erase_node(node)
    for node in context.graph.find_nodes(op="call_function", target=OP):
        remove_identical_copies(node)


def _attend(rewrite: Rewrite, args: AttentionArgs[Any]) -> Node:
    """Insert the op without copies in front, with un-expanded kv heads, and with the mask as a rule if possible."""
    q, k, v, scale = args.q, args.k, args.v, args.scale
    width = shape(q)[3]
    scalable = scale is not None or (isinstance(width, int) and width > 0)
    (q, by), (k, too), (v, _) = bare(rewrite, q, scalable), bare(rewrite, k, scalable), bare(rewrite, v)
    if by * too != 1:
        scale = (width**-0.5 if scale is None else scale) * by * too
    k, v = ungrouped(rewrite, k, v)
    args = args._replace(q=q, k=k, v=v, scale=scale)
    if args.mask is None or args.causal or args.window or args.score:
        return rewrite.call(OP, *args)
    return rewrite.call(OP, *read_mask(rewrite, args))


def read_mask(rewrite: Rewrite, args: AttentionArgs[Any]) -> AttentionArgs[Any]:
    """Replace the mask in the arguments by a rule and a score function. Keep it where these do not say all."""
    mask: Any = args.mask
    dims = axes_of((*shape(args.q)[:3], shape(args.k)[2]))
    given = Mask(mask, aligned(mask, dims), additive=dtype(mask) != torch.bool)
    places = Places(dims[0], dims[2], dims[3], dims[1])

    def said_of(attempt: Rewrite, in_text: bool) -> AttentionArgs[Any]:
        said = masks.combine(attempt, [given], dims, score_program.SCORE, places, in_text)
        return arguments_of(attempt, (args.q, args.k, args.v), said, args.scale, dims, places)

    attempt = Rewrite(rewrite.anchor)
    try:
        arguments = said_of(attempt, in_text=True)
    except score_program.Unwritable:
        attempt.discard()
        arguments = said_of(attempt, in_text=False)
    rewrite.nodes += attempt.nodes
    return arguments


def ungrouped(rewrite: Rewrite, k: Any, v: Any) -> tuple[Any, Any]:
    """Return k and v with one head per group, if both were expanded alike; else return both unchanged."""
    found = []
    for x in (k, v):
        groups = axes_of(shape(x))
        root, have = trace(x, groups)
        present = {a for g in have for a in g}
        heads = leaves(groups[1])
        kept = [a for a in heads if a in present]
        if kept == heads or kept != heads[: len(kept)]:
            return k, v
        found.append((root, have, [groups[0], kept, groups[2], groups[3]]))
    if not known(extent(found[0][2][1]) == extent(found[1][2][1])):
        return k, v
    new = [arrange(rewrite, root, have, want) for root, have, want in found]
    return (k, v) if None in new else (new[0], new[1])
