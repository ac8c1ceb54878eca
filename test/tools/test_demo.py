# SPDX-License-Identifier: Apache-2.0
import re

import pytest
import torch
from torch._dynamo.utils import counters

from torch_tile.inductor.report.rows import MISSED, REPLACED, Report, Row
from torch_tile.tools import demo, models


def test_a_compiled_model_agrees(capsys, monkeypatch) -> None:
    monkeypatch.setattr(models, "has_transformers", lambda: False)
    monkeypatch.setattr(models, "LAYERS", 1)
    graphs = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        assert demo.show_compiled(models.llama(), length=24, select="tile")
    assert counters["stats"]["unique_graphs"] == graphs + 2  # neither backend compiles the model twice
    out = capsys.readouterr().out
    assert "Llama (plain torch, random weights)" in out
    for line in (
        "Inference: 11 of 11",
        "11 subgraphs became tile kernels",
        "tile.attention(",
        "tile.gemm(2 products",
        "rms_norm(",
    ):
        assert line in out
    assert re.search(r"error against float64: +eager \d\.\de-0\d +Inductor \d\.\de-0\d +tile \d\.\de-0\d", out)
    assert re.search(r"time of a forward pass: +eager \d+\.\d ms +Inductor \d+\.\d ms +tile \d+\.\d ms", out)


def test_latent_decoding_agrees(capsys) -> None:
    with torch.no_grad():
        assert demo.show_latent_decoding(length=4)
    assert "one new token over 64 cached ones" in capsys.readouterr().out


def test_a_wrong_result_is_said(capsys, monkeypatch) -> None:
    monkeypatch.setattr(demo, "show_compiled", lambda sample, length, select: sample.name != "Llama")
    monkeypatch.setattr(demo, "show_latent_decoding", lambda length: True)
    assert demo.demo() == demo.demo(every=True) == 1
    assert "some result is wrong" in capsys.readouterr().out


def test_error_is_relative_to_the_largest_value() -> None:
    exact = torch.tensor([1.0, -4.0], dtype=torch.float64)
    assert demo.error(torch.tensor([1.5, -4.0]), exact) == 0.125


def test_summary_counts_and_gives_reasons() -> None:
    rows = [Row("gemm", REPLACED, "tile.gemm(x)", "a"), Row("gemm", REPLACED, "tile.gemm(x)", "b")]
    text = demo.summary(Report([*rows, Row("norm", MISSED, "rms_norm", "c", "odd axis")]))
    assert text.splitlines()[1:] == [
        "  2 subgraphs became tile kernels:",
        "  gemm       tile.gemm(x)  (x2)",
        "  norm       not replaced: rms_norm c: odd axis",
    ]


def test_progress_reports_even_when_it_fails(capsys) -> None:
    with pytest.raises(KeyError), demo.progress("trying"):
        raise KeyError("x")
    assert re.fullmatch(r"  trying: \d+\.\d s\n", capsys.readouterr().out)
