# SPDX-License-Identifier: Apache-2.0
"""Fuse norms with the rounding of their results to float8 or int8: `tile.fused_norm_quantize`.

The norm has no other reader; a sum with a residual that it keeps may have any that come later. What is a norm was
decided before (400 to 620), and so were the texts around it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.nodes import Rewrite, arg, aten, bind, dtype, is_call, known, ordered, shape
from torch_tile.ops.families.fused_norm_quantize import FusedNormQuantizeArgs
from torch_tile.ops.families.norm import AddRmsNormArgs, FusedNormArgs, RmsNormArgs

OPS = torch.ops.tile


@family("norm", "post_grad", 630)
def take_rounding(context: Context) -> None:
    """Replace a norm and the rounding of its result, as layers of float8 and int8 have it, by one kernel."""
    for node in list(context.graph.nodes):
        if not is_call(node, OPS.quantize_fp8.default, OPS.quantize_int8.default):
            continue
        y = _unviewed(arg(node, "x"))
        found = None if y is None else _norm_of(y)
        if found is None:
            continue
        norm, source = found
        results = {n: _result(node, n) for n in (0, 1)}
        total = _result(source, 1) if norm.keep else None
        position = ordered(context.graph)
        if total is not None and any(position[u] < position[node] for u in total.users):
            continue
        rewrite = Rewrite(node)
        to = arg(node, "dtype") if is_call(node, OPS.quantize_fp8.default) else torch.int8
        given = FusedNormQuantizeArgs(*norm, group=arg(node, "group"), out_dtype=to)
        new = rewrite.call(OPS.fused_norm_quantize.default, *given)
        pairs = [
            (old, rewrite.reshape(rewrite.call(operator.getitem, new, n), shape(old)))
            for n, old in results.items()
            if old is not None
        ]
        if total is not None:
            pairs.append((total, rewrite.call(operator.getitem, new, 2)))
        what = f"tile.fused_norm_quantize([..., {shape(norm.x)[-1]}], {to})"
        context.replace(rewrite, "norm", pairs, what, node)


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
