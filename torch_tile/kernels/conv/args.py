# SPDX-License-Identifier: Apache-2.0
"""The arguments of convolutions, spelled once for kernels, operators and graphs.

Imports nothing but torch: the declaration of the operators asks for it before any kernel is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch

V = TypeVar("V")


class ConvArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.conv`, which its documentation explains; V stands for a tensor."""

    x: V
    weight: V
    bias: V | None = None
    residual: V | None = None
    stride: Sequence[int] = ()
    padding: Sequence[int] = ()
    dilation: Sequence[int] = ()
    activation: str = "none"

    def window(self, dims: int) -> Window:
        """Return stride, padding and dilation for each of `dims` dimensions; what is not given has its default."""
        before, after = self.padding or (0,) * dims, self.padding or (0,) * dims
        if len(self.padding) == 2 * dims:
            before, after = self.padding[::2], self.padding[1::2]
        ones = (1,) * dims
        return Window(*map(tuple, (self.stride or ones, before, after, self.dilation or ones)))


class Window(NamedTuple):
    """How a convolution walks over its dimensions: one number for each."""

    stride: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    dilation: tuple[int, ...]

    def sizes(self, x: Sequence[Any], taps: Sequence[Any]) -> list[Any]:
        """Return the sizes of the result, from those of x and the numbers of taps."""
        spans = (d * (n - 1) + 1 for d, n in zip(self.dilation, taps, strict=True))
        room = zip(x, self.before, self.after, spans, self.stride, strict=True)
        return [(size + before + after - span) // step + 1 for size, before, after, span, step in room]


def result_dtype(x: torch.dtype, residual: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the result."""
    return x if residual is None else torch.promote_types(x, residual)
