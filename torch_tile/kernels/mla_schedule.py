# SPDX-License-Identifier: Apache-2.0
"""Who decodes what where sequences differ in length: units of equal work, planned on the device.

A unit takes whole sequences and parts of sequences, one after the other, in blocks of BLOCK positions. Lengths are
known to the device only, so a kernel plans; all layers of a model that decode the same sequences share the plan. (The
idea is that of FlashMLA's tile scheduler.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.jit import jit
from torch_tile.kernels.common import has_kernels, into, machine_of, strided
from torch_tile.kernels.mla_form import LEAST_ROWS, units_for

BLOCK = 64  # positions: what a plan counts in; tiles of positions divide it
PANEL = 64  # columns that are joined at a time
AHEAD = range(4)  # units whose parts are read together
BEGINNING = 5  # blocks: what it costs to begin a piece and to write what came of it

# The row of a unit: its first sequence, the first block there, its last sequence (before the first if it has no work),
# the end of the blocks there. Behind the units, the row of a sequence: its first unit, its last unit, and counters of
# the units that have left a piece of a block of rows, which are 0 but while kernels decode.
FIRST, BEGIN, LAST, END = range(4)
COUNTERS = 2


def fields_for(rows: int) -> int:
    """Columns of a schedule for so many rows of queries: counters for blocks of LEAST_ROWS or more of them."""
    return max(4, COUNTERS + -(-rows // LEAST_ROWS))


def plan(lengths: Sequence[int], units: int) -> list[tuple[int, int, int, int]]:
    """The rows of a schedule, without zeros at their ends: what `plan_units` computes."""
    sizes = [-(-max(n, 0) // BLOCK) for n in lengths]
    load = max(-(-sum(n + BEGINNING for n in sizes) // units) + BEGINNING, 2 * BEGINNING)
    rows, owners = [], [(0, 0)] * len(sizes)
    sequence, done = 0, 0
    for unit in range(units):
        first, begin, last, end, left = sequence, done, sequence - 1, 0, load
        while left > 0 and sequence < len(sizes):
            rest = sizes[sequence] - done
            owners[sequence] = (owners[sequence][0] if done else unit, unit)
            if left >= rest + BEGINNING or unit == units - 1:
                last, end, left = sequence, sizes[sequence], max(left - rest - BEGINNING, 1)
                sequence, done = sequence + 1, 0
            else:
                if left > BEGINNING:
                    done += left - BEGINNING
                    last, end = sequence, done
                left = 0
        rows.append((first, begin, last, end))
    return [*rows, *((a, z, 0, 0) for a, z in owners)]


@jit
def plan_units() -> Any:
    """One thread goes through sequences and units in turn, which takes some 200 ns for each."""
    batch, entries, fields = T.dynamic("batch, entries, fields")

    @T.prim_func
    def plan_units(seq_lens: T.Tensor((batch,), "int32"), schedule: T.Tensor((entries, fields), "int32")):
        with T.Kernel(1, threads=128):
            for row, field in T.Parallel(entries, fields):
                schedule[row, field] = 0
            units = entries - batch
            total = T.alloc_var("int32", 0)
            for b in T.serial(batch):
                total += T.ceildiv(T.max(seq_lens[b], 0), BLOCK) + BEGINNING
            load = T.max(T.ceildiv(total, units) + BEGINNING, 2 * BEGINNING)
            sequence: Any = T.alloc_var("int32", 0)
            done: Any = T.alloc_var("int32", 0)
            last: Any = T.alloc_var("int32", 0)
            end: Any = T.alloc_var("int32", 0)
            left: Any = T.alloc_var("int32", 0)
            for unit in T.serial(units):
                schedule[unit, FIRST] = sequence
                schedule[unit, BEGIN] = done
                last, end, left = sequence - 1, 0, load
                while T.logical_and(left > 0, sequence < batch):
                    size = T.ceildiv(T.max(seq_lens[sequence], 0), BLOCK)
                    rest = size - done
                    if done == 0:
                        schedule[units + sequence, FIRST] = unit
                    schedule[units + sequence, BEGIN] = unit
                    if T.logical_or(left >= rest + BEGINNING, unit == units - 1):
                        last, end, left = sequence, size, T.max(left - rest - BEGINNING, 1)
                        sequence, done = sequence + 1, 0
                    else:
                        if left > BEGINNING:
                            done += left - BEGINNING
                            last, end = sequence, done
                        left = 0
                schedule[unit, LAST] = last
                schedule[unit, END] = end

    return plan_units


def units_of(seq_lens: torch.Tensor, rows: int, units: int) -> int:
    """As many units as asked for; for 0 as many as the machine runs at a time."""
    return units or units_for(rows, machine_of(seq_lens))


def reference(seq_lens: torch.Tensor, rows: int, units: int = 0) -> torch.Tensor:
    """A schedule int32 `[units + B, fields_for(rows)]` of sequences with lengths `[B]` and `rows` of queries each.

    `units` of 0 is as many as the machine runs at a time.
    """
    made = torch.tensor(plan(seq_lens.tolist(), units_of(seq_lens, rows, units)), dtype=torch.int32)
    return torch.nn.functional.pad(made, (0, fields_for(rows) - made.shape[1])).to(seq_lens.device)


def mla_schedule(seq_lens: torch.Tensor, rows: int, units: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `reference`; `out` may be given, contiguous."""
    units = units_of(seq_lens, rows, units)
    if not has_kernels(seq_lens):
        return into(out, reference(seq_lens, rows, units))
    if out is None:
        out = seq_lens.new_empty((units + len(seq_lens), fields_for(rows)))
    if not len(seq_lens):
        return out.copy_(reference(seq_lens, rows, units))
    machine_of(seq_lens).kernel(plan_units)()(seq_lens.contiguous(), out)
    return out


def scheduled_types(batch: Any, rows: Any, latent: int, accum: torch.dtype) -> list[Any]:
    """The types of what `operands` gives."""
    entries, fields, slots, blocks = T.dynamic("entries, fields, slots, blocks")
    schedule = strided("schedule", (entries, fields), torch.int32)
    counters = strided("counters", (batch, blocks), torch.int32)
    return [schedule, counters, T.Tensor((slots, rows, latent), accum), T.Tensor((slots, rows), accum)]


def operands(schedule: torch.Tensor, batch: int, rows: int, latent: int, accum: torch.dtype) -> list[torch.Tensor]:
    """A schedule, its counters by sequences and blocks of rows, and room for what units leave of parts of sequences:
    sums of rows, and what to weigh them with.
    """
    units = schedule.shape[0] - batch
    left = (schedule.new_empty((2 * units, rows, *width), dtype=accum) for width in ((latent,), ()))
    return [schedule, schedule[units:, COUNTERS:], *left]


@dataclass(frozen=True)
class Units:
    """A schedule inside a kernel, and what units leave."""

    schedule: Any
    counters: Any
    part: Any
    part_lse: Any

    @property
    def count(self) -> Any:
        """How many there are."""
        return self.schedule.shape[0] - self.counters.shape[0]

    def pieces(self, unit: Any) -> Any:
        """How many sequences a unit works on."""
        batch = self.counters.shape[0]
        return T.clamp(self.schedule[unit, LAST] - self.schedule[unit, FIRST] + 1, 0, batch)

    def sequence(self, unit: Any, piece: Any) -> Any:
        """The sequence of a piece."""
        return T.clamp(self.schedule[unit, FIRST] + piece, 0, self.counters.shape[0] - 1)

    def blocks(self, unit: Any, piece: Any, keys: int, length: Any) -> tuple[Any, Any]:
        """The first block of `keys` positions of a piece, and the end of them, in a sequence of some length.

        Whatever the schedule says, they are blocks of the sequence, and integers of 32 bits.
        """
        each, whole = BLOCK // keys, T.ceildiv(length, keys)
        begin, end = (T.clamp(self.schedule[unit, field] * each, 0, whole) for field in (BEGIN, END))
        return T.if_then_else(piece == 0, begin, 0), T.if_then_else(piece == self.pieces(unit) - 1, end, whole)

    def owners(self, sequence: Any) -> tuple[Any, Any]:
        """The first unit of a sequence, and how many share it."""
        first, last = (self.schedule[self.count + sequence, field] for field in (FIRST, BEGIN))
        first = T.clamp(first, 0, self.count - 1)
        return first, T.clamp(last - first, 0, self.count - 1) + 1

    @T.macro
    def leave(self, unit: Any, piece: Any, sums: Any, weight: Any, log_sum: Any, row: Any) -> None:
        """Rows of `sums` times their weights, from `row` on, and the logarithms of their sums.

        Of a unit's pieces only the first and the last are no whole sequences.
        """
        slot = 2 * unit + T.if_then_else(piece == 0, 0, 1)
        for i in T.Parallel(sums.shape[0]):
            self.part_lse[slot, row + i] = log_sum[i]
        for i, c in T.Parallel(*sums.shape):
            self.part[slot, row + i, c] = sums[i, c] * weight[i]

    @T.macro
    def join(self, sequence: Any, rows: int, row: Any, out: Any, lse: Any, heads: Any) -> None:
        """What the units of a sequence left of some rows, in the units' order, as `combine` joins shares.

        A few columns at a time, so that there is room in registers for what several units left.
        """
        first, shares = self.owners(sequence)
        latent, accum = self.part.shape[2], self.part.dtype
        width = PANEL if latent % PANEL == 0 else latent
        behind = T.if_then_else(
            self.schedule[first, FIRST] == sequence, 0, 1
        )  # where the first unit left its last piece
        peak, total, level = (T.alloc_fragment((rows,), accum) for _ in range(3))
        sums = T.alloc_fragment((rows, width), accum)
        values = [T.alloc_fragment((rows, width), accum) for _ in AHEAD]
        weights = [T.alloc_fragment((rows,), accum) for _ in AHEAD]
        T.fill(peak, -T.infinity(accum))
        for n in T.serial(shares):
            slot = 2 * (first + n) + T.if_then_else(n == 0, behind, 0)
            for i in T.Parallel(rows):
                peak[i] = T.max(peak[i], self.part_lse[slot, row + i])
        for i in T.Parallel(rows):
            level[i] = T.if_then_else(peak[i] == -T.infinity(accum), 0.0, peak[i])
        for panel in T.serial(latent // width):
            T.clear(total)
            T.clear(sums)
            for turn in T.serial(T.ceildiv(shares, len(AHEAD))):
                for ahead, value, weight in zip(AHEAD, values, weights, strict=True):
                    n = turn * len(AHEAD) + ahead
                    slot = 2 * (first + n) + T.if_then_else(n == 0, behind, 0)
                    for i in T.Parallel(rows):
                        weight[i] = T.if_then_else(n < shares, self.part_lse[slot, row + i], -T.infinity(accum))
                    for i, c in T.Parallel(rows, width):
                        value[i, c] = T.if_then_else(n < shares, self.part[slot, row + i, panel * width + c], 0.0)
                for value, weight in zip(values, weights, strict=True):
                    for i in T.Parallel(rows):
                        weight[i] = T.exp(weight[i] - level[i])
                        total[i] += weight[i]
                    for i, c in T.Parallel(rows, width):
                        sums[i, c] += value[i, c] * weight[i]
            for i in T.Parallel(rows):
                weights[0][i] = 1.0 / T.max(total[i], 1.0)
            for i, c in T.Parallel(rows, width):
                out[sequence, row + i, panel * width + c] = T.cast(sums[i, c] * weights[0][i], out.dtype)
        for i in T.Parallel(rows):
            lse[sequence, (row + i) // heads, (row + i) % heads] = peak[i] + T.log(T.max(total[i], 1.0))
