# SPDX-License-Identifier: Apache-2.0
import json

import pytest
import torch

from benchmarks.problem import (
    Case,
    Result,
    error_of,
    first_of,
    poisoned,
    sample_of,
    sample_of_groups,
    tolerance_of,
    wrong,
)
from benchmarks.timer import Timing


def case_of(result):
    want = torch.ones(4, 8, dtype=torch.float64)
    return Case(lambda: result, {}, lambda out: out[:2], lambda: want[:2]), want[:2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rounding_is_right(dtype):
    exact = torch.randn(64, 256, dtype=torch.float64)
    assert error_of(exact.to(dtype), exact) < tolerance_of(dtype) / 4


def test_one_wrong_element_is_found():
    good = torch.ones(4, 8, dtype=torch.bfloat16)
    case, want = case_of(good)
    assert wrong(case, case.ours, want, tolerance_of(good.dtype)) == (0.0, "")
    good[1, 3] += 0.125
    error, message = wrong(case, case.ours, want, tolerance_of(good.dtype))
    assert error == pytest.approx(0.0625) and "error 6.2e-02" in message


def test_what_is_not_written_is_found():
    """Even outside of the sample."""
    with poisoned():
        result = torch.randn(3).new_empty(4, 8)
    result[:3] = 1
    case, want = case_of(result)
    assert wrong(case, case.ours, want, 1.0)[1] == "8 of 32 elements are not finite"
    assert not torch.are_deterministic_algorithms_enabled()


def test_zero_rows_must_be_zero():
    zero = torch.zeros(1, 4)
    assert error_of(zero, zero) == 0.0
    assert error_of(zero + 1e-30, zero) > 1.0


def test_nan_in_the_sample_is_wrong():
    result = torch.full((4, 8), float("nan"))
    case, want = case_of(result)
    assert wrong(case, case.ours, want, 1.0)[1]


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"\[1, 4\], expected \[2, 4\]"):
        error_of(torch.ones(1, 4), torch.ones(2, 4))


@pytest.mark.parametrize(("n", "count"), [(1, 128), (7, 3), (1000, 128), (8192, 128), (5, 5)])
def test_samples_come_from_every_band(n, count):
    rows = sample_of(n, count, "cpu")
    count = min(n, count)
    assert len(rows) == count and rows.unique().numel() == count
    assert rows.min() >= 0 and rows.max() < n
    assert bool((rows.diff() < 2 * n / count + 1).all())


@pytest.mark.parametrize(("n", "groups"), [(1, 3), (40, 1), (500, 60), (3000, 5)])
def test_samples_have_the_ends_of_every_group(n, groups):
    chosen = torch.randint(groups, (n,)).sort().values
    rows, ends = sample_of_groups(chosen, groups)
    assert bool((rows.diff() > 0).all()) and ends[-1] == len(rows)
    for group, own in enumerate(torch.tensor_split(rows, ends[:-1].tolist())):
        inside = (chosen == group).nonzero()[:, 0]
        assert bool(torch.isin(own, inside).all())
        assert not len(inside) or bool(torch.isin(inside[[0, -1]], own).all())


def test_first_of():
    x = torch.ones(1)
    assert first_of((x, None)) is x and first_of(x) is x


def result() -> Result:
    times = {"tile": Timing(2e-3, 1.9e-3, 2.1e-3, 9), "b": Timing(3e-3, 3e-3, 3e-3, 9)}
    return Result(
        "f", "n", "g", "fp16", 4e9, 1e9, error=0.0, times=times, asked={"a": 2.0, "b": 1.2}, best=1e-3, bound="flops"
    )


def test_goal_is_the_first_rival_that_was_timed():
    r = result()
    assert r.goal() == ("b", 1.2, pytest.approx(1.5))
    r.asked = {"ceiling": 0.9, "b": 1.2}
    assert r.goal() == ("ceiling", 0.9, 0.5)
    r.asked = {"a": 2.0}
    assert r.goal() is None


def test_rates_have_the_unit_of_the_bound():
    r = result()
    assert r.rate() == (pytest.approx(2.0), "TFLOP/s")
    r.bound = "bytes"
    assert r.rate() == (pytest.approx(0.5), "TB/s")
    r.bytes = 1e6
    assert r.rate("b") == (pytest.approx(1 / 3), "GB/s")


def test_a_line_reads_back():
    assert Result.of_line(json.loads(json.dumps(result().line()))) == result()
