# SPDX-License-Identifier: Apache-2.0
"""Run the roles of a block as tasks with their own stacks; one task runs at a time.

A task runs until it must wait, so each switch comes where the hardware would switch at the latest. The order found by
vector clocks does not depend on which task runs first. A deadlock shows when no task can run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np


class Stuck(Exception):
    """Raised when the block cannot go on; the findings tell the reason."""


class _Stopped(BaseException):
    """Raised to unwind a task that is no longer needed."""


class Task:
    """One role: the function `body`, and while the task waits, its condition to go on and its report of a deadlock."""

    def __init__(self, body: Callable[[], None]):
        """Create a task that is ready to run `body`."""
        self.body = body
        self.ready: Callable[[], bool] = lambda: True
        self.report: Callable[[], None] = lambda: None
        self.error: BaseException | None = None
        self.done = False
        self.state: Any = None  # the state that the interpreter keeps while another task runs
        self.may_run: threading.Semaphore = threading.Semaphore(0)
        self.thread: threading.Thread | None = None


class Tasks:
    """Runs tasks, and their inner tasks, by turns; `save` and `restore` switch the state of the running one."""

    save: Callable[[], Any]
    restore: Callable[[Any], None]

    def __init__(self, save: Callable[[], Any], restore: Callable[[Any], None]):
        self.save, self.restore = save, restore
        self.current: Task | None = None
        self.stopping: bool = False
        self.pool: list[Task] = []
        self.back: threading.Semaphore = threading.Semaphore(0)  # the baton on its way back to `run`

    def run(self, tasks: list[Task]) -> None:
        """Run all tasks to their end, preferring the first task that can go on. Raises a task's exception, or Stuck."""
        for task in tasks:
            task.thread = threading.Thread(target=self._work, args=(task,), daemon=True)
            task.thread.start()
        if self.current is not None:
            self.pool += tasks
            self.until(lambda: all(t.done for t in tasks), lambda: None)
            return
        self.stopping, self.pool = False, list(tasks)
        try:
            while waiting := [t for t in self.pool if not t.done]:
                able = next((t for t in waiting if t.ready()), None)
                if able is None:
                    for t in waiting:
                        self.restore(t.state)
                        t.report()
                    raise Stuck
                self._hand(able)
                if able.error is not None:
                    raise able.error
        finally:
            self.stopping = True
            for task in self.pool:
                if not task.done:
                    self._hand(task)
                if task.thread is not None:
                    task.thread.join()
            self.current = None

    def until(self, ready: Callable[[], bool], report: Callable[[], None]) -> None:
        """Let other tasks run until `ready()`; if that can never happen, call `report` and raise Stuck."""
        if ready():
            return
        task = self.current
        if task is None:
            report()
            raise Stuck
        task.ready, task.report = ready, report
        task.state = self.save()
        self.back.release()
        task.may_run.acquire()
        if self.stopping:
            raise _Stopped
        self.restore(task.state)

    def _hand(self, task: Task) -> None:
        """Let a task run until it waits or ends."""
        self.current = task
        task.may_run.release()
        self.back.acquire()

    def _work(self, task: Task) -> None:
        """Run a task's body in its thread, and then return control to `run`."""
        task.may_run.acquire()
        try:
            if not self.stopping:
                with np.errstate(all="ignore"):
                    task.body()
        except _Stopped:
            pass
        except BaseException as error:  # `run` raises it
            task.error = error
        finally:
            task.done = True
            self.back.release()
