# SPDX-License-Identifier: Apache-2.0
"""The search for cuts, on the CPU: a made-up landscape, and one real problem."""

import json
from dataclasses import dataclass, fields
from functools import partial

import pytest
import torch

from benchmarks import tune
from benchmarks.problem import Case, Problem
from benchmarks.runner import problems_of
from benchmarks.tune import FAMILIES, Climb, changed, compile_ahead, groups_of, main, neighbours, write
from torch_tile.autotuner.trials import Runner
from torch_tile.kernels.gemm.tiling import Config


@dataclass(frozen=True)
class Cut:
    block: int = 64
    stages: int = 2
    splits: int = 0
    staged: bool = False
    settled: int = 3


NAMES = ("block", "stages", "splits", "staged")


def test_neighbours_differ_in_one_field():
    found = list(neighbours(Cut(), NAMES))
    assert found == [Cut(128), Cut(32), Cut(stages=1), Cut(stages=3), Cut(splits=8), Cut(staged=True)]
    assert Cut(block=1) not in list(neighbours(Cut(block=1), NAMES)) and Cut(block=2) in list(
        neighbours(Cut(block=1), NAMES)
    )


@pytest.fixture
def landscape(monkeypatch):
    """Cuts near (256, 4) are fast, 512 is refused, staged ones are wrong; only the clock runs."""
    tried = []

    def ours(config):
        tried.append(config)
        if config.block == 512:
            raise ValueError("too large")
        return torch.full((4,), 2.0 if config.staged else 1.0)

    def race(calls, warmup, rep, stop_factor):
        def time(call):
            call()
            config = tried[-1]
            return 1.0 + abs(config.block - 256) / 256 + abs(config.stages - 4) / 4 + config.splits

        return [Runner(call, [time(call)]) for call in calls]

    monkeypatch.setattr(tune, "race", race)
    case = Case(ours, {}, lambda out: out, lambda: torch.ones(4, dtype=torch.float64))
    problem = Problem("made up", "x", torch.float32, 1.0, 1.0, lambda: case)
    return problem, case


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_to_vary_are_there(family):
    _, chooses, names = FAMILIES[family]
    assert set(names) <= {field.name for field in fields(chooses.Config)}


def test_it_climbs_and_leaves_out_what_fails(landscape):
    climb = Climb([landscape], Cut(), NAMES)
    best, ratio = climb.best(1, 1, float("inf"))
    assert best == Cut(256, 4) and ratio == pytest.approx(1.0 / 2.25)
    assert any("too large" in why for why in climb.refused.values())
    assert any("error" in why for cut, why in climb.refused.items() if cut.staged)
    assert changed(best, Cut()) == {"block": 256, "stages": 4}


def test_it_stops_in_time(landscape):
    climb = Climb([landscape], Cut(), NAMES)
    assert climb.best(1, 1, 0.0) == (Cut(), 1.0) and climb.timed == {Cut()}


def test_the_file_holds_the_best_and_what_was_there(tmp_path):
    path = tmp_path / "new" / "nvidia.json"
    write(path, "gemm", "b", Cut(128), "NVIDIA")
    write(path, "gemm", "a", Cut(256), "NVIDIA")
    write(path, "mla", "c", None, "NVIDIA")
    found = json.loads(path.read_text())
    assert list(found["gemm"]) == ["a", "b"] and found["gemm"]["a"]["block"] == 256 and found["device"] == "NVIDIA"
    write(path, "gemm", "a", None, "NVIDIA")  # the model has caught up
    assert list(json.loads(path.read_text())["gemm"]) == ["b"] and not list(path.parent.glob("*.tmp"))


def test_kernels_are_compiled_ahead(monkeypatch):
    """All of them side by side, and none is kept as if it had been called for."""
    built = []
    monkeypatch.setattr(tune, "side_by_side", lambda jobs, *_: built.extend(job() for job in jobs))
    (problem,) = [p for p in problems_of("gemm", "cpu") if "tiny_swiglu" in p.name]
    call = problem.make().ours
    compile_ahead([partial(call, config=Config(8, n, 16)) for n in (16, 48)] + [lambda: 1 / 0])
    assert [type(kernel).__name__ for kernel in built] == ["JITKernel"] * 2
    assert torch.isfinite(call(config=Config(8, 16, 16)).float()).all()


def test_problems_of_one_class_are_tuned_together():
    half = [p for p in problems_of("gemm", "cpu") if "square_bf16" in p.name or "linear_bf16" in p.name]
    groups = groups_of("gemm", [*half, *half])
    assert groups and all(len(g.problems) == 2 for g in groups.values())
    assert list(groups) == [g.shape for g in groups.values()]


def test_a_real_search(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tune, "CLIMBS", 1)
    assert main(["gemm", "--device", "cpu", "--only", "tiny_swiglu", "--rep", "2", "--output", str(tmp_path)]) == 0
    assert "of the model's time" in capsys.readouterr().out and json.loads((tmp_path / "cpu.json").read_text())
    assert main(["gemm", "--device", "cpu", "--only", "tiny_swiglu", "--seconds", "0", "--output", str(tmp_path)]) == 1
    with pytest.raises(SystemExit):
        main(["cooking"])
