# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from torch_tile.runtime import nvrtc as module
from torch_tile.runtime.nvrtc import NoNvrtcError, find_nvrtc


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing remembered, nothing found by the loader, no toolkit of this machine."""
    find_nvrtc.cache_clear()
    monkeypatch.setattr(module, "_load_by_name", lambda name: None)
    for name in ("TORCH_TILE_NVRTC", "CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    yield
    find_nvrtc.cache_clear()


def make(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"x" * len(name))
    return folder


def packages(monkeypatch, **folders: Path) -> None:
    monkeypatch.setattr(module, "_packages", lambda name: [folders[name]] if name in folders else [])


def test_the_wheel_comes_first_and_knows_its_builtins(monkeypatch, tmp_path):
    make(tmp_path / "nvidia/cuda_nvrtc/lib", "libnvrtc.so.12", "libnvrtc.alt.so.12", "libnvrtc-builtins.so.12.8")
    make(tmp_path / "torch/lib", "libnvrtc-672ee683.so.13")
    packages(monkeypatch, nvidia=tmp_path / "nvidia", torch=tmp_path / "torch")
    found = find_nvrtc()
    assert found.path.name == "libnvrtc.so.12" and found.builtins.name == "libnvrtc-builtins.so.12.8"
    assert found.identity == "libnvrtc.so.12 14 libnvrtc-builtins.so.12.8 25"


def test_the_newest_of_a_folder(monkeypatch, tmp_path):
    make(tmp_path / "nvidia/cu13/lib", "libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libnvrtc-builtins.alt.so.13.0")
    packages(monkeypatch, nvidia=tmp_path / "nvidia")
    assert find_nvrtc().path.name == "libnvrtc.so.13"


@pytest.mark.parametrize(("version", "wanted"), [("12.8", 12), ("13.0", 13), (None, 13)])
def test_of_several_the_one_of_torch(version, wanted, monkeypatch, tmp_path):
    make(tmp_path / "nvidia/cuda_nvrtc/lib", "libnvrtc.so.12")
    make(tmp_path / "nvidia/cu13/lib", "libnvrtc.so.13")
    packages(monkeypatch, nvidia=tmp_path / "nvidia")
    monkeypatch.setattr("torch.version.cuda", version)
    assert find_nvrtc().path.name == f"libnvrtc.so.{wanted}"


def test_torch_may_rename_its_copy(monkeypatch, tmp_path):
    make(tmp_path / "torch/lib", "libnvrtc-672ee683.so.12", "libnvrtc-builtins.so.12.6", "libtorch.so")
    packages(monkeypatch, torch=tmp_path / "torch")
    assert find_nvrtc().path.name == "libnvrtc-672ee683.so.12"


def test_a_toolkit_and_a_named_file(monkeypatch, tmp_path):
    packages(monkeypatch)
    make(tmp_path / "cuda/lib64", "libnvrtc.so.13.0.88", "libnvrtc-builtins.so.13.0.88")
    (tmp_path / "cuda/lib64/libnvrtc.so").symlink_to("libnvrtc.so.13.0.88")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert find_nvrtc().path.resolve().name == "libnvrtc.so.13.0.88"
    find_nvrtc.cache_clear()
    own = make(tmp_path / "own", "libnvrtc.so.12") / "libnvrtc.so.12"
    monkeypatch.setenv("TORCH_TILE_NVRTC", str(own))
    assert find_nvrtc().path == own and find_nvrtc().builtins is None


def test_what_is_missing_is_said(monkeypatch, tmp_path):
    packages(monkeypatch, torch=make(tmp_path / "torch/lib", "libnvrtc.so.11.8").parent)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [])
    monkeypatch.setattr(module, "_load_by_name", lambda name: None)
    with pytest.raises(NoNvrtcError, match=r"torch/lib.*pip install nvidia-cuda-nvrtc"):
        find_nvrtc()
    monkeypatch.setenv("TORCH_TILE_NVRTC", str(tmp_path / "gone.so"))
    with pytest.raises(NoNvrtcError, match=r"gone\.so, which does not exist"):
        find_nvrtc()
