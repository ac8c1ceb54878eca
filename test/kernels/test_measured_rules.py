# SPDX-License-Identifier: Apache-2.0
"""Rows of measured rules: the first that fits counts, and each names a measurement that is there to repeat."""

import importlib.util
import re
from pathlib import Path

import pytest

from torch_tile.hardware import Target
from torch_tile.kernels.measured_rules import COMPARE, RULES, verdict

ROOT = Path(__file__).parents[2]
H200, A100 = Target("cuda", 90), Target("cuda", 80)
SOURCES = sorted({rule.source for rule in RULES})


@pytest.mark.every_sample
@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.command)
def test_each_measurement_can_be_repeated(source):
    results = (ROOT / "benchmarks" / "results" / source.results).read_text()
    assert source.gpu.removeprefix("NVIDIA ") in results and source.date in source.results
    module = source.command.split()[0]
    assert (ROOT / "benchmarks" / f"{module}.py").is_file()
    assert re.fullmatch(r"\w+( --only (\w[\w,]*|\"[^\"]+\"))?( --rivals [\w,-]+)?", source.command)
    assert importlib.util.find_spec(f"benchmarks.{module}") is not None


@pytest.mark.every_sample
def test_no_row_stands_behind_one_that_always_fits():
    ended = set()
    for rule in RULES:
        assert (rule.choice, rule.feature) not in ended, rule
        assert isinstance(getattr(Target, rule.feature), property)
        assert all(how in COMPARE for _, how, _ in rule.when)
        if not rule.when:
            ended.add((rule.choice, rule.feature))


@pytest.mark.every_sample
def test_each_choice_is_read():
    text = "".join(p.read_text() for p in (ROOT / "torch_tile").rglob("*.py"))
    read = re.findall(r"(?:verdict|rule)\(\s*\"([a-z_]+\.[a-z_]+)\"", text)
    assert {rule.choice for rule in RULES} <= set(read)


@pytest.mark.parametrize(
    ("target", "rows", "k", "tiles", "expected"),
    [
        (H200, 16, 4096, 0.7, True),
        (H200, 16, 4096, 0.75, False),
        (H200, 16, 1023, 0.1, False),
        (H200, 48, 2047, 0.1, False),
        (H200, 48, 2048, 5.0, True),
        (H200, 128, 8192, 0.39, True),
        (H200, 64, 8192, 0.4, False),
        (A100, 16, 4096, 0.7, False),
    ],
)
def test_the_first_row_that_fits_counts(target, rows, k, tiles, expected):
    assert verdict("gemm.transposed", target, False, rows=rows, k=k, tiles_per_sm=tiles) is expected


def test_powers():
    assert [n for n in range(70) if COMPARE["power of"](n, 2)] == [1, 2, 4, 8, 16, 32, 64]


def test_a_missing_quantity_is_an_error():
    with pytest.raises(KeyError, match="tiles_per_sm"):
        verdict("gemm.few_rows_apart", H200, False)


@pytest.mark.parametrize("target", [H200, A100, Target("cpu")], ids=str)
def test_a_choice_without_rows_is_the_default(target):
    assert verdict("gemm.not_measured_yet", target, 7, rows=3) == 7
    with_rows = {rule.choice for rule in RULES if getattr(target, rule.feature)}
    missing = {rule.choice for rule in RULES} - with_rows
    assert all(verdict(choice, target, 7) == 7 for choice in missing)
