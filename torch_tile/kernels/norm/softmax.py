# SPDX-License-Identifier: Apache-2.0
"""Softmax over any one dimension.

Assumes that `ops` checked shapes and dtypes; takes tensors of any stride and returns a fresh contiguous one.
"""

from __future__ import annotations

import math
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import (
    compute_dtype,
    dynamic,
    entry_function,
    is_unit,
    machine_of,
    strided,
    vector_of,
)
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.norm.args import SoftmaxArgs
from torch_tile.kernels.norm.tiling import Config, config_for


def reference(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Compute the softmax of x over `dim` in float32 (float64 for that), rounded once to `dtype` or x's dtype."""
    dtype = x.dtype if dtype is None else dtype
    compute = compute_dtype(torch.promote_types(x.dtype, dtype))
    return torch.softmax(x.to(compute), dim).to(dtype).contiguous()


@library_jit
def softmax_rows(config: Config, dtype: torch.dtype, out_dtype: torch.dtype, unit: bool) -> Any:
    """Build the kernel `out[o, i, :] = softmax(x[o, i, :])`; with `unit`, of rows that are dense in both."""
    compute = compute_dtype(torch.promote_types(dtype, out_dtype))
    rows, width = config.rows, config.width
    outer, inner = T.dynamic("outer, inner")
    n = width if config.exact else dynamic("n", config.vector)
    shape = (outer, inner, n)
    x_type = strided("x", shape, dtype, unit, config.vector)
    out_type = strided("out", shape, out_dtype, unit, config.vector)

    @T.prim_func
    def softmax(x: x_type, out: out_type):
        with T.Kernel(T.ceildiv(inner, rows), outer, threads=config.threads) as (bx, by):
            tile = T.alloc_fragment((rows, width), compute)
            row_max = T.alloc_fragment((rows,), compute)
            old_row_max = T.alloc_fragment((rows,), compute)
            base = T.alloc_fragment((rows,), compute)
            row_sum = T.alloc_fragment((rows,), compute)
            tile_row_sum = T.alloc_fragment((rows,), compute)
            if config.lanes:
                T.annotate_layout({tile: config.layout})
            T.fill(row_max, -T.infinity(compute))
            T.clear(row_sum)

            for step in T.serial(1 if config.whole else T.ceildiv(n, width)):
                for i, j in T.Parallel(rows, width):
                    value = T.cast(x[by, bx * rows + i, step * width + j], compute)
                    inside = config.exact or step * width + j < n
                    tile[i, j] = T.if_then_else(inside, value, -T.infinity(compute))
                T.copy(row_max, old_row_max)
                T.reduce_max(tile, row_max, dim=1, clear=False, nan_propagate=True)
                for i in T.Parallel(rows):
                    base[i] = T.if_then_else(
                        row_max[i] == -T.infinity(compute), 0.0, row_max[i]
                    )  # nothing but -inf so far
                for i, j in T.Parallel(rows, width):
                    tile[i, j] = T.exp(tile[i, j] - base[i])
                T.reduce_sum(tile, tile_row_sum, dim=1)
                for i in T.Parallel(rows):
                    row_sum[i] = row_sum[i] * T.exp(old_row_max[i] - base[i]) + tile_row_sum[i]

            for i in T.Parallel(rows):
                row_sum[i] = 1.0 / row_sum[i]
            if config.whole:
                for i, j in T.Parallel(rows, width):
                    out[by, bx * rows + i, j] = T.cast(tile[i, j] * row_sum[i], out_dtype)
            else:
                for step in T.serial(T.ceildiv(n, width)):
                    for i, j in T.Parallel(rows, width):
                        value = T.cast(x[by, bx * rows + i, step * width + j], compute)
                        part = T.exp(value - base[i]) * row_sum[i]
                        out[by, bx * rows + i, step * width + j] = T.cast(part, out_dtype)

    return softmax


@entry_function(
    SoftmaxArgs,
    reference,
    lambda args: torch.empty_like(args.x, dtype=args.dtype or args.x.dtype, memory_format=torch.contiguous_format),
)
def softmax(args: SoftmaxArgs[torch.Tensor], out: torch.Tensor) -> None:
    """Compute the softmax as `reference` does."""
    if out.numel():
        run(args.x, args.dim, out)


def run(x: torch.Tensor, dim: int, out: torch.Tensor, config: Config | None = None) -> None:
    """Launch `softmax` into `out`, contiguous and not empty. `config` overrides the choice of `config_for`."""
    if x.dim() == 0:
        x, out, dim = x[None], out[None], 0
    dim %= x.dim()
    target = _as_outer_inner_n(out, dim)
    source = _as_outer_inner_n(x, dim)
    source = _as_outer_inner_n(x.contiguous(), dim) if source is None else source
    assert source is not None and target is not None  # contiguous tensors have such views
    unit = is_unit(source) and is_unit(target)
    machine, n = machine_of(x), source.shape[-1]
    vector = vector_of((source, target), (n,)) if machine.is_gpu and unit else 1
    config = config or config_for(n, vector, machine, x.dtype == torch.float64)
    machine.kernel(softmax_rows)(config, x.dtype, out.dtype, unit)(source, target)


def _as_outer_inner_n(x: torch.Tensor, dim: int) -> torch.Tensor | None:
    """View `x` as `[outer, inner, N]`: dimensions before `dim`, after it, and `dim`. None if no view exists."""
    outer, inner = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :])
    if inner == 1:  # let the rows be the inner ones, of which a block takes several
        outer, inner = 1, outer
    try:
        return x.movedim(dim, -1).view(outer, inner, x.shape[dim])
    except (RuntimeError, ValueError):  # the latter of tensors without memory, which Inductor asks for a plan
        return None
