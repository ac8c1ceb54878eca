# SPDX-License-Identifier: Apache-2.0
"""Names that `T` does not have: an author asks for one by mistake, or because TileLang has it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from torch_tile.diagnostics.errors import TileError, diagnose
from torch_tile.language.trace import author_span

# What to write for names of TileLang that have no counterpart of the same name.
INSTEAD = {
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
    "Var": "name sizes by T.dynamic, and variables by T.alloc_var",
    "annotate_safe_value": "reads outside a tensor give 0; for more write `T.if_then_else(i < n, A[i], value)`",
    "activemask": "all 32 lanes of a warp take part in what lanes do together",
    "sync_grid": "T.arrive_last tells which block is the last to arrive; several T.Kernel in one function run in order",
    "launch_thread": "T.Kernel(blocks, threads=n) launches; T.get_thread_binding(dim) names the running thread",
    "import_source": "kernels hold no CUDA text: write it in the language",
    "call_extern": "kernels hold no CUDA text: write it in the language",
    "access_ptr": "the language has no pointers: give elements A[i, j] and regions A[a:b, :]",
    "tvm_access_ptr": "the language has no pointers: give elements A[i, j] and regions A[a:b, :]",
    "make_tensor": "the language has no pointers: give every tensor as a parameter",
    "annotate_pass_configs": "give pass_configs to torch_tile.jit or torch_tile.compile",
    "annotate_compile_flags": "give compile_flags to torch_tile.jit or torch_tile.compile",
    "ieee_add": "write `x + y`; products and sums may be fused, which rounds once",
    "ieee_sub": "write `x - y`; products and sums may be fused, which rounds once",
    "ieee_mul": "write `x * y`; products and sums may be fused, which rounds once",
    "ieee_fmaf": "write `T.fma(x, y, z)`",
    "ieee_fdiv": "write `x / y`",
    "ieee_frcp": "write `1 / x`",
    "ieee_fsqrt": "write `T.sqrt(x)`",
    "ieee_frsqrt": "write `T.rsqrt(x)`",
    "add2": "write `x + y` in T.Parallel or T.vectorized",
    "sub2": "write `x - y` in T.Parallel or T.vectorized",
    "mul2": "write `x * y` in T.Parallel or T.vectorized",
    "fma2": "write `T.fma(x, y, z)` in T.Parallel or T.vectorized",
    "alloc_tmem": "tensor memory is sm_100's: accumulate in T.alloc_fragment",
    "tcgen05_gemm": "T.gemm chooses the instruction; sm_100's own are not supported",
    "gemm_sp": "sparse products are not supported: T.gemm multiplies dense tiles",
    "rng_init": "give random numbers as a tensor",
    "rng_rand": "give random numbers as a tensor",
    "rng_rand_float": "give random numbers as a tensor",
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
