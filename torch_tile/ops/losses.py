# SPDX-License-Identifier: Apache-2.0
"""`F.cross_entropy` and `F.linear_cross_entropy` by our operators: the losses of rows, and their reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_tile.diagnostics.arguments import explains_misfits, renames
from torch_tile.ops.checks import check_tensors
from torch_tile.ops.recomputed import gradients_of

REDUCTIONS = ("mean", "sum", "none")


@explains_misfits
@renames("cross_entropy", logits="input")
def cross_entropy_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Compute `F.cross_entropy` of class indices, and a penalty on the log-sum-exp: see `torch_tile.ops.cross_entropy`.

    The logits are read twice if a gradient is wanted, else once. Nothing of their size is stored but the gradient.

    Args:
        input: logits `[C]`, `[N, C]` or `[N, C, d1, ...]`; the kernel copies those whose classes are not the last
            dimension in memory.
        target: class indices in input's shape without C; int64, int32, uint8. Probabilities are refused: TypeError.
        weight: `[C]`, of each class; it has no gradient.
        ignore_index: targets that do not count.
        reduction: "mean" (over the weights of targets that count), "sum" or "none".
        label_smoothing: 0.0 to 1.0.
        z_loss: the factor of the squared log-sum-exp.

    Returns:
        A scalar, or target's shape for "none", in float32 (float64 for float64), where torch rounds to input's dtype.
    """
    check_tensors("cross_entropy", input=input, target=target)
    if target.is_floating_point() and not input.is_floating_point():
        raise TypeError(f"cross_entropy: input has dtype {input.dtype}; expected floats: the input comes first")
    target = _checked("cross_entropy", target, reduction)
    logits = input.movedim(1, -1) if input.dim() > 2 else input
    loss, _ = torch.ops.tile.cross_entropy(logits, target, weight, ignore_index, label_smoothing, z_loss)
    found: torch.Tensor = reduced(loss, target, weight, ignore_index, reduction)
    return found


@explains_misfits
@renames("linear_cross_entropy", hidden="input", weight="linear_weight", bias="linear_bias", class_weight="weight")
def linear_cross_entropy_loss(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    linear_bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute `F.cross_entropy(softcap(F.linear(input, linear_weight, linear_bias)), target)`, storing no logits.

    Where a gradient is wanted, "mean" and "sum" compute the gradients together with the loss. They do so in one pass
    over chunks of rows. "none" computes the chunks again in its backward. See
    `torch_tile.ops.linear_cross_entropy_gradients`.

    Args:
        input: `[..., K]`.
        linear_weight: `[C, K]`, maybe that of an embedding.
        target: class indices `[...]`, int64, int32 or uint8. Probabilities are refused with a TypeError.
        linear_bias: `[C]`.
        weight: `[C]`, of each class; it has no gradient.
        reduction: "mean" (over the weights of targets that count), "sum" or "none".
        ignore_index: targets that do not count.
        label_smoothing: 0.0 to 1.0.
        z_loss: the factor of the squared log-sum-exp (arXiv:2204.02311).
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2). None for no cap.

    Returns:
        A scalar, or target's shape for "none", in float32 (float64 for float64).
    """
    check_tensors("linear_cross_entropy", input=input, linear_weight=linear_weight, target=target)
    if not linear_weight.is_floating_point():
        order = "input, linear_weight and target come in this order"
        raise TypeError(
            f"linear_cross_entropy: linear_weight has dtype {linear_weight.dtype}; expected floats: {order}"
        )
    target = _checked("linear_cross_entropy", target, reduction)
    given = input, linear_weight, target, linear_bias, weight, ignore_index, label_smoothing, z_loss, softcap
    wants = [x is not None and x.requires_grad for x in (input, linear_weight, linear_bias)]
    if reduction == "none" or not torch.is_grad_enabled() or not any(wants):
        rows, _ = torch.ops.tile.linear_cross_entropy(*given)
        found: torch.Tensor = reduced(rows, target, weight, ignore_index, reduction)
        return found
    sums = torch.float64 if input.dtype == torch.float64 else torch.float32
    factor, scale = row_factor(target, weight, ignore_index, reduction, sums, _runs_in_half(input))
    of_weight = wants[1] or wants[2]
    tensors, rest = given[:5], given[5:]
    if _is_plain(tensors):
        apply: Callable[..., torch.Tensor] = _ScalesInPlace.apply
        loss = apply(factor, rest, wants[0], of_weight, *tensors)
    else:
        loss = torch.ops.tile.linear_cross_entropy_gradients(factor, *given, wants[0], of_weight)[0]
    return loss if scale is None else loss / scale


def is_in_autocast(x: torch.Tensor) -> bool:
    """Return whether autocast is on for a tensor's device; some devices, as meta, have none."""
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _runs_in_half(x: torch.Tensor) -> bool:
    """Return whether an operator that takes part in autocast computes in float16."""
    if x.dtype == torch.float64 or not is_in_autocast(x):
        return x.dtype == torch.float16
    return torch.get_autocast_dtype(x.device.type) == torch.float16


def _is_plain(tensors: Any) -> bool:
    """Return whether a call is an eager one, outside of transforms, of tensors of no subclass."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return all(x is None or type(x) in (torch.Tensor, torch.nn.Parameter) for x in tensors)


class _ScalesInPlace(torch.autograd.Function):
    """The loss of `linear_cross_entropy_gradients`, whose backward hands over the gradients that the forward made.

    They are multiplied in place by the loss's own gradient. The operator's backward copies them, since callers may hold
    its results: another gigabyte for a large vocabulary. A second backward computes them again.
    """

    @staticmethod
    def forward(ctx: Any, factor: Any, rest: tuple[Any, ...], of_hidden: bool, of_weight: bool, *tensors: Any) -> Any:
        loss, *made = torch.ops.tile.linear_cross_entropy_gradients(factor, *tensors, *rest, of_hidden, of_weight)
        ctx.save_for_backward(factor, *tensors)
        ctx.rest, ctx.wanted, ctx.made = rest, (of_hidden, of_weight), made
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        (factor, *tensors), made, ctx.made = ctx.saved_tensors, ctx.made, None
        of_input, of_weight, _, of_bias, _ = ctx.needs_input_grad[4:]
        needed = [of_input, of_weight, False, of_bias, False]
        if made is None or torch.is_grad_enabled():

            def again(*given: Any) -> Any:
                op = torch.ops.tile.linear_cross_entropy_gradients
                return (op(factor, *given, *ctx.rest, *ctx.wanted)[0],)

            return (None, None, None, None, *gradients_of(again, tensors, needed, (upstream,)))
        dhidden, dweight, dbias = (_scaled(x, upstream) for x in made)
        found = dhidden, dweight, None, dbias, None
        return (None, None, None, None, *(x if wants else None for x, wants in zip(found, needed, strict=True)))


def _scaled(x: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    """Multiply in place, but in float16 by way of float32: the largest scales of losses are beyond float16."""
    if x.dtype == torch.float16:
        return (x.to(upstream.dtype) * upstream).to(x.dtype)
    return x.mul_(upstream) if x.numel() else x


def row_factor(
    target: Any, weight: Any, ignore_index: int, reduction: str, dtype: torch.dtype, in_half: bool
) -> tuple[Any, Any]:
    """Return the factor of each row's loss, `[...]` of `dtype`, and the scale in it. Takes tensors or `fx.Proxy`s.

    The sum of the factors times the losses, divided by the scale, is the reduced loss. Only gradients in float16 have a
    scale: a power of two near the root of the number of rows, or its inverse. It keeps rows of a mean above float16's
    least number, and sums of rows below its largest.
    """
    if reduction == "sum" and not in_half:
        return torch.ones_like(target, dtype=dtype), None
    total = _counted(target, weight, ignore_index, dtype).to(dtype)
    if not in_half:
        return (1 / total).expand_as(target), None
    root = total.clamp(min=1).log2().div(2).round().exp2()
    scale, factor = (1 / root, 1 / root) if reduction == "sum" else (root, root / total)
    return factor.expand_as(target), scale


def check_reduction(name: str, reduction: str) -> None:
    """Raise ValueError unless `reduction` is one that losses know."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name}: reduction is {reduction!r}; expected 'mean', 'sum' or 'none'")


def _checked(name: str, target: torch.Tensor, reduction: str) -> torch.Tensor:
    """Check the reduction, and that target holds class indices; widen those in bytes, which torch takes."""
    check_reduction(name, reduction)
    if target.is_floating_point():
        raise TypeError(f"{name}: target holds probabilities; give class indices, or call F.{name}")
    return target.long() if target.dtype == torch.uint8 else target


def reduced(loss: Any, target: Any, weight: Any, ignore_index: int, reduction: str) -> Any:
    """Reduce the losses of rows as `F.cross_entropy` does. All but the last two may be tensors or `fx.Proxy`s."""
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / _counted(target, weight, ignore_index, loss.dtype if weight is not None else None)


def _counted(target: Any, weight: Any, ignore_index: int, dtype: Any) -> Any:
    """Return the number of targets that count, or the sum of their classes' weights in `dtype`."""
    counted = target != ignore_index
    if weight is None:
        return counted.sum()
    return torch.where(counted, weight[torch.where(counted, target, 0)], 0).sum(dtype=dtype)
