# SPDX-License-Identifier: Apache-2.0
"""Keep each captured op as a tile kernel, or replace it by the ATen that Inductor would have seen.

Runs last. An op is expanded if the user left out its family, or if Inductor is faster; all others stay. Then every
product, norm or attention still in the graph is reported as missed.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.inline import IN_TRAINING, captured, expand
from torch_tile.inductor.graph.nodes import TIMES, Miss, aten, dtype, is_call, is_tensor, shape, val
from torch_tile.inductor.patterns.attention import rewrite
from torch_tile.inductor.patterns.gemm.epilogue import PRODUCTS
from torch_tile.inductor.patterns.norm import fused_norm
from torch_tile.inductor.report import rows as report
from torch_tile.ops.registry import operator_of

CALLED = "attention", "mla"
"""Families whose operators a model may call itself: those of no contest, for which ATen has no form."""


@family(None, "settle", 10)
def settle(context: Context) -> None:
    """Decide on every captured op, report it, and expand the ops that stay with Inductor."""
    for node in list(context.graph.nodes):
        in_training = is_call(node, *IN_TRAINING) and node not in context.handled
        if in_training and "attention" in context.settings.families:
            what = f"{node.target}".removesuffix(".default") + rewrite.signature(node)
            times = node.meta.get(TIMES)
            context.note("attention", report.REPLACED, what, node, str(times or ""), [node], times)
        if (called := _called(node)) and node not in context.rows:  # no match made it
            what = f"{node.target}".removesuffix(".default") + _signature(node)
            context.note(called, report.REPLACED, what, node)
        found = captured(node)
        if found is None or (_settled(context, node) and node not in context.left):
            continue
        name, reference = found
        what = f"{node.target}".removesuffix(".default") + _signature(node)
        if node in context.left or name not in context.settings.families:
            context.handled.update(expand(node, reference))
            continue
        on_rows = name in ("norm", "softmax")
        if on_rows and fused_norm.left_to_inductor(context, what, node, node.all_input_nodes[0], node, name):
            context.handled.update(expand(node, reference))
        elif why := context.select.refused([node]):
            context.note(name, report.KEPT, what, node, why, [node])
            context.handled.update(expand(node, reference))
        elif (outcome := context.select.of_captured(node, reference)) is not None:
            status = report.REPLACED if outcome.tile_wins else report.KEPT
            context.note(name, status, what, node, str(outcome), [node], outcome)
            if not outcome.tile_wins:
                context.handled.update(expand(node, reference))
        else:
            context.note(name, report.REPLACED, what, node, "", [node])


def _called(node: Node) -> str | None:
    """Return the family in `CALLED` of an operator that has no contest: the folder of its arguments in `kernels/`."""
    operator = operator_of(node.target)
    if operator is None or is_call(node, *IN_TRAINING) or captured(node):
        return None
    room = operator.args.__module__.removeprefix("torch_tile.kernels.").partition(".")[0]
    return room if room in CALLED else None


def _settled(context: Context, node: Node) -> bool:
    """Return whether a match made the node. A softmax outside of attention is reported but not yet settled."""
    row = context.rows.get(node)
    return node in context.handled and not (row is not None and row.status == report.MISSED)


def _signature(node: Node) -> str:
    """Return the shapes of a call as text, for the report."""
    if is_call(node, torch.ops.tile.attention.default):
        return rewrite.signature(node)
    shapes = ", ".join(str(list(shape(n))) for n in node.args if is_tensor(n))
    return f"({shapes})"


WATCHED = {
    "gemm": PRODUCTS,
    "attention": (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    ),
    "norm": (aten.native_layer_norm.default, aten._fused_rms_norm.default),
    "softmax": (aten._softmax.default,),
}

ADVICE = {
    "gemm": "nothing in the model is wrong: please report the graph",
    "attention": "call F.scaled_dot_product_attention",
    "norm": 'in training give options={"select": "tile"}; otherwise normalise over the last dimension alone',
    "softmax": "reduce over one dimension of a floating tensor",
}


@family(None, "settle", 20)
def report_missed(context: Context) -> None:
    """Report as missed every remaining subgraph of a wanted family."""
    for node in context.graph.nodes:
        for name, targets in WATCHED.items():
            if name in context.settings.families and is_call(node, *targets) and node not in context.handled:
                context.miss(name, node, Miss(f"no rule for it here ({_types(node)})", ADVICE[name]))


def _types(node: Node) -> str:
    """Return the dtype of a node as text, for the report."""
    value = val(node)
    return f"{dtype(node)}" if isinstance(value, torch.Tensor) else "several outputs"
