# SPDX-License-Identifier: Apache-2.0
"""Products of float8 matrices with scales, for groups of rows: each group has its own matrix, as experts have.

Tiles are those of row_groups.py, and each is summed as scaled.py sums its tiles. Assumes that `ops` checked shapes and
dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import Machine, compute_dtype, entry_function, machine_of, typical
from torch_tile.kernels.gemm.args import GroupedScaledGemmArgs
from torch_tile.kernels.gemm.grouped import average, by_groups, finished, groups_of
from torch_tile.kernels.gemm.scaled import (
    GROUP,
    Piece,
    Problem,
    Spec,
    can_be_timed,
    config_for,
    fetch_whole_scales,
    leave,
    multiply,
    panels_of_pieces,
    prepare,
    spread,
    staging_of,
)
from torch_tile.kernels.gemm.tiling import Config
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.row_groups import END, FIELDS, FIRST, GROUP as MATRIX, most_tiles, plan


def reference(*given: Any, **named: Any) -> torch.Tensor:
    """Compute `tile.grouped_scaled_gemm` in float32 (float64 for float64 `a`), rounded once."""
    args: GroupedScaledGemmArgs[torch.Tensor] = GroupedScaledGemmArgs(*given, **named)
    compute, (rows, k), n = compute_dtype(args.a.dtype), args.a.shape, args.b.shape[2]
    wide, group = args.a.to(compute) * spread(args.scale_a.to(compute), rows, k), groups_of(args.offsets, args.a)

    def terms(g: int) -> list[torch.Tensor]:
        return [wide @ (args.b[g].to(compute) * spread(args.scale_b[g].to(compute), k, n))]

    products = by_groups(group, wide, n, 1, args.offsets.shape[0], terms)
    return finished(products, group, args.aux, args.kinds, args.epilogue).to(args.dtype)


@T.macro
def tile_of_group(
    config: Config,
    spec: Spec,
    a: Any,
    operands: Sequence[Any],
    offsets: Any,
    table: Any,
    buffers: Sequence[Any],
    out: Any,
    tile: Any,
    pieces: Sequence[Piece],
) -> None:
    """Compute and store a tile of the plan, in the columns of `pieces`."""
    groups = offsets.shape[0]
    group, first, end = table[tile, MATRIX], table[tile, FIRST], table[tile, END]
    steps = T.if_then_else(group < groups, T.ceildiv(a.shape[1], GROUP), 0)
    matrix = (T.clamp(group, 0, groups - 1),)
    ends = fetch_whole_scales(config, spec, operands, first, pieces, matrix)
    product = multiply(config, spec, a, operands, first, pieces, steps, matrix)
    leave(config, spec, product, ends, operands, buffers, out, first, pieces, end, (group,))


@library_jit
def grouped_scaled_matmul(config: Config, spec: Spec) -> Any:
    """Build the kernel `out = epilogue((a * scale_a) @ (b * scale_b)[group], aux)`; b is stored `[G, N, K]`."""
    bm, bn = config.block_m, config.block_n
    groups, tiles = T.dynamic("matrices, tiles")
    m, n, _, types = spec.types(groups)

    @T.prim_func
    def grouped_scaled_gemm(
        a: types[0],
        *operands: types[1:],
        offsets: T.Tensor((groups,), "int32"),
        table: T.Tensor((tiles, FIELDS), "int32"),
        out: T.Tensor((m, n), spec.product.out_dtype),
    ):
        plan(offsets, table, m, bm)
        with T.Kernel(T.ceildiv(n, bn), tiles, threads=config.threads) as (bx, tile):
            if config.panel:
                T.use_swizzle(config.panel)
            buffers = staging_of(config, panels_of_pieces(config, spec), spec.product.out_dtype)
            pieces = spec.columns(config, bx, T.ceildiv(n, bn))
            tile_of_group(config, spec, a, operands, offsets, table, buffers, out, tile, pieces)

    return grouped_scaled_gemm


@entry_function(
    GroupedScaledGemmArgs,
    reference,
    lambda args: args.a.new_empty((args.a.shape[0], args.b.shape[2]), dtype=args.dtype),
)
def grouped_scaled_gemm(
    args: GroupedScaledGemmArgs[torch.Tensor], out: torch.Tensor, config: Config | None = None
) -> bool:
    """Compute the product as `reference` does. `config` overrides the choice of `tiling_for`."""
    a, offsets, groups = args.a, args.offsets, args.offsets.shape[0]
    if not a.shape[1] or not groups:
        return False
    if not out.numel():
        return True
    machine = machine_of(a)
    spec, problem, tensors = prepare(args.dense, machine, out, partial(as_one_product, groups))
    config = config or tiling_for(problem, groups, machine)
    table = offsets.new_empty((most_tiles(out.shape[0], groups, config.block_m), FIELDS))
    machine.kernel(grouped_scaled_matmul)(config, spec)(*tensors, offsets.contiguous(), table, out)
    return True


# Tilings. They change the speed, never the result. Each tile was timed with groups of 4 to 1024 rows on an H200.

PANEL = 8  # tiles below each other that run together
LOW, WIDE, HIGH = Config(64, 192, GROUP, 128, 5), Config(128, 192, GROUP, 256, 4), Config(192, 128, GROUP, 384, 4)
WIDER = 1.04  # time of a step of WIDE by one of HIGH, which has as many elements
FEW_ROWS = 96  # of a group, up to which reading its matrix takes longer than multiplying


def as_one_product(groups: int, problem: Problem) -> Problem:
    """Return a product of the groups' average number of rows, with columns of all groups.

    It has more rows than LOW, as times are known for such products only.
    """
    groups, rows = average(groups, problem.m)
    return replace(problem, m=max(rows, LOW.block_m + 1), n=groups * problem.n)


def tiling_for(problem: Problem, groups: int, machine: Machine) -> Config:
    """Choose the tiling for the groups' average number of rows, with columns of all groups.

    Tiles below each other run together: else each row of tiles would read its group's whole matrix again.
    """
    problem = typical(problem)
    groups, rows = average(groups, problem.m)
    config = None
    if can_be_timed(problem, machine):
        if problem.runs and problem.blocks:
            config = LOW if rows <= LOW.block_m else _wider_or_higher(groups, rows, problem, machine)
        else:
            few = rows <= FEW_ROWS
            config = (WIDE if few else HIGH) if problem.runs else (LOW if few else WIDE)
        tiles = groups * -(-rows // config.block_m) * -(-problem.n // config.block_n)
        config = replace(config, staged=True) if 2 * tiles > machine.num_sms else None
    if config is None:
        config = config_for(replace(problem, m=rows, n=groups * problem.n, staged=False), machine)
    together = config.staged or (machine.is_gpu and rows > config.block_m)
    return replace(config, panel=PANEL if together else 0)


def _wider_or_higher(groups: int, rows: int, problem: Problem, machine: Machine) -> Config:
    """Return WIDE or HIGH, whichever takes less time for groups of about `rows` rows."""

    def waves(config: Config) -> int:
        """Count waves. Half of the groups have more rows than the average, by its square root."""
        high = sum(-(-most // config.block_m) for most in (rows, rows + math.isqrt(rows)))
        return -(-groups * high * -(-problem.n // config.block_n) // (2 * machine.num_sms))

    return WIDE if WIDER * waves(WIDE) < waves(HIGH) else HIGH
