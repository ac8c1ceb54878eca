# SPDX-License-Identifier: Apache-2.0
"""Buffers and regions: where data lives, and which part of it a tile op touches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Never

from torch_tile.diagnostics.errors import TileError, error
from torch_tile.ir import dtype as dt
from torch_tile.ir.dtype import DType
from torch_tile.ir.expr import Const, Expr, is_constant, is_zero
from torch_tile.ir.layout import Layout
from torch_tile.ir.node import Node, equal, node_class

if TYPE_CHECKING:
    import torch

# Who sees a buffer of each scope: every block; one block; one block's registers, spread over its threads; one thread. A
# "barrier" is an array of mbarriers in a block's shared memory.
SCOPES = ("global", "shared", "fragment", "local", "var", "barrier")
SPELLINGS = {
    "shared.dyn": "shared", "local.fragment": "fragment", "local.var": "var",
} | {s: s for s in SCOPES}  # fmt: skip


@node_class
class Buffer(Node):
    """A typed n-dimensional array in one memory scope. Compares by identity.

    `strides` (in elements) is None for row-major contiguous buffers. `origin` is "param" for arguments, "empty" for
    outputs that the launcher allocates, "workspace" for scratch memory. It is "tile" for on-chip buffers, "address" for
    tensors whose address the kernel computes. GPU passes set `layout`, which places elements of shared memory and
    fragments; None is row-major. They set `offset`, the first byte of a shared buffer in its block's shared memory.
    `align` divides a global buffer's address, in bytes. None is the alignment of the widest access, which launches
    check. Each mbarrier of a "barrier" waits for `arrivals`. `base` is the contiguous global buffer that this one is a
    view of, in another shape. `guards` is the first of the tiles that a pipeline's barriers pass. Barriers of full
    stages and of empty ones have the same. `seen_as` is the author's type of
    a global buffer that holds it as bytes: callers give tensors of that type. `lanes` is the size of a last dimension
    that the author sees as vectors, or 0. Threads do not fill all of an array with `padding`: it holds their share of a
    tile whose size their number does not divide. `padding` lists the registers in which no thread holds an element.
    The values of a "var" with `below` are at least 0 and below that number; 0 says nothing of them.
    """

    is_symbol: ClassVar[bool] = True
    unsaid: ClassVar[tuple[str, ...]] = ("guards", "seen_as", "lanes", "padding", "below")
    name: str
    shape: tuple[Expr, ...]
    dtype: DType
    scope: str
    strides: tuple[Expr, ...] | None = None
    origin: str = "tile"
    layout: Layout | None = None
    offset: int | None = None
    align: int | None = None
    arrivals: int = 0
    base: Buffer | None = None
    guards: Buffer | None = None
    seen_as: DType | None = None
    lanes: int = 0
    padding: tuple[int, ...] | None = None
    below: int = 0

    def torch_dtype(self) -> torch.dtype:
        """Return the dtype of the tensors that callers give and get."""
        return (self.seen_as or self.dtype).as_torch()

    def may_start_at(self, bytes: int) -> bool:
        """Return whether accesses may rely on an address that is a multiple of so many bytes."""
        return self.align is None or self.align % bytes == 0

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def static_shape(self) -> tuple[int, ...] | None:
        """Return the shape as integers, or None if a dimension is known only at run time."""
        sizes = [d.value for d in self.shape if isinstance(d, Const)]
        return tuple(int(s) for s in sizes) if len(sizes) == self.rank else None


@node_class
class Range(Node):
    """`extent` indices from `start` on; `keep` is False for a single index, whose dimension is dropped."""

    start: Expr
    extent: Expr
    keep: bool = True

    def covers(self, size: Expr) -> bool:
        """Return whether the range is written as all of a dimension of `size`."""
        whole = is_constant(self.extent, size.value) if isinstance(size, Const) else equal(self.extent, size)
        return whole and is_zero(self.start)


def used_as_value(value: Any, fix: str = "") -> TileError:
    """Return the error for a tensor, tile or region in the place of a value; `fix` says what to write there."""
    scope = "" if isinstance(value, Region | Steps) else value.buffer.scope
    kind = {"": "region", "global": "tensor"}.get(scope, "tile")
    return error("region_as_value", None, kind=kind, region=repr(value), fix=fix)


class NotAValue:
    """Base of arrays that are computed with element by element only: operators tell the author so."""

    def _refuse(self, *others: object) -> Never:
        """Raise an author error: this is no value."""
        raise used_as_value(self)

    __add__: ClassVar[Callable[..., Never]] = _refuse
    __radd__: ClassVar[Callable[..., Never]] = _refuse
    __sub__: ClassVar[Callable[..., Never]] = _refuse
    __rsub__: ClassVar[Callable[..., Never]] = _refuse
    __mul__: ClassVar[Callable[..., Never]] = _refuse
    __rmul__: ClassVar[Callable[..., Never]] = _refuse
    __truediv__: ClassVar[Callable[..., Never]] = _refuse
    __rtruediv__: ClassVar[Callable[..., Never]] = _refuse
    __floordiv__: ClassVar[Callable[..., Never]] = _refuse
    __mod__: ClassVar[Callable[..., Never]] = _refuse
    __pow__: ClassVar[Callable[..., Never]] = _refuse
    __matmul__: ClassVar[Callable[..., Never]] = _refuse
    __neg__: ClassVar[Callable[..., Never]] = _refuse
    __abs__: ClassVar[Callable[..., Never]] = _refuse
    __lt__: ClassVar[Callable[..., Never]] = _refuse
    __le__: ClassVar[Callable[..., Never]] = _refuse
    __gt__: ClassVar[Callable[..., Never]] = _refuse
    __ge__: ClassVar[Callable[..., Never]] = _refuse


@node_class
class Region(NotAValue, Node):
    """A box of a buffer: what a tile op reads or writes."""

    buffer: Buffer
    ranges: tuple[Range, ...]

    @property
    def extents(self) -> tuple[Expr, ...]:
        """Return the extent in each dimension of the buffer."""
        return tuple(r.extent for r in self.ranges)

    @property
    def starts(self) -> tuple[Expr, ...]:
        """Return the first index in each dimension of the buffer."""
        return tuple(r.start for r in self.ranges)

    @property
    def tile_shape(self) -> tuple[Expr, ...]:
        """Return the region's own shape: without dimensions given by a single index."""
        return tuple(r.extent for r in self.ranges if r.keep)

    @property
    def is_whole(self) -> bool:
        """Return whether the region is written as all of its buffer; sizes may be known only at run time."""
        return all(r.covers(n) for r, n in zip(self.ranges, self.buffer.shape, strict=True))


class Steps(NotAValue):
    """A region with strided indices in some dimension, as in A[0:16:2].

    `region` has the first index and the number of indices of each dimension; `steps` has the distance of two. Copies,
    fills and assignments take it; regions of tile operations have no steps.
    """

    region: Region
    steps: tuple[int, ...]

    def __init__(self, region: Region, steps: tuple[int, ...]):
        self.region, self.steps = region, steps

    def __repr__(self) -> str:
        return f"{self.region!r} in steps of {self.steps}"

    def at(self, point: Iterable[Expr]) -> tuple[Expr, ...]:
        """Return indices into the buffer for a point of the region without its dimensions of size 1."""
        rest, found = iter(point), []
        for one, step in zip(self.region.ranges, self.steps, strict=True):
            single = isinstance(one.extent, Const) and one.extent.value == 1
            found.append(one.start if single else one.start + next(rest) * step)
        return tuple(found)


# Tensor maps: the tensor memory accelerator's description of a tensor in global memory.


@node_class
class TensorMap(Expr):
    """A global buffer as the tensor memory accelerator sees it; an operand of target-level calls only.

    `sizes` and `strides` (in elements; the last is 1) have one entry per dimension of the tensor, outermost first. They
    keep the shape that a flattened buffer no longer shows. One copy moves a `box`. Its rows lie in shared memory
    swizzled over `swizzle` bytes (0, 32, 64 or 128). The launcher makes the map that the hardware reads; the kernel
    gets its address.
    """

    buffer: Buffer
    sizes: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    box: tuple[int, ...]
    swizzle: int

    @property
    def dtype(self) -> DType:
        """Return the type of the value."""
        return dt.int64
