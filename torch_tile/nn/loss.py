# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy whose forward and backward are a kernel each."""

from __future__ import annotations

import torch
from torch import nn

from torch_tile.ops.losses import cross_entropy_loss as cross_entropy

__all__ = ["CrossEntropyLoss", "cross_entropy"]


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """`nn.CrossEntropyLoss` of class indices by `cross_entropy`, with its `z_loss`.

    Args:
        weight: `[C]`, of each class.
        ignore_index: targets that do not count.
        reduction: "mean", "sum" or "none".
        label_smoothing: 0.0 to 1.0.
        z_loss: the factor of the squared log-sum-exp (arXiv:2204.02311).
    """

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

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Compute `cross_entropy` of these arguments."""
        options = self.ignore_index, self.reduction, self.label_smoothing, self.z_loss
        return cross_entropy(input, target, self.weight, *options)
