# SPDX-License-Identifier: Apache-2.0
"""Fuse what follows products that a model calls as `tile.dequant_gemm` itself, as quantised layers do.

The pointwise region behind a call becomes part of its epilogue, which has the call's own epilogue in front. Calls of
one input with weights of one storage join, as in SwiGLU. Column parts of one call join, too. An RMS norm of one row
goes into the calls that read it, each of which normalises the row itself.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch.fx import Node

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.nodes import (
    VIEWS,
    Miss,
    Rewrite,
    aten,
    bind,
    dtype,
    erase_dead,
    is_call,
    known,
    ordered,
    same_shape,
    shape,
    val,
)
from torch_tile.inductor.patterns.gemm import column_slices, epilogue
from torch_tile.inductor.patterns.gemm.epilogue import PACKED
from torch_tile.inductor.patterns.norm import fused_norm
from torch_tile.inductor.patterns.norm.fused_norm import Norm
from torch_tile.inductor.patterns.norm.norm import read_norm
from torch_tile.kernels.epilogue.program import parse
from torch_tile.kernels.gemm.args import DequantGemmArgs

FACTORS = "bs", "scales", "zeros"
"""Arguments that each product of a call has of its own."""
SHARED = "bits", "high_first", "offset", "format", "norm_weight", "norm_eps"


class CallEpilogueWriter(epilogue.Writer):
    """Write a region of calls as text. The epilogue of a call comes before the region's functions."""

    def __init__(self, region: epilogue.Region) -> None:
        super().__init__(region)
        self.products = 0

    def _product(self, node: Node, value: str) -> str:
        """Write the epilogue of a call, with numbers of products and operands behind those of calls before it."""
        call = call_of(node)
        names: dict[Any, Any] = {f"acc{i}": f"acc{self.products + i}" for i in range(len(call.bs))}
        self.products += len(call.bs)
        for i, (operand, kind) in enumerate(zip(call.aux, call.kinds, strict=True)):
            names[f"x{i}"] = f"x{len(self.aux)}"
            if kind in "tr" and epilogue.whole(node) is not node:
                self.cut[len(self.aux)] = node
            self.aux.append(operand)
            self.kinds.append(kind)
        own = parse(call.epilogue)
        for each in own.statements:
            operands = (names.get(x, x) for x in each.operands)
            names[each.name] = self._say(each.function, *(x if isinstance(x, str) else repr(x) for x in operands))
        return str(names[own.result])


def call_of(node: Node) -> DequantGemmArgs[Any]:
    """Return the arguments of a call, or of the call that some columns are cut from."""
    return bind(epilogue.whole(node) or node, DequantGemmArgs[Any])


@family("dequant", "post_grad", 505)
def match(context: Context) -> None:
    """Replace every call that pointwise operations follow."""
    taken: set[Node] = set()
    for node in list(context.graph.nodes):
        if is_call(node, *PACKED) and node not in taken and node.users:
            taken.update(_replace(context, node))


def _region_of(call: Node, order: dict[Node, int]) -> tuple[epilogue.Region, Node]:
    """Return the region of one kernel: the column parts of a call if they meet again, else the whole call."""
    parts = column_slices.parts_of(call)
    for part in parts:
        region, out = epilogue.region_of(part, order, lambda other: are_alike(call, other))
        if set(region.products) == set(parts):
            return region, out
    return epilogue.region_of(call, order, lambda other: are_alike(call, other))


def _replace(context: Context, seed: Node) -> list[Node]:
    """Replace one call and what follows; return the replaced calls."""
    region, out = _region_of(seed, ordered(context.graph))
    epilogue.tell_wordless(context, "dequant", out)
    if out is seed:
        return []
    rewrite = Rewrite(out)
    aux, kinds, text = epilogue.write_program(region, out, rewrite, CallEpilogueWriter)
    bs, scales, zeros = ([x for part in region.products for x in _own_tensors(rewrite, part, name)] for name in FACTORS)
    aux = [rewrite.reshape(x, shape(x)[-2:]) for x in aux]
    call = call_of(seed)._replace(
        bs=bs, scales=scales, zeros=zeros, aux=aux, kinds=kinds, epilogue=text, dtype=dtype(out)
    )
    new = rewrite.reshape(rewrite.call(PACKED[0], *call), shape(out))
    layers = f"{len(call.bs)} products, " if len(call.bs) > 1 else ""
    what = f"tile.dequant_gemm({layers}{call.bits} bits of {dtype(call.bs[0])} in layers, {text})"
    if not context.replace(rewrite, "dequant", [(out, new)], what, seed):
        return []
    erase_dead(out)
    return [epilogue.whole(part) or part for part in region.products]


def _own_tensors(rewrite: Rewrite, node: Node, name: str) -> list[Node]:
    """Return words, scales or zeros of a call, or their rows of a part of its columns."""
    found: list[Node] = getattr(call_of(node), name)
    part = column_slices.part_of(node)
    return [x if part is None else rewrite.call(aten.slice.Tensor, x, 0, *part[1:]) for x in found]


def are_alike(node: Node, other: Node) -> bool:
    """Return whether one kernel can compute the products of two calls: their weights are stored alike."""
    if not is_call(epilogue.whole(other), *PACKED):
        return False
    first, second = call_of(node), call_of(other)
    if any(getattr(first, name) != getattr(second, name) for name in SHARED):
        return False
    pairs = [(getattr(first, name), getattr(second, name)) for name in FACTORS]
    return all(bool(x) == bool(y) and (not x or _stored_alike(x[0], y[0])) for x, y in pairs)


def _stored_alike(x: Node, y: Node) -> bool:
    """Return whether two matrices have one dtype, shape and order of dimensions."""
    strides = zip(val(x).stride(), val(y).stride(), strict=True)
    return dtype(x) == dtype(y) and same_shape(shape(x), shape(y)) and all(known(s == t) for s, t in strides)


@family("dequant", "post_grad", 507)
def take_norms(context: Context) -> None:
    """Fuse each RMS norm of one row into the calls that read it, if nothing else reads it."""
    for node in list(context.graph.nodes):
        norm = _norm_of(node) if node.users else None
        calls = [] if norm is None else _readers(norm)
        if norm is not None and calls:
            _take_norm(context, norm, calls)


def _norm_of(node: Node) -> Norm | None:
    """Return the norm that a captured operator stands for, or that is written out around a root; else None."""
    if not is_call(node, aten.rsqrt.default):
        return fused_norm.norm_of(node)
    with contextlib.suppress(Miss):
        return read_norm(node)
    return None


def _readers(norm: Norm) -> list[Node]:
    """Return the calls that read a norm, in order. They must be its only readers, and able to compute it."""
    plain = not norm.centred and norm.factor == 1 and norm.offset == 0 and norm.bias is None
    if not plain or dtype(norm.x) != dtype(norm.out):
        return []
    readers, calls = [norm.out], list[Node]()
    for reader in readers:  # grows meanwhile
        for user in reader.users:
            if is_call(user, *VIEWS):
                readers.append(user)
            elif is_call(user, *PACKED) and user.all_input_nodes.count(reader) == 1 and user.args[0] is reader:
                calls.append(user)
            else:
                return []
    one_row = all(known(shape(call.args[0])[0] == 1) for call in calls)
    taken = any(call_of(call).norm_eps is not None for call in calls)
    position = ordered(norm.out.graph)
    calls.sort(key=position.__getitem__)
    others = (x for call in calls for x in call.all_input_nodes if x is not call.args[0])
    early = all(position[x] < position[calls[0]] for x in others)
    return calls if one_row and early and not taken else []


def _take_norm(context: Context, norm: Norm, calls: list[Node]) -> None:
    """Replace calls of a norm by calls of its input."""
    rewrite = Rewrite(calls[0])
    a = rewrite.reshape(norm.x, shape(calls[0].args[0]))
    pairs = []
    for node in calls:
        call = call_of(node)._replace(a=a, norm_weight=norm.weight, norm_eps=norm.eps)
        pairs.append((node, rewrite.call(PACKED[0], *call)))
    layers = f"{len(calls)} calls, " if len(calls) > 1 else ""
    bits = call_of(calls[0]).bits
    what = f"tile.dequant_gemm({layers}{bits} bits in layers) with tile.rms_norm([..., {shape(a)[-1]}]) in front"
    if context.replace(rewrite, "dequant", pairs, what, calls[0]):
        for old, _ in pairs:
            erase_dead(old)
