# SPDX-License-Identifier: Apache-2.0
"""Print the statements that read alike in C++ for the CPU and in CUDA."""

from __future__ import annotations

from torch_tile.codegen.c_text import Text, storage
from torch_tile.codegen.lines import Lines
from torch_tile.diagnostics.errors import InternalError
from torch_tile.ir.node import Visitor
from torch_tile.ir.stmt import Alloc, Block, Break, Continue, If, Stmt, Store, While


def advance(kind: str, name: str, last: str, step: int, leaves: bool) -> str:
    """Return the text that advances a loop's variable; where the last sum `leaves` the type, it stops at `last`."""
    if step == 1:
        return f"++{name}"
    if not leaves:
        return f"{name} += {step}"
    unsigned = "uint32_t" if kind == "int" else "uint64_t"
    return f"{name} = ({unsigned})({last}) - ({unsigned}){name} > {step}u ? {name} + {step} : {last}"


class Statements(Visitor, Lines):
    """Write statements line by line. A target adds loops, names, buffers, calls and what it prints otherwise."""

    language: str  # for errors
    text: Text

    def body(self, block: Block) -> None:
        """Write the statements of a block."""
        for stmt in block.stmts:
            self.statement(stmt)

    def statement(self, stmt: Stmt) -> None:
        """Write one statement."""
        method = self.method_of(stmt)
        if method is None:
            raise InternalError(f"no {self.language} for {type(stmt).__name__}", stmt.span)
        method(stmt)

    def visit_Block(self, block: Block) -> None:
        """Write statements in a scope."""
        self.open()
        self.body(block)
        self.close()

    def visit_While(self, loop: While) -> None:
        """Write a loop with a condition."""
        self.open(f"while ({self.text.value(loop.condition)})", loop.span)
        self.body(loop.body)
        self.close()

    def visit_If(self, node: If) -> None:
        """Write a branch."""
        self.open(f"if ({self.text.value(node.condition)})", node.span)
        self.body(node.then)
        if node.otherwise.stmts:
            self.otherwise()
            self.body(node.otherwise)
        self.close()

    def visit_Store(self, store: Store) -> None:
        """Write a store."""
        convert = self.text.assigned if store.buffer.scope == "var" else self.text.converted
        element = self.text.element(store.buffer, store.indices)
        self.line(f"{element} = {convert(store.value, store.buffer.dtype)};", store.span)

    def visit_Break(self, node: Break) -> None:
        """Write the end of a loop."""
        self.line("break;", node.span)

    def visit_Continue(self, node: Continue) -> None:
        """Write the end of an iteration."""
        self.line("continue;", node.span)

    def variable(self, node: Alloc) -> None:
        """Declare a variable."""
        buffer, name = node.buffer, self.text.names.of(node.buffer)
        init = f" = {self.text.assigned(node.init, buffer.dtype)}" if node.init is not None else ""
        self.line(f"{storage(buffer.dtype)} {name}{init};", node.span)

    def tensor(self, node: Alloc) -> None:
        """Declare a tensor at an address that the kernel computes."""
        kind, name = storage(node.buffer.dtype), self.text.names.of(node.buffer)
        if node.init is None:
            raise InternalError(f"`{node.buffer.name}` has no address", node.span)
        address = self.text.assigned(node.init, node.init.dtype)
        self.line(f"{kind}* const {name} = reinterpret_cast<{kind}*>({address});", node.span)

    def local_array(self, node: Alloc, alignment: int) -> None:
        """Declare an array that one thread holds, aligned to so many bytes."""
        buffer = node.buffer
        size = buffer.static_shape
        if size is None:
            raise InternalError(f"`{buffer.name}` has no static size", node.span)
        name = self.text.names.of(buffer)
        self.line(f"alignas({alignment}) {storage(buffer.dtype)} {name}[{max(1, size[0])}];", node.span)
