# SPDX-License-Identifier: Apache-2.0
"""Kernels that only the gradient of Mamba-2's scan has: sums over heads of a group, over pairs of times, and of dt."""

from __future__ import annotations

from typing import Any

import torch_tile.language as T
from torch_tile.kernels.common import dynamic, strided
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.ssm.tiles import DECAY_HEADS, FAST, Config, Sizes, Spec, step_size

GROUP_HEADS = 8  # of which a block adds up the gradients of B and C
ENDS = 16  # parts of sums over states that a block adds up at once


@library_jit(pass_configs=FAST)  # type: ignore[untyped-decorator]
def group_scan(config: Config, spec: Spec) -> Any:
    """Build the kernel for the gradient of C, summed over the heads of a group; in reverse, that of B.

    left `[B, L, H, P]` is the gradient, right is x, keys are B; with reverse they are x, the gradient and C. The scores
    of all heads are added up first, so that each step has one product with the keys. With split a block adds up
    GROUP_HEADS heads only, and the result has parts of the sum, `[parts, B, L, G, N]`.
    """
    s, size, rows, step, compute = Sizes(config, spec), config.chunk, config.rows, config.step, spec.compute
    tile_p, tile_n = config.head_tile, config.state_tile
    parts = T.dynamic("parts") if spec.split else 1
    shape = (s.b, s.length, s.g, s.n)

    @T.prim_func
    def ssd_group_scan(
        left: s.values("left", spec),
        right: s.values("right", spec),
        keys: s.keys("keys", spec),
        steps: s.per_time(spec),
        decays: s.per_time(spec),
        states: s.states(spec.dtype),
        *marks: s.marks(spec),
        out: T.Tensor((parts, *shape), compute) if spec.split else T.Tensor(shape, spec.dtype),
    ):
        tiles_n = T.ceildiv(s.n, tile_n)
        with T.Kernel(size // rows * tiles_n, s.count * s.g, s.b * parts, threads=config.threads) as (bx, by, z):
            T.annotate_min_blocks_per_sm(config.blocks)
            row, n = bx % (size // rows) * rows, bx // (size // rows) * tile_n
            bz, part = (z // parts, z % parts) if spec.split else (z, 0)
            chunk, group, first = by // s.g, by % s.g, by // s.g * size
            members = s.h // s.g
            begin_head = group * members + part * GROUP_HEADS
            count = T.min(GROUP_HEADS, members - part * GROUP_HEADS) if spec.split else members
            alloc_weights = T.alloc_shared if config.shared_weights else T.alloc_fragment
            left_tile = T.alloc_shared((rows, tile_p), spec.dtype)
            weighed = alloc_weights((rows, tile_p), spec.dtype)
            state_tile = T.alloc_shared((tile_p, tile_n), spec.dtype)
            own_decays = T.alloc_shared((rows,), compute)
            end_decays = T.alloc_shared((rows,), compute)
            own_steps = T.alloc_shared((rows,), compute)
            row_tile = T.alloc_shared((rows, tile_p), spec.dtype)
            column_tile = T.alloc_shared((step, tile_p), spec.dtype)
            key_tile = T.alloc_shared((step, tile_n), spec.dtype)
            row_decays = T.alloc_shared((rows,), compute)
            column_decays = T.alloc_shared((step,), compute)
            step_tile = T.alloc_shared((rows if spec.reverse else step,), compute)
            mark_tile = T.alloc_shared((step,), "int32")
            own_marks = T.alloc_fragment((rows,), "int32")
            weights = alloc_weights((rows, step), spec.dtype)
            scores = T.alloc_fragment((rows, step), compute)
            total = T.alloc_fragment((rows, step), compute)
            acc = T.alloc_fragment((rows, tile_n), compute)
            factor = T.alloc_fragment((rows,), compute)
            row_factor = T.alloc_fragment((rows,), compute)
            column_factor = T.alloc_fragment((step,), compute)
            tiles_p = T.ceildiv(s.p, tile_p)
            if spec.packed:
                T.copy(marks[0][bz, first + row], own_marks)
            T.clear(acc)
            for k in T.Pipelined(count * tiles_p, num_stages=config.stages):
                head, p = begin_head + k // tiles_p, k % tiles_p * tile_p
                T.copy(left[bz, first + row : first + row + rows, head, p : p + tile_p], left_tile)
                behind = chunk + 1 if spec.reverse else chunk
                T.copy(states[bz, behind, head, p : p + tile_p, n : n + tile_n], state_tile)
                T.copy(decays[bz, head, first + row], own_decays)
                if spec.reverse:
                    T.copy(decays[bz, head, first + size - rows], end_decays)
                    T.copy(steps[bz, head, first + row], own_steps)
                for i in T.Parallel(rows):
                    if spec.reverse:
                        factor[i] = T.exp2(end_decays[rows - 1] - own_decays[i]) * own_steps[i]
                    else:
                        factor[i] = T.exp2(own_decays[i])
                    if spec.packed:
                        other = marks[0][bz, first + size - 1] if spec.reverse else 0
                        factor[i] = T.if_then_else(own_marks[i] == other, factor[i], 0.0)
                for i, j in T.Parallel(rows, tile_p):
                    weighed[i, j] = T.cast(T.cast(left_tile[i, j], compute) * factor[i], spec.dtype)
                T.gemm(weighed, state_tile, acc)
            begin, end = (row // step, size // step) if spec.reverse else (0, T.ceildiv(row + rows, step))
            for k in T.serial(end - begin):
                column = (begin + k) * step
                T.clear(total)
                if spec.packed:
                    T.copy(marks[0][bz, first + column], mark_tile)
                # A tile of P is weighed by itself, so that one loop loads all tiles of all heads ahead.
                for m in T.Pipelined(count * tiles_p, num_stages=config.stages):
                    head, p = begin_head + m // tiles_p, m % tiles_p * tile_p
                    T.copy(left[bz, first + row : first + row + rows, head, p : p + tile_p], row_tile)
                    T.copy(right[bz, first + column : first + column + step, head, p : p + tile_p], column_tile)
                    T.copy(decays[bz, head, first + row], row_decays)
                    T.copy(decays[bz, head, first + column], column_decays)
                    T.copy(steps[bz, head, first + (row if spec.reverse else column)], step_tile)
                    T.gemm(row_tile, column_tile, scores, transpose_B=True, clear_accum=True)
                    if column == row:
                        for i, j in T.Parallel(rows, step):
                            between = row_decays[i] - column_decays[j]
                            path = i <= j if spec.reverse else i >= j
                            if spec.packed:
                                path = T.logical_and(path, own_marks[i] == mark_tile[j])
                            value = scores[i, j] * T.exp2(-between if spec.reverse else between)
                            value = value * step_tile[i if spec.reverse else j]
                            total[i, j] += T.if_then_else(path, value, 0.0)
                    else:  # the decay in two factors, as in `chunk_scan`
                        border = row_decays[rows - 1 if spec.reverse else 0]
                        for i in T.Parallel(rows):
                            between = border - row_decays[i] if spec.reverse else row_decays[i] - border
                            row_factor[i] = T.exp2(between) * step_tile[i] if spec.reverse else T.exp2(between)
                        for j in T.Parallel(step):
                            between = column_decays[j] - border if spec.reverse else border - column_decays[j]
                            column_factor[j] = T.exp2(between) if spec.reverse else T.exp2(between) * step_tile[j]
                        for i, j in T.Parallel(rows, step):
                            value = scores[i, j] * (row_factor[i] * column_factor[j])
                            if spec.packed:
                                value = T.if_then_else(own_marks[i] == mark_tile[j], value, 0.0)
                            total[i, j] += value
                T.copy(total, weights)
                T.copy(keys[bz, first + column : first + column + step, group, n : n + tile_n], key_tile)
                T.gemm(weights, key_tile, acc)
            if spec.split:
                T.copy(acc, out[part, bz, first + row : first + row + rows, group, n : n + tile_n])
            else:
                T.copy(acc, out[bz, first + row : first + row + rows, group, n : n + tile_n])

    return ssd_group_scan


@library_jit(pass_configs=FAST)  # type: ignore[untyped-decorator]
def pair_sums(config: Config, spec: Spec) -> Any:
    """Build the kernel that sums the pairs of times of a chunk, for the gradient of decays.

    For each time it adds the output gradient times what earlier times of the chunk contribute to it. It subtracts what
    the time contributes to later outputs. A block has all pairs of a chunk. Both sums add up the same numbers in
    float32. So sums of times between which nothing decays cancel later.
    """
    s, size, rows, step, compute = Sizes(config, spec), config.chunk, config.rows, config.step, spec.compute
    tile_p = config.head_tile

    @T.prim_func
    def ssd_pair_sums(
        scores: s.scores(config, spec),
        grad: s.values("grad", spec),
        x: s.values("x", spec),
        steps: s.per_time(spec),
        decays: s.per_time(spec),
        *marks: s.marks(spec),
        out: s.per_time(spec),
    ):
        with T.Kernel(s.h, s.count, s.b, threads=config.threads) as (head, chunk, bz):
            T.annotate_min_blocks_per_sm(config.blocks)
            group, first, tiles_p = head // (s.h // s.g), chunk * size, T.ceildiv(s.p, tile_p)
            grad_tile = T.alloc_shared((rows, tile_p), spec.dtype)
            x_tile = T.alloc_shared((step, tile_p), spec.dtype)
            score_tile = T.alloc_shared((rows, step), spec.dtype)
            row_decays = T.alloc_shared((rows,), compute)
            column_decays = T.alloc_shared((step,), compute)
            step_tile = T.alloc_shared((step,), compute)
            sums = T.alloc_shared((size,), compute)
            products = T.alloc_fragment((rows, step), compute)
            of_pairs = T.alloc_fragment((rows, step), compute)
            of_rows = T.alloc_fragment((rows,), compute)
            of_columns = T.alloc_fragment((step,), compute)
            row_factor = T.alloc_fragment((rows,), compute)
            column_factor = T.alloc_fragment((step,), compute)
            T.clear(sums)
            for n in T.serial(size // step):
                column = n * step
                T.clear(of_pairs)
                # A tile of P is weighed by itself, so that one loop loads all tiles of all rows ahead.
                for k in T.Pipelined((size // rows - column // rows) * tiles_p, num_stages=config.stages):
                    row, p = (column // rows + k // tiles_p) * rows, k % tiles_p * tile_p
                    T.copy(grad[bz, first + row : first + row + rows, head, p : p + tile_p], grad_tile)
                    T.copy(x[bz, first + column : first + column + step, head, p : p + tile_p], x_tile)
                    T.copy(scores[bz, first + row : first + row + rows, group, column : column + step], score_tile)
                    T.copy(decays[bz, head, first + row], row_decays)
                    T.copy(decays[bz, head, first + column], column_decays)
                    T.copy(steps[bz, head, first + column], step_tile)
                    T.gemm(grad_tile, x_tile, products, transpose_B=True, clear_accum=True)
                    if row < column + step:
                        for i, j in T.Parallel(rows, step):
                            path = row + i > column + j
                            decay = T.exp2(row_decays[i] - column_decays[j])  # above all bounds where no path is
                            value = products[i, j] * decay * step_tile[j] * T.cast(score_tile[i, j], compute)
                            products[i, j] = T.if_then_else(path, value, 0.0)
                    else:  # the decay in two factors, as in `chunk_scan`
                        border = row_decays[0]
                        for i in T.Parallel(rows):
                            row_factor[i] = T.exp2(row_decays[i] - border)
                        for j in T.Parallel(step):
                            column_factor[j] = T.exp2(border - column_decays[j]) * step_tile[j]
                        for i, j in T.Parallel(rows, step):
                            score = T.cast(score_tile[i, j], compute)
                            products[i, j] *= score * (row_factor[i] * column_factor[j])
                    for i, j in T.Parallel(rows, step):
                        if spec.packed:
                            same = marks[0][bz, first + row + i] == marks[0][bz, first + column + j]
                            products[i, j] = T.if_then_else(same, products[i, j], 0.0)
                        of_pairs[i, j] += products[i, j]
                    T.reduce_sum(products, of_rows, dim=1)
                    for i in T.Parallel(rows):
                        sums[row + i] += of_rows[i]
                T.reduce_sum(of_pairs, of_columns, dim=0)
                for j in T.Parallel(step):
                    sums[column + j] -= of_columns[j]
            T.copy(sums, out[bz, head, first])

    return ssd_pair_sums


@library_jit
def step_gradients(config: Config, spec: Spec) -> Any:
    """Build the kernel for the gradient of dt. It also computes each chunk's parts of the gradients of A and of the
    bias.

    The logarithm of a time's decay counts for pairs of an earlier input and an output from that time on: pairs in the
    chunk, states before the chunk with outputs, inputs with the state behind it, and these two states. Sums up to the
    time cancel but for the pairs.
    """
    compute, size = spec.compute, config.chunk
    b, length, h, chunks = T.dynamic("b, length, h, chunks")
    parts, parts_of_ends = T.dynamic("parts, parts_of_ends")
    padded = dynamic("padded", size)
    bias = [] if spec.dt_bias is None else [strided("dt_bias", (h,), spec.dt_bias, unit=False)]
    of_bias = [] if spec.dt_bias is None else [T.Tensor((b, chunks, h), compute)]  # one more, for which there is 0

    @T.prim_func
    def ssd_step_gradients(
        dt: strided("dt", (b, length, h), spec.dt, unit=False),
        A: strided("A", (h,), spec.A, unit=False),
        steps: T.Tensor((b, h, padded), compute),
        pairs: T.Tensor((b, h, padded), compute),
        outputs: T.Tensor((b, h, parts, padded), compute),
        to_states: T.Tensor((b, h, parts, padded), compute),
        inputs: T.Tensor((b, h, parts, padded), compute),
        ends: T.Tensor((b, h, chunks, parts_of_ends), compute),
        *others: [*bias, *of_bias],
        ddt: T.Tensor((b, length, h), spec.dt),
        of_A: T.Tensor((b, chunks, h), compute),
        low: compute,
        high: compute,
    ):
        with T.Kernel(T.ceildiv(h, DECAY_HEADS), chunks, b, threads=config.threads) as (bx, chunk, bz):
            logs = T.alloc_shared((DECAY_HEADS, size), compute)
            behind = T.alloc_shared((DECAY_HEADS, size), compute)
            terms = T.alloc_fragment((DECAY_HEADS, size), compute)
            of_outputs = T.alloc_fragment((DECAY_HEADS, size), compute)
            of_inputs = T.alloc_fragment((DECAY_HEADS, size), compute)
            of_states = T.alloc_fragment((DECAY_HEADS, size), compute)
            of_ends = T.alloc_fragment((DECAY_HEADS, ENDS), compute)
            total = T.alloc_fragment((DECAY_HEADS,), compute)
            end = T.alloc_fragment((DECAY_HEADS,), compute)
            if chunk == chunks - 1:
                for i in T.Parallel(DECAY_HEADS):
                    of_A[bz, chunk, bx * DECAY_HEADS + i] = 0.0
                    if spec.dt_bias is not None:
                        others[-1][bz, chunk, bx * DECAY_HEADS + i] = 0.0
            else:
                T.clear(of_outputs)
                T.clear(of_inputs)
                T.clear(of_states)
                T.clear(of_ends)
                for k in T.serial(parts):  # the outer loop, so that all loads of a part are on their way at once
                    for i, j in T.Parallel(DECAY_HEADS, size):
                        head, time = T.min(bx * DECAY_HEADS + i, h - 1), chunk * size + j
                        of_outputs[i, j] += outputs[bz, head, k, time]
                        of_inputs[i, j] += inputs[bz, head, k, time]
                        of_states[i, j] += to_states[bz, head, k, time]
                for k in T.serial(T.ceildiv(parts_of_ends, ENDS)):
                    for i, j in T.Parallel(DECAY_HEADS, ENDS):
                        head, place = T.min(bx * DECAY_HEADS + i, h - 1), k * ENDS + j
                        found = ends[bz, head, chunk, T.min(place, parts_of_ends - 1)]
                        of_ends[i, j] += T.if_then_else(place < parts_of_ends, found, 0.0)
                for i, j in T.Parallel(DECAY_HEADS, size):
                    head, time = T.min(bx * DECAY_HEADS + i, h - 1), chunk * size + j
                    logs[i, j] = of_outputs[i, j] + pairs[bz, head, time]
                    behind[i, j] = of_states[i, j] * steps[bz, head, time]
                    terms[i, j] = behind[i, j]
                T.cumsum(logs, dim=1, reverse=True)
                T.cumsum(behind, dim=1)
                T.reduce_sum(of_ends, end, dim=1)
                for i, j in T.Parallel(DECAY_HEADS, size):
                    head, time = T.min(bx * DECAY_HEADS + i, h - 1), chunk * size + j
                    log = logs[i, j] + (behind[i, j] - terms[i, j]) + end[i]
                    logs[i, j] = log
                    terms[i, j] = log * steps[bz, head, time]
                T.reduce_sum(terms, total, dim=1)
                for i in T.Parallel(DECAY_HEADS):
                    of_A[bz, chunk, bx * DECAY_HEADS + i] = total[i]
                for i, j in T.Parallel(DECAY_HEADS, size):
                    head, time = T.min(bx * DECAY_HEADS + i, h - 1), chunk * size + j
                    given = dt[bz, T.min(time, length - 1), head]
                    _, value, raw = step_size(spec, given, others[0][head] if bias else 0.0, low, high)
                    slope = 1.0 / (1.0 + T.exp(-raw)) if spec.softplus else 1.0
                    inside = T.logical_and(value >= low, value <= high)
                    whole = (logs[i, j] * T.cast(A[head], compute) + of_inputs[i, j]) * slope
                    of_step = T.if_then_else(T.logical_and(inside, time < length), whole, 0.0)
                    terms[i, j] = of_step
                    ddt[bz, time, bx * DECAY_HEADS + i] = T.cast(of_step, spec.dt)
                if spec.dt_bias is not None:
                    T.reduce_sum(terms, total, dim=1)
                    for i in T.Parallel(DECAY_HEADS):
                        others[-1][bz, chunk, bx * DECAY_HEADS + i] = total[i]

    return ssd_step_gradients
