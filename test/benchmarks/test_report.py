# SPDX-License-Identifier: Apache-2.0
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import report
from benchmarks.problem import Result
from benchmarks.timer import Timing

HEAD = {
    "run": "2026-01-02 03:04", "command": "gemm.py --quick", "device": "GPU", "torch": "2.11", "seed": 1,
    "ceilings": {"copy": 4e12, "read": 4.4e12, "products": {"fp16": 7e14}},
}  # fmt: skip


def result(name: str, seconds: float, rivals: dict[str, float], status: str = "ok") -> Result:
    times = {name: Timing(t, t, t, 5) for name, t in ({"tile": seconds} | rivals).items()} if status == "ok" else {}
    return Result(
        "gemm", name, "gemm M", "fp16", 7e11, 1e9, status, "" if status == "ok" else "error 1", 0.0, times, {},
        {"cuBLAS": 1.02}, 1e-3,
    )  # fmt: skip


def write(path: Path, *lines: dict | str) -> Path:
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rivals = {"cuBLAS": 1.5e-3}
    results = [
        result("M0", 9e-3, rivals), result("M0", 2e-3, rivals), replace(result("M1", 1e-3, {"FA3": 2e-3}), bytes=1e10),
        result("M2", 1.0, {}, "WRONG"),
    ]  # fmt: skip
    return write(tmp_path / "a.jsonl", HEAD, *(r.line() for r in results), '{"name": "M3", "ti')


def test_the_table(file, capsys):
    assert report.main([str(file)]) == 0
    captured = capsys.readouterr()
    assert "a.jsonl:6: not a whole line" in captured.err
    rows = [line for line in captured.out.splitlines() if line.startswith("|")]
    assert rows == [
        "| problem | µs | ± | rate | of ceiling | asked | reached | cuBLAS µs · ratio | FA3 µs · ratio |",
        "|---|---|---|---|---|---|---|---|---|",
        "| M0 | 2000.0 | 0% | 350 TFLOP/s | 50% | 1.02 × cuBLAS | 0.750 | 1500.0 · 0.750 |  |",
        "| M1 | 1000.0 | 0% | 700 TFLOP/s | 100% |  |  |  | 2000.0 · 2.000 |",
        "| M2 | WRONG: error 1 | | | | | | | |",
    ]
    assert "## GPU, torch 2.11, 2026-01-02 03:04" in captured.out
    assert "geomean gemm M: 1 WRONG or FAILED, cuBLAS 0.750 (least 0.750, 1), FA3 2.000" in captured.out


def test_without_matplotlib(file, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report.main([str(file), "--plot", str(tmp_path / "roof.svg"), "--markdown", str(tmp_path / "t.md")]) == 0
    assert "matplotlib is not installed" in capsys.readouterr().err
    assert not (tmp_path / "roof.svg").exists() and "| M0 |" in (tmp_path / "t.md").read_text()


def test_the_roofline(file, monkeypatch, tmp_path):
    """What is drawn, by a matplotlib that only notes it."""
    points, lines, saved = [], [], []
    axes = SimpleNamespace(
        plot=lambda x, y, style, **o: lines.append((x, y)), legend=lambda: None,
        scatter=lambda x, y, **o: points.append((x, y, o.get("label"))), set=lambda **o: None,
        set_title=lambda *a, **o: None,
    )  # fmt: skip
    figure = SimpleNamespace(tight_layout=lambda: None, savefig=saved.append)
    pyplot = SimpleNamespace(subplots=lambda **o: (figure, axes), close=lambda figure: None)
    monkeypatch.setitem(sys.modules, "matplotlib", SimpleNamespace(use=lambda name: None))
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)
    assert report.main([str(file), "--plot", str(tmp_path / "roof.svg"), "--markdown", str(tmp_path / "t.md")]) == 0
    assert saved == [tmp_path / "roof.svg"]
    ((steps, roof),) = lines
    assert max(roof) == 700 and roof[0] == pytest.approx(4.4 * steps[0])
    ours = next(p for p in points if p[2] == "gemm")
    assert ours[0] == [700.0, 70.0] and ours[1] == pytest.approx([350.0, 700.0])
    assert [p[:2] for p in points if p[2] is None] == [(700.0, pytest.approx(7e11 / 1.5e-3 / 1e12)), (70.0, 350.0)]


def test_nothing_to_report(tmp_path):
    assert report.main([str(write(tmp_path / "empty.jsonl", HEAD))]) == 1
    with pytest.raises(ValueError, match=r"x.jsonl:1: a result before any header"):
        report.main([str(write(tmp_path / "x.jsonl", result("M0", 1.0, {}).line()))])


def test_the_plot_by_matplotlib_itself(file, tmp_path):
    pytest.importorskip("matplotlib")
    assert report.plot(report.read([file])[0], tmp_path / "roof.svg")
    assert (tmp_path / "roof.svg").read_text().startswith("<?xml")
