# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.tile` names what is near a misspelt operator, and is torch's namespace otherwise."""

import copy
import io

import pytest
import torch

import torch_tile
from torch_tile.diagnostics.spelling import nearest


class Two(torch.nn.Module):
    def forward(self, x):
        return torch.ops.tile.softmax(x, -1) + torch.ops.tile.rms_norm(x)


@pytest.mark.parametrize("name", torch_tile.ops.__all__)
def test_misspelt_operators(name) -> None:
    wrong = name[:-1]  # without its last letter
    if wrong in torch_tile.ops.__all__:
        return
    near = nearest(wrong, torch_tile.ops.__all__)
    assert near.startswith(wrong)
    with pytest.raises(AttributeError, match=f"has no attribute '{wrong}'; did you mean {near}\\?"):
        getattr(torch.ops.tile, wrong)


def test_other_names() -> None:
    with pytest.raises(AttributeError, match=r"'qqqq'; dir\(torch_tile\.ops\) has all names"):
        torch.ops.tile.qqqq
    assert not hasattr(torch.ops.tile, "qqqq") and not hasattr(torch.ops.tile, "__origin__")
    assert not hasattr(torch.ops.aten, "qqqq")
    with pytest.raises(AttributeError, match=r"'qqqq'$"):
        torch.ops.aten.qqqq


def test_packets_are_torchs() -> None:
    assert torch.ops.tile.softmax.__module__ == "torch._ops.tile"
    assert copy.deepcopy(torch.ops.tile.softmax) is torch.ops.tile.softmax
    module, x = Two(), torch.randn(3, 17)
    wanted = x.double().softmax(-1) + torch.nn.functional.rms_norm(x.double(), (17,), eps=1e-6)
    exported = torch.export.export(module, (x,))
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    for called in (
        torch.compile(module, backend="eager", fullgraph=True),
        torch.export.load(file).module(),
        torch.fx.symbolic_trace(module),
        torch.jit.script(module),
    ):
        torch.testing.assert_close(called(x).double(), wanted, rtol=1e-5, atol=1e-5)
