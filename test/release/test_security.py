# SPDX-License-Identifier: Apache-2.0
"""SECURITY.md names each variable of the environment that leads to code being run."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.every_sample  # facts about the sources

ROOT = Path(__file__).parents[2]
LEADING = {
    "CXX", "PATH", "CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX", "TMPDIR", "XDG_CACHE_HOME", "HOME",
    "LD_LIBRARY_PATH", "TORCH_TILE_CACHE_DIR", "TORCH_TILE_NVRTC",
}  # fmt: skip

HARMLESS = {"NO_COLOR", "CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS"}


def test_variables_are_named() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    assert not [name for name in LEADING if not re.search(rf"`{name}`", page)]
    assert "report" in page.lower()


def test_foreign_variables_that_are_read_are_known() -> None:
    """A variable of other tools that is read, and that nobody judged, is named here."""
    read = set()
    for path in (ROOT / "torch_tile").rglob("*.py"):
        read |= set(re.findall(r"environ(?:\.get\(|\[)\"([A-Z_]+)\"", path.read_text()))
    foreign = {name for name in read if not name.startswith("TORCH_TILE_")}
    assert foreign <= LEADING | {
        "NO_COLOR",
        "CUDA_VISIBLE_DEVICES",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "OMP_NUM_THREADS",
    }
