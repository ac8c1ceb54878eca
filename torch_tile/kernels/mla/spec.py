# SPDX-License-Identifier: Apache-2.0
"""Facts that an MLA decoding kernel is compiled for, and the tilings of decoding on the CPU and on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.hardware import BULK_BYTES, GRID_LIMITS
from torch_tile.kernels.common import Machine, compute_dtype, strided, typical
from torch_tile.kernels.footprint import Footprint, Tile


@dataclass(frozen=True)
class Config:
    """The tiling of decoding: a block holds `block_h` rows (heads of one sequence) and steps over `block_kv` positions.

    With `split`, blocks take splits of the positions; with `scheduled`, units of a schedule.

    For Hopper: different warpgroups compute the scores of `parts` of a tile's positions. The sum of a row is kept in
    `partial_sums`; with 8 for each part, each thread of an accumulator has its own. `staged` sends the result through
    shared memory. `held` is the number of columns of the queries in registers: reading queries slows down warpgroups
    that make scores of few positions each. `ping_pong` chooses the kernel whose warpgroups take turns (`mla_hopper`).
    """

    block_h: int = 16
    block_kv: int = 64
    threads: int = 128
    stages: int = 2
    split: bool = False
    parts: int = 1
    partial_sums: int = 1
    staged: bool = False
    held: int = 0
    scheduled: bool = False
    ping_pong: bool = False

    def part_dtype(self, spec: Spec) -> torch.dtype:
        """Return the dtype in which splits store their results: the output's, if they leave through shared memory."""
        return spec.dtype if self.staged else compute_dtype(spec.dtype)


@dataclass(frozen=True)
class Spec:
    """Facts that a kernel is compiled for, besides its `Config`.

    The dtype, both widths, and the positions of a page: 0 for a contiguous cache. `gathered`: a tile of positions may
    reach over several pages. `folded`: the scale is positive and applied inside the exponent. Rows of the operands and
    of the result start at multiples of `vector` elements. `whole`: every sequence is as long as the cache. `fuses`:
    sums in float32, on a machine that makes a product and a sum in one instruction. `packed`: positions are bytes of
    float8, scales and bfloat16 (packed.py). `listed`: each query sees the positions that a list names.
    """

    dtype: torch.dtype
    latent: int
    rotary: int
    page: int
    gathered: bool
    folded: bool
    vector: int = 1
    whole: bool = False
    fuses: bool = True
    packed: bool = False
    listed: bool = False

    @property
    def paged(self) -> bool:
        """Return whether a table says where pages of positions lie."""
        return self.page > 0

    @property
    def one_by_one(self) -> bool:
        """Return whether a tile's positions are read one by one, as they lie apart."""
        return self.gathered or self.listed

    def on_hopper(self, machine: Machine) -> bool:
        """Return whether wgmma multiplies tiles that bulk copies load."""
        wide = self.latent % 128 == 0 and self.rotary % 64 == 0 and self.vector > 1 and self.dtype.itemsize == 2
        return machine.target.has_wgmma and wide and not (self.one_by_one or self.packed)

    def cache_shapes(self, batch: Any) -> tuple[Any, list[Any], Any]:
        """Return the first two sizes of the cache, the table's type if paged, and the number of positions."""
        pages, length, table_len = T.dynamic("pages, length, table_len")
        if self.paged:
            return (pages, self.page), [strided("block_table", (batch, table_len), torch.int32)], table_len * self.page
        return (batch, length), [], length

    def place(self, cache: Any, table: Sequence[Any], sequence: Any, tile: Any, keys: int) -> tuple[Any, Any]:
        """Return the cache indices of a tile of `keys` positions, which divide a page. Gathered caches have none."""
        if not self.paged:
            return sequence, tile * keys
        return self.slab(cache, self.entry(table, sequence, tile, keys)), self.row(tile, keys)

    def row(self, tile: Any, keys: int) -> Any:
        """Return the row of its page, or of a contiguous cache, in which a tile of `keys` positions begins."""
        return tile % (self.page // keys) * keys if self.paged else tile * keys

    def entry(self, table: Sequence[Any], sequence: Any, tile: Any, keys: int) -> Any:
        """Return the table's entry for a tile's page, right or wrong; contiguous caches have one a sequence."""
        return table[0][sequence, tile // (self.page // keys)] if self.paged else sequence

    def slab(self, cache: Any, entry: Any) -> Any:
        """Return the page that an entry means, or the sequence. It is one of the cache's."""
        return T.clamp(entry, 0, cache.shape[0] - 1) if self.paged else entry

    def needs_mask(self, first: Any, keys: int, length: Any, first_own: Any) -> Any:
        """Return whether some query of a block may not see some of the `keys` positions from `first` on."""
        if not self.folded or self.listed:
            return True
        return T.logical_or(first + keys > length, first + keys - 1 > first_own)

    def key_blocks(self, config: Config, length: Any, splits: Any, split: Any) -> Any:
        """Return the range of blocks of positions, within one split if split."""
        end = T.ceildiv(length, config.block_kv)
        if not config.split:
            return 0, end
        each = (length - 1) // config.block_kv // splits + 1  # no sum passes 32 bits: 64 divide slowly
        first = T.min(split * each, end)
        return first, T.min(first + each, end)


@dataclass(frozen=True)
class Problem:
    """Sizes that decide the tiling: sequences, rows of each (queries x heads), and positions of the cache."""

    batch: int
    rows: int
    positions: int


def config_for(spec: Spec, problem: Problem, machine: Machine, splits: int = 0) -> Config | None:
    """Choose the tiling of a problem on a machine. `splits` are the splits asked for, 0 to choose.

    None for a cache so wide that not even the smallest tiles fit.
    """
    problem = typical(problem)
    rows = problem.rows
    config: Config | None = Config(block_h=4 if rows <= 4 else 16 if rows <= 16 else 32)  # as few as the queries fill
    if machine.is_gpu:
        tilings = SHORT if rows <= LEAST_ROWS else (*HOPPER, *LONG) if spec.on_hopper(machine) else LONG
        config = next((c for c in tilings if _fits(c, spec, machine)), None)
    if config is None:
        return None
    return replace(config, split=(splits or splits_for(config, problem, machine)) > 1)


def units_for(rows: int, machine: Machine) -> int:
    """Return how many units of a schedule a machine runs at once, each with the blocks that `rows` fill."""
    blocks = -(-rows // (MOST_ROWS if rows > LEAST_ROWS else LEAST_ROWS))
    return max(1, (machine.num_sms if machine.is_gpu else 2 * machine.num_sms) // max(1, blocks))


def splits_for(config: Config, problem: Problem, machine: Machine, wanted: int = 0) -> int:
    """Choose the number of splits of the positions: work for the whole machine, but splits long enough to be worth a
    launch.

    As many as wanted, if any are, but none without a block of positions, nor more than a launch takes.
    """
    problem = typical(problem)
    tiles = -(-problem.positions // config.block_kv)
    if wanted:
        return max(1, min(wanted, tiles, MOST_SPLITS))
    blocks = problem.batch * -(-problem.rows // config.block_h)
    room = machine.num_sms // blocks if machine.is_gpu else -(-2 * machine.num_sms // blocks)  # one block fills an SM
    each = -(-tiles // max(1, min(room, problem.positions // LEAST_SPLIT)))  # tiles of a split
    return -(-tiles // (each + each % 2 if config.ping_pong else each)) if tiles else 1


LEAST_ROWS, MOST_ROWS = 16, 64  # of a block on a GPU
MOST_POSITIONS = 2**31 - 1  # of a sequence, so that 32 bits hold their numbers
MOST_SPLITS = GRID_LIMITS[1]  # blocks in the second dimension of a launch
LEAST_SPLIT = 128  # positions: a pair of tiles, which blocks with turns take together

# Tilings by falling size; the first whose tiles fit is taken.
SHORT = (Config(16, 64, 128), Config(16, 32, 128), Config(16, 32, 128, stages=1), Config(16, 16, 128, stages=1))
HOPPER = (
    Config(64, 64, 256, 2, partial_sums=8, staged=True, ping_pong=True),
    Config(64, 64, 256, 2, parts=2, partial_sums=16, staged=True, held=256),
    Config(64, 64, 256, 2, parts=2, partial_sums=16, staged=True),
    Config(64, 64, 256, 1, parts=2, partial_sums=16, staged=True),
)
LONG = (Config(64, 64, 256), Config(64, 32, 256), Config(32, 32, 256, stages=1), *SHORT[1:])


def _fits(config: Config, spec: Spec, machine: Machine) -> bool:
    """Return whether the tiles fit in shared memory and the sums in registers."""
    size = spec.dtype.itemsize
    if config.ping_pong and spec.vector * size < BULK_BYTES:
        return False
    sums = config.block_h * spec.latent * max(1, size // 4) // config.threads
    return footprint(config, spec).fits(machine.target) and sums <= 128 and config.held < spec.latent


def footprint(config: Config, spec: Spec) -> Footprint:
    """Compute the shared memory of queries, positions and weights. Results leave through the queries' tile."""
    width, bits, rows, keys = spec.latent + spec.rotary, 8 * spec.dtype.itemsize, config.block_h, config.block_kv
    versions = 1 if spec.packed else config.stages  # no stage holds what is widened on its way
    tiles = [Tile(keys, width, bits, versions), Tile(rows, keys, bits)]
    if spec.packed:  # latents as they came, widened into a tile beside them
        tiles += [] if spec.one_by_one else [Tile(keys, spec.latent, 8, config.stages)]
    if config.ping_pong:  # queries turned lie in registers; halves show each other weights and greatest scores
        tiles += [Tile(rows, spec.latent, bits), Tile(rows, keys, bits), *[Tile(1, rows, 32)] * 4]
    else:
        held = width - config.held
        tiles.append(Tile(rows, max(held, spec.latent) if config.staged else held, bits))
        if bits == 16:  # warps that share rows by tensor cores hand each other greatest scores, sums and factors
            tiles += [Tile(6, rows, 32)]
    return Footprint(tuple(tiles))
