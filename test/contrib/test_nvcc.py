# SPDX-License-Identifier: Apache-2.0
import pytest

from torch_tile.contrib import nvcc


def test_capabilities():
    assert nvcc.get_target_compute_version("cuda:sm_90a") == "9.0" and nvcc.parse_compute_version("8.9") == (8, 9)
    assert nvcc.get_target_arch("9.0") == "90a" and nvcc.have_bf16("8.0") and not nvcc.have_bf16("7.5")
    assert nvcc.have_fp8("8.9") and not nvcc.have_fp8("8.0")
    assert nvcc.have_tma("sm_90") and not nvcc.have_tma("sm_80") and nvcc.have_pdl("sm_90") and nvcc.is_hopper("sm_90")
    with pytest.raises(ValueError, match="no GPU"):
        nvcc.get_target_compute_version("cpu")
