# SPDX-License-Identifier: Apache-2.0
"""Find results that no kernel writes. No pass is imported, as programs from the cache are looked at, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch_tile.diagnostics.errors import Diagnostic, diagnose
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address
from torch_tile.ir.node import find
from torch_tile.ir.stmt import Program, Store
from torch_tile.tileop.base import RegisteredOp


def unwritten_results(program: Program, out_idx: Sequence[int] = ()) -> list[Diagnostic]:
    """Return a diagnostic for each tensor that is returned, of T.empty or of `out_idx`, and that no kernel can write.

    It holds garbage, as in TileLang: compile_program warns of it.
    """
    named = [b for b in (program.params[p] for p in out_idx) if isinstance(b, Buffer)]
    unwritten = never_written(program, (*program.outputs, *named))
    return [diagnose("unwritten_result", b.span, buffer=b.name, fix=_fix(program, b, named)) for b in unwritten]


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
        buffers = [r.buffer for r in node.accesses()[1]] if isinstance(node, RegisteredOp) else [node.buffer]
        for buffer in buffers:
            missing.pop(buffer.base or buffer, None)
        if not missing:
            break
    return list(missing)
