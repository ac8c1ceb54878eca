# SPDX-License-Identifier: Apache-2.0
"""Vectors by TIR's names: T.Ramp, T.Broadcast, T.Shuffle and T.extract_lane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.ir.expr import Vector, to_expr
from torch_tile.tileop.base import Scalar


def Ramp(base: Scalar, stride: Scalar, lanes: int) -> Vector:
    """`base`, `base + stride`, ...: `lanes` integers, which index as many elements, `A[T.Ramp(i * 4, 1, 4)]`."""
    first = to_expr(base, op="T.Ramp")
    return Vector([first + n * stride for n in range(_count("T.Ramp", lanes))])


def Broadcast(value: Scalar, lanes: int) -> Vector:
    """`value` in each of `lanes` lanes; of a vector, one copy after the other."""
    each = value.lanes if isinstance(value, Vector) else (to_expr(value, op="T.Broadcast"),)
    return Vector(each * _count("T.Broadcast", lanes))


def Shuffle(vectors: Sequence[Any], indices: Sequence[int]) -> Any:
    """Lanes of several vectors, counted through all of them, in the order of `indices`; one is a scalar."""
    every = [lane for v in vectors for lane in (v.lanes if isinstance(v, Vector) else (to_expr(v),))]
    chosen = [int(getattr(n, "value", n)) for n in indices]
    if not chosen or not all(0 <= n < len(every) for n in chosen):
        why, fix = f"is {list(indices)!r}", f"give numbers from 0 to {len(every) - 1}"
        raise error("bad_argument", None, op="T.Shuffle", name="indices", why=why, fix=fix)
    found = [every[n] for n in chosen]
    return found[0] if len(found) == 1 else Vector(found)


def extract_lane(vector: Vector, lane: Scalar) -> Any:
    """One lane of a vector, `vector[lane]`: a number, or an expression that is one."""
    if not isinstance(vector, Vector):
        why, fix = f"is {type(vector).__name__}", "give a vector"
        raise error("bad_argument", None, op="T.extract_lane", name="vector", why=why, fix=fix)
    return vector[lane]


def _count(what: str, lanes: Any) -> int:
    """Check a number of vector lanes."""
    number = getattr(lanes, "value", lanes)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise error("bad_argument", None, op=what, name="lanes", why=f"is {lanes!r}", fix="give a positive integer")
    return number
