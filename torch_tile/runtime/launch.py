# SPDX-License-Identifier: Apache-2.0
"""Binds tensors to a compiled kernel: checks every argument, learns the run-time sizes, allocates results, calls.

Errors name the argument, what was given and what is wanted.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..diagnostics import LaunchError, Span, TileError, diagnose
from ..ir.buffer import Buffer
from ..ir.expr import Binary, Const, Expr, Var
from ..ir.stmt import Program, dimensions

if TYPE_CHECKING:
    import torch

Sizes = dict[int, int]
MOST_FORMS = 1024  # forms of arguments that a launcher remembers


@dataclass(frozen=True)
class _Fact:
    """One number of a tensor: its size or stride in a dimension, and the expression that it must equal."""

    dim: int
    is_stride: bool
    wanted: Expr


class _Parameter:
    """A tensor parameter with what is checked at each call."""

    def __init__(self, buffer: Buffer):
        self.buffer, self.name = buffer, buffer.name
        self.dtype = buffer.dtype.as_torch()
        self.facts = [_Fact(d, False, size) for d, size in enumerate(buffer.shape)]
        self.facts += [_Fact(d, True, stride) for d, stride in enumerate(buffer.strides or ())]

    def check(self, tensor: Any, device: torch.device | None) -> None:
        import torch

        if not isinstance(tensor, torch.Tensor):
            raise LaunchError(f"argument `{self.name}` must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype != self.dtype:
            raise LaunchError(f"argument `{self.name}` must have dtype {self.dtype}, got {tensor.dtype}")
        if tensor.dim() != self.buffer.rank:
            want, got = self.buffer.rank, list(tensor.shape)
            raise LaunchError(f"argument `{self.name}` must have {want} dimensions, got shape {got}")
        if device is not None and tensor.device != device and not tensor.device.type == device.type == "cpu":
            raise LaunchError(f"argument `{self.name}` must be on {device}, got a tensor on {tensor.device}")
        if tensor.layout is not torch.strided or tensor.is_neg():
            raise LaunchError(
                f"argument `{self.name}` must be a plain dense tensor; pass .to_dense() or .resolve_neg()"
            )
        if self.buffer.strides is None and not tensor.is_contiguous():
            shape = list(tensor.shape)
            raise LaunchError(
                f"argument `{self.name}` must be contiguous, got strides {tensor.stride()} for shape {shape}; "
                "pass .contiguous(), or annotate it with T.StridedTensor"
            )

    def bind(self, tensor: torch.Tensor, sizes: Sizes, unused: Sizes) -> list[tuple[_Fact, int]]:
        """Learn plain dimensions; return what is left to compare.

        Strides that no element is found with go into `unused`: they may name a size, but never contradict one.
        """
        left = []
        for fact in self.facts:
            if fact.is_stride and tensor.shape[fact.dim] <= 1:
                if isinstance(fact.wanted, Var):
                    unused[id(fact.wanted)] = tensor.stride(fact.dim)
                continue
            actual = tensor.stride(fact.dim) if fact.is_stride else tensor.shape[fact.dim]
            wanted = fact.wanted
            if isinstance(wanted, Var) and id(wanted) not in sizes:
                sizes[id(wanted)] = actual
            elif not (isinstance(wanted, Const) and wanted.value == actual):
                left.append((fact, actual))
        return left


class Launcher:
    """Calls the entry of a compiled program. `out_idx` names parameters that are allocated here and returned."""

    def __init__(
        self, program: Program, entry: Callable[..., int], asserts: Sequence[tuple[str, Span | None]],
        out_idx: Sequence[int] = (), device: str = "cpu",
    ):  # fmt: skip
        import torch

        self.program, self.entry, self.asserts = program, entry, asserts
        self.device = torch.device(device)
        count = len(program.params)
        self.out_idx = [i % count for i in out_idx]
        self.given = [p for i, p in enumerate(program.params) if i not in self.out_idx]
        self.parameters = {id(p): _Parameter(p) for p in program.params if isinstance(p, Buffer)}
        self.scalars = [p for p in program.params if isinstance(p, Var)]
        self.sizes = dimensions(program)
        self.names = [p.name for p in self.given]
        self.known: dict[Any, Sizes] = {}  # by the dtypes, sizes, strides and devices of the arguments

    def __call__(self, *args: Any) -> Any:
        """Run on `args`, in the order of the parameters without those of `out_idx`; returns what the kernel returns."""
        if len(args) != len(self.given):
            raise LaunchError(
                f"{self.program.name} takes {len(self.given)} arguments ({', '.join(self.names)}), got {len(args)}"
            )
        values = {id(p): a for p, a in zip(self.given, args, strict=True)}
        sizes = self.sizes_of(args, values)
        wanted = [self.program.params[i] for i in self.out_idx]
        made = [self.allocate(p, sizes) for p in wanted]
        values |= {id(p): tensor for p, tensor in zip(wanted, made, strict=True)}
        results = [self.allocate(b, sizes) for b in self.program.outputs]
        scratch = [self.allocate(b, sizes) for b in self.program.workspaces]
        params = [values[id(p)] for p in self.program.params if isinstance(p, Buffer)]
        self.call([*params, *results, *scratch], sizes, values)
        returned = [*made, *results]
        return None if not returned else returned[0] if len(returned) == 1 else tuple(returned)

    def sizes_of(self, args: Sequence[Any], values: dict[int, Any]) -> Sizes:
        """The run-time sizes, remembered for arguments that were found fit before."""
        form = tuple(map(_form, args))
        found = self.known.get(form)
        if found is None:
            if len(self.known) >= MOST_FORMS:
                self.known.clear()
            found = self.known[form] = self.bind(values)
        return found

    def bind(self, values: dict[int, Any]) -> Sizes:
        """Check the arguments and learn the run-time sizes."""
        sizes: Sizes = {}
        unused: Sizes = {}
        left: list[tuple[_Parameter, _Fact, int]] = []
        for param in self.given:
            if isinstance(param, Buffer):
                parameter = self.parameters[id(param)]
                parameter.check(values[id(param)], self.device)
                left += [(parameter, fact, actual) for fact, actual in parameter.bind(values[id(param)], sizes, unused)]
        sizes = unused | sizes
        for parameter, fact, actual in left:
            wanted = evaluate(fact.wanted, sizes, parameter.name)
            if wanted != actual:
                what = "stride" if fact.is_stride else "size"
                text = "" if isinstance(fact.wanted, Const) else f" ({fact.wanted!r})"
                raise LaunchError(
                    f"argument `{parameter.name}` must have {what} {wanted}{text} in dimension {fact.dim}, got {actual}"
                )
        for var in self.sizes:
            if id(var) not in sizes:
                raise LaunchError(
                    f"size `{var.name}` is not a plain dimension or stride of any argument of {self.names}"
                )
        return sizes

    def allocate(self, buffer: Any, sizes: Sizes) -> torch.Tensor:
        """A fresh tensor for a result or scratch buffer."""
        import torch

        shape = [evaluate(s, sizes, buffer.name) for s in buffer.shape]
        return torch.empty(shape, dtype=buffer.dtype.as_torch(), device=self.device)

    def call(self, tensors: list[torch.Tensor], sizes: Sizes, values: dict[int, Any]) -> None:
        """Hand pointers and numbers to the entry; raise if a device assertion failed."""
        pointers = (ctypes.c_void_p * max(1, len(tensors)))(*[t.data_ptr() for t in tensors])
        numbers = [sizes[id(v)] for v in self.sizes] + [scalar_bits(p, values[id(p)]) for p in self.scalars]
        code = self.entry(pointers, (ctypes.c_int64 * max(1, len(numbers)))(*numbers))
        if code == -1:
            raise MemoryError(f"{self.program.name}: no memory for on-chip buffers")
        if code:
            message, span = self.asserts[code - 1]
            raise TileError(diagnose("device_assert", span, message=message or "condition is false"))


def _form(value: Any) -> Any:
    """All that `Launcher.bind` looks at in an argument; kinds that it refuses need not be told apart."""
    if getattr(value, "layout", None) is None or value.is_neg() or value.layout != _strided():
        return type(value)
    return value.dtype, value.shape, value.stride(), value.device


@functools.cache
def _strided() -> object:
    import torch

    return torch.strided


def scalar_bits(param: Var, value: Any) -> int:
    """A scalar argument as the 64 bits that the entry reads."""
    if isinstance(value, bool | int) or (isinstance(value, float) and param.dtype.is_float):
        if param.dtype.is_float:
            return int(struct.unpack("q", struct.pack("d", float(value)))[0])
        bits = param.dtype.bits if param.dtype.kind != "bool" else 1
        low, high = (0, 1 << bits) if param.dtype.kind != "int" else (-(1 << (bits - 1)), 1 << (bits - 1))
        if low <= value < high:
            return int(value) if value < 2**63 else int(value) - 2**64
        raise LaunchError(f"argument `{param.name}` = {value} does not fit into {param.dtype}")
    item = getattr(value, "item", None)
    if item is not None and getattr(value, "ndim", 1) == 0:
        return scalar_bits(param, item())
    raise LaunchError(f"argument `{param.name}` must be a number of type {param.dtype}, got {type(value).__name__}")


def evaluate(expr: Expr, sizes: Sizes, name: str) -> int:
    """A size expression with the sizes learnt from the arguments."""
    if isinstance(expr, Const):
        return int(expr.value)
    if isinstance(expr, Var) and id(expr) in sizes:
        return sizes[id(expr)]
    if isinstance(expr, Binary):
        a, b = evaluate(expr.a, sizes, name), evaluate(expr.b, sizes, name)
        table: dict[str, Callable[[], int]] = {
            "+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "//": lambda: a // b, "%": lambda: a % b,
            "min": lambda: min(a, b), "max": lambda: max(a, b),
        }  # fmt: skip
        if expr.op in table:
            return table[expr.op]()
    raise LaunchError(f"a size of `{name}`, {expr!r}, cannot be found from the arguments")
