# SPDX-License-Identifier: Apache-2.0
"""The page of kinds names tests and mends that exist."""

import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.every_sample  # facts about the sources

ROOT = Path(__file__).parents[2]
PAGE = (Path(__file__).parent / "README.md").read_text()


def test_tests_exist() -> None:
    tests = re.findall(r"`(test/[\w/]+\.py)(?:::(\w+))?`", PAGE)
    assert len(tests) > 60
    assert not [path for path, _ in tests if not (ROOT / path).is_file()]
    assert not [name for path, name in tests if f"def {name}" not in (ROOT / path).read_text()]


def test_each_mend_stands_beside_a_kind() -> None:
    sys.path.insert(0, str(ROOT / "test" / "fuzz"))
    import test_removed_mends

    named = {row.split("|")[-2].strip() for row in PAGE.splitlines() if row.startswith("| ") and row.count("|") == 5}
    others = {
        "integers of two signs", "floats outside an integer type", "widths of literals", "fills by the tile itself",
        "copies of an element that meet", "products fused by the compiler",
    }  # fmt: skip
    assert set(test_removed_mends.KINDS) - named == others
