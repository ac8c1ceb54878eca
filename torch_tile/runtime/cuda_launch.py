# SPDX-License-Identifier: Apache-2.0
"""Launch a program compiled for NVIDIA GPUs on the current stream of its tensors' device, without waiting.

A form of arguments (dtypes, devices, sizes, strides) is checked once and becomes a `Plan`; from then on only addresses
and scalars change. The plan is followed here or, where it could be built, by csrc/launch.cpp, to the same effect.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_tile.compiler.binding import Binding, Sizes, scalar, size_of
from torch_tile.diagnostics.errors import LaunchError
from torch_tile.hardware import GRID_LIMITS, LARGEST_SIZE, Target, runs_on
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.dtype import rounded_tensor
from torch_tile.ir.expr import Scalar, Var
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Program
from torch_tile.runtime.driver import NO_CLUSTER, Driver, Function, driver
from torch_tile.runtime.launch import MOST_FORMS, BaseLauncher, MakeKernel, form_of, refuse_python_tensors
from torch_tile.runtime.native_launch import launch_function
from torch_tile.runtime.tensor_map import MapForm, TensorMaps, map_form

if TYPE_CHECKING:
    import torch

    from torch_tile.compiler.sources import CudaSource, Entry

TENSOR, SCALAR, NUMBER, MAP = 0, 1, 2, 3  # kinds of a kernel's arguments in a plan
# Functions of the driver, in the order of csrc/launch_driver.h.
NATIVE_FUNCTIONS = "cuLaunchKernel", "cuLaunchKernelEx", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuTensorMapEncodeTiled"
# Scalars that csrc/launch.cpp converts itself, by the letters of the struct module.
LETTERS = {
    "bool": "?", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "uint8": "B", "uint16": "H", "uint32": "I",
    "uint64": "Q", "float32": "f", "float64": "d",
}  # fmt: skip


class Launch(NamedTuple):
    """One launch of a plan, each argument (TENSOR or SCALAR, position), (NUMBER, 64 bits) or (MAP, position)."""

    function: int
    grid: tuple[int, int, int]
    threads: int
    shared: int
    arguments: tuple[tuple[int, int], ...]
    maps: tuple[TensorMaps, ...] = ()
    cluster: tuple[int, int, int] = NO_CLUSTER
    early: bool = False


class Plan(NamedTuple):
    """The launches, device and bytes of workspace for arguments of one form."""

    context: int
    device: int
    launches: tuple[Launch, ...]
    workspace: int = 0

    def packed(self) -> bytes:
        """Pack the plan for csrc/launch.cpp, which reads all maps before all launches."""
        words = self.words()
        return struct.pack(f"{len(words)}q", *(word if word < 2**63 else word - 2**64 for word in words))

    def words(self) -> list[int]:
        """Return the plan as 64-bit words."""
        maps = [each.form for launch in self.launches for each in launch.maps]
        words = [
            self.context,
            self.workspace,
            len(self.launches),
            len(maps),
            *(word for form in maps for word in form.packed()),
        ]
        before = 0
        for each in self.launches:
            words += [each.function, *each.grid, each.threads, each.shared, *each.cluster, each.early]
            words.append(len(each.arguments))
            words += [word for kind, n in each.arguments for word in (kind, n + before if kind == MAP else n)]
            before += len(each.maps)
        return words


class CudaLauncher(BaseLauncher):
    """Launches the entries of a cubin. Loads the module once for each device of the arguments."""

    source: CudaSource
    cubin: bytes
    target: Target

    kind = "cuda"

    def __init__(
        self, program: Program, source: CudaSource, cubin: bytes, target: Target, out_idx: Sequence[int] = (),
        make: MakeKernel | None = None,
    ):  # fmt: skip
        super().__init__(program, out_idx, source.disjoint, make)
        self.source, self.cubin, self.target = source, cubin, target
        self.whole: Binding = Binding(program)
        self.alignments: dict[Buffer, int] = dict(zip(self.buffers, source.alignment, strict=True))
        used = [n for entry in source.entries for size in entry.grid for n in walk(size)]
        self.scalars_matter: bool = self.binding.asks_scalars or any(n is p for n in used for p in self.scalars)
        self.functions: dict[int, dict[str, Function]] = {}
        self.plans: dict[Any, Plan] = {}
        self.remember: Callable[[tuple[Any, ...], bytes], bool] | None = None
        self.go: Callable[..., None] = self.start
        self.allocates: bool = bool(self.out_idx or program.outputs or program.workspaces)
        self.begin = self.__call__ if self.allocates else self.go

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run on `args`; return the kernel's results as soon as the launch is in the stream's queue."""
        if named:
            self.binding.refuse_names(named)
        if not self.allocates:
            return self.go(*args)
        self.require_gpu()
        return super().__call__(*args)

    def call(self, tensors: list[Any], sizes: Sizes, scalars: dict[Var, Scalar]) -> None:
        """Launch the kernels."""
        left = iter(tensors)
        self.go(*(next(left) if isinstance(p, Buffer) else scalars[p] for p in self.everything))

    def device_of(self, args: Sequence[Any]) -> torch.device | str:
        """Return the device of the first tensor, or the current device if there is none."""
        return next((a.device for a in args if hasattr(a, "device") and hasattr(a, "data_ptr")), self.kind)

    def start(self, *args: Any, **named: Any) -> None:
        """Launch on all parameters, outputs and workspaces through Python; the first call of each form does."""
        if named:
            self.binding.refuse_names(named)
        plan, tensors, slots = self.prepared(args)
        pointers = [self.address(p, t) for p, t in zip(self.buffers, tensors, strict=True)]
        variant = self.variant(tensors, may_overlap=False)
        if variant is not None:
            variant.launcher.go(*args)
            return
        values = pointers, slots
        machine, stream = driver(), current_stream(plan.device)
        with machine.current(plan.context):
            for each in plan.launches:
                maps = [m.at(pointers[m.form.position]) for m in each.maps]
                given = [
                    maps[n] if kind == MAP else n if kind == NUMBER else values[kind][n] for kind, n in each.arguments
                ]
                machine.launch(*each[:4], stream, given, each.cluster, each.early)
        # Not before: what the driver refuses, Python explains.
        if self.remember is not None and all(a is not None for a in args):
            self.remember(args, plan.packed())

    def prepared(self, args: Sequence[Any]) -> tuple[Plan, list[Any], list[int]]:
        """Return the plan for arguments of this form, checked if new; also the tensors and the scalars' bits."""
        if len(args) != len(self.everything):
            self.whole.in_order(args)
        scalars = {p: scalar(p, a) for p, a in zip(self.everything, args, strict=False) if isinstance(p, Var)}
        form: tuple[Any, ...] = tuple(map(form_of, args))
        if self.scalars_matter:
            form += tuple(scalars.values())
        plan = self.plans.get(form)
        if plan is None:
            plan = self.plan(args, scalars)
            if len(self.plans) >= MOST_FORMS:
                self.plans.clear()
            self.plans[form] = plan
        tensors = [a for p, a in zip(self.everything, args, strict=True) if isinstance(p, Buffer)]
        return plan, tensors, [slot_of(p, number) for p, number in scalars.items()]

    def address(self, param: Buffer, tensor: torch.Tensor | None) -> int:
        """Return a tensor's address; 0 for None. Raises LaunchError if it has none, or one that is not aligned."""
        found, alignment = super().address(param, tensor), self.alignments[param]
        if found % alignment:
            raise LaunchError(
                f"argument `{param.name}` must begin at a multiple of {alignment} bytes, and {found:#x} is none; "
                "pass .clone(), or a view that begins elsewhere"
            )
        return found

    # -- plans ---------------------------------------------------------------------------------------------------------
    def plan(self, args: Sequence[Any], scalars: Mapping[Var, Scalar]) -> Plan:
        """Check the arguments and compute their launches."""
        machine = self.require_gpu()
        refuse_python_tensors(self.everything, args)
        sizes = self.whole.sizes_of(args[: len(self.program.params)], self.kind)
        if self.watch is not None:
            self.watch(sizes)
        device = self.index_of(args)
        functions = self.load(machine, device)
        launches = [self.launch(e, functions[e.name], sizes, scalars, machine) for e in self.source.entries]
        self.use_native(machine)
        return Plan(machine.context(device), device, tuple(each for each in launches if each is not None))

    def launch(
        self, entry: Entry, function: Function, sizes: Sizes, scalars: Mapping[Var, Scalar], machine: Driver
    ) -> Launch | None:
        """Return the launch of one kernel; None if its grid is empty."""
        grid = fitted(entry, grid_of(entry, {**sizes, **scalars}))
        if grid is None:
            return None
        arguments, forms = self.arguments(entry, sizes, scalars)
        maps = tuple(TensorMaps(form, machine) for form in forms)
        shape = grid, entry.threads, entry.shared_bytes
        return Launch(function.handle, *shape, arguments, maps, entry.cluster, entry.early)

    def arguments(
        self, entry: Entry, sizes: Sizes, scalars: Mapping[Var, Scalar] | None = None
    ) -> tuple[tuple[tuple[int, int], ...], tuple[MapForm, ...]]:
        """Return a kernel's arguments, as in `Launch`, and the forms of its tensor maps."""
        found: list[tuple[int, int]] = []
        forms: list[MapForm] = []
        values: dict[Var, Scalar] = {**sizes, **(scalars or {})}
        names = [p.name for p in self.buffers]
        for argument, kind in zip(entry.args, entry.kinds, strict=True):
            if isinstance(argument, int):
                found.append((TENSOR, argument))
            elif not isinstance(argument, Var):
                found.append((MAP, len(forms)))
                forms.append(map_form(argument, names[argument.position], values))
            elif argument in sizes:
                found.append((NUMBER, passed_size(argument, kind, sizes)))
            else:
                found.append((SCALAR, next(n for n, p in enumerate(self.scalars) if p is argument)))
        return tuple(found), tuple(forms)

    def index_of(self, args: Sequence[Any]) -> int:
        """Return the index of the tensors' device."""
        import torch

        tensors = (a for p, a in zip(self.everything, args, strict=True) if isinstance(p, Buffer))
        first = next((a for a in tensors if a is not None), None)
        return torch.cuda.current_device() if first is None else int(first.device.index)

    def load(self, machine: Driver, device: int) -> dict[str, Function]:
        """Return the entries on a device; load the cubin at the first call."""
        if device not in self.functions:
            found = machine.capability(device)
            if not runs_on(self.target.capability, found):
                raise LaunchError(
                    f"{self.program.name} is compiled for {self.target.arch}, and device {device} is an sm_{found}; "
                    f"compile with target='cuda:sm_{found}'"
                )
            wanted = {entry.name: entry.shared_bytes for entry in self.source.entries}
            self.functions[device] = machine.load(self.cubin, device, wanted)
        return self.functions[device]

    def require_gpu(self) -> Driver:
        """Return the driver. Raises LaunchError with a remedy if there is none."""
        try:
            return driver()
        except LaunchError as problem:
            raise LaunchError(
                f"{self.program.name} is compiled for {self.target} and cannot run here: {problem}. "
                "Compile it with target='cpu', or run kernel.interpret(...)"
            ) from problem

    def use_native(self, machine: Driver) -> None:
        """Launch through csrc/launch.cpp from the next call on, if it is built and handles all arguments."""
        kinds = ["t" if isinstance(p, Buffer) else LETTERS.get(p.dtype.name, "") for p in self.everything]
        if self.remember is not None or not all(kinds):
            return
        masks = [self.alignments[p] - 1 if isinstance(p, Buffer) else 0 for p in self.everything]
        made = launch_function(
            self.start, failed, native_addresses(machine), "".join(kinds), masks, self.scalars_matter,
            0, self.source.disjoint,
        )  # fmt: skip
        if made is not None:
            self.go, self.remember = made
            if not self.allocates:
                self.begin = self.go


def grid_of(entry: Entry, values: Mapping[Var, Scalar]) -> tuple[int, int, int]:
    """Compute the number of blocks in each direction."""
    x, y, z = (*(size_of(size, values, f"{entry.name}'s grid") for size in entry.grid), 1, 1, 1)[:3]
    return x, y, z


def passed_size(var: Var, kind: str, sizes: Sizes) -> int:
    """Return the size that a launch passes; `kind` is "i" for one of 32 bits, which refuses larger ones."""
    size = sizes[var]
    if kind == "i" and size > LARGEST_SIZE:
        fix = f'T.dynamic("{var.name}", "int64") takes more'
        raise LaunchError(f"size `{var.name}` = {size} is too large for a 32-bit index (at most {LARGEST_SIZE}); {fix}")
    return size


def fitted(entry: Entry, grid: tuple[int, int, int]) -> tuple[int, int, int] | None:
    """Adapt a grid to the GPU's limits; return None if the grid is empty."""
    x, y, z = grid
    if min(grid) <= 0:
        return None
    if entry.folds and max(y, z) > GRID_LIMITS[1]:
        grid = (x * y * z, 1, 1)
    for axis, extent, limit, group in zip("xyz", grid, GRID_LIMITS, entry.cluster, strict=True):
        if extent > limit:
            raise LaunchError(f"{entry.name} has {extent} blocks in {axis}; the GPU allows {limit}")
        if extent % group:
            raise LaunchError(f"{entry.name} has {extent} blocks in {axis}, which are no clusters of {group}")
    return grid


def native_addresses(machine: Driver) -> tuple[int, ...]:
    """Return the addresses of the driver's functions that csrc/launch.cpp calls."""
    return tuple(map(machine.address, NATIVE_FUNCTIONS))


def failed(status: int) -> None:
    """Raise LaunchError with the driver's message for a refused launch."""
    raise LaunchError(f"cuLaunchKernel: {driver().error(status)}")


def slot_of(param: Var, value: Scalar) -> int:
    """Encode a scalar argument in 8 bytes; the first bytes hold it in the parameter's type."""
    dtype = param.dtype
    if not dtype.is_float:
        return int(value) % 2**64
    if dtype.bits == 64:
        return int.from_bytes(struct.pack("d", value), "little")
    if dtype.bits == 32:
        return int.from_bytes(bytes(ctypes.c_float(value)), "little")
    import torch

    narrow = rounded_tensor(torch.tensor([value], dtype=torch.float64), dtype)
    return int.from_bytes(bytes(narrow.view(torch.uint8).tolist()), "little")


def current_stream(device: int) -> int:
    """Return the handle of torch's current stream on a device."""
    import torch

    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(raw(device)) if raw is not None else int(torch.cuda.current_stream(device).cuda_stream)
