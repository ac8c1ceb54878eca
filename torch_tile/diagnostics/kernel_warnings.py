# SPDX-License-Identifier: Apache-2.0
"""Warn of kernels that are valid and hardly do what their author meant.

Passes run once for each program, whose text is kept on disk. Their findings are kept beside the text: each later
process warns, too.
"""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections.abc import Iterable, Iterator

from torch_tile.diagnostics.errors import Diagnostic

_collected: contextvars.ContextVar[list[Diagnostic] | None] = contextvars.ContextVar("warnings", default=None)
_told: dict[str | tuple[str, type[Warning], int], int] = {}  # what Python's filters keep of warnings that were shown


def warn_of(found: Iterable[Diagnostic]) -> None:
    """Warn of each finding, or add it to the list of `collected_warnings` around."""
    collected = _collected.get()
    if collected is not None:
        collected += found
        return
    for each in dict.fromkeys(found):  # passes may run twice
        text = each.render().removeprefix("error")
        if each.span is None:
            warnings.warn(text, stacklevel=3)
        else:
            warnings.warn_explicit(text, UserWarning, each.span.file, each.span.line, registry=_told)


@contextlib.contextmanager
def collected_warnings() -> Iterator[list[Diagnostic]]:
    """Collect the findings inside, and warn of none."""
    found: list[Diagnostic] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


__all__ = ["collected_warnings", "warn_of"]
