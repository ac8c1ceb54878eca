# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

import torch_tile.language as T
from torch_tile import compat


def test_float8_types_by_format():
    compat.install()
    try:
        from tilelang.language.fp8 import determine_fp8_type, determine_torch_fp8_type
    finally:
        compat.uninstall()
    assert determine_fp8_type() is T.float8_e4m3fn and determine_fp8_type("e5m2") is T.float8_e5m2
    assert determine_torch_fp8_type("e5m2") is torch.float8_e5m2
    with pytest.raises(ValueError, match="e4m3, e5m2"):
        determine_fp8_type("e3m4")
