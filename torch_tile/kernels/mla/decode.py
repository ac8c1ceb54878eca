# SPDX-License-Identifier: Apache-2.0
"""Decoding with multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) in its weight-absorbed form.

All heads share one latent `kv`, which is both key (with the rotary part `k_pe` beside it) and value. Assumes that `ops`
checked shapes and dtypes; takes tensors of any stride. The result lies in memory as q does (see arguments.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.attention.arguments import empty_beside, placed_beside
from torch_tile.kernels.attention.forward import default_scale, softmax_with_lse
from torch_tile.kernels.attention.softmax import begin_rows, exponentiate
from torch_tile.kernels.common import (
    LOG2_E,
    Machine,
    compute_dtype,
    dense_last,
    entry_function,
    machine_of,
    strided,
    typical,
    vector_of,
)
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.mla.args import MlaDecodeArgs
from torch_tile.kernels.mla.hopper import flash_mla_hopper
from torch_tile.kernels.mla.scheduler import WorkItems, combine_scheduled, scheduled_types
from torch_tile.kernels.mla.spec import MOST_POSITIONS, Config, Problem, Spec, config_for, splits_for
from torch_tile.kernels.mla.tiles import GROUP, SLACK, Positions, hide, load_cache, store_weighted
from torch_tile.kernels.split_k import combine_parts


def gather_pages(pages: torch.Tensor, block_table: torch.Tensor | None) -> torch.Tensor:
    """Gather the cache as `[B, S, C]`: `pages` itself when contiguous, else the rows of `[pages, page, C]` in table
    order.

    Entries of the table outside `[0, pages)` (padding) read some page; positions past a sequence's length are not used.
    """
    if block_table is None:
        return pages
    batch, blocks = block_table.shape
    rows = pages[block_table.clamp(0, max(pages.shape[0] - 1, 0)).long()] if pages.shape[0] else pages[:0]
    return rows.reshape(batch, blocks * pages.shape[1] if pages.shape[0] else 0, pages.shape[2])


def visible(q_len: int, kv_len: int, seq_lens: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Return a bool mask `[B or 1, Sq, S]`: query `t` is at position `len - Sq + t`, and sees those up to it."""
    length = seq_lens.to(device)[:, None, None] if seq_lens is not None else kv_len
    position = length - q_len + torch.arange(q_len, device=device)[None, :, None]
    return torch.arange(kv_len, device=device)[None, None, :] <= position


def gather_cache(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    block_table: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gather latent `[B, S, C]` and rotary `[B, S, R]` in the summing dtype, and the mask of seen positions."""
    compute = compute_dtype(q.dtype)
    latent, rotary = (gather_pages(cache, block_table).to(compute) for cache in (kv, k_pe))
    keep = visible(q.shape[1], latent.shape[1], seq_lens, q.device)
    # Memory past a sequence's end may hold NaN, which a zero weight would not cancel.
    used = keep.any(1).unsqueeze(-1)
    return torch.where(used, latent, 0.0), torch.where(used, rotary, 0.0), keep


def probabilities(
    q: torch.Tensor, q_pe: torch.Tensor, kv: torch.Tensor, k_pe: torch.Tensor, keep: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the softmax `[B, Sq, H, S]` and log-sum-exp `[B, Sq, H]` over a gathered cache, in the inputs' dtype."""
    s = torch.einsum("bthc,bsc->bths", q, kv) + torch.einsum("bthr,bsr->bths", q_pe, k_pe)
    return softmax_with_lse((s * scale).masked_fill(~keep.unsqueeze(2), float("-inf")))


def reference(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `tile.mla_decode_lse` in plain torch, in float32 (float64 for float64), from `MlaDecodeArgs`.

    `num_splits` and `schedule` only say how a kernel divides the work. Without them, threads or multiprocessors
    decide, so the last bits follow their number.
    """
    args: MlaDecodeArgs[torch.Tensor] = MlaDecodeArgs(*given, **named)
    q, q_pe = args.q, args.q_pe
    compute, scale = compute_dtype(q.dtype), scale_of(args)
    latent, rotary, keep = gather_cache(q, args.kv, args.k_pe, args.block_table, args.seq_lens)
    p, lse = probabilities(q.to(compute), q_pe.to(compute), latent, rotary, keep, scale)
    return placed_beside(torch.einsum("bths,bsc->bthc", p, latent), q), lse.contiguous()


# Up to so many sequences are split evenly, whatever a plan says: they wait less for the longest one than a plan costs.
# Six of random lengths up to 8192 take 34 us so and 39 by a plan. Eight take 41 and 42, and 40 and 26 if all but one
# are short (128 heads, H200).
EVENLY_SPLIT = 6


# Fast: exp2 of what is below -126 is 0, which saves three instructions for each score.
@library_jit(pass_configs={"tl.enable_fast_math": True})  # type: ignore[untyped-decorator]
def flash_mla(config: Config, spec: Spec) -> Any:
    """Build the decoding kernel: online softmax over blocks of positions, as in `attention`.

    Row r of a sequence is head `r % heads` of query `r // heads`. A tile of the cache is read once for both products.
    With `config.split` a block takes one of `splits` splits of the positions, and `combine` joins the splits. With
    `config.scheduled` it takes a unit of a schedule, piece after piece. `combine_pieces` then joins the pieces of
    divided sequences.
    """
    rows, keys = config.block_h, config.block_kv
    latent, width = spec.latent, spec.latent + spec.rotary
    accum = compute_dtype(spec.dtype)
    batch, lines, q_len, heads, splits = T.dynamic("batch, lines, q_len, heads, splits")
    owners = T.dynamic("owners") if spec.listed else batch
    (d0, d1), table_types, covered = spec.cache_shapes(owners)
    length_types = [] if spec.whole else [T.Tensor((owners,), "int32")]
    list_types = [T.Tensor((batch, T.dynamic("listed")), "int32")] if spec.listed else []
    stored_dtype = torch.float8_e4m3fn if spec.packed else spec.dtype
    rotary_dtype = torch.bfloat16 if spec.packed else spec.dtype
    stored_multiple = 2 * spec.vector if spec.packed and spec.vector > 1 else spec.vector
    scale_shape = (d0, d1, spec.latent // GROUP)
    scale_types = [strided("scales", scale_shape, torch.float32, unit=False, align=4)] if spec.packed else []
    work_item_types = scheduled_types(lines, latent, config.part_dtype(spec)) if config.scheduled else []
    part = (splits,) if config.split else ()
    out_dtype = config.part_dtype(spec) if config.split else spec.dtype
    out_shape = (*part, batch, lines, latent)

    @T.prim_func
    def mla_decode(
        q: strided("q", (batch, lines, latent), spec.dtype, multiple=spec.vector),
        q_pe: strided("q_pe", (batch, lines, spec.rotary), spec.dtype, multiple=spec.vector),
        kv: strided("kv", (d0, d1, latent), stored_dtype, multiple=stored_multiple),
        k_pe: strided("k_pe", (d0, d1, spec.rotary), rotary_dtype, multiple=spec.vector),
        *others: [*list_types, *scale_types, *table_types, *length_types, *work_item_types],
        out: strided("out", out_shape, out_dtype, multiple=latent),
        lse: T.Tensor((*part, batch, q_len, heads), accum),
        scale: accum,
    ):
        caches = (kv, k_pe, *others[len(list_types) :][: len(scale_types)])
        indices: Any = others[0] if spec.listed else None
        own_types = others[len(list_types) + len(scale_types) :]
        table, lengths = own_types[: len(table_types)], own_types[len(table_types) :][: len(length_types)]
        work_items: Any = WorkItems(*others[-3:], batch=batch) if config.scheduled else None
        grid = (
            T.ceildiv(lines, rows),
            splits if config.split else work_items.count if work_items else 1,
            1 if work_items else batch,
        )
        with T.Kernel(*grid, threads=config.threads) as (bx, split, bz):
            if config.split or work_items:
                T.pdl_trigger()
            row = work_items.read(split) if work_items else None
            own = (split,) if config.split else ()
            held, rest = config.held, width - config.held
            q_tile = T.alloc_shared((rows, max(rest, latent) if config.staged else rest), spec.dtype)
            tile = T.alloc_shared((keys, width), spec.dtype)
            stored = T.alloc_shared((keys, latent), stored_dtype) if spec.packed and not spec.one_by_one else tile
            scores = T.alloc_fragment((rows, keys), accum)
            probs = T.alloc_shared((rows, keys), spec.dtype)
            lse_made = T.alloc_fragment((rows, latent), accum)
            row_max, base, row_sum, rescale = (T.alloc_fragment((rows,), accum) for _ in range(4))
            partial_sums = T.alloc_fragment((rows, config.partial_sums), accum) if config.partial_sums > 1 else row_sum
            unit: Any = work_items.unit(split, row) if work_items else None
            for sequence in T.serial(unit.first, unit.last + 1) if work_items else (bz,):
                T.copy(q[sequence, bx * rows, held], q_tile[:, : latent - held])
                T.copy(q_pe[sequence, bx * rows, 0], q_tile[:, latent - held : rest])
                if held:
                    q_held = T.alloc_fragment((rows, held), spec.dtype)
                    T.copy(q[sequence, bx * rows, 0], q_held)
                T.clear(lse_made)
                T.clear(partial_sums)
                begin_rows(row_max, base)

                owner = sequence // (batch // owners) if spec.listed else sequence
                present = T.clamp(lengths[0][owner], 0, covered) if lengths else covered
                positions = Positions(spec, indices, table, sequence, owner, present)
                length = indices.shape[1] if spec.listed else present
                first_own = length - q_len + (bx * rows) // heads  # the position of the block's first query
                first, end = (
                    unit.blocks(sequence, keys, length)
                    if work_items
                    else spec.key_blocks(config, length, splits, split)
                )
                scale_log2 = scale * LOG2_E if spec.folded else LOG2_E
                for step in T.Pipelined(first, end, num_stages=config.stages):
                    load_cache(spec, caches, positions, tile, stored, step)
                    if held:
                        T.gemm(q_held, tile[:, :held], scores, transpose_B=True, clear_accum=True)
                    T.gemm(q_tile[:, :rest], tile[:, held:], scores, transpose_B=True, clear_accum=held == 0)
                    if spec.needs_mask(step * keys, keys, length, first_own):
                        hide(spec, scores, step * keys, length, length - q_len, heads, bx * rows, scale, positions)
                    exponentiate(
                        scores, row_max, base, partial_sums, rescale, scale_log2, config.parts, SLACK, not spec.fuses
                    )
                    # After the barrier of the maxima: by then all have read the tile.
                    if not spec.listed and step * keys + keys > length:
                        for j, c in T.Parallel(keys, latent):
                            if step * keys + j >= length:
                                tile[j, c] = 0  # memory past it may hold NaN, which weights of 0 would not cancel
                    T.copy(scores, probs)
                    T.scale_rows(lse_made, rescale)
                    T.gemm(probs, tile[:, :latent], lse_made, policy=T.GemmWarpPolicy.FullCol)

                if config.partial_sums > 1:
                    T.reduce_sum(partial_sums, row_sum, dim=1)
                for i in T.Parallel(rows):
                    row_max[i] = row_max[i] * (scale if spec.folded else 1.0) + T.log(row_sum[i])
                    rescale[i] = T.if_then_else(row_sum[i] == 0.0, 0.0, 1.0 / row_sum[i])
                through = q_tile if config.staged else None
                if work_items.is_divided(sequence) if work_items else False:
                    slot = work_items.slot(unit, sequence)
                    for i in T.Parallel(rows):
                        work_items.part_lse[slot, bx * rows + i] = row_max[i]
                    store_weighted(through, lse_made, rescale, work_items.part, (slot,), bx * rows)
                else:
                    for i in T.Parallel(rows):
                        lse[(*own, sequence, (bx * rows + i) // heads, (bx * rows + i) % heads)] = row_max[i]
                    store_weighted(through, lse_made, rescale, out, (*own, sequence), bx * rows)

    return mla_decode


def scale_of(args: Any) -> Any:
    """Return the factor of scores: as given, or one over the root of the columns of queries."""
    return default_scale(args.q.shape[3] + args.q_pe.shape[3]) if args.scale is None else args.scale


def empty_lse(q: torch.Tensor) -> torch.Tensor:
    """Allocate the log-sum-exp of each query and head."""
    return q.new_empty(q.shape[:3], dtype=compute_dtype(q.dtype))


def empty_results(args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the results: the first lies in memory as q does."""
    return empty_beside(args.q, args.q.shape[3]), empty_lse(args.q)


@entry_function(MlaDecodeArgs, reference, empty_results)
def mla_decode(
    args: MlaDecodeArgs[torch.Tensor], out: torch.Tensor, lse: torch.Tensor | None, config: Config | None = None
) -> bool:
    """Decode as `reference` does. `config` overrides the choice of `config_for`."""
    if not (args.q.shape[3] and args.q_pe.shape[3]):
        return False
    lse = empty_lse(args.q) if lse is None else lse
    return not lse.numel() or run(args, out, lse, machine_of(args.q), config)


def run(
    args: MlaDecodeArgs[Any],
    out: torch.Tensor,
    lse: torch.Tensor,
    machine: Machine,
    config: Config | None = None,
    scales: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
) -> bool:
    """Launch `mla_decode` on a machine into `out`, dense with the last dimension innermost, and contiguous `lse`.
    Neither is empty. Return whether there is a tiling, else nothing is launched.

    With `scales` `[.., C / 128]`, kv is float8. With `indices` int32 `[B, n]` a query, the only one of its sequence,
    sees the listed positions; neighbouring sequences share a cache.
    """
    q, q_pe, kv, k_pe, block_table, seq_lens, _, num_splits, schedule = args
    scale = scale_of(args)
    if not kv.numel():  # tensor maps cannot describe tensors without elements
        out.zero_()
        lse.fill_(float("-inf"))
        return True
    batch, q_len, heads, latent = q.shape
    positions = kv.shape[1] if block_table is None else block_table.shape[1] * kv.shape[1]
    positions = positions if indices is None else indices.shape[1]
    q, q_pe, kv, k_pe = (dense_last(x) for x in (q, q_pe, kv, k_pe))
    problem = Problem(batch, q_len * heads, positions)
    if typical(problem).positions > MOST_POSITIONS:
        return False
    if config is None and typical(problem).batch <= EVENLY_SPLIT:
        schedule = None
    spec = _spec_of(q, q_pe, kv, k_pe, out, machine, 0 if block_table is None else kv.shape[1], seq_lens is None, scale)
    spec = replace(spec, packed=scales is not None, listed=indices is not None)
    config = config or config_for(spec, problem, machine, num_splits if schedule is None else 1)
    if config is None:
        return False
    spec = replace(spec, gathered=spec.page % config.block_kv != 0)
    others = [] if indices is None else [indices.contiguous()]
    others += [] if scales is None else [scales]
    others += [] if block_table is None else [dense_last(block_table)]
    others += [] if seq_lens is None else [seq_lens.contiguous()]
    operands = (q.flatten(1, 2), q_pe.flatten(1, 2), kv, k_pe, *others)
    made = flash_mla_hopper if config.ping_pong else flash_mla
    if config.split:
        splits = splits_for(config, problem, machine, num_splits)
        part = q.new_empty((splits, batch, q_len * heads, latent), dtype=config.part_dtype(spec))
        parts = part, lse.new_empty((splits, *lse.shape))
        machine.kernel(made)(config, spec)(*operands, *parts, float(scale))
        combine_parts(*parts, out, lse, machine)
        return True
    is_even = q_len == 1 or out.stride(1) == heads * out.stride(2)  # rows of all queries and heads are a view
    target = out if is_even else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    if schedule is None:
        machine.kernel(made)(config, spec)(*operands, target.flatten(1, 2), lse, float(scale))
    else:
        slots = 2 * (schedule.shape[0] - batch)
        left = (
            schedule.contiguous(),
            q.new_empty((slots, q_len * heads, latent), dtype=config.part_dtype(spec)),
            lse.new_empty((slots, q_len * heads)),
        )
        config = replace(config, scheduled=True)
        machine.kernel(made)(config, spec)(*operands, *left, target.flatten(1, 2), lse, float(scale))
        combine_scheduled(*left, target, lse, machine)
    if target is not out:
        out.copy_(target)
    return True


def _spec_of(
    q: torch.Tensor,
    q_pe: torch.Tensor,
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    out: torch.Tensor,
    machine: Machine,
    page: int,
    whole: bool,
    scale: float,
) -> Spec:
    """Return the facts that a kernel for these tensors is compiled for."""
    latent, rotary = q.shape[3], q_pe.shape[3]
    vector = vector_of((q, q_pe, k_pe, out), (latent, rotary)) if machine.is_gpu else 1
    if machine.is_gpu and vector_of((kv,), (latent,)) == 1:
        vector = 1
    gathered = page % 64 != 0
    fuses = machine.is_gpu and q.dtype != torch.float64
    return Spec(q.dtype, latent, rotary, page, gathered, scale > 0, vector, whole, fuses)
