# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch

import torch_tile


def test_sizes():
    for a in range(40):
        for b in range(1, 9):
            assert torch_tile.cdiv(a, b) == (a + b - 1) // b
    assert [torch_tile.next_power_of_2(n) for n in (0, 1, 2, 3, 4, 5, 1000, 1024, 1025)] == [
        1, 1, 2, 4, 4, 8, 1024, 1024, 2048,
    ]  # fmt: skip
    assert torch_tile.math.cdiv is torch_tile.cdiv
    assert torch_tile.next_power_of_2(np.int64(5)) == 8


@pytest.mark.parametrize("dynamic", [False, True])
def test_dynamo_traces_checked_functions(dynamic):
    """Of sizes too: a check of arguments leaves the graph whole."""
    torch._dynamo.reset()
    scaled = torch.compile(
        lambda x: x * torch_tile.next_power_of_2(x.shape[0]), fullgraph=True, backend="eager", dynamic=dynamic
    )
    for rows in (5, 9):
        assert torch.equal(scaled(torch.ones(rows)), torch.full((rows,), 8.0 if rows == 5 else 16.0))
