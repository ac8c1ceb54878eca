# SPDX-License-Identifier: Apache-2.0
"""What the processes of test_roles.py do: compile random programs with roles, and run them on a GPU.

A module of its own, on the path: processes that are spawned have to find it by its name. `verdicts` also runs other
problems that are known by a seed and may never end.
"""

import multiprocessing
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from torch_tile.compiler.context import PassOptions
from torch_tile.diagnostics.errors import TileError
from torch_tile.ir.stmt import Role
from torch_tile.jit import compile_program
from torch_tile.simulator.tile.interpreter import evaluate

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
from fuzz_lines import arguments, disagreement, traced
from fuzz_roles import RoleGenerator

SECONDS = 20  # for one program, after which it counts as stuck
FAMILY = "float16"  # whose tolerance holds for tensor cores, which round sums of 8-bit products
REFUSED = "shared_memory", "layout_conflict"


def compiled(seed):
    """`(source, kernel)` of a seed; the kernel is None where the compiler refuses it."""
    source = RoleGenerator(seed, f"p{seed}").generate()
    with tempfile.TemporaryDirectory() as folder:
        program = traced(source.text(), source.name, Path(folder))
    try:
        return source, compile_program(program, target="cuda:sm_90a", options=PassOptions(tf32=True))
    except TileError as error:
        if error.code not in REFUSED:
            raise
        return source, None


def begin():
    """Of each process: passes are checked elsewhere, so that what lies in the cache is used."""
    os.environ.pop("TORCH_TILE_VERIFY", None)
    torch.set_num_threads(1)


def prepare(seed):
    """Compile into the cache: `(seed, whether it has roles, what was wrong, advice of the assembler)`."""
    try:
        _, kernel = compiled(seed)
    except Exception as error:
        return seed, False, f"{type(error).__name__}: {error}", 0
    if kernel is None:
        return seed, False, "", 0
    roles = any(isinstance(s, Role) for s in kernel.lowered.kernels[0].body.stmts)
    return seed, roles, "", len(kernel.cubin.warnings)


def difference(seed):
    """What a program does on the GPU that it should not; "" if nothing."""
    source, kernel = compiled(seed)
    if kernel is None:
        return ""
    wanted = arguments(source, seed)
    got = [a.cuda() if isinstance(a, torch.Tensor) else a for a in wanted]
    evaluate(kernel.program, *wanted)
    kernel(*got)
    torch.cuda.synchronize()
    got = [a.cpu() if isinstance(a, torch.Tensor) else a for a in got]
    return disagreement(replace(source, family=FAMILY), got, wanted, ("GPU", "tiles"))


def run(seeds, difference, pipe):
    """The process that launches."""
    begin()
    for seed in seeds:
        try:
            pipe.send((seed, difference(seed)))
        except Exception as error:
            pipe.send((seed, f"{type(error).__name__}: {error}"))
            if "CUDA" in str(error):  # nothing runs after a fault
                break
    pipe.send((None, ""))


def verdicts(seeds, difference=difference):
    """`(seed, difference(seed))`: what is wrong or "", from processes that are replaced when one is lost."""
    context = multiprocessing.get_context("spawn")
    while seeds:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=run, args=(seeds, difference, theirs))
        process.start()
        theirs.close()
        limit = SECONDS * 3  # it has to begin
        while seeds:
            seed = None
            if not mine.poll(limit):
                yield seeds.pop(0), f"does not end within {limit} seconds"
                break
            try:
                seed, text = mine.recv()
            except EOFError:
                yield seeds.pop(0), "its process died"
                break
            if seed is None:
                break
            seeds.remove(seed)
            limit = SECONDS
            yield seed, text
        process.kill()
        process.join()
