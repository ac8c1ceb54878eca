# SPDX-License-Identifier: Apache-2.0
"""`F.cross_entropy` by `tile.cross_entropy`: the losses of rows, and their reduction."""

from __future__ import annotations

from typing import Any

import torch

REDUCTIONS = ("mean", "sum", "none")


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
        target: class indices, input's shape without C; int64 or int32. Probabilities are refused with a TypeError.
        weight: `[C]`, of each class; it has no gradient.
        ignore_index: targets that do not count.
        reduction: "mean" (over the weights of targets that count), "sum" or "none".
        label_smoothing: 0.0 to 1.0.
        z_loss: the factor of the squared log-sum-exp.

    Returns:
        A scalar, or target's shape for "none", in float32 (float64 for float64), where torch rounds to input's dtype.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"cross_entropy: reduction is {reduction!r}; expected 'mean', 'sum' or 'none'")
    if target.is_floating_point():
        raise TypeError("cross_entropy: target holds probabilities; give class indices, or call F.cross_entropy")
    logits = input.movedim(1, -1) if input.dim() > 2 else input
    loss, _ = torch.ops.tile.cross_entropy(logits, target, weight, ignore_index, label_smoothing, z_loss)
    found: torch.Tensor = reduced(loss, target, weight, ignore_index, reduction)
    return found


def reduced(loss: Any, target: Any, weight: Any, ignore_index: int, reduction: str) -> Any:
    """Reduce the losses of rows as `F.cross_entropy` does. All but the last two may be tensors or `fx.Proxy`s."""
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    counted = target != ignore_index
    if weight is None:
        return loss.sum() / counted.sum()
    weights = torch.where(counted, weight[torch.where(counted, target, 0)], 0)
    return loss.sum() / weights.sum(dtype=loss.dtype)
