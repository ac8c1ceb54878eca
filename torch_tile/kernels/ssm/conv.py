# SPDX-License-Identifier: Apache-2.0
"""Causal depthwise convolution over time, its gradient, and its step by one token.

Assumes that `ops` checked shapes and dtypes. A channel has `width` taps; sums are in float32 (float64 for float64).
"""

from __future__ import annotations

from dataclasses import dataclass
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
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.ssm.args import CausalConv1dArgs, CausalConv1dBackwardArgs, CausalConv1dUpdateArgs

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Spec:
    """Compile-time facts of a convolution kernel, besides its `Config`.

    `weight`, `bias`, `state` and `index` are dtypes, None for absent operands. `length` is that of an update's
    state. With `silu` it is applied to the sum. `vector` elements divide the channels and the strides of rows.
    """

    dtype: torch.dtype
    weight: torch.dtype
    bias: torch.dtype | None
    state: torch.dtype | None
    width: int
    silu: bool
    vector: int = 1
    length: int = 0
    index: torch.dtype | None = None


@dataclass(frozen=True)
class Config:
    """Tiles of `rows` times and `columns` channels. A block of the gradient takes `steps` tiles in order."""

    rows: int
    columns: int
    threads: int = 128
    steps: int = 1


def config_for(machine: Machine) -> Config:
    """Choose the tiles of the forward pass."""
    return Config(16, 256) if machine.is_gpu else Config(16, 64)


def gradient_config_for(length: int, channels: int, batch: int, dtype: torch.dtype, machine: Machine) -> Config:
    """Choose the tiles of the gradient, with two waves of blocks, as a second kernel adds up their sums."""
    rows, columns = 16, 32 if dtype.itemsize == 8 else 64  # of which registers hold a sum for each tap
    tiles = -(-length // rows)
    wanted = -(-8 * machine.num_sms // max(1, batch * -(-channels // columns)))
    steps = 1
    while steps * wanted < tiles:  # a power of two, so that few kernels are compiled
        steps *= 2
    return Config(rows, columns, steps=steps)


def reference(*given: Any, **named: Any) -> torch.Tensor:
    """Compute `tile.causal_conv1d` in plain torch. Takes the arguments of `CausalConv1dArgs`."""
    args: CausalConv1dArgs[torch.Tensor] = CausalConv1dArgs(*given, **named)
    return activated(sums(args), args.activation).to(args.x.dtype).contiguous()


def sums(args: CausalConv1dArgs[torch.Tensor]) -> torch.Tensor:
    """Compute the convolution in plain torch before its activation, `[B, L, D]` in the dtype of sums."""
    x, weight, bias, initial_state, _, seq_idx = args
    compute, width = compute_dtype(x.dtype), weight.shape[1]
    before = x.new_zeros(x.shape[0], width - 1, x.shape[2]) if initial_state is None else initial_state
    padded = torch.cat([before.to(compute), x.to(compute)], 1)
    terms = (
        padded[:, k : k + x.shape[1]] * weight[:, k].to(compute) * in_sequence(seq_idx, width - 1 - k)
        for k in range(width)
    )
    total = sum(terms, torch.zeros((), dtype=compute, device=x.device))
    return total if bias is None else total + bias.to(compute)


def in_sequence(seq_idx: torch.Tensor | None, back: int) -> Any:
    """Return whether each position and the one `back` earlier share a sequence, `[B, L, 1]`; 1 for one sequence."""
    if seq_idx is None:
        return 1
    earlier = torch.nn.functional.pad(seq_idx, (back, 0), value=-1)[:, : seq_idx.shape[1]]
    inside = torch.arange(seq_idx.shape[1], device=seq_idx.device) >= back
    return ((earlier == seq_idx) & inside)[..., None]


def activated(total: torch.Tensor, activation: str) -> torch.Tensor:
    """Apply the named activation in plain torch."""
    return torch.nn.functional.silu(total) if activation == "silu" else total


def gradient_reference(*given: Any, **named: Any) -> Gradients:
    """Compute `tile.causal_conv1d_backward` in plain torch. Takes the arguments of `CausalConv1dBackwardArgs`."""
    args: CausalConv1dBackwardArgs[torch.Tensor] = CausalConv1dBackwardArgs(*given, **named)
    grad, x, weight, bias, initial_state, activation, seq_idx = args
    compute, width, length = compute_dtype(x.dtype), weight.shape[1], x.shape[1]
    slope = grad.to(compute)
    if activation == "silu":
        total = sums(args.forward)
        gate = torch.sigmoid(total)
        slope = slope * gate * (1.0 + total * (1.0 - gate))
    before = x.new_zeros(x.shape[0], width - 1, x.shape[2]) if initial_state is None else initial_state
    padded = torch.cat([before.to(compute), x.to(compute)], 1)
    whole = torch.zeros_like(padded)
    slopes = [slope * in_sequence(seq_idx, width - 1 - k) for k in range(width)]
    for k in range(width):
        whole = whole + torch.nn.functional.pad(slopes[k] * weight[:, k].to(compute), (0, 0, k, width - 1 - k))
    dweight = torch.stack([(slopes[k] * padded[:, k : k + length]).sum((0, 1)) for k in range(width)], 1)
    dbias = slope.sum((0, 1)) if bias is not None else slope.new_empty(0)
    dstate = whole[:, : width - 1] if initial_state is not None else slope.new_empty(0)
    return (
        whole[:, width - 1 :].to(x.dtype).contiguous(),
        dweight.to(weight.dtype),
        dbias.to(x.dtype if bias is None else bias.dtype),
        dstate.to(x.dtype if initial_state is None else initial_state.dtype).contiguous(),
    )


def update_reference(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "none",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `tile.causal_conv1d_update` in plain torch."""
    compute = compute_dtype(x.dtype)
    window = torch.cat([state.to(compute), x.to(compute)[..., None]], -1)
    total = (window[..., -weight.shape[1] :] * weight.to(compute)).sum(-1)
    total = total if bias is None else total + bias.to(compute)
    return activated(total, activation).to(x.dtype), window[..., 1:].to(state.dtype).contiguous()


def tensor_types(spec: Spec, b: Any, length: Any, d: Any) -> tuple[Any, Any, list[Any]]:
    """Return the tensor types of x and of the weights. Those of a given bias, state or numbers of sequences follow."""
    bias = [] if spec.bias is None else [strided("bias", (d,), spec.bias, unit=False)]
    state = [] if spec.state is None else [strided("state", (b, spec.width - 1, d), spec.state, unit=False)]
    x = strided("x", (b, length, d), spec.dtype, multiple=spec.vector)
    index = [] if spec.index is None else [strided("seq_idx", (b, length), spec.index, unit=False)]
    return x, strided("weight", (d, spec.width), spec.weight, unit=False), [*bias, *state, *index]


@T.macro
def input_at(spec: Spec, x: Any, others: Any, sequence: Any, time: Any, channel: Any, output: Any) -> Any:
    """Return the input at a time for an output. Before the beginning it is the state's, or 0, as in other sequences."""
    compute, last = compute_dtype(spec.dtype), x.shape[1] - 1
    here = T.cast(x[sequence, T.max(time, 0), channel], compute)
    if spec.index is not None:
        ids = others[-1]
        same = ids[sequence, T.min(T.max(time, 0), last)] == ids[sequence, T.min(output, last)]
        return T.if_then_else(T.logical_and(time >= 0, same), here, 0.0)
    if spec.state is None:
        return T.if_then_else(time >= 0, here, 0.0)
    before = T.cast(others[-1][sequence, T.min(T.max(time + spec.width - 1, 0), spec.width - 2), channel], compute)
    return T.if_then_else(time >= 0, here, before)


@T.macro
def load_taps(spec: Spec, config: Config, weight: Any, others: Any, first: Any, taps: Any) -> None:
    """Load the taps of a block's channels, and their bias as the last row."""
    compute, channels = compute_dtype(spec.dtype), weight.shape[0]
    for k, j in T.Parallel(spec.width, config.columns):
        taps[k, j] = T.cast(weight[T.min(first + j, channels - 1), k], compute)
    for j in T.Parallel(config.columns):
        given = 0.0 if spec.bias is None else T.cast(others[0][T.min(first + j, channels - 1)], compute)
        taps[spec.width, j] = given


@library_jit
def convolve(config: Config, spec: Spec) -> Any:
    """Build the forward kernel: the causal convolution of a tile of times and channels, with its activation."""
    compute, rows, columns = compute_dtype(spec.dtype), config.rows, config.columns
    numbers = tuple(range(spec.width))  # a tuple, so that loops over taps are unrolled
    b, length = T.dynamic("b, length")
    d = dynamic("d", spec.vector)
    x_type, weight_type, other_types = tensor_types(spec, b, length, d)

    @T.prim_func
    def causal_conv1d(x: x_type, weight: weight_type, *others: other_types, out: T.Tensor((b, length, d), spec.dtype)):
        with T.Kernel(T.ceildiv(d, columns), T.ceildiv(length, rows), b, threads=config.threads) as (bx, by, bz):
            taps = T.alloc_shared((spec.width + 1, columns), compute)
            load_taps(spec, config, weight, others, bx * columns, taps)
            for i, j in T.Parallel(rows, columns):
                total = taps[spec.width, j]
                for k in numbers:
                    time = by * rows + i
                    value = input_at(spec, x, others, bz, time + (k - spec.width + 1), bx * columns + j, time)
                    total = total + taps[k, j] * value
                if spec.silu:
                    total = total / (1.0 + T.exp(-total))
                out[bz, by * rows + i, bx * columns + j] = T.cast(total, spec.dtype)

    return causal_conv1d


@library_jit
def convolve_back(config: Config, spec: Spec) -> Any:
    """Build the kernel for the gradients of x and the state, and for parts of those of weights and bias."""
    compute, rows, columns, width = compute_dtype(spec.dtype), config.rows, config.columns, spec.width
    halo, numbers = width - 1, tuple(range(width))
    b, length, parts = T.dynamic("b, length, parts")
    d = dynamic("d", spec.vector)
    x_type, weight_type, other_types = tensor_types(spec, b, length, d)
    dstate = [] if spec.state is None else [T.Tensor((b, halo, d), spec.state)]

    @T.prim_func
    def causal_conv1d_gradient(
        grad: strided("grad", (b, length, d), spec.dtype, multiple=spec.vector),
        x: x_type,
        weight: weight_type,
        *others: [*other_types, *dstate],
        dx: T.Tensor((b, length, d), spec.dtype),
        sums: T.Tensor((b, parts, width + 1, d), compute),
    ):
        with T.Kernel(T.ceildiv(d, columns), parts, b, threads=config.threads) as (bx, by, bz):
            given = others[: len(other_types)]
            taps = T.alloc_shared((width + 1, columns), compute)
            slopes = T.alloc_shared((rows + halo, columns), compute)
            terms = [T.alloc_fragment((rows, columns), compute) for _ in range(width + 1)]
            total = [T.alloc_fragment((columns,), compute) for _ in range(width + 1)]
            load_taps(spec, config, weight, others, bx * columns, taps)
            for term in terms:
                T.clear(term)
            for step in T.serial(config.steps):
                first = (by * config.steps + step) * rows
                for i, j in T.Parallel(rows + halo, columns):
                    channel = bx * columns + j
                    time = first + i
                    slope = T.cast(grad[bz, T.min(time, length - 1), T.min(channel, d - 1)], compute)
                    if spec.silu:
                        value = taps[width, j]
                        for k in numbers:
                            value = value + taps[k, j] * input_at(spec, x, given, bz, time + (k - halo), channel, time)
                        gate = 1.0 / (1.0 + T.exp(-value))
                        slope = slope * gate * (1.0 + value * (1.0 - gate))
                    inside = T.logical_and(time < length, channel < d)
                    slopes[i, j] = T.if_then_else(inside, slope, 0.0)
                for i, j in T.Parallel(rows, columns):
                    found = 0.0 * taps[0, j]
                    for k in numbers:
                        part = taps[k, j] * slopes[i + (halo - k), j]
                        if spec.index is not None:
                            ids, last = given[-1], length - 1
                            later = T.min(first + i + (halo - k), last)
                            part = T.if_then_else(ids[bz, T.min(first + i, last)] == ids[bz, later], part, 0.0)
                        found = found + part
                    dx[bz, first + i, bx * columns + j] = T.cast(found, spec.dtype)
                for k in (*numbers, width):
                    for i, j in T.Parallel(rows, columns):
                        channel = bx * columns + j
                        time = T.min(first + i, length - 1)
                        factor = 1.0 if k == width else input_at(spec, x, given, bz, time + (k - halo), channel, time)
                        terms[k][i, j] += slopes[i, j] * factor
                if spec.state is not None:  # noqa: SIM102 - one is decided here, the other on the device
                    if first == 0:
                        for i, j in T.Parallel(halo, columns):
                            found = 0.0 * taps[0, j]
                            for k in numbers[:-1]:  # the input at time i - halo counts at the times up to i - halo + k
                                reached = T.max(i - k, 0)
                                part = taps[k, j] * slopes[reached, j]
                                found = found + T.if_then_else(i >= k, part, 0.0)
                            others[-1][bz, i, bx * columns + j] = T.cast(found, spec.state)
            for k in (*numbers, width):
                T.reduce_sum(terms[k], total[k], dim=0)
                for j in T.Parallel(columns):
                    sums[bz, by, k, bx * columns + j] = total[k][j]

    return causal_conv1d_gradient


@library_jit
def add_parts(config: Config, spec: Spec) -> Any:
    """Build the kernel that sums all blocks' parts of the gradients of weights and bias."""
    compute, rows, columns, width = compute_dtype(spec.dtype), config.rows, config.columns, spec.width
    parts, d = T.dynamic("parts, d")
    dbias = [] if spec.bias is None else [T.Tensor((d,), spec.bias)]

    @T.prim_func
    def causal_conv1d_add(
        sums: T.Tensor((parts, width + 1, d), compute), *others: dbias, dweight: T.Tensor((d, width), spec.weight)
    ):
        with T.Kernel(T.ceildiv(d, columns), width + 1, threads=config.threads) as (bx, k):
            terms = T.alloc_fragment((rows, columns), compute)
            total = T.alloc_fragment((columns,), compute)
            T.clear(terms)
            for step in T.serial(T.ceildiv(parts, rows)):
                for i, j in T.Parallel(rows, columns):
                    part = step * rows + i
                    value = sums[T.min(part, parts - 1), k, T.min(bx * columns + j, d - 1)]
                    terms[i, j] += T.if_then_else(part < parts, value, 0.0)
            T.reduce_sum(terms, total, dim=0)
            if k < width:
                for j in T.Parallel(columns):
                    dweight[bx * columns + j, k] = T.cast(total[j], spec.weight)
            elif spec.bias is not None:
                for j in T.Parallel(columns):
                    others[0][bx * columns + j] = T.cast(total[j], spec.bias)

    return causal_conv1d_add


@library_jit
def step(config: Config, spec: Spec) -> Any:
    """Build the kernel of one decoding step: the output of one token, and the shifted state."""
    compute, columns, width, length = compute_dtype(spec.dtype), config.columns, spec.width, spec.length
    numbers = tuple(range(width))
    b, d = T.dynamic("b, d")
    bias = [] if spec.bias is None else [strided("bias", (d,), spec.bias, unit=False)]

    @T.prim_func
    def causal_conv1d_update(
        x: strided("x", (b, d), spec.dtype, unit=False),
        state: strided("state", (b, d, length), spec.state, unit=False),
        weight: strided("weight", (d, width), spec.weight, unit=False),
        *others: bias,
        out: T.Tensor((b, d), spec.dtype),
        new_state: T.Tensor((b, d, length), spec.state),
    ):
        with T.Kernel(T.ceildiv(d, columns), b, threads=config.threads) as (bx, by):
            for j in T.Parallel(columns):
                channel = T.min(bx * columns + j, d - 1)
                token = T.cast(x[by, channel], compute)
                total = T.cast(weight[channel, width - 1], compute) * token
                if spec.bias is not None:
                    total = total + T.cast(others[0][channel], compute)
                for k in numbers[:-1]:
                    value = T.cast(state[by, channel, length - width + 1 + k], compute)
                    total = total + T.cast(weight[channel, k], compute) * value
                if spec.silu:
                    total = total / (1.0 + T.exp(-total))
                out[by, bx * columns + j] = T.cast(total, spec.dtype)
            for j, k in T.Parallel(columns, length):
                channel = T.min(bx * columns + j, d - 1)
                kept = T.cast(state[by, channel, T.min(k + 1, length - 1)], compute)
                value = T.if_then_else(k + 1 < length, kept, T.cast(x[by, channel], compute))
                new_state[by, bx * columns + j, k] = T.cast(value, spec.state)

    return causal_conv1d_update


@entry_function(CausalConv1dArgs, reference, lambda args: args.x.new_empty(args.x.shape))
def causal_conv1d(args: CausalConv1dArgs[torch.Tensor], out: torch.Tensor, config: Config | None = None) -> None:
    """Compute the convolution as `reference` does. `config` overrides the tiling."""
    if not out.numel():
        return
    args = args._replace(x=dense_last(args.x))
    machine = machine_of(args.x)
    config = config or config_for(machine)
    machine.kernel(convolve)(config, _spec(args, machine, out))(args.x, args.weight, *_given(args), out)


@entry_function(
    CausalConv1dBackwardArgs,
    gradient_reference,
    lambda args: empty_gradients(args.x, args.weight, args.bias, args.initial_state),
)
def causal_conv1d_backward(
    whole: CausalConv1dBackwardArgs[torch.Tensor], results: Gradients, config: Config | None = None
) -> bool:
    """Compute the gradients as `gradient_reference` does. `config` overrides the tiling."""
    args = whole.forward
    if not args.x.numel():
        return False
    args, grad, machine = args._replace(x=dense_last(args.x)), dense_last(whole.grad), machine_of(args.x)
    x, (batch, length, channels) = args.x, args.x.shape
    dx, dweight, dbias, dstate = results
    spec = _spec(args, machine, dx, grad)
    config = config or gradient_config_for(length, channels, batch, x.dtype, machine)
    parts = -(-length // (config.rows * config.steps))
    sums_of_parts = x.new_empty((batch, parts, spec.width + 1, channels), dtype=compute_dtype(x.dtype))
    states = [] if args.initial_state is None else [dstate]
    kernel = machine.kernel(convolve_back)(config, spec)
    kernel(grad, x, args.weight, *_given(args), *states, dx, sums_of_parts)
    adding = Config(8, 64) if machine.is_gpu else config
    machine.kernel(add_parts)(adding, Spec(spec.dtype, spec.weight, spec.bias, None, spec.width, False))(
        sums_of_parts.flatten(0, 1), *([] if args.bias is None else [dbias]), dweight
    )
    return True


def _given(args: CausalConv1dArgs[torch.Tensor]) -> list[torch.Tensor]:
    """Return the optional operands that are given, as kernels take them."""
    return [each for each in (args.bias, args.initial_state, args.seq_idx) if each is not None]


def empty_gradients(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, initial_state: torch.Tensor | None
) -> Gradients:
    """Allocate the results of `causal_conv1d_backward`. Gradients of absent operands are empty."""
    dbias = x.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    dstate = x.new_empty(0) if initial_state is None else initial_state.new_empty(initial_state.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias, dstate


@entry_function(
    CausalConv1dUpdateArgs,
    update_reference,
    lambda args: (args.x.new_empty(args.x.shape), args.state.new_empty(args.state.shape)),
)
def causal_conv1d_update(
    args: CausalConv1dUpdateArgs[torch.Tensor], out: torch.Tensor, new_state: torch.Tensor
) -> None:
    """Compute the update as `update_reference` does."""
    x, state, weight, bias, activation = args
    if out.numel():
        machine, width = machine_of(x), weight.shape[1]
        dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype, state.dtype
        spec = Spec(*dtypes, width, activation == "silu", length=state.shape[2])
        given = [] if bias is None else [bias]
        machine.kernel(step)(Config(1, 128), spec)(x, state, weight, *given, out, new_state)


def _spec(args: CausalConv1dArgs[torch.Tensor], machine: Machine, *dense: torch.Tensor) -> Spec:
    """Collect the compile-time facts of a call, with the widest vector that its strides allow."""
    x, weight, bias, initial_state, activation, seq_idx = args
    vector = vector_of((x, *dense), x.shape[2:]) if machine.is_gpu else 1
    bias_type, state, index = (None if t is None else t.dtype for t in (bias, initial_state, seq_idx))
    dtypes = x.dtype, weight.dtype, bias_type, state
    return Spec(*dtypes, weight.shape[1], activation == "silu", vector, index=index)
