# SPDX-License-Identifier: Apache-2.0
"""Show on a terminal what a user waits for, once it takes more than two seconds; say nothing anywhere else."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 2.0  # seconds without a word
STEP = 0.5  # seconds between two updates of the line
_shown = threading.Lock()  # of the one line


@contextmanager
def only_clock() -> Iterator[None]:
    """Keep the line of a terminal for a clock of the caller's own: `waiting` says nothing meanwhile."""
    free = _shown.acquire(blocking=False)
    try:
        yield
    finally:
        if free:
            _shown.release()


def clock_line(what: str, start: float) -> str:
    """Return the text of a clock since `start`, which overwrites the one before. A narrow terminal cuts `what`."""
    seconds = f" ... {time.perf_counter() - start:.0f} s"
    return f"\r{what[: max(shutil.get_terminal_size().columns - len(seconds) - 1, 0)]}{seconds}"


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show `what` and a running clock on stderr while the body runs, on a terminal; one of several has the line."""
    if not (sys.stderr is not None and sys.stderr.isatty()) or not _shown.acquire(blocking=False):
        yield
        return
    done, start = threading.Event(), time.perf_counter()

    def show() -> None:
        if done.wait(PATIENCE):
            return
        while True:
            print(clock_line(f"torch_tile: {what}", start), end="", file=sys.stderr, flush=True)
            if done.wait(STEP):
                break
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    clock = threading.Thread(target=show, daemon=True)
    clock.start()
    try:
        yield
    finally:
        done.set()
        clock.join()
        _shown.release()


__all__ = ["clock_line", "only_clock", "waiting"]
