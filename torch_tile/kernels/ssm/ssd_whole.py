# SPDX-License-Identifier: Apache-2.0
"""The forward of Mamba-2's scan in one kernel, whose blocks go from chunk to chunk with the state in registers.

Nothing is stored but results. Heads and batches must fill the GPU, since the chunks of a head come one after the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import Machine, power_of_two, strided, typical
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.ssm.tiles import Config, Sizes, Spec

ROWS = 64  # of wgmma: the times of a chunk, and the columns of P in a tile
MOST_STATES = 128  # of a tile, in 64 registers
RESIDENT = 2  # blocks on a multiprocessor, since one warp for each scheduler mostly waits


@dataclass(frozen=True)
class Problem:
    """The sizes that decide whether heads and batches fill a GPU."""

    batch: int
    heads: int
    head_dim: int


def whole_config_for(x: torch.Tensor, states: Any, machine: Machine) -> Config | None:
    """Choose the tiling of `whole_scan` for values `[B, L, H, P]`. None where blocks for each chunk are faster.

    A block takes 2.4 us for a chunk of 64 times on an H200. The chunks of a block wait for each other: the last wave of
    blocks must be three quarters full.
    """
    problem = typical(Problem(x.shape[0], x.shape[2], x.shape[3]))
    blocks = problem.batch * problem.heads * math.ceil(problem.head_dim / ROWS)
    fits = x.dtype.itemsize == 2 and machine.target.has_wgmma and states <= MOST_STATES
    waves = math.ceil(blocks / machine.num_sms)
    if not fits or 4 * blocks < 3 * waves * machine.num_sms:
        return None
    return Config(ROWS, ROWS, ROWS, ROWS, max(64, power_of_two(states)), blocks=RESIDENT, whole=True)


@library_jit
def whole_scan(config: Config, spec: Spec) -> Any:
    """Build the kernel for outputs and the last state, without z and packed sequences, for which no registers are left.

    Each block computes the scores of a chunk's times itself.

    The state of a chunk's start gives outputs beside the chunk's own times. The latter's values, weighed by the decay
    until the chunk's end, are an operand in registers.
    """
    s, size, compute = Sizes(config, spec), config.chunk, spec.compute
    tile_p, tile_n = config.head_tile, config.state_tile
    state_shape = (s.b, s.h, s.p, s.n)
    more = [] if spec.D is None else [strided("D", (s.h, s.p), spec.D, unit=False)]
    more += [] if spec.initial is None else [strided("initial", state_shape, spec.initial, unit=False)]

    @T.prim_func
    def ssd_whole_scan(
        values: s.values("values", spec),
        keys: s.keys("keys", spec),
        queries: s.keys("queries", spec),
        steps: s.per_time(spec),
        decays: s.per_time(spec),
        *others: more,
        out: T.Tensor((s.b, s.length, s.h, s.p), spec.dtype),
        last: T.Tensor(state_shape, compute),
    ):
        with T.Kernel(T.ceildiv(s.p, tile_p), s.h, s.b, threads=config.threads) as (bx, head, bz):
            T.annotate_min_blocks_per_sm(config.blocks)
            group, p = head // (s.h // s.g), bx * tile_p
            value_tile = T.alloc_shared((size, tile_p), spec.dtype)
            key_tile = T.alloc_shared((size, tile_n), spec.dtype)
            query_tile = T.alloc_shared((size, tile_n), spec.dtype)
            decay_tile = T.alloc_shared((size,), compute)
            step_tile = T.alloc_shared((size,), compute)
            own = T.alloc_shared((size,), compute)
            left = T.alloc_shared((size,), compute)
            before = T.alloc_shared((tile_p, tile_n), spec.dtype)
            staged = T.alloc_shared((size, tile_p), spec.dtype)
            of_D = T.alloc_shared((tile_p,), compute)
            state = T.alloc_fragment((tile_p, tile_n), compute)
            acc = T.alloc_fragment((size, tile_p), compute)
            scores = T.alloc_fragment((size, size), compute)
            weights = T.alloc_fragment((size, size), spec.dtype)
            weighed = T.alloc_fragment((tile_p, size), spec.dtype)
            T.clear(state)
            if spec.initial is not None:
                T.copy(others[-1][bz, head, p : p + tile_p, 0:tile_n], state)
            if spec.D is not None:
                for j in T.Parallel(tile_p):
                    of_D[j] = T.cast(others[0][head, T.min(p + j, s.p - 1)], compute)
            for chunk in T.Pipelined(T.ceildiv(s.length, size), num_stages=config.stages):
                first = chunk * size
                T.copy(values[bz, first : first + size, head, p : p + tile_p], value_tile)
                T.copy(keys[bz, first : first + size, group, 0:tile_n], key_tile)
                T.copy(queries[bz, first : first + size, group, 0:tile_n], query_tile)
                T.copy(decays[bz, head, first : first + size], decay_tile)
                T.copy(steps[bz, head, first : first + size], step_tile)
                T.gemm(query_tile, key_tile, scores, transpose_B=True, clear_accum=True)
                final = decay_tile[size - 1]
                keep = T.alloc_var(compute, T.exp2(final))
                for i in T.Parallel(size):
                    own[i] = T.exp2(decay_tile[i])
                    left[i] = T.exp2(final - decay_tile[i]) * step_tile[i]
                for i, j in T.Parallel(size, size):
                    between = decay_tile[i] - decay_tile[j]
                    weight = scores[i, j] * T.exp2(T.if_then_else(i >= j, between, 0.0)) * step_tile[j]
                    weights[i, j] = T.cast(T.if_then_else(i >= j, weight, 0.0), spec.dtype)
                T.copy(state, before)
                # Before the two products: beside one in flight, ptxas wants no change of the other's accumulators.
                for i, j in T.Parallel(tile_p, tile_n):
                    state[i, j] *= keep
                for i, j in T.Parallel(tile_p, size):
                    weighed[i, j] = T.cast(T.cast(value_tile[j, i], compute) * left[j], spec.dtype)
                T.gemm(query_tile, before, acc, transpose_B=True, clear_accum=True)
                T.gemm(weighed, key_tile, state)
                for i, j in T.Parallel(size, tile_p):
                    acc[i, j] *= own[i]
                T.gemm(weights, value_tile, acc)
                if spec.D is not None:
                    for i, j in T.Parallel(size, tile_p):
                        acc[i, j] += T.cast(value_tile[i, j], compute) * of_D[j]
                T.copy(acc, staged)
                T.copy(staged, out[bz, first : first + size, head, p : p + tile_p])
            T.copy(state, last[bz, head, p : p + tile_p, 0:tile_n])

    return ssd_whole_scan
