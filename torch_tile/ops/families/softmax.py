# SPDX-License-Identifier: Apache-2.0
"""`tile.softmax`, over any one dimension."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_tile.ops import checks
from torch_tile.ops.checks import require_type
from torch_tile.ops.registration import register
from torch_tile.ops.registry import V, entry, form, in_torch, no_flops, op_gradients
from torch_tile.ops.sharding_rule import Rule, Spec


class SoftmaxArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.softmax`."""

    x: V
    dim: int = -1
    dtype: torch.dtype | None = None


def _fake(args: SoftmaxArgs[Tensor]) -> Tensor:
    x, dim, dtype = args
    checks.check_floating("softmax", x=x)
    rank = max(x.dim(), 1)
    if not -rank <= dim < rank:
        raise IndexError(f"tile.softmax: dim is {dim}; expected {-rank} to {rank - 1} for shape {checks.shape_of(x)}")
    require_type(
        dtype is None or dtype in checks.FLOATING,
        lambda: f"tile.softmax: dtype is {dtype}; expected float16, bfloat16, float32 or float64",
    )
    return x.new_empty(x.shape, dtype=x.dtype if dtype is None else dtype)


def _save(ctx: Any, args: SoftmaxArgs[Tensor], output: Tensor) -> None:
    ctx.dim, ctx.input_dtype = args.dim, args.x.dtype
    ctx.save_for_backward(output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (y,) = ctx.saved_tensors
    compute = torch.promote_types(torch.promote_types(y.dtype, ctx.input_dtype), torch.float32)
    p, upstream = y.to(compute), grad.to(compute)
    grad_x = p * (upstream - (upstream * p).sum(ctx.dim, keepdim=True))
    return op_gradients(SoftmaxArgs, x=grad_x.to(ctx.input_dtype))


def _sharding(args: SoftmaxArgs[Spec]) -> Rule:
    dims = tuple(f"row{i}" for i in range(len(args.x.shape)))
    whole = dims[args.dim] if dims else ""
    return Rule(outputs=[dims], inputs=[dims], free=tuple(d for d in dims if d != whole))


def _as_aten(args: SoftmaxArgs[Tensor]) -> Tensor:
    return F.softmax(args.x, args.dim, dtype=args.dtype)


softmax = form(
    "softmax",
    SoftmaxArgs[Tensor],
    Tensor,
    """`exp(x) / sum(exp(x))` over one dimension.

Args:
    x: any shape.
    dim: the dimension to sum over; counts from the end if negative.
    dtype: of the result; default x's.

Returns:
    x's shape.
""",
)


register(
    name="softmax",
    args=SoftmaxArgs,
    form=softmax,
    fake=_fake,
    run=entry("softmax", "softmax", "out"),
    reference=in_torch("softmax"),
    setup_context=_save,
    backward=_backward,
    as_aten=_as_aten,
    sharding=_sharding,
    flops=no_flops,
    full_precision_cuda=True,
)
