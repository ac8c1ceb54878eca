# SPDX-License-Identifier: Apache-2.0
"""Gradients of attention by one kernel on Hopper, which adds up dq in memory (FlashAttention-3, arXiv:2407.08608).

A block has keys and loops over queries. It makes five products a step, where the kernels of `backward.py` make seven:
scores and their gradients are made once for dq, dk and dv. Blocks add their tiles of dq to float32 sums in memory, in
any order. The last bits of dq differ from run to run. With `ordered` the order is fixed: a block waits for those of
later keys (`Order`). The first one stores, so that no sums have to be cleared. With `alone` one block has all keys and
stores dq: there are no sums.

Two warpgroups multiply, each for half of the keys. Scores of the next queries are on their way while a step ends. dq
needs what both have made, and is added up a step later, so that neither waits for the other:

    products     dp | dv += p grad | dq of the step before | dk += ds q | next scores
    arithmetic   p  | ds           |                       | dq to memory

A step begins with dv's product, in front of which no product is in flight: assemblers differ in what they let pass from
one iteration of a loop to the next.

Heads of 192 with values of 128 leave registers for scores of 32 queries. So a step of 64 queries has two pieces, each
with products of its own but for dq. Beside the first piece a warpgroup makes 64 columns of dq from all keys. Beside the
second one it makes the last 64 columns from its own keys. The next scores start when dk is there: beside dq they would
spill.

A third warpgroup has one warp that loads tiles, and two that add tiles of dq to memory.

Where few waves of equally long blocks leave multiprocessors idle, several blocks share keys (`key_blocks.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.hardware import WARP, WARPGROUP
from torch_tile.kernels.attention.key_blocks import Numbering, handover_types, make_handover, members_of
from torch_tile.kernels.attention.queries_of_keys import PADDING, masks_queries, query_blocks
from torch_tile.kernels.attention.softmax import probability
from torch_tile.kernels.attention.spec import Config, Spec
from torch_tile.kernels.attention.tiling import Problem
from torch_tile.kernels.common import LOG2_E, Machine, compute_dtype, dynamic, strided, typical
from torch_tile.kernels.library_jit import library_jit

BOTH = 2 * WARPGROUP  # threads of the warpgroups that multiply
WARPS = BOTH // WARP
HALF = 64  # keys of a warpgroup, which are rows of its products
MOST_ITERATIONS = 2**30  # tensors with more do not fit in memory
LONGEST = 2**29  # queries or keys of a sequence
LEAST_KEYS = 512
SIDES = 32, 16, 8, 4, 2
MOST_HEADS = 4  # of keys, side by side: sums of dq take room in the second-level cache, too
SHORT = 1024  # keys of which few blocks are in a chain that waits
LEAST_WAVES_ORDERED = 4  # of more keys, as the longest blocks come last
# A tile of the sums of dq has 64 queries by 64 columns. It lies in memory as a product leaves it in registers. Its
# dimensions are 16 rows (of a warp), 8 columns, and row and pair of columns among these. A thread's 2 rows and 2
# columns come last.
DQ_DIMS = HALF // 16, HALF // 8, 8, 4, 4
DQ_TILE = 128, 32
WHOLE = 128  # columns of heads whose scores are made for all queries of a step at once
SUMMED = 1  # the first of two named barriers: a warpgroup's tile of dq is there


def place_in_memory(w: Any, j: Any, i: Any, q: Any, e: Any) -> tuple[Any, Any]:
    """Return the place in memory of an element of a tile of dq, by its dimensions in `DQ_DIMS`."""
    return j * 16 + w * 4 + i // 2, i % 2 * 16 + q * 4 + e


def place_in_tile(w: Any, j: Any, i: Any, q: Any, e: Any) -> tuple[Any, Any]:
    """Return the query and the column of an element of a tile of dq, by its dimensions in `DQ_DIMS`."""
    return w * 16 + e // 2 * 8 + i, j * 8 + q * 2 + e % 2


def step_pieces(spec: Spec) -> tuple[int, ...]:
    """Return the pieces of a step. Sums of wide heads leave registers for scores of half of its queries at a time."""
    return (0, 1) if spec.tile_d > WHOLE else (0,)


def by_thread(tiles: int) -> Any:
    """Return which thread holds which elements of dq tiles that lie side by side, and in which order."""

    def place(p: Any, w: Any, j: Any, i: Any, q: Any, e: Any) -> tuple[Any, Any]:
        return p * WARPGROUP + w * WARP + i * 4 + q, j * 4 + e

    return T.Fragment((tiles, *DQ_DIMS), forward_fn=place)


@dataclass(frozen=True, eq=False)
class Order:
    """The order in which blocks add to sums of dq: those of later keys come first.

    Under causal masks these reach a query first, too, so that blocks hardly wait. A counter of each tile of dq says
    how many blocks have added to it. Blocks are numbered as they begin. So a block waits only for blocks that run or
    have run.
    """

    spec: Spec
    counters: Any
    block: Any
    blocks: Any
    keys: int
    queries: int
    q_offset: Any

    def before(self, row: Any) -> Any:
        """Return how many blocks add to the queries from `row` on before this one."""
        last = self.blocks - 1
        if self.spec.causal:
            offset = T.max(T.min(self.q_offset, LONGEST), -LONGEST) if self.spec.shifted else 0
            last = T.min(last, (row + (self.queries - 1) + offset) // self.keys)
        return last - self.block

    @T.macro
    def wait(self, tile: tuple[Any, ...], before: Any) -> None:
        """Wait until `before` blocks have added to a tile of dq."""
        while T.atomic_load(self.counters[tile], "acquire") != before:
            pass

    @T.macro
    def end(self, tile: tuple[Any, ...]) -> None:
        """Let the next block add to a tile of dq."""
        T.sync_warp()  # the thread that started the sum has waited for it
        if T.shuffle_elect(WARP):
            T.atomic_add(self.counters[tile], 1, memory_order="release")


@dataclass(frozen=True, eq=False)
class Iterations:
    """The iterations of a block, in each of which it takes `queries` queries of a head: `count` times for each head.

    They begin with block `first` of the queries of head `head` and sequence `sequence`.
    """

    spec: Spec
    queries: int
    stages: int
    sequence: Any
    head: Any
    groups: Any
    first: Any
    count: Any
    total: Any

    def step(self, iteration: Any) -> Any:
        """Return the block of queries of an iteration."""
        return self.first + (iteration % self.count if self.spec.grouped else iteration)

    def place(self, iteration: Any) -> tuple[Any, ...]:
        """Return the place of an iteration's first query in a tensor of queries, without the column."""
        member = iteration // self.count if self.spec.grouped else 0
        return self.sequence, self.head, member, self.step(iteration) * self.queries

    @property
    def pieces(self) -> tuple[int, ...]:
        """Return the pieces of an iteration."""
        return step_pieces(self.spec)

    def dq_tile(self, step: Any, piece: int, index: int) -> Any:
        """Return to which tile of a head's sums consumer `index` adds what it has after a piece of the step.

        With two pieces it has a tile of its own, then a share of one that both consumers have.
        """
        return step * 2 + index if len(self.pieces) == 1 else step * 3 + (2 if piece else index)

    def phase(self, iteration: Any) -> tuple[Any, Any]:
        """Return the stage of an iteration, and the parity of its barriers."""
        return iteration % self.stages, iteration // self.stages % 2

    @T.macro
    def load(self, sources: Any, tiles: Any, full: Any, free: Any) -> None:
        """Load the tiles of all iterations: queries, two numbers of each, and gradients. Run by one warp."""
        (q, statistics, grad), (q_tiles, numbers, grad_tiles) = sources, tiles
        for iteration in T.serial(self.total):
            stage, parity = self.phase(iteration)
            *here, row = self.place(iteration)
            T.mbarrier_wait_parity(free[0][stage], parity ^ 1)
            T.tma_copy(q[(*here, row, 0)], q_tiles[stage, :, :], barrier=full[0][stage])
            for n in [0, 1]:
                T.tma_copy(statistics[(*here, n, row)], numbers[n][stage, :], barrier=full[0][stage])
            if T.shuffle_elect(WARP):
                T.mbarrier_arrive(full[0][stage])
            T.mbarrier_wait_parity(free[1][stage], parity ^ 1)
            T.tma_copy(grad[(*here, row, 0)], grad_tiles[stage, :, :], barrier=full[1][stage])
            if T.shuffle_elect(WARP):
                T.mbarrier_arrive(full[1][stage])

    @T.macro
    def skip_first(self, free: Any, index: int) -> None:
        """Free the first tiles of dq of consumer `index` unread: they are empty, as dq is one iteration late."""
        if self.total > 0:
            for _ in self.pieces:
                T.sync_threads(SUMMED + index, WARPGROUP + WARP)
                if T.shuffle_elect(WARP):
                    T.mbarrier_arrive(free)

    @T.macro
    def add_up(self, tile: Any, sums: Any, order: Order | None, free: Any, index: int) -> None:
        """Add the tiles of dq that consumer `index` makes to memory. Run by warp `index + 1` of the producers."""
        self.skip_first(free, index)
        thread, queries = WARP * (index + 1), self.queries
        for member in T.serial(self.groups) if self.spec.grouped else (0,):
            for step in T.serial(self.first, self.first + self.count):
                for piece in self.pieces:
                    here = self.sequence, self.head, member, self.dq_tile(step, piece, index)
                    place = (*here[:3], here[3] * DQ_TILE[0], 0)
                    if order is not None:
                        before = T.alloc_var(T.int32, order.before(step * queries))
                        order.wait(here, before)
                    T.sync_threads(SUMMED + index, WARPGROUP + WARP)
                    if order is None:
                        T.tma_copy(tile, sums[place], combine="add", by=thread)
                    elif before == 0:
                        T.tma_copy(tile, sums[place], by=thread)
                    else:
                        T.tma_copy(tile, sums[place], combine="add", by=thread)
                    if T.shuffle_elect(WARP):
                        T.mbarrier_arrive(free)
                    if order is not None:
                        order.end(here)

    @T.macro
    def store_all(self, tile: Any, dq: Any, scale: Any, free: Any, index: int) -> None:
        """Store dq, the tiles that consumer `index` makes times `scale`. Run by warp `index + 1` of the producers."""
        self.skip_first(free, index)
        wide = dq.shape[-1] // HALF  # tiles of a row
        found = T.alloc_local((4,), tile.dtype)
        for iteration in T.serial(self.total):
            *head, first = self.place(iteration)
            T.sync_threads(SUMMED + index, WARPGROUP + WARP)
            # A lane takes elements as `place_in_memory` says for i * 4 + q = lane.
            for w in T.unroll(HALF // 16, unroll_factor=1):
                lane = T.get_lane_idx()
                row, column = first + index // wide * HALF + w * 16 + lane // 4, index % wide * HALF + lane % 4 * 2
                for j in T.unroll(HALF // 8):
                    for e in T.vectorized(4):
                        found[e] = tile[j * 16 + w * 4 + lane // 8, lane % 8 * 4 + e]
                    for side in T.unroll(2):
                        for e in T.vectorized(2):
                            to = row + side * 8, column + j * 8 + e
                            dq[(*head, *to)] = T.cast(found[side * 2 + e] * scale, dq.dtype)
            T.sync_warp()  # all lanes have read the tile
            if T.shuffle_elect(WARP):
                T.mbarrier_arrive(free)


@dataclass(frozen=True, eq=False)
class Scores:
    """Which of a block's `keys` from `first_key` on the step's `queries` see, and their probabilities and gradients."""

    config: Config
    spec: Spec
    first_key: Any
    keys: Any
    queries: Any
    q_offset: Any
    window: Any
    scale: Any

    @property
    def reads_early(self) -> bool:
        """Return whether each query's log-sum-exp is read while its scores are made, not behind operands of products.

        Windows leave no registers for it. Narrow heads gained nothing.
        """
        return not self.spec.windowed and self.spec.tile_d > HALF

    @T.macro
    def hide(self, p: Any, step: Any) -> None:
        """Clear the probabilities of keys that queries do not see, or that are behind the last key."""
        rows, queries = p.shape
        spec, first = self.spec, T.min(step, LONGEST // queries) * queries
        masks = masks_queries(spec, self.config, step, self.first_key, self.q_offset, self.window, self.queries)
        if T.logical_or(masks, self.first_key + rows > self.keys):
            # Query j sees key i from j = diagonal + i on. What is clamped to `LONGEST` differs by a number of 32 bits.
            offset = T.max(T.min(self.q_offset, LONGEST), -LONGEST) if spec.shifted else 0
            to_diagonal = T.cast(T.cast(self.first_key - offset, T.int64) - first, T.int32)
            diagonal = T.max(T.min(to_diagonal, queries), -rows)
            end = T.max(T.min(to_diagonal + T.min(self.window, LONGEST), queries), -rows) if spec.windowed else 0
            left = T.min(T.min(self.keys, LONGEST) - self.first_key, rows)
            # Numbers of all queries would fill registers. Here a thread has constants for a and c, and one number of b.
            for i, a, b, c in T.Parallel(rows, queries // 8, 4, 2):
                seen = i < left
                if spec.causal:
                    seen = a * 8 + c >= T.if_then_else(seen, diagonal + i, queries) - b * 2
                if spec.windowed:
                    seen = T.logical_and(seen, a * 8 + c < end + i - b * 2)
                p[i, a * 8 + b * 2 + c] = T.if_then_else(seen, p[i, a * 8 + b * 2 + c], 0.0)

    @T.macro
    def weigh(self, p: Any, p_rounded: Any, kept: Any, row_lse: Any, at: tuple[Any, int], step: Any) -> None:
        """Turn scores into probabilities, rounded. `row_lse` is a number of each query, in stages or of each element.

        `at` are the stage and its first query.

        They are `kept` as the assembler sees that these are `p_rounded`, which a product reads meanwhile: there are no
        registers for more.
        """
        for i, j in T.Parallel(*p.shape):
            number = row_lse[i, j] if self.reads_early else row_lse[at[0], at[1] + j]
            p[i, j] = probability(self.spec, p[i, j], self.scale, number)
        self.hide(p, step)
        T.copy(p, p_rounded)
        T.copy(p_rounded, kept)

    @T.macro
    def differentiate(self, kept: Any, dp: Any, numbers: Any, at: tuple[Any, int], ds: Any) -> None:
        """Turn gradients of probabilities into those of scores."""
        for i, j in T.Parallel(*dp.shape):
            ds[i, j] = T.cast(T.cast(kept[i, j], dp.dtype) * (dp[i, j] - numbers[1][at[0], at[1] + j]), self.spec.dtype)


@dataclass(frozen=True, eq=False)
class ConsumerWarpgroup:
    """The tiles, barriers and fragments of one of two warpgroups, and what it does in an iteration.

    It has half of the block's keys and half of the columns of dq. With 128 queries it has half of these instead of
    columns.
    """

    index: int
    iterations: Iterations
    scores: Scores
    k: Any
    v: Any
    q: Any
    grad: Any
    numbers: Any
    all_ds: Any
    dq_tile: Any
    full: Any
    free: Any
    ds_full: Any
    dq_free: Any
    p: Any
    dp: Any
    p_rounded: Any
    kept: Any
    ds: Any
    dq: Any
    dk: Any
    dv: Any

    @property
    def own(self) -> slice:
        """Return the warpgroup's half of the block's keys, and of dq."""
        return slice(self.index * HALF, (self.index + 1) * HALF)

    @property
    def pieces(self) -> tuple[int, ...]:
        """Return the pieces of an iteration."""
        return self.iterations.pieces

    def piece_queries(self, piece: int) -> slice:
        """Return the queries of a piece."""
        wide = self.iterations.queries // len(self.pieces)
        return slice(piece * wide, (piece + 1) * wide)

    @T.macro
    def run(self) -> None:
        """Run all iterations, at least one."""
        last = self.iterations.total - 1  # a number of its own: without it the loop is 1.5 % slower
        if len(self.pieces) == 1:
            self.start_scores_gemm(0, 0)
            self.make_probabilities(0, 0)
            for iteration in T.serial(last):
                self.make_gradients(iteration, 0, True)
                self.make_probabilities(iteration + 1, 0)
            self.make_gradients(last, 0, False)
        else:
            # Scores that start beside dq would be one tile of sums more than there are registers for.
            for iteration in T.serial(self.iterations.total):
                for piece in self.pieces:
                    self.start_scores_gemm(iteration, piece)
                    self.make_probabilities(iteration, piece)
                    self.make_gradients(iteration, piece, False)
        for piece in self.pieces:
            self.start_dq_gemm(last + 1, piece)
            T.wait_wgmma(0)
            self.store_dq(last + 1, piece)
            T.named_barrier_arrive(SUMMED + self.index, WARPGROUP + WARP)

    @T.macro
    def start_scores_gemm(self, iteration: Any, piece: int) -> None:
        """Start the scores of the queries of a piece."""
        stage, parity = self.iterations.phase(iteration)
        if piece == 0:
            T.mbarrier_wait_parity(self.full[0][stage], parity)
        T.wgmma_gemm(
            self.k[self.own, :], self.q[stage, self.piece_queries(piece), :], self.p, transpose_B=True, clear_accum=True
        )

    @T.macro
    def make_probabilities(self, iteration: Any, piece: int) -> None:
        """Make the probabilities of a piece, whose scores are under way, and the gradients of probabilities."""
        stage, parity = self.iterations.phase(iteration)
        queries = self.piece_queries(piece)
        step = T.alloc_var(
            T.int32, self.iterations.step(iteration) * len(self.pieces) + piece
        )  # a division later on would lack registers
        if piece == 0:
            T.mbarrier_wait_parity(self.full[1][stage], parity)
        T.wgmma_gemm(self.v[self.own, :], self.grad[stage, queries, :], self.dp, transpose_B=True, clear_accum=True)
        row_lse = self.numbers[0]
        if self.scores.reads_early:
            row_lse = T.alloc_fragment(self.p.shape, self.p.dtype)
            for i, j in T.Parallel(*self.p.shape):
                row_lse[i, j] = self.numbers[0][stage, queries.start + j]
        T.wait_wgmma(1)
        self.scores.weigh(self.p, self.p_rounded, self.kept, row_lse, (stage, queries.start), step)
        T.wait_wgmma(0)

    @T.macro
    def make_gradients(self, iteration: Any, piece: int, more: bool) -> None:
        """Make the gradients of scores, and add up dv, dk and the last dq. With `more`, start the next scores."""
        stage, _ = self.iterations.phase(iteration)
        version, queries, ends = iteration % 2, self.piece_queries(piece), piece == self.pieces[-1]
        T.wgmma_gemm(self.p_rounded, self.grad[stage, queries, :], self.dv)
        self.scores.differentiate(self.kept, self.dp, self.numbers, (stage, queries.start), self.ds)
        self.start_dq_gemm(iteration, piece)
        # The other warpgroup has read this version: it arrived behind that.
        T.copy(self.ds, self.all_ds[version, self.own, queries])
        T.wgmma_gemm(self.ds, self.q[stage, queries, :], self.dk)
        T.fence_proxy_async()  # beside the product of dq, not behind the wait for it
        T.wait_wgmma(1)
        if ends:
            T.mbarrier_arrive(self.ds_full[version])
            if T.shuffle_elect(WARP):
                T.mbarrier_arrive(self.free[1][stage])
        self.store_dq(iteration, piece)
        if more:
            self.start_scores_gemm(iteration + 1, piece)
        T.named_barrier_arrive(SUMMED + self.index, WARPGROUP + WARP)
        T.wait_wgmma(1 if more else 0)
        if ends:
            T.sync_warp()  # all lanes have read the two numbers of each query
            if T.shuffle_elect(WARP):
                T.mbarrier_arrive(self.free[0][stage])

    @T.macro
    def start_dq_gemm(self, n: Any, piece: int) -> None:
        """Start tile `n` of dq, by the gradients of the iteration before from both warpgroups. Tile 0 takes zeros."""
        version = (n + 1) % 2
        T.mbarrier_wait_parity(self.ds_full[version], n // 2 % 2, own=True)
        if piece > 0:  # the columns that are left, of the warpgroup's keys
            ds, columns = self.all_ds[version, self.own, :], slice(2 * HALF, 3 * HALF)
            T.wgmma_gemm(ds, self.k[self.own, columns], self.dq, transpose_A=True, clear_accum=True)
        elif self.iterations.queries == HALF:
            T.wgmma_gemm(self.all_ds[version, :, :], self.k[:, self.own], self.dq, transpose_A=True, clear_accum=True)
        else:
            T.wgmma_gemm(self.all_ds[version, :, self.own], self.k, self.dq, transpose_A=True, clear_accum=True)

    @T.macro
    def store_dq(self, n: Any, piece: int) -> None:
        """Store tile `n` of dq for the warp that adds it to memory. The caller tells that warp, so that products can
        start between the stores and the fence, which waits for them.
        """
        T.mbarrier_wait_parity(self.dq_free, (n * len(self.pieces) + piece + 1) % 2)
        # Each thread stores what it has of 16 rows and 8 columns at one place: other orders meet in banks of memory.
        for _, *at in T.Parallel(1, *DQ_DIMS, loop_layout=by_thread(1)):
            self.dq_tile[place_in_memory(*at)] = self.dq[place_in_tile(*at)]


@T.macro
def store_sums(acc: Any, factor: Any, staged: Any, out: tuple[Any, ...]) -> None:
    """Store a warpgroup's sums times a factor through its rows of shared memory `staged`, as many columns as fit.

    `out` are a tensor and the indices of the first row.
    """
    rows, columns = acc.shape
    (tile, own), (result_tensor, *place) = staged, out
    for first in tuple(range(0, columns, tile.shape[1])):
        wide = min(tile.shape[1], columns - first)
        result = T.alloc_fragment((rows, wide), result_tensor.dtype)
        for i, c in T.Parallel(rows, wide):
            result[i, c] = T.cast(acc[i, first + c] * factor, result.dtype)
        T.copy(result, tile[own, 0:wide])
        T.copy(tile[own, 0:wide], result_tensor[(*place, first)])


@library_jit(pass_configs={"tl.enable_fast_math": True})  # type: ignore[untyped-decorator]
def fused_gradients(config: Config, spec: Spec) -> Any:
    """Build the kernel of all gradients of a block of keys, over all heads that share the keys.

    It adds to `sums`, which is dq without its factor, in whole blocks of `PADDING`. Its tiles have the shape `DQ_TILE`.
    With `ordered` the last arguments are `counters`. With `alone` dq itself stands for the sums.
    """
    queries, rows, stages = config.block_q, config.block_kv, config.stages
    accum, narrow = compute_dtype(spec.dtype), spec.dtype
    batch, kv_heads, q_len, kv_len = T.dynamic("batch, kv_heads, q_len, kv_len")
    padded = dynamic("padded", PADDING)
    groups = T.dynamic("groups") if spec.grouped else 1
    d, dv = spec.tile_d, spec.tile_dv
    piece = queries // len(step_pieces(spec))  # queries whose scores a warpgroup makes at once
    q_shape = (batch, kv_heads, groups, q_len)
    count_types = counters(q_shape[:3]) if config.ordered else []
    if config.shared_wave:
        count_types = handover_types(config.shared_wave, (HALF, d + dv))
    sum_type = T.Tensor((*q_shape[:3], padded * (d // DQ_TILE[1]), DQ_TILE[1]), accum)
    if config.alone:
        sum_type = strided("sums", (*q_shape, d), narrow, multiple=spec.vector)

    @T.prim_func
    def fused_gradients(
        q: strided("q", (*q_shape, d), narrow, multiple=spec.vector),
        k: strided("k", (batch, kv_heads, kv_len, d), narrow, multiple=spec.vector),
        v: strided("v", (batch, kv_heads, kv_len, dv), narrow, multiple=spec.vector),
        grad: strided("grad", (*q_shape, dv), narrow, multiple=spec.vector),
        statistics: T.Tensor((*q_shape[:3], 2, padded), accum),
        sums: sum_type,
        dk: strided("dk", (batch, kv_heads, kv_len, d), narrow, multiple=spec.vector),
        dv_out: strided("dv_out", (batch, kv_heads, kv_len, dv), narrow, multiple=spec.vector),
        scale: accum,
        q_offset: T.int32,
        window: T.int32,
        *counts: count_types,
    ):
        blocks = T.ceildiv(kv_len, rows)
        numbering = Numbering(config, config.grid(blocks, kv_heads, batch, 1))
        with T.Kernel(*numbering.launched, threads=BOTH + WARPGROUP) as (bx, by, bz):
            x, y, z, share = numbering.place(bx, by, bz, counts[-1] if counts else None)
            place, head, sequence, _ = config.place(x, y, z, blocks, kv_heads, 1)
            # The first keys are the heavy ones under causal masks. If additions are ordered they come last.
            block = blocks - 1 - place if config.heavy_first or config.ordered else place
            first_key = T.min(block, LONGEST // rows) * rows
            k_tile, v_tile = T.alloc_shared((rows, d), narrow), T.alloc_shared((rows, dv), narrow)
            q_tiles, grad_tiles = (T.alloc_shared((stages, queries, n), narrow) for n in (d, dv))
            numbers = [T.alloc_shared((stages, queries), accum) for _ in range(2)]
            # One version is read by both warpgroups while the next one is written.
            all_ds, dq_tiles = (
                T.alloc_shared((2, rows, queries), narrow),
                [T.alloc_shared(DQ_TILE, accum) for _ in range(2)],
            )
            keys_full, ds_full, dq_free = T.alloc_barrier(1), T.alloc_barrier([BOTH] * 2), T.alloc_barrier([1] * 2)
            full = [T.alloc_barrier([1] * stages) for _ in range(2)]  # queries with their numbers, and gradients
            free = [T.alloc_barrier([WARPS] * stages) for _ in range(2)]
            # A block that is alone also stores dq of queries that see no key.
            seen = query_blocks(spec, config, first_key, q_offset, window, q_len)
            first, end = (0, T.ceildiv(q_len, queries)) if config.alone else seen
            count = T.max(end - first, 0)
            order = None
            if config.ordered:
                count = T.if_then_else(sequence < batch, count, 0)
                order = Order(spec, counts[0], block, blocks, rows, queries, q_offset)
            if share is not None:
                first, count = share.steps(first, count)
            total = T.min(groups * count, MOST_ITERATIONS)
            iterations = Iterations(spec, queries, stages, sequence, head, groups, first, count, total)
            with T.ws(2):
                T.dec_max_nreg(24)
                if T.get_warp_idx() == WARPS:
                    T.tma_copy(k[sequence, head, first_key, 0], k_tile, barrier=keys_full)
                    T.tma_copy(v[sequence, head, first_key, 0], v_tile, barrier=keys_full)
                    if T.shuffle_elect(WARP):
                        T.mbarrier_arrive(keys_full)
                    iterations.load((q, statistics, grad), (q_tiles, numbers, grad_tiles), full, free)
                for index in [0, 1]:
                    if T.get_warp_idx() == WARPS + 1 + index:
                        if config.alone:
                            iterations.store_all(dq_tiles[index], sums, scale, dq_free[index], index)
                        else:
                            iterations.add_up(dq_tiles[index], sums, order, dq_free[index], index)
            for index in [0, 1]:
                with T.ws(index):
                    T.inc_max_nreg(240)
                    own_key = first_key + index * HALF
                    scores = Scores(
                        replace(config, block_kv=HALF, block_q=piece),
                        spec,
                        own_key,
                        kv_len,
                        q_len,
                        q_offset,
                        window,
                        scale,
                    )
                    p, dp = (T.alloc_fragment((HALF, piece), accum) for _ in range(2))
                    p_rounded, kept, ds = (T.alloc_fragment((HALF, piece), narrow) for _ in range(3))
                    dq, dk_acc, dv_acc = (T.alloc_fragment((HALF, n), accum) for n in (HALF, d, dv))
                    consumer = ConsumerWarpgroup(
                        index, iterations, scores, k_tile, v_tile, q_tiles, grad_tiles, numbers, all_ds,
                        dq_tiles[index], full, free, ds_full, dq_free[index], p, dp, p_rounded, kept, ds, dq,
                        dk_acc, dv_acc,
                    )  # fmt: skip
                    T.clear(dk_acc)
                    T.clear(dv_acc)
                    T.clear(all_ds[1, consumer.own, :])  # tile 0 of dq reads it
                    T.mbarrier_arrive(ds_full[1])
                    T.mbarrier_wait_parity(keys_full, 0)
                    if total > 0:
                        consumer.run()
                    stores = True
                    if share is not None:
                        stores = share.join((dk_acc, dv_acc), counts[0], counts[1], index)
                    if stores:
                        store_sums(dv_acc, 1.0, (v_tile, consumer.own), (dv_out, sequence, head, own_key))
                        store_sums(dk_acc, scale, (v_tile, consumer.own), (dk, sequence, head, own_key))

    return fused_gradients


ROWS = 64  # of a block of the kernels around


def counters(heads: tuple[Any, ...]) -> list[Any]:
    """Return the types of the counters of additions, one for each tile of dq, and of that of begun blocks."""
    return [T.Tensor((*heads, T.dynamic("tiles")), T.int32), T.Tensor((1,), T.int32)]


@library_jit
def prepare_sums(spec: Spec, ordered: bool = False, alone: bool = False, shared_wave: int = 0) -> Any:
    """Build the kernel that clears the sums of dq, or counters, and computes two numbers of each query.

    They are those of `query_gradients`: the argument of `probability`, infinite for a query that sees no key, and the
    sum of grad * out. A block that is `alone` has neither sums nor counters.
    """
    accum = compute_dtype(spec.dtype)
    batch, kv_heads, q_len = T.dynamic("batch, kv_heads, q_len")
    padded = dynamic("padded", PADDING)
    groups = T.dynamic("groups") if spec.grouped else 1
    q_shape, tiles = (batch, kv_heads, groups, q_len), spec.tile_d // HALF
    sum_type = T.Tensor((*q_shape[:3], padded, spec.tile_d), accum)
    handed_types = handover_types(shared_wave, (HALF, spec.tile_d + spec.tile_dv))[1:] if shared_wave else []

    @T.prim_func
    def prepare_sums(
        grad: strided("grad", (*q_shape, spec.tile_dv), spec.dtype, multiple=spec.vector),
        out: strided("out", (*q_shape, spec.tile_dv), spec.dtype, multiple=spec.vector),
        lse: T.Tensor(q_shape, accum),
        statistics: T.Tensor((*q_shape[:3], 2, padded), accum),
        *cleared: [] if alone else counters(q_shape[:3]) if ordered else [sum_type, *handed_types],
    ):
        with T.Kernel(padded // ROWS, kv_heads * groups, batch, threads=256) as (bx, by, bz):
            # The first heads come last, as `fused_gradients` begins with them while they are in the second-level cache.
            head = kv_heads * groups - 1 - by
            here, first = (batch - 1 - bz, head // groups, head % groups), bx * ROWS
            infinity = T.infinity(accum)
            if ordered:
                for n in T.Parallel(tiles):
                    cleared[0][(*here, bx * tiles + n)] = 0
                for n in T.Parallel(1):
                    cleared[1][n] = 0
            elif not alone:
                for i, c in T.Parallel(ROWS, spec.tile_d):
                    cleared[0][(*here, first + i, c)] = 0.0
            if shared_wave:
                for share, index in T.Parallel(shared_wave, 2):
                    cleared[1][share, index] = 0
                for n in T.Parallel(1):
                    cleared[2][n] = 0
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


@library_jit
def finish_sums(spec: Spec, ordered: bool = False) -> Any:
    """Build the kernel that turns the sums of dq, which lie in tiles, into dq."""
    accum = compute_dtype(spec.dtype)
    batch, kv_heads, q_len = T.dynamic("batch, kv_heads, q_len")
    padded = dynamic("padded", PADDING)
    groups = T.dynamic("groups") if spec.grouped else 1

    d, tiles = spec.tile_d, spec.tile_d // HALF

    @T.prim_func
    def finish_sums(
        sums: T.Tensor((batch, kv_heads, groups, padded * (d // DQ_TILE[1]), DQ_TILE[1]), accum),
        dq: strided("dq", (batch, kv_heads, groups, q_len, d), spec.dtype, multiple=spec.vector),
        scale: accum,
        *counts: counters((batch, kv_heads, groups)) if ordered else [],
    ):
        with T.Kernel(T.ceildiv(q_len, ROWS), kv_heads * groups, batch, threads=tiles * WARPGROUP) as (bx, by, bz):
            # The last sums come first: they are in the second-level cache.
            head = kv_heads * groups - 1 - by
            here, first = (batch - 1 - bz, head // groups, head % groups), bx * ROWS
            staged = T.alloc_shared((ROWS, d + 8), spec.dtype)  # rows begin in other banks of memory
            found = T.alloc_fragment((tiles, *DQ_DIMS), accum)
            for p, *at in T.Parallel(tiles, *DQ_DIMS, loop_layout=by_thread(tiles)):
                row, column = place_in_memory(*at)
                found[(p, *at)] = sums[(*here, (bx * tiles + p) * DQ_TILE[0] + row, column)]
            none = counts[0][(*here, bx * tiles)] == 0 if ordered else False
            if none:  # queries that see no key: no block has stored their sums
                T.clear(found)
            for p, *at in T.Parallel(tiles, *DQ_DIMS, loop_layout=by_thread(tiles)):
                row, column = place_in_tile(*at)
                staged[row, p * HALF + column] = T.cast(found[(p, *at)] * scale, spec.dtype)
            T.copy(staged[:, 0:d], dq[(*here, first, 0)])

    return finish_sums


def launch(
    config: Config,
    spec: Spec,
    machine: Machine,
    tensors: tuple[torch.Tensor, ...],
    statistics: torch.Tensor,
    results: tuple[torch.Tensor, ...],
    options: tuple[Any, ...],
) -> None:
    """Launch two kernels where a block is alone, else three. `tensors` are q, k, v, grad, out and lse.

    `results` are dq, dk and dv. Heads of queries are split into key heads and heads of a group. `options` are the
    scale, the offset and the window.
    """
    q, k, v, grad, out, lse = tensors
    dq, dk, dv = results
    given, prepare = (
        (q, k, v, grad, statistics),
        machine.kernel(prepare_sums)(spec, config.ordered, config.alone, config.shared_wave),
    )
    fused = machine.kernel(fused_gradients)(config, spec)
    if config.alone:
        prepare(grad, out, lse, statistics)
        fused(*given, dq, dk, dv, *options)
        return
    sums = statistics.new_empty(*q.shape[:3], statistics.shape[4], spec.tile_d)
    counts: list[torch.Tensor] = []
    if config.ordered:
        tiles = statistics.shape[4] // ROWS * (spec.tile_d // HALF)
        counts = [sums.new_empty(n, dtype=torch.int32) for n in ((*q.shape[:3], tiles), (1,))]
    handed: list[torch.Tensor] = []
    if config.shared_wave:
        handed = make_handover(sums, config.shared_wave, (HALF, spec.tile_d + spec.tile_dv))
    prepare(grad, out, lse, statistics, *(counts or [sums]), *handed[1:])
    sums = sums.view(*q.shape[:3], -1, DQ_TILE[1])
    fused(*given, sums, dk, dv, *options, *counts, *handed)
    machine.kernel(finish_sums)(spec, config.ordered)(sums, dq, options[0], *counts)


# By the width of heads: queries and keys of a block, threads that multiply, stages.
TILINGS = {n: Config(128 if n == HALF else 64, 128, BOTH, 2, packed=False) for n in (64, 128, 192)}


def fused_tiling(spec: Spec, problem: Problem, machine: Machine) -> Config | None:
    """Return the tiling of `fused_gradients`, or None where two kernels serve.

    They do for operands and texts of scores, ragged sequences, and lists of blocks. They do for other head sizes,
    other machines, and few keys. One kernel serves few keys that one block has, where heads fill half of the GPU.

    Under `torch.use_deterministic_algorithms` blocks add in one order. Two kernels serve there where waiting would
    leave multiprocessors idle: for grouped heads, and few heads of many keys.
    """
    plain = not (spec.operands or spec.score or spec.keep or spec.lists) and spec.layout.fixed
    whole = spec.exact and spec.tile_dv == min(spec.tile_d, WHOLE) and spec.vector >= 8 and spec.dtype.itemsize == 2
    if not (plain and whole and machine.target.has_wgmma):
        return None
    found, size = TILINGS.get(spec.tile_d), typical(problem)
    if found is None or max(size.keys, size.rows) > LONGEST:
        return None
    # Whether a block is alone decides what is right, so that no typical number will do.
    few = isinstance(problem.keys, int) and problem.keys <= found.block_kv
    divided = len(step_pieces(spec)) > 1
    if few and not divided and 2 * size.heads >= machine.num_sms:
        return replace(found, alone=True)
    blocks, ordered = -(-size.keys // found.block_kv), torch.are_deterministic_algorithms_enabled()
    # Wide heads that share keys would spill, and few blocks of wide heads are slower than two kernels.
    if size.keys < LEAST_KEYS or (divided and (spec.grouped or blocks * size.heads < machine.num_sms)):
        return None
    waits = size.keys > SHORT and blocks * size.heads < LEAST_WAVES_ORDERED * machine.num_sms
    if ordered and (spec.grouped or waits or divided):
        return None
    # As many heads as fill the machine run side by side, so that the longest blocks of all come together.
    most = max(MOST_HEADS, machine.num_sms // blocks) if spec.causal or ordered else MOST_HEADS
    side = next((n for n in SIDES if n <= most and size.heads % n == 0 and size.heads > n), 1)
    # Blocks that see all keys are equally long, so that a last wave of few blocks leaves multiprocessors idle.
    members = 1 if ordered or spec.causal or spec.windowed else members_of(blocks * size.heads, size, found, machine)
    shared_wave = machine.num_sms if members > 1 else 0
    return replace(
        found, heavy_first=spec.causal and not ordered, side=side, ordered=ordered, shared_wave=shared_wave,
        members=members,
    )  # fmt: skip
