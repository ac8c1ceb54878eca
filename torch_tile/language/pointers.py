# SPDX-License-Identifier: Apache-2.0
"""Pointers: parameters T.ptr and addresses, whose tensors the body declares by T.make_tensor.

A table of pointers is a tensor of addresses, `T.Tensor((n,), T.ptr)`. The kernel reads an address from it as it reads
any element, and makes a tensor there.
"""

from __future__ import annotations

from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.hardware import VECTOR_BYTES
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Const, Expr, Var, binary, cast, const
from torch_tile.ir.node import equal
from torch_tile.ir.stmt import Alloc, Assert
from torch_tile.language.asynchronous import in_kernel
from torch_tile.language.narrow import is_narrow
from torch_tile.language.trace import let, tracer
from torch_tile.language.values import Handle, TensorType, dtype_of, shape_of
from torch_tile.language.views import view


class PointerType:
    """The annotation `a: T.ptr` (TIR: T.handle) of a contiguous tensor of any shape; `storage_scope` is "global"."""

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
    """A parameter T.ptr in the author's hands. It has no elements: T.make_tensor makes the buffer to index."""

    is_declared = False

    def __getitem__(self, key: Any) -> Any:
        raise self._undeclared()

    def __setitem__(self, key: Any, value: Any) -> None:
        raise self._undeclared()

    def _undeclared(self) -> Exception:
        """Build the error for a pointer that is used as a tensor."""
        why, fix = f"`{self.name}` is a pointer", f"name its elements: A = T.make_tensor({self.name}, shape, dtype)"
        return error("bad_argument", None, op="T.ptr", name=self.name, why=f"is indexed, and {why}", fix=fix)


def make_tensor(ptr: Any, shape: Any, dtype: Any = "float32", strides: Any = None, align: int = VECTOR_BYTES) -> Handle:
    """Make a tensor of `shape` that begins at a parameter T.ptr or at an address.

    At a parameter T.ptr, it stands before or inside T.Kernel. Sizes may be scalar parameters. Launches refuse a smaller
    tensor. A second tensor at the same pointer is a T.view of the first. If `ptr` is a tensor, the result is a T.view
    of it.

    An address is a value of 64 bits that all threads of a block compute alike. It may be an element of a table
    `T.Tensor((n,), T.ptr)`. The table has dtype int64 and holds `data_ptr()` of other tensors. The kernel stops where
    an address is no multiple of `align` bytes. It also stops where the address is 0 and the tensor has elements.
    `dtype` is of 8 bits or more. Nothing knows how large the memory there is, or whether two such tensors overlap: the
    kernel must not write an element by one name and use it by another.

    Raises TileError for anything else, in T.Parallel and in T.Pipelined.
    """
    if isinstance(ptr, Expr):
        return _at_address(ptr, shape, dtype, strides, align)
    if align != VECTOR_BYTES:
        why, fix = f"is {align!r}", "give it with an address; launches check the address of a parameter"
        raise error("bad_argument", None, op="T.make_tensor", name="align", why=why, fix=fix)
    return _declared("T.make_tensor", ptr, shape, dtype, strides, "pointer")


make_tensor_from_addr = make_tensor


def _at_address(address: Expr, shape: Any, dtype: Any, strides: Any, align: int) -> Handle:
    """Record the tensor at an address. Its sizes get names, which all of its accesses use."""
    at = in_kernel("T.make_tensor")
    element = dtype_of(dtype)
    name, why, fix = "", "", ""
    if not (address.dtype.is_integer and address.dtype.bits == 64):
        name, why = "ptr", f"is {address!r} of {address.dtype}"[:80]
        fix = "give an element of a table, T.Tensor((n,), T.ptr), or another address of 64 bits"
    elif not isinstance(align, int) or align < element.itemsize or align & (align - 1):
        name, why = "align", f"is {align!r}"
        fix = f"give a power of two from {element.itemsize} on, the bytes of an element"
    elif is_narrow(element) or element.lanes > 1:
        name, why, fix = ("dtype", f"is {element}", "give uint8, and take the elements of a byte apart")
    if name:
        raise error("bad_argument", None, op="T.make_tensor", name=name, why=why, fix=fix)
    sizes = tuple(map(_named_size, shape_of(shape, "a tensor's shape")))
    steps = None if strides is None else tuple(map(_named_size, shape_of(strides, "strides")))
    if steps is not None and len(steps) != len(sizes):
        raise error("bad_shape", None, what="strides", want=f"{len(sizes)} integers", got=repr(strides)[:60])
    place = let("address", cast(address, dt.int64))
    buffer = Buffer("", sizes, element, "global", steps, "address", align=align)
    has_memory: Expr = place != 0
    for size in sizes:
        has_memory = binary("or", has_memory, size == 0)
    message = f"the address of a tensor is a multiple of {align}, and not 0"
    checked = Assert(binary("and", place % align == 0, has_memory), message)
    before = at.scopes[-1].stmts[-1:]
    if not (before and equal(before[0], checked)):  # as in printed kernels
        at.emit(checked)
    at.emit(Alloc(buffer, place))
    at.own(buffer)
    return Handle(buffer)


def _named_size(size: Expr) -> Expr:
    """Name a size that the kernel computes."""
    is_plain = isinstance(size, Const) or (isinstance(size, Var) and size.role in ("dim", "param", "let"))
    return size if is_plain else let("size", size)


def match_buffer(
    param: Any, shape: Any, dtype: Any = "float32", strides: Any = None, align: int = VECTOR_BYTES
) -> Handle:
    """Declare the tensor behind `param`, a parameter T.handle, as an annotation T.Tensor(shape, dtype, strides) does.

    Launches check that the first element lies at a multiple of 16 bytes; an `align` above that is a TileError.
    """
    if not isinstance(align, int) or not 0 < align <= VECTOR_BYTES:
        why, fix = f"is {align!r}", f"give at most {VECTOR_BYTES}, which launches check, or leave it out"
        raise error("bad_argument", None, op="T.match_buffer", name="align", why=why, fix=fix)
    return _declared("T.match_buffer", param, shape, dtype, strides, "param")


def _declared(what: str, given: Any, shape: Any, dtype: Any, strides: Any, origin: str) -> Handle:
    """Build the tensor that T.make_tensor declares for a pointer."""
    tracer(what)
    if not isinstance(given, Handle):
        why, fix = (
            f"is {given!r}"[:80],
            "give a parameter that is annotated with T.ptr, or an element of a table, T.Tensor((n,), T.ptr)",
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
