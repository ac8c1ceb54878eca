# SPDX-License-Identifier: Apache-2.0
"""Scans and short convolutions under the names and arguments of mamba-ssm and causal-conv1d, over `torch.ops.tile`.

What packs sequences and is not documented here, and tables of states, are refused with a ValueError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_tile.diagnostics.arguments import explains_misfits, renames
from torch_tile.ops.checks import check_dims, check_size

Tensor = torch.Tensor
Run = Callable[..., Any]
ACTIVATIONS = {None: "none", "silu": "silu", "swish": "silu"}


def operator(name: str, *args: Any) -> Any:
    """Call an operator of ours."""
    return getattr(torch.ops.tile, name)(*args)


@explains_misfits
@renames(initial_state="initial_states")
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    run: Run = operator,
) -> Any:
    """Compute `tile.causal_conv1d` of channels-first tensors.

    Args:
        x: `[B, D, L]`; fastest where its channels are dense in memory.
        weight: `[D, W]`.
        bias: `[D]`.
        seq_idx: int32 or int64 `[B, L]`, the sequence of each time; without states.
        initial_states: `[B, D, W - 1]`.
        return_final_states: whether to return the last W - 1 times, too.
        final_states_out: refused.
        activation: None, "silu" or "swish".
        run: what calls operators.

    Returns:
        `[B, D, L]`, and with return_final_states `[B, D, W - 1]`.
    """
    refuse("causal_conv1d_fn", final_states_out=final_states_out)
    check_dims("causal_conv1d_fn", "x", x, 3, "[B, D, L]")
    check_dims("causal_conv1d_fn", "weight", weight, 2, "[D, W]")
    check_size("causal_conv1d_fn", "weight", weight, 0, x.shape[1], "x's channels, as x is [B, D, L]")
    if seq_idx is not None:
        refuse("causal_conv1d_fn", initial_states=initial_states, return_final_states=return_final_states or None)
    before = None if initial_states is None else initial_states.transpose(1, 2)
    name = activation_of("causal_conv1d_fn", activation)
    out = run("causal_conv1d", x.transpose(1, 2), weight, bias, before, name, seq_idx)
    if not return_final_states:
        return out.transpose(1, 2)
    taps = weight.shape[1] - 1
    state = x.new_zeros(*x.shape[:2], taps) if initial_states is None else initial_states.to(x.dtype)
    return out.transpose(1, 2), torch.cat([state, x], -1)[..., x.shape[2] :]


@explains_misfits
@renames(state="conv_state")
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    run: Run = operator,
) -> Tensor:
    """Compute `tile.causal_conv1d_update`, which writes the new state into `conv_state`.

    Args:
        x: `[B, D]` or `[B, D, L]`, tokens in order.
        conv_state: `[B, D, S]`, S at least W - 1; updated in place.
        weight: `[D, W]`.
        bias: `[D]`.
        activation: None, "silu" or "swish".
        cache_seqlens: refused.
        conv_state_indices: refused.
        run: what calls operators.

    Returns:
        x's shape.
    """
    refuse("causal_conv1d_update", cache_seqlens=cache_seqlens, conv_state_indices=conv_state_indices)
    name = activation_of("causal_conv1d_update", activation)
    tokens = [x] if x.dim() == 2 else list(x.unbind(-1))
    made, state = [], conv_state
    for token in tokens:
        out, state = run("causal_conv1d_update", token, state, weight, bias, name)
        made.append(out)
    conv_state.copy_(state)
    return made[0] if x.dim() == 2 else torch.stack(made, -1) if made else torch.empty_like(x)


@explains_misfits
def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    run: Run = operator,
) -> Any:
    """Compute `tile.ssd_chunk_scan` under the name and parameters of mamba_ssm.

    Args:
        x: `[B, L, H, P]`.
        dt: `[B, L, H]`.
        A: `[H]`.
        B: `[B, L, G, N]`.
        C: `[B, L, G, N]`.
        chunk_size: not needed: the result does not depend on it, and the kernels choose their own.
        D: `[H]` or `[H, P]`.
        z: `[B, L, H, P]`.
        dt_bias: `[H]`.
        initial_states: `[B, H, P, N]`.
        seq_idx: int32 or int64 `[B, L]`, the sequence of each time.
        cu_seqlens: `[N + 1]`, the first times of sequences that are packed into one row (B is 1), if seq_idx is not
            given.
        dt_softplus: whether the step size is a softplus.
        dt_limit: the least and the greatest step size.
        return_final_states: whether to return the last states, too.
        return_varlen_states: refused.
        run: what calls operators.

    Returns:
        `[B, L, H, P]`, and with return_final_states `[B, H, P, N]` in float32.
    """
    refuse("mamba_chunk_scan_combined", return_varlen_states=return_varlen_states or None)
    if seq_idx is None and cu_seqlens is not None:
        seq_idx = numbers_of("mamba_chunk_scan_combined", cu_seqlens, x)
    low, high = dt_limit
    limits = float(low), None if high == float("inf") else float(high)
    keys = B.to(x.dtype), C.to(x.dtype)
    more = initial_states, bool(dt_softplus), *limits, seq_idx
    out, states = run("ssd_chunk_scan", x, dt, A, *keys, D, z, dt_bias, *more)
    return (out, states) if return_final_states else out


@explains_misfits
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    run: Run = operator,
) -> Tensor:
    """Compute `tile.selective_state_update`, which writes the new state into `state`; without a head dimension there is
    one head.

    Args:
        state: `[B, P, N]` or `[B, H, P, N]`; updated in place.
        x: `[B, P]` or `[B, H, P]`.
        dt: as x.
        A: `[P, N]` or `[H, P, N]`.
        B: `[B, N]` or `[B, G, N]`.
        C: as B.
        D: `[P]` or `[H, P]`.
        z: as x.
        dt_bias: as D.
        dt_softplus: whether the step size is a softplus.
        state_batch_indices: refused.
        run: what calls operators.

    Returns:
        x's shape.
    """
    refuse("selective_state_update", state_batch_indices=state_batch_indices)

    whole = state if state.dim() == 4 else state[:, None]
    heads = [t if t.dim() == 3 else t[:, None] for t in (x, dt)]
    decay = A if A.dim() == 3 else A[None]
    keys = [t if t.dim() == 3 else t[:, None] for t in (B, C)]
    skip, bias = (t if t is None or t.dim() == 2 else t[None] for t in (D, dt_bias))
    gate = z if z is None or z.dim() == 3 else z[:, None]
    out, new = run("selective_state_update", whole, *heads, decay, *keys, skip, gate, bias, bool(dt_softplus))
    whole.copy_(new)
    found: Tensor = out.view(x.shape)
    return found


def numbers_of(function: str, cu_seqlens: Tensor, x: Tensor) -> Tensor:
    """Return the number of the sequence of each time, `[1, L]`, from the first times of packed sequences."""
    if x.shape[0] != 1:
        raise ValueError(f"{function}: x has {x.shape[0]} rows; expected 1, as sequences are packed by cu_seqlens")
    times = torch.arange(x.shape[1], device=x.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), times, right=True)[None]


def activation_of(function: str, activation: str | None) -> str:
    """Return the activation's name in our operators."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"{function}: activation is {activation!r}; expected None, 'silu' or 'swish'")
    return ACTIVATIONS[activation]


def refuse(function: str, **arguments: Any) -> None:
    """Raise a ValueError for arguments that are given but not supported."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{function}: {name} is not supported; expected None")
