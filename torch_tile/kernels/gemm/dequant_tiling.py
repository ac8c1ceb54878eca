# SPDX-License-Identifier: Apache-2.0
"""How a product with weights of few bits is cut into blocks. The result never depends on it, only the speed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from torch_tile.kernels.common import Machine, power_of_two, typical
from torch_tile.kernels.gemm.candidates import BARRIERS, Config as Config
from torch_tile.kernels.gemm.few_rows import MOST_JOINED
from torch_tile.kernels.tuned import rows_class, tuned

FEW_ROWS = 64  # up to which reading the weights takes longer than multiplying
ROW_BYTES = {8: 256, 16: 128}  # of a row of weights that one step takes, by rows of a; for more rows MANY_COLUMNS
MOST_COLUMNS, MANY_COLUMNS = 512, 128  # of a step: for few rows of a, and for more than 16
MOST_GROUPS = 4  # of columns with a scale each in a step: each has sums of its own
LEAST_COLUMNS = 64  # of a step, whatever groups are
LEAST_SHARE, LONGEST_SHARE = 512, 4096  # columns that a block of a cluster sums up
LONG_K = 8192  # columns, from which long steps pay where no sums are shared
MOST_SUMS = 128  # of a thread
MOST_PRODUCTS = 4  # of more than few rows, for which weights that are widened take registers, too
LEAST_STAGES = 3  # of steps for few rows, with which two blocks may share a multiprocessor's memory


@dataclass(frozen=True)
class Problem:
    """One product: dtype of a, sizes, how many bs share a, bits of a weight, how many columns share a scale (0: all),
    and whether rows in memory are runs of whole 16 bytes.
    """

    dtype: torch.dtype
    m: int
    n: int
    k: int
    products: int
    bits: int
    group: int
    aligned: bool


def config_for(problem: Problem, machine: Machine) -> Config | None:
    """The cut of a problem on a machine: `block_m` rows of a, `block_n` of the weights, in steps of `block_k` columns.

    Steps hold whole groups of columns that share a scale, or lie in one. None for so many products that not even the
    smallest tiles fit.
    """
    problem = typical(problem)
    if not machine.is_gpu:
        return Config(min(max(8, power_of_two(problem.m)), 64), 64, 64, stages=0)
    return tuned(Config, "dequant", machine, shape_class(problem)) or _gpu_config(problem, machine)


def shape_class(problem: Problem) -> str | None:
    """Problems that are cut alike; None for operands that are not tuned for."""
    if problem.dtype.itemsize != 2 or not problem.aligned:
        return None
    bits = f"{problem.bits} bits by {problem.group}"
    return f"{problem.products}*{rows_class(problem.m)}x{problem.n}x{problem.k} {bits}"


def _gpu_config(problem: Problem, machine: Machine) -> Config | None:
    config = _by_rules(problem, machine)
    if config is None:
        return None
    stages = min(config.stages, _stages(config, problem, machine))
    sums = config.block_m * config.block_n * problem.products * max(1, problem.dtype.itemsize // 4) // config.threads
    return replace(config, stages=stages) if stages > 0 and sums <= MOST_SUMS else None


def _by_rules(problem: Problem, machine: Machine) -> Config | None:
    """By few rules: exact numbers, few rows, wgmma, mma.sync."""
    if problem.dtype.itemsize > 2:  # exact: no tensor core for float32, one of its own shape for float64
        return Config(32, 64, 32, 128, 2)
    products = power_of_two(problem.products)  # among which rows and columns are shared out
    if problem.m <= FEW_ROWS // products:
        return _few_rows(problem, machine)
    if products > MOST_PRODUCTS:
        return None
    if not machine.target.has_wgmma or not problem.aligned:
        return Config(64 // products, 128, 64, 128, 3)
    wide = 256 // products
    columns = _columns(MANY_COLUMNS // products, problem)  # weights under way stay in registers
    cuts = [Config(rows, 128, columns, 256) for rows in (wide, wide // 2)]
    best = min(cuts, key=lambda c: _waves(c, problem, machine))
    return replace(best, stages=4)


def _few_rows(problem: Problem, machine: Machine) -> Config:
    """Long rows of weights in each step; where there are few tiles, they are smaller and blocks share the sum."""
    block_m, clusters = max(8, power_of_two(problem.m)), machine.target.has_clusters
    fills = -(-problem.n // 128) * 5 >= machine.units * 3
    if clusters and not fills and (found := _in_clusters(block_m, problem, machine)) is not None:
        return found
    block_n, resident = (128, 1) if fills or clusters or block_m > 8 else (64, 2)
    columns = ROW_BYTES.get(block_m, 128) * 8 // problem.bits
    long = block_m == 8 and fills and problem.group > 0 and problem.bits >= 4 and problem.k >= LONG_K
    columns = MOST_COLUMNS if long else min(columns, MANY_COLUMNS if block_m > 16 else 256)
    columns //= max(1, power_of_two(problem.products) // 2)  # words of all products are in registers
    config = Config(block_m, block_n, _columns(columns, problem), 2 * block_n)
    while not _stages(config, problem, machine) and config.block_k > LEAST_COLUMNS // 4:
        config = replace(config, block_k=config.block_k // 2)
    most = _stages(config, problem, machine)
    stages = most if most < 2 * LEAST_STAGES else most // 2
    config = replace(config, stages=min(stages, 2 if long else 4) if block_m == 8 else stages)
    count = -(-problem.n // block_n)
    splits = min(resident * machine.units // count, problem.k // (4 * config.block_k), 64)
    return replace(config, splits=splits) if splits > 1 else config


def _in_clusters(block_m: int, problem: Problem, machine: Machine) -> Config | None:
    """Blocks of a cluster share the sums over K of 64 rows of the weights; None where their shares would be too long.

    Two blocks on each SM where shares stay long enough, else one. Measured on an H200.
    """
    if block_m > 16 or problem.products > 1 or not problem.aligned:
        return None
    count, splits = -(-problem.n // 64), 1
    while splits < MOST_JOINED and problem.k // (2 * splits) >= LEAST_SHARE:
        if 2 * splits * count > machine.units * (1 if problem.k // (2 * splits) < LONGEST_SHARE else 2):
            break
        splits *= 2
    share, alone = problem.k // splits, splits * count <= machine.units
    if share > LONGEST_SHARE:
        return None
    long = alone and problem.group > 0 and share >= LONG_K // 4
    columns = MOST_COLUMNS * 4 // problem.bits if long and problem.bits >= 4 else 256
    config = Config(block_m, 64, _columns(columns, problem), 128, splits=splits, cluster=splits > 1)
    stages = 4 if alone or block_m * problem.bits > 64 else 2
    return replace(config, stages=min(stages, _stages(config, problem, machine)))


def _columns(most: int, problem: Problem) -> int:
    """Columns of a step: whole groups that share a scale, not too many, or a part of one."""
    group = problem.group
    block_k = min(most, max(LEAST_COLUMNS, MOST_GROUPS * power_of_two(group))) if group else most
    while group and block_k % group and group % block_k:
        block_k //= 2
    return block_k


def _stages(config: Config, problem: Problem, machine: Machine) -> int:
    """Of how many steps a block's shared memory has room for the operands."""
    bits = config.block_m * problem.dtype.itemsize * 8 + config.block_n * problem.products * problem.bits
    return (machine.target.shared_limit - BARRIERS) // (bits * config.block_k // 8)


def _waves(config: Config, problem: Problem, machine: Machine) -> float:
    """Time of all tiles, in units of one column of a tile; smaller tiles reuse less of the widened weights."""
    tiles = -(-problem.m // config.block_m) * -(-problem.n // config.block_n)
    return -(-tiles // machine.units) * (config.block_m + 32)
