# SPDX-License-Identifier: Apache-2.0
"""Linear attention, delta rules and RWKV-7 under fla's names and arguments, over `torch.ops.tile`.

All functions take q (or r), k, a and b `[B, L, G, K]`, v `[B, L, H, V]` and beta `[B, L, H]`. Logarithms of decays g
are `[B, L, H]` or `[B, L, H, K]`. The functions return `[B, L, H, V]` with the last state `[B, H, K, V]`, or None
unless `output_final_state`. States of packed sequences (`cu_seqlens`, `[N + 1]`) are `[N, H, K, V]`. `scale` is the
factor of q; None for `K ** -0.5`. `run` is what calls operators. Names with `recurrent` compute token after token;
they give packed sequences to the form in chunks.
"""

from __future__ import annotations

import torch

from torch_tile.diagnostics.arguments import explains_misfits, renames
from torch_tile.nn.scans import Run, Tensor, operator, refuse

Result = tuple[Tensor, Tensor | None]


@explains_misfits
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    run: Run = operator,
) -> Result:
    """Compute `tile.gated_delta_rule`; use_qk_l2norm_in_kernel divides q and k by their lengths."""
    options = initial_state, output_final_state, cu_seqlens, run
    return _chunks("gated_delta_rule", (q, k, v, g, beta), (scale, use_qk_l2norm_in_kernel), *options)


@explains_misfits
@renames(state="initial_state")
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    run: Run = operator,
) -> Result:
    """Compute `tile.gated_delta_rule_step`; without g nothing decays, without beta it is 1.

    The last state has the dtype of the first one, which is not changed.
    """
    g = no_decay(v) if g is None else g
    beta = v.new_ones(v.shape[:3]) if beta is None else beta
    options = initial_state, output_final_state, cu_seqlens, run
    return _steps("gated_delta_rule", (q, k, v, g, beta), (scale, use_qk_l2norm_in_kernel), *options)


@explains_misfits
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
) -> Result:
    """Compute Kimi delta attention: `chunk_gated_delta_rule` with g `[B, L, H, K]`, for decays of channels.

    use_gate_in_kernel is refused: g must be the logarithm itself.
    """
    refuse("chunk_kda", use_gate_in_kernel=use_gate_in_kernel or None)
    options = scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    return chunk_gated_delta_rule(q, k, v, g, beta, *options, run=run)


fused_recurrent_kda = fused_recurrent_gated_delta_rule
"""`chunk_kda`, token after token: the decays of the delta rule's steps may be those of channels."""


@explains_misfits
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
) -> Result:
    """Compute `tile.gated_linear_attention` with g `[B, L, H, K]`, logarithms of channels' decays."""
    options = initial_state, output_final_state, cu_seqlens, run
    return _chunks("gated_linear_attention", (q, k, v, g), (scale,), *options)


@explains_misfits
@renames(g="gk", state="initial_state")
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
) -> Result:
    """Compute `chunk_gla` token after token; gk is its g, None for no decay. gv and reverse are refused."""
    refuse("fused_recurrent_gla", gv=gv, reverse=reverse or None)
    options = initial_state, output_final_state, cu_seqlens, run
    return _steps("gated_linear_attention", (q, k, v, no_decay(v) if gk is None else gk), (scale,), *options)


@explains_misfits
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
) -> Result:
    """Compute linear attention whose heads decay as a whole: by g `[B, L, H]`, by g_gamma `[H]`, or by both."""
    return chunk_gla(q, k, v, _decay(v, g, g_gamma), scale, initial_state, output_final_state, cu_seqlens, run)


@explains_misfits
@renames(state="initial_state")
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
) -> Result:
    """Compute `chunk_simple_gla` token after token. reverse is refused."""
    refuse("fused_recurrent_simple_gla", reverse=reverse or None)
    options = initial_state, output_final_state, cu_seqlens, run
    return _steps("gated_linear_attention", (q, k, v, _decay(v, g, g_gamma)), (scale,), *options)


@explains_misfits
def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    run: Run = operator,
) -> Result:
    """Compute linear attention without decay. normalize divides by `scale q[t] . (k[1] + ... + k[t]) + 1e-10`."""
    out, state = chunk_gla(q, k, v, no_decay(v), scale, initial_state, output_final_state, run=run)
    if normalize:
        share = v.shape[2] // q.shape[2]
        factor = q.shape[3] ** -0.5 if scale is None else scale
        sums = (q * factor * k.cumsum(1)).sum(-1, keepdim=True).repeat_interleave(share, 2)
        out = (out / (sums + 1e-10)).to(out.dtype)
    return out, state


@explains_misfits
def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    run: Run = operator,
) -> Result:
    """Compute RetNet's attention (arXiv:2307.08621): head h decays by `1 - 2 ** (-5 - h)` at each time."""
    heads = torch.arange(v.shape[2], device=v.device, dtype=torch.float32)
    gamma = torch.log1p(-torch.exp2(-5 - heads))
    return chunk_simple_gla(q, k, v, None, gamma, scale, initial_state, output_final_state, cu_seqlens, run)


@explains_misfits
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
) -> Result:
    """Compute lightning attention (arXiv:2401.04658): `exp(-8 h / H (1 - layer_idx / num_layers))` in head h."""
    heads = torch.arange(v.shape[2], device=v.device, dtype=torch.float32)
    gamma = -(8 / v.shape[2] * (1 - layer_idx / num_layers)) * heads
    return chunk_simple_gla(q, k, v, None, gamma, scale, initial_state, output_final_state, cu_seqlens, run)


@explains_misfits
@renames(g="gk")
def chunk_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    run: Run = operator,
) -> Result:
    """Compute `tile.rwkv7` with gk as its g; `exp(-gk) a` must be finite."""
    options = initial_state, output_final_state, cu_seqlens, run
    return _chunks("rwkv7", (q, k, v, gk, a, b), (_scale(q, scale),), *options)


@explains_misfits
@renames(g="gk", state="initial_state")
def fused_recurrent_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    run: Run = operator,
) -> Result:
    """Compute `chunk_dplr_delta_rule` token after token. reverse is refused."""
    refuse("fused_recurrent_dplr_delta_rule", reverse=reverse or None)
    options = initial_state, output_final_state, cu_seqlens, run
    return _steps("rwkv7", (q, k, v, gk, a, b), (_scale(q, scale),), *options)


@explains_misfits
@renames(q="r", gk="w")
def chunk_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    run: Run = operator,
) -> Result:
    """Compute `tile.rwkv7` with r as its q and w as its g."""
    return chunk_dplr_delta_rule(r, k, v, a, b, w, scale, initial_state, output_final_state, cu_seqlens, run)


@explains_misfits
@renames(q="r", gk="w", a="kk", b="a")
def fused_mul_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    kk: Tensor,
    a: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    run: Run = operator,
) -> Result:
    """Compute RWKV-7 by tokens from normalized keys kk and their rates a: reads at -kk, updates at `kk a`."""
    options = scale, initial_state, output_final_state, reverse, cu_seqlens
    return fused_recurrent_dplr_delta_rule(r, k, v, -kk, kk * a, w, *options, run=run)


def _scale(q: Tensor, scale: float | None) -> float:
    """Return the factor of q: `K ** -0.5` for None."""
    return q.shape[3] ** -0.5 if scale is None else scale


def no_decay(v: Tensor) -> Tensor:
    """Return the logarithms of decays that change nothing, `[B, L, H]`."""
    return v.new_zeros((1, 1, 1), dtype=torch.float32).expand(v.shape[:3])


def _decay(v: Tensor, g: Tensor | None, gamma: Tensor | None) -> Tensor:
    """Return the logarithms of decays `[B, L, H]` of those that are given for each time and for all times."""
    if gamma is None:
        return no_decay(v) if g is None else g
    everywhere = gamma.expand(v.shape[:3])
    return everywhere if g is None else g + everywhere


def _chunks(
    op: str,
    tensors: tuple[Tensor, ...],
    numbers: tuple[float | None, ...],
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    run: Run,
) -> Result:
    """Run the operator `op`, which computes chunks of tokens; `numbers` are its scale and its flags."""
    scale, *flags = numbers
    given = initial_state, cu_seqlens, None if scale is None else float(scale), *map(bool, flags)
    out, state = run(op, *tensors, *given)
    return out, state if output_final_state else None


def _steps(
    op: str,
    tensors: tuple[Tensor, ...],
    numbers: tuple[float | None, ...],
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    run: Run,
) -> Result:
    """Run the operator `op` in its form for steps; packed sequences go to `_chunks`.

    Without a first state it is zeros `[B, H, K, V]`, in float32 or v's float64.
    """
    if cu_seqlens is not None:
        return _chunks(op, tensors, numbers, initial_state, output_final_state, cu_seqlens, run)
    _, k, v, *_ = tensors
    if initial_state is None:
        wide = torch.promote_types(v.dtype, torch.float32)
        initial_state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=wide)
    scale, *flags = numbers
    given = None if scale is None else float(scale), *map(bool, flags)
    out, state = run(f"{op}_step", initial_state, *tensors, *given)
    return out, state if output_final_state else None
