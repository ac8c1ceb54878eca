# SPDX-License-Identifier: Apache-2.0
"""Random programs with roles (test/fuzz/fuzz_roles.py) on a Hopper GPU against the tile interpreter.

TORCH_TILE_DEVICE_PROGRAMS says how many, TORCH_TILE_FUZZ_SEED=n starts from a given seed. Processes compile them side
by side into the cache; another runs them, so that one that never ends or faults is known by its seed and the rest goes
on.
"""

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from role_runs import RoleGenerator, begin, prepare, verdicts

pytestmark = pytest.mark.cuda
COUNT = int(os.environ.get("TORCH_TILE_DEVICE_PROGRAMS", "300"))
REPORTED = 5  # programs, in full


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="roles need sm_90a"
)
def test_random_programs(seed, request):
    first = int(os.environ.get("TORCH_TILE_FUZZ_SEED", seed))
    seeds = list(range(first, first + COUNT))
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn"), begin) as pool:
        made = list(pool.map(prepare, seeds, chunksize=4))
    wrong = {n: f"compiling: {text}" for n, _, text, _ in made if text}
    wrong |= {n: text for n, text in verdicts([n for n in seeds if n not in wrong]) if text}
    request.node.user_properties.append(("problems", [f"program {n}" for n in seeds]))
    for number in list(wrong)[:REPORTED]:
        print(f"{wrong[number]}\n{RoleGenerator(number, f'p{number}').generate().text()}")
    assert not wrong, f"{len(wrong)} of {COUNT}: " + "\n".join(f"seed {n}: {text[:300]}" for n, text in wrong.items())
    roles = sum(has for _, has, _, _ in made)
    print(f"{COUNT} programs, {roles} with roles, {sum(map(bool, (n for *_, n in made)))} with advice of the assembler")
    assert roles >= 0.6 * COUNT, f"only {roles} of {COUNT} programs have roles"
