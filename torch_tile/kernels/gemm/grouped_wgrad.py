# SPDX-License-Identifier: Apache-2.0
"""Weight gradients of grouped products: `a[rows].T @ b[rows]` for each group of rows.

These are the gradients of the matrices of a grouped product (grouped.py), whose sum over K is one over rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import (
    Machine,
    compute_dtype,
    dense_last,
    dynamic,
    entry_function,
    machine_of,
    strided,
    vector_of,
)
from torch_tile.kernels.footprint import Footprint, Part, Tile, most_stages
from torch_tile.kernels.gemm import tiling
from torch_tile.kernels.gemm.args import KGroupedGemmArgs
from torch_tile.kernels.gemm.gemm import tile_of
from torch_tile.kernels.gemm.grouped import groups_of
from torch_tile.kernels.gemm.tiling import MOST_TILES, Config, Problem, buffers_of, config_for, panels_of
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.row_groups import bounds_of


def reference(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute `tile.k_grouped_gemm`, `a[rows of g].T @ b[rows of g]`, in float32 (float64 for float64 `a`)."""
    compute = compute_dtype(a.dtype)
    group, found = groups_of(offsets, a), [a.new_zeros((0, a.shape[1], b.shape[1]), dtype=compute)]
    for g in range(offsets.shape[0]):
        left, right = (torch.where(group == g, x.to(compute), 0.0) for x in (a, b))  # others may be infinite
        found.append((left.mT @ right)[None])
    return torch.cat(found).to(dtype)


@dataclass(frozen=True)
class Spec:
    """Compile-time facts of the kernel: dtypes, and the vector width that divides M, N and all row starts."""

    dtype: torch.dtype
    out_dtype: torch.dtype
    vector: int = 1


@T.macro
def multiply_rows(config: Config, spec: Spec, a: Any, b: Any, offsets: Any, group: Any, row: Any, col: Any) -> Any:
    """Compute one tile of a group's product: whole steps over its rows, then the remaining rows.

    There both operands are zeros behind the group: rows of others may hold what times zero is no zero.
    """
    bm, bn, bk = config.block_m, config.block_n, config.block_k
    first, end = bounds_of(group, offsets, a.shape[0])
    steps = (end - first) // bk
    a_tile, a_last = (T.alloc_shared((bk, bm), spec.dtype) for _ in range(2))
    b_tile, b_last = (T.alloc_shared((bk, bn), spec.dtype) for _ in range(2))
    product = T.alloc_fragment((bm, bn), compute_dtype(spec.dtype))
    T.clear(product)
    for step in T.Pipelined(steps, num_stages=config.stages):
        T.copy(a[first + step * bk, row], a_tile)
        T.copy(b[first + step * bk, col], b_tile)
        T.gemm(a_tile, b_tile, product, transpose_A=True)
    start = first + steps * bk
    if start < end:
        T.copy(a[start, row], a_last)
        T.copy(b[start, col], b_last)
        for i, j in T.Parallel(bk, bm):
            if start + i >= end:
                a_last[i, j] = 0
        for i, j in T.Parallel(bk, bn):
            if start + i >= end:
                b_last[i, j] = 0
        T.gemm(a_last, b_last, product, transpose_A=True)
    return product


def types(spec: Spec) -> tuple[Any, Any, Any, Any, tuple[Any, Any, Any]]:
    """Return the types of a, b, the offsets and the result, and the sizes of the result."""
    rows, groups = T.dynamic("rows, groups")
    m, n = (dynamic(name, spec.vector) for name in "mn")
    a, b = (strided(x, (rows, size), spec.dtype, multiple=spec.vector) for x, size in (("a", m), ("b", n)))
    return a, b, T.Tensor((groups,), "int32"), T.Tensor((groups, m, n), spec.out_dtype), (groups, m, n)


@library_jit
def k_grouped_matmul(config: Config, spec: Spec) -> Any:
    """Build the kernel in which each block makes one tile of a group's product."""
    bm, bn = config.block_m, config.block_n
    a_type, b_type, ends, result, (groups, m, n) = types(spec)

    @T.prim_func
    def k_grouped_gemm(a: a_type, b: b_type, offsets: ends, out: result):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), groups, threads=config.threads) as (bx, by, group):
            product = multiply_rows(config, spec, a, b, offsets, group, by * bm, bx * bn)
            if config.staged:
                staged = T.alloc_shared((bm, bn), spec.out_dtype)
                T.copy(product, staged)
                T.copy(staged, out[group, by * bm, bx * bn])
            else:
                T.copy(product, out[group, by * bm, bx * bn])

    return k_grouped_gemm


@library_jit
def persistent_k_grouped_matmul(config: Config, spec: Spec) -> Any:
    """Build the persistent kernel: `config.blocks` blocks take tile after tile, as in `gemm.persistent_matmul`."""
    bm, bn = config.block_m, config.block_n
    a_type, b_type, ends, result, (groups, m, n) = types(spec)
    panels = panels_of(config, spec.out_dtype.itemsize)

    @T.prim_func
    def k_grouped_gemm(a: a_type, b: b_type, offsets: ends, out: result):
        with T.Kernel(config.blocks, threads=config.threads) as block:
            rows, columns = T.ceildiv(m, bm), T.ceildiv(n, bn)
            staged = [T.alloc_shared((bm, width), spec.out_dtype) for width in buffers_of(panels)]
            tiles = T.min(groups * rows * columns, MOST_TILES)
            for iteration in T.serial(T.ceildiv(tiles - block, config.blocks)):
                group, by, bx = tile_of(block + iteration * config.blocks, rows, columns, config.panel)
                product = multiply_rows(config, spec, a, b, offsets, group, by * bm, bx * bn)
                for start, width, buffer in panels:
                    part = T.alloc_fragment((bm, width), spec.out_dtype)
                    for i, j in T.Parallel(bm, width):
                        part[i, j] = T.cast(product[i, start + j], spec.out_dtype)
                    T.copy(part, staged[buffer])
                    T.copy(staged[buffer], out[group, by * bm, bx * bn + start])

    return k_grouped_gemm


def tiling_for(problem: Problem, machine: Machine) -> Config | None:
    """Choose the tiling for a batch of products with the groups' average rows, and room for the last rows."""
    config = config_for(problem, machine)
    if config is None:
        return None
    config = replace(
        config, splits=1, cluster=False, blocks=0 if config.transposed else config.blocks, transposed=False
    )
    if not machine.is_gpu:
        return config
    bulk = machine.target.has_wgmma and problem.aligned and problem.dtype.itemsize == 2

    def of(stages: int) -> Footprint:
        """Return the tiling with so many stages."""
        return footprint(replace(config, stages=stages), problem.dtype, problem.dtype, bulk)

    stages = most_stages(of, range(config.stages, 0, -1), machine.target)
    return replace(config, stages=stages) if stages else None


def footprint(config: Config, dtype: torch.dtype, out: torch.dtype, bulk: bool) -> Footprint:
    """Compute the shared memory of the tiles of a product and of a group's last rows."""
    product, bits = tiling.footprint(config, dtype, 1, out, bulk), 8 * dtype.itemsize
    lasts = (Tile(config.block_k, n, bits, parts=(Part.LAST,)) for n in (config.block_m, config.block_n))
    return Footprint((*product.tiles, *lasts), bulk)


@entry_function(
    KGroupedGemmArgs,
    reference,
    lambda args: args.a.new_empty((args.offsets.shape[0], args.a.shape[1], args.b.shape[1]), dtype=args.dtype),
)
def k_grouped_gemm(args: KGroupedGemmArgs[torch.Tensor], out: torch.Tensor, config: Config | None = None) -> bool:
    """Compute the products as `reference` does. `config` overrides the choice of `tiling_for`."""
    if not out.numel():
        return True
    if not args.a.shape[0]:  # tensor maps cannot describe tensors without elements
        out.zero_()
        return True
    (groups, m, n), machine = out.shape, machine_of(args.a)
    a, b = dense_last(args.a), dense_last(args.b)
    vector = vector_of((a, b, out), (m, n)) if machine.is_gpu else 1
    problem = Problem(a.dtype, groups, m, n, -(-a.shape[0] // groups), aligned=vector > 1)
    config = config or tiling_for(problem, machine)
    if config is None:
        return False
    kernel = persistent_k_grouped_matmul if config.blocks else k_grouped_matmul
    machine.kernel(kernel)(config, Spec(a.dtype, args.dtype, vector))(a, b, args.offsets.contiguous(), out)
    return True
