# SPDX-License-Identifier: Apache-2.0
"""Replay functions of tensors that end in launches: for a known form of arguments, only the launches are made.

A form is everything that the function may look at: dtypes, devices, sizes, strides, the low bits of addresses, and
numbers. The second call with arguments of a form is planned (launch_plan.py). A plan of views, empty tensors and
launches becomes one plan of driver calls. There, a kernel's tensors are distances from an argument, or from the
workspace that holds the empty tensors. csrc/launch.cpp follows this plan from then on. If the function does anything
else, such as a copy, calls of that form run the function as before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch_tile.diagnostics.errors import LaunchError
from torch_tile.hardware import VECTOR_BYTES
from torch_tile.runtime import cuda_launch
from torch_tile.runtime.cuda_launch import NUMBER, SCALAR, TENSOR, CudaLauncher, Launch, Plan
from torch_tile.runtime.driver import driver
from torch_tile.runtime.launch import MOST_FORMS, form_of
from torch_tile.runtime.launch_plan import LaunchPlan, Unplanned, planning, tensors_in
from torch_tile.runtime.native_launch import launch_function
from torch_tile.runtime.tensor_map import TensorMaps

GRANULE = VECTOR_BYTES  # bytes: functions and kernels may look at addresses modulo this
PIECE = 256  # bytes: what tensors of a workspace begin at multiples of; torch's allocator gives no less
OFFSET_BITS = 8  # of a place, below the offset: the number of an argument
_log = logging.getLogger("torch_tile")


def replayed(kinds: str, function: Callable[..., object], at_once: bool = False) -> Callable[..., object]:
    """Return a function that replays the launches of `function` and returns nothing, or `function` if none can be.

    kinds: for each argument, in order, "t" for a tensor, "q" for an int, "d" for a float. The results must go into
    arguments and may depend on arguments and constants only. Only kernels may look at the values of tensors. at_once:
    plan the first call with arguments of a form, not the second, because such calls were made elsewhere.
    """
    import torch

    if CudaLauncher.kind == "cuda" and not torch.cuda.is_available():
        return function
    long_way = LongWay(function, at_once)
    try:
        machine = driver()
    except LaunchError:
        return function
    addresses, masks = cuda_launch.native_addresses(machine), [0] * len(kinds)
    made = launch_function(long_way, cuda_launch.failed, addresses, kinds, masks, True, GRANULE - 1)
    if made is None:
        return function
    go, long_way.remember = made
    return go


class LongWay:
    """Calls the function for arguments without a plan; where possible, plans its launches and registers the plan."""

    def __init__(self, function: Callable[..., object], at_once: bool = False):
        self.function = function
        self.unknown = "" if at_once else None  # instead of a reason
        self.remember: Callable[[tuple[Any, ...], bytes], bool] = lambda args, plan: False
        self.met: dict[Any, str] = {}  # forms that were met, and why they cannot be replayed, "" if they may

    def __call__(self, *args: Any) -> None:
        """Run the function on `args`; plan a form's launches when it returns."""
        if not all(map(_is_plain, args)):
            self.function(*args)
            return
        form = tuple((form_of(a), a.data_ptr() % GRANULE) if hasattr(a, "data_ptr") else a for a in args)
        # To plan a new form takes as long as many calls, and this may be the only one.
        if self.met.get(form, self.unknown) != "":
            self.function(*args)
            if len(self.met) >= MOST_FORMS:
                self.met.clear()
            self.met.setdefault(form, "")
            return
        self.met[form] = self.plan(args)
        if self.met[form]:
            _log.info("calls with %s are not replayed: %s", form, self.met[form])

    def plan(self, args: tuple[Any, ...]) -> str:
        """Run the function on `args` through a plan and register it. Returns why that failed, or ""."""
        # Tensors of their own: one that is given twice could be two others in another call.
        given = [a.detach() if hasattr(a, "detach") else a for a in args]
        plan = LaunchPlan(tensors_in(given))
        try:
            with planning(plan):
                self.function(*given)
            plan.require_launches_only()
            refuse(plan)
        except (Unplanned, NotReplayed) as why:
            self.function(*args)
            return str(why)
        for launch in plan.launches:
            launch.kernel(*launch.args)
        try:
            return "" if self.remember(args, replay_of(plan).packed()) else "its plan is too long"
        except NotReplayed as why:
            return str(why)


class NotReplayed(Exception):
    """Raised if a plan cannot be replayed, with the reason."""


def refuse(plan: LaunchPlan) -> None:
    """Raise NotReplayed for a plan with kernels that are not for a GPU, allocate, or want unusual alignment."""
    for launch in plan.launches:
        launcher = launch.kernel.launcher
        name = launcher.program.name
        if not isinstance(launcher, CudaLauncher) or launcher.allocates:
            raise NotReplayed(f"{name} is not for a GPU, or allocates what it returns")
        if launcher.variant_for(launch.args) is not None:
            raise NotReplayed(f"{name} is given one tensor twice, and tensors of other calls may be two")
        if max(launcher.alignments.values(), default=1) > GRANULE:
            raise NotReplayed(f"{name} needs addresses that are multiples of more than {GRANULE} bytes")


def replay_of(plan: LaunchPlan) -> Plan:
    """Merge all launches of a plan into one driver plan. Raises NotReplayed for several devices."""
    workspace = _Workspace(plan)
    contexts: set[tuple[int, int]] = set()
    launches: list[Launch] = []
    for launch in plan.launches:
        launcher = launch.kernel.launcher
        assert isinstance(launcher, CudaLauncher)
        found, tensors, slots = launcher.prepared(launch.args)
        places = list(map(workspace.place, tensors))
        contexts.add((found.context, found.device))
        for each in found.launches:
            arguments = tuple(
                (TENSOR, places[n]) if kind == TENSOR else (NUMBER, slots[n]) if kind == SCALAR else (kind, n)
                for kind, n in each.arguments
            )
            forms = ((m.form._replace(position=places[m.form.position]), m.machine) for m in each.maps)
            launches.append(each._replace(arguments=arguments, maps=tuple(TensorMaps(*form) for form in forms)))
    if len(contexts) != 1:
        raise NotReplayed("it uses several devices")
    ((context, device),) = contexts
    return Plan(context, device, tuple(launches), workspace.size)


class _Workspace:
    """One piece of memory for all empty tensors that a plan's kernels take."""

    def __init__(self, plan: LaunchPlan):
        self.plan = plan
        self.offsets: dict[int, int] = {}  # of each root that has been met
        self.size = 0

    def place(self, tensor: Any) -> int:
        """Encode a tensor's place for the driver's plan: its argument number and byte offset."""
        root = self.plan.root(tensor)
        assert root is not None
        offset: int = self.plan.offset(tensor)
        if root >= self.plan.given:
            if root not in self.offsets:
                self.offsets[root] = self.size
                size = self.plan.roots[root].untyped_storage().nbytes()
                self.size += -(-size // PIECE) * PIECE
            offset += self.offsets[root]
        return min(root, self.plan.given) | offset << OFFSET_BITS


def _is_plain(value: Any) -> bool:
    """Return whether an argument is a number or a plain dense tensor, so that its launches can be replayed."""
    import torch

    if isinstance(value, int | float):
        return True
    is_dense = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided
    return is_dense and value.device.type == CudaLauncher.kind and not value.is_neg()
