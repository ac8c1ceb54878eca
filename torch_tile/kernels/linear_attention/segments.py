# SPDX-License-Identifier: Apache-2.0
"""Scans of linear attention in segments of a sequence, for calls with too few heads to fill a GPU.

What a segment makes of a state `[V, K]` is linear: `S X + own`, with a transition `X` of the segment and what the
segment adds to a state of 0. All segments find both at once. Then all compute their outputs at once; each first joins
what those before it found. Gradients join all segments by a short scan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch_tile.language as T
from torch_tile.kernels.common import Machine, power_within, typical
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.linear_attention.tiles import (
    MOST_VALUES,
    Config,
    Sizes,
    Spec,
    add_to_state,
    advance_state,
    begin_state,
    place_of,
    values_to_add,
    weigh_times,
)

SHORTEST = 4  # chunks of a segment
SHORTEST_OF_GRADIENTS = 6  # which are joined twice
FEWEST_CHUNKS = 20  # of a sequence that is cut: the joins of 16 take longer than its segments save
FEWEST, MOST = 4, 16  # segments of a sequence
BLOCKS = 2  # of `scan_segments` on a multiprocessor


@dataclass(frozen=True)
class Problem:
    """The sizes that the number of segments depends on: states of all sequences and heads, and chunks of each."""

    states: int
    values: int
    chunks: int


def segments_for(
    config: Config, machine: Machine, states: int, values: int, chunks: int, gradients: bool = False
) -> int:
    """Return into how many segments to cut each sequence, a power of two: as many as run at once, 1 if few do.

    States in registers alone are cut: two scans of all segments take longer than one of the whole sequence otherwise.
    A block of gradients has more values, and so each head more segments.
    """
    if not config.fused_values:
        return 1
    sizes = typical(Problem(states, values, chunks))
    blocks = sizes.states * -(-sizes.values // (MOST_VALUES if gradients else config.fused_values))
    shortest = SHORTEST_OF_GRADIENTS if gradients else SHORTEST
    segments = power_within(min(machine.num_sms // max(1, blocks), sizes.chunks // shortest, MOST))
    return segments if segments >= FEWEST and sizes.chunks >= FEWEST_CHUNKS else 1


@library_jit
def scan_segments(config: Config, spec: Spec) -> Any:
    """Build the kernel for transitions of the first segments, `[K, K]`, and for what they add to a state of 0.

    A sequence has as many of both as the results have room for.
    Both are one scan of rows `[K]`, the state's for each value. Behind the blocks of values come those of transitions.
    They begin with the identity, and values that they read are behind the last one and so 0.
    """
    s, compute, size, rows, columns = Sizes(config, spec), spec.compute, config.chunk, config.keys, config.fused_values
    segments, segment_types = s.segments, s.segment_types()

    @T.prim_func
    def delta_scan_segments(
        k: s.keys("k"),
        v: s.values("v"),
        seen: s.per_time(),
        left: s.per_time(),
        *others: s.pairs_of_delta(),
        own_states: segment_types[0],
        transitions: segment_types[1],
        slots: T.int32,
    ):
        tiles = T.ceildiv(s.v, columns)
        blocks = tiles + T.ceildiv(s.k, columns)
        with T.Kernel(blocks, s.h, s.sequences * segments, threads=config.threads) as (bx, head, place):
            T.annotate_min_blocks_per_sm(BLOCKS)
            bz, segment = place // segments, place % segments
            group, at, row = head // (s.h // s.g), bx * columns, (bx - tiles) * columns
            run = T.ceildiv(slots, config.segments)
            # The identity stands for the first segment's transition of a state of 0.
            skips = T.logical_and(segment == 0, bx >= tiles) if spec.initial is None else False
            chunks = T.if_then_else(skips, 0, T.max(T.min(run, slots - segment * run), 0))
            k_tile = T.alloc_shared((size, rows), spec.dtype)
            v_tile = T.alloc_shared((size, columns), spec.dtype)
            own = T.alloc_shared((size,), compute)
            factor = T.alloc_shared((size,), compute)
            state = T.alloc_fragment((columns, rows), compute)
            inverse = T.alloc_shared((size, size), spec.dtype)
            before = T.alloc_fragment((columns, rows), spec.dtype)
            said = T.alloc_fragment((columns, size), compute)
            for i, j in T.Parallel(columns, rows):
                state[i, j] = T.if_then_else(row + i == j, 1.0, 0.0)  # of values all are 0, as their rows are below 0
            for n in T.Pipelined(chunks, num_stages=config.stages):
                first, count = place_of(s, None, segment * run + n)
                T.copy(k[bz, first : first + size, group, 0:rows], k_tile)
                T.copy(v[bz, first : first + size, head, at : at + columns], v_tile)
                T.copy(seen[bz, head, first : first + size], own)
                T.copy(left[bz, head, first : first + size], factor)
                if spec.delta:
                    T.copy(others[0][bz, first : first + size, head, 0:size], inverse)
                    T.copy(state, before)
                    T.gemm(before, k_tile, said, transpose_B=True, clear_accum=True)
                keep = weigh_times(s, own, factor, count, own, factor)
                for i, j in T.Parallel(columns, rows):
                    state[i, j] *= keep
                add_to_state(s, values_to_add(s, v_tile, inverse, own, said), factor, k_tile, state)
            if bx < tiles:
                T.copy(state, own_states[bz, segment, head, at : at + columns, 0:rows])
            else:
                T.copy(state, transitions[bz, segment, head, row : row + columns, 0:rows])

    return delta_scan_segments


@library_jit
def join_segments(config: Config, spec: Spec) -> Any:
    """Build the kernel for the state `[V, K]` before each segment, from what `scan_segments` found.

    In reverse it finds the gradient of the state behind each segment. What `scan_gradients` found apart takes the place
    of what a segment adds.
    """
    s, compute, rows, columns = Sizes(config, spec), spec.compute, config.keys, config.fused_values
    segment_types, size, reverse = s.segment_types(), config.segments, spec.reverse

    @T.prim_func
    def delta_join_segments(
        own_states: segment_types[0],
        transitions: segment_types[1],
        *others: s.initial(),
        segment_states: s.segment_states(),
    ):
        with T.Kernel(T.ceildiv(s.v, columns), s.h, s.sequences, threads=config.threads) as (bx, head, bz):
            at = bx * columns
            own_tile = T.alloc_shared((columns, rows), compute)
            transition = T.alloc_shared((rows, rows), spec.dtype)
            state = T.alloc_fragment((columns, rows), compute)
            before = T.alloc_fragment((columns, rows), spec.dtype)
            stored = T.alloc_shared((columns, rows), compute)  # bulk copies need no registers for addresses
            begin_state(s, others, state, (bz, head, at), transposed=True)
            for n in T.Pipelined(size - 1, num_stages=config.stages):
                segment = size - 1 - n if reverse else n
                T.copy(own_states[bz, segment, head, at : at + columns, 0:rows], own_tile)
                T.copy(transitions[bz, segment, head, 0:rows, 0:rows], transition)
                T.copy(state, stored)
                T.copy(stored, segment_states[bz, segment, head, at : at + columns, 0:rows])
                advance_state(state, before, own_tile, transition, reverse)
            T.copy(state, segment_states[bz, 0 if reverse else size - 1, head, at : at + columns, 0:rows])

    return delta_join_segments
