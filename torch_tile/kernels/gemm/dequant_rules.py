# SPDX-License-Identifier: Apache-2.0
"""Choose the tilings of products with weights of few bits (dequant.py), and count their shared memory.

Tilings change the speed, never the result. May assume what `dequant.prepare` describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from torch_tile.kernels.common import Machine, compute_dtype, power_of_two, round_up, typical
from torch_tile.kernels.footprint import SPARE, Footprint, Part, Tile
from torch_tile.kernels.gemm.formats import TABLE
from torch_tile.kernels.gemm.packed import FEW_ROWS, Problem
from torch_tile.kernels.gemm.tiling import MOST_JOINED, Config
from torch_tile.kernels.measured_rules import verdict

SPAN_BYTES = 16  # of scales of a row that come at once, at least
ROW_BYTES = {8: 256, 16: 128}  # of a row of weights that one step takes, by rows of a; for more rows MANY_COLUMNS
MOST_COLUMNS, MANY_COLUMNS = 512, 128  # of a step: for few rows of a, and for more than 16
MOST_GROUPS = 8  # of columns with a scale each in a step: each has sums of its own
LEAST_COLUMNS = 64  # of a step, whatever groups are
LEAST_SHARE, LONG_SHARE, LONGEST_SHARE = 512, 2048, 4096  # columns that a block of a cluster sums up
MOST_SUMS_ON_GPUS = 128  # of a thread
MOST_PRODUCTS = 4  # of many rows, where widened weights take registers, too
WIDTHS = 8, 7, 6, 5, 4  # of tiles of many rows, in eighths of the widest
NARROW, NARROW_LOSS = 96, 14  # rows of a tile whose products run beside no widening, and as many rows what it costs
WIDENING = 72  # rows of a that are multiplied in the time in which a tile's weights are loaded, widened and stored
MOST_TIMED = 96  # rows of a whose tiles were timed with 64, 128, 192 and 256 rows of weights
WIDTH_TIMES = {64: 2.0, 128: 3.0, 192: 4.5, 256: 5.7}  # of such tiles, in units of the next two
WHOLE_SPAN = 8  # groups of a row whose 16-bit scales come at once
STEP_TIME, STEP_TIME_OF_ROW = 4.6, 0.025  # microseconds of a unit for 4096 columns, and more for each row of a
LEAST_STAGES = 3  # of steps for few rows, with which two blocks may share a multiprocessor's memory


def config_for(problem: Problem, machine: Machine) -> Config | None:
    """Choose the tiling of a problem: `block_m` rows of a by `block_n` rows of weights, in steps of `block_k` columns.

    Steps hold whole groups of columns that share a scale, or lie in one. None for so many products that not even the
    smallest tiles fit.
    """
    problem = typical(problem)
    if not machine.is_gpu:
        return Config(min(max(8, power_of_two(problem.m)), 64), 64, 64, stages=0)
    return _gpu_config(problem, machine)


def _gpu_config(problem: Problem, machine: Machine) -> Config | None:
    """Choose the tiling on a GPU."""
    config = _by_rules(problem, machine)
    if config is None:
        return None
    stages = min(config.stages, _stages(config, problem, machine))
    sums = config.block_m * config.block_n * problem.products * max(1, problem.dtype.itemsize // 4) // config.threads
    return replace(config, stages=stages) if stages > 0 and sums <= MOST_SUMS_ON_GPUS else None


def _by_rules(problem: Problem, machine: Machine) -> Config | None:
    """Choose a tiling by rules for exact numbers, few rows, wgmma and mma.sync, in this order."""
    if problem.dtype.itemsize > 2:  # exact: no tensor core for float32, one of its own shape for float64
        return Config(32, 64, 32, 128, 2)
    products = power_of_two(problem.products)  # among which rows and columns are shared out
    if (found := _by_time_of_tiles(problem, machine)) is not None:
        return found
    if problem.m <= FEW_ROWS // products:
        return _few_rows_config(problem, machine)
    if products > MOST_PRODUCTS:
        return None
    if not machine.target.has_wgmma or not problem.aligned:
        return Config(64 // products, 128, 64, 128, 3)
    wide = 256 // products
    columns = _columns(MANY_COLUMNS // products, problem)  # weights in flight stay in registers
    single, timed = problem.products == 1 and not problem.grouped, _has_timed_tiles(problem, machine)
    tilings = [Config(wide * eighths // 8, 128, columns, 256) for eighths in (WIDTHS if single else (8, 4))]
    if single and (problem.coded or timed):
        tilings.append(Config(NARROW, 128, 2 * columns if timed else columns, 256))
    best = min(tilings, key=lambda c: _relative_time(c, problem, machine))
    return replace(_in_pairs(best, problem, machine), stages=4)


def _in_pairs(config: Config, problem: Problem, machine: Machine) -> Config:
    """Let two blocks of a cluster share tiles of many rows of a, and store results in long pieces."""
    pairs = verdict("dequant.pairs", machine.target, False, rows=config.block_m)
    columns = -(-problem.n // config.block_n)
    return replace(config, shared=2, staged=True) if pairs and columns % 2 == 0 else config


def _few_rows_config(problem: Problem, machine: Machine) -> Config:
    """Choose a tiling for few rows: long rows of weights in each step. Few tiles are smaller, and sums shared."""
    block_m, clusters = max(8, power_of_two(problem.m)), machine.target.has_clusters
    fills = -(-problem.n // 128) * 5 >= machine.num_sms * 3
    if clusters and not fills and (found := _in_clusters(block_m, problem, machine)) is not None:
        return found
    block_n, resident = (128, 1) if fills or clusters or block_m > 8 else (64, 2)
    columns = ROW_BYTES.get(block_m, 128) * 8 // problem.bits
    tiles = -(-problem.n // 128) / machine.num_sms
    long = verdict(
        "dequant.long_steps", machine.target, False,
        rows=block_m, tiles_per_sm=tiles, group=problem.group, bits=problem.bits, k=problem.k, coded=problem.coded,
    )  # fmt: skip
    if problem.aligned and verdict(
        "dequant.two_blocks", machine.target, False,
        coded=problem.coded, rows=block_m, group=problem.group, k=problem.k, tiles_per_sm=tiles,
        products=problem.products,
    ):  # fmt: skip
        return Config(block_m, 64, _columns(MOST_COLUMNS, problem), 128, 2, resident=2)
    wide = block_m <= 16 or verdict(
        "dequant.wide_steps", machine.target, False,
        group=problem.group, bits=problem.bits, coded=problem.coded, products=problem.products,
    )  # fmt: skip
    columns = MOST_COLUMNS if long else min(columns, 256 if wide else MANY_COLUMNS)
    columns //= max(1, power_of_two(problem.products) // 2)  # words of all products are in registers
    config = Config(block_m, block_n, _columns(columns, problem), 2 * block_n)
    while not _stages(config, problem, machine) and config.block_k > LEAST_COLUMNS // 4:
        config = replace(config, block_k=config.block_k // 2)
    most = _stages(config, problem, machine)
    stages = most if most < 2 * LEAST_STAGES else most // 2
    config = replace(config, stages=min(stages, 3 if long else 4) if block_m == 8 or long else stages)
    count = -(-problem.n // block_n)
    splits = min(resident * machine.num_sms // count, problem.k // (4 * config.block_k), 64)
    return replace(config, splits=splits) if splits > 1 else config


def _by_time_of_tiles(problem: Problem, machine: Machine) -> Config | None:
    """Choose the tiling of up to 96 rows by the time of its tiles. None for weights whose tiles were not timed.

    A tile has 64 rows of weights for each warpgroup. Blocks share a sum over K where there are few tiles.
    """
    if not 8 < problem.m <= MOST_TIMED or not _has_timed_tiles(problem, machine):
        return None
    rows = round_up(problem.m, 8)
    tilings = [tiling for tiling in _timed_tilings(rows, problem, machine) if _stages(tiling, problem, machine) > 1]
    best = min(tilings, key=lambda c: _time_of_tiles(c, problem, machine))
    if rows <= 16 and (best.block_n < 128 or (best.block_n == 128 and best.splits == 1)):
        return None  # steps of 512 columns, or clusters of smaller tiles, are faster
    return best


def _has_timed_tiles(problem: Problem, machine: Machine) -> bool:
    """Return whether tiles of such weights were timed."""
    if not problem.aligned or problem.products > 1 or problem.grouped or problem.zeros:
        return False
    kind = {"group": problem.group, "bits": problem.bits, "coded": problem.coded}
    return bool(verdict("dequant.timed_tiles", machine.target, False, **kind))


def _timed_tilings(rows: int, problem: Problem, machine: Machine) -> list[Config]:
    """Return the tilings of few rows that were timed. More warpgroups leave each thread fewer registers."""
    few, whole = rows <= 16, 128 if rows > 64 else 256
    tilings = [Config(rows, 64, whole, 128, 6 if rows <= 64 else 5), Config(rows, 128, 256, 256, 4)]
    if rows <= 64:
        tilings.append(Config(rows, 192, 256, 384, 3) if rows <= 48 else Config(rows, 192, 128, 384, 5))
        tilings.append(Config(rows, 256, 256, 512, 3) if few else Config(rows, 256, 128, 512, 6 if rows <= 40 else 4))
    tiles = -(-problem.n // 128)
    fills = 10 * tiles >= 4 * machine.num_sms or not few
    if 2 * tiles <= machine.num_sms and fills and problem.k % (2 * WHOLE_SPAN * problem.group) == 0:
        tilings.append(replace(tilings[1], splits=2, cluster=True))
    if not few and (splits := min(machine.num_sms // tiles, problem.k // 1024)) > 1:
        tilings.append(replace(tilings[1], splits=splits, stages=3))
    return tilings


def _time_of_tiles(config: Config, problem: Problem, machine: Machine) -> float:
    """Estimate the microseconds of all waves and of joining sums."""
    tiles = -(-problem.n // config.block_n) * config.splits
    waves, step = -(-tiles // machine.num_sms), STEP_TIME + config.block_m * STEP_TIME_OF_ROW
    first, of_row = (0.0, 0.16) if config.cluster else (3.1, 0.1) if config.splits > 1 else (0.0, 0.0)
    joining = first + of_row * config.block_m
    return waves * WIDTH_TIMES[config.block_n] * step * problem.k / (4096 * config.splits) + joining


def _in_clusters(block_m: int, problem: Problem, machine: Machine) -> Config | None:
    """Choose a tiling whose clusters share the sums over K of 64 rows of the weights. None if the parts would be long.

    It has two blocks on each SM if parts stay long enough, else one.
    """
    if block_m > 16 or problem.products > 1 or not problem.aligned:
        return None
    count, splits = -(-problem.n // 64), 1
    while splits < MOST_JOINED and problem.k // (2 * splits) >= LEAST_SHARE:
        if 2 * splits * count > machine.num_sms * (1 if problem.k // (2 * splits) < LONGEST_SHARE else 2):
            break
        splits *= 2
    share, alone = problem.k // splits, splits * count <= machine.num_sms
    if share > LONGEST_SHARE:
        return None
    long = alone and problem.group > 0 and share >= LONG_SHARE
    columns = MOST_COLUMNS * 4 // problem.bits if long and problem.bits >= 4 else 256
    config = Config(block_m, 64, _columns(columns, problem), 128, splits=splits, cluster=splits > 1)
    stages = 4 if alone or block_m * problem.bits > 64 else 2
    return replace(config, stages=min(stages, _stages(config, problem, machine)))


def _columns(most: int, problem: Problem) -> int:
    """Choose the columns of a step: whole groups that share a scale, or a part of one group."""
    group = problem.group
    block_k = min(most, max(LEAST_COLUMNS, MOST_GROUPS * power_of_two(group))) if group else most
    while group and block_k % group and group % block_k:
        block_k //= 2
    return block_k


def _stages(config: Config, problem: Problem, machine: Machine) -> int:
    """Return the number of stages for which shared memory has room."""
    alone = replace(config, stages=1, cluster=False)
    one = footprint(alone, problem.dtype, problem.products, problem.bits, False).tile_bytes
    table = TABLE * problem.dtype.itemsize if problem.coded else 0
    # Scales of at most 4 bytes and zeros, of which copies bring two spans.
    groups = config.block_k // problem.group if problem.group else 0
    factors = 2 * (4 * groups + 2 * SPAN_BYTES) * config.block_n * problem.products if problem.group else 0
    return (machine.target.shared_limit - SPARE - table - factors) // one


def footprint(
    config: Config,
    operand: torch.dtype,
    products: int,
    bits: int,
    bulk: bool,
    coded: bool = False,
    factors: Sequence[int] = (),
    out: torch.dtype | None = None,
) -> Footprint:
    """Compute the shared memory of a, the words, a table, a cluster's sums, and the weights of exact products.

    `factors` are the bytes of a row's scales, and of its zeros, in a span. `out` is the dtype of a staged result.
    """
    bm, bn, bk, whole = config.block_m, config.block_n, config.block_k, 8 * operand.itemsize
    tiles = [Tile(bm, bk, whole, config.stages, (Part.LOOP,))]
    tiles += [Tile(bn, bk, bits, config.stages, (Part.LOOP,))] * products
    tiles += [Tile(bn, size, 8, 2, (Part.LOOP,)) for size in factors] * products
    if coded:
        tiles.append(Tile(1, TABLE, whole, parts=(Part.BEFORE, Part.LOOP), bulk=False))
    if operand == torch.float32:
        tiles.append(Tile(bn, bk, whole, parts=(Part.LOOP,), bulk=False))
    if config.staged:
        tiles.append(Tile(bm, bn, 8 * (out or operand).itemsize, parts=(Part.LEAVING,)))
    if config.cluster:
        accum = 8 * compute_dtype(operand).itemsize
        tiles += [Tile(bn, bm, accum, parts=(Part.LEAVING,), bulk=False)] * products
    return Footprint(tuple(tiles), bulk)


def _relative_time(config: Config, problem: Problem, machine: Machine) -> float:
    """Estimate the relative time of all tiles: waves times the rows of a, and what each tile takes besides."""
    tiles = -(-problem.m // config.block_m) * -(-problem.n // config.block_n)
    loss = NARROW_LOSS if config.block_m == NARROW else 0
    return -(-tiles // machine.num_sms) * (config.block_m + WIDENING + loss)
