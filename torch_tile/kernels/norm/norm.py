# SPDX-License-Identifier: Apache-2.0
"""Normalisation over the last dimension: RMS norm (arXiv:1910.07467) and layer norm (arXiv:1607.06450).

Assumes that `ops` checked shapes and dtypes; takes tensors of any stride and returns fresh contiguous ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import (
    Machine,
    as_rows,
    compute_dtype,
    dynamic,
    entry_function,
    machine_of,
    start_early,
    strided,
    vector_of,
)
from torch_tile.kernels.epilogue.emit import activate
from torch_tile.kernels.epilogue.program import torch_functions
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.norm.args import AddRmsNormArgs, LayerNormArgs, RmsNormArgs
from torch_tile.kernels.norm.tiling import Config, config_for


def rms_norm_dtype(x: torch.dtype, weight: torch.dtype | None, cast_first: bool) -> torch.dtype:
    """Return the dtype of `rms_norm`'s y: x's, promoted with the weight's where the product follows the cast."""
    return torch.promote_types(x, weight) if weight is not None and cast_first else x


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    activation: str = "none",
    weight_offset: float = 0.0,
    cast_first: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `activation(s / sqrt(mean(s^2) + eps) * (weight + weight_offset))` of `s = x + residual`, by rows.

    x and residual `[..., N]`, of one dtype; weight `[N]`. `s` is rounded to x's dtype before it is normalised in
    float32 (float64 for float64). With `cast_first` the normalised row is rounded to x's dtype and then multiplied
    (transformers' order). The product is in the promoted dtype of x and weight; else it is multiplied first and rounded
    once, as `F.rms_norm` does. The activation is computed in float32, before the last rounding. Returns y `[..., N]`
    and `s`, None without a residual.
    """
    compute = compute_dtype(x.dtype)
    total = x if residual is None else x + residual
    s = total.to(compute)
    rstd = torch.rsqrt(s.square().mean(-1, keepdim=True) + eps)
    y = s * rstd
    dtype = rms_norm_dtype(x.dtype, None if weight is None else weight.dtype, cast_first)
    if weight is not None:
        if cast_first:
            y = y.to(x.dtype).to(dtype) * (weight + weight_offset if weight_offset else weight).to(dtype)
        else:
            y = y * (weight.to(compute) + weight_offset)
    if activation != "none":
        y = torch_functions()[activation](y.to(compute))
    return y.to(dtype).contiguous(), None if residual is None else total.contiguous()


def layer_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """Compute the layer norm over the last dimension, in float32 (float64 for float64), in x's dtype."""
    compute = compute_dtype(x.dtype)
    s = x.to(compute)
    mean = s.mean(-1, keepdim=True)
    rstd = torch.rsqrt((s - mean).square().mean(-1, keepdim=True) + eps)
    y = (s - mean) * rstd
    if weight is not None:
        y = y * weight.to(compute)
    if bias is not None:
        y = y + bias.to(compute)
    return y.to(x.dtype).contiguous()


@dataclass(frozen=True)
class RmsSpec:
    """Compile-time facts of an RMS norm, besides its `Config`."""

    dtype: torch.dtype
    weight: torch.dtype | None
    residual: bool
    activation: str
    cast_first: bool
    offset: bool


def weighted(spec: RmsSpec, normalised: Any, weight: Any, offset: Any) -> Any:
    """Multiply a normalised element by its weight, rounded where `rms_norm_reference` rounds."""
    compute, out = compute_dtype(spec.dtype), rms_norm_dtype(spec.dtype, spec.weight, spec.cast_first)
    if spec.weight is None:
        return normalised
    if not spec.cast_first:
        return normalised * (T.cast(weight, compute) + offset)
    wide = torch.promote_types(compute, out)
    factor = T.cast(weight, wide)
    if spec.offset:
        factor = T.cast(T.cast(factor + offset, spec.weight), wide)
    return T.cast(T.cast(T.cast(normalised, spec.dtype), wide) * factor, out)


def factors_type(config: Config, n: Any, dtype: torch.dtype) -> Any:
    """Return the type of a weight or bias, which is aligned as rows are."""
    return T.Tensor((n,), dtype, align=16 if config.vector > 1 else dtype.itemsize)


def mean_of(config: Config, total: Any, n: Any) -> Any:
    """Divide a row's sum by its length. A constant length needs no division."""
    return total * (1.0 / n) if config.exact else total / T.cast(n, total.dtype)


@T.macro
def finish(spec: RmsSpec, normalised: Any, weight: Any, offset: Any) -> Any:
    """Compute an element of the result: weighted, activated, rounded."""
    value = T.cast(weighted(spec, normalised, weight, offset), compute_dtype(spec.dtype))
    out = rms_norm_dtype(spec.dtype, spec.weight, spec.cast_first)
    return T.cast(activate(spec.activation, value, quick=out.itemsize <= 2), out)


@T.macro
def load_sum(spec: RmsSpec, x: Any, operands: Any, tile: Any, row: Any, col: Any) -> None:
    """Load a tile of `x`, or of `x + residual` rounded to x's dtype. The residual is the last operand but one."""
    if not spec.residual:
        T.copy(x[row, col], tile)
        return
    for i, j in T.Parallel(*tile.shape):
        both = T.cast(x[row + i, col + j], tile.dtype) + T.cast(operands[-2][row + i, col + j], tile.dtype)
        tile[i, j] = T.cast(T.cast(both, spec.dtype), tile.dtype)


@library_jit
def rms_norm_rows(config: Config, spec: RmsSpec) -> Any:
    """Build the RMS norm kernel of `[m, n]` by tiles of rows. It reads longer rows again for its result."""
    rows, width = config.rows, config.width
    compute = compute_dtype(spec.dtype)
    out_dtype = rms_norm_dtype(spec.dtype, spec.weight, spec.cast_first)
    m, n = T.dynamic("m"), width if config.exact else dynamic("n", config.vector)
    row_type, residual = (strided(name, (m, n), spec.dtype, multiple=config.vector) for name in ("x", "residual"))
    weights = [] if spec.weight is None else [factors_type(config, n, spec.weight)]
    extras = [residual, T.Tensor((m, n), spec.dtype)] if spec.residual else []

    @T.prim_func
    def rms_norm(
        x: row_type, *operands: [*weights, *extras], y: T.Tensor((m, n), out_dtype), eps: compute, offset: compute
    ):
        with T.Kernel(T.ceildiv(m, rows), threads=config.threads) as bx:
            start_early()
            tile = T.alloc_fragment((rows, width), compute)
            squares = T.alloc_fragment((rows, width), compute)
            total = T.alloc_fragment((rows,), compute)
            scale = T.alloc_fragment((rows,), compute)
            if config.lanes:
                T.annotate_layout({tile: config.layout})
            T.clear(total)
            for step in T.serial(1 if config.whole else T.ceildiv(n, width)):
                load_sum(spec, x, operands, tile, bx * rows, step * width)
                if spec.residual:
                    T.copy(tile, operands[-1][bx * rows, step * width])
                for i, j in T.Parallel(rows, width):
                    squares[i, j] = tile[i, j] * tile[i, j]
                T.reduce_sum(squares, total, dim=1, clear=False)
            for i in T.Parallel(rows):
                scale[i] = T.rsqrt(mean_of(config, total[i], n) + eps)
            for step in T.serial(1 if config.whole else T.ceildiv(n, width)):
                if not config.whole:
                    load_sum(spec, x, operands, tile, bx * rows, step * width)
                for i, j in T.Parallel(rows, width):
                    col = step * width + j
                    weight = operands[0][col] if weights else 1.0
                    y[bx * rows + i, col] = finish(spec, tile[i, j] * scale[i], weight, offset)

    return rms_norm


@library_jit
def layer_norm_rows(config: Config, dtype: torch.dtype, weight: torch.dtype | None, bias: torch.dtype | None) -> Any:
    """Build the layer norm kernel of `[m, n]` by tiles of rows: mean, then variance about it, then the result."""
    rows, width = config.rows, config.width
    compute = compute_dtype(dtype)
    m, n = T.dynamic("m"), width if config.exact else dynamic("n", config.vector)
    factors = [factors_type(config, n, t) for t in (weight, bias) if t is not None]

    @T.prim_func
    def layer_norm(
        x: strided("x", (m, n), dtype, multiple=config.vector),
        *operands: factors,
        y: T.Tensor((m, n), dtype),
        eps: compute,
    ):
        with T.Kernel(T.ceildiv(m, rows), threads=config.threads) as bx:
            tile = T.alloc_fragment((rows, width), compute)
            squares = T.alloc_fragment((rows, width), compute)
            total = T.alloc_fragment((rows,), compute)
            centre = T.alloc_fragment((rows,), compute)
            scale = T.alloc_fragment((rows,), compute)
            if config.lanes:
                T.annotate_layout({tile: config.layout})

            T.clear(total)
            for step in T.serial(1 if config.whole else T.ceildiv(n, width)):
                T.copy(x[bx * rows, step * width], tile)
                T.reduce_sum(tile, total, dim=1, clear=False)
            for i in T.Parallel(rows):
                centre[i] = mean_of(config, total[i], n)

            T.clear(total)
            for step in T.serial(1 if config.whole else T.ceildiv(n, width)):
                if not config.whole:
                    T.copy(x[bx * rows, step * width], tile)
                for i, j in T.Parallel(rows, width):
                    far = tile[i, j] - centre[i]
                    # The condition stands in the expression, so that the CPU's loop is split at the point where it
                    # turns false.
                    distance = far if config.exact else T.if_then_else(step * width + j < n, far, 0.0)
                    squares[i, j] = distance * distance
                T.reduce_sum(squares, total, dim=1, clear=False)
            for i in T.Parallel(rows):
                scale[i] = T.rsqrt(mean_of(config, total[i], n) + eps)

            for step in T.serial(1 if config.whole else T.ceildiv(n, width)):
                if not config.whole:
                    T.copy(x[bx * rows, step * width], tile)
                for i, j in T.Parallel(rows, width):
                    col = step * width + j
                    normalised = (tile[i, j] - centre[i]) * scale[i]
                    factor = 1.0 if weight is None else T.cast(operands[0][col], compute)
                    shift = 0.0 if bias is None else T.cast(operands[-1][col], compute)
                    y[bx * rows + i, col] = T.cast(normalised * factor + shift, dtype)

    return layer_norm


def plain_rms_norm_reference(*given: Any) -> torch.Tensor:
    """Compute `rms_norm_reference` without a residual, of the arguments of `tile.rms_norm`."""
    args = RmsNormArgs[torch.Tensor](*given)
    return rms_norm_reference(args.x, args.weight, None, *args[2:])[0]


def add_rms_norm_reference(*given: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `rms_norm_reference` of the arguments of `tile.add_rms_norm`."""
    args = AddRmsNormArgs[torch.Tensor](*given)
    return rms_norm_reference(args.x, args.weight, args.residual, *args[3:])


def _empty_rms_norm(args: RmsNormArgs[torch.Tensor] | AddRmsNormArgs[torch.Tensor]) -> torch.Tensor:
    """Allocate the normalised rows."""
    weight = None if args.weight is None else args.weight.dtype
    return args.x.new_empty(args.x.shape, dtype=rms_norm_dtype(args.x.dtype, weight, args.cast_first))


@entry_function(RmsNormArgs, plain_rms_norm_reference, _empty_rms_norm)
def rms_norm(args: RmsNormArgs[torch.Tensor], out: torch.Tensor, config: Config | None = None) -> bool:
    """Compute the RMS norm as `rms_norm_reference` does. `config` overrides the choice of `config_for`."""
    return bool(args.x.numel()) and _launch_rms_norm(args, [], out, config)


@entry_function(
    AddRmsNormArgs, add_rms_norm_reference, lambda args: (_empty_rms_norm(args), args.x.new_empty(args.x.shape))
)
def add_rms_norm(
    args: AddRmsNormArgs[torch.Tensor], out: torch.Tensor, total: torch.Tensor, config: Config | None = None
) -> bool:
    """Compute the RMS norm of a sum, and the sum, as `rms_norm_reference` does. `config` is as for `rms_norm`."""
    return bool(args.x.numel()) and _launch_rms_norm(args.norm, [args.residual, total], out, config)


def _launch_rms_norm(
    args: RmsNormArgs[torch.Tensor], residual_and_total: list[torch.Tensor], out: torch.Tensor, config: Config | None
) -> bool:
    """Launch the kernel of RMS norms into `out` and, with a residual, into the sum."""
    x, weight, eps, activation, weight_offset, cast_first = args
    dtype = None if weight is None else weight.dtype
    spec = RmsSpec(x.dtype, dtype, bool(residual_and_total), activation, cast_first, weight_offset != 0.0)
    rows = as_rows(x)
    y = out.view(rows.shape)
    operands = [*([] if weight is None else [weight.contiguous()]), *map(as_rows, residual_and_total)]
    machine = machine_of(x)
    config = config or _config_for((rows, *operands, y), machine)
    machine.kernel(rms_norm_rows)(config, spec)(rows, *operands, y, float(eps), float(weight_offset))
    return True


@entry_function(LayerNormArgs, layer_norm_reference, lambda args: args.x.new_empty(args.x.shape))
def layer_norm(args: LayerNormArgs[torch.Tensor], out: torch.Tensor, config: Config | None = None) -> bool:
    """Compute the layer norm as `layer_norm_reference` does. `config` overrides the choice of `config_for`."""
    x, weight, bias, eps = args
    if not x.numel():
        return False
    rows = as_rows(x)
    operands = [t.contiguous() for t in (weight, bias) if t is not None]
    dtypes = [None if t is None else t.dtype for t in (weight, bias)]
    machine = machine_of(x)
    config = config or _config_for((rows, *operands, out.view(rows.shape)), machine)
    kernel = machine.kernel(layer_norm_rows)(config, x.dtype, *dtypes)
    kernel(rows, *operands, out.view(rows.shape), float(eps))
    return True


def _config_for(operands: Sequence[torch.Tensor], machine: Machine) -> Config:
    """Choose the tiling for operands, the first of shape `[m, n]`."""
    n = operands[0].shape[-1]
    wide = operands[0].dtype == torch.float64
    return config_for(n, vector_of(operands, (n,)) if machine.is_gpu else 1, machine, wide)
