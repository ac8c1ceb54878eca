# SPDX-License-Identifier: Apache-2.0
"""Softmax of attention on tiles: online steps of the forward, and probabilities computed again for the backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch_tile.language as T
from torch_tile.kernels.attention import score_mod as score_text
from torch_tile.kernels.attention.operands import Held, Rows
from torch_tile.kernels.attention.spec import Spec
from torch_tile.kernels.common import LOG2_E


@T.macro
def exponentiate(
    scores: Any,
    row_max: Any,
    row_sum: Any,
    rescale: Any,
    scale_log2: Any,
    parts: int = 1,
    slack: float = 0.0,
    finite_min_masks: bool = False,
) -> None:
    """Replace scores `[rows, keys]` by `2 ** (scale_log2 * (score - row_max))`, with the rows' maxima so far as
    `row_max`.

    `row_max` and `row_sum` `[rows]` go from block to block; `rescale` becomes what sums of earlier blocks are worth
    now. A row of nothing but -inf so far gives 0, and keeps `row_sum` 0. As `[rows, partial_sums]`, `row_sum` has key j
    count for share `j % partial_sums`: threads then sum up the keys that they hold, and meet only when the caller adds
    the shares.

    With `slack`, `row_max` follows the maxima only where results would pass `2 ** slack` otherwise: quotients of sums
    are the same, and `rescale` is exactly 1 for most blocks, which `T.scale_rows` then skips. With `finite_min_masks`,
    scores may be as low as numbers go, where a mask stands for -inf by one: `scale_log2` then multiplies differences,
    as the product of a row's maximum would overflow, or be rounded by more than 1.
    """
    rows, keys = scores.shape
    infinity = T.infinity(row_max.dtype)
    old_row_max = T.alloc_fragment((rows,), row_max.dtype)
    base = T.alloc_fragment((rows,), row_max.dtype)
    T.copy(row_max, old_row_max)
    T.reduce_max(scores, row_max, dim=1, clear=False, nan_propagate=True)
    for i in T.Parallel(rows):
        if slack:
            row_max[i] = T.if_then_else(
                row_max[i] * scale_log2 > old_row_max[i] * scale_log2 + slack, row_max[i], old_row_max[i]
            )
        base[i] = T.if_then_else(
            row_max[i] == -infinity, 0.0, row_max[i] if finite_min_masks else row_max[i] * scale_log2
        )
        rescale[i] = T.exp2(
            (old_row_max[i] - base[i]) * scale_log2 if finite_min_masks else old_row_max[i] * scale_log2 - base[i]
        )
        if slack:  # a fused product and sum would come near 1
            rescale[i] = T.if_then_else(row_max[i] == old_row_max[i], 1.0, rescale[i])
    for i, j in T.Parallel(rows, keys):
        scores[i, j] = T.exp2(
            (scores[i, j] - base[i]) * scale_log2 if finite_min_masks else scores[i, j] * scale_log2 - base[i]
        )
    if len(row_sum.shape) == 2:
        each, partial_sums = keys // parts, row_sum.shape[1] // parts
        for i, c in T.Parallel(rows, row_sum.shape[1]):
            row_sum[i, c] *= rescale[i]
            for j in T.serial(each // partial_sums):
                row_sum[i, c] += scores[i, c // partial_sums * each + j * partial_sums + c % partial_sums]
    else:
        block_row_sum = T.alloc_fragment((rows,), row_max.dtype)
        T.reduce_sum(scores, block_row_sum, dim=1)
        for i in T.Parallel(rows):
            row_sum[i] = row_sum[i] * rescale[i] + block_row_sum[i]


# Probabilities of attention, computed again from log-sum-exps where gradients are, and what scores change them by.


def probability(spec: Spec, score: Any, unit: Any, row_lse: Any, *mask: Any) -> Any:
    """`exp(unit * score - log-sum-exp)` under the mask's element, if there is a mask; `row_lse` is the log-sum-exp, in
    powers of two where that loses nothing.
    """
    if spec.finite_min_masks:
        return T.exp2((spec.masked(score * unit, *mask) - row_lse) * LOG2_E)
    seen = T.exp2(score * (unit * LOG2_E) - row_lse)
    return T.if_then_else(mask[0] != 0, seen, 0.0) if mask else seen


@T.macro
def weigh(
    spec: Spec, product: Any, scale: Any, row_lse: Any, held: Sequence[Held], here: Rows, i: Any, j: Any, first: Any
) -> Any:
    """The probability of row i and key j of those from `first` on, and its products with a form's slopes."""
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
