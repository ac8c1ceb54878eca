# SPDX-License-Identifier: Apache-2.0
"""The passes of each target, in order, and their runner. A pass is one function of one file, Program to Program."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

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
