# SPDX-License-Identifier: Apache-2.0
"""Every file of examples/, run as a user runs it; the whole suite takes a sample by seed (conftest.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "examples").rglob("*.py"))


@pytest.mark.parametrize("example", FILES, ids=lambda path: path.stem)
def test_runs(example: Path) -> None:
    """Each compares itself with torch, and prints what it found."""
    if example.stem == "transformers_generate":
        pytest.importorskip("transformers")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()


def test_each_says_in_one_line_what_it_is() -> None:
    for path in FILES:
        lines = path.read_text().splitlines()
        assert lines[1].startswith('"""') and lines[1].rstrip('"').endswith("."), path
