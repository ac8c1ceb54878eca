# SPDX-License-Identifier: Apache-2.0
"""A linear layer with its activation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from torch_tile.diagnostics.arguments import FloatDtype, Size, explains_misfits, names_parameters, renames
from torch_tile.diagnostics.spelling import did_you_mean
from torch_tile.kernels.epilogue.program import ACTIVATIONS, torch_functions

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_KNOWN = {**torch_functions(), "none": lambda x: x}
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {name: _KNOWN[name] for name in ACTIVATIONS}


def check_activation(name: str) -> str:
    """Return an activation's name. Raises ValueError if the ops have no such activation."""
    if name not in ACTIVATIONS:
        near = did_you_mean(name, ACTIVATIONS)
        raise ValueError(f"activation is {name!r}; it may be {', '.join(ACTIVATIONS)}{near}")
    return name


class Linear(nn.Linear):
    """`activation(x @ weight.T + bias) + residual`; parameters are those of `nn.Linear`.

    Args:
        in_features: K.
        out_features: N.
        bias: whether there is one.
        activation: "none", "relu", "gelu" (erf), "gelu_tanh" or "silu".
        device: as for `nn.Linear`.
        dtype: as for `nn.Linear`.
    """

    @names_parameters
    def __init__(
        self,
        in_features: Size,
        out_features: Size,
        bias: bool = True,
        activation: str = "none",
        device: torch.device | str | int | None = None,
        dtype: FloatDtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.activation: str = check_activation(activation)

    @explains_misfits
    @renames(x="input")
    def forward(self, input: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Map `[..., K]` and a residual `[..., N]` to `[..., N]`."""
        out: torch.Tensor = torch.ops.tile.linear.default(input, self.weight, self.bias, residual, self.activation)
        return out

    def extra_repr(self) -> str:
        """Return nn.Linear's text, with the activation."""
        return super().extra_repr() + (f", activation={self.activation!r}" if self.activation != "none" else "")


def is_watched(module: nn.Module | None) -> bool:
    """Return whether a module's call has hooks."""
    return module is not None and ("forward" in module.__dict__ or any(getattr(module, name, None) for name in HOOKS))


def is_product(module: nn.Module) -> bool:
    """Return whether a call of a linear layer gives the product with its weight plus its bias, and nothing else."""
    if type(module) not in (nn.Linear, Linear) or is_watched(module):
        return False
    return bool(module.__dict__.get("activation", "none") == "none")


def options_of(function: Any) -> dict[str, Any]:
    """Return the attributes of an activation that its class gave it: what it computes with. Functions have none."""
    if not isinstance(function, nn.Module):
        return {}
    return {name: value for name, value in vars(function).items() if name not in _EVERY_MODULE and name != FUSED}


def is_unchanged(function: Any, options: Mapping[str, Any]) -> bool:
    """Return whether an activation still has these options, and no hooks."""
    if isinstance(function, nn.Module) and is_watched(function):
        return False
    for name, value in options.items():
        now = getattr(function, name, None)
        if now is not value and not (isinstance(value, (str, int, float)) and now == value):
            return False
    return True


_EVERY_MODULE = frozenset(vars(nn.Module()))
FUSED = "_tile_activation"
"""Attribute of an activation that `replace_layers` fuses: its name in our ops, and its `options_of` then."""


# The gated feed-forward layer of Llama and its relatives.


class GatedMLP(nn.Module):
    """`down_proj(activation(gate_proj(x)) * up_proj(x))`: SwiGLU (arXiv:2002.05202), or GeGLU with "gelu_tanh".

    Parameters are named as in transformers' LlamaMLP.

    Args:
        hidden_size: of input and output.
        intermediate_size: of the gate.
        activation: "silu", "gelu", "gelu_tanh", "relu" or "none".
        bias: whether the three projections have one.
        device: of all parameters.
        dtype: of all parameters.
    """

    @names_parameters
    def __init__(
        self,
        hidden_size: Size,
        intermediate_size: Size,
        activation: str = "silu",
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: FloatDtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.activation: str = check_activation(activation)
        self.gate_proj: Linear = Linear(hidden_size, intermediate_size, bias, **factory)
        self.up_proj: Linear = Linear(hidden_size, intermediate_size, bias, **factory)
        self.down_proj: Linear = Linear(intermediate_size, hidden_size, bias, **factory)

    # Where `replace_layers` made the object: the attribute that held its activation, which function that was, and what
    # `options_of` said of it.
    recognised: tuple[str, Any, Mapping[str, Any]] | None = None

    @explains_misfits
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[..., hidden_size]` to the same. Gate and up are one kernel if they have no bias.

        Projections that an adapter replaced, or that have hooks, are called. So is an activation that a replaced layer
        got later, or that has hooks.
        """
        gate, up, own = self.gate_proj, self.up_proj, self._own_activation()
        if own is not None or not (is_product(gate) and is_product(up)):
            hidden = (own or FUNCTIONS[self.activation])(gate(x)) * up(x)
        elif gate.bias is None and up.bias is None:
            hidden = torch.ops.tile.swiglu.default(x, gate.weight, up.weight, self.activation)
        else:
            hidden = torch.ops.tile.linear.default(x, gate.weight, gate.bias, None, self.activation) * up(x)
        out: torch.Tensor = self.down_proj(hidden)
        return out

    def _own_activation(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return the activation of a replaced layer if it changed, so that `activation` no longer names it."""
        if self.recognised is None:
            return None
        name, function, options = self.recognised
        now: Callable[[torch.Tensor], torch.Tensor] = getattr(self, name)
        return None if now is function and is_unchanged(now, options) else now

    def extra_repr(self) -> str:
        """Return the activation as text."""
        return f"activation={self.activation!r}"


SwiGLU = GatedMLP
