# SPDX-License-Identifier: Apache-2.0
"""Change settings of the process by TileLang's names: the cache of kernels, log messages, paths.

`tilelang.env` is this module; `env.TILELANG_CACHE_DIR` and other names that begin so are read when they are asked for.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from typing import Any

from torch_tile.diagnostics.arguments import names_parameters
from torch_tile.diagnostics.spelling import did_you_mean
from torch_tile.runtime.cache import cache_dir

CACHE = "TORCH_TILE_CACHE_DIR"
_uncached: tuple[tempfile.TemporaryDirectory[str], str | None] | None = None  # and what the variable was before
env = sys.modules[__name__]


def disable_cache() -> None:
    """Stop using the kernel cache on disk, in child processes, too; new builds go to a temporary folder."""
    global _uncached
    if _uncached is None:
        folder = tempfile.TemporaryDirectory(prefix="torch_tile-uncached-", ignore_cleanup_errors=True)
        _uncached = folder, os.environ.get(CACHE)
        os.environ[CACHE] = folder.name


def enable_cache() -> None:
    """Keep kernels on disk again, as without `disable_cache`."""
    global _uncached
    if _uncached is not None:
        folder, before = _uncached
        os.environ.pop(CACHE, None)
        if before is not None:
            os.environ[CACHE] = before
        _uncached = None
        folder.cleanup()


def is_cache_enabled() -> bool:
    """Return whether kernels are kept on disk."""
    return _uncached is None


@names_parameters
def set_log_level(level: str | int) -> None:
    """Show torch_tile's messages from this level on: a `logging` number or its name. Raises ValueError."""
    known = logging.getLevelNamesMapping()
    if isinstance(level, str) and level.upper() not in known:
        meant = did_you_mean(level, known) or f"; expected one of {', '.join(known)}"
        raise ValueError(f"set_log_level: level is {level!r}{meant}")
    logging.getLogger("torch_tile").setLevel(level.upper() if isinstance(level, str) else level)


def __getattr__(name: str) -> Any:
    """Look up a TileLang setting, such as TILELANG_CACHE_DIR, when it is read."""
    if name == "TILELANG_CACHE_DIR":
        return str(cache_dir())
    if name == "TILELANG_DISABLE_CACHE":
        return "0" if is_cache_enabled() else "1"
    if name.startswith("TILELANG_"):
        return os.environ.get(name, "")
    if name == "CUDA_HOME":
        return os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
