# SPDX-License-Identifier: Apache-2.0
"""Rows, their table, and where a node says it comes from."""

import logging

import pytest
import torch

from torch_tile.inductor.report import KEPT, MISSED, REPLACED, Report, Row, collect, place, record


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


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("L['self'].model.layers.0.q_proj", "model.layers.0.q_proj"),
        ("L['self']._modules['model']._modules['layers']._modules['0']", "model.layers.0"),
        ("L['self'].blocks[1]['attn']", "blocks.1.attn"),
    ],
)
def test_place(path, name):
    node = torch.fx.Graph().placeholder("x")
    assert place(node) == "x"
    node.meta["nn_module_stack"] = {"outer": ("L['self']", object), "inner": (path, object)}
    assert place(node) == name
    node.meta["stack_trace"] = 'File "/a/b/first.py", line 1, in f\n  File "/a/b/model.py", line 42, in g\n    x @ y'
    assert place(node) == f"{name} model.py:42"
