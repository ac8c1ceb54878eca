# SPDX-License-Identifier: Apache-2.0
"""A cut of a matrix product into blocks, the problem that it is for, and what it takes of a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from torch_tile.kernels.common import Machine

BARRIERS = 1024  # bytes for mbarriers, at most


@dataclass(frozen=True)
class Config:
    """How a product is cut: one block makes `block_m x block_n` of the result, in steps of `block_k`.

    With `splits > 1` so many blocks share the sum over K; a second kernel adds up their parts, or they do it themselves
    as a `cluster`. `panel` is the width, in tiles, of the panels in which GPUs walk the result; `staged` sends it
    through shared memory, so that rows leave in 16-byte pieces. With `blocks` so many blocks take one tile after the
    other, else there is one for each. `turned` makes the product as its transpose, as wgmma takes 64 rows but any 8
    columns.
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
    turned: bool = False


@dataclass(frozen=True)
class Problem:
    """One product: sizes, how many bs share a, whether it is a row times matrices stored `[N, K]`, and whether rows in
    memory are runs of whole 16 bytes. If `ragged`, m is how many rows each of the batch has on average.
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


@dataclass(frozen=True)
class Tile:
    """A cut, how many of its blocks an SM holds at once, and the rate of a full SM relative to the best cut's."""

    config: Config
    resident: int
    rate: float


def stage_bytes(config: Config, problem: Problem) -> int:
    """Shared memory of the operands of one step over K."""
    return (config.block_m + config.block_n * problem.products) * config.block_k * problem.dtype.itemsize


def count_of(config: Config, problem: Problem) -> int:
    """How many tiles the result has; of ragged rows each last tile is half empty."""
    rows = problem.batch * -(-problem.m // config.block_m)
    if problem.ragged:
        rows = -(-problem.batch * (2 * problem.m + config.block_m) // (2 * config.block_m))
    return rows * -(-problem.n // config.block_n)


def with_room(config: Config, problem: Problem, machine: Machine) -> Config:
    """As many stages as fit in shared memory."""
    room = machine.target.shared_limit // stage_bytes(config, problem)
    return replace(config, stages=max(1, min(config.stages, room)))


def fitting(tiles: Iterable[Tile], problem: Problem, machine: Machine) -> list[Tile]:
    """The tiles whose products fit in the registers, with as many stages as fit in shared memory."""
    found = []
    for tile in tiles:
        c = tile.config
        registers = c.block_m * c.block_n * problem.products * (2 if problem.dtype == torch.float64 else 1) // c.threads
        stages = min(c.stages, machine.target.shared_limit // stage_bytes(c, problem))
        if registers <= 128 and stages >= 1:
            found.append(replace(tile, config=replace(c, stages=stages)))
    return found
