# SPDX-License-Identifier: Apache-2.0
"""`fake_cuda`: the driver of fake_cuda.py. `way`: both ways to launch through it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for fake_cuda.py

from fake_cuda import FakeCuda, fake_library as built, install

from torch_tile.runtime import cuda_launch
from torch_tile.runtime.native_launch import native


@pytest.fixture(scope="session")
def fake_library() -> FakeCuda:
    return built()


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)


@pytest.fixture(params=["python", "native"])
def way(request: pytest.FixtureRequest, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> str:
    """Launches by the way in Python, or by the native one."""
    if request.param == "python":
        monkeypatch.setattr(cuda_launch, "launch_function", lambda *_: None)
    else:
        assert native() is not None
    return request.param
