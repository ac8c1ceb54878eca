# SPDX-License-Identifier: Apache-2.0
"""Replace torch's `flex_attention` by a tile op: translate score_mod and mask_mod into a text and a rule.

The mask_mod defines a block mask, as in torch's own eager form. The lists of blocks name blocks to skip: where a causal
rule or a window does not say the same, `tile.attention_block_sparse` walks the lists.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from torch_tile.inductor import compat
from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph import index_expr
from torch_tile.inductor.graph.axes import axes_of, extent
from torch_tile.inductor.graph.extract import body_of
from torch_tile.inductor.graph.flex_backend import FLASH, OP, set_backend
from torch_tile.inductor.graph.nodes import (
    CASTS,
    COPIES,
    EXAMPLE,
    Miss,
    Rewrite,
    aten,
    dtype,
    is_call,
    is_tensor,
    known,
    name_of,
    shape,
    val,
)
from torch_tile.inductor.graph.pointwise import WORDS
from torch_tile.inductor.graph.score_index import Places
from torch_tile.inductor.patterns.attention import masks, score_program
from torch_tile.inductor.patterns.attention.rewrite import BLOCK_SPARSE, arguments_of, call, describe
from torch_tile.inductor.patterns.attention.scores import NoMatch
from torch_tile.inductor.report.rows import KEPT
from torch_tile.kernels.attention.args import BlockSparseArgs
from torch_tile.kernels.attention.arguments import FAR
from torch_tile.ops.families.attention_block_sparse import LEAST

PLACES = (index_expr.B, index_expr.H, index_expr.Q, index_expr.K)
LISTS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip


@family("attention", "post_grad", 320)
def match(context: Context) -> None:
    """Replace each `flex_attention` call whose score_mod and mask_mod can be written in the kernel's language."""
    for node in context.graph.find_nodes(op="call_function", target=OP):
        rewrite = Rewrite(node)
        try:
            output = _output(node)
            new = _attend(rewrite, node)
            if context.settings.select == "fastest":
                rewrite.given = _with_examples(node)
            context.replace(rewrite, "attention", [(output, new)], describe(rewrite), node)
            _keep_rival(context, node, new)
        except Miss as reason:
            rewrite.discard()
            context.miss("attention", node, reason)


def _keep_rival(context: Context, node: Node, new: Node) -> None:
    """Give a call that is kept the backend of Inductor that won its contest."""
    row = context.rows.get(new)
    if row is not None and row.status == KEPT and row.times is not None and row.times.rival.endswith(FLASH):
        set_backend([node], FLASH)


def _output(node: Node) -> Node:
    """Return the output of the call, which must be the only result that is used."""
    if any(not is_call(u, operator.getitem) or u.args[1] != 0 for u in node.users) or len(node.users) != 1:
        raise NoMatch(
            "the log-sum-exp or the maxima of flex_attention are used: this is training, or they are returned",
            "run it under torch.no_grad(), without return_lse and return_aux",
        )
    return next(iter(node.users))


def _attend(rewrite: Rewrite, node: Node) -> Node:
    """Insert `tile.attention` for a `flex_attention` call; raises NoMatch if it cannot be written."""
    q, k, v, score_mod, block_mask, scale, _, score_buffers, mask_buffers = _arguments(node)
    if len({dtype(x) for x in (q, k, v)}) != 1 or not known(shape(k)[0] == shape(q)[0]):
        raise NoMatch("q, k and v differ in dtype or batch", "cast or expand them before the call")
    dims = axes_of((*shape(q)[:3], shape(k)[2]))
    places = Places(dims[0], dims[2], dims[3], dims[1])
    score = index_expr.numeric(_value(score_mod, (score_program.SCORE, *PLACES), score_buffers))
    visible = index_expr.truth(_value(block_mask[-1], PLACES, mask_buffers))
    lists = _lists(block_mask, shape(q)[2], shape(k)[2])
    if visible == sympy.true and lists is None and not _is_one_block(block_mask, shape(q)[2], shape(k)[2]):
        raise NoMatch(
            "the block mask has blocks but no mask_mod: only its lists say what is visible",
            f"give BlockMask a mask_mod that says the same, or blocks of a multiple of {LEAST} rows",
        )
    # One place of a single element is 0: what is asked of it holds for all, or for none.
    alone = {symbol: 0 for symbol, group in zip(PLACES, dims, strict=True) if not group}
    score, visible = score.subs(alone), visible.subs(alone)
    rule = masks.classify(visible, extent(dims[2]), extent(dims[3])) or masks.Rule(False, 0, 0, visible)
    whole = rule.complete and visible != sympy.true  # the rule says what the lists say
    if not rule.complete:
        score = sympy.Piecewise((score, rule.rest), (-sympy.oo, True))
    said = masks.Said(rule, None, score)
    if lists is None or whole:
        return call(rewrite, (q, k, v), said, scale, dims, places)
    given = arguments_of(rewrite, (q, k, v), said, scale, dims, places)
    counts, indices, full_counts, full_indices, rows, columns = lists
    options = given.causal, given.scale, given.window, given.q_offset, given.aux, given.score
    sparse = BlockSparseArgs(q, k, v, counts, indices, full_counts, full_indices, rows, columns, *options)
    return rewrite.call(BLOCK_SPARSE, *sparse)


def _lists(block_mask: Sequence[Any], queries: Any, keys: Any) -> tuple[Any, ...] | None:
    """Return the lists of a block mask and the sizes of its blocks; None for lists that kernels cannot walk."""
    rows, columns = block_mask[-3:-1]
    if not isinstance(rows, int) or not isinstance(columns, int) or rows % LEAST or columns % LEAST:
        return None
    found = block_mask[2:6]
    counts = found[0]
    if _is_one_block(block_mask, queries, keys) or not is_tensor(counts) or dtype(counts) != torch.int32:
        return None
    if not known(shape(counts)[2] == (queries + rows - 1) // rows):
        return None
    return (*found, rows, columns)


def _arguments(node: Node) -> tuple[Any, ...]:
    """Return the arguments of a `flex_attention` call. Raises NoMatch for an unknown form."""
    if len(node.args) != 9 or node.kwargs:
        raise NoMatch("another form of flex_attention than this version knows", "please report the graph")
    return node.args


def _with_examples(node: Node) -> list[Node]:
    """Give the nodes of the block lists example values for a contest, made from the mask_mod; return the nodes."""
    q, k, _, _, block_mask, *_, mask_buffers = _arguments(node)
    if any(map(is_tensor, mask_buffers)):
        raise NoMatch(
            "how much the mask_mod of flex_attention shows depends on values, so no contest can tell who is faster",
            'give options={"select": "tile"} to have it computed by tile.attention',
        )
    lists = {name: x for name, x in zip(LISTS, block_mask[2:10], strict=True) if isinstance(x, Node)}

    @functools.cache
    def make_block_mask() -> BlockMask | None:
        """Build flex_attention's BlockMask once; return None if a single block covers all queries and keys."""
        queries, keys = compat.size_hint(shape(q)[2]), compat.size_hint(shape(k)[2])
        if _is_one_block(block_mask, queries, keys):
            return None
        body = body_of(block_mask[-1])
        batch, heads = (compat.size_hint(n) for n in shape(lists["kv_num_blocks"])[:2])
        device = str(val(q).device)
        rows, columns = map(compat.size_hint, block_mask[-3:-1])

        def visible(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            """Evaluate the mask_mod at one score."""
            found: Any = body(b, h, i, j, *mask_buffers)  # type: ignore[misc]
            seen: torch.Tensor = found[0] if isinstance(found, list | tuple) else found
            return seen

        return create_block_mask(visible, batch, heads, queries, keys, device, BLOCK_SIZE=(rows, columns))

    def example(name: str, x: Node) -> torch.Tensor:
        """Make the example value of one tensor of the BlockMask's lists."""
        like: torch.Tensor = compat.empty_for(val(x))
        blocks = make_block_mask()
        if blocks is None:  # the one is seen in part
            compat.elements(like).fill_(name in ("kv_num_blocks", "q_num_blocks"))
            return like
        first = tuple(slice(None if stride else 1) for stride in like.stride())  # of what is expanded
        like[first].copy_(getattr(blocks, name)[first])
        return like

    for name, x in lists.items():
        x.meta[EXAMPLE] = functools.partial(example, name, x)
    return list(lists.values())


def _is_one_block(block_mask: Sequence[Any], queries: Any, keys: Any) -> bool:
    """Return whether one block holds all queries and keys, so that there are no real block lists."""
    rows, columns = (min(size, FAR) if isinstance(size, int) else size for size in block_mask[-3:-1])
    return (rows == FAR or known(queries <= rows)) and (columns == FAR or known(keys <= columns))


def _value(module: Node, given: Sequence[Any], buffers: Sequence[Any]) -> Any:
    """Return the result of a score_mod or mask_mod as an expression of its indices, the score and captured tensors."""
    body = body_of(module)
    if body is None:
        raise NoMatch("a modification of flex_attention that is no graph", "write it as a Python function")
    inputs = body.graph.find_nodes(op="placeholder")
    scalars = (*given, *(b if is_tensor(b) else index_expr.at(b, ()) for b in buffers))
    values: dict[Node, Any] = dict(zip(inputs, scalars, strict=True))
    for node in body.graph.nodes:
        if node.op == "output":
            result = node.args[0]
            return _operand(values, result[0] if isinstance(result, list | tuple) else result)
        if node.op == "call_function":
            value = _computed(node, values)
            if value is None:
                raise NoMatch(
                    f"{name_of(node)} in a modification of flex_attention has no word in the kernel's language", WORDS
                )
            values[node] = value
    raise NoMatch("a modification of flex_attention returns nothing", "return the score")


def _computed(node: Node, values: dict[Node, Any]) -> Any:
    """Return the expression of a call inside a score_mod or mask_mod, or None if it has none."""
    if is_call(node, aten.index.Tensor):
        table, places = values.get(node.args[0]), node.args[1]  # type: ignore[arg-type]
        if not isinstance(table, Node) or any(p is None for p in places):  # type: ignore[union-attr]
            return None
        return _load(table, [_operand(values, p) for p in places])  # type: ignore[union-attr]
    if is_call(node, *CASTS, *COPIES):
        return _operand(values, node.args[0])
    if not node.all_input_nodes:
        return index_expr.at(node, ())
    operands = index_expr.pointwise_operands(node)
    return None if operands is None else index_expr.combine(node, [_operand(values, x) for x in operands])


def _operand(values: dict[Node, Any], x: Any) -> Any:
    """Return the expression of an operand of a call."""
    value = values[x] if isinstance(x, Node) else index_expr.at(x, ())
    return _load(value, []) if isinstance(value, Node) else value


def _load(table: Node, index: Sequence[Any]) -> Any:
    """Return the load of one element of a tensor; raises NoMatch for rows and for dtypes that float32 may not hold."""
    if len(index) != len(shape(table)):
        raise NoMatch("a modification of flex_attention reads a row of a tensor", "read single elements", at=table)
    if not (dtype(table).is_floating_point or val(table).dtype == torch.bool):
        raise NoMatch(
            f"a modification of flex_attention reads {dtype(table)}, which float32 may not hold",
            "give it float32 or bool tensors",
            at=table,
        )
    load = index_expr.LOAD(sympy.Symbol(table.name), *index)
    return index_expr.truth(load) if dtype(table) == torch.bool else load
