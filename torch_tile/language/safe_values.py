# SPDX-License-Identifier: Apache-2.0
"""T.annotate_safe_value: the value of reads outside of a tensor, if not 0."""

from __future__ import annotations

from functools import reduce
from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Const, Expr, Load, binary, cast, const, is_number, select
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.node import Rewriter
from torch_tile.ir.stmt import Block, Stmt, Store
from torch_tile.language.trace import tracer
from torch_tile.language.values import Handle
from torch_tile.tileop.base import parallel, spread, squeezed
from torch_tile.tileop.copy.op import Copy


def annotate_safe_value(safe_value_map: dict[Any, Any]) -> None:
    """Give elements outside of tensors values by `safe_value_map`: `{A: -T.infinity("float32")}`. The default is 0."""
    at = tracer("T.annotate_safe_value")
    for handle, value in safe_value_map.items():
        is_tensor = isinstance(handle, Handle) and handle.buffer.scope == "global"
        if not is_tensor or not (is_number(value) or isinstance(value, Const)):
            why, fix = f"has {handle!r}: {value!r}"[:80], "keys are tensors, values are numbers"
            raise error("bad_argument", None, op="T.annotate_safe_value", name="safe_value_map", why=why, fix=fix)
        found = value if isinstance(value, Const) else const(value, handle.dtype)
        at.safe_values[handle.buffer] = const(found.value, handle.dtype)


def with_safe_values(body: Block, values: IdMap[Buffer, Const]) -> Block:
    """Rewrite a kernel's body so that reads outside of these tensors give their value."""
    found = _SafeReads(values)(body) if values else body
    assert isinstance(found, Block)
    return found


class _SafeReads(Rewriter):
    """Replace loads outside a buffer's bounds by its safe value."""

    def __init__(self, values: IdMap[Buffer, Const]):
        self.values = values

    def visit_Load(self, node: Load) -> Expr:
        node = self.children(node)
        value = self.values.get(node.buffer)
        if value is None:
            return node
        zero = const(0, dt.int32)
        limits = [
            check
            for index, size in zip(node.indices, node.buffer.shape, strict=True)
            for check in (binary(">=", index, zero), binary("<", index, size))
        ]
        return select(reduce(lambda a, b: binary("and", a, b), limits), node, value)

    def visit_Copy(self, node: Copy) -> Stmt:
        if node.src.buffer not in self.values:
            return self.children(node)
        target, source = node.dst.buffer, node.src

        def store_element(point: Any) -> Stmt:
            """Store the element at a point, or the safe value where the point lies outside."""
            value = self.visit_Load(Load(source.buffer, spread(source, point)))
            return Store(target, spread(node.dst, point), cast(value, target.dtype))

        extents = squeezed(node.dst)
        return parallel(extents, store_element) if extents else store_element(())


__all__ = ["annotate_safe_value", "with_safe_values"]
