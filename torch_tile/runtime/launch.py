# SPDX-License-Identifier: Apache-2.0
"""Launch a compiled program on tensors: bind the arguments, allocate the results, call the entry.

Arguments are checked once for each form. Binding itself is torch_tile/compiler/binding.py.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_tile.compiler.binding import Binding, Sizes, size_of
from torch_tile.diagnostics.errors import LaunchError, Span, TileError, diagnose
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Scalar, Var
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.stmt import Program
from torch_tile.runtime.aliases import Variants, exact_aliases, refuse_overlap

if TYPE_CHECKING:
    import torch

MakeKernel = Callable[[Program], Any]
MOST_FORMS = 1024  # forms of arguments that a launcher remembers


class BaseLauncher:
    """The shared part of all targets' launchers. `out_idx` names parameters that it allocates and returns.

    `make` compiles a variant of the program for tensors that are the same, of those that must be `disjoint`.
    """

    given: list[Buffer | Var]
    sizes: list[Var]

    kind = "cpu"

    def __init__(
        self, program: Program, out_idx: Sequence[int] = (), disjoint: Sequence[tuple[int, int]] = (),
        make: MakeKernel | None = None,
    ):  # fmt: skip
        self.program = program
        self.out_idx: list[int] = [i % len(program.params) for i in out_idx]
        self.binding: Binding = Binding(program, self.out_idx)
        self.given, self.sizes = self.binding.given, self.binding.sizes
        self.scalars: list[Var] = [p for p in program.params if isinstance(p, Var)]
        self.everything: list[Buffer | Var] = [*program.params, *program.outputs, *program.workspaces]
        self.buffers: list[Buffer] = [p for p in self.everything if isinstance(p, Buffer)]
        self.disjoint = disjoint
        self.variants = None if make is None else Variants(program, self.buffers, make)
        self.begin: Callable[..., Any] = self.__call__  # the shortest way to a call
        self.watch: Callable[[Sizes], None] | None = None  # is told the sizes of calls
        self.known: dict[Any, Sizes] = {}  # by the dtypes, sizes, strides and devices of the arguments

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run on `args`, in the order of the parameters without those of `out_idx`; return the result, or a list."""
        if named:
            self.binding.refuse_names(named)
        if len(args) != len(self.given):
            self.binding.in_order(args)
        sizes = self.sizes_of(args)
        scalars = self.binding.scalars_of(args) if self.scalars else {}
        program, device = self.program, self.device_of(args)
        values = dict(zip(self.given, args, strict=True))
        made = {p: self.allocate(p, sizes | scalars, device) for p in map(program.params.__getitem__, self.out_idx)}
        values |= made
        results = [self.allocate(b, sizes | scalars, device) for b in program.outputs]
        scratch = [self.allocate(b, sizes | scalars, device) for b in program.workspaces]
        params = [values[p] for p in program.params if isinstance(p, Buffer)]
        self.call([*params, *results, *scratch], sizes, scalars)
        returned = [*made.values(), *results]
        return None if not returned else returned[0] if len(returned) == 1 else returned

    def sizes_of(self, args: Sequence[Any]) -> Sizes:
        """Return the run-time sizes; arguments of a known form are not checked again."""
        form = tuple(map(form_of, args))
        if self.binding.asks_scalars:
            form += tuple(self.binding.scalars_of(args).values())
        found = self.known.get(form)
        if found is None:
            if len(self.known) >= MOST_FORMS:
                self.known.clear()
            refuse_python_tensors(self.given, args)
            found = self.known[form] = self.binding.sizes_of(args, self.kind)
            if self.watch is not None:
                self.watch(found)
        return found

    def device_of(self, args: Sequence[Any]) -> torch.device | str:
        """Return the device on which results are allocated."""
        return self.kind

    def allocate(self, buffer: Any, values: dict[Var, Any], device: torch.device | str) -> torch.Tensor:
        """Allocate a tensor for a result or scratch buffer."""
        import torch

        shape = [size_of(s, values, buffer.name) for s in buffer.shape]
        return torch.empty(shape, dtype=buffer.torch_dtype(), device=device)

    def address(self, param: Buffer, tensor: torch.Tensor | None) -> int:
        """Return a tensor's address; 0 for None. Raises LaunchError if the tensor has no memory."""
        found = 0 if tensor is None else tensor.data_ptr()
        if not found and tensor is not None and tensor.numel():
            raise LaunchError(f"argument `{param.name}` has no memory, as zero and functional tensors have none")
        return found

    def variant(self, tensors: Sequence[Any], may_overlap: bool) -> Any:
        """Return the kernel in whose program the exact aliases among `tensors` are one buffer; None without aliases.

        Raises LaunchError for tensors that overlap in part, unless they `may_overlap`.
        """
        aliases, others = exact_aliases(self.disjoint, self.buffers, tensors)
        if self.variants is None:
            aliases, others = (), [*aliases, *others]
        if not may_overlap:
            refuse_overlap(self.program, self.buffers, others)
        return self.variants.of(aliases) if self.variants is not None and aliases else None

    def variant_for(self, args: Sequence[Any]) -> Any:
        """Return the kernel in whose program the exact aliases among a call's arguments are one; None without any."""
        given = IdMap(zip(self.given, self.binding.in_order(args), strict=True))
        tensors = [given.get(buffer) for buffer in self.buffers]
        return self.variant([x if hasattr(x, "data_ptr") else None for x in tensors], may_overlap=True)

    def call(self, tensors: list[Any], sizes: Sizes, scalars: dict[Var, Scalar]) -> None:
        """Launch the kernels on checked tensors: buffer parameters, outputs and workspaces; None if unused."""
        raise NotImplementedError


class Launcher(BaseLauncher):
    """Calls the entry of a program compiled for the CPU: (pointers, numbers) -> 0, or the failed assertion's number."""

    entry: Callable[..., int]
    asserts: Sequence[tuple[str, Span | None]]

    def __init__(
        self,
        program: Program,
        entry: Callable[..., int],
        asserts: Sequence[tuple[str, Span | None]],
        out_idx: Sequence[int] = (),
        library: Path | None = None,
        disjoint: Sequence[tuple[int, int]] = (),
        make: MakeKernel | None = None,
    ):
        super().__init__(program, out_idx, disjoint, make)
        self.entry, self.asserts = entry, asserts
        self.library = library  # where the entry is from, if from a library of its own

    def call(self, tensors: list[Any], sizes: Sizes, scalars: dict[Var, Scalar]) -> None:
        """Pass pointers and numbers to the entry; raise if a device assertion failed."""
        addresses = list(map(self.address, self.buffers, tensors))
        is_shared = len(set(addresses)) < len(addresses)
        if is_shared and (variant := self.variant(tensors, may_overlap=True)) is not None:
            variant.launcher.call(tensors, sizes, scalars)
            return
        pointers = (ctypes.c_void_p * max(1, len(tensors)))(*addresses)
        numbers = [sizes[v] for v in self.sizes] + [bits_of(p, scalars[p]) for p in self.scalars]
        code = self.entry(pointers, (ctypes.c_int64 * max(1, len(numbers)))(*numbers))
        if code == -1:
            raise MemoryError(
                f"{self.program.name}: no memory for the tiles of its blocks; free some, or make the tiles smaller"
            )
        if code:
            message, span = self.asserts[code - 1]
            raise TileError(diagnose("device_assert", span, message=message or "condition is false"))


def form_of(value: Any) -> Any:
    """Return the properties of an argument that `Binding.sizes_of` checks; refused kinds may look the same."""
    if getattr(value, "layout", None) is None or value.is_neg() or value.layout != _strided():
        return type(value)
    return type(value), value.dtype, value.shape, value.stride(), value.device


def computes_in_python(value: Any) -> bool:
    """Return whether a tensor's class computes its operators in Python, as fake and distributed tensors do."""
    return getattr(type(value), "__torch_dispatch__", _no_dispatch()) is not _no_dispatch()


@functools.cache
def _no_dispatch() -> object:
    """Return what torch's own tensors have in place of a dispatch function in Python; torch is imported late."""
    import torch

    return torch.Tensor.__torch_dispatch__


def refuse_python_tensors(params: Sequence[Any], args: Sequence[Any]) -> None:
    """Raise LaunchError for a tensor that computes in Python: what it holds need not be in memory of its own."""
    for param, value in zip(params, args, strict=False):
        if computes_in_python(value):
            kind = type(value).__name__
            raise LaunchError(f"argument `{param.name}` has no memory of its own, as a {kind} computes in Python")


@functools.cache
def _strided() -> object:
    """Return `torch.strided`; torch is imported late."""
    import torch

    return torch.strided


def bits_of(param: Var, value: Scalar) -> int:
    """Encode a scalar argument in 64 bits for the CPU's entry: every float as a double."""
    if param.dtype.is_float:
        return int(struct.unpack("q", struct.pack("d", value))[0])
    return int(value) if value < 2**63 else int(value) - 2**64


__all__ = ["BaseLauncher", "LaunchError", "Launcher", "form_of"]
