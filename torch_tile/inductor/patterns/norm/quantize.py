# SPDX-License-Identifier: Apache-2.0
"""Fuse norms, and SwiGLU's products, with the rounding of their results to float8 or int8.

They become `tile.fused_norm_quantize` and `tile.silu_mul_quantize`. Neither a norm nor a product has another reader. A
sum with a residual that the norm keeps may have any that come later. What is a norm was decided before (400 to 620),
and so were the texts around it. Matrix products in front had the first choice of SwiGLU's product.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.nodes import (
    Rewrite,
    arg,
    aten,
    bind,
    dtype,
    is_call,
    known,
    ordered,
    product,
    same_shape,
    shape,
)
from torch_tile.inductor.patterns.norm.fused_norm import Rows, RowsWriter, tree_of
from torch_tile.kernels.epilogue.canonicalize import canonical
from torch_tile.kernels.norm.args import AddRmsNormArgs, FusedNormArgs, FusedNormQuantizeArgs, RmsNormArgs

OPS = torch.ops.tile
ROUNDINGS = OPS.quantize_fp8.default, OPS.quantize_int8.default
GATE_FIRST = canonical("v0=silu(acc0);v1=mul(v0,x0);ret v1")
GATE_LAST = canonical("v0=silu(x0);v1=mul(acc0,v0);ret v1")


@family("norm", "post_grad", 630)
def fuse_rounding(context: Context) -> None:
    """Replace a norm and the rounding of its result, as layers of float8 and int8 have it, by one kernel."""
    for node in list(context.graph.nodes):
        if not is_call(node, *ROUNDINGS):
            continue
        y = _unviewed(arg(node, "x"))
        found = None if y is None else _norm_of(y)
        if found is None:
            continue
        norm, source = found
        total = _result(source, 1) if norm.keep else None
        position = ordered(context.graph)
        if total is not None and any(position[u] < position[node] for u in total.users):
            continue
        rewrite = Rewrite(node)
        to = _dtype_of(node)
        given = FusedNormQuantizeArgs(*norm, group=arg(node, "group"), out_dtype=to)
        new = rewrite.call(OPS.fused_norm_quantize.default, *given)
        pairs = _pairs(rewrite, node, new)
        if total is not None:
            pairs.append((total, rewrite.call(operator.getitem, new, 2)))
        what = f"tile.fused_norm_quantize([..., {shape(norm.x)[-1]}], {to})"
        context.replace(rewrite, "norm", pairs, what, node)


@family("norm", "post_grad", 640)
def fuse_swiglu_rounding(context: Context) -> None:
    """Replace `silu(gate) * up` and the rounding of it by one kernel."""
    for node in list(context.graph.nodes):
        y = _unviewed(arg(node, "x")) if is_call(node, *ROUNDINGS) else None
        halves = None if y is None else _halves_of(y)
        if halves is None:
            continue
        rewrite, to = Rewrite(node), _dtype_of(node)
        new = rewrite.call(OPS.silu_mul_quantize.default, *halves, arg(node, "group"), to)
        what = f"tile.silu_mul_quantize([..., {shape(halves[0])[-1]}], {to})"
        context.replace(rewrite, "norm", _pairs(rewrite, node, new), what, node)


def _halves_of(y: Node) -> tuple[Node, Node] | None:
    """Return the gate and what it multiplies of a SwiGLU product; None if y is none."""
    taken, leaves = tree_of(y)
    halves = list(dict.fromkeys(leaves))
    sizes = shape(y)
    fits = all(same_shape(shape(x), sizes) and dtype(x) == dtype(y) for x in halves)
    if not (taken and fits and len(halves) == 2):
        return None
    region = Rows([halves[0]], product(sizes[:-1]), sizes[-1], ordered(y.graph), taken)
    text = canonical(RowsWriter(region).text(y))
    if text not in (GATE_FIRST, GATE_LAST):
        return None
    return (halves[0], halves[1]) if text == GATE_FIRST else (halves[1], halves[0])


def _dtype_of(node: Node) -> torch.dtype:
    """Return the dtype that a node rounds to."""
    to: torch.dtype = arg(node, "dtype") if is_call(node, OPS.quantize_fp8.default) else torch.int8
    return to


def _pairs(rewrite: Rewrite, node: Node, new: Node) -> list[tuple[Node, Node]]:
    """Return the values and scales of a rounding that something reads, each with its successor."""
    results = {n: _result(node, n) for n in (0, 1)}
    return [
        (old, rewrite.reshape(rewrite.call(operator.getitem, new, n), shape(old)))
        for n, old in results.items()
        if old is not None
    ]


def _unviewed(node: Node) -> Node | None:
    """Return what a chain of views of whole rows shows, if nothing else reads it; else None."""
    while len(node.users) == 1 and is_call(node, aten.view.default, aten.reshape.default, aten._unsafe_view.default):
        inner = arg(node, "self")
        if not known(shape(inner)[-1] == shape(node)[-1]):
            break
        node = inner
    return node if len(node.users) == 1 else None


def _result(node: Node, number: int) -> Node | None:
    """Return the result of that number of a call with several results, if something reads it."""
    found = (u for u in node.users if u.target is operator.getitem and u.args[1] == number and u.users)
    return next(found, None)


def _norm_of(y: Node) -> tuple[FusedNormArgs[Any], Node] | None:
    """Return the arguments of `tile.fused_norm` that compute y and maybe a sum, and the call; None if no norm does."""
    if is_call(y, OPS.rms_norm.default):
        return _fused(bind(y, RmsNormArgs[Any]), [], "", y), y
    if y.target is not operator.getitem or y.args[1] != 0 or not isinstance(source := y.args[0], Node):
        return None
    if is_call(source, OPS.fused_norm.default):
        return bind(source, FusedNormArgs[Any]), source
    if is_call(source, OPS.add_rms_norm.default):
        both = bind(source, AddRmsNormArgs[Any])
        norm = _fused(both.norm, [both.residual], "v0=add(acc0,x0);ret v0", y)
        return norm._replace(keep=_result(source, 1) is not None), source
    return None


def _fused(norm: RmsNormArgs[Any], aux: list[Any], prologue: str, y: Node) -> FusedNormArgs[Any]:
    """Write an RMS norm as texts. The weight comes behind the operands of the prologue."""
    steps, value, kinds = [], "acc0", "t" * len(aux)
    if norm.weight is not None:
        factor = f"x{len(aux)}"
        aux, kinds = [*aux, norm.weight], kinds + "r"
        if norm.weight_offset:
            steps.append(f"w=add({factor},{float(norm.weight_offset)})")
            factor = "w"
        steps.append(f"v=mul({value},{factor})")
        value = "v"
    if norm.activation != "none":
        steps.append(f"u={norm.activation}({value})")
        value = "u"
    text = ";".join([*steps, f"ret {value}"])
    return FusedNormArgs(norm.x, aux, kinds, prologue, text, False, norm.eps, False, dtype(y))
