# SPDX-License-Identifier: Apache-2.0
"""Choose the products of few rows by weights of 4 bits whose K warps cut, and their tilings, as measured.

Tilings change the speed, never the result. May assume what `dequant.prepare` describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, inf
from typing import NamedTuple

from torch_tile.hardware import WARP
from torch_tile.kernels.common import Machine, power_of_two, round_up, typical
from torch_tile.kernels.gemm import row_dequant
from torch_tile.kernels.gemm.cut_dequant import chunks_of_warp, footprint
from torch_tile.kernels.gemm.cut_sums import Parts
from torch_tile.kernels.gemm.fields_in_place import excess, has_whole_groups
from torch_tile.kernels.gemm.packed import Problem, Spec
from torch_tile.kernels.gemm.row_dequant import SLICES
from torch_tile.kernels.gemm.tiling import Config

WARPS = 16  # of a block, at most
CODES, NUMBERS = 64, 128  # columns of a group
ROWS = 64  # of a tile of several rounds
LEAST_WEIGHTS = 1 << 21  # of a matrix


class Measured(NamedTuple):
    """State a range of problems for which this kernel was faster than row_dequant.py on an H200, and its tiling there.

    `rows` are those of a. `chunks` are those of a row of the weights. `each` bounds the rows of the weights for a
    multiprocessor: the least number, and the first that is too large. `ahead` steps are in flight. A tile is
    `one_round` of these, or has `ROWS` rows.
    """

    coded: bool
    rows: int
    products: int
    chunks: Sequence[int]
    each: tuple[float, float]
    ahead: int
    one_round: bool

    def holds(self, coded: bool, rows: int, products: int, chunks: float, each: float) -> bool:
        """Return whether a problem is in the range. Tiles of one round were measured for whole chunks alone."""
        same = (self.coded, self.rows, self.products) == (coded, rows, products)
        whole = chunks == ceil(chunks) or not self.one_round
        return same and whole and ceil(chunks) in self.chunks and self.each[0] <= each < self.each[1]


ALL, MANY = inf, 80  # rows of the weights for a multiprocessor
MEASURED = (  # coded, rows, products, chunks, each, ahead, one round
    Measured(False, 1, 1, (3,), (15, 20), 2, False),
    Measured(False, 1, 1, (4,), (36, MANY), 2, False),
    Measured(False, 1, 1, (5, 7, 8, 9), (0, MANY), 2, False),
    Measured(False, 1, 1, (5,), (MANY, 160), 3, True),
    Measured(False, 1, 1, (6, 7, 14), (MANY, 115), 4, True),
    Measured(False, 1, 1, (4, 8), (MANY, ALL), 4, True),
    Measured(False, 1, 1, (16,), (0, 48), 4, False),
    Measured(False, 1, 1, (16, 28), (48, ALL), 4, True),
    Measured(False, 1, 2, (4,), (100, 115), 1, False),
    Measured(False, 2, 1, (8,), (36, 60), 2, False),
    Measured(False, 2, 1, (8,), (MANY, ALL), 4, True),
    Measured(False, 2, 1, range(9, 17), (20, MANY), 2, False),
    Measured(False, 2, 1, (16,), (200, ALL), 4, True),
    Measured(False, 2, 1, (32,), (MANY, ALL), 4, False),
    Measured(False, 4, 1, range(16, 21), (15, 48), 2, False),
    Measured(True, 1, 1, (8,), (0, ALL), 4, True),
    Measured(True, 1, 1, range(1, 11), (0, 115), 4, False),
    Measured(True, 1, 1, (14,), (MANY, 115), 4, True),
    Measured(True, 1, 1, (16,), (MANY, ALL), 4, False),
    Measured(True, 1, 1, range(11, 23), (0, MANY), 4, False),
    Measured(True, 1, 1, (28,), (MANY, 115), 16, True),
    Measured(True, 1, 1, (32,), (MANY, ALL), 16, True),
    Measured(True, 1, 2, (8,), (MANY, ALL), 2, False),
)


# Eight rows of a, which fill a product.
SLICED_ROWS = 4  # up to which slices of K are as fast where they fill the multiprocessors
HELD = 256  # columns of a warp
LEAST_WARPS = 8  # of a block
MOST_PARTS = 4  # of K, that blocks take
LEAST_WEIGHTS_OF_ROWS = 1 << 24  # of a matrix


def fits(spec: Spec, problem: Problem, machine: Machine) -> bool:
    """Return whether this kernel can compute a product: of up to eight rows, without a norm."""
    return has_whole_groups(spec, problem, machine) and problem.m <= SLICES and spec.norm is None


def config_for(problem: Problem, spec: Spec, machine: Machine) -> Config | None:
    """Choose the tiling of a product that `fits`. None where another kernel is as fast or faster."""
    config = _tiling_of_slices(problem, spec, machine) or _tiling_of_rows(problem, spec, machine)
    if config is None:
        return None
    chunks = chunks_of_warp(config, problem.k // problem.group)
    return config if footprint(config, spec, chunks).fits(machine.target) else None


def _tiling_of_slices(problem: Problem, spec: Spec, machine: Machine) -> Config | None:
    """Choose the tiling of slices of K where they were measured to be faster than those of row_dequant.py.

    Each warp has as few chunks as it can. The warps left over take other rows of the weights.
    """
    n, coded, rows = typical(problem).n, problem.coded, power_of_two(problem.m)
    if problem.group != (CODES if coded else NUMBERS) or n * problem.k < LEAST_WEIGHTS:
        return None
    groups = problem.k // problem.group
    chunks = groups * rows / SLICES
    own = coded, rows, problem.products, chunks, n / machine.num_sms
    found = next((measured for measured in MEASURED if measured.holds(*own)), None)
    if found is None:
        return None
    cuts = ceil(chunks / ceil(chunks / WARPS))
    threads, tile = WARP * cuts * (WARPS // cuts), 0 if found.one_round else ROWS
    config = Config(rows, tile, problem.group, threads, found.ahead, cuts, blocks=machine.num_sms)
    return fit_tile_to_stages(config, n, groups)


def fit_tile_to_stages(config: Config, n: int, groups: int) -> Config:
    """Return a tiling of whole rounds of its stages, at least one. Tiles are no longer than a block's rows."""
    chunks = chunks_of_warp(config, groups)
    config = replace(config, stages=round_up(config.stages, chunks))
    parts = Parts(config, chunks)
    rows = max(1, min(config.block_n, -(-n // config.blocks)))
    return replace(config, block_n=round_up(rows, parts.units_in_flight * parts.units_at_once * parts.unit))


def _tiling_of_rows(problem: Problem, spec: Spec, machine: Machine) -> Config | None:
    """Choose the tiling of 2 to 8 rows of numbers, whose columns warps share evenly.

    Fields of which nothing is taken off are left out, as ptxas spills. Few rows are left to row_dequant.py if its
    slices keep multiprocessors busy.
    """
    group, n = problem.group, typical(problem).n
    if problem.m == 1 or problem.products > 1 or problem.zeros or excess(spec) == 0.0 or group < NUMBERS:
        return None
    if HELD % group or problem.k % HELD or n * problem.k < LEAST_WEIGHTS_OF_ROWS:
        return None
    pieces = problem.k // HELD
    blocks = next((count for count in range(1, MOST_PARTS + 1) if _cuts_evenly(pieces, count)), None)
    if blocks is None:
        return None
    if problem.m <= SLICED_ROWS and row_dequant.config_for(problem, spec, machine) is not None:
        return None
    threads = WARP * pieces // blocks
    return Config(SLICES, ROWS, group, threads, HELD // group, pieces, blocks=machine.num_sms // blocks)


def _cuts_evenly(pieces: int, blocks: int) -> bool:
    """Return whether so many blocks can cut K into pieces of a warp each."""
    return pieces % blocks == 0 and LEAST_WARPS <= pieces // blocks <= WARPS
