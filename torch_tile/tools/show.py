# SPDX-License-Identifier: Apache-2.0
"""`python -m torch_tile show kernel.py`: what became of its kernels for a GPU, with no GPU needed.

Prints the schedule report, the table of layouts with who decided each, the stages as asked for, and writes pictures.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import TileError
from torch_tile.diagnostics.spelling import did_you_mean
from torch_tile.hardware import WARP, Target
from torch_tile.intrinsics import lookup
from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.bits import passes
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.dtype import to_dtype
from torch_tile.ir.expr import Address, Call, Expr, Load, Var
from torch_tile.ir.layout import Layout
from torch_tile.ir.layout_ops import FORMATS, text_picture
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Alloc, Kernel, Program, Store
from torch_tile.language import PrimFunc
from torch_tile.lowering import cuda_passes
from torch_tile.tools import Mistake


def show(file: str, target: str, stages: list[str], pictures: str = "", formats: tuple[str, ...] = ("svg",)) -> str:
    """Report on every T.prim_func that is a global name of `file`. Raises Mistake, if there is none for one."""
    check(target, stages)
    kernels = {n: f for n, f in runpy.run_path(file).items() if isinstance(f, PrimFunc)}
    if not kernels:
        raise Mistake(f"{file} has no T.prim_func among its global names; give one a name there, kernel = make(1024)")
    parts = []
    for name, kernel in kernels.items():
        parts.append(report(kernel.program, target, stages))
        if pictures:
            parts += [f"wrote {path}" for path in draw(kernel.program, target, Path(pictures), name, formats)]
    return "\n".join(parts)


def check(target: str, stages: list[str]) -> None:
    """Raise Mistake for targets and passes that there are not."""
    try:
        machine = Target.of(target)
    except TileError as problem:
        raise Mistake(f"--target {target}: {problem.diagnostics[0].fix}") from problem
    if machine.kind != "cuda":
        raise Mistake(f"--target {target}: schedules and layouts are a GPU's: cuda:sm_80, cuda:sm_90a, cuda:sm_120a")
    known = [step.__name__ for step, _ in cuda_passes(Build(machine))]
    for stage in stages:
        if stage != "all" and stage not in known:
            near = did_you_mean(stage, known)
            raise Mistake(f"--stage {stage}: the passes are {', '.join(known)}; all is every one{near}")


def report(program: Program, target: str, stages: list[str]) -> str:
    """Format the schedule, the layouts with small pictures, and the program after the passes in `stages` ("all")."""
    build = Build(Target.of(target))
    laid_out, flat, texts = lowered(program, build, stages)
    parts = [repr(build.schedule(program.name)), "", *table(build, laid_out, flat)]
    for buffer in tiles(laid_out):
        parts += ["", f"{buffer.name}: {buffer.layout}", text_picture(buffer.layout, 8, 8)] if buffer.layout else []
    for stage, text in texts.items():
        parts += ["", f"# after {stage}", text]
    return "\n".join(parts)


def lowered(program: Program, build: Build, stages: list[str]) -> tuple[Program, Program, dict[str, str]]:
    """Lower a program; return it with layouts, flat, and as text after each of `stages`."""
    laid_out, texts = program, {}
    for step, _ in cuda_passes(build):
        program = step(program)
        if step.__name__ == "infer_layouts":
            laid_out = program
        if step.__name__ in stages or "all" in stages:
            texts[step.__name__] = repr(program)
    return laid_out, program, texts


def tiles(program: Program) -> list[Buffer]:
    """List shared buffers and fragments, in program order."""
    found = (n.buffer for n in walk(program) if isinstance(n, Alloc))
    return [b for b in found if b.scope in ("shared", "fragment")]


def table(build: Build, laid_out: Program, flat: Program) -> list[str]:
    """Format one line per buffer: layout, vector width, passes of a warp's worst access, and who decided."""
    worst = conflicts(flat)
    rows = [("buffer", "scope", "layout", "vector", "passes", "decided by")]
    for p in build.placements:
        line = f" (line {p.span.line})" if p.span else ""
        crowded = str(worst.get(p.buffer, 1)) if p.scope == "shared" else "-"
        rows.append((p.buffer, p.scope, p.layout, str(Layout.parse(p.layout).vector_width()), crowded, p.why + line))
    sizes = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return ["  ".join(cell.ljust(n) for cell, n in zip(row, sizes, strict=True)).rstrip() for row in rows]


def conflicts(flat: Program) -> dict[str, int]:
    """Count, for each shared buffer, the passes that the first warp's worst access takes; 1 is free of bank conflicts.

    Loops and blocks stand at their first turn; accesses whose place is read from memory are left out.
    """
    found: dict[str, int] = {}
    for kernel in flat.kernels:
        for buffer, index, width in accesses(kernel):
            others = {n: 0 for n in walk(index) if isinstance(n, Var)}
            if kernel.thread is None or any(isinstance(n, Load) for n in walk(index)):
                continue
            size = buffer.dtype.itemsize
            lanes = [int(evaluate(index, others | {kernel.thread: lane})) * size for lane in range(WARP)]
            found[buffer.name] = max(found.get(buffer.name, 1), passes(lanes, width))
    return found


def accesses(kernel: Kernel) -> Iterator[tuple[Buffer, Expr, int]]:
    """List shared buffer, index and bytes per lane of every access in a flat kernel."""
    for node in walk(kernel.body):
        if isinstance(node, Load | Store) and node.buffer.scope == "shared" and len(node.indices) == 1:
            yield node.buffer, node.indices[0], node.buffer.dtype.itemsize
        elif isinstance(node, Call):
            for effect in lookup(node.name).effects(node):
                place = node.args[effect.operand]
                if isinstance(place, Address) and place.buffer.scope == "shared" and len(place.indices) == 1:
                    size = 16 if "matrix" in node.name else effect.elements * place.buffer.dtype.itemsize
                    yield place.buffer, place.indices[0], size


def draw(program: Program, target: str, folder: Path, name: str, formats: tuple[str, ...]) -> list[Path]:
    """Write a picture of each tile's layout in each format; returns the files."""
    laid_out = lowered(program, Build(Target.of(target)), [])[0]
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for buffer in tiles(laid_out):
        for kind in formats if buffer.layout is not None else ():
            path = folder / f"{name}_{buffer.name}.{kind}"
            bits = to_dtype(buffer.dtype).bits
            path.write_bytes(FORMATS[kind](buffer.layout, bits) if buffer.layout else b"")
            written.append(path)
    return written
