# SPDX-License-Identifier: Apache-2.0
"""`fake_cuda`: the driver of fake_cuda.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for fake_cuda.py

from fake_cuda import FakeCuda, fake_library as built, install


@pytest.fixture(scope="session")
def fake_library() -> FakeCuda:
    return built()


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)
