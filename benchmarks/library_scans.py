# SPDX-License-Identifier: Apache-2.0
"""Cases of library.py for layers that scan: Mamba-2's, the delta rule's, linear attention's, RWKV-7's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.library_case import ALL, Case, Make
from torch_tile.kernels.linear_attention import delta, delta_backward, linear, rwkv7, step
from torch_tile.kernels.ssm import conv, ssd, update


def scans() -> Iterator[Case]:
    """Yield cases of Mamba-2 layers: 8 heads of 64 channels and 128 states in 2 groups; and one of odd sizes."""
    usual, odd = (2, 1024, 8, 64, 2, 128), (1, 77, 3, 23, 1, 41)
    cases = {"bf16": (torch.bfloat16, usual), "bf16 odd": (torch.bfloat16, odd), "fp32": (torch.float32, usual)}
    for name, (dtype, sizes) in (cases | {"fp64": (torch.float64, usual)}).items():
        yield Case(f"causal_conv1d {name}", _convolution(dtype, *sizes[:2], sizes[2] * sizes[3]))
        yield Case(f"ssd_chunk_scan {name}", _scan(dtype, *sizes))
        yield Case(f"selective_state_update {name}", _scan_update(dtype, *sizes))
    yield Case("ssd_chunk_scan bf16 many heads", _scan(torch.bfloat16, 4, 1024, 64, 64, 2, 128, gated=False))
    yield Case("ssd_chunk_scan fp16 many small heads", _scan(torch.float16, 8, 200, 16, 40, 1, 56, gated=False))
    yield from (Case(f"ssd_chunk_scan packed {h}", _scan(torch.float16, 2, 300, h, 72, 2, 136, True)) for h in (4, 64))
    for name, dtype in ALL.items():
        for size in (64, 128, 256)[: 1 if dtype == torch.float64 else 3]:
            yield Case(f"gated_delta_rule {name} {size}", _delta_rule(dtype, 2, 2048, 4, 8, size, size))
    yield Case("gated_delta_rule bf16 many heads", _delta_rule(torch.bfloat16, 2, 1024, 8, 16, 128, 128))
    yield Case("gated_delta_rule bf16 odd", _delta_rule(torch.bfloat16, 1, 77, 3, 3, 41, 23))
    yield Case("gated_delta_rule bf16 packed", _delta_rule(torch.bfloat16, 1, 1024, 4, 8, 128, 128, True))
    for name, dtype in ALL.items():
        for size in (64, 128, 256)[: 1 if dtype == torch.float64 else 3]:
            yield Case(f"kda {name} {size}", _delta_rule(dtype, 2, 1024, 8, 8, size, size, channels=True))
    yield Case("kda bf16 odd packed", _delta_rule(torch.bfloat16, 1, 77, 3, 3, 41, 23, True, channels=True))
    for name, channels in (("gated_linear_attention", False), ("gla", True)):
        for of, size in ((torch.bfloat16, 128), (torch.bfloat16, 256), (torch.float32, 128)):
            yield Case(f"{name} {of} {size}", _linear_attention(of, 2, 1024, 8, size, channels))
    for of, size in ((torch.bfloat16, 64), (torch.bfloat16, 256), (torch.float32, 128)):
        yield Case(f"rwkv7 {of} {size}", _rwkv7(of, 2, 1024, 8, size))


def _convolution(dtype: torch.dtype, batch: int, length: int, channels: int) -> Callable[[Make], object]:
    """Return calls of `causal_conv1d`, its update and its backward."""

    def call(make: Make) -> object:
        x, weight, bias = make((batch, length, channels), dtype), make((channels, 4), dtype), make((channels,), dtype)
        given = weight, bias, make((batch, 3, channels), dtype), "silu"
        conv.causal_conv1d_update(x[:, 0], make((batch, channels, 4), dtype), weight, bias, "silu")
        return conv.causal_conv1d(x, *given), conv.causal_conv1d_backward(x, x, *given)

    return call


def _scan(
    dtype: torch.dtype,
    batch: int,
    length: int,
    heads: int,
    head_dim: int,
    groups: int,
    states: int,
    packed: bool = False,
    gated: bool = True,
) -> Callable[[Make], object]:
    """Return calls of `ssd_chunk_scan` and its backward."""

    def call(make: Make) -> object:
        x, wide = make((batch, length, heads, head_dim), dtype), torch.promote_types(dtype, torch.float32)
        keys = make((batch, length, groups, states), dtype)
        numbers, state = make((heads,), wide), make((batch, heads, head_dim, states), wide)
        given = x, make((batch, length, heads), dtype), numbers, keys, keys, numbers
        index = make((batch, length), torch.int32) if packed else None
        ssd.ssd_chunk_scan(*given, x if gated else None, numbers, state, True, seq_idx=index)
        return ssd.ssd_chunk_scan_backward(x, state, *given, numbers, state, True, seq_idx=index)

    return call


def _scan_update(
    dtype: torch.dtype, batch: int, length: int, heads: int, head_dim: int, groups: int, states: int
) -> Callable[[Make], object]:
    """Return a call of `selective_state_update`."""

    def call(make: Make) -> object:
        x, channel = make((batch, heads, head_dim), dtype), make((heads, head_dim), dtype)
        state, A = make((batch, heads, head_dim, states), dtype), make((heads, head_dim, states), torch.float32)
        keys = make((batch, groups, states), dtype)
        return update.selective_state_update(state, x, x, A, keys, keys, channel, x, channel, True)

    return call


def _delta_rule(
    dtype: torch.dtype,
    batch: int,
    length: int,
    groups: int,
    heads: int,
    keys: int,
    values: int,
    packed: bool = False,
    channels: bool = False,
) -> Callable[[Make], object]:
    """Return calls of `gated_delta_rule`, its step and its backward."""

    def call(make: Make) -> object:
        q, v = make((batch, length, groups, keys), dtype), make((batch, length, heads, values), dtype)
        g, state = make((batch, length, heads), torch.float32), make((batch, heads, keys, values), torch.float32)
        decays = make((batch, length, heads, keys), torch.float32) if channels else g
        step.gated_delta_rule_step(state, q, q, v, decays, g, None, True)
        starts = make((batch + 1,), torch.int32) if packed else None
        given = q, q, v, decays, g, state, starts, None, True
        delta.gated_delta_rule(*given)
        return delta_backward.gated_delta_rule_backward(v, state, *given)

    return call


def _rwkv7(dtype: torch.dtype, batch: int, length: int, heads: int, size: int) -> Callable[[Make], object]:
    """Return calls of `rwkv7`, its step and its backward."""

    def call(make: Make) -> object:
        q, state = make((batch, length, heads, size), dtype), make((batch, heads, size, size), torch.float32)
        given = q, q, q, make((batch, length, heads, size), torch.float32), q, q
        rwkv7.rwkv7_step(state, *given)
        rwkv7.rwkv7(*given, state)
        return rwkv7.rwkv7_backward(q, state, *given, state)

    return call


def _linear_attention(
    dtype: torch.dtype, batch: int, length: int, heads: int, size: int, channels: bool
) -> Callable[[Make], object]:
    """Return calls of `gated_linear_attention`, its step and its backward."""

    def call(make: Make) -> object:
        q, state = make((batch, length, heads, size), dtype), make((batch, heads, size, size), torch.float32)
        given = q, q, q, make((batch, length, heads, *([size] if channels else [])), torch.float32)
        linear.gated_linear_attention_step(state, *given)
        linear.gated_linear_attention(*given, state)
        return linear.gated_linear_attention_backward(q, state, *given, state)

    return call
