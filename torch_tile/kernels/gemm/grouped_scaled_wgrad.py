# SPDX-License-Identifier: Apache-2.0
"""Products of float8 matrices with scales, summed over a run of columns for each group: `a[:, g] @ b[g]`.

These are the gradients of experts' matrices: K counts tokens, and both operands are stored with tokens along their
rows, as tensor cores want float8. Each tile is summed as scaled.py sums its tiles. Assumes that `ops` checked shapes
and dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import Machine, compute_dtype, dynamic, entry_function, machine_of, typical
from torch_tile.kernels.footprint import Footprint, Part, Tile, most_stages
from torch_tile.kernels.gemm import scaled
from torch_tile.kernels.gemm.args import KGroupedScaledGemmArgs, ScaledGemmArgs
from torch_tile.kernels.gemm.grouped import average, groups_of
from torch_tile.kernels.gemm.scaled import GROUP, Ends, Piece, Problem, WholeScales, config_for, spread, staging_of
from torch_tile.kernels.gemm.tiling import Config, panels_of
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.row_groups import bounds_of

START = 16  # columns of float8 at a multiple of which bulk copies start


def reference(*given: Any, **named: Any) -> torch.Tensor:
    """Compute `tile.k_grouped_scaled_gemm` in float32 (float64 for float64 `a`), rounded once."""
    args: KGroupedScaledGemmArgs[torch.Tensor] = KGroupedScaledGemmArgs(*given, **named)
    compute, (m, k), n, count = compute_dtype(args.a.dtype), args.a.shape, args.b.shape[1], args.offsets.shape[0]
    group, found = groups_of(args.offsets, args.b), [args.a.new_zeros((0, m, n), dtype=compute)]
    for g in range(count):
        own = (scale.to(compute)[min(g, scale.shape[0] - 1)] for scale in (args.scale_a, args.scale_b))
        left, right = (spread(scale, *size) for scale, size in zip(own, ((m, k), (k, n)), strict=True))
        a = torch.where(group.mT == g, args.a.to(compute) * left, 0.0)  # others may be infinite
        found.append((a @ torch.where(group == g, args.b.to(compute) * right, 0.0))[None])
    return torch.cat(found).to(args.dtype)


@dataclass(frozen=True)
class Spec:
    """Compile-time facts of the kernel: those of one product, and which operand's scales differ between groups."""

    product: scaled.Spec
    own: tuple[bool, bool]

    def types(self) -> tuple[tuple[Any, Any, Any], list[Any]]:
        """Return groups, m and n of a problem, and the types of a, b and their scales."""
        m, n, _, (a, b, *_) = self.product.types()
        scales = [
            kind.type(name, *([] if kind.grouped else [dynamic(f"{name}_matrices")]))
            for name, kind in zip(("scale_a", "scale_b"), self.product.scales, strict=True)
        ]
        return (T.dynamic("groups"), m, n), [a, b, *scales]


@T.macro
def ends_of(config: Config, spec: Spec, operands: Sequence[Any], group: Any, row: Any, col: Any) -> Any:
    """Begin to load the scales of a tile that do not change along a group's columns."""
    found = []
    for number, (start, rows) in enumerate(((row, config.block_m), (col, config.block_n))):
        kind, matrix = spec.product.scales[number], (group if spec.own[number] else 0,)
        whole = None if kind.grouped else WholeScales(kind, operands[1 + number], start, rows, matrix, number == 1)
        found.append(whole)
    return Ends(*found)


@T.macro
def multiply_columns(
    config: Config, spec: Spec, a: Any, operands: Sequence[Any], offsets: Any, group: Any, row: Any, col: Any
) -> Any:
    """Compute one tile of a group's product: whole steps over its columns, then the columns before and behind them.

    Bulk copies start at multiples of `START` columns, groups anywhere. In the last steps both operands are zeros
    outside of the group: columns of others may hold what times zero is no zero.
    """
    bm, bn = config.block_m, config.block_n
    first, end = bounds_of(group, offsets, a.shape[1])
    begin = T.ceildiv(first, START) * START
    steps = T.max(end - begin, 0) // GROUP
    product = scaled.multiply(config, spec.product, a, operands, row, [Piece(0, bn, col)], steps, (), begin)
    b, *scales = operands
    a_last, b_last = (T.alloc_shared((x, GROUP), of) for x, of in zip((bm, bn), spec.product.operands, strict=True))
    part = T.alloc_fragment((bm, bn), spec.product.sums)
    for piece in T.serial(2):
        low = T.if_then_else(piece == 0, first, begin + steps * GROUP)
        high = T.if_then_else(piece == 0, T.min(begin, end), end)
        start = low // START * START
        if low < high:
            T.copy(a[row, start], a_last)
            T.copy(b[col, start], b_last)
            for tile, rows in ((a_last, bm), (b_last, bn)):
                for i, c in T.Parallel(rows, GROUP):
                    if start + c < low or start + c >= high:
                        tile[i, c] = 0
            T.gemm(a_last, b_last, part, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(bm, bn):
                value = part[i, j]
                for kind, scale, place in zip(spec.product.scales, scales, (row + i, col + j), strict=True):
                    if kind.grouped:
                        value = value * scale[kind.place(place, start // GROUP)]
                product[i, j] += value
    return product


@library_jit
def k_grouped_scaled_matmul(config: Config, spec: Spec) -> Any:
    """Build the kernel in which each block makes one tile of a group's product; b is stored `[N, K]`."""
    bm, bn, dtype = config.block_m, config.block_n, spec.product.product.out_dtype
    panels = panels_of(config, dtype.itemsize)
    (groups, m, n), types = spec.types()

    @T.prim_func
    def k_grouped_scaled_gemm(
        a: types[0], *operands: types[1:], offsets: T.Tensor((groups,), "int32"), out: T.Tensor((groups, m, n), dtype)
    ):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), groups, threads=config.threads) as (bx, by, group):
            buffers = staging_of(config, panels, dtype)
            row, col = by * bm, bx * bn
            ends = ends_of(config, spec, operands, group, row, col)
            product = multiply_columns(config, spec, a, operands, offsets, group, row, col)
            ends.share()
            for i, j in T.Parallel(bm, bn):
                product[i, j] = ends.scaled(product[i, j], i, j)
            if buffers:
                for start, width, number in panels:
                    result = T.alloc_fragment((bm, width), dtype)
                    for i, j in T.Parallel(bm, width):
                        result[i, j] = T.cast(product[i, start + j], dtype)
                    T.copy(result, buffers[number])
                    T.copy(buffers[number], out[group, row, col + start])
            else:
                T.copy(product, out[group, row, col])

    return k_grouped_scaled_gemm


@entry_function(
    KGroupedScaledGemmArgs,
    reference,
    lambda args: args.a.new_empty((args.offsets.shape[0], args.a.shape[0], args.b.shape[1]), dtype=args.dtype),
)
def k_grouped_scaled_gemm(
    args: KGroupedScaledGemmArgs[torch.Tensor], out: torch.Tensor, config: Config | None = None
) -> bool:
    """Compute the products as `reference` does. `config` overrides the choice of `tiling_for`."""
    if not out.numel():
        return True
    if not args.a.shape[1]:  # tensor maps cannot describe tensors without elements
        out.zero_()
        return True
    machine = machine_of(args.a)
    # Scales of runs are those of all groups.
    scale_a = args.scale_a[0] if args.scale_a.shape[2] > 1 else args.scale_a
    scale_b = args.scale_b[0] if args.scale_b.shape[1] > 1 else args.scale_b
    dense = ScaledGemmArgs(args.a, args.b, scale_a, scale_b, [], "", "", args.dtype)
    groups = args.offsets.shape[0]
    product, problem, tensors = scaled.prepare(dense, machine, out, partial(as_one_product, groups))
    own = args.scale_a.shape[0] > 1, args.scale_b.shape[0] > 1
    config = config or tiling_for(problem, product, groups, machine)
    kernel = machine.kernel(k_grouped_scaled_matmul)(config, Spec(product, own))
    kernel(*tensors, args.offsets.contiguous(), out)
    return True


def as_one_product(groups: int, problem: Problem) -> Problem:
    """Return a product of the groups' average number of columns of a, with tiles of all groups."""
    groups, columns = average(groups, problem.k)
    return replace(problem, k=columns, n=groups * problem.n)


def tiling_for(problem: Problem, spec: scaled.Spec, groups: int, machine: Machine) -> Config:
    """Choose the tiling for the groups' average number of columns, with tiles of all groups."""
    one = as_one_product(groups, typical(problem))
    config = replace(config_for(one, machine), blocks=0, panel=0)
    if not machine.is_gpu:
        return config
    bulk = machine.target.has_wgmma and problem.aligned

    def of(stages: int) -> Footprint:
        """Compute the footprint with so many stages."""
        return footprint(replace(config, stages=stages), spec, bulk)

    return replace(config, stages=most_stages(of, range(config.stages, 0, -1), machine.target))


def footprint(config: Config, spec: scaled.Spec, bulk: bool) -> Footprint:
    """Compute the shared memory of the tiles of a product and of a group's last columns."""
    of_operands = zip((config.block_m, config.block_n), spec.operands, strict=True)
    lasts = (Tile(rows, GROUP, 8 * dtype.itemsize, parts=(Part.LAST,)) for rows, dtype in of_operands)
    return Footprint((*scaled.footprint(config, spec, bulk).tiles, *lasts), bulk)
