# SPDX-License-Identifier: Apache-2.0
"""`tile.mla_decode` and `tile.mla_decode_lse`: decoding with multi-head latent attention, weight-absorbed.

The forward runs the kernel; the backward is plain torch and recomputes the probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_tile.kernels.attention.memory_order import empty_beside
from torch_tile.ops import checks
from torch_tile.ops.checks import require, require_type, require_value
from torch_tile.ops.registration import register


def _check_mla_decode(
    q: torch.Tensor,
    q_pe: torch.Tensor,
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    block_table: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    num_splits: int,
    schedule: torch.Tensor | None,
) -> None:
    tensors = {"q": q, "q_pe": q_pe, "kv": kv, "k_pe": k_pe}
    checks.check_floating("mla_decode", **tensors)
    checks.check_same_dtype("mla_decode", **tensors)
    cache = "[B, S, {}]" if block_table is None else "[pages, page, {}]"
    checks.check_dims("mla_decode", "q", q, 4, "[B, Sq, H, C]")
    checks.check_dims("mla_decode", "q_pe", q_pe, 4, "[B, Sq, H, R]")
    checks.check_dims("mla_decode", "kv", kv, 3, cache.format("C"))
    checks.check_dims("mla_decode", "k_pe", k_pe, 3, cache.format("R"))
    for dim in range(3):
        checks.check_size("mla_decode", "q_pe", q_pe, dim, q.shape[dim], "as q")
    checks.check_size("mla_decode", "kv", kv, 2, q.shape[3], "q's last dimension")
    checks.check_size("mla_decode", "k_pe", k_pe, 2, q_pe.shape[3], "q_pe's last dimension")
    for dim in range(2):
        checks.check_size("mla_decode", "k_pe", k_pe, dim, kv.shape[dim], "as kv")
    if block_table is None:
        checks.check_size("mla_decode", "kv", kv, 0, q.shape[0], "q's batch")
    else:
        _check_table("block_table", block_table, 2, "[B, n]", q)
    if seq_lens is not None:
        _check_table("seq_lens", seq_lens, 1, "[B]", q)
    require_value(
        num_splits >= 0, lambda: f"tile.mla_decode: num_splits is {num_splits}; expected 0 (automatic) or more"
    )
    if schedule is not None:
        _check_schedule(schedule, seq_lens, num_splits, q)


def _check_schedule(schedule: torch.Tensor, seq_lens: torch.Tensor | None, num_splits: int, q: torch.Tensor) -> None:
    require_type(
        schedule.dtype == torch.int32,
        lambda: f"tile.mla_decode: schedule has dtype {schedule.dtype}; expected torch.int32",
    )
    checks.check_dims("mla_decode", "schedule", schedule, 2, "[units + B, 4]")
    checks.check_size("mla_decode", "schedule", schedule, 1, 4, "the fields of an entry")
    checks.check_device("mla_decode", "schedule", schedule, "q", q)
    require(
        schedule.shape[0] > q.shape[0],
        lambda: (
            f"tile.mla_decode: schedule has {schedule.shape[0]} entries; expected more than q's batch, {q.shape[0]}"
        ),
    )
    require_value(seq_lens is not None, lambda: "tile.mla_decode: schedule is given without seq_lens, whose plan it is")
    require_value(num_splits == 0, lambda: f"tile.mla_decode: num_splits is {num_splits}; expected 0 with a schedule")


def _check_table(name: str, table: torch.Tensor, dims: int, meaning: str, q: torch.Tensor) -> None:
    require_type(
        table.dtype == torch.int32, lambda: f"tile.mla_decode: {name} has dtype {table.dtype}; expected torch.int32"
    )
    checks.check_dims("mla_decode", name, table, dims, meaning)
    checks.check_size("mla_decode", name, table, 0, q.shape[0], "q's batch")
    checks.check_device("mla_decode", name, table, "q", q)


def _check_values(
    q: torch.Tensor,
    q_pe: torch.Tensor,
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    scale: float | None = None,
    num_splits: int = 0,
    schedule: torch.Tensor | None = None,
) -> None:
    """The lengths fit the cache and the pages they reach exist. On the CPU only: elsewhere reading them would wait."""
    if kv.device.type != "cpu":
        return
    pages, page = kv.shape[:2]
    capacity = page if block_table is None else block_table.shape[1] * page
    if seq_lens is not None and seq_lens.numel():
        low, high = (int(v) for v in seq_lens.aminmax())
        require(
            low >= 0 and high <= capacity,
            lambda: f"tile.mla_decode: seq_lens has values from {low} to {high}; expected 0 to {capacity}",
        )
    if schedule is not None and seq_lens is not None:
        _check_plan(schedule, seq_lens)
    if block_table is not None and block_table.numel():
        start = torch.arange(block_table.shape[1]) * page
        used = block_table if seq_lens is None else block_table[start[None, :] < seq_lens[:, None]]
        if used.numel() and page:
            low, high = (int(v) for v in used.aminmax())
            require(
                low >= 0 and high < pages,
                lambda: f"tile.mla_decode: block_table has pages from {low} to {high}; expected 0 to {pages - 1}",
            )


def _check_plan(schedule: torch.Tensor, seq_lens: torch.Tensor) -> None:
    from torch_tile.kernels.mla.scheduler import reference

    require(
        torch.equal(schedule, reference(seq_lens, 1, schedule.shape[0] - seq_lens.shape[0])),
        lambda: "tile.mla_decode: schedule is not what tile.mla_schedule makes of seq_lens; make it anew in each step",
    )


def _fake_mla_decode_lse(
    q: torch.Tensor,
    q_pe: torch.Tensor,
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    scale: float | None = None,
    num_splits: int = 0,
    schedule: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_mla_decode(q, q_pe, kv, k_pe, block_table, seq_lens, num_splits, schedule)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return empty_beside(q, q.shape[3]), q.new_empty(q.shape[:3], dtype=lse_dtype)


def _fake_mla_decode(*args: Any) -> torch.Tensor:
    return _fake_mla_decode_lse(*args)[0]


def _save_mla_decode(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.scale, _, _ = inputs
    if isinstance(output, tuple):
        ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors)


def _mla_decode_backward(ctx: Any, grad: torch.Tensor, grad_lse: torch.Tensor | None = None) -> tuple[Any, ...]:
    from torch_tile.kernels.attention.forward import default_scale
    from torch_tile.kernels.gemm.gemm import compute_dtype
    from torch_tile.kernels.mla import decode as family

    q, q_pe, kv, k_pe, block_table, seq_lens = ctx.saved_tensors
    compute = compute_dtype(q.dtype)
    scale = default_scale(q.shape[3] + q_pe.shape[3]) if ctx.scale is None else ctx.scale
    latent, rotary, keep = family.gather_cache(q, kv, k_pe, block_table, seq_lens)
    qc, q_pec = q.to(compute), q_pe.to(compute)
    p, _ = family.probabilities(qc, q_pec, latent, rotary, keep, scale)
    upstream = grad.to(compute)
    grad_p = torch.einsum("bthc,bsc->bths", upstream, latent)
    grad_s = scale * p * (grad_p - (grad_p * p).sum(-1, keepdim=True))
    grad_q = torch.einsum("bths,bsc->bthc", grad_s, latent)
    grad_q_pe = torch.einsum("bths,bsr->bthr", grad_s, rotary)
    grad_latent = torch.einsum("bths,bthc->bsc", p, upstream) + torch.einsum("bths,bthc->bsc", grad_s, qc)
    grad_rotary = torch.einsum("bths,bthr->bsr", grad_s, q_pec)
    grad_kv = _scatter_pages(grad_latent, kv, block_table)
    grad_k_pe = _scatter_pages(grad_rotary, k_pe, block_table)
    return grad_q.to(q.dtype), grad_q_pe.to(q.dtype), grad_kv, grad_k_pe, None, None, None, None, None


def _scatter_pages(grad: torch.Tensor, pages: torch.Tensor, block_table: torch.Tensor | None) -> torch.Tensor:
    """The adjoint of `gather_pages`: `[B, S, C]` added up into `pages`' shape, in its dtype."""
    if block_table is None or not pages.shape[0]:
        return grad.to(pages.dtype) if block_table is None else torch.zeros_like(pages)
    index = block_table.clamp(0, pages.shape[0] - 1).long().reshape(-1)
    rows = grad.reshape(index.shape[0], *pages.shape[1:])
    return grad.new_zeros(pages.shape).index_add(0, index, rows).to(pages.dtype)


def _mla_decode_flops(
    q: Sequence[int],
    q_pe: Sequence[int],
    kv: Sequence[int],
    k_pe: Sequence[int],
    block_table: Sequence[int] | None = None,
    *args: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    batch, q_len, heads, latent = q
    kv_len = kv[1] if block_table is None else block_table[1] * kv[1]
    return 2 * batch * q_len * heads * kv_len * (2 * latent + q_pe[3])


for _name, _fake in (
    ("mla_decode", _fake_mla_decode),
    ("mla_decode_lse", _fake_mla_decode_lse),
):
    register(
        _name,
        fake=_fake,
        check_values=_check_values,
        backward=_mla_decode_backward,
        setup_context=_save_mla_decode,
        lower_precision=("q", "q_pe", "kv", "k_pe"),
        flops=_mla_decode_flops,
    )
