# SPDX-License-Identifier: Apache-2.0
"""The schedule of decoding for sequences of different lengths: units of equal work, planned on the device.

A unit takes whole sequences and parts of sequences, one after the other, in blocks of BLOCK positions. Lengths are
known to the device only, so a kernel plans; all layers of a model that decode the same sequences share the plan. (The
idea is that of FlashMLA's tile scheduler.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.hardware import VECTOR_BYTES, WARP
from torch_tile.kernels.common import (
    Machine,
    compute_dtype,
    entry_function,
    machine_of,
    power_of_two,
    strided,
    typical,
)
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.mla.args import MlaScheduleArgs
from torch_tile.kernels.mla.spec import MOST_SPLITS, units_for
from torch_tile.kernels.split_k import join_parts

BLOCK = 64  # positions: what a plan counts in; tiles of positions divide it
LAST_BLOCK = 2**31 // BLOCK - 1  # of a sequence
MOST_BLOCKS = 2**30  # of all sequences: beyond, units are as if there were so many, and sums fit in 32 bits
BEGINNING = 4  # blocks: what it costs to begin a piece and to write what came of it
LEAST_PIECE = 4  # blocks of a unit's share: pieces below take longer to join than to make
FIELDS = 4
BLOCKS_THAT_JOIN = 16  # for each SM: fewer join rows one after the other, more take as long to start
MOST_AHEAD = 8  # pieces of rows that such a block reads together; more are too much code to fetch

# The row of a unit: its first sequence and the first block there, its last sequence and the end of the blocks there.
# Without work the last sequence stands before the first.
FIRST, BEGIN, LAST, END = range(FIELDS)
# Behind the units, the row of a sequence: its first unit, its last unit, and zeros.
FIRST_UNIT, LAST_UNIT, *ZEROS = range(FIELDS)


def plan(lengths: Sequence[int], units: int) -> list[tuple[int, int, int, int]]:
    """Divide sequences among units (persistent blocks); return the rows of a schedule, as `plan_units` does."""
    sizes = [-(-max(n, 0) // BLOCK) for n in lengths]
    load = max(-(-min(sum(n + BEGINNING for n in sizes), MOST_BLOCKS) // units), LEAST_PIECE) + BEGINNING
    rows, owners = [], [(0, 0)] * len(sizes)
    sequence, done = 0, 0
    for unit in range(units):
        first, begin, last, end, left = sequence, done, sequence - 1, 0, load
        while left > 0 and sequence < len(sizes):
            rest = sizes[sequence] - done
            owners[sequence] = (owners[sequence][0] if done else unit, unit)
            room = in_pairs(left - BEGINNING)
            if room >= rest or unit == units - 1:
                last, end, left = sequence, sizes[sequence], max(left - rest - BEGINNING, 1)
                sequence, done = sequence + 1, 0
            else:
                if room > 0:
                    done += room
                    last, end = sequence, done
                left = 0
        rows.append((first, begin, last, end))
    return [*rows, *((*owner, 0, 0) for owner in owners)]


def in_pairs(blocks: Any) -> Any:
    """Round a positive number of blocks up to an even one, since the kernel with turns takes blocks by pairs."""
    if isinstance(blocks, int):
        return blocks + blocks % 2 if blocks > 0 else blocks
    return blocks + T.if_then_else(blocks > 0, blocks % 2, 0)


def blocks_of(length: Any) -> Any:
    """Return the number of KV blocks of a sequence of any length; its length plus BLOCK may not fit in 32 bits."""
    return (T.max(length, 0) - 1) // BLOCK + 1


@library_jit
def plan_units() -> Any:
    """Build the kernel that divides sequences among persistent blocks, in one thread, 200 ns for each."""
    batch, entries = T.dynamic("batch, entries")

    @T.prim_func
    def plan_units(seq_lens: T.Tensor((batch,), "int32"), schedule: T.Tensor((entries, FIELDS), "int32")):
        with T.Kernel(1, threads=32):
            units = entries - batch
            total = T.alloc_var("int32", 0)
            for b in T.serial(batch):
                total = T.min(total + blocks_of(seq_lens[b]) + BEGINNING, MOST_BLOCKS)
            # Rounded up in one sum, since there are MOST_BLOCKS at most, and one unit at least.
            load = T.max((total + (units - 1)) // units, LEAST_PIECE) + BEGINNING
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
                    size = blocks_of(seq_lens[sequence])
                    rest = size - done
                    if done == 0:
                        schedule[units + sequence, FIRST_UNIT] = unit
                        for field in ZEROS:
                            schedule[units + sequence, field] = 0
                    schedule[units + sequence, LAST_UNIT] = unit
                    room = in_pairs(left - BEGINNING)
                    if T.logical_or(room >= rest, unit == units - 1):
                        last, end, left = sequence, size, T.max(left - rest - BEGINNING, 1)
                        sequence, done = sequence + 1, 0
                    else:
                        if room > 0:
                            done += room
                            last, end = sequence, done
                        left = 0
                schedule[unit, LAST] = last
                schedule[unit, END] = end

    return plan_units


def units_of(seq_lens: torch.Tensor, rows: int, units: int) -> int:
    """Return the number of units (persistent blocks): as many as asked, or for 0 as the machine runs at once."""
    return units or units_for(rows, machine_of(seq_lens))


def reference(seq_lens: torch.Tensor, rows: int, units: int = 0) -> torch.Tensor:
    """Compute `tile.mla_schedule` in plain Python. `units` of 0 is as many as the machine runs at a time."""
    lengths = [int(n) for n in seq_lens]
    return torch.tensor(plan(lengths, units_of(seq_lens, rows, units)), dtype=torch.int32, device=seq_lens.device)


@entry_function(
    MlaScheduleArgs,
    reference,
    lambda args: args.seq_lens.new_empty((units_of(*args) + len(args.seq_lens), FIELDS)),
)
def mla_schedule(args: MlaScheduleArgs[torch.Tensor], out: torch.Tensor) -> bool:
    """Compute a schedule as `reference` does."""
    if not len(args.seq_lens):
        return False
    machine_of(args.seq_lens).kernel(plan_units)()(args.seq_lens.contiguous(), out)
    return True


def scheduled_types(rows: Any, latent: int, part_dtype: torch.dtype) -> list[Any]:
    """Return the types of a schedule and of the units' partial results: sums of rows, and their weights."""
    entries, slots = T.dynamic("entries, slots")
    schedule = T.Tensor((entries, FIELDS), torch.int32)
    return [schedule, T.Tensor((slots, rows, latent), part_dtype), T.Tensor((slots, rows), compute_dtype(part_dtype))]


@dataclass(frozen=True)
class Unit:
    """What a persistent block works on: sequences `first` to `last`, from block `begin` of the first one to block `end`
    of the last one.
    """

    number: Any
    first: Any
    begin: Any
    last: Any
    end: Any

    def blocks(self, sequence: Any, keys: int, length: Any) -> tuple[Any, Any]:
        """Return the range of blocks of `keys` positions of a sequence. Its end is inside the sequence. Its beginning
        is known without the sequence's length.
        """
        each, whole = BLOCK // keys, T.ceildiv(length, keys)
        begin = T.if_then_else(sequence == self.first, self.begin * each, 0)
        return begin, T.if_then_else(sequence == self.last, T.min(self.end * each, whole), whole)

    def begins(self, sequence: Any) -> Any:
        """Return whether the unit's piece of a sequence is the first one."""
        return T.logical_or(sequence != self.first, self.begin == 0)


@dataclass(frozen=True)
class WorkItems:
    """A schedule of `batch` sequences inside a kernel, with the units' partial results."""

    schedule: Any
    part: Any
    part_lse: Any
    batch: Any

    @property
    def count(self) -> Any:
        """Return the number of units."""
        return T.clamp(self.schedule.shape[0] - self.batch, 1, MOST_SPLITS)

    @T.macro
    def read(self, number: Any) -> Any:
        """Read the row of a unit by one load. A block does so first of all, since its first tile waits for it."""
        row = T.alloc_local((FIELDS,), "int32")
        for n in T.vectorized(FIELDS):
            row[n] = self.schedule[number, n]
        return row

    @T.macro
    def unit(self, number: Any, row: Any) -> Unit:
        """Return what a unit works on by its row. Sequences are valid ones, whatever the schedule says."""
        first, last = T.clamp(row[FIRST], 0, self.batch), T.clamp(row[LAST], -1, self.batch - 1)
        begin, end = T.clamp(row[BEGIN], 0, LAST_BLOCK), T.clamp(row[END], 0, LAST_BLOCK)
        return Unit(number, first, begin, last, end)

    def owners(self, sequence: Any) -> tuple[Any, Any]:
        """Return the first and the last unit with a piece of a sequence: valid units, whatever the schedule says."""
        owner = self.count + sequence
        first = T.clamp(self.schedule[owner, FIRST_UNIT], 0, self.count - 1)
        return first, T.clamp(self.schedule[owner, LAST_UNIT], 0, self.count - 1)

    def is_divided(self, sequence: Any) -> Any:
        """Return whether several units have a piece of a sequence."""
        first, last = self.owners(sequence)
        return first < last

    def slot(self, unit: Unit, sequence: Any) -> Any:
        """Return the slot for a unit's piece of a sequence. Behind the slots for sequences that began before the unit,
        each unit has one for a sequence that it begins.
        """
        return unit.number + T.if_then_else(unit.begins(sequence), self.count, 0)

    def slot_in_order(self, first: Any, count: Any, n: Any) -> Any:
        """Return the slot of piece `n` of the `count` pieces of a sequence, which begins in unit `first`.

        Behind the last piece it is -1. Slots are bounded above, so that one test finds those outside. Loads behind
        one test run side by side on a GPU.
        """
        slot = T.min(first + T.if_then_else(n == 0, self.count, n), self.part.shape[0] - 1)
        return T.if_then_else(n < count, slot, -1)

    def left_by(self, unit: Any) -> Any:
        """Return the only sequence that a unit may have begun and not ended: its last one."""
        return T.clamp(self.schedule[unit, LAST], 0, self.batch - 1)


@dataclass(frozen=True)
class Joining:
    """How many rows a block joins together, of how many pieces it reads them together, and its threads."""

    rows: int
    pieces: int
    threads: int


# Fast: the exponentials of few numbers, in few instructions.
@library_jit(pass_configs={"tl.enable_fast_math": True})  # type: ignore[untyped-decorator]
def combine_pieces(dtype: torch.dtype, part_dtype: torch.dtype, latent: int, height: int, joining: Joining) -> Any:
    """Build the kernel `combine` for the sequences that several units share, in the order of their units.

    A block joins `height` rows of a sequence, `joining.rows` together. Of many sequences most need no joining, but a
    unit leaves at most one to the units behind it. So blocks go by units where these are fewer than sequences.
    """
    rows, batch, outer, inner = T.dynamic("rows, batch, outer, inner")
    schedule_type, part_type, lse_type = scheduled_types(rows, latent, part_dtype)

    @T.prim_func
    def combine_pieces(
        schedule: schedule_type,
        part: part_type,
        part_lse: lse_type,
        out: strided("out", (batch, outer, inner, latent), dtype, multiple=latent),
        lse: T.Tensor((batch, rows), compute_dtype(part_dtype)),
    ):
        work_items = WorkItems(schedule, part, part_lse, batch)
        units = work_items.count
        with T.Kernel(T.ceildiv(rows, height), T.min(batch, units), threads=joining.threads) as (bx, by):
            # The schedule was there before the kernel that leaves the pieces began.
            sequence = T.if_then_else(batch <= units, by, work_items.left_by(by))
            first, last = work_items.owners(sequence)
            T.pdl_sync()
            if first < last and (batch <= units or first == by) and rows > 0:
                count = last - first + 1
                slot_of = partial(work_items.slot_in_order, first, count)
                for own in T.serial(T.ceildiv(T.min(height, rows - bx * height), joining.rows)):
                    row = bx * height + own * joining.rows
                    # Rows behind the last one are the last one once more, so that no load needs a second test.
                    together = [T.min(row + n, rows - 1) for n in range(joining.rows)]
                    joined = join_parts(part, part_lse, slot_of, count, together, joining.pieces)
                    for n, (acc, log_sum) in enumerate(joined):
                        if row + n < rows:
                            T.copy(acc, out[sequence, (row + n) // inner, (row + n) % inner, 0])
                            lse[sequence, row + n] = log_sum

    return combine_pieces


def combine_scheduled(
    schedule: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    machine: Machine,
) -> None:
    """Combine the units' partial results into `out` `[B, Sq, H, C]` and contiguous `lse` `[B, Sq, H]`."""
    batch, rows = lse.flatten(1).shape
    shared = Shared(batch, rows, part.shape[0] // 2, part.shape[2] * part.dtype.itemsize)
    height, joining = _joined_together(shared, machine)
    kernel = machine.kernel(combine_pieces)(out.dtype, part.dtype, part.shape[2], height, joining)
    kernel(schedule, part, part_lse, out, lse.flatten(1))


@dataclass(frozen=True)
class Shared:
    """Sizes of a launch that joins pieces: sequences, rows of each, units, and bytes of a row."""

    batch: int
    rows: int
    units: int
    row_bytes: int


def _joined_together(shared: Shared, machine: Machine) -> tuple[int, Joining]:
    """Return the rows of a block that joins pieces, and how many rows and pieces it reads together.

    Blocks are few, since most of them may only find that there is nothing to join. A sequence of many has two pieces.
    """
    shared = typical(shared)
    pieces = min(power_of_two(max(2, shared.units // max(shared.batch, 1))), MOST_AHEAD)
    readers = power_of_two(shared.row_bytes // VECTOR_BYTES)  # of the widest accesses, so that instructions are few
    joining = Joining(MOST_AHEAD // pieces, pieces, max(WARP, min(readers, 128)))
    height = -(-min(shared.batch, shared.units) * shared.rows // (BLOCKS_THAT_JOIN * machine.num_sms))
    return max(power_of_two(height), joining.rows), joining
