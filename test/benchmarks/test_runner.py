# SPDX-License-Identifier: Apache-2.0
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import runner
from benchmarks.problem import Case, Problem
from benchmarks.timer import Ceilings, measure


def matrix(value: float) -> torch.Tensor:
    return torch.full((4, 8), value)


def absent():
    raise ModuleNotFoundError("no module named rival")


def broken():
    raise RuntimeError("cannot do\nthis")


def made(ours=lambda: matrix(1.0), rivals=None, yardsticks=None):
    want = matrix(1.0).double()
    return lambda: Case(ours, rivals or {}, lambda out: out, lambda: want, yardsticks or {})


def problem(name, make, quick=False, asked=None):
    return Problem(name, "group", torch.float32, 1e6, 1e3, make, asked or {}, quick=quick)


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the given problems as a family; returns the exit status and what was printed."""

    def go(problems, *arguments):
        family = SimpleNamespace(problems=lambda device: problems)
        monkeypatch.setitem(sys.modules, "benchmarks.made_up", family)
        status = runner.main(["made_up"], "text", ["--device", "cpu", "--seconds", "2", *arguments])
        return status, capsys.readouterr().out

    return go


def test_a_table_and_lines_of_json(run, tmp_path):
    rivals = {"good": lambda: lambda: matrix(1.0), "bad": lambda: lambda: matrix(2.0), "away": absent, "sick": broken}
    make = made(rivals=rivals, yardsticks={"copy": lambda: matrix(0.0)})
    one = problem("one", make, asked={"away": 2.0, "good": 1.0})
    file = tmp_path / "results.jsonl"
    status, out = run([one], "--json", str(file))
    line = next(x for x in out.splitlines() if x.startswith("one "))
    assert status == 0 and "1.00" in line and " good " in line and "copy " in line
    assert "(bad: error 5.0e-01" in line and "(sick: RuntimeError: cannot do this)" in line and "away" not in line
    assert "geomean group: copy" in out
    head, written = (json.loads(x) for x in file.read_text().splitlines())
    assert head["ceilings"]["products"].keys() == {"fp32"} and head["seed"] >= 0
    assert written["times"].keys() == {"tile", "copy", "good"} and written["failed"].keys() == {"bad", "sick"}


def test_wrong_and_failed_have_no_time_and_do_not_stop_the_rest(run):
    ours = [made(ours=lambda: matrix(1.1)), made(ours=lambda: torch.empty(4, 8)), made(ours=broken), made()]
    status, out = run([problem(f"p{i}", make) for i, make in enumerate(ours)])
    lines = {x.split()[0]: x for x in out.splitlines() if x.startswith("p")}
    assert status == 1
    assert "WRONG: error" in lines["p0"] and "WRONG: 32 of 32 elements" in lines["p1"]
    assert "FAILED: RuntimeError: cannot do this" in lines["p2"] and "FLOP/s" in lines["p3"]
    assert "3 WRONG or FAILED" in out


def test_choice_of_problems_and_rivals(run):
    rivals = {"a": lambda: lambda: matrix(1.0), "Triton": lambda: lambda: matrix(1.0)}
    problems = [problem("x M5", made(rivals=rivals), quick=True), problem("x M6", made(rivals=rivals))]
    assert "x M6" not in run(problems, "--quick")[1]
    out = run(problems, "--only", "M6,M7")[1]
    assert "x M5" not in out and "x M6" in out and " a " in out and "Triton" not in out
    out = run(problems, "--rivals", "Triton", "--only", "M5")[1]
    assert "Triton" in out and " a " not in out
    assert run(problems, "--only", "nothing") == (1, "no such problem\n")


def test_memory_is_measured_where_it_is_asked(run, monkeypatch):
    monkeypatch.setattr(runner, "peak_of", lambda call: 3 << 29 if call() is hungry else 1 << 29)
    hungry = matrix(1.0)
    rivals = {"rival": lambda: lambda: hungry}
    problems = [
        replace(problem(name, made(rivals=rivals)), memory=memory) for name, memory in (("a", 2**30), ("b", None))
    ]
    out = run(problems)[1]
    assert "GiB" not in out  # of a CPU
    options = SimpleNamespace(device="cuda", rivals=None)
    monkeypatch.setattr(runner.faulthandler, "dump_traceback_later", lambda *args, **named: None)  # needs a real stderr
    monkeypatch.setattr(runner, "measure", lambda calls, seconds, device: measure(calls, seconds, "cpu"))
    results = [runner.run("made_up", p, options, Ceilings(1.0, 1.0, {"fp32": 1.0}), 0.01) for p in problems]
    assert [r.peaks for r in results] == [{"tile": 1 << 29, "rival": 3 << 29}, {}]
    assert runner.format_result(results[0]).endswith("GiB above inputs: tile 0.50, rival 1.50; asked 1.00")
    assert "GiB" not in runner.format_result(results[1])


def test_out_of_time(run, monkeypatch):
    clock = iter(range(0, 10**6, 100))
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: next(clock), strftime=lambda f: "", time=int))
    assert "out of time: 1 of 1 problems left" in run([problem("one", made())])[1]


def test_unknown_families(capsys):
    with pytest.raises(SystemExit):
        runner.main(["gemm", "mla"], "", ["other"])
    assert "no family other" in capsys.readouterr().err


@pytest.mark.parametrize("family", runner.FAMILIES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_problems_of_the_families(family, device):
    problems = runner.problems_of(family, device)
    names = [p.name for p in problems]
    assert len(set(names)) == len(names) and any(p.quick for p in problems) and not all(p.quick for p in problems)
    for p in problems:
        assert p.flops > 0 and p.bytes > 0 and len(p.name) <= 48, p.name
        assert all(ratio > 0 for ratio in p.asked.values())


@pytest.mark.slow
def test_all_families_smoke(monkeypatch, capsys):
    """What `python -m benchmarks --quick` does here."""
    monkeypatch.setattr(runner, "MOST_SECONDS", 0.01)
    assert runner.main(runner.FAMILIES, "", ["--device", "cpu", "--quick", "--seconds", "600"]) == 0
    out = capsys.readouterr().out
    assert "WRONG" not in out and "FAILED" not in out
    assert all(f"geomean {name}" in out for name in ("gemm", "attention fp32", "decode", "mla", "softmax"))
