# SPDX-License-Identifier: Apache-2.0
"""Edits of valid kernels, drawn by the seed: where counts are too small or sizes swapped, some word is said."""

import random
from pathlib import Path

import pytest

from test.faults.edited_kernels import HEAD, KERNELS, edits, run_text

COUNTS = {"rounded down", "one less"}
# Each result was set before, whole, so that its end holds what it began with.
SILENT = {("moments", "T.Kernel((N) // (columns),"), ("moments", "T.Kernel((T.ceildiv(N, columns) - 1),")}


@pytest.mark.parametrize("name", KERNELS)
def test_valid_kernels_are_right_without_a_word(name: str, seed: int, tmp_path: Path) -> None:
    said, right = run_text(name, HEAD + KERNELS[name][0], tmp_path / "kernel.py")
    assert right and not said


@pytest.mark.parametrize("name", KERNELS)
def test_counts_that_are_too_small(name: str, seed: int, tmp_path: Path) -> None:
    """Wrong results have a warning that names the line, or that of the tensor."""
    known = [each for each in edits(name) if each.kind in COUNTS]
    for each in random.Random(seed).sample(known, min(2, len(known))):
        said, right = run_text(name, each.text, tmp_path / "edited.py")
        is_known = any(name == one and part in each.what for one, part in SILENT)
        assert right or is_known or "fix: " in said, each.what


@pytest.mark.parametrize(
    "name, what", [("stencil", "X[c, r]"), ("split_k", "T.copy(A[(bz * turns"), ("moments", "M, r")]
)
def test_indices_and_counts_that_are_swapped(name: str, what: str, seed: int, tmp_path: Path) -> None:
    for each in edits(name):
        if each.kind.startswith("swapped") and what in each.what.partition(" -> ")[2]:
            said, right = run_text(name, each.text, tmp_path / "edited.py")
            assert right or "swap" in said, each.what
