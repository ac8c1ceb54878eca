# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
import torch

from torch_tile.hardware import Target
from torch_tile.kernels.common import Machine
from torch_tile.kernels.gemm.candidates import stage_bytes
from torch_tile.kernels.gemm.tiling import Problem, config_for

GPUS = [Machine(Target("cuda", c), units) for c, units in ((80, 108), (89, 142), (90, 132), (120, 170))]


def test_blocks_fill_the_machine():
    a100, _, h200, _ = GPUS
    for m, n, k, rows, columns, splits, cluster in [
        (16, 512, 512, 16, 64, 1, False), (64, 1024, 1024, 32, 32, 1, False),
        (64, 1024, 4096, 64, 32, 8, True), (16, 64, 65536, 16, 64, 64, False), (1, 16384, 16384, 16, 128, 1, False),
        (2, 16384, 16384, 16, 64, 1, False), (1, 9216, 36864, 16, 128, 1, False), (1, 9216, 9216, 16, 64, 1, False),
    ]:  # fmt: skip
        problem = Problem(torch.bfloat16, 1, m, n, k, aligned=True)
        config = config_for(problem, h200)
        found = config.block_m, config.block_n, config.splits, config.cluster
        assert found == (rows, columns, splits, cluster), (m, n, k, config)
        assert not config.turned and not config_for(problem, a100).cluster


@pytest.mark.parametrize("products", [1, 2])
def test_rows_that_wgmma_has_no_64_of_are_its_columns(products):
    """Tiles with as many rows as there are, as many at a time as it takes to stream the matrix, joined for a long K."""
    h200 = GPUS[2]
    for m, n, k, rows, columns, splits in [
        (8, 4096, 4096, 8, 64, 1), (16, 6144, 4096, 16, 64, 1), (20, 4096, 14336, 24, 64, 1),
        (17, 9216, 9216, 24, 128, 1),
        (32, 28672, 4096, 32, 256, 1), (32, 57344, 8192, 32, 128, 1), (32, 1024, 4096, 32, 64, 4),
        (1, 512, 4096, 8, 64, 8),
        (40, 4608, 3584, 48, 64, 1), (48, 4096, 14336, 48, 64, 2), (64, 1536, 8960, 64, 64, 4),
        (72, 4096, 4096, 80, 64, 1),
        (96, 10240, 8192, 96, 128, 1), (100, 3584, 18944, 112, 64, 2), (128, 1536, 8960, 128, 64, 4),
    ]:  # fmt: skip
        problem = Problem(torch.bfloat16, 1, m, n, k, products, aligned=True)
        config = config_for(problem, h200)
        if products == 1 or rows * columns <= 64 * 128:
            found = config.block_m, config.block_n, config.splits, config.cluster, config.turned
            assert found == (rows, columns, splits, splits > 1, True), (problem, config)
        leaving = config.block_m * config.block_n * 2 if config.staged else 0
        assert config.stages >= 3 and config.stages * stage_bytes(config, problem) + leaving < h200.target.shared_limit
        for other in (GPUS[0], GPUS[3]):
            assert not config_for(problem, other).turned
        for change in ({"aligned": False}, {"dtype": torch.float32}, {"m": 129}, {"k": 512}):
            unfit = replace(problem, **change)
            assert not config_for(unfit, h200).turned


def test_other_tiles_stay_where_they_were_faster():
    h200 = GPUS[2]
    for m, n, k in (
        (16, 8192, 8192), (8, 28672, 4096), (48, 4608, 1536), (64, 4096, 14336), (64, 2048, 2048), (96, 2048, 2048),
        (96, 1536, 1536), (128, 3584, 18944), (128, 6144, 4096),
    ):  # fmt: skip
        assert not config_for(Problem(torch.bfloat16, 1, m, n, k, aligned=True), h200).turned


def test_a_row_goes_by_tensor_cores_where_that_was_faster():
    for machine, block_m in zip(GPUS, (1, 1, 16, 1), strict=True):
        for n, k in ((16384, 16384), (8192, 4096)):
            problem = Problem(torch.float16, 1, 1, n, k, row=True, aligned=True)
            assert config_for(problem, machine).block_m == block_m
        assert config_for(Problem(torch.float16, 1, 1, 9216, 9216, row=True, aligned=True), machine).block_m == 1
    for others in ({"products": 2}, {"dtype": torch.float32}, {"aligned": False}):
        given = {"dtype": torch.float16, "products": 1, "aligned": True} | others
        assert config_for(Problem(batch=1, m=1, n=8192, k=4096, row=True, **given), GPUS[2]).block_m == 1
