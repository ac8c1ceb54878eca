# SPDX-License-Identifier: Apache-2.0
"""Rows, and their table."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_tile.inductor.graph.nodes import Frame
from torch_tile.inductor.report.rows import KEPT, MISSED, REPLACED, Report, Row, collect, record


def rows():
    return [
        Row("gemm", REPLACED, "tile.gemm", "mlp.0"),
        Row("gemm", REPLACED, "tile.gemm", "mlp.0"),
        Row("norm", MISSED, "rsqrt", "norm", "unbiased"),
        Row("gemm", KEPT, "tile.gemm", "head", "tile 2 us, Inductor 1 us"),
    ]


def test_selection_and_table():
    report = Report(rows())
    assert len(report.replaced("gemm")) == 2
    assert [r.reason for r in report.missed()] == ["unbiased"]
    text = str(report)
    assert "mlp.0 (x2)" in text
    assert text.splitlines()[-1] == "1 kept, 1 missed, 2 replaced"
    assert str(Report()).splitlines()[-1] == "nothing found"


def test_collectors_nest_and_close(caplog):
    caplog.set_level(logging.INFO, "torch_tile.inductor")
    with collect() as outer:
        record(rows()[0])
        with collect() as inner:
            record(rows()[2])
    record(rows()[3])
    assert (len(outer.rows), len(inner.rows)) == (2, 1)
    assert "missed rsqrt at norm (unbiased)" in caplog.text


def test_advice_stands_below_the_table():
    line, other = Frame("/m/model.py", 7, "forward"), Frame("/m/layers.py", 3, "cap")
    report = Report([
        Row("norm", MISSED, "rsqrt", "norm model.py:7", "unbiased", fix="correction=0", frames=(line,), cause=line),
        Row("attention", MISSED, "softmax", "model.py:7", "tanh", fix="cap q", frames=(line,), cause=other),
    ])  # fmt: skip
    assert str(report).splitlines()[4:] == [
        "to make them match:",
        "  norm model.py:7: correction=0",
        "  model.py:7: cap q (layers.py:3)",
        "2 missed",
    ]


def test_save(tmp_path):
    path = Report(rows()).save(tmp_path / "explain.html")
    assert path.read_text() == Report(rows()).html()


ROOT = Path(__file__).parents[3]
PROGRAM = """
import torch

def f(x):
    return torch.nn.functional.layer_norm(x, (4,))

with torch.no_grad():
    torch.compile(f, backend="tile", options={"select": "tile"})(torch.randn(4, 4))
"""


@pytest.mark.slow
@pytest.mark.parametrize("logs", ["torch_tile", "tile", "+tile"])
def test_torch_logs(logs, tmp_path):
    """The rows appear, though torch_tile is imported long after torch has read the variable."""
    if "torch_tile" not in logs and torch.__version__ < (2, 13):
        pytest.skip("before 2.13 torch reads TORCH_LOGS before it calls entry points")
    installed = tmp_path / "registers_tile-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: registers_tile\nVersion: 0\n")
    (installed / "entry_points.txt").write_text("[torch.backends]\ntile_logs = torch_tile_logs:register\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = os.environ | {"TORCH_LOGS": logs, "PYTHONPATH": path, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "inference: replaced tile.layer_norm([4, 4]) at program.py:5" in done.stderr
    assert ("captured tile.layer_norm.default at program.py:5" in done.stderr) == logs.startswith("+")
