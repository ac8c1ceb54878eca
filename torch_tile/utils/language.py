# SPDX-License-Identifier: Apache-2.0
"""Questions about what an author holds: a buffer, a region or an element of one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import SPELLINGS, Buffer, Region
from torch_tile.ir.expr import Const, Load, const
from torch_tile.ir.node import equal
from torch_tile.language.values import Handle, TensorType
from torch_tile.tileop.base import region_of


def buffer_of(value: Any) -> Buffer:
    """Return the buffer of a handle, region or element. Raises TypeError for anything else."""
    if isinstance(value, Handle | Region | Load):
        return value.buffer
    if isinstance(value, Buffer):
        return value
    raise TypeError(f"a buffer, region or element is wanted, got {type(value).__name__}")


def is_global(buffer: Any) -> bool:
    """Return whether a buffer lies in global memory."""
    return buffer_of(buffer).scope == "global"


def is_shared(buffer: Any, allow_dynamic: bool = True) -> bool:
    """Return whether a buffer lies in shared memory, which a launch sizes: False without `allow_dynamic`."""
    return allow_dynamic and buffer_of(buffer).scope == SPELLINGS["shared"]


def is_shared_dynamic(buffer: Any) -> bool:
    """Return whether a buffer lies in shared memory."""
    return is_shared(buffer)


def is_fragment(buffer: Any) -> bool:
    """Return whether a buffer is spread over the registers of a block."""
    return buffer_of(buffer).scope == SPELLINGS["local.fragment"]


def is_local(buffer: Any) -> bool:
    """Return whether a buffer is an array of each thread."""
    return buffer_of(buffer).scope == SPELLINGS["local"]


def array_reduce(array: Sequence[int]) -> int:
    """Return the product of sizes."""
    return math.prod(array)


def to_buffer_region(value: Any) -> Region:
    """Return the region that a buffer, region or element is. Raises TypeError for anything else."""
    found = region_of(value)
    if found is None:
        raise TypeError(f"a buffer, region or element is wanted, got {type(value).__name__}")
    return found


def retrieve_shape(value: Any) -> list[Any]:
    """Return the sizes of a buffer, or of a region's ranges; ones for an element."""
    if isinstance(value, Region):
        return [int(each.extent.value) if isinstance(each.extent, Const) else each.extent for each in value.ranges]
    if isinstance(value, Load):
        return [1] * value.buffer.rank
    return list(Handle(buffer_of(value)).shape)


def retrieve_stride(value: Any) -> list[Any]:
    """Return the strides of a buffer, or of a tensor's annotation, in elements."""
    if isinstance(value, TensorType):
        value = value.buffer("", "global")
    return list(Handle(buffer_of(value)).strides)


def is_full_region(region: Region) -> bool:
    """Return whether a region is its whole buffer."""
    pairs = zip(region.ranges, region.buffer.shape, strict=True)
    return all(equal(each.start, const(0, dt.int32)) and equal(each.extent, size) for each, size in pairs)
