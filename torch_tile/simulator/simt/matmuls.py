# SPDX-License-Identifier: Apache-2.0
"""Track the products that warpgroups have in flight on the tensor cores, and the registers of these products.

From a product's start until its warps wait for its group, ordinary code must not use its registers. Ordinary code that
used them before needs a wgmma_fence before the product. Ordinary code that reads results needs wgmma_results first.
"""

from __future__ import annotations

import numpy as np

from torch_tile.diagnostics.errors import Span
from torch_tile.hardware import WARPGROUP
from torch_tile.ir.buffer import Buffer
from torch_tile.simulator.simt.calls import Calls
from torch_tile.simulator.simt.memory import Local, Memory
from torch_tile.simulator.simt.races import Array
from torch_tile.simulator.simt.values import Value


class Uses:
    """The last uses of registers: an array entry for each register and warpgroup, `[size, groups]`.

    results, factors: the group of products that last had the register as a result or factor. hidden: whether it is a
    result without a wgmma_results since. touched: the number of wgmma_fences before ordinary code last used it.
    """

    def __init__(self, size: int, groups: int):
        self.results, self.factors, self.touched = (np.zeros((size, groups), np.int64) for _ in range(3))
        self.hidden = np.zeros((size, groups), bool)


class Products:
    """The products that each warpgroup of a block has in flight."""

    def __init__(self, calls: Calls):
        self.calls = calls
        groups = -(-calls.threads.lanes // WARPGROUP)
        self.closed = np.zeros(groups, np.int64)  # groups of products
        self.done = np.zeros(groups, np.int64)  # of these, known to be done
        self.fences = np.zeros(groups, np.int64)  # how many there were
        self.last: dict[int, tuple[int, Span | None]] = {}  # of each warpgroup: the group of its last product
        self.uses: dict[Memory, Uses] = {}
        self.in_flight: bool = False  # whether any product is

    def uses_of(self, memory: Memory) -> Uses:
        """Return the recorded uses of one array of registers."""
        found = self.uses.get(memory)
        if found is None:
            found = self.uses[memory] = Uses(memory.size, len(self.done))
        return found

    def agents(self, group: int) -> tuple[int, ...]:
        """Return the clock columns of the four warps' parts of a warpgroup's products."""
        name = f"a product of warpgroup {group}"
        return tuple(self.calls.order.agent(name, 4 * group + w) for w in range(4))

    def claim(self, memory: Local, start: int, count: int, group: int, role: str, span: Span | None) -> None:
        """Make registers the "results" or "factors" of a warpgroup's next product."""
        uses, here = self.uses_of(memory), (slice(start, start + count), group)
        other, add = uses.factors if role == "results" else uses.results, self.calls.threads.findings.add
        if (other[here] > self.done[group]).any():
            text = f"`{memory.name}` becomes {role} of a product while another one uses it otherwise"
            add("missing_wait", span, text)
        if (uses.touched[here] >= self.fences[group]).any():
            add("missing_fence", span, f"a product uses `{memory.name}` with no wgmma_fence before")
        (uses.results if role == "results" else uses.factors)[here] = self.closed[group] + 1
        uses.hidden[here] |= role == "results"
        self.in_flight = True

    def touch(self, memory: Memory, places: Array, groups: Array, span: Span | None) -> None:
        """Record that ordinary code of some warpgroups uses registers; report missing waits and fences."""
        uses = self.uses_of(memory)
        uses.touched[places, groups] = self.fences[groups]
        add = self.calls.threads.findings.add
        if self.in_flight and (flying := self._in_flight_at(uses, places, groups)).any():
            text = f"`{memory.name}` is used while a product with it is in flight"
            add("missing_wait", span, text, int(flying.sum()))
        elif uses.hidden[places, groups].any():
            add("missing_fence", span, f"`{memory.name}` is used with no wgmma_results before")

    def show(self, memory: Memory, places: Array, groups: Array, span: Span | None) -> None:
        """Mark results as readable after their wait; report results whose product is still in flight."""
        uses = self.uses_of(memory)
        if self._in_flight_at(uses, places, groups).any():
            text = f"`{memory.name}` has no results while a product with it is in flight"
            self.calls.threads.findings.add("missing_wait", span, text)
        uses.hidden[places, groups] = False

    def _in_flight_at(self, uses: Uses, places: Array, groups: Array) -> Array:
        """Return for each place of a register array whether a product in flight reads or writes it."""
        return np.maximum(uses.results[places, groups], uses.factors[places, groups]) > self.done[groups]

    def wait(self, group: int, pending: int) -> None:
        """Let a warpgroup wait for all groups but the newest `pending`; each warp waits for its own part."""
        order, done = self.calls.order, max(0, int(self.closed[group]) - pending)
        self.done[group] = max(done, self.done[group])
        self.in_flight = any(started > self.done[g] for g, (started, _) in self.last.items())
        for warp, agent in enumerate(self.agents(group)):
            order.learn(group * WARPGROUP + 32 * warp + np.arange(32), agent, order.time(done))

    def finish(self) -> None:
        """Report products that are still in flight when the block ends."""
        for group, (started, span) in self.last.items():
            if started > self.done[group]:
                text = f"the block ends while products of warpgroup {group} are in flight"
                self.calls.threads.findings.add("missing_wait", span, text)


class Accumulators(Local):
    """Registers that tensor-core products write or read."""

    def __init__(self, buffer: Buffer, size: int, calls: Calls):
        self.calls = calls
        self.last: tuple[Array | None, Array] | None = None  # a mask and its warpgroups
        super().__init__(buffer, size, calls.threads)

    def load(self, index: Value, span: Span | None) -> Value:
        """Load one element for each running thread."""
        self._touch(index, span)
        return super().load(index, span)

    def store(self, index: Value, value: Value, span: Span | None) -> None:
        """Store one element for each running thread."""
        self._touch(index, span)
        super().store(index, value, span)

    def rows(self, index: Array, count: int, ids: Array, span: Span | None) -> Array:
        """Read `count` registers from each index on, as raw bits."""
        self._touch_rows(index, count, ids, span)
        return super().rows(index, count, ids, span)

    def put_rows(self, index: Array, raw: Array, ids: Array, span: Span | None) -> None:
        """Overwrite registers from each index on."""
        self._touch_rows(index, raw.shape[1], ids, span)
        super().put_rows(index, raw, ids, span)

    def _touch(self, index: Value, span: Span | None) -> None:
        """Record that the running threads use the register at `index`."""
        if isinstance(index, np.ndarray):
            ids = self.threads.active()
            self._touch_rows(index[ids], 1, ids, span)
            return
        mask = self.threads.mask
        if self.last is None or self.last[0] is not mask:
            self.last = mask, np.unique(self.threads.active() // WARPGROUP)
        place = np.array(min(max(index, 0), self.size - 1))
        self.calls.state(Products).touch(self, place, self.last[1], span)

    def _touch_rows(self, index: Array, count: int, ids: Array, span: Span | None) -> None:
        """Report accesses to runs of registers that products in flight use."""
        places = np.clip(index[:, None] + np.arange(count), 0, self.size - 1)
        self.calls.state(Products).touch(self, places, (ids // WARPGROUP)[:, None], span)
