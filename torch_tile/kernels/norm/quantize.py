# SPDX-License-Identifier: Apache-2.0
"""Rounding of rows, or of runs of their columns, to float8 with a scale each.

Assumes that `ops` checked shapes and dtypes; takes tensors of any stride and returns fresh contiguous ones.
"""

from __future__ import annotations

from typing import Any

import torch

import torch_tile.language as T
from torch_tile.jit import jit
from torch_tile.kernels.common import (
    as_rows,
    compute_dtype,
    dynamic,
    has_kernels,
    into,
    machine_of,
    strided,
    vector_of,
)
from torch_tile.kernels.norm.tiling import Config, config_for

LEAST = 2.0**-100  # what counts as the largest magnitude of a run of zeros
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def runs_of(columns: int, group: int) -> int:
    """Return how many runs of `group` columns a row has; 0 stands for whole rows, the last run may be shorter."""
    return -(-columns // group) if group else 1


def reference(x: torch.Tensor, group: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the values `x / scale` rounded to `dtype`, and the scales: the largest magnitude of each run of `group`
    columns (0: all) over the largest number of `dtype`.

    x `[..., K]`. Returns `[..., K]` and float32 `[..., K / group]`, rounded up.
    """
    wide, largest = x.to(compute_dtype(x.dtype)), LARGEST[dtype]
    runs = runs_of(x.shape[-1], group)
    width = group or x.shape[-1]
    padded = torch.nn.functional.pad(wide, (0, runs * width - x.shape[-1])).reshape(*x.shape[:-1], runs, width)
    scales = (padded.abs().amax(-1).clamp_min(LEAST) / largest).to(torch.float32)
    values = (padded * (1.0 / scales)[..., None]).clamp(-largest, largest)
    values = values.reshape(*x.shape[:-1], runs * width)[..., : x.shape[-1]]
    return values.to(dtype).contiguous(), scales


@jit
def quantize_rows(config: Config, dtype: torch.dtype, out_dtype: torch.dtype) -> Any:
    """Build the kernel `out[o, i, :], scales[o, i] = x[o, i, :] / scale, scale`."""
    compute, largest = compute_dtype(dtype), LARGEST[out_dtype]
    rows, width = config.rows, config.width
    outer, inner = T.dynamic("outer, inner")
    n = width if config.exact else dynamic("n", config.vector)
    x_type = strided("x", (outer, inner, n), dtype, multiple=config.vector)
    out_type = strided("out", (outer, inner, n), out_dtype, multiple=config.vector)
    scales_type = strided("scales", (outer, inner), torch.float32, False)

    @T.prim_func
    def quantize_fp8(x: x_type, out: out_type, scales: scales_type):
        with T.Kernel(T.ceildiv(inner, rows), outer, threads=config.threads) as (bx, by):
            tile = T.alloc_fragment((rows, width), compute)
            most = T.alloc_fragment((rows,), compute)
            if config.lanes:
                T.annotate_layout({tile: config.layout})
            T.fill(most, LEAST)
            for step in T.serial(1 if config.whole else T.ceildiv(n, width)):
                for i, j in T.Parallel(rows, width):
                    value = T.cast(x[by, bx * rows + i, step * width + j], compute)
                    inside = config.exact or step * width + j < n
                    tile[i, j] = T.if_then_else(inside, value, 0.0)
                T.reduce_absmax(tile, most, dim=1, clear=False, nan_propagate=True)
            for i in T.Parallel(rows):
                most[i] = most[i] / largest
                scales[by, bx * rows + i] = T.cast(most[i], "float32")
                most[i] = 1.0 / T.cast(T.cast(most[i], "float32"), compute)
            if config.whole:
                for i, j in T.Parallel(rows, width):
                    out[by, bx * rows + i, j] = rounded(tile[i, j] * most[i], out_dtype)
            else:
                for step in T.serial(T.ceildiv(n, width)):
                    for i, j in T.Parallel(rows, width):
                        value = T.cast(x[by, bx * rows + i, step * width + j], compute)
                        out[by, bx * rows + i, step * width + j] = rounded(value * most[i], out_dtype)

    return quantize_fp8


def rounded(value: Any, dtype: torch.dtype) -> Any:
    """Round a value to float8, clamped to its largest number. NaN stays NaN."""
    largest = LARGEST[dtype]
    return T.cast(T.minimum(T.maximum(value, -largest), largest), dtype)


def quantize_fp8(
    x: torch.Tensor,
    group: int,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute values and scales as `reference` does. `out` and `scales` may be given, contiguous."""
    if not has_kernels(x):
        made = reference(x, group, dtype)
        return into(out, made[0]), into(scales, made[1])
    columns = x.shape[-1]
    runs = runs_of(columns, group)
    if out is None:
        out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    if scales is None:
        scales = x.new_empty((*x.shape[:-1], runs), dtype=torch.float32)
    if not out.numel():
        scales.fill_(LEAST / LARGEST[dtype])
        return out, scales
    rows, values, factors = as_rows(x), out.view(-1, columns), scales.view(-1, runs)
    whole = columns // group if group else 0
    if whole * group < columns:  # whole rows, or a last run that is shorter
        run(rows[:, None, whole * group :], values[:, None, whole * group :], factors[:, whole:])
    if whole:
        parts, pieces = (t[:, : whole * group].unflatten(1, (whole, group)) for t in (rows, values))
        run(parts, pieces, factors[:, :whole])
    return out, scales


def run(x: torch.Tensor, out: torch.Tensor, scales: torch.Tensor, config: Config | None = None) -> None:
    """Launch the quantisation of the rows of x `[outer, inner, n]`, which is not empty. `config` overrides the choice
    of `config_for`.
    """
    if x.shape[1] == 1:  # let the rows be the inner ones, of which a block takes several
        x, out, scales = (t.transpose(0, 1) for t in (x, out, scales))
    machine, n = machine_of(x), x.shape[-1]
    vector = vector_of((x, out), (n,)) if machine.is_gpu else 1
    config = config or config_for(n, vector, machine, x.dtype == torch.float64)
    machine.kernel(quantize_rows)(config, x.dtype, out.dtype)(x, out, scales)
