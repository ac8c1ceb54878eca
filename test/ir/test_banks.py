# SPDX-License-Identifier: Apache-2.0
import random

import pytest

from torch_tile.ir.banks import passes


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
def test_neighbours_are_free_of_conflicts(width):
    assert passes([lane * width for lane in range(32)], width) == 1


@pytest.mark.parametrize(("stride", "expected"), [(4, 1), (8, 2), (12, 1), (64, 16), (128, 32), (132, 1), (0, 1)])
def test_strided_words(stride, expected):
    assert passes([lane * stride for lane in range(32)], 4) == expected


def test_eight_lanes_of_sixteen_bytes_are_one_group(seed):
    rows = list(range(8))
    random.shuffle(rows)
    assert passes([row * 128 for row in rows] * 4, 16) == 8
    assert passes([row * 128 + 16 * (row ^ 5) for row in rows] * 4, 16) == 1
    assert passes([0] * 16 + [128] * 16, 16) == 1  # the groups do not meet
