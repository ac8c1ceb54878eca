# SPDX-License-Identifier: Apache-2.0
"""Environment variables that are misspelt, or hold what nobody reads, are named; the FAQ lists those that are read."""

import re
from pathlib import Path

import pytest

from torch_tile.diagnostics.variables import OTHERS, SWITCHES, problems, warn_of_variables

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("TORCH_TILE_CACHEDIR", "/tmp", ("TORCH_TILE_CACHEDIR", "did you mean TORCH_TILE_CACHE_DIR?")),
        ("TORCH_TILE_DUMPS", "/tmp", ("did you mean TORCH_TILE_DUMP?",)),
        ("TORCH_TILE_QQQ", "1", ("TORCH_TILE_QQQ means nothing",)),
        ("TORCH_TILE_AUTOTUNE", "off", ("'off'", "0 or 1")),
        ("TORCH_TILE_VERIFY", "false", ("'false'", "0 or 1")),
        ("TORCH_TILE_AUTOTUNE_WORKERS", "four", ("'four'", "a number")),
    ],
)
def test_problems_are_named(name: str, value: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    (said,) = problems({name: value, "PATH": "/bin"})
    assert all(word in said for word in words), said
    monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match=re.escape(name)):
        warn_of_variables()


def test_known_variables_are_quiet() -> None:
    known = dict.fromkeys(SWITCHES, "0") | dict.fromkeys(OTHERS, "3")
    assert list(problems(known | {"TORCH_TILE_TEST_SEED": "5", "TORCH_TILE_VERIFY": ""})) == []


def test_every_variable_that_is_read_is_known_and_listed() -> None:
    source = "".join(path.read_text() for path in (ROOT / "torch_tile").rglob("*.py"))
    read = set(re.findall(r"TORCH_TILE_[A-Z_]*[A-Z]", source))
    assert read == {*SWITCHES, *OTHERS}
    listed = re.findall(r"^\| `(TORCH_TILE_\w+)` \| (.*) \|$", (ROOT / "docs/faq.md").read_text(), re.MULTILINE)
    assert dict(listed) == SWITCHES | OTHERS
