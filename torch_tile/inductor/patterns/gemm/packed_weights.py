# SPDX-License-Identifier: Apache-2.0
"""Weights taken out of packed words in a way that no kernel reads: they are told, and the product is a plain one."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from torch_tile.inductor.graph.nodes import (
    CAST,
    COPIES,
    VIEWS,
    Miss,
    aten,
    dtype,
    is_call,
    is_tensor,
)

SHIFTS = (aten.__rshift__.Scalar, aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar)
ANDS = (aten.bitwise_and.Scalar, aten.bitwise_and.Tensor)

_STEPS = (
    *(CAST, *VIEWS, *COPIES, aten.permute.default, aten.expand.default, aten.unsqueeze.default, aten.squeeze.dims),
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.copy.default, aten._to_copy.default),
    *(aten.slice.Tensor, aten.slice_scatter.default, aten.cat.default, aten.stack.default, aten.index.Tensor),
    *(*SHIFTS, *ANDS),
)


def tell_packed(weight: Any, most: int = 64) -> None:
    """Raise `Miss` if the right operand of a product is made of the bits of integers, which `dequant` did not read."""
    seen: dict[Node, None] = {weight: None}
    pending = [weight]
    bits: Node | None = None
    while pending and len(seen) < most:
        node = pending.pop()
        if not is_call(node, *_STEPS):
            continue
        if is_call(node, *SHIFTS, *ANDS) and dtype(node) != torch.bool:
            bits = bits or node
        for source in node.all_input_nodes:
            if is_tensor(source) and source not in seen:
                seen[source] = None
                pending.append(source)
    if bits is None:
        return
    fix = "store fields of 4, 2 or 1 bits of a byte as neighbouring input features, [N, K * bits / 8] in uint8"
    words: Any = bits
    while is_call(words, *_STEPS) and is_tensor(words.args[0]) and not dtype(words.args[0]).is_floating_point:
        words = words.args[0]
    if dtype(words).itemsize > 1:
        why = f"the fields of the weight are of words of {dtype(words)}, kernels read those of bytes"
        raise Miss(why, fix, at=bits)
    raise Miss("the fields of the weight are not put together byte by byte, in the order of their bits", fix, at=bits)
