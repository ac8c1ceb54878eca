# SPDX-License-Identifier: Apache-2.0
"""The samples of the suite: which tests a session runs by their number in .ci/sample."""

from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture
def sample(request, monkeypatch):
    """`sample(items, number)`: the tests of these that a session of that number runs."""
    plugin = request.config.pluginmanager.get_plugin(str(Path(__file__).parent / "conftest.py"))

    def drawn(items, number):
        monkeypatch.setattr(plugin, "_number", lambda: number)
        return {item.nodeid for item in plugin._sample(items)}

    monkeypatch.setattr(plugin, "WHOLE_SUITE", 0)
    drawn.plugin = plugin
    return drawn


def item(name, slow=False, folder="ops", **params):
    """A test of that folder with these parameters."""
    marks = {"slow"} if slow else set()
    case = f"[{'-'.join(map(str, params.values()))}]" if params else ""
    return SimpleNamespace(
        nodeid=f"test/{folder}/test_{name}.py::test_{name}{case}",
        path=Path(__file__).parent / folder / f"test_{name}.py",
        callspec=SimpleNamespace(params=params),
        get_closest_marker=lambda mark: mark if mark in marks else None,
    )


def suite(slow):
    """Functions of one case, of some and of many, on all simulators."""
    yield from (item(f"alone{n}", slow) for n in range(40))
    yield from (item("some", slow, n=n) for n in range(9))
    yield from (item("many", slow, n=n) for n in range(70))
    yield from (item("way", slow, way=w, n=n) for w in ("cpu", "cuda:sm_80", "cuda:sm_90a", "text") for n in range(9))
    yield from (item("engine", slow, engine=e) for e in ("cpu", "interpreter", "threads", "text"))


@pytest.mark.parametrize("slow", [False, True])
def test_24_samples_in_a_row_hold_every_test(sample, slow):
    items = list(suite(slow))
    samples = [sample(items, number) for number in range(17, 17 + 24)]
    assert set().union(*samples) == {each.nodeid for each in items}


def test_slow_tests_are_in_half_as_many(sample):
    def share(slow):
        items = [item(f"alone{n}", slow) for n in range(400)]
        return len(sample(items, 5)) / len(items)

    assert 0.2 < share(False) < 0.3
    assert 0.08 < share(True) < 0.17


def test_six_samples_in_a_row_hold_every_cubin(sample, monkeypatch):
    monkeypatch.setattr(sample.plugin, "WHOLE_SUITE", 10**6)
    monkeypatch.setattr(sample.plugin, "ALL_CUBINS", 0)
    items = [item("cubins", chip=chip, n=n) for chip in ("sm_80", "sm_90a", "sm_120a") for n in range(50)]
    samples = [sample(items, number) for number in range(17, 17 + 6)]
    assert set().union(*samples) == {each.nodeid for each in items}
    assert all(10 < len(each) < 40 for each in samples)


def test_tests_of_the_whole_tree_are_in_every_sample(sample):
    items = [item("structure", folder="."), *suite(False)]
    items[0].path = Path(__file__).parent / "test_structure.py"
    assert all(items[0].nodeid in sample(items, number) for number in range(4))
