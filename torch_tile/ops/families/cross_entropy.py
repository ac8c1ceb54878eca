# SPDX-License-Identifier: Apache-2.0
"""`tile.cross_entropy`, the loss of logits against class indices, and `tile.cross_entropy_backward`.

The kernels read the logits once each: for the loss and the log-sum-exp, and for the gradient.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from torch_tile.kernels import compute_dtype, kernels
from torch_tile.kernels.loss.args import CrossEntropyArgs, CrossEntropyBackwardArgs
from torch_tile.ops import checks
from torch_tile.ops.checks import require, require_type, require_value
from torch_tile.ops.registration import declare
from torch_tile.ops.registry import in_torch, no_flops, op_gradients
from torch_tile.ops.saved_args import restored_args, save_args
from torch_tile.ops.sharding_rule import Rule, Spec, if_given, row_names

INDICES = (torch.int32, torch.int64)


def _check(op: str, args: CrossEntropyArgs[Tensor]) -> None:
    """Check the arguments of `tile.cross_entropy`."""
    logits, target = args.logits, args.target
    checks.check_floating(op, logits=logits, weight=args.weight)
    require(logits.dim() >= 1, lambda: f"tile.{op}: logits has 0 dimensions; expected at least 1: [..., N]")
    check_targets(op, target, "logits", logits)
    checks.check_vector(op, "weight", args.weight, logits.shape[-1], "logits' last dimension")
    check_smoothing(op, args.label_smoothing)


def check_targets(op: str, target: Tensor, of: str, x: Tensor) -> None:
    """Check that the targets are classes, one for each row of a tensor `x` that is named `of`."""
    require_type(
        target.dtype in INDICES, lambda: f"tile.{op}: target has dtype {target.dtype}; expected int64 or int32: classes"
    )
    check_rows(op, "target", target, of, x)


def check_classes(op: str, target: Tensor, ignore_index: int, classes: int) -> None:
    """Raise IndexError on the CPU for a target that is no class, as torch does. Elsewhere its loss is NaN."""
    if target.device.type != "cpu":
        return
    strange = target[(target != ignore_index) & ((target < 0) | (target >= classes))]
    if strange.numel():
        raise IndexError(
            f"tile.{op}: target holds {int(strange[0])}, which is no class; expected 0 to {classes - 1}, "
            f"or ignore_index ({ignore_index})"
        )


def check_smoothing(op: str, label_smoothing: float) -> None:
    """Check that the label smoothing is a share."""
    require_value(
        0.0 <= label_smoothing <= 1.0, lambda: f"tile.{op}: label_smoothing is {label_smoothing}; expected 0.0 to 1.0"
    )


def check_rows(op: str, name: str, rows: Tensor, of: str, x: Tensor) -> None:
    """Check that there is one number for each row of a tensor `x` that is named `of`."""
    checks.check_device(op, name, rows, of, x)
    checks.check_dims(op, name, rows, x.dim() - 1, f"{of}'{'' if of.endswith('s') else 's'} dimensions but the last")
    checks.check_sizes(op, name, rows, x.shape[:-1], f"as {of}, whose rows are along the last dimension")


def _fake(args: CrossEntropyArgs[Tensor]) -> tuple[Tensor, Tensor]:
    """Check the arguments of `tile.cross_entropy` and make its empty results."""
    _check("cross_entropy", args)
    loss = args.logits.new_empty(args.target.shape, dtype=compute_dtype(args.logits.dtype))
    return loss, torch.empty_like(loss)


def _fake_backward(args: CrossEntropyBackwardArgs[Tensor]) -> Tensor:
    """Check the arguments of `tile.cross_entropy_backward` and make its empty results."""
    op, sums = "cross_entropy_backward", compute_dtype(args.logits.dtype)
    _check(op, args.forward)
    for name, x in (("grad", args.grad), ("lse", args.lse)):
        check_rows(op, name, x, "logits", args.logits)
        require_type(x.dtype == sums, lambda: f"tile.{op}: {name} has dtype {x.dtype}; expected {sums}")  # noqa: B023
    return args.logits.new_empty(args.logits.shape)


def _save(ctx: Any, args: CrossEntropyArgs[Tensor], output: tuple[Tensor, Tensor]) -> None:
    """Save for the gradient of `tile.cross_entropy` what it needs."""
    if args.weight is not None and args.weight.requires_grad:
        raise NotImplementedError("tile.cross_entropy: weight has no gradient; pass weight.detach()")
    ctx.mark_non_differentiable(output[1])
    save_args(ctx, args, output[1])


def _backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None) -> tuple[Any, ...]:
    """Compute the gradients of `tile.cross_entropy`."""
    args, (lse,) = restored_args(ctx)
    given = CrossEntropyBackwardArgs(grad, args.logits, args.target, lse, *args[2:])
    return op_gradients(CrossEntropyArgs, logits=torch.ops.tile.cross_entropy_backward.default(*given))


def _save_backward(ctx: Any, args: CrossEntropyBackwardArgs[Tensor], output: Tensor) -> None:
    """Save for the gradient of `tile.cross_entropy_backward` what it needs."""
    save_args(ctx, args)


def _gradients_of_gradients(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    """Compute gradients of the gradient; the log-sum-exp counts as a function of the logits."""
    args, _ = restored_args(ctx)
    grad, logits, target, lse = args[:4]
    slopes, factor = kernels("loss.cross_entropy").logit_slopes(*args[1:])
    upstream = upstream.to(slopes.dtype)
    of_grad = (upstream * slopes).sum(-1).to(grad.dtype)
    probability = torch.exp(logits.to(slopes.dtype) - lse[..., None])
    mean = (upstream * probability).sum(-1, keepdim=True)
    counted = (target != args.ignore_index)[..., None]
    found = factor[..., None] * probability * (upstream - mean) + 2.0 * args.z_loss * probability * mean
    of_logits = torch.where(counted, grad.to(slopes.dtype)[..., None] * found, 0.0).to(logits.dtype)
    return op_gradients(CrossEntropyBackwardArgs, grad=of_grad, logits=of_logits)


def _sharding(args: CrossEntropyArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.cross_entropy` for sharding."""
    rows = row_names(args.logits)
    dims, weight = (*rows, "n"), if_given(args.weight, ("n",))
    return Rule(outputs=[rows, rows], inputs=[dims, rows, weight], free=rows, saved=[dims, rows, weight, rows])


def _sharding_of_backward(args: CrossEntropyBackwardArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.cross_entropy_backward` for sharding."""
    rows = row_names(args.logits)
    dims = (*rows, "n")
    inputs = [rows, dims, rows, rows, if_given(args.weight, ("n",))]
    return Rule(outputs=[dims], inputs=inputs, free=rows)


cross_entropy: Final = declare(
    "cross_entropy",
    CrossEntropyArgs[Tensor],
    tuple[Tensor, Tensor],
    """The cross-entropy of each row of logits against its class, and the row's log-sum-exp.

With `p = softmax(logits)`, a row of class y costs `-(1 - s) w[y] log p[y] - s / N sum_c w[c] log p[c] + z lse^2`, where
s is `label_smoothing` (arXiv:1512.00567), w `weight` or 1, and z `z_loss` (arXiv:2204.02311). Sums are in float32
(float64 for float64). The gradient is a kernel, too.

Args:
    logits: `[..., N]`, of any strides.
    target: `[...]` int64 or int32, a class for each row. One that is no class and not `ignore_index`
        raises IndexError on the CPU and gives NaN on a GPU.
    weight: `[N]`, of any floating dtype. It has no gradient: one that requires it is refused.
    ignore_index: rows of this target cost 0 and get no gradient.
    label_smoothing: 0.0 to 1.0, the share of the target that all classes divide among themselves.
    z_loss: the factor of the squared log-sum-exp.

Returns:
    loss and log-sum-exp, `[...]` in float32 (float64 for float64). The log-sum-exp has no gradient.
""",
    module="loss.cross_entropy",
    returns=("loss", "lse"),
    fake=_fake,
    check_values=lambda args: check_classes("cross_entropy", args.target, args.ignore_index, args.logits.shape[-1]),
    reference=in_torch("loss.cross_entropy", "loss_reference"),
    setup_context=_save,
    backward=_backward,
    sharding=_sharding,
    flops=no_flops,
)
cross_entropy_backward: Final = declare(
    "cross_entropy_backward",
    CrossEntropyBackwardArgs[Tensor],
    Tensor,
    """The gradient of `cross_entropy` by its logits.

Args:
    grad: `[...]` in float32 (float64 for float64), of each row's loss.
    logits: `[..., N]`, as given to `cross_entropy`.
    target: as `cross_entropy`, like what follows but lse.
    lse: the log-sum-exp that `cross_entropy` returned.
    weight: `[N]`.
    ignore_index: rows of this target get zeros.
    label_smoothing: 0.0 to 1.0.
    z_loss: the factor of the squared log-sum-exp.

Returns:
    `[..., N]` in logits' dtype. It has gradients, with the log-sum-exp as a function of the logits.
""",
    module="loss.cross_entropy",
    fake=_fake_backward,
    reference=in_torch("loss.cross_entropy", "gradient_reference"),
    setup_context=_save_backward,
    backward=_gradients_of_gradients,
    sharding=_sharding_of_backward,
    flops=no_flops,
)
