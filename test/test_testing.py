# SPDX-License-Identifier: Apache-2.0
import operator
import random

import numpy
import pytest
import torch

from torch_tile import testing
from torch_tile.testing import torch_assert_close


def test_a_few_elements_may_differ():
    a = torch.zeros(1000)
    b = a.clone()
    b[0] = 1
    assert torch_assert_close(a, b)
    with pytest.raises(AssertionError, match=r"0\.20% of 1000 elements differ"):
        b[1] = 1
        torch_assert_close(a, b)
    assert torch_assert_close(a, b, max_mismatched_ratio=0.01)
    assert torch_assert_close(a, a + 0.009)


def test_nan():
    a = torch.tensor([1.0, float("nan")])
    assert torch_assert_close(a, a.clone())
    with pytest.raises(AssertionError, match="differ"):
        torch_assert_close(a, a.clone(), equal_nan=False)
    with pytest.raises(TypeError, match="equal_nann"):
        torch_assert_close(a, a.clone(), equal_nann=False)


@pytest.mark.parametrize("found", [0, 75, 80, 90])
def test_requirements_skip_what_the_machine_cannot_run(monkeypatch, found):
    monkeypatch.setattr(testing, "detected", lambda: found)
    for mode in ("ge", "gt", "le", "lt", "eq"):
        made = getattr(testing, f"requires_cuda_compute_version_{mode}")(8)
        assert made.holds() is (found > 0 and getattr(operator, mode)(found, 80)), mode
        assert made.holds() is testing.requires_cuda_compute_version(8, 0, mode).holds()
    assert testing.requires_cuda.holds() is (found != 0)
    with pytest.raises(ValueError, match="mode is one of"):
        testing.requires_cuda_compute_version(8, mode="about")


def test_requirements_as_decorators():
    def test():
        pass

    for decorate in (testing.requires_rocm, testing.requires_rocm(), testing.requires_package("no_such_package_here")):
        marked = decorate(test)
        assert marked is test and marked.pytestmark[-1].args == (True,) and marked.pytestmark[-1].kwargs["reason"]
    assert testing.requires_package("torch")(test).pytestmark[-1].args == (False,)
    assert testing.requires_llvm.marks()[0].args == (False,)


def test_seeds():
    drawn = []
    for _ in range(2):
        testing.set_random_seed(3)
        drawn.append((random.random(), numpy.random.rand(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]


def test_functions_of_a_file_are_measured_in_order(capsys):
    calls = []

    def timed(times=1):
        calls.append(times)
        return 0.5 * times

    scope = {"testing": testing, "timed": timed, "regression_9": 1, "other": lambda: calls.append("other")}
    text = "def regression_b(): testing.process_func(timed, 'regression_late', times=3)\n"
    text += "def regression_a(): testing.process_func(timed)\ntesting.regression(verbose=False)\n"
    exec(text, scope)
    assert calls == [1, 3]
    assert capsys.readouterr().out.splitlines() == [f"{__name__}: 0.5", "late: 1.5"]
    with pytest.raises(ValueError, match="no time"):
        testing.process_func(lambda: 0.0)
