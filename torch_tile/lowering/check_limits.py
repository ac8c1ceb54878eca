# SPDX-License-Identifier: Apache-2.0
"""What no GPU launches: blocks of too many threads, and grids of too many blocks."""

from __future__ import annotations

import math

from ..build import Build
from ..diagnostics import Diagnostic, TileError, diagnose
from ..ir.expr import Const
from ..ir.stmt import Kernel, Program
from ..target import GRID_LIMITS, MOST_THREADS


def check_limits(program: Program, build: Build) -> Program:
    """Return the program unchanged, or raise one TileError with every finding. Launches check what is known there."""
    found = [each for kernel in program.kernels for each in (*_threads(kernel, build), *_grid(kernel, build))]
    if found:
        raise TileError(*found)
    return program


def _threads(kernel: Kernel, build: Build) -> list[Diagnostic]:
    count = math.prod(kernel.threads)
    if count <= MOST_THREADS:
        return []
    fix = f"a block has at most {MOST_THREADS} threads: give threads=..., each of which takes more elements of a tile"
    return [_refusal(kernel, f"a block of {count} threads", fix, build)]


def _grid(kernel: Kernel, build: Build) -> list[Diagnostic]:
    sizes = [int(n.value) if isinstance(n, Const) else 1 for n in kernel.grid]
    all_of_x, most = GRID_LIMITS[:2]
    if any(n > most for n in sizes[1:]) and kernel.cluster == (1, 1, 1):  # then all blocks lie in x
        if math.prod(sizes) <= all_of_x:
            return []
        fix = f"together at most {all_of_x}, or {most} in y and z: let each block loop over several tiles"
        return [_refusal(kernel, f"a grid of {' x '.join(map(str, sizes))} blocks", fix, build)]
    found = []
    for axis, size, limit in zip("xyz", sizes, GRID_LIMITS, strict=False):
        if size > limit:
            fix = f"at most {limit} in {axis}: let each block loop over several tiles"
            if axis != "x":
                fix += ", or leave out cluster_dims"
            found.append(_refusal(kernel, f"a grid of {size} blocks in {axis}", fix, build))
    return found


def _refusal(kernel: Kernel, what: str, fix: str, build: Build) -> Diagnostic:
    return diagnose("unsupported_on_target", kernel.span, what=what, target=str(build.target), fix=fix)
