# SPDX-License-Identifier: Apache-2.0
"""Base of every IR node: a frozen dataclass with a span, walked and rebuilt through its fields.

Nodes are never changed. A rewrite that changes nothing returns the very same object, so `is` answers "did this pass do
anything?". `==` on expressions builds a comparison of the language; `equal` and `alike` below compare nodes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from operator import is_
from typing import Any, ClassVar, TypeVar, dataclass_transform, overload

from torch_tile.diagnostics.errors import Span, span_source

N = TypeVar("N", bound="Node")
T = TypeVar("T")
A = TypeVar("A", bound="Node")
B = TypeVar("B", bound="Node")
C = TypeVar("C", bound="Node")
_BITS: dict[str, int] = {}
_POSITIONS = itertools.count()


def _bit(name: str) -> int:
    """Return the bit of a name of a node class."""
    return _BITS.setdefault(name, 1 << next(_POSITIONS))


@dataclass_transform(eq_default=False, frozen_default=True, field_specifiers=(field,))
def node_class(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass of nodes whose constructor fills `__dict__`, in half the usual time."""
    made: Any = dataclass(frozen=True, eq=False, repr=False)(cls)
    for f in fields(made):
        if f.default_factory is not MISSING or not f.init or f.kw_only != (f.name == "span"):
            raise TypeError(f"{cls.__name__}.{f.name}: fields of nodes are positional, and their defaults are values")
    slow = made.__init__
    given = {f.name: f"={f.name}_default" * (f.default is not MISSING) for f in fields(made)}
    body = "; ".join(f"values[{name!r}] = {name}" for name in given)
    positional = ", ".join(f"{name}{default}" for name, default in given.items() if name != "span")
    text = f"def __init__(self, {positional}{', ' * bool(positional)}*, span=span_default):\n"
    text += f" values = self.__dict__; {body}\n self.__post_init__()"
    names: dict[str, Any] = {f"{f.name}_default": f.default for f in fields(made)}
    exec(text, names)
    made.__init__ = functools.update_wrapper(names["__init__"], slow)
    del made.__init__.__wrapped__
    return cls


@node_class
class Node:
    """Base of all nodes, hashed by identity. `span` is where the author wrote it, and is never compared."""

    is_symbol: ClassVar[bool] = False
    # Fields that introduce a symbol (a loop variable, an allocated buffer) instead of using it.
    binders: ClassVar[tuple[str, ...]] = ()
    # Fields that are not printed, and that comparisons leave out.
    unsaid: ClassVar[tuple[str, ...]] = ()
    bit: ClassVar[int] = _bit("Node")
    bits: ClassVar[int] = bit  # and those of the base classes
    span: Span | None = field(default=None, kw_only=True)

    def __init_subclass__(cls) -> None:
        cls.bit = _bit(cls.__name__)
        cls.bits |= cls.bit

    def __post_init__(self) -> None:
        if self.span is None and span_source:
            object.__setattr__(self, "span", span_source[-1]())

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields. Facts kept beside them refer to objects of this process."""
        return {name: value for name, value in self.__dict__.items() if name[0] != "_"}

    def __repr__(self) -> str:
        return printers[-1](self) if printers else f"<{type(self).__name__}>"


printers: list[Callable[[Node], str]] = []
"""What prints nodes: ir/printer.py puts itself here."""


NONE: frozenset[Any] = frozenset()
_LAYOUTS: dict[type, tuple[tuple[str, ...], tuple[str, ...]]] = {}


def _layout(cls: type[Node]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of fields with children, and of all fields that comparisons look at."""
    found = _LAYOUTS.get(cls)
    if found is None:
        found = _LAYOUTS[cls] = _find_layout(cls)
    return found


def _find_layout(cls: type[Node]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the field names of a node class: the child fields, and all fields."""
    names = tuple(f.name for f in fields(cls) if f.name != "span")
    return tuple(name for name in names if name not in cls.binders), names


def field_names(node: Node) -> tuple[str, ...]:
    """Return all fields of `node` except its span."""
    return _layout(type(node))[1]


def children(node: Node) -> tuple[Node, ...]:
    """Return the nodes that `node` uses, in field order, without symbols that it introduces."""
    found: tuple[Node, ...] | None = node.__dict__.get("_children")
    if found is None:  # kept: passes walk over unchanged nodes again and again
        below: list[Node] = []
        if not node.is_symbol:
            _add_nodes([node.__dict__[name] for name in _layout(type(node))[0]], below)
        found = node.__dict__["_children"] = tuple(below)
    return found


def _add_nodes(values: Iterable[object], found: list[Node]) -> None:
    """Append the nodes in values and nested tuples."""
    for value in values:
        if isinstance(value, Node):
            found.append(value)
        elif type(value) is tuple:
            _add_nodes(value, found)


def walk(node: Node) -> Iterator[Node]:
    """Iterate over `node` and everything below it, parents first."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        below = node.__dict__.get("_children")
        waiting += reversed(children(node) if below is None else below)


def contents(node: Node) -> int:
    """Return the bits of all node classes that occur in the node or below it; the result is kept with the node."""
    found: int | None = node.__dict__.get("_contents")
    if found is None:
        found = node.bits
        for child in children(node):
            found |= contents(child)
        node.__dict__["_contents"] = found
    return found


@overload
def find(node: Node, a: type[A], /) -> Iterator[A]: ...
@overload
def find(node: Node, a: type[A], b: type[B], /) -> Iterator[A | B]: ...
@overload
def find(node: Node, a: type[A], b: type[B], c: type[C], /, *more: type[Node]) -> Iterator[A | B | C]: ...
def find(node: Node, *kinds: type[Node]) -> Iterator[Node]:
    """Find the nodes of `walk` that are of one of `kinds`; skip subtrees that contain none."""
    wanted = 0
    for kind in kinds:
        wanted |= kind.bit
    if not contents(node) & wanted:
        return
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, kinds):
            yield node
        below = node.__dict__["_children"]  # `contents` has asked for them
        waiting += [each for each in reversed(below) if each.__dict__["_contents"] & wanted]


def contains(node: Node, *kinds: type[Node]) -> bool:
    """Return whether the node, or a node below it, is of one of `kinds`."""
    return any(True for _ in find(node, *kinds))


def symbols(node: Node) -> frozenset[Any]:
    """Return the symbols, Var and Buffer, used by `node` or below it; the result is kept with the node."""
    found: frozenset[Any] | None = node.__dict__.get("_symbols")
    if found is None:
        if node.is_symbol:
            return frozenset((node,))  # kept, it would keep the symbol alive
        found = node.__dict__["_symbols"] = NONE.union(*map(symbols, children(node)))
    return found


def map_children(node: N, f: Callable[[Any], Any]) -> N:
    """Apply `f` to each child of `node`; return the same object if no child changed."""
    old = children(node)
    new = [f(child) for child in old]
    if all(map(is_, old, new)):
        return node
    source = iter(new)
    return rebuilt(node, **{name: _refilled(getattr(node, name), source) for name in _layout(type(node))[0]})


def _refilled(value: Any, source: Iterator[Any]) -> Any:
    """Return a field with its nodes replaced by the next nodes of `source`."""
    if isinstance(value, Node):
        return next(source)
    return tuple([_refilled(item, source) for item in value]) if isinstance(value, tuple) else value


def rebuilt(node: N, **changed: Any) -> N:
    """Replace fields of `node` as `dataclasses.replace` does, in a third of its time."""
    new = object.__new__(type(node))
    new.__dict__.update({name: node.__dict__[name] for name in _layout(type(node))[1]}, span=node.span)
    new.__dict__.update(changed)
    new.__post_init__()
    return new


def with_fields(node: N, **values: Any) -> N:
    """Return `node` with other values of fields; return the same object if each field holds its value already."""
    same = all(_is_held(node.__dict__[name], value) for name, value in values.items())
    return node if same else rebuilt(node, **values)


def _is_held(old: object, new: object) -> bool:
    """Return whether a field holds the very object, or a tuple of the very objects."""
    if isinstance(old, tuple) and isinstance(new, tuple):
        return len(old) == len(new) and all(map(is_, old, new))
    return old is new


class Visitor:
    """Finds the method for a node by its class, as `visit_For` for each `For`, or by its nearest base class."""

    def method_of(self, node: Node) -> Callable[..., Any] | None:
        """Return the bound method that handles `node`, or None."""
        found = _method(type(self), type(node))
        return None if found is None else found.__get__(self)


class Rewriter(Visitor):
    """Rewrite nodes bottom-up or top-down by methods named after node classes; walk through nodes without a method.

    `def visit_For(self, node)` handles every `For`; `self.children(node)` goes down. A new node without a span takes
    the span of the node that it replaces. Subtrees for which there is no method are skipped.
    """

    handled: ClassVar[int] = 0  # bits of the classes that have a method

    def __init_subclass__(cls) -> None:
        for name in tuple(vars(cls)):
            if name.startswith(VISIT):
                cls.handled |= _bit(name.removeprefix(VISIT))

    def __call__(self, node: Any) -> Any:
        """Rewrite `node` with the method of its class, or of the nearest base class that has one."""
        if not (node.__dict__.get("_contents") or contents(node)) & self.handled:
            return node
        handler = _method(type(self), type(node))
        new = map_children(node, self) if handler is None else handler(self, node)
        if new is not node and isinstance(new, Node) and new.span is None and not new.is_symbol and node.span:
            new = rebuilt(new, span=node.span)
        return new

    def children(self, node: N) -> N:
        """Return `node` with its children rewritten."""
        return map_children(node, self)


VISIT = "visit_"
_METHODS: dict[tuple[type, type], Any] = {}


def _method(visitor: type, node: type) -> Any:
    """Return the visitor's method for a node's class or its nearest base class; cached."""
    key = visitor, node
    if key not in _METHODS:
        methods = (getattr(visitor, VISIT + cls.__name__, None) for cls in node.__mro__ if cls is not Node)
        _METHODS[key] = next((m for m in methods if m is not None), None)
    return _METHODS[key]


def equal(a: object, b: object) -> bool:
    """Return whether two nodes have the same structure, with the very same symbols."""
    return a is b or _is_same(a, b, None)


def alike(a: object, b: object) -> bool:
    """Return whether two nodes have the same structure up to symbols (variables and buffers) renamed one to one."""
    return _is_same(a, b, ({}, {}))


def _is_same(a: Any, b: Any, names: tuple[dict[Node, Node], dict[Node, Node]] | None) -> bool:
    """Compare two nodes structurally, with bound variables renamed."""
    if isinstance(a, Node):
        if type(a) is not type(b):
            return False
        if a.is_symbol:
            if names is None:
                return a is b
            forward, backward = names
            if a in forward or b in backward:
                return forward.get(a) is b and backward.get(b) is a
            forward[a], backward[b] = b, a
        return all(
            (a.is_symbol and name == "name") or name in a.unsaid or _is_same(getattr(a, name), getattr(b, name), names)
            for name in field_names(a)
        )
    if isinstance(a, tuple):
        return (
            isinstance(b, tuple) and len(a) == len(b) and all(_is_same(x, y, names) for x, y in zip(a, b, strict=True))
        )
    if isinstance(a, float) and isinstance(b, float):  # nan is like nan, 0.0 is not like -0.0
        return (a != a and b != b) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return type(a) is type(b) and bool(a == b)
