# SPDX-License-Identifier: Apache-2.0
"""Replace convolutions of images and videos by `tile.conv`, with the padding that is written out before them.

Our kernel wants dense channels: the input is read as `[N, *sizes, C]`, and copied where it does not lie so in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.nodes import (
    Miss,
    Rewrite,
    arg,
    aten,
    constant,
    dtype,
    erase_dead,
    is_call,
    known,
    only_user,
    shape,
    val,
)
from torch_tile.ops.checks import FLOATING


@family("conv", "post_grad", 560)
def match(context: Context) -> None:
    """Replace every convolution that a kernel of ours computes."""
    for node in list(context.graph.nodes):
        if is_call(node, aten.convolution.default):
            with context.recording_miss("conv", node):
                _replace(context, node)


def _replace(context: Context, node: Node) -> None:
    """Replace one convolution. Raises Miss with the reason if no kernel of ours computes it."""
    x, weight, bias = (arg(node, name) for name in ("input", "weight", "bias"))
    dims = len(shape(node)) - 2
    if arg(node, "transposed") or arg(node, "groups") != 1:
        raise Miss("the convolution is transposed or of groups", "call torch.ops.tile.conv for each group")
    if dtype(node) not in FLOATING or dims > 3:
        raise Miss(f"no kernel for {dims} dimensions of {dtype(node)}", "cast to float32, float16 or bfloat16")
    if not val(node).is_cuda and context.settings.select == "fastest":
        raise Miss("on CPUs oneDNN's convolutions are faster", 'option "select": "tile" takes ours')
    stride, padding, dilation = (list(arg(node, name)) for name in ("stride", "padding", "dilation"))
    padding = [n for each in padding * (dims if len(padding) == 1 else 1) for n in (each, each)]
    x, padding = _without_pad(x, padding)
    rewrite = Rewrite(node)
    last, first = [0, *range(2, dims + 2), 1], [0, dims + 1, *range(1, dims + 1)]
    given = _dense(rewrite, x, last), rewrite.permute(weight, last), bias, None
    new = rewrite.call(torch.ops.tile.conv.default, *given, stride, padding, dilation)
    new = rewrite.permute(new, first)
    pad = "" if padding == [0] * len(padding) else f", padding {padding}"
    taps = " x ".join(map(str, shape(weight)[2:]))
    what = f"tile.conv({shape(weight)[1]} to {shape(weight)[0]} channels, {taps} taps{pad})"
    if context.replace(rewrite, "conv", [(node, new)], what, node):
        erase_dead(node)


def _without_pad(x: Node, padding: Sequence[int]) -> tuple[Node, list[int]]:
    """Return the tensor under a padding with zeros, and the paddings of both, before and behind each dimension."""
    if not is_call(x, aten.constant_pad_nd.default) or constant(arg(x, "value")) != 0:
        return x, list(padding)
    ends = arg(x, "pad")
    if len(ends) > len(padding) or not all(isinstance(n, int) and n >= 0 for n in ends):
        return x, list(padding)
    inner = [n for at in range(len(ends) - 2, -1, -2) for n in ends[at : at + 2]]
    inner = [0] * (len(padding) - len(inner)) + inner
    return arg(x, "self"), [a + b for a, b in zip(inner, padding, strict=True)]


def _dense(rewrite: Rewrite, x: Node, last: Sequence[int]) -> Node:
    """Return `x` with its channels last in shape and in memory; parts that only it joins are brought so, one by one."""
    if is_call(x, aten.cat.default) and only_user(x) is not None and known(arg(x, "dim") > 1):
        parts = [_dense(rewrite, part, last) for part in arg(x, "tensors")]
        return rewrite.call(aten.cat.default, parts, arg(x, "dim") - 1)
    moved: Node = rewrite.permute(x, last)
    if val(moved).is_contiguous():
        return moved
    return rewrite.call(aten.clone.default, moved, memory_format=torch.contiguous_format)
