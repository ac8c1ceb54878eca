# SPDX-License-Identifier: Apache-2.0
import copy
import re
import types
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from torch_tile.inductor.report.rows import MISSED, REPLACED, Report, Row
from torch_tile.tools import demo, models


def test_a_compiled_model_agrees(capsys) -> None:
    machine = replace(demo.this_machine(), length=24)
    graphs = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        assert demo.show_compiled(models.plain_llama, machine, replace(models.SMALL, layers=1), select="tile")
    assert counters["stats"]["unique_graphs"] == graphs + 2  # neither backend compiles the model twice
    out = capsys.readouterr().out
    assert "Llama (plain torch, random weights): 1 layer of 256 features" in out
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
        assert demo.show_latent_decoding(replace(demo.this_machine(), length=4))
    assert "one new token over 64 cached ones" in capsys.readouterr().out


def test_a_wrong_result_is_said(capsys, monkeypatch) -> None:
    monkeypatch.setattr(demo, "show_compiled", lambda maker, machine, sizes, select: maker is not models.plain_llama)
    monkeypatch.setattr(demo, "show_latent_decoding", lambda machine: True)
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


def test_a_gpu_gets_layers_of_real_sizes(monkeypatch) -> None:
    def machine(gigabytes: int) -> demo.Machine:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(total_memory=gigabytes << 30)
        )
        return demo.this_machine()

    large, small = machine(80), machine(8)
    assert large.dtype is torch.bfloat16 and large.sizes is models.LLAMA_8B and large.length == 2048
    assert large.sizes.head_dim == 128 and small.sizes == replace(large.sizes, layers=1)


@pytest.mark.parametrize("installed", [True, False])
def test_samples_are_made_in_the_dtype_of_the_machine(installed: bool, monkeypatch, seed: int) -> None:
    """In bfloat16 as on a GPU: positions are not rounded, so that the error stays bfloat16's."""
    if installed:
        pytest.importorskip("transformers")
    monkeypatch.setattr(models, "has_transformers", lambda: installed)
    machine = demo.Machine(torch.device("cpu"), torch.bfloat16, models.SMALL, 300)
    sample = machine.make(models.llama, machine.sizes)
    ids = torch.randint(0, sample.vocabulary, (1, machine.length))
    assert {p.dtype for p in sample.model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        exact = sample.run(copy.deepcopy(sample.model).double(), ids)
        assert demo.error(sample.run(sample.model, ids), exact) <= demo.TOLERANCES[torch.bfloat16]
