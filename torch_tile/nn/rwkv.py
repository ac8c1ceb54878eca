# SPDX-License-Identifier: Apache-2.0
"""RWKV-7's recurrence under fla's names and arguments, over `torch.ops.tile`.

All functions take r or q, k, a and b `[B, L, H, K]`, v `[B, L, H, V]` and logarithms of decays `[B, L, H, K]`. They
return `[B, L, H, V]` with the last state `[B, H, K, V]` in float32, or None unless `output_final_state`. States of
packed sequences (`cu_seqlens`, `[N + 1]`) are `[N, H, K, V]`. `run` is what calls operators.
"""

from __future__ import annotations

from torch_tile.nn.scans import Run, Tensor, first_state, operator, refuse, run_scan


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
) -> tuple[Tensor, Tensor | None]:
    """Compute `tile.rwkv7` with gk as its g; `exp(-gk) a` must be finite.

    scale is the factor of q, `K ** -0.5` if None.
    """
    given = q, k, v, gk, a, b, initial_state, cu_seqlens, _factor(q, scale)
    return run_scan(run, "rwkv7", *given, keep_state=output_final_state)


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
) -> tuple[Tensor, Tensor | None]:
    """Compute `chunk_dplr_delta_rule` token after token; packed sequences go to that function. reverse is refused."""
    refuse("fused_recurrent_dplr_delta_rule", reverse=reverse or None)
    if cu_seqlens is not None:
        options = scale, initial_state, output_final_state, cu_seqlens
        return chunk_dplr_delta_rule(q, k, v, a, b, gk, *options, run=run)
    given = first_state(initial_state, k, v), q, k, v, gk, a, b, _factor(q, scale)
    return run_scan(run, "rwkv7_step", *given, keep_state=output_final_state)


def _factor(q: Tensor, scale: float | None) -> float:
    """Return the factor of q: `K ** -0.5` for None."""
    return float(q.shape[3] ** -0.5 if scale is None else scale)


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
) -> tuple[Tensor, Tensor | None]:
    """Compute `tile.rwkv7` with r as its q and w as its g."""
    return chunk_dplr_delta_rule(r, k, v, a, b, w, scale, initial_state, output_final_state, cu_seqlens, run)


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
) -> tuple[Tensor, Tensor | None]:
    """Compute RWKV-7 token after token, from normalized keys kk and their rates a.

    It reads the state by -kk, and adds what it read at `kk a`.
    """
    options = scale, initial_state, output_final_state, reverse, cu_seqlens
    return fused_recurrent_dplr_delta_rule(r, k, v, -kk, kk * a, w, *options, run=run)
