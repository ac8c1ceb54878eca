# SPDX-License-Identifier: Apache-2.0
"""Cache the C++ of programs on disk, so that a later process neither lowers nor prints the kernel again.

The key is a digest of the traced program, the target, the options, and the files of this package. What is kept is JSON:
the text, and for CUDA its entries and the schedule report. The machine code lies below, keyed by the text
(runtime/nvrtc.py, runtime/host_compiler.py).
"""

from __future__ import annotations

import contextvars
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch_tile.compiler.context import Build, Placement, Remark, is_watched
from torch_tile.compiler.garbage import collector_paused
from torch_tile.compiler.sources import CpuSource, CudaSource, Entry, MapArg
from torch_tile.diagnostics.errors import Diagnostic, Span, assertions_as_bugs
from torch_tile.diagnostics.kernel_warnings import collected_warnings, warn_of
from torch_tile.ir import expr
from torch_tile.ir.dtype import DType, to_dtype
from torch_tile.ir.expr import Expr, Var
from torch_tile.ir.fingerprint import fingerprint
from torch_tile.ir.node import field_names
from torch_tile.ir.stmt import Program, dimensions
from torch_tile.runtime.cache import get_or_build, is_kept, key_of
from torch_tile.runtime.source_digest import source_digest

remote_compile: contextvars.ContextVar[Callable[[Program, Build], object]] = contextvars.ContextVar(
    "elsewhere", default=lambda program, build: None
)
"""Called with a program whose text is not on the disk: another process may put it there (compile_ahead/workers.py)."""

PARTS = ("codegen", "compiler", "diagnostics", "intrinsics", "ir", "lowering", "tileop")
"""Folders that decide what a traced program becomes, with all folders inside."""


def cuda_source(program: Program, build: Build) -> tuple[CudaSource, Callable[[], Program]]:
    """Return the CUDA C++ of `program`, from the cache if possible, and a function that returns the lowered program.

    The schedule report goes into `build`. The passes always run if stages are dumped or verified.
    """
    made: list[Program] = []

    def lowered(here: Build | None = None) -> Program:
        from torch_tile.lowering import lower_for_gpu  # not before: most processes find the text and need no pass

        if not made or here is not None:
            made.append(lower_for_gpu(program, here or Build(build.target, build.options)))
        return made[-1]

    def text() -> str:
        from torch_tile.codegen.cuda import emit_cuda

        here = Build(build.target, build.options)
        with collected_warnings() as warned:
            ready = lowered(here)
        with assertions_as_bugs("emit_cuda"):
            source = emit_cuda(ready, here, program)  # CUDA C++: codegen/cuda.py
        return packed(source, here, program, warned)

    return unpacked(_cached_or_made(text, program, build), build, program), lowered


def cpu_source(program: Program, build: Build) -> tuple[CpuSource, Callable[[], Program]]:
    """Return the C++ of `program` for the CPU, and a function that returns the lowered program."""

    @functools.cache
    def lowered() -> Program:
        from torch_tile.lowering import CPU_PASSES, lower

        return lower(program, CPU_PASSES)

    def text() -> str:
        from torch_tile.codegen.cpu import emit_cpu

        with collected_warnings() as warned:
            ready = lowered()
        with assertions_as_bugs("emit_cpu"):
            source = emit_cpu(ready, dimensions(program))  # C++: codegen/cpu.py
        asserts = [_pack(each, {}) for each in source.asserts]
        return json.dumps([source.text, asserts, source.disjoint, [_fields(each, {}) for each in warned]])

    found, asserts, disjoint, warned = json.loads(_cached_or_made(text, program, build))
    warn_of([Diagnostic(*(_unpack(value, []) for value in each)) for each in warned])
    return CpuSource(found, tuple(_unpack(each, []) for each in asserts), _pairs(disjoint)), lowered


def _cached_or_made(text: Callable[[], str], program: Program, build: Build) -> str:
    """Return the cached text of the program; call `text()` if the cache has none.

    What is cached names the author's files by their numbers, so that it serves machines on which they lie elsewhere.
    """
    files: dict[str, int] = {}

    def make(output: Path) -> None:
        with collector_paused():
            made = text()
        for file, number in files.items():
            made = made.replace(json.dumps(file), _file(number))
        output.write_text(made)

    if is_watched():
        return text()
    key = key_of(fingerprint(program, files), str(build.target), repr(build.options), source_digest(*PARTS))
    if not is_kept(key, ".json"):
        remote_compile.get()(program, build)
    found = get_or_build(key, ".json", make).read_text()
    for file, number in files.items():
        found = found.replace(_file(number), json.dumps(file))
    return found


def _file(number: int) -> str:
    """Return what stands for the path of a file, a text of JSON, in the cache."""
    return json.dumps(f"\0file {number}")


def packed(source: CudaSource, build: Build, program: Program, warned: Sequence[Diagnostic] = ()) -> str:
    """Serialise a CUDA source, its report and the compiler's warnings as JSON text for the cache."""
    symbols = {v: n for n, v in enumerate(_symbols(program))}
    found = {
        "text": source.text,
        "alignment": source.alignment,
        "disjoint": source.disjoint,
        "entries": [_fields(entry, symbols) for entry in source.entries],
        "notes": [_fields(note, symbols) for note in build.remarks],
        "placements": [_fields(place, symbols) for place in build.placements],
        "warned": [_fields(each, symbols) for each in warned],
    }
    return json.dumps(found)


def unpacked(text: str, build: Build, program: Program) -> CudaSource:
    """Rebuild a source from the text of `packed`, with the variables of `program`; add its report to `build`.

    Repeats the warnings that were kept with it.
    """
    found, symbols = json.loads(text), _symbols(program)

    def instances(cls: Any, items: list[list[Any]]) -> list[Any]:
        return [cls(*(_unpack(value, symbols) for value in item)) for item in items]

    build.remarks += instances(Remark, found["notes"])
    build.placements += instances(Placement, found["placements"])
    warn_of(instances(Diagnostic, found["warned"]))
    entries, alignment = tuple(instances(Entry, found["entries"])), tuple(found["alignment"])
    return CudaSource(found["text"], entries, alignment, _pairs(found["disjoint"]))


def _pairs(found: list[list[int]]) -> tuple[tuple[int, int], ...]:
    """Return the pairs of positions that JSON gives as lists."""
    return tuple((read, written) for read, written in found)


def _symbols(program: Program) -> list[Var]:
    """Return all variables that the entries may mention."""
    return [*dimensions(program), *(p for p in program.params if isinstance(p, Var))]


def _fields(value: Any, symbols: dict[Var, int]) -> list[Any]:
    """Pack the fields of a value for JSON."""
    return [_pack(each, symbols) for each in (value if isinstance(value, tuple) else vars(value).values())]


def _pack(value: Any, symbols: dict[Var, int]) -> Any:
    """Convert a value for JSON: numbers, text and None unchanged, other values as a list that begins with the kind."""
    if isinstance(value, Var):
        return ["Var", symbols[value]]
    if isinstance(value, Expr):
        return [type(value).__name__, *(_pack(getattr(value, name), symbols) for name in field_names(value))]
    if isinstance(value, DType):
        return ["DType", value.name]
    if isinstance(value, MapArg):
        return ["MapArg", *(_pack(v, symbols) for v in value)]
    if isinstance(value, Span):
        return ["Span", *vars(value).values()]
    if isinstance(value, tuple):
        return ["tuple", *(_pack(v, symbols) for v in value)]
    return value


def _unpack(value: Any, symbols: list[Var]) -> Any:
    """Rebuild a value from the form that `_pack` returned."""
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind == "Var":
        return symbols[rest[0]]
    if kind == "DType":
        return to_dtype(rest[0])
    if kind == "Span":
        return Span(*rest)
    parts = [_unpack(v, symbols) for v in rest]
    if kind == "MapArg":
        return MapArg(*parts)
    return tuple(parts) if kind == "tuple" else getattr(expr, kind)(*parts)
