# SPDX-License-Identifier: Apache-2.0
"""What the CPU generator hands on. Text found on disk needs this and no generator."""

from __future__ import annotations

from typing import NamedTuple

from torch_tile.diagnostics.errors import Span

ENTRY = "tile_main"
"""The function of the text that is called."""


class CpuSource(NamedTuple):
    """Generated text, and the assertions that a nonzero result of the entry names (1-based)."""

    text: str
    asserts: tuple[tuple[str, Span | None], ...]
