# SPDX-License-Identifier: Apache-2.0
"""Random kernels of threads do what their model in NumPy does: thread by thread, without races, and as printed text.

TORCH_TILE_FUZZ=1000 runs that many programs instead of 60, TORCH_TILE_FUZZ_SEED=n starts from a given seed.
"""

import os

import numpy as np
import pytest
import torch
from emulate import EmulatedLauncher
from fuzz_by_hand import MOST, ByHand
from fuzz_lines import traced

from torch_tile.codegen.cuda import emit_cuda
from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import TileError
from torch_tile.hardware import Target
from torch_tile.lowering import cuda_passes, lower
from torch_tile.simulator.interpret import interpret

COUNT, PARTS = int(os.environ.get("TORCH_TILE_FUZZ", "60")), 4
TARGETS = ("sm_90a", "sm_80", "sm_120a")
TEXTS = 10  # the printed text of every so many programs runs as well
LEAST = 0.4  # the share of programs that compile: in others some threads exchange values where no barrier can stand


def compared(seed, folder):
    """Run one program; return whether it compiles."""
    text, shapes, model = ByHand(seed).generate(f"p{seed}")
    program, build = traced(text, f"p{seed}", folder), Build(Target.of(TARGETS[seed % len(TARGETS)]))
    try:
        flat = lower(program, cuda_passes(build))
    except TileError as problem:
        assert problem.code == "divergent_hazard", f"{text}\n{problem}"
        return False
    a = np.random.default_rng(seed).integers(0, MOST, (shapes[0][0], 64))
    wanted = [torch.from_numpy(result).int() for result in model(a)]
    for is_text in (False, True) if seed % TEXTS == 0 else (False,):
        args = [torch.from_numpy(a).int(), *(torch.zeros(shape, dtype=torch.int32) for shape in shapes)]
        if is_text:
            EmulatedLauncher(program, emit_cuda(flat, build, program), seed=seed)(*args)
        else:
            findings = interpret(flat, program, args)
            assert not findings, f"{text}\n{findings.report()}"
        for got, result in zip(args[1:], wanted, strict=True):
            assert torch.equal(got, result), f"{'text' if is_text else 'threads'}, seed {seed}:\n{text}"
    return True


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*unread_write")
@pytest.mark.parametrize("part", range(PARTS))
def test_random_kernels_of_threads(seed, part, tmp_path):
    given, count = os.environ.get("TORCH_TILE_FUZZ_SEED"), -(-COUNT // PARTS)
    first = seed if given is None else int(given) + part * count
    compiled = [compared(number, tmp_path) for number in range(first, first + count)]
    assert count < 10 or sum(compiled) >= LEAST * count
