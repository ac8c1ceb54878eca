# SPDX-License-Identifier: Apache-2.0
"""Model the threads of a block and the memory of its buffers: tensors, shared memory, registers and variables.

`load` and `store` take one index for all threads (an int) or one for each (an array); `rows` and `put_rows` move
several neighbouring elements of chosen threads as they lie in memory. Accesses outside are reported; they read 0
and write nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torch_tile.diagnostics.errors import Span
from torch_tile.ir.buffer import Buffer
from torch_tile.simulator.findings import Banks, Findings
from torch_tile.simulator.memory import poisoned
from torch_tile.simulator.simt.races import Array, OrderedTrace, Trace
from torch_tile.simulator.simt.values import Value, carrier, decode, encode, number, stored

ACCESSES = 100  # of one line that are looked at for bank conflicts


class Threads:
    """The threads of a block. `mask` tells which threads run at the moment; None means all threads.

    Where `blocks` of a cluster run at the same time, each block has `of_block` thread numbers, in whole warpgroups. The
    first `count` of them are threads; `block` is the block that runs at the moment.
    """

    count: int
    of_block: int
    blocks: int
    block: int

    def __init__(self, count: int, findings: Findings, blocks: int = 1):
        unit = 32 if blocks == 1 else 128
        self.count, self.of_block, self.blocks, self.block = count, -(-count // unit) * unit, blocks, 0
        self.lanes: int = blocks * self.of_block
        self.findings = findings
        self.ids: Array = np.arange(self.lanes)
        self.everyone: Array | None = None if count == self.lanes else self.ids % self.of_block < count
        self.mask: Array | None = self.everyone

    def in_block(self, block: int) -> Array:
        """Return a mask of the thread numbers that belong to one block of the cluster."""
        return (self.ids // self.of_block == block) & (self.ids % self.of_block < self.count)

    def active(self) -> Array:
        """Return the numbers of the running threads."""
        return self.ids if self.mask is None else np.flatnonzero(self.mask)

    def narrowed(self, condition: Array) -> tuple[bool, Array | None]:
        """Return whether the condition holds for any running thread, and the mask of the threads where it holds."""
        outer = self.mask
        mask = condition if outer is None else condition & outer
        some = bool(mask.any())
        same = bool(mask.all()) if outer is None else bool((mask == outer).all())
        return some, outer if same else mask

    def each(self, value: Value, ids: Array) -> Array:
        """Return the value of each of the threads `ids`."""
        if isinstance(value, np.ndarray):
            return value if ids is self.ids else value[ids]
        return np.full(len(ids), value)

    def spread(self, values: Array, ids: Array) -> Array:
        """Extend the values of the threads `ids` to all threads; the remaining threads get 0."""
        if ids is self.ids:
            return values
        whole = np.zeros(self.lanes, values.dtype)
        whole[ids] = values
        return whole


class Memory:
    """The interface of all kinds of memory. `size` is the number of elements."""

    buffer: Buffer
    name: str
    size: int
    threads: Threads

    def __init__(self, buffer: Buffer, size: int, threads: Threads):
        self.buffer, self.name, self.dtype = buffer, buffer.name, buffer.dtype
        self.size, self.threads = size, threads
        self.raw_type = stored(buffer.dtype)

    def load(self, index: Value, span: Span | None) -> Value:
        """Load one element for each running thread."""
        ids = self.threads.active()
        if isinstance(index, np.ndarray):
            raw = self.rows(self.threads.each(index, ids), 1, ids, span)[:, 0]
            return self.threads.spread(decode(raw, self.dtype), ids)
        raw = self.rows(np.full(len(ids), index), 1, ids, span)[:1, 0]
        return number(decode(raw, self.dtype)[0], self.dtype) if len(ids) else number(0, self.dtype)

    def store(self, index: Value, value: Value, span: Span | None) -> None:
        """Store one element for each running thread."""
        ids = self.threads.active()
        raw = encode(self.threads.each(value, ids), self.dtype)
        self.put_rows(self.threads.each(index, ids), raw[:, None], ids, span)

    def rows(self, index: Array, count: int, ids: Array, span: Span | None) -> Array:
        """Read `count` elements from each index on, as raw bits."""
        raise NotImplementedError

    def put_rows(self, index: Array, raw: Array, ids: Array, span: Span | None) -> None:
        """Overwrite elements from each index on."""
        raise NotImplementedError

    def peek(self, index: Array) -> Array:
        """Read raw elements with no check and no trace."""
        raise NotImplementedError

    def poke(self, index: Array, raw: Array) -> None:
        """Overwrite elements, with no check and no trace."""
        raise NotImplementedError

    def touch(self, index: Array, ids: Array, span: Span | None) -> None:
        """Record atomic updates in the trace."""

    def inside(self, index: Array, count: int, span: Span | None) -> Array | None:
        """Report rows that leave the buffer; return a mask of the rows inside, or None if all are."""
        if len(index) == 0 or (index.min() >= 0 and index.max() <= self.size - count):
            return None
        ok = (index >= 0) & (index <= self.size - count)
        where = f"`{self.name}` of {self.size} elements; element {int(index[~ok][0])}"
        self.threads.findings.add("out_of_bounds", span, where, int((~ok).sum()))
        return np.asarray(ok)

    def aligned(self, index: Array, count: int, span: Span | None) -> None:
        """Report vector accesses that do not start at a multiple of their width."""
        if count > 1 and (index % count).any():
            text = f"{count * self.dtype.itemsize} bytes of `{self.name}`; element {int(index[index % count > 0][0])}"
            self.threads.findings.add("misaligned", span, text, int((index % count > 0).sum()))


class Global(Memory):
    """A tensor's elements from its first to its last in memory; `own` marks the elements outside the gaps."""

    def __init__(self, buffer: Buffer, tensor: torch.Tensor, threads: Threads):
        super().__init__(buffer, 0, threads)
        self.trace: Trace | None = None  # of tensors that the kernel writes
        self.place(tensor)

    def place(self, tensor: torch.Tensor) -> None:
        """Make this the memory of a tensor."""
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
        self.size = span
        bits = torch.as_strided(tensor, (span,), (1,)).view(torch.uint8 if span else tensor.dtype)
        self.raw = bits.numpy().view(self.raw_type) if span else np.zeros(0, self.raw_type)
        self.own: Array | None = None
        if span != tensor.numel():
            self.own = np.zeros(span, bool)
            steps = [s * self.own.itemsize for s in tensor.stride()]
            np.lib.stride_tricks.as_strided(self.own, tuple(tensor.shape), steps)[...] = True

    def rows(self, index: Array, count: int, ids: Array, span: Span | None) -> Array:
        """Read `count` elements from each index on, as raw bits."""
        ok = self.inside(index, count, span)
        if ok is not None:
            found = np.zeros((len(index), count), self.raw_type)
            found[ok] = self.rows(index[ok], count, ids[ok], span)
            return found
        places = index[:, None] + np.arange(count)
        if self.trace is not None:
            self.trace.read(places, ids, self.name, span)
        return self.raw[places]

    def put_rows(self, index: Array, raw: Array, ids: Array, span: Span | None) -> None:
        """Overwrite elements from each index on."""
        ok = self.inside(index, raw.shape[1], span)
        if ok is not None:
            index, raw, ids = index[ok], raw[ok], ids[ok]
        places = index[:, None] + np.arange(raw.shape[1])
        bits = f"u{raw.itemsize}"
        new = np.ascontiguousarray(raw).view(bits)
        if self.trace is not None:  # threads that write the same value do no harm
            self.trace.before_write(places, ids, self.name, span, self.raw[places].view(bits) == new)
            self.trace.wrote(places, ids)
        self.raw[places] = raw
        if (self.raw[places].view(bits) != new).any():
            self.threads.findings.add("race", span, f"`{self.name}` is written by several threads at once")

    def peek(self, index: Array) -> Array:
        """Read raw elements with no check and no trace."""
        return self.raw[index]

    def poke(self, index: Array, raw: Array) -> None:
        """Overwrite elements with no check and no trace."""
        self.raw[index] = raw

    def touch(self, index: Array, ids: Array, span: Span | None) -> None:
        """Record atomic updates in the trace."""
        if self.trace is not None and len(index):
            self.trace.before_write(index[:, None], ids, self.name, span, atomic=True)
            self.trace.wrote(index[:, None], ids, atomic=True)

    def inside(self, index: Array, count: int, span: Span | None) -> Array | None:
        """Report rows that leave the tensor; gaps between the rows of a strided tensor count as outside."""
        ok = super().inside(index, count, span)
        if self.own is None or len(index) == 0:
            return ok
        places = np.clip(index[:, None] + np.arange(count), 0, self.size - 1)
        mine = self.own[places].all(axis=1)
        mine = mine if ok is None else mine & ok
        if mine.all():
            return None
        gaps = int((~mine).sum())
        self.threads.findings.add("out_of_bounds", span, f"`{self.name}`; between its rows", gaps)
        return np.asarray(mine)


class Tile(Memory):
    """A buffer in shared memory."""

    shared: Shared
    offset: int

    def __init__(self, buffer: Buffer, size: int, threads: Threads, shared: Shared):
        super().__init__(buffer, size, threads)
        self.shared, self.offset = shared, buffer.offset or 0
        self.owner: Owner = Owner(buffer.name, shared.next_number())

    def rows(self, index: Array, count: int, ids: Array, span: Span | None, who: Array | None = None) -> Array:
        """Read `count` elements from each index on, as raw bits. `ids` are the threads that ask, and `who` those that
        the checks of races see reading: engines, or by default the same threads.
        """
        who = ids if who is None else who
        ok = self.inside(index, count, span)
        if ok is not None:
            found = np.zeros((len(index), count), self.raw_type)
            if ok.any():
                found[ok] = self.rows(index[ok], count, ids[ok], span, who[ok])
            return found
        first, size = self.address(index), count * self.dtype.itemsize
        self.note(first, size, ids, "read", span)
        return self.shared.read(first, size, who, self.owner, span).view(self.raw_type)

    def put_rows(
        self, index: Array, raw: Array, ids: Array, span: Span | None, who: Array | None = None, atomic: bool = False
    ) -> None:
        """Overwrite elements from each index on; `ids` and `who` are as in `rows`."""
        who = ids if who is None else who
        ok = self.inside(index, raw.shape[1], span)
        if ok is not None:
            index, raw, ids, who = index[ok], raw[ok], ids[ok], who[ok]
        if len(index):
            first, data = self.address(index), np.ascontiguousarray(raw).view(np.uint8)
            self.note(first, data.shape[1], ids, "write", span)
            self.shared.write(first, data, who, self.owner, span, atomic)

    def peek(self, index: Array) -> Array:
        """Read raw elements with no check and no trace."""
        return self.shared.bytes_at(self.address(index), self.dtype.itemsize).view(self.raw_type)[:, 0]

    def poke(self, index: Array, raw: Array) -> None:
        """Overwrite elements with no check and no trace."""
        self.shared.data[self.address(index)[:, None] + np.arange(self.dtype.itemsize)] = raw[:, None].view(np.uint8)

    def touch(self, index: Array, ids: Array, span: Span | None) -> None:
        """Record atomic updates in the trace."""
        if len(index):
            self.put_rows(index, self.peek(index)[:, None], ids, span, atomic=True)

    def address(self, index: Array) -> Array:
        """Convert element indices to bytes from the start of shared memory."""
        return index.astype(np.int64) * self.dtype.itemsize + self.start

    @property
    def start(self) -> int:
        """Return the byte address of the first element in the running block's shared memory."""
        return self.offset + self.threads.block * self.shared.of_block

    def note(self, first: Array, size: int, ids: Array, how: str, span: Span | None) -> None:
        """Add an access to the statistic of bank conflicts."""
        banks = self.threads.findings.banks.setdefault((span, f"{how} of `{self.name}`"), Banks())
        if banks.accesses < ACCESSES:
            count_banks(banks, first, size, ids)


# A block's shared memory, byte for byte: NaN until written, and with a trace of all accesses.
#
# What an asynchronous copy has yet to bring is not there before it lands; until then no thread may touch its place.
# Places are as large as the smallest access of the kernel.

WHOLE = 1024  # bytes, after which all swizzles repeat


@dataclass(frozen=True)
class Owner:
    """A buffer in shared memory; its place may also belong to other buffers at other times."""

    name: str
    number: int


class Shared:
    """Shared memory of one block, or of the `blocks` of a cluster, each from a multiple of `of_block` bytes on.

    Addresses are in bytes; `who` names the accessor of each row of an access.
    """

    size: int
    place: int
    findings: Findings
    new_trace: Callable[[int], Trace]
    buffers: int
    flights: int

    def __init__(self, size: int, place: int, findings: Findings, trace: Callable[[int], Trace], blocks: int = 1):
        self.of_block: int = size if blocks == 1 else -(-size // WHOLE) * WHOLE
        self.size, self.place, self.findings, self.new_trace = blocks * self.of_block, place, findings, trace
        self.buffers = 0
        self.reset()

    def next_number(self) -> int:
        """Return the number of one more buffer; 0 means no buffer."""
        self.buffers += 1
        return self.buffers

    def reset(self) -> None:
        """Return to the state in which a block begins: all bytes unwritten."""
        self.data = np.full(self.size, 0xFF, np.uint8)
        count = self.size // self.place
        self.trace: Trace = self.new_trace(count)
        self.flying = np.zeros(count, np.int16)  # asynchronous copies in flight to here
        self.flights = 0
        self.owners = np.zeros(count, np.int32)  # the buffer that each place was last written for

    def read(self, first: Array, size: int, who: Array, owner: Owner, span: Span | None) -> Array:
        """Read `size` bytes from each of the addresses `first` on."""
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
        """Begin an asynchronous copy, which may write to its place from now on."""
        places = self._places(first, size)
        self._check_flying(places, f"`{owner.name}` is written", span)
        self.trace.before_write(places, who, owner.name, span)
        self.flying[places] += 1
        self.flights += 1

    def land(self, first: Array, data: Array, who: Array, owner: Owner) -> None:
        """Write the bytes of copies that these threads waited for; all others may read them after a barrier."""
        places = self._places(first, data.shape[1])
        self._store(first, data)
        self.flying[places] = 0
        self.owners[places] = owner.number
        self.trace.wrote(places, who)

    def fetch(
        self, first: Array, size: int, ids: Array, agents: tuple[int, ...], time: int, owner: Owner, span: Span | None
    ) -> Array:
        """Read `size` bytes from each address on; `agents` keep reading them until `time` for the threads `ids`."""
        places = self._places(first, size)
        self._check_flying(places, f"`{owner.name}` is read", span)
        written = self._ordered.read_by_agents(places, ids, agents, time, owner.name, span)
        self._check_written(written, places, owner, span)
        return self.bytes_at(first, size)

    def write_by_agent(
        self, first: Array, data: Array, thread: int, agent: int, time: int, owner: Owner, span: Span | None
    ) -> None:
        """Write rows of bytes by `agent`. A thread may use them once it knows that the agent has reached `time`."""
        places = self._places(first, data.shape[1])
        self._check_flying(places, f"`{owner.name}` is written", span)
        self._ordered.check_agent_write(places, thread, owner.name, span)
        self._store(first, data)
        self.owners[places] = owner.number
        self._ordered.written_by_agent(places, agent, time)

    @property
    def _ordered(self) -> OrderedTrace:
        """Return the trace of a kernel with roles or engines."""
        assert isinstance(self.trace, OrderedTrace)
        return self.trace

    def bytes_at(self, first: Array, size: int) -> Array:
        """Return rows of bytes with no check."""
        return self.data[first[:, None] + np.arange(size)]

    def _store(self, first: Array, data: Array) -> None:
        """Write rows of data at these elements."""
        self.data[first[:, None] + np.arange(data.shape[1])] = data

    def _places(self, first: Array, size: int) -> Array:
        """Return the places, in units of `self.place` bytes, that runs of `size` bytes from `first` on cover."""
        return (first // self.place)[:, None] + np.arange(size // self.place)

    def _check_written(self, written: Array, places: Array, owner: Owner, span: Span | None) -> None:
        """Report reads of places that this buffer has not written: never written, or left by another buffer."""
        strange = self.owners[places] != owner.number
        if strange.any():
            never = bool((written < 0).any())
            text = f"`{owner.name}`" if never else f"`{owner.name}` finds what another buffer left there"
            self.findings.add("unwritten", span, text, int(strange.any(axis=1).sum()))

    def _check_flying(self, places: Array, what: str, span: Span | None) -> None:
        """Report accesses to places that copies in flight use."""
        if self.flights and (flying := self.flying[places]).any():
            count = int((flying > 0).any(axis=1).sum())
            self.findings.add("missing_wait", span, f"{what} while a copy to it is in flight", count)


def count_banks(banks: Banks, first: Array, size: int, lanes: Array) -> None:
    """Add one access of `size` bytes per thread to the statistic; a warp moves 128 bytes at a time."""
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


# Registers of each thread, and variables that keep one value for all threads as long as all agree.


class Local(Memory):
    """Registers of each thread, `values[register, thread]`, kept as numbers and not as raw bits.

    `written` tells which registers each thread has written. Of arrays with padding a read is reported only where some
    thread holds an element in that register. None may have written it: threads read what pads their share, and store
    none of it.
    """

    def __init__(self, buffer: Buffer, size: int, threads: Threads):
        super().__init__(buffer, size, threads)
        self.values = np.zeros((size, threads.lanes), carrier(buffer.dtype))
        self.written = np.zeros((size, threads.lanes), bool)
        self.padding: tuple[int, ...] | None = buffer.padding
        self.poison = poisoned((1,), buffer.dtype).to(torch.float64 if buffer.dtype.is_float else torch.int64).numpy()
        self.reset()

    def reset(self) -> None:
        """Make the registers of the running threads undefined."""
        where = slice(None) if self.threads.mask is None else self.threads.mask
        self.values[:, where] = self.poison.astype(self.values.dtype)
        self.written[:, where] = False

    def load(self, index: Value, span: Span | None) -> Value:
        """Load one element for each running thread."""
        if isinstance(index, np.ndarray):
            ids = self.threads.active()
            places = np.clip(self._checked(index[ids], span), 0, self.size - 1)
            self.need(self.known()[places, ids], span)
            return self.threads.spread(self.values[places, ids], ids)
        if not 0 <= index < self.size:
            self.inside(np.array([index]), 1, span)
            index = 0
        there = self.written[index]
        if not there.all():
            self.need(self.known()[index][self.threads.active()], span)
        return self.values[index].copy()

    def known(self) -> Array:
        """Tell which registers count as written."""
        if self.padding is None:
            return self.written
        found: Array = np.asarray(self.written.any(axis=1, keepdims=True))
        found[list(self.padding)] = True
        return np.broadcast_to(found, self.written.shape)

    def need(self, there: Array, span: Span | None) -> None:
        """Report reads of registers never written, not `there`; moves by the compiler, without a line, are fine."""
        if span is not None and not there.all():
            text = f"`{self.name}`, a fragment or array of each thread"
            self.threads.findings.add("unwritten", span, text, int((~there).sum()))

    def store(self, index: Value, value: Value, span: Span | None) -> None:
        """Store one element for each running thread."""
        mask = self.threads.mask
        if isinstance(index, np.ndarray):
            ids = self.threads.active()
            ok = self.inside(index[ids], 1, span)
            ids = ids if ok is None else ids[ok]
            self.values[index[ids], ids] = self.threads.each(value, ids)
            self.written[index[ids], ids] = True
        elif not 0 <= index < self.size:
            self.inside(np.array([index]), 1, span)
        elif mask is None:
            self.values[index] = value
            self.written[index] = True
        else:
            self.values[index, mask] = value[mask] if isinstance(value, np.ndarray) else value
            self.written[index, mask] = True

    def _checked(self, index: Array, span: Span | None) -> Array:
        """Check an index against the array's size; return it."""
        self.inside(index, 1, span)
        return index

    def rows(self, index: Array, count: int, ids: Array, span: Span | None) -> Array:
        """Read `count` registers from each index on, as raw bits."""
        self.inside(index, count, span)
        places = np.clip(index[:, None] + np.arange(count), 0, self.size - 1)
        self.need(self.known()[places, ids[:, None]].any(axis=1), span)  # what is moved may end in padding
        return encode(self.values[places, ids[:, None]], self.dtype)

    def put_rows(self, index: Array, raw: Array, ids: Array, span: Span | None) -> None:
        """Overwrite registers from each index on."""
        ok = self.inside(index, raw.shape[1], span)
        if ok is not None:
            index, raw, ids = index[ok], raw[ok], ids[ok]
        places = index[:, None] + np.arange(raw.shape[1])
        self.values[places, ids[:, None]] = decode(raw, self.dtype)
        self.written[places, ids[:, None]] = True

    def fragment(self, start: int, count: int) -> Array:
        """Return registers of whole warps, `[warps, 32, count]`."""
        return self.values[start : start + count].reshape(count, -1, 32).transpose(1, 2, 0)

    def put_fragment(self, start: int, values: Array, warps: Sequence[bool] | Array) -> None:
        """Overwrite registers of the chosen warps."""
        count = values.shape[2]
        target = self.values[start : start + count].reshape(count, -1, 32)
        target[:, warps] = values[warps].transpose(2, 0, 1)
        self.written[start : start + count].reshape(count, -1, 32)[:, warps] = True


class Variable(Memory):
    """A T.alloc_var: one value for all threads until threads assign different values."""

    def __init__(self, buffer: Buffer, threads: Threads):
        super().__init__(buffer, 1, threads)
        self.reset()

    def reset(self) -> None:
        """Make the value undefined."""
        self.value: Value = number(poisoned((), self.dtype).item(), self.dtype)
        self.written: Array | None = np.zeros(self.threads.lanes, bool)  # None: for all threads

    def load(self, index: Value, span: Span | None) -> Value:
        """Return the value."""
        if self.written is not None and not self.written[ids := self.threads.active()].all():
            text = f"`{self.name}`, a variable of each thread"
            self.threads.findings.add("unwritten", span, text, int((~self.written[ids]).sum()))
        return self.value

    def store(self, index: Value, value: Value, span: Span | None) -> None:
        """Assign a value for the running threads."""
        mask = self.threads.mask
        if mask is None or mask is self.threads.everyone:
            self.value, self.written = value, None
        else:
            self.assign(mask, value)

    def assign(self, mask: Array, value: Value) -> None:
        """Assign a value for the threads of `mask`."""
        width = carrier(self.dtype)  # NumPy 2.5 takes two plain integers for int64
        self.value = np.where(mask, np.asarray(value, width), np.asarray(self.value, width))
        if self.written is not None:
            self.written = self.written | mask
