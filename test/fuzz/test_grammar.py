# SPDX-License-Identifier: Apache-2.0
"""Random programs of the grammar do on every executor what plain Python makes of them.

Each runs tile by tile and by unoptimised C++, and some on each executor more; `grammar_run.py` runs as many as are
asked for on all of them, and on a GPU. The number of the sample chooses the seeds, so that each landing sees programs
of its own, and `grammar_run.py --seed` the next ones. TORCH_TILE_FUZZ=10000 runs that many programs here,
TORCH_TILE_FUZZ_SEED=n starts from another seed.
"""

import gc
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from grammar import generated
from grammar_run import WAYS, Case, outcomes, smallest

COUNT, PARTS = int(os.environ.get("TORCH_TILE_FUZZ", "1000")), 20
SAMPLE = Path(__file__).parents[2] / ".ci" / "sample"
NUMBER = int(SAMPLE.read_text()) if SAMPLE.exists() else 0
FIRST = int(os.environ.get("TORCH_TILE_FUZZ_SEED", 10_000_000 + 2000 * NUMBER))
QUICK = ("tiles", "unoptimised")
EVERY = 10  # one program of so many runs on an executor of its part that is not quick, too


@pytest.mark.slow
@pytest.mark.every_sample
@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs(part, tmp_path, monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setenv("TORCH_TILE_VERIFY", "0")  # which other tests look at, and which takes a sixth of the time
    torch.set_num_threads(1)
    gc.disable()  # a third of the time goes into looking over the nodes of programs
    try:
        seeds = range(FIRST + part, FIRST + COUNT, PARTS)
        check(outcomes([generated(s) for s in seeds], QUICK, tmp_path), tmp_path)
        check(outcomes([generated(s) for s in seeds[::EVERY]], [WAYS[1:][part % 4]], tmp_path), tmp_path)
    finally:
        gc.enable()
        torch.set_num_threads(threads)


def check(found, folder):
    """Most programs are accepted, and none goes wrong. About one in ten is refused, so that four of ten are rare."""
    for o in found:
        if o.is_fault:
            program = smallest(o.seed, o.way, o.kind, folder)
            text = f"seed {o.seed}, {o.way}, {o.kind}: {o.text}\n{program.text()}"
            pytest.fail(text, pytrace=False)
    assert sum(o.kind == "refused" for o in found) <= max(4, len(found) // 4)


def test_programs_are_the_same_again(tmp_path):
    for seed in range(20):
        first, again = generated(seed), generated(seed)
        assert first.text() == again.text() and first.reference() == again.reference()
        x, y = Case(first, tmp_path).wanted, Case(again, tmp_path).wanted
        assert [str(a) for a in x] == [str(a) for a in y]


def test_programs_have_every_part_of_the_grammar():
    text = "\n".join(generated(seed).text() for seed in range(150))
    for part in (
        "elif", "else:", "break", "continue", "while", "range(", "T.serial", "T.unroll", "T.Pipelined", ", -1, -",
        "T.Parallel", "alloc_shared", "alloc_fragment", "alloc_local", "alloc_var", "T.atomic_", "T.reduce_", "T.cum",
        "T.copy", "T.fill", "T.transpose", "ceildiv", "truncmod", " or ", " and ", "nan", "-0.0", "T.uint64(",
        "9223372036854775807", "T.clamp", "T.maximum", "//", " if ", "'bool'",
    ):  # fmt: skip
        assert part in text, part
