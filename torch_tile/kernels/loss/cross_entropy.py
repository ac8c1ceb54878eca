# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of logits against class indices, and its gradient: each reads the logits once, or both together.

Assumes that `ops` checked shapes and dtypes; takes logits of any strides. A target that names no class gives NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.ir.layout import Digit, Layout
from torch_tile.kernels.common import (
    LOG2_E,
    Machine,
    as_rows,
    compute_dtype,
    dynamic,
    entry_function,
    machine_of,
    power_of_two,
    strided,
    vector_of,
)
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.loss.args import CrossEntropyArgs, CrossEntropyBackwardArgs


@dataclass(frozen=True)
class Spec:
    """Compile-time facts of a cross-entropy kernel: dtypes, and whether labels are smoothed.

    weight: the dtype of the classes' weights, None without. smoothed: label smoothing is not 0. capped: logits are
    `cap * tanh(x / cap)` of the numbers x whose gradient is wanted.
    """

    dtype: torch.dtype
    target: torch.dtype
    weight: torch.dtype | None
    smoothed: bool
    capped: bool = False


@dataclass(frozen=True)
class Config:
    """Tiles of `rows` rows by `lanes * pieces * vector` classes.

    A lane takes `pieces` runs of `vector` neighbouring logits and keeps its own maximum and sum. So lanes meet once a
    row. On a GPU a lane is a thread; rows start at multiples of `vector` logits.
    """

    rows: int
    lanes: int
    pieces: int
    vector: int

    is_gpu: bool = False

    @property
    def threads(self) -> int:
        """Return how many threads a block has."""
        return self.rows * self.lanes if self.is_gpu else 128

    @property
    def alignment(self) -> int:
        """Return how many logits divide every row length and row stride."""
        return self.vector if self.is_gpu else 1

    @property
    def width(self) -> int:
        """Return how many classes a tile has."""
        return self.lanes * self.pieces * self.vector

    @property
    def layout(self) -> Layout:
        """Return the layout of a tile `[rows, lanes, pieces * vector]`: the elements of a lane lie in one thread."""
        per_lane = self.pieces * self.vector
        return Layout(((Digit(self.rows, self.lanes, "t"),), (Digit(self.lanes, 1, "t"),), (Digit(per_lane, 1, "r"),)))


def config_for(n: int, vector: int, machine: Machine) -> Config:
    """Choose the tiling of rows of `n` logits that start at multiples of `vector`."""
    if not machine.is_gpu:
        return Config(1, 1, 1, min(4096, max(64, power_of_two(n))))
    threads, pieces = 256, 32 // max(vector, 4)
    wanted = -(-n // (vector * pieces))
    lanes = min(threads, max(32, power_of_two(wanted)))
    return Config(threads // lanes, lanes, pieces, vector, is_gpu=True)


def loss_reference(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `tile.cross_entropy` in plain torch. Takes the arguments of `CrossEntropyArgs`."""
    args: CrossEntropyArgs[torch.Tensor] = CrossEntropyArgs(*given, **named)
    target, weight, ignore_index = args.target, args.weight, args.ignore_index
    x = args.logits.to(compute_dtype(args.logits.dtype))
    n = x.shape[-1]
    lse = x.logsumexp(-1)
    if isinstance(n, int) and n == 0:  # no target names a class
        return torch.where(target != ignore_index, torch.nan, torch.zeros_like(lse)), lse
    at, counted, valid = _classes(target, ignore_index, n)
    own_weight, smoothing, total = _weights(x, at, weight, args.label_smoothing)
    picked = x.gather(-1, at[..., None])[..., 0]
    loss = own_weight * (lse - picked) + args.z_loss * lse.square()
    if args.label_smoothing:
        spread = x.sum(-1) if weight is None else x @ weight.to(x.dtype)
        loss = loss + smoothing * (total * lse - spread)
    return torch.where(counted, loss.masked_fill(~valid, torch.nan), 0.0), lse


def gradient_reference(*given: Any, **named: Any) -> torch.Tensor:
    """Compute `tile.cross_entropy_backward` in plain torch. Takes the arguments of `CrossEntropyBackwardArgs`."""
    args: CrossEntropyBackwardArgs[torch.Tensor] = CrossEntropyBackwardArgs(*given, **named)
    if isinstance(args.logits.shape[-1], int) and args.logits.shape[-1] == 0:
        return args.logits.new_empty(args.logits.shape)
    slope, _ = logit_slopes(*args[1:])
    return (args.grad.to(slope.dtype)[..., None] * slope).to(args.logits.dtype).contiguous()


def logit_slopes(
    logits: torch.Tensor,
    target: torch.Tensor,
    lse: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the derivative of each row's loss by its logits, `[..., N]`, and its softmax factor."""
    x = logits.to(compute_dtype(logits.dtype))
    at, counted, valid = _classes(target, ignore_index, x.shape[-1])
    own_weight, smoothing, total = _weights(x, at, weight, label_smoothing)
    factor = own_weight + smoothing * total + 2.0 * z_loss * lse
    slope = factor[..., None] * torch.exp(x - lse[..., None])
    own = torch.arange(x.shape[-1], device=x.device) == at[..., None]
    slope = slope - torch.where(own, own_weight[..., None], 0.0)
    if label_smoothing:
        slope = slope - (smoothing if weight is None else smoothing * weight.to(x.dtype))
    return torch.where(counted[..., None], slope.masked_fill(~valid[..., None], torch.nan), 0.0), factor


def _classes(target: torch.Tensor, ignore_index: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Clamp targets to valid class indices; return them with masks of counted rows and of valid targets."""
    return target.clamp(0, n - 1).long(), target != ignore_index, (target >= 0) & (target < n)


def _weights(
    x: torch.Tensor, at: torch.Tensor, weight: torch.Tensor | None, label_smoothing: float
) -> tuple[torch.Tensor, float, torch.Tensor | float]:
    """Return each row's own class weight, the label-smoothing share of a class, and the sum of all class weights."""
    n = x.shape[-1]
    kept = 1.0 - label_smoothing
    if weight is None:
        return torch.full_like(at, kept, dtype=x.dtype), label_smoothing / n, float(n)
    weight = weight.to(x.dtype)
    return kept * weight[at], label_smoothing / n, weight.sum()


@T.macro
def weight_of(spec: Spec, operands: Any, column: Any) -> Any:
    """Load the weight of a class in the dtype of sums."""
    compute = compute_dtype(spec.dtype)
    return T.cast(1.0, compute) if spec.weight is None else T.cast(operands[0][column], compute)


@T.macro
def finite(value: Any) -> Any:
    """Replace an infinite row max by 0, so that it can be subtracted in exponents."""
    return T.if_then_else(T.isinf(value), 0.0, value)


@T.macro
def column_of(config: Config, step: Any, lane: Any, j: Any) -> Any:
    """Return the class that a lane's j-th element of a step stands for."""
    vector = config.vector
    return step * config.width + (j // vector) * (config.lanes * vector) + lane * vector + j % vector


@T.macro
def sum_exponentials(config: Config, spec: Spec, logits: Any, operands: Any, first: Any) -> Any:
    """Sum the exponentials of the rows from `first` on: an online softmax in each lane, joined at the end of the row.

    Returns, for each row, its finite maximum and the log of the sum above that maximum. The sums of its weighted logits
    and of all weights follow. Without smoothing the last two are not set.
    """
    compute = compute_dtype(spec.dtype)
    rows, lanes, width, n = config.rows, config.lanes, config.width, logits.shape[1]
    per_lane = config.pieces * config.vector
    # On a GPU a weight is one product with sum and one power of two: the base is in powers of two.
    fused = config.is_gpu and compute == torch.float32
    unit, power = (LOG2_E, T.exp2) if fused else (1.0, T.exp)

    def weight(logit: Any, base: Any) -> Any:
        """Compute `exp(logit - base)`; if fused, as one multiply-add and an exp2 of a scaled base."""
        return T.exp2(T.fma(logit, unit, -base)) if fused else T.exp(logit - base)

    tile = T.alloc_fragment((rows, lanes, per_lane), compute)
    lane_max = T.alloc_fragment((rows, lanes), compute)
    base = T.alloc_fragment((rows, lanes), compute)
    old_base = T.alloc_fragment((rows, lanes), compute)
    lane_sum = T.alloc_fragment((rows, lanes), compute)
    row_max = T.alloc_fragment((rows,), compute)
    row_sum = T.alloc_fragment((rows,), compute)
    spread = T.alloc_fragment((rows,), compute)
    total_weight = T.alloc_fragment((rows,), compute)
    if config.is_gpu:
        T.annotate_layout({tile: config.layout})
    T.fill(lane_max, -T.infinity(compute))
    T.fill(base, -T.infinity(compute))
    T.clear(lane_sum)
    if spec.smoothed:
        terms = T.alloc_fragment((rows, lanes, per_lane), compute)
        lane_spread = T.alloc_fragment((rows, lanes), compute)
        lane_weight = T.alloc_fragment((rows, lanes), compute)
        T.clear(lane_spread)
        T.clear(lane_weight)

    whole = n // width
    for masked in (False, True):
        for step in T.serial(whole, T.ceildiv(n, width)) if masked else T.serial(whole):
            for i, lane, j in T.Parallel(rows, lanes, per_lane):
                column = column_of(config, step, lane, j)
                logit = T.cast(logits[first + i, column], compute)
                inside = not masked or column < n
                tile[i, lane, j] = T.if_then_else(inside, logit, -T.infinity(compute))
            if spec.smoothed:
                for i, lane, j in T.Parallel(rows, lanes, per_lane):
                    column = column_of(config, step, lane, j)
                    term = weight_of(spec, operands, column) * tile[i, lane, j]
                    terms[i, lane, j] = T.if_then_else(column < n, term, 0.0)
                T.reduce_sum(terms, lane_spread, dim=2, clear=False)
                if spec.weight is not None:
                    for i, lane, j in T.Parallel(rows, lanes, per_lane):
                        column = column_of(config, step, lane, j)
                        terms[i, lane, j] = T.if_then_else(column < n, weight_of(spec, operands, column), 0.0)
                    T.reduce_sum(terms, lane_weight, dim=2, clear=False)
            T.reduce_max(tile, lane_max, dim=2, clear=False)
            for i, lane in T.Parallel(rows, lanes):
                old_base[i, lane] = base[i, lane]
                base[i, lane] = lane_max[i, lane] * unit
                lane_sum[i, lane] *= power(old_base[i, lane] - finite(base[i, lane]))
            for i, lane, j in T.Parallel(rows, lanes, per_lane):
                tile[i, lane, j] = weight(tile[i, lane, j], finite(base[i, lane]))
            T.reduce_sum(tile, lane_sum, dim=2, clear=False)

    T.reduce_max(lane_max, row_max, dim=1)
    for i, lane in T.Parallel(rows, lanes):  # a lane of -inf alone has a sum of 0, or NaN
        shift = base[i, lane] - finite(row_max[i]) * unit
        lane_sum[i, lane] *= T.if_then_else(T.isinf(base[i, lane]), 1.0, power(shift))
    T.reduce_sum(lane_sum, row_sum, dim=1)
    if spec.smoothed:
        T.reduce_sum(lane_spread, spread, dim=1)
        T.reduce_sum(lane_weight, total_weight, dim=1)
    for i in T.Parallel(rows):
        # The sum counts from the rounded product of the maximum and log2(e): what was rounded off is put back.
        row_max[i] = finite(row_max[i])
        row_sum[i] = T.log(row_sum[i]) + (T.fma(-row_max[i], unit, row_max[i] * unit) * math.log(2) if fused else 0.0)
    return row_max, row_sum, spread, total_weight


@T.macro
def loss_of(spec: Spec, operands: Any, found: Any, i: Any, own: Any, picked: Any, n: Any, options: Any) -> Any:
    """Compute the loss of row i from `found` of `sum_exponentials`, its class and that class's logit."""
    compute, (smoothing, z_loss) = compute_dtype(spec.dtype), options
    top, above = found[0][i], found[1][i]
    log_sum = top + above
    kept = (1.0 - smoothing) * weight_of(spec, operands, own)
    spread_loss = 0.0
    if spec.smoothed:
        total = T.cast(n, compute) if spec.weight is None else found[3][i]
        spread_loss = smoothing / T.cast(n, compute) * (total * log_sum - found[2][i])
    return kept * (top - picked + above) + spread_loss + z_loss * log_sum * log_sum


@library_jit
def loss_rows(config: Config, spec: Spec) -> Any:
    """Build the kernel for `loss[r]` and `lse[r]` of row r."""
    compute, rows = compute_dtype(spec.dtype), config.rows
    m, n = T.dynamic("m"), dynamic("n", config.alignment)
    logits_type = strided("logits", (m, n), spec.dtype, True, config.alignment)
    weights = [] if spec.weight is None else [T.Tensor((n,), spec.weight)]

    @T.prim_func
    def cross_entropy(
        logits: logits_type,
        target: strided("target", (m,), spec.target, unit=False),
        *operands: weights,
        loss: T.Tensor((m,), compute),
        lse: T.Tensor((m,), compute),
        ignore_index: T.int64,
        smoothing: compute,
        z_loss: compute,
    ):
        with T.Kernel(T.ceildiv(m, rows), threads=config.threads) as bx:
            found = sum_exponentials(config, spec, logits, operands, bx * rows)
            for i in T.Parallel(rows):
                row = bx * rows + i
                label = T.cast(target[row], "int64")
                own = T.max(T.min(label, T.cast(n, "int64") - 1), 0)
                picked = T.cast(logits[row, own], compute)
                value = loss_of(spec, operands, found, i, own, picked, n, (smoothing, z_loss))
                known = T.if_then_else(label == own, value, T.cast(math.nan, compute))
                loss[row] = T.if_then_else(label == ignore_index, 0.0, known)
                lse[row] = found[0][i] + found[1][i]

    return cross_entropy


@library_jit
def gradient_rows(config: Config, spec: Spec) -> Any:
    """Build the kernel for the gradient of `loss_rows` by the logits: one pass over each row."""
    compute = compute_dtype(spec.dtype)
    rows, width = config.rows, config.width
    m, n = T.dynamic("m"), dynamic("n", config.alignment)
    logits_type = strided("logits", (m, n), spec.dtype, True, config.alignment)
    weights = [] if spec.weight is None else [T.Tensor((n,), spec.weight)]
    uneven = spec.smoothed and spec.weight is not None

    @T.prim_func
    def cross_entropy_gradient(
        grad: strided("grad", (m,), compute, unit=False),
        logits: logits_type,
        target: strided("target", (m,), spec.target, unit=False),
        lse: strided("lse", (m,), compute, unit=False),
        *operands: weights,
        out: T.Tensor((m, n), spec.dtype),
        ignore_index: T.int64,
        smoothing: compute,
        z_loss: compute,
    ):
        with T.Kernel(T.ceildiv(m, rows), threads=config.threads) as bx:
            log_sum = T.alloc_fragment((rows,), compute)
            factor = T.alloc_fragment((rows,), compute)
            own_factor = T.alloc_fragment((rows,), compute)
            each_factor = T.alloc_fragment((rows,), compute)
            total_weight = T.alloc_fragment((rows,), compute)
            own = T.alloc_fragment((rows,), "int32")
            if uneven:
                terms = T.alloc_fragment((rows, width), compute)
                T.clear(total_weight)
                for step in T.serial(T.ceildiv(n, width)):
                    for i, j in T.Parallel(rows, width):
                        column = step * width + j
                        terms[i, j] = T.if_then_else(column < n, weight_of(spec, operands, column), 0.0)
                    T.reduce_sum(terms, total_weight, dim=1, clear=False)
            for i in T.Parallel(rows):
                row = bx * rows + i
                label = T.cast(target[row], "int64")
                inside = T.max(T.min(label, T.cast(n, "int64") - 1), 0)
                known = T.if_then_else(label == inside, grad[row], T.cast(math.nan, compute))
                scale = T.if_then_else(label == ignore_index, 0.0, known)
                each = smoothing / T.cast(n, compute)
                total = total_weight[i] if uneven else T.cast(n, compute)
                kept = (1.0 - smoothing) * weight_of(spec, operands, inside)
                own[i] = T.if_then_else(label == ignore_index, -1, T.cast(inside, "int32"))
                log_sum[i] = lse[row]
                own_factor[i] = scale * kept
                each_factor[i] = scale * each
                factor[i] = scale * (kept + (each * total if spec.smoothed else 0.0) + 2.0 * z_loss * lse[row])
            for step in T.serial(T.ceildiv(n, width)):
                for i, j in T.Parallel(rows, width):
                    column = step * width + j
                    probability = T.exp(T.cast(logits[bx * rows + i, column], compute) - log_sum[i])
                    own_slope = T.if_then_else(column == own[i], own_factor[i], 0.0)
                    each_slope = each_factor[i] * weight_of(spec, operands, column) if spec.smoothed else 0.0
                    # An ignored row gives 0 whatever its logits are.
                    slope = T.if_then_else(own[i] < 0, 0.0, factor[i] * probability - own_slope - each_slope)
                    out[bx * rows + i, column] = T.cast(slope, spec.dtype)

    return cross_entropy_gradient


@library_jit
def loss_and_gradient_rows(config: Config, spec: Spec) -> Any:
    """Compute `loss[r]` of row r, and replace its logits, which may be capped softly, by `grad[r]` times its gradient.

    The second reading of a row finds it in the cache. The class's logit is read before anything is written. Each step
    loads all pieces before it stores any. The compiler of CUDA moves no load before a store to the same tensor.
    """
    compute, rows, lanes = compute_dtype(spec.dtype), config.rows, config.lanes
    per_lane = config.pieces * config.vector
    m, n = T.dynamic("m"), dynamic("n", config.alignment)
    logits_type = strided("logits", (m, n), spec.dtype, True, config.alignment)
    weights = [] if spec.weight is None else [T.Tensor((n,), spec.weight)]

    @T.prim_func
    def cross_entropy_in_place(
        grad: strided("grad", (m,), compute, unit=False),
        logits: logits_type,
        target: strided("target", (m,), spec.target, unit=False),
        *operands: weights,
        loss: T.Tensor((m,), compute),
        ignore_index: T.int64,
        smoothing: compute,
        z_loss: compute,
        cap: compute,
    ):
        with T.Kernel(T.ceildiv(m, rows), threads=config.threads) as bx:
            tile = T.alloc_fragment((rows, lanes, per_lane), spec.dtype)
            picked = T.alloc_fragment((rows,), compute)
            log_sum = T.alloc_fragment((rows,), compute)
            factor = T.alloc_fragment((rows,), compute)
            own_factor = T.alloc_fragment((rows,), compute)
            each_factor = T.alloc_fragment((rows,), compute)
            own = T.alloc_fragment((rows,), "int32")
            counted = T.alloc_fragment((rows,), "int32")
            if config.is_gpu:
                T.annotate_layout({tile: config.layout})
            found = sum_exponentials(config, spec, logits, operands, bx * rows)
            for i in T.Parallel(rows):
                row = bx * rows + i
                label = T.cast(target[row], "int64")
                inside = T.max(T.min(label, T.cast(n, "int64") - 1), 0)
                scale = T.if_then_else(label == inside, grad[row], T.cast(math.nan, compute))
                each = smoothing / T.cast(n, compute)
                kept = (1.0 - smoothing) * weight_of(spec, operands, inside)
                own[i] = T.cast(inside, "int32")
                picked[i] = T.cast(logits[row, inside], compute)
                counted[i] = T.if_then_else(label == ignore_index, 0, 1)
                log_sum[i] = found[0][i] + found[1][i]
                total = found[3][i] if spec.smoothed and spec.weight is not None else T.cast(n, compute)
                spread = each * total if spec.smoothed else 0.0
                own_factor[i] = scale * kept
                each_factor[i] = scale * each
                factor[i] = scale * (kept + spread + 2.0 * z_loss * log_sum[i])
            for step in T.serial(T.ceildiv(n, config.width)):
                for i, lane, j in T.Parallel(rows, lanes, per_lane):
                    tile[i, lane, j] = logits[bx * rows + i, column_of(config, step, lane, j)]
                for i, lane, j in T.Parallel(rows, lanes, per_lane):
                    column = column_of(config, step, lane, j)
                    logit = T.cast(tile[i, lane, j], compute)
                    own_slope = T.if_then_else(column == own[i], own_factor[i], 0.0)
                    each_slope = each_factor[i] * weight_of(spec, operands, column) if spec.smoothed else 0.0
                    slope = factor[i] * T.exp(logit - log_sum[i]) - own_slope - each_slope
                    share = logit / cap
                    slope *= 1.0 - share * share if spec.capped else 1.0
                    # An ignored row gives 0 whatever its logits are.
                    logits[bx * rows + i, column] = T.cast(T.if_then_else(counted[i] == 0, 0.0, slope), spec.dtype)
            for i in T.Parallel(rows):
                row = bx * rows + i
                value = loss_of(spec, operands, found, i, own[i], picked[i], n, (smoothing, z_loss))
                known = T.if_then_else(T.cast(target[row], "int64") == own[i], value, T.cast(math.nan, compute))
                loss[row] = T.if_then_else(counted[i] == 0, 0.0, known)

    return cross_entropy_in_place


def _empty_sums(args: CrossEntropyArgs[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the loss and the log-sum-exp of each row."""
    loss = args.logits.new_empty(args.target.shape, dtype=compute_dtype(args.logits.dtype))
    return loss, torch.empty_like(loss)


@entry_function(CrossEntropyArgs, loss_reference, _empty_sums)
def cross_entropy(
    args: CrossEntropyArgs[torch.Tensor], loss: torch.Tensor, lse: torch.Tensor, config: Config | None = None
) -> bool:
    """Compute `loss_reference` with the kernel; `config` replaces that of `config_for`."""
    logits, target = args.logits, args.target
    if not logits.numel():
        return False
    x = as_rows(logits)
    kernel, weights = _kernel(loss_rows, (x,), target, args.weight, args.label_smoothing, config)
    kernel(x, target.reshape(-1), *weights, loss.view(-1), lse.view(-1), *_last_arguments(args))
    return True


@entry_function(CrossEntropyBackwardArgs, gradient_reference, lambda args: args.logits.new_empty(args.logits.shape))
def cross_entropy_backward(
    args: CrossEntropyBackwardArgs[torch.Tensor], out: torch.Tensor, config: Config | None = None
) -> bool:
    """Compute `gradient_reference` with the kernel; `config` replaces that of `config_for`."""
    logits, target = args.logits, args.target
    if not logits.numel():
        return False
    x = as_rows(logits)
    result = out.view(x.shape)
    kernel, weights = _kernel(gradient_rows, (x, result), target, args.weight, args.label_smoothing, config)
    kernel(args.grad.reshape(-1), x, target.reshape(-1), args.lse.reshape(-1), *weights, result, *_last_arguments(args))
    return True


def _last_arguments(args: Any) -> tuple[int, float, float]:
    """Return what each kernel takes last: the ignored class, the share of smoothing, the weight of log(z)^2."""
    return int(args.ignore_index), float(args.label_smoothing), float(args.z_loss)


def loss_and_gradient(
    grad: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    loss: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    config: Config | None = None,
) -> None:
    """Write the losses of rows into `loss` `[M]`, and over `logits` `[M, N]` `grad` `[M]` times their gradient.

    softcap: logits are `softcap * tanh(x / softcap)`; then the gradient is that by x. The rows of logits are dense.
    """
    capped = softcap is not None
    kernel, weights = _kernel(loss_and_gradient_rows, (logits,), target, weight, label_smoothing, config, capped)
    numbers = int(ignore_index), float(label_smoothing), float(z_loss), float(softcap or 1.0)
    kernel(grad, logits, target, *weights, loss, *numbers)


def _kernel(
    entry: Any,
    rows: tuple[torch.Tensor, ...],
    target: torch.Tensor,
    weight: torch.Tensor | None,
    label_smoothing: float,
    config: Config | None,
    capped: bool = False,
) -> tuple[Any, list[torch.Tensor]]:
    """Compile kernel `entry` for a call; return it and the classes' weights as it takes them.

    rows: logits `[M, N]`, and the gradient if the kernel writes one beside them. config replaces that of `config_for`.
    """
    machine, n = machine_of(rows[0]), rows[0].shape[1]
    config = config or config_for(n, vector_of(rows, (n,)), machine)
    dtype = None if weight is None else weight.dtype
    spec = Spec(rows[0].dtype, target.dtype, dtype, label_smoothing != 0.0, capped)
    return machine.kernel(entry)(config, spec), [] if weight is None else [weight.contiguous()]
