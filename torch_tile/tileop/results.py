# SPDX-License-Identifier: Apache-2.0
"""Find results that no kernel writes, or only updates, parameters without a use, and programs that write nothing.

No pass is imported, as programs from the cache are looked at, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch_tile.diagnostics.errors import Diagnostic, Span, diagnose
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import LOGICAL, Address, Binary, Load, Select
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Node, children, contains, equal, find, symbols
from torch_tile.ir.stmt import Assert, Do, Print, Program, Store
from torch_tile.tileop.base import RegisteredOp


def unwritten_results(program: Program, out_idx: Sequence[int] = ()) -> list[Diagnostic]:
    """Return a diagnostic for each returned tensor, of T.empty or `out_idx`, that no kernel can write or sets first."""
    named = [b for b in (program.params[p] for p in out_idx) if isinstance(b, Buffer)]
    results = (*program.outputs, *named)
    unwritten = never_written(program, results)
    found = [diagnose("unwritten_result", b.span, buffer=b.name, fix=_fix(program, b, named)) for b in unwritten]
    rest = [b for b in results if not any(b is each for each in unwritten)]
    return found + [diagnose("only_updated", span, buffer=b.name) for b, span in _only_updated(program, rest)]


def unused_parameters(program: Program, out_idx: Sequence[int] = ()) -> list[Diagnostic]:
    """Return a diagnostic for each parameter that no kernel uses, and of which no other use needs a size.

    Results are left out, as `unwritten_results` has them.
    """
    used: set[Any] = set().union(*map(symbols, (*program.kernels, *program.assumed)))
    used |= {buffer.base for buffer in program.views if buffer in used}
    results = {program.params[n] for n in out_idx}
    idle = IdSet(p for p in program.params if p not in used | results and not _may_idle(p.name))
    if not idle:
        return []
    tensors = [p for p in (*program.params, *program.outputs, *program.workspaces) if isinstance(p, Buffer)]
    needed = used.union(*(_sizes(b) for b in tensors if b not in idle))
    span = next((kernel.span for kernel in program.kernels), None)
    found = []
    for one in idle:
        given = set().union(*(_sizes(b) for b in program.params if isinstance(b, Buffer) and b is not one))
        if one not in needed and not (isinstance(one, Buffer) and _sizes(one) & needed - given):
            found.append(diagnose("unused_parameter", one.span or span, name=one.name))
    return found


def _may_idle(name: str) -> bool:
    """Return whether a parameter's name says that nothing uses it."""
    return name.startswith("_") or "unused" in name.lower()


def _sizes(tensor: Buffer) -> frozenset[Any]:
    """Return the symbols in the shape and strides of a tensor."""
    return frozenset().union(*map(symbols, (*tensor.shape, *(tensor.strides or ()))))


def writes_nothing(program: Program) -> list[Diagnostic]:
    """Return a diagnostic for a program that writes none of its tensors, and neither prints, asserts nor calls."""
    speaks = any(contains(k.body, Print, Assert, Do) for k in program.kernels)
    if speaks or program.outputs or not any(isinstance(p, Buffer) for p in program.params):
        return []
    written = (b for k in program.kernels for n in find(k.body, RegisteredOp, Store, Address) for b in _written(n))
    if any(b.scope == "global" for b in written):
        return []
    return [diagnose("writes_nothing", next((k.span for k in program.kernels), None), name=program.name)]


def _written(node: RegisteredOp | Store | Address) -> list[Buffer]:
    """Return the buffers that a statement writes, or that a pointer leads to."""
    return [r.buffer for r in node.accesses()[1]] if isinstance(node, RegisteredOp) else [node.buffer]


def _only_updated(program: Program, tensors: Iterable[Buffer]) -> list[tuple[Buffer, Span | None]]:
    """Return those of `tensors` whose writes all update what stood there, as `B[i] += x`, with the first write."""
    first: IdMap[Buffer, Span | None] = IdMap()
    missing = IdSet(tensors)
    for node in (n for k in program.kernels if missing for n in find(k.body, RegisteredOp, Store, Address)):
        if isinstance(node, RegisteredOp):
            reads, writes = node.accesses()
            written = [
                (w.buffer, any(w.buffer is r.buffer and equal(w.ranges, r.ranges) for r in reads)) for w in writes
            ]
        elif isinstance(node, Store):
            same = (n for n in needed(node.value) if n.buffer is node.buffer and equal(n.indices, node.indices))
            written = [(node.buffer, any(True for _ in same))]
        else:
            written = [(node.buffer, False)]
        for buffer, updates in written:
            whole = buffer.base or buffer
            if whole in missing and not updates:
                missing.discard(whole)
            elif whole in missing and whole not in first:
                first[whole] = node.span
    return [(b, first[b]) for b in tensors if b in missing and b in first]


def _fix(program: Program, result: Buffer, named: Sequence[Buffer]) -> str:
    """Say how a result that nothing writes gets its values: by a statement, or by another position in `out_idx`."""
    write = f"write it, `{result.name}[i] = x` or T.copy(tile, {result.name})"
    place = {param: n for n, param in enumerate(program.params) if isinstance(param, Buffer)}
    if not any(result is each for each in named):
        return write
    idle = never_written(program, place)
    written = [f"{n} (`{b.name}`)" for b, n in place.items() if not any(b is each for each in idle)]
    instead = f", or name what the kernel writes: {', '.join(written)}" if written else ""
    return f"out_idx names it by {place[result]}: {write}{instead}"


def never_written(program: Program, tensors: Iterable[Buffer]) -> list[Buffer]:
    """Return those of `tensors` that no kernel can write. What has a pointer to one may write it.

    The search ends when each tensor has a write, as programs whose text is in the cache are searched, too.
    """
    missing = dict.fromkeys(tensors)
    for node in (n for k in program.kernels if missing for n in find(k.body, RegisteredOp, Store, Address)):
        for buffer in _written(node):
            missing.pop(buffer.base or buffer, None)
        if not missing:
            break
    return list(missing)


def needed(value: Node) -> Iterator[Load]:
    """Yield the loads of which a value is computed whatever its conditions choose."""
    if isinstance(value, Load):
        yield value
    elif isinstance(value, Select):
        yield from needed(value.condition)
    elif isinstance(value, Binary) and value.op in LOGICAL:
        yield from needed(value.a)
    else:
        for child in children(value):
            yield from needed(child)
