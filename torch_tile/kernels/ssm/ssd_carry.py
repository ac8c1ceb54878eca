# SPDX-License-Identifier: Apache-2.0
"""The states between chunks of Mamba-2's scan in one kernel, whose blocks go from chunk to chunk.

A block keeps its state in registers, so that no chunk's own part is stored. Heads and batches must fill the GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch_tile.language as T
from torch_tile.kernels.common import Machine, strided, typical
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.ssm.tiles import FAST, Config, Sizes, Spec, add_weighed

TILE = 64  # columns of P, and of narrow tiles of states, by which fewer heads fill the GPU
WIDE = 128  # columns of wide tiles of states, which load values once
FEWEST = 0.72  # narrow blocks for each multiprocessor
RESIDENT = 2  # blocks on a multiprocessor
STORED = 64  # columns of states that leave at once


@dataclass(frozen=True)
class Problem:
    """The sizes that decide whether heads and batches fill a GPU."""

    batch: int
    heads: int
    head_dim: int
    states: int


def carry_config_for(config: Config, spec: Spec, problem: Problem, machine: Machine) -> Config | None:
    """Choose the tiling of `carry_states` for chunks of `config`. None where blocks for each chunk are faster.

    The chunks of a block wait for each other, so that few blocks take as long as many. On an H200 128 narrow blocks win
    over two kernels, and 64 lose. 160 wide blocks win over narrow ones, and 128 do not.
    """
    problem = typical(problem)
    if not machine.target.has_wgmma or spec.dtype.itemsize != 2 or spec.vector == 1:
        return None
    rows = problem.batch * problem.heads * math.ceil(problem.head_dim / TILE)
    wide, narrow = (rows * math.ceil(problem.states / width) for width in (WIDE, TILE))
    # In reverse a block has a tile of earlier states, too, so that two wide blocks do not fit.
    width = WIDE if narrow > wide >= machine.num_sms and not spec.reverse else TILE
    if narrow < FEWEST * machine.num_sms:
        return None
    return replace(config, head_tile=TILE, state_tile=width, head_stages=1, blocks=RESIDENT, carried=True)


@library_jit(pass_configs=FAST)  # type: ignore[untyped-decorator]
def carry_states(config: Config, spec: Spec) -> Any:
    """Build the kernel for the state before each chunk, and the last one.

    With reverse, the gradient of the state behind each chunk and of the first one. Also, for each chunk, in parts, the
    sum of this gradient times what is left of the earlier state.
    """
    s, size, step, compute = Sizes(config, spec), config.chunk, config.step, spec.compute
    tile_p, tile_n = config.head_tile, config.state_tile
    width = min(tile_n, STORED)
    state_shape, tiles = (s.b, s.h, s.p, s.n), list(range(size // step))
    columns = list(range(0, tile_n, width))
    parts = T.dynamic("parts")
    more = s.marks(spec)
    more += [] if spec.initial is None else [strided("initial", state_shape, spec.initial, unit=False)]
    if spec.reverse:
        more += [s.states(spec.dtype), T.Tensor((s.b, s.h, s.states_of, parts), compute)]

    @T.prim_func
    def ssd_carry_states(
        values: s.values("values", spec),
        keys: s.keys("keys", spec),
        steps: s.per_time(spec),
        decays: s.per_time(spec),
        *others: more,
        states: s.states(spec.dtype),
        last: T.Tensor(state_shape, compute),
    ):
        tiles_p, tiles_n = T.ceildiv(s.p, tile_p), T.ceildiv(s.n, tile_n)
        with T.Kernel(tiles_n, tiles_p * s.h, s.b, threads=config.threads) as (tile, by, bz):
            T.annotate_min_blocks_per_sm(config.blocks)
            head, at_p = by // tiles_p, by % tiles_p
            group, p, n = head // (s.h // s.g), at_p * tile_p, tile * tile_n
            factors = T.alloc_shared((size,), compute)
            staged = T.alloc_shared((tile_p, width), spec.dtype)
            state = T.alloc_fragment((tile_p, tile_n), compute)
            weighed = [T.alloc_fragment((tile_p, step), spec.dtype) for _ in tiles[:2]]
            T.clear(state)
            if spec.initial is not None:
                T.copy(others[int(spec.packed)][bz, head, p : p + tile_p, n : n + tile_n], state)
            for k in T.Pipelined(s.count, num_stages=config.head_stages):
                chunk = s.count - 1 - k if spec.reverse else k
                first = chunk * size
                decay_tile = T.alloc_shared((size,), compute)
                T.copy(decays[bz, head, first], decay_tile)
                if not spec.reverse:
                    step_tile = T.alloc_shared((size,), compute)
                    T.copy(steps[bz, head, first], step_tile)
                else:
                    before_tile = T.alloc_shared((tile_p, tile_n), spec.dtype)
                    T.copy(others[-2][bz, chunk, head, p : p + tile_p, n : n + tile_n], before_tile)
                keep = T.alloc_var(compute, T.exp2(decay_tile[size - 1]))
                if spec.packed:
                    keep = T.if_then_else(others[0][bz, first + size - 1] == 0, keep, 0.0)
                for at in columns:
                    T.copy(state[0:tile_p, at : at + width], staged)
                    T.copy(staged, states[bz, chunk + int(spec.reverse), head, p : p + tile_p, n + at : n + at + width])
                if spec.reverse:
                    product = T.alloc_fragment((tile_p, tile_n), compute)
                    of_rows = T.alloc_fragment((tile_p,), compute)
                    total = T.alloc_fragment((1,), compute)
                    for i, j in T.Parallel(tile_p, tile_n):
                        product[i, j] = T.cast(before_tile[i, j], compute) * keep * state[i, j]
                    T.reduce_sum(product, of_rows, dim=1)
                    T.reduce_sum(of_rows, total, dim=0)
                    for i in T.Parallel(1):
                        others[-1][bz, head, chunk, tile * tiles_p + at_p + i] = total[i]
                for j in T.Parallel(size):
                    if spec.reverse:
                        factors[j] = T.exp2(decay_tile[j])
                    else:
                        factors[j] = T.exp2(decay_tile[size - 1] - decay_tile[j]) * step_tile[j]
                    if spec.packed:
                        other = 0 if spec.reverse else others[0][bz, first + size - 1]
                        factors[j] = T.if_then_else(others[0][bz, first + j] == other, factors[j], 0.0)
                for i, j in T.Parallel(tile_p, tile_n):
                    state[i, j] *= keep
                for place in tiles:  # a list, so that the loop is unrolled
                    at = first + place * step
                    value_tile = T.alloc_shared((step, tile_p), spec.dtype)
                    key_tile = T.alloc_shared((step, tile_n), spec.dtype)
                    T.copy(values[bz, at : at + step, head, p : p + tile_p], value_tile)
                    T.copy(keys[bz, at : at + step, group, n : n + tile_n], key_tile)
                    add_weighed(spec, state, weighed[place % 2], value_tile, key_tile, factors, place * step)
            end = 0 if spec.reverse else s.count
            for at in columns:
                T.copy(state[0:tile_p, at : at + width], staged)
                T.copy(staged, states[bz, end, head, p : p + tile_p, n + at : n + at + width])
            T.copy(state, last[bz, head, p : p + tile_p, n : n + tile_n])

    return ssd_carry_states
