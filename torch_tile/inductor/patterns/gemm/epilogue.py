# SPDX-License-Identifier: Apache-2.0
"""Find the epilogue of a matrix product: the largest pointwise region behind it that one gemm kernel can compute.

A region grows from a product through its users. These are views that keep the last dimension, and pointwise ops. Their
operands are values of the region, numbers, or what the kernel can address. The kinds of operands are `t` (a full
matrix), `r` (a row), `c` (a column) and `s` (a scalar). A second product of the same left operand may join the region
(the two halves of SwiGLU). Only one value of the region may be used outside. The largest such region is written as the
epilogue text of `tile.gemm`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from torch_tile.inductor.context import Context
from torch_tile.inductor.graph.nodes import (
    CAST,
    VIEWS,
    Miss,
    Rewrite,
    aten,
    constant,
    dtype,
    equivalent,
    is_call,
    is_number,
    is_tensor,
    known,
    look_through,
    name_of,
    ordered,
    product,
    same_shape,
    shape,
    val,
)
from torch_tile.inductor.graph.pointwise import WORDS, call_of, is_wordless
from torch_tile.inductor.patterns.gemm import column_slices, grouped_ops
from torch_tile.kernels.epilogue.canonicalize import canonical

MAX_OPS = 32
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
SCALED_GROUPED = tuple(
    getattr(aten, name).default for name in ("_scaled_grouped_mm", "_scaled_grouped_mm_v2") if hasattr(aten, name)
)
"""Products of groups of rows of float8 with a matrix each."""
SCALED = (
    aten._scaled_mm.default,
    *([aten._scaled_mm_v2.default] if hasattr(aten, "_scaled_mm_v2") else []),
    *SCALED_GROUPED,
)
"""Products of float8 matrices, whose scales come behind the operands."""
PACKED = (torch.ops.tile.dequant_gemm.default,)
"""Products with weights of few bits that a model calls itself, each with an epilogue of its own."""


@dataclass
class Region:
    """A growing region of `values`, in any order; `rows` counts all rows, `joins` allows a second product."""

    products: list[Node]
    rows: Any
    cols: Any
    order: dict[Node, int]
    ops: list[Node] = field(default_factory=list)
    joins: Callable[[Node], bool] = lambda product: True

    @property
    def values(self) -> set[Node]:
        """Return all products and ops of the region."""
        return {*self.products, *self.ops}

    def escaping(self) -> list[Node]:
        """Return the values that are used outside the region."""
        inside = self.values
        return [n for n in inside if any(u not in inside for u in n.users)]

    def copy(self) -> Region:
        """Copy the region in its present state."""
        return replace(self, products=list(self.products), ops=list(self.ops))

    def kind(self, operand: Node, node: Node) -> str | None:
        """Return the kind by which an operand broadcasts to the value of `node`; None if it cannot."""
        return kind_of(operand, node)


def is_product(node: Any) -> bool:
    """Return whether a node is a matrix product or a product of groups of rows."""
    return is_call(node, *PRODUCTS) or grouped_ops.by_rows(node) is not None


def whole(node: Node) -> Node | None:
    """Return the product that a node is, or is some columns of, unless the product's addend is no row."""
    if is_product(node) or is_call(node, *PACKED):
        return node
    part = column_slices.part_of(node)
    if part is None or not (is_product(part[0]) or is_call(part[0], *PACKED)):
        return None
    return part[0] if bias_kind(part[0]) in ("", "r") else None


def left(node: Node) -> Node:
    """Return the left operand of a product, or of the product that some columns are cut from."""
    result: Node = _operands(node)[0]
    return result


def right(node: Node) -> Node:
    """Return the right operand of a product, or of the product that some columns are cut from."""
    result: Node = _operands(node)[1]
    return result


def _operands(node: Node) -> tuple[Any, Any, Any]:
    """Return the left and right operands, and the ends of the row groups, if there are any."""
    product = whole(node) or node
    if is_call(product, *SCALED, *PACKED):
        return product.args[0], product.args[1], None
    return grouped_ops.by_rows(product) or (product.args[-2], product.args[-1], None)


def covers(sizes: Sequence[Any], rows: Any, cols: Any) -> bool:
    """Return whether a shape is the rows, split into any dimensions, by the columns."""
    return len(sizes) >= 1 and known(sizes[-1] == cols) and known(product(sizes[:-1]) == rows)


def _unpadded(sizes: Sequence[Any]) -> list[Any]:
    """Drop leading sizes of one."""
    sizes = list(sizes)
    while sizes and known(sizes[0] == 1):
        sizes.pop(0)
    return sizes


def kind_of(operand: Node, value: Node) -> str | None:
    """Return the kind by which an operand broadcasts to a value: `s`, `r`, `t`, `c`, or None if none fits."""
    if not is_tensor(operand) or not (dtype(operand).is_floating_point or dtype(operand) == torch.bool):
        return None
    if val(operand).device != val(value).device:  # a number that dynamic=True made a tensor of the CPU
        return None
    have, sizes = _unpadded(shape(operand)), shape(value)
    if not have:
        return "s"
    if len(have) == 1 and known(have[0] == sizes[-1]):
        return "r"
    if same_shape(have, _unpadded(sizes)):
        return "t"
    if known(have[-1] == 1) and same_shape(have[:-1], _unpadded(sizes[:-1])):
        return "c"
    return None


Joins = Callable[[Node], bool]


def region_of(seed: Node, order: dict[Node, int], joins: Joins = lambda product: True) -> tuple[Region, Node]:
    """Return the region and value that `grow` finds, or the product alone if nothing follows."""
    sizes = shape(seed)
    alone = Region([seed], product(sizes[:-1]), sizes[-1], order)
    return grow(seed, order, joins=joins) or (alone, seed)


def grow(
    seed: Node, order: dict[Node, int] | None = None, alone: bool = False, joins: Joins = lambda product: True
) -> tuple[Region, Node] | None:
    """Grow the largest region from a product with one escaping value; return both, or None if nothing follows.

    `alone`: allow no operand but numbers; then the seed may be any tensor. `joins`: which other products may join.
    """
    sizes = shape(seed)
    return extend(Region([seed], product(sizes[:-1]), sizes[-1], order or ordered(seed.graph), joins=joins), alone)


def extend(region: Region, alone: bool = False) -> tuple[Region, Node] | None:
    """Grow a region as `grow` does; at first the region has only its product."""
    best: tuple[Region, Node] | None = None
    while len(region.ops) < MAX_OPS:
        inside = region.values
        users = {u for n in inside for u in n.users if u not in inside}
        if not any(_admit(region, u, alone) for u in sorted(users, key=lambda n: region.order.get(n, 0))):
            break
        escaping = region.escaping()
        if len(escaping) == 1 and escaping[0] in region.ops and dtype(escaping[0]).is_floating_point:
            best = region.copy(), escaping[0]
    if best is None or all(is_call(n, *VIEWS) for n in best[0].ops):
        return None
    return best


def _admit(region: Region, node: Node, alone: bool) -> bool:
    """Add `node` to the region if the kernel can compute it there; return whether it was added."""
    if node.op != "call_function" or not is_tensor(node) or not covers(shape(node), region.rows, region.cols):
        return False
    if not _representable(region, node):
        return False
    if is_call(node, *VIEWS, CAST):
        region.ops.append(node)
        return True
    if operands_of(node) is None:
        return False
    joined: list[Node] = []
    for x in tensors_of(node):
        if x not in region.values:
            if alone:
                return False
            chain = _second_product(region, x)
            if chain is not None:
                joined.extend(c for c in chain if c not in joined)
            elif region.kind(x, node) is None or not _is_as_precise(region, x):
                return False
    region.products.extend(n for n in joined if whole(n) is not None)
    region.ops.extend(n for n in [*joined, node] if n is node or whole(n) is None)
    return True


def _representable(region: Region, node: Node) -> bool:
    """Return whether the kernel's arithmetic (float32, or float64 for float64 products) can hold the values."""
    kind = dtype(node)
    if kind == torch.float64:
        return dtype(region.products[0]) == torch.float64
    if is_call(node, CAST):
        before = dtype(node.args[0])
        return kind.is_floating_point and (before.is_floating_point or before == torch.bool)
    return kind.is_floating_point or kind == torch.bool


def _second_product(region: Region, node: Node) -> list[Node] | None:
    """Return the chain of nodes from a second product, through views and pointwise steps, to `node`.

    None unless only the region reads the chain and the product shares the region's left operand.
    """
    chain = [node]
    while whole(chain[-1]) is None:
        before = _single_source(region, chain[-1])
        if before is None or len(chain) > MAX_OPS:
            return None
        chain.append(before)
    last, first = chain[-1], region.products[0]
    if any(len(n.users) != 1 for n in chain) or not region.joins(last):
        return None
    if whole(last) is not last and whole(last) is not whole(first):
        return None  # the other columns would be computed twice
    if is_call(whole(last), *PACKED) != is_call(whole(first), *PACKED):
        return None
    (a, _, ends), (other, _, others) = _operands(first), _operands(last)
    if not equivalent(others, ends):
        return None
    if not same_shape(shape(last), shape(first)) or not same_shape(shape(other), shape(a)):
        return None
    if not equivalent(look_through(other, views=True), look_through(a, views=True)) or bias_kind(last) is None:
        return None
    return chain[::-1]


def _single_source(region: Region, node: Node) -> Node | None:
    """Return the one operand of a view or pointwise step that no kernel reads as `r`, `c` or `s`."""
    if is_call(node, *VIEWS):
        return node.args[0]  # type: ignore[return-value]
    if not covers(shape(node), region.rows, region.cols) or not _representable(region, node):
        return None
    tensors = [x for x in tensors_of(node) if x not in region.values]
    others = [x for x in tensors if region.kind(x, node) in (None, "t")]
    return others[0] if len(others) == 1 and all(_is_as_precise(region, x) for x in tensors) else None


def _is_as_precise(region: Region, operand: Node) -> bool:
    """Return whether the kernel's arithmetic holds an operand's values."""
    return dtype(operand) != torch.float64 or dtype(region.products[0]) == torch.float64


def bias_kind(node: Node) -> str | None:
    """Return the kind of the addend of `addmm` or `baddbmm`; "" for plain products, None if unsupported."""
    if not is_call(node, aten.addmm.default, aten.baddbmm.default):
        return ""
    bias: Any = node.args[0]
    unknown = any(isinstance(x, Node) for x in node.kwargs.values())  # factors that are sizes
    return None if unknown else kind_of(bias, node)


class Writer:
    """Write a region as text. Intermediate casts are dropped: the arithmetic stays in float32, as in one kernel."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.names: dict[Node, str] = {}
        self.aux: list[Node] = []
        self.kinds: list[str] = []
        self.statements: list[str] = []
        self.cut: dict[int, Node] = {}
        """The part of a product, by the position of the bias whose columns for that part are read."""

    def text(self, out: Node) -> str:
        """Return the text of the whole epilogue, which returns `out`."""
        for index, node in enumerate(self.region.products):
            self.names[node] = self._product(node, f"acc{index}")
        for node in sorted(self.region.ops, key=self.region.order.__getitem__):
            self.names[node] = self._op(node)
        return ";".join([*self.statements, f"ret {self.names[out]}"]) if self.statements else ""

    def _say(self, function: str, *operands: str) -> str:
        """Write a statement that calls a function of the table; return its name."""
        name = f"v{len(self.statements)}"
        self.statements.append(f"{name}={function}({','.join(operands)})")
        return name

    def _scaled(self, value: str, factor: Any) -> str:
        """Multiply a value by a number; write nothing for the number 1."""
        return value if factor == 1 else self._say("mul", value, repr(float(factor)))

    def _product(self, node: Node, value: str) -> str:
        """Name a product; add its scaled addend."""
        product = whole(node) or node
        if not is_call(product, aten.addmm.default, aten.baddbmm.default):
            return value
        beta, alpha = product.kwargs.get("beta", 1), product.kwargs.get("alpha", 1)
        value = self._scaled(value, alpha)
        if beta == 0:
            return value
        bias = self._name(product.args[0], node) if product is node else self._bias_of_part(product.args[0], node)
        return self._say("add", value, self._scaled(bias, beta))

    def _bias_of_part(self, bias: Any, part: Node) -> str:
        """Add the columns of a bias that belong to one part of a product."""
        self.cut[len(self.aux)] = part
        self.aux.append(bias)
        self.kinds.append("r")
        return f"x{len(self.aux) - 1}"

    def _name(self, operand: Any, node: Node) -> str:
        """Return the name of an operand: a value, a number or an auxiliary operand."""
        if isinstance(operand, Node) and operand in self.names:
            return self.names[operand]
        number = constant(operand)
        if number is not None:
            return repr(number)
        kind = self.region.kind(operand, node)
        assert kind is not None, f"{operand} was admitted without a kind"
        self.names[operand] = f"x{len(self.aux)}"
        self.aux.append(operand)
        self.kinds.append(kind)
        return self.names[operand]

    def _op(self, node: Node) -> str:
        """Write a pointwise op; a view or cast is its operand."""
        if is_call(node, *VIEWS, CAST):
            return self._name(node.args[0], node)
        call = call_of(node)
        assert call is not None, f"{node} was admitted without a word"
        return call.reduce(lambda x: self._name(x, node), lambda function, words: self._say(function, *words))


def write_program(
    region: Region, out: Node, rewrite: Rewrite, write: type[Writer] = Writer
) -> tuple[list[Node], str, str]:
    """Write a region as an epilogue: its operands in the shapes of their kinds, the kinds, and the text for `out`."""
    writer = write(region)
    text = canonical(writer.text(out))
    first = region.products[0]  # columns of a product lose its batches: its rows are those of the left operand
    full = (*shape(left(first) if whole(first) else first)[:-1], shape(first)[-1])
    wanted = {"t": full, "r": full[-1:], "c": (*full[:-1], 1), "s": ()}
    given = [
        column_slices.columns_of(x, writer.cut[i], rewrite) if i in writer.cut else x for i, x in enumerate(writer.aux)
    ]
    aux = [rewrite.reshape(x, wanted[kind]) for x, kind in zip(given, writer.kinds, strict=True)]
    return aux, "".join(writer.kinds), text


def tell_wordless(context: Context, family: str, out: Node) -> None:
    """Report each pointwise op on a kernel's result that Inductor would fuse and the language lacks."""
    readers = list(out.users)
    for node in readers:
        if is_call(node, *VIEWS, CAST):
            readers.extend(u for u in node.users if u not in readers)
        elif is_tensor(node) and same_shape(shape(node)[-1:], shape(out)[-1:]) and is_wordless(node):
            name = name_of(node)
            reason = f"no epilogue has a word for {name}, so the kernel in front of it ends there"
            context.miss(family, node, Miss(reason, WORDS))


def operands_of(node: Node) -> list[Any] | None:
    """Return the operands of a pointwise op, numbers included.

    None if the epilogue language lacks the op. None, too, if an operand is a number that the graph does not know (a
    size).
    """
    call = call_of(node)
    if call is None or not all(map(is_tensor, node.all_input_nodes)):
        return None
    if not dtype(node).is_floating_point and (dtype(node) != torch.bool or call.function == "add"):
        return None  # kernels compute with no integers, of which a bit is no truth; and True + True is True
    operands = list(call.leaves())
    return operands if all(isinstance(x, Node) or is_number(x) for x in operands) else None


def tensors_of(node: Node) -> list[Node]:
    """Return the tensor operands of a pointwise op or a cast, without constants; nothing for other nodes."""
    operands = [node.args[0]] if is_call(node, CAST) else operands_of(node) or ()
    return [x for x in operands if isinstance(x, Node) and constant(x) is None]
