# SPDX-License-Identifier: Apache-2.0
"""Count the operations and bytes of a subgraph, and the least time that a known GPU needs for them.

Only multiply-adds of products are counted, as two operations each. Each input and output tensor is moved once. CPUs and
GPUs that are not listed have no peak here, so their share of the peak is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from torch_tile.hardware import BOARDS
from torch_tile.inductor import compat
from torch_tile.inductor.graph.nodes import aten, bind, is_tensor, val
from torch_tile.ops.registry import operator_of


@dataclass(frozen=True)
class Cost:
    """Operations of the products, least number of bytes moved, and dtype of the operands."""

    flops: int
    bytes: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Peak:
    """Peak rates of a GPU: dense operations per second by operand dtype, and memory bytes per second."""

    flops: dict[torch.dtype, float]
    bandwidth: float

    def seconds(self, cost: Cost) -> float | None:
        """Return the least time in seconds; None if the dtype has no known peak."""
        rate = self.flops.get(cost.dtype)
        if cost.flops and rate is None:
            return None
        return max(cost.flops / rate if rate else 0.0, cost.bytes / self.bandwidth)

    def limit(self, cost: Cost) -> str:
        """Return the resource that limits the time: "arithmetic" or "memory"."""
        rate = self.flops.get(cost.dtype, math.inf)
        return "arithmetic" if cost.flops / rate > cost.bytes / self.bandwidth else "memory"


PEAKS = {
    name: Peak({getattr(torch, name): rate for name, rate in board.flops.items()}, board.bandwidth * 1e12)
    for name, board in BOARDS.items()
}
"""Peak of each GPU, by the device name that the driver reports."""


def peak_of(device: torch.device | None) -> Peak | None:
    """Return the peak of a device, or None if it is no listed GPU."""
    if device is None or device.type != "cuda" or not torch.cuda.is_available():
        return None
    return PEAKS.get(torch.cuda.get_device_name(device))


def cost_of(nodes: Sequence[Node]) -> Cost | None:
    """Count the least cost of a subgraph, symbols as traced; None unless it has exactly one counted operation."""
    ops = [n for n in nodes if n.op == "call_function" and is_counted(n)]
    if len(ops) != 1:
        return None
    (op,) = ops
    inside = set(nodes)
    inputs = {x for n in nodes for x in n.all_input_nodes if x not in inside}
    operand = next(x for x in op.all_input_nodes if is_tensor(x))
    moved = sum(_bytes(val(x)) for x in inputs) + _bytes(val(op))
    return Cost(flops_of(op), moved, val(operand).dtype)


def _bytes(value: Any) -> int:
    """Return the size in bytes of one or several tensors, without dimensions that only repeat."""
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    if not isinstance(value, torch.Tensor):
        return 0
    pairs = zip(_sizes(value.shape), value.stride(), strict=True)
    return math.prod(size for size, stride in pairs if not (isinstance(stride, int) and stride == 0)) * value.itemsize


def _sizes(shape: Iterable[Any]) -> list[int]:
    """Return typical values of a shape's sizes."""
    return [compat.size_hint(size) for size in shape]


def sizes_of(node: Any) -> list[int]:
    """Return the shape of a node; symbols take the value of the trace."""
    return _sizes(val(node).shape)


def _product(node: Node) -> int:
    """Count the operations of a matrix product."""
    left: Any = node.args[-2]
    return 2 * math.prod(sizes_of(node)) * sizes_of(left)[-1]


def _grouped(node: Node) -> int:
    """Count the operations of a grouped product. Every row is in one group, whether the sum is over K or over rows."""
    a, b = (sizes_of(x) for x in node.args[:2])
    return 2 * math.prod(a) * b[-1]


def _fused_attention(node: Node) -> int:
    """Count the operations of ATen's fused attention."""
    q, k, v = (sizes_of(x) for x in node.args[:3])
    return 2 * math.prod(q[:2]) * q[2] * k[2] * (q[3] + v[3])


def _none(node: Node) -> int:
    """Count no operations."""
    return 0


ATEN_FLOPS: dict[Any, Callable[[Node], int]] = {
    **dict.fromkeys((aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default), _product),
    aten._scaled_dot_product_flash_attention_for_cpu.default: _fused_attention,
    aten._scaled_dot_product_flash_attention.default: _fused_attention,
    aten._scaled_dot_product_efficient_attention.default: _fused_attention,
    aten._scaled_dot_product_cudnn_attention.default: _fused_attention,
    aten._grouped_mm.default: _grouped,
    aten.native_layer_norm.default: _none,
}
"""Operation counts of ATen's operators; our operators declare their own."""


def is_counted(node: Node) -> bool:
    """Return whether the operations of a node are known."""
    operator = operator_of(node.target)
    return node.target in ATEN_FLOPS or (operator is not None and operator.flops is not None)


def flops_of(node: Node) -> int:
    """Return the least number of operations that a counted node needs."""
    operator = operator_of(node.target)
    return ATEN_FLOPS[node.target](node) if operator is None else operator.minimal_flops(_shapes(bind(node)))


def _shapes(args: Any) -> Any:
    """Replace the tensors among the arguments of an operator by shapes; symbols take the value of the trace."""
    return type(args)(*map(_shape, args))


def _shape(x: Any) -> Any:
    """Return the shapes of an argument's tensors."""
    if isinstance(x, list | tuple):
        return [_shape(each) for each in x]
    value = val(x) if isinstance(x, Node) else x
    if isinstance(value, torch.Tensor):
        return _sizes(value.shape)
    return compat.size_hint(value) if isinstance(value, torch.SymInt) else value
