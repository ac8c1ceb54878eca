# SPDX-License-Identifier: Apache-2.0
import json
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import chart
from benchmarks.model_cases import cases
from benchmarks.models import Line
from benchmarks.problem import Result
from benchmarks.runner import problems_of
from benchmarks.timer import Timing


def test_the_committed_chart_and_tables_are_what_the_results_say() -> None:
    assert chart.CHART.read_text() == chart.svg(), "run python -m benchmarks.chart"
    readme = (chart.ROOT / "README.md").read_text().splitlines()
    for line in (*chart.table(), *chart.cpu_table()):
        assert line in readme


def _times(**medians: float) -> dict[str, Timing]:
    return {name.replace("_", "-"): Timing(us * 1e-6, us * 1e-6, us * 1e-6, 5) for name, us in medians.items()}


def test_the_best_rival_counts(tmp_path: Path) -> None:
    results = [
        Result("gemm", "gemm M0 fp16", "", "fp16", 1.0, 1.0, times=_times(tile=10, cuBLAS=12, tilelang=9)),
        Result("gemm", "gemm M1 fp16", "", "fp16", 1.0, 1.0, times=_times(tile=10, cuBLAS=11, other=1)),
        Result("gemm", "gemm M2 fp16", "", "fp16", 1.0, 1.0, status="WRONG"),
        Result("gemm", "gemm V0 fp16", "", "fp16", 1.0, 1.0, times=_times(tile=10, cuBLAS=90)),
        Result("norm", "gemm M3 fp16", "", "fp16", 1.0, 1.0, times=_times(tile=10, cuBLAS=90)),
    ]
    lines = [{"run": "", "device": "<GPU>", "torch": ""}, *(result.line() for result in results)]
    (tmp_path / chart.KERNELS).write_text("\n".join(map(json.dumps, lines)))
    models = [
        Line("a model", {}, _times(Inductor=3, max_autotune=2, tile=1)),
        Line("another model", {}, _times(Inductor=3, tile=1)),
    ]
    (tmp_path / chart.MODELS).write_text("\n".join(json.dumps(asdict(line)) for line in models))
    products = chart.Group("<title>", "gemm", ("cuBLAS", "tilelang"), ("gemm M",))
    whole = chart.Group("models", "", ("Inductor", "max-autotune"))
    assert chart.ratios(products, tmp_path) == pytest.approx({"gemm M0 fp16": 0.9, "gemm M1 fp16": 1.1})
    assert chart.ratios(whole, tmp_path) == pytest.approx({"a model": 2.0})
    assert list(chart.table([products], tmp_path))[-1] == "| <title> | 2 | cuBLAS, tilelang | 1.00 | 0.90 |"
    ElementTree.fromstring(chart.svg([products, whole], tmp_path))


@pytest.mark.parametrize("group", chart.GROUPS, ids=lambda group: group.title)
def test_every_name_of_a_group_is_a_case(group: chart.Group) -> None:
    names = [p.name for p in problems_of(group.family, "cuda")] if group.family else [c.name for c in cases()]
    for prefix in group.prefixes:
        assert any(name.startswith(prefix) for name in names), prefix


def test_short_calls_do_not_count_on_the_cpu(tmp_path: Path) -> None:
    lines = [
        "gemm a 8x8   9.0   1%  5 GFLOP/s  2%  3e-07 torch 6.0",
        *(f"gemm b 8x8   {us}   1%  5 GFLOP/s  2%  3e-07 torch 200.0" for us in (100.0, 200.0, 400.0)),
        "softmax c   400.0   1%  5 GB/s  2%  3e-07 copy 1.6, torch 100.0",
    ]
    (tmp_path / chart.CPU).write_text("\n".join(lines))
    assert list(chart.cpu_table(tmp_path))[2:] == [
        "| Linears and products | 1 | torch | 1.00 | 1.00 |", "| Softmax | 1 | torch | 0.25 | 0.25 |",
    ]  # fmt: skip
