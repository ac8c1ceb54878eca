# SPDX-License-Identifier: Apache-2.0
"""Random programs do the same in the interpreter and compiled for the CPU.

TORCH_TILE_FUZZ=1000 runs that many programs instead of 60, TORCH_TILE_FUZZ_SEED=n starts from a given seed.
"""

import ctypes
import os
import re
import time

import pytest
import torch

import torch_tile.language as T
from torch_tile.codegen.cpu import ENTRY, emit_cpu
from torch_tile.interp.tiles import evaluate
from torch_tile.ir.stmt import dimensions
from torch_tile.lowering import lower
from torch_tile.runtime.host_compiler import compile_many
from torch_tile.runtime.launch import Launcher

COUNT = int(os.environ.get("TORCH_TILE_FUZZ", "60"))
PER_UNIT = 10  # programs in one compiled file
TOLERANCE = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 0.1, "float8": 1.5}  # relative, absolute below 1
SHRINKING_SECONDS = 90


def traced(text, name, folder):
    """The program that a text says."""
    path = folder / f"{name}.py"
    path.write_text(text)
    space = {"T": T}
    exec(compile(text, str(path), "exec"), space)
    return space[name].program


def build(programs):
    """A launcher for each program, many in one file."""
    emitted = [emit_cpu(lower(p), dimensions(p)) for p in programs]
    units = [range(i, min(i + PER_UNIT, len(programs))) for i in range(0, len(programs), PER_UNIT)]
    sources = []
    for unit in units:
        heads, bodies = {}, []
        for n in unit:
            text = emitted[n].text.replace(ENTRY, f"{ENTRY}_{n}")
            heads |= dict.fromkeys(re.findall(r"^#include .*$", text, re.MULTILINE))
            bodies.append(f"namespace p{n} {{\n" + re.sub(r"^#include .*\n", "", text, flags=re.MULTILINE) + "}\n")
        sources.append("\n".join([*heads, *bodies]))
    libraries = [ctypes.CDLL(str(path)) for path in compile_many(sources, 2)]
    launchers = []
    for n, (program, source) in enumerate(zip(programs, emitted, strict=True)):
        entry = libraries[n // PER_UNIT][f"{ENTRY}_{n}"]
        entry.restype, entry.argtypes = ctypes.c_int64, (ctypes.c_void_p, ctypes.c_void_p)
        launchers.append(Launcher(program, entry, source.asserts))
    return launchers


def arguments(source, seed):
    """Random tensors of a program's parameters."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _, shape, dtype, _ in source.tensors:
        to = getattr(torch, dtype)
        if to.is_floating_point:
            x = torch.randn(shape, generator=generator, dtype=torch.float64).clamp(-2, 2)
        else:
            low, high = {"int32": (-20, 100), "int64": (-20, 100), "int16": (-20, 100)}.get(dtype, (0, 200))
            x = torch.randint(low, 2 if dtype == "bool" else high, shape, generator=generator)
        made.append(x.to(to))
    return [*made, seed % 7]


def difference(source, launch, seed):
    """What the two engines disagree on; empty if nothing."""
    args = arguments(source, seed)
    wanted = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    evaluate(launch.program, *wanted)
    launch(*args)
    for (name, *_), got, want in zip(source.tensors, args, wanted, strict=False):
        exact = not got.dtype.is_floating_point
        tolerance = 0 if exact else TOLERANCE[source.family]
        a, b = got.double(), want.double()
        bad = ~((a - b).abs() <= tolerance * b.abs().clamp(min=1.0)) & (a != b) & ~(a.isnan() & b.isnan())
        if bad.any():
            place = bad.nonzero()[0].tolist()
            values = f"compiled {a[tuple(place)]:.6g}, interpreted {b[tuple(place)]:.6g}"
            return f"{name}{place}: {values}, {int(bad.sum())} differ"
    return ""


def shrunk(source, seed, folder):
    """The program with every statement dropped that the failure does not need."""
    deadline = time.monotonic() + SHRINKING_SECONDS

    def fails():
        try:
            program = traced(source.text(), source.name, folder)
            return bool(difference(source, build([program])[0], seed))
        except Exception:  # a program that lost a name that it needs
            return False

    def reduce_block(block):
        for index in reversed(range(len(block))):
            if time.monotonic() > deadline:
                return
            line = block.pop(index)
            if fails():
                continue
            block.insert(index, line)
            if line.otherwise is not None:
                kept, line.otherwise = line.otherwise, None
                if not fails():
                    line.otherwise = kept
                    reduce_block(kept)
            if line.body:
                reduce_block(line.body)

    reduce_block(source.body)
    return source.text()


@pytest.mark.slow  # about ten seconds
def test_random_programs(seed, generate, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # blocks then run in the interpreter's order, so they may meet in memory
    try:
        run(int(os.environ.get("TORCH_TILE_FUZZ_SEED", seed)), generate, tmp_path)
    finally:
        torch.set_num_threads(threads)


def run(first, generate, folder):
    for start in range(first, first + COUNT, 60):
        seeds = range(start, min(start + 60, first + COUNT))
        sources = [generate(s, f"p{n}") for n, s in enumerate(seeds)]
        programs = [traced(source.text(), source.name, folder) for source in sources]
        for seed, source, launch in zip(seeds, sources, build(programs), strict=True):
            if found := difference(source, launch, seed):
                text = shrunk(source, seed, folder)
                pytest.fail(f"TORCH_TILE_FUZZ_SEED={seed} TORCH_TILE_FUZZ=1: {found}\n{text}", pytrace=False)
