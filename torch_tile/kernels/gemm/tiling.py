# SPDX-License-Identifier: Apache-2.0
"""The tilings of matrix products on the CPU and on GPUs. The result never depends on the tiling, only the
speed does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from torch_tile.kernels.common import KEPT_CHOICES, Machine, compute_dtype, power_of_two, power_within, typical
from torch_tile.kernels.footprint import Footprint, Part, Tile, most_stages
from torch_tile.kernels.measured_rules import verdict

# A tiling of a matrix product into blocks, its problem, and its footprint on a GPU.


@dataclass(frozen=True)
class Config:
    """The tiling of a product: one block makes `block_m x block_n` of the result, in steps of `block_k`.

    With `splits > 1` so many blocks share the sum over K. A second kernel adds up their parts, or they do it themselves
    as a `cluster`. `panel` is the width, in tiles, of the panels in which GPUs walk the result. `staged` sends it
    through shared memory, so that rows leave in 16-byte pieces. With `blocks` so many blocks take one tile after the
    other, else there is one for each. `transposed` makes the product as its transpose, as wgmma takes 64 rows but any 8
    columns. `resident` blocks share the registers of a multiprocessor. `shared` blocks of a cluster, whose tiles lie
    side by side, load a tile of a once.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 32
    threads: int = 128
    stages: int = 3
    splits: int = 1
    cluster: bool = False
    panel: int = 0
    staged: bool = False
    blocks: int = 0
    transposed: bool = False
    resident: int = 1
    shared: int = 1


@dataclass(frozen=True)
class Problem:
    """One product: its sizes, the number of bs for one a, and two facts about memory.

    The facts are whether it is a row times matrices stored `[N, K]`. Also whether memory rows are runs of whole 16
    bytes. If `ragged`, m is the average number of rows in a batch. `out` is the dtype of a result of another. `along_k`
    says that the bs of a product that is not ragged are stored `[N, K]`.
    """

    dtype: torch.dtype
    batch: int
    m: int
    n: int
    k: int
    products: int = 1
    row: bool = False
    aligned: bool = False
    ragged: bool = False
    out: torch.dtype | None = None
    along_k: bool = False


@dataclass(frozen=True)
class Cut:
    """A candidate tiling: its resident blocks on an SM, and the rate of a full SM relative to the best tiling's."""

    config: Config
    resident: int
    rate: float


def footprint(config: Config, dtype: torch.dtype, products: int, out: torch.dtype, bulk: bool) -> Footprint:
    """Compute the shared memory of both operands' tiles, and of tiles for staged results or cluster sums."""
    bm, bn, bits = config.block_m, config.block_n, 8 * dtype.itemsize
    tiles = [Tile(bm, config.block_k, bits, config.stages, (Part.LOOP,))]
    tiles += [Tile(bn, config.block_k, bits, config.stages, (Part.LOOP,))] * products
    if config.cluster:
        tiles += [Tile(bm, bn, 8 * compute_dtype(dtype).itemsize, parts=(Part.LEAVING,))] * products
    elif config.blocks:
        tiles += [Tile(bm, width, 8 * out.itemsize) for width in buffers_of(panels_of(config, out.itemsize))]
    elif config.staged:
        tiles.append(Tile(bm, bn, 8 * out.itemsize, parts=(Part.LEAVING,)))
    return Footprint(tuple(tiles), bulk)


def with_stages(config: Config, problem: Problem, machine: Machine, bulk: bool = False) -> Config | None:
    """Limit the stages of a tiling to those that fit in shared memory. Return None if not even one fits."""

    def of(stages: int) -> Footprint:
        """Return the footprint with so many stages."""
        out = problem.out or problem.dtype
        return footprint(replace(config, stages=stages), problem.dtype, problem.products, out, bulk)

    stages = most_stages(of, range(config.stages, 0, -1), machine.target)
    return replace(config, stages=stages) if stages else None


def with_room(config: Config, problem: Problem, machine: Machine) -> Config:
    """Limit the stages of a tiling to those that fit in shared memory, but keep at least one."""
    return with_stages(config, problem, machine) or replace(config, stages=1)


def count_of(config: Config, problem: Problem) -> int:
    """Count the tiles of the result. The last tile of ragged rows counts as half empty."""
    rows = problem.batch * -(-problem.m // config.block_m)
    if problem.ragged:
        rows = -(-problem.batch * (2 * problem.m + config.block_m) // (2 * config.block_m))
    return rows * -(-problem.n // config.block_n)


def fitting(tiles: Iterable[Cut], problem: Problem, machine: Machine) -> list[Cut]:
    """Return the tilings whose products fit in the registers, with as many stages as fit in shared memory."""
    found = []
    for tile in tiles:
        c = tile.config
        registers = c.block_m * c.block_n * problem.products * (2 if problem.dtype == torch.float64 else 1) // c.threads
        if registers <= 128 and (config := with_stages(c, problem, machine)) is not None:
            found.append(replace(tile, config=config))
    return found


MOST_TILES = 1 << 30  # of a persistent kernel, whose indices are 32 bits wide
COMFORTABLE = 128  # sums of a thread; with more the assembler has little left to work ahead with
ACCUMULATORS = {1: 192, 2: 192, 3: 112}  # registers for sums of a thread, by how many warpgroups multiply
SHORT_K = 2048  # below, small tiles need no shared sums


def config_for(problem: Problem, machine: Machine) -> Config | None:
    """Choose the tiling of a problem. Return None if even the smallest tiles do not fit so many products."""
    problem = typical(problem)
    if not machine.is_gpu:
        return _cpu_config(problem, machine.num_sms)
    return _gpu_config(problem, machine)


# Limits of a tile on the CPU. Rows and columns are multiples of the micro-kernel's. Sums and operands fit into a part
# of a second-level cache. Each tile costs so many rows or columns besides its products.
CPU_ROWS = tuple(range(64, 257, 16))
CPU_COLUMNS = tuple(range(64, 257, 32))
CPU_BYTES = 512 << 10
CPU_EDGE = 10


@lru_cache(KEPT_CHOICES)
def _cpu_config(problem: Problem, threads: int) -> Config:
    """Choose the tiles with the least work on a CPU. Large tiles copy and pack less; others waste less at edges or fill
    threads.

    Where there are fewer tiles than threads and K is long, blocks share the sum.
    """
    if problem.row:
        return Config(1, 8, 128)  # 4 KiB of sums, read and written for each step
    most = 256 if problem.dtype.itemsize == 2 else 64 if problem.dtype == torch.float64 else 128
    block_k = _even_step(problem.k, most)
    rows = CPU_ROWS if problem.m > 64 else (max(8, power_of_two(problem.m)),)
    tilings = [Config(m, n, block_k) for m in rows for n in (CPU_COLUMNS if problem.n > 64 else (64,))]
    fitting_tilings = [c for c in tilings if _cpu_bytes(c, problem) <= CPU_BYTES] or tilings[:1]
    config = min(fitting_tilings, key=lambda c: _cpu_work(c, problem, threads))
    tiles = count_of(config, problem)
    if tiles < threads and problem.k >= 8 * block_k:
        return replace(config, splits=min(-(-threads // tiles), problem.k // (4 * block_k)))
    return config


def _even_step(size: int, most: int) -> int:
    """Return a step of at most `most`, so that all steps are about as long: a multiple of 32, and at least 64."""
    return max(64, -(-size // -(-size // most) // 32) * 32)


def _cpu_bytes(config: Config, problem: Problem) -> int:
    """Count the bytes of a block's tiles on a CPU."""
    sums = problem.products * config.block_m * config.block_n * (8 if problem.dtype == torch.float64 else 4)
    return sums + (config.block_m + problem.products * config.block_n) * config.block_k * problem.dtype.itemsize


def _cpu_work(config: Config, problem: Problem, threads: int) -> float:
    """Estimate the work of the busiest thread: its tiles, each with a cost for its edges."""
    m, n = config.block_m, config.block_n
    return -(-count_of(config, problem) // threads) * (m + CPU_EDGE) * (n + CPU_EDGE)


# 16-bit operands, by mma.sync. Large tiles reuse more; small ones waste less at the edges of small problems.
HALF_TILES = (
    Cut(Config(128, 256, 64, 256, 3, panel=8, staged=True), 1, 1.0),
    Cut(Config(128, 128, 64, 128, 3, panel=8, staged=True), 2, 0.93),
    Cut(Config(64, 128, 64, 128, 3, panel=8, staged=True), 2, 0.75),
    Cut(Config(64, 64, 64, 128, 4, panel=8, staged=True), 3, 0.55),
)
# The same by wgmma, of tiles that bulk copies bring: one block on each SM takes tile after tile. Between large tiles it
# matters most how well they fill the last iteration.
HOPPER_TILES = (
    Cut(Config(128, 256, 64, 256, 4, panel=8, staged=True), 1, 1.0),
    Cut(Config(128, 192, 64, 256, 4, panel=8, staged=True), 1, 1.0),
    Cut(Config(128, 128, 64, 256, 6, panel=8, staged=True), 1, 0.94),
    Cut(Config(192, 192, 64, 384, 3, panel=8, staged=True), 1, 0.95),
)
# The same for one product by a matrix stored [N, K]: with widths between the others, a last iteration idles less.
BETWEEN_TILES = (
    Cut(Config(128, 176, 64, 256, 4, panel=8, staged=True), 1, 0.975),
    Cut(Config(128, 144, 64, 256, 5, panel=8, staged=True), 1, 0.905),
)
# For fewer rows or columns, of which every tile has a block of its own: copies have to begin early.
SMALL_HOPPER_TILES = (
    Cut(Config(64, 256, 64, 128, 4, panel=8, staged=True), 1, 0.85),
    Cut(Config(64, 128, 64, 128, 8, panel=8, staged=True), 1, 0.75),
    Cut(Config(64, 64, 128, 128, 6, panel=8, staged=True), 1, 0.55),
    Cut(Config(64, 32, 128, 128, 8, panel=8, staged=True), 1, 0.35),
)
# The same for one product by a matrix stored [N, K].
BETWEEN_SMALL_TILES = (
    Cut(Config(128, 96, 64, 256, 7, panel=8, staged=True), 1, 0.88),
    Cut(Config(128, 72, 64, 256, 8, panel=8, staged=True), 1, 0.75),
)
# The same, for as many rows only.
FEWER_ROWS = 128
FEWER_ROWS_TILES = (
    Cut(Config(128, 96, 64, 256, 7, panel=8, staged=True), 1, 0.88),
    Cut(Config(64, 96, 128, 128, 5, panel=8, staged=True), 1, 0.65),
)
# Exact float32 has no tensor core, float64 has one of its own shape.
WIDE_TILES = {
    torch.float32: (Cut(Config(64, 64, 16, 128, 2), 4, 1.0), Cut(Config(16, 64, 32, 128, 2), 4, 0.4)),
    torch.float64: (Cut(Config(64, 64, 16, 128, 2), 2, 1.0), Cut(Config(16, 64, 16, 128, 2), 4, 0.4)),
}


@lru_cache(KEPT_CHOICES)
def _gpu_config(problem: Problem, machine: Machine) -> Config | None:
    """Choose the tile that finishes first by a model of waves. `resident` blocks run on each SM at once.

    Few tiles and a long K: blocks share the sum, so that every SM has work.
    """
    exact = problem.dtype in WIDE_TILES
    if (transposed := transposed_config(problem, machine)) is not None:
        return transposed
    if problem.row and (exact or not row_by_tensor_cores(problem, machine)):
        return Config(1, 8, 512)
    if (persistent := _hopper_config(problem, machine)) is not None:
        return persistent
    if problem.m <= FEW_ROWS and not exact:
        return few_rows_config(problem, machine)
    tiles = fitting(WIDE_TILES.get(problem.dtype, HALF_TILES), problem, machine)
    tile = min(tiles, key=lambda t: _duration(t, problem, machine.num_sms), default=None)
    if tile is None:
        return None
    config, slots = tile.config, tile.resident * machine.num_sms
    count = count_of(config, problem)
    if 3 * count <= machine.num_sms and problem.k >= 8 * config.block_k:
        short = problem.k < SHORT_K
        small = Config(32, 32, 128, 128, 4) if short else Config(64, 32, 64, 128, 4)
        together = None if exact else with_split_k(small, problem, machine, 1 if short else MOST_JOINED)
        splits = min(slots // count, problem.k // (4 * config.block_k), 64)
        return replace(config, splits=splits, panel=0) if together is None else together
    return config


def _hopper_config(problem: Problem, machine: Machine) -> Config | None:
    """Choose a tiling by wgmma. Return None for few rows or tiles, and operands that no bulk copy can take."""
    size, num_sms = problem.dtype.itemsize, machine.num_sms
    if not machine.target.has_wgmma or not problem.aligned or size != 2 or problem.m <= FEW_ROWS:
        return None
    found = []
    single = problem.along_k and problem.products == 1 and problem.batch == 1
    between = (*BETWEEN_TILES, *BETWEEN_SMALL_TILES) if single else ()
    few = FEWER_ROWS_TILES if problem.m <= FEWER_ROWS else ()
    for tile in (*HOPPER_TILES, *SMALL_HOPPER_TILES, *few, *between):
        c, lasts = tile.config, tile in HOPPER_TILES or tile in BETWEEN_TILES
        config = with_stages(replace(c, blocks=num_sms if lasts else 0), problem, machine, bulk=True)
        sums = c.block_m * c.block_n * problem.products // c.threads
        if sums <= ACCUMULATORS[c.threads // 128] and config is not None and config.stages >= 2:
            rate = tile.rate if sums <= COMFORTABLE else tile.rate * 0.9
            found.append(Cut(config, tile.resident, rate))
    best = min(found, key=lambda t: _duration(t, problem, num_sms), default=None)
    return best.config if best is not None and num_sms // 3 <= count_of(best.config, problem) < MOST_TILES else None


def panel_width(block_m: int, itemsize: int) -> int:
    """Return the columns of a panel in which a persistent kernel stores results. Two panels are in flight at once."""
    return (128 if block_m <= 128 else 64) // itemsize


class Panel(NamedTuple):
    """Columns of a tile that are stored as one: the first, how many, and the number of the buffer that they use."""

    start: int
    width: int
    buffer: int


def panels_of(config: Config, itemsize: int, pieces: Sequence[tuple[int, int]] = ()) -> list[Panel]:
    """Split a tile, or each of its `pieces` (first column, width), into panels for staged stores.

    They are as wide as they may be, and powers of two. Those of one width take turns in two buffers. A tile that is
    made as its transpose leaves as a whole.
    """
    if config.transposed:
        return [Panel(0, config.block_n, 0)]
    found: list[Panel] = []
    buffers: dict[int, list[int]] = {}
    for first, columns in pieces or [(0, config.block_n)]:
        for start, width in powers_within(columns, panel_width(config.block_m, itemsize)):
            before = sum(panel.width == width for panel in found)
            own = buffers.setdefault(width, [])
            if before < 2:
                own.append(sum(map(len, buffers.values())))
            found.append(Panel(first + start, width, own[before % 2]))
    return found


def powers_within(size: int, most: int) -> list[tuple[int, int]]:
    """Split a size into powers of two of at most `most`, the largest first; return where each starts, and its size."""
    found: list[tuple[int, int]] = []
    start = 0
    while start < size:
        part = min(most, power_within(size - start))
        found.append((start, part))
        start += part
    return found


def buffers_of(panels: Iterable[Panel]) -> list[int]:
    """Return the columns of each buffer that panels use."""
    return list({panel.buffer: panel.width for panel in panels}.values())


def _duration(tile: Cut, problem: Problem, num_sms: int) -> float:
    """Estimate the time of all waves, in units of a full SM's time for one element of the result."""
    config = tile.config
    count = count_of(config, problem)
    slots = tile.resident * num_sms
    # A block that is alone on its SM has all of it; a last wave takes as long as a full one.
    waves = max(count / num_sms, 1.0) if count <= slots else -(-count // slots) * tile.resident
    return waves * config.block_m * config.block_n / tile.rate


# Tilings of products of few rows on GPUs: all time is that of reading the bs.

# By mma.sync: the least that hold the rows.
FEW_ROWS_CONFIGS = (Config(16, 64, 128, 128, 4), Config(32, 64, 128, 128, 4))
FEW_ROWS = FEW_ROWS_CONFIGS[-1].block_m
MOST_JOINED = 8  # blocks of a cluster
# By wgmma, whose 64 rows the columns of the result are: rows of a tile, and (columns, threads).
TURNED_ROWS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
TURNED_COLUMNS = ((64, 128), (128, 256), (256, 256))
TURNED_SUMS = 128  # of a thread


def transposed_config(problem: Problem, machine: Machine) -> Config | None:
    """Choose a tiling for the product as its transpose, on Hopper. None if that was not faster.

    Bulk copies that read past the end of a are slow, and its tiles have 64 rows otherwise.
    """
    if not machine.target.has_wgmma or not problem.aligned or problem.dtype.itemsize != 2:
        return None
    rows = next((r for r in TURNED_ROWS if problem.m <= r), 0)
    config = _transposed_tile(rows, problem, machine) if rows else None
    if config is None:
        return None
    tiles = count_of(replace(config, block_n=64), problem) / machine.num_sms
    if not verdict("gemm.transposed", machine.target, False, rows=rows, k=problem.k, tiles_per_sm=tiles):
        return None
    count, splits = count_of(config, problem), 1
    wanted = verdict("gemm.transposed_blocks", machine.target, 0, rows=rows, k=problem.k)
    while (
        count * splits / machine.num_sms < wanted and splits < MOST_JOINED and problem.k >= 6 * splits * config.block_k
    ):
        splits *= 2
    if count * splits / machine.num_sms < verdict("gemm.least_blocks", machine.target, 0):
        return None
    if splits == 1:
        return config
    return with_stages(replace(config, splits=splits, cluster=True, panel=0, staged=False), problem, machine, bulk=True)


def _transposed_tile(rows: int, problem: Problem, machine: Machine) -> Config | None:
    """Return the narrowest tile of the given rows whose tiles are all in flight at once, else 128 columns."""
    found = None
    for columns, threads in TURNED_COLUMNS:
        long = Config(rows, columns, 128, threads, 8, panel=8, staged=True, transposed=True)
        config = with_stages(long, problem, machine, bulk=True)
        if config is None or config.stages < 5:
            config = with_stages(replace(long, block_k=64, stages=10), problem, machine, bulk=True)
        if rows * columns * problem.products > TURNED_SUMS * threads or config is None or config.stages < 3:
            break
        if count_of(config, problem) <= machine.num_sms:
            return config
        if columns == 128 or found is None:
            found = config
    return found


def row_by_tensor_cores(problem: Problem, machine: Machine) -> bool:
    """Return whether the few-row kernels take a row times a matrix stored `[N, K]`.

    They take short rows of the matrix, and rows at distances that make memory slow for several at a time.
    """
    if problem.products > 1 or not problem.aligned:
        return False
    row_bytes = problem.k * problem.dtype.itemsize
    return bool(verdict("gemm.row_by_tensor_cores", machine.target, False, k=problem.k, row_bytes=row_bytes))


def few_rows_config(problem: Problem, machine: Machine) -> Config | None:
    """Choose a tiling for few rows with blocks for all SMs. Blocks share sums only over a long K."""
    config = next(c for c in FEW_ROWS_CONFIGS if problem.m <= c.block_m)
    if not fitting([Cut(config, 1, 1.0)], problem, machine):
        return None
    if machine.target.has_clusters and (found := _few_rows_in_clusters(config, problem, machine)) is not None:
        return found
    config = with_room(config, problem, machine)
    count, steps = count_of(config, problem), problem.k // config.block_k
    if (count < machine.num_sms and steps >= 64) or (3 * count <= machine.num_sms and steps >= 8):
        return replace(config, splits=max(1, min(2 * machine.num_sms // count, steps // 4, 64)))
    return config


def _few_rows_in_clusters(config: Config, problem: Problem, machine: Machine) -> Config | None:
    """Choose a tiling for few rows where clusters share sums; None where most SMs would have no work."""
    tiles = count_of(config, problem) / machine.num_sms
    if problem.m == 1 and not problem.row and problem.products == 1:
        changes = verdict("gemm.one_row", machine.target, None, tiles_per_sm=tiles, k_by_n=problem.k / problem.n)
        if changes is not None:
            return with_room(replace(config, **changes), problem, machine)
    if verdict("gemm.few_rows_apart", machine.target, False, tiles_per_sm=tiles):
        return with_room(config, problem, machine)
    narrow = replace(config, block_n=32, stages=6)
    if config.block_m == 32 and 2 * count_of(narrow, problem) >= machine.num_sms:
        return with_room(narrow, problem, machine)
    few = replace(config if config.block_m == 16 else narrow, block_k=64, stages=6 if config.block_m == 16 else 4)
    return with_split_k(few, problem, machine, MOST_JOINED)


def with_split_k(config: Config, problem: Problem, machine: Machine, most: int) -> Config | None:
    """Split K over up to `most` blocks of a cluster, so that all SMs have work; None if most SMs would idle."""
    count = count_of(config, problem)
    wanted = power_of_two(-(-5 * machine.num_sms // (4 * count)))
    longest = power_within(problem.k // (4 * config.block_k))  # so that each has four steps
    splits = max(1, min(wanted, most, longest))
    if count * splits / machine.num_sms < verdict("gemm.least_blocks", machine.target, math.inf):
        return None
    return replace(with_room(config, problem, machine), splits=splits, cluster=splits > 1)
