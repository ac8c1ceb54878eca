# SPDX-License-Identifier: Apache-2.0
"""How a product with weights of few bits is cut into blocks. The result never depends on it, only the speed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from torch_tile.kernels.common import Machine, power_of_two, typical
from torch_tile.kernels.gemm_config import BARRIERS, Config as Config
from torch_tile.kernels.tuned import rows_class, tuned

FEW_ROWS = 64  # up to which reading the weights takes longer than multiplying
ROW_BYTES = 128  # of a row of weights that one step takes, where reading them counts
STAGES = 6  # of steps for few rows, where shared memory has room for them


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


def config_for(problem: Problem, machine: Machine) -> Config:
    """The cut of a problem on a machine: `block_m` rows of a, `block_n` of the weights, in steps of `block_k` columns.

    Steps hold whole groups of columns that share a scale, or lie in one.
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


def _gpu_config(problem: Problem, machine: Machine) -> Config:
    """By few rules: exact numbers, few rows, wgmma, mma.sync."""
    if problem.dtype.itemsize > 2:  # exact: no tensor core for float32, one of its own shape for float64
        return Config(32, 64, 32, 128, 2)
    if problem.m <= FEW_ROWS // problem.products:
        return _few_rows(problem, machine)
    if machine.target.capability != 90 or not problem.aligned:
        return Config(64 // problem.products, 128, 64, 128, 3)
    wide = 256 // problem.products
    return min(
        (Config(wide, 128, 64, 256, 4), Config(wide // 2, 128, 64, 256, 5)), key=lambda c: _waves(c, problem, machine)
    )


def _few_rows(problem: Problem, machine: Machine) -> Config:
    """Long rows of weights in each step; where there are few tiles, blocks share the sum.

    Every block reads all of a: with more than 8 rows this is much beside the weights, so blocks take more of those.
    """
    block_m = max(8, power_of_two(problem.m))
    block_n, resident = (64, 2) if block_m == 8 else (128, 1)
    block_k = min(ROW_BYTES * 8 // problem.bits, 256 if block_m == 8 else 128)
    while problem.group and block_k % problem.group and problem.group % block_k:
        block_k //= 2
    stage = (block_m * problem.dtype.itemsize * 8 + block_n * problem.products * problem.bits) * block_k // 8
    stages = min(STAGES, (machine.target.shared_limit // resident - BARRIERS) // stage)
    config = Config(block_m, block_n, block_k, 2 * block_n, stages)
    count = -(-problem.n // block_n)
    splits = min(resident * machine.units // count, problem.k // (4 * block_k), 64)
    return replace(config, splits=splits) if splits > 1 else config


def _waves(config: Config, problem: Problem, machine: Machine) -> float:
    """Time of all tiles, in units of one column of a tile; smaller tiles reuse less of the widened weights."""
    tiles = -(-problem.m // config.block_m) * -(-problem.n // config.block_n)
    return -(-tiles // machine.units) * (config.block_m + 32)
