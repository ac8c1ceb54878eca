# SPDX-License-Identifier: Apache-2.0
"""`tile.mla_decode` and `tile.mla_decode_lse`: decoding with multi-head latent attention, weight-absorbed.

The forward runs the kernel; the backward is plain torch and recomputes the probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from torch_tile.kernels import compute_dtype
from torch_tile.kernels.attention.arguments import empty_beside
from torch_tile.kernels.mla.args import MlaDecodeArgs, MlaScheduleArgs
from torch_tile.ops import checks
from torch_tile.ops.attention_common import check_pages, declare_with_lse
from torch_tile.ops.checks import require, require_type, require_value
from torch_tile.ops.registration import declare
from torch_tile.ops.registry import Shape, entry, op_gradients
from torch_tile.ops.sharding_rule import Rule, Spec, if_given


def _check_schedule(schedule: Tensor, seq_lens: Tensor | None, num_splits: int, q: Tensor) -> None:
    """Check the dtype, shape and device of a schedule, which excludes `num_splits`."""
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


def _check_values(args: MlaDecodeArgs[Tensor]) -> None:
    """Check that lengths fit the cache, that their pages exist and that a schedule is theirs."""
    if args.kv.device.type != "cpu":
        return
    check_pages("mla_decode", args.kv.shape[:2], ("block_table", args.block_table), ("seq_lens", args.seq_lens))
    if args.schedule is not None and args.seq_lens is not None:
        _check_plan(args.schedule, args.seq_lens)


def _check_plan(schedule: Tensor, seq_lens: Tensor) -> None:
    """Check that a schedule is the one that `mla_schedule` makes for these lengths."""
    from torch_tile.kernels.mla.scheduler import reference

    require(
        torch.equal(schedule, reference(seq_lens, 1, schedule.shape[0] - seq_lens.shape[0])),
        lambda: "tile.mla_decode: schedule is not what tile.mla_schedule makes of seq_lens; make it anew in each step",
    )


def check_parts(op: str, q: Tensor, q_pe: Tensor, keys: Sequence[Tensor]) -> None:
    """Check that queries and their rotary part have four dimensions. Latents that are joined with that part get a hint.

    keys: the latents and the rotary part of a cache that keeps them apart; () for another cache.
    """
    columns = q.shape[-1] if q.dim() == 4 else 0
    sizes = [x.shape[-1] if x.dim() > 0 else 0 for x in keys]
    if all(isinstance(n, int) for n in (columns, *sizes)) and sizes[:1] < [columns] == [sum(sizes)]:
        raise RuntimeError(
            f"tile.{op}: q has size {columns} in dimension 3, as kv and k_pe together; "
            f"expected {sizes[0]}: give q[..., :{sizes[0]}] as q and q[..., {sizes[0]}:] as q_pe"
        )
    checks.check_dims(op, "q", q, 4, "[B, Sq, H, C]")
    checks.check_dims(op, "q_pe", q_pe, 4, "[B, Sq, H, R]")


def _fake_with_lse(args: MlaDecodeArgs[Tensor]) -> tuple[Tensor, Tensor]:
    """Check the arguments of `tile.mla_decode` and make its empty results."""
    q, q_pe, kv, k_pe, block_table, seq_lens, _, num_splits, schedule = args
    tensors = {"q": q, "q_pe": q_pe, "kv": kv, "k_pe": k_pe}
    checks.check_floating("mla_decode", **tensors)
    checks.check_same_dtype("mla_decode", **tensors)
    cache = "[B, S, {}]" if block_table is None else "[pages, page, {}]"
    check_parts("mla_decode", q, q_pe, (kv, k_pe))
    checks.check_dims("mla_decode", "kv", kv, 3, cache.format("C"))
    checks.check_dims("mla_decode", "k_pe", k_pe, 3, cache.format("R"))
    checks.check_sizes("mla_decode", "q_pe", q_pe, q.shape[:3], "as q")
    checks.check_size("mla_decode", "kv", kv, 2, q.shape[3], "q's last dimension")
    checks.check_size("mla_decode", "k_pe", k_pe, 2, q_pe.shape[3], "q_pe's last dimension")
    checks.check_sizes("mla_decode", "k_pe", k_pe, kv.shape[:2], "as kv")
    if block_table is None:
        checks.check_size("mla_decode", "kv", kv, 0, q.shape[0], "q's batch")
    else:
        checks.check_positions("mla_decode", "block_table", block_table, 2, "[B, n]", q=q)
        checks.check_size("mla_decode", "block_table", block_table, 0, q.shape[0], "q's batch")
    if seq_lens is not None:
        checks.check_positions("mla_decode", "seq_lens", seq_lens, 1, "[B]", q=q)
        checks.check_size("mla_decode", "seq_lens", seq_lens, 0, q.shape[0], "q's batch")
    require_value(
        num_splits >= 0, lambda: f"tile.mla_decode: num_splits is {num_splits}; expected 0 (automatic) or more"
    )
    if schedule is not None:
        _check_schedule(schedule, seq_lens, num_splits, q)
    return empty_beside(q, q.shape[3]), q.new_empty(q.shape[:3], dtype=compute_dtype(q.dtype))


def _save(ctx: Any, args: MlaDecodeArgs[Tensor], output: Any) -> None:
    """Save for the gradient of `tile.mla_decode` what it needs."""
    ctx.scale = args.scale
    if isinstance(output, tuple):
        ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(args.q, args.q_pe, args.kv, args.k_pe, args.block_table, args.seq_lens)


def _backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None = None) -> tuple[Any, ...]:
    """Compute the gradients of `tile.mla_decode`."""
    from torch_tile.kernels.attention.forward import default_scale
    from torch_tile.kernels.mla import decode as family

    q, q_pe, kv, k_pe, block_table, seq_lens = ctx.saved_tensors
    compute = compute_dtype(q.dtype)
    scale = default_scale(q.shape[3] + q_pe.shape[3]) if ctx.scale is None else ctx.scale
    latent, rotary, keep = family.gather_cache(q, kv, k_pe, block_table, seq_lens)
    qc, q_pec = q.to(compute), q_pe.to(compute)
    p, _ = family.probabilities(qc, q_pec, latent, rotary, keep, scale)
    upstream = grad.to(compute)
    # Products and no einsum, for which torch's older vmap (`is_grads_batched`) has no rule.
    grad_p = upstream @ latent[:, None].mT
    grad_s = scale * p * (grad_p - (grad_p * p).sum(-1, keepdim=True))
    grad_q, grad_q_pe = grad_s @ latent[:, None], grad_s @ rotary[:, None]
    grad_latent = _over_rows(p, upstream) + _over_rows(grad_s, qc)
    grad_rotary = _over_rows(grad_s, q_pec)
    grad_kv = _scatter_pages(grad_latent, kv, block_table)
    grad_k_pe = _scatter_pages(grad_rotary, k_pe, block_table)
    of_q = {"q": grad_q.to(q.dtype), "q_pe": grad_q_pe.to(q.dtype)}
    return op_gradients(MlaDecodeArgs, **of_q, kv=grad_kv, k_pe=grad_k_pe)


def _over_rows(weights: Tensor, rows: Tensor) -> Tensor:
    """Multiply `[B, T, H, S]` and `[B, T, H, C]` into `[B, S, C]`."""
    batch, length, heads, positions = weights.shape
    count, columns = length * heads, rows.shape[-1]
    return weights.reshape(batch, count, positions).mT @ rows.reshape(batch, count, columns)


def _scatter_pages(grad: Tensor, pages: Tensor, block_table: Tensor | None) -> Tensor:
    """Add `[B, S, C]` up into `pages`' shape, in its dtype: the adjoint of `gather_pages`."""
    if block_table is None or not pages.shape[0]:
        return grad.to(pages.dtype) if block_table is None else torch.zeros_like(pages)
    index = block_table.clamp(0, pages.shape[0] - 1).long().reshape(-1)
    rows = grad.reshape(index.shape[0], *pages.shape[1:])
    return grad.new_zeros(pages.shape).index_add(0, index, rows).to(pages.dtype)


def _sharding(args: MlaDecodeArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.mla_decode` for sharding."""
    pages = "batch" if args.block_table is None else "page"
    inputs = [
        ("batch", "query", "head", "c"),
        ("batch", "query", "head", "r"),
        (pages, "key", "c"),
        (pages, "key", "r"),
        if_given(args.block_table, ("batch", "entry")),
        if_given(args.seq_lens, ("batch",)),
    ]
    return Rule(
        outputs=[("batch", "query", "head", "c"), ("batch", "query", "head")],
        inputs=[*inputs, if_given(args.schedule, ("unit", "field"))],
        saved=inputs,
        free=("batch", "head") if args.schedule is None else ("head",),  # a schedule is one of all sequences
    )


def _flops(args: MlaDecodeArgs[Shape]) -> int:
    """Count the operations of `tile.mla_decode`."""
    batch, q_len, heads, latent = args.q
    kv_len = args.kv[1] if args.block_table is None else args.block_table[1] * args.kv[1]
    return 2 * batch * q_len * heads * kv_len * (2 * latent + args.q_pe[3])


mla_decode, mla_decode_lse = declare_with_lse(
    "mla_decode",
    MlaDecodeArgs[Tensor],
    """A decoding step of multi-head latent attention with absorbed weights (DeepSeek-V2, arXiv:2405.04434).

`softmax(scale (q kv^T + q_pe k_pe^T)) kv` for every head; all heads share the cached latent `kv` (C is 512 in
DeepSeek-V2 and V3) and its rotary part `k_pe` (R is 64).

Args:
    q: `[B, Sq, H, C]`: queries already multiplied into the latent space.
    q_pe: `[B, Sq, H, R]`: their rotary part.
    kv: `[B, S, C]`, or `[pages, page, C]` with a block_table.
    k_pe: `[B, S, R]`, or `[pages, page, R]`.
    block_table: int32 `[B, n]`: position `s` of sequence `b` lies in page `block_table[b, s // page]`, row
        `s % page`. Entries past the sequence's end are not read.
    seq_lens: int32 `[B]`: positions in use, the new ones included; default all of the cache.
    scale: default `(C + R) ** -0.5`. Absorbing does not change a model's own scale, so pass it: DeepSeek-V3's is
        `(128 + 64) ** -0.5`.
    num_splits: into how many parts at most a kernel splits a sequence. 0 lets it choose: by the multiprocessors of the
        GPU, or the threads that torch uses on the CPU. Parts are summed apart, so the last bits of the result depend on
        their number. A fixed num_splits gives the same bits with any number of threads.
    schedule: what `mla_schedule` made of seq_lens, for sequences that differ in length.

Returns:
    `[B, Sq, H, C]` in q's dtype, dense; B, Sq and H lie in memory in the order they do in q, with C innermost. The
    Sq queries are the last Sq positions of their sequence and causal among themselves; one that sees no position
    (Sq beyond the length) gives 0.

Values of seq_lens, block_table and schedule are checked on the CPU only, where reading them is free.
""",
    "`[B, Sq, H]`",
    module="mla.decode",
    fake=_fake_with_lse,
    without_lse={"run": entry("mla.decode", "mla_decode", "out", lse=None)},
    check_values=_check_values,
    setup_context=_save,
    backward=_backward,
    sharding=_sharding,
    flops=_flops,
    lower_precision=("q", "q_pe", "kv", "k_pe"),
)


# `tile.mla_schedule`: divides the work of `tile.mla_decode` over sequences of different lengths among blocks.


def _fake(args: MlaScheduleArgs[Tensor]) -> Tensor:
    """Check the arguments of `tile.mla_decode` and make its empty results."""
    from torch_tile.kernels.mla import scheduler as family

    seq_lens, rows, units = args
    require_type(
        seq_lens.dtype == torch.int32,
        lambda: f"tile.mla_schedule: seq_lens has dtype {seq_lens.dtype}; expected torch.int32",
    )
    checks.check_dims("mla_schedule", "seq_lens", seq_lens, 1, "[B]")
    require_value(rows >= 0, lambda: f"tile.mla_schedule: rows is {rows}; expected Sq * H, 0 or more")
    checks.check_count_or_auto("mla_schedule", "units", units)
    return seq_lens.new_empty((family.units_of(seq_lens, rows, units) + seq_lens.shape[0], family.FIELDS))


def _check_schedule_values(args: MlaScheduleArgs[Tensor]) -> None:
    """Check on the CPU that no length is negative. Elsewhere reading them would wait, and they count as 0."""
    seq_lens = args.seq_lens
    if seq_lens.device.type == "cpu" and seq_lens.numel():
        low = int(seq_lens.min())
        require(low >= 0, lambda: f"tile.mla_schedule: seq_lens has the value {low}; expected 0 or more")


def _sharding_mla_schedule(args: MlaScheduleArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.mla_schedule` for sharding."""
    return Rule(outputs=[("unit", "field")], inputs=[("batch",)], free=())


mla_schedule: Final = declare(
    "mla_schedule",
    MlaScheduleArgs[Tensor],
    Tensor,
    """Which positions of which sequences each unit of a GPU decodes, so that all work equally long.

Sequences of different lengths would otherwise leave most of a GPU to wait for the longest. The plan is made on the
device, without a look from the host, once for all layers of a step: it depends on the lengths only.

Args:
    seq_lens: int32 `[B]`, as for `mla_decode`. Negative ones are refused on the CPU, and count as 0 elsewhere.
    rows: Sq * H: how many rows of queries each sequence has.
    units: how many there are, up to 65535; 0 for as many as the GPU runs at a time.

Returns:
    int32 `[units + B, 4]`. For each unit the first sequence, the first block of 64 positions in it, the last
    sequence and the end of the blocks in it; then for each sequence the first unit, the last unit, and zeros.
""",
    module="mla.scheduler",
    fake=_fake,
    check_values=_check_schedule_values,
    sharding=_sharding_mla_schedule,
)
