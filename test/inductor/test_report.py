# SPDX-License-Identifier: Apache-2.0
"""Rows, and their table."""

import logging

from torch_tile.inductor.report import KEPT, MISSED, REPLACED, Report, Row, collect, record
from torch_tile.inductor.source import Frame


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
