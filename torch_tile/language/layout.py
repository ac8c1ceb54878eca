# SPDX-License-Identifier: Apache-2.0
"""Layout requests of the language. CPU tiles are row-major, so a request names a layout without changing a result."""

from __future__ import annotations

from dataclasses import dataclass

from .values import Handle


@dataclass(frozen=True)
class LayoutRequest:
    """A layout asked for by name, to be given to T.annotate_layout."""

    kind: str
    buffer: Handle


def make_swizzled_layout(buffer: Handle, **hints: object) -> LayoutRequest:
    """XOR-swizzled shared memory, free of bank conflicts for tensor-core operands."""
    return LayoutRequest("swizzled", buffer)


def make_linear_layout(buffer: Handle, **hints: object) -> LayoutRequest:
    """Plain row-major memory."""
    return LayoutRequest("linear", buffer)
