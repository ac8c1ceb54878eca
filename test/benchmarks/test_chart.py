# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from xml.etree import ElementTree

from benchmarks import chart


def test_the_committed_chart_and_tables_are_what_the_results_say() -> None:
    assert chart.CHART.read_text() == chart.svg(), "run python -m benchmarks.chart"
    readme = (chart.ROOT / "README.md").read_text().splitlines()
    for line in (*chart.table(), *chart.cpu_table()):
        assert line in readme


def test_the_best_rival_counts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(
        "$ a command\n"
        "gemm M0 fp16                 10.0   cuBLAS 12.0, x1.200   tilelang 9.0, x0.900\n"
        "gemm M1 fp16                 10.0   cuBLAS x1.10\n"
        "attention b1                 10.0   cuDNN 20.0, x2.000\n"
        "a model         Inductor 3.0, max-autotune 2.0, tile 1.0, x3.000 of Inductor, x2.000 of max-autotune\n"
        "another model   Inductor 3.0, tile 1.0, x3.000\n"
    )
    products, models = (chart.Group("<title>", "rivals", ("a.txt",), prefix) for prefix in ("gemm", ""))
    assert chart.ratios(products, tmp_path) == {"gemm M0 fp16": 0.9, "gemm M1 fp16": 1.1}
    assert chart.ratios(models, tmp_path) == {"a model": 2.0}
    assert list(chart.table([products], tmp_path))[-1] == "| <title> | 2 | rivals | 1.00 | 0.90 |"
    ElementTree.fromstring(chart.svg([products, models], tmp_path))


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
