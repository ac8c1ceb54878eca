# SPDX-License-Identifier: Apache-2.0
"""Find asynchronous copies of an author's in kernels that wait for none, and read the tile."""

from __future__ import annotations

from torch_tile.diagnostics.errors import Diagnostic, diagnose
from torch_tile.intrinsics.base import intrinsic_of
from torch_tile.intrinsics.traits import Sync
from torch_tile.ir.node import find
from torch_tile.ir.stmt import Do, Program
from torch_tile.tileop.copy.cp_async import AsyncCopy
from torch_tile.tileop.uses import reads_of


def never_waited(program: Program) -> list[Diagnostic]:
    """Return a diagnostic for the first asynchronous copy of each kernel without a wait."""
    found = []
    for kernel in program.kernels:
        copy = next(find(kernel.body, AsyncCopy), None)
        if copy is None or copy.dst.buffer not in reads_of(kernel.body):
            continue
        calls = (intrinsic_of(do) for do in find(kernel.body, Do))
        if not any(call is None or call.sync in (Sync.DRAIN, Sync.WAIT, Sync.BARRIER) for call in calls):
            found.append(diagnose("never_waited", copy.span, buffer=copy.dst.buffer.name))
    return found
