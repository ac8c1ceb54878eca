# SPDX-License-Identifier: Apache-2.0
"""Pointers: parameters T.ptr, whose tensors the body declares by T.make_tensor."""

from __future__ import annotations

from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import const
from torch_tile.language.trace import tracer
from torch_tile.language.values import Handle, TensorType, dtype_of, shape_of
from torch_tile.language.views import view


class PointerType:
    """The annotation of a parameter that is a contiguous tensor of any shape: `a: T.ptr`. TIR's name is T.handle."""

    def __call__(self, dtype: Any = None, storage_scope: str = "global") -> PointerType:
        """Return the annotation itself: T.make_tensor declares the element type."""
        return self

    def __repr__(self) -> str:
        return "T.ptr"

    def buffer(self, name: str) -> Buffer:
        """Make the parameter's buffer. T.make_tensor declares its shape and dtype later."""
        return Buffer(name, (const(1, dt.int32),), dt.uint8, "global", None, "pointer")


ptr: PointerType = PointerType()
handle: PointerType = ptr


class Pointer(Handle):
    """A parameter T.ptr. It has no elements: T.make_tensor makes the buffer that can be indexed."""

    is_declared = False

    def __getitem__(self, key: Any) -> Any:
        raise self._undeclared()

    def __setitem__(self, key: Any, value: Any) -> None:
        raise self._undeclared()

    def _undeclared(self) -> Exception:
        why, fix = f"`{self.name}` is a pointer", f"name its elements: A = T.make_tensor({self.name}, shape, dtype)"
        return error("bad_argument", None, op="T.ptr", name=self.name, why=f"is indexed, and {why}", fix=fix)


def make_tensor(ptr: Any, shape: Any, dtype: Any = "float32", strides: Any = None) -> Handle:
    """Make a tensor of `shape` that begins at a parameter T.ptr, before or inside T.Kernel.

    Sizes may be scalar parameters. A launch is refused if its tensor is smaller. A second tensor at the same pointer is
    a T.view of the first. If `ptr` is a tensor, the result is a T.view of it. Raises TileError for anything else.
    """
    return _declared("T.make_tensor", ptr, shape, dtype, strides, "pointer")


def match_buffer(param: Any, shape: Any, dtype: Any = "float32", strides: Any = None) -> Handle:
    """Declare the tensor behind a parameter T.handle, as an annotation T.Tensor(shape, dtype, strides) does."""
    return _declared("T.match_buffer", param, shape, dtype, strides, "param")


def _declared(what: str, given: Any, shape: Any, dtype: Any, strides: Any, origin: str) -> Handle:
    tracer(what)
    if not isinstance(given, Handle):
        why, fix = (
            f"is {given!r}"[:80],
            "give a parameter that is annotated with T.ptr; tables of pointers are not known",
        )
        raise error("bad_argument", None, op=what, name="ptr", why=why, fix=fix)
    if not isinstance(given, Pointer) or given.is_declared:
        if strides is not None:
            fix = "leave them out: views are contiguous"
            raise error("bad_argument", None, op=what, name="strides", why="are given for a view", fix=fix)
        return view(Handle(given.buffer), shape, dtype)
    steps = None if strides is None else shape_of(strides, "strides")
    wanted = TensorType(shape_of(shape, "a tensor's shape"), dtype_of(dtype), steps).buffer(given.name, origin)
    for field in ("shape", "dtype", "strides", "origin", "lanes"):
        object.__setattr__(given.buffer, field, getattr(wanted, field))
    given.is_declared = True
    return Handle(given.buffer)
