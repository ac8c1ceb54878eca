# SPDX-License-Identifier: Apache-2.0
"""What no GPU runs: blocks of too many threads, grids of too many blocks, and tiles of single threads."""

from __future__ import annotations

import math

from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import Diagnostic, TileError, diagnose
from torch_tile.hardware import GRID_LIMITS, MOST_THREADS
from torch_tile.ir.expr import Const
from torch_tile.ir.node import find
from torch_tile.ir.stmt import Alloc, For, Kernel, LoopKind, Program


def check_limits(program: Program, build: Build) -> Program:
    """Return the program unchanged, or raise one TileError with every finding. Launches check what is known there."""
    found = [each for kernel in program.kernels for each in _findings(kernel, build)]
    if found:
        raise TileError(*found)
    return program


def _findings(kernel: Kernel, build: Build) -> list[Diagnostic]:
    return [*_threads(kernel, build), *_grid(kernel, build), *_tiles(kernel, build)]


def _tiles(kernel: Kernel, build: Build) -> list[Diagnostic]:
    """A tile is one for the whole block, while iterations of T.Parallel are shared out among its threads."""
    found = {}
    for loop in (n for n in find(kernel.body, For) if n.kind is LoopKind.PARALLEL):
        for node in (n for n in find(loop.body, Alloc) if n.buffer.scope in ("fragment", "shared")):
            what = f"T.alloc_{node.buffer.scope} inside T.Parallel"
            fix = "allocate the tile before the loop; T.alloc_local and T.alloc_var are of each iteration"
            found[id(node)] = diagnose("unsupported_on_target", node.span, what=what, target=str(build.target), fix=fix)
    return list(found.values())


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
