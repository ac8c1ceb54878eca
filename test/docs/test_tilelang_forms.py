# SPDX-License-Identifier: Apache-2.0
"""Each test that docs/tilelang-forms.md names exists."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.every_sample  # facts about the sources

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def test_the_tests_of_each_form_exist():
    text = (ROOT / "docs" / "tilelang-forms.md").read_text()
    named = NAMED.findall(text)
    forms, *_ = text.partition("\n## ")  # the counts of TileLang's own tests follow
    rows = [line for line in forms.splitlines() if line.startswith("| ") and not line.startswith("| form")]
    assert len(rows) > 50 and all(NAMED.search(line) for line in rows)
    lost = [
        f"{file}::{name}" for file, name in named
        if not re.search(rf"^def {name}\(", (ROOT / "test" / file).read_text(), re.M)
    ]  # fmt: skip
    assert not lost
