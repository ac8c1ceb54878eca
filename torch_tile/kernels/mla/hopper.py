# SPDX-License-Identifier: Apache-2.0
"""MLA decoding on Hopper with hand-ordered warpgroups: one multiplies while the other computes softmax weights.

A tile of positions is both keys and values. The sums of 64 rows fill the registers of two warpgroups, each of which has
half of the columns. So tiles go by pairs. The first warpgroup makes the scores and weights of the first tile of a pair.
The second does so for the second tile. Each adds both tiles, weighted, to its half:

    first   scores 0 | weights 0 | sums += 0, left             | sums += 1, left  | scores 0 of the next pair
    second             scores 1  | sums += 0, right; weights 1 | sums += 1, right | scores 1 of the next pair

A half of a tile that has been added is free for the copies of a third warpgroup. The next tile comes meanwhile. The
first warpgroup copies the queries, so that the third one begins with positions. The division of work is that of
FlashMLA's authors (their notes of April 2025); the order within a pair is our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch_tile.language as T
from torch_tile.hardware import WARPGROUP
from torch_tile.kernels.attention.softmax import base_of, factor_of
from torch_tile.kernels.common import LOG2_E, compute_dtype, strided
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.mla.scheduler import WorkItems, scheduled_types
from torch_tile.kernels.mla.spec import MOST_POSITIONS, MOST_SPLITS, Config, Spec
from torch_tile.kernels.mla.tiles import PANEL, SLACK, Halves, Steps, hide, store_weighted

BOTH = 2 * WARPGROUP  # threads of the warpgroups that multiply
FIRST, SECOND = 1, 2  # barriers: the weights of the first or second tile of a pair are there
ENDS = 3, 4  # the sums of the first or second warpgroup are


@dataclass(frozen=True, eq=False)
class SoftmaxState:
    """A warpgroup's state of the online softmax: scores of its tiles, and the maximum so far of each row, `row_max`.

    Exponents of 2 are scores times `scale_log2` less `base`. `rescale` is what sums are worth since that changed;
    `row_sum` has parts of the sums of a row's weights. `before` and `factor` hold values of one step.
    """

    scores: Any
    narrow: Any
    acc: Any
    row_sum: Any
    row_max: Any
    base: Any
    before: Any
    factor: Any
    rescale: Any
    scale_log2: Any

    @T.macro
    def begin(self) -> None:
        """Initialize the state before the first scores."""
        T.clear(self.acc)
        T.clear(self.row_sum)
        T.fill(self.row_max, -T.infinity(self.row_max.dtype))
        T.fill(self.base, -T.infinity(self.base.dtype))

    @T.macro
    def update_row_max(self, shared: Any) -> None:
        """Raise the row maxima to new scores if weights would pass 2 ** SLACK, and publish the maxima."""
        T.copy(self.row_max, self.before)
        T.reduce_max(self.scores, self.row_max, dim=1, clear=False, nan_propagate=True)
        for i in T.Parallel(self.row_max.shape[0]):
            is_high = (self.row_max[i] - self.before[i]) * self.scale_log2 > SLACK
            self.row_max[i] = T.if_then_else(is_high, self.row_max[i], self.before[i])
        T.copy(self.row_max, shared)
        self.update_base()

    @T.macro
    def take_row_max(self, shared: Any) -> None:
        """Take the row maxima that the other warpgroup found."""
        T.copy(shared, self.row_max)
        self.update_base()

    @T.macro
    def update_base(self) -> None:
        """Rebase exponents on new maxima. The factor of earlier sums is exactly 1 where the maxima are unchanged.

        Sums of nothing, before the first tile, have that factor, too.
        """
        for i in T.Parallel(self.row_max.shape[0]):
            self.factor[i] = factor_of(self.row_max[i], self.scale_log2)
            base = base_of(self.row_max[i], self.factor[i])
            is_first = self.base[i] == -T.infinity(self.base.dtype)
            self.rescale[i] = T.if_then_else(is_first, 1.0, T.exp2(self.base[i] - base))
            self.base[i] = base

    @T.macro
    def exponentiate(self, shared_probs: Any) -> None:
        """Turn scores into probabilities, and publish them to the other warpgroup in `shared_probs`."""
        for i, j in T.Parallel(*self.scores.shape):
            self.scores[i, j] = T.exp2(T.fma(self.scores[i, j], self.factor[i], -self.base[i]))
        T.copy(self.scores, self.narrow)
        T.copy(self.narrow, shared_probs)
        T.fence_proxy_async()

    @T.macro
    def rescale_acc(self) -> None:
        """Rescale sums to the new maxima, by exactly 1 for most tiles."""
        T.scale_rows(self.acc, self.rescale)

    @T.macro
    def rescale_row_sum(self) -> None:
        """Rescale the sum of weights to the new maxima, while products are in flight."""
        for i, c in T.Parallel(*self.row_sum.shape):
            self.row_sum[i, c] *= self.rescale[i]

    @T.macro
    def combine_row_sums(self, ends: Sequence[Any], side: int, scale: Any) -> None:
        """Add up both warpgroups' row sums. `row_max` becomes the log-sum-exp, `rescale` the weight of the sums."""
        T.reduce_sum(self.row_sum, self.before, dim=1)
        T.copy(self.before, ends[side])
        T.named_barrier_arrive(ENDS[side], BOTH)
        T.sync_threads(ENDS[1 - side], BOTH)
        other = T.alloc_fragment(self.before.shape, self.before.dtype)
        T.copy(ends[1 - side], other)
        for i in T.Parallel(self.before.shape[0]):
            self.before[i] += other[i]
            self.row_max[i] = self.row_max[i] * scale + T.log(self.before[i])
            self.rescale[i] = T.if_then_else(self.before[i] == 0.0, 0.0, 1.0 / self.before[i])

    @T.macro
    def add_to_row_sum(self) -> None:
        """Add weights to the row sum. Each thread adds the weights that it holds."""
        for i, c in T.Parallel(*self.row_sum.shape):
            for j in T.serial(self.scores.shape[1] // self.row_sum.shape[1]):
                self.row_sum[i, c] += self.scores[i, j * self.row_sum.shape[1] + c]


@dataclass(frozen=True, eq=False)
class PingPong:
    """The ping-pong schedule of both warpgroups over a block's rows and tiles of positions. A block has rows from
    `row` on, and positions below `limit` in the pairs of tiles of `steps`.

    Row r is one of query r // heads, which sees positions up to `reach` and its number; the block's first query those
    up to `first_own`. The maxima go from one warpgroup to the other in `shared_max`, weights in `shared_probs`.
    """

    spec: Spec
    halves: Halves
    shared_probs: Sequence[Any]
    shared_max: Sequence[Any]
    steps: Steps
    limit: Any
    reach: Any
    first_own: Any
    heads: Any
    row: Any
    scale: Any

    @T.macro
    def update_row_max(self, state: SoftmaxState, pair: Any, tile: int) -> None:
        """Mask the positions of a tile that are not visible, and update the row maxima."""
        keys = state.scores.shape[1]
        # Tiles behind the limit begin there: 32 bits hold that.
        first = T.min((self.steps.begin + self.steps.stride * pair + tile) * keys, self.limit)
        if self.spec.needs_mask(first, keys, self.limit, self.first_own):
            hide(self.spec, state.scores, first, self.limit, self.reach, self.heads, self.row, self.scale)
            self.halves.clear(tile, first, self.limit)
        state.update_row_max(self.shared_max[tile])

    @T.macro
    def first_pair(self, state: SoftmaxState, pair: Any) -> None:
        """Compute in the first warpgroup the weights of a pair of tiles; leave the second product in flight."""
        self.update_row_max(state, pair, 0)
        state.exponentiate(self.shared_probs[0])
        T.named_barrier_arrive(FIRST, BOTH)
        state.rescale_acc()
        T.wgmma_gemm(state.narrow, self.halves.values(0), state.acc)
        state.rescale_row_sum()
        state.add_to_row_sum()
        T.wait_wgmma(0)
        self.halves.release(0)
        T.sync_threads(SECOND, BOTH)
        state.take_row_max(self.shared_max[1])
        state.rescale_acc()
        T.wgmma_gemm(self.shared_probs[1], self.halves.values(2), state.acc)
        state.rescale_row_sum()

    @T.macro
    def first_warpgroup(self, state: SoftmaxState, queries: Sequence[Any], done: Any) -> None:
        """Run the first warpgroup. Its scores of the next pair begin behind the last sums of this pair. It has had
        `done` pairs of tiles before.
        """
        pairs = self.steps.pairs
        self.halves.multiply(0, done, queries, state.scores, True)
        self.halves.multiply(1, done, queries, state.scores, False)
        T.wait_wgmma(0)
        for pair in T.serial(pairs - 1):
            self.first_pair(state, pair)
            self.halves.multiply(0, done + pair + 1, queries, state.scores, True)
            T.wait_wgmma(len(self.halves.panels(0)))
            self.halves.release(2)
            self.halves.multiply(1, done + pair + 1, queries, state.scores, False)
            T.wait_wgmma(0)
        self.first_pair(state, pairs - 1)
        T.wait_wgmma(0)
        self.halves.release(2)

    @T.macro
    def second_warpgroup(self, state: SoftmaxState, queries: Sequence[Any], done: Any) -> None:
        """Run the second warpgroup, which computes its weights while it adds the first tile."""
        for pair in T.serial(self.steps.pairs):
            self.halves.multiply(3, done + pair, queries, state.scores, True)
            self.halves.multiply(2, done + pair, queries, state.scores, False)
            T.sync_threads(FIRST, BOTH)
            state.take_row_max(self.shared_max[0])
            T.wait_wgmma(0)
            state.rescale_acc()
            state.rescale_row_sum()
            T.wgmma_gemm(self.shared_probs[0], self.halves.values(1), state.acc)
            self.update_row_max(state, pair, 1)
            state.exponentiate(self.shared_probs[1])
            T.named_barrier_arrive(SECOND, BOTH)
            T.wait_wgmma(0)
            self.halves.release(1)
            state.rescale_acc()
            T.wgmma_gemm(state.narrow, self.halves.values(3), state.acc)
            state.rescale_row_sum()
            state.add_to_row_sum()
            T.wait_wgmma(0)
            self.halves.release(3)


def length_of(lengths: Sequence[Any], covered: Any, at: Any) -> Any:
    """Return the number of positions of a sequence."""
    return T.clamp(lengths[0][at], 0, covered) if lengths else T.min(covered, MOST_POSITIONS)


def steps_of(config: Config, unit: Any, length: Any, splits: Any, split: Any, at: Any) -> Steps:
    """Return the pairs of tiles of sequence `at` that a block takes.

    Splits take pairs in turns, so that they know their first one without a length. Those of an empty range have one
    pair without visible positions.
    """
    if unit:
        begin, end = unit.blocks(at, config.block_kv, length)
        return Steps(begin, 2, end, T.max(T.ceildiv(end - begin, 2), 1))
    first, stride = (T.min(split, MOST_SPLITS), T.min(splits, MOST_SPLITS)) if config.split else (0, 1)
    pairs = T.ceildiv(T.ceildiv(length, 2 * config.block_kv) - first, stride)
    return Steps(2 * first, 2 * stride, T.ceildiv(length, config.block_kv), T.max(pairs, 1))


# Fast: exp2 of what is below -126 is 0, which saves three instructions for each score.
@library_jit(pass_configs={"tl.enable_fast_math": True})  # type: ignore[untyped-decorator]
def flash_mla_hopper(config: Config, spec: Spec) -> Any:
    """Build `flash_mla` for Hopper, with 64 rows and tiles of 64 positions. Registers hold the rotary part of the
    queries.

    Shares of the positions and units of a schedule as there.
    """
    rows, keys, latent, half = config.block_h, config.block_kv, spec.latent, spec.latent // 2
    accum = compute_dtype(spec.dtype)
    batch, lines, q_len, heads, splits = T.dynamic("batch, lines, q_len, heads, splits")
    (d0, d1), table_types, covered = spec.cache_shapes(batch)
    length_types = [] if spec.whole else [T.Tensor((batch,), "int32")]
    work_item_types = scheduled_types(lines, latent, config.part_dtype(spec)) if config.scheduled else []
    part = (splits,) if config.split else ()
    out_shape, out_dtype = (*part, batch, lines, latent), config.part_dtype(spec) if config.split else spec.dtype

    @T.prim_func
    def mla_decode_hopper(
        q: strided("q", (batch, lines, latent), spec.dtype, multiple=spec.vector),
        q_pe: strided("q_pe", (batch, lines, spec.rotary), spec.dtype, multiple=spec.vector),
        kv: strided("kv", (d0, d1, latent), spec.dtype, multiple=spec.vector),
        k_pe: strided("k_pe", (d0, d1, spec.rotary), spec.dtype, multiple=spec.vector),
        *others: [*table_types, *length_types, *work_item_types],
        out: strided("out", out_shape, out_dtype, multiple=latent),
        lse: T.Tensor((*part, batch, q_len, heads), accum),
        scale: accum,
    ):
        table, lengths = others[: len(table_types)], others[len(table_types) :][: len(length_types)]
        work_items: Any = WorkItems(*others[-3:], batch=batch) if config.scheduled else None
        grid = (
            T.ceildiv(lines, rows),
            splits if config.split else work_items.count if work_items else 1,
            1 if work_items else batch,
        )
        with T.Kernel(*grid, threads=config.threads + 128) as (bx, split, bz):
            if config.split or work_items:
                T.pdl_trigger()
            row = work_items.read(split) if work_items else None
            q_tile = T.alloc_shared((rows, latent), spec.dtype)
            widths = [half, half + spec.rotary, half, half + spec.rotary]
            tiles = [T.alloc_shared((keys, columns), spec.dtype) for columns in widths]
            full = [T.alloc_barrier([1] * (columns // PANEL)) for columns in widths]
            q_full, q_free = T.alloc_barrier(1), T.alloc_barrier(BOTH)
            halves = Halves(spec, tiles, full, T.alloc_barrier([4] * 4))
            shared_probs = [T.alloc_shared((rows, keys), spec.dtype) for _ in range(2)]
            shared_max, ends = ([T.alloc_shared((rows,), accum) for _ in range(2)] for _ in range(2))
            scores, narrow = T.alloc_fragment((rows, keys), accum), T.alloc_fragment((rows, keys), spec.dtype)
            acc, row_sum = T.alloc_fragment((rows, half), accum), T.alloc_fragment((rows, config.partial_sums), accum)
            row_max, base, before, factor, rescale = (T.alloc_fragment((rows,), accum) for _ in range(5))
            scale_log2 = scale * LOG2_E if spec.folded else LOG2_E
            state = SoftmaxState(scores, narrow, acc, row_sum, row_max, base, before, factor, rescale, scale_log2)
            with T.ws(2):
                T.dec_max_nreg(24)
                done = T.alloc_var("int32", 0)
                unit: Any = work_items.unit(split, row) if work_items else None
                for at in T.serial(unit.first, unit.last + 1) if work_items else (bz,):
                    length = length_of(lengths, covered, at)
                    steps = steps_of(config, unit, length, splits, split, at)
                    halves.load_pairs((kv, k_pe), table, at, steps, done)
                    done += steps.pairs
            for side in [0, 1]:
                with T.ws(side):
                    T.inc_max_nreg(240)
                    done = T.alloc_var("int32", 0)
                    unit = work_items.unit(split, row) if work_items else None
                    for at in T.serial(unit.first, unit.last + 1) if work_items else (bz,):
                        number = at - unit.first if work_items else 0
                        if side == 0:  # not by the producer, which so has its first tile sooner
                            if work_items:
                                T.mbarrier_wait_parity(q_free, (number + 1) % 2)
                            for n in T.unroll(latent // PANEL, unroll_factor=1):
                                part = q_tile[:, n * PANEL : (n + 1) * PANEL]
                                T.tma_copy(q[at, bx * rows, n * PANEL], part, barrier=q_full)
                            if T.shuffle_elect(128):
                                T.mbarrier_arrive(q_full)
                        length = length_of(lengths, covered, at)
                        steps = steps_of(config, unit, length, splits, split, at)
                        # The second tile of the last pair may begin past the share.
                        limit = T.min(length, steps.end * keys)
                        reach = length - q_len
                        known = steps, limit, reach, reach + (bx * rows) // heads, heads, bx * rows, scale
                        ping_pong = PingPong(spec, halves, shared_probs, shared_max, *known)
                        queries = [q_tile]
                        for c in list(range(0, spec.rotary, PANEL)):
                            held = T.alloc_fragment((rows, PANEL), spec.dtype)
                            T.copy(q_pe[at, bx * rows, c], held)
                            queries.append(held)
                        is_divided = work_items.is_divided(at) if work_items else False
                        state.begin()
                        T.mbarrier_wait_parity(q_full, number % 2)
                        if side == 0:
                            ping_pong.first_warpgroup(state, queries, done)
                        else:
                            ping_pong.second_warpgroup(state, queries, done)
                        done += steps.pairs
                        state.combine_row_sums(ends, side, scale if spec.folded else 1.0)
                        through = q_tile if config.staged else None
                        store = partial(store_weighted, through, acc, rescale, column=side * half, bulk=True)
                        if is_divided:
                            slot = work_items.slot(unit, at)
                            if side == 0:
                                for i in T.Parallel(rows):
                                    work_items.part_lse[slot, bx * rows + i] = row_max[i]
                            store(work_items.part, (slot,), bx * rows)
                        else:
                            own = (split,) if config.split else ()
                            if side == 0:
                                for i in T.Parallel(rows):
                                    lse[(*own, at, (bx * rows + i) // heads, (bx * rows + i) % heads)] = row_max[i]
                            store(out, (*own, at), bx * rows)
                        if work_items:
                            T.mbarrier_arrive(q_free)

    return mla_decode_hopper
