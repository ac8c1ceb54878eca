# SPDX-License-Identifier: Apache-2.0
"""Processes that run parts of the random programs, and survive a program that hangs, crashes or eats the memory.

Each says on which program it is. Its parent kills it where that takes too long, counts the program as a fault, and runs
the rest of the part again. So no program hides another, and no fault lacks a seed.
"""

import collections
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

PARTS_OF_PROCESS = 8  # then a new one starts: compiled libraries stay in memory
GIBIBYTE = 2**30
_pages = os.sysconf("SC_PAGE_SIZE")
_context = multiprocessing.get_context("spawn")


@dataclass
class Limits:
    """What a program may take: seconds on one executor, seconds to compile a file of programs, bytes of memory."""

    seconds: float = 60
    compiling: float = 240
    memory: float = 8 * GIBIBYTE


@dataclass
class Lost:
    """A program that took its process with it."""

    seed: int
    way: str
    kind: str  # "hang", "crash" or "memory"
    text: str


class Watch:
    """What a process is at: written by it, read by its parent."""

    def __init__(self):
        self.seed = _context.Value("q", -1, lock=False)
        self.since = _context.Value("d", 0.0, lock=False)
        self.way = _context.Array("c", 32, lock=False)

    def at(self, seed, way):
        """Say that a program begins on an executor."""
        self.since.value, self.seed.value, self.way.value = time.time(), seed, way.encode()


class NoWatch:
    """Nobody looks."""

    def at(self, seed, way):
        """Do nothing."""


@dataclass
class _Worker:
    """A process, its pipe, its part and what it is at."""

    process: multiprocessing.Process
    pipe: object
    watch: Watch
    seeds: list = field(default_factory=list)
    parts: int = 0

    def lost(self, limits):
        """Why this process has to go, or None."""
        seed, way, took = self.watch.seed.value, self.watch.way.value.decode(), time.time() - self.watch.since.value
        if not self.process.is_alive():
            return Lost(seed, way, "crash", f"the process ended with {_ending(self.process.exitcode)}")
        if (used := _memory(self.process.pid)) > limits.memory:  # before the time, which swapping takes as well
            return Lost(seed, way, "memory", f"took {used / GIBIBYTE:.1f} GiB")
        if took > (limits.compiling if way.endswith(COMPILING) else limits.seconds):
            return Lost(seed, way, "hang", f"took more than {took:.0f} s")
        return None


COMPILING = " compiling"  # of an executor's name while many programs are compiled as one


def in_processes(parts, run, count, limits, deadline=None, devices=0):
    """Yield (seeds, outcomes or None, a Lost or None) of each part as it ends, in any order.

    `run(seeds, watch)` gives the outcomes of a part; it has to be importable. After `deadline` (of time.time) no part
    begins, and what runs is given up. A lost program ends its part: the other seeds run again without it, one by one
    where it is not known which of them it was.
    """
    waiting, workers, started = collections.deque(list(p) for p in parts), [], 0
    try:
        while waiting or any(w.seeds for w in workers):
            if deadline is not None and time.time() > deadline:
                return
            while waiting and len(workers) < count and not any(not w.seeds for w in workers):
                workers.append(_start(run, started, devices))
                started += 1
            for w in workers:
                if waiting and not w.seeds:
                    _give(w, waiting.popleft())
            multiprocessing.connection.wait([w.pipe for w in workers if w.seeds], timeout=1)
            for w in [w for w in workers if w.seeds]:
                yield from _look(w, workers, waiting, limits)
    finally:
        for w in workers:
            _end(w)


def _give(worker, seeds):
    worker.seeds = seeds
    worker.watch.at(seeds[0], "start" + COMPILING)
    worker.pipe.send(seeds)


def _look(worker, workers, waiting, limits):
    """Take what a process has done, or its place if it has to go."""
    found, seeds = None, worker.seeds
    try:
        if worker.pipe.poll():
            found = worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join(5)
    if found is not None:
        worker.seeds, worker.parts = [], worker.parts + 1
        if worker.parts >= PARTS_OF_PROCESS:
            workers.remove(worker)
            _end(worker)
        if isinstance(found, Lost):
            _end(worker)
            workers[:] = [w for w in workers if w is not worker]
            waiting.extendleft([[s for s in seeds if s != found.seed]] * (len(seeds) > 1))
            yield [found.seed], None, found
        else:
            yield seeds, found, None
        return
    lost = worker.lost(limits)
    if lost is None:
        return
    workers.remove(worker)
    _end(worker)
    if lost.way.endswith(COMPILING) and len(seeds) > 1:  # one of these
        waiting.extendleft([s] for s in seeds)
        return
    waiting.extendleft([[s for s in seeds if s != lost.seed]] * (len(seeds) > 1))
    yield [lost.seed], None, lost


def _start(run, number, devices):
    """Start a process; with `devices`, it sees one GPU of so many."""
    here, there = _context.Pipe()
    watch, before = Watch(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices:
        seen = before.split(",") if before else [str(n) for n in range(devices)]
        os.environ["CUDA_VISIBLE_DEVICES"] = seen[number % devices]
    try:
        process = _context.Process(target=_serve, args=(run, there, watch), daemon=True)
        process.start()
    finally:
        if devices:
            os.environ.pop("CUDA_VISIBLE_DEVICES")
            os.environ.update({"CUDA_VISIBLE_DEVICES": before} if before is not None else {})
    there.close()
    return _Worker(process, here, watch)


def _serve(run, pipe, watch):
    """Run parts until there is none."""
    while True:
        try:
            seeds = pipe.recv()
        except EOFError:
            return
        try:
            found = run(seeds, watch)
        except Exception:
            found = Lost(watch.seed.value, watch.way.value.decode(), "crash", traceback.format_exc()[-1000:])
        pipe.send(found)


def _end(worker):
    """Kill a process without waiting for it: one whose kernel hangs on a GPU may take long to go."""
    if worker.process.is_alive():
        os.kill(worker.process.pid, signal.SIGKILL)
    worker.pipe.close()


def _ending(code):
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"


def _memory(pid):
    """Bytes of memory that a process holds."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _pages
    except (OSError, IndexError, ValueError):
        return 0
