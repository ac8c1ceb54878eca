# SPDX-License-Identifier: Apache-2.0
"""Attention of few queries over few keys: a block has one tile of keys, and loads all of it before it waits.

Launches, memory's latency and cold code are the cost here, not bytes. So there is no loop. Keys and queries pass no
shared memory: a lane loads runs of 16 bytes, and products take them as operands whose columns stand in another order.
May assume what `tiling_for` asks for.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

import torch_tile.language as T
from torch_tile.hardware import WARP
from torch_tile.kernels.attention.operands import Rows, prepare_operands
from torch_tile.kernels.attention.sequences import Given, clear_past, page_of
from torch_tile.kernels.attention.softmax import base_of, factor_of
from torch_tile.kernels.attention.spec import MOST_SPLITS
from torch_tile.kernels.common import LOG2_E, Machine, strided, typical
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.measured_rules import verdict

if TYPE_CHECKING:
    from torch_tile.kernels.attention.spec import Spec
    from torch_tile.kernels.attention.tiling import Problem

RUN = 8  # elements of 16 bytes
LINE = 4 * RUN  # columns that the four lanes of a row of an operand load at once
MMA_ROWS, MMA_COLUMNS = 16, 8  # of a product of tensor cores
PIECE = 128  # values of a product that begins while others are under way


@dataclass(frozen=True)
class Tiling:
    """A block of `threads` threads has `rows` rows of queries, 8 or 16, and `keys` keys.

    Above 1, `cluster` is the number of blocks that have all keys, and join what they made of these. With `bulk`, one
    thread starts the copies of values.
    """

    rows: int = 8
    keys: int = 64
    threads: int = 128
    cluster: int = 1
    bulk: bool = False

    @property
    def warps(self) -> int:
        """Number of a block's warps."""
        return self.threads // WARP

    def key_lines(self, d: int) -> Any:
        """Return the layout of keys `[keys, d]` as they are loaded: four lanes share a row of a warp's product."""
        own = self.keys // self.warps

        def place(j: Any, c: Any) -> tuple[Any, Any]:
            lane = j % own % MMA_COLUMNS * 4 + c % LINE // RUN
            return j // own * WARP + lane, (j % own // MMA_COLUMNS * (d // LINE) + c // LINE) * RUN + c % RUN

        return T.Fragment((self.keys, d), forward_fn=place)

    def query_lines(self, d: int) -> Any:
        """Return the layout of queries `[rows, d]`: each warp has all of them, as it has its keys."""
        return T.Fragment(
            (self.rows, d),
            forward_thread_fn=lambda i, c, warp: warp * WARP + i % MMA_COLUMNS * 4 + c % LINE // RUN,
            forward_index_fn=lambda i, c: (i // MMA_COLUMNS * (d // LINE) + c // LINE) * RUN + c % RUN,
            replicate=self.warps,
        )


def column_of(slot: Any) -> Any:
    """Return the column of a key or a query that stands at a slot of its operand. Lanes keep what they loaded.

    Four lanes share a row. Of 16 slots, lane t holds two from 2 t and two from 2 t + 8 on. Sums have no order.
    """
    place = slot // 16 * 4 + slot % 16 // 8 * 2 + slot % 2
    return place // RUN * LINE + slot % 8 // 2 * RUN + place % RUN


@T.macro
def join_in_cluster(
    tiling: Tiling,
    acc: Any,
    weight: Any,
    log_sum: Any,
    rank: Any,
    length: Any,
    place: tuple[Any, ...],
    lse: Any,
    out: Any,
) -> None:
    """Join the results `acc * weight` `[dv, rows]` of a cluster's blocks. Each stores some columns of the joined rows.

    Rows without visible keys give 0 and -inf.
    """
    dv, rows = acc.shape
    count = tiling.cluster
    own, infinity = dv // count, T.infinity(acc.dtype)
    layout = T.Fragment((rows, own), lambda i, c: ((i * own + c) % tiling.threads, (i * own + c) // tiling.threads))
    parts = T.alloc_shared((rows, dv), acc.dtype)
    logs = T.alloc_shared((rows,), acc.dtype)
    joined, joined_log = (T.alloc_fragment((rows, own), acc.dtype) for _ in range(2))
    for c, i in T.Parallel(dv, rows):
        parts[i, c] = acc[c, i] * weight[i]
    T.copy(log_sum, logs)
    T.cluster_sync()
    for i, c in T.Parallel(rows, own, loop_layout=layout):
        each = [T.alloc_var(acc.dtype, T.at_rank(logs[i], r)) for r in range(count)]
        values = [T.alloc_var(acc.dtype, T.at_rank(parts[i, rank * own + c], r)) for r in range(count)]
        highest = functools.reduce(T.max, each)
        level = T.alloc_var(acc.dtype, T.if_then_else(highest == -infinity, 0.0, highest))
        total, sum_ = (T.alloc_var(acc.dtype, 0.0) for _ in range(2))
        for log, value in zip(each, values, strict=True):
            share = T.alloc_var(acc.dtype, T.exp(log - level))
            total += share
            sum_ += share * value
        total = T.max(total, 1.0)
        joined[i, c] = sum_ / total
        joined_log[i, c] = highest + T.log(total)
    T.cluster_arrive()  # this block has read the parts of all blocks
    for i, c in T.Parallel(rows, own, loop_layout=layout):
        if i < length:
            out[(*place, i, rank * own + c)] = joined[i, c]
            if rank * own + c == 0:
                lse[(*place, i)] = joined_log[i, c]
    T.cluster_wait()  # until then the other blocks read this block's part


# Fast: exp2 of what is below -126 is 0, as in `forward.flash_attention`.
@library_jit(pass_configs={"tl.enable_fast_math": True})  # type: ignore[untyped-decorator]
def few_keys_attention(tiling: Tiling, spec: Spec) -> Any:
    """Build the kernel for queries of few positions. All heads that share a key head are rows of a block.

    A block computes the softmax of its own keys, and its log-sum-exp. A cluster joins them, else `split_k.combine`.
    """
    keys, rows, accum = tiling.keys, tiling.rows, torch.float32
    infinity = T.infinity(accum)
    batch, kv_heads, groups, length, kv_len, splits = T.dynamic("batch, kv_heads, groups, length, kv_len, splits")
    mask_queries = T.dynamic("mask_queries")
    d, dv, page = spec.tile_d, spec.tile_dv, spec.layout.page
    # Values of a copy, and of a product that waits for one or several copies.
    each, piece = (min(page, keys), keys) if page else (min(keys, PIECE), min(keys, PIECE))
    q_shape, count = (batch, kv_heads, length), tiling.cluster
    part = () if count > 1 else (splits,)
    slabs, key_rows = (T.dynamic("pages"), page) if page else (batch, kv_len)

    @T.prim_func
    def few_keys_attention(
        q: strided("q", (*q_shape, d), spec.dtype, multiple=spec.vector),
        k: strided("k", (slabs, kv_heads, key_rows, d), spec.dtype, multiple=spec.vector),
        v: strided("v", (slabs, kv_heads, key_rows, dv), spec.dtype, multiple=spec.vector),
        *others: [*spec.operand_types(batch, (kv_heads, groups), mask_queries, kv_len), *spec.layout.types(batch)],
        lse: T.Tensor((*part, *q_shape), accum),
        out: spec.out_type((*q_shape, dv)) if count > 1 else T.Tensor((splits, *q_shape, dv), accum),
        scale: accum,
        q_len: T.int32,
    ):
        blocks = count if count > 1 else splits
        with T.Kernel(blocks, kv_heads, batch, threads=tiling.threads, cluster_dims=count) as (split, head, sequence):
            if count == 1:
                T.pdl_trigger()
            first = T.min(split, MOST_SPLITS) * keys
            k_lines = T.alloc_fragment((keys, d), spec.dtype)
            q_lines = T.alloc_fragment((rows, d), spec.dtype)
            T.annotate_layout({k_lines: tiling.key_lines(d), q_lines: tiling.query_lines(d)})
            v_tile = T.alloc_shared((keys, dv), spec.dtype)
            given = Given(spec.layout, others[len(spec.operands) :])
            present = given.paged_keys(sequence) if page else kv_len
            here = Rows(0, length, q_len, True, sequence, head, 0, 1)
            mask = []
            for x in prepare_operands(spec.operands, others[: len(spec.operands)], (rows, keys), False, here):
                elements = T.alloc_fragment((keys, rows), x.spec.stored)
                for j, i in T.Parallel(keys, rows):
                    elements[j, i] = x.element(here, i, j, first)
                mask.append(elements)
            if page:
                for j, c in T.Parallel(keys, d):
                    number = page_of(given, k, sequence, (first + j) // page)
                    k_lines[j, c] = k[number, head, (first + j) % page, c]
            else:
                T.copy(k[sequence, head, first, 0], k_lines)
            T.copy(q[sequence, head, 0, 0], q_lines)
            zero = T.alloc_shared((1,), accum)
            T.clear(zero)
            arrived = T.alloc_barrier([1] * (keys // each)) if tiling.bulk else None
            for n in tuple(range(keys // each)):
                slab = page_of(given, v, sequence, (first + n * each) // page) if page else sequence
                row = (first + n * each) % page if page else first + n * each
                values = v_tile[n * each : (n + 1) * each, :]
                if arrived is None:
                    T.async_copy(v[slab, head, row, 0], values)
                else:
                    T.tma_copy(v[slab, head, row, 0], values, barrier=arrived[n])
                    if T.get_thread_binding() == 0:
                        T.mbarrier_arrive(arrived[n])
            # A zero behind a barrier: no compiler moves products, which wait, before the loads of values.
            scores = T.alloc_fragment((keys, rows), accum)
            for j, i in T.Parallel(keys, rows):
                scores[j, i] = zero[0]

            keys_by_slot, queries = (T.alloc_fragment(x.shape, spec.dtype) for x in (k_lines, q_lines))
            for source, operand in ((k_lines, keys_by_slot), (q_lines, queries)):
                for i, c in T.Parallel(*source.shape):
                    operand[i, c] = source[i, column_of(c)]
            T.gemm(keys_by_slot, queries, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            unit = spec.unit(scale)
            scale_log2 = unit * LOG2_E
            for j, i in T.Parallel(keys, rows):
                product = scores[j, i] if spec.folded else scores[j, i] * scale
                seen = spec.masked(product, *[x[j, i] for x in mask])
                scores[j, i] = T.if_then_else(first + j < present, seen, -infinity)
            row_max, row_sum, base, factor = (T.alloc_fragment((rows,), accum) for _ in range(4))
            T.reduce_max(scores, row_max, dim=0, nan_propagate=True)
            for i in T.Parallel(rows):
                factor[i] = 1.0 if spec.subtracts else factor_of(row_max[i], scale_log2)
                base[i] = base_of(row_max[i], factor[i])
            for j, i in T.Parallel(keys, rows):
                if spec.subtracts:
                    scores[j, i] = T.exp2((scores[j, i] - base[i]) * scale_log2)
                else:
                    scores[j, i] = T.exp2(T.fma(scores[j, i], factor[i], -base[i]))
            probs = T.alloc_shared((rows, keys), spec.dtype)
            for j, i in T.Parallel(keys, rows):
                probs[i, j] = T.cast(scores[j, i], spec.dtype)
            T.reduce_sum(scores, row_sum, dim=0)
            acc = T.alloc_fragment((dv, rows), accum)
            for n in tuple(range(keys // piece)):
                if arrived is None:
                    T.ptx_wait_group((keys // piece - 1 - n) * (piece // each))
                else:
                    for copy in tuple(range(n * piece // each, (n + 1) * piece // each)):
                        T.mbarrier_wait_parity(arrived[copy], 0)
                if page:
                    clear_past(v_tile, first, present)
                own = slice(n * piece, (n + 1) * piece)
                T.gemm(
                    v_tile[own, :], probs[:, own], acc, transpose_A=True, transpose_B=True,
                    policy=T.GemmWarpPolicy.FullRow, clear_accum=n == 0,
                )  # fmt: skip
            log_sum = T.alloc_fragment((rows,), accum)
            for i in T.Parallel(rows):
                log_sum[i] = row_max[i] * unit + T.log(row_sum[i])
                row_sum[i] = T.if_then_else(row_sum[i] == 0.0, 0.0, 1.0 / row_sum[i])
            if count > 1:
                join_in_cluster(tiling, acc, row_sum, log_sum, split, length, (sequence, head), lse, out)
            else:
                for i in T.Parallel(rows):
                    if i < length:
                        lse[split, sequence, head, i] = log_sum[i]
                for c, i in T.Parallel(dv, rows):
                    if i < length:
                        out[split, sequence, head, i, c] = acc[c, i] * row_sum[i]

    return few_keys_attention


WIDEST = 128  # columns whose keys a thread holds
TILE = 64  # keys of 128 columns by which the rule counts
MOST_COPIES = 2  # of pages, which one thread starts one after the other: threads start more of them sooner


def tiling_for(spec: Spec, problem: Problem, machine: Machine) -> Tiling | None:
    """Return the tiling for this kernel, or None where blocks that take tile after tile are faster or needed."""
    if isinstance(problem.rows, torch.SymInt) or problem.rows > MMA_ROWS:  # another call may have more rows
        return None
    size, widest = typical(problem), max(spec.tile_d, spec.tile_dv)
    lines = WIDEST // widest if widest in (WIDEST, WIDEST // 2) else 1  # keys that have the bytes of one of 128 columns
    keys = -(-size.keys // lines)
    tiles = size.heads * -(-keys // TILE) / machine.num_sms
    quantities = {"tiles_per_sm": tiles, "heads_per_sm": size.heads / machine.num_sms, "keys": keys}
    quantities |= {"masked": bool(spec.operands), "page": spec.layout.page, "keys_by_width": lines}
    found = verdict("attention.few_keys", machine.target, None, **quantities)
    if found is None:
        return None
    tiling = Tiling(**found, rows=8 if problem.rows <= 8 else 16)
    tiling = replace(tiling, keys=lines * tiling.keys)
    copies = tiling.keys // min(spec.layout.page or tiling.keys, tiling.keys)
    tiling = replace(tiling, bulk=machine.target.has_tma and copies <= MOST_COPIES)
    if isinstance(problem.keys, torch.SymInt):  # another call may have more keys than a cluster
        tiling = replace(tiling, cluster=1)
    return tiling if _computes(spec, tiling, problem, machine) else None


def _computes(spec: Spec, tiling: Tiling, problem: Problem, machine: Machine) -> bool:
    """Return whether this kernel computes a problem: of few rows that see all keys, but for a mask in memory."""
    one_behind_all = spec.layout.page > 0 and problem.rows == problem.groups  # one query, at the end of its pages
    sees_all = not spec.causal or one_behind_all
    plain = sees_all and not (spec.windowed or spec.score or spec.lists or spec.scaled or spec.layout.ragged)
    widths = spec.tile_d % LINE == 0 and spec.tile_dv % (tiling.warps * MMA_ROWS) == 0
    narrow = max(spec.tile_d, spec.tile_dv) <= WIDEST
    whole = spec.exact and spec.vector >= RUN and spec.dtype.itemsize == 2 and spec.layout.fits(tiling.keys)
    return (
        machine.is_gpu and plain and whole and widths and narrow and problem.packs(16) and problem.rows <= tiling.rows
    )
