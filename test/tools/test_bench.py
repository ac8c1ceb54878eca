# SPDX-License-Identifier: Apache-2.0
import torch

from torch_tile.__main__ import main
from torch_tile.tools import bench


def test_a_row_for_each_case(capsys, monkeypatch) -> None:
    """Small, by eager torch and ours; every error is that of float32."""
    monkeypatch.setattr(bench, "SECONDS", 0.0)
    assert main(["bench", "--size", "40", "--no-inductor"]) == 0
    out = capsys.readouterr().out
    for case in bench.cases(40):
        row = next(line for line in out.splitlines() if line.startswith(f"{case.name}  "))
        eager, ours, wrong, ratio = map(float, row[22:].split())
        assert eager > 0 and ours > 0 and ratio >= 0 and wrong < 1e-5
    assert "Inductor" not in out.splitlines()[2]


def test_a_wrong_result_is_said(capsys, monkeypatch) -> None:
    wrong = bench.Case("doubled", torch.neg, lambda x: x * 2, [(4, 4)])
    monkeypatch.setattr(bench, "SECONDS", 0.0)
    monkeypatch.setattr(bench, "cases", lambda size: [wrong])
    assert bench.bench(4, compiled=False) == 1
    assert "some result is wrong" in capsys.readouterr().out
