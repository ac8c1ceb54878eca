# SPDX-License-Identifier: Apache-2.0
"""Guess the name that a misspelt one stands for, and name the parameters that a function has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the name of `known` that is spelt most like `name`, in either case of letters; "" if none is.

    A part of a name between underlines counts as near, `stages` means `num_stages`, and so does its beginning.
    """
    from difflib import get_close_matches  # not before: `import torch_tile` needs none of it

    spellings = {k.lower(): k for k in known}
    low = name.lower()
    found = (
        [k for k in spellings if low in k.split("_")]
        or get_close_matches(low, spellings, 1, cutoff)
        or [k for k in spellings if len(low) > 2 and k.startswith(low)]
    )
    return spellings[found[0]] if found else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the name of `known` nearest to `name`, or ""."""
    near = nearest(name, known)
    return f"; did you mean {near}?" if near else ""


def missing_name(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """Build the error for a name that a module does not have."""
    return AttributeError(f"module {module!r} has no attribute {name!r}{did_you_mean(name, known)}")


def names_parameters(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function name its parameters, and the nearest one, in the TypeError for arguments that do not fit."""

    @functools.wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> R:
        try:
            return function(*args, **named)
        except TypeError as problem:
            told = _bad_call(function, args, named, str(problem))
            if told is None:
                raise
        raise told

    return call


def _bad_call(
    function: Callable[..., object], args: tuple[Any, ...], named: dict[str, Any], text: str
) -> TypeError | None:
    """Build the error for a call that Python refused with `text`; None if the arguments fit."""
    import inspect

    signature = inspect.signature(function)
    try:
        signature.bind(*args, **named)
        return None
    except TypeError:
        own = (p for p in signature.parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
        known = [p.name for p in own if p.name not in ("self", "cls") and not p.name.startswith("_")]
    unknown = next((name for name in named if name not in known), "")
    owner = function.__qualname__.removesuffix(".__init__").rpartition("<locals>.")[2]
    why = f"got an unexpected keyword argument '{unknown}'" if unknown else text.partition("() ")[2]
    return TypeError(f"{owner}() {why}{did_you_mean(unknown, known)}; its parameters are {', '.join(known)}")
