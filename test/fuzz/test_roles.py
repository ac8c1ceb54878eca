# SPDX-License-Identifier: Apache-2.0
"""Random programs with roles do the same thread by thread as tile by tile, in an order without races.

TORCH_TILE_FUZZ=10000 runs that many programs instead of 80 (with -n, side by side), TORCH_TILE_FUZZ_SEED=n starts
from a given seed.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

from torch_tile.build import Build, PassOptions
from torch_tile.diagnostics import TileError
from torch_tile.interp.interpret import interpret
from torch_tile.interp.tiles import evaluate
from torch_tile.ir.stmt import Role
from torch_tile.lowering import cuda_passes, lower
from torch_tile.target import Target

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_lines import arguments, disagreement, shrunk, traced
from fuzz_roles import RoleGenerator

COUNT, PARTS = int(os.environ.get("TORCH_TILE_FUZZ", "80")), 4
SHARE = 0.6  # of the programs, at least, that have roles


def lowered(program):
    return lower(program, cuda_passes(Build(Target.of("sm_90a"), PassOptions(tf32=True))))


def has_roles(flat):
    return any(isinstance(s, Role) for s in flat.kernels[0].body.stmts)


def difference(source, seed, folder):
    """What is wrong with a program, as (kind, text), None if nothing; and whether it has roles."""
    program = traced(source.text(), source.name, folder)
    roles = False
    try:
        flat = lowered(program)
        roles = has_roles(flat)
        args = arguments(source, seed)
        wanted = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        evaluate(program, *wanted)
        findings = interpret(flat, program, args)
    except Exception as error:
        if isinstance(error, TileError) and error.code == "shared_memory":
            return None, roles  # more tiles than there is room for
        return (f"{type(error).__name__} {str(error).strip()[:40]}", f"{type(error).__name__}: {error}"), roles
    if findings:
        return (next(iter(findings)).kind, findings.report()), roles
    found = disagreement(source, args, wanted, ("threads", "tiles"))
    return ("values", found) if found else None, roles


def still_fails(source, seed, folder, kind):
    """Whether a changed program fails in the same way."""
    try:
        found, _ = difference(source, seed, folder)
    except Exception:  # a program that lost a name that it needs
        return False
    return found is not None and found[0] == kind


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs(seed, part, tmp_path):
    given = os.environ.get("TORCH_TILE_FUZZ_SEED")
    count = -(-COUNT // PARTS)
    first = seed if given is None else int(given) + part * count
    if given is not None and COUNT == 1 and part:
        return
    roles = 0
    for number in range(first, first + count):
        source = RoleGenerator(number, f"p{number}").generate()
        found, has = difference(source, number, tmp_path)
        roles += has
        if found:
            kind, text = found
            small = shrunk(source, lambda s=source, n=number, k=kind: still_fails(s, n, tmp_path, k))
            pytest.fail(f"TORCH_TILE_FUZZ_SEED={number} TORCH_TILE_FUZZ=1: {text}\n{small}", pytrace=False)
    assert count < 10 or roles >= SHARE * count, f"only {roles} of {count} programs have roles"
