# SPDX-License-Identifier: Apache-2.0
"""Tell whether statements certainly write every element of a tile before anything reads it.

Whole boxes are compared as regions. Stores of threads are tried at all values of the thread and of the loops around.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch_tile.ir.arith_util import Expand
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Const, Var
from torch_tile.ir.node import contains, symbols
from torch_tile.ir.scope_facts import values_for_names
from torch_tile.ir.stmt import Block, Break, Continue, For, Stmt, Store
from torch_tile.lowering.analysis.thread_values import Numbers
from torch_tile.lowering.pipelining.copy_plan import first_access
from torch_tile.tileop.uses import reads_of

MOST_POINTS = 1 << 20  # values of the variables of one store that are tried

_Spans = tuple[tuple[Var, range], ...]  # a variable and its values


def writes_whole(stmts: Sequence[Stmt], tile: Buffer, thread: Var | None, threads: int) -> bool:
    """Return whether `stmts`, run by `threads` threads, write all of a tile of known size and read no old element."""
    first = first_access(stmts, tile)
    if first != "none" or tile.static_shape is None:
        return first == "written"
    if any(tile in reads_of(one) or contains(one, Break, Continue) for one in stmts):
        return False
    import numpy as np

    names = values_for_names(*stmts)
    seen = np.zeros(math.prod(tile.static_shape), bool)
    start: _Spans = () if thread is None else ((thread, range(threads)),)
    for store, spans in _stores(stmts, start):
        places = _places(store, spans, names) if store.buffer is tile else None
        if places is not None:
            seen[places] = True
    return bool(seen.all())


def _stores(stmts: Sequence[Stmt], spans: _Spans) -> Iterator[tuple[Store, _Spans]]:
    """Yield the stores that certainly run, each with the variables of the loops around it."""
    for one in stmts:
        if isinstance(one, Store):
            yield one, spans
        elif isinstance(one, Block):
            yield from _stores(one.stmts, spans)
        elif isinstance(one, For):
            ends = [*one.starts, *one.stops]
            if all(isinstance(end, Const) for end in ends):
                pairs = zip(one.starts, one.stops, strict=True)
                values = (range(int(a.value), int(b.value), one.step) for a, b in pairs)  # type: ignore[attr-defined]
                yield from _stores(one.body.stmts, (*spans, *zip(one.vars, values, strict=True)))


def _places(store: Store, spans: _Spans, names: Expand) -> Any:
    """Return the elements, counted by rows, that a store reaches; None if something unknown decides them."""
    import numpy as np

    indices = [names(index) for index in store.indices]
    used = [(var, span) for var, span in spans if any(var in symbols(index) for index in indices)]
    if not 0 < math.prod(len(span) for _, span in used) <= MOST_POINTS:
        return None
    grid = np.meshgrid(*(np.arange(s.start, s.stop, s.step) for _, s in used), indexing="ij", sparse=True)
    values = {var: axis for (var, _), axis in zip(used, grid, strict=True)}
    thread = next((axis for var, axis in values.items() if var.role == "thread"), None)
    numbers = Numbers(values, thread)
    if not all(map(numbers.knows, indices)):
        return None
    flat: Any = 0
    for index, size in zip(indices, store.buffer.static_shape or (), strict=True):
        at = numbers(index)
        if np.min(at) < 0 or np.max(at) >= size:
            return None
        flat = flat * size + at
    return np.asarray(flat).reshape(-1)
