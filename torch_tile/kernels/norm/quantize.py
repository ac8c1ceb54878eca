# SPDX-License-Identifier: Apache-2.0
"""Rounding of rows, or of runs of their columns, to float8 or int8 with a scale each.

The rows may be `silu(x) * up`, computed on the way (SwiGLU, arXiv:2002.05202). Assumes that `ops` checked shapes and
dtypes; takes tensors of any stride and returns fresh ones. Values are contiguous; scales lie as `empty_scales` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import (
    as_rows,
    compute_dtype,
    dynamic,
    entry_function,
    machine_of,
    strided,
    vector_of,
)
from torch_tile.kernels.epilogue.emit import apply
from torch_tile.kernels.epilogue.program import parse
from torch_tile.kernels.gemm.padded_rows import START
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.norm.args import QuantizeFp8Args, SiluMulQuantizeArgs
from torch_tile.kernels.norm.tiling import Config, config_for

LEAST = 2.0**-100  # what counts as the largest magnitude of a run of zeros
SWIGLU = parse("v0=silu(acc0);v1=mul(v0,x0);ret v1")
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}


def runs_of(columns: int, group: int) -> int:
    """Return how many runs of `group` columns a row has; 0 stands for whole rows, the last run may be shorter."""
    return -(-columns // group) if group else 1


def empty_scales(x: torch.Tensor, group: int) -> torch.Tensor:
    """Allocate float32 scales `[..., K / group]`, rounded up, of rows `[..., K]` as products by runs want them.

    The scales of all rows for one run lie side by side. They begin at a multiple of 16 bytes: so bulk copies can read
    them. Scales of rows with one run, and those of one row without further dimensions, are contiguous.
    """
    *leading, columns = x.shape
    runs = runs_of(columns, group)
    if not (group and leading) or (isinstance(runs, int) and runs == 1):
        return x.new_empty((*leading, runs), dtype=torch.float32)
    strides, rows = [], 1
    for size in reversed(leading):
        strides.append(rows)
        rows = rows * size
    between = -(-rows // START) * START
    return x.new_empty_strided((*leading, runs), (*reversed(strides), between), dtype=torch.float32)


def reference(x: torch.Tensor, group: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the values `x / scale` rounded to `dtype`, and the scales: the largest magnitude of each run of `group`
    columns (0: all) over the largest number of `dtype`.

    x `[..., K]`. Returns `[..., K]` and float32 `[..., K / group]`, rounded up, as `empty_scales` makes them.
    """
    wide, largest = x.to(compute_dtype(x.dtype)), LARGEST[dtype]
    runs = runs_of(x.shape[-1], group)
    width = group or x.shape[-1]
    padded = torch.nn.functional.pad(wide, (0, runs * width - x.shape[-1])).reshape(*x.shape[:-1], runs, width)
    scales = (padded.abs().amax(-1).clamp_min(LEAST) / largest).to(torch.float32)
    values = (padded * (1.0 / scales)[..., None]).clamp(-largest, largest)
    if dtype == torch.int8:
        values = values.round().nan_to_num(0.0)
    values = values.reshape(*x.shape[:-1], runs * width)[..., : x.shape[-1]]
    return values.to(dtype).contiguous(), empty_scales(x, group).copy_(scales)


def silu_mul_reference(
    gate: torch.Tensor, up: torch.Tensor, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute values and scales of `reference` for `silu(gate) * up`, rounded once to the dtype of gate."""
    wide = compute_dtype(gate.dtype)
    y = torch.nn.functional.silu(gate.to(wide)) * up.to(wide)
    return reference(y.to(gate.dtype), group, dtype)


@library_jit
def quantize_rows(config: Config, dtype: torch.dtype, out_dtype: torch.dtype, gated: bool) -> Any:
    """Build the kernel `out[o, i, :], scales[o, i] = x[o, i, :] / scale, scale`; if `gated` of `silu(x) * up`."""
    compute, largest = compute_dtype(dtype), LARGEST[out_dtype]
    rows, width = config.rows, config.width
    outer, inner = T.dynamic("outer, inner")
    n = width if config.exact else dynamic("n", config.vector)
    x_type = strided("x", (outer, inner, n), dtype, multiple=config.vector)
    up_types = [strided("up", (outer, inner, n), dtype, multiple=config.vector)] if gated else []
    out_type = strided("out", (outer, inner, n), out_dtype, multiple=config.vector)
    scales_type = strided("scales", (outer, inner), torch.float32, False)

    @T.macro
    def value_at(x: Any, ups: Sequence[Any], *at: Any) -> Any:
        """Return what is rounded at a place, in the dtype of sums."""
        value = T.cast(x[at], compute)
        if not gated:
            return value
        value = apply(SWIGLU, {"acc0": value, "x0": T.cast(ups[0][at], compute)}, compute, dtype.itemsize <= 2)
        return T.cast(T.cast(value, dtype), compute)

    @T.prim_func
    def quantize_fp8(x: x_type, *ups: up_types, out: out_type, scales: scales_type):
        with T.Kernel(T.ceildiv(inner, rows), outer, threads=config.threads) as (bx, by):
            tile = T.alloc_fragment((rows, width), compute)
            most = T.alloc_fragment((rows,), compute)
            if config.lanes:
                T.annotate_layout({tile: config.layout})
            T.fill(most, LEAST)
            for step in T.serial(1 if config.whole else T.ceildiv(n, width)):
                for i, j in T.Parallel(rows, width):
                    value = value_at(x, ups, by, bx * rows + i, step * width + j)
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
                        value = value_at(x, ups, by, bx * rows + i, step * width + j)
                        out[by, bx * rows + i, step * width + j] = rounded(value * most[i], out_dtype)

    return quantize_fp8


def rounded(value: Any, dtype: torch.dtype) -> Any:
    """Round a value, clamped to the largest number of the dtype. NaN stays NaN in float8, and is 0 in int8."""
    largest = LARGEST[dtype]
    if dtype == torch.int8:
        value = T.if_then_else(value == value, T.round(value), 0.0)
    return T.cast(T.minimum(T.maximum(value, -largest), largest), dtype)


def _empty_results(
    args: QuantizeFp8Args[torch.Tensor] | SiluMulQuantizeArgs[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate values and scales."""
    x = args[0]
    values = torch.empty_like(x, dtype=args.dtype, memory_format=torch.contiguous_format)
    return values, empty_scales(x, args.group)


@entry_function(QuantizeFp8Args, reference, _empty_results)
def quantize_fp8(args: QuantizeFp8Args[torch.Tensor], out: torch.Tensor, scales: torch.Tensor) -> None:
    """Compute values and scales as `reference` does."""
    _launch([args.x], args.group, out, scales)


@entry_function(SiluMulQuantizeArgs, silu_mul_reference, _empty_results)
def silu_mul_quantize(args: SiluMulQuantizeArgs[torch.Tensor], out: torch.Tensor, scales: torch.Tensor) -> None:
    """Compute values and scales as `silu_mul_reference` does."""
    _launch([args.gate, args.up], args.group, out, scales)


def _launch(operands: Sequence[torch.Tensor], group: int, out: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantise x, or a gated product: one launch for whole runs of columns, one for a shorter last run."""
    columns = out.shape[-1]
    if not out.numel():
        scales.fill_(LEAST / LARGEST[out.dtype])
        return
    runs = runs_of(columns, group)
    rows, factors = [*map(as_rows, operands), out.view(-1, columns)], scales.view(-1, runs)
    whole = columns // group if group else 0
    if whole * group < columns:  # whole rows, or a last run that is shorter
        run([t[:, None, whole * group :] for t in rows], factors[:, whole:])
    if whole:
        run([t[:, : whole * group].unflatten(1, (whole, group)) for t in rows], factors[:, :whole])


def run(tensors: Sequence[torch.Tensor], scales: torch.Tensor, config: Config | None = None) -> None:
    """Launch the quantisation of rows `[outer, inner, n]`, which are not empty: of x, or a gate and what it multiplies,
    into the last tensor. `config` overrides the choice of `config_for`.
    """
    if tensors[0].shape[1] == 1:  # let the rows be the inner ones, of which a block takes several
        tensors, scales = [t.transpose(0, 1) for t in tensors], scales.transpose(0, 1)
    (x, *ups), out = tensors[:-1], tensors[-1]
    machine, n = machine_of(x), x.shape[-1]
    vector = vector_of(tensors, (n,)) if machine.is_gpu else 1
    config = config or config_for(n, vector, machine, x.dtype == torch.float64)
    machine.kernel(quantize_rows)(config, x.dtype, out.dtype, bool(ups))(x, *ups, out, scales)
