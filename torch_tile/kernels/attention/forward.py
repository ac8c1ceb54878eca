# SPDX-License-Identifier: Apache-2.0
"""Scaled dot-product attention with masks, windows, grouped heads and unequal lengths.

Assumes that `ops` checked shapes and dtypes; takes tensors of any stride. The result lies in memory as q does (see
arguments.py), lse is contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.attention import score_mod as score_text
from torch_tile.kernels.attention.args import AttentionArgs
from torch_tile.kernels.attention.arguments import bounded, empty_beside, placed_beside
from torch_tile.kernels.attention.block_lists import Listed
from torch_tile.kernels.attention.few_keys import Tiling, few_keys_attention, tiling_for
from torch_tile.kernels.attention.operands import Rows, load, prepare_operands
from torch_tile.kernels.attention.scaled_keys import (
    E4M3,
    GAIN,
    Scales,
    raise_scores,
    scale_scores,
    scale_to_float16,
    scale_types,
    sign_weights,
    widen,
)
from torch_tile.kernels.attention.sequences import (
    DENSE,
    Given,
    Sequences,
    clear_past,
    dense_span,
    held_pages,
    load_keys,
    plan,
    store_own,
)
from torch_tile.kernels.attention.softmax import begin_rows, exponentiate, hide_keys
from torch_tile.kernels.attention.spec import MOST_SPLITS, Config, Spec, spec_of
from torch_tile.kernels.attention.tiling import Problem, config_for, entries_for, splits_for
from torch_tile.kernels.common import (
    LOG2_E,
    Machine,
    compute_dtype,
    dense_last,
    dynamic,
    entry_function,
    machine_of,
    strided,
)
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.split_k import combine_parts


def visible(args: AttentionArgs[torch.Tensor]) -> torch.Tensor | None:
    """Return a bool tensor `[Sq, Skv]`: whether query `i` sees key `j`. Return None if all queries see all keys.

    Causal: `j <= i + q_offset`. Window `w > 0`: `j > i + q_offset - w`.
    """
    causal, window, device = args.causal, args.window, args.q.device
    offset: Any = args.q_offset
    if not causal and not window:
        return None
    reach: torch.Tensor = torch.arange(args.q.shape[2], device=device)[:, None] + offset
    key = torch.arange(args.k.shape[2], device=device)[None, :]
    if not window:
        return key <= reach
    near: torch.Tensor = key > reach - bounded(window)
    return (key <= reach) & near if causal else near


def scores(args: AttentionArgs[torch.Tensor]) -> torch.Tensor:
    """Compute `score(scale * q k^T) + mask`: `[B, H, Sq, Skv]` in `q`'s dtype, with `-inf` where a query may not see a
    key.

    q `[B, H, Sq, D]` and k `[B, Hkv, Skv, D]` in the dtype to compute in; query head `h` reads key head
    `h // (H / Hkv)`. v is not read.
    """
    q, k, mask = args.q, args.k, args.mask
    offset: Any = args.q_offset
    batch, kv_heads, kv_len, _ = k.shape
    heads, q_len = q.shape[1], q.shape[2]
    groups = heads // kv_heads if kv_heads else 1
    scale = default_scale(q.shape[3]) if args.scale is None else args.scale
    grouped = q.reshape(batch, kv_heads, groups, q_len, q.shape[3])
    s = torch.matmul(grouped * scale, k.unsqueeze(2).mT).reshape(batch, heads, q_len, kv_len)
    s = score_text.modified(args.score, s, args.aux or (), offset)
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else s + mask.to(s.dtype)
    keep = visible(args)
    return s if keep is None else s.masked_fill(~keep, float("-inf"))


def softmax_with_lse(s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the softmax over the last dimension and its log-sum-exp. A row without keys gives 0 and `-inf`."""
    lse = torch.logsumexp(s, -1)
    # Not exp(s - lse): where all scores are as low as numbers go, lse has no digit left for their count.
    empty = (lse == float("-inf")).unsqueeze(-1)
    return torch.softmax(s.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0), lse


def default_scale(head_dim: int) -> float:
    """Return the default scale of scores: `1 / sqrt(head_dim)`, or 1 for heads of no elements."""
    return float(head_dim) ** -0.5 if head_dim else 1.0


def reference(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `tile.attention_lse` in plain torch, summed in float32 (float64 for float64 inputs).

    Takes the arguments of `AttentionArgs`. See `visible` for the causal rule and the window. A query that sees no key
    gets 0 and `-inf`.

    Kernels weigh keys rightly for scores of any magnitude up to 1e38. Where they split the keys, and in the backward
    without finite masks, weights come from lse, which float32 rounds: their relative error is up to
    `2 ** -24 * abs(lse)`.
    """
    args: AttentionArgs[torch.Tensor] = AttentionArgs(*given, **named)
    q, v = args.q, args.v
    compute = compute_dtype(q.dtype)
    batch, heads, q_len, _ = q.shape
    kv_heads, kv_len, v_dim = v.shape[1:]
    p, lse = softmax_with_lse(scores(args._replace(q=q.to(compute), k=args.k.to(compute))))
    grouped = p.reshape(batch, kv_heads, heads // kv_heads if kv_heads else 1, q_len, kv_len)
    out = torch.matmul(grouped, v.to(compute).unsqueeze(2)).reshape(batch, heads, q_len, v_dim)
    return placed_beside(out, q), lse.contiguous()


MMA_ROWS, RUN = 16, 8  # rows that a warp holds of a product, and elements of 16 bytes
MOST_TILES = 1 << 30  # of persistent blocks, whose indices are 32 bits wide


@T.macro
def store_rows(acc: Any, weight: Any, out: Any, place: tuple[Any, ...], first: Any) -> None:
    """Store the rows of `acc` times their weights to `out` at `place`, from row `first` on."""
    for i, c in T.Parallel(*acc.shape):
        out[(*place, first + i, c)] = acc[i, c] * weight[i]


@T.macro
def store_staged(acc: Any, weight: Any, out: Any, place: tuple[Any, ...], first: Any, given: Any = None) -> None:
    """Store as `store_rows`, but through shared memory, in runs of 16 bytes: a `given` tile, or one of its own."""
    staged = T.alloc_shared(acc.shape, out.dtype) if given is None else given
    stage(acc, weight, staged)
    T.copy(staged[0 : acc.shape[0], 0 : acc.shape[1]], out[(*place, first, 0)])


@T.macro
def store_by_warps(acc: Any, weight: Any, out: Any, place: tuple[Any, ...], first: Any, staged: Any) -> None:
    """Store as `store_staged`, each warp the rows that it holds after a product by wgmma: warps do not meet."""
    stage(acc, weight, staged)
    T.sync_warp()
    T.tma_copy(staged, out[(*_not_negative(*place, first), 0)], by_warps=True)


def _at_least_one(config: Config, count: Any) -> Any:
    """Return a number of rows, clamped to 1 where tiles start early: a proof that each tile has a step."""
    return T.max(count, 1) if config.early else count


def _not_negative(*place: Any) -> tuple[Any, ...]:
    """Clamp a tile's place at 0: bulk stores ask for a proof of the sign, which not all orders of tiles have."""
    return tuple(x if isinstance(x, int) else T.max(x, 0) for x in place)


@T.macro
def stage(acc: Any, weight: Any, staged: Any) -> None:
    """Round the rows of `acc` times their weights to a shared tile."""
    rows, columns = acc.shape
    result = T.alloc_fragment(acc.shape, staged.dtype)
    for i, c in T.Parallel(rows, columns):
        result[i, c] = T.cast(acc[i, c] * weight[i], staged.dtype)
    T.copy(result, staged[0:rows, 0:columns])


# Fast: exp2 of what is below -126 is 0, which saves three instructions for each score.
@library_jit(pass_configs={"tl.enable_fast_math": True})  # type: ignore[untyped-decorator]
def flash_attention(config: Config, spec: Spec) -> Any:
    """Build the forward kernel: online softmax over blocks of keys, in powers of two (FlashAttention-2,
    arXiv:2307.08691).

    With `config.packed` the query heads that share a key head are one matrix of `length` rows, head by head. So short
    queries fill tiles: row r is query `r % q_len` of head `r // q_len`. Else each head is a matrix of its own. With
    `config.split` a block takes one of `splits` splits of the keys, and `combine` joins the splits.
    """
    rows, keys = config.block_q, config.block_kv
    accum = compute_dtype(spec.dtype)
    infinity = T.infinity(accum)
    batch, kv_heads, length, kv_len, splits = T.dynamic("batch, kv_heads, length, kv_len, splits")
    groups = T.dynamic("groups") if spec.grouped else 1
    lists = spec.lists
    packed = spec.grouped and config.packed and not spec.layout.ragged and lists is None
    members = 1 if packed else groups
    mask_queries = T.dynamic("mask_queries") if packed else length
    d, dv = (spec.tile_d, spec.tile_dv) if spec.exact else (dynamic("d", spec.vector), dynamic("dv", spec.vector))
    q_shape = (batch, kv_heads, members, length)
    layout, sequences = spec.layout, batch if spec.layout.fixed else T.dynamic("sequences")
    slabs, key_rows = (T.dynamic("pages"), layout.page) if layout.page else (batch, kv_len)
    part = (splits,) if config.split else ()
    lse_types = [T.Tensor((*part, *q_shape), accum)] if config.split or spec.lse else []
    list_types = [] if lists is None else lists.types(batch, kv_heads * groups)
    scales = scale_types(slabs, kv_heads, key_rows) if spec.scaled else []
    key_dtype = E4M3 if spec.scaled else spec.dtype
    behind = len(list_types) + len(scales) + len(lse_types)

    @T.prim_func
    def attention(
        q: strided("q", (*q_shape, d), spec.dtype, multiple=spec.vector),
        k: strided("k", (slabs, kv_heads, key_rows, d), key_dtype, multiple=spec.vector),
        v: strided("v", (slabs, kv_heads, key_rows, dv), key_dtype, multiple=spec.vector),
        *others: [
            *spec.operand_types(sequences, (kv_heads, groups), mask_queries, kv_len),
            *layout.types(sequences),
            *list_types,
            *scales,
            *lse_types,
        ],
        out: T.Tensor((*part, *q_shape, dv), accum) if config.split else spec.out_type((*q_shape, dv)),
        scale: accum,
        q_len: T.int32,
        q_offset: T.int32,
        window: T.int32,
    ):
        given = Given(layout, others[len(spec.operands) : len(others) - behind])
        if config.split:
            T.assume(splits >= 1 and splits <= MOST_SPLITS)
        if config.entries:  # those of all tiles of a split
            T.assume(given.table.shape[1] * max(layout.page // keys, 1) <= splits * config.entries)
        if layout.ragged:
            plan(given.q_ends, given.tiles, length, rows)
        blocks = given.tiles.shape[0] if layout.ragged else T.ceildiv(length, rows)
        with T.Kernel(*config.grid(blocks, kv_heads * members, batch, splits), threads=config.threads) as (bx, by, bz):
            T.annotate_min_blocks_per_sm(config.blocks)
            if config.split:
                T.pdl_trigger()
            heads = kv_heads * members
            # Outside of the loop, so that a tile leaves while the block works on its next one.
            staged = T.alloc_shared((rows, spec.tile_dv), spec.dtype) if config.persistent else None
            tiles = T.min(heads * batch * blocks, MOST_TILES)
            for wave in config.loop(config.waves(bx, tiles)) if config.persistent else (0,):
                if config.persistent:
                    block, number = config.tile(wave, bx, blocks, T.min(heads * batch, MOST_TILES), tiles)
                    if config.early:  # bounds of keys ask for a proof of the sign, which not all orders have
                        block = T.max(block, 0)
                    own = T.min(heads, MOST_TILES)  # 64 bits divide slowly
                    any_head, sequence, split = number % own, number // own, 0
                else:
                    block, any_head, sequence, split = config.place(bx, by, bz, blocks, heads, splits)
                head, member = any_head // members, any_head % members
                place = (*((split,) if config.split else ()), sequence, head, member)
                if config.split and config.shared_probs:
                    T.pdl_sync()  # a launch takes longer than what stands in front of this
                if layout.ragged:
                    span = given.ragged_span(block, length, kv_len, of_keys=False)
                elif layout.page:
                    if config.entries:
                        given = held_pages(given, k, sequence, keys, config.entries, (split, splits))
                    present = given.paged_keys(sequence)
                    span = dense_span(block * rows, sequence, length, q_len, present, present - q_len)
                else:
                    span = dense_span(block * rows, sequence, length, q_len, kv_len, q_offset)
                q_tile = T.alloc_shared((rows, spec.tile_d), spec.dtype)
                k_tile = T.alloc_shared((keys, spec.tile_d), spec.dtype)
                v_tile = T.alloc_shared((keys, spec.tile_dv), spec.dtype)
                k_stored, v_stored, k_scale, v_scale = k_tile, v_tile, None, None
                if spec.scaled:
                    if spec.tile_d == spec.tile_dv:  # keys are read before values are widened
                        v_tile = k_tile
                    k_stored, v_stored = (T.alloc_shared((keys, n), E4M3) for n in (spec.tile_d, spec.tile_dv))
                    if config.narrow:
                        k_tile, v_tile = k_stored, v_stored
                    k_scale, v_scale = (
                        others[len(others) - len(lse_types) - 2],
                        others[len(others) - len(lse_types) - 1],
                    )
                    k_scales, v_scales = (T.alloc_shared((keys,), T.float32) for _ in range(2))
                scores = T.alloc_fragment((rows, keys), accum)
                probs_dtype = torch.float16 if config.narrow else spec.dtype
                probs = (T.alloc_shared if config.shared_probs else T.alloc_fragment)((rows, keys), probs_dtype)
                acc = T.alloc_fragment((rows, spec.tile_dv), accum)
                row_max, base, row_sum, rescale = (T.alloc_fragment((rows,), accum) for _ in range(4))
                partial_sums = (
                    T.alloc_fragment((rows, config.partial_sums), accum) if config.partial_sums > 1 else row_sum
                )

                T.copy(q[span.slab, head, member, span.row, 0], q_tile)
                queries, unit_of_row = q_tile, None
                if config.narrow and spec.dtype == torch.bfloat16:
                    queries = T.alloc_fragment((rows, spec.tile_d), torch.float16)
                    unit_of_row = T.alloc_fragment((rows,), accum)
                    scale_to_float16(q_tile, queries, unit_of_row)
                elif config.resident:
                    queries = T.alloc_fragment((rows, spec.tile_d), spec.dtype)
                    T.copy(q_tile, queries)
                T.clear(acc)
                T.clear(partial_sums)
                begin_rows(row_max, base)

                here = Rows(
                    span.first, span.length, span.queries, packed, span.sequence, head, member, members, span.q_offset
                )
                held = prepare_operands(
                    spec.operands, others[: len(spec.operands)], (rows, keys), config.tiled and not packed, here
                )
                mask, aux = held[: spec.mask is not None], held[spec.mask is not None :]
                extremes = (
                    (0, q_len - 1)
                    if packed
                    else (span.first, T.min(span.first + rows - 1, _at_least_one(config, span.length) - 1))
                )
                listed = None
                if lists is not None:
                    counts, indices = others[len(others) - behind], others[len(others) - behind + 1]
                    own_list = lists.place(span.sequence, head * members + member, span.first, counts)
                    listed = lists.steps(counts, own_list, keys)
                first, end = spec.key_blocks(
                    config, extremes, span.q_offset, window, _at_least_one(config, span.keys), splits, split, listed
                )
                own, hidden = extremes, None
                if config.own_keys and not config.split:
                    begin, own_end = T.own_rows(rows)
                    own = span.first + begin, T.min(span.first + own_end - 1, span.length - 1)
                    own_keys = spec.key_blocks(config, own, span.q_offset, window, span.keys, splits, split)
                    hidden = end - own_keys[1]
                past = None
                if config.halved:  # the end of the keys that a warpgroup sees
                    past = T.min(span.first + T.own_rows(rows)[1], span.length) - first * keys
                    past = past + span.q_offset if spec.shifted else past
                unit = spec.unit(scale)
                scale_log2 = unit * LOG2_E
                for iteration in T.Pipelined(
                    spec.iterations(config, end - first, splits, split), num_stages=config.stages,
                    ping_pong=config.ping_pong, skip=hidden,
                ):  # fmt: skip
                    number = spec.block_number(config, iteration, end - first, splits, split)
                    step = end - 1 - number if spec.backwards(config) else first + number
                    if lists is not None:
                        step = lists.step(indices, own_list, step, keys, span.keys)
                    load(held, here, step * keys)
                    load_keys(given, k, k_stored, span, head, step, iteration)
                    if spec.scaled:
                        load_keys(given, k_scale, k_scales, span, head, step, iteration)
                        if not config.narrow:
                            widen(k_stored, k_scales, k_tile)
                    T.gemm(queries, k_tile, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                    if config.narrow:
                        scale_scores(scores, k_scales, unit_of_row)
                    if spec.score:
                        score_text.modify(spec.program, scores, scale, aux, here, step * keys)
                    if spec.mask is not None or not spec.folded:
                        for i, j in T.Parallel(rows, keys):
                            product = scores[i, j] if spec.score or spec.folded else scores[i, j] * scale
                            scores[i, j] = spec.masked(product, *[x.element(here, i, j, step * keys) for x in mask])
                    if spec.needs_mask(config, iteration, step, own, span.q_offset, window, span.keys):
                        limits = span.q_offset, window, span.keys
                        hide_keys(
                            spec, [scores], -infinity, here.query, step * keys, *limits, columns=config.partial_sums
                        )
                    gain, sizes = 0.0, None
                    if config.narrow:
                        gain, sizes = GAIN, T.alloc_fragment((keys,), accum)
                        load_keys(given, v_scale, v_scales, span, head, step, iteration)
                        clear_past(v_scales, step * keys, span.keys, iteration == 0 if spec.backwards(config) else True)
                        raise_scores(scores, v_scales, sizes, scale_log2)
                    exponentiate(
                        scores, row_max, base, partial_sums, rescale, scale_log2, subtracts=spec.subtracts, gain=gain,
                        sizes=sizes,
                    )  # fmt: skip
                    for i, c in T.Parallel(rows, spec.tile_dv):
                        acc[i, c] *= rescale[i]
                    load_keys(given, v, v_stored, span, head, step, iteration)
                    may_end = iteration == 0 if spec.backwards(config) else True
                    if config.narrow:
                        sign_weights(scores, v_scales, probs)
                    else:
                        if spec.scaled:
                            load_keys(given, v_scale, v_scales, span, head, step, iteration)
                            widen(v_stored, v_scales, v_tile)
                        T.copy(scores, probs)
                    if not layout.fixed:
                        clear_past(v_tile, step * keys, span.keys, may_end)
                    T.gemm(
                        probs, v_tile, acc, policy=T.GemmWarpPolicy.FullRow,
                        used=None if past is None else past - iteration * keys,
                    )  # fmt: skip

                if config.partial_sums > 1:
                    T.reduce_sum(partial_sums, row_sum, dim=1)
                for i in T.Parallel(rows):
                    if lse_types:
                        log_sum = row_max[i] * unit + T.log(row_sum[i])
                        if config.narrow:
                            log_sum = log_sum - GAIN * math.log(2)
                        if not layout.ragged:
                            others[-1][(*place, block * rows + i)] = log_sum
                        elif span.first + i < span.length:
                            others[-1][(*place, span.row + i)] = log_sum
                    rescale[i] = T.if_then_else(row_sum[i] == 0.0, 0.0, 1.0 / row_sum[i])
                if layout.ragged:
                    store_own(acc, rescale, out, place, span, config.staged)
                elif config.persistent:
                    store_by_warps(acc, rescale, out, place, block * rows, staged)
                elif config.staged:
                    store_staged(acc, rescale, out, place, block * rows, q_tile if config.through_queries else None)
                else:
                    store_rows(acc, rescale, out, place, block * rows)

    return attention


def empty_results(args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the results of dense attention: the first lies in memory as q does."""
    q = args.q
    return empty_beside(q, args.v.shape[3]), q.new_empty(q.shape[:3], dtype=compute_dtype(q.dtype))


@entry_function(AttentionArgs, reference, empty_results)
def attention(
    args: AttentionArgs[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor | None,
    config: Config | Tiling | None = None,
    splits: int = 0,
) -> bool:
    """Compute attention as `reference` does. `config` overrides the choice of a kernel and its tiling, and `splits` the
    number of splits.
    """
    return not (out if lse is None else lse).numel() or run(args, out, lse, machine_of(args.q), config, splits)


def run(
    args: AttentionArgs[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor | None,
    machine: Machine,
    config: Config | Tiling | None,
    splits: int,
    sequences: Sequences | None = None,
    lists: Listed | None = None,
    scales: Scales | None = None,
) -> bool:
    """Launch `attention` on a machine into `out` and, if given, `lse`. `out` is dense with the last dimension
    innermost, `lse` is contiguous; neither is empty. Return whether there is a tiling, else nothing is launched.

    Of ragged `sequences`, q is `[1, H, rows, D]` and keys `[1, Hkv, rows, D]`; pages are `[pages, Hkv, page, D]`. Of
    `lists`, queries see the blocks of keys that these name. With `scales` keys and values are float8.
    """
    if not args.k.shape[2]:  # tensor maps cannot describe tensors without elements
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        return True
    args = score_text.as_mask(args)
    q, k, v = (dense_last(x) for x in args[:3])
    scale = default_scale(q.shape[3]) if args.scale is None else args.scale
    batch, kv_heads, (head_dim, v_dim) = k.shape[0], k.shape[1], (k.shape[3], v.shape[3])
    groups = q.shape[1] // kv_heads
    layout = DENSE if sequences is None else sequences.layout
    spec, operands = spec_of(
        args, (q, k, v, out), machine, layout, lists,
        folded=(args.mask is None or args.mask.dtype == torch.bool) and (scale > 0 or bool(args.score)),
        lse=lse is not None, fuses=machine.is_gpu and q.dtype != torch.float64, scaled=scales is not None,
    )  # fmt: skip
    adjacent = all(_heads_are_adjacent(x, groups) for x in (q, out))
    problem = Problem(batch * kv_heads, groups * q.shape[2], k.shape[2], groups, adjacent)
    if sequences is not None:
        batch = q.shape[0]
        rows, most_keys = groups * torch.sym_max(sequences.most_queries, 1), torch.sym_max(sequences.most_keys, 1)
        problem = Problem(sequences.count * kv_heads, rows, most_keys, groups, adjacent)
    config = config or (None if splits else tiling_for(spec, problem, machine)) or config_for(spec, problem, machine)
    if config is None:
        return False
    if isinstance(config, Tiling):
        given = [k, v, *operands, *(sequences.tensors(q.shape[2], 1) if sequences is not None else ())]
        rows = q.reshape(batch, kv_heads, -1, head_dim)  # a copy, if heads that share keys are not one after the other
        _launch_few_keys(config, spec, machine, [rows, *given], problem.keys, out, lse, (float(scale), q.shape[2]))
        return True
    config = replace(config, packed=config.packed and not layout.ragged and lists is None)
    lanes = (1, groups * q.shape[2]) if groups > 1 and config.packed else (groups, q.shape[2])
    shape = (batch, kv_heads, *lanes)
    if sequences is not None:
        operands = [*operands, *sequences.tensors(q.shape[2], config.block_q)]
    if lists is not None:
        operands = [*operands, *lists.tensors]
    if scales is not None:
        operands = [*operands, *scales.tensors]
    options = (float(scale), q.shape[2], args.q_offset, bounded(args.window))
    if config.split:
        splits = splits or splits_for(config, problem, machine)
        config = replace(config, entries=entries_for(config, spec, problem, splits))
    kernel = machine.kernel(flash_attention)(config, spec)
    grouped = q.reshape(*shape, head_dim)  # a copy, if heads are packed that do not lie one after the other
    if not config.split:
        packs = lanes[0] > 1 or _heads_are_adjacent(out, groups)
        target = out if packs else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        sums = [] if lse is None else [lse.view(shape)]
        kernel(grouped, k, v, *operands, *sums, target.view(*shape, v_dim), *options)
        if target is not out:
            out.copy_(target)
        return True
    empty = partial(q.new_empty, dtype=compute_dtype(q.dtype))
    lse = empty(grouped.shape[:-1]) if lse is None else lse
    parts = empty((splits, *shape, v_dim)), empty((splits, *shape))
    kernel(grouped, k, v, *operands, parts[1], parts[0], *options)
    combine_parts(*parts, out, lse, machine)
    return True


def _launch_few_keys(
    config: Tiling, spec: Spec, machine: Machine, tensors: Sequence[torch.Tensor], most_keys: Any, out: torch.Tensor,
    lse: torch.Tensor | None, options: tuple[Any, ...],
) -> None:  # fmt: skip
    """Launch the kernel whose blocks have one tile of keys each. Where clusters do not join these, launch a join.

    `tensors` are the rows of queries `[B, Hkv, rows, D]`, keys, values, and what describes masks and sequences.
    """
    shape, v_dim = tensors[0].shape[:-1], out.shape[3]
    empty = partial(out.new_empty, dtype=compute_dtype(out.dtype))
    lse = empty(out.shape[:-1]) if lse is None else lse
    kernel = machine.kernel(few_keys_attention)(config, spec)
    if config.cluster > 1:
        adjacent = _heads_are_adjacent(out, out.shape[1] // shape[1])
        target = out if adjacent else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        kernel(*tensors, lse.view(shape), target.view(*shape, v_dim), *options)
        if target is not out:
            out.copy_(target)
        return
    part = (-(-most_keys // config.keys), *shape)
    parts = empty((*part, v_dim)), empty(part)
    kernel(*tensors, parts[1], parts[0], *options)
    combine_parts(*parts, out, lse, machine)


def _heads_are_adjacent(x: torch.Tensor, groups: int) -> bool:
    """Return whether a view packs the rows of the heads that share a key head: these then have one stride."""
    return groups == 1 or x.shape[2] == 1 or x.stride(1) == x.shape[2] * x.stride(2)
