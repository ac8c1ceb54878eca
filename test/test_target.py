# SPDX-License-Identifier: Apache-2.0
"""Names of targets."""

import pytest

import torch_tile.target
from torch_tile.diagnostics import TileError
from torch_tile.target import Target


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch_tile.target, "detected", lambda: 0)


@pytest.mark.parametrize("name", ["cpu", "c", "llvm", "CPU"])
def test_cpu_spellings(name):
    assert Target.of(name) == Target("cpu")
    assert Target.of(name).arch == ""


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("cuda:sm_80", "sm_80"),
        ("cuda -arch=sm_89", "sm_89"),
        ("cuda:sm_90", "sm_90a"),
        ("sm_90a", "sm_90a"),
        ({"kind": "cuda", "arch": "sm_90"}, "sm_90a"),
        ("cuda:sm_120", "sm_120a"),
        ("cuda", "sm_90a"),
    ],
)
def test_cuda_spellings(name, arch, no_gpu):
    found = Target.of(name)
    assert (found.kind, found.arch) == ("cuda", arch)
    assert str(found) == f"cuda:{arch}"
    assert Target.of(str(found)) == found


def test_auto_is_the_gpu_if_there_is_one(monkeypatch, no_gpu):
    assert Target.of("auto").kind == "cpu"
    monkeypatch.setattr(torch_tile.target, "detected", lambda: 80)
    assert Target.of("auto") == Target.of("cuda") == Target("cuda", 80)


@pytest.mark.parametrize("name", ["hip", "metal", "webgpu"])
def test_other_machines_are_refused(name):
    with pytest.raises(TileError) as caught:
        Target.of(name)
    assert caught.value.diagnostics[0].code == "unsupported_on_target"


@pytest.mark.parametrize("name", ["gpu?", 3, object()])
def test_nonsense_is_refused(name):
    with pytest.raises(TileError) as caught:
        Target.of(name)
    assert caught.value.diagnostics[0].code == "bad_argument"
