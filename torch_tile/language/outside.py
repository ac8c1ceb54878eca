# SPDX-License-Identifier: Apache-2.0
"""Make keys of what a kernel is compiled for: compile-time arguments, and what its function reads from outside.

Two values share a key only if kernels cannot tell them apart. What a helper function or a macro reads belongs to the
key of the kernel that calls it. Libraries (Python's own, torch, NumPy, torch_tile) count as constant.
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import struct
import sys
from collections.abc import Callable, Container, Hashable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

PLAIN = (int, float, complex, str, bytes, bool, type(None))
CONSTANT = frozenset({*sys.stdlib_module_names, "torch", "numpy", "torch_tile"})
_READS_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_READS_CELL = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
_READS_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_BETWEEN = frozenset({"CACHE", "EXTENDED_ARG", "PUSH_NULL"})


def exact_key(value: Any, around: tuple[Any, ...] = ()) -> Hashable:
    """Make a cache key of a compile-time value; two values share it only if kernels cannot tell them apart.

    So 0.0 and -0.0 differ, as do True, 1 and 1.0, and NaNs of different bits. The same holds in containers and
    dataclasses. An object that is compared by identity has its attributes in its key, because they may change.
    A function has what it reads from outside. `around` holds the values whose keys are being made.
    """
    kind = type(value)
    if kind is int or kind is str or kind is bool or value is None:
        return kind, value
    if isinstance(value, float):
        return kind, struct.pack("d", value)
    if isinstance(value, complex):
        return kind, struct.pack("dd", value.real, value.imag)
    if isinstance(value, bytes):
        return kind, value
    if around and any(value is each for each in around):
        return kind, "itself"
    inner = functools.partial(exact_key, around=(*around, value))
    if isinstance(value, list | tuple):
        return kind, tuple(map(inner, value))
    if isinstance(value, dict):
        return kind, tuple((inner(k), inner(v)) for k, v in value.items())
    if isinstance(value, set | frozenset):
        return kind, frozenset(map(inner, value))
    if kind.__module__ == "numpy" and hasattr(value, "tobytes"):
        return kind, str(value.dtype), value.shape, repr(value) if value.dtype.hasobject else value.tobytes()
    if is_dataclass(value) and not isinstance(value, type):
        return kind, tuple(inner(getattr(value, each.name)) for each in fields(value))
    if isinstance(value, functools.partial):
        return kind, inner(value.func), inner(value.args), inner(value.keywords)
    if isinstance(value, MethodType):
        return kind, inner(value.__func__), inner(value.__self__)
    if isinstance(value, FunctionType):
        return (kind, value, *_read_by(value, inner))
    try:
        hash(value)
    except TypeError:
        return kind, repr(value)
    if "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):  # its numbers change in place
        return kind, value, 0 if value.is_inference() else value._version
    own = vars(value) if isinstance(value, type) or _is_compared_by_identity(kind) else {}
    if own and not isinstance(value, ModuleType) and not is_constant(value):
        return kind, value, tuple((n, inner(v)) for n, v in own.items() if not n.startswith("__") and _changes(v))
    return kind, value


def _is_compared_by_identity(kind: type) -> bool:
    """Return whether two objects of a class are equal only if they are one object, and it keeps attributes."""
    compares: Any = kind.__eq__
    return compares is object.__eq__ and kind.__dictoffset__ != 0


def _changes(value: Any) -> bool:
    """Return whether an attribute of an object belongs to its key: modules and classes do not."""
    return not isinstance(value, ModuleType | type)


def is_constant(value: Any) -> bool:
    """Return whether a module, a class, a function or an object is a library's, which no program changes."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    if name is None:
        name = type(value).__module__
    return isinstance(name, str) and name.partition(".")[0] in CONSTANT


@dataclass(frozen=True)
class Read:
    """One value that a function reads: a global name or a variable around it, and attributes from there."""

    name: str
    cell: CellType | None
    attributes: tuple[str, ...]

    def value(self, names: Mapping[str, Any]) -> Any:
        """Return the value now, or the object before an attribute that is missing; `Read` if a name is unbound."""
        if self.cell is None:
            found = names.get(self.name, Read)
        else:
            try:
                found = self.cell.cell_contents
            except ValueError:  # not bound yet
                return Read
        for each in self.attributes:
            if not isinstance(found, ModuleType) and is_constant(found if isinstance(found, type) else type(found)):
                return found  # a number, a list, a tensor
            try:
                found = getattr(found, each)
            except AttributeError:
                return found
        return found


class Outside:
    """Collect what a function reads from its globals and enclosing functions. Calling it gives keys of that now.

    A kernel that was compiled for other values is not the kernel for these.
    """

    def __init__(self, function: FunctionType):
        self.function = function
        self.globals: dict[str, Any] = function.__globals__
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        own = {*function.__code__.co_varnames, *function.__code__.co_cellvars}  # that annotations name
        reads = dict.fromkeys(each for code in _codes(function) for each in _reads_of(code, cells.keys(), own))
        found = [Read(name, cells.get(name), attributes) for name, attributes in reads if not name.startswith("__")]
        of_library = is_constant(function)
        self.reads: list[Read] = [each for each in found if self._may_change(each, of_library)]

    def _may_change(self, read: Read, of_library: bool) -> bool:
        """Return whether a program may bind a name anew, or change what it stands for."""
        root = Read(read.name, read.cell, ()).value(self.globals)
        if of_library:
            return isinstance(root, (*PLAIN, tuple))
        if root is Read:
            return not hasattr(builtins, read.name)
        return not (isinstance(root, ModuleType) and is_constant(root))

    def __call__(self, key: Callable[[Any], Any]) -> tuple[Any, ...]:
        """Return `key` of each value."""
        return tuple(key(each.value(self.globals)) for each in self.reads)


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
            helpers, leaves = _leaves(".".join((found.name, *found.attributes)), found.value(read.globals))
            todo += [helper for helper in helpers if not any(helper is other for other in seen)]
            texts += leaves
        if texts:
            made.append(_reader(each, tuple(texts)))
    return tuple(made)


def _leaves(text: str, value: Any, around: tuple[Any, ...] = ()) -> tuple[list[FunctionType], list[str]]:
    """Return the functions of the author's in a value, and the expressions of the plain values in it.

    `text` is the expression of `value`, and `around` holds the values that it is a part of.
    """
    if isinstance(value, PLAIN):
        return [], [text]
    if isinstance(value, FunctionType):
        author = _author(value)
        return ([], []) if author is None else ([author], [f"id({text})"])
    parts: list[tuple[str, Any]] = []
    if isinstance(value, list | tuple):
        parts = [(f"{text}[{n}]", part) for n, part in enumerate(value)]
    elif isinstance(value, dict):
        parts = [(f"{text}[{name!r}]", part) for name, part in value.items() if isinstance(name, str | int)]
    elif not any(map(is_constant, value.__mro__[:-1] if isinstance(value, type) else type(value).__mro__[:-1])):
        own = getattr(value, "__dict__", {})  # of an author's class, or of an object that no library's class made
        parts = [(f"{text}.{name}", part) for name, part in own.items() if not name.startswith("__")]
    if any(value is each for each in around):
        return [], []
    found = [_leaves(name, part, (*around, value)) for name, part in parts]
    return [f for functions, _ in found for f in functions], [t for _, texts in found for t in texts]


def _reader(function: FunctionType, texts: tuple[str, ...]) -> FunctionType:
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


def _read_by(function: FunctionType, key: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Return `key` of what a helper function or macro reads. Its reads are found once, and kept at the function."""
    author = _author(function)
    if author is None:
        return ()
    found: Outside | None = author.__dict__.get("__tile_outside__")
    if found is None or found.function is not author:  # functools.wraps copies what a function holds
        found = author.__dict__["__tile_outside__"] = Outside(author)
    return found(key)


def _codes(function: FunctionType) -> Iterator[CodeType]:
    """Return the codes of a function, of functions inside it and of the annotations of its variables."""
    from torch_tile.language.rewrite import source_tree

    todo = [function.__code__]
    while todo:
        code = todo.pop()
        yield code
        todo += [each for each in code.co_consts if isinstance(each, CodeType)]
    try:
        tree = source_tree(function)
    except Exception:  # a helper without a source, or a lambda
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            yield compile(ast.Expression(node.annotation), "<annotation>", "eval")


def _reads_of(code: CodeType, cells: Container[str], own: Container[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Return the names that a code reads from outside, each with the attributes that follow.

    `cells` are the names of the variables around the function, `own` those of its variables.
    """
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
