# SPDX-License-Identifier: Apache-2.0
"""T.async_copy: start moving a tile from global to shared memory; it has arrived after the wait for its group."""

from __future__ import annotations

from dataclasses import dataclass

from .base import tile_op
from .copy import Copy


@tile_op("async_copy")
@dataclass(frozen=True, eq=False, repr=False)
class AsyncCopy(Copy):
    """As T.copy, but the destination may be read only after `cp_async_commit` and `cp_async_wait`."""
