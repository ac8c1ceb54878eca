# SPDX-License-Identifier: Apache-2.0
"""Let an author's function change the generated CUDA C++ before it is compiled. The text is trusted input."""

from __future__ import annotations

from collections.abc import Callable

from torch_tile.hardware import Target

Postprocess = Callable[[str, Target], str]
_chosen: list[Postprocess] = []


def choose(function: Postprocess | None) -> None:
    """Hand the text of each kernel that is compiled from now on to `function(text, target)`; None hands it to none."""
    _chosen[:] = [] if function is None else [function]


def has_function() -> bool:
    """Return whether an author's function was chosen."""
    return bool(_chosen)


def postprocessed(text: str, target: Target) -> str:
    """Return the text that the author's function makes of `text`. Raises TypeError unless that is a string."""
    for function in _chosen:
        text = function(text, target)
        if not isinstance(text, str):
            raise TypeError(f"{function!r} returned {type(text).__name__}: a callback returns the text to compile")
    return text


__all__ = ["choose", "has_function", "postprocessed"]
