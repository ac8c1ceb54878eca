# SPDX-License-Identifier: Apache-2.0
"""A linear layer with its activation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")


def check_activation(name: str) -> str:
    """The name itself. Raises ValueError if it is not an activation of the ops."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation is {name!r}; it may be {', '.join(ACTIVATIONS)}")
    return name


class Linear(nn.Linear):
    """`activation(x @ weight.T + bias) + residual`; parameters are those of `nn.Linear`.

    Args:
        in_features: K.
        out_features: N.
        bias: whether there is one.
        activation: "none", "relu", "gelu" (erf), "gelu_tanh" or "silu".
        **kwargs: `device` and `dtype`, as for `nn.Linear`.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, activation: str = "none", **kwargs: Any
    ) -> None:
        super().__init__(in_features, out_features, bias, **kwargs)
        self.activation = check_activation(activation)

    def forward(self, input: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """From `[..., K]` and a residual `[..., N]` to `[..., N]`."""
        out: torch.Tensor = torch.ops.tile.linear.default(input, self.weight, self.bias, residual, self.activation)
        return out

    def extra_repr(self) -> str:
        """As nn.Linear's, with the activation."""
        return super().extra_repr() + (f", activation={self.activation!r}" if self.activation != "none" else "")
