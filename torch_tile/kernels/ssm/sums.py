# SPDX-License-Identifier: Apache-2.0
"""Sum the parts of a gradient that blocks store, always in one order: the bits are the same in each run."""

from __future__ import annotations

from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import Machine, compute_dtype, dynamic
from torch_tile.kernels.library_jit import library_jit

ROWS, COLUMNS = 8, 64


@library_jit
def sum_parts(dtype: torch.dtype, inner: bool, vector: int, threads: int) -> Any:
    """Build the kernel `out[d] = sum parts[n, d, e]` over n, and e with `inner`, by vectors that divide d."""
    compute = compute_dtype(dtype)
    n, e = T.dynamic("n, e")
    d = dynamic("d", vector)
    e = e if inner else 1

    @T.prim_func
    def ssm_sum_parts(parts: T.Tensor((n, d, e) if inner else (n, d), compute), out: T.Tensor((d,), dtype)):
        with T.Kernel(T.ceildiv(d, COLUMNS), threads=threads) as bx:
            tile = T.alloc_fragment((ROWS, COLUMNS), compute)
            terms = T.alloc_fragment((ROWS, COLUMNS), compute)
            total = T.alloc_fragment((COLUMNS,), compute)
            T.clear(terms)
            for step in T.serial(T.ceildiv(n * e, ROWS)):
                if inner:
                    for i, j in T.Parallel(ROWS, COLUMNS):
                        part = T.min(step * ROWS + i, n * e - 1)
                        value = parts[part // e, T.min(bx * COLUMNS + j, d - 1), part % e]
                        tile[i, j] = T.if_then_else(step * ROWS + i < n * e, value, 0.0)
                else:  # what lies behind the last row or column is 0
                    T.copy(parts[step * ROWS : step * ROWS + ROWS, bx * COLUMNS : bx * COLUMNS + COLUMNS], tile)
                for i, j in T.Parallel(ROWS, COLUMNS):
                    terms[i, j] += tile[i, j]
            T.reduce_sum(terms, total, dim=0)
            for j in T.Parallel(COLUMNS):
                out[bx * COLUMNS + j] = T.cast(total[j], dtype)

    return ssm_sum_parts


def add_up(parts: torch.Tensor, out: torch.Tensor, machine: Machine) -> None:
    """Write the sums of `parts` `[n, d]` over n, or `[n, d, e]` over n and e, to `out` `[d]`."""
    vector = 4 if machine.is_gpu and parts.shape[1] % 4 == 0 else 1
    machine.kernel(sum_parts)(out.dtype, parts.dim() == 3, vector, 128)(parts, out)
