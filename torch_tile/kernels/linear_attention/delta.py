# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule chunk by chunk (arXiv:2412.06464; the WY form of arXiv:2406.06484).

The state of a head is a matrix `[K, V]`: `S[t] = exp(g[t]) S[t-1] + beta[t] k[t] e[t]^T`, where the error `e[t]` is
what `v[t]` is above `exp(g[t]) S[t-1]^T k[t]`. The errors of a chunk solve a triangular system. Its inverse
`(I + D)^-1`, with `D[i, j] = k[i] . k[j] beta[j] exp(g between j and i)` for j < i, turns values less what the state
before the chunk says into errors. So the scan over chunks has products only.

Without the rule (`tile.gated_linear_attention`) values take the place of errors, and there is no triangle. Where each
channel of keys decays by itself, `channels.py` has the products of pairs. It also has keys and queries that have
decayed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import (
    Machine,
    compute_dtype,
    dense_last,
    entry_function,
    has_kernels,
    machine_of,
    vector_of,
)
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.linear_attention.args import GatedDeltaRuleArgs, scale_of, sequences_of
from torch_tile.kernels.linear_attention.channels import channel_decays, channel_pairs
from torch_tile.kernels.linear_attention.delta_torch import NORM_EPS, reference
from torch_tile.kernels.linear_attention.segments import join_segments, scan_segments, segments_for
from torch_tile.kernels.linear_attention.tiles import (
    Config,
    Sizes,
    Spec,
    add_to_state,
    advance_state,
    begin_segment,
    begin_state,
    chunks_of,
    config_for,
    load_decay_sums,
    load_rows,
    load_times,
    most_keys,
    place_of,
    scan_config_for,
    store_inverse,
    store_rows,
    sum_decays,
    values_to_add,
    weigh_times,
)

__all__ = ["Config", "gated_delta_rule", "reference"]

NORM_ROWS = 16  # of a block that normalizes


@library_jit
def chunk_pairs(config: Config, spec: Spec) -> Any:
    """Build the kernel for what a chunk's times do to each other: weights of errors, and the inverse for errors.

    Both are `[B, L, H, chunk]`; the inverse is the last of the others, if errors are learned. The weights
    `scale q[i] . k[j] beta[j] exp(g between j and i)` give outputs. Where nothing is packed, it also does what
    `sum_decays` does.
    """
    s, compute, size, tile = Sizes(config, spec), spec.compute, config.chunk, config.key_tile
    by_tiles = config.staged and not spec.packed  # a bulk copy cannot leave out rows of the next sequence
    given = [s.per_time(), s.per_time()] if spec.packed else [*s.times(), *[s.per_time()] * 4]

    @T.prim_func
    def delta_chunk_pairs(
        q: s.keys("q"),
        k: s.keys("k"),
        *others: [*given, *s.table(), *s.pairs_of_delta()],
        weights: s.pairs(),
        slots: T.int32,
        scale: compute,
    ):
        with T.Kernel(s.h, slots, s.b, threads=config.threads) as (head, slot, bz):
            T.annotate_min_blocks_per_sm(1 if spec.packed else config.blocks)  # guarded stores take registers
            group = head // (s.h // s.g)
            first, count = place_of(s, others[2] if spec.packed else None, slot)
            q_tile = T.alloc_shared((size, tile), spec.dtype)
            k_tile = T.alloc_shared((size, tile), spec.dtype)
            of_keys = T.alloc_fragment((size, size), compute)
            of_queries = T.alloc_fragment((size, size), compute)
            own = T.alloc_shared((size,), compute)
            factor = T.alloc_shared((size,), compute)
            T.clear(of_keys)
            T.clear(of_queries)
            if spec.packed:
                load_times(s, others[0], others[1], (bz, first, count, head), own, factor)
            else:
                load_decay_sums(s, others, (bz, first, count, head), own, factor)
            for n in T.Pipelined(T.ceildiv(s.k, tile), num_stages=config.stages):
                at = n * tile
                T.copy(q[bz, first : first + size, group, at : at + tile], q_tile)
                T.copy(k[bz, first : first + size, group, at : at + tile], k_tile)
                if spec.delta:
                    T.gemm(k_tile, k_tile, of_keys, transpose_B=True)
                T.gemm(q_tile, k_tile, of_queries, transpose_B=True)
            for i, j in T.Parallel(size, size):
                path = T.logical_and(i >= j, i < count)
                weight = T.exp2(T.if_then_else(path, own[i] - own[j], 0.0)) * factor[j]
                if spec.delta:
                    of_keys[i, j] = T.if_then_else(T.logical_and(i > j, path), of_keys[i, j] * weight, 0.0)
                of_queries[i, j] = T.if_then_else(path, of_queries[i, j] * weight * scale, 0.0)
            weight_tile = T.alloc_shared((size, size), spec.dtype) if by_tiles else of_queries
            if by_tiles:
                T.copy(of_queries, weight_tile)
            store_rows(s, weight_tile, weights, (bz, first, count, head, 0))
            if spec.delta:
                lower = T.alloc_shared((size, size), compute)
                T.copy(of_keys, lower)
                store_inverse(s, lower, others[-1], (bz, first, count, head, 0))

    return delta_chunk_pairs


@library_jit
def scan_states(config: Config, spec: Spec) -> Any:
    """Build the kernel for the errors of all times `[B, L, H, V]`, the state before each chunk, and the last one.

    A block has all keys and some values of a head, and goes from chunk to chunk. Without the delta rule values are
    what is learned, and no errors are stored. Where channels decay, `k` holds keys that have decayed since the chunk's
    start. `later` holds keys that decay until its end.
    """
    s, compute, size, rows, columns = Sizes(config, spec), spec.compute, config.chunk, config.keys, config.value_tile
    more = [*s.later_keys(), *s.pairs_of_delta()]
    more += [s.like_values()] if spec.delta else []
    segments = config.segments
    by_tiles = config.staged and not spec.packed  # a bulk copy cannot leave out rows of the next sequence

    @T.prim_func
    def delta_scan_states(
        k: s.keys("k"),
        v: s.values("v"),
        seen: s.per_time(),
        left: s.per_time(),
        *others: [*s.starts(), *s.table(), *more, *s.states_before_scan()],
        states: s.states(),
        last: s.state_of_sequences(),
    ):
        with T.Kernel(T.ceildiv(s.v, columns), s.h, s.sequences * segments, threads=config.threads) as (
            bx,
            head,
            place,
        ):
            (sequence, segment, group, at), (bz, begin, chunks) = chunks_of(s, others, (bx, head, place), columns)
            at_more = 2 if spec.packed else 0
            k_tile = T.alloc_shared((size, rows), spec.dtype)
            v_tile = T.alloc_shared((size, columns), spec.dtype)
            state_tile = T.alloc_shared((rows, columns), spec.dtype)
            weighed = T.alloc_shared((size, columns), spec.dtype)
            seen_tile = T.alloc_shared((size,), compute)
            left_tile = T.alloc_shared((size,), compute)
            own = T.alloc_shared((size,), compute) if spec.packed else seen_tile
            factor = T.alloc_shared((size,), compute) if spec.packed else left_tile
            state = T.alloc_fragment((rows, columns), compute)
            said = T.alloc_fragment((size, columns), compute)
            found = T.alloc_fragment((size, columns), compute)
            found_tile = T.alloc_shared((size, columns), spec.dtype) if by_tiles else found
            if spec.channels:
                later = T.alloc_shared((size, rows), spec.dtype)
                keeps = T.alloc_shared((rows,), compute)
            if spec.delta:
                inverse = T.alloc_shared((size, size), spec.dtype)
                rest = T.alloc_shared((size, columns), spec.dtype)
            if segments == 1:
                begin_state(s, others, state, (sequence, head, at))
            else:
                begin_segment(s, others, state, (sequence, segment, head, at))
            for n in T.Pipelined(chunks, num_stages=config.stages):
                first, count = place_of(s, others[1] if spec.packed else None, begin + n)
                T.copy(k[bz, first : first + size, group, 0:rows], k_tile)
                T.copy(v[bz, first : first + size, head, at : at + columns], v_tile)
                T.copy(seen[bz, head, first : first + size], seen_tile)
                T.copy(left[bz, head, first : first + size], left_tile)
                if spec.channels:
                    T.copy(others[at_more][bz, first : first + size, head, 0:rows], later)
                    for i in T.Parallel(rows):
                        log = others[at_more + 1][bz, first + count - 1, head, T.min(i, s.k - 1)]
                        keeps[i] = T.if_then_else(i < s.k, T.exp2(log), 0.0)
                if spec.delta or config.staged:
                    T.copy(state, state_tile)
                T.copy(state_tile if config.staged else state, states[bz, begin + n, head, 0:rows, at : at + columns])
                keep = weigh_times(s, seen_tile, left_tile, count, own, factor)
                for i, j in T.Parallel(rows, columns):
                    state[i, j] *= keeps[i] if spec.channels else keep
                if spec.delta:
                    T.copy(
                        others[at_more + (2 if spec.channels else 0)][bz, first : first + size, head, 0:size], inverse
                    )
                    T.gemm(k_tile, state_tile, said, clear_accum=True)
                    for i, j in T.Parallel(size, columns):
                        rest[i, j] = T.cast(T.cast(v_tile[i, j], compute) - own[i] * said[i, j], spec.dtype)
                    T.gemm(inverse, rest, found, clear_accum=True)
                    for i, j in T.Parallel(size, columns):
                        weighed[i, j] = T.cast(found[i, j] * factor[i], spec.dtype)
                    if by_tiles:
                        T.copy(found, found_tile)
                    store_rows(s, found_tile, others[at_more + len(more) - 1], (bz, first, count, head, at))
                else:
                    for i, j in T.Parallel(size, columns):
                        value = T.if_then_else(i < count, T.cast(v_tile[i, j], compute), 0.0)
                        weighed[i, j] = T.cast(value * factor[i], spec.dtype)
                T.gemm(later if spec.channels else k_tile, weighed, state, transpose_A=True)
            if segment == segments - 1:
                T.copy(state, last[sequence, head, 0:rows, at : at + columns])

    return delta_scan_states


@library_jit
def chunk_outputs(config: Config, spec: Spec) -> Any:
    """Build the kernel for outputs: queries times the state before the chunk, and weights times the chunk's errors."""
    s, compute, size, tile, columns = Sizes(config, spec), spec.compute, config.chunk, config.key_tile, config.key_tile

    @T.prim_func
    def delta_chunk_outputs(
        q: s.keys("q"),
        weights: s.pairs(),
        decays: s.per_time(),
        errors: s.errors(),
        states: s.states(),
        *others: s.table(),
        out: s.like_values(),
        slots: T.int32,
        scale: compute,
    ):
        tiles = T.ceildiv(s.v, columns)
        with T.Kernel(s.h * tiles, slots, s.b, threads=config.threads) as (bx, slot, bz):
            head, at = bx // tiles, bx % tiles * columns
            group = head // (s.h // s.g)
            first, count = place_of(s, others[0] if spec.packed else None, slot)
            q_tile = T.alloc_shared((size, tile), spec.dtype)
            state_tile = T.alloc_shared((tile, columns), spec.dtype)
            weight_tile = T.alloc_shared((size, size), spec.dtype)
            error_tile = T.alloc_shared((size, columns), spec.dtype)
            own = T.alloc_shared((size,), compute)
            acc = T.alloc_fragment((size, columns), compute)
            T.clear(acc)
            for i in T.Parallel(size):
                time = T.min(first + i, s.length - 1)
                own[i] = T.if_then_else(i < count, T.exp2(decays[bz, head, time]) * scale, 0.0)
            for n in T.Pipelined(T.ceildiv(s.k, tile), num_stages=config.stages):
                T.copy(q[bz, first : first + size, group, n * tile : n * tile + tile], q_tile)
                T.copy(states[bz, slot, head, n * tile : n * tile + tile, at : at + columns], state_tile)
                T.gemm(q_tile, state_tile, acc)
            for i, j in T.Parallel(size, columns):
                acc[i, j] *= own[i]
            T.copy(weights[bz, first : first + size, head, 0:size], weight_tile)
            T.copy(errors[bz, first : first + size, head, at : at + columns], error_tile)
            T.gemm(weight_tile, error_tile, acc)
            store_rows(s, acc, out, (bz, first, count, head, at))

    return delta_chunk_outputs


@library_jit
def scan_outputs(config: Config, spec: Spec) -> Any:
    """Build the kernel for outputs and the last state, where no channel decays and nothing is packed.

    A block has all keys and `config.fused_values` values of a head, and goes from chunk to chunk. The state is
    transposed, `[V, K]`: then each product's result is the next one's operand in the same registers. Shared memory
    holds only what is loaded ahead. States and errors are not stored, since the gradient's own scan finds them again.

    Of several segments each joins what `scan_segments` found of those before it. The last one stores its own state.
    """
    s, compute, size, rows, columns = Sizes(config, spec), spec.compute, config.chunk, config.keys, config.fused_values
    segments = config.segments
    segment_types, parts = s.segment_types() if segments > 1 else [], len(s.pairs_of_delta())

    @T.prim_func
    def delta_scan_outputs(
        q: s.keys("q"),
        k: s.keys("k"),
        v: s.values("v"),
        seen: s.per_time(),
        left: s.per_time(),
        weights: s.pairs(),
        *others: [*s.pairs_of_delta(), *segment_types, *s.initial()],
        out: s.like_values(),
        last: s.state_of_sequences(),
        slots: T.int32,
        scale: compute,
    ):
        with T.Kernel(T.ceildiv(s.v, columns), s.h, s.sequences * segments, threads=config.threads) as (
            bx,
            head,
            place,
        ):
            (_, segment, group, at), (bz, begin, chunks) = chunks_of(s, others, (bx, head, place), columns, slots)
            k_tile = T.alloc_shared((size, rows), spec.dtype)
            q_tile = T.alloc_shared((size, rows), spec.dtype)
            v_tile = T.alloc_shared((size, columns), spec.dtype)
            weight_tile = T.alloc_shared((size, size), spec.dtype)
            own = T.alloc_shared((size,), compute)
            factor = T.alloc_shared((size,), compute)
            out_tile = T.alloc_shared((size, columns), spec.dtype)
            state = T.alloc_fragment((columns, rows), compute)
            before = T.alloc_fragment((columns, rows), spec.dtype)
            results = T.alloc_fragment((size, columns), spec.dtype)
            errors = T.alloc_fragment((columns, size), spec.dtype)
            acc = T.alloc_fragment((columns, size), compute)
            inverse = T.alloc_shared((size, size), spec.dtype)
            said = T.alloc_fragment((columns, size), compute)
            begin_state(s, others, state, (bz, head, at), transposed=True)
            if segments > 1:
                own_states, transitions = others[parts : parts + 2]
                own_tile = T.alloc_shared((columns, rows), compute)
                transition = T.alloc_shared((rows, rows), spec.dtype)
                for m in T.Pipelined(segment, num_stages=1):
                    T.copy(own_states[bz, m, head, at : at + columns, 0:rows], own_tile)
                    T.copy(transitions[bz, m, head, 0:rows, 0:rows], transition)
                    advance_state(state, before, own_tile, transition)
            for n in T.Pipelined(chunks, num_stages=config.stages):
                first, count = place_of(s, None, begin + n)
                T.copy(k[bz, first : first + size, group, 0:rows], k_tile)
                T.copy(q[bz, first : first + size, group, 0:rows], q_tile)
                T.copy(v[bz, first : first + size, head, at : at + columns], v_tile)
                T.copy(seen[bz, head, first : first + size], own)
                T.copy(left[bz, head, first : first + size], factor)
                T.copy(weights[bz, first : first + size, head, 0:size], weight_tile)
                T.copy(state, before)
                keep = weigh_times(s, own, factor, count, own, factor)
                if spec.delta:
                    T.copy(others[0][bz, first : first + size, head, 0:size], inverse)
                    T.gemm(before, k_tile, said, transpose_B=True, clear_accum=True)
                T.gemm(before, q_tile, acc, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(columns, rows):
                    state[i, j] *= keep
                added = values_to_add(s, v_tile, inverse, own, said)
                for i, j in T.Parallel(columns, size):  # while the errors are found
                    acc[i, j] *= own[j] * scale
                for i, j in T.Parallel(columns, size):
                    errors[i, j] = T.cast(added[i, j] if spec.delta else added[j, i], spec.dtype)
                T.gemm(errors, weight_tile, acc, transpose_B=True)
                add_to_state(s, added, factor, k_tile, state)
                for i, j in T.Parallel(columns, size):
                    results[j, i] = T.cast(acc[i, j], spec.dtype)
                T.copy(results, out_tile)
                store_rows(s, out_tile, out, (bz, first, count, head, at))
            if segment == segments - 1:
                for i, j in T.Parallel(columns, rows):
                    if T.logical_and(j < s.k, at + i < s.v):
                        last[bz, head, j, at + i] = state[i, j]

    return delta_scan_outputs


@library_jit
def normalize_rows(config: Config, spec: Spec) -> Any:
    """Build the kernel that divides each row of `[B, L, G, K]` by its length."""
    s, compute, columns = Sizes(config, spec), spec.compute, config.keys

    @T.prim_func
    def delta_normalize_rows(x: s.keys("x"), out: T.Tensor((s.b, s.length, s.g, s.k), spec.dtype)):
        with T.Kernel(T.ceildiv(s.length, NORM_ROWS), s.g, s.b, threads=config.threads) as (bx, group, bz):
            tile = T.alloc_fragment((NORM_ROWS, columns), compute)
            squares = T.alloc_fragment((NORM_ROWS, columns), compute)
            total = T.alloc_fragment((NORM_ROWS,), compute)
            load_rows(s, x, tile, (bz, bx * NORM_ROWS, group))
            for i, j in T.Parallel(NORM_ROWS, columns):
                squares[i, j] = tile[i, j] * tile[i, j]
            T.reduce_sum(squares, total, dim=1)
            for i, j in T.Parallel(NORM_ROWS, columns):
                value = tile[i, j] / T.sqrt(total[i] + NORM_EPS)
                out[bz, bx * NORM_ROWS + i, group, j] = T.cast(value, spec.dtype)

    return delta_normalize_rows


class Chunks:
    """The tensors of one call that all its kernels share.

    grown_q, grown_k, later: queries and keys to multiply states with. Where channels decay, they have decayed since the
    start of their chunk, or decay until its end; elsewhere the kernels weigh rows, and they are q, k and k.
    reads: keys `[B, L, H, K]` that errors come from, if not from k; where channels decay.
    gradients: whether gradients are asked, whose segments differ.
    """

    def __init__(
        self,
        machine: Machine,
        args: Any,
        config: Config | None,
        *dense: torch.Tensor,
        reads: torch.Tensor | None = None,
        gradients: bool = False,
    ) -> None:
        self.machine, self.args, self.scale = machine, args, scale_of(args)
        self.v = dense_last(args.v)
        self.batch, self.length, self.heads, self.values = args.v.shape
        self.groups, self.keys = args.k.shape[2:]
        channels = args.g.dim() == 4
        q, k = dense_last(args.q), dense_last(args.k)
        self.reads = [] if reads is None else [dense_last(reads)]
        dense = *dense, *self.reads
        sizes, vectors = (self.keys, self.values), self.machine.is_gpu
        vector = vector_of((q, k, self.v, *dense), sizes) if vectors else 1
        whole = None if config is None else replace(config, segments=1)
        self.config = whole or config_for(args.v.dtype, self.keys, self.machine, channels, bulk=vector > 1)
        self.compute = compute_dtype(args.v.dtype)
        self.sequences, size = sequences_of(args), self.config.chunk
        states = self.sequences * self.heads
        packed = args.cu_seqlens is not None
        self.slots = self.length // size + self.sequences if packed else -(-self.length // size)
        self.segment_config = self.config
        if self.config.fused_values and not (packed or channels):
            segments = segments_for(self.config, self.machine, states, self.values, self.slots, gradients)
            self.segment_config = config or replace(self.config, segments=segments)
        self.scan_config = self.segment_config
        if config is None:
            states *= self.segment_config.segments
            self.scan_config = scan_config_for(self.segment_config, self.machine, states, self.values, packed)
        starts = args.cu_seqlens.dtype if packed else None
        beta = None if args.beta is None else args.beta.dtype
        facts = args.v.dtype, args.g.dtype, beta, None, starts, vector, channels, bool(self.reads)
        self.spec = Spec(*facts, shared=self.groups < self.heads)
        self.given = q, k
        self.q, self.k = (self.normalized(t) for t in (q, k)) if args.use_qk_l2norm else (q, k)
        self.starts = [args.cu_seqlens] if packed else []
        self.table = [q.new_empty((self.slots + 1, 2), dtype=torch.int32)] if packed else []
        self.decays, self.betas, self.seen, self.left = (self.per_time() for _ in range(4))
        times = [] if channels else [args.g]
        times += [] if args.beta is None else [args.beta]
        sums = self.decays, self.betas, self.seen, self.left
        self.times = [*times, *sums]  # `chunk_pairs` adds up the decays of whole rows itself
        if packed or channels:
            self.run(sum_decays, *times, *self.starts, *self.table, *sums, self.slots, self.length)
            self.times = [self.decays, self.betas]
        self.grown_q, self.grown_k, self.later = self.q, self.k, self.k
        self.sums: list[torch.Tensor] = []
        if channels:
            shape = self.batch, self.length, self.heads, self.keys
            self.sums = [self.empty(*shape)]
            self.grown_q, self.grown_k, self.later = (self.empty(*shape, dtype=self.v.dtype) for _ in range(3))
            made = *self.sums, self.grown_q, self.grown_k, self.later
            self.run(channel_decays, self.q, self.k, args.g, *self.table, *self.reads, *made, self.slots)

    @property
    def later_keys(self) -> list[torch.Tensor]:
        """Return keys that decay until their chunk's end, and the decays of channels; none where no channel decays."""
        return [self.later, *self.sums] if self.sums else []

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocate a tensor, in the dtype of sums if none is given."""
        return self.v.new_empty(shape, dtype=dtype or self.compute)

    def per_time(self) -> torch.Tensor:
        """Allocate numbers for each time, `[B, H, padded]`: rows are whole chunks, which bulk copies can load."""
        return self.empty(self.batch, self.heads, -(-self.length // self.config.chunk) * self.config.chunk)

    def pairs(self) -> torch.Tensor:
        """Allocate numbers for each time and the times of its chunk, `[B, L, H, chunk]`."""
        return self.empty(self.batch, self.length, self.heads, self.config.chunk, dtype=self.v.dtype)

    def states(self) -> torch.Tensor:
        """Allocate states, one for each chunk and one more."""
        return self.empty(self.batch, self.slots + 1, self.heads, self.keys, self.values, dtype=self.v.dtype)

    def segment_states(self) -> torch.Tensor:
        """Allocate transposed states, one for each segment."""
        return self.empty(self.batch, self.segment_config.segments, self.heads, self.values, self.keys)

    def run(self, kernel: Any, *operands: Any, spec: Spec | None = None, config: Config | None = None) -> None:
        """Launch a kernel."""
        self.machine.kernel(kernel)(config or self.config, spec or self.spec)(*operands)

    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        """Divide rows by their length."""
        out = self.empty(self.batch, self.length, self.groups, self.keys, dtype=x.dtype)
        self.run(normalize_rows, x, out)
        return out

    def pairs_of_chunks(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Compute the inverse for errors, in a list that is empty without the delta rule, and weights of errors."""
        inverses, weights = [self.pairs()] if self.spec.delta else [], self.pairs()
        operands = *self.table, *self.reads, *inverses, weights, self.slots, self.scale
        if self.sums:
            self.run(channel_pairs, self.q, self.k, *self.sums, self.betas, *operands)
        else:
            self.run(chunk_pairs, self.q, self.k, *self.times, *operands)
        return inverses, weights

    def outputs(
        self, inverses: list[torch.Tensor], weights: torch.Tensor, out: torch.Tensor, last: torch.Tensor
    ) -> None:
        """Write outputs and the last state."""
        spec = self.spec
        if self.config.fused_values and not (spec.channels or spec.packed):
            initial, spec = self.initial()
            found = self.segment_parts(inverses) if self.segment_config.segments > 1 else []
            operands = self.q, self.k, self.v, self.seen, self.left, weights, *inverses, *found, *initial
            results = out, last, self.slots, self.scale
            self.run(scan_outputs, *operands, *results, spec=spec, config=self.segment_config)
            return
        errors, states = self.scan(inverses, last)
        operands = self.grown_q, weights, self.decays, errors, states, *self.table, out
        self.run(chunk_outputs, *operands, self.slots, self.scale)

    def initial(self) -> tuple[list[torch.Tensor], Spec]:
        """Return the states before the first chunk, in a list that is empty without them, and the facts with them."""
        given = self.args.initial_state
        return ([], self.spec) if given is None else ([given], replace(self.spec, initial=given.dtype))

    def states_before(self, inverses: list[torch.Tensor], more: int = 0) -> tuple[list[torch.Tensor], Spec]:
        """Compute the transposed states before segments, as `initial`; `more` of 1 adds the last transition."""
        if self.segment_config.segments == 1:
            return self.initial()
        own, self.transitions = self.segment_parts(inverses, more)
        initial, spec = self.initial()
        return [self.states_from_segments(own, initial, spec)], self.spec

    def segment_parts(self, inverses: list[torch.Tensor], more: int = 0) -> list[torch.Tensor]:
        """Compute what segments add to a state of 0, and their transitions; of the last one if `more` is 1."""
        config = self.segment_config
        shape = self.batch, config.segments - 1 + more, self.heads
        own = self.empty(*shape, self.values, self.keys)
        transitions = self.empty(*shape, self.keys, self.keys, dtype=self.v.dtype)
        operands = self.k, self.v, self.seen, self.left, *inverses
        self.run(scan_segments, *operands, own, transitions, self.slots, spec=self.initial()[1], config=config)
        return [own, transitions]

    def states_from_segments(self, own: torch.Tensor, given: list[torch.Tensor], spec: Spec) -> torch.Tensor:
        """Compute the transposed states before segments, or gradients of those behind, from those from 0."""
        out = self.segment_states()
        self.run(join_segments, own, self.transitions, *given, out, spec=spec, config=self.segment_config)
        return out

    def scan(self, inverses: list[torch.Tensor], last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute errors, which are values without the delta rule, and the states before chunks, and write `last`."""
        errors = [torch.empty_like(self.v, memory_format=torch.contiguous_format)] if inverses else []
        states, (before, spec) = self.states(), self.states_before(inverses, more=1)
        others = *self.starts, *self.table, *self.later_keys, *inverses, *errors, *before
        operands = self.grown_k, self.v, self.seen, self.left, *others, states, last
        self.run(scan_states, *operands, spec=spec, config=self.scan_config)
        return errors[0] if errors else self.v, states


def fits(args: Any) -> bool:
    """Return whether there are kernels for the call: none for empty tensors and for very many keys."""
    return (
        has_kernels(args.v) and bool(args.q.numel() and args.v.numel()) and args.q.shape[3] <= most_keys(args.v.dtype)
    )


def empty_results(args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the outputs and the last states."""
    shape = sequences_of(args), args.v.shape[2], args.k.shape[3], args.v.shape[3]
    return args.v.new_empty(args.v.shape), args.v.new_empty(shape, dtype=compute_dtype(args.v.dtype))


@entry_function(GatedDeltaRuleArgs, reference, empty_results)
def gated_delta_rule(
    args: GatedDeltaRuleArgs[Any],
    out: torch.Tensor,
    final_state: torch.Tensor,
    config: Config | None = None,
    reads: torch.Tensor | None = None,
) -> bool:
    """Compute the rule as `reference` does. `config` overrides the tiling. A call with `reads` must have kernels."""
    if not fits(args):
        return False
    chunks = Chunks(machine_of(args.v), args, config, out, reads=reads)
    inverses, weights = chunks.pairs_of_chunks()
    chunks.outputs(inverses, weights, out, final_state)
    return True
