# SPDX-License-Identifier: Apache-2.0
"""The Python examples of README and docs/, run as they stand."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = {page.stem: BLOCK.findall(page.read_text()) for page in PAGES}


@pytest.mark.parametrize("page", [name for name, examples in EXAMPLES.items() if examples])
def test_examples(page: str, tmp_path: Path) -> None:
    """Run a page's examples in order; later ones see what earlier ones defined, since a reader types them one by one.

    Those of README stand alone: a reader copies one.
    """
    names: dict[str, object] = {}
    for number, text in enumerate(EXAMPLES[page]):
        path = tmp_path / f"{page}_{number}.py"
        path.write_text(text)
        left = runpy.run_path(str(path), init_globals=names)
        names = {} if page == "README" else left


def test_there_are_examples() -> None:
    assert len(EXAMPLES["README"]) >= 4
    assert len(EXAMPLES["writing-kernels"]) >= 3


def test_readme_is_a_page() -> None:
    assert len(PAGES[0].read_text().splitlines()) <= 150
