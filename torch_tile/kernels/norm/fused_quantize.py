# SPDX-License-Identifier: Apache-2.0
"""A fused norm whose result is rounded to float8 or int8 with scales, without a store of the result between.

Values and scales are those of quantize.py for the result of fused.py, which is rounded to its dtype first. Rows that no
block holds at once are left to these two kernels. Assumes that `ops` checked shapes and dtypes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import compute_dtype, dynamic, entry_function, machine_of, strided, vector_of
from torch_tile.kernels.epilogue.canonicalize import canonical
from torch_tile.kernels.epilogue.emit import apply
from torch_tile.kernels.epilogue.program import parse
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.norm import fused, quantize
from torch_tile.kernels.norm.args import FusedNormQuantizeArgs
from torch_tile.kernels.norm.fused import FusedSpec, Operand, aux_rows, grouped, groups_of, inputs
from torch_tile.kernels.norm.quantize import LARGEST, LEAST, rounded, runs_of
from torch_tile.kernels.norm.tiling import Config, config_for

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def reference(*given: Any, **named: Any) -> Results:
    """Compute `quantize.reference` of y of `fused.reference`, and the sum that it keeps, else an empty tensor."""
    args: FusedNormQuantizeArgs[torch.Tensor] = FusedNormQuantizeArgs(*given, **named)
    y, total = fused.reference(*args.norm)
    return *quantize.reference(y, args.group, args.out_dtype), total


@library_jit
def fused_norm_quantize_rows(config: Config, spec: FusedSpec, runs: int, group: int, out_dtype: torch.dtype) -> Any:
    """Build the kernel of `[groups, m, n]` by tiles of whole rows of one group, in `runs` of `group` columns."""
    rows, compute, largest = config.rows, compute_dtype(spec.dtype), LARGEST[out_dtype]
    before, after = parse(spec.prologue), parse(spec.epilogue)
    groups = T.dynamic("groups") if spec.is_grouped else 1
    m, n = T.dynamic("m"), dynamic("n", config.vector)
    shape = groups, m, n
    x_type = strided("x", shape, spec.dtype, multiple=config.vector)
    aux_types = [o.type(f"x{i}", groups, m, n) for i, o in enumerate(spec.aux)]
    totals = [T.Tensor(shape, spec.dtype)] if spec.keep else []
    scales_type = strided("scales", (groups, m, runs), torch.float32, unit=False)

    @T.prim_func
    def fused_norm_quantize(
        x: x_type,
        *operands: [*aux_types, *totals],
        out: T.Tensor(shape, out_dtype),
        scales: scales_type,
        eps: compute,
    ):
        with T.Kernel(groups * T.ceildiv(m, rows), threads=config.threads) as bx:
            of = bx // T.ceildiv(m, rows) if spec.is_grouped else 0
            row = (bx % T.ceildiv(m, rows) if spec.is_grouped else bx) * rows
            tile, squares = (T.alloc_fragment((rows, runs, group), compute) for _ in range(2))
            part = T.alloc_fragment((rows, runs), compute)
            centre, total, scale = (T.alloc_fragment((rows,), compute) for _ in range(3))
            for i, r, j in T.Parallel(rows, runs, group):
                at = of, row + i, r * group + j
                value = apply(before, inputs(spec, before, T.cast(x[at], compute), operands, at), compute)
                value = T.cast(T.cast(value, spec.dtype), compute)
                tile[i, r, j] = T.if_then_else(r * group + j < n, value, 0.0)
            if spec.keep:
                for i, r, j in T.Parallel(rows, runs, group):
                    if r * group + j < n:
                        operands[-1][of, row + i, r * group + j] = T.cast(tile[i, r, j], spec.dtype)
            if spec.centred:
                T.reduce_sum(tile, part, dim=2)
                T.reduce_sum(part, centre, dim=1)
                for i, r, j in T.Parallel(rows, runs, group):
                    distance = tile[i, r, j] - centre[i] / T.cast(n, compute)
                    tile[i, r, j] = T.if_then_else(r * group + j < n, distance, 0.0)
            for i, r, j in T.Parallel(rows, runs, group):
                squares[i, r, j] = tile[i, r, j] * tile[i, r, j]
            T.reduce_sum(squares, part, dim=2)
            T.reduce_sum(part, total, dim=1)
            for i in T.Parallel(rows):
                scale[i] = T.rsqrt(total[i] / T.cast(n, compute) + eps)
            for i, r, j in T.Parallel(rows, runs, group):
                at = of, row + i, r * group + j
                value = apply(after, inputs(spec, after, tile[i, r, j] * scale[i], operands, at), compute)
                value = T.cast(T.cast(value, spec.out), compute)
                tile[i, r, j] = T.if_then_else(r * group + j < n, value, 0.0)
            T.fill(part, LEAST)
            T.reduce_absmax(tile, part, dim=2, clear=False, nan_propagate=True)
            for i, r in T.Parallel(rows, runs):
                part[i, r] = part[i, r] / largest
                scales[of, row + i, r] = T.cast(part[i, r], "float32")
                part[i, r] = 1.0 / T.cast(T.cast(part[i, r], "float32"), compute)
            for i, r, j in T.Parallel(rows, runs, group):
                if r * group + j < n:
                    out[of, row + i, r * group + j] = rounded(tile[i, r, j] * part[i, r], out_dtype)

    return fused_norm_quantize


def _empty_results(args: FusedNormQuantizeArgs[torch.Tensor]) -> Results:
    """Allocate the values, their scales, and the sum in front of the norm, which is empty unless it is kept."""
    x = args.x
    scales = quantize.empty_scales(x, args.group)
    return x.new_empty(x.shape, dtype=args.out_dtype), scales, x.new_empty(x.shape if args.keep else 0)


@entry_function(FusedNormQuantizeArgs, reference, _empty_results)
def fused_norm_quantize(
    args: FusedNormQuantizeArgs[torch.Tensor],
    out: torch.Tensor,
    scales: torch.Tensor,
    total: torch.Tensor,
    config: Config | None = None,
) -> bool:
    """Compute values, scales and the sum as `reference` does. `config` overrides the choice of `config_for`."""
    x, aux, kinds, prologue, epilogue, centred, eps, keep, dtype, group, out_dtype = args
    if not x.numel():
        return False
    n = x.shape[-1]
    runs = runs_of(n, group)
    width, groups = runs * (group or n), groups_of(aux, kinds)
    rows, operands = grouped(x, groups), aux_rows(aux, kinds, groups)
    results = [t.view(rows.shape) for t in ([total, out] if keep else [out])]
    machine = machine_of(x)
    full = [v for v, kind in zip(operands, kinds, strict=True) if kind in "tgr"]
    vector = vector_of((rows, *full, *results[:-1]), (n,)) if machine.is_gpu else 1
    config = config or replace(config_for(width, vector, machine, x.dtype == torch.float64), exact=False)
    if not config.whole or width > config.width:
        y, _ = fused.fused_norm(*args.norm, out=x.new_empty(x.shape, dtype=dtype), total=total)
        quantize.quantize_fp8(y, group, out_dtype, out=out, scales=scales)
        return True
    described = tuple(Operand(k, v.dtype, vector > 1) for k, v in zip(kinds, operands, strict=True))
    spec = FusedSpec(x.dtype, dtype, described, canonical(prologue), canonical(epilogue), centred, keep)
    kernel = machine.kernel(fused_norm_quantize_rows)(config, spec, runs, group or n, out_dtype)
    kernel(rows, *operands, *results, scales.view(*rows.shape[:2], runs), float(eps))
    return True
