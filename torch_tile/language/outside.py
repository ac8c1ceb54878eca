# SPDX-License-Identifier: Apache-2.0
"""Make keys of what a kernel is compiled for: compile-time arguments, and what its function reads from outside.

Two values share a key only if kernels cannot tell them apart. What a helper function or a macro reads belongs to the
key of the kernel that calls it. Libraries (Python's own, torch, NumPy, torch_tile) count as constant. A later call
makes no keys while the same objects are found.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import functools
import operator
import struct
import sys
import threading
import weakref
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Container,
    Hashable,
    ItemsView,
    Iterator,
    KeysView,
    Mapping,
    ValuesView,
)
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from types import CellType, CodeType, FunctionType, MappingProxyType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Self

from torch_tile.ir.idmap import IdMap

PLAIN = (int, float, complex, str, bytes, bool, type(None))
CONSTANT = frozenset({*sys.stdlib_module_names, "torch", "numpy", "torch_tile"})
_UNCHANGING = frozenset({float, complex, bytes, tuple, frozenset})
_READS_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_READS_CELL = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
_READS_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_BETWEEN = frozenset({"CACHE", "EXTENDED_ARG", "PUSH_NULL"})


class Walk:
    """The way through one value's parts while its key is made: what it met, and how to see that nothing changed."""

    def __init__(self, inside: bool = False) -> None:
        self.inside = inside  # a function or a class
        self.met: IdMap[Any, int] = IdMap()
        self.unchanged: list[Callable[[], bool]] = []

    def meet(self, value: Any) -> int | None:
        """Return the number of an object that was met before; else give it one, and return None."""
        found = self.met.get(value)
        if found is None:
            self.met[value] = len(self.met)
        return found

    def parts(self, look: Callable[[], Collection[Any]]) -> tuple[Hashable, ...]:
        """Return keys of the parts that `look` finds. They are unchanged while it finds the same objects."""
        found = tuple(look())
        self.unchanged.append(functools.partial(_are_these, look, found))
        return tuple([exact_key(each, self) for each in found])

    def version(self, of: FunctionType | type) -> Hashable:
        """Return a key of what a function reads or a class has; inside of another version its parts are that."""
        found = _version_of(of)
        return self.parts(found.look) if self.inside else found()

    def compared(self, look: Callable[[], Hashable]) -> Hashable:
        """Return the key that `look` makes of a value without parts. It is unchanged while that is equal."""
        found = look()
        self.unchanged.append(lambda: look() == found)
        return found


def _are_these(look: Callable[[], Collection[Any]], found: tuple[Any, ...]) -> bool:
    """Return whether `look` finds these very objects."""
    now = look()
    return len(now) == len(found) and all(map(operator.is_, now, found))


class _Itself(weakref.ref[Any]):
    """An object by its identity, as keys hold it: they do not keep it alive. A dead one equals no other key."""

    __slots__ = ("number",)
    number: int

    def __new__(cls, value: Any) -> Self:
        """Refer to an object. A later one at its address has its number, which `__eq__` tells apart."""
        made = super().__new__(cls, value)
        made.number = hash(object.__hash__(value))
        return made

    def __eq__(self, other: object) -> bool:
        value = self()
        return self is other or (isinstance(other, _Itself) and value is not None and value is other())

    def __hash__(self) -> int:
        return hash(self.number)


def _itself(value: Any) -> Hashable:
    """Return a key of an object that is compared by identity."""
    try:
        return _Itself(value)
    except TypeError:  # a class with slots alone, a proxy
        return value  # type: ignore[no-any-return]


class Found:
    """What a `Version` found at one time: it stands for the key of it."""

    __slots__ = ("parts",)

    def __init__(self, parts: Hashable):
        self.parts: Hashable = parts


def is_dead(key: Any) -> bool:
    """Return whether a key names an object that is no more, so that no later key equals it."""
    if isinstance(key, tuple | frozenset):
        return any(map(is_dead, key))
    return is_dead(key.parts) if type(key) is Found else type(key) is _Itself and key() is None


def forget_dead(kept: dict[Any, Any]) -> None:
    """Remove what is kept for objects that are no more."""
    for key in filter(is_dead, list(kept)):  # other threads may add to it
        kept.pop(key, None)


def exact_key(value: Any, walk: Walk | None = None) -> Hashable:
    """Make a cache key of a compile-time value; two values share it only if kernels cannot tell them apart.

    So 0.0 and -0.0 differ, as do True, 1 and 1.0, and NaNs of different bits. The same holds in containers and
    dataclasses. An object of an author's class has its attributes and its class in its key, because they may change.
    A function has what it reads from outside. `walk` is the way to a value inside a larger one.
    """
    kind = type(value)
    if kind is int or kind is str or kind is bool or value is None:
        return kind, value
    walk = walk or Walk()
    if kind in _UNCHANGING:
        return kind, _contents_key(value, walk)
    if isinstance(value, MethodType | staticmethod | classmethod):
        return kind, exact_key(value.__func__, walk), exact_key(getattr(value, "__self__", None), walk)
    if isinstance(value, property):
        return kind, exact_key(value.fget, walk)
    if isinstance(value, ModuleType):
        return kind, value
    if (number := walk.meet(value)) is not None:
        return kind, "met", number
    if isinstance(value, FunctionType):
        author = _author(value)
        return (kind, _itself(value)) if author is None else (kind, _itself(value), walk.version(author))
    if isinstance(value, type):
        return (kind, value) if is_constant(value) else (kind, value, walk.version(value))
    contents = _contents_key(value, walk)
    if not _has_attributes(value):
        return kind, contents
    own = functools.partial(_own_attributes, value)
    return kind, contents, walk.parts(own), walk.parts(lambda: own().values()), exact_key(value.__class__, walk)


def _contents_key(value: Any, walk: Walk) -> Hashable:
    """Return a key of what an object is without its attributes: its number, its items, or what it compares by."""
    kind = type(value)
    if isinstance(value, float):
        return struct.pack("d", value)
    if isinstance(value, complex):
        return struct.pack("dd", value.real, value.imag)
    if isinstance(value, tuple):
        return tuple([exact_key(each, walk) for each in value])
    if isinstance(value, frozenset):
        return frozenset([exact_key(each, walk) for each in value])
    if isinstance(value, list | deque | KeysView | ValuesView | ItemsView):
        return walk.parts(lambda: value)
    if isinstance(value, dict | MappingProxyType):
        return walk.parts(value.keys), walk.parts(value.values)
    if isinstance(value, set):
        return frozenset(walk.parts(lambda: value))
    if isinstance(value, functools.partial):
        return walk.parts(lambda: (value.func, value.args, value.keywords))
    if isinstance(value, weakref.ref):
        return walk.parts(lambda: [value()])
    if isinstance(value, ContextVar):
        return walk.parts(lambda: [value.get(ContextVar)])  # a class stands for unset: None may be set
    if kind.__module__ == "numpy" and hasattr(value, "tobytes"):
        items = walk.parts(lambda: _items(value)) if value.dtype.hasobject else None
        return items, walk.compared(lambda: _array_key(value))
    if _is_torch(value, "Tensor"):
        return _itself(value), walk.compared(lambda: repr(value.tolist()) if value.is_inference() else value._version)
    if is_dataclass(value):  # not as it compares: 0.0 equals -0.0
        names = [] if _has_attributes(value) else [each.name for each in fields(value)]
        return walk.parts(lambda: [getattr(value, name, None) for name in names])
    hashed: Any = kind.__hash__
    if hashed is None:
        return walk.compared(lambda: repr(value))
    if hashed is object.__hash__:
        return _itself(value)
    walk.compared(lambda: hash(value))
    itself: Hashable = value
    return itself


def _items(value: Any) -> list[Any]:
    """Return the items of a NumPy array of objects; of records, the fields."""
    names = value.dtype.names
    return list(value.flat) if names is None else [value[name] for name in names]


def _array_key(value: Any) -> Hashable:
    """Return the dtype, the shape and the bytes of a NumPy array or number; no bytes of objects."""
    return str(value.dtype), value.shape, None if value.dtype.hasobject else value.tobytes()


def _has_attributes(value: Any) -> bool:
    """Return whether a program may change attributes of an object or a class: not those of most of a library's."""
    if not is_constant(value):
        return True
    bears = type(value).__hash__ is None or isinstance(value, functools.partial | threading.local)
    return hasattr(value, "__dict__") and (bears or _is_torch(value, "Tensor"))


def _is_torch(value: Any, name: str) -> bool:
    """Return whether an object is of the class that torch has under this name, as "nn.Module"."""
    return "torch" in sys.modules and isinstance(value, operator.attrgetter(name)(sys.modules["torch"]))


def _may_read(value: Any) -> bool:
    """Return whether the attribute that a kernel reads of an object is looked at; of a tensor all are.

    A program may set options of torch's layers, as `norm.eps`.
    """
    if isinstance(value, ModuleType) or _is_torch(value, "nn.Module"):
        return True
    return _has_attributes(value) and not _is_torch(value, "Tensor")


def _own_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes that an object keeps itself, those in slots included."""
    slots = [] if is_constant(value.__class__) else _version_of(value.__class__).slots  # a proxy's is its object's
    own: dict[str, Any] = getattr(value, "__dict__", {})
    return own | {name: getattr(value, name, None) for name in slots} if slots else own


def is_constant(value: Any) -> bool:
    """Return whether a module, a class, a function or an object is a library's, which no program changes."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    if name is None:
        name = type(value).__module__
    return isinstance(name, str) and name.partition(".")[0] in CONSTANT


@dataclass(frozen=True)
class OuterRead:
    """One value that a function reads: a global name or a variable around it, and attributes from there."""

    name: str
    cell: CellType | None
    attributes: tuple[str, ...]

    def current_value(self, names: Mapping[str, Any]) -> Any:
        """Return the present value, or the object that lacks the next attribute; `OuterRead` for an unbound name."""
        return self.reached(names)[0]

    def reached(self, names: Mapping[str, Any]) -> tuple[Any, int]:
        """Return `current_value`, and the number of attributes on the way to it."""
        if self.cell is None:
            found = names.get(self.name, OuterRead)
        else:
            try:
                found = self.cell.cell_contents
            except ValueError:  # not bound yet
                return OuterRead, 0
        for count, each in enumerate(self.attributes):
            if not _may_read(found):
                return found, count  # a number, a list, a tensor
            try:
                found = getattr(found, each)
            except AttributeError:
                return found, count
        return found, len(self.attributes)


class Version:
    """Tells apart what `look` finds at one time and another. It makes keys only where it finds other objects."""

    def __init__(self, of: FunctionType | type, look: Callable[[], Collection[Any]]):
        self.of: FunctionType | type = of
        self.look: Callable[[], Collection[Any]] = look
        self.found: dict[Hashable, Found] = {}  # one for each key of what was found
        self.last: tuple[list[Callable[[], bool]], Found | None] = [lambda: False], None

    def __call__(self) -> object:
        """Return an object that stands for what is found now, and what that reads: for equal values the same."""
        unchanged, found = self.last
        for each in unchanged:
            if not each():
                break
        else:
            return found
        walk = Walk(inside=True)
        walk.meet(self.of)
        parts = walk.parts(self.look)
        if parts not in self.found:
            forget_dead(self.found)
            self.found[parts] = Found(parts)
        found = self.found[parts]
        self.last = walk.unchanged, found
        return found


class Attributes(Version):
    """The attributes of an author's class and of those that it is made of. `slots` are names of such of its objects."""

    def __init__(self, of: type):
        super().__init__(of, self.names_and_values)
        self.classes: list[type] = [each for each in reversed(of.__mro__) if not is_constant(each)]
        self.slots: list[str] = [name for name, each in self.kept().items() if isinstance(each, MemberDescriptorType)]

    def kept(self) -> dict[str, Any]:
        """Return the attributes as classes keep them: functions, not methods."""
        found: dict[str, Any] = {}
        for each in self.classes:
            found |= {n: v for n, v in vars(each).items() if n[:2] != "__" or isinstance(v, FunctionType)}
        return found

    def names_and_values(self) -> list[Any]:
        """Return the names of the attributes, and their values."""
        kept = self.kept()
        return [*kept, *kept.values()]


class Outside(Version):
    """What a function reads from its globals and outer variables, for which values a kernel was compiled."""

    def __init__(self, function: FunctionType):
        super().__init__(function, self.values)
        self.function: FunctionType = function
        self.globals: dict[str, Any] = function.__globals__
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        own = {*function.__code__.co_varnames, *function.__code__.co_cellvars}  # that annotations name
        reads = dict.fromkeys(each for code in _codes(function) for each in _reads_of(code, cells.keys(), own))
        written = [each for each in reads if each[0].isidentifier() and each[0][:2] != "__"]  # by the author
        found = [OuterRead(name, cells.get(name), attributes) for name, attributes in written]
        of_library = is_constant(function)
        self.reads: list[OuterRead] = [each for each in found if self._may_change(each, of_library)]

    def values(self) -> list[Any]:
        """Return what the function reads now, and the defaults of its parameters."""
        read = [each.current_value(self.globals) for each in self.reads]
        return [*read, self.function.__defaults__, self.function.__kwdefaults__]

    def _may_change(self, read: OuterRead, of_library: bool) -> bool:
        """Return whether a program may bind a name anew, or change what it stands for."""
        root = OuterRead(read.name, read.cell, ()).current_value(self.globals)
        if of_library:
            return isinstance(root, (*PLAIN, tuple))
        if root is OuterRead:
            return not hasattr(builtins, read.name)
        return not (isinstance(root, ModuleType) and is_constant(root))


def readers(function: FunctionType) -> tuple[FunctionType, ...]:
    """Return functions that return the plain values among what a function and its helpers read now.

    Dynamo can inline these, and so guards a graph by the values.
    """
    made: list[FunctionType] = []
    todo, seen = [function], []
    while todo:
        each = todo.pop()
        seen.append(each)
        read = Outside(each)
        texts = []
        for found in read.reads:
            value, count = found.reached(read.globals)
            helpers, leaves = _leaves(".".join((found.name, *found.attributes[:count])), value)
            todo += [helper for helper in helpers if not any(helper is other for other in seen)]
            texts += leaves
        if texts:
            made.append(_value_getter(each, tuple(texts)))
    return tuple(made)


def _leaves(text: str, value: Any, around: tuple[Any, ...] = ()) -> tuple[list[FunctionType], list[str]]:
    """Return the functions of the author's in a value, and the expressions of the plain values in it.

    `text` is the expression of `value`, and `around` holds the values that it is a part of.
    """
    if any(value is each for each in around) or isinstance(value, ModuleType):
        return [], []
    helpers: list[FunctionType] = []
    leaves: list[str] = [text] if isinstance(value, PLAIN) else []
    parts: list[tuple[str, Any]] = []
    if isinstance(value, FunctionType):
        author = _author(value)
        if author is None:
            return [], []
        helpers, leaves = [author], [f"id({text})"]
        parts = [(f"{text}.{name}", getattr(value, name)) for name in ("__defaults__", "__kwdefaults__")]
    elif isinstance(value, MethodType):
        parts = [(f"{text}.{name}", getattr(value, name)) for name in ("__func__", "__self__")]
    elif isinstance(value, list | tuple | deque):
        parts = [(f"{text}[{n}]", part) for n, part in enumerate(value)]
    elif isinstance(value, dict | MappingProxyType):
        parts = [(f"{text}[{name!r}]", part) for name, part in value.items() if isinstance(name, str | int)]
    elif isinstance(value, functools.partial):
        parts = [(f"{text}.{name}", getattr(value, name)) for name in ("func", "args", "keywords")]
    elif type(value) is weakref.ref:
        parts = [(f"{text}()", value())]
    if not isinstance(value, FunctionType | MethodType | functools.partial) and _has_attributes(value):
        kind = value if isinstance(value, type) else type(value)
        kept_by_class = {} if is_constant(kind) else _version_of(kind).kept()
        for name, kept in (kept_by_class | ({} if kind is value else _own_attributes(value))).items():
            function = kept.fget if isinstance(kept, property) else getattr(kept, "__func__", kept)
            if isinstance(function, FunctionType) and name not in getattr(value, "__dict__", ()):  # its class's
                helpers += filter(None, [_author(function)])
            elif name.isidentifier():
                parts.append((f"{text}.{name}", kept))
    for name, part in parts:
        below = _leaves(name, part, (*around, value))
        helpers += below[0]
        leaves += below[1]
    return helpers, leaves


def _value_getter(function: FunctionType, texts: tuple[str, ...]) -> FunctionType:
    """Return a function beside `function` that returns the values of these expressions; equal ones are made once."""
    kept: dict[Any, FunctionType] = function.__dict__.setdefault("__tile_readers__", {})
    if texts not in kept:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        source = f"def around({', '.join(cells)}):\n    def read(): return ({', '.join(texts)},)\n"
        around = next(c for c in compile(source, "<reads>", "exec").co_consts if isinstance(c, CodeType))
        code = next(c for c in around.co_consts if isinstance(c, CodeType))
        closure = tuple(cells[name] for name in code.co_freevars)
        kept[texts] = FunctionType(code, function.__globals__, "read", None, closure)
    return kept[texts]


def _author(function: FunctionType) -> FunctionType | None:
    """Return the author's function behind a macro, or the function itself; None for a library's."""
    found = getattr(function, "__wrapped__", function) if is_constant(function) else function
    return found if isinstance(found, FunctionType) and not is_constant(found) else None


def _version_of(holder: Any) -> Any:
    """Return the `Outside` of a helper function or the `Attributes` of a class. It is made once, and kept there."""
    found = vars(holder).get("__tile_version__")
    if found is None or found.of is not holder:  # functools.wraps copies what a function holds
        is_class = isinstance(holder, type)
        found = Attributes(holder) if is_class else Outside(holder)
        with contextlib.suppress(TypeError):  # of a compiled extension
            (type if is_class else object).__setattr__(holder, "__tile_version__", found)
    return found


def _codes(function: FunctionType) -> Iterator[CodeType]:
    """Return the codes of a function, of functions inside it and of the annotations of its variables."""
    from torch_tile.language.rewrite import source_tree
    from torch_tile.language.syntax_nodes import nodes_of

    todo = [function.__code__]
    while todo:
        code = todo.pop()
        yield code
        todo += [each for each in code.co_consts if isinstance(each, CodeType)]
    try:
        tree = source_tree(function)
    except Exception:  # a helper without a source, or a lambda
        return
    for node in nodes_of(tree):
        if isinstance(node, ast.AnnAssign):
            yield compile(ast.Expression(node.annotation), "<annotation>", "eval")


def _reads_of(code: CodeType, cells: Container[str], own: Container[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Return the names that a code reads from outside, with attributes; `cells` and `own` are its variables."""
    name, attributes = "", []
    for step in dis.get_instructions(code):
        if name and step.opname in _READS_ATTRIBUTE:
            attributes.append(step.argval)
        elif step.opname not in _BETWEEN:
            if name:
                yield name, tuple(attributes)
            attributes, name = [], step.argval if step.opname in _READS_GLOBAL | _READS_CELL else ""
            if (step.opname in _READS_CELL and name not in cells) or (step.opname == "LOAD_NAME" and name in own):
                name = ""
    if name:
        yield name, tuple(attributes)
