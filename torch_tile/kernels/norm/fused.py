# SPDX-License-Identifier: Apache-2.0
"""A norm with fused prologue and epilogue: `epilogue(normalise(prologue(x)))`, texts in the language of gemm's
epilogues.

Prologues are gates and residuals. Epilogues are modulation by scales and shifts of a whole sequence (adaptive norms),
and activations. They are operands and texts here, as biases and residuals are of a product. Assumes that `ops` checked
shapes and dtypes; takes tensors of any stride.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import (
    as_rows,
    compute_dtype,
    dense_last,
    dynamic,
    entry_function,
    machine_of,
    strided,
    vector_of,
)
from torch_tile.kernels.epilogue.canonicalize import canonical
from torch_tile.kernels.epilogue.emit import apply
from torch_tile.kernels.epilogue.program import Epilogue, evaluate, parse
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.norm.args import FusedNormArgs
from torch_tile.kernels.norm.norm import mean_of
from torch_tile.kernels.norm.tiling import Config, config_for

PLAIN = "ret acc0"
"""The text, in its canonical form, that changes nothing."""


def groups_of(aux: Sequence[torch.Tensor], kinds: str) -> int:
    """Return the number of runs of rows with different operands of kind `g`, or 1 without such operands."""
    return next((math.prod(x.shape[:-1]) for x, kind in zip(aux, kinds, strict=True) if kind == "g"), 1)


def grouped(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Return `[..., N]` as `[groups, rows of each, N]`, a view where the strides allow it."""
    rows = as_rows(x)
    return rows.view(groups, -1, rows.shape[1])


def aux_rows(aux: Sequence[torch.Tensor], kinds: str, groups: int) -> list[torch.Tensor]:
    """Return the auxiliary operands in the form that the kernel takes.

    By kind: `t` `[groups, R, N]`, `g` `[groups, N]`, `r` `[N]`, `c` `[groups, R]`, `s` `[1]`.
    """

    def view(x: torch.Tensor, kind: str) -> torch.Tensor:
        """Reshape one auxiliary operand to the shape that the kernel takes for its kind."""
        if kind == "t":
            return grouped(x, groups)
        if kind == "c":
            return x.reshape(groups, -1)
        return as_rows(x) if kind == "g" else dense_last(x) if kind == "r" else x.reshape(1)

    return [view(x, kind) for x, kind in zip(aux, kinds, strict=True)]


def reference(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `y = epilogue(normalise(s))` of `s = prologue(x)` by rows, from the arguments of `FusedNormArgs`.

    `centred` subtracts the mean first (layer norm). x `[..., N]`; aux by kind: `t` as x, `g` with x's leading sizes up
    to some dimension, ones from there on, and N: one row for each of the runs of rows between, `r` `[N]`, `c`
    `[..., 1]`, `s` one element. In both texts acc0 is what goes in and x0, x1, ... are aux. All is computed in float32
    (float64 for float64 x); `s` is rounded to x's dtype before it is normalised, if there is a prologue. Returns y
    `[..., N]` in `dtype`, and `s` in x's dtype if `keep`, else an empty tensor.
    """
    args: FusedNormArgs[torch.Tensor] = FusedNormArgs(*given, **named)
    x, aux, kinds, prologue, epilogue, centred, eps, keep, dtype = args
    compute = compute_dtype(x.dtype)
    operands = [v.to(compute) for v in aux]
    operands = [v.reshape(()) if kind == "s" else v for v, kind in zip(operands, kinds, strict=True)]
    total = x
    if canonical(prologue) != PLAIN:
        total = evaluate(prologue, [x.to(compute)], operands).to(x.dtype)
    s = total.to(compute)
    if centred:
        s = s - s.mean(-1, keepdim=True)
    y = evaluate(epilogue, [s * torch.rsqrt(s.square().mean(-1, keepdim=True) + eps)], operands)
    dense = torch.contiguous_format
    return y.to(dtype).clone(memory_format=dense), total.clone(memory_format=dense) if keep else x.new_empty(0)


@dataclass(frozen=True)
class Operand:
    """An auxiliary operand: its kind (as `aux_rows` lays it), its dtype and whether its rows begin at 16 bytes."""

    kind: str
    dtype: torch.dtype
    aligned: bool

    def type(self, name: str, groups: Any, rows: Any, n: Any) -> Any:
        """Return the parameter's type."""
        if self.kind == "s":
            return T.Tensor((1,), self.dtype)
        if self.kind == "c":
            return strided(name, (groups, rows), self.dtype, unit=False)
        shape = {"t": (groups, rows, n), "g": (groups, n), "r": (n,)}[self.kind]
        size = self.dtype.itemsize
        multiple, align = (16 // size, 16) if self.aligned else (1, size)
        return strided(name, shape, self.dtype, multiple=multiple, align=align)

    def at(self, tensor: Any, group: Any, row: Any, col: Any) -> Any:
        """Return the element that belongs to `x[group, row, col]`."""
        index = {"t": (group, row, col), "g": (group, col), "r": (col,), "c": (group, row), "s": (0,)}[self.kind]
        return tensor[index]


@dataclass(frozen=True)
class FusedSpec:
    """Compile-time facts of a fused norm, besides its `Config`. The texts are canonical."""

    dtype: torch.dtype
    out: torch.dtype
    aux: tuple[Operand, ...]
    prologue: str
    epilogue: str
    centred: bool
    keep: bool

    @property
    def is_grouped(self) -> bool:
        """Return whether an operand has one row for each group of rows (kind `g`)."""
        return any(x.kind == "g" for x in self.aux)


def inputs(spec: FusedSpec, text: Epilogue, value: Any, aux: Sequence[Any], at: Sequence[Any]) -> Mapping[str, Any]:
    """Return the operands of a prologue or epilogue for the element at `(group, row, col)`, in the computing dtype."""
    compute = compute_dtype(spec.dtype)
    read = {f"x{i}": T.cast(spec.aux[i].at(aux[i], *at), compute) for i in sorted(text.inputs("x"))}
    return {"acc0": value, **read}


@T.macro
def load(config: Config, spec: FusedSpec, x: Any, aux: Any, tile: Any, group: Any, row: Any, col: Any, n: Any) -> None:
    """Load a tile of `prologue(x)` in the computing dtype, with zeros beyond the end of rows."""
    if spec.prologue == PLAIN:
        T.copy(x[group, row, col], tile)
        return
    text = parse(spec.prologue)
    for i, j in T.Parallel(*tile.shape):
        value = T.cast(x[group, row + i, col + j], tile.dtype)
        value = apply(text, inputs(spec, text, value, aux, (group, row + i, col + j)), tile.dtype)
        inside = config.exact or col + j < n
        tile[i, j] = T.if_then_else(inside, T.cast(T.cast(value, spec.dtype), tile.dtype), 0.0)


@library_jit
def fused_norm_rows(config: Config, spec: FusedSpec) -> Any:
    """Build the fused norm kernel of `[groups, m, n]` by tiles of rows. It reads longer rows than a tile twice."""
    rows, width = config.rows, config.width
    compute = compute_dtype(spec.dtype)
    text = parse(spec.epilogue)
    groups = T.dynamic("groups") if spec.is_grouped else 1
    m, n = T.dynamic("m"), width if config.exact else dynamic("n", config.vector)
    x_type = strided("x", (groups, m, n), spec.dtype, multiple=config.vector)
    aux_types = [o.type(f"x{i}", groups, m, n) for i, o in enumerate(spec.aux)]
    totals = [T.Tensor((groups, m, n), spec.dtype)] if spec.keep else []

    @T.prim_func
    def fused_norm(x: x_type, *operands: [*aux_types, *totals], y: T.Tensor((groups, m, n), spec.out), eps: compute):
        with T.Kernel(groups * T.ceildiv(m, rows), threads=config.threads) as bx:
            group = bx // T.ceildiv(m, rows) if spec.is_grouped else 0
            row = (bx % T.ceildiv(m, rows) if spec.is_grouped else bx) * rows
            tile = T.alloc_fragment((rows, width), compute)
            squares = T.alloc_fragment((rows, width), compute)
            total = T.alloc_fragment((rows,), compute)
            centre = T.alloc_fragment((rows,), compute)
            scale = T.alloc_fragment((rows,), compute)
            if config.lanes:
                T.annotate_layout({tile: config.layout})

            T.clear(centre)
            T.clear(total)
            for step in T.serial(1 if config.whole else T.ceildiv(n, width)):
                load(config, spec, x, operands, tile, group, row, step * width, n)
                if spec.keep:
                    T.copy(tile, operands[-1][group, row, step * width])
                if spec.centred:
                    T.reduce_sum(tile, total, dim=1, clear=False)
                else:
                    for i, j in T.Parallel(rows, width):
                        squares[i, j] = tile[i, j] * tile[i, j]
                    T.reduce_sum(squares, total, dim=1, clear=False)
            if spec.centred:
                for i in T.Parallel(rows):
                    centre[i] = mean_of(config, total[i], n)
                T.clear(total)
                for step in T.serial(1 if config.whole else T.ceildiv(n, width)):
                    if not config.whole:
                        load(config, spec, x, operands, tile, group, row, step * width, n)
                    for i, j in T.Parallel(rows, width):
                        inside = config.exact or step * width + j < n
                        distance = T.if_then_else(inside, tile[i, j] - centre[i], 0.0)
                        squares[i, j] = distance * distance
                    T.reduce_sum(squares, total, dim=1, clear=False)
            for i in T.Parallel(rows):
                scale[i] = T.rsqrt(mean_of(config, total[i], n) + eps)

            for step in T.serial(1 if config.whole else T.ceildiv(n, width)):
                if not config.whole:
                    load(config, spec, x, operands, tile, group, row, step * width, n)
                for i, j in T.Parallel(rows, width):
                    col = step * width + j
                    value = (tile[i, j] - centre[i]) * scale[i] if spec.centred else tile[i, j] * scale[i]
                    read = inputs(spec, text, value, operands, (group, row + i, col))
                    y[group, row + i, col] = T.cast(apply(text, read, compute, quick=spec.out.itemsize <= 2), spec.out)

    return fused_norm


def _empty_results(args: FusedNormArgs[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the norm, and the sum in front of it, which is empty unless it is kept."""
    return args.x.new_empty(args.x.shape, dtype=args.dtype), args.x.new_empty(args.x.shape if args.keep else 0)


@entry_function(FusedNormArgs, reference, _empty_results)
def fused_norm(
    args: FusedNormArgs[torch.Tensor], out: torch.Tensor, total: torch.Tensor, config: Config | None = None
) -> bool:
    """Compute the fused norm as `reference` does: y into `out`, the sum into `total`; `config` as `config_for`'s."""
    x, aux, kinds, prologue, epilogue, centred, eps, keep, dtype = args
    if not x.numel():
        return False
    groups, n = groups_of(aux, kinds), x.shape[-1]
    rows, operands = grouped(x, groups), aux_rows(aux, kinds, groups)
    results = [t.view(rows.shape) for t in ([total, out] if keep else [out])]
    machine = machine_of(x)
    if config is None:
        full = [v for v, kind in zip(operands, kinds, strict=True) if kind in "tgr"]
        vector = vector_of((rows, *full, *results), (n,)) if machine.is_gpu else 1
        config = config_for(n, vector, machine, x.dtype == torch.float64)
    described = tuple(Operand(k, v.dtype, config.vector > 1) for k, v in zip(kinds, operands, strict=True))
    spec = FusedSpec(x.dtype, dtype, described, canonical(prologue), canonical(epilogue), centred, keep)
    machine.kernel(fused_norm_rows)(config, spec)(rows, *operands, *results, float(eps))
    return True
