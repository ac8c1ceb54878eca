# SPDX-License-Identifier: Apache-2.0
import torch_tile


def test_sizes():
    for a in range(40):
        for b in range(1, 9):
            assert torch_tile.cdiv(a, b) == (a + b - 1) // b
    assert [torch_tile.next_power_of_2(n) for n in (0, 1, 2, 3, 4, 5, 1000, 1024, 1025)] == [
        1, 1, 2, 4, 4, 8, 1024, 1024, 2048,
    ]  # fmt: skip
    assert torch_tile.math.cdiv is torch_tile.cdiv
