# SPDX-License-Identifier: Apache-2.0
"""A block's shared memory, byte for byte, and the order of all accesses to it.

It is NaN until written. Each place remembers in which epoch (between two barriers) and by whom it was last written and
read. An access is a race if another thread touched the place in the same epoch, one of the two writes, and no barrier
of their warp lies between. What an asynchronous copy has yet to bring counts as touched by nobody but its landing.

Threads are told by number; 1024 + w is warp w as a whole (ldmatrix: any lane may receive any byte), ANYONE stands for
several warps. Places are as large as the smallest access of the kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..diagnostics import Span
from .findings import Banks, Findings

WHO = 2048  # accessor codes per epoch: threads, warps from 1024 on
ANYONE = WHO - 1
Array = Any


class Shared:
    """Shared memory of one block. Addresses are in bytes; `who` names the accessor of each row of an access."""

    def __init__(self, size: int, place: int, findings: Findings):
        self.size, self.place, self.findings = size, place, findings
        self.reset()

    def reset(self) -> None:
        """The state in which a block finds it."""
        self.data = np.full(self.size, 0xFF, np.uint8)
        count = self.size // self.place
        self.writes = np.full(count, -1, np.int64)  # epoch * WHO + accessor of the last write; -1: never
        self.reads = np.full(count, -1, np.int64)  # the same of the reads since
        self.write_turn = np.zeros(count, np.int32)  # how often the accessor's warp had met a warp barrier
        self.read_turn = np.zeros(count, np.int32)
        self.flying = np.zeros(count, np.int16)  # asynchronous copies under way to here
        self.flights = 0
        self.base = 0  # the epoch, times WHO
        self.turns = np.zeros(33, np.int32)  # warp barriers of each warp in this epoch; the last is ANYONE's
        self.ordered = False  # whether any warp met one

    def barrier(self) -> None:
        """All threads of the block have met: everything before is ordered before everything after."""
        self.base += WHO
        self.turns[:] = 0
        self.ordered = False

    def warp_barrier(self, warps: Array) -> None:
        """The threads of these warps have met."""
        self.turns[warps] += 1
        self.ordered = True

    def read(self, first: Array, size: int, who: Array, what: str, span: Span | None) -> Array:
        """`size` bytes from each of the addresses `first` on."""
        places = self._places(first, size)
        me = self.base + who[:, None]
        written = self.writes[places]
        if written.min() < 0:
            self.findings.add("unwritten", span, f"`{what}`", int((written < 0).any(axis=1).sum()))
        self._check_flying(places, f"`{what}` is read", span)
        self._check(written, self.write_turn, places, who, f"`{what}` is read; written by another thread", span)
        before = self.reads[places]
        self.reads[places] = me
        several = self.reads[places] != me
        recent = (before >= self.base) & (before != me)
        if several.any():
            self._join(places, me, self.reads[places], several)
        if recent.any():
            self._join(places, self.reads[places], before, recent)
        if self.ordered:
            self.read_turn[places] = self.turns[_warp(who)][:, None]
        return self.bytes_at(first, size)

    def write(self, first: Array, data: Array, who: Array, what: str, span: Span | None, atomic: bool = False) -> None:
        """Write rows of bytes at the addresses `first`; atomic writes of one epoch do not race with each other."""
        size = data.shape[1]
        places = self._places(first, size)
        self._check_flying(places, f"`{what}` is written", span)
        self._check(self.reads[places], self.read_turn, places, who, f"`{what}` is overwritten; read before", span)
        written = self.writes[places]
        if atomic:
            harmless = written == self.base + ANYONE
            if written.min() < 0:
                self.findings.add("unwritten", span, f"`{what}`", int((written < 0).any(axis=1).sum()))
        else:  # threads that write the same value do no harm
            harmless = (self.bytes_at(first, size) == data).reshape(*places.shape, self.place).all(axis=2)
        stamps = np.where(harmless, -1, written)
        self._check(stamps, self.write_turn, places, who, f"`{what}` is written; written before", span)
        self._store(first, data, places)
        self.writes[places] = self.base + (who[:, None] if not atomic else ANYONE)
        if self.ordered:
            self.write_turn[places] = self.turns[_warp(who)][:, None]
        if not atomic and (self.bytes_at(first, size) != data).any():
            self.findings.add("race", span, f"`{what}` is written by several threads at once")

    def take_off(self, first: Array, size: int, who: Array, what: str, span: Span | None) -> None:
        """An asynchronous copy begins: it may write from now on."""
        places = self._places(first, size)
        self._check_flying(places, f"`{what}` is written", span)
        self._check(self.reads[places], self.read_turn, places, who, f"`{what}` is overwritten; read before", span)
        self._check(self.writes[places], self.write_turn, places, who, f"`{what}` is written; written before", span)
        self.flying[places] += 1
        self.flights += 1

    def land(self, first: Array, data: Array, who: Array) -> None:
        """What these threads waited for is there, for themselves at once, for others after the next barrier."""
        places = self._places(first, data.shape[1])
        self._store(first, data, places)
        self.flying[places] = 0
        self.writes[places] = self.base + who[:, None]
        if self.ordered:
            self.write_turn[places] = self.turns[_warp(who)][:, None]

    def bytes_at(self, first: Array, size: int) -> Array:
        """Rows of bytes, with no check."""
        return self.data[first[:, None] + np.arange(size)]

    def _store(self, first: Array, data: Array, places: Array) -> None:
        self.data[first[:, None] + np.arange(data.shape[1])] = data

    def _places(self, first: Array, size: int) -> Array:
        return (first // self.place)[:, None] + np.arange(size // self.place)

    def _check_flying(self, places: Array, what: str, span: Span | None) -> None:
        if self.flights and (flying := self.flying[places]).any():
            count = int((flying > 0).any(axis=1).sum())
            self.findings.add("missing_wait", span, f"{what} while a copy to it is under way", count)

    def _check(self, stamps: Array, turns: Array, places: Array, who: Array, what: str, span: Span | None) -> None:
        """Report places that others touched in this epoch, as `stamps` tell."""
        bad = (stamps >= self.base) & (stamps != self.base + who[:, None])
        if not bad.any():
            return
        if self.ordered:
            other, mine = _warp(stamps - self.base), _warp(who)[:, None]
            bad &= (other != mine) | (turns[places] >= self.turns[mine])
            if not bad.any():
                return
        row, column = np.argwhere(bad)[0]
        names = f"by {_name(int(who[row]))} and {_name(int(stamps[row, column] - self.base))}"
        self.findings.add("race", span, f"{what}; {names}", int(bad.any(axis=1).sum()))

    def _join(self, places: Array, mine: Array, others: Array, where: Array) -> None:
        """Note that several threads have read a place."""
        here = places[where]
        a, b = _warp(np.broadcast_to(mine, where.shape)[where] - self.base), _warp(others[where] - self.base)
        apart = (a != b) | (a == 32)
        self.reads[here] = self.base + 1024 + a
        self.reads[here[apart]] = self.base + ANYONE


def _warp(who: Array) -> Array:
    """The warp of an accessor; 32 for ANYONE."""
    return np.where(who < 1024, who // 32, np.minimum(who - 1024, 32)).astype(np.int64)


def _name(who: int) -> str:
    if who == ANYONE:
        return "threads of several warps"
    return f"thread {who}" if who < 1024 else f"warp {who - 1024}"


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
