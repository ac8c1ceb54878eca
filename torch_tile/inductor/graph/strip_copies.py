# SPDX-License-Identifier: Apache-2.0
"""Remove copies around attention that only move elements: read through them in front of it, drop them behind it.

The kernels address any strides, and their result has the memory layout of q. So the copies of `.contiguous()` that
models put between a projection and attention are needless work. So is scaling q by a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from torch_tile.hardware import VECTOR_BYTES
from torch_tile.inductor.compat import size_hint
from torch_tile.inductor.graph.axes import Group, arrange, axes_of, trace, trace_unrounded
from torch_tile.inductor.graph.nodes import (
    CAST,
    COPIES,
    LAYOUT,
    Rewrite,
    aten,
    dtype,
    is_call,
    known,
    only_user,
    shape,
    times_number,
    val,
)


def bare(rewrite: Rewrite, node: Any, scaled: bool = False) -> tuple[Any, float]:
    """Return the tensor under the copies of an operand, as a view of the operand's shape. Also return the number that
    scales it.

    The number is 1 unless `scaled`. The operand itself and 1 are returned where there is nothing to remove. They are
    also returned where kernels would have to copy or would read more slowly. That holds if the last dimension is not
    dense, rows are less aligned, or elements repeat.
    """
    groups = axes_of(shape(node))
    root, have = trace(node, groups)
    scale = 1.0
    if scaled:
        root, have, scale = unscaled(root, have)
    if scale == 1.0 and not _is_copied(node, root):
        return node, 1.0
    attempt = Rewrite(rewrite.anchor)
    new = arrange(attempt, root, have, groups)
    if new is None or dtype(new) != dtype(node) or not _reads_as_well(val(new), val(node), val(root)):
        attempt.discard()
        return node, 1.0
    rewrite.nodes += attempt.nodes
    return new, scale


def laid_out(rewrite: Rewrite, node: Node, like: Node) -> Node:
    """Copy `node` into the memory order of `like`, unless it has that order already. Its readers were traced so."""
    want = val(like).stride()
    if all(known(n == 1) or known(a == b) for n, a, b in zip(shape(node), val(node).stride(), want, strict=True)):
        return node
    order = sorted(range(len(want)), key=lambda d: size_hint(want[d]), reverse=True)
    dense = rewrite.call(aten.clone.default, rewrite.permute(node, order), memory_format=torch.contiguous_format)
    return rewrite.permute(dense, [order.index(d) for d in range(len(order))])


def unscaled(root: Any, groups: list[Group], casts: bool = False) -> tuple[Any, list[Group], float]:
    """Remove the constant factors of a tensor; return the tensor, its dimensions and the product of the factors.

    A factor is removed only if nothing else reads the scaled tensor: else that tensor has to be computed anyway.
    """
    scale = 1.0
    while (found := times_number(root)) and found[1] and dtype(found[0]) == dtype(root) and _is_read_once(root):
        root, groups = (trace_unrounded if casts else trace)(found[0], groups)
        scale *= found[1]
    return root, groups, scale


def remove_identical_copies(node: Node) -> None:
    """Remove copies of `node`, also through views, with the same memory layout. Graph results stay copies."""
    for clone in list(_copies_of(node)):
        groups = axes_of(shape(clone))
        root, have = trace(clone.args[0], groups)
        if root is not node or _is_returned(clone):
            continue
        attempt = Rewrite(clone)
        new = arrange(attempt, node, have, groups)
        if new is not None and _share_memory(val(new), val(node)) and _have_same_strides(val(new), val(clone)):
            clone.replace_all_uses_with(new)
            clone.graph.erase_node(clone)
        else:
            attempt.discard()


def _copies_of(node: Node) -> Iterator[Node]:
    """Yield the copies that are made of a node, of a view of it, or of another copy."""
    for user in node.users:
        if is_call(user, *LAYOUT, *COPIES):
            if is_call(user, aten.clone.default):
                yield user
            yield from _copies_of(user)


def _is_copied(node: Any, root: Any) -> bool:
    """Return whether a copy lies between a node and the tensor that it is traced to."""
    while node is not root:
        if is_call(node, aten.clone.default):
            return True
        node = node.args[0]
    return False


def _is_read_once(node: Node) -> bool:
    """Return whether a single computation reads a node, through views and copies that nothing else reads."""
    user = only_user(node)
    while user is not None and is_call(user, CAST, *LAYOUT, *COPIES):
        user = only_user(user)
    return user is not None and user.op != "output"


def _reads_as_well(new: torch.Tensor, old: torch.Tensor, root: torch.Tensor) -> bool:
    """Return whether kernels read a view of `root` no slower than the copy `old`."""
    if not _share_memory(new, root):
        return False  # no view: the copy is only elsewhere
    repeats = any(
        known(stride == 0) and not known(size == 1) for size, stride in zip(new.shape, new.stride(), strict=True)
    )
    dense = known(new.stride(-1) == 1) or known(new.shape[-1] == 1)
    return dense and not repeats and (_has_aligned_rows(new) or not _has_aligned_rows(old))


def _has_aligned_rows(x: torch.Tensor) -> bool:
    """Return whether the offset and all row strides of a tensor are multiples of `VECTOR_BYTES`."""
    starts = (x.storage_offset(), *(s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if not known(n == 1)))
    return all(known(start * x.element_size() % VECTOR_BYTES == 0) for start in starts)


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have one storage."""
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def _have_same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one shape surely have equal strides in all dimensions of more than one element."""
    return all(known(n == 1) or known(s == t) for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True))


def _is_returned(node: Node) -> bool:
    """Return whether a node, or a view of it, is a result of the graph."""
    return any(u.op == "output" or (is_call(u, *LAYOUT, *COPIES) and _is_returned(u)) for u in node.users)
