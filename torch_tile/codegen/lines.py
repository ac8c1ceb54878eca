# SPDX-License-Identifier: Apache-2.0
"""Collect generated text line by line: scopes are indented, and lines end with the author's line."""

from __future__ import annotations

from torch_tile.codegen.c_text import comment
from torch_tile.diagnostics.errors import Span
from torch_tile.intrinsics.base import starts, syncs
from torch_tile.intrinsics.traits import Engine, Scope, Sync
from torch_tile.ir.expr import Address, Call, Const, Load, Select
from torch_tile.ir.node import Node, children, find, symbols
from torch_tile.ir.stmt import Block, For, LoopKind, Stmt, Store, While


class Lines:
    """Collect text."""

    depth: int

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0

    def line(self, text: str, span: Span | None = None) -> None:
        """Add a line of text, with the author's line."""
        where = f"  // {comment(span.place)}" if span else ""
        self.lines.append("  " * self.depth + text + where)

    def open(self, text: str = "", span: Span | None = None) -> None:
        """Add a line that opens a scope."""
        self.line(f"{text} {{".lstrip(), span)
        self.depth += 1

    def close(self, text: str = "}") -> None:
        """End a scope of the generated text."""
        self.depth -= 1
        self.line(text)

    def otherwise(self, text: str = "") -> None:
        """End a branch and start the other one, under the condition `text` if there is one."""
        self.close(f"}} else {text} {{" if text else "} else {")
        self.depth += 1


# Limits of unrolling CUDA loops: fully if they pick registers, else until the unrolled text is large. NVRTC's time
# grows faster than the text. Beyond some hundred statements a kernel gains nothing and spends registers.

MOST = 192  # statements that unrolling a loop may make
GUARDED = 24  # statements that one guarded element counts as: its guard, its address, and a branch


def pragma(loop: For) -> str | None:
    """Return the pragma line in front of a loop; None leaves the choice to the compiler."""
    if picks_registers(loop):
        return "#pragma unroll"
    if loop.factor:
        return f"#pragma unroll {loop.factor}"
    if loop.kind not in (LoopKind.UNROLLED, LoopKind.VECTOR):
        # Copies of asynchronous products, and their remainder, meet on paths that the assembler cannot follow.
        # Iterations that wait for other threads gain nothing, and producers have few registers.
        if any(starts(n, Engine.WGMMA) or syncs(n, Sync.WAIT, Scope.MBARRIER) for n in find(loop, Call)):
            return "#pragma unroll 1"
        return "#pragma unroll" if _waits_for_loads(loop) else None
    iterations, size = iterations_of(loop), size_of(loop.body)
    if iterations is None or iterations * size <= MOST:
        return "#pragma unroll"
    wanted = max(1, MOST // size)
    return f"#pragma unroll {next(n for n in range(min(wanted, iterations), 0, -1) if iterations % n == 0)}"


def _waits_for_loads(loop: For) -> bool:
    """Return whether a short loop waits for nothing but loads from global memory, which can be under way together."""
    iterations = iterations_of(loop)
    if iterations is None or iterations * size_of(loop.body, all_loops=True) > MOST:
        return False
    if any(isinstance(inner, While) or pragma(inner) is None for inner in find(loop.body, For, While)):
        return False
    if any(syncs(call, sync) for call in find(loop.body, Call) for sync in (Sync.WAIT, Sync.BARRIER, Sync.DRAIN)):
        return False
    return any(load.buffer.scope == "global" for load in find(loop.body, Load))


def iterations_of(loop: For) -> int | None:
    """Return how often the body runs; None if that is not known here."""
    start, stop = loop.starts[0], loop.stops[0]
    if not isinstance(start, Const) or not isinstance(stop, Const):
        return None
    return len(range(int(start.value), int(stop.value), loop.step))


def picks_registers(loop: For) -> bool:
    """Return whether a loop with known bounds indexes local arrays, whose indices must be known at compile time."""
    if iterations_of(loop) is None:
        return False
    var = loop.vars[0]
    return any(
        node.buffer.scope == "local" and any(var in symbols(i) for i in node.indices)
        for node in find(loop.body, Load, Store, Address)
    )


def size_of(node: Node, all_loops: bool = False) -> int:
    """Count a body's statements, multiplied by the repetitions of unrolled loops in it, or of all loops."""
    inner = sum(size_of(child, all_loops) for child in children(node) if isinstance(child, Stmt))
    if isinstance(node, For):
        unrolled = all_loops or node.kind in (LoopKind.UNROLLED, LoopKind.VECTOR) or picks_registers(node)
        return inner * (iterations_of(node) or 1) if unrolled else inner
    if isinstance(node, Store):
        return GUARDED if _is_guarded(node) else 1
    return inner if isinstance(node, Block) else inner + 1


def _is_guarded(store: Store) -> bool:
    """Return whether a bounds check guards the load from global memory that a store takes its value from."""
    value = store.value
    return isinstance(value, Select) and any(n.buffer.scope == "global" for n in find(value, Load))
