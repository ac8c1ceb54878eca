# SPDX-License-Identifier: Apache-2.0
"""Functions of tensors that end in launches, replayed: for arguments of a form seen before, only the launches are made.

A form is everything that the function may look at: dtypes, devices, sizes, strides, the low bits of addresses, and
numbers. The second call with arguments of a form is watched. If all that it did was to make views, empty tensors and
launches, these become one plan, in which each kernel's tensors are distances from an argument or from the workspace
that the empty tensors become; csrc/launch.cpp follows it from then on. If it did anything else, such as a copy, calls
of that form go through the function as before.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch_tile.diagnostics.errors import LaunchError
from torch_tile.hardware import VECTOR_BYTES
from torch_tile.runtime import cuda_launch
from torch_tile.runtime.cuda_launch import NUMBER, SCALAR, TENSOR, CudaLauncher, Launch, Plan
from torch_tile.runtime.driver import driver
from torch_tile.runtime.launch import MOST_FORMS, form_of
from torch_tile.runtime.native_launch import launch_function, through_python
from torch_tile.runtime.tensor_map import TensorMaps

if TYPE_CHECKING:
    import torch

GRANULE = VECTOR_BYTES  # bytes: functions and kernels may look at addresses modulo this
PIECE = 256  # bytes: what tensors of a workspace begin at multiples of; torch's allocator gives no less
OFFSET_BITS = 8  # of a place, below the offset: the number of an argument
EMPTY = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
OF_FORMS = frozenset(f"aten::{name}" for name in ("can_cast", "promote_types", "result_type"))  # touch no memory
_log = logging.getLogger("torch_tile")


def replayed(kinds: str, function: Callable[..., object], at_once: bool = False) -> Callable[..., object]:
    """`function`, or where launches can be replayed, one that does what it does to its arguments and returns nothing.

    kinds: for each argument, in order, "t" for a tensor, "q" for an int, "d" for a float. What it computes must go into
    arguments, may depend on them and on constants only, and must look at the values of tensors in kernels only.
    at_once: the first call with arguments of a form is watched, not the second: there were such calls elsewhere.
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
    """Calls the function, watches it where that may lead to a plan, and hands the plan on."""

    def __init__(self, function: Callable[..., object], at_once: bool = False):
        self.function = function
        self.unknown = "" if at_once else None  # instead of a reason
        self.remember: Callable[[tuple[Any, ...], bytes], bool] = lambda args, plan: False
        self.met: dict[Any, str] = {}  # forms that were met, and why they cannot be replayed, "" if they may

    def __call__(self, *args: Any) -> None:
        """What `function(*args)` does."""
        if not all(map(_is_plain, args)):
            self.function(*args)
            return
        form = tuple((form_of(a), a.data_ptr() % GRANULE) if hasattr(a, "data_ptr") else a for a in args)
        # To watch a new form takes as long as many calls, and this may be the only one.
        if self.met.get(form, self.unknown) != "":
            self.function(*args)
            if len(self.met) >= MOST_FORMS:
                self.met.clear()
            self.met.setdefault(form, "")
            return
        with recording(args) as record:
            self.function(*record.arguments)
        if not record.refusal and not self.remember(args, record.plan().packed()):
            record.refuse("its plan is too long")
        if record.refusal:
            _log.info("calls with %s are not replayed: %s", form, record.refusal)
        self.met[form] = record.refusal


class Record:
    """What a function does with its arguments. `refusal` says why that cannot be replayed, and is empty if it can."""

    def __init__(self, args: Sequence[Any]):
        # Tensors of their own: one that is given twice could be two others in another call.
        self.arguments = [a.detach() if hasattr(a, "detach") else a for a in args]
        self.given = [a for a in self.arguments if hasattr(a, "detach")]
        self.origins = {a._cdata: n for n, a in enumerate(self.given)}  # of views: which argument or empty tensor
        self.roots = list(self.given)  # the arguments, then the empty tensors
        self.kept: list[torch.Tensor] = []  # so that no tensor gets the address of one that was
        self.offsets: dict[int, int] = {}  # of empty tensors in the workspace, once a kernel has been given them
        self.workspace = 0
        self.launches: list[Launch] = []
        self.contexts: set[tuple[int, int]] = set()
        self.refusal = ""

    def refuse(self, why: str) -> None:
        """Note why this cannot be replayed, if nothing was noted before."""
        self.refusal = self.refusal or why

    def operation(self, op: Any, args: Sequence[Any], result: Any) -> None:
        """torch has computed `result` by `op`."""
        name = op._schema.name
        if name in OF_FORMS:
            return
        results = result if isinstance(result, list | tuple) else [result]
        if name in EMPTY:
            self.origins[result._cdata] = len(self.roots)
            self.roots.append(result)
        elif not op._schema.is_mutable and args and all(_shares_memory(each, args[0]) for each in results):
            self.kept += results
            for each in results:
                if args[0]._cdata in self.origins:
                    self.origins.setdefault(each._cdata, self.origins[args[0]._cdata])
        else:
            self.refuse(f"torch is asked for {name}")

    def launched(self, launcher: CudaLauncher, plan: Plan, tensors: list[torch.Tensor], slots: list[int]) -> None:
        """A launcher has launched `plan` on `tensors` and the scalars in `slots`."""
        if any(each._cdata not in self.origins for each in tensors):
            self.refuse(f"{launcher.program.name} is given a tensor that is no view of an argument")
            return
        if max(launcher.alignments.values(), default=1) > GRANULE:
            self.refuse(f"{launcher.program.name} needs addresses that are multiples of more than {GRANULE} bytes")
            return
        places = [self.place(each) for each in tensors]
        self.contexts.add((plan.context, plan.device))
        for each in plan.launches:
            arguments = tuple(
                (TENSOR, places[n]) if kind == TENSOR else (NUMBER, slots[n]) if kind == SCALAR else (kind, n)
                for kind, n in each.arguments
            )
            forms = ((m.form._replace(position=places[m.form.position]), m.machine) for m in each.maps)
            self.launches.append(each._replace(arguments=arguments, maps=tuple(TensorMaps(*form) for form in forms)))

    def place(self, tensor: torch.Tensor) -> int:
        """Where a tensor begins, as a plan says it."""
        root = self.origins[tensor._cdata]
        offset: int = tensor.data_ptr() - self.roots[root].data_ptr()
        if root >= len(self.given):
            if root not in self.offsets:
                self.offsets[root] = self.workspace
                size = self.roots[root].untyped_storage().nbytes()
                self.workspace += -(-size // PIECE) * PIECE
            offset += self.offsets[root]
        return min(root, len(self.given)) | offset << OFFSET_BITS

    def plan(self) -> Plan:
        """All launches as one plan."""
        ((context, device),) = self.contexts
        return Plan(context, device, tuple(self.launches), self.workspace)


@contextlib.contextmanager
def recording(args: Sequence[Any]) -> Iterator[Record]:
    """Watch what is done with `arguments` of the record inside."""
    record = Record(args)
    before, cuda_launch.seen.by = cuda_launch.seen.by, record.launched
    try:
        with through_python(), _watch_class()(record):
            yield record
    finally:
        cuda_launch.seen.by = before
    if len(record.contexts) != 1:
        record.refuse("nothing is launched" if not record.contexts else "it uses several devices")


@functools.cache
def _watch_class() -> type:
    """A dispatch mode that tells a record of torch's operations."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __init__(self, record: Record):
            super().__init__()  # type: ignore[no-untyped-call]
            self.record = record

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = op(*args, **(kwargs or {}))
            self.record.operation(op, args, result)
            return result

    return Watch


def _is_plain(value: Any) -> bool:
    """Whether an argument is a number or one of the tensors that launches are replayed for."""
    import torch

    if isinstance(value, int | float):
        return True
    is_dense = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided
    return is_dense and value.device.type == CudaLauncher.kind and not value.is_neg()


def _shares_memory(value: Any, other: Any) -> bool:
    """Whether both are tensors, in the same memory."""
    if not hasattr(value, "untyped_storage") or not hasattr(other, "untyped_storage"):
        return False
    return bool(value.untyped_storage()._cdata == other.untyped_storage()._cdata)
