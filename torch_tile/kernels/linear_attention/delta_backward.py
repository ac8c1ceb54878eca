# SPDX-License-Identifier: Apache-2.0
"""The gradient of the gated delta rule and of linear attention without it, chunk by chunk.

The forward's errors e and states are computed again. The gradient of the values is `f = inverse^T de`, by a scan from
the end that has the forward's form. With it the gradient of the triangular system is `-f[i] . e[j]`, as errors are what
the inverse makes: no product with the inverse is left. A decay has the products of a time as output less those as
input, added up from the end; both sides use the same float32 numbers, so that they cancel where nothing decays.
Without the rule errors are values, f is de, and no product has the inverse.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

import torch_tile.language as T
from torch_tile.kernels.common import dense_last, dot_rows, into, machine_of
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.linear_attention.args import GRADIENTS, GatedDeltaRuleBackwardArgs, empty_gradients
from torch_tile.kernels.linear_attention.channels import channel_gradients, pair_gradients
from torch_tile.kernels.linear_attention.delta import NORM_ROWS, Chunks, fits
from torch_tile.kernels.linear_attention.delta_torch import NORM_EPS, gradient_reference
from torch_tile.kernels.linear_attention.tiles import (
    HEADS,
    Config,
    Sizes,
    Spec,
    begin_segment,
    begin_state,
    chunks_of,
    load_rows,
    load_times,
    place_of,
    store_rows,
    weigh_times,
)
from torch_tile.kernels.ssm.sums import add_up

reference = gradient_reference


@library_jit
def scan_gradients(config: Config, spec: Spec) -> Any:
    """Build the kernel for three gradients: of v, of the state behind each chunk, and of the first state.

    `initial` is the gradient of the last state. q and k are `grown_q` and `grown_k` of `Chunks`. Segments `apart` give
    the gradients of their first states `[sequences, segments, H, V, K]` alone.
    """
    s, compute, size, rows, columns = Sizes(config, spec), spec.compute, config.chunk, config.keys, config.value_tile
    by_tiles = config.staged and not spec.packed  # a bulk copy cannot leave out rows of the next sequence
    both = 2 * size if spec.delta else size  # rows of queries, and behind them of keys
    stages = config.stages if config.staged else 1  # more would not fit
    segments = config.segments
    firsts = s.segment_states() if spec.apart else s.state_of_sequences()

    @T.prim_func
    def delta_scan_gradients(
        q: s.keys("q"),
        k: s.keys("k"),
        grad: s.values("grad"),
        weights: s.pairs(),
        seen: s.per_time(),
        left: s.per_time(),
        *others: [*s.starts(), *s.table(), *s.later_keys(), *s.pairs_of_delta(), *s.states_before_scan()],
        dv: s.like_values(),
        behind: s.states(),
        of_first: firsts,
        scale: compute,
    ):
        with T.Kernel(T.ceildiv(s.v, columns), s.h, s.sequences * segments, threads=config.threads) as (
            bx,
            head,
            place,
        ):
            (sequence, segment, group, at), (bz, begin, chunks) = chunks_of(s, others, (bx, head, place), columns)
            at_more = 2 if spec.packed else 0
            tile = T.alloc_shared((both, rows), spec.dtype)
            grad_tile = T.alloc_shared((size, columns), spec.dtype)
            weight = T.alloc_shared((size, size), spec.dtype)
            state_tile = T.alloc_shared((rows, columns), spec.dtype)
            own_grad = T.alloc_shared((size, columns), spec.dtype) if spec.packed else grad_tile
            of_errors = T.alloc_shared((size, columns), spec.dtype)
            weighed = T.alloc_shared((both, columns), spec.dtype)
            seen_tile = T.alloc_shared((size,), compute)
            left_tile = T.alloc_shared((size,), compute)
            own = T.alloc_shared((size,), compute) if spec.packed else seen_tile
            factor = T.alloc_shared((size,), compute) if spec.packed else left_tile
            state = T.alloc_fragment((rows, columns), compute)
            added = T.alloc_fragment((rows, columns), compute)
            acc = T.alloc_fragment((size, columns), compute)
            found = T.alloc_fragment((size, columns), compute) if spec.delta else acc
            stored = state_tile if config.staged else state  # a bulk copy reads it beside the products
            found_tile = T.alloc_shared((size, columns), spec.dtype) if by_tiles else found
            if spec.delta:
                inverse = T.alloc_shared((size, size), spec.dtype)
            if spec.channels or not spec.delta:
                later = T.alloc_shared((size, rows), spec.dtype)
            if spec.channels:
                keeps = T.alloc_shared((rows,), compute)
            if segments == 1 or spec.apart:
                begin_state(s, others, state, (sequence, head, at))
            else:
                begin_segment(s, others, state, (sequence, segment, head, at))
            for n in T.Pipelined(chunks, num_stages=stages):
                slot = begin + chunks - 1 - n
                first, count = place_of(s, others[1] if spec.packed else None, slot)
                T.copy(q[bz, first : first + size, group, 0:rows], tile[0:size, 0:rows])
                if spec.delta:
                    T.copy(k[bz, first : first + size, group, 0:rows], tile[size : 2 * size, 0:rows])
                    pairs = others[at_more + (2 if spec.channels else 0)]
                    T.copy(pairs[bz, first : first + size, head, 0:size], inverse)
                if spec.channels:
                    T.copy(others[at_more][bz, first : first + size, head, 0:rows], later)
                    for i in T.Parallel(rows):
                        log = others[at_more + 1][bz, first + count - 1, head, T.min(i, s.k - 1)]
                        keeps[i] = T.if_then_else(i < s.k, T.exp2(log), 0.0)
                elif not spec.delta:
                    T.copy(k[bz, first : first + size, group, 0:rows], later)
                T.copy(grad[bz, first : first + size, head, at : at + columns], grad_tile)
                T.copy(weights[bz, first : first + size, head, 0:size], weight)
                T.copy(seen[bz, head, first : first + size], seen_tile)
                T.copy(left[bz, head, first : first + size], left_tile)
                T.copy(state, state_tile)
                if not spec.apart:
                    T.copy(stored, behind[bz, slot, head, 0:rows, at : at + columns])
                keep = weigh_times(s, seen_tile, left_tile, count, own, factor)
                for i, j in T.Parallel(size, columns):
                    value = T.if_then_else(i < count, T.cast(grad_tile[i, j], compute), 0.0)
                    if spec.packed:  # else what is behind the last time was loaded as 0
                        own_grad[i, j] = T.cast(value, spec.dtype)
                    weighed[i, j] = T.cast(value * own[i] * scale, spec.dtype)
                if spec.channels or not spec.delta:
                    T.gemm(later, state_tile, acc, clear_accum=True)
                else:
                    T.gemm(tile[size : 2 * size, 0:rows], state_tile, acc, clear_accum=True)
                for i, j in T.Parallel(size, columns):
                    acc[i, j] *= factor[i]
                T.gemm(weight, own_grad, acc, transpose_A=True)
                if spec.delta:
                    for i, j in T.Parallel(size, columns):
                        of_errors[i, j] = T.cast(acc[i, j], spec.dtype)
                    T.gemm(inverse, of_errors, found, transpose_A=True, clear_accum=True)
                    for i, j in T.Parallel(size, columns):
                        weighed[size + i, j] = T.cast(-own[i] * found[i, j], spec.dtype)
                if not spec.apart:
                    if by_tiles:
                        T.copy(found, found_tile)
                    store_rows(s, found_tile, dv, (bz, first, count, head, at))
                T.gemm(tile, weighed, added, transpose_A=True, clear_accum=True)
                for i, j in T.Parallel(rows, columns):
                    state[i, j] = state[i, j] * (keeps[i] if spec.channels else keep) + added[i, j]
            if spec.apart:
                for i, j in T.Parallel(rows, columns):
                    if T.logical_and(i < s.k, at + j < s.v):
                        of_first[sequence, segment, head, at + j, i] = state[i, j]
            elif segment == 0:
                T.copy(state, of_first[sequence, head, 0:rows, at : at + columns])

    return delta_scan_gradients


@T.macro
def dot_states(before: Any, after: Any, products: Any) -> None:
    """Add products of two tiles in shared memory to `[K, 2]`, half a row to each."""
    rows, columns = before.shape
    run = min(8, columns // 2)
    for i, j in T.Parallel(rows, 2):
        left, right = (T.alloc_local((run,), before.dtype) for _ in range(2))
        for m in tuple(range(0, columns // 2, run)):
            for n in T.vectorized(run):
                left[n] = before[i, j * (columns // 2) + m + n]
                right[n] = after[i, j * (columns // 2) + m + n]
            for n in tuple(range(run)):
                products[i, j] += T.cast(left[n], products.dtype) * T.cast(right[n], products.dtype)


@library_jit
def key_gradients(config: Config, spec: Spec) -> Any:
    """Build the kernel for the gradients of q and k, summed over the heads of a group.

    For each time and head it also sums up all products as output and as input without beta. For each chunk it finds
    what the state behind it adds to sums over its times. From these come the gradients of g and beta, the last of the
    others, if a block has all keys. Else `decay_gradients` gets all three in parts of the keys. The first part has the
    products of pairs of a chunk's times.
    """
    s, compute, size, tile = Sizes(config, spec), spec.compute, config.chunk, config.key_columns
    step, most = config.key_step, config.keys // config.key_columns
    whole = most == 1
    found = s.gradients_of_rates() if whole else s.parts_of_sums()
    stages = config.stages if config.staged and not spec.shared else 1  # more would not fit

    @T.prim_func
    def delta_key_gradients(
        q: s.keys("q"),
        k: s.keys("k"),
        grad: s.values("grad"),
        dv: s.like_values(),
        errors: s.errors(),
        states: s.states(),
        behind: s.states(),
        decays: s.per_time(),
        betas: s.per_time(),
        *others: [*s.table(), *found],
        dq: T.Tensor((s.b, s.length, s.g, s.k), spec.dtype),
        dk: T.Tensor((s.b, s.length, s.g, s.k), spec.dtype),
        slots: T.int32,
        scale: compute,
    ):
        tiles = T.ceildiv(s.k, tile)
        with T.Kernel(s.g * tiles, slots, s.b, threads=config.key_threads) as (bx, slot, bz):
            group, part = T.min(bx // tiles, s.g - 1), bx % tiles
            at, members = part * tile, s.h // s.g if spec.shared else 1
            first, count = place_of(s, others[0] if spec.packed else None, slot)
            q_tile = T.alloc_shared((size, tile), spec.dtype)
            k_tile = T.alloc_shared((size, tile), spec.dtype)
            logs = T.alloc_shared((size,), compute)
            own = T.alloc_shared((size,), compute)
            factor = T.alloc_shared((size,), compute)
            left = T.alloc_shared((size,), compute)
            grad_tile = T.alloc_shared((size, step), spec.dtype)
            error_tile = T.alloc_shared((size, step), spec.dtype)
            before = T.alloc_shared((tile, step), spec.dtype)
            after = T.alloc_shared((tile, step), spec.dtype)
            of_queries = T.alloc_shared((size, size), spec.dtype)
            of_outputs = T.alloc_fragment((size, tile), compute)
            of_inputs = T.alloc_fragment((size, tile), compute)
            products = T.alloc_fragment((tile, 2), compute)
            of_rows = T.alloc_fragment((tile,), compute)
            total = T.alloc_fragment((1,), compute)
            dot = T.alloc_fragment((size,), compute)
            more = T.alloc_fragment((size,), compute)
            sums_of_times = T.alloc_shared((size,), compute)
            end = T.alloc_shared((1,), compute)
            row_sums = T.alloc_fragment((size,), compute)
            column_sums = T.alloc_fragment((size,), compute)
            acc, scores, sums = (T.alloc_fragment((size, size), compute) for _ in range(3))
            if spec.delta:
                dv_tile = T.alloc_shared((size, step), spec.dtype)
                of_errors = T.alloc_fragment((size, tile), compute)
                of_keys = T.alloc_shared((size, size), spec.dtype)
                acc_keys = T.alloc_fragment((size, size), compute)
            if most > 1:
                q_rest, k_rest = (T.alloc_shared((size, step), spec.dtype) for _ in range(2))
            T.copy(q[bz, first : first + size, group, at : at + tile], q_tile)
            T.copy(k[bz, first : first + size, group, at : at + tile], k_tile)
            own_q, own_k = of_outputs, of_errors if spec.delta else of_inputs
            of_q, of_k = own_q, own_k
            if spec.shared:
                of_q, of_k = (T.alloc_shared((size, tile), compute) for _ in range(2))  # registers hold no more sums
                for i, j in T.Parallel(size, tile):
                    of_q[i, j] = 0.0
                    of_k[i, j] = 0.0
            for member in T.serial(members):
                head = T.min(group * members + member, s.h - 1)  # bounds that the compiler knows take fewer registers
                final = decays[bz, head, T.max(first + count - 1, 0)]
                load_times(s, decays, betas, (bz, first, count, head), logs, factor)
                for i in T.Parallel(size):
                    own[i] = T.if_then_else(i < count, T.exp2(logs[i]), 0.0)
                    left[i] = T.if_then_else(i < count, T.exp2(final - logs[i]), 0.0)
                for sum_of in (of_outputs, of_inputs, products, acc):
                    T.clear(sum_of)
                if spec.delta:
                    T.clear(of_errors)
                    T.clear(acc_keys)
                for n in T.Pipelined(T.ceildiv(s.v, step), num_stages=stages):
                    v = n * step
                    T.copy(states[bz, slot, head, at : at + tile, v : v + step], before)
                    T.copy(grad[bz, first : first + size, head, v : v + step], grad_tile)
                    T.gemm(grad_tile, before, of_outputs, transpose_B=True)
                    T.copy(errors[bz, first : first + size, head, v : v + step], error_tile)
                    T.gemm(grad_tile, error_tile, acc, transpose_B=True)
                    T.copy(behind[bz, slot, head, at : at + tile, v : v + step], after)
                    T.gemm(error_tile, after, of_inputs, transpose_B=True)
                    if spec.delta:
                        T.copy(dv[bz, first : first + size, head, v : v + step], dv_tile)
                        T.gemm(dv_tile, before, of_errors, transpose_B=True)
                        T.gemm(dv_tile, error_tile, acc_keys, transpose_B=True)
                    dot_states(before, after, products)
                for keys in (False, True) if spec.delta else (False,):  # apart: registers do not hold scores of both
                    T.gemm(k_tile if keys else q_tile, k_tile, scores, transpose_B=True, clear_accum=True)
                    if most > 1:
                        for m in T.serial(tile // step, tiles * (tile // step)):  # keys of other parts
                            rest = (at + m * step) % (tiles * tile)
                            T.copy(k[bz, first : first + size, group, rest : rest + step], k_rest)
                            if not keys:
                                T.copy(q[bz, first : first + size, group, rest : rest + step], q_rest)
                            T.gemm(k_rest if keys else q_rest, k_rest, scores, transpose_B=True)
                    for i, j in T.Parallel(size, size):
                        path = T.logical_and(i > j if keys else i >= j, i < count)
                        weight = T.exp2(T.if_then_else(path, logs[i] - logs[j], 0.0))
                        weight *= -acc_keys[i, j] if keys else acc[i, j] * scale
                        value = T.if_then_else(path, weight, 0.0)
                        sums[i, j] = value * scores[i, j] + (sums[i, j] if keys else 0.0)
                        (of_keys if keys else of_queries)[i, j] = T.cast(value * factor[j], spec.dtype)
                T.reduce_sum(sums, column_sums, dim=0)
                for i, j in T.Parallel(size, size):
                    sums[i, j] *= factor[j]
                T.reduce_sum(sums, row_sums, dim=1)
                for i, j in T.Parallel(size, tile):
                    of_outputs[i, j] *= own[i] * scale
                dot_rows(of_outputs, q_tile, dot)
                if spec.delta:
                    for i, j in T.Parallel(size, tile):
                        of_errors[i, j] *= -own[i]
                    dot_rows(of_errors, k_tile, more)
                    for i in T.Parallel(size):
                        dot[i] += more[i]
                for i, j in T.Parallel(size, tile):
                    of_inputs[i, j] *= left[i]
                dot_rows(of_inputs, k_tile, more)
                for i, j in T.Parallel(size, tile):
                    of_inputs[i, j] *= factor[i]
                    if spec.delta:
                        of_errors[i, j] += of_inputs[i, j]
                T.reduce_sum(products, of_rows, dim=1)
                T.reduce_sum(of_rows, total, dim=0)
                to_state = T.alloc_fragment((size,), compute)
                of_state = T.alloc_fragment((1,), compute)
                for i in T.Parallel(size):
                    to_state[i] = more[i] * factor[i]
                T.reduce_sum(to_state, of_state, dim=0)
                for i in T.Parallel(1):
                    end[i] = total[i] * T.exp2(final) + of_state[i]
                for i in T.Parallel(size):
                    dot[i] += T.if_then_else(part == 0, row_sums[i], 0.0)
                for i in T.Parallel(size):
                    more[i] += T.if_then_else(part == 0, column_sums[i], 0.0)
                if whole:
                    for i in T.Parallel(size):
                        sums_of_times[i] = T.if_then_else(i < count, dot[i] - factor[i] * more[i], 0.0)
                        if spec.delta:  # noqa: SIM102 - the first is asked while the kernel is built
                            if i < count:
                                others[-2][bz, first + i, head] = T.cast(more[i], spec.beta)
                    T.cumsum(sums_of_times, dim=0, reverse=True)
                    for i in T.Parallel(size):
                        if i < count:
                            others[-1][bz, first + i, head] = T.cast(sums_of_times[i] + end[0], spec.g)
                else:
                    outs, ins, ends = others[-3:]
                    for i in T.Parallel(size):
                        if i < count:
                            outs[bz, head, part, first + i] = dot[i]
                            ins[bz, head, part, first + i] = more[i]
                    for i in T.Parallel(1):
                        ends[bz, head, part, slot + i] = end[i]
                T.gemm(of_queries, k_tile, own_q)
                T.gemm(of_queries, q_tile, own_k, transpose_A=True)
                if spec.delta:
                    T.gemm(of_keys, k_tile, own_k)
                    T.gemm(of_keys, k_tile, own_k, transpose_A=True)
                if spec.shared:
                    for i, j in T.Parallel(size, tile):
                        of_q[i, j] += own_q[i, j]
                        of_k[i, j] += own_k[i, j]
            T.copy(of_q, q_tile)
            T.copy(of_k, k_tile)
            store_rows(s, q_tile, dq, (bz, first, count, group, at))
            store_rows(s, k_tile, dk, (bz, first, count, group, at))

    return delta_key_gradients


@T.macro
def part_or_zero(values: Any, place: tuple[Any, ...]) -> Any:
    """Return a value of a tensor `[B, H, parts, times or chunks]`; 0 for a part behind the last one."""
    bz, head, part, at = place
    parts = values.shape[2]
    return T.if_then_else(part < parts, values[bz, head, T.min(part, parts - 1), at], 0.0)


@library_jit
def decay_gradients(config: Config, spec: Spec) -> Any:
    """Build the kernel for the gradients of g and beta from parts of sums."""
    s, compute, size, most = Sizes(config, spec), spec.compute, config.chunk, config.keys // config.key_columns
    sums = s.parts_of_sums()

    @T.prim_func
    def delta_decay_gradients(
        outs: sums[0],
        ins: sums[1],
        ends: sums[2],
        betas: s.per_time(),
        *others: [*s.table(), *s.gradients_of_rates()],
        slots: T.int32,
    ):
        with T.Kernel(T.ceildiv(s.h, HEADS), slots, s.b, threads=config.threads) as (bx, slot, bz):
            logs = T.alloc_shared((HEADS, size), compute)
            end = T.alloc_fragment((HEADS,), compute)
            first, count = place_of(s, others[0] if spec.packed else None, slot)
            for i, j in T.Parallel(HEADS, size):
                head, time = T.min(bx * HEADS + i, s.h - 1), T.min(first + j, s.length - 1)
                of_output = T.alloc_var(compute, 0.0)
                of_input = T.alloc_var(compute, 0.0)
                for n in tuple(range(most)):  # Python's numbers: all loads start at once
                    of_output += part_or_zero(outs, (bz, head, n, time))
                    of_input += part_or_zero(ins, (bz, head, n, time))
                logs[i, j] = T.if_then_else(j < count, of_output - betas[bz, head, time] * of_input, 0.0)
                if spec.delta:  # noqa: SIM102 - the first is asked while the kernel is built
                    if j < count:
                        others[-2][bz, first + j, bx * HEADS + i] = T.cast(of_input, spec.beta)
            T.cumsum(logs, dim=1, reverse=True)
            for i in T.Parallel(HEADS):
                end[i] = 0.0
                for n in tuple(range(most)):
                    end[i] += part_or_zero(ends, (bz, T.min(bx * HEADS + i, s.h - 1), n, slot))
            for i, j in T.Parallel(HEADS, size):
                if j < count:
                    others[-1][bz, first + j, bx * HEADS + i] = T.cast(logs[i, j] + end[i], spec.g)

    return delta_decay_gradients


@library_jit
def normalize_gradients(config: Config, spec: Spec) -> Any:
    """Build the kernel for the gradient of rows that were divided by their lengths, `[B, L, G, K]`; in place."""
    s, compute, columns = Sizes(config, spec), spec.compute, config.keys

    @T.prim_func
    def delta_normalize_gradients(x: s.keys("x"), grad: T.Tensor((s.b, s.length, s.g, s.k), spec.dtype)):
        with T.Kernel(T.ceildiv(s.length, NORM_ROWS), s.g, s.b, threads=config.threads) as (bx, group, bz):
            tile = T.alloc_fragment((NORM_ROWS, columns), compute)
            upstream = T.alloc_fragment((NORM_ROWS, columns), compute)
            products = T.alloc_fragment((NORM_ROWS, columns), compute)
            squares = T.alloc_fragment((NORM_ROWS,), compute)
            along = T.alloc_fragment((NORM_ROWS,), compute)
            load_rows(s, x, tile, (bz, bx * NORM_ROWS, group))
            load_rows(s, grad, upstream, (bz, bx * NORM_ROWS, group))
            for i, j in T.Parallel(NORM_ROWS, columns):
                products[i, j] = tile[i, j] * tile[i, j]
            T.reduce_sum(products, squares, dim=1)
            for i, j in T.Parallel(NORM_ROWS, columns):
                products[i, j] = tile[i, j] * upstream[i, j]
            T.reduce_sum(products, along, dim=1)
            for i, j in T.Parallel(NORM_ROWS, columns):
                square = squares[i] + NORM_EPS
                value = (upstream[i, j] - tile[i, j] * along[i] / square) / T.sqrt(square)
                grad[bz, bx * NORM_ROWS + i, group, j] = T.cast(value, spec.dtype)

    return delta_normalize_gradients


def gated_delta_rule_backward(
    *given: Any,
    config: Config | None = None,
    results: tuple[torch.Tensor, ...] | None = None,
    reads: torch.Tensor | None = None,
    of_reads: torch.Tensor | None = None,
    **named: Any,
) -> tuple[torch.Tensor, ...]:
    """Compute the gradients as `gradient_reference` does.

    `results` may be given, contiguous. `config` overrides the tiling. Of calls with `reads`, for which there must be
    kernels, the gradient of these is written to `of_reads`.
    """
    args: GatedDeltaRuleBackwardArgs[Any] = GatedDeltaRuleBackwardArgs(*given, **named)
    if results is None:
        results = empty_gradients(args, tuple(n for n in GRADIENTS if n != "beta" or args.beta is not None))
    if not fits(args):
        return into(results, gradient_reference(*args))
    grad, (dq, dk, dv, dg, *dbeta, dinitial) = dense_last(args.grad), results
    chunks = Chunks(machine_of(args.v), args, config, grad, reads=reads, gradients=True)
    inverses, weights = chunks.pairs_of_chunks()
    shape = chunks.sequences, chunks.heads, chunks.keys, chunks.values
    of_first = chunks.empty(*shape)  # before that the last state, which nobody reads
    errors, states = chunks.scan(inverses, of_first)
    table = chunks.table
    behind, last, spec = chunks.states(), [], chunks.spec
    if args.grad_state is not None:
        last, spec = [args.grad_state], replace(spec, initial=args.grad_state.dtype)
    places = *chunks.starts, *table, *chunks.later_keys, *inverses
    operands = chunks.grown_q, chunks.grown_k, grad, weights, chunks.seen, chunks.left, *places
    if chunks.scan_config.segments > 1:
        own, apart = chunks.segment_states(), replace(chunks.spec, apart=True)
        chunks.run(scan_gradients, *operands, dv, behind, own, chunks.scale, spec=apart, config=chunks.scan_config)
        last, spec = [chunks.states_from_segments(own, last, replace(spec, reverse=True))], chunks.spec
    results_of_scan = dv, behind, of_first, chunks.scale
    chunks.run(scan_gradients, *operands, *last, *results_of_scan, spec=spec, config=chunks.scan_config)
    found = Found(dq, dk, dg, dbeta, states, behind, of_reads)
    (gradients_of_channels if chunks.sums else gradients_of_heads)(chunks, grad, dv, errors, found)
    if args.use_qk_l2norm:
        for x, rows in zip(chunks.given, (dq, dk), strict=True):
            chunks.run(normalize_gradients, x, rows)
    if args.initial_state is not None:
        dinitial.copy_(of_first)
    return results


class Found(NamedTuple):
    """Results to write, and what the scan and the pairs of times gave; lists are empty without the delta rule."""

    dq: torch.Tensor
    dk: torch.Tensor
    dg: torch.Tensor
    dbeta: list[torch.Tensor]
    states: torch.Tensor
    behind: torch.Tensor
    of_reads: torch.Tensor | None


def gradients_of_heads(
    chunks: Chunks, grad: torch.Tensor, dv: torch.Tensor, errors: torch.Tensor, found: Found
) -> None:
    """Write the gradients of q, k, g and beta where heads decay as a whole."""
    table, launch, times = chunks.table, (chunks.slots, chunks.scale), (chunks.decays, chunks.betas)
    tiles = -(-chunks.keys // chunks.config.key_columns)
    whole = chunks.config.keys == chunks.config.key_columns
    sizes = [] if whole else [chunks.length, chunks.length, chunks.slots + 1]
    sums, rates = [chunks.empty(chunks.batch, chunks.heads, tiles, n) for n in sizes], [*found.dbeta, found.dg]
    tensors = chunks.q, chunks.k, grad, dv, errors, found.states, found.behind, *times, *table
    chunks.run(key_gradients, *tensors, *(rates if whole else sums), found.dq, found.dk, *launch)
    if not whole:
        chunks.run(decay_gradients, *sums, chunks.betas, *table, *rates, chunks.slots)


def gradients_of_channels(
    chunks: Chunks, grad: torch.Tensor, dv: torch.Tensor, errors: torch.Tensor, found: Found
) -> None:
    """Write the gradients of q, k, g and beta where channels decay by themselves."""
    tiles = -(-chunks.keys // chunks.config.channel_tile)
    rates = chunks.empty(tiles, chunks.batch, chunks.length, chunks.heads)
    of_delta = [dv] if chunks.spec.delta else []
    of_queries, of_keys = chunks.pairs(), [chunks.pairs() for _ in of_delta]
    operands = grad, errors, *chunks.table, *of_delta, *of_keys, of_queries, chunks.slots, chunks.scale
    chunks.run(pair_gradients, *operands)
    of_delta = [*(chunks.reads and (*chunks.reads, found.of_reads)), *of_delta, *of_keys]
    operands = chunks.q, chunks.k, *chunks.sums, grad, errors, found.states, found.behind, of_queries
    results = found.dq, found.dk, found.dg, rates, chunks.slots, chunks.scale
    chunks.run(channel_gradients, *operands, chunks.betas, *chunks.table, *of_delta, *results)
    for dbeta in found.dbeta:
        add_up(rates.view(tiles, -1), dbeta.view(-1), chunks.machine)
