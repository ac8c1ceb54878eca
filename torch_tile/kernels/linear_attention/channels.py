# SPDX-License-Identifier: Apache-2.0
"""Linear attention whose keys decay channel by channel (GLA, arXiv:2312.06635; Kimi delta attention, arXiv:2510.26692).

The product of two times has a decay in each of its terms. A chunk is cut into blocks of `base` times. For a block and
all times before it, decays are split at the block's start: each side decays towards it, so that no factor is above 1.
Within a block the terms are added up one by one. Decays are exponents of 2.
"""

from __future__ import annotations

from typing import Any

import torch_tile.language as T
from torch_tile.kernels.common import LOG2_E, strided
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.linear_attention.tiles import Config, Sizes, Spec, place_of, store_inverse, store_rows


@library_jit
def channel_decays(config: Config, spec: Spec) -> Any:
    """Build the kernel for decays of channels from the start of each chunk, `[B, L, H, K]`.

    It also stores queries and keys that have decayed since then, and keys that decay until the chunk's end. Keys that
    only read the state, the last of the others, have decayed in place of those that it learns.
    """
    s, compute, size, tile = Sizes(config, spec), spec.compute, config.chunk, config.channel_tile

    @T.prim_func
    def delta_channel_decays(
        q: s.keys("q"),
        k: s.keys("k"),
        g: strided("g", (s.b, s.length, s.h, s.k), spec.g, unit=False),
        *others: [*s.table(), *s.reads()],
        sums: s.of_channels(),
        grown_q: s.keys_of_heads(),
        grown_k: s.keys_of_heads(),
        later: s.keys_of_heads(),
        slots: T.int32,
    ):
        tiles = T.ceildiv(s.k, tile)
        with T.Kernel(s.h * tiles, slots, s.b, threads=config.threads) as (bx, slot, bz):
            head, at = bx // tiles, bx % tiles * tile
            first, count = place_of(s, others[0] if spec.packed else None, slot)
            logs = T.alloc_shared((size, tile), compute)
            for i, j in T.Parallel(size, tile):
                given = g[bz, T.min(first + i, s.length - 1), head, T.min(at + j, s.k - 1)]
                logs[i, j] = T.if_then_else(i < count, T.cast(given, compute) * LOG2_E, 0.0)
            T.cumsum(logs, dim=0)
            for i, j in T.Parallel(size, tile):
                time, column = first + i, at + j
                if T.logical_and(i < count, column < s.k):
                    key, grown = T.cast(k[bz, time, head, column], compute), T.exp2(logs[i, j])
                    query = T.cast(q[bz, time, head, column], compute)
                    sums[bz, time, head, column] = logs[i, j]
                    grown_q[bz, time, head, column] = T.cast(query * grown, spec.dtype)
                    read = T.cast(others[-1][bz, time, head, column], compute) if spec.reads else key
                    grown_k[bz, time, head, column] = T.cast(read * grown, spec.dtype)
                    later[bz, time, head, column] = T.cast(key * T.exp2(logs[size - 1, j] - logs[i, j]), spec.dtype)

    return delta_channel_decays


@T.macro
def load_chunk(s: Any, x: Any, tile: Any, place: tuple[Any, ...]) -> None:
    """Load some columns of a chunk's rows from a tensor `[B, L, H, K]`; 0 behind its last time and column."""
    bz, first, count, head, at = place
    rows, columns = tile.shape
    for i, j in T.Parallel(rows, columns):
        inside = T.logical_and(i < count, at + j < s.k)
        value = x[bz, T.min(first + i, s.length - 1), head, T.min(at + j, s.k - 1)]
        tile[i, j] = T.if_then_else(inside, value, T.cast(0.0, tile.dtype))


@T.macro
def load_decays(s: Any, sums: Any, logs: Any, place: tuple[Any, ...]) -> None:
    """Load some columns of a chunk's decays; behind its last time nothing decays any more."""
    bz, first, count, head, at = place
    rows, columns = logs.shape
    for i, j in T.Parallel(rows, columns):
        time = T.min(first + T.min(i, T.max(count - 1, 0)), s.length - 1)
        logs[i, j] = T.if_then_else(at + j < s.k, sums[bz, time, head, T.min(at + j, s.k - 1)], 0.0)


@library_jit
def channel_pairs(config: Config, spec: Spec) -> Any:
    """Build the kernel for weights of errors and the inverse, as `chunk_pairs` of `delta.py`, where channels decay."""
    s, compute, size, tile, block = Sizes(config, spec), spec.compute, config.chunk, config.channel_tile, config.base

    @T.prim_func
    def delta_channel_pairs(
        q: s.keys("q"),
        k: s.keys("k"),
        sums: s.of_channels(),
        betas: s.per_time(),
        *others: [*s.table(), *s.reads(), *s.pairs_of_delta()],
        weights: s.pairs(),
        slots: T.int32,
        scale: compute,
    ):
        with T.Kernel(s.h, slots, s.b, threads=config.threads) as (head, slot, bz):
            first, count = place_of(s, others[0] if spec.packed else None, slot)
            q_tile = T.alloc_shared((size, tile), spec.dtype)
            k_tile = T.alloc_shared((size, tile), spec.dtype)
            read_tile = T.alloc_shared((size, tile), spec.dtype) if spec.reads else k_tile
            logs = T.alloc_shared((size, tile), compute)
            earlier = T.alloc_shared((size, tile), spec.dtype)
            own_q = T.alloc_shared((block, tile), spec.dtype)
            own_k = T.alloc_shared((block, tile), spec.dtype)
            of_queries = T.alloc_shared((size, size), compute)
            of_keys = T.alloc_shared((size, size), compute)
            factor = T.alloc_shared((size,), compute)
            part_q = T.alloc_fragment((block, size), compute)
            part_k = T.alloc_fragment((block, size), compute)
            for i in T.Parallel(size):
                time = T.min(first + i, s.length - 1)
                factor[i] = T.if_then_else(i < count, betas[bz, head, time], 0.0)
            for i, j in T.Parallel(size, size):
                of_queries[i, j] = 0.0
                of_keys[i, j] = 0.0
            for n in T.serial(T.ceildiv(s.k, tile)):
                load_chunk(s, q, q_tile, (bz, first, count, head, n * tile))
                load_chunk(s, k, k_tile, (bz, first, count, head, n * tile))
                if spec.reads:
                    load_chunk(s, others[-2], read_tile, (bz, first, count, head, n * tile))
                load_decays(s, sums, logs, (bz, first, count, head, n * tile))
                for begin in tuple(range(block, size, block)):
                    for i, j in T.Parallel(size, tile):
                        left = T.exp2(T.min(logs[begin - 1, j] - logs[i, j], 0.0))
                        value = T.if_then_else(i < begin, T.cast(k_tile[i, j], compute) * left, 0.0)
                        earlier[i, j] = T.cast(value, spec.dtype)
                    for i, j in T.Parallel(block, tile):
                        grown = T.exp2(logs[begin + i, j] - logs[begin - 1, j])
                        own_q[i, j] = T.cast(T.cast(q_tile[begin + i, j], compute) * grown, spec.dtype)
                        own_k[i, j] = T.cast(T.cast(read_tile[begin + i, j], compute) * grown, spec.dtype)
                    T.gemm(own_q, earlier, part_q, transpose_B=True, clear_accum=True)
                    for i, j in T.Parallel(block, size):
                        of_queries[begin + i, j] += part_q[i, j]
                    if spec.delta:
                        T.gemm(own_k, earlier, part_k, transpose_B=True, clear_accum=True)
                        for i, j in T.Parallel(block, size):
                            of_keys[begin + i, j] += part_k[i, j]
                for i, m in T.Parallel(size, block):
                    j = i // block * block + m
                    total_q = T.alloc_var(compute, 0.0)
                    total_k = T.alloc_var(compute, 0.0)
                    for c in T.serial(tile):
                        between = T.exp2(T.min(logs[i, c] - logs[j, c], 0.0))
                        key = T.cast(k_tile[j, c], compute) * between
                        total_q += T.cast(q_tile[i, c], compute) * key
                        total_k += T.cast(read_tile[i, c], compute) * key
                    of_queries[i, j] += total_q
                    of_keys[i, j] += total_k
            for i, j in T.Parallel(size, size):
                path = T.logical_and(i >= j, i < count)
                of_queries[i, j] = T.if_then_else(path, of_queries[i, j] * factor[j] * scale, 0.0)
                learned = T.logical_and(i > j, path)
                of_keys[i, j] = T.if_then_else(learned, of_keys[i, j] * factor[j], 0.0)
            store_rows(s, of_queries, weights, (bz, first, count, head, 0))
            if spec.delta:
                store_inverse(s, of_keys, others[-1], (bz, first, count, head, 0))

    return delta_channel_pairs


@library_jit
def pair_gradients(config: Config, spec: Spec) -> Any:
    """Build the kernel for what gradients weigh pairs of a chunk's times with, `[B, L, H, chunk]`, without beta.

    `of_queries[i, j]` is for q[i] and k[j], `of_keys[i, j]`, the last of the others, for k[i] and k[j] under the delta
    rule.
    """
    s, compute, size, tile = Sizes(config, spec), spec.compute, config.chunk, config.key_tile
    of_delta = [s.like_values(), *s.pairs_of_delta()] if spec.delta else []

    @T.prim_func
    def delta_pair_gradients(
        grad: s.values("grad"),
        errors: s.errors(),
        *others: [*s.table(), *of_delta],
        of_queries: s.pairs(),
        slots: T.int32,
        scale: compute,
    ):
        with T.Kernel(s.h, slots, s.b, threads=config.threads) as (head, slot, bz):
            first, count = place_of(s, others[0] if spec.packed else None, slot)
            grad_tile = T.alloc_shared((size, tile), spec.dtype)
            error_tile = T.alloc_shared((size, tile), spec.dtype)
            acc = T.alloc_fragment((size, size), compute)
            T.clear(acc)
            if spec.delta:
                dv_tile = T.alloc_shared((size, tile), spec.dtype)
                acc_keys = T.alloc_fragment((size, size), compute)
                T.clear(acc_keys)
            for n in T.Pipelined(T.ceildiv(s.v, tile), num_stages=config.stages):
                T.copy(grad[bz, first : first + size, head, n * tile : n * tile + tile], grad_tile)
                T.copy(errors[bz, first : first + size, head, n * tile : n * tile + tile], error_tile)
                T.gemm(grad_tile, error_tile, acc, transpose_B=True)
                if spec.delta:
                    T.copy(others[-2][bz, first : first + size, head, n * tile : n * tile + tile], dv_tile)
                    T.gemm(dv_tile, error_tile, acc_keys, transpose_B=True)
            for i, j in T.Parallel(size, size):
                path = T.logical_and(i >= j, i < count)
                acc[i, j] = T.if_then_else(path, acc[i, j] * scale, 0.0)
                if spec.delta:
                    acc_keys[i, j] = T.if_then_else(T.logical_and(i > j, path), -acc_keys[i, j], 0.0)
            store_rows(s, acc, of_queries, (bz, first, count, head, 0))
            if spec.delta:
                store_rows(s, acc_keys, others[-1], (bz, first, count, head, 0))

    return delta_pair_gradients


@library_jit
def channel_gradients(config: Config, spec: Spec) -> Any:
    """Build the kernel for the gradients of q, k and g, all `[B, L, H, K]`, where channels decay.

    `of_queries` and `of_keys` weigh pairs of times, without beta. `rates` are parts of the gradient of beta. Keys that
    only read the state, and their gradient, stand before the last two of the others.
    """
    s, compute, size, block = Sizes(config, spec), spec.compute, config.chunk, config.base
    tile, columns = config.channel_tile, config.key_tile
    of_delta = [*s.reads(), *([s.keys_of_heads()] if spec.reads else [])]
    of_delta += [s.like_values(), s.pairs()] if spec.delta else []

    @T.prim_func
    def delta_channel_gradients(
        q: s.keys("q"),
        k: s.keys("k"),
        sums: s.of_channels(),
        grad: s.values("grad"),
        errors: s.errors(),
        states: s.states(),
        behind: s.states(),
        of_queries: s.pairs(),
        betas: s.per_time(),
        *others: [*s.table(), *of_delta],
        dq: s.keys_of_heads(),
        dk: s.keys_of_heads(),
        dg: T.Tensor((s.b, s.length, s.h, s.k), spec.g),
        rates: T.Tensor((T.dynamic("parts"), s.b, s.length, s.h), compute),
        slots: T.int32,
        scale: compute,
    ):
        tiles = T.ceildiv(s.k, tile)
        with T.Kernel(s.h * tiles, slots, s.b, threads=config.threads) as (bx, slot, bz):
            head, part = bx // tiles, bx % tiles
            at = part * tile
            first, count = place_of(s, others[0] if spec.packed else None, slot)
            q_tile = T.alloc_shared((size, tile), spec.dtype)
            k_tile = T.alloc_shared((size, tile), spec.dtype)
            read_tile = T.alloc_shared((size, tile), spec.dtype) if spec.reads else k_tile
            logs = T.alloc_shared((size, tile), compute)
            factor = T.alloc_shared((size,), compute)
            row_tile = T.alloc_shared((size, columns), spec.dtype)
            state_tile = T.alloc_shared((tile, columns), spec.dtype)
            weight_q = T.alloc_shared((size, size), spec.dtype)
            weight_k = T.alloc_shared((size, size), spec.dtype)
            scaled = T.alloc_shared((size, tile), spec.dtype)
            scaled_k = T.alloc_shared((size, tile), spec.dtype)
            of_q = T.alloc_shared((size, tile), compute)
            as_output = T.alloc_shared((size, tile), compute)
            as_input = T.alloc_shared((size, tile), compute)
            acc = T.alloc_fragment((size, tile), compute)
            terms = T.alloc_fragment((size, tile), compute)
            by_state = T.alloc_fragment((tile, columns), compute)
            end = T.alloc_fragment((tile,), compute)
            of_end = T.alloc_fragment((tile,), compute)
            rate = T.alloc_fragment((size,), compute)
            some = T.alloc_fragment((block, tile), compute)
            place = bz, first, count, head, at
            load_chunk(s, q, q_tile, place)
            load_chunk(s, k, k_tile, place)
            if spec.reads:
                load_chunk(s, others[-4], read_tile, place)
            load_decays(s, sums, logs, place)
            for i in T.Parallel(size):
                time = T.min(first + i, s.length - 1)
                factor[i] = T.if_then_else(i < count, betas[bz, head, time], 0.0)
            for i, j in T.Parallel(size, size):
                time = T.min(first + i, s.length - 1)
                none = T.cast(0.0, spec.dtype)
                weight_q[i, j] = T.if_then_else(i < count, of_queries[bz, time, head, j], none)
                if spec.delta:
                    weight_k[i, j] = T.if_then_else(i < count, others[-1][bz, time, head, j], none)
            T.clear(by_state)
            for n in T.serial(T.ceildiv(s.v, columns)):
                for i, j in T.Parallel(tile, columns):
                    c, v = at + i, n * columns + j
                    inside = T.logical_and(T.logical_and(c < s.k, v < s.v), count > 0)
                    before = T.cast(states[bz, slot, head, T.min(c, s.k - 1), T.min(v, s.v - 1)], compute)
                    after = T.cast(behind[bz, slot, head, T.min(c, s.k - 1), T.min(v, s.v - 1)], compute)
                    by_state[i, j] += T.if_then_else(inside, before * after, 0.0)
            T.reduce_sum(by_state, end, dim=1)
            for kind in (0, 1, 2) if spec.delta else (0, 2):
                rows_of = grad if kind == 0 else errors if kind == 2 else others[-2]
                T.clear(acc)
                for n in T.Pipelined(T.ceildiv(s.v, columns), num_stages=1):
                    v = n * columns
                    T.copy(rows_of[bz, first : first + size, head, v : v + columns], row_tile)
                    T.copy(
                        (behind if kind == 2 else states)[bz, slot, head, at : at + tile, v : v + columns], state_tile
                    )
                    T.gemm(row_tile, state_tile, acc, transpose_B=True)
                for i, j in T.Parallel(size, tile):
                    inside = T.logical_and(i < count, at + j < s.k)
                    if kind == 0:
                        of_q[i, j] = T.if_then_else(inside, acc[i, j] * T.exp2(logs[i, j]) * scale, 0.0)
                    elif kind == 1:
                        as_output[i, j] = T.if_then_else(inside, -acc[i, j] * T.exp2(logs[i, j]), 0.0)
                    else:
                        left = T.exp2(logs[size - 1, j] - logs[i, j])
                        as_input[i, j] = T.if_then_else(inside, acc[i, j] * left, 0.0)
            for i, j in T.Parallel(size, tile):
                terms[i, j] = T.cast(k_tile[i, j], compute) * as_input[i, j] * factor[i]
                if not spec.delta:
                    as_output[i, j] = 0.0
            T.reduce_sum(terms, of_end, dim=0)
            for j in T.Parallel(tile):
                end[j] = end[j] * T.exp2(logs[size - 1, j]) + of_end[j]
            for begin in tuple(range(block, size, block)):
                for i, j in T.Parallel(size, tile):
                    left = T.exp2(T.min(logs[begin - 1, j] - logs[i, j], 0.0)) * factor[i]
                    value = T.if_then_else(i < begin, T.cast(k_tile[i, j], compute) * left, 0.0)
                    scaled[i, j] = T.cast(value, spec.dtype)
                for queries in (True, False) if spec.delta else (True,):
                    weight = weight_q if queries else weight_k
                    total = of_q if queries else as_output
                    T.gemm(weight[begin : begin + block, 0:size], scaled, some, clear_accum=True)
                    for i, j in T.Parallel(block, tile):
                        grown = T.exp2(logs[begin + i, j] - logs[begin - 1, j])
                        total[begin + i, j] += some[i, j] * grown
                for i, j in T.Parallel(size, tile):
                    grown = T.exp2(T.min(logs[i, j] - logs[begin - 1, j], 0.0))
                    later = i >= begin
                    query, key = T.cast(q_tile[i, j], compute) * grown, T.cast(read_tile[i, j], compute) * grown
                    scaled[i, j] = T.cast(T.if_then_else(later, query, 0.0), spec.dtype)
                    scaled_k[i, j] = T.cast(T.if_then_else(later, key, 0.0), spec.dtype)
                T.gemm(weight_q[0:size, begin - block : begin], scaled, some, transpose_A=True, clear_accum=True)
                if spec.delta:
                    T.gemm(weight_k[0:size, begin - block : begin], scaled_k, some, transpose_A=True)
                for i, j in T.Parallel(block, tile):
                    row = begin - block + i
                    as_input[row, j] += some[i, j] * T.exp2(logs[begin - 1, j] - logs[row, j])
            for i, j in T.Parallel(size, tile):
                asked = T.alloc_var(compute, 0.0)
                said = T.alloc_var(compute, 0.0)
                taught = T.alloc_var(compute, 0.0)
                for m in T.serial(block):
                    n = (
                        i // block * block + m
                    )  # pairs of which i is the later time, and those of which it is the earlier
                    between = T.exp2(-T.abs(logs[i, j] - logs[n, j]))
                    key = T.cast(k_tile[n, j], compute)
                    asked += T.cast(weight_q[i, n], compute) * key * factor[n] * between
                    taught += T.cast(weight_q[n, i], compute) * T.cast(q_tile[n, j], compute) * between
                    if spec.delta:
                        said += T.cast(weight_k[i, n], compute) * key * factor[n] * between
                        read = T.cast(read_tile[n, j], compute) if spec.reads else key
                        taught += T.cast(weight_k[n, i], compute) * read * between
                of_q[i, j] += asked
                as_output[i, j] += said
                as_input[i, j] += taught
            for i, j in T.Parallel(size, tile):
                query, key = T.cast(q_tile[i, j], compute), T.cast(k_tile[i, j], compute)
                terms[i, j] = key * as_input[i, j]
                learned = factor[i] * as_input[i, j]
                if spec.reads:
                    read = T.cast(read_tile[i, j], compute)
                    logs[i, j] = query * of_q[i, j] + read * as_output[i, j] - key * learned
                    as_input[i, j] = learned
                else:
                    logs[i, j] = query * of_q[i, j] + key * (as_output[i, j] - learned)
                    as_output[i, j] += learned
            T.reduce_sum(terms, rate, dim=1)
            T.cumsum(logs, dim=0, reverse=True)
            for i in T.Parallel(size):
                if i < count:
                    rates[part, bz, first + i, head] = rate[i]
            store_rows(s, of_q, dq, place)
            store_rows(s, as_input if spec.reads else as_output, dk, place)
            if spec.reads:
                store_rows(s, as_output, others[-3], place)
            for i, j in T.Parallel(size, tile):
                if i < count:
                    dg[bz, first + i, head, at + j] = T.cast(logs[i, j] + end[j], spec.g)

    return delta_channel_gradients
