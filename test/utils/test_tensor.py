# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

import torch_tile.language as T
from torch_tile.utils import TensorSupplyType, get_tensor_supply
from torch_tile.utils.tensor import is_float8_dtype, map_torch_type


@T.prim_func
def kernel(A: T.Tensor((64, 3), "float16"), B: T.Tensor((8,), "int8"), n: T.int32):
    with T.Kernel(1):
        A[0, 0] = B[0] + n


def test_tensors_for_parameters():
    a, b, n = kernel.program.params
    made = get_tensor_supply(TensorSupplyType.Integer)(a)
    assert made.shape == (64, 3) and made.dtype == torch.float16 and made.abs().max() <= 2
    assert (get_tensor_supply(TensorSupplyType.One)(b) == 1).all() and get_tensor_supply()(b).dtype == torch.int8
    with pytest.raises(ValueError, match="is a scalar"):
        get_tensor_supply()(n)


def test_dtypes():
    assert map_torch_type("float8_e4m3fn") is torch.float8_e4m3fn and map_torch_type(T.int32) is torch.int32
    assert is_float8_dtype(torch.float8_e5m2) and not is_float8_dtype(torch.int8) and not is_float8_dtype(torch.half)
    with pytest.raises(ValueError, match="is not a dtype"):
        map_torch_type("float7")
