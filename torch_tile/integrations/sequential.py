# SPDX-License-Identifier: Apache-2.0
"""An nn.Sequential that computes linear layers together with the activations behind them."""

from __future__ import annotations

import torch
from torch import nn

import torch_tile.nn as tnn
from torch_tile.integrations.recognise import is_watched

ACTIVATION = "_tile_activation"
"""Attribute of an activation: its name in our ops."""


class Sequential(nn.Sequential):
    """What nn.Sequential computes; a linear layer of ours and an activation with a name behind it are one kernel.

    The children stay what they are: to call, hook, slice or replace one of them is as it was before.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As nn.Sequential's, from `[..., K]`."""
        children: list[nn.Module | None] = [*self, None]
        at = 0
        while (layer := children[at]) is not None:
            activation = together(layer, children[at + 1])
            if activation is None:
                input, at = layer(input), at + 1
            else:
                input = torch.ops.tile.linear.default(input, layer.weight, layer.bias, None, activation)
                at += 2
        return input


def together(layer: nn.Module, after: nn.Module | None) -> str | None:
    """The activation of a layer that may be computed with the one behind it, now that nobody watches either."""
    name: str | None = after.__dict__.get(ACTIVATION) if after is not None else None
    if name is None or type(layer) is not tnn.Linear or layer.activation != "none":
        return None
    return None if is_watched(layer) or is_watched(after) else name
