# SPDX-License-Identifier: Apache-2.0
"""Kernels whose blocks load for each other, read each other's tiles or join what others left, on a Hopper GPU against
float64: random sizes, types, cuts and clusters.

TORCH_TILE_DEVICE_PROGRAMS says how many, TORCH_TILE_FUZZ_SEED=n starts from a given seed. Processes compile them side
by side into the cache; another runs them and is killed where one does not end, so that it is known by its seed and the
rest goes on.
"""

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from cluster_runs import difference, prepare, problem
from role_runs import begin, verdicts

pytestmark = pytest.mark.cuda
COUNT = int(os.environ.get("TORCH_TILE_DEVICE_PROGRAMS", "300"))
LEAST = 0.6  # of the kernels have blocks that reach others; the rest has tiles too small for their clusters


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="roles need sm_90a"
)
def test_random_kernels(seed, request):
    first = int(os.environ.get("TORCH_TILE_FUZZ_SEED", seed))
    seeds = list(range(first, first + COUNT))
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn"), begin) as pool:
        made = list(pool.map(prepare, seeds, chunksize=4))
    wrong = {n: f"compiling: {text}" for n, _, text in made if text}
    wrong |= {n: text for n, text in verdicts([n for n in seeds if n not in wrong], difference) if text}
    request.node.user_properties.append(("problems", [problem(n).text for n in seeds]))
    assert not wrong, f"{len(wrong)} of {COUNT}: " + "\n".join(f"seed {n}: {text[:500]}" for n, text in wrong.items())
    shared = sum(has for _, has, _ in made)
    assert shared >= LEAST * COUNT, f"the blocks of only {shared} of {COUNT} kernels reach others"
