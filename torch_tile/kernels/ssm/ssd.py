# SPDX-License-Identifier: Apache-2.0
"""Mamba-2's state-space dual form (SSD), chunk by chunk (arXiv:2405.21060, section 6), and its gradient.

Within a chunk the scan is a masked product, between chunks a recurrence of states: five kernels. One kernel has both
that compute states where heads and batches fill a GPU (`ssd_carry.py`). The gradient has the same kernels with the
roles of its operands exchanged. The gradient of a scan is a scan from the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import (
    LOG2_E,
    Machine,
    compute_dtype,
    dense_last,
    dot_rows,
    dynamic,
    entry_function,
    has_kernels,
    into,
    machine_of,
    power_of_two,
    power_within,
    strided,
    typical,
    vector_of,
)
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.ssm.args import SsdChunkScanArgs, SsdChunkScanBackwardArgs, empty_gradients
from torch_tile.kernels.ssm.ssd_carry import Problem as Carried, carry_config_for, carry_states
from torch_tile.kernels.ssm.ssd_gradients import GROUP_HEADS, group_scan, pair_sums, step_gradients
from torch_tile.kernels.ssm.ssd_torch import gradient_reference, reference
from torch_tile.kernels.ssm.ssd_whole import whole_config_for, whole_scan
from torch_tile.kernels.ssm.sums import add_up
from torch_tile.kernels.ssm.tiles import DECAY_HEADS, FAST, Config, Sizes, Spec, add_weighed, step_size

PASSED = (8, 64)  # of P and N, what a block passes on from chunk to chunk
FEWEST_HEADS, MOST_HEADS = 2, 8  # that a block takes one after the other, and whose keys it holds
FULL = 1.8  # blocks for each multiprocessor, of which two run at once
STATE_HEADS = 4  # the most for `chunk_states`
STORED = 32  # columns of its states that leave at once
VALUE_STAGES = 4  # of values in a block that takes several heads
MOST_HELD = 256  # states, so that a tile has all


@dataclass(frozen=True)
class Problem:
    """The sizes that the choice of chunks depends on."""

    length: int


@dataclass(frozen=True)
class Work:
    """The heads of a group, and the blocks of a kernel by heads; both decide how many heads a block takes."""

    members: int
    blocks: int


def config_for(dtype: torch.dtype, length: int, machine: Machine, bulk: bool = True) -> Config:
    """Choose chunks, long ones for long sequences, and tiles; `bulk` copies leave more registers."""
    length = typical(Problem(length)).length
    size = 64 if length <= 256 else 128 if length <= 1024 else 256
    if not machine.is_gpu:
        return Config(chunk=64, rows=32, step=32, stages=1)
    if dtype == torch.float64:
        return Config(64, 32, 32, 32, 32, stages=1, shared_weights=True)
    if dtype.itemsize > 2:
        return Config(chunk=size, shared_weights=True, stages=1)
    return Config(chunk=size, blocks=3 if machine.target.has_wgmma and bulk else 1)


def heads_of(work: Work, machine: Machine) -> int:
    """Return how many heads a block takes: as many as leave each multiprocessor two blocks, 1 in groups of one head."""
    work = typical(work)
    heads = power_within(work.blocks // math.ceil(FULL * machine.num_sms))
    return min(max(heads, FEWEST_HEADS), MOST_HEADS) if work.members > 1 else 1


def config_of_states(config: Config, dtype: torch.dtype, states: int, work: Work, machine: Machine) -> Config:
    """Choose the tiles of `chunk_states`, as wide as registers allow; Hopper takes several heads."""
    if not machine.is_gpu or dtype.itemsize != 2:
        return config
    if states > config.state_tile:
        config = replace(config, state_tile=2 * config.state_tile, blocks=min(2, config.blocks))
    heads = min(STATE_HEADS, heads_of(work, machine))
    if config.blocks == 1 or heads == 1:
        return config
    return replace(config, heads=heads, blocks=2, head_stages=1)


def config_of_scan(config: Config, spec: Spec, states: int, work: Work, machine: Machine) -> Config:
    """Choose the tiling of `chunk_scan`. On Hopper a block takes several heads in turn, and loads ahead."""
    if states > config.state_tile:
        config = replace(config, heads=1)
    if spec.dtype.itemsize > 4 or not machine.is_gpu:
        return config
    # Without bulk copies all threads copy, which takes registers.
    if not machine.target.has_wgmma or spec.dtype.itemsize > 2 or spec.vector == 1:
        return replace(config, threads=256)
    config = replace(config, staged=True, blocks=2)
    heads = heads_of(work, machine)
    if heads > 1 and states <= MOST_HELD:
        width = max(64, power_of_two(states))
        config = replace(config, heads=heads, state_tile=width, blocks=1 if width > 128 else 2)
        if spec.dots:  # which need neither scores nor values
            return replace(config, blocks=1 if width > 128 else 4)
        # A state's tile is free again at once, behind the first product, but values are waited for.
        return replace(config, head_stages=1, stages=VALUE_STAGES)
    return config


def config_of_groups(config: Config, spec: Spec, states: int, machine: Machine) -> Config:
    """Choose the tiling of `group_scan`: on Hopper as wide as the states, else by 128 threads' registers."""
    if machine.target.has_wgmma and spec.dtype.itemsize <= 2 and spec.vector > 1:
        return replace(config, blocks=2, state_tile=config.state_tile * (2 if states > config.state_tile else 1))
    return replace(config, threads=256, shared_weights=True) if machine.is_gpu and spec.dtype.itemsize <= 4 else config


# The kernels.


@library_jit
def sum_decays(config: Config, spec: Spec) -> Any:
    """Build the kernel for step sizes, and for decays from the start of each chunk, both `[B, H, chunks * chunk]`.

    Decays are exponents of 2.

    Times behind the sequence have steps of 0 and no decay. So a chunk's last decay is that of all its times.
    """
    compute, size = spec.compute, config.chunk
    b, length, h = T.dynamic("b, length, h")
    padded = dynamic("padded", size)
    bias = [] if spec.dt_bias is None else [strided("dt_bias", (h,), spec.dt_bias, unit=False)]

    @T.prim_func
    def ssd_sum_decays(
        dt: strided("dt", (b, length, h), spec.dt, unit=False),
        A: strided("A", (h,), spec.A, unit=False),
        *others: bias,
        steps: T.Tensor((b, h, padded), compute),
        decays: T.Tensor((b, h, padded), compute),
        low: compute,
        high: compute,
    ):
        with T.Kernel(T.ceildiv(h, DECAY_HEADS), padded // size, b, threads=config.threads) as (bx, chunk, sequence):
            tile = T.alloc_shared((DECAY_HEADS, size), compute)
            for j, i in T.Parallel(size, DECAY_HEADS):
                head = T.min(bx * DECAY_HEADS + i, h - 1)
                time = chunk * size + j
                given = dt[sequence, T.min(time, length - 1), head]
                size_of_step, _, _ = step_size(spec, given, others[0][head] if others else 0.0, low, high)
                value = T.if_then_else(time < length, size_of_step, 0.0)
                tile[i, j] = value * T.cast(A[head], compute) * LOG2_E
                steps[sequence, bx * DECAY_HEADS + i, time] = value
            T.cumsum(tile, dim=1)
            for i, j in T.Parallel(DECAY_HEADS, size):
                decays[sequence, bx * DECAY_HEADS + i, chunk * size + j] = tile[i, j]

    return ssd_sum_decays


@library_jit
def mark_sequences(config: Config, spec: Spec) -> Any:
    """Build the kernel for marks: how many sequences begin in a chunk up to each time, `[B, chunks * chunk]`.

    Times with equal marks belong to one sequence. Those with mark 0 belong to that of the state before the chunk.
    """
    size = config.chunk
    b, length = T.dynamic("b, length")
    padded = dynamic("padded", size)

    @T.prim_func
    def ssd_mark_sequences(
        seq_idx: strided("seq_idx", (b, length), spec.seq_idx, unit=False), marks: T.Tensor((b, padded), "int32")
    ):
        with T.Kernel(padded // size, b, threads=config.threads) as (chunk, sequence):
            tile = T.alloc_shared((1, size), "float32")
            for i, j in T.Parallel(1, size):
                time = T.min(chunk * size + j, length - 1)
                begins = seq_idx[sequence, time] != seq_idx[sequence, T.max(time - 1, 0)]
                tile[i, j] = T.if_then_else(T.logical_and(begins, chunk * size + j < length), 1.0, 0.0)
            T.cumsum(tile, dim=1)
            for i, j in T.Parallel(1, size):
                marks[sequence, chunk * size + j] = T.cast(tile[i, j], "int32")

    return ssd_mark_sequences


@library_jit
def chunk_scores(config: Config, spec: Spec) -> Any:
    """Build the kernel for scores `C[l] . B[s]` of times with earlier times of their chunk, in reverse with later."""
    s, size, rows, step = Sizes(config, spec), config.chunk, config.rows, config.step

    @T.prim_func
    def ssd_chunk_scores(left: s.keys("left", spec), right: s.keys("right", spec), out: s.scores(config, spec)):
        with T.Kernel((size // rows) * (size // step), s.count * s.g, s.b, threads=config.threads) as (bx, by, bz):
            row, column = bx % (size // rows) * rows, bx // (size // rows) * step
            chunk, group = by // s.g, by % s.g
            needed = row < column + step if spec.reverse else column < row + rows
            if needed:
                a = T.alloc_shared((rows, config.state_tile), spec.dtype)
                b = T.alloc_shared((step, config.state_tile), spec.dtype)
                acc = T.alloc_fragment((rows, step), spec.compute)
                T.clear(acc)
                first = chunk * size
                for k in T.Pipelined(T.ceildiv(s.n, config.state_tile), num_stages=config.stages):
                    at = k * config.state_tile
                    T.copy(left[bz, first + row : first + row + rows, group, at : at + config.state_tile], a)
                    T.copy(right[bz, first + column : first + column + step, group, at : at + config.state_tile], b)
                    T.gemm(a, b, acc, transpose_B=True)
                T.copy(acc, out[bz, first + row : first + row + rows, group, column : column + step])

    return ssd_chunk_scores


@library_jit(pass_configs=FAST)  # type: ignore[untyped-decorator]
def chunk_states(config: Config, spec: Spec) -> Any:
    """Build the kernel for each chunk's part of the next state; in reverse, of the gradient of the state before.

    A block takes several heads of a group one after the other, and holds their keys. So values of the next head are on
    their way while the block stores a state.
    """
    s, size, step, compute = Sizes(config, spec), config.chunk, config.step, spec.compute
    tile_p, tile_n, resident = config.head_tile, config.state_tile, config.heads > 1
    width = min(tile_n, STORED)
    tiles, columns = list(range(size // step)), list(range(0, tile_n, width))

    @T.prim_func
    def ssd_chunk_states(
        x: s.values("x", spec),
        keys: s.keys("keys", spec),
        steps: s.per_time(spec),
        decays: s.per_time(spec),
        *marks: s.marks(spec),
        out: s.states(compute),
    ):
        tiles_p, tiles_n, members = T.ceildiv(s.p, tile_p), T.ceildiv(s.n, tile_n), s.h // s.g
        runs = T.ceildiv(members, config.heads)
        with T.Kernel(tiles_p * tiles_n * runs * s.g, s.count, s.b, threads=config.threads) as (bx, chunk, bz):
            T.annotate_min_blocks_per_sm(config.blocks)
            place, tile = bx // (tiles_p * tiles_n), bx // tiles_p % tiles_n
            p, n = bx % tiles_p * tile_p, tile * tile_n
            group, run, first = place // runs, place % runs, chunk * size
            key_tile = T.alloc_shared((size if resident else step, tile_n), spec.dtype)
            factors = T.alloc_shared((size,), compute)
            acc = T.alloc_fragment((tile_p, tile_n), compute)
            alloc = T.alloc_shared if config.shared_weights else T.alloc_fragment
            weighed = [alloc((tile_p, step), spec.dtype) for _ in tiles[: 2 if resident else 1]]
            if resident:
                staged = T.alloc_shared((tile_p, width), compute)
                T.copy(keys[bz, first : first + size, group, n : n + tile_n], key_tile)
            for member in T.Pipelined(T.min(config.heads, members - run * config.heads), num_stages=config.head_stages):
                head = T.min(group * members + run * config.heads + member, s.h - 1)
                decay_tile = T.alloc_shared((size,), compute)
                T.copy(decays[bz, head, first], decay_tile)
                if not spec.reverse:
                    step_tile = T.alloc_shared((size,), compute)
                    T.copy(steps[bz, head, first], step_tile)
                for j in T.Parallel(size):
                    if spec.reverse:
                        factors[j] = T.exp2(decay_tile[j])
                    else:
                        factors[j] = T.exp2(decay_tile[size - 1] - decay_tile[j]) * step_tile[j]
                    if spec.packed:
                        other = 0 if spec.reverse else marks[0][bz, first + size - 1]
                        factors[j] = T.if_then_else(marks[0][bz, first + j] == other, factors[j], 0.0)
                T.clear(acc)
                if resident:
                    for k in tiles:  # a list, so that the loop is unrolled
                        x_tile = T.alloc_shared((step, tile_p), spec.dtype)
                        T.copy(x[bz, first + k * step : first + k * step + step, head, p : p + tile_p], x_tile)
                        held = key_tile[k * step : k * step + step, 0:tile_n]
                        add_weighed(spec, acc, weighed[k % 2], x_tile, held, factors, k * step)
                    for column in columns:
                        T.copy(acc[0:tile_p, column : column + width], staged)
                        at = tile * tile_n + column
                        T.copy(staged, out[bz, chunk, head, p : p + tile_p, at : at + width])
                else:
                    for k in T.Pipelined(size // step, num_stages=config.stages):
                        at = first + k * step
                        x_tile = T.alloc_shared((step, tile_p), spec.dtype)
                        T.copy(keys[bz, at : at + step, group, n : n + tile_n], key_tile)
                        T.copy(x[bz, at : at + step, head, p : p + tile_p], x_tile)
                        add_weighed(spec, acc, weighed[0], x_tile, key_tile, factors, k * step)
                    T.copy(acc, out[bz, chunk, head, p : p + tile_p, tile * tile_n : tile * tile_n + tile_n])

    return ssd_chunk_states


@library_jit
def pass_states(config: Config, spec: Spec) -> Any:
    """Build the kernel for the state before each chunk, and the last one.

    With reverse, the gradient of the state behind each chunk and of the first one. Also, for each chunk, in parts, the
    sum of this gradient times what is left of the earlier state.
    """
    s, compute, rows, columns = Sizes(config, spec), spec.compute, *PASSED
    state_shape = (s.b, s.h, s.p, s.n)
    parts = T.dynamic("parts")
    others_types = s.marks(spec)
    others_types += [] if spec.initial is None else [strided("initial", state_shape, spec.initial, unit=False)]
    if spec.reverse:
        others_types += [s.states(spec.dtype), T.Tensor((s.b, s.h, s.states_of, parts), compute)]

    @T.prim_func
    def ssd_pass_states(
        own: s.states(compute),
        decays: s.per_time(spec),
        *others: others_types,
        before: s.states(spec.dtype),
        last: T.Tensor(state_shape, compute),
    ):
        tiles = T.ceildiv(s.p, rows)
        with T.Kernel(s.h * s.b, tiles, T.ceildiv(s.n, columns), threads=config.threads) as (bx, tile_p, tile_n):
            head, bz, p, n = bx % s.h, bx // s.h, tile_p * rows, tile_n * columns
            state = T.alloc_fragment((rows, columns), compute)
            own_tile = T.alloc_shared((rows, columns), compute)
            T.clear(state)
            if spec.initial is not None:
                for i, j in T.Parallel(rows, columns):
                    given = others[int(spec.packed)][bz, head, T.min(p + i, s.p - 1), T.min(n + j, s.n - 1)]
                    state[i, j] = T.cast(given, compute)
            for k in T.Pipelined(s.count, num_stages=config.pass_stages):
                chunk = s.count - 1 - k if spec.reverse else k
                # Not n: a variable is not known to be a multiple, which copies of 16 bytes need.
                T.copy(own[bz, chunk, head, p : p + rows, tile_n * columns : (tile_n + 1) * columns], own_tile)
                if spec.reverse:
                    before_tile = T.alloc_shared((rows, columns), spec.dtype)
                    T.copy(
                        others[-2][bz, chunk, head, p : p + rows, tile_n * columns : tile_n * columns + columns],
                        before_tile,
                    )
                keep = T.exp2(decays[bz, head, chunk * config.chunk + config.chunk - 1])
                if spec.packed:
                    keep = T.if_then_else(others[0][bz, chunk * config.chunk + config.chunk - 1] == 0, keep, 0.0)
                if spec.reverse:
                    product = T.alloc_fragment((rows, columns), compute)
                    of_rows = T.alloc_fragment((rows,), compute)
                    total = T.alloc_fragment((1,), compute)
                    for i, j in T.Parallel(rows, columns):
                        inside = T.logical_and(p + i < s.p, n + j < s.n)
                        value = T.cast(before_tile[i, j], compute) * keep * state[i, j]
                        product[i, j] = T.if_then_else(inside, value, 0.0)
                    T.reduce_sum(product, of_rows, dim=1)
                    T.reduce_sum(of_rows, total, dim=0)
                    for i in T.Parallel(1):
                        others[-1][bz, head, chunk, tile_n * tiles + tile_p + i] = total[i]
                for i, j in T.Parallel(rows, columns):
                    before[bz, chunk + (1 if spec.reverse else 0), head, p + i, n + j] = T.cast(state[i, j], spec.dtype)
                for i, j in T.Parallel(rows, columns):
                    state[i, j] = state[i, j] * keep + own_tile[i, j]
            for i, j in T.Parallel(rows, columns):
                end = 0 if spec.reverse else s.count
                before[bz, end, head, p + i, n + j] = T.cast(state[i, j], spec.dtype)
                last[bz, head, p + i, n + j] = state[i, j]

    return ssd_pass_states


@T.macro
def decay_scores(spec: Any, weights: Any, scores: Any, column: Any, row: Any, times: tuple[Any, ...]) -> None:
    """Weigh scores of times from `row` with those from `column` on, some of which are later, by decays between both."""
    own, decays, steps, own_marks, marks = times
    for i, j in T.Parallel(*weights.shape):
        other = column + j
        between = decays[other] - own[i] if spec.reverse else own[i] - decays[other]
        path = row + i <= other if spec.reverse else row + i >= other
        if spec.packed:
            path = T.logical_and(path, own_marks[i] == marks[other])
        value = T.cast(scores[i, j], spec.compute) * T.exp2(between)  # above all bounds where no path is
        value = value if spec.reverse else value * steps[other]
        weights[i, j] = T.cast(T.if_then_else(path, value, 0.0), spec.dtype)


@library_jit(pass_configs=FAST)  # type: ignore[untyped-decorator]
def chunk_scan(config: Config, spec: Spec) -> Any:
    """Build the kernel for outputs, from the state before the chunk and all earlier times of the chunk.

    A decay between times of two tiles is a product: of the decay to the first time of the later tile and of the decay
    from there. The former, `factors`, weighs columns of scores; the latter weighs the sum of all tiles. No factor is
    above 1. Blocks of a cluster have one tile of times and heads of one group, and so share keys and scores.

    With reverse, the gradient by x, from the gradient of the state behind the chunk and all later times. Also, for each
    time, x times this gradient without its step size, of the state alone and of all. Also parts of the gradient by D.
    With dots only the product of `second` with what comes from the state, for each time.
    """
    s, size, rows, step, compute = Sizes(config, spec), config.chunk, config.rows, config.step, spec.compute
    tile_p, tile_n = config.head_tile, config.state_tile
    resident = config.heads > 1
    # Two products of bfloat16 are one instruction. Small factors in float16 would lose digits.
    kind = spec.dtype if spec.dtype == torch.bfloat16 else compute
    parts, tiles = T.dynamic("parts, tiles")
    second = spec.reverse or spec.dots
    more, base = s.marks(spec), int(spec.packed)
    more += [s.values("second", spec)] if second else []
    more += [] if spec.D is None or spec.dots else [strided("D", (s.h, s.p), spec.D, unit=False)]
    more += [] if spec.z is None else [strided("z", (s.b, s.length, s.h, s.p), spec.z)]
    results = [] if spec.dots else [T.Tensor((s.b, s.length, s.h, s.p), spec.dtype)]
    results += [T.Tensor((s.b, s.h, parts, s.padded), compute)] * (spec.dots + 2 * spec.reverse)
    if spec.reverse and spec.D is not None:
        results.append(T.Tensor((s.b, tiles, s.h, s.p), compute))

    @T.prim_func
    def ssd_chunk_scan(
        scores: s.scores(config, spec),
        values: s.values("values", spec),
        keys: s.keys("keys", spec),
        steps: s.per_time(spec),
        decays: s.per_time(spec),
        states: s.states(spec.dtype),
        *others: [*more, *results],
    ):
        tiles_p, members = T.ceildiv(s.p, tile_p), s.h // s.g
        runs, row_tiles = T.ceildiv(members, config.heads), size // rows
        blocks = runs * s.g * row_tiles * tiles_p
        with T.Kernel(blocks, s.count, s.b, threads=config.threads) as (bx, chunk, bz):
            T.annotate_min_blocks_per_sm(config.blocks)
            run, group, place = bx % runs, bx // runs % s.g, bx // runs // s.g
            # The row tiles with the most pairs come first, so that the last blocks are short.
            row_tile = place % row_tiles if spec.reverse else row_tiles - 1 - place % row_tiles
            row = row_tile * rows
            tile = place // row_tiles
            p, first = tile * tile_p, chunk * size
            border = row + (rows - 1 if spec.reverse else 0)
            count = 0 if spec.dots else (size - row if spec.reverse else row + rows) // step
            key_tile = T.alloc_shared((rows, tile_n), spec.dtype)
            if resident:
                T.copy(keys[bz, first + row : first + row + rows, group, 0:tile_n], key_tile)
                if not spec.dots:
                    # Of columns that no decay joins with the rows nothing is read.
                    all_scores = T.alloc_shared((rows, size), spec.dtype)
                    T.copy(scores[bz, first + row : first + row + rows, group, 0:size], all_scores)
            staged = T.alloc_shared((rows, tile_p), spec.dtype)
            factors = T.alloc_shared((size,), kind)
            of_D = T.alloc_shared((config.heads, tile_p), compute)
            acc = T.alloc_fragment((rows, tile_p), compute)
            own = T.alloc_fragment((rows,), compute)
            factor = T.alloc_fragment((rows,), compute)
            own_marks = T.alloc_fragment((rows,), "int32")
            mark_tile = T.alloc_shared((size,), "int32")
            if spec.packed:
                T.copy(others[0][bz, first + row], own_marks)
                T.copy(others[0][bz, first], mark_tile)
            if spec.D is not None and not spec.dots:
                for i, j in T.Parallel(config.heads, tile_p):
                    head = T.min(group * members + run * config.heads + i, s.h - 1)
                    of_D[i, j] = T.cast(others[base + second][head, T.min(p + j, s.p - 1)], compute)
            for member in T.Pipelined(T.min(config.heads, members - run * config.heads), num_stages=config.head_stages):
                head = T.min(group * members + run * config.heads + member, s.h - 1)
                decay_tile = T.alloc_shared((size,), compute)
                step_tile = T.alloc_shared((size,), compute)
                T.copy(decays[bz, head, first], decay_tile)
                T.copy(steps[bz, head, first], step_tile)
                if second:  # loaded here, so that it is there when the product with the states is
                    mine = T.alloc_fragment((rows, tile_p), spec.dtype)
                    T.copy(others[base][bz, first + row : first + row + rows, head, p : p + tile_p], mine)
                at_border = decay_tile[border]
                for i in T.Parallel(rows):
                    own[i] = decay_tile[row + i]
                for j in T.Parallel(size):
                    between = decay_tile[j] - at_border if spec.reverse else at_border - decay_tile[j]
                    joined = j >= row + rows if spec.reverse else j < row
                    if spec.packed:
                        joined = T.logical_and(joined, mark_tile[j] == mark_tile[border])
                    value = T.exp2(T.if_then_else(joined, between, 0.0))
                    value = value if spec.reverse else value * step_tile[j]
                    factors[j] = T.cast(T.if_then_else(joined, value, 0.0), kind)
                for i in T.Parallel(rows):
                    factor[i] = T.exp2(at_border - own[i] if spec.reverse else own[i] - at_border)
                    if spec.packed:
                        factor[i] = T.if_then_else(own_marks[i] == mark_tile[border], factor[i], 0.0)
                times = own, decay_tile, step_tile, own_marks, mark_tile
                behind = chunk + 1 if spec.reverse else chunk
                state_tile = T.alloc_shared((tile_p, tile_n), spec.dtype)
                if resident:
                    T.copy(states[bz, behind, head, p : p + tile_p, 0:tile_n], state_tile)
                    T.gemm(key_tile, state_tile, acc, transpose_B=True, clear_accum=True)
                    if not spec.dots:  # beside the product
                        pairs = T.alloc_fragment((rows, step), spec.dtype)
                        last = T.alloc_fragment((rows, step), spec.dtype)
                        T.copy(all_scores[0:rows, row_tile * rows : row_tile * rows + step], pairs)
                        decay_scores(spec, last, pairs, row, row, times)
                else:
                    T.clear(acc)
                    for k in T.Pipelined(T.ceildiv(s.n, tile_n), num_stages=config.stages):
                        at = k * tile_n
                        T.copy(keys[bz, first + row : first + row + rows, group, at : at + tile_n], key_tile)
                        T.copy(states[bz, behind, head, p : p + tile_p, at : at + tile_n], state_tile)
                        T.gemm(key_tile, state_tile, acc, transpose_B=True)
                of_states = T.exp2(decay_tile[size - 1] - at_border if spec.reverse else at_border)
                if spec.packed:
                    other = mark_tile[size - 1] if spec.reverse else 0
                    of_states = T.if_then_else(mark_tile[border] == other, of_states, 0.0)
                for i, j in T.Parallel(rows, tile_p):
                    acc[i, j] *= of_states
                if second:
                    dot = T.alloc_fragment((rows,), compute)
                    dot_rows(acc, mine, dot)
                    for i in T.Parallel(rows):
                        dot[i] *= factor[i]
                    T.copy(dot, others[len(more) + (not spec.dots)][bz, head, tile, first + row])
                if not spec.dots:
                    score_tile = T.alloc_shared((rows, step), spec.dtype)
                    value_tile = T.alloc_shared((step, tile_p), spec.dtype)
                    grads = T.alloc_fragment((rows, tile_p), spec.dtype)
                    weights = (T.alloc_shared if config.shared_weights else T.alloc_fragment)((rows, step), spec.dtype)
                    for k in T.Pipelined(count, num_stages=config.stages):
                        column = size - (k + 1) * step if spec.reverse else k * step
                        if not resident:
                            T.copy(
                                scores[bz, first + row : first + row + rows, group, column : column + step], score_tile
                            )
                        T.copy(values[bz, first + column : first + column + step, head, p : p + tile_p], value_tile)
                        if k >= count - rows // step:
                            if k == count - rows // step:
                                for i, j in T.Parallel(rows, tile_p):
                                    acc[i, j] *= factor[i]
                            if spec.D is not None and not spec.reverse:
                                for i, j in T.Parallel(rows, tile_p):
                                    given = T.cast(value_tile[i % step, j], compute) * of_D[member, j]
                                    acc[i, j] += T.if_then_else(i // step == (column - row) // step, given, 0.0)
                            if spec.D is not None and spec.reverse:
                                for i, j in T.Parallel(rows, tile_p):
                                    if i // step == (column - row) // step:
                                        grads[i, j] = value_tile[i % step, j]
                            if resident:
                                T.copy(last, weights)
                            else:
                                decay_scores(spec, weights, score_tile, column, row, times)
                        else:
                            if resident and spec.reverse:
                                T.copy(all_scores[0:rows, size - (k + 1) * step : size - k * step], pairs)
                            elif resident:
                                T.copy(all_scores[0:rows, k * step : k * step + step], pairs)
                            for i, j in T.Parallel(rows, step):
                                scored = pairs if resident else score_tile
                                weights[i, j] = T.cast(T.cast(scored[i, j], kind) * factors[column + j], spec.dtype)
                        T.gemm(weights, value_tile, acc)
                    if spec.reverse:
                        dot_rows(acc, mine, dot)
                        T.copy(dot, others[len(more) + 2][bz, head, tile, first + row])
                        for i in T.Parallel(rows):
                            factor[i] = step_tile[row + i]
                        for i, j in T.Parallel(rows, tile_p):
                            acc[i, j] *= factor[i]
                        if spec.D is not None:
                            product = T.alloc_fragment((rows, tile_p), compute)
                            total = T.alloc_fragment((tile_p,), compute)
                            for i, j in T.Parallel(rows, tile_p):
                                acc[i, j] += T.cast(grads[i, j], compute) * of_D[member, j]
                                product[i, j] = T.cast(grads[i, j], compute) * T.cast(mine[i, j], compute)
                            T.reduce_sum(product, total, dim=0)
                            T.copy(total, others[-1][bz, (first + row) // rows, head, p])
                    if spec.z is not None:
                        gates = T.alloc_fragment((rows, tile_p), spec.z)
                        T.copy(others[len(more) - 1][bz, first + row : first + row + rows, head, p : p + tile_p], gates)
                        for i, j in T.Parallel(rows, tile_p):
                            gate = T.cast(gates[i, j], compute)
                            acc[i, j] = acc[i, j] * gate / (1.0 + T.exp(-gate))
                    out = others[len(more)]
                    if config.staged:
                        T.copy(acc, staged)
                        T.copy(staged, out[bz, first + row : first + row + rows, head, p : p + tile_p])
                    else:
                        T.copy(acc, out[bz, first + row : first + row + rows, head, p : p + tile_p])

    return ssd_chunk_scan


# Entry functions.


class Scan:
    """The tensors and sizes of one call that all its kernels share, with methods that launch the kernels."""

    x: torch.Tensor
    batch: Any
    length: Any
    heads: Any
    head_dim: Any
    groups: Any
    states: Any
    steps: torch.Tensor
    decays: torch.Tensor

    def __init__(self, args: Any, config: Config | None, *dense: torch.Tensor, forward: bool = False) -> None:
        self.machine: Machine = machine_of(args.x)
        self.x, self.B, self.C = (dense_last(t) for t in (args.x, args.B, args.C))
        self.batch, self.length, self.heads, self.head_dim = args.x.shape
        self.groups, self.states = args.B.shape[2:]
        sizes = self.head_dim, self.states
        vector = vector_of((self.x, self.B, self.C, *dense), sizes) if self.machine.is_gpu else 1
        packed = args.seq_idx is not None
        if config is None and forward and vector > 1 and not packed and args.z is None:
            config = whole_config_for(self.x, self.states, self.machine)
        self.config: Config = config or config_for(args.x.dtype, self.length, self.machine, vector > 1)
        self.chunks: Any = -(-self.length // self.config.chunk)
        self.padded: Any = self.chunks * self.config.chunk
        self.compute = compute_dtype(args.x.dtype)
        self.limits: tuple[float, float] = float(args.dt_min), float("inf" if args.dt_max is None else args.dt_max)
        self.plain: Spec = Spec(args.x.dtype, vector=vector, packed=packed)
        self.times: Spec = replace(
            self.plain,
            dt=args.dt.dtype,
            A=args.A.dtype,
            dt_bias=None if args.dt_bias is None else args.dt_bias.dtype,
            softplus=bool(args.dt_softplus),
        )
        self.bias: list[Any] = [] if args.dt_bias is None else [args.dt_bias]
        self.args = args
        self.steps, self.decays = (self.empty(self.batch, self.heads, self.padded) for _ in range(2))
        self.run(sum_decays, self.times, args.dt, args.A, *self.bias, self.steps, self.decays, *self.limits)
        self.marks = [self.empty(self.batch, self.padded, dtype=torch.int32)] if packed else []
        if packed:
            self.run(mark_sequences, Spec(args.x.dtype, seq_idx=args.seq_idx.dtype), args.seq_idx, *self.marks)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocate a tensor, in the dtype of sums if none is given."""
        return self.x.new_empty(shape, dtype=dtype or self.compute)

    def run(self, kernel: Any, spec: Spec, *operands: Any, config: Config | None = None) -> None:
        """Launch a kernel of the scan."""
        self.machine.kernel(kernel)(config or self.config, spec)(*operands)

    def work(self, tiles: Any) -> Work:
        """Return the work of a kernel with so many tiles of a head."""
        return Work(self.heads // self.groups, self.batch * self.heads * tiles)

    def scores(self, reverse: bool = False) -> torch.Tensor:
        """Launch `chunk_scores`, `[B, chunks * chunk, G, chunk]`; pairs that no decay joins stay unwritten."""
        size = self.config.chunk
        out = self.empty(self.batch, self.padded, self.groups, size, dtype=self.x.dtype)
        left, right = (self.B, self.C) if reverse else (self.C, self.B)
        self.run(chunk_scores, replace(self.plain, reverse=reverse), left, right, out)
        return out

    def own_states(self, values: torch.Tensor, reverse: bool = False) -> torch.Tensor:
        """Launch `chunk_states`: each chunk's contribution to the next state."""
        out = self.empty(self.batch, self.chunks + 1, self.heads, self.head_dim, self.states)
        keys = self.C if reverse else self.B
        times = self.steps, self.decays, *self.marks
        tiles = -(-self.head_dim // self.config.head_tile) * self.chunks
        config = config_of_states(self.config, self.x.dtype, self.states, self.work(tiles), self.machine)
        self.run(chunk_states, replace(self.plain, reverse=reverse), values, keys, *times, out, config=config)
        return out

    def passed(
        self, own: torch.Tensor, initial: torch.Tensor | None, last: torch.Tensor, more: Any = (), reverse: bool = False
    ) -> torch.Tensor:
        """Launch `pass_states`: the states between chunks `[B, chunks + 1, H, P, N]`; write the last one to `last`."""
        before = self.empty(self.batch, self.chunks + 1, self.heads, self.head_dim, self.states, dtype=self.x.dtype)
        given = [] if initial is None else [initial]
        spec = replace(self.plain, reverse=reverse, initial=None if initial is None else initial.dtype)
        self.run(pass_states, spec, own, self.decays, *self.marks, *given, *more, before, last)
        return before

    def between(
        self, values: torch.Tensor, initial: torch.Tensor | None, last: torch.Tensor, before: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Compute the states between chunks, and write the last one to `last`; by one kernel where blocks fill the GPU.

        With the states `before` chunks, in reverse: gradients of states, and parts of their sums for `step_gradients`.
        """
        reverse = before is not None
        sizes = Carried(self.batch, self.heads, self.head_dim, self.states)
        spec = replace(self.plain, reverse=reverse, initial=None if initial is None else initial.dtype)
        config = self.config if self.config.carried else carry_config_for(self.config, spec, sizes, self.machine)
        rows, columns = PASSED if config is None else (config.head_tile, config.state_tile)
        parts = -(-self.head_dim // rows) * -(-self.states // columns)
        ends = [self.empty(self.batch, self.heads, self.chunks + 1, parts)] if reverse else []
        more = [] if before is None else [before, *ends]
        if config is None:
            return [self.passed(self.own_states(values, reverse), initial, last, more, reverse), *ends]
        states = self.empty(self.batch, self.chunks + 1, self.heads, self.head_dim, self.states, dtype=self.x.dtype)
        given = [*self.marks, *([] if initial is None else [initial]), *more]
        keys = self.C if reverse else self.B
        self.run(carry_states, spec, values, keys, self.steps, self.decays, *given, states, last, config=config)
        return [states, *ends]

    def sum_heads(self, spec: Spec, operands: tuple[Any, ...], out: torch.Tensor) -> None:
        """Launch `group_scan`; several blocks add up the heads of a large group, and their sums are added up behind."""
        parts = -(-(self.heads // self.groups) // GROUP_HEADS)
        config = config_of_groups(self.config, spec, self.states, self.machine)
        if parts == 1:
            self.run(group_scan, spec, *operands, out, config=config)
            return
        sums = self.empty(parts, *out.shape)
        self.run(group_scan, replace(spec, split=True), *operands, sums, config=config)
        add_up(sums.view(parts, -1), out.view(-1), self.machine)

    def outputs(self, spec: Spec, *operands: Any) -> None:
        """Launch `chunk_scan`."""
        tiles = -(-self.head_dim // self.config.head_tile) * (self.padded // self.config.rows)
        config = config_of_scan(self.config, spec, self.states, self.work(tiles), self.machine)
        self.run(chunk_scan, spec, *operands, config=config)

    def skip(self) -> list[torch.Tensor]:
        """Return D as `[H, P]`, in a list that is empty without D."""
        d = self.args.D
        return [] if d is None else [d[:, None].expand(-1, self.head_dim) if d.dim() == 1 else d]


def _empty_results(args: SsdChunkScanArgs[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the outputs and the final states."""
    shape = args.x.shape[0], *args.x.shape[2:], args.B.shape[3]
    return args.x.new_empty(args.x.shape), args.x.new_empty(shape, dtype=compute_dtype(args.x.dtype))


@entry_function(SsdChunkScanArgs, reference, _empty_results)
def ssd_chunk_scan(
    args: SsdChunkScanArgs[torch.Tensor], out: torch.Tensor, final_states: torch.Tensor, config: Config | None = None
) -> bool:
    """Compute the scan as `reference` does. `config` overrides the tiling."""
    if not (out.numel() and args.B.numel()):
        return False
    z = [] if args.z is None else [dense_last(args.z)]
    scan = Scan(args, config, out, forward=True)
    spec = replace(scan.plain, D=None if args.D is None else args.D.dtype, z=None if args.z is None else args.z.dtype)
    if scan.config.whole and not (scan.marks or z):
        initial = [] if args.initial_states is None else [args.initial_states]
        spec = replace(spec, initial=None if args.initial_states is None else args.initial_states.dtype)
        operands = scan.x, scan.B, scan.C, scan.steps, scan.decays, *scan.skip(), *initial
        scan.run(whole_scan, spec, *operands, out, final_states)
        return True
    (before,) = scan.between(scan.x, args.initial_states, final_states)
    operands = scan.scores(), scan.x, scan.C, scan.steps, scan.decays, before, *scan.marks
    scan.outputs(spec, *operands, *scan.skip(), *z, out)
    return True


# The gradient.


def ssd_chunk_scan_backward(
    *given: Any, config: Config | None = None, results: tuple[torch.Tensor, ...] | None = None, **named: Any
) -> tuple[torch.Tensor, ...]:
    """Compute the gradients as `gradient_reference` does, into `results` if given. `config` overrides the tiling."""
    args: SsdChunkScanBackwardArgs[torch.Tensor] = SsdChunkScanBackwardArgs(*given, **named)
    results = results or empty_gradients(args)
    if not has_kernels(args.x) or not (args.x.numel() and args.B.numel()):
        return into(results, gradient_reference(*args))
    grad, (dx, ddt, dA, dB, dC, dD, dbias, dinitial) = dense_last(args.grad), results
    scan = Scan(args, config, grad, dx)
    batch, heads, chunks, head_dim = scan.batch, scan.heads, scan.chunks, scan.head_dim
    tiles_p, row_tiles = -(-head_dim // scan.config.head_tile), scan.padded // scan.config.rows
    last = scan.empty(batch, heads, head_dim, scan.states)
    (before,) = scan.between(scan.x, args.initial_states, last)
    of_initial = last if args.initial_states is None or dinitial.dtype != scan.compute else dinitial
    behind, ends = scan.between(grad, args.grad_states, of_initial, before)
    if args.initial_states is not None and of_initial is not dinitial:
        dinitial.copy_(last)
    outputs, to_states, inputs = (scan.empty(batch, heads, tiles_p, scan.padded) for _ in range(3))
    pairs = scan.empty(batch, heads, scan.padded)
    scores = scan.scores()
    times = scan.steps, scan.decays
    back = replace(scan.plain, reverse=True)
    dots = replace(scan.plain, dots=True)
    scan.outputs(dots, scores, scan.x, scan.C, *times, before, *scan.marks, grad, outputs)
    scan.run(pair_sums, scan.plain, scores, grad, scan.x, *times, *scan.marks, pairs)
    scores = scan.scores(reverse=True)
    of_D = [] if args.D is None else [scan.empty(batch, row_tiles, heads, head_dim)]
    spec = replace(back, D=None if args.D is None else args.D.dtype)
    operands = scores, grad, scan.B, *times, behind, *scan.marks, scan.x, *scan.skip()
    scan.outputs(spec, *operands, dx, to_states, inputs, *of_D)
    scan.sum_heads(scan.plain, (grad, scan.x, scan.B, *times, before, *scan.marks), dC)
    scan.sum_heads(back, (scan.x, grad, scan.C, *times, behind, *scan.marks), dB)
    of_A = scan.empty(batch, chunks + 1, heads)
    of_bias = [] if args.dt_bias is None else [scan.empty(batch, chunks + 1, heads)]
    operands = args.dt, args.A, scan.steps, pairs, outputs, to_states, inputs, ends, *scan.bias, *of_bias
    scan.run(step_gradients, scan.times, *operands, ddt, of_A, *scan.limits)
    add_up(of_A.view(-1, heads), dA, scan.machine)
    if args.dt_bias is not None:
        add_up(of_bias[0].view(-1, heads), dbias, scan.machine)
    if args.D is not None:
        # First over times, where many blocks add up, then over a head's channels.
        parts = scan.empty(heads, head_dim) if args.D.dim() == 1 else dD
        add_up(of_D[0].view(-1, heads * head_dim), parts.view(-1), scan.machine)
        if args.D.dim() == 1:
            add_up(parts[None], dD, scan.machine)
    return results
