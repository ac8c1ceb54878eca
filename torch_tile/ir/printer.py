# SPDX-License-Identifier: Apache-2.0
"""Any node as text of the language itself: what is printed for a Program traces back to an `alike` Program.

One exception: a name for a literal or for another name, which simplify_stmt removes, reads back as what it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import Any

from torch_tile.ir import stmt
from torch_tile.ir.buffer import Buffer, Range, Region
from torch_tile.ir.expr import Expr, Var
from torch_tile.ir.expr_printer import ExprPrinter, is_zero, literal, quoted, tuple_text
from torch_tile.ir.node import Node, walk

ALLOCATORS = {"shared": "alloc_shared", "fragment": "alloc_fragment", "local": "alloc_local", "global": "alloc_global"}


def to_text(node: Node) -> str:
    """`node` in the language: a whole function for a Program, lines for a statement, else a piece of a line."""
    return Printer().text(node)


class Printer(ExprPrinter):
    """Collects lines; expressions come back as strings."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.depth = 0

    def text(self, node: Node) -> str:
        """A node of any kind."""
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
        """One level deeper."""
        self.depth += 1
        yield
        self.depth -= 1

    # Programs and kernels.

    def program(self, p: stmt.Program) -> None:
        """The whole function, sizes known at run time first."""
        dims = stmt.dimensions(p)
        known = {id(dim) for dim in dims}
        for node in walk(p):  # flat buffers no longer show all sizes and strides
            if isinstance(node, Var) and node.role == "dim" and id(node) not in known:
                known.add(id(node))
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
            for kernel in p.kernels:
                self.kernel(kernel)
            if p.outputs:
                self.line(f"return {', '.join(self.names(b) for b in p.outputs)}")

    def kernel(self, k: stmt.Kernel) -> None:
        """`with T.Kernel(...)` and its body."""
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
        """Statements in order, `pass` if there are none."""
        for s in b.stmts:
            self.statement(s)
        if not b.stmts and empty:
            self.line("pass")

    def body(self, b: stmt.Block) -> None:
        """A block, one level deeper."""
        with self.indented():
            self.block(b)

    def statement(self, s: stmt.Stmt) -> None:
        """One statement."""
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
        if f.layout is not None:
            args.append(f'loop_layout="{f.layout}"')
        with self.names.bound(f.vars) as names:
            self.line(f"for {', '.join(names)} in T.{f.kind.value}({', '.join(args)}):")
            self.body(f.body)

    def _if(self, s: stmt.If, word: str = "if") -> None:
        self.line(f"{word} {self.expr(s.condition)}:")
        self.body(s.then)
        rest = s.otherwise.stmts
        if len(rest) == 1 and isinstance(rest[0], stmt.If):
            self._if(rest[0], "elif")
        elif rest:
            self.line("else:")
            self.body(s.otherwise)

    def _while(self, s: stmt.While) -> None:
        self.line(f"while {self.expr(s.condition)}:")
        self.body(s.body)

    def _let(self, s: stmt.Let) -> None:
        value = self.value(s.value, None, typed=True)
        self.line(f"{self.names.bind(s.var)} = {value}")

    def _alloc(self, s: stmt.Alloc) -> None:
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
            placed = "" if b.layout is None else f', layout="{b.layout}"'
            placed += "" if b.offset is None else f", offset={b.offset}"
            self.line(f"{name} = T.{ALLOCATORS[b.scope]}({self.shape(b.shape)}, {b.dtype!r}{placed})")

    def _role(self, s: stmt.Role) -> None:
        registers = f", registers={s.registers}" if s.registers else ""
        groups = ", ".join(str(n // 128) for n in range(s.first, s.first + s.count, 128))
        what = f"ws({groups}" if s.by_hand else f"role({s.first}, {s.count}"
        self.line(f"with T.{what}{registers}):")
        self.body(s.body)

    def _store(self, s: stmt.Store) -> None:
        target = self.element(s.buffer, s.indices)
        self.line(f"{target} = {self.value(s.value, s.buffer.dtype)}")

    def _print(self, s: stmt.Print) -> None:
        value = self.region(s.value) if isinstance(s.value, Region) else self.expr(s.value)
        self.line(f"T.print({value}, {quoted(s.message)})")

    def _tile_op(self, op: stmt.TileOp) -> str:
        """Regions and expressions first, then options that differ from their default."""
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
