# SPDX-License-Identifier: Apache-2.0
"""List what a call of an entry function launches, instead of launching it.

Inside `planning` kernels are listed with their compile-time arguments, tensors and scalars; none is compiled before it
is asked for. Views and empty tensors are made as usual. A plan follows them: each tensor has a root, which is an
argument or a tensor that was made, and an offset from it. Tensors need no memory: fake ones of any size will do.

Replay, the C++ wrapper, the compilation ahead of a graph, `explain` and the tests of machine code read such plans.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from torch_tile.jit import JITFunction
    from torch_tile.kernel import JITKernel
    from torch_tile.runtime.machine import Machine

EMPTY = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
COPIES = frozenset(f"aten::{name}" for name in ("clone", "copy_", "_to_copy"))
OF_FORMS = frozenset({"aten::can_cast", "aten::promote_types", "aten::result_type", "prim::device"})  # touch no memory


class Unplanned(Exception):
    """Raised for a call that does more than launch kernels on views of its arguments and on empty tensors.

    copies: the number of the argument that the call clones, if that is what it does.
    """

    def __init__(self, why: str, copies: int | None = None):
        super().__init__(why)
        self.copies = copies


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel call: kernel function, compile-time arguments (tiling, spec), then tensors and scalars."""

    function: JITFunction
    choice: tuple[Any, ...]
    args: tuple[Any, ...]

    @property
    def kernel(self) -> JITKernel:
        """Return the kernel, compiled if it is not yet known."""
        made: JITKernel = self.function(*self.choice)
        return made


@dataclass(frozen=True, eq=False)
class TorchCall:
    """A call of torch that makes neither a view nor an empty tensor: a copy, a fill, or a computation.

    name: of the operator, as "aten::clone". source: the tensor that a copy reads, maybe into another dtype.
    """

    name: str
    source: torch.Tensor | None


class LaunchPlan:
    """The calls made inside `planning`, in order, and the places of their tensors.

    steps: kernels' launches and calls of torch. roots: the arguments, then what was made; `given` counts the arguments.
    """

    given: int

    def __init__(self, arguments: Iterable[torch.Tensor] = (), machine: Machine | None = None):
        self.machine = machine
        self.steps: list[Launch | TorchCall] = []
        self.roots: list[torch.Tensor] = []
        self._low_bits: dict[int, int] = {}  # of the addresses of roots without memory
        self._origins: dict[int, int] = {}  # the number of the root of each tensor
        self._kept: list[torch.Tensor] = []  # so that no two tensors get the same address
        self.given = 0
        for each in arguments:
            self.add(each)

    # -- what readers ask ----------------------------------------------------------------------------------------------
    @property
    def launches(self) -> list[Launch]:
        """Return the kernel launches of the plan."""
        return [step for step in self.steps if isinstance(step, Launch)]

    @property
    def torch_calls(self) -> list[TorchCall]:
        """List the torch calls of the plan, without views and empty tensors."""
        return [step for step in self.steps if isinstance(step, TorchCall)]

    def compile(self) -> list[JITKernel]:
        """Return the distinct kernels of the launches; compile those that are not yet known."""
        return list(dict.fromkeys(launch.kernel for launch in self.launches))

    def refuse_torch(self) -> None:
        """Raise Unplanned if the call asks torch for more than views and empty tensors."""
        for call in self.torch_calls:
            copied = self.root(call.source) if call.name == "aten::clone" and call.source is not None else None
            raise Unplanned(f"torch is asked for {call.name}", copied)

    def require_launches_only(self) -> None:
        """Raise Unplanned unless all steps are launches on views of arguments and of empty tensors made here."""
        self.refuse_torch()
        if not self.launches:
            raise Unplanned("nothing is launched")
        for launch in self.launches:
            if any(self.root(each) is None for each in tensors_in(launch.args)):
                raise Unplanned("a kernel is given a tensor that is no view of an argument")

    @property
    def made(self) -> list[torch.Tensor]:
        """Return the tensors made during planning: workspaces, and results of torch."""
        return self.roots[self.given :]

    def root(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the root that a tensor is a view of; None for a tensor from elsewhere."""
        return self._origins.get(tensor._cdata)

    def offset(self, tensor: torch.Tensor) -> Any:
        """Return a tensor's offset in bytes from its root, or from the root's storage if it has no memory."""
        if has_memory(tensor):
            return tensor.data_ptr() - self.roots[self._origins[tensor._cdata]].data_ptr()
        return tensor.storage_offset() * tensor.element_size()

    def address(self, tensor: torch.Tensor) -> Any:
        """Return an address of a tensor whose low bits are right."""
        if has_memory(tensor):
            return tensor.data_ptr()
        return self.low_bits_of(tensor) + self.offset(tensor)

    def low_bits_of(self, tensor: torch.Tensor) -> int:
        """Return the low bits of the storage address of a tensor without memory."""
        return self._low_bits.get(self._origins.get(tensor._cdata, -1), 0)

    # -- what fills the plan -------------------------------------------------------------------------------------------
    def add(self, tensor: torch.Tensor, low_bits: int = 0) -> None:
        """Add an argument before planning begins. low_bits: of its storage's address, if it has no memory."""
        if low_bits:
            self._low_bits[self.given] = low_bits
        self._add_root(tensor)
        self.given += 1

    def noting(self, function: JITFunction) -> Callable[..., Callable[..., None]]:
        """Wrap a kernel function so that the plan records its kernels' calls instead of launching them."""
        return lambda *choice: lambda *args: self.steps.append(Launch(function, choice, args))

    def call(self, op: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call torch's `op` and record its effect. Raises Unplanned if it touches memory."""
        name = op._schema.name
        is_view = not op._schema.is_mutable and any(each.alias_info is not None for each in op._schema.returns)
        if not is_view and name not in EMPTY and name not in OF_FORMS and any(map(has_memory, tensors_in(args, named))):
            raise Unplanned(f"torch is asked for {name}")
        result = op(*args, **named)
        if name in OF_FORMS:
            return result
        results = tensors_in(result)
        self._kept += results
        if is_view:
            if (origin := self.root(args[0])) is not None:
                for each in results:
                    self._origins.setdefault(each._cdata, origin)
            return result
        for each in results:
            if each._cdata not in self._origins:
                self._add_root(each)
        if name not in EMPTY:
            source = (args[1] if op._schema.is_mutable else args[0]) if name in COPIES else None
            self.steps.append(TorchCall(name, source))
        return result

    def _add_root(self, tensor: torch.Tensor) -> None:
        """Register a tensor with memory of its own."""
        self._origins[tensor._cdata] = len(self.roots)
        self.roots.append(tensor)


_current: ContextVar[LaunchPlan | None] = ContextVar("plan", default=None)


def current_plan() -> LaunchPlan | None:
    """Return the plan that records calls in this thread, or None."""
    return _current.get()


def address_function() -> Callable[[torch.Tensor], Any]:
    """Return the function that gives a tensor's address; in planning, a substitute with the right low bits."""
    import torch

    plan = _current.get()
    return torch.Tensor.data_ptr if plan is None else plan.address


@contextmanager
def planning(plan: LaunchPlan | None = None) -> Iterator[LaunchPlan]:
    """Record launches of this thread in a plan (a new one unless given) instead of making them.

    Where the plan names a machine, every tensor counts as one of that machine. Raises Unplanned where torch is called
    for more than views and empty tensors, with tensors that have memory.
    """
    made = LaunchPlan() if plan is None else plan
    token = _current.set(made)
    try:
        with _mode_class()(made):
            yield made
    finally:
        _current.reset(token)


@functools.cache
def _mode_class() -> type:
    """Return a dispatch mode class that sends torch's calls to a plan."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Following(TorchDispatchMode):
        """A dispatch mode that sends torch's calls to a plan."""

        def __init__(self, plan: LaunchPlan):
            super().__init__()  # type: ignore[no-untyped-call]
            self.plan = plan

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if _current.get() is not self.plan:  # a plan inside this one follows its own
                return op(*args, **(kwargs or {}))
            return self.plan.call(op, args, kwargs or {})

    return Following


def has_memory(x: Any) -> bool:
    """Return whether a value is one of torch's own tensors with memory, and not a fake tensor."""
    import torch

    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type != "meta"


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """Return the tensors in the arguments, including those in lists."""
    import torch
    from torch.utils._pytree import tree_leaves

    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]
