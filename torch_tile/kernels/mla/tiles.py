# SPDX-License-Identifier: Apache-2.0
"""What kernels of MLA decoding do with tiles: load them, hide scores, store sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch_tile.language as T
from torch_tile.kernels.mla.spec import Form

SLACK = 8.0  # weights may be as large as 2 ** 8 before sums are scaled anew: far from the end of float16


@T.macro
def load_cache(
    form: Form, caches: Sequence[Any], table: Sequence[Any], tile: Any, bz: Any, number: Any, length: Any
) -> None:
    """The positions of tile `number` of a sequence into a tile, latent and rotary part side by side.

    What lies past the sequence's end, where memory may hold NaN, is made 0 here only if pages are smaller than tiles.
    """
    keys = tile.shape[0]
    page_size = caches[0].shape[1]
    if form.gathered:
        start = 0
        for cache, width in zip(caches, (form.latent, form.rotary), strict=True):
            for j, c in T.Parallel(keys, width):
                position = number * keys + j
                page = T.clamp(table[0][bz, position // page_size], 0, cache.shape[0] - 1)
                value = cache[page, position % page_size, c]
                tile[j, start + c] = T.if_then_else(position < length, value, T.cast(0, form.dtype))
            start = form.latent
    else:
        place = form.place(caches[0], table, bz, number, keys)
        T.copy(caches[0][(*place, 0)], tile[:, : form.latent])
        T.copy(caches[1][(*place, 0)], tile[:, form.latent :])


@T.macro
def hide(form: Form, scores: Any, first: Any, length: Any, reach: Any, heads: Any, row: Any, scale: Any) -> None:
    """-inf for positions from `first` on that a query does not see: row r sees those up to `reach + r // heads`.

    The scale is applied where it is not folded.
    """
    for i, j in T.Parallel(*scores.shape):
        seen = first + j <= reach + (row + i) // heads
        seen = T.logical_and(seen, first + j < length)
        score = scores[i, j] if form.folded else scores[i, j] * scale
        scores[i, j] = T.if_then_else(seen, score, -T.infinity(scores.dtype))


@T.macro
def store_through(tile: Any, sums: Any, weight: Any, out: Any, sequence: Any, first: Any, column: int = 0) -> None:
    """Rows of `sums` times their weights to `out` from row `first` and `column` on, by way of a tile: by 16 bytes."""
    result = T.alloc_fragment(sums.shape, out.dtype)
    for i, c in T.Parallel(*sums.shape):
        result[i, c] = T.cast(sums[i, c] * weight[i], out.dtype)
    part = tile[:, column : column + sums.shape[1]]
    T.copy(result, part)
    T.copy(part, out[sequence, first, column])
