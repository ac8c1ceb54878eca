# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm over the last dimension."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from torch_tile.diagnostics.arguments import FloatDtype, Size, explains_misfits, names_parameters, renames
from torch_tile.nn.linear import check_activation
from torch_tile.ops.checks import check_tensors


def last_dimension(normalized_shape: int | Sequence[int]) -> int:
    """Return the one dimension to normalise over. Raises ValueError for several, which the kernels do not take."""
    shape = tuple(normalized_shape) if isinstance(normalized_shape, Iterable) else (int(normalized_shape),)
    if len(shape) != 1:
        raise ValueError(f"normalized_shape is {shape}; expected the last dimension alone: keep torch's layer here")
    return shape[0]


class RMSNorm(nn.Module):
    """`activation(x / sqrt(mean(x^2) + eps) * (weight + weight_offset))` (arXiv:1910.07467); its parameter is `weight`.

    The defaults are those of `nn.RMSNorm`. transformers' Llama is `eps=1e-6, cast_first=True`, Gemma is
    `eps=1e-6, weight_offset=1.0`.

    Args:
        normalized_shape: length of the last dimension.
        eps: added to the mean square; None means the machine epsilon of the type that is computed in.
        elementwise_affine: whether there is a weight.
        activation: "none", "relu", "gelu", "gelu_tanh" or "silu", after the weight.
        weight_offset: added to the weight.
        cast_first: True rounds the normalised row to x's dtype before the weight multiplies it; False rounds once.
        device: of the weight.
        dtype: of the weight.
    """

    eps: float | None
    activation: str
    weight_offset: float
    cast_first: bool

    @names_parameters
    def __init__(
        self,
        normalized_shape: Size | Sequence[Size],
        eps: float | None = None,
        elementwise_affine: bool = True,
        activation: str = "none",
        weight_offset: float = 0.0,
        cast_first: bool = False,
        device: torch.device | str | None = None,
        dtype: FloatDtype | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape: tuple[int] = (last_dimension(normalized_shape),)
        self.eps, self.activation = eps, check_activation(activation)
        self.weight_offset, self.cast_first = weight_offset, cast_first
        size = self.normalized_shape[0]
        weight = torch.full((size,), 1.0 - weight_offset, device=device, dtype=dtype) if elementwise_affine else None
        self.register_parameter("weight", None if weight is None else nn.Parameter(weight))

    weight: nn.Parameter | None
    # Differ where `replace_layers` made the object of another library's norm.
    names: tuple[str, ...] = ("x",)  # of forward's arguments: the input, and the gate if there is one
    gating = "none"  # "before": normalise x * silu(gate); "after": multiply the normalised row by silu(gate)
    gate_rounded = False  # whether silu and the product are rounded to x's dtype

    @renames()
    def forward(self, *args: torch.Tensor | None, **named: torch.Tensor | None) -> torch.Tensor:
        """Map `[..., N]` to the same. Takes `x`, by position or name; replaced norms keep their names and gate."""
        x, gate = self._arguments(args, named)
        if gate is not None:
            return self._gated(x, gate)
        return self._normalised(x, self.weight)

    def _arguments(
        self, args: tuple[torch.Tensor | None, ...], named: dict[str, torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Bind the input and the gate. Raises TypeError as a function with parameters `names` does."""
        if len(args) > len(self.names):
            raise TypeError(f"forward() takes {', '.join(self.names)}, but {len(args)} arguments were given")
        given = dict(zip(self.names, args, strict=False))
        for name, value in named.items():
            if name in given or name not in self.names:
                problem = "multiple values for" if name in given else "an unexpected keyword"
                raise TypeError(f"forward() got {problem} argument {name!r}; it takes {', '.join(self.names)}")
            given[name] = value
        x = given.get(self.names[0])
        if x is None:
            raise TypeError(f"forward() misses its argument {self.names[0]!r}")
        check_tensors("RMSNorm", **{self.names[0]: x})
        return x, given.get(self.names[1]) if len(self.names) > 1 else None

    def _normalised(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Normalise rows by the kernel."""
        eps = self.eps
        if eps is None:  # half precision is computed in float32
            eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
        out: torch.Tensor = torch.ops.tile.rms_norm.default(
            x, weight, eps, self.activation, self.weight_offset, self.cast_first
        )
        return out

    def _gated(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Normalise with a gate; what is not `gate_rounded` stays in float32 up to the last product."""
        dtype, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)
        factor = nn.functional.silu(gate if self.gate_rounded else gate.to(wide))
        if self.gate_rounded:
            if self.gating == "before":
                return self._normalised(x * factor, self.weight)
            return self._normalised(x, self.weight) * factor
        x = x.to(wide) * factor if self.gating == "before" else x.to(wide)
        if self.cast_first and self.weight is not None:
            weight = self.weight + self.weight_offset if self.weight_offset else self.weight
            y = self._normalised(x, None).to(dtype) * weight
            return y if self.gating == "before" else (y * factor).to(dtype)
        y = self._normalised(x, self.weight)
        return (y if self.gating == "before" else y * factor).to(dtype)

    def extra_repr(self) -> str:
        """Return all options that change the result."""
        weight = self._parameters["weight"]
        size = "no weight" if weight is None else str(tuple(weight.shape))
        extra = f", activation={self.activation!r}" if self.activation != "none" else ""
        extra += f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return f"{size}, eps={self.eps}, cast_first={self.cast_first}{extra}"


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` over the last dimension; the parameters are the same."""

    @names_parameters
    def __init__(
        self,
        normalized_shape: Size | Sequence[Size],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: FloatDtype | None = None,
    ) -> None:
        super().__init__([last_dimension(normalized_shape)], eps, elementwise_affine, bias, device, dtype)

    @explains_misfits
    @renames(x="input")
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map `[..., N]` to `[..., N]`. Raises ValueError if torch's layer, which became this, has several."""
        last_dimension(self.normalized_shape)
        out: torch.Tensor = torch.ops.tile.layer_norm.default(input, self.weight, self.bias, self.eps)
        return out
