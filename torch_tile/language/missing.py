# SPDX-License-Identifier: Apache-2.0
"""Names that `T` does not have: an author asks for one by mistake, or because TileLang has it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from ..diagnostics import TileError, diagnose
from .trace import author_span

# What to write for names of TileLang that have no counterpart of the same name.
INSTEAD = {
    "view": "index the buffer as it is, or allocate one of that shape and T.copy to it",
    "reshape": "index the buffer as it is, or allocate one of that shape and T.copy to it",
    "sum": "T.reduce_sum(src, dst, dim) adds up tiles; `+` adds values",
    "any": "T.any_of(flags) asks about a tile; `or` joins conditions",
    "all": "T.all_of(flags) asks about a tile; `and` joins conditions",
    "where": "write `a if c else b`, or T.if_then_else(c, a, b)",
    "zeros": "allocate by T.alloc_fragment or T.alloc_shared, then T.clear(tile)",
    "full": "allocate by T.alloc_fragment or T.alloc_shared, then T.fill(tile, value)",
    "load": "read elements as A[i, j], tiles by T.copy(A[i, j], tile)",
    "store": "write elements as A[i, j] = x, tiles by T.copy(tile, A[i, j])",
    "dot": "T.gemm(a, b, c) adds the product of tiles to c",
    "matmul": "T.gemm(a, b, c) adds the product of tiles to c",
    "arange": "loop by `for i in T.Parallel(n)`, whose i counts from 0",
    "program_id": "`with T.Kernel(...) as (bx, by)` names the block's indices",
    "range": "`for i in range(n)` is a loop of the device, as T.serial is",
    "loop_break": "write `break`",
    "exp10": "write `T.exp2(x * 3.321928094887362)`",
    "Var": "name sizes by T.dynamic, and variables by T.alloc_var",
    "tvm_thread_allreduce": "keep partial results in a fragment and fold them by T.reduce_sum, T.reduce_max, ...",
    "warp_reduce_sum": "keep values in a fragment and fold them by T.reduce_sum",
    "warp_reduce_max": "keep values in a fragment and fold them by T.reduce_max",
    "warp_reduce_min": "keep values in a fragment and fold them by T.reduce_min",
    "annotate_safe_value": "reads outside a tensor give 0; for more write `T.if_then_else(i < n, A[i], value)`",
    "alloc_cluster_barrier": "blocks of a cluster meet at T.cluster_sync()",
    "ptx_cp_async": "T.async_copy(src, dst) is asynchronous, and so are copies in T.Pipelined loops",
    "tma_load": "T.tma_copy(src, dst, barrier=...) copies in bulk",
    "tma_store": "T.tma_copy(src, dst) copies in bulk",
}  # fmt: skip


class UnknownName(TileError, AttributeError):
    """`T.name` where there is no such name: shows the author's line, and is what `hasattr` asks for."""


def unknown_name(name: str, known: Iterable[str]) -> UnknownName:
    """The error for `T.name`, to be raised by the caller: with what to write instead, or the nearest `known` names."""
    fix = INSTEAD.get(name, "")
    if not fix:
        spellings = {n.lower(): n for n in known if not n.startswith("_")}
        near = get_close_matches(name.lower(), spellings, cutoff=0.75)
        meant = " or ".join(f"T.{spellings[n]}" for n in near)
        fix = f"did you mean {meant}?" if near else "see docs/writing-kernels.md for what the language offers"
    return UnknownName(diagnose("unknown_name", author_span(), name=name, fix=fix))
