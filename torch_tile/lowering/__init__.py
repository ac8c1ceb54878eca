# SPDX-License-Identifier: Apache-2.0
"""The passes of each target, in order, and their runner. A pass is one function of one file, Program to Program."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch_tile.compiler.context import Build, is_watched
from torch_tile.diagnostics.errors import Span, TileError, assertions_as_bugs
from torch_tile.ir.node import contains
from torch_tile.ir.stmt import Program
from torch_tile.ir.verify import Stage, verify
from torch_tile.lowering.common.check import check_kernel, check_limits
from torch_tile.lowering.common.flatten import flatten
from torch_tile.lowering.common.guard_bounds import guard_all_bounds, guard_bounds
from torch_tile.lowering.common.part_overlaps import part_overlaps
from torch_tile.lowering.common.simplify import simplify_program
from torch_tile.lowering.cpu.lower_tile_ops import elide_staging, lower_tile_ops, split_parallel
from torch_tile.lowering.cpu.peel_tails import peel_tails
from torch_tile.lowering.hopper.async_wgmma import DOUBLED, async_wgmma, resolve_ping_pong
from torch_tile.lowering.hopper.choose_wgmma import choose_wgmma
from torch_tile.lowering.hopper.elect_producers import elect_producers
from torch_tile.lowering.hopper.init_mbarriers import init_mbarriers
from torch_tile.lowering.hopper.peel_causal import peel_causal
from torch_tile.lowering.hopper.resolve_own_rows import OWN, resolve_own_rows
from torch_tile.lowering.hopper.resolve_role_registers import resolve_role_registers
from torch_tile.lowering.hopper.start_first_loads import start_first_loads
from torch_tile.lowering.hopper.start_next_tiles import start_next_tiles
from torch_tile.lowering.hopper.tma_store_waits import sink_store_waits
from torch_tile.lowering.hopper.warp_specialize import SPLIT, specialize_warps
from torch_tile.lowering.pipelining.count_stages import count_stages
from torch_tile.lowering.pipelining.prefetch_operands import prefetch_operands
from torch_tile.lowering.pipelining.prune_async_groups import prune_async_groups
from torch_tile.lowering.pipelining.software_pipeline import pipeline_loops
from torch_tile.lowering.pipelining.start_gathers import start_gathers
from torch_tile.lowering.sync.insert_barriers import insert_barriers
from torch_tile.lowering.threads.allocate_shared import allocate_shared
from torch_tile.lowering.threads.bind_threads import bind_threads
from torch_tile.lowering.threads.infer_layouts import infer_layouts
from torch_tile.lowering.threads.recompute_indices import recompute_indices
from torch_tile.lowering.threads.share_divisions import share_divisions
from torch_tile.lowering.threads.slice_fragments import slice_fragments
from torch_tile.lowering.threads.vectorize import vectorize
from torch_tile.lowering.threads.widen_blocks import widen_blocks
from torch_tile.tileop.reduce.op import Reduce

Pass = Callable[[Program], Program]

# The comment on each pass says what holds after it.
CPU_PASSES: tuple[tuple[Pass, Stage], ...] = (
    (check_kernel, Stage.TILE),  # no error that the author can mend is left
    (resolve_own_rows, Stage.TILE),  # all rows of a tile are those of its only thread
    (part_overlaps, Stage.TILE),  # no copy overwrites what it has yet to read
    (elide_staging, Stage.TILE),  # products read right operands from global memory if inside bounds
    (lower_tile_ops, Stage.LOOPS),  # only loops, stores and helper calls
    (split_parallel, Stage.LOOPS),  # every loop has one variable and a known order
    (guard_all_bounds, Stage.LOOPS),  # memory is touched only inside its bounds
    (peel_tails, Stage.LOOPS),  # elementwise loops have no guard in their main part
    (simplify_program, Stage.LOOPS),  # no constant branch, no empty loop
    (flatten, Stage.FLAT),  # one linear index per access
)


def cuda_passes(
    build: Build, no_roles: str = "", single: bool = False, shared_rows: bool = False
) -> tuple[tuple[Pass, Stage], ...]:
    """Return the passes for a GPU; those that ask for the target or report to the author are bound to `build`.

    `no_roles`, a reason, keeps the threads of each kernel together; with `single` operands that threads write keep one
    version. With `shared_rows` no warpgroup has rows of its own.
    """

    def bound(step: Callable[..., Program], *rest: object) -> Pass:
        @functools.wraps(step)
        def run(program: Program) -> Program:
            return step(program, build, *rest)

        return run

    return (
        (check_kernel, Stage.TILE),  # no error that the author can mend is left
        (bound(check_limits), Stage.TILE),  # a GPU can launch the blocks and grids
        (bound(widen_blocks), Stage.TILE),  # accumulators fit into registers, if more threads help
        (part_overlaps, Stage.TILE),  # no copy overwrites what it has yet to read
        (bound(specialize_warps, no_roles), Stage.TILE),  # producer warps copy the tiles of products by wgmma ahead
        (bound(resolve_own_rows, shared_rows), Stage.TILE),  # rows of a warpgroup are numbers, or its own
        (bound(choose_wgmma), Stage.TILE),  # products by wgmma without producer warps are marked
        (bound(pipeline_loops), Stage.TILE),  # T.Pipelined is explicit: buffer versions, asynchronous copies, waits
        (bound(start_gathers), Stage.TILE),  # rows that a table names come by cp.async in other loops, too
        (bound(prefetch_operands), Stage.TILE),  # pipelined products load operands a step ahead
        (bound(async_wgmma, single), Stage.TILE),  # products by wgmma stay in flight beside other work
        (bound(start_next_tiles), Stage.TILE),  # the next tile's first product runs beside the last one of a tile
        (bound(peel_causal), Stage.TILE),  # loops of such products branch only where a mask begins
        (slice_fragments, Stage.TILE),  # fragments are read at places that are known
        (bound(infer_layouts), Stage.LAID_OUT),  # shared buffers, fragments and T.Parallel loops have layouts
        (bound(bind_threads), Stage.THREAD),  # the code of one thread; fragments are its registers
        (bound(vectorize), Stage.THREAD),  # vectorised loops are wide copies and unrolled loops on registers
        (guard_bounds, Stage.THREAD),  # global memory is touched only inside its bounds
        (simplify_program, Stage.THREAD),  # no constant branch, no empty loop
        (prune_async_groups, Stage.THREAD),  # commits and waits cover asynchronous copies only
        (sink_store_waits, Stage.THREAD),  # bulk stores are waited for where their tiles are written again
        (bound(allocate_shared), Stage.THREAD),  # shared buffers have offsets
        (init_mbarriers, Stage.THREAD),  # one thread initialises mbarriers before their use
        (insert_barriers, Stage.THREAD),  # every hazard is ordered by a barrier
        (bound(resolve_role_registers), Stage.THREAD),  # no role waits for registers for ever
        (bound(resolve_ping_pong), Stage.THREAD),  # warpgroups take turns unless a barrier lies in a turn
        (bound(start_first_loads), Stage.THREAD),  # operands of a block's first product come before all others
        (share_divisions, Stage.THREAD),  # lanes of persistent roles find the places of tiles for each other
        (count_stages, Stage.THREAD),  # loops step stages and parities by comparisons
        (flatten, Stage.FLAT),  # one linear index per access
        (bound(elect_producers), Stage.FLAT),  # one lane of a warp runs what only waits and starts bulk copies
        (recompute_indices, Stage.FLAT),  # loops short of registers keep no addresses across iterations
    )


def lower(program: Program, passes: Sequence[tuple[Pass, Stage]] = CPU_PASSES) -> Program:
    """Run the passes on a program.

    With TORCH_TILE_DUMP=<folder>, write each changed stage there in the language itself. With TORCH_TILE_VERIFY=1, as
    in tests, check each stage against its rules (ir/verify.py), which takes a fifth of the time.
    """
    folder, checked, name = os.environ.get("TORCH_TILE_DUMP"), is_watched(), ""
    if folder:  # many a program is called main
        name = f"{program.name}-{hashlib.sha256(repr(program).encode()).hexdigest()[:8]}"
    for number, (step, stage) in enumerate(passes):
        start = time.perf_counter()
        with assertions_as_bugs(getattr(step, "__name__", "a pass")):
            new = step(program)
        seconds = time.perf_counter() - start
        if checked and (new is not program or number == 0):  # the first pass finds the author's mistakes
            verify(new, stage)
        if folder and (new is not program or number == 0):
            _dump(Path(folder), f"{name}_{number:02d}_{step.__name__}.py", new, seconds)
        program = new
    return program


def lower_for_gpu(program: Program, build: Build) -> Program:
    """Run the passes for a GPU.

    Where a kernel does not fit into shared memory, run them again with less of it: first with one version of what
    threads write, then with reductions in rounds. Last go producer warps, whose tiles share no place with later ones.
    Where warpgroups with rows of their own would have to meet, run them again without such rows.
    """
    try:
        return lower(program, cuda_passes(build))
    except TileError as problem:
        first = problem
    if first.code == "divergent_hazard" and (told := _places_of_remark(build, OWN)):
        _forget(build)
        build.remark(told[0], "T.own_rows", "all rows, as warpgroups exchange what they compute")
        return lower(program, cuda_passes(build, shared_rows=True))
    told = _places_of_remark(build, DOUBLED)
    if first.code == "shared_memory" and told:
        _forget(build)
        build.remark(told[0], "T.gemm", "one version of operands, as two need more shared memory than there is")
        try:
            return lower(program, cuda_passes(build, single=True))
        except TileError as problem:
            first = problem
    split = _places_of_remark(build, SPLIT)
    if first.code == "shared_memory" and contains(program, Reduce):
        _forget(build)
        with contextlib.suppress(TileError):
            return lower(program, cuda_passes(replace(build, sparing=True), single=bool(told)))
    if first.code != "shared_memory" or not split:
        raise first
    _forget(build)
    why = "with them a block needs more shared memory than there is"
    build.remark(split[0], "T.Pipelined", "no warps that copy, so that all threads copy and multiply in turn", why)
    try:
        return lower(program, cuda_passes(build, why))
    except TileError:
        raise first from None


def _places_of_remark(build: Build, text: str) -> list[Span | None]:
    """Return the places of the remarks that hold a text."""
    return [remark.span for remark in build.remarks if text in remark.became]


def _forget(build: Build) -> None:
    """Drop what a run of the passes reported."""
    build.remarks.clear()
    build.placements.clear()


def _dump(folder: Path, name: str, program: Program, seconds: float) -> None:
    """Write a program to a file of the dump folder, with the time of its pass in milliseconds."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise OSError(f"TORCH_TILE_DUMP names {folder}, which cannot be a folder: {problem.strerror}") from None
    (folder / name).write_text(f"# {seconds * 1e3:.1f} ms\n{program!r}\n")
