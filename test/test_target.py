# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from torch_tile.diagnostics import TileError
from torch_tile.target import Target


@pytest.mark.parametrize(
    "name", ["auto", "cpu", "c", "llvm", "host", "CPU", "llvm -mcpu=native", "", "  ", torch.device("cpu")]
)
def test_cpu(name, recwarn):
    assert Target.of(name) == Target("cpu") and str(Target.of(name)) == "cpu"
    assert Target.of(Target.of(name)) == Target("cpu")
    assert not recwarn


@pytest.mark.parametrize("name", ["cuda", "cuda -arch=sm_90", "sm_90a", "nvidia/h100", torch.device("cuda", 1)])
def test_cuda_is_compiled_for_the_cpu(name):
    with pytest.warns(UserWarning, match="no CUDA code generator here, compiling for the CPU"):
        assert Target.of(name) == Target("cpu")


@pytest.mark.parametrize("name", ["hip", "metal", "webgpu"])
def test_other_machines(name):
    with pytest.raises(TileError, match=f"not supported on target {name}") as caught:
        Target.of(name)
    assert caught.value.code == "unsupported_on_target"


@pytest.mark.parametrize("name", ["tpu", None, 3])
def test_nonsense(name):
    with pytest.raises(TileError, match="argument `target` is") as caught:
        Target.of(name)
    assert caught.value.code == "bad_argument"
