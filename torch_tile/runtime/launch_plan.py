# SPDX-License-Identifier: Apache-2.0
"""Lists what a call of an entry function launches, instead of launching it.

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
    from torch_tile.kernels.common import Machine

EMPTY = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
COPIES = frozenset(f"aten::{name}" for name in ("clone", "copy_", "_to_copy"))
FILLS = frozenset(f"aten::{name}" for name in ("fill_", "zero_", "zeros", "new_zeros", "full", "new_full", "ones"))
OF_FORMS = frozenset({"aten::can_cast", "aten::promote_types", "aten::result_type", "prim::device"})  # touch no memory


class Unplanned(Exception):
    """Raised where a call of torch would read or write memory that the plan's launches have not filled."""


@dataclass(frozen=True, eq=False)
class Launch:
    """A call of a kernel: kernel function, compile-time arguments (tiling, spec), then tensors and scalars."""

    function: JITFunction
    choice: tuple[Any, ...]
    args: tuple[Any, ...]

    @property
    def kernel(self) -> JITKernel:
        """The kernel, compiled unless it is known."""
        made: JITKernel = self.function(*self.choice)
        return made


@dataclass(frozen=True, eq=False)
class TorchCall:
    """A call of torch that neither makes a view nor an empty tensor.

    name: of the operator, as "aten::clone". source: the tensor that a copy reads. made: the fresh results.
    """

    name: str
    source: torch.Tensor | None
    made: tuple[torch.Tensor, ...]

    @property
    def is_copy(self) -> bool:
        """Whether it copies a tensor, maybe into another dtype."""
        return self.name in COPIES

    @property
    def is_fill(self) -> bool:
        """Whether it writes one number into all elements."""
        return self.name in FILLS


class LaunchPlan:
    """What was called inside `planning`, in order, and where the tensors of the calls lie.

    steps: kernels' launches and calls of torch. roots: the arguments, then what was made; `given` counts the arguments.
    """

    def __init__(self, arguments: Iterable[torch.Tensor] = (), machine: Machine | None = None):
        self.machine = machine
        self.steps: list[Launch | TorchCall] = []
        self.roots: list[torch.Tensor] = []
        self._low_bits: dict[int, int] = {}  # of the addresses of roots without memory
        self._origins: dict[int, int] = {}  # the number of the root of each tensor
        self._kept: list[torch.Tensor] = []  # so that no tensor gets the address of one that was
        self.given = 0
        for each in arguments:
            self.add(each)

    # -- what readers ask ----------------------------------------------------------------------------------------------
    @property
    def launches(self) -> list[Launch]:
        """The launches of kernels."""
        return [step for step in self.steps if isinstance(step, Launch)]

    @property
    def torch_calls(self) -> list[TorchCall]:
        """The calls of torch, without views and empty tensors."""
        return [step for step in self.steps if isinstance(step, TorchCall)]

    def compile(self) -> list[JITKernel]:
        """The kernels of the launches, each one once; those that are not known are compiled."""
        return list(dict.fromkeys(launch.kernel for launch in self.launches))

    @property
    def made(self) -> list[torch.Tensor]:
        """The tensors that were made: workspaces, and results of torch."""
        return self.roots[self.given :]

    def root(self, tensor: torch.Tensor) -> int | None:
        """The number of the root that a tensor is a view of; None for a tensor from elsewhere."""
        return self._origins.get(tensor._cdata)

    def offset(self, tensor: torch.Tensor) -> Any:
        """Bytes from the beginning of a tensor's root. Of tensors without memory, from that of the root's storage."""
        if has_memory(tensor):
            return tensor.data_ptr() - self.roots[self._origins[tensor._cdata]].data_ptr()
        return tensor.storage_offset() * tensor.element_size()

    def address(self, tensor: torch.Tensor) -> Any:
        """An address whose low bits are right."""
        if has_memory(tensor):
            return tensor.data_ptr()
        return self.low_bits_of(tensor) + self.offset(tensor)

    def low_bits_of(self, tensor: torch.Tensor) -> int:
        """The low bits of the address of the storage of a tensor without memory."""
        return self._low_bits.get(self._origins.get(tensor._cdata, -1), 0)

    # -- what fills the plan -------------------------------------------------------------------------------------------
    def add(self, tensor: torch.Tensor, low_bits: int = 0) -> None:
        """Add an argument, before anything is made. low_bits: of its storage's address, if it has no memory."""
        if low_bits:
            self._low_bits[self.given] = low_bits
        self._add_root(tensor)
        self.given += 1

    def noting(self, function: JITFunction) -> Callable[..., Callable[..., None]]:
        """Like a kernel function, but calls of its kernels are noted."""
        return lambda *choice: lambda *args: self.steps.append(Launch(function, choice, args))

    def call(self, op: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call torch's `op`, and follow or note what it does. Raises Unplanned if it touches memory."""
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
        fresh = tuple(each for each in results if each._cdata not in self._origins)
        for each in fresh:
            self._add_root(each)
        if name not in EMPTY:
            source = (args[1] if op._schema.is_mutable else args[0]) if name in COPIES else None
            self.steps.append(TorchCall(name, source, fresh))
        return result

    def _add_root(self, tensor: torch.Tensor) -> None:
        self._origins[tensor._cdata] = len(self.roots)
        self.roots.append(tensor)


_current: ContextVar[LaunchPlan | None] = ContextVar("plan", default=None)


def current_plan() -> LaunchPlan | None:
    """The plan that calls are noted in, if they are."""
    return _current.get()


def address_function() -> Callable[[torch.Tensor], Any]:
    """What gives the address of a tensor, or where a plan is made, of a tensor without memory, its low bits."""
    import torch

    plan = _current.get()
    return torch.Tensor.data_ptr if plan is None else plan.address


@contextmanager
def planning(plan: LaunchPlan | None = None) -> Iterator[LaunchPlan]:
    """In this thread, note launches in a plan (a new one unless given) instead of making them.

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
    """A dispatch mode that calls torch through a plan."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Following(TorchDispatchMode):
        def __init__(self, plan: LaunchPlan):
            super().__init__()  # type: ignore[no-untyped-call]
            self.plan = plan

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if _current.get() is not self.plan:  # a plan inside this one follows its own
                return op(*args, **(kwargs or {}))
            return self.plan.call(op, args, kwargs or {})

    return Following


def has_memory(x: Any) -> bool:
    """Whether a value is a tensor of torch's own kind, with memory: no fake one."""
    import torch

    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type != "meta"


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """The tensors among arguments, in lists, too."""
    import torch
    from torch.utils._pytree import tree_leaves

    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]
