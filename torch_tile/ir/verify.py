# SPDX-License-Identifier: Apache-2.0
"""Check that a program has only the nodes that its stage of compilation allows; the rules are data.

A broken rule is a bug of ours. Authors' mistakes are found before, while tracing and by check_kernel.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from torch_tile.diagnostics.errors import InternalError
from torch_tile.hardware import REGISTERS_OF_ROLES
from torch_tile.ir import dtype as dt, stmt
from torch_tile.ir.buffer import Range, Region, TensorMap
from torch_tile.ir.expr import (
    COMPARISONS,
    INTEGER_ONLY,
    LOGICAL,
    Address,
    Binary,
    Call,
    Const,
    Expr,
    Load,
    Select,
    Unary,
    Var,
    is_zero,
)
from torch_tile.ir.node import Node, children, symbols
from torch_tile.ir.stmt import LoopKind


class Stage(enum.Enum):
    """The stages of lowering, from TILE (as written) to code; each has its own rules. FLAT: every buffer has one
    dimension, every loop one variable. Between them, for the CPU: LOOPS: no tile op is left. For GPUs: LAID_OUT:
    shared buffers and fragments have layouts, loops are not pipelined. THREAD: the body is what one thread does,
    fragments are its registers.
    """

    TILE = 0
    LOOPS = 1
    FLAT = 2
    LAID_OUT = 3
    THREAD = 4


# Nodes that no longer appear, from a stage on.
GONE: dict[Stage, tuple[tuple[type[Node], ...], frozenset[LoopKind]]] = {
    Stage.TILE: ((), frozenset()),
    Stage.LOOPS: ((stmt.TileOp,), frozenset()),
    Stage.LAID_OUT: ((), frozenset({LoopKind.PIPELINED})),
    Stage.THREAD: ((stmt.TileOp, Region), frozenset({LoopKind.PARALLEL, LoopKind.PIPELINED})),
    Stage.FLAT: ((stmt.TileOp, Region), frozenset({LoopKind.PARALLEL})),
}


def verify(program: stmt.Program, stage: Stage) -> None:
    """Raise InternalError, naming the node and the author's line, unless `program` is well formed and of `stage`.

    Well formed: every variable and buffer is bound once, before and around its uses; every access has one index per
    dimension; operands, conditions and stored values have the types that expr.py and stmt.py give them.
    """
    _Verifier(stage).program(program)


class _Verifier:
    """Check the rules of a stage on every node of a program."""

    def __init__(self, stage: Stage):
        self.stage = stage
        self.gone, self.gone_loops = GONE[stage]
        self.bound: set[Node] = set()  # every symbol met so far
        self.in_scope: set[Node] = set()
        self.hidden: set[Node] = set()  # names of values that `here` hides from the C++ compiler
        self.hiding = 0  # how many `here` were checked, which depend on what is hidden
        self.loops = 0
        self.threads = 0  # of a block of the kernel around
        self.outermost: set[Node] = set()  # the statements of its body itself

    def program(self, p: stmt.Program) -> None:
        """Check a program. The shapes of the parameters bind the run-time sizes."""
        self.bind(stmt.dimensions(p), p)
        self.bind((*p.params, *p.outputs, *p.workspaces), p)
        self.need(all(v.base in self.in_scope for v in p.views), "a view is one of a buffer of the program", p)
        self.bind(p.views, p)
        for kernel in p.kernels:
            self(kernel)

    def __call__(self, node: Node) -> None:
        """Check a node and all below it. Nodes that bind nothing keep the stage at which they hold."""
        if node.is_symbol:
            if not self.is_in_scope(node):
                self.fail(f"`{_name(node)}` is used where it is not bound", node)
            return
        values = node.__dict__
        if values.get("_sound") is self.stage and (
            self.in_scope.issuperset(symbols(node)) or all(map(self.is_in_scope, symbols(node)))
        ):
            return
        if isinstance(node, self.gone):
            self.fail(f"{type(node).__name__} may not appear", node)
        kind = type(node)
        check = _CHECKS.get(kind)
        if check is not None:
            check(self, node)
        scope = _SCOPES.get(kind)
        if scope is not None:
            scope(self, node)
            return
        hiding = self.hiding
        for child in children(node):
            self(child)
        if hiding == self.hiding and isinstance(node, _KEPT):
            values["_sound"] = self.stage

    def is_in_scope(self, symbol: Node) -> bool:
        """Return whether a symbol is in scope. At stage FLAT all sizes are: the launcher passes them."""
        free = self.stage is Stage.FLAT and isinstance(symbol, Var) and symbol.role == "dim"
        return free or symbol in self.in_scope

    def need(self, holds: bool, problem: str, node: Node) -> None:
        """Raise unless `holds`."""
        if not holds:
            self.fail(problem, node)

    def fail(self, problem: str, node: Node) -> None:
        """Raise InternalError for a node."""
        raise InternalError(f"{problem} at stage {self.stage.name}: {_shown(node)}", node.span)

    def bind(self, symbols: Iterable[Node], where: Node) -> None:
        """Bring symbols into scope; raise if one is bound twice."""
        for symbol in symbols:
            self.need(symbol not in self.bound, f"`{_name(symbol)}` is bound twice", where)
            self.bound.add(symbol)
            self.in_scope.add(symbol)

    @contextmanager
    def scope(self, symbols: Iterable[Node], where: Node, loop: bool = False) -> Iterator[None]:
        """Bind symbols inside the `with` only."""
        outer, self.in_scope = self.in_scope, set(self.in_scope)
        self.loops += loop
        self.bind(symbols, where)
        yield
        self.in_scope = outer
        self.loops -= loop

    # Nodes that bind symbols for a part of their children.

    def kernel(self, k: stmt.Kernel) -> None:
        """Check a kernel. The grid does not see the block indices."""
        self.need(len(k.grid) == len(k.blocks), "one block index per grid extent", k)
        for extent in k.grid:
            self(extent)
        self.threads, self.outermost = math.prod(k.threads), set[Node](k.body.stmts)
        for together in (list(s) for kind, s in groupby(k.body.stmts, type) if kind is stmt.Role):
            taken = [n for r in together if isinstance(r, stmt.Role) for n in range(r.first, r.first + r.count, 32)]
            self.need(len(taken) == len(set(taken)), "a warp has one role", together[0])
            counts: dict[int, list[int]] = {}  # of registers, by warpgroup
            for r in (r for r in together if isinstance(r, stmt.Role)):
                for n in range(r.first, r.first + r.count, 32):
                    counts.setdefault(n // 128, []).append(r.registers)
            agreed = all(n == [n[0]] * 4 for n in counts.values() if any(n))
            self.need(agreed, "all warps of a warpgroup change their registers together", together[0])
        with self.scope(k.blocks if k.thread is None else (*k.blocks, k.thread), k):
            self(k.body)

    def loop(self, f: stmt.For) -> None:
        """Check a loop; its bounds do not see its variables."""
        for bound in (*f.starts, *f.stops):
            self.need(bound.dtype.is_integer, "loop bounds are integers", f)
            self(bound)
        with self.scope(f.vars, f, loop=True):
            self(f.body)

    def repeat(self, w: stmt.While) -> None:
        """Check a while loop, in which `break` may appear."""
        self(w.condition)
        with self.scope((), w, loop=True):
            self(w.body)

    def block(self, b: stmt.Block) -> None:
        """Check a block; names and buffers live to its end."""
        with self.scope((), b):
            for s in b.stmts:
                self(s)
                if isinstance(s, stmt.Let):
                    self.bind((s.var,), s)
                elif isinstance(s, stmt.Alloc):
                    self.alloc(s)

    def alloc(self, a: stmt.Alloc) -> None:
        """Check an allocation: sizes use only symbols in scope; layouts and scopes are those of the stage."""
        scope = a.buffer.scope
        laid_out = a.buffer.layout is not None or scope not in ("shared", "fragment")
        self.need(self.stage is not Stage.LAID_OUT or laid_out, f"`{a.buffer.name}` has no layout", a)
        self.need(self.stage is not Stage.THREAD or scope != "fragment", f"`{a.buffer.name}` is a fragment", a)
        if scope == "barrier":
            self.need(a in self.outermost, "mbarriers are for the whole block", a)
            self.need(a.buffer.arrivals > 0, f"`{a.buffer.name}` waits for nobody", a)
        for size in (*a.buffer.shape, *(a.buffer.strides or ())):
            self(size)
        self.bind((a.buffer,), a)

    # Nodes with rules of their own.

    def access(self, node: Load | stmt.Store | Address) -> None:
        """Check that an access has one integer index per dimension."""
        buffer, indices = node.buffer, node.indices
        self.need(len(indices) == buffer.rank, f"`{buffer.name}` has {buffer.rank} dimensions", node)
        self.need(self.stage is not Stage.FLAT or buffer.rank <= 1, f"`{buffer.name}` is not flat", node)
        # A tile op is given an mbarrier as an element, a call its address.
        is_named = isinstance(node, Address) or (isinstance(node, Load) and stmt.TileOp not in self.gone)
        self.need(buffer.scope != "barrier" or is_named, f"`{buffer.name}` is no memory to read or write", node)
        self.need(all(i.dtype.is_integer for i in indices), "indices are integers", node)
        if isinstance(node, stmt.Store):
            self.need(node.value.dtype == buffer.dtype, f"`{buffer.name}` holds {buffer.dtype}", node)

    def role(self, r: stmt.Role) -> None:
        """Check that a role has whole warps, and whole warpgroups if they change their registers."""
        self.need(r in self.outermost, "roles are statements of the kernel itself", r)
        fits = r.first >= 0 and r.count > 0 and r.first + r.count <= self.threads
        self.need(fits and r.first % 32 == r.count % 32 == 0, f"a role has threads of {self.threads} by 32", r)
        allowed = r.registers == 0 or r.registers in REGISTERS_OF_ROLES
        self.need(allowed, "registers are a multiple of 8 from 24 to 256", r)

    def tensor_map(self, m: TensorMap) -> None:
        """Check the limits of the tensor memory accelerator."""
        rank, row = len(m.sizes), (m.box or (0,))[-1] * m.buffer.dtype.itemsize
        self.need(1 <= rank == len(m.strides) == len(m.box) <= 5, "a tensor map has one to five dimensions", m)
        self.need(all(1 <= n <= 256 for n in m.box) and row % 16 == 0, "boxes have 1 to 256 elements a side", m)
        fits = m.swizzle == 0 or (m.swizzle in (32, 64, 128) and row <= m.swizzle)
        self.need(fits, "a swizzle spans 32, 64 or 128 bytes, and rows of boxes no more", m)
        self.need(m.buffer.scope == "global", "tensor maps are of global memory", m)

    def region(self, r: Region) -> None:
        """Check that a region has one range per dimension."""
        self.need(len(r.ranges) == r.buffer.rank, f"`{r.buffer.name}` has {r.buffer.rank} dimensions", r)

    def range(self, r: Range) -> None:
        """Check that a range has an integer start and extent."""
        self.need(r.start.dtype.is_integer and r.extent.dtype.is_integer, "ranges are integers", r)

    def const(self, c: Const) -> None:
        """Check that the Python value is of the literal's kind."""
        kind = _PYTHON_TYPES.get(c.type.kind, int)
        if type(c.value) is not kind:
            self.fail(f"a {c.type} is a Python {kind.__name__}", c)

    def unary(self, e: Unary) -> None:
        """Check the operand: `not` takes a bool, `~` no float, `-` no bool."""
        kind = e.a.dtype.kind
        fits = kind == "bool" if e.op == "not" else kind != "float" if e.op == "~" else kind != "bool"
        self.need(e.op in ("not", "~", "-") and fits, f"`{e.op}` cannot take {e.a.dtype}", e)

    def binary(self, e: Binary) -> None:
        """Check that both operands have one type, which the operator takes."""
        a, b = e.a.dtype, e.b.dtype
        if a is not b and a != b:
            self.fail(f"`{e.op}` of {a} and {b}", e)
        if e.op in LOGICAL or e.op in INTEGER_ONLY or e.op == "/":
            if not (a.kind == "bool" if e.op in LOGICAL else a.is_float == (e.op == "/")):
                self.fail(f"`{e.op}` of {a}", e)
        else:
            self.need(e.op in COMPARISONS or e.op in ("+", "-", "*", "//", "%", "min", "max"), "no such operator", e)

    def select(self, e: Select) -> None:
        """Check that a bool chooses between values of one type."""
        self.condition(e)
        self.need(e.a.dtype == e.b.dtype, f"a choice between {e.a.dtype} and {e.b.dtype}", e)

    def condition(self, node: Select | stmt.If | stmt.While | stmt.Assert) -> None:
        """Check that a condition is bool."""
        self.need(node.condition.dtype.kind == "bool", f"a condition of type {node.condition.dtype}", node)

    def let(self, s: stmt.Let) -> None:
        """Check that the name has the type of its value."""
        self.need(s.var.dtype == s.value.dtype, f"a {s.var.dtype} named for a {s.value.dtype}", s)
        if isinstance(s.value, Call) and s.value.name == "here":
            self.hidden.add(s.var)

    def call(self, c: Call) -> None:
        """Check that `here` hides a thread's index or 0: its C++ form promises the compiler 0 to 1023."""
        if c.name == "here":
            self.hiding += 1
            (value,) = c.args
            is_thread = isinstance(value, Var) and (value.role == "thread" or value in self.hidden)
            self.need(
                is_thread or (isinstance(value, Expr) and is_zero(value)), "`here` hides a thread's index or 0", c
            )

    def init(self, s: stmt.Alloc) -> None:
        """Check that only a T.alloc_var is initialised, with a value of its type, and that a tensor has an address."""
        if s.buffer.scope == "global":
            fits = s.buffer.origin == "address" and s.init is not None and s.init.dtype == dt.int64
        else:
            fits = s.init is None or (s.buffer.scope == "var" and s.init.dtype == s.buffer.dtype)
        self.need(fits, f"`{s.buffer.name}` cannot be initialised so", s)

    def nest(self, f: stmt.For) -> None:
        """Check a nest's box; more than one variable only in parallel loops."""
        sizes = len(f.vars) == len(f.starts) == len(f.stops) >= 1
        self.need(sizes and f.step >= 1, "a loop has a start, a stop and a positive step", f)
        self.need(len(f.vars) == 1 or f.kind is LoopKind.PARALLEL, "only T.Parallel has several variables", f)
        self.need(f.kind not in self.gone_loops, f"T.{f.kind.value} may not appear", f)

    def leave(self, s: stmt.Stmt) -> None:
        """Check that a break or continue is inside a loop."""
        self.need(self.loops > 0, f"{type(s).__name__.lower()} outside a loop", s)


_KEPT = Expr, Region, stmt.Store, stmt.Do
_PYTHON_TYPES: dict[str, type] = {"bool": bool, "float": float}
_SCOPES: dict[type[Node], Callable[[_Verifier, Any], None]] = {
    stmt.Kernel: _Verifier.kernel,
    stmt.For: _Verifier.loop,
    stmt.While: _Verifier.repeat,
    stmt.Block: _Verifier.block,
}
_CHECKS: dict[type[Node], Callable[[_Verifier, Any], None]] = {
    Load: _Verifier.access,
    Address: _Verifier.access,
    stmt.Store: _Verifier.access,
    stmt.Role: _Verifier.role,
    TensorMap: _Verifier.tensor_map,
    Region: _Verifier.region,
    Range: _Verifier.range,
    Const: _Verifier.const,
    Unary: _Verifier.unary,
    Binary: _Verifier.binary,
    Select: _Verifier.select,
    Call: _Verifier.call,
    stmt.If: _Verifier.condition,
    stmt.While: _Verifier.condition,
    stmt.Assert: _Verifier.condition,
    stmt.Let: _Verifier.let,
    stmt.Alloc: _Verifier.init,
    stmt.For: _Verifier.nest,
    stmt.Break: _Verifier.leave,
    stmt.Continue: _Verifier.leave,
}


def _name(symbol: Node) -> str:
    """Return a symbol's name for a message."""
    return str(getattr(symbol, "name", "?"))


def _shown(node: Node) -> str:
    """Return one line of text for a node."""
    text = repr(node)
    first = text.splitlines()[0] if text else ""
    return first if first == text and len(first) <= 120 else first[:120] + " ..."
