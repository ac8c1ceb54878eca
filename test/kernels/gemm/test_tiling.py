# SPDX-License-Identifier: Apache-2.0

from dataclasses import replace

import pytest
import torch

from torch_tile.hardware import Target
from torch_tile.kernels.common import Machine
from torch_tile.kernels.gemm.tiling import (
    Config,
    Problem,
    buffers_of,
    config_for,
    footprint,
    panel_width,
    panels_of,
    with_stages,
)

CPU = Machine(Target("cpu"), 16)
GPUS = [Machine(Target("cuda", c), num_sms) for c, num_sms in ((80, 108), (89, 142), (90, 132), (120, 170))]
SIZES = [(1, 64, 4096), (8, 8, 100_000), (1024, 1024, 1024), (1, 1, 1), (8192, 8192, 8192), (100, 50_000, 64)]


@pytest.mark.parametrize("machine", [CPU, *GPUS], ids=lambda m: str(m.target))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("products", [1, 2, 3])
def test_every_problem_has_a_cut_that_fits(machine, dtype, products):
    for m, n, k in SIZES:
        config = config_for(Problem(dtype, 1, m, n, k, products), machine)
        assert config.splits == 1 or config.splits * config.block_k <= k
        assert config.block_m < max(2 * m, 32)
        if machine.is_gpu:
            stage = (config.block_m + products * config.block_n) * config.block_k * dtype.itemsize
            assert config.stages >= 1 and config.stages * stage <= machine.target.shared_limit
            assert config.block_m * config.block_n * products // config.threads <= 128


@pytest.mark.parametrize("machine", GPUS, ids=lambda m: str(m.target))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_products_that_no_tile_holds_have_no_cut(machine, dtype):
    for products in (4, 5, 8, 40):
        for m, n, k in SIZES:
            config = config_for(Problem(dtype, 1, m, n, k, products), machine)
            if config is None:
                assert products > 4
                continue
            stage = (config.block_m + products * config.block_n) * config.block_k * dtype.itemsize
            assert config.stages * stage <= machine.target.shared_limit
            assert config.block_m * config.block_n * products // config.threads <= 128
        assert (products < 40) or config is None


def test_the_shape_decides():
    h200 = GPUS[2]
    large = config_for(Problem(torch.float16, 1, 8192, 8192, 8192), h200)
    assert large.block_m * large.block_n == 128 * 256 and large.splits == 1
    assert config_for(Problem(torch.float16, 1, 16, 4096, 4096), h200).block_m == 16
    fewer = [config_for(Problem(torch.float16, 1, 128, n, 4096, aligned=True), h200) for n in (6144, 10240)]
    assert [(c.block_m, c.block_n) for c in fewer] == [(64, 96), (128, 96)]
    assert config_for(Problem(torch.float16, 1, 64, 64, 65536), h200).splits > 8
    for machine in (CPU, h200):
        assert config_for(Problem(torch.float16, 1, 1, 1000, 1000, row=True), machine).block_m == 1


def test_choices_are_remembered():
    problem = Problem(torch.float16, 1, 77, 4096, 4096)
    assert config_for(problem, GPUS[2]) is config_for(Problem(torch.float16, 1, 77, 4096, 4096), GPUS[2])


@pytest.mark.parametrize("products", [1, 2, 3])
def test_hopper_takes_tile_after_tile(products):
    h200 = GPUS[2]
    for m, n, k in ((4096, 1024, 8192), (4096, 8192, 8192), (8192, 8192, 8192), (4096, 1000, 4096)):
        config = config_for(Problem(torch.bfloat16, 1, m, n, k, products, aligned=True), h200)
        assert config.blocks == 132 and config.splits == 1 and config.panel and config.stages >= 2
        assert footprint(config, torch.bfloat16, products, torch.bfloat16, bulk=True).fits(h200.target)
        assert config.block_n % panel_width(config.block_m, 2) == 0
    for machine in (CPU, GPUS[0], GPUS[1], GPUS[3]):
        assert not config_for(Problem(torch.bfloat16, 1, 8192, 8192, 8192, aligned=True), machine).blocks
    for other in (
        Problem(torch.float32, 1, 8192, 8192, 8192, aligned=True),
        Problem(torch.float16, 1, 8192, 8192, 8192),
    ):
        assert not config_for(other, h200).blocks


def test_tiles_fill_the_last_turn():
    """One turn of 128 large tiles, two of them, and where many iterations make all tiles alike those that reuse
    most.
    """
    h200 = GPUS[2]

    def tile(m, n, k):
        config = config_for(Problem(torch.float16, 1, m, n, k, aligned=True), h200)
        return config.block_m, config.block_n

    assert tile(4096, 1024, 8192) == tile(8192, 1024, 8192) == (128, 256)
    assert tile(4096, 28672, 8192)[1] == 192


# Microseconds on an H200 of products in bfloat16 by matrices stored [N, K] (h200_tile_widths_2026-11-30.txt).
BETWEEN = {
    (1000, 4608, 7168): {"128x144": 98.8, "128x192": 115.6, "128x160": 106.0, "128x176": 108.2},
    (2048, 2112, 7168): {"192x192": 94.8, "128x144": 98.3, "128x136": 94.4, "192x96": 101.6},
    (640, 2112, 7168): {"128x96": 35.0, "128x88": 35.1, "64x176": 36.8, "128x128": 44.5},
    (256, 4608, 7168): {"128x72": 34.8, "128x80": 37.3, "128x96": 38.0, "128x128": 45.8},
    (200, 4096, 4096): {"64x128": 22.8, "128x64": 27.9, "128x72": 27.7},
    (1500, 5120, 5120): {"128x256": 112.1, "128x160": 116.2, "128x176": 118.7},
    (3072, 1536, 7168): {"192x192": 97.3, "128x144": 99.1, "192x96": 103.6},
    (768, 7168, 2048): {"128x176": 37.5, "128x192": 39.4, "128x168": 37.8},
    (512, 28672, 4096): {"128x176": 161.8, "128x128": 176.2},
    (384, 6144, 4096): {"128x144": 35.6, "128x192": 39.9},
    (2048, 768, 3072): {"128x96": 19.7, "128x128": 24.2},
    (1576, 768, 3072): {"128x96": 18.8, "128x128": 23.9},
    (900, 11008, 4096): {"128x176": 126.2, "64x256": 141.6},
    (1800, 1280, 1280): {"128x176": 17.0, "128x192": 17.7},
}


@pytest.mark.parametrize("shape", BETWEEN, ids=str)
def test_widths_between_others_where_they_were_faster(shape):
    """Only for matrices stored [N, K]: else shared tiles of b would have panels narrower than a swizzle."""
    config, other = (
        config_for(Problem(torch.bfloat16, 1, *shape, aligned=True, along_k=along_k), GPUS[2]) for along_k in (1, 0)
    )
    times = BETWEEN[shape]
    assert times[f"{config.block_m}x{config.block_n}"] <= 1.01 * min(times.values())
    assert (
        config.blocks == 132 * (-(-shape[0] // config.block_m) * -(-shape[1] // config.block_n) > 132) or config.blocks
    )
    assert other.block_n % 64 == 0


def test_panels_of_a_tile():
    """Two buffers in turns for each width; panels are powers of two, and a turned tile is a panel by itself."""
    assert panels_of(Config(128, 192), 2) == [(0, 64, 0), (64, 64, 1), (128, 64, 0)]
    assert panels_of(Config(192, 48), 2) == [(0, 32, 0), (32, 16, 1)]
    assert panels_of(Config(128, 176), 2) == [(0, 64, 0), (64, 64, 1), (128, 32, 2), (160, 16, 3)]
    pieces = panels_of(Config(128, 144), 4, [(0, 128), (128, 16)])
    assert pieces == [(0, 32, 0), (32, 32, 1), (64, 32, 0), (96, 32, 1), (128, 16, 2)]
    assert buffers_of(pieces) == [32, 32, 16]
    assert panels_of(Config(16, 256, transposed=True), 2) == [(0, 256, 0)]


GPUS_few_rows = [Machine(Target("cuda", c), num_sms) for c, num_sms in ((80, 108), (89, 142), (90, 132), (120, 170))]


def test_blocks_fill_the_machine():
    a100, _, h200, _ = GPUS_few_rows
    for m, n, k, rows, columns, splits, cluster in [
        (16, 512, 512, 16, 64, 1, False), (64, 1024, 1024, 32, 32, 1, False),
        (64, 1024, 4096, 64, 32, 8, True), (16, 64, 65536, 16, 64, 64, False), (1, 16384, 16384, 16, 128, 1, False),
        (2, 16384, 16384, 16, 64, 1, False), (1, 9216, 36864, 16, 128, 1, False), (1, 9216, 9216, 16, 64, 1, False),
    ]:  # fmt: skip
        problem = Problem(torch.bfloat16, 1, m, n, k, aligned=True)
        config = config_for(problem, h200)
        found = config.block_m, config.block_n, config.splits, config.cluster
        assert found == (rows, columns, splits, cluster), (m, n, k, config)
        assert not config.transposed and not config_for(problem, a100).cluster


@pytest.mark.parametrize("products", [1, 2])
def test_rows_that_wgmma_has_no_64_of_are_its_columns(products):
    """Tiles with as many rows as there are, as many at a time as it takes to stream the matrix, joined for a long K."""
    h200 = GPUS_few_rows[2]
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
            found = config.block_m, config.block_n, config.splits, config.cluster, config.transposed
            assert found == (rows, columns, splits, splits > 1, True), (problem, config)
        assert config.stages >= 3 and with_stages(config, problem, h200, bulk=True) == config
        for other in (GPUS_few_rows[0], GPUS_few_rows[3]):
            assert not config_for(problem, other).transposed
        for change in ({"aligned": False}, {"dtype": torch.float32}, {"m": 129}, {"k": 512}):
            unfit = replace(problem, **change)
            assert not config_for(unfit, h200).transposed


def test_other_tiles_stay_where_they_were_faster():
    h200 = GPUS_few_rows[2]
    for m, n, k in (
        (16, 8192, 8192), (8, 28672, 4096), (48, 4608, 1536), (64, 4096, 14336), (64, 2048, 2048), (96, 2048, 2048),
        (96, 1536, 1536), (128, 3584, 18944), (128, 6144, 4096),
    ):  # fmt: skip
        assert not config_for(Problem(torch.bfloat16, 1, m, n, k, aligned=True), h200).transposed


def test_a_row_goes_by_tensor_cores_where_that_was_faster():
    for machine, block_m in zip(GPUS_few_rows, (1, 1, 16, 1), strict=True):
        for n, k in ((16384, 16384), (8192, 4096)):
            problem = Problem(torch.float16, 1, 1, n, k, row=True, aligned=True)
            assert config_for(problem, machine).block_m == block_m
        assert config_for(Problem(torch.float16, 1, 1, 9216, 9216, row=True, aligned=True), machine).block_m == 1
    for others in ({"products": 2}, {"dtype": torch.float32}, {"aligned": False}):
        given = {"dtype": torch.float16, "products": 1, "aligned": True} | others
        assert config_for(Problem(batch=1, m=1, n=8192, k=4096, row=True, **given), GPUS_few_rows[2]).block_m == 1
