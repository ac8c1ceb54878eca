# SPDX-License-Identifier: Apache-2.0
import itertools
from dataclasses import replace

import pytest
import torch

from torch_tile.hardware import Target
from torch_tile.kernels.common import Machine
from torch_tile.kernels.gemm.dequant_tiling import FEW_ROWS, Problem, config_for

CPU = Machine(Target("cpu"), 16)
GPUS = [Machine(Target("cuda", c), units) for c, units in ((80, 108), (90, 132), (120, 170))]
H200 = GPUS[1]
LARGE = Problem(torch.bfloat16, 16, 16384, 16384, 1, 4, 128, True)


@pytest.mark.parametrize("machine", [CPU, *GPUS], ids=lambda m: str(m.target))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("products", [1, 2])
def test_every_problem_has_a_cut_that_fits(machine, dtype, bits, products):
    for m in (1, 8, 33, 64, 65, 200, 1024):
        for n, k in ((16384, 16384), (100, 100_032), (1, 64)):
            for group in (0, 16, 32, 64, 192, 1024):
                config = config_for(Problem(dtype, m, n, k, products, bits, group, True), machine)
                steps = config.block_k
                assert not group or steps % group == 0 or group % steps == 0  # steps hold whole groups or lie in one
                assert steps * bits % 8 == 0
                assert config.splits == 1 or config.splits * steps <= k
                if machine.is_gpu:
                    stage = config.block_m * steps * dtype.itemsize + products * config.block_n * steps * bits // 8
                    assert config.stages * stage + 1024 <= machine.target.shared_limit
                    assert config.block_m * config.block_n * products // config.threads <= 128


@pytest.mark.parametrize("machine", GPUS, ids=lambda m: str(m.target))
@pytest.mark.parametrize("products", [3, 4, 5, 8, 100])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_many_products_have_a_cut_that_fits_or_none(machine, products, dtype):
    """Rows and columns of a step are what instructions and words take."""
    for m, bits, group in itertools.product((1, 16, 40, 64, 100, 1024), (1, 4, 8), (0, 16, 128, 192)):
        config = config_for(Problem(dtype, m, 4096, 192 * 128, products, bits, group, True), machine)
        if config is None:
            assert products > 4
            continue
        assert config.block_m % 8 == 0 and config.block_k % 16 == 0 and config.stages > 0
        assert not group or config.block_k % group == 0 or group % config.block_k == 0
        stage = config.block_k * (config.block_m * dtype.itemsize + products * config.block_n * bits // 8)
        assert config.stages * stage + 1024 <= machine.target.shared_limit
        wide = max(1, dtype.itemsize // 4)
        assert config.block_m * config.block_n * products * wide // config.threads <= 128


def test_few_rows_fill_the_machine():
    few = config_for(LARGE, H200)
    assert few.block_m == 16 and few.splits == 1
    for n, k, splits, cluster in (
        (1024, 8192, 8, True),
        (4096, 4096, 2, True),
        (8192, 8192, 2, True),
        (4096, 14336, 4, False),
    ):
        short = config_for(replace(LARGE, n=n, k=k), H200)
        assert (short.splits, short.cluster) == (splits, cluster), (n, k, short)
        assert short.splits * -(-n // short.block_n) > 0.9 * H200.units
        assert not config_for(replace(LARGE, n=n, k=k), GPUS[0]).cluster
    assert config_for(replace(LARGE, m=1), H200).block_m == 8
    assert config_for(replace(LARGE, m=FEW_ROWS), H200).block_m == FEW_ROWS


def test_many_rows_use_two_warpgroups_on_hopper_only():
    many = replace(LARGE, m=1024)
    assert config_for(many, H200).threads == 256 and config_for(many, H200).block_m == 256
    assert config_for(replace(many, products=2), H200).block_m <= 128
    for other in (config_for(many, GPUS[0]), config_for(replace(many, aligned=False), H200)):
        assert other.threads == 128 and other.block_m == 64
