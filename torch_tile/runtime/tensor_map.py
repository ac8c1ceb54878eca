# SPDX-License-Identifier: Apache-2.0
"""Make tensor maps at launch: check sizes and strides once per form, and let the driver encode each address.

The driver refuses unfit tensors without a message. This module refuses them with the argument's name and a remedy.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_tile.compiler.binding import size_of
from torch_tile.diagnostics.errors import InternalError, LaunchError
from torch_tile.hardware import BULK_BYTES, LARGEST_BOX, MOST_RANK
from torch_tile.ir.expr import Scalar, Var
from torch_tile.runtime.driver import Driver

if TYPE_CHECKING:
    from torch_tile.compiler.sources import MapArg

SIZE, ALIGNMENT = 128, 64  # bytes of a map, and of what its address is a multiple, on the host as in a kernel
SIZE_LIMIT, STRIDE_LIMIT = 2**32, 2**40
KEPT = 16  # maps of one form, for as many addresses

# CUtensorMapDataType. Types of 8 bits are all bytes to it, and products round float32 to tf32 themselves.
_TYPES = {
    "int16": 1, "uint16": 1, "uint32": 2, "int32": 3, "uint64": 4, "int64": 5, "float16": 6, "float32": 7,
    "float64": 8, "bfloat16": 9, "tf32": 7,
}  # fmt: skip
_BYTE = 0
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle by the span in bytes
_PROMOTE_128, _PROMOTE_256 = 2, 3  # CUtensorMapL2promotion: what a miss brings into L2 at least, in bytes


class MapForm(NamedTuple):
    """A tensor map without its address, in the driver's terms and order: the innermost dimension comes first."""

    name: str  # of the argument
    position: int  # among the tensors
    data_type: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, of all dimensions but the innermost
    box: tuple[int, ...]
    swizzle: int
    promotion: int

    def packed(self) -> tuple[int, ...]:
        """Return 64-bit words: PlannedMap of csrc/launch_driver.h, with room for the map and no address yet."""
        numbers = ((*each, *[0] * (MOST_RANK - len(each))) for each in (self.sizes, self.strides, self.box))
        begin = (self.position, self.data_type, len(self.sizes), self.swizzle, self.promotion)
        return (*begin, *(n for each in numbers for n in each), 2**64 - 1, *[0] * (SIZE // 8))


def map_form(arg: MapArg, name: str, values: Mapping[Var, Scalar]) -> MapForm:
    """Return the tensor map that `arg` describes for the tensor `name`, with dimension variables from `values`.

    Raises LaunchError for a tensor and InternalError for a box that no tensor map can describe.
    """
    sizes, strides = ([size_of(x, values, name) for x in given] for given in (arg.sizes, arg.strides))
    _check_box(arg, name)
    for dim, size in enumerate(sizes):
        if not 1 <= size <= SIZE_LIMIT:
            advice = "compute without the kernel where a tensor is empty" if size < 1 else "split the tensor"
            raise LaunchError(
                f"argument `{name}` has size {size} in dimension {dim}; copies by tensor map take 1 to {SIZE_LIMIT}: "
                f"{advice}"
            )
    last = len(sizes) - 1
    if sizes[last] > 1 and strides[last] != 1:
        raise LaunchError(
            f"argument `{name}` must have stride 1 in its last dimension, got {strides[last]}; pass .contiguous()"
        )
    steps = [_step(arg, name, dim, sizes[dim], strides[dim]) for dim in range(last)]
    # Only speed depends on it, so that a size known at run time only must not become a condition: its hint decides.
    inner: Any = sizes[last]
    inner = inner if isinstance(inner, int) else inner.node.hint or 0
    is_long = inner * arg.itemsize >= 256
    return MapForm(
        name, arg.position, _TYPES.get(arg.dtype, _BYTE), tuple(reversed(sizes)), tuple(reversed(steps)),
        tuple(reversed(arg.box)), _SWIZZLES[arg.swizzle], _PROMOTE_256 if is_long else _PROMOTE_128,
    )  # fmt: skip


def _check_box(arg: MapArg, name: str) -> None:
    """Raise InternalError for a box or swizzle that no tensor map has; the compiler chooses boxes."""
    row = arg.box[-1] * arg.itemsize if arg.box else 0
    is_whole = 1 <= len(arg.box) == len(arg.sizes) == len(arg.strides) <= MOST_RANK
    if not is_whole or not all(1 <= n <= LARGEST_BOX for n in arg.box) or row % BULK_BYTES:
        raise InternalError(f"there is no tensor map of `{name}` with boxes of {arg.box} elements of {arg.dtype}")
    if arg.swizzle not in _SWIZZLES or (arg.swizzle and row > arg.swizzle):
        raise InternalError(f"boxes of `{name}` have rows of {row} bytes, which no swizzle over {arg.swizzle} spans")
    if arg.dtype not in _TYPES and arg.itemsize != 1:
        raise InternalError(f"there are no tensor maps of {arg.dtype}, as `{name}` needs one")


def _step(arg: MapArg, name: str, dim: int, size: int, stride: int) -> int:
    """Return an outer dimension's stride in bytes. A dimension of size 1 gets a valid stride in place of torch's."""
    if size == 1:
        return BULK_BYTES
    step = stride * arg.itemsize
    if step % BULK_BYTES or not 0 <= step < STRIDE_LIMIT:
        raise LaunchError(
            f"argument `{name}` has stride {stride} ({step} bytes) in dimension {dim}; copies by tensor map need a "
            f"multiple of {BULK_BYTES} bytes below 2^40: pass .contiguous(), or rows padded to "
            f"{BULK_BYTES // arg.itemsize} "
            "elements"
        )
    return step


class TensorMaps:
    """The tensor maps of one form; maps of the addresses used last are cached."""

    form: MapForm
    machine: Driver

    def __init__(self, form: MapForm, machine: Driver):
        self.form, self.machine = form, machine
        self.at = functools.lru_cache(maxsize=KEPT)(self.encode)

    def encode(self, address: int) -> ctypes.Array[ctypes.c_char]:
        """Return the map of a tensor at `address`, in memory that does not move."""
        form, memory = self.form, aligned_memory()
        if address % BULK_BYTES:
            raise LaunchError(
                f"argument `{form.name}` must begin at a multiple of {BULK_BYTES} bytes, and {address:#x} is none; "
                "pass .clone(), or a view that begins elsewhere"
            )
        try:
            self.machine.encode_tiled(
                ctypes.addressof(memory), form.data_type, address, form.sizes, form.strides, form.box, form.swizzle,
                form.promotion,
            )  # fmt: skip
        except LaunchError as problem:
            shown = f"sizes {form.sizes}, strides {form.strides} bytes, boxes {form.box}, innermost first"
            raise LaunchError(f"there is no tensor map of argument `{form.name}` ({shown}): {problem}") from problem
        return memory


def aligned_memory() -> ctypes.Array[ctypes.c_char]:
    """Allocate memory for a map with the alignment that the driver needs."""
    whole = (ctypes.c_char * (SIZE + ALIGNMENT))()
    return (ctypes.c_char * SIZE).from_buffer(whole, -ctypes.addressof(whole) % ALIGNMENT)
