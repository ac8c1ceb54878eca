# SPDX-License-Identifier: Apache-2.0
"""Pause Python's garbage collector while a kernel is compiled.

A compilation makes and keeps hundreds of thousands of nodes, in no cycles. The collector walks over them again and
again, a fifth of the time, and finds nothing.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_compiling = 0  # compilations in progress, in all threads
_was_enabled = False


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector; once no thread needs the pause, it is as it was before. Reference counts free as ever."""
    global _compiling, _was_enabled
    with _lock:
        if not _compiling:
            _was_enabled = gc.isenabled()
            gc.disable()
        _compiling += 1
    try:
        yield
    finally:
        with _lock:
            _compiling -= 1
            if not _compiling and _was_enabled:
                gc.enable()
