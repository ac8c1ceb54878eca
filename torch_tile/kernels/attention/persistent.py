# SPDX-License-Identifier: Apache-2.0
"""Attention forward by persistent blocks on Hopper, for plain scores of many queries (FlashAttention-3,
arXiv:2407.08608).

A block claims tile after tile: 64 rows of queries for each of its consumer warpgroups. Consumers start their products
in turns, so that one's exponentials run beside the products of another. In the turn in which a warpgroup starts its
last product of a tile, it also starts the first scores of its next tile, which run while the result leaves:

    products     scores of step n, sums of step n - 1 | .. | sums of the last step, scores of the next tile
    arithmetic   exponentials of step n, rescale      | .. | quotients, result to shared memory

A warpgroup of producers has a warp for queries and keys, one for values, and one for results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.hardware import WARP, WARPGROUP
from torch_tile.jit import jit
from torch_tile.kernels.attention.softmax import begin_rows, exponentiate
from torch_tile.kernels.attention.spec import Config, Spec
from torch_tile.kernels.common import LOG2_E, Machine, compute_dtype, strided
from torch_tile.kernels.footprint import Footprint, Tile

OWN = 64  # rows of a consumer
ANCHOR = OWN, 8  # of weights, see `Consumer.run`
WARPS = WARPGROUP // WARP
REGISTERS = {2: (232, 40), 3: (160, 32)}  # of a consumer and a producer, by the number of consumers
MOST = 2**30  # tiles and steps of a launch, rows and keys of a sequence: numbers of 32 bits
MOST_HEADS = 2**24  # of queries, in all sequences
TURN = 1  # the first of the named barriers: it is a consumer's turn to start products
QUERY_WARP, VALUE_WARP, RESULT_WARP = range(3)  # of the producers; the first one loads keys, too


def footprint(config: Config, spec: Spec, slots: int) -> Footprint:
    """Compute the shared memory with `slots` tiles of queries. With one of them consumers share a tile of results."""
    bits = 8 * spec.dtype.itemsize
    results = config.block_q if slots > 1 else OWN
    return Footprint(
        (
            Tile(config.block_q, spec.tile_d, bits, slots), Tile(config.block_kv, spec.tile_d, bits, config.stages),
            Tile(config.block_kv, spec.tile_dv, bits, config.stages), Tile(results, spec.tile_dv, bits),
            *(Tile(*ANCHOR, bits) for _ in range(config.block_q // OWN)),
        ),
        True,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Tiles:
    """All `total` tiles, in the order in which blocks claim them.

    `config.side` heads run side by side, so that their keys and values stay in the second-level cache; of these, the
    longest tiles come first.
    """

    config: Config
    spec: Spec
    total: Any
    blocks: Any  # of rows, in a head
    all_heads: Any  # of queries, in all sequences
    heads: Any  # of keys, in a sequence
    members: Any
    q_len: Any
    kv_len: Any
    q_offset: Any

    def place(self, tile: Any) -> tuple[Any, ...]:
        """Return the sequence, the head of keys, the member of its group and the first row of a tile."""
        side = self.config.side
        tile = T.cast(tile, "uint32")
        all_heads, blocks = T.cast(self.all_heads, "uint32"), T.cast(self.blocks, "uint32")
        first = tile // (blocks * side) * side
        here = T.min(all_heads - first, T.cast(side, "uint32"))  # heads that run side by side
        place, head = tile % (blocks * side) // here, first + tile % (blocks * side) % here
        row = (blocks - 1 - place if self.config.heavy_first else place) * self.config.block_q
        apart, heads = head // T.cast(self.members, "uint32"), T.cast(self.heads, "uint32")
        found = apart // heads, apart % heads, head % T.cast(self.members, "uint32"), row
        return tuple(T.max(T.cast(x, "int32"), 0) for x in found)  # which is known to be positive now

    def steps(self, row: Any) -> Any:
        """Return the number of steps of the tile whose first row is given: at least one, in which all keys may be
        hidden.
        """
        extremes = row, T.min(row + self.config.block_q, self.q_len) - 1
        _, end = self.spec.key_blocks(self.config, extremes, self.q_offset, 0, self.kv_len, 1, 0)
        return T.cast(T.max(end, 1), "int32")

    def whole(self, first: Any, steps: Any) -> Any:
        """Return how many of a tile's first blocks of keys all rows from row `first` on see whole."""
        spec, keys = self.spec, self.config.block_kv
        found = self.kv_len // keys
        offset = self.q_offset if spec.shifted else 0
        if spec.causal:
            found = T.min(found, T.max(first + offset + 1, 0) // keys)
        return T.cast(T.min(found, steps), "int32")


@dataclass(frozen=True, eq=False)
class Claims:
    """The tiles that a block takes, one after the other: its own number first, then those that it claims.

    `numbers` begins with the number of claims of all blocks. Two numbers of each block follow, those that it claimed
    last, by which one warp tells all others.
    """

    block: Any
    blocks: int
    numbers: Any
    full: Any
    free: Any

    def place(self, tile: Any) -> Any:
        """Return where the number of the tile behind the block's tile `tile` stands."""
        return 1 + 2 * self.block + tile % 2

    @T.macro
    def claim(self, tile: Any) -> None:
        """Claim a tile to follow the block's tile `tile`. Run by one warp."""
        T.mbarrier_wait_parity(self.free[tile % 2], tile // 2 % 2 ^ 1)
        if T.shuffle_elect(WARP):
            self.numbers[self.place(tile)] = self.blocks + T.atomic_add(self.numbers[0], 1, return_prev=True)
            T.mbarrier_arrive(self.full[tile % 2])

    @T.macro
    def read(self, tile: Any) -> Any:
        """Return the number of the tile behind the block's tile `tile`."""
        T.mbarrier_wait_parity(self.full[tile % 2], tile // 2 % 2)
        return self.numbers[self.place(tile)]

    @T.macro
    def release(self, tile: Any) -> None:
        """Let the number be overwritten, as far as this warp is concerned."""
        T.sync_warp()
        if T.shuffle_elect(WARP):
            T.mbarrier_arrive(self.free[tile % 2])


@dataclass(frozen=True, eq=False)
class Pipe:
    """A tile of queries, keys or values in shared memory in stages, with barriers that say which are full or free."""

    tiles: Any
    full: Any
    free: Any
    warp: int  # of the producers

    def phase(self, number: Any) -> tuple[Any, Any]:
        """Return the stage of the tile of this number, and the parity of its barriers."""
        stages, number = self.tiles.shape[0], T.cast(number, "uint32")
        return T.cast(number % stages, "int32"), T.cast(number // stages % 2, "int32")

    @T.macro
    def load(self, number: Any, source: Any) -> None:
        """Load the tile of a number, once its stage is free."""
        stage, parity = self.phase(number)
        T.mbarrier_wait_parity(self.free[stage], parity ^ 1)
        T.tma_copy(source, self.tiles[stage, :, :], barrier=self.full[stage], by=WARP * self.warp)
        if T.shuffle_elect(WARP):
            T.mbarrier_arrive(self.full[stage])

    @T.macro
    def wait(self, number: Any) -> None:
        """Wait for the tile of a number."""
        stage, parity = self.phase(number)
        T.mbarrier_wait_parity(self.full[stage], parity)

    @T.macro
    def release(self, number: Any) -> None:
        """Let the tile of a number be overwritten, as far as this warp is concerned."""
        stage, _ = self.phase(number)
        if T.shuffle_elect(WARP):
            T.mbarrier_arrive(self.free[stage])


@dataclass(frozen=True, eq=False)
class Results:
    """Tiles of results in shared memory: one for each consumer, or one that they use one after the other."""

    tiles: Sequence[Any]
    full: Any
    free: Any

    def of(self, index: int) -> int:
        """Return which tile takes the rows of consumer `index`."""
        return index % len(self.tiles)

    @T.macro
    def wait(self, tile: Any, index: int) -> None:
        """Wait until consumer `index` may write its rows of the block's tile `tile`.

        Where consumers share a tile, all of them have been stored since this one wrote: one after the other, as a
        barrier tells a phase from the next one only.
        """
        sharing = self.full.shape[0] // len(self.tiles)
        use = tile * sharing + index // len(self.tiles)
        for earlier in list(range(sharing, 0, -1)):
            if use >= earlier:
                T.mbarrier_wait_parity(self.free[self.of(index)], (use - earlier) % 2)


@dataclass(frozen=True, eq=False)
class Consumer:
    """A warpgroup that multiplies: its fragments, and what it does in a step."""

    index: int
    tiles: Tiles
    claims: Claims
    q: Pipe
    k: Pipe
    v: Pipe
    results: Results
    anchor: Any
    lse: Any
    scale: Any
    scores: Any
    probs: Any
    acc: Any
    result: Any
    row_max: Any
    base: Any
    row_sum: Any
    partial_sums: Any
    rescale: Any

    @property
    def own(self) -> slice:
        """The rows of the warpgroup in a tile."""
        return slice(self.index * OWN, (self.index + 1) * OWN)

    @property
    def consumers(self) -> int:
        """The number of warpgroups that multiply."""
        return self.tiles.config.block_q // OWN

    @T.macro
    def take_tensor_cores(self) -> None:
        """Wait until no other warpgroup starts products."""
        T.sync_threads(TURN + self.index, 2 * WARPGROUP)

    @T.macro
    def pass_tensor_cores(self) -> None:
        """Let the next warpgroup start products."""
        T.named_barrier_arrive(TURN + (self.index + 1) % self.consumers, 2 * WARPGROUP)

    @T.macro
    def start_scores_gemm(self, tile: Any, step: Any) -> None:
        """Start the scores of a tile and a step, which counts the steps of all tiles of the block."""
        slot, _ = self.q.phase(tile)
        stage, _ = self.k.phase(step)
        q_tile, k_tile = self.q.tiles[slot, self.own, :], self.k.tiles[stage, :, :]
        T.wgmma_gemm(q_tile, k_tile, self.scores, transpose_B=True, clear_accum=True)

    @T.macro
    def start_sums_gemm(self, step: Any) -> None:
        """Start the product of a step's weights and values."""
        stage, _ = self.v.phase(step)
        T.wgmma_gemm(self.probs, self.v.tiles[stage, :, :], self.acc)

    @T.macro
    def hide(self, first: Any, key_block: Any) -> None:
        """Hide the scores of keys that the warpgroup's rows, from row `first` on, do not see."""
        spec, keys, tiles = self.tiles.spec, self.tiles.config.block_kv, self.tiles
        for i, j in T.Parallel(OWN, keys):
            query = T.min(first + i, tiles.q_len - 1)
            seen = spec.sees(query, key_block * keys, j, keys, tiles.q_offset, 0, tiles.kv_len)
            self.scores[i, j] = T.if_then_else(seen, self.scores[i, j], -T.infinity(self.scores.dtype))

    @T.macro
    def weigh(self) -> None:
        """Turn scores into weights."""
        spec = self.tiles.spec
        exponentiate(
            self.scores, self.row_max, self.base, self.partial_sums, self.rescale, spec.unit(self.scale) * LOG2_E,
            subtracts=spec.subtracts,
        )  # fmt: skip

    @T.macro
    def run(self) -> None:
        """Compute all tiles of the block, at least one."""
        tiles, total = self.tiles, self.tiles.total
        before: Any = T.alloc_var("int32", 0)  # steps of earlier tiles
        if self.index == self.consumers - 1:
            T.named_barrier_arrive(TURN, 2 * WARPGROUP)
        self.q.wait(0)
        self.k.wait(0)
        self.take_tensor_cores()
        self.start_scores_gemm(0, 0)
        self.pass_tensor_cores()
        number: Any = T.alloc_var("int32", 0)
        claimed: Any = T.alloc_var("int32", self.claims.block)
        while claimed < total:
            sequence, head, member, row = tiles.place(claimed)
            steps, tile = tiles.steps(row), number
            number_behind = T.alloc_var("int32", self.claims.read(tile))
            begin_rows(self.row_max, self.base)
            T.clear(self.partial_sums)
            T.clear(self.acc)
            T.wait_wgmma(0)
            self.k.release(before)
            if steps == 1:
                self.q.release(tile)
            first = row + self.index * OWN
            whole = tiles.whole(first, steps)
            if whole == 0:
                self.hide(first, 0)
            self.weigh()
            T.copy(self.scores, self.probs)
            unmasked = T.max(whole, 1)
            for step in T.serial(unmasked - 1):
                self.take_step(tile, before + step + 1, step == steps - 2, first, 0, False)
            for step in T.serial(steps - unmasked):
                key_block = unmasked + step
                self.take_step(tile, before + key_block, key_block == steps - 1, first, key_block, True)
            before += steps
            self.v.wait(before - 1)
            following = T.shfl_sync(number_behind, 0)
            self.claims.release(tile)
            more = T.if_then_else(following < total, 1, 0)
            if more == 1:
                self.q.wait(tile + 1)
                self.k.wait(before)
            self.take_tensor_cores()
            self.start_sums_gemm(before - 1)
            # The last tile's scores once more, for nothing: the assembler wants products in flight on each path.
            self.start_scores_gemm(tile + more, before - 1 + more)
            self.pass_tensor_cores()
            T.wait_wgmma(1)
            self.v.release(before - 1)
            self.finish(tile, (sequence, head, member), row)
            claimed = following
            number += 1
        T.wait_wgmma(0)

    @T.macro
    def take_step(self, tile: Any, step: Any, is_last: Any, first: Any, key_block: Any, masked: bool) -> None:
        """Weigh the keys of a step, and add up the values of the step before."""
        self.k.wait(step)
        self.v.wait(step - 1)
        self.take_tensor_cores()
        self.start_scores_gemm(tile, step)
        self.start_sums_gemm(step - 1)
        self.pass_tensor_cores()
        T.wait_wgmma(1)
        self.k.release(step)
        if is_last:
            self.q.release(tile)
        if masked:
            self.hide(first, key_block)
        self.weigh()
        # Nothing reads these weights. The assembler would put the wait before all exponentials otherwise.
        T.copy(self.scores[:, 0 : ANCHOR[1]], self.anchor)
        T.wait_wgmma(0)
        self.v.release(step - 1)
        for i, c in T.Parallel(*self.acc.shape):
            self.acc[i, c] *= self.rescale[i]
        T.copy(self.scores, self.probs)

    @T.macro
    def finish(self, tile: Any, place: tuple[Any, ...], row: Any) -> None:
        """Hand the result of a tile to the warp that stores it."""
        spec, first = self.tiles.spec, row + self.index * OWN
        T.reduce_sum(self.partial_sums, self.row_sum, dim=1)
        if spec.lse:
            for i in T.Parallel(OWN):
                if first + i < self.tiles.q_len:
                    self.lse[(*place, first + i)] = self.row_max[i] * spec.unit(self.scale) + T.log(self.row_sum[i])
        for i in T.Parallel(OWN):
            self.rescale[i] = T.if_then_else(self.row_sum[i] == 0.0, 0.0, 1.0 / self.row_sum[i])
        self.results.wait(tile, self.index)
        for i, c in T.Parallel(*self.acc.shape):
            self.result[i, c] = T.cast(self.acc[i, c] * self.rescale[i], spec.dtype)
        T.copy(self.result, self.results.tiles[self.results.of(self.index)])
        T.mbarrier_arrive(self.results.full[self.index])


@jit(pass_configs={"tl.enable_fast_math": True})  # type: ignore[untyped-decorator]
def persistent_attention(config: Config, spec: Spec, slots: int) -> Any:
    """Build the forward kernel of `config.persistent` blocks, which hold `slots` tiles of queries."""
    rows, keys, stages = config.block_q, config.block_kv, config.stages
    accum, narrow = compute_dtype(spec.dtype), spec.dtype
    batch, kv_heads, length, kv_len = T.dynamic("batch, kv_heads, length, kv_len")
    groups = T.dynamic("groups") if spec.grouped else 1
    d, dv = spec.tile_d, spec.tile_dv
    q_shape = (batch, kv_heads, groups, length)
    lse_types = [T.Tensor(q_shape, accum)] if spec.lse else []
    consumers = rows // OWN
    in_all, of_result = consumers * WARPS, consumers if slots > 1 else 1
    of_consumer, of_producer = REGISTERS[consumers]

    @T.prim_func
    def persistent_attention(
        q: strided("q", (*q_shape, d), narrow, multiple=spec.vector),
        k: strided("k", (batch, kv_heads, kv_len, d), narrow, multiple=spec.vector),
        v: strided("v", (batch, kv_heads, kv_len, dv), narrow, multiple=spec.vector),
        *lse: lse_types,
        numbers: T.Tensor((1 + 2 * config.persistent,), "int32"),
        out: spec.out_type((*q_shape, dv)),
        scale: accum,
        q_len: T.int32,
        q_offset: T.int32,
        window: T.int32,
    ):
        with T.Kernel(config.persistent, threads=(consumers + 1) * WARPGROUP) as block:
            blocks = T.min(T.ceildiv(length, rows), MOST // rows)
            all_heads = T.min(batch * kv_heads * groups, MOST_HEADS)
            total = T.min(blocks * all_heads, MOST)
            tiles = Tiles(
                config, spec, total, blocks, all_heads, kv_heads, groups, T.min(q_len, MOST),
                T.min(kv_len, MOST), q_offset,
            )  # fmt: skip
            q_pipe, k_pipe, v_pipe = (
                Pipe(T.alloc_shared((n, *tile), narrow), T.alloc_barrier([1] * n), T.alloc_barrier([in_all] * n), warp)
                for n, tile, warp in (
                    (slots, (rows, d), QUERY_WARP), (stages, (keys, d), QUERY_WARP), (stages, (keys, dv), VALUE_WARP),
                )
            )  # fmt: skip
            results = Results(
                [T.alloc_shared((OWN, dv), narrow) for _ in range(of_result)],
                T.alloc_barrier([WARPGROUP] * consumers), T.alloc_barrier([1] * of_result),
            )  # fmt: skip
            anchors = [T.alloc_shared(ANCHOR, narrow) for _ in range(consumers)]
            claims = Claims(
                block, config.persistent, numbers, T.alloc_barrier([1] * 2), T.alloc_barrier([in_all + 3] * 2),
            )  # fmt: skip
            with T.ws(consumers):
                T.dec_max_nreg(of_producer)
                warp = T.get_warp_idx() - in_all
                number: Any = T.alloc_var("int32", 0)
                tile: Any = T.alloc_var("int32", block)
                before: Any = T.alloc_var("int32", 0)
                if warp <= RESULT_WARP:
                    while tile < total:
                        sequence, head, member, row = tiles.place(tile)
                        steps = tiles.steps(row)
                        if warp == QUERY_WARP:
                            claims.claim(number)
                            q_pipe.load(number, q[sequence, head, member, row, 0])
                            for step in T.serial(steps):
                                k_pipe.load(before + step, k[sequence, head, step * keys, 0])
                        if warp == VALUE_WARP:
                            for step in T.serial(steps):
                                v_pipe.load(before + step, v[sequence, head, step * keys, 0])
                        if warp == RESULT_WARP:
                            for index in list(range(consumers)):
                                which = results.of(index)
                                T.mbarrier_wait_parity(results.full[index], number % 2)
                                T.tma_copy(
                                    results.tiles[which], out[sequence, head, member, row + index * OWN, 0],
                                    by=WARP * RESULT_WARP,
                                )  # fmt: skip
                                T.sync_warp()
                                if T.shuffle_elect(WARP):
                                    T.mbarrier_arrive(results.free[which])
                        before += steps
                        tile = T.shfl_sync(claims.read(number), 0)
                        claims.release(number)
                        number += 1
            for index in list(range(consumers)):
                with T.ws(index):
                    T.inc_max_nreg(of_consumer)
                    scores, probs = T.alloc_fragment((OWN, keys), accum), T.alloc_fragment((OWN, keys), narrow)
                    acc, result = T.alloc_fragment((OWN, dv), accum), T.alloc_fragment((OWN, dv), narrow)
                    row_max, base, row_sum, rescale = (T.alloc_fragment((OWN,), accum) for _ in range(4))
                    partial_sums = T.alloc_fragment((OWN, config.partial_sums), accum)
                    consumer = Consumer(
                        index, tiles, claims, q_pipe, k_pipe, v_pipe, results, anchors[index],
                        lse[0] if lse else None, scale, scores, probs, acc, result, row_max, base, row_sum,
                        partial_sums, rescale,
                    )  # fmt: skip
                    if block < total:
                        consumer.run()

    return persistent_attention


@jit
def clear_claims(blocks: int) -> Any:
    """Build the kernel that sets the number of claims to zero."""

    @T.prim_func
    def clear_claims(numbers: T.Tensor((1 + 2 * blocks,), "int32")):
        with T.Kernel(1, threads=WARP) as _:
            for i in T.Parallel(1):
                numbers[i] = 0

    return clear_claims


def claims_of(config: Config, like: torch.Tensor, machine: Machine) -> torch.Tensor:
    """Return the numbers of `Claims` for a launch, before the first claim."""
    numbers = like.new_empty(1 + 2 * config.persistent, dtype=torch.int32)
    machine.kernel(clear_claims)(config.persistent)(numbers)
    return numbers


def kernel_of(config: Config, spec: Spec, machine: Machine) -> Any:
    """Return `persistent_attention` with two tiles of queries where they fit in shared memory, else with one."""
    slots = 2 if footprint(config, spec, 2).fits(machine.target) else 1
    return machine.kernel(persistent_attention)(config, spec, slots)
