# SPDX-License-Identifier: Apache-2.0
"""Fuse the pointwise operations around a norm into its kernel: `tile.fused_norm`.

Behind the norm, the kernel takes the largest pointwise region, as behind a product (gemm/epilogue.py). Examples are
modulation by scales and shifts of each sequence (adaptive norms), biases and activations. In front of the norm, it
takes the pointwise tree that makes the input: residuals and gates. Operands that broadcast are computed inside too, so
that `1 + scale` is no kernel of its own.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from torch_tile.inductor.compat import size_hint
from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.extract import REDUCTIONS, Ancestors, is_fused, is_read_in_registers
from torch_tile.inductor.graph.nodes import (
    Rewrite,
    aten,
    bind,
    constant,
    dtype,
    erase_dead,
    is_call,
    is_tensor,
    known,
    look_through,
    ordered,
    product,
    same_shape,
    shape,
    val,
)
from torch_tile.inductor.patterns.gemm.epilogue import (
    PACKED,
    PRODUCTS,
    Region,
    Writer,
    extend,
    kind_of,
    tell_wordless,
    tensors_of,
)
from torch_tile.inductor.report import rows as report
from torch_tile.inductor.select import cost_rules
from torch_tile.kernels.epilogue.canonicalize import canonical
from torch_tile.kernels.norm.args import LayerNormArgs, RmsNormArgs

# Epilogue texts, in their canonical form, of the activations that the kernel of `tile.rms_norm` knows.
ACTIVATIONS = {canonical(f"v0={name}(acc0);ret v0"): name for name in ("relu", "silu", "gelu", "gelu_tanh")}
MOST_IN_FRONT = 12
MOST_READ_AGAIN = 2  # tensors, instead of the sum that one kernel would write and another read
FEWEST_ELEMENTS = 1 << 15
"""Least elements for a contest: a GPU moves fewer in less than half of the launch time of a kernel."""


@dataclass
class Norm:
    """A norm in a graph: the node that holds its result, the tensor whose rows it normalises, and its arguments.

    `factor` multiplies the normalised value, before the weight does. `source` is x as a norm's own op reads it, maybe
    widened, and `cast_first` is the argument of `tile.rms_norm`.
    """

    out: Node
    x: Node
    weight: Node | None
    bias: Node | None
    offset: float
    eps: float
    centred: bool
    factor: float = 1.0
    source: Node | None = None
    cast_first: bool = False


class Rows(Region):
    """Region of values of the norm's shape. An operand may also have one row for each run of rows."""

    def kind(self, operand: Node, node: Node) -> str | None:
        """Return the kind of an operand as in `Region.kind`, or `g` for one row per run of rows."""
        kind = kind_of(operand, self.products[0])
        if kind is None and is_tensor(operand) and dtype(operand).is_floating_point:
            return "g" if is_by_runs(shape(operand), shape(self.products[0])) else None
        return kind


def is_by_runs(have: Sequence[Any], full: Sequence[Any]) -> bool:
    """Return whether a shape equals the full one up to some dimension, then has ones, then the full last size."""
    if len(have) != len(full) or not known(have[-1] == full[-1]):
        return False
    outer = next((d for d in range(len(full) - 1) if not known(have[d] == full[d])), len(full) - 1)
    return all(known(size == 1) for size in have[outer:-1])


class RowsWriter(Writer):
    """Write a region of rows as text. Broadcast operands without other readers are computed inside."""

    def __init__(self, region: Region, norm: Norm | None = None) -> None:
        super().__init__(region)
        self.norm = norm

    def _product(self, node: Node, value: str) -> str:
        """Return the name of the input value: for a norm, the normalised value with its weight and bias."""
        if self.norm is None:
            return value
        value = self._scaled(value, self.norm.factor)
        if self.norm.weight is not None:
            weight = self._name(self.norm.weight, node)
            weight = self._say("add", weight, repr(float(self.norm.offset))) if self.norm.offset else weight
            value = self._say("mul", value, weight)
        return value if self.norm.bias is None else self._say("add", value, self._name(self.norm.bias, node))

    def _name(self, operand: Any, node: Node) -> str:
        """Return the name of an operand; compute a broadcast one inside if nothing else reads it."""
        if isinstance(operand, Node) and operand not in self.names and _inlines(operand, self.region):
            self.names[operand] = self._op(operand)
        return super()._name(operand, node)


def _inlines(node: Node, region: Region) -> bool:
    """Return whether a broadcast operand is pointwise, read only here, and made of operands of the kernel."""
    full = region.products[0]
    if constant(node) is not None or region.kind(node, full) in (None, "t") or len(node.users) != 1:
        return False
    tensors = tensors_of(node)
    return bool(tensors) and all(region.kind(x, full) is not None for x in tensors)


@family("norm", "post_grad", 420)
def match(context: Context) -> None:
    """Fuse neighbours into captured norm ops. Norms replaced by `norm.match` were already tried."""
    for node in list(context.graph.nodes):
        norm = norm_of(node) if node.users else None
        if norm is not None and node not in context.handled:
            fuse(context, norm, node)


def norm_of(node: Node) -> Norm | None:
    """Return the norm that a captured op stands for, or None."""
    if is_call(node, torch.ops.tile.layer_norm.default):
        plain = bind(node, LayerNormArgs[Any])
        return Norm(node, plain.x, plain.weight, plain.bias, 0.0, plain.eps, True)
    if is_call(node, torch.ops.tile.rms_norm.default):
        rms = bind(node, RmsNormArgs[Any])
        if rms.activation == "none":
            return Norm(node, rms.x, rms.weight, None, rms.weight_offset, rms.eps, False)
    return None


def fuse(context: Context, norm: Norm, anchor: Node, late: bool = False) -> bool:
    """Replace a norm and the operations around it, unless its own op takes them all; return whether a decision was
    made.

    `late`: products already took their epilogues, so the norm may take sums of products.
    """
    behind, last = _behind(norm)
    tell_wordless(context, "norm", last)
    writer = RowsWriter(behind, norm)
    epilogue = writer.text(last)
    front = _in_front(norm, last, writer.aux)
    plain_sum = front is not None and canonical(RowsWriter(front[0]).text(norm.x)) == _SUM
    if front is not None and not late and _product_takes(context, norm, front):
        front = None
    pure = canonical(Writer(behind).text(last)) if last is not norm.out else ""
    small = norm.factor == 1 and (not pure or (pure in ACTIVATIONS and not norm.centred))
    if small and (front is None or (plain_sum and not _takes_sum(context, norm, front, late))):
        return False
    what = _describe(norm, last, front)
    won_alone = anchor in context.handled
    left = left_to_inductor(context, what, last, norm.x, anchor)
    if not left:
        rewrite = Rewrite(last)
        pairs = _write(rewrite, norm, epilogue, writer, last, front)
        replaced = context.replace(rewrite, "norm", pairs, what, anchor)
        left = not replaced and not won_alone
        for old, _ in pairs if replaced else ():
            erase_dead(old)
    if left and anchor is norm.out:
        # Alone this op of ours would win still less, as Inductor fuses what stands around a norm either way.
        context.left.add(anchor)
    return True


def _takes_sum(context: Context, norm: Norm, front: Front, late: bool) -> bool:
    """Return whether to decide on a plain sum in front now.

    An RMS norm whose sum is stored too waits for `add_rms_norm` (norm.py). If the sum is not stored, the norm waits
    only where products may take sums. A layer norm always waits for the products.
    """
    may_be_taken = context.settings.select == "tile" or context.settings.thorough
    return late if norm.centred else not (front[1] or may_be_taken)


_SUM = canonical("v0=add(acc0,x0);ret v0")


def _describe(norm: Norm, last: Node, front: Any) -> str:
    """Name a fused norm for the report."""
    name = "tile.layer_norm" if norm.centred else "tile.rms_norm"
    follows = last is not norm.out or norm.factor != 1
    around = [*(["what makes its input"] if front else []), *(["what follows"] if follows else [])]
    return f"{name}([..., {shape(norm.x)[-1]}]) with {' and '.join(around)}"


def _behind(norm: Norm) -> tuple[Region, Node]:
    """Return the region behind a norm, or the norm alone, and the node that holds its result."""
    sizes = shape(norm.out)
    region = Rows([norm.out], product(sizes[:-1]), sizes[-1], ordered(norm.out.graph), joins=lambda product: False)
    return extend(region.copy()) or (region, norm.out)  # what it tried in vain is not to be read


Front = tuple[Region, bool]
"""The tree that makes a norm's input, as a region from its first operand; and whether other nodes read its result."""


def _product_takes(context: Context, norm: Norm, front: Front) -> bool:
    """Return whether a product in front may compute the sum in its own epilogue."""
    writer = RowsWriter(front[0])
    text = canonical(writer.text(norm.x))
    operands = [*writer.aux, *front[0].products]
    if "g" in writer.kinds or not any(map(_is_product_seen, operands)):
        return False
    packed = any(is_call(look_through(x, views=True), *PACKED) for x in operands)
    return packed or text != _SUM or context.settings.select == "tile" or context.settings.thorough


def _is_product_seen(node: Node) -> bool:
    """Return whether a node is a matrix product under views."""
    return is_call(look_through(node, views=True), *PRODUCTS, *PACKED)


def _in_front(norm: Norm, last: Node, operands: Sequence[Node]) -> Front | None:
    """Return the pointwise tree of the norm's input, unless no kernel takes it or `operands` need its result."""
    total, position = norm.x, ordered(norm.x.graph)
    if not same_shape(shape(total), shape(norm.out)):
        return None
    taken, leaves = tree_of(total)
    first = next((x for x in leaves if same_shape(shape(x), shape(total)) and dtype(x) == dtype(total)), None)
    if first is None or total not in taken:
        return None
    needed, dead = Ancestors(operands, position), _only_for(last, position, position[total])
    others = [u for u in total.users if u not in dead or u in operands or u in needed]
    if total in operands or total in needed or any(position[u] < position[last] for u in others):
        return None
    sizes = shape(total)
    region = Rows([first], product(sizes[:-1]), sizes[-1], position, taken)
    full = [x for x in dict.fromkeys(leaves) if same_shape(shape(x), sizes)]
    return region, bool(others) and not (len(full) <= MOST_READ_AGAIN and all(map(_ends_in_registers, others)))


def _ends_in_registers(node: Node) -> bool:
    """Return whether a node and all its results are pointwise and no product may take them.

    Inductor then computes the norm's input again in their kernel. This rounds nothing, and moves no more bytes than
    storing and loading the input.
    """
    if node.op == "output" or any(map(_is_product_seen, node.all_input_nodes)):
        return False
    seen = [node]
    for each in seen:  # grows meanwhile
        if each.op != "output" and (not is_fused(each) or is_call(each, *REDUCTIONS) or len(seen) > MOST_IN_FRONT):
            return False
        seen += [u for u in each.users if u not in seen]
    return True


def tree_of(total: Node) -> tuple[list[Node], list[Node]]:
    """Return the pointwise nodes that make a tensor and have no other readers, and what they are made of."""
    taken: list[Node] = []
    leaves: list[Node] = []
    _grow_back(total, shape(total), taken, leaves)
    return taken, leaves


def _grow_back(node: Node, full: Sequence[Any], taken: list[Node], leaves: list[Node]) -> None:
    """Add `node` to `taken`, or to `leaves` if the kernel cannot compute it."""
    tensors = tensors_of(node)
    inside = not taken or all(u in taken for u in node.users)
    floats = all(is_tensor(x) and dtype(x).is_floating_point and dtype(x) != torch.float64 for x in [node, *tensors])
    fits = floats and all(kind_of(x, node) or is_by_runs(shape(x), full) for x in tensors)
    if not (tensors and inside and fits and len(taken) < MOST_IN_FRONT and same_shape(shape(node), full)):
        leaves.append(node)
        return
    taken.append(node)
    for x in dict.fromkeys(tensors):
        _grow_back(x, full, taken, leaves)


def _only_for(last: Node, position: dict[Node, int], start: int) -> set[Node]:
    """Return `last` and the nodes behind `start` that only `last` needs."""
    dead, node = {last}, last.prev
    while position.get(node, -1) > start:
        if node.users and all(u in dead for u in node.users):
            dead.add(node)
        node = node.prev
    return dead


def _write(
    rewrite: Rewrite, norm: Norm, epilogue: str, writer: Writer, last: Node, front: Front | None
) -> list[tuple[Node, Node]]:
    """Insert the call; return (old, new) pairs of nodes."""
    aux, kinds = list(writer.aux), list(writer.kinds)
    x, prologue, keep = norm.x, "", False
    if front is not None:
        region, keep = front
        before = RowsWriter(region)
        prologue, (x,) = before.text(norm.x), region.products
        for operand, kind in zip(before.aux, before.kinds, strict=True):
            if operand not in aux:
                aux.append(operand)
                kinds.append(kind)
        prologue = re.sub(r"\bx(\d+)\b", lambda m: f"x{aux.index(before.aux[int(m[1])])}", prologue)
    full = shape(norm.x)
    wanted = {"t": full, "r": full[-1:], "c": (*full[:-1], 1), "s": ()}
    operands = [rewrite.reshape(v, wanted.get(kind, shape(v))) for v, kind in zip(aux, kinds, strict=True)]
    op, texts = torch.ops.tile.fused_norm.default, (canonical(prologue), canonical(epilogue))
    both = rewrite.call(op, x, operands, "".join(kinds), *texts, norm.centred, norm.eps, keep, dtype(last))
    y = rewrite.reshape(rewrite.call(operator.getitem, both, 0), shape(last))
    return [(last, y), *([(norm.x, rewrite.call(operator.getitem, both, 1))] if keep else [])]


@family("norm", "post_grad", 620)
def fuse_front(context: Context) -> None:
    """Fuse layer norms with the sums in front of them that products left, modulated or not."""
    for node in list(context.graph.nodes):
        norm = norm_of(node) if node.users else None
        if norm is not None and norm.centred and is_call(norm.x, aten.add.Tensor):
            fuse(context, norm, node, late=True)


def left_to_inductor(context: Context, what: str, node: Node, x: Node, anchor: Node, family: str = "norm") -> bool:
    """Return whether Inductor keeps an operation on rows without a contest, which would cost more than it gains.

    There are four such cases. Inductor fuses the operation into a larger pointwise kernel, where its result is never
    rounded. A GPU needs as long for it as for the launch of any kernel. The rows of `x` are not contiguous, so that a
    kernel by rows would load more than it needs. The sizes decide (cost_rules.py).
    """
    if context.settings.select != "fastest":
        return False
    if is_read_in_registers(node) and family == "norm":
        why = "Inductor computes it in one kernel with what reads it, and rounds nothing in between"
    elif val(node).device.type == "cuda" and math.prod(map(size_hint, shape(node))) < FEWEST_ELEMENTS:
        why = "so small that every kernel takes the same time"
    elif family == "norm" and val(x).device.type == "cuda" and val(x).shape[-1] != 1 and val(x).stride(-1) != 1:
        why = "neighbours in a row are no neighbours in memory, where Inductor goes along columns"
    elif family == "norm" and not context.settings.thorough and (held := cost_rules.in_registers(node)):
        why = held
    else:
        return False
    context.note(family, report.KEPT, what, anchor, why)
    return True
