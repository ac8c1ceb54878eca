# SPDX-License-Identifier: Apache-2.0
"""Rows, and their table."""

import html
import logging
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torch_tile.inductor.graph.nodes import Frame
from torch_tile.inductor.report.rows import KEPT, MISSED, REPLACED, Outcome, Report, Row, collect, record, together
from torch_tile.inductor.select.roofline import Cost


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


def test_the_verdict_comes_first():
    found = [
        Row("gemm", REPLACED, "tile.gemm", "head", cost=Cost(900, 10, torch.float32), times=Outcome(10.0, 30.0)),
        Row("gemm", KEPT, "tile.gemm", "mlp", cost=Cost(100, 10, torch.float32), times=Outcome(30.0, 20.0)),
    ]
    first = str(Report(found)).splitlines()[0]
    assert first == Report(found).verdict()
    assert first.startswith("Inference: 1 of 2 subgraphs found run as tile kernels, 90 % of their arithmetic.")
    assert "33 % of the time is in tile kernels; expected gain 1.67x, 50 us to 30 us" in first
    assert "Training: 2 of 4" in Report([*rows()[:3], replace(rows()[3], graph="backward")]).verdict()
    assert "Not timed" in Report(rows()).verdict() and "Nothing" in Report().verdict()


def test_the_verdict_advises_nothing_that_was_done():
    untimed = Report([Row("gemm", KEPT, "tile.gemm", "head")], asked="fastest")
    assert "Nothing was timed" in untimed.verdict() and "select=" not in untimed.verdict()
    training = Report([replace(rows()[3], graph="backward")], of_eval=True)
    assert "torch.no_grad() for inference" in training.verdict()
    assert "no_grad" not in Report([Row("gemm", KEPT, "tile.gemm", "head")], of_eval=True).verdict()
    assert repr(untimed) == str(untimed)


def test_layers_share_a_row():
    found = [Row("gemm", REPLACED, "tile.gemm", f"layers.{n}.experts.{n % 2} m.py:7") for n in (0, 1, 2, 5)]
    text = str(Report([*found, Row("gemm", REPLACED, "tile.gemm", "head.0 m.py:9"), found[0]]))
    assert "layers.0-2,5.experts.0-1 m.py:7 (x5)" in text and "head.0 m.py:9\n" in text.replace(" " * 10, "\n")
    assert together(["3 m.py:7", "4 m.py:7"]) == "3-4 m.py:7"
    assert together(["model.py:7"]) == "model.py:7"


def test_a_notebook_shows_the_page_in_a_frame():
    shown = Report(rows())._repr_html_()
    assert (
        shown.startswith("<iframe") and html.unescape(re.search(r'srcdoc="([^"]*)"', shown)[1]) == Report(rows()).html()
    )


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
    assert str(report).splitlines()[5:] == [
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
    backend = "[torch_dynamo_backends]\ntile = torch_tile.inductor.backend:tile\n"
    (installed / "entry_points.txt").write_text(f"{backend}[torch.backends]\ntile_logs = torch_tile_logs:register\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = os.environ | {"TORCH_LOGS": logs, "PYTHONPATH": path, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "inference: replaced tile.layer_norm([4, 4]) at program.py:5" in done.stderr
    assert ("captured tile.layer_norm.default at program.py:5" in done.stderr) == logs.startswith("+")
