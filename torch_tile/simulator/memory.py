# SPDX-License-Identifier: Apache-2.0
"""Store one buffer of the tile interpreter: boxes for tile ops, single elements for T.Parallel.

Types that torch cannot index everywhere (fp8, wide unsigned) are moved as bits. A buffer allocated inside a nest that
runs side by side has one copy per lane: its memory starts with the lane dimensions. Fresh memory is poison, NaN or
bytes of 0x55, and knows which of its elements were written.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch

from torch_tile.ir.buffer import Buffer
from torch_tile.ir.dtype import DType
from torch_tile.simulator.values import Value, shared, wrap

_BITS = {"float8_e4m3fn": torch.uint8, "float8_e5m2": torch.uint8, "uint16": torch.int16, "uint32": torch.int32,
         "uint64": torch.int64}  # fmt: skip
Index = tuple[Any, ...]  # ints and tensors, one per dimension of `raw`


def tensor_at(address: int, shape: Sequence[int], strides: Sequence[int] | None, dtype: DType) -> torch.Tensor:
    """Return the tensor of the process's own memory that begins at an address."""
    steps = [math.prod(shape[d + 1 :]) for d in range(len(shape))] if strides is None else list(strides)
    span = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, steps, strict=True))
    if not span or not address:
        return torch.empty([0] * len(shape), dtype=dtype.as_torch())
    memory = (ctypes.c_ubyte * (span * dtype.itemsize)).from_address(address)
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(dtype.as_torch())
    return flat.as_strided(list(shape), steps)


def poisoned(shape: Sequence[int], dtype: DType) -> torch.Tensor:
    """Return a tensor of recognisable undefined values: NaN, True or bytes of 0x55."""
    if dtype.is_float:
        wide = torch.full(tuple(shape), math.nan, dtype=torch.float32 if dtype.bits < 16 else dtype.as_torch())
        return wide.to(dtype.as_torch())
    if dtype.kind == "bool":
        return torch.ones(tuple(shape), dtype=torch.bool)
    pattern = int.from_bytes(b"\x55" * dtype.itemsize, "little")
    return torch.full(tuple(shape), pattern, dtype=torch.int64).to(dtype.as_torch())


class Storage:
    """A buffer's tensor. Accesses index `raw`, which holds bits where torch needs them and has a dimension."""

    def __init__(
        self, buffer: Buffer, tensor: torch.Tensor, lanes: tuple[int, ...] = (), written: torch.Tensor | None = None
    ):
        """`written` marks the elements of a fresh tensor that hold a value; None if all do."""
        self.dtype: DType = buffer.dtype
        self.tensor = tensor
        bits = _BITS.get(buffer.dtype.name)
        raw = tensor if bits is None else tensor.view(bits)
        self.raw: torch.Tensor = raw if raw.ndim else raw.view(1)
        self.shape: tuple[int, ...] = tuple(tensor.shape[len(lanes) :])
        self.prefix: Index = lane_ids(lanes) if lanes else () if tensor.ndim else (0,)
        self.written: torch.Tensor | None = written if written is None or written.ndim else written.view(1)

    def lacks(self, index: Index, active: Value) -> bool:
        """Return whether an active lane would read an element that was never written; None stands for all lanes."""
        if self.written is None:
            return False
        there = self.written[index]
        return bool((~there & torch.as_tensor(True if active is None else active)).any())

    def lacks_box(self, starts: Sequence[int], extents: Sequence[int]) -> bool:
        """Return whether an element of a box was never written."""
        outer, _, _ = _overlap(starts, extents, self.shape)
        return self.written is not None and not bool(self.written[outer if self.tensor.ndim else 0].all())

    def get(self, index: Index) -> Value:
        """Read copies of elements, for an index with the dimensions of lanes in front."""
        found = self.raw[index]
        if self.dtype.is_float:
            found = found.view(self.tensor.dtype) if found.dtype != self.tensor.dtype else found
            return found.clone() if found.ndim == 0 else found
        if found.ndim == 0:
            return self._unsigned(found.item())
        return found if self.dtype.kind == "bool" else self._unsigned(found.to(torch.int64))

    def _unsigned(self, number: Value) -> Value:
        """Convert bits of an unsigned type to their number."""
        small = self.dtype.kind == "uint" and self.dtype.bits < 64
        return number & ((1 << self.dtype.bits) - 1) if small else number

    def bits_of(self, value: Value) -> torch.Tensor:
        """Round a value to the element type and return its bits for `raw`."""
        if not isinstance(value, torch.Tensor):
            number = wrap(int(value), self.dtype) if self.dtype.is_integer else value  # the node's may be longer
            return torch.tensor(number).to(self.raw.dtype)
        if self.dtype.is_float:
            rounded = value.to(self.tensor.dtype)
            return rounded if rounded.dtype == self.raw.dtype else rounded.view(self.raw.dtype)
        return value.to(self.raw.dtype)

    def read_box(self, starts: Sequence[int], extents: Sequence[int]) -> torch.Tensor:
        """Copy a box; elements outside the buffer read 0."""
        outer, inner, whole = _overlap(starts, extents, self.shape)
        if whole:
            return self.tensor[outer].clone()
        tile = torch.zeros(tuple(extents), dtype=self.raw.dtype)
        tile[inner] = self.raw[outer]
        return tile.view(self.tensor.dtype) if tile.dtype != self.tensor.dtype else tile

    def write_box(self, starts: Sequence[int], tile: torch.Tensor) -> None:
        """Overwrite a box; elements outside the buffer are dropped."""
        outer, inner, _ = _overlap(starts, tile.shape, self.shape)
        rounded = tile.to(self.tensor.dtype)
        target = self.raw if self.tensor.ndim else self.raw[0]
        if self.written is not None:
            self.written[outer if self.tensor.ndim else 0] = True
        target[outer] = (rounded if rounded.dtype == self.raw.dtype else rounded.view(self.raw.dtype))[inner]


def _overlap(starts: Sequence[int], extents: Sequence[int], shape: Sequence[int]) -> tuple[Index, Index, bool]:
    """Intersect a box with the shape; return slices of the buffer, slices of the box, and whether the box fits."""
    outer, inner, whole = [], [], True
    for start, extent, size in zip(starts, extents, shape, strict=True):
        low, high = min(max(start, 0), size), max(min(start + extent, size), 0)
        high = max(low, high)
        outer.append(slice(low, high))
        inner.append(slice(low - start, high - start) if high > low else slice(0, 0))
        whole = whole and high - low == extent
    return tuple(outer), tuple(inner), whole


def lane_ids(lanes: Sequence[int], after: int = 0) -> Index:
    """Return an index tensor for each lane dimension; it broadcasts over all lanes and `after` more dimensions."""
    last = len(lanes) - 1 + after
    return tuple(torch.arange(n).reshape(n, *[1] * (last - k)) for k, n in enumerate(lanes))


def inside(index: Value, size: int) -> Value:
    """Return where an index lies in [0, size): True, False or a tensor of lanes."""
    if not isinstance(index, torch.Tensor):
        return 0 <= index < size
    low, high = torch.aminmax(index)
    if low >= 0 and high < size:
        return True
    return shared((index >= 0) & (index < size))
