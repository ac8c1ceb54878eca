# SPDX-License-Identifier: Apache-2.0
import sys
import threading
import time
from types import ModuleType

import pytest

from torch_tile.compiler.parallel import progress, side_by_side, workers_for
from torch_tile.hardware import Target


def test_results_are_in_order_and_failures_among_them():
    def bad():
        raise ValueError("no")

    told = []
    found = side_by_side([lambda: 1, bad, lambda: 3], 2, None, lambda: told.append(1))
    assert found[0] == 1 and found[2] == 3 and isinstance(found[1], ValueError) and len(told) == 3
    assert side_by_side([], 4, 1.0) == []


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_jobs_run_side_by_side(timeout):
    together = threading.Barrier(3, timeout=30)  # broken unless three jobs wait at once
    assert sorted(side_by_side([together.wait] * 3, 3, timeout)) == [0, 1, 2]


def test_no_more_workers_than_asked_for():
    running, most, lock = [], [], threading.Lock()

    def job():
        with lock:
            running.append(1)
            most.append(len(running))
        time.sleep(0.01)
        with lock:
            running.pop()

    side_by_side([job] * 6, 2, None)
    assert max(most) <= 2


def test_one_that_hangs_is_given_up_and_the_rest_go_on():
    release = threading.Event()
    try:
        found = side_by_side([lambda: release.wait(60), lambda: 2, lambda: 3], 1, 0.2)
    finally:
        release.set()
    assert isinstance(found[0], TimeoutError) and "0.2 seconds" in str(found[0]) and found[1:] == [2, 3]


def test_workers(monkeypatch):
    monkeypatch.setenv("TORCH_TILE_AUTOTUNE_WORKERS", "7")
    assert workers_for(Target("cpu")) == workers_for(Target("cuda", 90)) == 7
    monkeypatch.setenv("TORCH_TILE_AUTOTUNE_WORKERS", "0")
    assert workers_for(Target("cpu")) == 1
    monkeypatch.setenv("TORCH_TILE_AUTOTUNE_WORKERS", "")
    assert 1 <= workers_for(Target("cuda", 90)) <= 4


def test_a_bar_needs_tqdm_and_a_terminal(monkeypatch, capsys):
    with progress(2, "kernel: compiling") as told:
        told()
    assert "compiling" not in capsys.readouterr().err  # no terminal here
    steps = []

    class Bar:
        def __init__(self, total, desc, **_):
            steps.append((total, desc))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def update(self):
            steps.append("step")

    module = ModuleType("tqdm")
    module.tqdm = Bar
    monkeypatch.setitem(sys.modules, "tqdm", module)
    with progress(2, "timing") as told:
        told()
    assert steps == [(2, "timing"), "step"]
    monkeypatch.setitem(sys.modules, "tqdm", None)  # not installed
    with progress(2, "timing") as told:
        told()
