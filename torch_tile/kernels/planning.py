# SPDX-License-Identifier: Apache-2.0
"""Calls of entry functions that plan launches instead of making them.

Inside `planning` every tensor counts as one of the given machine, and kernels are compiled but not launched: the plan
lists what would have been. Tensors need no memory, so that entry functions plan on fake tensors of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_tile.kernel import JITKernel
    from torch_tile.kernels.common import Machine


@dataclass(frozen=True)
class Launch:
    """A compiled kernel, the `form` that it was compiled for, and what it would have been called with."""

    kernel: JITKernel
    args: tuple[Any, ...]
    form: tuple[Any, ...] = ()


@dataclass
class Plan:
    """The launches of the entry functions that were called, in their order, on a machine."""

    machine: Machine
    launches: list[Launch] = field(default_factory=list)

    def noting(self, compiled: Callable[..., Any]) -> Callable[..., Callable[..., None]]:
        """Like `compiled`, a function from forms to kernels, but its kernels are noted when they are called."""

        def of_form(*form: Any) -> Callable[..., None]:
            kernel = compiled(*form)
            return lambda *args: self.launches.append(Launch(kernel, args, form))

        return of_form


_current: ContextVar[Plan | None] = ContextVar("plan", default=None)


def current_plan() -> Plan | None:
    """The plan that calls are noted in, if they are."""
    return _current.get()


@contextmanager
def planning(machine: Machine) -> Iterator[Plan]:
    """Note launches on `machine` in a new plan."""
    token = _current.set(Plan(machine))
    try:
        plan = _current.get()
        assert plan is not None
        yield plan
    finally:
        _current.reset(token)
