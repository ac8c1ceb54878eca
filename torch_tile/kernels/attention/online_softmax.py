# SPDX-License-Identifier: Apache-2.0
"""One step of a softmax whose rows come block by block (arXiv:1805.02867), as flash attention takes it."""

from __future__ import annotations

from typing import Any

import torch_tile.language as T


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
