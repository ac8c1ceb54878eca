# SPDX-License-Identifier: Apache-2.0
"""T.create_tma_descriptor and T.tma_load: bulk copies as TileLang's compiler writes them, with numbers for all.

A descriptor names a tensor, its sizes and strides, and a box. A load copies a box from given coordinates to shared
memory, and signals an mbarrier. Both become a T.tma_copy whose bytes the author counts. Numbers along dimensions stand
innermost first, as CUDA's tensor maps have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_tile.diagnostics.errors import TileError, error
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, Range, Region
from torch_tile.ir.expr import Address, Const, Expr, const, is_number, to_expr
from torch_tile.ir.simplify import simplify
from torch_tile.language.asynchronous import in_kernel
from torch_tile.language.foreign import Pointer
from torch_tile.tileop.base import Tile, region_of, strides_of
from torch_tile.tileop.copy.tma import TmaCopy

# CUDA's numbers of the types of tensor maps (CUtensorMapDataType); float8 is moved as bytes.
TYPES = {
    0: ("uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1: ("uint16", "int16"), 2: ("uint32",), 3: ("int32",),
    4: ("uint64",), 5: ("int64",), 6: ("float16",), 7: ("float32",), 8: ("float64",), 9: ("bfloat16",),
}  # fmt: skip
POLICIES = ("evict_normal", "evict_first", "evict_last")  # by their numbers
MOST_SIDES = 256  # elements of a box along a dimension


@dataclass(frozen=True)
class TmaDescriptor:
    """A tensor and the box that its loads copy, outermost dimension first."""

    tensor: Buffer
    box: tuple[int, ...]
    swizzle: int


def create_tma_descriptor(data_type: int, rank: int, global_address: Tile, *numbers: Any) -> TmaDescriptor:
    """Describe a tensor of `rank` dimensions and a box of it to T.tma_load.

    `data_type` is CUDA's number of the type, such as 6 for float16. `numbers` are for each dimension, innermost first:
    the tensor's sizes, its strides in bytes, the box, its steps (1). Then follow interleave (0), swizzle (0 to 3), L2
    promotion (a hint) and the fill of what lies outside (0: zeros).

    A swizzle needs a tile with a layout of T.annotate_layout. Raises TileError for numbers that are not those of the
    tensor `global_address`.
    """
    in_kernel("T.create_tma_descriptor")
    region = region_of(global_address)
    if region is None or region.buffer.scope != "global":
        raise _wrong("create_tma_descriptor", "global_address", f"is {global_address!r}"[:80], "give a tensor")
    tensor = region.buffer
    if data_type not in TYPES or tensor.dtype.name not in TYPES[data_type]:
        number = next((n for n, names in TYPES.items() if tensor.dtype.name in names), None)
        fix = "no tensor map has its type" if number is None else f"give {number}, CUDA's number of {tensor.dtype}"
        raise _wrong("create_tma_descriptor", "data_type", f"is {data_type!r} for a {tensor.dtype}", fix)
    if rank != tensor.rank or len(numbers) != 4 * tensor.rank + 4:
        why, fix = f"is {rank!r}, with {len(numbers)} numbers", f"give {tensor.rank}, and {4 * tensor.rank + 4} numbers"
        raise _wrong("create_tma_descriptor", "rank", why, fix)
    parts = [numbers[n * rank : n * rank + rank][::-1] for n in range(4)]
    sizes, strides, box, steps = parts
    interleave, swizzle, _, fill = numbers[4 * rank :]
    wanted = [step * tensor.dtype.itemsize for step in strides_of(tensor)]
    for name, given, known in (("sizes", sizes, tensor.shape), ("strides", strides, wanted)):
        for a, b in zip(given, known, strict=True):
            if not _are_equal(a, b):
                why = f"has the {name} {tuple(given)}, outermost first, and `{tensor.name}` has {tuple(known)}"
                raise _wrong("create_tma_descriptor", "numbers", why, "describe the whole tensor")
    for name, bad, fix in (
        ("box", not all(isinstance(n, int) and 0 < n <= MOST_SIDES for n in box), f"1 to {MOST_SIDES} elements a side"),
        ("steps", any(n != 1 for n in steps), "give 1: every element is copied"),
        ("interleave", interleave != 0, "give 0"),
        ("swizzle", swizzle not in (0, 1, 2, 3), "give 0 to 3: none, or 32, 64 or 128 bytes"),
        ("fill", fill != 0, "give 0: what lies outside is read as 0"),
    ):
        if bad:
            raise _wrong("create_tma_descriptor", "numbers", f"has a wrong {name}", fix)
    return TmaDescriptor(tensor, tuple(box), swizzle)


def tma_load(descriptor: TmaDescriptor, mbarrier: Any, smem: Tile, *coordinates: Any) -> None:
    """Copy a descriptor's box that begins at `coordinates`, innermost first, to shared memory (Hopper).

    One thread runs it. It signals `mbarrier`, whose bytes the author counts by T.mbarrier_expect_tx. `smem` is the
    tile, the slice or the element at which the box begins; the box fills whole rows of it. After the coordinates may
    stand the number of an eviction policy: 0 normal, 1 first, 2 last. Raises TileError for a box that is no such slice.
    """
    at = in_kernel("T.tma_load")
    if not isinstance(descriptor, TmaDescriptor):
        why, fix = f"is {type(descriptor).__name__}", "make it by T.create_tma_descriptor"
        raise _wrong("tma_load", "descriptor", why, fix)
    rank = len(descriptor.box)
    if len(coordinates) not in (rank, rank + 1):
        why, fix = f"are {len(coordinates)}", f"give {rank}, and then perhaps an eviction policy"
        raise _wrong("tma_load", "coordinates", why, fix)
    place, rest = coordinates[:rank][::-1], coordinates[rank:]
    if rest and rest[0] not in (0, 1, 2):
        raise _wrong("tma_load", "coordinates", f"end with {rest[0]!r}", "an eviction policy is 0, 1 or 2")
    source = Region(
        descriptor.tensor,
        tuple(Range(to_expr(p), const(n, dt.int32)) for p, n in zip(place, descriptor.box, strict=True)),
    )
    policy = POLICIES[rest[0]] if rest else None
    target = _slice(descriptor, smem)
    at.emit(TmaCopy.build(source, target, barrier=mbarrier, eviction_policy=policy, counts=False))


def _slice(descriptor: TmaDescriptor, smem: Any) -> Region:
    """Return the slice of shared memory that a box fills."""
    pointed = smem.address if isinstance(smem, Pointer) else smem
    if isinstance(pointed, Address):
        tile, starts = pointed.buffer, pointed.indices
    elif (region := region_of(pointed)) is not None:
        tile, starts = region.buffer, region.starts
    else:
        raise _wrong("tma_load", "smem", f"is {smem!r}"[:80], "give a tile, a slice of it or its first element")
    shape = tile.static_shape
    if tile.scope != "shared" or shape is None:
        raise _wrong("tma_load", "smem", f"is `{tile.name}`, no shared tile of constant size", "give a T.alloc_shared")
    if descriptor.swizzle and tile.layout is None:
        why = f"is `{tile.name}`, which the compiler lays out itself, and the descriptor asks for a swizzle"
        raise _wrong("tma_load", "smem", why, "give swizzle 0, or T.annotate_layout the tile")
    box = list(descriptor.box)
    while len(box) > len(shape) and box[0] == 1:
        box.pop(0)
    box = [1] * (len(shape) - len(box)) + box
    outer = next((n for n, side in enumerate(box) if side != 1), len(box) - 1)
    if len(box) != len(shape) or box[outer + 1 :] != list(shape[outer + 1 :]):
        why = f"is `{tile.name}` of shape {shape}, which a box of {descriptor.box} does not fill by whole rows"
        raise _wrong("tma_load", "smem", why, "give a tile whose rows are as long as those of the box")
    return Region(tile, tuple(Range(start, const(n, dt.int32)) for start, n in zip(starts, box, strict=True)))


def _are_equal(a: Any, b: Any) -> bool:
    """Return whether two sizes are certainly equal."""
    if not (is_number(a) or isinstance(a, Expr)):
        return False
    apart = simplify(to_expr(a) - to_expr(b))
    return isinstance(apart, Const) and apart.value == 0


def _wrong(op: str, name: str, why: str, fix: str) -> TileError:
    """Return the error for an argument."""
    return error("bad_argument", None, op=f"T.{op}", name=name, why=why, fix=fix)


__all__ = ["TmaDescriptor", "create_tma_descriptor", "tma_load"]
