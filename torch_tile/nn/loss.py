# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of logits, whose forward and backward are a kernel each, and of a linear layer without its logits."""

from __future__ import annotations

import torch
from torch import nn

from torch_tile.diagnostics.arguments import FloatDtype, Size, explains_misfits, names_parameters
from torch_tile.ops.losses import (
    check_reduction,
    cross_entropy_loss as cross_entropy,
    linear_cross_entropy_loss as linear_cross_entropy,
)

__all__ = ["CrossEntropyLoss", "LinearCrossEntropyLoss", "cross_entropy", "linear_cross_entropy"]


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """`nn.CrossEntropyLoss` of class indices by `cross_entropy`, with its `z_loss`.

    Args:
        weight: `[C]`, of each class.
        ignore_index: targets that do not count.
        reduction: "mean", "sum" or "none".
        label_smoothing: 0.0 to 1.0.
        z_loss: the factor of the squared log-sum-exp (arXiv:2204.02311).
    """

    @names_parameters
    def __init__(
        self,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        self.z_loss = z_loss
        check_reduction("CrossEntropyLoss", reduction)

    @explains_misfits
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Compute `cross_entropy` of these arguments."""
        options = self.ignore_index, self.reduction, self.label_smoothing, self.z_loss
        return cross_entropy(input, target, self.weight, *options)


class LinearCrossEntropyLoss(nn.Linear):
    """A linear layer and the cross-entropy of its results, which are not stored: `linear_cross_entropy`.

    Its parameters are those of `nn.Linear(in_features, num_classes, bias)`. `weight` may be tied to an embedding's.

    Args:
        in_features: K.
        num_classes: C.
        bias: whether the layer has a bias.
        ignore_index: targets that do not count.
        reduction: "mean", "sum" or "none".
        label_smoothing: 0.0 to 1.0.
        z_loss: the factor of the squared log-sum-exp (arXiv:2204.02311).
        softcap: bound of the logits (Gemma 2), or None.
        device: of the parameters.
        dtype: of the parameters.
    """

    @names_parameters
    def __init__(
        self,
        in_features: Size,
        num_classes: Size,
        bias: bool = False,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        device: torch.device | str | None = None,
        dtype: FloatDtype | None = None,
    ) -> None:
        super().__init__(in_features, num_classes, bias, device, dtype)
        check_reduction("LinearCrossEntropyLoss", reduction)
        self.ignore_index: int = ignore_index
        self.reduction: str = reduction
        self.label_smoothing: float = label_smoothing
        self.z_loss: float = z_loss
        self.softcap: float | None = softcap

    @explains_misfits
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Compute the loss of `[..., K]` against class indices `[...]`."""
        return linear_cross_entropy(
            input,
            self.weight,
            target,
            linear_bias=self.bias,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
        )

    def extra_repr(self) -> str:
        """Return the layer's sizes and what is not default."""
        return f"{super().extra_repr()}, reduction={self.reduction!r}, softcap={self.softcap}"
