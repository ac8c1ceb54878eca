# SPDX-License-Identifier: Apache-2.0
"""Decide which keys each block of the kernel of all gradients has, and which queries of them.

A block has all queries of the keys at its own place. Blocks that wait for each other are numbered as they begin
instead: then those that a block waits for run or have run, whatever order the GPU has. Where few waves of equally long
blocks leave multiprocessors idle, several blocks share the keys of the last wave: each is a member, with some queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.hardware import WARP, WARPGROUP
from torch_tile.kernels.attention.spec import Config
from torch_tile.kernels.common import Machine

MOST_MEMBERS = 4  # blocks that share keys
LEAST_STEPS = 16  # of each
LEAST_GAIN = 1.1  # in waves: a last wave of few blocks has a higher clock, too
WARPGROUPS = 2  # of a block that make sums


@dataclass(frozen=True, eq=False)
class Share:
    """A block's share of the queries that see its keys: all, or an equal share if `members` blocks have these keys.

    `number` counts the shared blocks of keys; it is negative if no other block has these keys. A member waits for the
    one before, adds its sums of dk and dv and leaves them in memory. The last member stores both. So sums are the same
    from run to run.
    """

    number: Any
    member: Any
    members: int

    def steps(self, first: Any, count: Any) -> tuple[Any, Any]:
        """Return the first one and the number of a block's steps, of `count` from `first` on."""
        alone, member = self.number < 0, self.member
        begin, end = (T.if_then_else(alone, n, count * (member + n) // self.members) for n in (0, 1))
        return first + T.max(begin, 0), T.if_then_else(alone, count, end - begin)

    @T.macro
    def join(self, accs: tuple[Any, ...], sums: Any, counts: Any, index: int) -> Any:
        """Add the sums of the member before to those of warpgroup `index`; leave them for the next member.

        Return whether this block stores them instead.
        """
        sums_at = T.max(self.number, 0), index
        stores = T.logical_or(self.number < 0, self.member == self.members - 1)
        if T.logical_and(self.number >= 0, self.member > 0):
            take(accs, sums, counts, sums_at, self.member)
        if T.logical_not(stores):
            leave(accs, sums, counts, sums_at)
        return stores


@dataclass(frozen=True, eq=False)
class Numbering:
    """The keys of each block of a launch, of a `grid` of blocks of keys.

    With `ordered` all blocks are numbered as they begin. With `shared_wave` those of the last wave are, where `members`
    blocks share keys. Else a block has the keys at its own place.
    """

    config: Config
    grid: tuple[Any, Any, Any]

    @property
    def tasks(self) -> Any:
        """Return how many blocks of keys there are."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def shared(self) -> Any:
        """Return how many blocks of keys are shared."""
        return self.tasks % self.config.shared_wave

    @property
    def launched(self) -> tuple[Any, Any, Any]:
        """Return the numbers of blocks to launch: a row of them if some share keys, else `grid`."""
        if not self.config.shared_wave:
            return self.grid
        return self.tasks + (self.config.members - 1) * self.shared, 1, 1

    @T.macro
    def place(self, bx: Any, by: Any, bz: Any, begun: Any) -> tuple[Any, Any, Any, Share | None]:
        """Return the place of a block's keys in the grid, and its share, None if blocks share no keys.

        `begun` counts the blocks that were numbered.
        """
        x, y, z, own = bx, by, bz, None
        if self.config.ordered or self.config.shared_wave:
            if self.config.ordered:
                number = T.max(T.atomic_add(begun[0], 1, return_prev=True), 0)
            else:
                number, share, member = self.find_shared(bx, begun[0])
                own = Share(share, member, self.config.members)
            wide, high, _ = self.grid
            x, y, z = number % wide, number // wide % high, number // wide // high
        return x, y, z, own

    @T.macro
    def find_shared(self, block: Any, begun: Any) -> tuple[Any, Any, Any]:
        """Return the number of a block's keys, their number among shared keys (negative if alone), and its member."""
        whole, members = self.tasks - self.shared, self.config.members
        number = T.alloc_var(T.int32, block)
        if block >= whole:
            number = whole + T.atomic_add(begun, 1, return_prev=True)
        behind = number - whole
        keys = T.if_then_else(behind < 0, number, whole + behind // members)
        return T.max(keys, 0), behind // members, behind % members


@T.macro
def leave(accs: tuple[Any, ...], sums: Any, counts: Any, place: tuple[Any, ...]) -> None:
    """Leave sums of a warpgroup for the next member."""
    first = 0
    for acc in accs:
        rows, columns = acc.shape
        for i, c in T.Parallel(rows, columns):
            sums[(*place, i, first + c)] = acc[i, c]
        first += columns
    T.sync_warp()
    if T.shuffle_elect(WARP):
        T.atomic_add(counts[place], 1, memory_order="release")


@T.macro
def take(accs: tuple[Any, ...], sums: Any, counts: Any, place: tuple[Any, ...], member: Any) -> None:
    """Add what the member before has left."""
    while T.atomic_load(counts[place], "acquire") != WARPGROUP // WARP * member:
        pass
    first = 0
    for acc in accs:
        rows, columns = acc.shape
        for i, c in T.Parallel(rows, columns):
            acc[i, c] = acc[i, c] + sums[(*place, i, first + c)]
        first += columns


def handover_shapes(multiprocessors: int, tile: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of what members hand over: sums of dk and dv, counters of warps, counter of begun blocks.

    `tile` are the rows and columns of a warpgroup's sums.
    """
    places = multiprocessors, WARPGROUPS
    return (*places, *tile), places, (1,)


def handover_types(multiprocessors: int, tile: tuple[int, int]) -> list[Any]:
    """Return the types of what members hand over."""
    sums, *counters = handover_shapes(multiprocessors, tile)
    return [T.Tensor(sums, T.float32), *(T.Tensor(shape, T.int32) for shape in counters)]


def make_handover(like: torch.Tensor, multiprocessors: int, tile: tuple[int, int]) -> list[torch.Tensor]:
    """Allocate what members hand over, beside the float32 tensor `like`."""
    sums, *counters = handover_shapes(multiprocessors, tile)
    return [like.new_empty(sums), *(like.new_empty(shape, dtype=torch.int32) for shape in counters)]


def members_of(blocks: int, size: Any, config: Config, machine: Machine) -> int:
    """Return how many blocks share the keys of each block that is left for a last wave."""
    whole, left = divmod(blocks, machine.num_sms)
    most = max(min(MOST_MEMBERS, size.rows // config.block_q // LEAST_STEPS), 1)

    def waves(members: int) -> float:
        return whole + -(-left * members // machine.num_sms) / members

    best = min(range(1, most + 1), key=waves)
    return best if waves(1) >= LEAST_GAIN * waves(best) else 1
