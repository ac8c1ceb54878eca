# SPDX-License-Identifier: Apache-2.0
"""Find the arguments of a call that share memory, and the kernel that a call with exact aliases runs.

A kernel takes for constant what it only reads. A call may give the same elements for a read and a written parameter.
Then it runs a variant, in which all accesses name the written one. So the compiler sees that loads meet stores. Tensors
that overlap in part have no variant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch_tile.compiler.binding import place_of
from torch_tile.diagnostics.errors import LaunchError
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.merge_buffers import may_merge, merge_buffers
from torch_tile.ir.stmt import Program

if TYPE_CHECKING:
    import torch

Aliases = tuple[tuple[int, int], ...]
"""Positions of tensors, each with that of the written tensor whose elements it has."""


class Variants:
    """The variants of one program's kernel, each made by the first call that needs it."""

    def __init__(self, program: Program, buffers: Sequence[Buffer], make: Callable[[Program], Any]):
        self.program, self.buffers, self.make = program, buffers, make
        self.made: dict[Aliases, Any] = {}

    def of(self, aliases: Aliases) -> Any:
        """Return the kernel for these aliases."""
        found = self.made.get(aliases)
        if found is None:
            merged = IdMap[Buffer, Buffer]((self.buffers[one], self.buffers[kept]) for one, kept in aliases)
            found = self.made[aliases] = self.make(merge_buffers(self.program, merged))
        return found


def exact_aliases(
    disjoint: Sequence[tuple[int, int]], buffers: Sequence[Buffer], tensors: Sequence[Any]
) -> tuple[Aliases, list[tuple[int, int]]]:
    """Return the exact aliases among tensors that must be disjoint, and the pairs that share memory otherwise."""
    merged: dict[int, int] = {}
    kept: dict[Any, int] = {}
    partial: list[tuple[int, int]] = []
    for read, written in disjoint:
        one, other = tensors[read], tensors[written]
        if one is None or other is None or not may_meet(one, other):
            continue
        place = place_of(other)
        first = kept.setdefault(place, written)
        members = {read, written, first}
        if place == place_of(one) and all(may_merge(buffers[n], buffers[first]) for n in members):
            merged |= dict.fromkeys(members - {first}, first)
        elif overlap(one, other):
            partial.append((read, written))
    return tuple(sorted(merged.items())), partial


def refuse_overlap(program: Program, buffers: Sequence[Buffer], pairs: Sequence[tuple[int, int]]) -> None:
    """Raise LaunchError for tensors that overlap, of which a kernel reads one and writes the other."""
    for read, written in pairs:
        one, other = (buffers[n].name for n in (read, written))
        raise LaunchError(
            f"arguments `{one}` and `{other}` overlap, and {program.name} reads `{one}` while it writes "
            f"`{other}`; pass .clone() of one of them, or read and write one parameter"
        )


def may_meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have bytes between the first and the last byte of each other."""
    (start, end), (other, last) = extent(a), extent(b)
    return start < last and other < end


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors share a byte; True if the search takes too many steps."""
    if not may_meet(a, b):
        return False
    import numpy as np

    most: Any = 10_000  # steps of the search for a common byte
    try:
        return bool(np.shares_memory(as_bytes(a), as_bytes(b), max_work=most))
    except np.exceptions.TooHardError:
        return True


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the byte after its last."""
    start, size = tensor.data_ptr(), tensor.element_size()
    if not tensor.numel():
        return start, start
    return start, start + size * (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)))


def as_bytes(tensor: torch.Tensor) -> Any:
    """Return an array that describes the places of a tensor's bytes and must not be read."""
    import numpy as np

    class Place:
        __array_interface__: Mapping[str, Any] = {
            "version": 3, "typestr": "|u1", "data": (tensor.data_ptr(), True),
            "shape": (*tensor.shape, tensor.element_size()),
            "strides": (*(s * tensor.element_size() for s in tensor.stride()), 1),
        }  # fmt: skip

    return np.asarray(Place())
