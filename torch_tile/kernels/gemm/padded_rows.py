# SPDX-License-Identifier: Apache-2.0
"""Copies of small float32 tensors into rows that begin at multiples of 16 bytes, from which bulk copies can read.

All tensors of a call share one workspace and one launch. The kernel behind it may start early: it waits by
`T.pdl_sync` before it reads the rows. Elements behind the end of a row are never written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import Machine, strided
from torch_tile.kernels.library_jit import library_jit

START = 4  # numbers at a multiple of which a row begins
ROWS, COLUMNS = 8, 128  # of a block: it reads each 32 bytes once, whichever dimension of the source is dense


@library_jit
def pad_rows(count: int) -> Any:
    """Build the kernel `outs[i][m, r, c] = xs[i][m, r, c]` of `count` tensors of any sizes and strides."""
    shapes = [tuple(T.dynamic(f"{size}{i}") for size in ("matrices", "rows", "columns")) for i in range(count)]
    xs = [strided(f"x{i}", shape, torch.float32, unit=False) for i, shape in enumerate(shapes)]
    outs = [strided(f"out{i}", shape, torch.float32, multiple=START) for i, shape in enumerate(shapes)]

    @T.prim_func
    def pad_rows(*operands: [*xs, *outs]):
        most = T.int32(1)
        for matrices, rows, columns in shapes:
            most = T.max(most, matrices * T.ceildiv(rows, ROWS) * T.ceildiv(columns, COLUMNS))
        with T.Kernel(most, count, threads=ROWS * COLUMNS // START) as (block, which):
            T.pdl_trigger()
            for number, (_, rows, columns) in enumerate(shapes):
                if which == number:
                    high, wide = T.ceildiv(rows, ROWS), T.ceildiv(columns, COLUMNS)
                    tile = block // wide
                    matrix, row, column = tile // high, tile % high * ROWS, block % wide * COLUMNS
                    for i, j in T.Parallel(ROWS, COLUMNS):
                        place = matrix, row + i, column + j
                        operands[count + number][place] = operands[number][place]

    return pad_rows


def in_padded_rows(tensors: Sequence[torch.Tensor], machine: Machine) -> list[torch.Tensor]:
    """Copy float32 tensors `[..., rows, columns]` of two or three dimensions, which are not empty, and of any strides.

    Rows of the results are dense and begin at multiples of 16 bytes.
    """
    sources = [x if x.dim() == 3 else x[None] for x in tensors]
    widths = [-(-x.shape[2] // START) * START for x in sources]
    sizes = [x.shape[0] * x.shape[1] * width for x, width in zip(sources, widths, strict=True)]
    room, start, outs = sources[0].new_empty(sum(sizes)), 0, []
    for x, size, width in zip(sources, sizes, widths, strict=True):
        # No slice: it would ask whether a row is shorter than its room, which may be a symbol.
        outs.append(room.as_strided(x.shape, (x.shape[1] * width, width, 1), start))
        start = start + size
    machine.kernel(pad_rows)(len(sources))(*sources, *outs)
    return [out if x.dim() == 3 else out[0] for x, out in zip(tensors, outs, strict=True)]
