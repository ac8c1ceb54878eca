# SPDX-License-Identifier: Apache-2.0
"""T.view and T.reshape: a tensor in global memory by another shape. Nothing moves: it is a second name for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import mul
from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Expr, const
from torch_tile.ir.polynomial import Atoms
from torch_tile.language.trace import tracer
from torch_tile.language.values import Handle, dtype_of, shape_of
from torch_tile.tileop.base import describe, need_region


def view(src: Any, shape: Any = None, dtype: Any = None) -> Handle:
    """A tensor by another shape of as many elements: a second name for its memory, in which nothing moves.

    `src` is a contiguous tensor in global memory. A kernel that writes to it uses one of the two names only.
    """
    at, region = tracer("T.view"), need_region(src, "view", "src")
    base = region.buffer
    sizes = base.shape if shape is None else shape_of(shape, "T.view's shape")
    name, why, fix = "src", "", "read elements, and convert them by T.reinterpret"
    if base.scope != "global" or base.strides is not None:
        why = f"is a {base.scope} buffer" if base.scope != "global" else "has strides"
        fix = "only contiguous tensors have views: index it as it is, or T.copy it to a tile of the shape"
    elif dtype is not None and dtype_of(dtype) != base.dtype:
        name, why = "dtype", f"is {dtype_of(dtype)}, the tensor's is {base.dtype}"
    elif not _as_many(sizes, base.shape):
        name, why = "shape", f"is {describe(sizes)}, the tensor's is {describe(base.shape)}"
        fix = "give a shape of as many elements"
    if why:
        raise error("bad_argument", None, op="T.view", name=name, why=why, fix=fix)
    made = Buffer("", sizes, base.dtype, "global", None, base.origin, align=base.align, base=base.base or base)
    at.views.append(made)
    return Handle(made)


def reshape(src: Any, shape: Any) -> Handle:
    """T.view by another shape."""
    return view(src, shape)


def _as_many(a: Sequence[Expr], b: Sequence[Expr]) -> bool:
    """Whether two shapes certainly have as many elements."""
    atoms, one = Atoms(), const(1, dt.int32)
    return atoms.of(reduce(mul, a, one)).key == atoms.of(reduce(mul, b, one)).key
