# SPDX-License-Identifier: Apache-2.0
"""`tile.fused_norm_quantize`: a norm between two texts, whose result is rounded to float8 or int8 with scales.

It has no gradient, as that of a rounding is 0: the caller chooses another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_tile.kernels import kernels
from torch_tile.kernels.norm.args import FusedNormQuantizeArgs
from torch_tile.ops.checks import require, require_type, require_value, shape_of
from torch_tile.ops.families.norm import check_fused, fused_sharding
from torch_tile.ops.families.quantize_fp8 import FLOAT8
from torch_tile.ops.recomputed import no_gradient
from torch_tile.ops.registration import register
from torch_tile.ops.registry import entry, no_flops
from torch_tile.ops.sharding_rule import Rule, Spec

OP = "fused_norm_quantize"


def _fake(args: FusedNormQuantizeArgs[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Check the arguments of `tile.fused_norm_quantize` and make its empty results."""
    x, group, dtype = args.x, args.group, args.out_dtype
    check_fused(OP, args.norm)
    require_type(
        dtype in (*FLOAT8, torch.int8),
        lambda: f"tile.{OP}: out_dtype is {dtype}; expected float8_e4m3fn, float8_e5m2 or int8",
    )
    require(
        x.shape[-1] > 0, lambda: f"tile.{OP}: x has shape {shape_of(x)}; expected a last dimension that is not empty"
    )
    require_value(group >= 0, lambda: f"tile.{OP}: group is {group}; expected a number of columns, or 0 for whole rows")
    scales = kernels("norm.quantize").empty_scales(x, group)
    return x.new_empty(x.shape, dtype=dtype), scales, x.new_empty(x.shape if args.keep else (0,))


ADVICE = (
    "Call the norm and tile.quantize_fp8 in a torch.autograd.Function that passes the gradient on, or call it on"
    " x.detach()"
)


def _sharding(args: FusedNormQuantizeArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.fused_norm_quantize` for sharding: those of the norm, and runs of columns."""
    rule = fused_sharding(args.norm)
    (values, total), runs = rule.outputs, (*rule.outputs[0][:-1], "run")
    return Rule(outputs=[values, runs, total], inputs=rule.inputs, free=rule.free)


def fused_norm_quantize(
    x: Tensor,
    aux: Sequence[Tensor] = (),
    kinds: str = "",
    prologue: str = "ret acc0",
    epilogue: str = "ret acc0",
    centred: bool = False,
    eps: float = 1e-6,
    keep: bool = False,
    dtype: torch.dtype | None = None,
    group: int = 128,
    out_dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute an RMS norm, or a layer norm if `centred`, rounded to float8 or int8 by runs of columns.

    `s = prologue(x)`, `y = epilogue(normalise(s))`, and values and scales are `quantize_fp8(y, group, out_dtype)`
    (`quantize_int8` for int8). An RMS norm with a weight is `aux=[weight]`, `kinds="r"`,
    `epilogue="v=mul(acc0,x0);ret v"`; a residual is an `aux` of kind "t" with `prologue="v=add(acc0,x1);ret v"`. All is
    computed in float32 (float64 for float64 x). The backend makes this call of a norm and the rounding behind it.

    Args:
        x: `[..., N]`, of a floating dtype.
        aux: operands of both texts, x0, x1, ..., by kind.
        kinds: a letter for each aux: "t" `[..., N]`, "g" one row for each leading run of rows, "r" `[N]`, "c"
            `[..., 1]`, "s" one element.
        prologue: what is computed of x, acc0, before the norm; the sum is rounded to x's dtype.
        epilogue: what is computed of the normalised element, acc0.
        centred: whether the mean is subtracted first.
        eps: added to the mean of the squares.
        keep: whether the sum `s` is a result.
        dtype: to which y is rounded before its scales are taken; x's dtype if not given.
        group: columns that share a scale; the last run may be shorter. 0: all of a row.
        out_dtype: float8_e4m3fn, float8_e5m2 or int8.

    Returns:
        values `[..., N]`, float32 scales `[..., N / group]`, rounded up, and `s` (empty without `keep`). They have no
        gradient.
    """
    op, rounded = torch.ops.tile.fused_norm_quantize.default, dtype or x.dtype
    out: tuple[Tensor, Tensor, Tensor] = op(
        x, list(aux), kinds, prologue, epilogue, centred, eps, keep, rounded, group, out_dtype
    )
    return out


register(
    name=OP,
    args=FusedNormQuantizeArgs,
    module="norm.fused_quantize",
    returns=("values", "scales", "sum"),
    form=fused_norm_quantize,
    fake=_fake,
    run=entry("norm.fused_quantize", OP, "out", "scales", "total"),
    **no_gradient(OP, ADVICE),
    sharding=_sharding,
    flops=no_flops,
)
