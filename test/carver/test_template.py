# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

import torch_tile
from torch_tile.carver.arch import CDNA, CPU, CUDA, driver, get_arch
from torch_tile.carver.roller import NoRasterization
from torch_tile.carver.template import ElementwiseTemplate, MatmulTemplate
from torch_tile.diagnostics.errors import TileError


def test_suggestions_for_a_product():
    """As configurations of a kernel are made of them; the first one multiplies."""
    template = MatmulTemplate(M=96, N=80, K=64, trans_A=True, trans_B=False, out_dtype="float32")
    template.with_arch(CUDA("cuda -arch=sm_80"))
    hints = template.recommend_hints(topk=4)
    assert template.has_arch() and len(hints) == 4
    assert [h.seconds for h in hints] == sorted(h.seconds for h in hints)
    for hint in hints:
        (m, n), (warp_m, warp_n) = hint.block, hint.warp
        assert 1 <= m // warp_m * (n // warp_n) <= 8 and hint.rstep[0] >= 32 and hint.pipeline_stage > 1
        assert isinstance(hint.rasterization_plan, NoRasterization) and hint.to_dict()["block"] == [m, n]
    kernel = torch_tile.compile(template.equivalent_function(), target="cpu")
    a, b, c = torch.randn(64, 96).half(), torch.randn(64, 80).half(), torch.empty(96, 80)
    kernel(a, b, c)
    torch.testing.assert_close(c, a.float().T @ b.float(), rtol=1e-2, atol=1e-2)


def test_suggestions_for_elements():
    hints = ElementwiseTemplate([64, 1000], "float32").with_arch(CUDA("cuda:sm_90a")).recommend_hints(3)
    assert all(hint.block[0] == 1 and hint.block[1] % hint.thread[1] == 0 for hint in hints)


def test_machines():
    assert CUDA("sm_90").sm_version == 90 and CPU().platform == "CPU" and get_arch("cuda:sm_80").smem_cap > 1 << 16
    assert driver.get_num_sms() > 0 and driver.get_max_dynamic_shared_size_bytes() > 1 << 15
    assert driver.get_device_name() and driver.get_registers_per_block() == 65536
    with pytest.raises(ValueError, match="takes no target"):
        CUDA("cpu")
    with pytest.raises(TileError, match="hip"):
        CDNA()
