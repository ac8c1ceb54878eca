# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
import torch

from torch_tile.hardware import Target
from torch_tile.kernels.attention.backward_spec import (
    PADDING,
    cuts_for,
    cuts_queries,
    query_blocks,
    seen_by,
)
from torch_tile.kernels.attention.spec import Config, Form
from torch_tile.kernels.attention.tiling import Problem
from torch_tile.kernels.common import Machine

GPUS = [Machine(Target("cuda", c), units) for c, units in ((80, 108), (89, 142), (90, 132), (120, 170))]
FORM = Form(torch.float16, 128, 128, True, True, False, None, False, True, 8)


@pytest.mark.parametrize("machine", GPUS, ids=lambda m: str(m.target))
@pytest.mark.parametrize("width", [16, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_tiles_fit(machine, width, dtype):
    form = replace(FORM, dtype=dtype, tile_d=width, tile_dv=width)
    cuts = cuts_for(form, Problem(32, 4096, 4096), machine)
    if cuts is None:  # left to the reference
        assert width >= 192 and dtype == torch.float64
        return
    for config, (own, step), held in (
        (cuts.dq, ("block_q", "block_kv"), 2),
        *((config, ("block_kv", "block_q"), 1 if sums == ("dv",) else 2) for config, sums in cuts.of_keys),
    ):
        own, step = getattr(config, own), getattr(config, step)
        weights = 2 * own * step * config.shared_weights
        tiles = (held * own + config.stages * 2 * step) * width + weights
        assert tiles * dtype.itemsize <= machine.target.shared_limit
        assert PADDING % config.block_q == 0 and config.heavy_first and not config.packed


def test_wide_heads_have_a_kernel_for_each_sum_of_keys():
    """Twice the keys in a block, where no block has the registers for both sums."""
    wide = cuts_for(replace(FORM, tile_d=256, tile_dv=256), Problem(32, 4096, 4096), GPUS[2])
    assert [sums for _, sums in wide.of_keys] == [("dv",), ("dk",)]
    assert wide.dkv.block_kv == wide.dk.block_kv == 128
    for form in (FORM, replace(FORM, tile_d=192)):
        assert [sums for _, sums in cuts_for(form, Problem(32, 4096, 4096), GPUS[2]).of_keys] == [("dk", "dv")]


def test_heads_of_a_group_are_side_by_side():
    cuts = cuts_for(FORM, Problem(8, 4 * 4096, 4096, 4), GPUS[2])
    assert (cuts.dq.side, cuts.dkv.side) == (8, 4)


@pytest.mark.parametrize("causal, windowed", [(True, False), (True, True), (False, True)])
def test_which_queries_see_a_block_of_keys(causal, windowed):
    """Against the definition: blocks outside see nothing, and those that are not cut see all."""
    form, config = replace(FORM, causal=causal, windowed=windowed), Config(8, 12)
    for q_len, kv_len, offset, window in ((50, 40, 0, 7), (30, 70, 40, 20), (70, 30, -40, 1), (9, 9, 3, 100)):
        keys, queries = torch.arange(kv_len), torch.arange(q_len)[:, None]
        sees = torch.ones(q_len, kv_len, dtype=torch.bool)
        if causal:
            sees &= keys <= queries + offset
        if windowed:
            sees &= keys > queries + offset - window
        for first_key in range(0, kv_len, config.block_kv):
            first, end = (_value(x) for x in query_blocks(form, config, first_key, offset, window, q_len))
            mine = sees[:, first_key : first_key + config.block_kv]
            assert not mine[: max(0, first) * 8].any() and not mine[max(0, end) * 8 :].any()
            for step in range(max(0, first), end):
                block = mine[step * 8 : step * 8 + 8]
                if not _value(cuts_queries(form, config, step, first_key, offset, window, q_len)):
                    assert block.all()
                for (i, j), want in zip(
                    torch.cartesian_prod(*map(torch.arange, block.shape)).tolist(), block.flatten(), strict=True
                ):
                    got = seen_by(form, first_key + j, step * 8, i, 8, offset, window, q_len)
                    assert bool(_value(got)) == bool(want)


def _value(x):
    """Of an expression of numbers."""
    from torch_tile.ir.simplify import simplify

    return getattr(simplify(x), "value", x) if hasattr(x, "dtype") else x
