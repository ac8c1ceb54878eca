# SPDX-License-Identifier: Apache-2.0
"""The passes of each target, in order, and their runner. A pass is one function of one file, Program to Program."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..build import Build
from ..ir.stmt import Program
from ..ir.verify import Stage, verify
from .check_kernel import check_kernel
from .flatten import flatten
from .guard_bounds import guard_bounds
from .lower_tile_ops import lower_tile_ops
from .peel_tails import peel_tails
from .simplify_program import simplify_program
from .split_parallel import split_parallel

Pass = Callable[[Program], Program]

# What holds after each pass stands beside it.
CPU_PASSES: tuple[tuple[Pass, Stage], ...] = (
    (check_kernel, Stage.TILE),  # no error that the author can mend is left
    (lower_tile_ops, Stage.LOOPS),  # only loops, stores and helper calls
    (split_parallel, Stage.LOOPS),  # every loop has one variable and a known order
    (guard_bounds, Stage.LOOPS),  # global memory is touched only inside its bounds
    (peel_tails, Stage.LOOPS),  # elementwise loops have no guard in their main part
    (simplify_program, Stage.LOOPS),  # no constant branch, no empty loop
    (flatten, Stage.FLAT),  # one linear index per access
)

CUDA_PASSES: tuple[tuple[str, Stage], ...] = (
    ("check_kernel", Stage.TILE),  # no error that the author can mend is left
    ("pipeline_loops", Stage.TILE),  # T.Pipelined is explicit: buffer versions, asynchronous copies, waits
    ("infer_layouts", Stage.LAID_OUT),  # shared buffers, fragments and T.Parallel loops have layouts
    ("bind_threads", Stage.THREAD),  # what one thread does; fragments are its registers
    ("vectorize", Stage.THREAD),  # vectorised loops are wide copies and unrolled loops on registers
    ("guard_bounds", Stage.THREAD),  # global memory is touched only inside its bounds
    ("simplify_program", Stage.THREAD),  # no constant branch, no empty loop
    ("place_shared", Stage.THREAD),  # shared buffers have offsets
    ("insert_sync", Stage.THREAD),  # every hazard is ordered by a barrier
    ("flatten", Stage.FLAT),  # one linear index per access
)


def cuda_passes(build: Build) -> tuple[tuple[Pass, Stage], ...]:
    """The passes for a GPU, each bound to `build`. They are imported here, so that the CPU target does not pay."""
    return tuple((_bound(name, build), stage) for name, stage in CUDA_PASSES if _exists(name))


def _exists(name: str) -> bool:
    return importlib.util.find_spec(f"{__name__}.{name}") is not None


def _bound(name: str, build: Build) -> Pass:
    step = getattr(importlib.import_module(f"{__name__}.{name}"), name)
    if name in _SHARED:
        return step  # type: ignore[no-any-return]

    @functools.wraps(step)
    def run(program: Program) -> Program:
        return step(program, build)  # type: ignore[no-any-return]

    return run


_SHARED = {"check_kernel", "guard_bounds", "simplify_program", "flatten"}  # with the CPU: they take the program alone


def lower(program: Program, passes: Sequence[tuple[Pass, Stage]] = CPU_PASSES) -> Program:
    """Run the passes. With TORCH_TILE_DUMP=<folder> each changed stage is written there in the language itself."""
    folder = os.environ.get("TORCH_TILE_DUMP")
    for number, (step, stage) in enumerate(passes):
        start = time.perf_counter()
        new = step(program)
        seconds = time.perf_counter() - start
        if new is not program or number == 0:  # the first pass finds the author's mistakes
            verify(new, stage)
        if folder and (new is not program or number == 0):
            _dump(Path(folder), f"{program.name}_{number:02d}_{step.__name__}.py", new, seconds)
        program = new
    return program


def _dump(folder: Path, name: str, program: Program, seconds: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"# {seconds * 1e3:.1f} ms\n{program!r}\n")
