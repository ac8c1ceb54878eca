# SPDX-License-Identifier: Apache-2.0
"""Products of groups of rows with matrices stored in few bits: each group has its own, as experts have.

Tiles are those of row_groups.py, and each is summed as dequant.py sums its tiles. Assumes that `ops` checked shapes and
dtypes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import Machine, compute_dtype, entry_function, machine_of, typical
from torch_tile.kernels.gemm.args import GroupedDequantGemmArgs
from torch_tile.kernels.gemm.dequant import (
    multiply,
    prepare,
    spans_of,
    together,
    widened_matrices,
    with_copied_factors,
)
from torch_tile.kernels.gemm.dequant_rules import config_for
from torch_tile.kernels.gemm.grouped import average, by_groups, finished, groups_of
from torch_tile.kernels.gemm.packed import Problem, Spec, finish
from torch_tile.kernels.gemm.tiling import Config
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.row_groups import END, FIELDS, FIRST, GROUP, most_tiles, plan


def reference(*given: Any, **named: Any) -> torch.Tensor:
    """Compute `tile.grouped_dequant_gemm` with w by `dequantize`, in float32 (float64 for float64 `a`)."""
    args: GroupedDequantGemmArgs[torch.Tensor] = GroupedDequantGemmArgs(*given, **named)
    a, compute = args.a, compute_dtype(args.a.dtype)
    group = groups_of(args.offsets, a)

    def terms(g: int) -> list[torch.Tensor]:
        return [a.to(compute) @ w.mT for w in widened_matrices(args.dense, compute, g)]

    products = by_groups(group, a, args.bs[0].shape[1], len(args.bs), args.offsets.shape[0], terms)
    return finished(products, group, args.aux, args.kinds, args.epilogue).to(args.dtype)


@library_jit
def grouped_dequant_matmul(config: Config, spec: Spec) -> Any:
    """Build the kernel `out = epilogue(a @ w0[group]^T, ..., aux)`, a tile a block, those of a weight in a row."""
    bm, bn = config.block_m, config.block_n
    groups, tiles = T.dynamic("matrices, tiles")
    m, n, k, a_type, types = spec.types(groups)

    @T.prim_func
    def grouped_dequant_gemm(
        a: a_type,
        *operands: types,
        offsets: T.Tensor((groups,), "int32"),
        table: T.Tensor((tiles, FIELDS), "int32"),
        out: T.Tensor((m, n), spec.product.out_dtype),
    ):
        plan(offsets, table, m, bm)
        with T.Kernel(tiles, T.ceildiv(n, bn), threads=config.threads) as (tile, bx):
            group, first, end = table[tile, GROUP], table[tile, FIRST], table[tile, END]
            spans = T.if_then_else(group < groups, spans_of(config, spec, k), 0)
            matrix = (T.clamp(group, 0, groups - 1),)
            products = multiply(config, spec, a, operands, first, bx * bn, 0, spans, matrix)
            for i, j in T.Parallel(bm, bn):
                if first + i < end:
                    col = bx * bn + j
                    values = [p[j, i] for p in products]
                    out[first + i, col] = finish(spec, values, operands, first + i, col, (group,))

    return grouped_dequant_gemm


@entry_function(
    GroupedDequantGemmArgs,
    reference,
    lambda args: args.a.new_empty((args.a.shape[0], args.bs[0].shape[1]), dtype=args.dtype),
)
def grouped_dequant_gemm(
    args: GroupedDequantGemmArgs[torch.Tensor], out: torch.Tensor, config: Config | None = None
) -> bool:
    """Compute the product as `reference` does. `config` overrides the choice of `tiling_for`."""
    a, offsets, groups = args.a, args.offsets, args.offsets.shape[0]
    if not a.shape[1] or not groups:
        return False
    if not out.numel():
        return True
    machine = machine_of(a)
    spec, problem, tensors = prepare(args.dense, machine)
    config = config or tiling_for(problem, groups, machine)
    if config is None:
        return False
    spec, tensors = together(spec, tensors, config)
    spec = with_copied_factors(spec, tensors, config, machine)
    table = offsets.new_empty((most_tiles(out.shape[0], groups, config.block_m), FIELDS))
    machine.kernel(grouped_dequant_matmul)(config, spec)(*tensors, offsets.contiguous(), table, out)
    return True


def tiling_for(problem: Problem, groups: int, machine: Machine) -> Config | None:
    """Choose the tiling for the groups' average number of rows, with columns of all groups. Sums are not shared: groups
    are many. None if there is no tiling.
    """
    problem = typical(problem)
    groups, rows = average(groups, problem.m)
    config = config_for(replace(problem, m=rows, n=groups * problem.n, grouped=True), machine)
    return None if config is None else replace(config, splits=1, cluster=False, shared=1, staged=False)
