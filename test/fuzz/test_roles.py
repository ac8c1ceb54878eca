# SPDX-License-Identifier: Apache-2.0
"""Random programs with roles do the same thread by thread as tile by tile, in an order without races; and each wait and
arrival of theirs matters.

TORCH_TILE_FUZZ=10000 runs that many programs instead of 60 (with -n, side by side), TORCH_TILE_FUZZ_SEED=n starts
from a given seed.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
from mutation import ordering, removals

from torch_tile.compiler.context import Build, PassOptions
from torch_tile.diagnostics.errors import TileError
from torch_tile.hardware import Target
from torch_tile.ir.expr import Call, Const
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import For, LoopKind, Role
from torch_tile.lowering import cuda_passes, lower
from torch_tile.simulator.interpret import interpret
from torch_tile.simulator.tile.interpreter import evaluate

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_lines import arguments, disagreement, shrunk, traced
from fuzz_roles import RoleGenerator

COUNT, PARTS = int(os.environ.get("TORCH_TILE_FUZZ", "60")), 4
# More tiles than there is room for; two products into one fragment that split it in different ways.
ACCEPTED = "shared_memory", "layout_conflict"
REMOVALS = max(2, COUNT // 30)  # programs of which waits are left out
SHARE = 0.25  # of the programs, at least, that have roles: 0.75 to 0.85 do, 5 of 20 and fewer once in 10^5 runs


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
        if isinstance(error, TileError) and error.code in ACCEPTED:
            return None, roles
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
    assert count < 10 or roles > SHARE * count, f"only {roles} of {count} programs have roles"


WAITS = "mbarrier_wait", "wgmma_wait", "bulk_wait", "fence_proxy_async"
ARRIVALS = "mbarrier_arrive", "warp_arrive"
MATTERS = 0.85  # at least, of the waits: some say what the mbarriers of other tiles say, too


def in_loops(flat):
    """Calls of loops, by identity; but arrivals only of loops that are known to have more turns than there are
    barriers: after the last iterations an arrival is for nobody, also where these are peeled off, and a loop may have
    none.
    """
    found = set()
    for loop in (n for n in walk(flat) if isinstance(n, For) and n.kind is LoopKind.SERIAL):
        bounds = (*loop.starts, *loop.stops)
        turns = bounds[1].value - bounds[0].value if all(isinstance(b, Const) for b in bounds) else 0
        for call in (n for n in walk(loop.body) if isinstance(n, Call)):
            if call.name not in ARRIVALS or turns > call.args[0].buffer.shape[0].value:
                found.add(call)
    return found


def is_noticed(removal, program, source, seed, wanted):
    """Whether a program without a statement goes wrong."""
    args = arguments(source, seed)
    findings = interpret(removal.program, program, args)
    return bool(findings) or bool(disagreement(source, args, wanted))


@pytest.mark.slow
def test_what_orders_matters(seed, tmp_path):
    """Waits and arrivals left out, one by one, are noticed."""
    noticed, programs = [], 0
    for number in range(seed, seed + 50):
        source = RoleGenerator(number, f"p{number}", thorough=True).generate()
        program = traced(source.text(), source.name, tmp_path)
        try:
            flat = lowered(program)
        except TileError:
            continue
        if not has_roles(flat):
            continue
        wanted = arguments(source, number)
        assert not interpret(flat, program, wanted)
        repeated, calls = in_loops(flat), ordering(flat, WAITS + ARRIVALS)
        for removal in removals(flat, WAITS + ARRIVALS):
            if removal.name in ARRIVALS and calls[removal.number] not in repeated:
                continue
            found = is_noticed(removal, program, source, number, wanted)
            assert found or removal.name not in ARRIVALS, f"seed {number}: {removal.name} {removal.number}\n{flat!r}"
            noticed.append(found)
        programs += 1
        if programs == REMOVALS:
            break
    assert sum(noticed) >= MATTERS * len(noticed), f"seed {seed}: {sum(noticed)} of {len(noticed)}"
