# SPDX-License-Identifier: Apache-2.0
"""Sizes at which a subgraph with symbolic shapes is timed besides those that it was traced with."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from torch_tile.inductor import compat

APART = 8
"""How far the smaller and the larger problem are from the traced one, in elements."""
MOST_BYTES = 1 << 30
"""Of inputs; larger problems are not made."""


def buckets(values: Iterable[Any]) -> list[compat.Sizes]:
    """A smaller and a larger choice of all symbols in the shapes of inputs, powers of two within their ranges."""
    values = list(values)
    symbols = compat.symbols_of(values)
    if not symbols:
        return []
    factor = max(2, round(APART ** (1 / len(symbols))))
    hints = {symbol: hint for symbol, (hint, _, _) in symbols.items()}
    small = {s: max(low, 2, _power_of_two(hint // factor)) for s, (hint, low, _) in symbols.items()}
    large = {s: min(high, _power_of_two(hint * factor)) for s, (hint, _, high) in symbols.items()}
    small = {s: min(small[s], hints[s]) for s in symbols}
    large = {s: max(large[s], hints[s]) for s in symbols}
    return [each for each in (small, large) if each != hints and _bytes(values, each) <= MOST_BYTES]


def _power_of_two(size: int) -> int:
    """The largest that is not above."""
    return 1 << max(0, size.bit_length() - 1)


def _bytes(values: Iterable[Any], sizes: compat.Sizes) -> int:
    with compat.at_sizes(sizes):
        return sum(
            math.prod(map(compat.size_hint, v.shape)) * v.dtype.itemsize for v in values if isinstance(v, torch.Tensor)
        )
