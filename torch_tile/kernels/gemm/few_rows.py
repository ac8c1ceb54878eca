# SPDX-License-Identifier: Apache-2.0
"""How matrix products of few rows are cut on GPUs, where all time is that of reading the bs. Measured on an H200."""

from __future__ import annotations

from dataclasses import replace

from torch_tile.kernels.common import Machine, power_of_two
from torch_tile.kernels.gemm.candidates import (
    BARRIERS,
    Config,
    Problem,
    Tile,
    count_of,
    fitting,
    stage_bytes,
    with_room,
)

# By mma.sync: the least that hold the rows.
FEW_ROWS_CONFIGS = (Config(16, 64, 128, 128, 4), Config(32, 64, 128, 128, 4))
FEW_ROWS = FEW_ROWS_CONFIGS[-1].block_m
MOST_JOINED = 8  # blocks of a cluster
# By wgmma, whose 64 rows the columns of the result are: rows of a tile, and (columns, threads).
TURNED_ROWS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
TURNED_COLUMNS = ((64, 128), (128, 256), (256, 256))
TURNED_SUMS = 128  # of a thread
SHORTEST_K = 1024  # that was measured
LONG_K = 8192  # what is read for it takes long beside joining sums of more rows than `CHEAP_ROWS`
CHEAP_ROWS = 32


def turned_config(problem: Problem, machine: Machine) -> Config | None:
    """The product as its transpose, on Hopper: bulk copies that read past the end of a are slow, and its tiles have 64
    rows otherwise. None where that was not faster.

    A block that streams has about a fiftieth of the memory's rate, so two fifths of the SMs are enough for few rows.
    """
    if not machine.target.has_wgmma or not problem.aligned or problem.dtype.itemsize != 2:
        return None
    rows = next((r for r in TURNED_ROWS if problem.m <= r), 0)
    config = _turned_tile(rows, problem, machine) if rows and problem.k >= SHORTEST_K else None
    if config is None:
        return None
    count, units = count_of(replace(config, block_n=64), problem), machine.units
    if rows <= 16 and 4 * count >= 3 * units:  # tiles of 16 rows by mma.sync read as fast
        return None
    if rows == 48 and problem.k < LONG_K // 4:  # most of 64 rows, and soon over
        return None
    if rows % 64 == 0 and (problem.k < LONG_K or 5 * count >= 2 * units):  # the other tiles have so many rows, too
        return None
    count, splits = count_of(config, problem), 1
    wanted = (2 if rows <= CHEAP_ROWS else 3) * units if rows <= CHEAP_ROWS or problem.k >= LONG_K else 0
    while 5 * count * splits < wanted and splits < MOST_JOINED and problem.k >= 6 * splits * config.block_k:
        splits *= 2
    if 5 * count * splits < 2 * units:
        return None
    return config if splits == 1 else replace(config, splits=splits, cluster=True, panel=0, staged=False)


def _turned_tile(rows: int, problem: Problem, machine: Machine) -> Config | None:
    """The narrowest tile of so many rows of which all are under way at once; if there is none, 128 columns."""
    found = None
    for columns, threads in TURNED_COLUMNS:
        leaving = rows * columns * problem.dtype.itemsize
        room = machine.target.shared_limit - leaving - BARRIERS
        config = Config(rows, columns, 128, threads, 8, panel=8, staged=True, turned=True)
        if room // stage_bytes(config, problem) < 5:
            config = replace(config, block_k=64, stages=10)
        config = replace(config, stages=min(config.stages, room // stage_bytes(config, problem)))
        if rows * columns * problem.products > TURNED_SUMS * threads or config.stages < 3:
            break
        if count_of(config, problem) <= machine.units:
            return config
        if columns == 128 or found is None:
            found = config
    return found


def row_by_tensor_cores(problem: Problem, machine: Machine) -> bool:
    """Whether a row times a matrix stored `[N, K]` goes by the kernels for few rows: where that was faster on an H200.

    For short rows of the matrix, and for such a distance of them that memory is slow to give several at a time.
    """
    if not machine.target.has_wgmma or problem.products > 1 or not problem.aligned:
        return False
    return problem.k <= 8192 or problem.k * problem.dtype.itemsize % 32768 == 0


def few_rows_config(problem: Problem, machine: Machine) -> Config | None:
    """Blocks for all SMs: they share sums over a K so long that adding up parts takes no time beside it."""
    config = next(c for c in FEW_ROWS_CONFIGS if problem.m <= c.block_m)
    if not fitting([Tile(config, 1, 1.0)], problem, machine):
        return None
    if machine.target.has_clusters and (found := _few_rows_in_clusters(config, problem, machine)) is not None:
        return found
    config = with_room(config, problem, machine)
    count, steps = count_of(config, problem), problem.k // config.block_k
    if (count < machine.units and steps >= 64) or (3 * count <= machine.units and steps >= 8):
        return replace(config, splits=max(1, min(2 * machine.units // count, steps // 4, 64)))
    return config


def _few_rows_in_clusters(config: Config, problem: Problem, machine: Machine) -> Config | None:
    """The same on GPUs with clusters, whose blocks share sums where there are few tiles. Measured on an H200.

    None where clusters would leave most SMs without work.
    """
    count, units = count_of(config, problem), machine.units
    if problem.m == 1 and not problem.row and problem.products == 1:  # long pieces of rows, and all tiles at a time
        if 5 * count >= 8 * units:
            block_k = 128 if count <= 2 * units else 32
            return with_room(replace(config, block_n=128, block_k=block_k), problem, machine)
        if count >= units and problem.k >= 4 * problem.n:
            return with_room(replace(config, block_n=128, block_k=64, stages=8), problem, machine)
    if 4 * count >= 3 * units:
        return with_room(config, problem, machine)
    narrow = replace(config, block_n=32, stages=6)
    if config.block_m == 32 and 2 * count_of(narrow, problem) >= units:
        return with_room(narrow, problem, machine)
    few = replace(config if config.block_m == 16 else narrow, block_k=64, stages=6 if config.block_m == 16 else 4)
    return joined(few, problem, machine, MOST_JOINED)


def joined(config: Config, problem: Problem, machine: Machine, most: int) -> Config | None:
    """As many blocks of a cluster, up to `most`, as it takes to give all SMs work; None if that leaves most without."""
    count = count_of(config, problem)
    wanted = power_of_two(-(-5 * machine.units // (4 * count)))
    longest = power_of_two(problem.k // (4 * config.block_k) + 1) // 2  # so that each has four steps
    splits = max(1, min(wanted, most, longest))
    if not machine.target.has_clusters or 5 * count * splits < 2 * machine.units:
        return None
    return replace(with_room(config, problem, machine), splits=splits, cluster=splits > 1)
