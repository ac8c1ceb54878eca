# SPDX-License-Identifier: Apache-2.0
"""Calls of T's functions: arguments that do not fit the signature are an error on the author's line.

A function's signature is the one list of its parameters. `help(T.gemm)` shows it; Python checks calls against it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch_tile.ir.idmap import IdMap
from torch_tile.language.misuse import bad_call
from torch_tile.language.trace import author_span, tracer
from torch_tile.language.values import Annotation

# Decorators, which look at the names around their caller.
DECORATORS = ("inline", "macro", "meta_class", "prim_func")


def recorded(name: str, build: Callable[..., Any]) -> Callable[..., None]:
    """The function `T.name` that records what `build` makes of its arguments; it has the signature of `build`."""

    def record(*args: Any, **kwargs: Any) -> None:
        at = tracer(f"T.{name}")
        at.emit(_call(name, build, args, kwargs))

    record.__name__ = record.__qualname__ = name
    record.__doc__ = build.__doc__
    record.__signature__ = inspect.signature(build).replace(return_annotation=None)  # type: ignore[attr-defined]
    return record


def checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as `T.name`: a call that does not fit its signature raises TileError."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _call(name, function, args, kwargs)

    return call


def check_all(names: dict[str, Any]) -> None:
    """Replace the functions of the language among `names` by checked ones; two names of one function stay so."""
    made = IdMap[Any, Callable[..., Any]]()
    for name, value in list(names.items()):
        if isinstance(value, Annotation):
            value.function = made.setdefault(value, checked(value.function.__name__, value.function))
        ours = isinstance(value, FunctionType) and value.__module__.startswith("torch_tile.")
        hidden = name.endswith("__") or (name.startswith("_") and not name.startswith("__"))  # not __exp
        if not ours or hidden or name in DECORATORS:
            continue
        if not hasattr(value, "__signature__"):  # those of `recorded` are checked already
            names[name] = made.setdefault(value, checked(name, value))


def _call(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except TypeError as problem:
        if problem.__traceback__ is None or problem.__traceback__.tb_next is not None:
            raise
        raise bad_call(name, function, str(problem), author_span()) from None  # Python could not even call it
