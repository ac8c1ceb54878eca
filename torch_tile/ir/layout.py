# SPDX-License-Identifier: Apache-2.0
"""Where the elements of a tile lie: in which thread and register, or at which place of memory.

Each dimension of the tile is split into digits, major to minor; each digit has a size and a stride along one axis:
"t" thread, "r" register, "m" memory element.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Digit:
    """One digit of an index: `size` values, each step of it `stride` further along `axis`."""

    size: int
    stride: int
    axis: str


@dataclass(frozen=True)
class Swizzle:
    """Element offset `x` becomes `x ^ ((x >> shift) & mask)`, the mask being `bits` ones from bit `base` on."""

    bits: int
    base: int
    shift: int


@dataclass(frozen=True)
class Layout:
    """Digits of each dimension, major to minor; `replicas` are thread digits along which elements are repeated."""

    dims: tuple[tuple[Digit, ...], ...]
    replicas: tuple[Digit, ...] = ()
    swizzle: Swizzle | None = None
