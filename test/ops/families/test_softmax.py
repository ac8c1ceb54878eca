# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

import torch_tile.ops as ops


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1,), (5, 33), (2, 3, 7), (3, 0, 4)])
def test_is_torchs(shape, dtype, maker):
    x = maker(1, dtype)(*shape) * 5
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    for dim in range(-len(shape), len(shape)):
        want = torch.softmax(x.double(), dim)
        torch.testing.assert_close(ops.softmax(x, dim).double(), want, rtol=tolerance, atol=tolerance / 10)
        wide = ops.softmax(x, dim, torch.float32)
        assert wide.dtype == torch.float32
        torch.testing.assert_close(wide.double(), want, rtol=1e-4, atol=1e-6)


def test_refuses():
    x = torch.zeros(3, 4)
    with pytest.raises(IndexError, match=r"tile.softmax: dim is 2; expected -2 to 1 for shape \[3, 4\]"):
        ops.softmax(x, 2)
    with pytest.raises(IndexError, match="dim is -3"):
        ops.softmax(x, -3)
    with pytest.raises(TypeError, match=r"tile\.softmax: x has dtype torch.int64"):
        ops.softmax(x.long())
    with pytest.raises(TypeError, match=r"tile\.softmax: dtype is torch.int32"):
        ops.softmax(x, 0, torch.int32)
