# SPDX-License-Identifier: Apache-2.0
"""Random programs do the same thread by thread as tile by tile, without races. Their printed text does, too.

TORCH_TILE_FUZZ=10000 runs that many programs instead of 300 (with -n, side by side), TORCH_TILE_FUZZ_SEED=n starts
from a given seed.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
from emulate import EmulatedLauncher, EmulationError

from torch_tile.codegen.cuda import emit_cuda
from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import TileError
from torch_tile.hardware import Target
from torch_tile.lowering import cuda_passes, lower
from torch_tile.simulator.interpret import interpret
from torch_tile.simulator.tile.interpreter import evaluate

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_lines import arguments, disagreement, shrunk, traced

COUNT, PARTS = int(os.environ.get("TORCH_TILE_FUZZ", "150")), 10
TEXTS = 6  # the printed text of every so many programs runs as well: a compiler takes half a second for each
TARGETS = ("sm_90", "sm_80", "sm_120")


def difference(source, seed, folder):
    """What is wrong with a program, as (kind, text); None if nothing."""
    program = traced(source.text(), source.name, folder)
    try:
        build = Build(Target.of(TARGETS[seed % len(TARGETS)]))
        flat = lower(program, cuda_passes(build))
        args = arguments(source, seed)
        wanted = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        evaluate(program, *wanted)
        findings = interpret(flat, program, args)
    except Exception as error:
        if isinstance(error, TileError) and error.code == "shared_memory":
            return None  # more stages than some GPU has room for
        return f"{type(error).__name__} {str(error).strip()[:40]}", f"{type(error).__name__}: {error}"
    if findings:
        return next(iter(findings)).kind, findings.report()
    if found := disagreement(source, args, wanted, ("threads", "tiles")):
        return "values", found
    if seed % TEXTS:
        return None
    args = arguments(source, seed)
    try:
        EmulatedLauncher(program, emit_cuda(flat, build, program), seed=seed)(*args)
    except EmulationError as error:
        return "text", str(error)
    found = disagreement(source, args, wanted, ("text", "tiles"))
    return ("text", found) if found else None


def still_fails(source, seed, folder, kind):
    """Whether a changed program fails in the same way."""
    try:
        found = difference(source, seed, folder)
    except Exception:  # a program that lost a name that it needs
        return False
    return found is not None and found[0] == kind


@pytest.mark.slow  # about five seconds
@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs(seed, part, generate_threads, tmp_path):
    given = os.environ.get("TORCH_TILE_FUZZ_SEED")
    count = -(-COUNT // PARTS)
    first = seed if given is None else int(given) + part * count
    if given is not None and COUNT == 1 and part:
        return
    for number in range(first, first + count):
        source = generate_threads(number, f"p{number}")
        if found := difference(source, number, tmp_path):
            kind, text = found
            small = shrunk(source, lambda s=source, n=number, k=kind: still_fails(s, n, tmp_path, k))
            pytest.fail(f"TORCH_TILE_FUZZ_SEED={number} TORCH_TILE_FUZZ=1: {text}\n{small}", pytrace=False)


SHORT = """
@T.prim_func
def short(A: T.Tensor((24, 8), "float32"), B: T.Tensor((24, 8), "float32"), C: T.Tensor((8, 8), "float32")):
    with T.Kernel(1, threads=64) as bx:
        a = T.alloc_shared((24, 8), "float32")
        b = T.alloc_shared((24, 8), "float32")
        c = T.alloc_fragment((8, 8), "float32")
        T.clear(c)
        for k in T.Pipelined(1, num_stages=3):
            T.copy(A[k * 24, 0], a)
            T.copy(B[k * 24, 0], b)
            T.gemm(a, b, c, transpose_A=True)
        T.copy(c, C)
"""


def test_a_pipeline_longer_than_its_loop(tmp_path):
    program = traced(SHORT, "short", tmp_path)
    flat = lower(program, cuda_passes(Build(Target.of("sm_80"))))
    findings = interpret(flat, program, [torch.randn(24, 8), torch.randn(24, 8), torch.zeros(8, 8)])
    assert not findings, findings.report()
