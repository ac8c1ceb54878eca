# SPDX-License-Identifier: Apache-2.0
"""`python -m torch_tile tune FILE.py:NAME ...`: search the configurations of an autotuned kernel on this machine."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from torch_tile.autotuner.decorator import AutotunedFunction
from torch_tile.autotuner.result import AutotuneResult
from torch_tile.tools import Mistake


def tune(function: object, name: str, words: Sequence[str]) -> str:
    """Search for the arguments in `words`, such as "1024" or "M=1024", and return the table of what was tried.

    Later calls for the same arguments find the outcome on disk. Raises Mistake for what is no autotuned kernel.
    """
    if not isinstance(function, AutotunedFunction):
        raise Mistake(f"{name} is not decorated with @torch_tile.autotune: give configs=... above its @torch_tile.jit")
    args, kwargs = arguments(words)
    try:
        found: AutotuneResult = (
            function.tune(*args, **kwargs) if function.function.is_lazy else function.tune_sizes(args, kwargs)
        )
    except TypeError as problem:
        takes = ", ".join(function.names)
        raise Mistake(
            f"{problem}; it takes {takes}: give those that are not tuned, as {function.names[0]}=64"
        ) from None
    return f"{found}\n\nbest: {found.config}"


def arguments(words: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """Read words of a command line as arguments by position, and by name where they hold `=`."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name.isidentifier():
            kwargs[name] = _value(value)
        elif kwargs:
            raise Mistake(f"{word!r} stands behind an argument by name: give it a name, too")
        else:
            args.append(_value(word))
    return args, kwargs


def _value(word: str) -> Any:
    """Read an argument of the command line as a Python literal, else as text."""
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word  # a text, such as float16
