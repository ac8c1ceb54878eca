# SPDX-License-Identifier: Apache-2.0
"""Replace matrix products with a weight widened from few bits by `tile.dequant_gemm`, with their epilogue.

The weight is read back to bytes or float8 numbers. On the way are views, casts, shifts by zero points and
multiplications by scales. Any order that amounts to `(field - offset - zero) * scale` matches. Two 4-bit columns in a
byte are recognised where fields are extracted and placed side by side. So all spellings of one scheme by quantisation
libraries become one form.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.axes import Group, arrange, axes_of, extent, leaves, regroup, trace
from torch_tile.inductor.graph.nodes import (
    CAST,
    CASTS,
    COPIES,
    LAYOUT,
    Miss,
    Rewrite,
    arg,
    aten,
    constant,
    dtype,
    equivalent,
    erase_dead,
    is_call,
    is_tensor,
    known,
    ordered,
    same_shape,
    shape,
    val,
)
from torch_tile.inductor.patterns.attention.scores import aligned
from torch_tile.inductor.patterns.gemm import epilogue
from torch_tile.ops.families.dequant_gemm import FLOAT8, WHOLE, ZEROS, supported_group

MOST_NODES = 64  # behind a weight that are looked through for bits
Factor = tuple[Node, list[Group]]
"""A tensor and its dimensions."""


@dataclass(frozen=True)
class Stored:
    """A matrix `(fields of words - offset - zero) * scales * factor`; each tensor has dimensions in common axes.

    `field` is the axis along which the fields of a word lie. `signed`: the highest bit of a field is a sign.
    """

    words: Node
    dims: list[Group]
    bits: int = 8
    high_first: bool = False
    signed: bool = False
    field: Group = dataclasses.field(default_factory=list)
    offset: int = 0
    factor: float = 1.0
    zero: Factor | None = None
    scales: list[Factor] = dataclasses.field(default_factory=list)


def read(node: Any, dims: list[Group]) -> Stored | None:
    """Return the stored form of `node`, whose dimensions are `dims`; None if it is no widened weight."""
    node, dims = trace(node, dims)
    if not is_tensor(node):
        return None
    whole = Stored(node, dims, signed=dtype(node).is_signed) if dtype(node) in WHOLE + FLOAT8 else None
    if node.op != "call_function" or dtype(node) in FLOAT8:
        return whole
    found = None
    if is_call(node, CAST, aten._to_copy.default):
        found = _cast(node, dims)
    elif is_call(node, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
        found = _scaled(node, dims)
    elif is_call(node, aten.sub.Tensor, aten.sub.Scalar, aten.add.Tensor, aten.add.Scalar):
        found = _shifted(node, dims)
    elif is_call(node, aten.cat.default, aten.stack.default):
        found = _concatenated_fields(node, dims)
    elif is_call(node, aten.slice_scatter.default):
        found = _interleaved(node, dims)
    return found or whole


def _cast(node: Node, dims: list[Group]) -> Stored | None:
    """Read a cast that keeps values: to a floating type, or to an integer type that holds the values."""
    found = read(node.args[0], dims)
    if found is None or dtype(node).is_floating_point:
        return found
    before, after = dtype(node.args[0]), dtype(node)
    fits = after == before or (after.itemsize > 1 and after.is_signed) or (found.bits < 8 and not found.scales)
    return found if fits and not before.is_floating_point else None


def _scaled(node: Node, dims: list[Group]) -> Stored | None:
    """Read a product with a number or scale, or a quotient by a number."""
    divides = is_call(node, aten.div.Tensor, aten.div.Scalar)
    for weight, other in (node.args[:2],) if divides else (node.args[:2], node.args[1::-1]):
        found = read(weight, aligned(weight, dims)) if is_tensor(weight) and _floats(node) else None
        number = constant(other)
        if found is None or ("rounding_mode" in node.kwargs):
            continue
        if number is not None:
            return replace(found, factor=found.factor / number if divides else found.factor * number)
        if is_tensor(other) and dtype(other).is_floating_point and not divides:
            return replace(found, scales=[*found.scales, trace(other, aligned(other, dims))])
    return None


def _shifted(node: Node, dims: list[Group]) -> Stored | None:
    """Read the subtraction of a number or zero point, before any scale."""
    if node.kwargs.get("alpha", 1) != 1 or len(node.args) != 2:
        return None
    weight, other = node.args
    found = read(weight, aligned(weight, dims)) if is_tensor(weight) else None
    wraps = not _floats(node) and dtype(node).itemsize == 1 and (found is None or found.bits == 8)
    if found is None or found.scales or found.factor != 1 or wraps:
        return None
    number = constant(other)
    if number is not None:
        whole = int(number) if is_call(node, aten.sub.Tensor, aten.sub.Scalar) else -int(number)
        return replace(found, offset=found.offset + whole) if number == int(number) else None
    if not is_tensor(other) or not is_call(node, aten.sub.Tensor) or found.zero is not None:
        return None
    return replace(found, zero=_uncast(*trace(other, aligned(other, dims))))


def _uncast(node: Node, dims: list[Group]) -> Factor:
    """Return a zero point under its casts, where kernels read the dtype there."""
    while is_call(node, CAST) and dtype(node.args[0]) in ZEROS:
        node, dims = trace(node.args[0], dims)
    return node, dims


def _floats(node: Node) -> bool:
    """Return whether a node holds a floating tensor."""
    return dtype(node).is_floating_point


def _concatenated_fields(node: Node, dims: list[Group]) -> Stored | None:
    """Read fields of the same bytes, placed next to each other as columns."""
    parts: Any = node.args[0]
    along: Any = arg(node, "dim")
    along %= len(dims)
    before, after = dims[:along], dims[along + 1 :]
    if is_call(node, aten.cat.default) and not all(known(shape(p)[along] == 1) for p in parts):
        return None
    inner = [*before, *after] if is_call(node, aten.stack.default) else [*before, [], *after]
    return _together(node, parts, inner, dims[along])


def _interleaved(node: Node, dims: list[Group]) -> Stored | None:
    """Read fields written to every second (fourth, eighth) column until all columns are overwritten."""
    along, step = arg(node, "dim") % len(dims), arg(node, "step")
    parts: dict[int, Any] = {}
    size, layer = shape(node)[along], node
    if not isinstance(size, int) or step not in (2, 4, 8) or size % step:
        return None
    while is_call(layer, aten.slice_scatter.default) and len(parts) < step:
        base, part, dim, start, own = (arg(layer, name) for name in ("self", "src", "dim", "start", "step"))
        start = start or 0
        if dim % len(dims) != along or own != step or start not in range(step) or shape(part)[along] != size // step:
            return None
        if is_call(part, aten.copy.default) and same_shape(shape(part), shape(part.args[1])):
            part = part.args[1]
        parts.setdefault(start, part)  # the last to write is the first to be met
        layer = base
    cut = regroup(dims[along], [size // step, step]) if len(parts) == step else None
    if cut is None:
        return None
    return _together(node, [parts[i] for i in range(step)], [*dims[:along], cut[0], *dims[along + 1 :]], cut[1])


def _together(node: Node, parts: list[Node], inner: list[Group], field: Group) -> Stored | None:
    """Return the stored form of `node` if `parts`, its neighbours along `field`, are all fields of a byte."""
    fields = [_field(p, inner) for p in parts]
    first, bits = fields[0], 8 // len(parts)
    if first is None or not all(f is not None and f.beside(first) for f in fields):
        return None
    if first.signed and not dtype(node).is_signed:
        return None
    places = [(f.place, f.bits) for f in fields if f is not None]
    for high_first in (False, True):
        if places == [(place, bits) for place in range(0, 8, bits)][:: -1 if high_first else 1]:
            return Stored(first.words, first.dims, bits, high_first, first.signed, leaves(field))
    return None


@dataclass(frozen=True)
class Field:
    """`bits` bits of each word, from bit `place` on; `signed` if the highest of these bits is a sign."""

    words: Node
    dims: list[Group]
    place: int
    bits: int
    signed: bool

    def beside(self, other: Field) -> bool:
        """Return whether both fields have the same words, order and signedness."""
        same = equivalent(self.words, other.words) and self.signed == other.signed
        return same and [*map(leaves, self.dims)] == [*map(leaves, other.dims)]


def _field(node: Any, dims: list[Group]) -> Field | None:
    """Read `(words >> place) & mask`, with either step optional, or `(words << n) >> n` of signed words."""
    place, mask, masked, lifted = 0, 255, False, 0
    node, dims = trace(node, dims)
    while is_call(node, CAST) and dtype(node).is_floating_point and dtype(node).itemsize > 1:
        node, dims = trace(node.args[0], dims)  # which every field fits into
    while is_call(node, CAST, *SHIFTS, *ANDS, *_LIFTS):
        source: Any = node.args[0]
        if not is_tensor(source) or dtype(node).is_floating_point or dtype(source).is_floating_point:
            return None
        if not is_call(node, CAST):
            number = constant(node.args[1])
            if number is None or lifted:
                return None
            if is_call(node, *ANDS):
                mask, masked = mask & (int(number) >> place), True
            elif is_call(node, *SHIFTS):
                place += int(number)
            elif masked or dtype(node) != torch.int8:
                return None  # a left shift makes a sign only if it drops higher bits
            else:
                lifted = int(number)
        node, dims = trace(source, dims)
    if not is_tensor(node) or dtype(node) not in WHOLE or not 0 <= lifted <= place < 8:
        return None
    mask &= 255 >> place
    signed = not masked and dtype(node).is_signed
    return Field(node, dims, place - lifted, mask.bit_length(), signed) if mask & (mask + 1) == 0 else None


_LIFTS = (aten.__lshift__.Scalar, aten.bitwise_left_shift.Tensor, aten.bitwise_left_shift.Tensor_Scalar)


@dataclass(frozen=True)
class Weight:
    """The right operand `[K, N]` of a product; the axes `prefix` of k count runs that share a scale and a zero."""

    stored: Stored
    n: Group
    k: Group
    prefix: Group

    def scheme(self) -> tuple[Any, ...]:
        """Return the properties that the weights of one call must share."""
        s = self.stored
        scaled = bool(s.scales) or s.factor != 1
        return dtype(s.words), s.bits, s.high_first, s.signed, s.offset, s.zero is None, scaled, extent(self.prefix)

    def operand(self, rewrite: Rewrite) -> Node:
        """Insert the words as `[N, words]`, of signed bytes if the fields are signed."""
        s = self.stored
        words = arrange(rewrite, s.words, s.dims, [self.n, self.k[: len(self.k) - len(s.field)]])
        assert words is not None, "weight_of has checked the axes"
        if dtype(words) in WHOLE and dtype(words).is_signed != s.signed:
            words = rewrite.call(aten.view.dtype, words, torch.int8 if s.signed else torch.uint8)
        return words

    def by_group(self, rewrite: Rewrite, factor: Factor) -> Node:
        """Insert a scale or zero point as `[N, G]`."""
        node = arrange(rewrite, factor[0], factor[1], [self.n, self.prefix])
        assert node is not None, "weight_of has checked the axes"
        return node

    def scale(self, rewrite: Rewrite) -> Node | None:
        """Insert the product of all scales; None if there is no scale."""
        s, node = self.stored, None
        for factor in s.scales:
            if factor[1]:
                own = self.by_group(rewrite, factor)
                node = own if node is None else rewrite.call(aten.mul.Tensor, node, own)
        numbers: list[Any] = [x for x, groups in s.scales if not groups]  # which may be on the CPU
        if node is not None:
            numbers += [] if s.factor == 1 else [s.factor]
            return functools.reduce(lambda x, by: rewrite.call(aten.mul.Tensor, x, by), numbers, node)
        if not numbers and s.factor == 1:
            return None
        device, kind = val(s.words).device, torch.float32
        one = rewrite.call(aten.full.default, [1, 1], s.factor, dtype=kind, device=device)
        one = functools.reduce(lambda x, by: rewrite.call(aten.mul.Tensor, x, by), numbers, one)
        return rewrite.call(aten.expand.default, one, [extent(self.n), extent(self.prefix)])


def weight_of(node: Node) -> Weight | None:
    """Read the right operand of a product; None if it is not widened. Raises `Miss` for a weight without a kernel."""
    *batch, rows, columns = axes_of(shape(node))
    stored = None if any(batch) else read(node, [*batch, rows, columns])
    if stored is None or stored.words is node:
        return None
    k, n = leaves(rows), leaves(columns)
    stored = replace(stored, dims=[leaves(d) for d in stored.dims], field=leaves(stored.field))
    if {a for d in stored.dims for a in d} != {*n, *k} - {*stored.field}:
        raise Miss("the weight repeats numbers that are stored once", "store a number for every weight", at=node)
    if stored.field and k[len(k) - len(stored.field) :] != stored.field:
        raise Miss("neighbouring columns of the weight are not in one byte", "pack along the input features", at=node)
    prefix: Group = []
    gathered = None
    for factor, groups in (*stored.scales, *([stored.zero] if stored.zero else [])):
        gathered = factor if is_call(factor, aten.index.Tensor) else gathered
        own = [a for d in groups for a in leaves(d) if a not in n]
        if own != k[: len(own)]:
            raise Miss("scales do not belong to runs of input features", "give each run of columns a scale", at=node)
        prefix = max(prefix, own, key=len)
    group, whole = extent(k[len(prefix) :]), extent(prefix) == 1
    if not whole and not (isinstance(group, int) and supported_group(group)):
        if gathered is not None:
            fix = "sort the input features by their group once, and give each run one scale (repeat_interleave)"
            raise Miss("scales are gathered by an index", fix, at=gathered)
        raise Miss(f"scales of {group} input features", "use groups of 16, 32 or a multiple of 64", at=node)
    return Weight(stored, n, k, prefix)


@family("dequant", "post_grad", 510)
def match(context: Context) -> None:
    """Replace every product with a widened weight."""
    taken: set[Node] = set()
    for node in list(context.graph.nodes):
        if not is_call(node, *epilogue.PRODUCTS) or node in taken or not node.users:
            continue
        try:
            weight = weight_of(epilogue.right(node)) if epilogue.bias_kind(node) is not None else None
            if weight is not None:
                taken.update(_replace(context, node, weight))
            else:
                reject_unknown_packing(epilogue.right(node))
        except Miss as why:
            context.miss("dequant", node, why)


def _replace(context: Context, seed: Node, weight: Weight) -> list[Node]:
    """Replace one product and its epilogue; return the replaced products."""
    weights = {seed: weight}

    def joins(other: Node) -> bool:
        try:
            found = weight_of(epilogue.right(other)) if is_call(other, *epilogue.PRODUCTS) else None
        except Miss:
            return False
        if found is None or found.scheme() != weight.scheme():
            return False
        weights[other] = found
        return True

    region, out = epilogue.region_of(seed, ordered(context.graph), joins)
    epilogue.tell_wordless(context, "dequant", out)
    rewrite = Rewrite(out)
    aux, kinds, text = epilogue.write_program(region, out, rewrite)
    found = [weights[p] for p in region.products]
    bs = [w.operand(rewrite) for w in found]
    scales = [s for w in found if (s := w.scale(rewrite)) is not None]
    zeros = [w.by_group(rewrite, w.stored.zero) for w in found if w.stored.zero is not None]
    how = weight.stored
    a, *aux = (rewrite.reshape(x, shape(x)[-2:]) for x in (epilogue.left(seed), *aux))  # a batch of one, maybe
    call = (a, bs, scales, zeros, how.bits, how.high_first, how.offset, aux, kinds, text, dtype(out))
    new = rewrite.call(torch.ops.tile.dequant_gemm.default, *call)
    new = rewrite.reshape(new, shape(out))
    group = f" in groups of {extent(weight.k[len(weight.prefix) :])}" if weight.prefix else ""
    layers = f"{len(bs)} products, " if len(bs) > 1 else ""
    what = f"tile.dequant_gemm({layers}{how.bits} bits of {dtype(bs[0])}{group}, {text or 'no epilogue'})"
    if not context.replace(rewrite, "dequant", [(out, new)], what, seed):
        return []
    erase_dead(out)
    return region.products


# Weights taken out of packed words in a way that no kernel reads: they are told, and the product is a plain one.

SHIFTS = (aten.__rshift__.Scalar, aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar)
ANDS = (aten.bitwise_and.Scalar, aten.bitwise_and.Tensor)

_STEPS = (
    *(*CASTS, *LAYOUT, *COPIES, aten.copy.default),
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
    *(aten.slice.Tensor, aten.slice_scatter.default, aten.cat.default, aten.stack.default, aten.index.Tensor),
    *(*SHIFTS, *ANDS),
)


def reject_unknown_packing(weight: Any) -> None:
    """Raise `Miss` if the right operand of a product is made from bits of integers that `read` did not recognise."""
    seen: dict[Node, None] = {weight: None}
    pending = [weight]
    bits: Node | None = None
    while pending and len(seen) < MOST_NODES:
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
