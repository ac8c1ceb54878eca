# SPDX-License-Identifier: Apache-2.0
"""Keys and values in float8 with a scale for each position, which the kernels of attention widen to the queries' dtype.

A key is `values * scale`, computed in float32 and rounded once to the queries' dtype. Where products widen the numbers
(`Config.narrow`), the scale of a key multiplies its scores instead, and the scale of a value its weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import strided

E4M3 = torch.float8_e4m3fn


def scale_types(slabs: Any, heads: Any, rows: Any) -> list[Any]:
    """Return the parameter types of the scales of keys and of values; shared scales have strides of 0."""
    return [strided(name, (slabs, heads, rows), torch.float32, unit=False, align=4) for name in ("k_scale", "v_scale")]


@T.macro
def widen(stored: Any, scales: Any, tile: Any) -> None:
    """Write a tile of float8 keys or values, times the scale of each row, into a tile of the queries' dtype.

    Positions behind the end of the sequence get numbers of no meaning.
    """
    raw = T.alloc_fragment(tile.shape, E4M3)  # all of a thread's loads come before its stores
    T.copy(stored, raw)
    for j, c in T.Parallel(*tile.shape):
        tile[j, c] = T.cast(T.cast(raw[j, c], T.float32) * scales[j], tile.dtype)


@T.macro
def scale_scores(scores: Any, scales: Any) -> None:
    """Multiply scores `[rows, keys]` by the scale of each key."""
    for i, j in T.Parallel(*scores.shape):
        scores[i, j] = scores[i, j] * scales[j]


@T.macro
def scale_weights(weights: Any, scales: Any, probs: Any) -> None:
    """Write weights times the scale of each value, which is finite, rounded to the dtype of `probs`."""
    for i, j in T.Parallel(*weights.shape):
        probs[i, j] = T.cast(weights[i, j] * scales[j], probs.dtype)


@dataclass(frozen=True, eq=False)
class Scales:
    """The scales of keys and values before a launch, float32 `[slabs, Hkv, rows]` as the keys are `[.., D]`."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors in the order of `scale_types`."""
        return [self.k, self.v]


def widened(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float8 `values` `[..., D]` times their scales, which broadcast to `[...]`, in `dtype`, in plain torch."""
    return (values.float() * scale[..., None]).to(dtype)
