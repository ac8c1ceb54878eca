# SPDX-License-Identifier: Apache-2.0
"""Softmax of attention on tiles: online steps of the forward, and probabilities computed again for the backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch_tile.language as T
from torch_tile.kernels.attention import score_mod as score_text
from torch_tile.kernels.attention.operands import Held, Rows
from torch_tile.kernels.attention.spec import Form
from torch_tile.kernels.common import LOG2_E


@T.macro
def exponentiate(
    scores: Any, peak: Any, total: Any, fade: Any, factor: Any, parts: int = 1, slack: float = 0.0, lows: bool = False
) -> None:
    """Replace scores `[rows, keys]` by `2 ** (factor * (score - peak))`, with the rows' maxima so far as `peak`.

    `peak` and `total` `[rows]` go from block to block; `fade` becomes what sums of earlier blocks are worth now. A row
    of nothing but -inf so far gives 0, and keeps `total` 0. As `[rows, shares]`, `total` has key j count for share
    `j % shares`: threads then sum up the keys that they hold, and meet only when the caller adds the shares.

    With `slack`, `peak` follows the maxima only where results would pass `2 ** slack` otherwise: quotients of sums are
    the same, and `fade` is exactly 1 for most blocks, which `T.scale_rows` then skips. With `lows`, scores may be as
    low as numbers go, where a mask stands for -inf by one: `factor` then multiplies differences, as the product of a
    row's maximum would overflow, or be rounded by more than 1.
    """
    rows, keys = scores.shape
    infinity = T.infinity(peak.dtype)
    old_peak = T.alloc_fragment((rows,), peak.dtype)
    base = T.alloc_fragment((rows,), peak.dtype)
    T.copy(peak, old_peak)
    T.reduce_max(scores, peak, dim=1, clear=False, nan_propagate=True)
    for i in T.Parallel(rows):
        if slack:
            peak[i] = T.if_then_else(peak[i] * factor > old_peak[i] * factor + slack, peak[i], old_peak[i])
        base[i] = T.if_then_else(peak[i] == -infinity, 0.0, peak[i] if lows else peak[i] * factor)
        fade[i] = T.exp2((old_peak[i] - base[i]) * factor if lows else old_peak[i] * factor - base[i])
        if slack:  # a fused product and sum would come near 1
            fade[i] = T.if_then_else(peak[i] == old_peak[i], 1.0, fade[i])
    for i, j in T.Parallel(rows, keys):
        scores[i, j] = T.exp2((scores[i, j] - base[i]) * factor if lows else scores[i, j] * factor - base[i])
    if len(total.shape) == 2:
        each, shares = keys // parts, total.shape[1] // parts
        for i, c in T.Parallel(rows, total.shape[1]):
            total[i, c] *= fade[i]
            for j in T.serial(each // shares):
                total[i, c] += scores[i, c // shares * each + j * shares + c % shares]
    else:
        block_total = T.alloc_fragment((rows,), peak.dtype)
        T.reduce_sum(scores, block_total, dim=1)
        for i in T.Parallel(rows):
            total[i] = total[i] * fade[i] + block_total[i]


# Probabilities of attention, computed again from log-sum-exps where gradients are, and what scores change them by.


def probability(form: Form, score: Any, unit: Any, peak: Any, *mask: Any) -> Any:
    """`exp(unit * score - log-sum-exp)` under the mask's element, if there is a mask; `peak` is the log-sum-exp, in
    powers of two where that loses nothing.
    """
    if form.lows:
        return T.exp2((form.masked(score * unit, *mask) - peak) * LOG2_E)
    seen = T.exp2(score * (unit * LOG2_E) - peak)
    return T.if_then_else(mask[0] != 0, seen, 0.0) if mask else seen


@T.macro
def weigh(
    form: Form, product: Any, scale: Any, peak: Any, held: Sequence[Held], here: Rows, i: Any, j: Any, first: Any
) -> Any:
    """The probability of row i and key j of those from `first` on, and its products with a form's slopes."""
    mask, aux = held[: form.mask is not None], held[form.mask is not None :]
    bias = [x.element(here, i, j, first) for x in mask]
    if not form.score:
        seen = probability(form, product, scale, peak, *bias)
        return seen, [seen]
    sloped = form.sloped
    values = score_text.values_of(sloped.program, product * scale, aux, here, i, j, first)
    chance = probability(form, values[sloped.program.result], form.unit(scale), peak, *bias)
    weighted = []
    for slope in form.slopes:
        term = chance if slope == 1.0 else chance * (values[slope] if isinstance(slope, str) else slope)
        weighted.append(T.if_then_else(chance == 0.0, 0.0, term) if sloped.may_be_infinite(slope) else term)
    return chance, weighted
