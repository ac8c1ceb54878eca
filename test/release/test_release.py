# SPDX-License-Identifier: Apache-2.0
"""The pure parts of .ci/release.py, which builds a release."""

import importlib.util
import runpy
import sys
from pathlib import Path

import pytest

import torch_tile

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("release", ROOT / ".ci/release.py")
release = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(release)

INFO = "torch_tile-1.2.3.dist-info"
WHEEL = {
    "torch_tile/__init__.py": "", "torch_tile/py.typed": "", "torch_tile/language/__init__.pyi": "",
    "torch_tile_logs.py": "", "torch_tile/csrc/a.h": "", f"{INFO}/licenses/LICENSE": "", f"{INFO}/RECORD": "",
    f"{INFO}/METADATA": "Metadata-Version: 2.4\nName: torch_tile\nVersion: 1.2.3\n",
    f"{INFO}/entry_points.txt": "[torch.backends]\ntile_logs = x:y\n[torch_dynamo_backends]\ntile = x:y\n",
}  # fmt: skip
SDIST = [
    f"torch_tile-1.2.3/{name}"
    for name in (
        "pyproject.toml", "PKG-INFO", "README.md", "LICENSE", "CHANGELOG.md", "torch_tile/__init__.py", "csrc/a.h",
        "test/test_x.py",
    )
]  # fmt: skip


def test_a_whole_release_passes() -> None:
    assert release.wrong_in_wheel(WHEEL, "1.2.3", ["a.h"]) == []
    assert release.wrong_in_sdist(SDIST, "1.2.3", ["a.h"]) == []


@pytest.mark.parametrize("name", [name for name in WHEEL if not name.endswith("RECORD")])
def test_each_file_of_a_wheel_is_needed(name: str) -> None:
    rest = {n: text for n, text in WHEEL.items() if n != name}
    assert f"{name} is missing" in release.wrong_in_wheel(rest, "1.2.3", ["a.h"])


def test_what_is_wrong_with_a_wheel_is_named() -> None:
    more = {**WHEEL, "test/test_x.py": "", "torch_tile/__pycache__/x.pyc": "", f"{INFO}/entry_points.txt": "tile_logs"}
    assert release.wrong_in_wheel(more, "1.2.3", ["a.h", "b.h"]) == [
        "torch_tile/csrc/b.h is missing",
        "test does not belong into it",
        "torch_tile/__pycache__/x.pyc does not belong into it",
        "entry point torch_dynamo_backends is missing",
    ]
    old = {**WHEEL, f"{INFO}/METADATA": "Name: torch_tile\nVersion: 1.2.2\n"}
    assert release.wrong_in_wheel(old, "1.2.3", []) == ["'Version: 1.2.3' is not in METADATA"]


def test_what_is_wrong_with_an_sdist_is_named() -> None:
    root = "torch_tile-1.2.3/"
    members = [*SDIST[1:], f"{root}benchmarks/results/h100.json", f"{root}.mypy_cache/x.json", "elsewhere.py"]
    assert release.wrong_in_sdist(members, "1.2.3", []) == [
        "pyproject.toml is missing",
        f"elsewhere.py is not below {root}",
        ".mypy_cache/x.json does not belong into it",
        "benchmarks/results/h100.json does not belong into it",
    ]


def test_the_version_is_read_without_an_import() -> None:
    assert release.source_version((ROOT / "torch_tile/__init__.py").read_text()) == torch_tile.__version__
    with pytest.raises(ValueError, match="no __version__"):
        release.source_version("x = 1")


def test_supported_pythons_are_those_of_the_classifiers() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert [f'"Programming Language :: Python :: 3.{minor}"' in text for minor in range(10, 16)] == [
        minor in release.MINORS for minor in range(10, 16)
    ]


def test_the_newest_python_of_each_version_is_tried(tmp_path: Path) -> None:
    for name in ("3.10.13", "3.12.1", "3.12.11", "3.13.0", "3.14-dev", "3.11.7"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin/python").touch()
    (tmp_path / "3.13.9").mkdir()  # without an interpreter
    found = release.pythons(["/usr/bin/python3.11"], sorted(tmp_path.iterdir()))
    assert found == {
        11: "/usr/bin/python3.11",
        12: str(tmp_path / "3.12.11/bin/python"),
        13: str(tmp_path / "3.13.0/bin/python"),
    }


def test_the_smoke_test_runs_here(tmp_path: Path, monkeypatch) -> None:
    script = tmp_path / "smoke.py"
    script.write_text(release.SMOKE)
    monkeypatch.setattr(sys, "argv", [str(script), torch_tile.__version__])
    runpy.run_path(str(script))
    monkeypatch.setattr(sys, "argv", [str(script), "0.0.0"])
    with pytest.raises(AssertionError, match=torch_tile.__version__):
        runpy.run_path(str(script))
