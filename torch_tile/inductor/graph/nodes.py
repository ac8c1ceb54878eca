# SPDX-License-Identifier: Apache-2.0
"""Read and edit FX graphs: the helpers that every family's matcher uses.

Matchers read through `val`, `is_call` and `known`. They write through a `Rewrite`, whose nodes carry correct
`meta["val"]`; `discard` removes all of them. This module knows no family.
"""

from __future__ import annotations

import linecache
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, overload

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

from torch_tile.ops.registry import operator_of

Args = TypeVar("Args")

aten = torch.ops.aten
prims = torch.ops.prims

# Operators that move values and compute none, grouped by their effect on a tensor.
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
"""Reshapes: the elements stay in order."""
UNITS = (aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
"""Operators that add or remove dimensions of size one: the elements stay in order."""
TURNS = (aten.permute.default, aten.transpose.int, aten.t.default)
REPEATS = (aten.expand.default,)
PARTS = (aten.slice.Tensor, aten.select.int, operator.getitem)
COPIES = (aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default)
LAYOUT = (*VIEWS, *UNITS, *TURNS, *REPEATS)
"""Views that contain every element of a tensor."""

CAST = prims.convert_element_type.default
CASTS = (CAST, aten._to_copy.default)
EXAMPLE = "tile_example"
"""Key of a node's meta: a function that makes an example tensor, where random numbers would distort the timing."""
FROZEN = "tile_frozen"
"""Key of a node's meta: the tensor that the node stands for, where the graph holds it, as after freezing."""
NUMBERS = "tile_numbers"
"""Key of a node's meta: the mean and deviation of the tensor that it stood for when the graph was compiled."""
TIMES = "tile_times"
"""Key of a node's meta: the outcome of the contest that it won before the graph was partitioned."""
TOLD = "tile_told"
"""Key of a node's meta: the subgraph that contains the node is already reported."""
WRITTEN = "tile_written"
"""Key of a node's meta: the operation that the user wrote, where the node calls an equal one instead."""
PARTITIONING = ("recompute", "ac_graph_id", "partitioner_tag")
"""Keys of a node's meta by which AOTAutograd partitions the graph."""


class Miss(Exception):
    """Reason why a subgraph that resembles a pattern does not match: the reason, a remedy, and the node at fault."""

    reason: str
    fix: str

    def __init__(self, reason: str, fix: str = "", at: Any = None) -> None:
        super().__init__(reason)
        self.reason, self.fix = reason, fix
        self.at: Node | None = at if isinstance(at, Node) else None


def name_of(node: Any) -> str:
    """Return a node's operation as users call it: `aten.tanh`, `method softmax`. Other arguments give their text."""
    if not isinstance(node, Node):
        return str(node)
    if node.op == "placeholder":
        return "an input of the graph"
    target: Any = node.meta.get(WRITTEN, node.target)
    return str(getattr(target, "overloadpacket", getattr(target, "__name__", target)))


def val(node: Any) -> Any:
    """Return the fake value of a node, else None. ATen graphs keep it under `val`, Dynamo's under `example_value`."""
    if not isinstance(node, Node):
        return None
    meta = node.meta
    return meta["val"] if "val" in meta else meta.get("example_value")


def shape(node: Any) -> tuple[Any, ...]:
    """Return the (possibly symbolic) shape of a node that holds a tensor."""
    return tuple(val(node).shape)


def dtype(node: Any) -> torch.dtype:
    """Return the dtype of a node that holds a tensor."""
    result: torch.dtype = val(node).dtype
    return result


def is_tensor(node: Any) -> TypeGuard[Node]:
    """Return whether `node` is a graph node holding one tensor."""
    return isinstance(val(node), torch.Tensor)


def is_call(node: Any, *targets: Any) -> TypeGuard[Node]:
    """Return whether `node` calls one of `targets`."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def arg(node: Node, name: str) -> Any:
    """Return the argument `name` of a call, given by position or keyword, or its default."""
    for at, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            given = node.args[at : at + 1]
            return given[0] if given and not argument.kwarg_only else node.kwargs.get(name, argument.default_value)
    raise LookupError(f"{name_of(node)} has no argument {name!r}")


def named_args(node: Node, op: Any) -> dict[str, Any]:
    """Return all arguments of a call by name. The callee is a Python function with the arguments of `op`."""
    schema = op._schema.arguments
    positional = dict(zip((a.name for a in schema), node.args, strict=False))
    return {a.name: a.default_value for a in schema} | positional | node.kwargs


def has_arg(node: Node, name: str) -> bool:
    """Return whether the operation that a node calls has an argument `name`."""
    return any(argument.name == name for argument in node.target._schema.arguments)  # type: ignore[union-attr]


@overload
def bind(node: Node) -> Any: ...


@overload
def bind(node: Node, to: Callable[..., Args]) -> Args: ...


def bind(node: Node, to: Callable[..., Any] | None = None) -> Any:
    """Return the arguments of a call of one of our operators by name, with defaults, in the class `to`."""
    operator = operator_of(node.target)
    if operator is None or (to is not None and getattr(to, "__origin__", to) is not operator.args):
        raise TypeError(f"{name_of(node)} has no arguments of class {getattr(to, '__name__', to)}")
    return operator.args(*node.args, **node.kwargs)


def known(condition: Any) -> bool:
    """Return whether a (possibly symbolic) condition holds for every size, without adding a guard."""
    return bool(statically_known_true(condition))


def can_be_guarded(symbol: torch.SymFloat | torch.SymInt) -> bool:
    """Return whether a symbol has a value at compile time. A symbol read from a tensor's data has none."""
    return not free_unbacked_symbols(symbol)


def same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Return whether two shapes are equal for every value of their symbols."""
    return len(a) == len(b) and all(known(x == y) for x, y in zip(a, b, strict=True))


def product(sizes: Iterable[Any]) -> Any:
    """Return the product of (possibly symbolic) sizes."""
    return math.prod(sizes)


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether an FX argument is a plain Python number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def nodes_under(
    node: Any, *, casts: bool = False, views: bool = False, copies: bool = False, broadcasts: bool = False
) -> Iterator[Any]:
    """Yield `node`, then each node under the operations on top of it that keep its values, nearest first.

    Args:
        node: any argument of a call.
        casts: walk through conversions between floating dtypes.
        views: walk through reshapes, and through dimensions of size one that are added or removed.
        copies: walk through copies.
        broadcasts: walk through dimensions that repeat.
    """
    kinds = ((VIEWS, views), (UNITS, views), (COPIES, copies), (REPEATS, broadcasts))
    through = [target for targets, wanted in kinds if wanted for target in targets]
    yield node
    while is_call(node, *through) or (casts and is_floating_cast(node)):
        node = node.args[0]
        yield node


def look_through(
    node: Any, *, casts: bool = False, views: bool = False, copies: bool = False, broadcasts: bool = False
) -> Any:
    """Return the tensor under all operations of these kinds: the last node of `below`."""
    *_, last = nodes_under(node, casts=casts, views=views, copies=copies, broadcasts=broadcasts)
    return last


def is_floating_cast(node: Any) -> TypeGuard[Node]:
    """Return whether a node converts between floating dtypes."""
    return is_call(node, *CASTS) and dtype(node).is_floating_point and dtype(node.args[0]).is_floating_point


def uncast(node: Any) -> Any:
    """Return `node` without the floating casts on top of it."""
    return look_through(node, casts=True)


def constant(node: Any) -> float | None:
    """Return the Python number that every element of a node has (`full`, `scalar_tensor`), else None."""
    if is_number(node):
        return float(node)
    node = look_through(node, casts=True, views=True, copies=True, broadcasts=True)
    if is_call(node, aten.slice.Tensor):
        return constant(node.args[0])
    if is_call(node, CAST):
        number = constant(node.args[0])
        return number if number is None else _converted(number, dtype(node))
    if is_call(node, aten.full.default) and is_number(node.args[1]):
        return float(node.args[1])
    if is_call(node, aten.scalar_tensor.default) and is_number(node.args[0]):
        return float(node.args[0])
    return None


def _converted(number: float, kind: torch.dtype) -> float:
    """Convert a number to another dtype, without the rounding of floating dtypes."""
    if kind == torch.bool:
        return float(number != 0)
    return number if kind.is_floating_point or not math.isfinite(number) else float(math.trunc(number))


def binary_with_scalar(node: Any, *targets: Any) -> tuple[Any, float] | None:
    """Return `(x, c)` if `node` applies one of `targets` to a tensor x and a number c, in any order."""
    if not is_call(node, *targets) or len(node.args) < 2 or node.kwargs.get("alpha", 1) != 1:
        return None
    x, y = node.args[0], node.args[1]
    for tensor, other in ((x, y), (y, x)):
        number = constant(other)
        if number is not None and is_tensor(tensor) and same_shape(shape(tensor), shape(node)):
            return tensor, number
    return None


def times_number(node: Any) -> tuple[Any, float] | None:
    """Return `(x, c)` if `node` is `x * c`, or `x / (1 / c)`, for a tensor x and a number c; else None."""
    pair = binary_with_scalar(node, aten.mul.Tensor, aten.mul.Scalar)
    if pair is None and (pair := binary_with_scalar(node, aten.div.Tensor)) is not None:
        return (pair[0], 1 / pair[1]) if pair[0] is node.args[0] and pair[1] else None
    return pair


def only_user(node: Node, but: Collection[Node] = ()) -> Node | None:
    """Return the single user of a node, without those in `but`; None if it has none or several."""
    users = [u for u in node.users if u not in but] if but else node.users
    return next(iter(users)) if len(users) == 1 else None


_PURE = ("aten", "prims")


def equivalent(a: Any, b: Any, depth: int = 8) -> bool:
    """Return whether two arguments compute the same value: the same node, or equal pure calls on equivalent arguments.

    Graphs reach the passes without common-subexpression elimination, so `cache[:, :n]` read twice is two nodes.
    """
    if a is b:
        return True
    if isinstance(a, Node) and isinstance(b, Node):
        if depth == 0 or a.op != "call_function" or a.target is not b.target or a.kwargs != b.kwargs:
            return False
        target = a.target
        if getattr(target, "namespace", "") not in _PURE or torch.Tag.nondeterministic_seeded in target.tags:  # type: ignore[union-attr]
            return False
        return len(a.args) == len(b.args) and all(
            equivalent(x, y, depth - 1) for x, y in zip(a.args, b.args, strict=True)
        )
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(equivalent(x, y, depth) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt):
        return known(a == b)
    return type(a) is type(b) and bool(a == b)


def erase_dead(node: Node) -> None:
    """Erase a node without users, and its operands that then have none. Matchers would count these as users."""
    pending = [node]
    while pending:
        dead = pending.pop()
        if dead.op == "call_function" and not dead.users and not dead.is_impure() and not dead._erased:
            inputs = dead.all_input_nodes
            dead.graph.erase_node(dead)
            pending.extend(inputs)


def is_on_gpu(graph: Graph) -> bool:
    """Return whether some node holds a tensor of a GPU."""
    return any(is_tensor(n) and val(n).is_cuda for n in graph.nodes)


def ordered(graph: Graph) -> dict[Node, int]:
    """Return each node's position in the graph."""
    return {node: index for index, node in enumerate(graph.nodes)}


def backward_of(graph: Graph) -> set[Node]:
    """Return the nodes of the backward: those that depend on gradients of outputs, and nodes that only these read."""
    found: set[Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and node.name.startswith("tangents")
        if tangent or (node.op != "output" and any(x in found for x in node.all_input_nodes)):
            found.add(node)
    if found:
        for node in reversed(graph.nodes):
            if node.op == "call_function" and node.users and all(u in found for u in node.users):
                found.add(node)
    return found


class Rewrite:
    """Nodes inserted before `anchor` as a proposal; `discard` removes them again.

    `call` evaluates each operator on the fake values, so later matchers (ours and Inductor's) see true metadata.
    `given` lists nodes that only the old code reads and that exist on both sides; a contest does not time them.
    """

    def __init__(self, anchor: Node) -> None:
        self.graph: Graph = anchor.graph
        self.anchor = anchor
        self.nodes: list[Node] = []
        self.given: list[Node] = []

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Insert a call and return its node; SymInt arguments become nodes."""
        args = tuple(self._materialise(a) for a in args)
        with self.graph.inserting_before(self.anchor):
            node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = evaluate(target, args, kwargs)
        for key in ("nn_module_stack", "stack_trace", "custom", "original_aten", TOLD, *PARTITIONING):
            if key in self.anchor.meta:
                node.meta[key] = self.anchor.meta[key]
        self.nodes.append(node)
        return node

    def reshape(self, node: Node, sizes: Sequence[Any]) -> Node:
        """Reshape `node`; return the node itself if nothing changes."""
        if same_shape(shape(node), sizes):
            return node
        return self.call(aten.reshape.default, node, list(sizes))

    def permute(self, node: Node, order: Sequence[int]) -> Node:
        """Permute the dimensions of `node`; return the node itself for the identity."""
        if list(order) == list(range(len(order))):
            return node
        return self.call(aten.permute.default, node, list(order))

    def inputs(self) -> list[Node]:
        """List the existing nodes that the inserted nodes read, in order of first use."""
        mine = set(self.nodes)
        return list(dict.fromkeys(x for n in self.nodes for x in n.all_input_nodes if x not in mine))

    def discard(self) -> None:
        """Erase every inserted node; none may have users outside the rewrite."""
        for node in reversed(self.nodes):
            self.graph.erase_node(node)
        self.nodes.clear()

    def _materialise(self, value: Any) -> Any:
        """Replace the SymInts of an argument by ints or by nodes that compute them."""
        if isinstance(value, list | tuple):
            return [self._materialise(v) for v in value]
        if isinstance(value, torch.SymInt):
            return int(value.node.expr) if value.node.expr.is_number else self.size(value)
        return value

    def size(self, size: torch.SymInt) -> Node:
        """Return a node that computes `size`: an existing node, the size of an input, or arithmetic on these."""
        earlier = list(_nodes_before(self.anchor))

        def leaf(expr: Any, of: Sequence[Node]) -> Node | None:
            """Find a node of value `expr`, or the dimension of one of the tensors `of` with that size."""
            for node in earlier:
                if isinstance(val(node), torch.SymInt) and val(node).node.expr == expr:
                    return node
            for node in of:
                for dim, extent in enumerate(shape(node) if is_tensor(node) else ()):
                    if isinstance(extent, torch.SymInt) and extent.node.expr == expr:
                        return self.call(aten.sym_size.int, node, dim)
            return None

        inputs = [n for n in earlier if n.op == "placeholder"]
        try:
            node: Node = compute(size.node.expr, lambda expr: leaf(expr, inputs), self.call)
        except LookupError as error:
            found = leaf(size.node.expr, earlier)
            if found is None:
                raise Miss(str(error), "fix this size, or give it as the size of an input") from None
            return found
        return node


def _nodes_before(anchor: Node) -> Iterator[Node]:
    """Yield the nodes in front of `anchor`."""
    for node in anchor.graph.nodes:
        if node is anchor:
            return
        yield node


def evaluate(target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a call on the fake values of its arguments; return the fake result."""
    from torch._inductor.virtualized import V
    from torch.fx.node import map_arg

    values, keywords = map_arg((args, kwargs), val)
    with V.fake_mode:
        return target(*values, **keywords)


# Source of a node in the model: its module, and the lines of Python that led to it.

_PACKAGE = Path(__file__).parents[2]
_CALLERS = {str(_PACKAGE / file) for file in ("inductor/report/explain.py", "kernel.py", "jit.py")}
_CALLERS.add(torch.nn.functional.__file__)
"""Files that call a model, a user's kernel or an operator for a layer, and are no part of the model."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+)(?:, in (.+))?')


@dataclass(frozen=True)
class Frame:
    """One line of the model, and the function that contains it."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"

    @property
    def text(self) -> str:
        """Return the source text of the line, empty if the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def excerpt(self, around: int = 2) -> list[tuple[int, str]]:
        """Return the line and its neighbours, numbered, without their common indentation."""
        numbers = range(max(1, self.line - around), self.line + around + 1)
        lines = [(n, linecache.getline(self.file, n).rstrip().expandtabs(4)) for n in numbers]
        while lines and not lines[0][1]:
            lines.pop(0)
        while lines and not lines[-1][1]:
            lines.pop()
        shared = min((len(text) - len(text.lstrip()) for _, text in lines if text), default=0)
        return [(n, text[shared:]) for n, text in lines]


def frames_of(node: Node) -> tuple[Frame, ...]:
    """Return the stack frames that led to a node, outermost first; empty if the graph has no stack trace."""
    found = _FRAME.findall(node.meta.get("stack_trace") or "")
    return tuple(Frame(file, int(line), function.strip()) for file, line, function in found if file not in _CALLERS)


def module_of(node: Node) -> str:
    """Return the path of the innermost module that a node belongs to, spelt as in `named_modules`."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    for path, _ in reversed(list(stack.values())):
        name = re.sub(r"^L\['\w+'\]\.?|^L__\w+?__", "", str(path))
        name = re.sub(r"_modules\['([^']+)'\]|\['?([^'\]]+)'?\]", lambda m: f".{m[1] or m[2]}", name)
        return re.sub(r"\.{2,}", ".", name).strip(".")
    return ""


def place(node: Node) -> str:
    """Return the module path and source line of a node, as far as the graph records them, else its name."""
    line = "".join(map(str, frames_of(node)[-1:]))
    return " ".join(part for part in (module_of(node), line) if part) or node.name


# Symbolic sizes: exact quotients, and nodes of a graph that compute a size.
#
# Sizes are ints or SymInts. Views of views leave expressions such as `a*b//b`; kept simple, they stay comparable.


def quotient(a: Any, b: Any) -> Any:
    """Return `a // b` where b divides a, without the division if the expressions cancel."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    symbolic = a if isinstance(a, torch.SymInt) else b
    shape_env = symbolic.node.shape_env
    ratio = sympy.cancel(expression(a) / expression(b))
    if sympy.denom(ratio) != 1 or ratio.has(FloorDiv, Mod, PythonMod):
        return a // b
    if ratio.is_Integer:
        return int(ratio)
    value = a // b
    hint = value.node.hint if isinstance(value, torch.SymInt) else value
    return shape_env.create_symintnode(ratio, hint=hint)


def expression(size: Any) -> Any:
    """Convert a size to a sympy expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


_BINARY: dict[Any, Callable[[Any, Any], Any]] = {
    FloorDiv: operator.floordiv,
    Mod: operator.mod,
    PythonMod: operator.mod,
}


def compute(expr: Any, leaf: Callable[[Any], Node | None], call: Callable[..., Node]) -> Any:
    """Return a node (or int) of value `expr`.

    `leaf` finds a node that already has the value of an expression; `call` inserts `operator` calls on such nodes.
    Raises LookupError if a symbol has no node, or if the expression has an operation that graphs cannot express.
    """
    if expr.is_Integer:
        return int(expr)
    found = leaf(expr)
    if found is not None:
        return found
    parts = [compute(part, leaf, call) for part in expr.args] if expr.args else []
    if isinstance(expr, sympy.Add | sympy.Mul):
        word = operator.add if isinstance(expr, sympy.Add) else operator.mul
        return reduce(lambda x, y: call(word, x, y), parts)
    if isinstance(expr, sympy.Pow) and isinstance(parts[1], int) and parts[1] > 0:
        return reduce(lambda x, y: call(operator.mul, x, y), [parts[0]] * parts[1])
    if type(expr) in _BINARY:
        return call(_BINARY[type(expr)], *parts)
    raise LookupError(f"no node of the graph has the size {expr}")
