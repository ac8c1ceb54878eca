# SPDX-License-Identifier: Apache-2.0
"""Pre-grad: turn symbols that dynamic=True made of Python numbers back into numbers where a kernel wants them.

AOTAutograd turns such a symbol into a tensor of the CPU. Here it is read, which adds a guard that recompiles if it ever
changes; so this is for what models keep: eps of norms, scales and soft caps of attention. Temperatures of samplers,
whose softmax no product reads, stay symbols.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.fx.node import map_arg

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.nodes import aten, can_be_guarded, is_tensor, known, product, shape, val

STATISTICS = ("mean", "var", torch.mean, torch.var)
SOFTMAX = ("softmax", F.softmax, torch.softmax, aten.softmax.int)
PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum")
MOST_BETWEEN = 24


@family(None, "pre_grad", 20)
def specialise(context: Context) -> None:
    """Replace the symbols in norms and in scores of attention by numbers."""
    families = context.settings.families
    for node in list(context.graph.nodes):
        if "norm" in families and node.target in (operator.add, torch.add) and len(node.args) == 2 and not node.kwargs:
            statistic, eps = node.args
            if isinstance(statistic, Node) and statistic.target in STATISTICS and _is_kept(eps):
                node.args = (statistic, float(val(eps)))
        if {"attention", "mla"} & set(families) and node.target in SOFTMAX and is_tensor(node):
            scores = _alike(node, lambda each: each.all_input_nodes)
            if scores is not None and _alike(node, lambda each: list(each.users)) is not None:
                for each in scores:
                    _make_numbers(each)


def _alike(softmax: Node, neighbours: Any) -> list[Node] | None:
    """Return the elementwise nodes on one side of a softmax up to a product; None if there is no product."""
    count, found, products = product(shape(softmax)), [softmax], 0
    for node in found:  # grows meanwhile
        for each in neighbours(node):
            if getattr(each.target, "__name__", each.target) in PRODUCTS:
                products += 1
            elif each not in found and is_tensor(each) and known(product(shape(each)) == count):
                found.append(each)
        if len(found) > MOST_BETWEEN:
            return None
    return found if products else None


def _make_numbers(node: Node) -> None:
    """Replace a node's symbolic numbers by their values."""
    if any(map(_is_kept, node.all_input_nodes)):
        node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda x: float(val(x)) if _is_kept(x) else x)


def _is_kept(x: Any) -> bool:
    """Return whether an argument is a symbol of a float that is a number outside of the graph."""
    return isinstance(val(x), torch.SymFloat) and can_be_guarded(val(x))
