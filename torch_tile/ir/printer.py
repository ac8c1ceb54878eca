# SPDX-License-Identifier: Apache-2.0
"""Print any node as text of the language. The text of a Program traces back to an `alike` Program.

One exception: a name for a literal or for another name, which simplify_stmt removes, reads back as its value.
"""

from __future__ import annotations

import builtins
import json
import keyword
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import Any

from torch_tile.hardware import WARPGROUP
from torch_tile.ir import stmt
from torch_tile.ir.buffer import Buffer, Range, Region, TensorMap
from torch_tile.ir.dtype import DType
from torch_tile.ir.expr import (
    COMPARISONS,
    Address,
    Binary,
    Call,
    Cast,
    Const,
    Expr,
    Load,
    Select,
    Unary,
    Var,
    is_narrow,
    is_zero,
    natural,
    to_expr,
)
from torch_tile.ir.node import Node, printers, walk

# Expressions, regions and buffers as text of the language, and the names of symbols.
#
# Names are the author's, made valid and unique among what is visible (`x`, `x_1`). Parentheses and types of literals
# appear only where the language would otherwise read something else.

PRECEDENCE = {
    "or": 1, "and": 2, "not": 3, "==": 4, "!=": 4, "<": 4, "<=": 4, ">": 4, ">=": 4, "|": 5, "^": 6, "&": 7, "<<": 8,
    ">>": 8, "+": 9, "-": 9, "*": 10, "/": 10, "//": 10, "%": 10,
}  # fmt: skip
UNARY, ATOM = 11, 12
TARGET_LEVEL: set[str] = set()  # calls that are no functions of the language; intrinsics add theirs
RESERVED = {"T", *keyword.kwlist, *dir(builtins)}


class Names:
    """The names of symbols in a text. A loop variable's name is free after its loop; other names are used once."""

    def __init__(self) -> None:
        self._of: dict[Node, str] = {}
        self._visible: set[str] = set()
        self._used: set[str] = set()
        self._once: set[str] = set()

    def __call__(self, symbol: Var | Buffer) -> str:
        """Return the symbol's name; a symbol that was never bound gets one now."""
        known = self._of.get(symbol)
        return self.bind(symbol) if known is None else known

    def bind(self, symbol: Var | Buffer) -> str:
        """Choose a name for a symbol, not used by any other symbol of the text."""
        name = self._choose(symbol, self._used)
        self._once.add(name)
        return name

    @contextmanager
    def bound(self, symbols: Sequence[Var]) -> Iterator[tuple[str, ...]]:
        """Name loop variables inside the `with`; the names are free afterwards."""
        names = tuple(self._choose(v, self._visible | self._once) for v in symbols)
        yield names
        self._visible.difference_update(names)

    def _choose(self, symbol: Var | Buffer, taken: set[str]) -> str:
        """Choose a name that is valid in Python and not taken."""
        base = re.sub(r"\W", "_", symbol.name) or "x"
        base = f"_{base}" if base[0].isdigit() else f"{base}_" if base in RESERVED else base
        name, count = base, 0
        while name in taken:
            count += 1
            name = f"{base}_{count}"
        self._of[symbol] = name
        self._visible.add(name)
        self._used.add(name)
        return name


class ExprPrinter:
    """Print expressions and regions as strings."""

    def __init__(self) -> None:
        self.names: Names = Names()

    def expr(self, e: Expr, need: int = 0) -> str:
        """Print an expression; in parentheses if it binds weaker than `need`."""
        text, precedence = self._expr(e)
        return f"({text})" if precedence < need else text

    def _expr(self, e: Expr) -> tuple[str, int]:
        """Return the text of an expression and its precedence."""
        if isinstance(e, Const):
            return self._const(e, None)
        if isinstance(e, Var):
            return self.names(e), ATOM
        if isinstance(e, Binary):
            return self._binary(e)
        if isinstance(e, Unary):
            precedence = PRECEDENCE["not"] if e.op == "not" else UNARY
            return f"{e.op}{' ' if e.op == 'not' else ''}{self.expr(e.a, precedence)}", precedence
        if isinstance(e, Cast):
            return f"T.cast({self.expr(e.a)}, {e.type!r})", ATOM
        if isinstance(e, Select):
            plain = all(isinstance(x, Const) and natural(x.value).type == x.type for x in (e.a, e.b))
            a, b = (self.expr(e.a), self.expr(e.b)) if plain else self._pair(e.a, e.b)
            return f"T.if_then_else({self.expr(e.condition)}, {a}, {b})", ATOM
        if isinstance(e, Load):
            return self.element(e.buffer, e.indices), ATOM
        if isinstance(e, Address):
            return f"T.address_of({self.element(e.buffer, e.indices)})", ATOM
        if isinstance(e, Call):
            return self._call(e), ATOM
        if isinstance(e, TensorMap):
            seen = f"{self.names(e.buffer)}, {self.shape(e.sizes)}, {self.shape(e.strides)}"
            return f"T.tensor_map({seen}, box={e.box!r}, swizzle={e.swizzle})", ATOM
        return f"<{type(e).__name__}>", ATOM

    def _binary(self, e: Binary) -> tuple[str, int]:
        """Return the text of a binary expression and its precedence."""
        if e.op in ("min", "max"):
            return f"T.{e.op}({', '.join(self._pair(e.a, e.b))})", ATOM
        if e.op == "//" and isinstance(e.a, Binary) and e.a.op == "+" and isinstance(e.b, Const) and e.b.value > 1:
            top = e.a.b
            if isinstance(top, Const) and top.value == e.b.value - 1 and not isinstance(e.a.a, Const):
                return f"T.ceildiv({', '.join(self._pair(e.a.a, e.b))})", ATOM
        precedence = PRECEDENCE.get(e.op, 0)
        if e.op not in COMPARISONS:
            a, b = self._pair(e.a, e.b, precedence, precedence + 1)
        else:  # a < b < c would be a chain, and 1 < x would be x > 1
            a = self.value(e.a, e.b.dtype, precedence + 1, typed=True)
            b = self.value(e.b, e.a.dtype, precedence + 1)
        return f"{a} {e.op} {b}", precedence

    def _pair(self, a: Expr, b: Expr, need_a: int = 0, need_b: int = 0) -> tuple[str, str]:
        """Print two operands so that they get their types again when read; a plain number takes the type of the other
        one. An integer of fewer than 32 bits does not pass its type on.
        """
        both = isinstance(a, Const) and isinstance(b, Const)
        x = self.value(a, None if both or is_narrow(b.dtype) else b.dtype, need_a, typed=both)
        return x, self.value(b, None if is_narrow(a.dtype) else a.dtype, need_b)

    def value(self, e: Expr, like: DType | None, need: int = 0, typed: bool = False) -> str:
        """Print an expression where a plain number would take the type `like`."""
        if not isinstance(e, Const):
            return self.expr(e, need)
        text, precedence = self._const(e, like, typed)
        return f"({text})" if precedence < need else text

    def _const(self, c: Const, like: DType | None, typed: bool = False) -> tuple[str, int]:
        """Return the text of a constant, with its type where the context does not tell it."""
        value = c.value
        if c.type.is_float and not math.isfinite(value):
            if value != value:
                return f'{c.type!r}(float("nan"))', ATOM
            return (f"T.infinity({c.type!r})", ATOM) if value > 0 else (f"-T.infinity({c.type!r})", UNARY)
        text = repr(float(value) if c.type.is_float else bool(value) if c.type.kind == "bool" else int(value))
        if not typed and to_expr(value, like).dtype == c.type:
            return text, UNARY if text[0] == "-" else ATOM
        return f"{c.type!r}({text})", ATOM

    def element(self, buffer: Buffer, indices: Sequence[Expr]) -> str:
        """Print `A[i, j]`; just the name for a T.alloc_var, which has no dimensions."""
        name = self.names(buffer)
        return f"{name}[{', '.join(self.expr(i) for i in indices)}]" if indices else name

    def _call(self, e: Call) -> str:
        """Return the text of a call."""
        if e.name == "reinterpret":
            return f"T.reinterpret({self.value(e.args[0], None, typed=True)}, {e.type!r})"
        if e.options or e.name in TARGET_LEVEL or any(isinstance(a, Address) for a in e.args):
            options = [f"dtype={e.type!r}"] + ([f"options={literal(e.options)}"] if e.options else [])
            return f"T.call({', '.join([quoted(e.name), *(self.value(a, None) for a in e.args), *options])})"
        args = [self.value(a, next((b.dtype for b in e.args if not isinstance(b, Const)), None)) for a in e.args]
        return f"T.{e.name}({', '.join(args)})"

    def region(self, r: Region) -> str:
        """Print a region as slices; just the name for a whole buffer."""
        name = self.names(r.buffer)
        whole = all(
            x.keep and is_zero(x.start) and _same_size(x.extent, size)
            for x, size in zip(r.ranges, r.buffer.shape, strict=True)
        )
        return name if whole else f"{name}[{', '.join(self.range(x) for x in r.ranges)}]"

    def range(self, r: Range) -> str:
        """Print `start:stop`, or the index alone."""
        if not r.keep:
            return self.expr(r.start)
        if isinstance(r.start, Const) and isinstance(r.extent, Const):
            return f"{r.start.value}:{r.start.value + r.extent.value}"
        if is_zero(r.start):
            return f"0:{self.expr(r.extent)}"
        return f"{self.expr(r.start)}:{self.expr(Binary('+', r.start, r.extent))}"

    def shape(self, sizes: Sequence[Expr]) -> str:
        """Print a tuple of sizes."""
        return tuple_text([self.expr(s) for s in sizes])

    def tensor_type(self, b: Buffer) -> str:
        """Print the annotation of a tensor parameter."""
        align = "" if b.align is None else f", align={b.align}"
        if b.strides is not None:
            return f"T.StridedTensor({self.shape(b.shape)}, {self.shape(b.strides)}, {b.dtype!r}{align})"
        return f"T.Tensor({self.shape(b.shape)}, {b.dtype!r}{align})"


def literal(value: Any) -> str:
    """Print an option of a call or tile op as a Python literal."""
    if isinstance(value, tuple):
        return tuple_text([literal(item) for item in value])
    spelled = getattr(value, "to_language", None)
    return str(spelled()) if spelled else quoted(value) if isinstance(value, str) else repr(value)


def quoted(text: str) -> str:
    """Return a Python string literal."""
    return json.dumps(text, ensure_ascii=False)


def tuple_text(items: Sequence[str]) -> str:
    """Format texts as a Python tuple."""
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def _same_size(a: Expr, b: Expr) -> bool:
    """Return whether two sizes are the same expression or equal constants."""
    return a is b or (isinstance(a, Const) and isinstance(b, Const) and a.value == b.value)


ALLOCATORS = {"shared": "alloc_shared", "fragment": "alloc_fragment", "local": "alloc_local", "global": "alloc_global"}


def to_text(node: Node) -> str:
    """Print `node` in the language: a whole function for a Program, lines for a statement, else a piece of a line."""
    return Printer().text(node)


printers.append(to_text)


class Printer(ExprPrinter):
    """Print programs and statements as lines."""

    depth: int

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.depth = 0

    def text(self, node: Node) -> str:
        """Print a node of any kind."""
        if isinstance(node, Expr):
            return self.expr(node)
        if isinstance(node, Region):
            return self.region(node)
        if isinstance(node, Range):
            return self.range(node)
        if isinstance(node, Buffer):
            return f"{self.names(node)}: {self.tensor_type(node)}"
        if isinstance(node, stmt.Program):
            self.program(node)
        elif isinstance(node, stmt.Kernel):
            self.kernel(node)
        elif isinstance(node, stmt.Stmt):
            self.statement(node)
        else:
            return f"<{type(node).__name__}>"
        return "\n".join(self.lines)

    def line(self, text: str) -> None:
        """Add a line at the current indentation."""
        self.lines.append("    " * self.depth + text)

    @contextmanager
    def indented(self) -> Iterator[None]:
        """Indent one level deeper inside the `with`."""
        self.depth += 1
        yield
        self.depth -= 1

    # Programs and kernels.

    def program(self, p: stmt.Program) -> None:
        """Print the whole function, run-time sizes first."""
        dims = stmt.dimensions(p)
        known = set(dims)
        for node in walk(p):  # flat buffers no longer show all sizes and strides
            if isinstance(node, Var) and node.role == "dim" and node not in known:
                known.add(node)
                dims.append(node)
        for dim in dims:
            name = self.names.bind(dim)
            kind = "" if dim.type.name == "int32" else f", {dim.type!r}"
            kind += f", multiple_of={dim.multiple}" if dim.multiple != 1 else ""
            self.line(f'{name} = T.dynamic("{name}"{kind})')
        params = []
        for param in p.params:
            name = self.names.bind(param)
            params.append(f"{name}: {self.tensor_type(param) if isinstance(param, Buffer) else repr(param.type)}")
        self.line("@T.prim_func")
        self.line(f"def {p.name}({', '.join(params)}):")
        with self.indented():
            for buffer in (*p.outputs, *p.workspaces):
                maker = "alloc_global" if buffer.origin == "workspace" else "empty"
                self.line(f"{self.names.bind(buffer)} = T.{maker}({self.shape(buffer.shape)}, {buffer.dtype!r})")
            for view in p.views:
                base = view.base
                assert base is not None
                self.line(f"{self.names.bind(view)} = T.view({self.names(base)}, {self.shape(view.shape)})")
            if p.switches:
                configs = ", ".join(f'"{stmt.SWITCH_KEYS[name]}": True' for name in p.switches)
                self.line(f"T.annotate_pass_configs({{{configs}}})")
            for condition in p.assumed:
                self.line(f"T.assume({self.expr(condition)})")
            for kernel in p.kernels:
                self.kernel(kernel)
            if p.outputs:
                self.line(f"return {', '.join(self.names(b) for b in p.outputs)}")

    def kernel(self, k: stmt.Kernel) -> None:
        """Print `with T.Kernel(...)` and its body."""
        grid = ", ".join(self.expr(g) for g in k.grid)
        threads = repr(k.threads[0]) if len(k.threads) == 1 else repr(k.threads)
        threads += f", shared_bytes={k.shared_bytes}" if k.shared_bytes else ""
        threads += f", cluster_dims={k.cluster}" if k.cluster != (1, 1, 1) else ""
        with self.names.bound(k.blocks) as names:
            blocks = names[0] if len(names) == 1 else tuple_text(names)
            self.line(f"with T.Kernel({grid}, threads={threads}) as {blocks}:")
            with self.indented():
                if k.min_blocks > 1:
                    self.line(f"T.annotate_min_blocks_per_sm({k.min_blocks})")
                if k.swizzle:
                    self.line(f'T.use_swizzle({k.swizzle[0]}, "{k.swizzle[1]}")')
                if k.thread is not None:
                    self.line(f"{self.names.bind(k.thread)} = T.thread_index()")
                self.block(k.body, empty=not k.swizzle and k.min_blocks == 1 and k.thread is None)

    # Statements.

    def block(self, b: stmt.Block, empty: bool = True) -> None:
        """Print statements in order, `pass` if there are none."""
        for s in b.stmts:
            self.statement(s)
        if not b.stmts and empty:
            self.line("pass")

    def body(self, b: stmt.Block) -> None:
        """Print a block, one level deeper."""
        with self.indented():
            self.block(b)

    def statement(self, s: stmt.Stmt) -> None:
        """Print one statement."""
        write = _STATEMENTS.get(type(s))
        if write is not None:
            write(self, s)
        elif isinstance(loop := getattr(s, "loop", None), stmt.For):  # an op on a whole loop
            self._for(loop, "asynchronous=True")
        elif isinstance(s, stmt.TileOp):
            self.line(self._tile_op(s))
        else:
            self.line(f"<{type(s).__name__}>")

    def _for(self, f: stmt.For, *options: str) -> None:
        """Print a loop."""
        first = [self.expr(x) for x in f.starts]
        last = [self.expr(x) for x in f.stops]
        if f.kind is stmt.LoopKind.PARALLEL:
            args = last
        else:
            args = last if is_zero(f.starts[0]) and f.step == 1 else [first[0], last[0]]
            args += [str(f.step)] if f.step != 1 else []
        if f.kind is stmt.LoopKind.PIPELINED:
            args.append(f"num_stages={f.stages}")
            args += [f"{k}={list(v)!r}" for k, v in (("order", f.order), ("stage", f.stage)) if v]
        args += [*options, *["ping_pong=True"] * f.ping_pong, *["independent=True"] * f.independent]
        args += [f"unroll_factor={f.factor}"] * (f.factor > 0)
        args += [] if f.skip is None else [f"skip={self.expr(f.skip)}"]
        if f.layout is not None:
            args.append(f'loop_layout="{f.layout}"')
        with self.names.bound(f.vars) as names:
            name = stmt.LoopKind.UNROLLED.value if f.factor else f.kind.value
            self.line(f"for {', '.join(names)} in T.{name}({', '.join(args)}):")
            self.body(f.body)

    def _if(self, s: stmt.If, word: str = "if") -> None:
        """Print a branch."""
        self.line(f"{word} {self.expr(s.condition)}:")
        self.body(s.then)
        rest = s.otherwise.stmts
        if len(rest) == 1 and isinstance(rest[0], stmt.If):
            self._if(rest[0], "elif")
        elif rest:
            self.line("else:")
            self.body(s.otherwise)

    def _while(self, s: stmt.While) -> None:
        """Print a while loop."""
        self.line(f"while {self.expr(s.condition)}:")
        self.body(s.body)

    def _let(self, s: stmt.Let) -> None:
        """Print the binding of a name."""
        value = self.value(s.value, None, typed=True)
        self.line(f"{self.names.bind(s.var)} = {value}")

    def _alloc(self, s: stmt.Alloc) -> None:
        """Print an allocation."""
        b = s.buffer
        name = self.names.bind(b)
        if b.scope == "var":
            init = "..." if s.init is None else self.value(s.init, b.dtype)
            self.line(f"{name} = T.alloc_var({b.dtype!r}, {init})")
        else:
            if b.scope == "barrier":
                placed = "" if b.offset is None else f", offset={b.offset}"
                self.line(f"{name} = T.alloc_barrier({b.arrivals}, {self.shape(b.shape)}{placed})")
                return
            if b.origin == "address" and s.init is not None:
                steps = "" if b.strides is None else f", strides={self.shape(b.strides)}"
                at = self.value(s.init, None, typed=True)
                self.line(f"{name} = T.make_tensor({at}, {self.shape(b.shape)}, {b.dtype!r}{steps}, align={b.align})")
                return
            placed = "" if b.layout is None else f', layout="{b.layout}"'
            placed += "" if b.offset is None else f", offset={b.offset}"
            self.line(f"{name} = T.{ALLOCATORS[b.scope]}({self.shape(b.shape)}, {b.dtype!r}{placed})")

    def _role(self, s: stmt.Role) -> None:
        """Print a warp-specialised role."""
        registers = f", registers={s.registers}" if s.registers else ""
        groups = ", ".join(str(n // WARPGROUP) for n in range(s.first, s.first + s.count, WARPGROUP))
        whole = s.by_hand and s.first % WARPGROUP == s.count % WARPGROUP == 0
        hand = ", by_hand=True" if s.by_hand else ""
        what = f"ws({groups}" if whole else f"role({s.first}, {s.count}{hand}"
        self.line(f"with T.{what}{registers}):")
        self.body(s.body)

    def _store(self, s: stmt.Store) -> None:
        """Print a store."""
        target = self.element(s.buffer, s.indices)
        self.line(f"{target} = {self.value(s.value, s.buffer.dtype)}")

    def _print(self, s: stmt.Print) -> None:
        """Print a T.print statement."""
        if s.value is None:
            self.line(f"T.print(msg={quoted(s.message)})")
            return
        value = self.region(s.value) if isinstance(s.value, Region) else self.expr(s.value)
        self.line(f"T.print({value}, {quoted(s.message)})")

    def _tile_op(self, op: stmt.TileOp) -> str:
        """Print a tile op: regions and expressions first, then options that differ from their default."""
        target = getattr(op, "dst", None)
        like = target.buffer.dtype if isinstance(target, Region) else None
        operands, options = [], []
        for f in fields(op):
            value = getattr(op, f.name)
            if isinstance(value, Region):
                operands.append(self.region(value))
            elif isinstance(value, Expr):
                operands.append(self.value(value, like))
            elif f.name != "span" and (f.default is MISSING or value != f.default):
                options.append(f"{f.name}={literal(value)}")
        return f"T.{getattr(op, 'op_name', type(op).__name__)}({', '.join(operands + options)})"


_STATEMENTS: dict[type[stmt.Stmt], Callable[[Printer, Any], None]] = {
    stmt.Alloc: Printer._alloc,
    stmt.Assert: lambda p, s: p.line(f"T.device_assert({p.expr(s.condition)}, {quoted(s.message)})"),
    stmt.Block: lambda p, s: p.block(s),
    stmt.Break: lambda p, s: p.line("break"),
    stmt.Continue: lambda p, s: p.line("continue"),
    stmt.Do: lambda p, s: p.line(f"T.evaluate({p.expr(s.call)})"),
    stmt.For: Printer._for,
    stmt.If: Printer._if,
    stmt.Let: Printer._let,
    stmt.Print: Printer._print,
    stmt.Role: Printer._role,
    stmt.Store: Printer._store,
    stmt.While: Printer._while,
}
