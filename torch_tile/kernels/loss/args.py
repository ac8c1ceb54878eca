# SPDX-License-Identifier: Apache-2.0
"""The arguments of losses, spelled once for kernels and operators.

Imports nothing but torch: the declaration of the operators asks for it before any kernel is imported.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

V = TypeVar("V")


class CrossEntropyArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.cross_entropy`."""

    logits: V
    target: V
    weight: V | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0


class CrossEntropyBackwardArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.cross_entropy_backward`."""

    grad: V
    logits: V
    target: V
    lse: V
    weight: V | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    @property
    def forward(self) -> CrossEntropyArgs[V]:
        """Return the arguments of the loss."""
        return CrossEntropyArgs(*(getattr(self, name) for name in CrossEntropyArgs._fields))


class LinearCrossEntropyArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.linear_cross_entropy`."""

    hidden: V
    weight: V
    target: V
    bias: V | None = None
    class_weight: V | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None


class LinearCrossEntropyGradientsArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.linear_cross_entropy_gradients`."""

    grad: V
    hidden: V
    weight: V
    target: V
    bias: V | None = None
    class_weight: V | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    of_hidden: bool = True
    of_weight: bool = True

    @property
    def forward(self) -> LinearCrossEntropyArgs[V]:
        """Return the arguments of the loss."""
        return LinearCrossEntropyArgs(*(getattr(self, name) for name in LinearCrossEntropyArgs._fields))
