# SPDX-License-Identifier: Apache-2.0
"""The printed form of layouts, which parses back: `[64:64m | 64:1m] ^(3,3,3)`, `[2:2r 8:4t | 4:1t 2:1r] x[4:32t]`.

Dimensions stand between bars, each with its digits `size:stride axis`, major to minor; `1` is a dimension of one
element. `x[...]` holds the replicas, `^(bits,base,shift)` the swizzle.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch_tile.diagnostics.errors import error
from torch_tile.ir.layout import Digit, Layout, Swizzle

_FORM = re.compile(r"\s*\[(?P<dims>[^\]]*)\]\s*(x\[(?P<replicas>[^\]]*)\])?\s*(\^\((?P<swizzle>[^)]*)\))?\s*")
FIX = "write it like [2:2r 8:4t | 4:1t 2:1r] x[4:32t], or [64:64m | 64:1m] ^(3,3,3) for memory"
_DIGIT = re.compile(r"(\d+):(\d+)([trm])")


def to_text(layout: Layout) -> str:
    """The canonical form as text."""
    form = layout.canonical
    text = f"[{' | '.join(_digits(d) or '1' for d in form.dims)}]"
    if form.replicas:
        text += f" x[{_digits(form.replicas)}]"
    if form.swizzle:
        text += f" ^({form.swizzle.bits},{form.swizzle.base},{form.swizzle.shift})"
    return text


def _digits(digits: Iterable[Digit]) -> str:
    return " ".join(f"{d.size}:{d.stride}{d.axis}" for d in digits)


def parse(text: str) -> Layout:
    """The layout that prints as `text`. Raises TileError where the text is none."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise error("bad_layout", None, what=f"`{text}`", why="it has no dimensions in brackets", fix=FIX)
    dims = found["dims"].split("|") if found["dims"].strip() else []
    swizzle = None
    if found["swizzle"] is not None:
        numbers = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*", found["swizzle"])
        if numbers is None:
            raise error("bad_layout", None, what=f"`{text}`", why="its swizzle is not three numbers", fix=FIX)
        swizzle = Swizzle(*map(int, numbers.groups()))
    return Layout(tuple(_parse_digits(d, text) for d in dims), _parse_digits(found["replicas"] or "1", text), swizzle)


def _parse_digits(part: str, text: str) -> tuple[Digit, ...]:
    if part.strip() == "1":
        return ()
    digits = [_DIGIT.fullmatch(word) for word in part.split()]
    if not digits or None in digits:
        raise error("bad_layout", None, what=f"`{text}`", why=f"`{part.strip()}` is not digits like 8:4t", fix=FIX)
    return tuple(Digit(int(d[1]), int(d[2]), d[3]) for d in digits if d)
