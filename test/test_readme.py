# SPDX-License-Identifier: Apache-2.0
"""README's Python examples, run as they stand."""

import re
import runpy
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def names() -> dict[str, object]:
    """What earlier examples defined, since a reader types them one after the other."""
    return {}


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example(number: int, names: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / f"example_{number}.py"
    path.write_text(EXAMPLES[number])
    names.update(runpy.run_path(str(path), init_globals=names))


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 4
