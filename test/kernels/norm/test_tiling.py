# SPDX-License-Identifier: Apache-2.0
import random

import pytest

from torch_tile.hardware import Target
from torch_tile.ir.layout import points
from torch_tile.kernels.common import Machine
from torch_tile.kernels.norm.tiling import Config, config_for

CPU, GPU = Machine(Target("cpu"), 16), Machine(Target("cuda", 90), 132)


def test_cpu_tiles_stay_in_the_first_cache():
    assert config_for(100, 1, CPU).whole and config_for(8192, 1, CPU).whole and not config_for(8193, 1, CPU).whole


@pytest.mark.parametrize("vector", [1, 4, 8])
def test_gpu_tiles_cover_the_row(vector, seed):
    draw = random.Random(seed)
    for n in [1, 160, 256, 320, 512, 640, 1024, 4096, 32768, 40000, *(draw.randint(1, 50_000) for _ in range(20))]:
        n = -(-n // vector) * vector
        config = config_for(n, vector, GPU)
        assert config.whole == (config.width >= n) or config.width < n
        assert config.whole or config.width < n
        layout = config.layout
        assert layout.shape == (config.rows, config.width)
        assert layout.extent("t") == config.threads and layout.extent("r") <= 64 + vector
        assert layout.vector_width() % vector == 0


@pytest.mark.parametrize("n, lanes", [(160, 4), (256, 8), (320, 8), (512, 16), (640, 16), (1024, 32), (4096, 128)])
def test_rows_of_models_waste_nothing(n, lanes):
    config = config_for(n, 8, GPU)
    assert config.width == n and config.lanes == lanes and config.whole and config.exact
    assert not config_for(n - 8, 8, GPU).exact or config_for(n - 8, 8, GPU).width == n - 8
    assert not config_for(n, 1, GPU).exact  # rows may begin anywhere


def test_a_layout_holds_each_element_once():
    config = Config(rows=8, width=24, whole=True, threads=16, lanes=4, vector=2)
    places = {tuple(config.layout.apply(p).values()) for p in points((8, 24))}
    assert len(places) == 8 * 24
