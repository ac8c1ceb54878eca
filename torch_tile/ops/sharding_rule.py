# SPDX-License-Identifier: Apache-2.0
"""The sharding rule of an operator, as its declaration states it; sharding.py applies it to DTensors.

A rule names the dimensions of every tensor of a call, as einsum does. A free name may be sharded: its indices are
computed independently. Every tensor with the name is then sharded, the others are replicated. Sharding a summed name
gives parts of a sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Dims = tuple[str, ...]
Spec = Any
"""A DTensor, or what stands for it where DTensor asks for shardings: rules read its `shape`."""


@dataclass(frozen=True)
class Rule:
    """The sharding rule of a call: names of all dimensions ("" for one that broadcasts), and the names that may be
    sharded.

    inputs: one for each tensor argument in the schema's order, lists laid out flat, None where there is no tensor.
    free: names whose indices are computed independently. summed: names that are summed over. The call is linear in each
    operand with such a name and adds up the other operands. even: names that may be sharded only if so many parts fall
    evenly to the ranks. saved: the backward's `ctx.saved_tensors`, if not the inputs.
    """

    outputs: Sequence[Dims]
    inputs: Sequence[Dims | None]
    free: Dims
    summed: Dims = ()
    even: Mapping[str, int] = field(default_factory=dict)
    saved: Sequence[Dims | None] | None = None


def row_names(x: Spec) -> Dims:
    """Name all dimensions but the last."""
    return tuple(f"row{i}" for i in range(len(x.shape) - 1))


def if_given(tensor: Spec | None, dims: Dims) -> Dims | None:
    """Return the names of an optional tensor's dimensions, or None without the tensor."""
    return None if tensor is None else dims


def broadcast(tensor: Spec | None, dims: Dims) -> Dims | None:
    """Return the last of `dims`, as many as the tensor has, with "" where its size is 1."""
    if tensor is None:
        return None
    last = dims[len(dims) - len(tensor.shape) :]
    return tuple("" if size == 1 else dim for size, dim in zip(tensor.shape, last, strict=True))
