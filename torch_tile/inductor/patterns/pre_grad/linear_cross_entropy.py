# SPDX-License-Identifier: Apache-2.0
"""Pre-grad: replace a linear layer whose results only a cross-entropy reads by `tile.linear_cross_entropy`.

The losses of transformers are such pairs: the head's logits, capped softly or not, widened to float32 and viewed as
rows. Logits that something else reads have to be stored, and stay.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from torch_tile.inductor import compat
from torch_tile.inductor.context import Context, LinearLossOperands, LossOptions, family
from torch_tile.inductor.graph.nodes import Miss, is_number, is_tensor, val
from torch_tile.inductor.patterns.pre_grad import cross_entropy
from torch_tile.inductor.report import rows as report
from torch_tile.kernels import compute_dtype
from torch_tile.ops.checks import FLOATING
from torch_tile.ops.losses import reduced, row_factor

LINEAR = (F.linear, torch.ops.aten.linear.default, torch.ops.tile.linear, torch.ops.tile.linear.default)
DIVIDE, MULTIPLY = (operator.truediv, torch.div, torch.true_divide, "div"), (operator.mul, torch.mul, "mul")
TANH = (torch.tanh, F.tanh, "tanh")


@dataclass
class Head:
    """A linear layer under logits: its operands, and what turns rows of its input into those of the logits."""

    hidden: Node
    weight: Node
    bias: Node | None
    layer: Node
    softcap: float | None = None
    rows: list[Callable[[Any], Any]] = field(default_factory=list)


@family("loss", "pre_grad", 49)
def capture(context: Context) -> None:
    """Replace each pair that beats Inductor's code; the others remain for the family of the loss alone."""
    for node in cross_entropy.calls(context.graph):
        try:
            given = cross_entropy.arguments(node)
            cross_entropy.check(given)
            head = head_of(node, given["input"])
        except Miss:  # the next family says why
            continue
        if head is not None and (why := refusal(head)):
            report.log.info("%s keeps its logits: %s", node.name, why)
        elif head is not None:
            _replace(context, node, head, given)


def head_of(loss: Node, logits: Any) -> Head | None:
    """Find the linear layer under the logits of a loss, if nothing else reads any tensor in between."""
    rows: list[Callable[[Any], Any]] = []
    softcap, user = None, loss
    classes = val(logits).shape[-1]
    while isinstance(logits, Node) and is_tensor(logits) and list(_readers(logits)) == [user]:
        if logits.op == "call_function" and logits.target in LINEAR:
            return _operands(logits, softcap, rows)
        if not is_tensor(below := logits.args[0] if logits.args else None) or val(below).shape[-1] != classes:
            return None
        if cap := _soft_cap(logits):
            if softcap is not None:
                return None
            below, user, softcap = *cap[:2], cap[2]
        elif (step := _row_step(logits)) is not None:
            rows, user = [*step, *rows], logits
        else:
            return None
        logits = below
    return None


def _readers(node: Node) -> list[Node]:
    """Return the users that read a tensor's values, not its shape."""
    return [user for user in node.users if is_tensor(user) or user.op == "output"]


def _is(node: Any, targets: tuple[Any, ...]) -> bool:
    """Return whether `node` calls one of `targets`, a function or a method."""
    return isinstance(node, Node) and node.op in ("call_function", "call_method") and node.target in targets


def _soft_cap(node: Node) -> tuple[Node, Node, float] | None:
    """Return `(x, its user, c)` if a node is `tanh(x / c) * c` and nothing else reads the steps in between."""
    if not _is(node, MULTIPLY) or node.kwargs or len(node.args) != 2:
        return None
    operands: tuple[Any, ...] = node.args
    bounded, cap = operands if isinstance(operands[0], Node) else reversed(operands)
    if not is_number(cap) or cap <= 0 or not _is(bounded, TANH) or _readers(bounded) != [node]:
        return None
    scaled = bounded.args[0]
    if not isinstance(scaled, Node) or len(scaled.args) != 2 or scaled.kwargs or _readers(scaled) != [bounded]:
        return None
    x, factor = scaled.args
    same = (_is(scaled, DIVIDE) and factor == cap) or (
        _is(scaled, MULTIPLY) and is_number(factor) and factor * cap == 1
    )
    return (x, scaled, float(cap)) if same and is_tensor(x) else None


def _row_step(node: Node) -> list[Callable[[Any], Any]] | None:
    """Return what a step over logits does to their rows, as functions of the layer's input; None for other steps."""
    if _is(node, ("float", "to", "type")):
        source = val(node.args[0])
        wide = val(node).dtype in (torch.float32, source.dtype) and val(node).device == source.device
        return [] if wide and val(node).dtype.itemsize >= source.dtype.itemsize else None
    if _is(node, ("contiguous",)):
        return []
    if _is(node, (operator.getitem,)):
        index: Any = node.args[1]
        index = index if isinstance(index, tuple) else (index,)
        ends_whole = len(index) < val(node.args[0]).dim() and Ellipsis not in index
        parts = all(isinstance(i, int | slice) or i is Ellipsis for i in index)
        if parts and (ends_whole or index[-1] == slice(None)):
            return [lambda x: x[index]]
        return None
    if _is(node, cross_entropy.VIEWS) and val(node).dim() == 2:
        return [lambda x: x.flatten(0, -2)]
    return None


def _operands(layer: Node, softcap: float | None, rows: list[Callable[[Any], Any]]) -> Head | None:
    """Read the operands of the last layer; None if it adds or computes more than a bias."""
    names = ("input", "weight", "bias", "residual", "activation")
    given: dict[str, Any] = {**dict(zip(names, layer.args, strict=False)), **layer.kwargs}
    given["input"] = given.pop("x", given.get("input"))
    if given.get("residual") is not None or given.get("activation", "none") != "none":
        return None
    hidden, weight, bias = given["input"], given["weight"], given.get("bias")
    return Head(hidden, weight, bias, layer, softcap, rows) if isinstance(hidden, Node) else None


def refusal(head: Head) -> str:
    """Return why a layer does not fit the operator; empty if it does."""
    hidden, weight, layer = val(head.hidden), val(head.weight), val(head.layer)
    if weight is None or weight.dim() != 2 or hidden.dtype not in FLOATING:
        return "the layer has other operands"
    if not hidden.dtype == weight.dtype == layer.dtype:
        return "the layer runs in another dtype than its operands have"
    return ""


def _replace(context: Context, node: Node, head: Head, given: dict[str, Any]) -> None:
    """Replace the loss `node` and the last layer before it, if our kernels are faster."""
    target, weight = given["target"], given["weight"]
    options = LossOptions(given["ignore_index"], given["reduction"], float(given["label_smoothing"]))
    ignore_index, reduction, label_smoothing = options
    hidden, matrix = val(head.hidden), val(head.weight)
    n, k = (compat.size_hint(size) for size in matrix.shape)
    what = f"tile.linear_cross_entropy({[compat.size_hint(s) for s in hidden.shape]}, {[n, k]})"
    tensors = LinearLossOperands(hidden, matrix, val(target), val(head.bias), val(weight))
    outcome = context.select.of_linear_loss(tensors, options, head.softcap)
    if outcome is not None and not outcome.tile_wins:
        context.note("loss", report.KEPT, what, head.layer, str(outcome), (), outcome)
        return
    tracer = GraphAppendingTracer(context.graph)
    with context.graph.inserting_before(node):
        x: Any = Proxy(head.hidden, tracer)
        for step in head.rows:
            hidden, x = step(hidden), step(x)
            x.node.meta["example_value"] = hidden
        y, weights = Proxy(target, tracer), None if weight is None else Proxy(weight, tracer)
        operands = x.node, head.weight, target, head.bias, weight, ignore_index, label_smoothing, 0.0, head.softcap
        alone = reduction == "none" or not val(head.layer).requires_grad
        if alone:
            call = context.graph.call_function(torch.ops.tile.linear_cross_entropy.default, operands)
        else:
            half, sums = hidden.dtype == torch.float16, compute_dtype(hidden.dtype)
            factor, scale = row_factor(y, weights, ignore_index, reduction, sums, half)
            wants = hidden.requires_grad, any(val(p).requires_grad for p in (head.weight, head.bias) if p is not None)
            op = torch.ops.tile.linear_cross_entropy_gradients.default
            call = context.graph.call_function(op, (factor.node, *operands, *wants))
        found: Any = Proxy(call, tracer)
        if alone:
            loss = reduced(found[0], y, weights, ignore_index, reduction)
        else:
            loss = found[0] if scale is None else found[0] / scale
        if val(node).dtype != compute_dtype(hidden.dtype):
            loss = loss.to(val(node).dtype)
    new = loss.node
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    context.graph.erase_node(node)
    context.note("loss", report.REPLACED, what, new, str(outcome or ""), [call], outcome)
