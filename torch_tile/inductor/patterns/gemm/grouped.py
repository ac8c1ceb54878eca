# SPDX-License-Identifier: Apache-2.0
"""Replace products of row groups, the experts of a mixture, by `tile.grouped_gemm` with their epilogues.

Each group has a matrix of its own. The epilogue is the longest pointwise one. The gradients of the matrices become
`tile.k_grouped_gemm`.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch.fx import Node

from torch_tile.inductor import compat
from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.nodes import CAST, EXAMPLE, Miss, Rewrite, dtype, shape, val
from torch_tile.inductor.patterns.gemm import gemm, grouped_ops


@family("grouped", "post_grad", 530)
def match(context: Context) -> None:
    """Replace every grouped product and sum."""
    taken: set[Node] = set()
    for node in list(context.graph.nodes):
        if not grouped_ops.is_grouped(node) or node in taken or not node.users:
            continue
        if grouped_ops.operator_of(node) == grouped_ops.LOOP_BACKWARD:
            _replace_loop_backward(context, node)
        elif why := gemm.wrong_dtype(node):
            context.miss("grouped", node, why)
        elif found := grouped_ops.by_rows(node):
            taken.update(
                gemm.replace(context, node, functools.partial(int32_ends, offsets=found.offsets, rows=found.a))
            )
        elif found := grouped_ops.by_k(node):
            rewrite = Rewrite(node)
            new = _gradient(rewrite, rewrite.permute(found.a, (1, 0)), found.b, found.offsets, dtype(node))
            context.replace(rewrite, "grouped", [(node, new)], "tile.k_grouped_gemm", node)
        else:
            fix = "give it [S, K] and [G, K, N], or [M, S] and [S, N], with offs and without a bias"
            context.miss("grouped", node, Miss("groups are not of rows", fix))


def _gradient(rewrite: Rewrite, a: Node, b: Node, offsets: Node, result: torch.dtype) -> Node:
    """Insert the call of `tile.k_grouped_gemm`."""
    return rewrite.call(torch.ops.tile.k_grouped_gemm.default, a, b, int32_ends(rewrite, offsets, b), result)


def _replace_loop_backward(context: Context, node: Node) -> None:
    """Replace both gradients that transformers' loop over experts computes."""
    operands: Any = node.args
    a, b, offsets, grad = operands
    rewrite, pairs = Rewrite(node), []
    made: dict[Any, Any] = {
        0: lambda: rewrite.call(
            torch.ops.tile.grouped_gemm.default,
            *(grad, [rewrite.permute(b, (0, 2, 1))], int32_ends(rewrite, offsets, a), [], "", "", dtype(a)),
        ),
        1: lambda: _gradient(rewrite, a, grad, offsets, dtype(b)),
    }
    for user in list(node.users):
        if user.target is operator.getitem:
            pairs.append((user, made[user.args[1]]()))
    context.replace(rewrite, "grouped", pairs, "tile.grouped_gemm and tile.k_grouped_gemm", node)


def int32_ends(rewrite: Rewrite, offsets: Node, rows: Node) -> Node:
    """Return the offsets as the int32 that kernels read. In contests all groups have equally many rows."""
    sizes = shape(rows)[0], shape(offsets)[0]
    offsets.meta[EXAMPLE] = functools.partial(_even, *sizes, val(offsets))
    return offsets if dtype(offsets) == torch.int32 else rewrite.call(CAST, offsets, torch.int32)


def _even(rows: Any, count: Any, like: torch.Tensor) -> torch.Tensor:
    """Return offsets of equally large groups, as example values for a contest."""
    rows, count = compat.size_hint(rows), compat.size_hint(count)
    ends = torch.arange(1, count + 1, device=like.device) * rows // count
    return torch.as_tensor(ends, dtype=like.dtype)
