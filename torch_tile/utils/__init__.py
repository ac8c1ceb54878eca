# SPDX-License-Identifier: Apache-2.0
"""Helpers of TileLang's `utils`: inputs and comparisons of tensors, and questions about buffers."""

from torch_tile.utils import device, target
from torch_tile.utils.language import (
    array_reduce,
    is_fragment,
    is_full_region,
    is_global,
    is_local,
    is_shared,
    is_shared_dynamic,
    retrieve_shape,
    retrieve_stride,
)
from torch_tile.utils.tensor import TensorSupplyType, get_tensor_supply, map_torch_type, torch_assert_close

__all__ = [
    "TensorSupplyType", "array_reduce", "device", "get_tensor_supply", "is_fragment", "is_full_region", "is_global",
    "is_local", "is_shared", "is_shared_dynamic", "map_torch_type", "retrieve_shape", "retrieve_stride", "target",
    "torch_assert_close",
]  # fmt: skip
