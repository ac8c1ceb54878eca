# SPDX-License-Identifier: Apache-2.0
"""MLA decoding on Hopper, ordered by hand: two warpgroups take turns, so that one multiplies while the other weighs.

A tile of positions is both keys and values, and the sums of 64 rows fill the registers of two warpgroups, each of which
has half of the columns. So tiles go by pairs. The first warpgroup makes the scores and weights of the first tile of a
pair, the second those of the second tile, and each adds both tiles, weighted, to its half:

    first   scores 0 | weights 0 | sums += 0, left             | sums += 1, left  | scores 0 of the next pair
    second             scores 1  | sums += 0, right; weights 1 | sums += 1, right | scores 1 of the next pair

A half of a tile that has been added is free for the copies of a third warpgroup, so that the next one comes meanwhile.
The division of work is that of FlashMLA's authors (their notes of April 2025); the order within a pair is our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch_tile.language as T
from torch_tile.hardware import WARPGROUP
from torch_tile.jit import jit
from torch_tile.kernels.common import LOG2_E, compute_dtype, strided
from torch_tile.kernels.mla.scheduler import Units, scheduled_types
from torch_tile.kernels.mla.spec import Config, Form
from torch_tile.kernels.mla.tiles import PANEL, SLACK, Halves, hide, store_through

BOTH = 2 * WARPGROUP  # threads of the warpgroups that multiply
FIRST, SECOND = 1, 2  # barriers: the weights of the first or second tile of a pair are there
ENDS = 3, 4  # the sums of the first or second warpgroup are


@dataclass(frozen=True, eq=False)
class Share:
    """What a warpgroup keeps of the softmax: scores of its tiles, and of each row the maximum so far, `peak`.

    `fade` is what sums are worth since `peak` was `before`; `total` has parts of the sums of a row's weights. Scores
    times `factor` are exponents of 2.
    """

    scores: Any
    narrow: Any
    sums: Any
    total: Any
    peak: Any
    before: Any
    fade: Any
    factor: Any

    @T.macro
    def begin(self) -> None:
        """Nothing so far."""
        T.clear(self.sums)
        T.clear(self.total)
        T.fill(self.peak, -T.infinity(self.peak.dtype))

    @T.macro
    def look(self, top: Any) -> None:
        """Let the maxima follow new scores where weights would pass 2 ** SLACK otherwise, and show them in `top`."""
        T.copy(self.peak, self.before)
        T.reduce_max(self.scores, self.peak, dim=1, clear=False, nan_propagate=True)
        for i in T.Parallel(self.peak.shape[0]):
            is_high = self.peak[i] * self.factor > self.before[i] * self.factor + SLACK
            self.peak[i] = T.if_then_else(is_high, self.peak[i], self.before[i])
        T.copy(self.peak, top)

    @T.macro
    def follow(self, top: Any) -> None:
        """Take over the maxima that the other warpgroup found."""
        T.copy(self.peak, self.before)
        T.copy(top, self.peak)

    def base(self, i: Any) -> Any:
        """What a row's exponents are reckoned from."""
        return T.if_then_else(self.peak[i] == -T.infinity(self.peak.dtype), 0.0, self.peak[i] * self.factor)

    @T.macro
    def weigh(self, shown: Any) -> None:
        """Scores become weights, which the other warpgroup finds in `shown`."""
        for i, j in T.Parallel(*self.scores.shape):
            self.scores[i, j] = T.exp2(self.scores[i, j] * self.factor - self.base(i))
        T.copy(self.scores, self.narrow)
        T.copy(self.narrow, shown)
        T.fence_proxy_async()

    @T.macro
    def age(self) -> None:
        """What sums are worth since the maxima changed, exactly 1 for most tiles, and so the sums."""
        for i in T.Parallel(self.peak.shape[0]):
            faded = T.exp2(self.before[i] * self.factor - self.base(i))
            self.fade[i] = T.if_then_else(self.peak[i] == self.before[i], 1.0, faded)
        T.scale_rows(self.sums, self.fade)

    @T.macro
    def age_total(self) -> None:
        """The same for weights that were counted; while products are under way."""
        for i, c in T.Parallel(*self.total.shape):
            self.total[i, c] *= self.fade[i]

    @T.macro
    def meet(self, ends: Sequence[Any], side: int, scale: Any) -> None:
        """Both warpgroups have half of the weights: `peak` becomes the log-sum-exp, `fade` the weight of the sums."""
        T.reduce_sum(self.total, self.before, dim=1)
        T.copy(self.before, ends[side])
        T.named_barrier_arrive(ENDS[side], BOTH)
        T.sync_threads(ENDS[1 - side], BOTH)
        other = T.alloc_fragment(self.before.shape, self.before.dtype)
        T.copy(ends[1 - side], other)
        for i in T.Parallel(self.before.shape[0]):
            self.before[i] += other[i]
            self.peak[i] = self.peak[i] * scale + T.log(self.before[i])
            self.fade[i] = T.if_then_else(self.before[i] == 0.0, 0.0, 1.0 / self.before[i])

    @T.macro
    def count(self) -> None:
        """Add weights to the total, each thread those that it holds."""
        for i, c in T.Parallel(*self.total.shape):
            for j in T.serial(self.scores.shape[1] // self.total.shape[1]):
                self.total[i, c] += self.scores[i, j * self.total.shape[1] + c]


@dataclass(frozen=True, eq=False)
class Turns:
    """The turns of both warpgroups. A block has rows from `row` on, and positions below `limit` from tile `begin` on;
    it has had `done` pairs of tiles before.

    Row r is one of query r // heads, which sees positions up to `reach` and its number; the block's first query those
    up to `first_own`. The maxima go from one warpgroup to the other in `tops`, weights in `shown`.
    """

    form: Form
    halves: Halves
    shown: Sequence[Any]
    tops: Sequence[Any]
    begin: Any
    limit: Any
    reach: Any
    first_own: Any
    heads: Any
    row: Any
    scale: Any

    @T.macro
    def look(self, mine: Share, pair: Any, tile: int) -> None:
        """Hide what is not to be seen of a tile, and find the maxima."""
        keys = mine.scores.shape[1]
        first = (self.begin + 2 * pair + tile) * keys
        if self.form.cut(first, keys, self.limit, self.first_own):
            hide(self.form, mine.scores, first, self.limit, self.reach, self.heads, self.row, self.scale)
            self.halves.clear(tile, first, self.limit)
        mine.look(self.tops[tile])

    @T.macro
    def first_turn(self, mine: Share, pair: Any) -> None:
        """The first warpgroup, once it has scores: their weights, and both tiles, of which one is left under way."""
        self.look(mine, pair, 0)
        mine.weigh(self.shown[0])
        T.named_barrier_arrive(FIRST, BOTH)
        mine.age()
        T.wgmma_gemm(mine.narrow, self.halves.values(0), mine.sums)
        mine.age_total()
        mine.count()
        T.wait_wgmma(0)
        self.halves.let_go(0)
        T.sync_threads(SECOND, BOTH)
        mine.follow(self.tops[1])
        mine.age()
        T.wgmma_gemm(self.shown[1], self.halves.values(2), mine.sums)
        mine.age_total()

    @T.macro
    def first_turns(self, mine: Share, queries: Sequence[Any], pairs: Any, done: Any) -> None:
        """The first warpgroup. Scores of the next pair begin behind the last sums of this one."""
        self.halves.multiply(0, done, queries, mine.scores, True)
        self.halves.multiply(1, done, queries, mine.scores, False)
        T.wait_wgmma(0)
        for pair in T.serial(pairs - 1):
            self.first_turn(mine, pair)
            self.halves.multiply(0, done + pair + 1, queries, mine.scores, True)
            T.wait_wgmma(len(self.halves.panels(0)))
            self.halves.let_go(2)
            self.halves.multiply(1, done + pair + 1, queries, mine.scores, False)
            T.wait_wgmma(0)
        self.first_turn(mine, pairs - 1)
        T.wait_wgmma(0)
        self.halves.let_go(2)

    @T.macro
    def second_turns(self, mine: Share, queries: Sequence[Any], pairs: Any, done: Any) -> None:
        """The second warpgroup, which weighs while it adds the first tile."""
        for pair in T.serial(pairs):
            self.halves.multiply(3, done + pair, queries, mine.scores, True)
            self.halves.multiply(2, done + pair, queries, mine.scores, False)
            T.sync_threads(FIRST, BOTH)
            mine.follow(self.tops[0])
            T.wait_wgmma(0)
            mine.age()
            mine.age_total()
            T.wgmma_gemm(self.shown[0], self.halves.values(1), mine.sums)
            self.look(mine, pair, 1)
            mine.weigh(self.shown[1])
            T.named_barrier_arrive(SECOND, BOTH)
            T.wait_wgmma(0)
            self.halves.let_go(1)
            mine.age()
            T.wgmma_gemm(mine.narrow, self.halves.values(3), mine.sums)
            mine.age_total()
            mine.count()
            T.wait_wgmma(0)
            self.halves.let_go(3)


def piece_of(
    config: Config, form: Form, units: Any, lengths: Sequence[Any], covered: Any, splits: Any, share: Any, bz: Any,
    number: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """What a block works on: a sequence, its length, and which tiles. Of a schedule, the piece of this number."""
    sequence = units.sequence(share, number) if units else bz
    length = T.clamp(lengths[0][sequence], 0, covered) if lengths else covered
    if units:
        return sequence, length, *units.blocks(share, number, config.block_kv, length)
    return sequence, length, *form.key_blocks(config, length, splits, share)


def pairs_of(begin: Any, end: Any) -> Any:
    """How many pairs of tiles there are: one at least, of which nothing is seen if there is none."""
    return T.max(T.ceildiv(end - begin, 2), 1)


# Fast: exp2 of what is below -126 is 0, which saves three instructions for each score.
@jit(pass_configs={"tl.enable_fast_math": True})  # type: ignore[untyped-decorator]
def flash_mla_by_turns(config: Config, form: Form) -> Any:
    """`flash_mla` on Hopper, for 64 rows and tiles of 64 positions; the rotary part of the queries is in registers.

    Shares of the positions and units of a schedule as there.
    """
    rows, keys, latent, half = config.block_h, config.block_kv, form.latent, form.latent // 2
    accum = compute_dtype(form.dtype)
    batch, lines, q_len, heads, splits = T.dynamic("batch, lines, q_len, heads, splits")
    (d0, d1), table_types, covered = form.cache_shapes(batch)
    length_types = [] if form.whole else [T.Tensor((batch,), "int32")]
    unit_types = scheduled_types(lines, latent, accum) if config.scheduled else []
    part = (splits,) if config.split else ()
    out_shape = (*part, batch, lines, latent)

    @T.prim_func
    def mla_decode_by_turns(
        q: strided("q", (batch, lines, latent), form.dtype, multiple=form.vector),
        q_pe: strided("q_pe", (batch, lines, form.rotary), form.dtype, multiple=form.vector),
        kv: strided("kv", (d0, d1, latent), form.dtype, multiple=form.vector),
        k_pe: strided("k_pe", (d0, d1, form.rotary), form.dtype, multiple=form.vector),
        *others: [*table_types, *length_types, *unit_types],
        out: T.Tensor(out_shape, accum) if config.split else strided("out", out_shape, form.dtype, multiple=latent),
        lse: T.Tensor((*part, batch, q_len, heads), accum),
        scale: accum,
    ):
        table, lengths = others[: len(table_types)], others[len(table_types) :][: len(length_types)]
        units: Any = Units(*others[-3:], batch=batch) if config.scheduled else None
        grid = T.ceildiv(lines, rows), splits if config.split else units.count if units else 1, 1 if units else batch
        with T.Kernel(*grid, threads=config.threads + 128) as (bx, share, bz):
            q_tile = T.alloc_shared((rows, latent), form.dtype)
            widths = [half, half + form.rotary, half, half + form.rotary]
            tiles = [T.alloc_shared((keys, columns), form.dtype) for columns in widths]
            full = [T.alloc_barrier([1] * (columns // PANEL)) for columns in widths]
            q_full, q_free = T.alloc_barrier(1), T.alloc_barrier(BOTH)
            halves = Halves(form, tiles, full, T.alloc_barrier([4] * 4))
            shown = [T.alloc_shared((rows, keys), form.dtype) for _ in range(2)]
            tops, ends = ([T.alloc_shared((rows,), accum) for _ in range(2)] for _ in range(2))
            scores, narrow = T.alloc_fragment((rows, keys), accum), T.alloc_fragment((rows, keys), form.dtype)
            sums, total = T.alloc_fragment((rows, half), accum), T.alloc_fragment((rows, config.shares), accum)
            peak, before, fade = (T.alloc_fragment((rows,), accum) for _ in range(3))
            factor = scale * LOG2_E if form.folded else LOG2_E
            mine = Share(scores, narrow, sums, total, peak, before, fade, factor)
            with T.ws(2):
                T.dec_max_nreg(24)
                done = T.alloc_var("int32", 0)
                for number in T.serial(units.pieces(share)) if units else (0,):
                    at, _, begin, end = piece_of(config, form, units, lengths, covered, splits, share, bz, number)
                    if units:
                        T.mbarrier_wait_parity(q_free, (number + 1) % 2)
                    T.tma_copy(q[at, bx * rows, 0], q_tile, barrier=q_full)
                    if T.shuffle_elect(128):
                        T.mbarrier_arrive(q_full)
                    halves.load_pairs((kv, k_pe), table, at, begin, pairs_of(begin, end), done)
                    done += pairs_of(begin, end)
            for side in [0, 1]:
                with T.ws(side):
                    T.inc_max_nreg(240)
                    done = T.alloc_var("int32", 0)
                    for number in T.serial(units.pieces(share)) if units else (0,):
                        at, length, begin, end = piece_of(
                            config, form, units, lengths, covered, splits, share, bz, number
                        )
                        limit = T.min(length, end * keys)  # the second tile of the last pair may begin past the share
                        reach = length - q_len
                        known = begin, limit, reach, reach + (bx * rows) // heads, heads, bx * rows, scale
                        turns = Turns(form, halves, shown, tops, *known)
                        queries = [q_tile[:, c : c + PANEL] for c in range(0, latent, PANEL)]
                        for c in list(range(0, form.rotary, PANEL)):
                            held = T.alloc_fragment((rows, PANEL), form.dtype)
                            T.copy(q_pe[at, bx * rows, c], held)
                            queries.append(held)
                        mine.begin()
                        T.mbarrier_wait_parity(q_full, number % 2)
                        if side == 0:
                            turns.first_turns(mine, queries, pairs_of(begin, end), done)
                        else:
                            turns.second_turns(mine, queries, pairs_of(begin, end), done)
                        done += pairs_of(begin, end)
                        mine.meet(ends, side, scale if form.folded else 1.0)
                        first_owner, last_owner = units.owners(at) if units else (0, 0)
                        if first_owner >= last_owner:
                            own = (share,) if config.split else ()
                            if side == 0:
                                for i in T.Parallel(rows):
                                    lse[(*own, at, (bx * rows + i) // heads, (bx * rows + i) % heads)] = peak[i]
                            if config.split:
                                for i, c in T.Parallel(rows, half):
                                    out[(*own, at, bx * rows + i, side * half + c)] = sums[i, c] * fade[i]
                            else:
                                store_through(q_tile, sums, fade, out, at, bx * rows, side * half)
                        else:
                            units.leave(share, number, sums, fade, peak, bx * rows, side * half)
                        if units:
                            T.mbarrier_arrive(q_free)

    return mla_decode_by_turns
