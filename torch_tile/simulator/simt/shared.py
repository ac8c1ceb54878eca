# SPDX-License-Identifier: Apache-2.0
"""A block's shared memory, byte for byte: NaN until written, and with a trace of all accesses.

What an asynchronous copy has yet to bring is not there before it lands; until then nobody may touch its place. Places
are as large as the smallest access of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from torch_tile.diagnostics.errors import Span
from torch_tile.simulator.findings import Banks, Findings
from torch_tile.simulator.simt.accesses import OrderedTrace
from torch_tile.simulator.simt.race_epochs import Array, Trace

WHOLE = 1024  # bytes, after which all swizzles repeat


@dataclass(frozen=True)
class Owner:
    """A buffer in shared memory, which may share its place with others."""

    name: str
    number: int


class Shared:
    """Shared memory of one block, or of `blocks` of a cluster, one after another from multiples of `of_block` on.

    Addresses are in bytes; `who` names the accessor of each row of an access.
    """

    def __init__(self, size: int, place: int, findings: Findings, trace: Callable[[int], Trace], blocks: int = 1):
        self.of_block = size if blocks == 1 else -(-size // WHOLE) * WHOLE
        self.size, self.place, self.findings, self.new_trace = blocks * self.of_block, place, findings, trace
        self.buffers = 0
        self.reset()

    def next_number(self) -> int:
        """A number for one more buffer; 0 is nobody's."""
        self.buffers += 1
        return self.buffers

    def reset(self) -> None:
        """The state in which a block finds it."""
        self.data = np.full(self.size, 0xFF, np.uint8)
        count = self.size // self.place
        self.trace = self.new_trace(count)
        self.flying = np.zeros(count, np.int16)  # asynchronous copies under way to here
        self.flights = 0
        self.owners = np.zeros(count, np.int32)  # the buffer that each place was last written for

    def read(self, first: Array, size: int, who: Array, owner: Owner, span: Span | None) -> Array:
        """`size` bytes from each of the addresses `first` on."""
        places = self._places(first, size)
        self._check_flying(places, f"`{owner.name}` is read", span)
        self._check_written(self.trace.read(places, who, owner.name, span), places, owner, span)
        return self.bytes_at(first, size)

    def write(
        self, first: Array, data: Array, who: Array, owner: Owner, span: Span | None, atomic: bool = False
    ) -> None:
        """Write rows of bytes at the addresses `first`."""
        size = data.shape[1]
        places = self._places(first, size)
        self._check_flying(places, f"`{owner.name}` is written", span)
        # Threads that write the same value do no harm.
        same = (self.bytes_at(first, size) == data).reshape(*places.shape, self.place).all(axis=2)
        before = self.trace.before_write(places, who, owner.name, span, same, atomic)
        if atomic:
            self._check_written(before, places, owner, span)
        self._store(first, data)
        self.owners[places] = owner.number
        self.trace.wrote(places, who, atomic)
        if not atomic and (self.bytes_at(first, size) != data).any():
            self.findings.add("race", span, f"`{owner.name}` is written by several threads at once")

    def take_off(self, first: Array, size: int, who: Array, owner: Owner, span: Span | None) -> None:
        """An asynchronous copy begins: it may write from now on."""
        places = self._places(first, size)
        self._check_flying(places, f"`{owner.name}` is written", span)
        self.trace.before_write(places, who, owner.name, span)
        self.flying[places] += 1
        self.flights += 1

    def land(self, first: Array, data: Array, who: Array, owner: Owner) -> None:
        """What these threads waited for is there, for themselves at once, for others after the next barrier."""
        places = self._places(first, data.shape[1])
        self._store(first, data)
        self.flying[places] = 0
        self.owners[places] = owner.number
        self.trace.wrote(places, who)

    def fetch(
        self, first: Array, size: int, ids: Array, agents: tuple[int, ...], time: int, owner: Owner, span: Span | None
    ) -> Array:
        """`size` bytes from each address on, which `agents` go on reading until `time` for the threads `ids`."""
        places = self._places(first, size)
        self._check_flying(places, f"`{owner.name}` is read", span)
        written = self._ordered.read_by_agents(places, ids, agents, time, owner.name, span)
        self._check_written(written, places, owner, span)
        return self.bytes_at(first, size)

    def bring(
        self, first: Array, data: Array, thread: int, agent: int, time: int, owner: Owner, span: Span | None
    ) -> None:
        """Write rows of bytes; they are there for those who know that `agent` came to `time`."""
        places = self._places(first, data.shape[1])
        self._check_flying(places, f"`{owner.name}` is written", span)
        self._ordered.before_engine(places, thread, owner.name, span)
        self._store(first, data)
        self.owners[places] = owner.number
        self._ordered.written_by_agent(places, agent, time)

    @property
    def _ordered(self) -> OrderedTrace:
        assert isinstance(self.trace, OrderedTrace)
        return self.trace

    def bytes_at(self, first: Array, size: int) -> Array:
        """Rows of bytes, with no check."""
        return self.data[first[:, None] + np.arange(size)]

    def _store(self, first: Array, data: Array) -> None:
        self.data[first[:, None] + np.arange(data.shape[1])] = data

    def _places(self, first: Array, size: int) -> Array:
        return (first // self.place)[:, None] + np.arange(size // self.place)

    def _check_written(self, written: Array, places: Array, owner: Owner, span: Span | None) -> None:
        strange = self.owners[places] != owner.number
        if strange.any():
            never = bool((written < 0).any())
            text = f"`{owner.name}`" if never else f"`{owner.name}` finds what another buffer left there"
            self.findings.add("unwritten", span, text, int(strange.any(axis=1).sum()))

    def _check_flying(self, places: Array, what: str, span: Span | None) -> None:
        if self.flights and (flying := self.flying[places]).any():
            count = int((flying > 0).any(axis=1).sum())
            self.findings.add("missing_wait", span, f"{what} while a copy to it is under way", count)


def count_banks(banks: Banks, first: Array, size: int, lanes: Array) -> None:
    """Add one access of `size` bytes per thread to the statistic; 128 bytes of a warp go at a time."""
    group = max(1, min(32, 128 // size))
    words = max(1, size // 4)
    wave = lanes // group
    word = (first[:, None] // 4 + np.arange(words)).ravel()
    key = np.unique(np.repeat(wave, words) * (1 << 32) + word)
    wave, bank = key >> 32, key & 31
    loads = np.bincount(wave * 32 + bank)
    table = np.pad(loads, (0, -len(loads) % 32)).reshape(-1, 32)
    most = table.max(axis=1)
    ways = most[most > 0]
    banks.accesses += 1
    banks.phases += int(ways.sum())
    banks.ideal += len(ways)
    banks.worst = max(banks.worst, float(ways.max(initial=1)))
