# SPDX-License-Identifier: Apache-2.0
"""Linear attention with decays under fla's names and arguments, over `torch.ops.tile`.

All functions take q and k `[B, L, G, K]` and v `[B, L, H, V]`. They return `[B, L, H, V]` with the last state `[B, H,
K, V]` in float32, or None unless `output_final_state`. States of packed sequences (`cu_seqlens`, `[N + 1]`) are `[N, H,
K, V]`. `scale` is the factor of q; None for `K ** -0.5`. `run` is what calls operators.
"""

from __future__ import annotations

import torch

from torch_tile.nn.scans import (
    Run,
    Tensor,
    chunk_gated_delta_rule,
    first_state,
    fused_recurrent_gated_delta_rule,
    operator,
    refuse,
    run_scan,
)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    run: Run = operator,
) -> tuple[Tensor, Tensor | None]:
    """Kimi delta attention: `tile.gated_delta_rule` whose keys decay channel by channel.

    Args:
        q: `[B, L, H, K]`.
        k: `[B, L, H, K]`.
        v: `[B, L, H, V]`.
        g: `[B, L, H, K]`, logarithms of decays.
        beta: `[B, L, H]`.
        scale: the factor of q.
        initial_state: `[B, H, K, V]`.
        output_final_state: whether to return the last state, too.
        use_qk_l2norm_in_kernel: whether q and k are divided by their lengths.
        use_gate_in_kernel: refused if true: g must be the logarithm itself.
        cu_seqlens: the first times of packed sequences.
        run: what calls operators.
    """
    refuse("chunk_kda", use_gate_in_kernel=use_gate_in_kernel or None)
    options = scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    return chunk_gated_delta_rule(q, k, v, g, beta, *options, run=run)


fused_recurrent_kda = fused_recurrent_gated_delta_rule
"""`chunk_kda`, token after token: the decays of the delta rule's steps may be those of channels."""


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    run: Run = operator,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention: `tile.gated_linear_attention` with g `[B, L, H, K]`, logarithms of channels' decays."""
    options = initial_state, cu_seqlens, None if scale is None else float(scale)
    return run_scan(run, "gated_linear_attention", q, k, v, g, *options, keep_state=output_final_state)


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    run: Run = operator,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_gla` token after token; gk is its g, None for no decay. gv and reverse are refused."""
    refuse("fused_recurrent_gla", gv=gv, reverse=reverse or None)
    g = no_decay(v) if gk is None else gk
    return _steps(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, run)


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    run: Run = operator,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention whose heads decay as a whole: by g `[B, L, H]`, by g_gamma `[H]` at all times, or by both."""
    return chunk_gla(q, k, v, _decay(v, g, g_gamma), scale, initial_state, output_final_state, cu_seqlens, run)


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    run: Run = operator,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_simple_gla` token after token. reverse is refused."""
    refuse("fused_recurrent_simple_gla", reverse=reverse or None)
    return _steps(q, k, v, _decay(v, g, g_gamma), scale, initial_state, output_final_state, cu_seqlens, run)


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    run: Run = operator,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention without decay. normalize divides outputs by `scale q[t] . (k[1] + ... + k[t]) + 1e-10`."""
    out, state = chunk_gla(q, k, v, no_decay(v), scale, initial_state, output_final_state, run=run)
    if normalize:
        share = v.shape[2] // q.shape[2]
        factor = q.shape[3] ** -0.5 if scale is None else scale
        sums = (q * factor * k.cumsum(1)).sum(-1, keepdim=True).repeat_interleave(share, 2)
        out = (out / (sums + 1e-10)).to(out.dtype)
    return out, state


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    run: Run = operator,
) -> tuple[Tensor, Tensor | None]:
    """RetNet's attention (arXiv:2307.08621): head h decays by `1 - 2 ** (-5 - h)` at each time."""
    heads = torch.arange(v.shape[2], device=v.device, dtype=torch.float32)
    gamma = torch.log1p(-torch.exp2(-5 - heads))
    return chunk_simple_gla(q, k, v, None, gamma, scale, initial_state, output_final_state, cu_seqlens, run)


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    run: Run = operator,
) -> tuple[Tensor, Tensor | None]:
    """Lightning attention (arXiv:2401.04658): head h of H decays by `exp(-8 h / H (1 - layer_idx / num_layers))`."""
    heads = torch.arange(v.shape[2], device=v.device, dtype=torch.float32)
    gamma = -(8 / v.shape[2] * (1 - layer_idx / num_layers)) * heads
    return chunk_simple_gla(q, k, v, None, gamma, scale, initial_state, output_final_state, cu_seqlens, run)


def no_decay(v: Tensor) -> Tensor:
    """Return the logarithms of decays that change nothing, `[B, L, H]`."""
    return v.new_zeros((1, 1, 1), dtype=torch.float32).expand(v.shape[:3])


def _decay(v: Tensor, g: Tensor | None, gamma: Tensor | None) -> Tensor:
    """Return the logarithms of decays `[B, L, H]` of those that are given for each time and for all times."""
    if gamma is None:
        return no_decay(v) if g is None else g
    everywhere = gamma.expand(v.shape[:3])
    return everywhere if g is None else g + everywhere


def _steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    run: Run,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention token after token; packed sequences go to `chunk_gla`."""
    if cu_seqlens is not None:
        return chunk_gla(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, run)
    given = first_state(initial_state, k, v), q, k, v, g, None if scale is None else float(scale)
    return run_scan(run, "gated_linear_attention_step", *given, keep_state=output_final_state)
