# SPDX-License-Identifier: Apache-2.0
"""The gated feed-forward layer of Llama and its relatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torch_tile.nn.linear import Linear, check_activation


class GatedMLP(nn.Module):
    """`down_proj(activation(gate_proj(x)) * up_proj(x))`: SwiGLU (arXiv:2002.05202), or GeGLU with "gelu_tanh".

    Parameters are named as in transformers' LlamaMLP.

    Args:
        hidden_size: of input and output.
        intermediate_size: of the gate.
        activation: "silu", "gelu", "gelu_tanh", "relu" or "none".
        bias: whether the three projections have one.
        **kwargs: `device` and `dtype`.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str = "silu", bias: bool = False, **kwargs: Any
    ) -> None:
        super().__init__()
        self.activation = check_activation(activation)
        self.gate_proj = Linear(hidden_size, intermediate_size, bias, **kwargs)
        self.up_proj = Linear(hidden_size, intermediate_size, bias, **kwargs)
        self.down_proj = Linear(intermediate_size, hidden_size, bias, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., hidden_size]` to the same. Gate and up are one kernel if they have no bias."""
        gate, up = self.gate_proj, self.up_proj
        if gate.bias is None and up.bias is None:
            hidden = torch.ops.tile.swiglu.default(x, gate.weight, up.weight, self.activation)
        else:
            hidden = torch.ops.tile.linear.default(x, gate.weight, gate.bias, None, self.activation) * up(x)
        out: torch.Tensor = self.down_proj(hidden)
        return out

    def extra_repr(self) -> str:
        """The activation."""
        return f"activation={self.activation!r}"


SwiGLU = GatedMLP
