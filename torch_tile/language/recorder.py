# SPDX-License-Identifier: Apache-2.0
"""The recorder answers the calls that rewrite.py puts into one run of an author's function.

Every method meets values of two worlds. On Python's values it acts at once, as Python would. For the device's values it
records a statement or expression.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch_tile.diagnostics.errors import TileError, diagnose, error
from torch_tile.diagnostics.kernel_warnings import warn_of
from torch_tile.intrinsics import foreign
from torch_tile.intrinsics.base import is_pure
from torch_tile.ir.buffer import Region
from torch_tile.ir.dtype import DType, bool_
from torch_tile.ir.expr import Call, Const, Expr, Load, Var, Vector, binary, cast, is_number, select, truth, unary
from torch_tile.ir.node import Node, contains, find, walk
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Assert, Break, Continue, If, While
from torch_tile.language.branches import UNBOUND, Branches, is_same, is_scalar
from torch_tile.language.effects import is_of_launch
from torch_tile.language.loops import Grid, Loop, check_iterable, serial
from torch_tile.language.misuse import device_key_error
from torch_tile.language.threads import thread_binding
from torch_tile.language.trace import Scope, Tracer, author_span, close_body, let, make_variable, name_symbol, tracer
from torch_tile.language.values import AssignedType, Handle, TensorType, store_variable, stored
from torch_tile.language.vectors import VectorVariable


def _unpacked(names: int, values: int) -> TileError:
    """Build the error for an assignment of too many or too few values."""
    problem = f"{names} names are given to {values} value{'s'[: values != 1]}"
    fix = "give as many names as values, as in `M, N = T.const('M, N')`"
    return error("python_value", None, problem=problem, fix=fix)


_DEVICE = object()
_NEST = object()  # device loops that the author sees as one
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "Eq": operator.eq,
    "NotEq": operator.ne,
    "Lt": operator.lt,
    "LtE": operator.le,
    "Gt": operator.gt,
    "GtE": operator.ge,
    "Is": operator.is_,
    "IsNot": operator.is_not,
    "In": lambda a, b: a in b,
    "NotIn": lambda a, b: a not in b,
}
_KINDS = {"global": "tensor", "shared": "shared tile", "fragment": "fragment", "local": "array of the thread"}
_REGIONS = ("loop", "if", "else", "while", "role")


class Recorder:
    """Records one run of a rewritten function: the rewriter turns assignments, loops and branches into its methods.
    `on_annotate(name, annotation, value)` answers annotations in an eager kernel's body.

    `references` are elements of buffers that a macro was given for parameters of T.Ref.
    """

    def __init__(
        self,
        tracer: Tracer,
        on_annotate: Callable[[str, Any, Any], Any] | None = None,
        references: Mapping[str, Load] | None = None,
    ):
        self.tracer = tracer
        self.on_annotate = on_annotate
        self.references: Mapping[str, Load] | dict[str, Load] = references or {}  # elements behind names of T.Ref
        self.entry: Scope | None = tracer.scope
        self.bound_in: dict[str, Scope | None] = {}
        self.loops: list[Any] = []  # for each loop around: the scope in which Python runs it, or _DEVICE
        self.splits: list[Branches | None] = []  # for each `if` around: its names, or None where Python knew the branch
        self.carried: list[tuple[int, tuple[str, ...]]] = []  # for each device loop: its depth, and names it may carry
        self.leaves: list[list[list[Any]]] = []  # for each loop around: what names were bound to where it was left
        self.left: list[list[Any]] = []  # the same for the loop that has ended last
        self.broken: list[Any] = []  # for each loop around: whether a `break` was taken, a variable of a device loop
        self.broke: Any = False  # the same for the loop that has ended last
        self.passing: dict[str, Any] = {}  # numbers that loops bind names to which had others before
        self.kept: Any = None  # a value that Python itself stores
        self.now: dict[str, Any] = {}  # what names are bound to after a branch or loop

    unbound = UNBOUND

    # -- names ---------------------------------------------------------------------------------------------------------
    def bind(self, name: str, value: Any, old: Callable[[], Any], mutable: bool) -> Any:
        """Record `name = value`: a store into a variable, a named value, or plain Python."""
        previous = _current(old)
        scalar = isinstance(value, Expr) or is_number(value)
        fresh = _is_fresh(value)
        if isinstance(value, VectorVariable) and not value.named:
            value.name(name)
            return value
        if isinstance(previous, VectorVariable) and (scalar or isinstance(value, Vector | Region)):
            previous.store(value)
            return previous
        if isinstance(value, VectorVariable):
            value = value.value()
        if scalar and not fresh and isinstance(previous, Load) and previous.buffer.scope == "var":
            if not self.tracer.has_ended(previous.buffer):
                store_variable(previous, value)
                return previous
            if self.tracer.scope is not None:  # again a variable, so that no use after this region goes unnoticed
                init = value if isinstance(value, Expr) else stored(value, previous.buffer)
                return make_variable(name, init.dtype, init)
        if scalar and not fresh and name in self.references and previous is self.references[name]:
            store_variable(previous, value)
            return previous
        if previous is not UNBOUND:
            if (scalar or value is None) and not fresh:
                self._check_tile(name, previous, value)
            self._check_rebinding(name, previous, value)
        if not self._is_carried(name, previous):
            self.bound_in[name] = self.tracer.scope
        if isinstance(value, Handle) or fresh:
            name_symbol(value, name)
            return value
        if type(value) is TensorType:
            return AssignedType(value.shape, value.dtype, value.strides, value.align, name, author_span())
        if isinstance(value, Expr):
            if mutable and self.tracer.scope is not None:
                return make_variable(name, value.dtype, value)
            return let(name, value)
        return _read_now(name, value)

    def bind_many(
        self, names: tuple[str | None, ...], values: Any, olds: Any, mutable: tuple[bool, ...]
    ) -> tuple[Any, ...]:
        """Record `a, b = values`."""
        items = (values,) if isinstance(values, Expr) else tuple(values)
        if len(items) != len(names):
            raise _unpacked(len(names), len(items))
        # Read every value before the first store: a, b = b, a must swap.
        items = tuple(
            v.value()
            if isinstance(v, VectorVariable) and v.named
            else let(n or "t", v)
            if isinstance(v, Expr) and not _is_fresh(v)
            else v
            for n, v in zip(names, items, strict=True)
        )
        return tuple(self.bind(str(n), v, old, m) for n, v, old, m in zip(names, items, olds, mutable, strict=True))

    @staticmethod
    def assign_nonlocal(name: str, value: Any) -> Any:
        """Return the value for a `global` or `nonlocal` name. Raise TileError for a value that the device computes."""
        if isinstance(value, Expr | Handle | Region):
            what = f"`{name}` lives outside the kernel, where Python would keep an expression and no number"
            fix = "write the result into a tensor, or keep it in the kernel: T.alloc_var(dtype)"
            raise error("python_value", None, problem=what, fix=fix)
        return value

    @staticmethod
    def printing(function: Callable[..., Any], *formatted: Any) -> Callable[..., Any]:
        """Replace Python's `print`, which shows expressions while the kernel is traced; of elements that is a
        mistake. `formatted` are the values in f-strings among its arguments.
        """

        def checked(*values: Any, **options: Any) -> Any:
            if any(isinstance(value, Expr) and contains(value, Load) for value in (*values, *formatted)):
                problem = "`print` shows an expression once, while the kernel is traced, and no element"
                raise error("python_value", None, problem=problem, fix="T.print(value) prints on the device")
            return function(*values, **options)

        return checked if function is print else function

    def drawing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Warn of a random number of Python's or NumPy's in a loop or branch: it is drawn once, while tracing."""
        owner = getattr(function, "__self__", None)
        home = getattr(function, "__module__", None) or type(owner).__module__
        if len(self.tracer.scopes) > 1 and home.partition(".random")[0] in ("random", "numpy"):
            warn_of([diagnose("drawn_once", author_span())])
        return function

    @staticmethod
    def values(value: Any, count: int) -> tuple[Any, ...]:
        """Unpack a value into `count` values, all read now. Raises ValueError if it has not that many."""
        items = (value,) if isinstance(value, Expr) else tuple(value)
        if len(items) != count:
            raise _unpacked(count, len(items))
        return tuple(_read_now("t", item) for item in items)

    def keeps_item(self, where: Any, key: Any, value: Any) -> bool:
        """Return whether Python stores `where[key] = value`, and the value. A T.alloc_var there is stored to here."""
        self.kept = value
        if not isinstance(where, list | dict):
            return True
        if self._stores(where.get(key, UNBOUND) if isinstance(where, dict) else where[key], value):
            return False
        self.kept = _read_now(key if isinstance(key, str) else "item", value)
        return True

    def keeps_attribute(self, where: Any, name: str, value: Any) -> bool:
        """Return whether Python stores `where.name = value`, and with which value."""
        if self._stores(getattr(where, name, UNBOUND), value):
            return False
        self.kept = _read_now(name, value)
        if _is_fresh(value) or isinstance(value, Handle):
            name_symbol(value, name)
        return True

    def _stores(self, before: Any, value: Any) -> bool:
        """Store `value` if `before` is a T.alloc_var that is still in scope, and return whether it was stored."""
        if not (isinstance(value, Expr) or is_number(value)) or _is_fresh(value):
            return False
        if not isinstance(before, Load) or before.buffer.scope != "var" or self.tracer.has_ended(before.buffer):
            return False
        store_variable(before, value)
        return True

    def _check_tile(self, name: str, previous: Any, value: Any) -> None:
        """Refuse to bind a tile's name to a value, except, outside of loops and branches, one of the tile itself."""
        if self.tracer.scope is None or not isinstance(previous, Handle) or self.tracer.has_ended(previous.buffer):
            return
        home = self.bound_in.get(name, self.entry)
        here = home in self.tracer.scopes and self.tracer.scope is home
        own = isinstance(value, Expr) and any(load.buffer is previous.buffer for load in find(value, Load))
        if not (here and own):
            found = error("rebound_tile", None, name=name, kind=_KINDS.get(previous.buffer.scope, "buffer"))
            if previous.buffer.origin != "param":
                raise found
            self.tracer.rebound.append((previous.buffer, found))  # an error if nothing else uses the tensor

    def _check_rebinding(self, name: str, previous: Any, value: Any) -> None:
        """Refuse a rebinding inside a device loop. Python runs the body once, so the rebinding would silently be lost.

        After a branch nothing is lost: numbers become variables there.
        """
        if self._is_carried(name, previous) and not is_same(previous, value):
            raise _rebound(name, previous, value, "loop")
        if not (isinstance(previous, Expr | Handle) or is_number(previous)) or self._is_dead(previous):
            return
        kept: tuple[str, ...] = ("if", "else") if is_scalar(previous) and is_scalar(value) else ()
        if is_scalar(value) and not any(name in names for _, names in self.carried):  # no later turn reads it
            kept += ("loop", "while")
        own = self.tracer.owner.get(previous) if isinstance(previous, Node) else None  # of a loop variable
        home = self.bound_in.get(name, own or self.entry)  # other names came as arguments
        scopes = self.tracer.scopes
        inside = scopes if home is None else (scopes[scopes.index(home) + 1 :] if home in scopes else [])
        for scope in inside:
            if scope.what in _REGIONS and scope.what not in kept:
                raise _rebound(name, previous, value, scope.what)
        if inside and is_number(value) and not is_same(previous, value):
            self.passing[name] = value

    def _is_dead(self, value: Any) -> bool:
        """Return whether a value refers to symbols that are out of scope."""
        return isinstance(value, Expr) and any(n.is_symbol and self.tracer.has_ended(n) for n in walk(value))

    def _is_carried(self, name: str, previous: Any) -> bool:
        """Return whether a name's value was bound before this iteration of a loop, which may have read it."""
        buffer = previous.buffer if isinstance(previous, Handle) else None
        if previous is UNBOUND or isinstance(previous, Expr) or (buffer is not None and self.tracer.has_ended(buffer)):
            return False  # reading it would have been an error
        home = self.bound_in.get(name)
        return any(name in names and home not in self.tracer.scopes[depth:] for depth, names in self.carried)

    def typed(self, annotation: Any, value: Any) -> Any:
        """Record `x: T.int32 = value`."""
        annotation = annotation.dtype if isinstance(annotation, Var) else annotation  # T.int32()
        return cast(value, annotation) if isinstance(annotation, DType) else value

    def annotate(self, name: str, annotation: Any, old: Callable[[], Any]) -> Any:
        """Record `A: T.Tensor(...)` in the body of an eager kernel."""
        value = _current(old)
        if self.on_annotate is None:
            return None if value is UNBOUND else value
        return self.on_annotate(name, annotation, None if value is UNBOUND else value)

    def named(self, manager: Any, names: Any) -> Any:
        """Enter `with T.Kernel(...) as names`, and name the block indices; an index of T.launch_thread is the name."""
        if hasattr(manager, "take_names"):
            manager.take_names(names)
        return contextlib.nullcontext(manager) if isinstance(manager, Expr) else manager

    # -- conditions ----------------------------------------------------------------------------------------------------
    @staticmethod
    def condition(value: Any) -> Any:
        """Convert a condition to a bool, or to a device condition."""
        if isinstance(value, Expr):
            value = truth(value)
            return bool(value.value) if isinstance(value, Const) else value
        return python_truth(value)

    @staticmethod
    def is_device(value: Any) -> bool:
        """Return whether a condition is known only on the device."""
        return isinstance(value, Expr)

    def branches(
        self, test: Any, names: tuple[str, ...] = (), live: tuple[bool, ...] = (), *olds: Callable[[], Any]
    ) -> Iterator[bool]:
        """Yield the branches of an `if` to run: one if Python knows, both (recorded) otherwise.

        `names` are bound in it, and may be read after it where they are `live`.
        """
        condition = self.condition(test)
        if isinstance(condition, Expr):
            with self.then(condition, names, live, *olds):
                yield True
            with self.otherwise():
                yield False
        else:
            self.splits.append(None)
            yield condition
            self.splits.pop()

    @contextlib.contextmanager
    def then(
        self, condition: Expr, names: tuple[str, ...] = (), live: tuple[bool, ...] = (), *olds: Callable[[], Any]
    ) -> Iterator[None]:
        """Record the first branch of an `if`; `otherwise` must follow."""
        homes = {name: self.bound_in[name] for name in names if name in self.bound_in}
        split = Branches(self.tracer, condition, names, live, [_current(old) for old in olds], homes)
        self.splits.append(split)
        with self.tracer.open("if") as scope:
            split.scopes.append(scope)
            yield

    @contextlib.contextmanager
    def otherwise(self) -> Iterator[None]:
        """Record the second branch, and the `if`."""
        split = self.splits[-1]
        assert split is not None
        with self.tracer.open("else") as scope:
            split.scopes.append(scope)
            yield
        self.splits.pop()
        split.declare()
        if not split.is_done:
            self.tracer.emit(If(split.condition, *map(close_body, split.scopes)))

    def end_branch(self, **olds: Callable[[], Any]) -> bool:
        """End a branch, whose names are now bound to `now`. Return False where Python knew the branch."""
        split = self.splits[-1]
        if split is None:
            return False
        self.now = dict(zip(split.names, split.end([_current(old) for old in olds.values()]), strict=True))
        around = self.tracer.scopes[-2] if len(self.tracer.scopes) > 1 else None
        for name, before in zip(split.names, split.before, strict=True):
            if self.now[name] is before and name in split.homes:
                self.bound_in[name] = split.homes[name]
            elif split.is_over:
                self.bound_in[name] = around
        return True

    @staticmethod
    def all_of(*parts: Callable[[], Any]) -> Any:
        """Evaluate `a and b` as a condition, lazily."""
        return _lazy(parts, "and")

    @staticmethod
    def any_of(*parts: Callable[[], Any]) -> Any:
        """Evaluate `a or b` as a condition, lazily."""
        return _lazy(parts, "or")

    @staticmethod
    def last_of(*parts: Callable[[], Any]) -> Any:
        """Evaluate `a and b` as a value, lazily: one of the operands, as in Python."""
        return _lazy(parts, "and", _operand)

    @staticmethod
    def first_of(*parts: Callable[[], Any]) -> Any:
        """Evaluate `a or b` as a value, lazily: one of the operands, as in Python."""
        return _lazy(parts, "or", _operand)

    @staticmethod
    def negate(value: Any) -> Any:
        """Evaluate `not a`."""
        return unary("not", value) if isinstance(value, Expr) else not python_truth(value)

    def choose(self, test: Any, a: Callable[[], Any], b: Callable[[], Any]) -> Any:
        """Evaluate `a if test else b`."""
        condition = self.condition(test)
        if isinstance(condition, Expr):
            ways = [self.tracer.maybe(way, "`if` in a line") for way in (a, b)]
            if not all(map(is_scalar, ways)):
                raise error("bad_choice", None, got=" and ".join(repr(way)[:60] for way in ways))
            return select(condition, *ways)
        return a() if condition else b()

    @staticmethod
    def maybe_none(value: Any, holder: Any) -> Any:
        """Refuse to ask whether a value of the device is None; an item of a list, tuple or dict `holder` may be."""
        if isinstance(value, Expr | Region) and not isinstance(holder, list | tuple | dict):
            what = "`is None` asks about objects of Python, and a value of the device is never None"
            fix = "ask about the parameter, `X is None`; compare values by `==`"
            raise error("python_value", None, problem=what, fix=fix)
        return value

    @staticmethod
    def chain(ops: tuple[str, ...], *operands: Any) -> Any:
        """Evaluate a chained comparison, `a < b <= c`."""
        for op, a, b in zip(ops, operands, operands[1:], strict=False):
            one = isinstance(a, Expr | Region) and (isinstance(b, Expr | Region) or is_number(b))
            if one and a is not b and op in ("Is", "IsNot"):
                what = "`is` compares two objects of Python, not what the device computes"
                raise error("python_value", None, problem=what, fix=f"write `{'==' if op == 'Is' else '!='}`")
        tests = [partial(_COMPARE[op], a, b) for op, a, b in zip(ops, operands, operands[1:], strict=False)]
        return _lazy(tests, "and")

    @staticmethod
    def delete(value: Any) -> None:
        """Refuse `del` of a buffer and its elements; Python's own objects may go."""
        if isinstance(value, Handle):
            what = f"`del` forgets a name of Python, and the buffer `{value}` belongs to the kernel"
            fix = "leave the line out: tiles that are needed no longer lend their memory to later tiles"
            raise error("python_value", None, problem=what, fix=fix)

    # -- loops ---------------------------------------------------------------------------------------------------------
    def loop(self, iterable: Any, names: Any, carried: tuple[str, ...] = (), tells_end: bool = False) -> Iterator[Any]:
        """Run `for names in iterable`: recorded once for a device loop, by Python otherwise.

        An iteration may read the names `carried` before it binds them. With `tells_end`, `finished` is asked after it.
        """
        if not isinstance(iterable, Loop):
            check_iterable(iterable)
            with self._around(self.tracer.scope):
                yield from iterable
            return
        runner = _NEST if isinstance(iterable, Grid) and len(iterable.stops) > 1 else _DEVICE
        with self._around(runner, carried, self._flag(tells_end)):
            yield from iterable.iterate(names)

    def whiles(self, test: Callable[[], Any], carried: tuple[str, ...] = (), tells_end: bool = False) -> Iterator[None]:
        """Run `while test()` in Python, or record it once if the device decides the condition."""
        condition = self.condition(self.tracer.maybe(test, "`while`"))
        if not isinstance(condition, Expr):
            with self._around(self.tracer.scope):
                while condition is True:
                    yield
                    condition = self.condition(test())
            if isinstance(condition, Expr):
                raise error("symbolic_condition", condition.span)
            return
        with self._around(_DEVICE, carried, self._flag(tells_end)), self.tracer.open("while") as scope:
            yield
        self.tracer.emit(While(condition, close_body(scope)))

    @staticmethod
    def counter(function: Any) -> Any:
        """Return the function to call in `for i in function(...)`: T.serial for Python's range, under whatever name.

        T.thread_binding, a value elsewhere, becomes a loop of one iteration.
        """
        if callable(function) and inspect.unwrap(function) is thread_binding:
            return lambda *args, **kwargs: (function(*args, **kwargs),)
        return serial if function is range else function

    @staticmethod
    def _flag(tells_end: bool) -> Any:
        """Return the variable that a `break` of the next device loop sets, if the kernel asks for it."""
        return make_variable("left", bool_, Const(False, bool_)) if tells_end else False

    def finished(self) -> Any:
        """Return whether the last loop ran to its end, so that its `else` runs."""
        return self.negate(self.broke)

    @contextlib.contextmanager
    def _around(self, runner: Any, carried: tuple[str, ...] = (), broken: Any = False) -> Iterator[None]:
        """Track a loop inside the `with`, which `runner` runs: the device, or Python."""
        self.loops.append(runner)
        self.carried.append((len(self.tracer.scopes), carried))
        self.leaves.append([])
        self.broken.append(broken)
        try:
            yield
        finally:
            self.loops.pop()
            self.carried.pop()
            self.left = self.leaves.pop()
            self.broke = self.broken.pop()

    def end_loop(self, **olds: Callable[[], Any]) -> bool:
        """Return whether a `break` or `continue` left the loop with other values of names than `now`, its end's."""
        self.now = {name: _current(old) for name, old in olds.items()}
        lost = [
            name for n, name in enumerate(olds)
            if self._passes(name)
            or any(values[n] is not UNBOUND and not is_same(values[n], self.now[name]) for values in self.left)
        ]  # fmt: skip
        self.now |= dict.fromkeys(lost, UNBOUND)
        self.tracer.lost |= dict.fromkeys(lost, "loop")
        return bool(lost)

    def _passes(self, name: str) -> bool:
        """Return whether a name's number comes from an iteration of an ended loop: unknown without iterations."""
        home = self.bound_in.get(name)
        return home is not None and home.closed and self.now[name] is self.passing.get(name, UNBOUND)

    def leave(self, word: str, *olds: Callable[[], Any]) -> bool:
        """Run `break` or `continue`: return True if Python should do it, else record it."""
        if self.loops[-1] is _NEST and word == "break":
            raise error("break_of_nest", None)
        if self.loops[-1] not in (_DEVICE, _NEST):
            if self.tracer.scope is not self.loops[-1]:
                raise error("bad_break", None, word=word)
            if word == "break":
                self.broken[-1] = True
            return True
        self.leaves[-1].append([_current(old) for old in olds])
        if word == "break" and isinstance(self.broken[-1], Load):
            store_variable(self.broken[-1], True)
        self.tracer.emit(Break() if word == "break" else Continue())
        return False

    # -- the rest ------------------------------------------------------------------------------------------------------
    def returns(self, value: Any) -> Any:
        """Check `return value`, which may not leave a device loop or branch."""
        if self.tracer.scope is not self.entry:
            if self.tracer.scope is not None and self.tracer.scope.what == "kernel":
                raise error("return_in_region", None, where="`with T.Kernel`", fix="indent it less, behind the `with`")
            raise error("return_in_region", None, where="a device loop or branch")
        return value

    @staticmethod
    def unused(value: Any, function: Any = None) -> None:
        """Raise TileError for a value that a statement computes and drops, as `A[i] == 0` does for `A[i] = 0`.

        Where the statement is a call, `function` is what it calls. It may be one that acts (`effects.acts`), or that of
        an author.
        """
        module = getattr(function, "__module__", None) or ""
        of_author = function is not None and not module.startswith("torch_tile.language")
        may_act = of_author or getattr(function, "does_act", False)
        if may_act or not isinstance(value, Expr) or isinstance(value, Var | Load):
            return
        if all(is_pure(call) and call.name != foreign.NAME for call in find(value, Call)):
            raise error("unused_value", None, value=str(value)[:60])

    def member(self, value: Any) -> Any:
        """Return the left side of `in`. Raise TileError for what only the device knows: Python would compare texts."""
        if isinstance(value, Expr):
            what = f"`in` looks for `{str(value)[:60]}`"
            fix = "compare it with each, `x == 1 or x == 2`, or with the bounds, `0 <= x < n`"
            raise error("python_value", None, problem=what, fix=fix)
        return value

    def checked_lookup(self, function: Any) -> Any:
        """Wrap a dictionary's method: it raises TileError for a key that only the device knows. Others stay."""
        if not isinstance(getattr(function, "__self__", None), dict):
            return function

        def look_up(key: Any, *rest: Any) -> Any:
            if isinstance(key, Expr):
                raise device_key_error(key)
            return function(key, *rest)

        return look_up

    def refuse_try(self) -> None:
        """Raise TileError for a `try` inside T.Kernel: nothing that the device does is an exception."""
        if self.tracer.scopes:
            fix = "test before, by `if`; bring a Python `try` before T.Kernel"
            raise error("python_value", None, problem="`try` catches nothing that a kernel does", fix=fix)

    def refuse_raise(self) -> None:
        """Raise TileError for a `raise` in a branch of the device: it would run while the kernel is traced."""
        if any(split is not None for split in self.splits):
            what = "`raise` in a branch that the device decides runs while the kernel is traced, whatever is decided"
            raise error(
                "python_value", None, problem=what, fix='write `assert condition, "text"`, which the device checks'
            )

    def refuse_walrus(self, name: Any) -> None:
        """Raise TileError for `while (name := ...)`: the test is recorded once, where no name can be bound."""
        what = f"`{name} :=` in the test of a `while` would bind a name in each turn"
        fix = f"write `{name} = T.alloc_var(dtype)` before the loop, and set it before and at the end of each turn"
        raise error("python_value", None, problem=what, fix=fix)

    def asserts(self, test: Any, message: Any) -> None:
        """Record `assert test, message`; before T.Kernel it is a check of the launch, as T.assume of sizes is."""
        condition = self.condition(test)
        if isinstance(condition, Expr) and not self.tracer.scopes and is_of_launch(condition):
            self.tracer.assumed.append(simplify(condition))
        elif isinstance(condition, Expr):
            self.tracer.emit(Assert(condition, str(message)))
        elif not condition:
            raise AssertionError(message)


def _rebound(name: str, previous: Any, value: Any, region: str) -> TileError:
    """Return the error for a name that is bound in a region and has another value around it."""
    if isinstance(previous, Handle) and isinstance(value, Handle):
        return error("rebound_buffer", None, name=name, region=region)
    return error("rebound_in_region", None, name=name, region=region)


def _current(old: Callable[[], Any]) -> Any:
    """Return a name's value before an assignment, or UNBOUND."""
    try:
        return old()
    except NameError:
        return UNBOUND


def _is_fresh(value: Any) -> bool:
    """Return whether a value is a T.alloc_var without a bound name."""
    return isinstance(value, Load) and value.buffer.scope == "var" and value.buffer.name == ""


def _read_now(name: str, value: Any) -> Any:
    """Read elements of buffers inside a list, tuple or dict when the list is bound, not when it is used."""
    if isinstance(value, list):
        value[:] = [_read_now(name, v) for v in value]
    elif isinstance(value, dict):
        value.update({k: _read_now(name, v) for k, v in value.items()})
    elif type(value) is tuple:
        return tuple(_read_now(name, v) for v in value)
    elif isinstance(value, Vector):
        return value.map(lambda lane: let(name, lane))
    elif isinstance(value, Expr) and not _is_fresh(value) and contains(value, Load):
        return let(name, value)
    return value


def python_truth(value: Any) -> bool:
    """Return the truth of a value that is no expression. Raise TileError for a buffer: Python takes any for True."""
    if isinstance(value, Handle | Region):
        fix = "T.any_of(tile) and T.all_of(tile) ask about its elements; `A is not None` asks if a tensor was given"
        raise error("python_value", None, problem=f"the truth of the buffer `{value}`", fix=fix)
    return bool(value)


def _lazy(parts: Any, word: str, join: Callable[[str, Any, Any], Expr] = binary) -> Any:
    """Evaluate `and` or `or`; join traced values into one expression."""
    value = parts[0]()
    for part in parts[1:]:
        if isinstance(value, Expr):
            value = join(word, value, tracer().maybe(part, f"`{word}`"))
        elif python_truth(value) is (word == "or"):
            return value
        else:
            value = part()
    return value


def _operand(word: str, a: Expr, b: Any) -> Expr:
    """Evaluate `a or b` or `a and b`, which give an operand: of bools, that is the logical operator."""
    if a.dtype == bool_ and (b.dtype == bool_ if isinstance(b, Expr) else isinstance(b, bool)):
        return binary(word, a, b)
    return select(a, a, b) if word == "or" else select(a, b, a)
