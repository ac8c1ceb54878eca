# SPDX-License-Identifier: Apache-2.0
"""Run calls of an author's own text by their meaning in Python, thread by thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from torch_tile.intrinsics.base import Access
from torch_tile.intrinsics.foreign import meaning_of
from torch_tile.simulator.simt import values as va
from torch_tile.simulator.simt.calls import Place
from torch_tile.simulator.simt.memory import Memory
from torch_tile.simulator.simt.values import Value


def run_foreign(p: Place) -> Callable[[], Value]:
    """Compile a call of foreign text: pass an array for each pointer and write back the arrays that may change."""
    meaning, threads = meaning_of(p.call, p.span), p.threads
    accesses = {access.operand: access for access in p.intrinsic.effects(p.call)}

    def run() -> Value:
        ids = threads.active()
        given = [threads.each(operand(), ids) for operand in p.operands]
        found = np.zeros(len(ids), va.carrier(p.call.type))
        for n in range(len(ids)):
            who, args, written = ids[n : n + 1], [], []
            for number, values in enumerate(given):
                access = accesses.get(number)
                if access is None:
                    args.append(values[n].item())
                    continue
                memory, at = p.behind(number), values[n : n + 1]
                array = _fetched(memory, access, at, who, p)
                args.append(array)
                if "w" in access.kind:
                    written.append((memory, at, array))
            result = meaning(*args)
            for memory, at, array in written:
                memory.put_rows(at, va.encode(array, memory.dtype)[None], who, p.span)
            if result is not None:
                found[n] = result
        held = va.rounded(found, p.call.type) if p.call.type.is_float else found
        return threads.spread(held, ids)

    return run


def _fetched(memory: Memory, access: Access, at: Any, who: Any, p: Place) -> Any:
    """Fetch the elements behind a pointer; elements that the call only writes begin as 0."""
    count = access.elements if access.elements >= 0 else max(memory.size - int(at[0]), 0)
    if "r" in access.kind:
        raw = memory.rows(at, count, who, p.span)[0]
        return np.array(va.decode(raw, memory.dtype), va.carrier(memory.dtype))
    return np.zeros(count, va.carrier(memory.dtype))
