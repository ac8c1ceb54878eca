# SPDX-License-Identifier: Apache-2.0
"""Names of targets."""

import pytest

import torch_tile.hardware
from torch_tile.diagnostics.errors import TileError
from torch_tile.hardware import Target


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch_tile.hardware, "detected", lambda: 0)


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
    monkeypatch.setattr(torch_tile.hardware, "detected", lambda: 80)
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


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "blocks"),
    [
        ("sm_90", 256, 80, 65_608, 3),  # registers, as shared memory, leave room for three
        ("sm_90", 256, 128, 98_376, 2),
        ("sm_90", 160, 154, 81_992, 1),  # five warps have the registers of eight
        ("sm_90", 384, 168, 200_000, 1),
        ("sm_80", 128, 32, 0, 16),  # threads
        ("sm_89", 128, 32, 0, 12),
        ("sm_90", 32, 16, 0, 32),  # no multiprocessor runs more
        ("sm_89", 128, 32, 40_000, 2),  # shared memory
    ],
)
def test_blocks_at_once(arch, threads, registers, shared, blocks):
    assert Target.of(f"cuda:{arch}").blocks_at_once(threads, registers, shared) == blocks
