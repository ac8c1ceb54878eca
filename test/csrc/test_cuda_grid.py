# SPDX-License-Identifier: Apache-2.0
"""The order of blocks, on the host: every block of a grid is met once, however the grid was launched."""

import itertools
import random

import pytest
import torch

from torch_tile.hardware import Target
from torch_tile.runtime.host_compiler import csrc_dir
from torch_tile.runtime.nvrtc import compile_cubin

ENTRY = """
extern "C" void where(const int64_t* grid, int64_t x, int64_t y, int64_t z, int64_t wide, int64_t high, int64_t* out) {
  gridDim = {unsigned(grid[0]), unsigned(grid[1]), unsigned(grid[2])};
  blockIdx = {unsigned(x), unsigned(y), unsigned(z)};
  tile::GridIndex at = high ? tile::unfolded(wide, high) : tile::unfolded(wide);
  tile::BlockIndex rows = tile::swizzled_rows<3>(at), columns = tile::swizzled_columns<3>(at);
  for (int v : {at.x, at.y, at.z, rows.x, rows.y, columns.x, columns.y}) *out++ = v;
}
"""


@pytest.fixture(scope="module")
def where(library):
    text = (csrc_dir() / "cuda_grid.h").read_text().replace('#include "cuda_types.h"', "").replace("#pragma once", "")
    stand_ins = "struct Three { unsigned x, y, z; };\nstatic thread_local Three gridDim, blockIdx;\n"
    head = f"#include <cstdint>\n#include <initializer_list>\n#define TILE_DEVICE static inline\n{stand_ins}"
    made = library(head + text + ENTRY)

    def call(grid, block, wide, high):
        out = torch.empty(7, dtype=torch.int64)
        made("where", torch.tensor(grid), *block, wide, high, out)
        return out.tolist()

    return call


def blocks(grid):
    return itertools.product(*map(range, grid))


def test_every_block_once(where, seed):
    random.seed(seed)
    for _ in range(20):
        x, y, z = (random.randint(1, 9) for _ in range(3))
        places = list(blocks((x, y, z)))
        plain = [where((x, y, z), b, x, y) for b in places]
        folded = [where((x * y * z, 1, 1), (n, 0, 0), x, y) for n in range(x * y * z)]
        assert [tuple(p[:3]) for p in plain] == places
        assert sorted(map(tuple, plain)) == sorted(map(tuple, folded))
        for first in (3, 5):  # swizzled rows and columns
            assert sorted((p[first], p[first + 1], p[2]) for p in plain) == sorted(places)
        flat = [where((x * y, 1, 1), (n, 0, 0), x, 0) for n in range(x * y)]
        assert sorted(map(tuple, flat)) == sorted(tuple(where((x, y, 1), (*b, 0), x, 0)) for b in blocks((x, y)))


def test_far_blocks(where):
    wide, high, deep = 3, 100_000, 70_000 // 10
    at = (2, 99_999, 6_999)
    linear = at[0] + wide * (at[1] + high * at[2])
    assert linear < 2**31 and tuple(where((wide * high * deep, 1, 1), (linear, 0, 0), wide, high)[:3]) == at


def test_compiles_for_gpus():
    body = "tile::GridIndex at = tile::unfolded(w, h); x[at.z] = tile::swizzled_rows<8>(at).x + tile::unfolded(w).y;"
    text = f'#include "cuda_grid.h"\nextern "C" __global__ void f(int* x, int w, int h) {{ {body} }}\n'
    cubin = compile_cubin(text, Target("cuda", 90))
    assert cubin.resources["f"].spills == 0 and not cubin.warnings
