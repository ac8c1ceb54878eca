# SPDX-License-Identifier: Apache-2.0
"""`tile.attention` and `tile.attention_lse`: scaled dot-product attention.

The forward runs the kernel; the backward is plain torch and recomputes the probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_tile.kernels.memory_order import empty_beside
from torch_tile.ops import checks
from torch_tile.ops.checks import require, require_type, require_value
from torch_tile.ops.registration import kernels, register

Size = checks.Size


def _check_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, window: int) -> None:
    checks.check_floating("attention", q=q, k=k, v=v)
    checks.check_same_dtype("attention", q=q, k=k, v=v)
    checks.check_dims("attention", "q", q, 4, "[B, H, Sq, D]")
    checks.check_dims("attention", "k", k, 4, "[B, Hkv, Skv, D]")
    checks.check_dims("attention", "v", v, 4, "[B, Hkv, Skv, Dv]")
    checks.check_size("attention", "k", k, 0, q.shape[0], "q's batch")
    checks.check_size("attention", "k", k, 3, q.shape[3], "q's head dimension")
    for dim, what in enumerate(("k's batch", "k's heads", "k's length")):
        checks.check_size("attention", "v", v, dim, k.shape[dim], what)
    heads, kv_heads = q.shape[1], k.shape[1]
    require(
        heads == 0 if isinstance(kv_heads, int) and kv_heads == 0 else heads % kv_heads == 0,
        lambda: f"tile.attention: q has {heads} heads; expected a multiple of k's and v's {kv_heads}",
    )
    require_value(window >= 0, lambda: f"tile.attention: window is {window}; expected 0 (none) or a positive length")
    if mask is not None:
        require_type(
            mask.dtype == torch.bool or mask.dtype in checks.FLOATING,
            lambda: f"tile.attention: mask has dtype {mask.dtype}; expected bool (True: visible) or a floating dtype",
        )
        checks.check_device("attention", "mask", mask, "q", q)
        checks.check_broadcasts("attention", "mask", mask, (q.shape[0], heads, q.shape[2], k.shape[2]))


def _run_attention_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    q_offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_attention(q, k, v, mask, window)
    out, lse = kernels("attention").attention(q, k, v, mask, causal, scale, window, q_offset)
    return out, lse


def _run_attention(*args: Any) -> torch.Tensor:
    return _run_attention_lse(*args)[0]


def _fake_attention_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    q_offset: Size = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_attention(q, k, v, mask, window)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return empty_beside(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=lse_dtype)


def _fake_attention(*args: Any) -> torch.Tensor:
    return _fake_attention_lse(*args)[0]


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, mask, ctx.causal, ctx.scale, ctx.window, ctx.q_offset = inputs
    if isinstance(output, tuple):
        ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, mask)


def _attention_backward(ctx: Any, grad: torch.Tensor, grad_lse: torch.Tensor | None = None) -> tuple[Any, ...]:
    from torch_tile.kernels import attention as family
    from torch_tile.kernels.gemm import compute_dtype

    q, k, v, mask = ctx.saved_tensors
    compute = compute_dtype(q.dtype)
    scale = family.default_scale(q.shape[3]) if ctx.scale is None else ctx.scale
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len, v_dim = v.shape[1:]
    groups = heads // kv_heads if kv_heads else 1
    qc, kc, vc = (t.to(compute) for t in (q, k, v))
    p, _ = family.softmax_with_lse(family.scores(qc, kc, mask, ctx.causal, scale, ctx.window, ctx.q_offset))

    shape = (batch, kv_heads, groups, q_len, kv_len)
    grouped_p, grouped_grad = p.reshape(shape), grad.to(compute).reshape(*shape[:4], v_dim)
    grad_v = torch.matmul(grouped_p.mT, grouped_grad).sum(2)
    grad_p = torch.matmul(grouped_grad, vc.unsqueeze(2).mT)
    grad_s = grouped_p * (grad_p - (grad_p * grouped_p).sum(-1, keepdim=True))
    grad_q = torch.matmul(grad_s, kc.unsqueeze(2)).reshape(q.shape) * scale
    grad_k = torch.matmul(grad_s.mT, qc.reshape(*shape[:4], head_dim)).sum(2) * scale
    grad_mask = None
    if mask is not None and mask.is_floating_point() and ctx.needs_input_grad[3]:
        grad_mask = grad_s.reshape(batch, heads, q_len, kv_len).sum_to_size(mask.shape).to(mask.dtype)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_mask, None, None, None, None


def _attention_flops(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    # Like torch's formula for scaled_dot_product_attention, masked products are counted.
    batch, heads, q_len, head_dim = q
    return 2 * batch * heads * q_len * k[2] * (head_dim + v[3])


for _name, _run, _fake in (
    ("attention", _run_attention, _fake_attention),
    ("attention_lse", _run_attention_lse, _fake_attention_lse),
):
    register(
        _name,
        run=_run,
        fake=_fake,
        backward=_attention_backward,
        setup_context=_save_attention,
        lower_precision=("q", "k", "v", "mask"),
        flops=_attention_flops,
    )
