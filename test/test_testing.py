# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from torch_tile.testing import torch_assert_close


def test_a_few_elements_may_differ():
    a = torch.zeros(1000)
    b = a.clone()
    b[0] = 1
    assert torch_assert_close(a, b)
    with pytest.raises(AssertionError, match=r"0\.20% of 1000 elements differ"):
        b[1] = 1
        torch_assert_close(a, b)
    assert torch_assert_close(a, b, max_mismatched_ratio=0.01)
    assert torch_assert_close(a, a + 0.009)


def test_nan():
    a = torch.tensor([1.0, float("nan")])
    assert torch_assert_close(a, a.clone())
    with pytest.raises(AssertionError, match="differ"):
        torch_assert_close(a, a.clone(), equal_nan=False)
    with pytest.raises(TypeError, match="equal_nann"):
        torch_assert_close(a, a.clone(), equal_nann=False)
