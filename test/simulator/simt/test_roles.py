# SPDX-License-Identifier: Apache-2.0
"""Tasks that take turns, fail and wait for ever."""

import threading

import pytest

from torch_tile.simulator.simt.roles import Stuck, Task, Tasks


class Place:
    """A counter that tasks wait for, and a value that each has for itself."""

    def __init__(self):
        self.count, self.own, self.said = 0, None, []
        self.tasks = Tasks(lambda: self.own, lambda state: setattr(self, "own", state))

    def reach(self, count):
        self.tasks.until(lambda: self.count >= count, lambda: self.said.append(f"no {count}"))

    def role(self, name, steps, start=0):
        def body():
            self.own = name
            for n in range(steps):
                self.reach(2 * n + start)
                assert self.own == name
                self.said.append(name)
                self.count += 1

        return Task(body)


@pytest.fixture
def place():
    before = threading.active_count()
    yield Place()
    assert threading.active_count() == before


def test_tasks_take_turns_and_keep_what_is_their_own(place):
    place.tasks.run([place.role("a", 4), place.role("b", 4, start=1)])
    assert place.said == ["a", "b"] * 4


def test_all_wait(place):
    with pytest.raises(Stuck):
        place.tasks.run([place.role("a", 2), place.role("b", 1, start=5)])
    assert place.said == ["a", "no 2", "no 5"]


def test_who_waits_with_no_others(place):
    place.own = "a"
    with pytest.raises(Stuck):
        place.reach(1)
    place.reach(0)
    assert place.said == ["no 1"]


def test_what_a_task_raises(place):
    def fails():
        place.reach(1)
        raise ValueError("of a task")

    with pytest.raises(ValueError, match="of a task"):
        place.tasks.run([Task(fails), place.role("a", 9), place.role("b", 1, start=99)])
    place.tasks.run([place.role("a", 1)])  # and again


def test_tasks_of_tasks(place):
    """They take turns with all others, and who runs them goes on when they are done."""

    def outer(name, start):
        def body():
            place.tasks.run([place.role(f"{name}1", 2, start), place.role(f"{name}2", 2, start + 1)])
            place.said.append(f"{name} goes on")

        return Task(body)

    place.tasks.run([outer("a", 0), outer("b", 4)])
    assert place.said == ["a1", "a2", "a1", "a2", "a goes on", "b1", "b2", "b1", "b2", "b goes on"]


def test_tasks_of_tasks_that_wait_for_ever(place):
    with pytest.raises(Stuck):
        place.tasks.run([Task(lambda: place.tasks.run([place.role("a", 1), place.role("b", 1, start=9)]))])
    assert place.said == ["a", "no 9"]
    place.tasks.run([place.role("c", 1)])


def test_a_task_is_unwound_with_what_it_holds(place):
    def holds():
        try:
            place.reach(7)
        finally:
            place.said.append("release")

    with pytest.raises(Stuck):
        place.tasks.run([Task(holds)])
    assert place.said[-1] == "release"
