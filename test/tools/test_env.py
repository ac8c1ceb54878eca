# SPDX-License-Identifier: Apache-2.0
import re
import tomllib
from pathlib import Path

import pytest
import torch

import torch_tile
from torch_tile.__main__ import main
from torch_tile.tools import env

ROOT = Path(__file__).resolve().parents[2]


def test_names_what_a_report_needs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_TILE_VERIFY", "1")
    assert main(["env"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.split()[0] in NAMES)
    assert lines["torch_tile"].startswith(torch_tile.__version__)
    assert torch.__version__ in lines["torch"]
    assert "TORCH_TILE_VERIFY=1" in lines["variables"]
    assert lines.keys() >= NAMES


NAMES = {"torch_tile", "Python", "torch", "packages", "machine", "NVRTC", "GPU", "cache", "variables"}


def test_a_fact_that_cannot_be_found_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise OSError("no such thing here")

    monkeypatch.setattr(env, "FACTS", [("thing", missing), ("home", lambda: str(Path.home() / "x"))])
    assert env.describe() == f"{'thing':<14} none (no such thing here)\n{'home':<14} ~/x"


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert (
        "version" not in project["project"] and project["tool"]["hatch"]["version"]["path"] == "torch_tile/__init__.py"
    )
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert cited and newest and cited[1] == newest[1] == torch_tile.__version__


def test_every_issue_template_asks_for_the_machine() -> None:
    templates = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.md"))
    assert templates and all("python -m torch_tile env" in page.read_text() for page in templates)


def test_packages_are_typed_and_without_results() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "benchmarks/results" in project["tool"]["hatch"]["build"]["targets"]["sdist"]["exclude"]
    assert (ROOT / "torch_tile/py.typed").is_file()
