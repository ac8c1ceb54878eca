# SPDX-License-Identifier: Apache-2.0
"""Move pointwise operations on a product behind the split of its columns, so that the product's matchers see the split.

An example from experts is `gate, up = (x @ w).masked_fill(nobody, 0).chunk(2, -1)`. This happens only where the columns
meet again and one kernel may compute all of them. Every element is computed as often as before.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.nodes import (
    VIEWS,
    Rewrite,
    aten,
    erase_dead,
    is_call,
    is_tensor,
    known,
    only_user,
    same_shape,
    shape,
)
from torch_tile.inductor.patterns.gemm import column_slices
from torch_tile.inductor.patterns.gemm.column_slices import width
from torch_tile.inductor.patterns.gemm.epilogue import MAX_OPS, is_product, tensors_of


@family(None, "post_grad", 520)
def compute(context: Context) -> None:
    """Move pointwise steps behind the column slices that read them, the last step first."""
    for node in reversed(list(context.graph.nodes)):
        parts = column_slices.parts_of(node) if is_tensor(node) else []
        source = _source(node) if parts else None
        if source is not None and set.intersection(*map(_pointwise_of, parts)):
            for part in parts:
                _move(node, source, part)


def _source(node: Node) -> Node | None:
    """Return the operand of a pointwise node that is a product, or pointwise of one, with no other reader.

    The other operands must broadcast to it, else None.
    """
    tensors = tensors_of(node)
    found = [x for x in tensors if same_shape(shape(x), shape(node)) and only_user(x) is node and _is_made(x)]
    others = [x for x in tensors if x not in found and not (known(width(x) == 1) or known(width(x) == width(node)))]
    return found[0] if len(found) == 1 and not others else None


def _is_made(node: Node) -> bool:
    """Return whether a node has one reader and is a product under column-keeping views, or pointwise of one."""
    while column_slices.are_kept(node) and only_user(node) is not None:
        node = node.args[0]  # type: ignore[assignment]
    return only_user(node) is not None and (is_product(node) or _source(node) is not None)


def _pointwise_of(part: Node) -> set[Node]:
    """Return the nodes that are pointwise of columns, up to MAX_OPS steps behind them."""
    found = [part]
    for node in found:  # grows meanwhile
        if len(found) <= MAX_OPS:
            found += [u for u in node.users if u not in found and (is_call(u, *VIEWS) or tensors_of(u))]
    return set(found)


def _move(node: Node, source: Node, part: Node) -> None:
    """Compute columns of `node` from the columns of its operands."""
    found = column_slices.part_of(part)
    assert found is not None, f"{part} is no part of {node}"
    rewrite = Rewrite(part)

    def cut(x: Any) -> Any:
        if not is_tensor(x) or (known(width(x) == 1) and x is not source):
            return x
        return rewrite.call(aten.slice.Tensor, x, len(shape(x)) - 1, *found[1:])

    new = rewrite.call(node.target, *map(cut, node.args), **node.kwargs)  # type: ignore[arg-type]
    part.replace_all_uses_with(rewrite.reshape(new, shape(part)))
    erase_dead(part)
