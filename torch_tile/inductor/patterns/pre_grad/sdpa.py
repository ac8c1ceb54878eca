# SPDX-License-Identifier: Apache-2.0
"""Pre-grad: replace composite torch calls by functional tile ops, one to one.

After AOTAutograd, scaled_dot_product_attention and the norms are decomposed in ways that depend on device and shapes;
before it they are one node. The graph here is not functional (it may mutate), so nothing but single nodes is touched.
The ops carry autograd, so training works; what turns out not to be worth a kernel is put back after AOTAutograd.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from torch_tile.inductor import compat
from torch_tile.inductor.context import AttentionOperands, Context, family
from torch_tile.inductor.graph.nodes import Miss, aten, can_be_guarded, is_tensor, known, val
from torch_tile.inductor.patterns.attention.fit import check_attention_shapes
from torch_tile.inductor.report import rows as report

Arguments = dict[str, Any]
Captured = tuple[str, tuple[Any, ...], dict[str, Any]]


class NotCaptured(Miss):
    """Reason why a call is not captured."""


def _sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Captured:
    """Return the tile op for a `scaled_dot_product_attention` call, or raise NotCaptured."""
    q, k, v = val(query), val(key), val(value)
    if not (isinstance(dropout_p, int | float) and dropout_p == 0.0):
        raise NotCaptured("dropout", "call model.eval(), or pass dropout_p=0.0")
    if q.is_nested or k.is_nested or v.is_nested:  # what nested.py left
        raise NotCaptured("nested tensors", "make all of them jagged, [batch, heads, lengths, head size]")
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise NotCaptured(
            f"q, k and v of rank {q.dim()}, {k.dim()} and {v.dim()}", "make all [batch, heads, length, head size]"
        )
    if not (known(q.shape[0] == k.shape[0]) and known(k.shape[0] == v.shape[0])):
        raise NotCaptured("the batch sizes of q, k and v broadcast", "expand them to one batch size before the call")
    check_attention_shapes(query, key, value)
    options = {"causal": bool(is_causal), "scale": None if scale is None else _number(scale, "scale")}
    return "attention", (query, key, value, attn_mask), options


def _last_dim_only(x: Any, normalized_shape: Any) -> None:
    """Raise NotCaptured for a norm over several dimensions."""
    normalized_shape = val(normalized_shape) if isinstance(normalized_shape, Node) else normalized_shape
    sizes = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if len(sizes) != 1:
        raise NotCaptured(
            f"normalises over {len(sizes)} dimensions", "flatten them, so that normalized_shape has one size"
        )
    if val(x).dim() == 0:
        raise NotCaptured("the input has no dimension", "give it at least one")


def _number(value: Any, what: str) -> float:
    """Return a Python number. A symbol that dynamic=True made of a number is turned back, with a guard."""
    if isinstance(value, Node) and isinstance(val(value), torch.SymFloat | torch.SymInt):
        value = val(value) if can_be_guarded(val(value)) else None
    if not isinstance(value, int | float | torch.SymFloat | torch.SymInt):
        raise NotCaptured(f"{what} is not a Python number", f"pass {what} as a float")
    return float(value)


def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Captured:
    """Return the tile op for an `F.rms_norm` call, or raise NotCaptured."""
    _last_dim_only(input, normalized_shape)
    if eps is None:
        low = val(input).dtype in (torch.float16, torch.bfloat16)
        eps = torch.finfo(torch.float32 if low else val(input).dtype).eps
    if weight is not None and val(weight).dtype != val(input).dtype:
        raise NotCaptured("weight and input have different dtypes", "cast the weight or the input before the call")
    return "rms_norm", (input, weight), {"eps": _number(eps, "eps"), "cast_first": False}


def _layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5, cudnn_enable: bool = True
) -> Captured:
    """Return the tile op for an `F.layer_norm` call, or raise NotCaptured."""
    _last_dim_only(input, normalized_shape)
    if any(p is not None and val(p).dtype != val(input).dtype for p in (weight, bias)):
        raise NotCaptured("weight or bias and input have different dtypes", "cast them or the input before the call")
    return "layer_norm", (input, weight, bias), {"eps": _number(eps, "eps")}


def _group_norm(*args: Any, **kwargs: Any) -> Captured:
    """Raise NotCaptured, as there is no kernel for GroupNorm."""
    raise NotCaptured("no kernel for GroupNorm", "nothing needs to change: Inductor compiles it")


def _functional_softmax(input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Captured:
    """Return the tile op for an `F.softmax` call, or raise NotCaptured."""
    return _softmax(input, dim, dtype)


def _softmax(input: Any, dim: Any = None, dtype: Any = None) -> Captured:
    """Return the tile op for a softmax, or raise NotCaptured."""
    if not isinstance(dim, int) or val(input).dim() == 0:
        raise NotCaptured("no dimension given, or none there", "write softmax(x, dim=-1)")
    if not val(input).is_floating_point() or not (dtype is None or dtype.is_floating_point):
        raise NotCaptured("not a floating dtype", "cast the input to a floating dtype before the softmax")
    return "softmax", (input, dim), {} if dtype is None else {"dtype": dtype}


Binder = Callable[..., Captured]

FUNCTIONS: dict[Any, tuple[str, Binder]] = {
    F.scaled_dot_product_attention: ("attention", _sdpa),
    aten.scaled_dot_product_attention.default: ("attention", _sdpa),
    F.rms_norm: ("norm", _rms_norm),
    torch.rms_norm: ("norm", _rms_norm),
    aten.rms_norm.default: ("norm", _rms_norm),
    F.layer_norm: ("norm", _layer_norm),
    torch.layer_norm: ("norm", _layer_norm),
    aten.layer_norm.default: ("norm", _layer_norm),
    F.group_norm: ("norm", _group_norm),
    torch.group_norm: ("norm", _group_norm),
    aten.group_norm.default: ("norm", _group_norm),
    F.softmax: ("softmax", _functional_softmax),
    torch.softmax: ("softmax", _softmax),
    aten.softmax.int: ("softmax", _softmax),
}
METHODS: dict[str, tuple[str, Binder]] = {"softmax": ("softmax", _softmax)}


@family(None, "pre_grad", 30)
def capture(context: Context) -> None:
    """Replace every call that a tile op can compute; report why the others stay."""
    transforms = 0  # of torch.func, around a node
    for node in list(context.graph.nodes):
        transforms += _transforms_begun(node)
        table: Any = {"call_function": FUNCTIONS, "call_method": METHODS}.get(node.op, {})
        family, binder = table.get(node.target, (None, None))
        if family is None or not _is_wanted(context, family):
            continue
        try:
            if transforms:  # our ops have no rules for them
                raise NotCaptured("under torch.func", "call it outside of vmap, grad and the like")
            _capture_one(context, node, family, binder)
        except Miss as reason:
            context.miss(family, node, reason)


def _transforms_begun(node: Node) -> int:
    """Return 1 where a transform of torch.func (grad, vmap, jvp, ...) begins, -1 where one ends, 0 elsewhere."""
    name = getattr(node.target, "__name__", "")
    return name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")


def _is_wanted(context: Context, family: str) -> bool:
    """Return whether the user wants calls of a family captured."""
    families = context.settings.families
    if family == "softmax" and context.settings.select == "fastest":
        return False  # Inductor fuses attention around a plain softmax; softmax.py finds it again afterwards
    return family in families or (family == "softmax" and bool({"attention", "mla"} & set(families)))


def _capture_one(context: Context, node: Node, family: str, binder: Binder) -> None:
    """Replace one call by its tile op if its kernels are faster; raises NotCaptured."""
    tensors = [n for n in node.all_input_nodes if is_tensor(n)]
    if not tensors or any(not isinstance(t.meta.get("example_value", val(t)), torch.Tensor) for t in tensors):
        raise NotCaptured("no example value of the inputs", "nothing in the model is wrong: please report the graph")
    if node.kwargs.get("out") is not None:
        raise NotCaptured("writes into a given tensor", "leave out=... away and use the result")
    training = torch.is_grad_enabled() and any(val(t).requires_grad for t in tensors)
    measured = training and context.settings.select == "fastest"
    if measured and family != "attention":
        raise NotCaptured(
            "training, for which there is no tile backward kernel",
            'give options={"select": "tile"}, which takes the forward, or run under torch.no_grad()',
        )
    try:
        inspect.signature(binder).bind(*node.args, **node.kwargs)
    except TypeError as error:
        raise NotCaptured(f"unexpected arguments: {error}", "call it with the arguments of its documentation") from None
    name, args, options = binder(*node.args, **node.kwargs)
    op = getattr(torch.ops.tile, name).default
    if measured and not _wins_in_training(context, node, args, options):
        return
    with context.graph.inserting_before(node):
        new = context.graph.call_function(op, args, options)
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    context.graph.erase_node(node)
    context.captured(family, str(op), new)


def _wins_in_training(context: Context, node: Node, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return whether our kernels are faster for attention and its backward; if not, report the call as kept."""
    operands = AttentionOperands(*(val(x) for x in args))
    outcome = context.select.of_training(operands, options["causal"], options["scale"])
    if outcome is not None and not outcome.tile_wins:
        shapes = ", ".join(str([compat.size_hint(n) for n in x.shape]) for x in operands[:3])
        what = f"tile.attention({shapes}) with its backward"
        context.note("attention", report.KEPT, what, node, str(outcome), (), outcome)
    return outcome is None or outcome.tile_wins
