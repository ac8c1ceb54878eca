# SPDX-License-Identifier: Apache-2.0
"""Gradients of attention by one kernel on Hopper, which adds up dq in memory (FlashAttention-3, arXiv:2407.08608).

A block has keys and loops over queries. It makes five products a step, where the kernels of `backward.py` make seven:
scores and their gradients are made once for dq, dk and dv. Blocks add their parts of dq to float32 sums in memory, in
any order, so that the last bits of dq differ from run to run.

Two warpgroups multiply, each for half of the keys. Scores of the next queries are on their way while a step ends:

    products     dp | dv += p grad | dq = ds k | dk += ds q | next scores
    arithmetic   p  | ds           |           | dq to memory

A third warpgroup has one warp that loads tiles, and one that adds tiles of dq to memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.hardware import WARP, WARPGROUP
from torch_tile.jit import jit
from torch_tile.kernels.attention.forward import store_staged
from torch_tile.kernels.attention.queries_of_keys import PADDING, masks_queries, query_blocks
from torch_tile.kernels.attention.softmax import probability
from torch_tile.kernels.attention.spec import Config, Spec
from torch_tile.kernels.common import LOG2_E, Machine, compute_dtype, dynamic, strided

BOTH = 2 * WARPGROUP  # threads of the warpgroups that multiply
WARPS = BOTH // WARP
WGMMA_ROWS = 64
MOST_TURNS = 2**30  # tensors with more do not fit in memory
LONGEST = 2**29  # queries or keys of a sequence
SUMMED = 1  # a named barrier: a tile of dq is there


@dataclass(frozen=True, eq=False)
class Step:
    """The tiles and barriers of a block, and what a step of both warpgroups does with them.

    Tiles of queries, their gradients and statistics have stages, gradients of scores two versions: one is read by both
    warpgroups while the next one is written. `full` and `free` are barriers of queries, of gradients and of dq.
    """

    config: Config
    spec: Spec
    k: Any
    v: Any
    q: Any
    grad: Any
    numbers: Any
    shared_ds: Any
    shared_dq: Any
    q_full: Any
    q_free: Any
    grad_full: Any
    grad_free: Any
    dq_free: Any
    first_key: Any
    keys: Any
    queries: Any
    q_offset: Any
    window: Any
    scale: Any
    all_k: Any = None

    @T.macro
    def begin_scores(self, p: Any, turn: Any) -> None:
        """Start the scores of a turn's queries."""
        stage = turn % self.config.stages
        T.mbarrier_wait_parity(self.q_full[stage], turn // self.config.stages % 2)
        T.wgmma_gemm(
            self.k, self.q[stage, :, :], p, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True
        )

    @T.macro
    def hide(self, p: Any, step: Any) -> None:
        """Clear the probabilities of keys that queries do not see, or that are behind the last key."""
        rows, queries = p.shape
        spec, first = self.spec, T.min(step, LONGEST // queries) * queries
        masks = masks_queries(spec, self.config, step, self.first_key, self.q_offset, self.window, self.queries)
        if T.logical_or(masks, self.first_key + rows > self.keys):
            # In numbers that fit in 32 bits: query j sees key i from j = diagonal + i on.
            offset = T.max(T.min(self.q_offset, LONGEST), -LONGEST) if spec.shifted else 0
            to_diagonal = T.cast(T.cast(self.first_key - offset, T.int64) - first, T.int32)
            diagonal = T.max(T.min(to_diagonal, queries), -rows)
            end = T.max(T.min(T.cast(to_diagonal + T.min(self.window, LONGEST), T.int32), queries), -rows) if spec.windowed else 0
            left = T.min(T.cast(T.min(self.keys, LONGEST) - self.first_key, T.int32), rows)
            for i, a, b, c in T.Parallel(rows, queries // 8, 4, 2):  # a thread has all a and c, which are constants
                seen = i < left
                if spec.causal:
                    seen = a * 8 + c >= T.if_then_else(seen, diagonal + i, queries) - b * 2
                if spec.windowed:
                    seen = T.logical_and(seen, a * 8 + c < end + i - b * 2)
                p[i, a * 8 + b * 2 + c] = T.if_then_else(seen, p[i, a * 8 + b * 2 + c], 0.0)

    @T.macro
    def first_half(self, p: Any, dp: Any, p_rounded: Any, kept: Any, dv: Any, turn: Any, step: Any) -> None:
        """Make the probabilities of a turn, whose scores are under way, and start their part of dv.

        They are `kept` rounded: there are no registers for both forms. The assembler sees that they are `p_rounded`,
        which the product reads.
        """
        rows, queries = p.shape
        stage = turn % self.config.stages
        T.mbarrier_wait_parity(self.grad_full[stage], turn // self.config.stages % 2)
        T.wgmma_gemm(
            self.v, self.grad[stage, :, :], dp, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True
        )
        T.wait_wgmma(1)
        for i, j in T.Parallel(rows, queries):
            p[i, j] = probability(self.spec, p[i, j], self.scale, self.numbers[stage, 0, j])
        self.hide(p, step)
        T.copy(p, p_rounded)
        T.copy(p_rounded, kept)
        T.wgmma_gemm(p_rounded, self.grad[stage, :, :], dv, policy=T.GemmWarpPolicy.FullRow)
        T.wait_wgmma(1)

    @T.macro
    def second_half(
        self, p: Any, dp: Any, kept: Any, ds: Any, dq: Any, dk: Any, turn: Any, more: bool
    ) -> None:
        """Make the gradients of a turn's scores, and add up dq and dk. With `more`, start the scores of the next turn.
        """
        rows, queries = p.shape
        stage, version = turn % self.config.stages, turn % 2
        split = T.GemmWarpPolicy.FullCol if queries == WGMMA_ROWS else T.GemmWarpPolicy.FullRow
        for i, j in T.Parallel(rows, queries):
            ds[i, j] = T.cast(
                T.cast(kept[i, j], dp.dtype) * (dp[i, j] - self.numbers[stage, 1, j]), self.spec.dtype
            )
        T.copy(ds, self.shared_ds[version, :, :])
        T.wgmma_gemm(self.shared_ds[version, :, :], self.k, dq, transpose_A=True, policy=split, clear_accum=True)
        T.wgmma_gemm(ds, self.q[stage, :, :], dk, policy=T.GemmWarpPolicy.FullRow)
        T.wait_wgmma(1)
        if T.shuffle_elect(WARP):
            T.mbarrier_arrive(self.grad_free[stage])
        if more and self.config.ping_pong:
            self.begin_scores(p, turn + 1)
        T.mbarrier_wait_parity(self.dq_free, (turn + 1) % 2)
        T.copy(dq, self.shared_dq)
        T.named_barrier_arrive(SUMMED, BOTH + WARP)
        if more and not self.config.ping_pong:
            self.begin_scores(p, turn + 1)
        T.wait_wgmma(1 if more else 0)
        if T.shuffle_elect(WARP):
            T.mbarrier_arrive(self.q_free[stage])


@jit(pass_configs={"tl.enable_fast_math": True})  # type: ignore[untyped-decorator]
def fused_gradients(config: Config, spec: Spec) -> Any:
    """Build the kernel of all gradients of a block of keys, over all heads that share the keys.

    It adds to `sums`, dq without its factor, in rows of whole blocks of `PADDING`.
    """
    queries, rows, stages = config.block_q, config.block_kv, config.stages
    accum = compute_dtype(spec.dtype)
    batch, kv_heads, q_len, kv_len = T.dynamic("batch, kv_heads, q_len, kv_len")
    padded = dynamic("padded", PADDING)
    groups = T.dynamic("groups") if spec.grouped else 1
    d, dv = spec.tile_d, spec.tile_dv
    q_shape = (batch, kv_heads, groups, q_len)

    @T.prim_func
    def fused_gradients(
        q: strided("q", (*q_shape, d), spec.dtype, multiple=spec.vector),
        k: strided("k", (batch, kv_heads, kv_len, d), spec.dtype, multiple=spec.vector),
        v: strided("v", (batch, kv_heads, kv_len, dv), spec.dtype, multiple=spec.vector),
        grad: strided("grad", (*q_shape, dv), spec.dtype, multiple=spec.vector),
        statistics: T.Tensor((*q_shape[:3], 2, padded), accum),
        sums: T.Tensor((*q_shape[:3], padded, d), accum),
        dk: strided("dk", (batch, kv_heads, kv_len, d), spec.dtype, multiple=spec.vector),
        dv_out: strided("dv_out", (batch, kv_heads, kv_len, dv), spec.dtype, multiple=spec.vector),
        scale: accum,
        q_offset: T.int32,
        window: T.int32,
    ):
        blocks = T.ceildiv(kv_len, rows)
        with T.Kernel(*config.grid(blocks, kv_heads, batch, 1), threads=BOTH + WARPGROUP) as (bx, by, bz):
            place, head, sequence, _ = config.place(bx, by, bz, blocks, kv_heads, 1)
            block = blocks - 1 - place if config.heavy_first else place
            first_key = T.min(block, LONGEST // rows) * rows  # for numbers of 32 bits
            k_tile = T.alloc_shared((rows, d), spec.dtype)
            v_tile = T.alloc_shared((rows, dv), spec.dtype)
            q_tiles = T.alloc_shared((stages, queries, d), spec.dtype)
            grad_tiles = T.alloc_shared((stages, queries, dv), spec.dtype)
            numbers = T.alloc_shared((stages, 2, queries), accum)
            shared_ds = T.alloc_shared((2, rows, queries), spec.dtype)
            shared_dq = T.alloc_shared((queries, d), accum)
            keys_full = T.alloc_barrier(1)
            q_full, grad_full = T.alloc_barrier([1] * stages), T.alloc_barrier([1] * stages)
            q_free, grad_free = T.alloc_barrier([WARPS] * stages), T.alloc_barrier([WARPS] * stages)
            dq_free = T.alloc_barrier(1)
            first, end = query_blocks(spec, config, first_key, q_offset, window, q_len)
            count = T.max(end - first, 0)
            turns = T.min(groups * count, MOST_TURNS)
            with T.ws(2):
                T.dec_max_nreg(24)
                if T.get_warp_idx() == WARPS:
                    T.tma_copy(k[sequence, head, first_key, 0], k_tile, barrier=keys_full)
                    T.tma_copy(v[sequence, head, first_key, 0], v_tile, barrier=keys_full)
                    if T.shuffle_elect(WARP):
                        T.mbarrier_arrive(keys_full)
                    for turn in T.serial(turns):
                        stage, parity = turn % stages, (turn // stages + 1) % 2
                        member = turn // count if spec.grouped else 0
                        row = (first + (turn % count if spec.grouped else turn)) * queries
                        T.mbarrier_wait_parity(q_free[stage], parity)
                        T.tma_copy(q[sequence, head, member, row, 0], q_tiles[stage, :, :], barrier=q_full[stage])
                        T.tma_copy(statistics[sequence, head, member, 0, row], numbers[stage, :, :], barrier=q_full[stage])
                        if T.shuffle_elect(WARP):
                            T.mbarrier_arrive(q_full[stage])
                        T.mbarrier_wait_parity(grad_free[stage], parity)
                        T.tma_copy(grad[sequence, head, member, row, 0], grad_tiles[stage, :, :], barrier=grad_full[stage])
                        if T.shuffle_elect(WARP):
                            T.mbarrier_arrive(grad_full[stage])
                if T.get_warp_idx() == WARPS + 1:
                    for turn in T.serial(turns):
                        member = turn // count if spec.grouped else 0
                        row = (first + (turn % count if spec.grouped else turn)) * queries
                        T.sync_threads(SUMMED, BOTH + WARP)
                        if True:
                            T.tma_copy(shared_dq, sums[sequence, head, member, row, 0], combine="add", by=WARP)
                        if T.shuffle_elect(WARP):
                            T.mbarrier_arrive(dq_free)
            with T.ws(0, 1):
                T.inc_max_nreg(240)
                step = Step(
                    config, spec, k_tile, v_tile, q_tiles, grad_tiles, numbers, shared_ds, shared_dq, q_full, q_free,
                    grad_full, grad_free, dq_free, first_key, kv_len, q_len, q_offset, window, scale,
                )  # fmt: skip
                p, dp = T.alloc_fragment((rows, queries), accum), T.alloc_fragment((rows, queries), accum)
                p_rounded, kept, ds = (T.alloc_fragment((rows, queries), spec.dtype) for _ in range(3))
                dq = T.alloc_fragment((queries, d), accum)
                dk_acc, dv_acc = T.alloc_fragment((rows, d), accum), T.alloc_fragment((rows, dv), accum)
                T.clear(dk_acc)
                T.clear(dv_acc)
                T.mbarrier_wait_parity(keys_full, 0)
                if turns > 0:
                    step.begin_scores(p, 0)
                    step.first_half(p, dp, p_rounded, kept, dv_acc, 0, first)
                    for turn in T.serial(turns - 1):
                        step.second_half(p, dp, kept, ds, dq, dk_acc, turn, True)
                        step.first_half(p, dp, p_rounded, kept, dv_acc, turn + 1, first + ((turn + 1) % count if spec.grouped else turn + 1))
                    step.second_half(p, dp, kept, ds, dq, dk_acc, turns - 1, False)
                factors = T.alloc_fragment((rows,), accum)
                T.fill(factors, 1.0)
                store_staged(dv_acc, factors, dv_out, (sequence, head), first_key, v_tile)
                T.fill(factors, scale)
                store_staged(dk_acc, factors, dk, (sequence, head), first_key, k_tile)

    return fused_gradients


@T.macro
def store_part(acc: Any, factor: Any, staged: Any, out: Any) -> None:
    """Store sums times a factor through shared memory."""
    result = T.alloc_fragment(acc.shape, staged.buffer.dtype)
    for i, c in T.Parallel(*acc.shape):
        result[i, c] = T.cast(acc[i, c] * factor, result.dtype)
    T.copy(result, staged)
    T.copy(staged, out)


@dataclass(frozen=True, eq=False)
class Half(Step):
    """What one of two warpgroups does, which has half of the keys, and of dq half of the columns or of the queries."""

    ds_full: Any = None
    side: int = 0

    @T.macro
    def add_dq(self, dq: Any, turn: Any) -> None:
        """Start dq of a turn, whose gradients of scores both warpgroups have written."""
        wide, half = self.config.block_q > WGMMA_ROWS, self.side * WGMMA_ROWS
        T.mbarrier_wait_parity(self.ds_full[(turn + 2) % 2], (turn + 2) // 2 % 2 ^ 1)
        if wide:
            T.wgmma_gemm(self.shared_ds[(turn + 2) % 2, :, half : half + 64], self.all_k, dq, transpose_A=True, clear_accum=True)
        else:
            T.wgmma_gemm(self.shared_ds[(turn + 2) % 2, :, :], self.all_k[:, half : half + 64], dq, transpose_A=True, clear_accum=True)

    @T.macro
    def store_dq(self, dq: Any, turn: Any) -> None:
        T.mbarrier_wait_parity(self.dq_free, turn % 2)
        T.copy(dq, self.shared_dq)
        T.named_barrier_arrive(SUMMED + self.side, WARPGROUP + WARP)

    @T.macro
    def late_half(self, p: Any, dp: Any, kept: Any, ds: Any, dq: Any, dk: Any, turn: Any, more: bool) -> None:
        rows, queries = p.shape
        stage, version = turn % self.config.stages, turn % 2
        for i, j in T.Parallel(rows, queries):
            ds[i, j] = T.cast(
                T.cast(kept[i, j], dp.dtype) * (dp[i, j] - self.numbers[stage, 1, j]), self.spec.dtype
            )
        self.add_dq(dq, turn - 1)
        if more and self.config.resident:
            self.begin_scores(p, turn + 1)
        T.copy(ds, self.shared_ds[version, self.side * 64 : self.side * 64 + 64, :])
        T.wgmma_gemm(ds, self.q[stage, :, :], dk, policy=T.GemmWarpPolicy.FullRow)
        T.wait_wgmma(2 if more and self.config.resident else 1)
        T.mbarrier_arrive(self.ds_full[version])
        if T.shuffle_elect(WARP):
            T.mbarrier_arrive(self.grad_free[stage])
        self.store_dq(dq, turn + 1)
        if self.config.resident:
            T.wait_wgmma(0)
        else:
            if more:
                self.begin_scores(p, turn + 1)
            T.wait_wgmma(1 if more else 0)
        if T.shuffle_elect(WARP):
            T.mbarrier_arrive(self.q_free[stage])


@jit(pass_configs={"tl.enable_fast_math": True})  # type: ignore[untyped-decorator]
def late_gradients(config: Config, spec: Spec) -> Any:
    """Build the kernel of all gradients of a block of keys, over all heads that share the keys.

    It adds to `sums`, dq without its factor, in rows of whole blocks of `PADDING`.
    """
    queries, rows, stages = config.block_q, config.block_kv, config.stages
    accum = compute_dtype(spec.dtype)
    batch, kv_heads, q_len, kv_len = T.dynamic("batch, kv_heads, q_len, kv_len")
    padded = dynamic("padded", PADDING)
    groups = T.dynamic("groups") if spec.grouped else 1
    d, dv = spec.tile_d, spec.tile_dv
    q_shape = (batch, kv_heads, groups, q_len)

    @T.prim_func
    def late_gradients(
        q: strided("q", (*q_shape, d), spec.dtype, multiple=spec.vector),
        k: strided("k", (batch, kv_heads, kv_len, d), spec.dtype, multiple=spec.vector),
        v: strided("v", (batch, kv_heads, kv_len, dv), spec.dtype, multiple=spec.vector),
        grad: strided("grad", (*q_shape, dv), spec.dtype, multiple=spec.vector),
        statistics: T.Tensor((*q_shape[:3], 2, padded), accum),
        sums: T.Tensor((*q_shape[:3], padded, d), accum),
        dk: strided("dk", (batch, kv_heads, kv_len, d), spec.dtype, multiple=spec.vector),
        dv_out: strided("dv_out", (batch, kv_heads, kv_len, dv), spec.dtype, multiple=spec.vector),
        scale: accum,
        q_offset: T.int32,
        window: T.int32,
    ):
        blocks = T.ceildiv(kv_len, rows)
        with T.Kernel(*config.grid(blocks, kv_heads, batch, 1), threads=BOTH + WARPGROUP) as (bx, by, bz):
            place, head, sequence, _ = config.place(bx, by, bz, blocks, kv_heads, 1)
            block = blocks - 1 - place if config.heavy_first else place
            first_key = T.min(block, LONGEST // rows) * rows  # for numbers of 32 bits
            k_tile = T.alloc_shared((rows, d), spec.dtype)
            v_tile = T.alloc_shared((rows, dv), spec.dtype)
            q_tiles = T.alloc_shared((stages, queries, d), spec.dtype)
            grad_tiles = T.alloc_shared((stages, queries, dv), spec.dtype)
            numbers = T.alloc_shared((stages, 2, queries), accum)
            shared_ds = T.alloc_shared((2, rows, queries), spec.dtype)
            shared_dq = [T.alloc_shared((64, 64), accum) for _ in range(2)]
            keys_full = T.alloc_barrier(1)
            q_full, grad_full = T.alloc_barrier([1] * stages), T.alloc_barrier([1] * stages)
            q_free, grad_free = T.alloc_barrier([WARPS] * stages), T.alloc_barrier([WARPS] * stages)
            ds_full = T.alloc_barrier([BOTH] * 2)
            dq_free = T.alloc_barrier([1] * 2)
            first, end = query_blocks(spec, config, first_key, q_offset, window, q_len)
            count = T.max(end - first, 0)
            turns = T.min(groups * count, MOST_TURNS)
            T.clear(shared_ds)
            with T.ws(2):
                T.dec_max_nreg(24)
                if T.get_warp_idx() == WARPS:
                    T.tma_copy(k[sequence, head, first_key, 0], k_tile, barrier=keys_full)
                    T.tma_copy(v[sequence, head, first_key, 0], v_tile, barrier=keys_full)
                    if T.shuffle_elect(WARP):
                        T.mbarrier_arrive(keys_full)
                    for turn in T.serial(turns):
                        stage, parity = turn % stages, (turn // stages + 1) % 2
                        member = turn // count if spec.grouped else 0
                        row = (first + (turn % count if spec.grouped else turn)) * queries
                        T.mbarrier_wait_parity(q_free[stage], parity)
                        T.tma_copy(q[sequence, head, member, row, 0], q_tiles[stage, :, :], barrier=q_full[stage])
                        T.tma_copy(statistics[sequence, head, member, 0, row], numbers[stage, :, :], barrier=q_full[stage])
                        if T.shuffle_elect(WARP):
                            T.mbarrier_arrive(q_full[stage])
                        T.mbarrier_wait_parity(grad_free[stage], parity)
                        T.tma_copy(grad[sequence, head, member, row, 0], grad_tiles[stage, :, :], barrier=grad_full[stage])
                        if T.shuffle_elect(WARP):
                            T.mbarrier_arrive(grad_full[stage])
                for side in [0, 1]:
                    if T.get_warp_idx() == WARPS + 1 + side:
                        for turn in T.serial(turns + 1 if False else T.if_then_else(turns > 0, turns + 1, 0)):
                            before = T.max(turn - 1, 0)
                            member = before // count if spec.grouped else 0
                            row = (first + (before % count if spec.grouped else before)) * queries
                            T.sync_threads(SUMMED + side, WARPGROUP + WARP)
                            if turn > 0:
                                if queries > WGMMA_ROWS:
                                    T.tma_copy(shared_dq[side], sums[sequence, head, member, row + side * 64, 0], combine="add", by=WARP * (1 + side))
                                else:
                                    T.tma_copy(shared_dq[side], sums[sequence, head, member, row, side * 64], combine="add", by=WARP * (1 + side))
                            if T.shuffle_elect(WARP):
                                T.mbarrier_arrive(dq_free[side])
            for side in [0, 1]:
                with T.ws(side):
                    T.inc_max_nreg(240)
                    half = side * 64
                    step = Half(
                        replace(config, block_kv=64), spec, k_tile[half : half + 64, :], v_tile[half : half + 64, :], q_tiles, grad_tiles, numbers, shared_ds, shared_dq[side], q_full, q_free,
                        grad_full, grad_free, dq_free[side], first_key + half, kv_len, q_len, q_offset, window, scale, k_tile, ds_full, side
                    )  # fmt: skip
                    p, dp = T.alloc_fragment((64, queries), accum), T.alloc_fragment((64, queries), accum)
                    p_rounded, kept, ds = (T.alloc_fragment((64, queries), spec.dtype) for _ in range(3))
                    dq = T.alloc_fragment((64, 64), accum)
                    dk_acc, dv_acc = T.alloc_fragment((64, d), accum), T.alloc_fragment((64, dv), accum)
                    T.clear(dk_acc)
                    T.clear(dv_acc)
                    T.mbarrier_wait_parity(keys_full, 0)
                    if turns > 0:
                        step.begin_scores(p, 0)
                        step.first_half(p, dp, p_rounded, kept, dv_acc, 0, first)
                        for turn in T.serial(turns - 1):
                            step.late_half(p, dp, kept, ds, dq, dk_acc, turn, True)
                            step.first_half(p, dp, p_rounded, kept, dv_acc, turn + 1, first + ((turn + 1) % count if spec.grouped else turn + 1))
                        step.late_half(p, dp, kept, ds, dq, dk_acc, turns - 1, False)
                        step.add_dq(dq, turns - 1)
                        T.wait_wgmma(0)
                        step.store_dq(dq, turns + 1)
                    store_part(dv_acc, 1.0, v_tile[half : half + 64, :], dv_out[sequence, head, first_key + half, 0])
                    store_part(dk_acc, scale, v_tile[half : half + 64, :], dk[sequence, head, first_key + half, 0])

    return late_gradients


ROWS = 64  # of a block of the kernels around


@jit  # type: ignore[untyped-decorator]
def prepare_sums(spec: Spec) -> Any:
    """Build the kernel that clears the sums of dq, and computes two numbers of each query for `fused_gradients`.

    They are those of `query_gradients`: the argument of `probability`, infinite for a query that sees no key, and the
    sum of grad * out.
    """
    accum = compute_dtype(spec.dtype)
    batch, kv_heads, q_len = T.dynamic("batch, kv_heads, q_len")
    padded = dynamic("padded", PADDING)
    groups = T.dynamic("groups") if spec.grouped else 1
    q_shape = (batch, kv_heads, groups, q_len)

    @T.prim_func
    def prepare_sums(
        grad: strided("grad", (*q_shape, spec.tile_dv), spec.dtype, multiple=spec.vector),
        out: strided("out", (*q_shape, spec.tile_dv), spec.dtype, multiple=spec.vector),
        lse: T.Tensor(q_shape, accum),
        statistics: T.Tensor((*q_shape[:3], 2, padded), accum),
        sums: T.Tensor((*q_shape[:3], padded, spec.tile_d), accum),
    ):
        with T.Kernel(padded // ROWS, kv_heads * groups, batch, threads=256) as (bx, by, bz):
            here, first = (bz, by // groups, by % groups), bx * ROWS
            infinity = T.infinity(accum)
            for i, c in T.Parallel(ROWS, spec.tile_d):
                sums[(*here, first + i, c)] = 0.0
            product = T.alloc_fragment((ROWS, spec.tile_dv), accum)
            common, row_lse = T.alloc_fragment((ROWS,), accum), T.alloc_fragment((ROWS,), accum)
            for i, c in T.Parallel(ROWS, spec.tile_dv):
                a, b = grad[(*here, first + i, c)], out[(*here, first + i, c)]
                product[i, c] = T.cast(a, accum) * T.cast(b, accum)
            T.reduce_sum(product, common, dim=1)
            for i in T.Parallel(ROWS):
                log_sum = lse[(*here, first + i)]
                is_empty = T.logical_or(log_sum == -infinity, first + i >= q_len)
                row_lse[i] = T.if_then_else(is_empty, infinity, log_sum * LOG2_E)
            T.copy(row_lse, statistics[(*here, 0, first)])
            T.copy(common, statistics[(*here, 1, first)])

    return prepare_sums


@jit  # type: ignore[untyped-decorator]
def finish_sums(spec: Spec) -> Any:
    """Build the kernel that turns the sums of dq into dq."""
    accum = compute_dtype(spec.dtype)
    batch, kv_heads, q_len = T.dynamic("batch, kv_heads, q_len")
    padded = dynamic("padded", PADDING)
    groups = T.dynamic("groups") if spec.grouped else 1

    @T.prim_func
    def finish_sums(
        sums: T.Tensor((batch, kv_heads, groups, padded, spec.tile_d), accum),
        dq: strided("dq", (batch, kv_heads, groups, q_len, spec.tile_d), spec.dtype, multiple=spec.vector),
        scale: accum,
    ):
        with T.Kernel(T.ceildiv(q_len, ROWS), kv_heads * groups, batch, threads=256) as (bx, by, bz):
            here, first = (bz, by // groups, by % groups), bx * ROWS
            for i, c in T.Parallel(ROWS, spec.tile_d):
                dq[(*here, first + i, c)] = T.cast(sums[(*here, first + i, c)] * scale, spec.dtype)

    return finish_sums


def launch(
    config: Config, spec: Spec, machine: Machine, tensors: tuple[torch.Tensor, ...], statistics: torch.Tensor,
    results: tuple[torch.Tensor, ...], options: tuple[Any, ...],
) -> None:  # fmt: skip
    """Launch the three kernels. `tensors` are q, k, v, grad, out and lse, `results` dq, dk and dv.

    Heads of queries are split into key heads and heads of a group. `options` are the scale, the offset and the window.
    """
    q, k, v, grad, out, lse = tensors
    dq, dk, dv = results
    sums = statistics.new_empty(*q.shape[:3], statistics.shape[4], spec.tile_d)
    machine.kernel(prepare_sums)(spec)(grad, out, lse, statistics, sums)
    machine.kernel(late_gradients if config.shared_probs else fused_gradients)(config, spec)(q, k, v, grad, statistics, sums, dk, dv, *options)
    machine.kernel(finish_sums)(spec)(sums, dq, options[0])


# By the width of heads: queries and keys of a block, threads that multiply, stages.
TILINGS = {64: Config(128, 128, BOTH, 2, packed=False), 128: Config(64, 128, BOTH, 2, packed=False)}


def fused_tiling(spec: Spec, machine: Machine) -> Config | None:
    """Return the tiling of `fused_gradients`, or None where the deterministic kernels serve.

    They do for operands and texts of scores, ragged sequences, lists of blocks, other head sizes and machines, and
    under `torch.use_deterministic_algorithms`.
    """
    plain = not (spec.operands or spec.score or spec.keep or spec.lists) and spec.layout.fixed
    whole = spec.exact and spec.tile_d == spec.tile_dv and spec.vector >= 8 and spec.dtype.itemsize == 2
    if not (plain and whole and machine.target.has_wgmma) or torch.are_deterministic_algorithms_enabled():
        return None
    found = TILINGS.get(spec.tile_d)
    return None if found is None else replace(found, heavy_first=spec.causal)
