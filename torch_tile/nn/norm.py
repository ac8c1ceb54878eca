# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm over the last dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def last_dimension(normalized_shape: int | Sequence[int]) -> int:
    """The one dimension to normalise over. Raises ValueError for several, which the kernels do not take."""
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if len(shape) != 1:
        raise ValueError(f"normalized_shape is {shape}; only the last dimension can be normalised over")
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

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        activation: str = "none",
        weight_offset: float = 0.0,
        cast_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = (last_dimension(normalized_shape),)
        self.eps, self.activation = eps, activation
        self.weight_offset, self.cast_first = weight_offset, cast_first
        size = self.normalized_shape[0]
        weight = torch.full((size,), 1.0 - weight_offset, device=device, dtype=dtype) if elementwise_affine else None
        self.register_parameter("weight", None if weight is None else nn.Parameter(weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., N]` to `[..., N]`."""
        eps = self.eps
        if eps is None:  # half precision is computed in float32
            eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
        out: torch.Tensor = torch.ops.tile.rms_norm.default(
            x, self.weight, eps, self.activation, self.weight_offset, self.cast_first
        )
        return out

    def extra_repr(self) -> str:
        """Everything that changes what it computes."""
        weight = self._parameters["weight"]
        size = "no weight" if weight is None else str(tuple(weight.shape))
        extra = f", activation={self.activation!r}" if self.activation != "none" else ""
        extra += f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return f"{size}, eps={self.eps}, cast_first={self.cast_first}{extra}"


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` over the last dimension; the parameters are the same."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`[..., N]` to `[..., N]`. Raises ValueError if it was made for several dimensions."""
        last_dimension(self.normalized_shape)
        out: torch.Tensor = torch.ops.tile.layer_norm.default(input, self.weight, self.bias, self.eps)
        return out
