# SPDX-License-Identifier: Apache-2.0
"""Linear attention token after token, for decoding, with and without the delta rule.

The state stays in registers between tokens.

Assumes that `ops` checked shapes and dtypes. Tensors may have any strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import compute_dtype, entry_function, into, machine_of, power_of_two, strided
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.linear_attention.args import GatedDeltaRuleStepArgs
from torch_tile.kernels.linear_attention.delta_torch import NORM_EPS, normalized
from torch_tile.kernels.linear_attention.tiles import most_keys


@dataclass(frozen=True)
class Config:
    """A block has all `keys` rows of a state and `columns` of its values."""

    keys: int
    columns: int = 8
    threads: int = 128


@dataclass(frozen=True)
class Spec:
    """Facts that the kernel is compiled for: the dtypes of operands, and whether q and k are normalized.

    Without beta the state adds values as they are. If `channels` decay, each channel of the keys does so by itself.
    With `reads` errors are what other keys read from the state.
    """

    dtype: torch.dtype
    g: torch.dtype
    beta: torch.dtype | None
    state: torch.dtype
    normalize: bool
    channels: bool
    reads: bool = False


def reference(*given: Any, reads: torch.Tensor | None = None, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `tile.gated_delta_rule_step` in plain torch, token after token; without beta nothing is corrected.

    reads: keys that errors come from, if not from k.
    """
    state, q, k, v, g, beta, scale, use_qk_l2norm = GatedDeltaRuleStepArgs(*given, **named)
    compute, share = compute_dtype(v.dtype), v.shape[2] // q.shape[2]
    q, k = (t.to(compute) for t in (q, k))
    if use_qk_l2norm:
        q, k = normalized(q), normalized(k)
    q = q * (max(1, int(q.shape[3])) ** -0.5 if scale is None else scale)
    q, k = (t if share == 1 else t.repeat_interleave(share, 2) for t in (q, k))
    asked = k if reads is None else reads.to(compute)
    now, outs = state.to(compute), []
    decay, values = torch.exp((g if g.dim() == 4 else g[..., None]).to(compute)), v.to(compute)
    for t in range(v.shape[1]):
        now, error = now * decay[:, t, :, :, None], values[:, t]
        if beta is not None:
            error = (error - torch.einsum("bhkv,bhk->bhv", now, asked[:, t])) * beta[:, t, :, None].to(compute)
        now = now + k[:, t, :, :, None] * error[:, :, None]
        outs.append(torch.einsum("bhkv,bhk->bhv", now, q[:, t]))
    out = torch.stack(outs, 1) if outs else values
    return out.to(v.dtype).contiguous(), now.to(state.dtype).contiguous()


@library_jit
def step(config: Config, spec: Spec) -> Any:
    """Build the kernel for the tokens' outputs and the last state, for some values of a head."""
    compute, rows, columns = compute_dtype(spec.dtype), config.keys, config.columns
    b, length, g_heads, h, n, p = T.dynamic("b, length, g_heads, h, n, p")
    beta = [] if spec.beta is None else [strided("beta", (b, length, h), spec.beta, unit=False)]
    reads = [strided("reads", (b, length, h, n), spec.dtype, unit=False)] if spec.reads else []

    @T.prim_func
    def gated_delta_rule_step(
        state: strided("state", (b, h, n, p), spec.state, unit=False),
        q: strided("q", (b, length, g_heads, n), spec.dtype, unit=False),
        k: strided("k", (b, length, g_heads, n), spec.dtype, unit=False),
        v: strided("v", (b, length, h, p), spec.dtype, unit=False),
        g: strided("g", (b, length, h, n) if spec.channels else (b, length, h), spec.g, unit=False),
        *others: [*beta, *reads],
        out: T.Tensor((b, length, h, p), spec.dtype),
        new_state: T.Tensor((b, h, n, p), spec.state),
        scale: compute,
    ):
        with T.Kernel(T.ceildiv(p, columns), h, b, threads=config.threads) as (bx, head, sequence):
            group, at = head // (h // g_heads), bx * columns
            now = T.alloc_fragment((rows, columns), compute)
            terms = T.alloc_fragment((rows, columns), compute)
            error = T.alloc_fragment((columns,), compute)
            keys = T.alloc_fragment((rows,), compute)
            queries = T.alloc_fragment((rows,), compute)
            if spec.channels:
                keeps = T.alloc_fragment((rows,), compute)
            squares = T.alloc_fragment((rows,), compute)
            of_keys = T.alloc_fragment((1,), compute)
            of_queries = T.alloc_fragment((1,), compute)
            for i, j in T.Parallel(rows, columns):
                given = state[sequence, head, T.min(i, n - 1), T.min(at + j, p - 1)]
                now[i, j] = T.if_then_else(i < n, T.cast(given, compute), 0.0)
            for t in T.serial(length):
                if not spec.channels:
                    keep = T.exp(T.cast(g[sequence, t, head], compute))
                for i in T.Parallel(rows):
                    row = T.min(i, n - 1)
                    if spec.channels:
                        keeps[i] = T.exp(T.cast(g[sequence, t, head, row], compute))
                    keys[i] = T.if_then_else(i < n, T.cast(k[sequence, t, group, row], compute), 0.0)
                    queries[i] = T.if_then_else(i < n, T.cast(q[sequence, t, group, row], compute) * scale, 0.0)
                if spec.normalize:
                    for i in T.Parallel(rows):
                        squares[i] = keys[i] * keys[i]
                    T.reduce_sum(squares, of_keys, dim=0)
                    for i in T.Parallel(rows):
                        value = T.cast(q[sequence, t, group, T.min(i, n - 1)], compute)
                        squares[i] = T.if_then_else(i < n, value * value, 0.0)
                    T.reduce_sum(squares, of_queries, dim=0)
                    for i in T.Parallel(rows):
                        keys[i] = keys[i] / T.sqrt(of_keys[0] + NORM_EPS)
                        queries[i] = queries[i] / T.sqrt(of_queries[0] + NORM_EPS)
                for i, j in T.Parallel(rows, columns):
                    now[i, j] *= keeps[i] if spec.channels else keep
                    read = T.cast(others[-1][sequence, t, head, T.min(i, n - 1)], compute) if spec.reads else keys[i]
                    terms[i, j] = now[i, j] * read
                if spec.beta is not None:
                    T.reduce_sum(terms, error, dim=0)
                for j in T.Parallel(columns):
                    value = T.cast(v[sequence, t, head, T.min(at + j, p - 1)], compute)
                    if spec.beta is not None:
                        error[j] = (value - error[j]) * T.cast(others[0][sequence, t, head], compute)
                    else:
                        error[j] = value
                for i, j in T.Parallel(rows, columns):
                    now[i, j] += keys[i] * error[j]
                    terms[i, j] = now[i, j] * queries[i]
                T.reduce_sum(terms, error, dim=0)
                for j in T.Parallel(columns):
                    out[sequence, t, head, at + j] = T.cast(error[j], spec.dtype)
            for i, j in T.Parallel(rows, columns):
                new_state[sequence, head, i, at + j] = T.cast(now[i, j], spec.state)

    return gated_delta_rule_step


def empty_results(args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the outputs and the new state of a step."""
    return args.v.new_empty(args.v.shape), args.state.new_empty(args.state.shape)


@entry_function(GatedDeltaRuleStepArgs, reference, empty_results)
def gated_delta_rule_step(
    args: GatedDeltaRuleStepArgs[Any],
    out: torch.Tensor,
    new_state: torch.Tensor,
    config: Config | None = None,
    reads: torch.Tensor | None = None,
) -> bool:
    """Compute the tokens as `reference` does; `new_state` may be `state` itself. `config` overrides the tiling."""
    state, q, k, v, g, beta, scale, use_qk_l2norm = args
    if not (state.numel() and v.numel()) or q.shape[3] > most_keys(v.dtype):
        into((out, new_state), reference(*args, reads=reads))
        return True
    factor = float(int(q.shape[3]) ** -0.5 if scale is None else scale)
    rates = [t for t in (beta, reads) if t is not None]
    spec = Spec(
        v.dtype, g.dtype, beta.dtype if beta is not None else None, state.dtype, bool(use_qk_l2norm), g.dim() == 4,
        reads is not None,
    )  # fmt: skip
    keys = max(16, power_of_two(q.shape[3]))
    config = config or Config(keys, 4 if keys > 128 and spec.channels else 8)  # registers are short
    machine_of(v).kernel(step)(config, spec)(state, q, k, v, g, *rates, out, new_state, factor)
    return True
