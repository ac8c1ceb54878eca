# SPDX-License-Identifier: Apache-2.0
"""Commands of the command line, and TileLang's `tools.Analyzer`."""

from __future__ import annotations

from typing import Any


class Mistake(ValueError):
    """An argument of the command line that cannot be; the errors of a user's own file keep their traceback."""


def __getattr__(name: str) -> Any:
    """Import the analyzer when it is asked for, so that commands start without the language."""
    if name in ("AnalysisResult", "Analyzer"):
        from torch_tile.carver import analyzer

        return getattr(analyzer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
