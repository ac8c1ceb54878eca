# SPDX-License-Identifier: Apache-2.0
"""Guess the name that a misspelt one stands for."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the name of `known` that is spelt most like `name`, in either case of letters; "" if none is.

    A part of a name between underlines counts as near: `stages` means `num_stages`.
    """
    from difflib import get_close_matches  # not before: `import torch_tile` needs none of it

    spellings = {k.lower(): k for k in known}
    found = [k for k in spellings if name.lower() in k.split("_")] or get_close_matches(
        name.lower(), spellings, 1, cutoff
    )
    return spellings[found[0]] if found else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the name of `known` nearest to `name`, or ""."""
    near = nearest(name, known)
    return f"; did you mean {near}?" if near else ""


def missing_name(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """Build the error for a name that a module does not have."""
    return AttributeError(f"module {module!r} has no attribute {name!r}{did_you_mean(name, known)}")
