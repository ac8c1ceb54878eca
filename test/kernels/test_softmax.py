# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from torch_tile.kernels.softmax import reference


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4, 5), (0, 3), (3, 0)])
def test_every_dimension_is_torchs(shape):
    x = torch.randn(shape, dtype=torch.float64)
    for dim in range(-max(len(shape), 1), max(len(shape), 1)):
        torch.testing.assert_close(reference(x, dim), torch.softmax(x, dim))


def test_dtypes():
    x = torch.randn(5, 300).bfloat16()
    assert reference(x).dtype == torch.bfloat16
    torch.testing.assert_close(reference(x, -1, torch.float32), torch.softmax(x.float(), -1))
    assert reference(x, -1, torch.float64).dtype == torch.float64
    wide = torch.randn(5, 300) * 40
    torch.testing.assert_close(reference(wide, -1, torch.float16), torch.softmax(wide, -1).half())


def test_large_and_infinite_scores():
    x = torch.tensor([[1e4, 0.0], [-torch.inf, 0.0]])
    torch.testing.assert_close(reference(x), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    assert reference(torch.full((1, 3), -torch.inf)).isnan().all()  # like torch's
