# SPDX-License-Identifier: Apache-2.0
"""Pre-grad: replace `F.cross_entropy` of class indices by `tile.cross_entropy` and its reduction.

transformers widens half-precision logits to float32 before the loss. The kernel widens them itself. So it reads the
narrow logits, through views as well. No wide copy of them or of their gradient is made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from torch_tile.inductor import compat
from torch_tile.inductor.context import Context, LossOperands, LossOptions, family
from torch_tile.inductor.graph.nodes import Miss, aten, val
from torch_tile.inductor.report import rows as report
from torch_tile.kernels import compute_dtype
from torch_tile.ops.checks import FLOATING
from torch_tile.ops.losses import REDUCTIONS, reduced

HALF = (torch.float16, torch.bfloat16)
VIEWS = ("view", "reshape", "flatten", "contiguous", "unflatten")


@family("loss", "pre_grad", 50)
def capture(context: Context) -> None:
    """Replace each call whose kernels beat Inductor's code, forward and backward together."""
    for node in calls(context.graph):
        with context.recording_miss("loss", node):
            _capture_one(context, node)


def calls(graph: Graph) -> list[Node]:
    """Return the calls of a cross-entropy."""
    targets: tuple[Any, ...] = F.cross_entropy, aten.cross_entropy_loss.default
    return [node for target in targets for node in graph.find_nodes(op="call_function", target=target)]


def arguments(node: Node) -> dict[str, Any]:
    """Return the call's arguments by the names of `F.cross_entropy`; refuse the two deprecated ones."""
    if node.target is F.cross_entropy:
        bound = inspect.signature(F.cross_entropy).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        if given.pop("size_average") is not None or given.pop("reduce") is not None:
            raise Miss("size_average or reduce is given", "give reduction= instead")
        return given
    named = ("input", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    found: dict[str, Any] = {"weight": None, "reduction": 1, "ignore_index": -100, "label_smoothing": 0.0}
    found |= {**dict(zip(named, node.args, strict=False)), **node.kwargs}
    found["input"] = found.pop("self", found.get("input"))
    found["reduction"] = ("none", "mean", "sum")[found["reduction"]]
    return found


def check(given: dict[str, Any]) -> None:
    """Refuse losses that the operators do not compute."""
    x, y, weight = val(given["input"]), val(given["target"]), given["weight"]
    if x.dtype not in FLOATING or y.is_floating_point() or y.dtype not in (torch.int32, torch.int64):
        raise Miss("the target holds probabilities", "give class indices, or nothing: Inductor compiles it")
    if x.dim() > 2:
        raise Miss("classes are not the last dimension", "flatten the logits to [rows, classes] before the loss")
    if weight is not None and val(weight).requires_grad:
        raise Miss("the classes' weights want a gradient", "nothing needs to change: Inductor compiles it")
    numbers = given["ignore_index"], given["label_smoothing"]
    if given["reduction"] not in REDUCTIONS or any(isinstance(n, Node) for n in numbers):
        raise Miss("an option is not a constant", "pass reduction, ignore_index and label_smoothing as constants")


def _capture_one(context: Context, node: Node) -> None:
    """Replace one call of `F.cross_entropy` if its kernels are faster."""
    given = arguments(node)
    check(given)
    logits, target, weight = given["input"], given["target"], given["weight"]
    x, y = val(logits), val(target)
    options = LossOptions(given["ignore_index"], given["reduction"], float(given["label_smoothing"]))
    what = f"tile.cross_entropy({[compat.size_hint(n) for n in x.shape]})"
    with context.graph.inserting_before(node):
        source = _narrow(logits) or logits
    operands = LossOperands(val(source), y, val(weight))
    outcome = context.select.of_loss(operands, options, source is not logits)
    if outcome is not None and not outcome.tile_wins:
        context.note("loss", report.KEPT, what, node, str(outcome), (), outcome)
        return
    tracer = GraphAppendingTracer(context.graph)
    with context.graph.inserting_before(node):
        args = source, target, weight, options.ignore_index, options.label_smoothing
        rows = context.graph.call_function(torch.ops.tile.cross_entropy.default, args)
        loss: Any = Proxy(rows, tracer)
        weights = None if weight is None else Proxy(weight, tracer)
        result = reduced(loss[0], Proxy(target, tracer), weights, options.ignore_index, options.reduction)
        if val(node).dtype != compute_dtype(x.dtype):  # autocast keeps the loss of narrow logits wide
            result = result.to(val(node).dtype)
    new = result.node
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    context.graph.erase_node(node)
    context.note("loss", report.REPLACED, what, new, str(outcome or ""), [rows], outcome)


def _narrow(x: Any) -> Any:
    """Return the half-precision tensor, with the views applied, that `x` is a widened copy of, in float32."""
    if _is_call(x, "float", "to", "type") and isinstance(x.args[0], Node):
        source = x.args[0]
        wide = val(x).dtype == torch.float32 and val(x).device == val(source).device
        return source if wide and val(source).dtype in HALF else None
    if _is_call(x, *VIEWS) and isinstance(x.args[0], Node) and (source := _narrow(x.args[0])) is not None:
        new = x.graph.node_copy(x, lambda n: source if n is x.args[0] else n)
        method: Callable[..., torch.Tensor] = getattr(val(source), str(x.target))
        given = torch.fx.map_arg((x.args[1:], x.kwargs), val)
        new.meta["example_value"] = method(*given[0], **given[1])
        return new
    return None


def _is_call(x: Node, *names: str) -> bool:
    """Return whether a node calls one of these methods on a tensor."""
    return x.op == "call_method" and x.target in names and len(x.all_input_nodes) >= 1
