# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest
import torch

from torch_tile.hardware import Target
from torch_tile.kernels.common import Machine
from torch_tile.kernels.mla.spec import Config, Problem, Spec, config_for, splits_for

CPU = Machine(Target("cpu"), 16)
GPUS = [Machine(Target("cuda", c), num_sms) for c, num_sms in ((80, 108), (89, 142), (90, 132), (120, 170))]


@pytest.mark.parametrize("machine", GPUS, ids=lambda m: str(m.target))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tiles_fit(machine, dtype):
    spec = Spec(dtype, 512, 64, 0, False, True)
    for rows in (1, 16, 32, 128):
        config = config_for(spec, Problem(64, rows, 4096), machine)
        bytes_held = (config.block_h + config.stages * config.block_kv) * 576 * dtype.itemsize
        assert bytes_held <= machine.target.shared_limit


def test_deepseek_on_hopper_takes_64_heads():
    spec = Spec(torch.bfloat16, 512, 64, 0, False, True)
    config = config_for(spec, Problem(64, 128, 4096), GPUS[2])
    assert (config.block_h, config.block_kv, config.split) == (64, 64, False)


@pytest.mark.parametrize("latent", [512, 640, 1024])
def test_latents_too_wide_for_hoppers_tiles_have_those_of_others(latent):
    spec = Spec(torch.bfloat16, latent, 64, 0, False, True, 8)
    config = config_for(spec, Problem(64, 128, 4096), GPUS[2])
    assert config is not None and (config.block_h == 64) == (latent == 512)


def test_long_caches_are_shared_out():
    spec = Spec(torch.bfloat16, 512, 64, 0, False, True)
    for machine in (CPU, GPUS[2]):
        few, many = Problem(1, 128, 100_000), Problem(1000, 128, 100_000)
        assert config_for(spec, few, machine).split
        assert splits_for(config_for(spec, few, machine), few, machine) >= machine.num_sms // 4
        assert not config_for(spec, many, machine).split
        assert not config_for(spec, Problem(1, 16, 100), machine).split
        assert not config_for(spec, few, machine, splits=1).split


@pytest.mark.parametrize("heads, batch, splits", [(16, 64, 2), (16, 33, 4), (16, 128, 1), (128, 16, 4), (64, 64, 2)])
def test_shares_fill_a_wave_and_start_no_second(heads, batch, splits):
    """Three shares of 64 sequences would be a wave and a half, which takes as long as two."""
    spec = Spec(torch.float16, 512, 64, 0, False, True, 8)
    problem = Problem(batch, heads, 8192)
    config = config_for(spec, problem, GPUS[2])
    assert splits_for(config, problem, GPUS[2]) == splits
    assert batch * -(-heads // config.block_h) * splits <= GPUS[2].num_sms


@pytest.mark.parametrize("latent", [512, 1024])  # by turns, and not
def test_no_split_is_empty(latent, problems):
    """An empty one would leave a part to join."""
    spec = Spec(torch.bfloat16, latent, 64, 0, False, True, 8)
    for _ in range(200):
        problem = Problem(
            problems.random.randint(1, 70), problems.random.randint(17, 300), problems.random.randint(1, 40000)
        )
        config = config_for(spec, problem, GPUS[2])
        splits = splits_for(config, problem, GPUS[2])
        tiles = -(-problem.positions // config.block_kv)
        each = -(-tiles // splits)
        assert (splits - 1) * each < tiles, problem


@pytest.mark.parametrize("split", [True, False])
def test_blocks_of_positions_are_each_in_one_split(split, problems):
    spec, config = Spec(torch.bfloat16, 512, 64, 0, False, True, 8), Config(64, 64, split=split)
    for _ in range(200):
        length = problems.pick(0, 1, 64, 65, 2**31 - 1, problems.random.randint(0, 3000))
        splits = problems.random.randint(1, 40) if split else 1
        found = [tuple(map(int, spec.key_blocks(config, length, splits, n))) for n in range(splits)]
        assert found[0][0] == 0 and found[-1][1] == -(-length // 64)
        assert all(a[1] == b[0] and b[0] <= b[1] for a, b in itertools.pairwise(found))
