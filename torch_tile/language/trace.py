# SPDX-License-Identifier: Apache-2.0
"""Tracing: the author's function runs once, and its operations on tiles are recorded as statements.

A `Tracer` holds the open scopes. A `Recorder` answers the calls that rewrite.py put into one run of one function. After
tracing, every node knows the author's line and columns.
"""

from __future__ import annotations

import contextlib
import dis
import linecache
import math
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType, TracebackType
from typing import Any

from torch_tile.diagnostics.errors import Span, TileError, current_span, error, span_source
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import Call, Const, Expr, Load, Var
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Node, Rewriter, children, contains, find
from torch_tile.ir.stmt import Alloc, Block, If, Kernel, Let, Stmt, Store, While

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OURS = tuple(os.path.join(_PACKAGE, part) + os.sep for part in ("language", "ir", "tileop", "intrinsics", "compat"))
_ERRORS = os.path.join(_PACKAGE, "diagnostics", "errors.py")
_OURS_FILES = (
    *(os.path.join(_PACKAGE, name) for name in ("jit.py", "options.py")),
    _ERRORS,
    contextlib.__file__,
    "<string>",
)
_LIBRARIES = tuple(sysconfig.get_path(where) + os.sep for where in ("stdlib", "purelib", "platlib"))
_OF_VALUES = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RuntimeError)
MOST_CALLS = 3  # lines that an error in a macro names beside its own
_RAISE = dis.opmap["RAISE_VARARGS"]
_POSITIONS: IdMap[CodeType, list[tuple[int | None, int | None, int | None, int | None]]] = IdMap()


explainers: list[Callable[[Exception, Span | None], TileError]] = []
"""What turns Python's exceptions into author errors: language/__init__.py, which knows all names of T, puts it here."""


@dataclass
class Scope:
    """An open region of the program: a kernel, loop or branch."""

    what: str
    stmts: list[Stmt] = field(default_factory=list)
    closed: bool = False


@dataclass(frozen=True)
class Epoch:
    """A reduction between T.reducer_init and T.finalize_reducer: the scope in which it began, and where."""

    scope: Scope
    span: Span | None


OPEN_KERNEL = "write `with T.Kernel(blocks, threads=128) as bx:` above, and the statements in its body"


class Tracer:
    """The state of tracing: the program being recorded, scope by scope."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.owner: dict[Node, Scope] = {}
        self.kernels: list[Kernel] = []
        self.made: list[Buffer] = []  # by T.empty and T.alloc_global
        self.views: list[Buffer] = []  # by T.view
        self.switches: set[str] = set()  # options of the compiler that the function asks for
        self.compile_flags: list[str] = []  # as the author wrote them
        self.assumed: list[Expr] = []  # by T.assume, of sizes and scalar parameters
        self.swizzle: tuple[int, str] | None = None
        self.launch: Any = None  # the T.Kernel around
        self.waiting: Any = None  # a T.Kernel that no `with` has opened yet
        self.reducers: dict[Buffer, str] = {}  # by T.alloc_reducer, each with its operation
        self.epochs: dict[Buffer, Epoch] = {}  # of reducers that T.reducer_init opened and nothing ended yet
        self.of_clusters: IdSet[Buffer] = IdSet()  # mbarriers by T.alloc_cluster_barrier
        self.mbarriers: dict[Any, list[Any]] = {}  # by T.create_list_of_mbarrier, of each T.Kernel
        self.in_nest = False  # inside T.Parallel
        self.folds_by: Any = None  # the T.comm_reducer around
        self.rebound: list[tuple[Buffer, TileError]] = []  # parameters whose names got values, and the error for it
        self.barrier_group = 0  # threads of the T.role around
        self.doubtful: str = ""  # the device condition under which the operand that Python computes now is needed
        self.consts: Callable[[str], Any] = no_consts
        self.safe_values: IdMap[Buffer, Const] = IdMap()  # of T.annotate_safe_value, in the kernel around
        self.params: list[Buffer | Var] = []  # of the function around
        self.sources: dict[str, list[str]] = {}  # texts of T.import_source, by target
        self.inlining: list[CodeType] = []  # of the macros around, outermost first
        self.lost: dict[str, str] = {}  # names that were bound in a region and are unbound after it

    @property
    def scope(self) -> Scope | None:
        """Return the innermost open scope, or None outside kernels."""
        return self.scopes[-1] if self.scopes else None

    @property
    def threads(self) -> int:
        """Return the threads of the enclosing role, or of a block of the kernel; 1 outside kernels."""
        if self.barrier_group:
            return self.barrier_group
        return 1 if self.launch is None or not self.scopes else math.prod(self.launch.threads)

    def emit(self, stmt: Stmt) -> None:
        """Record a statement in the innermost scope."""
        if not self.scopes:
            if self.waiting is not None:
                fix = "write `with T.Kernel(...) as bx:`, and the body inside"
                raise error("not_opened", self.waiting.span, fix=fix)
            fix = "" if self.launch else OPEN_KERNEL
            raise error("not_in_kernel", None, what=describe_statement(stmt), fix=fix)
        self.check_scopes(stmt)
        self.scopes[-1].stmts.append(stmt)

    def maybe(self, operand: Callable[[], Any], word: str) -> Any:
        """Mark an operand that the device evaluates only if `word` asks for it. Python computes it in any case."""
        outer, self.doubtful = self.doubtful, word
        try:
            return operand()
        finally:
            self.doubtful = outer

    def own(self, symbol: Node) -> None:
        """Remember the scope in which a symbol lives."""
        if self.scopes:
            self.owner[symbol] = self.scopes[-1]

    def has_ended(self, symbol: Node) -> bool:
        """Return whether the scope of a symbol is closed."""
        return symbol in self.owner and self.owner[symbol].closed

    def check_scopes(self, node: Node) -> None:
        """Check that every symbol used lives in a scope that is still open."""
        for used in children(node):
            if used.is_symbol and used in self.owner:
                scope = self.owner[used]
                if scope.closed:
                    raise error("out_of_scope", None, name=getattr(used, "name", "?"), region=scope.what)
                if used in self.epochs:
                    what = "store to" if isinstance(node, Store) else "read of"
                    why, fix = (
                        f"illegal {what} reducer",
                        "T.reducer_update takes values; T.finalize_reducer gives the result",
                    )
                    raise error("reducer_protocol", None, name=getattr(used, "name", "?"), why=why, fix=fix)
            elif not isinstance(used, Block):  # the body was checked while it was recorded
                self.check_scopes(used)

    @contextlib.contextmanager
    def allow_open_reducers(self, *reducers: Buffer) -> Iterator[None]:
        """Let statements inside touch reducers whose epoch is open."""
        open_now = {one: self.epochs.pop(one) for one in reducers if one in self.epochs}
        try:
            yield
        finally:
            self.epochs.update(open_now)

    @contextlib.contextmanager
    def open(self, what: str) -> Iterator[Scope]:
        """Open a scope that is closed at the end of the `with`."""
        scope = Scope(what)
        self.scopes.append(scope)
        try:
            yield scope
            for reducer, epoch in self.epochs.items():
                if epoch.scope is scope:
                    why = "it is never finalized: T.finalize_reducer is not in the scope of its T.reducer_init"
                    fix = "write T.finalize_reducer(acc, dst) before the scope ends"
                    raise error("reducer_protocol", epoch.span, name=reducer.name, why=why, fix=fix)
        finally:
            self.scopes.pop()
            scope.closed = True


def no_consts(names: str) -> Any:
    """Raise the error for T.const outside an eager kernel: nothing binds it."""
    raise error("unbound_const", None, name=names)


class _State(threading.local):
    """The current tracer of each thread."""

    tracer: Tracer | None = None


_STATE = _State()


def tracer(what: str = "this") -> Tracer:
    """Return the active tracer; an author error outside tracing."""
    if _STATE.tracer is None:
        fix = "write it in a function below @torch_tile.jit or @T.prim_func: Python runs this one as it is"
        raise error("not_in_kernel", author_span(), what=what, fix=fix)
    return _STATE.tracer


def is_tracing() -> bool:
    """Return whether a kernel is being traced in this thread."""
    return _STATE.tracer is not None


@contextlib.contextmanager
def tracing() -> Iterator[Tracer]:
    """Trace the kernel that runs inside the `with`; spans are recorded meanwhile."""
    outer, _STATE.tracer = _STATE.tracer, Tracer()
    span_source.append(author_span)
    try:
        yield _STATE.tracer
    except NameError as problem:
        name = problem.name or str(problem).split("'")[1]  # UnboundLocalError tells the name only in its text
        region = _STATE.tracer.lost.get(name)
        if region is not None:
            raise error("out_of_scope", _span_of(problem), name=name, region=region) from problem
        notes = [(None, f"the function assigns `{name}` further down, so it is a local name everywhere: rename one")]
        is_later = isinstance(problem, UnboundLocalError)
        span = _span_of(problem)
        items = re.search(rf" as (\w+(?:, \w+)*, {name}\b[\w, ]*):", span.source() if span else "")
        fix = f"write `as ({items[1]}):`: Python reads several `with` items here" if items else ""
        if not fix and re.fullmatch(r"b[xyz]|pid_?\w*|block_?[xyz]", name):
            fix = "name all indices of the grid's blocks: `with T.Kernel(m, n) as (bx, by):`"
        if fix or is_later:
            told = error("undefined_name", span, notes if is_later else (), name=name, fix=fix)
        else:
            told = explainers[-1](problem, span)
        _add_calls(told, problem)
        raise told from problem
    except TileError as problem:
        told = _of_recursion(problem) or problem
        _add_calls(told, problem)
        if told is problem:
            raise
        raise told from problem
    except Exception as problem:
        if is_of_python(problem) and (meant := _explained(problem)) is not None:
            _add_calls(meant, problem)
            raise meant from problem
        raise
    finally:
        span_source.pop()
        _STATE.tracer = outer


def author_span() -> Span | None:
    """Find the author's position: the innermost frame outside the compiler's own files."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OURS) and file not in _OURS_FILES:
            return span_at(frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return None


def span_at(code: CodeType, offset: int) -> Span | None:
    """Return the source position of an instruction."""
    table = _POSITIONS.get(code)
    if table is None:
        table = _POSITIONS[code] = list(code.co_positions())
    line, end_line, column, end_column = table[offset // 2]
    if line is None:
        return None
    file, end_line = code.co_filename, end_line or line
    start = _character_column(file, line, column or 0)
    return Span(file, line, end_line, start, _character_column(file, end_line, end_column) if end_column else start + 1)


def _character_column(file: str, line: int, column: int) -> int:
    """Convert a column that Python counts in bytes of UTF-8 to one in characters."""
    text = linecache.getline(file, line)
    return column if text.isascii() else len(text.encode()[:column].decode(errors="ignore"))


def _span_of(problem: BaseException) -> Span | None:
    """Return the author's line that raised an exception."""
    trace = problem.__traceback__
    found = None
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_OURS):
            found = span_at(trace.tb_frame.f_code, trace.tb_lasti)
        trace = trace.tb_next
    return found


def describe_statement(stmt: Stmt) -> str:
    """Name a statement for a message."""
    if isinstance(stmt, Alloc):
        return f"T.alloc_{stmt.buffer.scope}"
    name = getattr(stmt, "op_name", "")
    return f"T.{name}" if name else type(stmt).__name__.lower()


def is_of_python(problem: Exception) -> bool:
    """Return whether an exception is one of Python's own that says: this value cannot be computed with."""
    return type(problem).__module__ == "builtins" and isinstance(problem, _OF_VALUES)


def is_of_ours(problem: Exception) -> bool:
    """Return whether a function of the compiler raised an exception, no function of the author's."""
    return _frames(problem)[-1].tb_frame.f_code.co_filename.startswith(_PACKAGE)


def _explained(problem: Exception) -> TileError | None:
    """Turn Python's exception on an author's line into an author error; None for one that an author raises."""
    own = _authors(problem)
    if not own:
        return None
    last = own[-1]
    if last is _frames(problem)[-1] and last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE:
        return None
    return explainers[-1](problem, span_at(last.tb_frame.f_code, last.tb_lasti))


def _add_calls(told: TileError, problem: Exception) -> None:
    """Name the lines that call the macro or function in which an error is, the innermost first."""
    places = [span_at(f.tb_frame.f_code, f.tb_lasti) for f in reversed(_authors(problem))]
    if told.span is not None and places and places[0] is not None and places[0].place == told.span.place:
        told.add_places((place, "called here") for place in places[1 : MOST_CALLS + 1])


def _of_recursion(problem: TileError) -> TileError | None:
    """Return the error for a condition of the device in a function that calls itself, which never ends; else None."""
    own = _authors(problem)
    code = own[-1].tb_frame.f_code if own and problem.code == "symbolic_condition" else None
    if code is None or code.co_name not in (*code.co_names, *code.co_freevars):
        return None
    return error("recursive_helper", problem.span, name=code.co_name)


def _authors(problem: Exception) -> list[TracebackType]:
    """Return the frames of the author's functions that an exception has left, the innermost last."""
    authors = [f for f in _frames(problem) if not f.tb_frame.f_code.co_filename.startswith(_PACKAGE)]
    folder = os.path.dirname(authors[0].tb_frame.f_code.co_filename) if authors else ""
    return [f for f in authors if not (name := f.tb_frame.f_code.co_filename).startswith(_LIBRARIES)
            or os.path.dirname(name) == folder]  # fmt: skip


def _frames(problem: Exception) -> list[TracebackType]:
    """Return the frames that an exception has left, the innermost last."""
    found, trace = [], problem.__traceback__
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found


def name_symbol(value: Any, name: str) -> None:
    """Give a nameless buffer or variable the name that its author bound it to."""
    symbol = getattr(value, "buffer", value)
    if isinstance(symbol, Var | Buffer) and symbol.name == "":
        object.__setattr__(symbol, "name", name)


def make_variable(name: str, dtype: Any, init: Expr | None) -> Load:
    """Make a mutable scalar: a buffer of scope "var", which stands for its value wherever it is used."""
    buffer = Buffer(name, (), dtype, "var")
    at = tracer("T.alloc_var")
    at.emit(Alloc(buffer, init))
    at.own(buffer)
    return Load(buffer, ())


def let(name: str, value: Expr) -> Expr:
    """Name a value; literals, symbols and everything outside kernels stay as they are."""
    at = tracer()
    if at.scope is None or isinstance(value, Const | Var):
        return value
    var = Var(name, value.dtype, "let")
    at.emit(Let(var, value))
    at.own(var)
    return var


def expand_names(value: Expr) -> Expr:
    """Replace names in `value` by their expressions. Names of elements stay, as those may have changed since."""
    known = IdMap[Var, Expr]()
    for depth, scope in enumerate(tracer().scopes if is_tracing() else ()):
        known.update((s.var, s.value) for n, s in enumerate(scope.stmts) if isinstance(s, Let) and _holds(s, depth, n))
    return Replaced(known)(value) if known else value


def _holds(named: Let, depth: int, place: int) -> bool:
    """Return whether a name still has the value of its expression: no store to its variables came since."""
    loads = [node.buffer for node in find(named.value, Load)]
    if contains(named.value, Call) or any(buffer.scope != "var" for buffer in loads):
        return False
    scopes = tracer().scopes[depth:]
    if not loads or any(
        scope.what in ("loop", "while") for scope in scopes[1:]
    ):  # a later iteration may see another value
        return not loads
    since = [*scopes[0].stmts[place:], *(stmt for scope in scopes[1:] for stmt in scope.stmts)]
    written = [node.buffer for stmt in since for node in find(stmt, Store, Region)]
    return not any(one is buffer for one in written for buffer in loads)


class Replaced(Rewriter):
    """Replace symbols by their `known` values, and symbols in those, too."""

    def __init__(self, known: IdMap[Var, Expr]):
        self.known = known

    def visit_Var(self, var: Var) -> Expr:
        """Return the variable's known value."""
        return self(self.known[var]) if var in self.known else var


def close_body(scope: Scope) -> Block:
    """Return the statements of a scope as a block."""
    return Block(tuple(scope.stmts))


@contextlib.contextmanager
def when(condition: Expr) -> Iterator[None]:
    """Record the body of the `with` as statements that run where the condition holds."""
    at = tracer()
    with at.open("if") as scope:
        yield
    at.emit(If(condition, close_body(scope), Block(())))


@contextlib.contextmanager
def repeat_while(condition: Expr) -> Iterator[None]:
    """Record the body of the `with` as statements that run while the condition holds."""
    at = tracer()
    with at.open("while") as scope:
        yield
    at.emit(While(condition, close_body(scope)))


def with_span(node: Any, span: Span | None) -> Any:
    """Return `node` placed at `span`."""
    return replace(node, span=span) if span else node


__all__ = [
    "Replaced",
    "Scope",
    "Tracer",
    "author_span",
    "close_body",
    "current_span",
    "expand_names",
    "is_tracing",
    "let",
    "make_variable",
    "name_symbol",
    "span_at",
    "tracer",
    "tracing",
    "with_span",
]  # fmt: skip
