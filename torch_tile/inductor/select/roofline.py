# SPDX-License-Identifier: Apache-2.0
"""What a subgraph has to compute and to move, and how fast a known GPU could do it at best.

Only multiply-adds of products are counted (as two operations), and each tensor that goes in or out once. GPUs that
are not listed, and CPUs, have no peak here: then the share of it is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from torch_tile.hardware import BOARDS, Board, rates_of
from torch_tile.inductor import compat
from torch_tile.inductor.graph.nodes import aten, bind, is_tensor, val
from torch_tile.ops.registry import operator_of


@dataclass(frozen=True)
class Cost:
    """Operations of the products, bytes moved at least, and the dtype of the operands."""

    flops: int
    bytes: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Peak:
    """What a GPU does at best: operations per second by dtype of the operands (dense), bytes of memory per second."""

    flops: dict[torch.dtype, float]
    bandwidth: float

    def seconds(self, cost: Cost) -> float | None:
        """The least time; None if the dtype has no known peak."""
        rate = self.flops.get(cost.dtype)
        if cost.flops and rate is None:
            return None
        return max(cost.flops / rate if rate else 0.0, cost.bytes / self.bandwidth)

    def limit(self, cost: Cost) -> str:
        """What takes that time."""
        rate = self.flops.get(cost.dtype, math.inf)
        return "arithmetic" if cost.flops / rate > cost.bytes / self.bandwidth else "memory"


def _peak(board: Board) -> Peak:
    return Peak({getattr(torch, name): rate for name, rate in rates_of(board).items()}, board.bandwidth * 1e12)


PEAKS = {name: _peak(board) for name, board in BOARDS.items()}
"""By the name that the driver gives."""


def peak_of(device: torch.device | None) -> Peak | None:
    """The peak of a device, if it is a GPU that we know."""
    if device is None or device.type != "cuda" or not torch.cuda.is_available():
        return None
    return PEAKS.get(torch.cuda.get_device_name(device))


def cost_of(nodes: Sequence[Node]) -> Cost | None:
    """What a subgraph costs at least; None unless it has exactly one operation that we know. Symbols take the value
    that was traced with.
    """
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
    """Of one tensor or several, dimensions that are only repeated left out."""
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    if not isinstance(value, torch.Tensor):
        return 0
    pairs = zip(_sizes(value.shape), value.stride(), strict=True)
    return math.prod(size for size, stride in pairs if not (isinstance(stride, int) and stride == 0)) * value.itemsize


def _sizes(shape: Iterable[Any]) -> list[int]:
    return [compat.size_hint(size) for size in shape]


def sizes_of(node: Any) -> list[int]:
    """The shape of a node; symbols take the value that was traced with."""
    return _sizes(val(node).shape)


def _product(node: Node) -> int:
    left: Any = node.args[-2]
    return 2 * math.prod(sizes_of(node)) * sizes_of(left)[-1]


def _grouped(node: Node) -> int:
    """Every row is of one group, whether the sum is over K or over rows."""
    a, b = (sizes_of(x) for x in node.args[:2])
    return 2 * math.prod(a) * b[-1]


def _fused_attention(node: Node) -> int:
    q, k, v = (sizes_of(x) for x in node.args[:3])
    return 2 * math.prod(q[:2]) * q[2] * k[2] * (q[3] + v[3])


def _none(node: Node) -> int:
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
"""Of ATen's operations; those of our operators are part of their declarations."""


def is_counted(node: Node) -> bool:
    """Whether the operations of a node are known."""
    operator = operator_of(node.target)
    return node.target in ATEN_FLOPS or (operator is not None and operator.flops is not None)


def flops_of(node: Node) -> int:
    """The operations that a counted node cannot avoid."""
    operator = operator_of(node.target)
    return ATEN_FLOPS[node.target](node) if operator is None else operator.minimal_flops(_shapes(bind(node)))


def _shapes(args: Any) -> Any:
    """Arguments of an operator with shapes for tensors, all symbols at the values that were traced with."""
    return type(args)(*map(_shape, args))


def _shape(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return [_shape(each) for each in x]
    value = val(x) if isinstance(x, Node) else x
    if isinstance(value, torch.Tensor):
        return _sizes(value.shape)
    return compat.size_hint(value) if isinstance(value, torch.SymInt) else value
