# SPDX-License-Identifier: Apache-2.0
"""Compile each expression of a thread-level kernel once into a function that computes its value for all threads.

An expression that depends on the thread's number alone is computed once. Values under a false mask are never used: a
guard protects a load and a division.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from torch_tile.diagnostics.errors import InternalError, Span
from torch_tile.ir import expr as ex
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.dtype import int32, int64
from torch_tile.ir.expr import Expr
from torch_tile.ir.node import Node, Visitor
from torch_tile.ir.widths import IndexValues
from torch_tile.simulator.simt import values as va
from torch_tile.simulator.simt.calls import Calls
from torch_tile.simulator.simt.memory import Memory, Threads
from torch_tile.simulator.simt.values import Value

Run = Callable[[], Value]


class Fixed:
    """A compiled expression whose value never changes."""

    def __init__(self, value: Value):
        self.value = value

    def __call__(self) -> Value:
        """Return the value."""
        return self.value


class Expressions(Visitor):
    """Compiles expressions. `values` holds the values of variables, `memory` the memory of buffers."""

    threads: Threads
    calls: Calls
    memory: Mapping[Buffer, Memory]

    def __init__(self, threads: Threads, calls: Calls, values: dict[ex.Var, Value], memory: Mapping[Buffer, Memory]):
        self.threads, self.calls = threads, calls
        self.values, self.memory = values, memory
        self.thread: ex.Var | None = None
        self.span: Span | None = None  # of the statement being compiled
        self.lets: dict[ex.Var, Fixed] = {}  # names of values that never change
        self.known: dict[tuple[Node, bool], Run] = {}
        self.is_from_indices: IndexValues = IndexValues()
        self.wide: bool = False  # whether int32 is computed in 64 bits, as where it makes an index

    def compile(self, node: Expr, wide: bool = False) -> Run:
        """Return the function that computes `node`; with `wide` an int32 does not wrap."""
        wide = wide and node.dtype == int32
        found = self.known.get((node, wide))
        if found is None:
            handler = self.method_of(node)
            if handler is None:
                raise InternalError(f"the thread interpreter met {type(node).__name__}", node.span or self.span)
            outer, self.wide = self.wide, wide
            found = handler(node)
            self.wide = outer
            if wide and not isinstance(node, ex.Binary | ex.Unary | ex.Select):
                found = self._widened(found)
            self.known[node, wide] = found
        return found

    def element(self, node: Expr) -> Run:
        """Return the function that computes `node` as memory of its type holds it."""
        run = self.compile(node)
        if node.dtype != int32 or not self.is_from_indices(node):
            return run
        narrow = va.cast(int64, int32)
        return Fixed(narrow(run())) if isinstance(run, Fixed) else lambda: narrow(run())

    @staticmethod
    def _widened(run: Run) -> Run:
        """Return the function that computes the same in 64 bits."""
        return Fixed(_in_64_bits(run())) if isinstance(run, Fixed) else lambda: _in_64_bits(run())

    def fixed(self, node: Expr) -> Value | None:
        """Return the value of an expression that depends on the thread's number alone, else None."""
        run = self.compile(node)
        return run() if isinstance(run, Fixed) else None

    def _compiled(self, function: Callable[..., Value], *parts: Expr, wide: bool = False) -> Run:
        """Compile a function of values; compute the result now if all values are known."""
        return self._applied(function, [self.compile(p, wide) for p in parts])

    @staticmethod
    def _applied(function: Callable[..., Value], runs: list[Run]) -> Run:
        """Return the function that applies `function` to the values of others."""
        if all(isinstance(r, Fixed) for r in runs):
            return Fixed(function(*(r() for r in runs)))
        if len(runs) == 1:
            only = runs[0]
            return lambda: function(only())
        if len(runs) == 2:
            first, second = runs
            return lambda: function(first(), second())
        return lambda: function(*[r() for r in runs])

    def visit_Const(self, node: ex.Const) -> Run:
        """Compile a constant."""
        return Fixed(va.constant(node.value, node.dtype))

    def visit_Var(self, node: ex.Var) -> Run:
        """Compile a variable."""
        if node is self.thread:
            return Fixed((self.threads.ids % self.threads.of_block).astype(va.carrier(node.dtype)))
        if node in self.lets:
            return self.lets[node]
        values = self.values
        return lambda: values[node]

    def visit_Unary(self, node: ex.Unary) -> Run:
        """Compile an operator with one operand."""
        wide = node.dtype == int32 and (self.wide or self.is_from_indices(node))
        return self._compiled(va.unary(node.op, int64 if wide else node.a.dtype), node.a, wide=wide)

    def visit_Binary(self, node: ex.Binary) -> Run:
        """Compile an operator with two operands."""
        if node.op in ex.LOGICAL:
            return self._logical(node)
        wide = node.a.dtype == int32 and (self.wide or node.op in ex.COMPARISONS or self.is_from_indices(node))
        return self._compiled(va.binary(node.op, int64 if wide else node.a.dtype), node.a, node.b, wide=wide)

    def visit_Cast(self, node: ex.Cast) -> Run:
        """Compile a conversion."""
        return self._compiled(va.cast(node.a.dtype, node.type), node.a, wide=node.type == int64)

    def visit_Load(self, node: ex.Load) -> Run:
        """Compile the load of an element."""
        memory, span = self.memory[node.buffer], node.span or self.span
        index = self.index(node)
        return lambda: memory.load(index(), span)

    def index(self, node: Any) -> Run:
        """Compile the one index of an access; a variable has none."""
        return self.compile(node.indices[0], True) if node.indices else Fixed(0)

    def visit_Call(self, node: ex.Call) -> Run:
        """Compile a call."""
        if node.name in self.calls.table:
            return self.calls.compile(node, self)
        function = va.mathematics(node.name, node.args[0].dtype, node.type)
        return self._applied(function, [self.element(a) for a in node.args])

    def _logical(self, node: ex.Binary) -> Run:
        """Compile `and` or `or`; the second operand runs only for threads that need it."""
        first, second, threads = self.compile(node.a), self.compile(node.b), self.threads
        ends = node.op == "or"  # the value of the first that decides
        if isinstance(first, Fixed) and isinstance(second, Fixed):
            a, b = first(), second()
            return Fixed(a | b if ends else a & b)

        def run() -> Value:
            a = first()
            if not isinstance(a, np.ndarray):
                return a if a is ends else second()
            b = _compute_where(threads, ~a if ends else a, second)
            return a if b is None else a | b if ends else a & b

        return run

    def visit_Select(self, node: ex.Select) -> Run:
        """Compile a choice between two values."""
        dtype = int64 if self.wide or (node.dtype == int32 and self.is_from_indices(node)) else node.dtype
        wide = dtype is not node.dtype
        condition, yes, no = self.compile(node.condition), self.compile(node.a, wide), self.compile(node.b, wide)
        threads, width = self.threads, va.carrier(dtype)
        if all(isinstance(r, Fixed) for r in (condition, yes, no)):
            a, b = np.asarray(yes(), width), np.asarray(no(), width)
            return Fixed(va.number(np.asarray(np.where(condition(), a, b), width), dtype))

        def run() -> Value:
            c = condition()
            if not isinstance(c, np.ndarray):
                return yes() if c else no()
            a, b = _compute_where(threads, c, yes), _compute_where(threads, ~c, no)
            if a is None or b is None:
                return no() if b is None and a is None else b if a is None else a
            return np.where(c, np.asarray(a, width), np.asarray(b, width))

        return run


def _in_64_bits(value: Value) -> Value:
    """Widen an array to int64; leave a number unchanged."""
    return value.astype(np.int64) if isinstance(value, np.ndarray) else value


def _compute_where(threads: Threads, condition: Value, run: Run) -> Value:
    """Compute a value for the threads where `condition` holds; return None if no running thread needs it."""
    some, mask = threads.narrowed(condition)
    if not some:
        return None
    outer, threads.mask = threads.mask, mask
    try:
        return run()
    finally:
        threads.mask = outer
