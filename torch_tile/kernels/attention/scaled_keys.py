# SPDX-License-Identifier: Apache-2.0
"""Keys and values in float8 with a scale for each position. The kernels of attention widen them to the queries' dtype.

A key is `values * scale`, computed in float32 and rounded once to the queries' dtype. Where products widen the numbers
(`Config.narrow`), the scale of a key multiplies its scores instead. The scale of a value goes into the exponents of its
weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.attention.softmax import power_above
from torch_tile.kernels.common import strided

E4M3 = torch.float8_e4m3fn


def scale_types(slabs: Any, heads: Any, rows: Any) -> list[Any]:
    """Return the parameter types of the scales of keys and of values; shared scales have strides of 0."""
    return [strided(name, (slabs, heads, rows), torch.float32, unit=False, align=4) for name in ("k_scale", "v_scale")]


@T.macro
def widen(stored: Any, scales: Any, tile: Any) -> None:
    """Write a tile of float8 keys or values into a tile of the queries' dtype. Each row is multiplied by its scale.

    Positions behind the end of the sequence get numbers of no meaning.
    """
    raw = T.alloc_fragment(tile.shape, E4M3)  # all of a thread's loads come before its stores
    T.copy(stored, raw)
    for j, c in T.Parallel(*tile.shape):
        tile[j, c] = T.cast(T.cast(raw[j, c], T.float32) * scales[j], tile.dtype)


LEAST_PEAK, MOST_PEAK = 2.0**-100, 2.0**100  # of a row of queries, so that its unit and one over it are normal numbers


@T.macro
def scale_to_float16(tile: Any, queries: Any, unit: Any) -> None:
    """Write a tile of bfloat16 queries as float16, each row as multiples of a power of two, `unit` `[rows]`.

    Float8 then becomes the type of the queries in one instruction for a pair. A row's largest magnitude is 0.5 to 1
    units, and numbers from 2^-14 units on are exact. Rows of larger or smaller magnitudes than 2^100 and 2^-100 have
    the unit of those.
    """
    rows, columns = tile.shape
    values, peak = T.alloc_fragment((rows, columns), unit.dtype), T.alloc_fragment((rows,), unit.dtype)
    units = T.alloc_shared((rows,), unit.dtype)
    for i, c in T.Parallel(rows, columns):
        values[i, c] = T.cast(tile[i, c], unit.dtype)
    T.reduce_absmax(values, peak, dim=1)
    for i in T.Parallel(rows):
        units[i] = power_above(T.clamp(peak[i], LEAST_PEAK, MOST_PEAK))
    T.copy(units, unit)
    for i, c in T.Parallel(rows, columns):
        queries[i, c] = T.cast(T.cast(tile[i, c], unit.dtype) / units[i], queries.dtype)


GAIN = 14.0  # weights beside float8 values are float16, at most 2 ** 14.5: those of 2 ** -28 are still exact
LEAST_SCALE = 2.0**-80  # of a value, else sums of weights over scales may pass what float32 holds


@T.macro
def scale_scores(scores: Any, scales: Any, unit: Any) -> None:
    """Multiply scores `[rows, keys]` by the scale of each key, and by the unit of each row if there is one.

    An infinite scale makes NaN of a score: one of `-inf` would hide the key.
    """
    factor = T.alloc_fragment(scales.shape, scales.dtype)
    for j in T.Parallel(*scales.shape):
        factor[j] = scales[j] + (scales[j] - scales[j])
    for i, j in T.Parallel(*scores.shape):
        scores[i, j] = scores[i, j] * (factor[j] if unit is None else factor[j] * unit[i])


@T.macro
def raise_scores(scores: Any, scales: Any, sizes: Any, scale_log2: Any) -> None:
    """Raise scores so that the weight `2 ** (scale_log2 * score)` of a key is times the magnitude of its value's scale.

    A row's weights are relative to its largest then, whatever scales there are, and fit in float16. Divide sums of
    weights by the magnitudes, which `sizes` `[keys]` become. Smaller ones count as LEAST_SCALE here. Scores are
    rounded once more, by which weights differ as by any rounding of scores.
    """
    over = 1.0 / scale_log2
    rise = T.alloc_fragment(sizes.shape, sizes.dtype)
    for j in T.Parallel(*sizes.shape):
        sizes[j] = T.max(T.abs(scales[j]), LEAST_SCALE)
        rise[j] = T.log2(sizes[j]) * over
    for i, j in T.Parallel(*scores.shape):
        scores[i, j] = scores[i, j] + rise[j]


@T.macro
def sign_weights(weights: Any, scales: Any, probs: Any) -> None:
    """Write weights of `raise_scores` with the signs of values' scales, less below LEAST_SCALE, as `probs`."""
    sign = T.alloc_fragment(scales.shape, scales.dtype)
    for j in T.Parallel(*scales.shape):
        sign[j] = T.clamp(scales[j] * (1 / LEAST_SCALE), -1.0, 1.0)
    for i, j in T.Parallel(*weights.shape):
        probs[i, j] = T.cast(weights[i, j] * sign[j], probs.dtype)


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
