# SPDX-License-Identifier: Apache-2.0
"""Compile many programs in parallel, with a time limit for each program and a progress bar.

Jobs are threads, not processes. The compilers proper (NVRTC, or the host's) take more than half of the time and run
beside Python. A fresh process would first import torch, which takes longer than a dozen kernels. Inductor has processes
at hand: they compile its graphs' kernels (inductor/compile_ahead/workers.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import TypeVar

from torch_tile.diagnostics.errors import error
from torch_tile.diagnostics.progress import waiting
from torch_tile.hardware import Target

_log = logging.getLogger("torch_tile")
R = TypeVar("R")
WORKERS = "TORCH_TILE_AUTOTUNE_WORKERS"


def workers_for(target: Target) -> int:
    """Choose how many programs to compile at once: `$TORCH_TILE_AUTOTUNE_WORKERS`, else by the cores.

    The passes hold Python's lock for some two fifths of a GPU kernel's time. More than four threads would only wait.
    """
    chosen = os.environ.get(WORKERS, "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(chosen)) if chosen.isdigit() else min(cores, 4 if target.kind == "cuda" else 16)


def side_by_side(
    jobs: Sequence[Callable[[], R]], workers: int, timeout: float | None, told: Callable[[], object] = lambda: None
) -> list[R | Exception]:
    """Run jobs in parallel and return each job's result or exception in order.

    A job that runs longer than `timeout` seconds gives a TimeoutError. Nothing can stop its thread, so a new thread
    takes its place.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    ended: queue.SimpleQueue[tuple[int, R | Exception]] = queue.SimpleQueue()
    started: dict[int, float] = {}
    results: dict[int, R | Exception] = {}
    given_up: set[int] = set()

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                number = waiting.get_nowait()
                started[number] = time.monotonic()
                try:
                    found: R | Exception = jobs[number]()
                except Exception as problem:
                    found = problem
                ended.put((number, found))
                if number in given_up:  # another thread has taken this one's place
                    return

    def start() -> None:
        threading.Thread(target=work, name="torch_tile compiles", daemon=True).start()

    for number in range(len(jobs)):
        waiting.put(number)
    for _ in range(min(workers, len(jobs))):
        start()
    while len(results) < len(jobs):
        with contextlib.suppress(queue.Empty):
            number, found = ended.get(timeout=0.1 if timeout else None)
            if number not in results:
                results[number] = found
                told()
        for number, since in list(started.items()) if timeout else ():
            if number not in results and time.monotonic() - since > (timeout or 0.0):
                given_up.add(number)
                results[number] = TimeoutError(f"took longer than {timeout:g} seconds to compile")
                told()
                start()
    return [results[number] for number in range(len(jobs))]


def all_of(
    jobs: Sequence[Callable[[], R]], target: object, num_workers: int | None, ignore_error: bool
) -> list[R | None]:
    """Run compile jobs for `target` in parallel and return their results in order, with a progress bar.

    `num_workers` jobs run at once; None chooses a number. After all jobs have ended, the first failure is raised. With
    `ignore_error` a failed job gives None and a logged warning.
    """
    if num_workers is not None and num_workers < 1:
        fix = "give a positive number, or None for as many as the cores allow"
        raise error("bad_argument", None, op="par_compile", name="num_workers", why=f"is {num_workers}", fix=fix)
    with progress(len(jobs), "torch_tile: kernels") as step:
        found = side_by_side(jobs, num_workers or workers_for(Target.of(target)), None, step)
    kernels: list[R | None] = []
    for number, each in enumerate(found):
        if isinstance(each, Exception):
            if not ignore_error:
                raise each
            _log.warning("kernel %d of %d does not compile: %s", number, len(found), each)
        kernels.append(None if isinstance(each, Exception) else each)
    return kernels


@contextlib.contextmanager
def progress(total: int | None, what: str) -> Iterator[Callable[[], object]]:
    """Show a progress bar on a terminal, or a clock without tqdm; yield the function to call after each step.

    `total` is None if the number of steps is unknown. TQDM_DISABLE=1 hides the bar, as it hides all bars of tqdm.
    """
    try:
        tqdm = import_module("tqdm").tqdm
    except ModuleNotFoundError:
        with waiting(what):
            yield lambda: None
        return
    with tqdm(total=total, desc=what, leave=False, disable=None) as bar:
        yield bar.update
