# SPDX-License-Identifier: Apache-2.0
"""Run an op outside of compiled graphs: check its arguments, make its results, launch its kernels into them.

The op remembers forms of arguments: everything but the tensors' contents and addresses. For a known form it checks
nothing again, makes the results as before, and repeats only the launches (on CUDA; runtime/replay.py). That takes the
time of a launch, not of some hundred Python statements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

MOST_FORMS = 1024  # of arguments, that an op remembers
TENSOR = ...  # the mark of a tensor in a form; a tuple of it for a list of tensors
PLAIN = (torch.Tensor, torch.nn.Parameter)


class Result(NamedTuple):
    """Size, stride, dtype and device of a result tensor."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Known(NamedTuple):
    """The prepared launch for arguments of one form, and the results to allocate for it."""

    launch: Callable[..., object]
    results: tuple[Result, ...]


class Eager:
    """The eager kernel of op `name`, which remembers the forms of arguments that it has seen.

    make_results: of the op's arguments, checks them and returns empty results. check_values: refuses what tensors hold.
    """

    name: str
    make_results: Callable[..., Any]

    def __init__(self, name: str, make_results: Callable[..., Any], check_values: Callable[..., None] | None = None):
        self.name, self.make_results, self.check_values = name, make_results, check_values
        self.known: dict[Any, Known | None] = {}  # None: met once; there may be no second time
        self.sites: dict[Any, Callable[..., object]] = {}  # by the arguments that are no tensors
        _ops.append(self)

    def __call__(self, *args: Any) -> Any:
        """Run the op and return its results."""
        tensors: list[torch.Tensor] = []
        form = (torch.are_deterministic_algorithms_enabled(), *[_form(x, tensors) for x in args])  # kernels may differ
        known = self.known.get(form)
        if known is None:
            return self.first(form, tensors, args)
        if self.check_values is not None:
            self.check_values(*args)
        results = [torch.empty_strided(r.size, r.stride, dtype=r.dtype, device=r.device) for r in known.results]
        known.launch(*tensors, *results)
        return results[0] if len(results) == 1 else tuple(results)

    def first(self, form: Any, tensors: Sequence[torch.Tensor], args: Sequence[Any]) -> Any:
        """Run the op for checked arguments. Their form is remembered once it is met for the second time."""
        results = self.make_results(*args)
        if self.check_values is not None:
            self.check_values(*args)
        if form in self.known:  # for the second time
            made = results if isinstance(results, tuple) else (results,)
            site = self.site(args, len(tensors) + len(made), len(made))
            self.known[form] = Known(site, tuple(map(_described, made)))
            site(*tensors, *made)
            return results
        self.into(*args, out=results)
        if all(type(x) in PLAIN and x.layout == torch.strided for x in tensors):
            if len(self.known) >= MOST_FORMS:
                self.known.clear()
                self.sites.clear()
            self.known[form] = None
        return results

    @functools.cached_property
    def into(self) -> Callable[..., object]:
        """Run the op into given results."""
        from torch_tile.ops import launchers  # imports kernels' modules

        return getattr(launchers, self.name)  # type: ignore[no-any-return]

    def site(self, args: Sequence[Any], count: int, results: int) -> Callable[..., object]:
        """Prepare calls with these arguments, the tensors apart: return a function of `count` tensors, results last."""
        from torch_tile.runtime.replay import replayed

        constants = tuple(map(_constant, args))
        key = torch.are_deterministic_algorithms_enabled(), constants
        found = self.sites.get(key)
        if found is None:
            call = functools.partial(_call, self.into, constants, results)
            found = self.sites[key] = replayed("t" * count, call, at_once=True)
        return found


_ops: list[Eager] = []


def forget() -> None:
    """Forget all remembered forms of all operators, since kernels may be chosen differently from here on."""
    for op in _ops:
        op.known.clear()
        op.sites.clear()


def _form(x: Any, tensors: list[torch.Tensor]) -> Any:
    """Return all facts of an argument that an op may depend on. If it is a tensor, append it to `tensors`."""
    if type(x) is list:
        return tuple([_form(each, tensors) for each in x])
    if isinstance(x, torch.Tensor):
        tensors.append(x)
        return (x.dtype, x.shape, x.stride(), x.device) if x.layout is torch.strided else x.layout
    return x


def _constant(x: Any) -> Any:
    """Replace a tensor, or the tensors of a list, by a mark; keep any other argument, a list as a tuple."""
    if isinstance(x, list):
        return tuple(map(_constant, x))
    return TENSOR if isinstance(x, torch.Tensor) else x


def _described(x: torch.Tensor) -> Result:
    """Describe a tensor, so that one like it can be made."""
    return Result(x.shape, x.stride(), x.dtype, x.device)


def _call(into: Callable[..., object], constants: Sequence[Any], results: int, *tensors: torch.Tensor) -> None:
    """Call `into(*args, out=results)`, where args are the constants with tensors in their places."""
    queue: Iterator[torch.Tensor] = iter(tensors)
    args = [[_filled(e, queue) for e in c] if isinstance(c, tuple) else _filled(c, queue) for c in constants]
    made = tuple(queue)
    into(*args, out=made[0] if results == 1 else made)


def _filled(constant: Any, queue: Iterator[torch.Tensor]) -> Any:
    """Return a constant, or the next tensor for a mark."""
    return next(queue) if constant is TENSOR else constant
