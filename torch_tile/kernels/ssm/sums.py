# SPDX-License-Identifier: Apache-2.0
"""Sum the parts of a gradient that blocks store, always in one order: the bits are the same in each run."""

from __future__ import annotations

from typing import Any

import torch

import torch_tile.language as T
from torch_tile.jit import jit
from torch_tile.kernels.common import Machine, compute_dtype

ROWS, COLUMNS = 8, 64


@jit
def sum_parts(dtype: torch.dtype, threads: int) -> Any:
    """Build the kernel for `out[d]`, the sum of `parts[n, d, e]` over n and e."""
    compute = compute_dtype(dtype)
    n, d, e = T.dynamic("n, d, e")

    @T.prim_func
    def ssm_sum_parts(parts: T.Tensor((n, d, e), compute), out: T.Tensor((d,), dtype)):
        with T.Kernel(T.ceildiv(d, COLUMNS), threads=threads) as bx:
            terms = T.alloc_fragment((ROWS, COLUMNS), compute)
            total = T.alloc_fragment((COLUMNS,), compute)
            T.clear(terms)
            for step in T.serial(T.ceildiv(n * e, ROWS)):
                for i, j in T.Parallel(ROWS, COLUMNS):
                    part = T.min(step * ROWS + i, n * e - 1)
                    value = parts[part // e, T.min(bx * COLUMNS + j, d - 1), part % e]
                    terms[i, j] += T.if_then_else(step * ROWS + i < n * e, value, 0.0)
            T.reduce_sum(terms, total, dim=0)
            for j in T.Parallel(COLUMNS):
                out[bx * COLUMNS + j] = T.cast(total[j], dtype)

    return ssm_sum_parts


def add_up(parts: torch.Tensor, out: torch.Tensor, machine: Machine) -> None:
    """Write the sums of `parts` `[n, d, e]` over n and e to `out` `[d]`."""
    machine.kernel(sum_parts)(out.dtype, 128)(parts, out)
