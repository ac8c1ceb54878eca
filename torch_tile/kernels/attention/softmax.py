# SPDX-License-Identifier: Apache-2.0
"""Softmax of attention on tiles: online steps of the forward, and probabilities computed again for the backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch_tile.language as T
from torch_tile.kernels.attention import score_mod as score_text
from torch_tile.kernels.attention.operands import Held, Rows
from torch_tile.kernels.attention.spec import Spec
from torch_tile.kernels.common import LOG2_E

# Powers of two from which on neighbours among float32 numbers differ by 16: what is not a row's maximum has no weight.
LARGE = 2.0**28
LARGE_BESIDE_GAIN = 2.0**24  # products below are rounded by at most 0.5


def power_above(x: Any) -> Any:
    """Return the power of two in the interval `(x, 2 * x]` of a positive float32 `x`."""
    if isinstance(x, float):
        return 2.0 ** math.frexp(x)[1]
    exponent = T.bitwise_and(T.reinterpret(x, "int32"), 0x7F800000)
    return T.reinterpret(exponent + 0x00800000, "float32")


def factor_of(row_max: Any, scale_log2: Any, large: float = LARGE) -> Any:
    """Return the factor of a row's scores: `scale_log2`, or a power of two above it for maxima from `large` on.

    The product of a large maximum would be rounded by more than 2 ** 7. As a power of two that is infinite or nothing.
    A factor that is a power of two makes it exact. It is not smaller, so the weights of other scores only vanish
    faster.
    """
    return T.if_then_else(T.abs(row_max * scale_log2) >= large, power_above(scale_log2), scale_log2)


def base_of(row_max: Any, factor: Any) -> Any:
    """Return the value that a row's exponents are relative to. It is finite, even for a row of -inf only."""
    return T.max(row_max * factor, T.min_value(row_max.dtype))


@T.macro
def exponentiate(
    scores: Any,
    row_max: Any,
    base: Any,
    row_sum: Any,
    rescale: Any,
    scale_log2: Any,
    parts: int = 1,
    slack: float = 0.0,
    subtracts: bool = False,
    gain: float = 0.0,
    sizes: Any = None,
) -> None:
    """Replace scores `[rows, keys]` by `2 ** (scale_log2 * (score - row_max))`, where `row_max` becomes the rows'
    running maximum.

    `row_max`, `base` and `row_sum` `[rows]` go from block to block, from `begin_rows` on; `rescale` becomes what sums
    of earlier blocks are worth now. A row of nothing but -inf so far gives 0, and keeps `row_sum` 0. As
    `[rows, partial_sums]`, `row_sum` has key j count for share `j % partial_sums`: threads then sum up the keys that
    they hold, and meet only when the caller adds the shares.

    With `subtracts`, maxima are subtracted before `scale_log2` multiplies, which is exact. Else `base` is the product,
    which a GPU takes off in the instruction that multiplies. Its rounding changes all weights of a row by one factor,
    from 2 ** -8 to 2 ** 8: quotients of sums are right.

    With `gain`, weights and their sums are times `2 ** gain`. Without `subtracts`, `base` has it, and no weight passes
    `2 ** (gain + 0.5)`.

    With `sizes` `[keys]`, the sum of a row has each weight divided by its size.

    With `slack`, `row_max` follows the maxima only where results would pass `2 ** slack` otherwise: quotients of sums
    are the same, and `rescale` is exactly 1 for most blocks, which `T.scale_rows` then skips. Scores as low as numbers
    go, where a mask stands for -inf by one, ask for `subtracts`.
    """
    rows, keys = scores.shape
    factor = T.alloc_fragment((rows,), row_max.dtype)
    if slack:
        old_row_max = T.alloc_fragment((rows,), row_max.dtype)
        T.copy(row_max, old_row_max)
    T.reduce_max(scores, row_max, dim=1, clear=False, nan_propagate=True)
    for i in T.Parallel(rows):
        if slack:
            is_high = (row_max[i] - old_row_max[i]) * scale_log2 > slack
            row_max[i] = T.if_then_else(is_high, row_max[i], old_row_max[i])
        factor[i] = 1.0 if subtracts else factor_of(row_max[i], scale_log2, LARGE_BESIDE_GAIN if gain else LARGE)
        new_base = base_of(row_max[i], factor[i]) - (0.0 if subtracts else gain)
        rescale[i] = T.exp2((base[i] - new_base) * scale_log2 if subtracts else base[i] - new_base)
        base[i] = new_base
    for i, j in T.Parallel(rows, keys):
        if subtracts:
            exponent = (scores[i, j] - base[i]) * scale_log2
            scores[i, j] = T.exp2(exponent + gain if gain else exponent)
        else:
            scores[i, j] = T.exp2(T.fma(scores[i, j], factor[i], -base[i]))
    if len(row_sum.shape) == 2:
        each, partial_sums = keys // parts, row_sum.shape[1] // parts
        for i, c in T.Parallel(rows, row_sum.shape[1]):
            row_sum[i, c] *= rescale[i]
            for j in T.serial(each // partial_sums):
                key = c // partial_sums * each + j * partial_sums + c % partial_sums
                row_sum[i, c] += scores[i, key] if sizes is None else scores[i, key] / sizes[key]
    else:
        block_row_sum = T.alloc_fragment((rows,), row_max.dtype)
        shares = scores
        if sizes is not None:
            shares = T.alloc_fragment(scores.shape, scores.dtype)
            for i, j in T.Parallel(rows, keys):
                shares[i, j] = scores[i, j] / sizes[j]
        T.reduce_sum(shares, block_row_sum, dim=1)
        for i in T.Parallel(rows):
            row_sum[i] = row_sum[i] * rescale[i] + block_row_sum[i]


@T.macro
def hide_keys(
    spec: Spec,
    tiles: Sequence[Any],
    hidden: float,
    query_of: Callable[[Any], Any],
    first: Any,
    *limits: Any,
    columns: int = 1,
) -> None:
    """Set elements of `tiles` `[rows, keys]` to `hidden` where the query of a row does not see the key. `limits` are
    the offset of queries, the window and the number of keys.

    Each row's ends are kept in 32 bits. As expressions they are differences that may need 64, for each key.

    Under a window, ends count from each of `columns` neighbours, of which a thread holds some. It then compares them
    with constants, and keeps no number of a key in a register.
    """
    rows, keys = tiles[0].shape
    if spec.windowed and 1 < columns < keys:
        begins, ends = (T.alloc_fragment((rows, columns), "int32") for _ in range(2))
        for i, c in T.Parallel(rows, columns):
            seen_from, seen_to = spec.keys_seen(query_of(i), first, keys, *limits)
            begins[i, c] = seen_from - c
            ends[i, c] = seen_to - c
        for i, c in T.Parallel(rows, columns):
            for j in T.serial(keys // columns):
                seen = T.logical_and(j * columns >= begins[i, c], j * columns < ends[i, c])
                for tile in tiles:
                    tile[i, j * columns + c] = T.if_then_else(seen, tile[i, j * columns + c], hidden)
        return
    end = T.alloc_fragment((rows,), "int32")
    begin = T.alloc_fragment((rows,), "int32") if spec.windowed else None
    for i in T.Parallel(rows):
        seen_from, seen_to = spec.keys_seen(query_of(i), first, keys, *limits)
        end[i] = seen_to
        if spec.windowed:
            begin[i] = seen_from
    for i, j in T.Parallel(rows, keys):
        seen = T.logical_and(j >= begin[i], j < end[i]) if spec.windowed else j < end[i]
        for tile in tiles:
            tile[i, j] = T.if_then_else(seen, tile[i, j], hidden)


@T.macro
def begin_rows(row_max: Any, base: Any) -> None:
    """Initialize the rows' running values before the first scores."""
    T.fill(row_max, -T.infinity(row_max.dtype))
    T.fill(base, T.min_value(base.dtype))


# Probabilities of attention, computed again from log-sum-exps for gradients, and derivatives of the scores.


def probability(spec: Spec, score: Any, unit: Any, row_lse: Any, *mask: Any) -> Any:
    """Compute `exp(unit * score - log-sum-exp)` under the mask's element, if there is a mask. `row_lse` is the
    log-sum-exp, in powers of two where that loses nothing.
    """
    if spec.finite_min_masks:
        return T.exp2((spec.masked(score * unit, *mask) - row_lse) * LOG2_E)
    seen = T.exp2(score * (unit * LOG2_E) - row_lse)
    return T.if_then_else(mask[0] != 0, seen, 0.0) if mask else seen


@T.macro
def weigh(
    spec: Spec, product: Any, scale: Any, row_lse: Any, held: Sequence[Held], here: Rows, i: Any, j: Any, first: Any
) -> Any:
    """Compute the probability of row i and key j, and its products with a score function's derivatives."""
    mask, aux = held[: spec.mask is not None], held[spec.mask is not None :]
    bias = [x.element(here, i, j, first) for x in mask]
    if not spec.score:
        seen = probability(spec, product, scale, row_lse, *bias)
        return seen, [seen]
    sloped = spec.sloped
    values = score_text.values_of(sloped.program, product * scale, aux, here, i, j, first)
    chance = probability(spec, values[sloped.program.result], spec.unit(scale), row_lse, *bias)
    weighted = []
    for slope in spec.slopes:
        term = chance if slope == 1.0 else chance * (values[slope] if isinstance(slope, str) else slope)
        weighted.append(T.if_then_else(chance == 0.0, 0.0, term) if sloped.may_be_infinite(slope) else term)
    return chance, weighted
