# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
import torch

from torch_tile.kernels.attention_form import Form, Problem, config_for, splits_for
from torch_tile.kernels.common import Machine
from torch_tile.target import Target

CPU = Machine(Target("cpu"), 16)
GPUS = [Machine(Target("cuda", c), units) for c, units in ((80, 108), (89, 142), (90, 132), (120, 170))]
FORM = Form(torch.float16, 128, 128, True, True, False, None, True, False, True, 8)


@pytest.mark.parametrize("machine", GPUS, ids=lambda m: str(m.target))
@pytest.mark.parametrize("width", [16, 64, 80, 128, 192, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_tiles_fit(machine, width, dtype):
    form = replace(FORM, dtype=dtype, tile_d=width, tile_dv=width)
    for rows in (1, 8, 17, 64, 4096):
        config = config_for(form, Problem(32, rows, 4096), machine)
        if config is None:  # left to the reference
            assert width >= 256 and dtype.itemsize >= 4
            continue
        tiles = config.block_q * width + config.stages * config.block_kv * 2 * width
        tiles += config.block_q * config.block_kv * config.shared_weights
        assert tiles * dtype.itemsize <= machine.target.shared_limit
        assert config.block_q <= max(64, rows) and config.heavy_first


def test_short_queries_get_short_tiles():
    for machine in (CPU, GPUS[2]):
        short, long = (config_for(FORM, Problem(8, rows, 1000), machine).block_q for rows in (1, 1000))
        assert short < long


def test_few_blocks_share_the_keys():
    h200 = GPUS[2]
    assert config_for(FORM, Problem(8, 8, 8192), h200).split
    assert not config_for(FORM, Problem(32, 4096, 4096), h200).split
    assert not config_for(FORM, Problem(8, 1, 8192), CPU).split
    config = config_for(FORM, Problem(8, 8, 8192), h200)
    splits = splits_for(config, Problem(8, 8, 8192), h200)
    assert 1 < splits * 8 <= 2 * h200.units and 8192 // splits >= 4 * config.block_kv
