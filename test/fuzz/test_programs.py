# SPDX-License-Identifier: Apache-2.0
"""Random programs do the same in the interpreter and compiled for the CPU.

TORCH_TILE_FUZZ=1000 runs that many programs instead of 100, TORCH_TILE_FUZZ_SEED=n starts from a given seed.
"""

import ctypes
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from torch_tile.codegen.cpu import ENTRY, emit_cpu
from torch_tile.ir.stmt import dimensions
from torch_tile.lowering import lower
from torch_tile.runtime.host_compiler import compile_shared
from torch_tile.runtime.launch import Launcher
from torch_tile.simulator.tile.interpreter import evaluate

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_lines import arguments, disagreement, shrunk, traced

COUNT = int(os.environ.get("TORCH_TILE_FUZZ", "100"))
PER_UNIT = 10  # programs in one compiled file


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
    with ThreadPoolExecutor(2) as pool:
        libraries = [ctypes.CDLL(str(path)) for path in pool.map(compile_shared, sources)]
    launchers = []
    for n, (program, source) in enumerate(zip(programs, emitted, strict=True)):
        entry = libraries[n // PER_UNIT][f"{ENTRY}_{n}"]
        entry.restype, entry.argtypes = ctypes.c_int64, (ctypes.c_void_p, ctypes.c_void_p)
        launchers.append(Launcher(program, entry, source.asserts))
    return launchers


def difference(source, launch, seed):
    """What the two engines disagree on; empty if nothing."""
    args = arguments(source, seed)
    wanted = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    evaluate(launch.program, *wanted)
    launch(*args)
    return disagreement(source, args, wanted)


def still_fails(source, seed, folder):
    """Whether a changed program still shows a difference."""
    try:
        program = traced(source.text(), source.name, folder)
        return bool(difference(source, build([program])[0], seed))
    except Exception:  # a program that lost a name that it needs
        return False


@pytest.mark.slow  # about ten seconds
def test_random_programs(seed, generate, generate_threads, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # blocks then run in the interpreter's order, so they may meet in memory
    try:
        run(int(os.environ.get("TORCH_TILE_FUZZ_SEED", seed)), (generate, generate_threads), tmp_path)
    finally:
        torch.set_num_threads(threads)


def run(first, generators, folder):
    """Odd seeds give programs made for GPUs."""
    for start in range(first, first + COUNT, 60):
        seeds = range(start, min(start + 60, first + COUNT))
        sources = [generators[s % 2](s, f"p{n}") for n, s in enumerate(seeds)]
        programs = [traced(source.text(), source.name, folder) for source in sources]
        for seed, source, launch in zip(seeds, sources, build(programs), strict=True):
            if found := difference(source, launch, seed):
                text = shrunk(source, lambda s=source, n=seed: still_fails(s, n, folder))
                pytest.fail(f"TORCH_TILE_FUZZ_SEED={seed} TORCH_TILE_FUZZ=1: {found}\n{text}", pytrace=False)
