# SPDX-License-Identifier: Apache-2.0
"""Vectors by TIR's names: T.Ramp, T.Broadcast, T.Shuffle and T.extract_lane; vectors in variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.ir.buffer import Region
from torch_tile.ir.dtype import DType
from torch_tile.ir.expr import Load, Vector, cast, to_expr
from torch_tile.ir.node import equal
from torch_tile.ir.stmt import Store
from torch_tile.language.trace import let, make_variable, tracer
from torch_tile.tileop.base import Scalar


def Ramp(base: Scalar, stride: Scalar, lanes: int) -> Vector:
    """Return `base`, `base + stride`, ...: `lanes` integers, which index as many elements, `A[T.Ramp(i * 4, 1, 4)]`."""
    first = to_expr(base, op="T.Ramp")
    return Vector([first + n * stride for n in range(_count("T.Ramp", lanes))])


def Broadcast(value: Scalar, lanes: int) -> Vector:
    """Return `value` in each of `lanes` lanes; of a vector, one copy after the other."""
    each = value.lanes if isinstance(value, Vector) else (to_expr(value, op="T.Broadcast"),)
    return Vector(each * _count("T.Broadcast", lanes))


def Shuffle(vectors: Sequence[Any], indices: Sequence[int]) -> Any:
    """Join lanes of several vectors, counted through all of them, in the order of `indices`; one is a scalar."""
    every = [lane for v in vectors for lane in (v.lanes if isinstance(v, Vector) else (to_expr(v),))]
    chosen = [int(getattr(n, "value", n)) for n in indices]
    if not chosen or not all(0 <= n < len(every) for n in chosen):
        why, fix = f"is {list(indices)!r}", f"give numbers from 0 to {len(every) - 1}"
        raise error("bad_argument", None, op="T.Shuffle", name="indices", why=why, fix=fix)
    found = [every[n] for n in chosen]
    return found[0] if len(found) == 1 else Vector(found)


def extract_lane(vector: Vector, lane: Scalar) -> Any:
    """Return one lane of a vector, `vector[lane]`: a number, or an expression that is one."""
    if not isinstance(vector, Vector):
        why, fix = f"is {type(vector).__name__}", "give a vector"
        raise error("bad_argument", None, op="T.extract_lane", name="vector", why=why, fix=fix)
    return vector[lane]


class VectorVariable(Vector):
    """A mutable vector of each thread: T.alloc_var of a vector's dtype. Its lanes are variables."""

    lanes: tuple[Load, ...]
    named = False  # whether the author has given it a name

    def __init__(self, dtype: DType, init: Any):
        value = None if init is ... else _spread(init, dtype)
        self.lanes = tuple(
            make_variable("", dtype.element, None if value is None else value.lanes[n]) for n in range(dtype.lanes)
        )

    def name(self, name: str) -> None:
        """Name the lanes after the vector."""
        for n, lane in enumerate(self.lanes):
            object.__setattr__(lane.buffer, "name", f"{name}_{n}")
        self.named = True

    def value(self) -> Vector:
        """Return the lanes as they are now."""
        return Vector([let("lane", lane) for lane in self.lanes])

    def store(self, value: Any) -> None:
        """Assign a vector, or a number to all lanes; all of it is read before the first lane changes."""
        at = tracer("T.alloc_var")
        new = [let("lane", lane) for lane in _spread(value, self.dtype).lanes]
        for lane, each in zip(self.lanes, new, strict=True):
            at.emit(Store(lane.buffer, (), each))

    def __setitem__(self, lane: Any, value: Any) -> None:
        """Assign one lane, by its number."""
        one = self[lane]
        if not isinstance(one, Load) or not any(one is each for each in self.lanes):
            why, fix = f"is {lane!r}"[:80], "give a number that is known, or assign the whole vector"
            raise error("bad_argument", None, op="T.alloc_var", name="lane", why=why, fix=fix)
        tracer("T.alloc_var").emit(Store(one.buffer, (), cast(to_expr(value), one.dtype)))


def _spread(value: Any, dtype: DType) -> Vector:
    """Return a vector of a dtype: of as many lanes, of neighbours `A[i : i + 4]`, or of one number in each lane."""
    if isinstance(value, Region):
        moving = [k for k, r in enumerate(value.ranges) if r.keep]
        if len(moving) != 1 or not equal(value.extents[moving[0]], to_expr(dtype.lanes)):
            raise error("bad_operand", None, op=f"T.{dtype}", got=f"{value!r}"[:80])
        steps = ([n if k == moving[0] else 0 for k in range(len(value.ranges))] for n in range(dtype.lanes))
        value = Vector(
            [Load(value.buffer, tuple(s + n for s, n in zip(value.starts, step, strict=True))) for step in steps]
        )
    found = value if isinstance(value, Vector) else Vector([to_expr(value, dtype.element)] * dtype.lanes)
    return found.astype(dtype)


def _count(what: str, lanes: Any) -> int:
    """Check a number of vector lanes."""
    number = getattr(lanes, "value", lanes)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise error("bad_argument", None, op=what, name="lanes", why=f"is {lanes!r}", fix="give a positive integer")
    return number
