# SPDX-License-Identifier: Apache-2.0
"""Give the events of one block times, so that a picture shows which work covers which.

The thread interpreter tells what each role does and what each wait waits for. The cost model's rates say how long
copies and products take. An engine takes work in the first gap that is long enough, whatever task the interpreter runs
first. Plain statements cost their instructions. The times are no predictions: latency of ordinary loads, bank conflicts
and other blocks count nothing.
"""

from __future__ import annotations

import math
import re
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from torch_tile.diagnostics.errors import Span
from torch_tile.hardware import WARP, Rates, Target
from torch_tile.intrinsics import wgmma
from torch_tile.intrinsics.traits import Engine, Sync
from torch_tile.ir.buffer import TensorMap
from torch_tile.ir.expr import Address, Binary, Call, Cast, Select, Unary
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Let, Store
from torch_tile.simulator.simt.memory import Threads

if TYPE_CHECKING:
    from torch_tile.simulator.simt.calls import Place, Run

Step = Callable[[], None]
MOST_EVENTS = 240
MOST_STATEMENTS = 40_000  # that the interpreter runs for one picture
COPIES, PRODUCTS = "copies in flight", "tensor cores"
_ENGINES = {Engine.COPY: COPIES, Engine.BULK: COPIES, Engine.WGMMA: PRODUCTS}


@dataclass
class Event:
    """Work or a wait of one row of the picture, from `start` to `end` in seconds; `by` is the role that began it."""

    row: str
    by: str
    kind: str  # "copy", "product", "wait" or "compute"
    what: str
    span: Span | None
    start: float
    end: float


class EnoughEvents(Exception):
    """Raised to stop the interpreter when the picture has enough events."""


class Untimed:
    """A timeline that keeps no times: that of all runs without a picture."""

    finds_races: ClassVar[bool] = True  # of tensors
    landing: float = 0.0  # when the bytes of the copy that starts now arrive

    def begin(self, threads: Threads) -> None:
        """Begin the times of a block of these threads."""

    def now(self, ids: Any) -> float:
        """Return how far the latest warp of these threads has come."""
        return 0.0

    def wait(self, ids: Any, time: float, what: str, span: Span | None) -> None:
        """Let these threads wait for what happens at `time`."""

    def watch(self, p: Place, run: Run) -> Run:
        """Return `run`, the call's function, with its time."""
        return run

    def timed(self, node: Store | Let, step: Step) -> Step:
        """Return `step`, which runs a statement, with its time."""
        return step


UNTIMED = Untimed()


class Timeline(Untimed):
    """The times of a block's warps and engines, and the events so far."""

    finds_races = False

    def __init__(self, target: Target, rates: Rates):
        self.target, self.rates = target, rates
        self.instruction: float = 2 * WARP * 4 / rates.scalar  # seconds of one, for up to four warps at once
        self.events: list[Event] = []
        self.statements = 0
        self.last: dict[str, Event] = {}  # of each row
        self.busy: dict[str, list[tuple[float, float]]] = {COPIES: [], PRODUCTS: []}
        self.open: dict[tuple[Engine, str], float] = {}  # when the work of the open group ends
        self.closed: dict[tuple[Engine, str], list[float]] = {}

    def begin(self, threads: Threads) -> None:
        """Begin the times of a block of these threads."""
        self.threads = threads
        self.warps = np.zeros(threads.lanes // WARP)

    @property
    def row(self) -> str:
        """Name the running role by its warps."""
        everyone = self.threads.everyone
        mask = np.ones(self.threads.lanes, bool) if everyone is None else everyone
        found = np.flatnonzero(mask) // WARP
        first, last = int(found[0]), int(found[-1])
        return f"warp {first}" if first == last else f"warps {first} to {last}"

    def now(self, ids: Any) -> float:
        """Return how far the latest warp of these threads has come."""
        return float(self.warps[ids // WARP].max(initial=0.0))

    def until(self, ids: Any, time: float, kind: str, what: str, span: Span | None) -> None:
        """Let these threads work or wait until `time`."""
        start = self.now(ids)
        if time > start:
            self.add(Event(self.row, self.row, kind, what, span, start, time))
        self.warps[ids // WARP] = max(time, start)

    def wait(self, ids: Any, time: float, what: str, span: Span | None) -> None:
        """Let these threads wait for what happens at `time`."""
        self.until(ids, time, "wait", what, span)

    def compute(self, instructions: int, span: Span | None) -> None:
        """Let the running threads compute."""
        self.statements += 1
        if self.statements > MOST_STATEMENTS:
            raise EnoughEvents
        ids = self.threads.active()
        rounds = max(1, -(-len(np.unique(ids // WARP)) // 4))
        self.until(ids, self.now(ids) + instructions * rounds * self.instruction, "compute", "compute", span)

    def add(self, event: Event) -> None:
        """Add an event, or make the last one of its row longer if that goes on."""
        last = self.last.get(event.row)
        if last is not None and event.kind == last.kind == "compute" and math.isclose(event.start, last.end):
            last.end = event.end
            return
        if len(self.events) >= MOST_EVENTS:
            raise EnoughEvents
        self.events.append(event)
        self.last[event.row] = event

    def work(self, row: str, kind: str, what: str, span: Span | None, seconds: float, latency: float = 0.0) -> float:
        """Give an engine work of the running threads, and return when its result is there."""
        start = self.now(self.threads.active())
        for first, end in self.busy[row]:
            if start + seconds <= first:
                break
            start = max(start, end)
        insort(self.busy[row], (start, start + seconds))
        self.add(Event(row, self.row, kind, what, span, start, start + seconds + latency))
        return start + seconds + latency

    def watch(self, p: Place, run: Run) -> Run:
        """Return `run`, the call's function, with its time."""
        intrinsic, call, span = p.intrinsic, p.call, p.span
        engine = intrinsic.engine

        def plain() -> Any:
            """Count one instruction, and run the call."""
            self.compute(1, span)
            return run()

        def start() -> Any:
            assert engine is not None
            self.compute(1, span)
            if engine is Engine.WGMMA:
                self.landing = self.work(PRODUCTS, "product", _products(p), span, self.seconds(p))
            else:
                self.landing = self.work(
                    COPIES, "copy", _copied(p), span, self.bytes(p) / self.rates.traffic, self.rates.step
                )
            key = engine, self.row
            self.open[key] = max(self.landing, self.open.get(key, 0.0))
            return run()

        def multiply() -> Any:
            self.compute(1, span)
            self.until(p.threads.active(), self.work(PRODUCTS, "product", _products(p), span, self.seconds(p)),
                       "compute", "compute", span)  # fmt: skip
            return run()

        def commit() -> Any:
            assert engine is not None
            key = engine, self.row
            self.closed.setdefault(key, []).append(self.open.pop(key, 0.0))
            return run()

        def drain() -> Any:
            assert engine is not None
            done, pending = self.closed.get((engine, self.row), []), int(str(call.options[0]))
            ends = done[: len(done) - pending]
            self.wait(p.threads.active(), max(ends, default=0.0), _ENGINES[engine], span)
            return run()

        if intrinsic.starts:
            return start
        if intrinsic.name == "mma":
            return multiply
        if engine is not None and intrinsic.sync in (Sync.COMMIT, Sync.DRAIN):
            return commit if intrinsic.sync is Sync.COMMIT else drain
        return run if intrinsic.sync is not None else plain

    def timed(self, node: Store | Let, step: Step) -> Step:
        """Wrap `step`, which runs a statement, to count the time of its instructions."""
        count, span = instructions(node), node.span

        def run() -> None:
            self.compute(count, span)
            step()

        return run

    def bytes(self, p: Place) -> int:
        """Return the bytes that a copy brings."""
        maps = [a for a in p.call.args if isinstance(a, TensorMap)]
        if maps:
            return math.prod(maps[0].box) * maps[0].buffer.dtype.itemsize
        return int(str(p.call.options[0])) * len(p.threads.active())

    def seconds(self, p: Place) -> float:
        """Return how long the tensor cores take for the products of the running warps."""
        warps = len(p.threads.active()) // WARP
        shape, a, b, d = (str(o) for o in p.call.options[:4])
        if p.intrinsic.engine is Engine.WGMMA:
            count = warps / 4 * wgmma.M * int(shape) * wgmma.PRODUCTS[a, b, d]
        else:
            count = warps * math.prod(map(int, re.findall(r"\d+", shape)))
        rate = self.target.flops(a) / self.target.sms
        return 2 * count / (rate or self.rates.product)


def _copied(p: Place) -> str:
    """Name the buffers of a copy."""
    names = (a.buffer.name for a in p.call.args[:2] if isinstance(a, Address | TensorMap))
    return " and ".join(dict.fromkeys(names))


def _products(p: Place) -> str:
    """Name the factors of a product."""
    return " by ".join(a.buffer.name for a in p.call.args[1:3] if isinstance(a, Address))


def instructions(node: Store | Let) -> int:
    """Count the instructions of a statement: its operations, and one that keeps the result."""
    return 1 + sum(isinstance(n, Binary | Unary | Cast | Select | Call) for n in walk(node.value))
