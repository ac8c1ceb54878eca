# SPDX-License-Identifier: Apache-2.0
"""A random program that hangs, crashes or eats the memory is reported by its seed and hides no other."""

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_lost import run
from grammar_processes import GIBIBYTE, Limits, in_processes


def test_lost_programs_have_their_seed():
    limits = Limits(seconds=2, compiling=4, memory=GIBIBYTE // 4)
    ended = list(in_processes([range(7), range(7, 10), range(10, 13), range(13, 15)], run, 2, limits))
    assert {(lost.seed, lost.kind) for _, _, lost in ended if lost} == {
        (3, "hang"), (5, "crash"), (8, "memory"), (11, "hang"),
    }  # fmt: skip
    assert sorted(s for _, found, _ in ended for s in found or []) == [0, 1, 2, 4, 6, 7, 9, 10, 12, 13, 14]
    assert sorted(s for seeds, _, _ in ended for s in seeds) == list(range(15))


@pytest.mark.parametrize("seconds", [0, 2])
def test_a_deadline_ends_the_run(seconds):
    begin = time.time()
    ended = list(in_processes([[1], [3], [2], [4]], run, 1, Limits(1000), begin + seconds))
    assert time.time() - begin < 30
    assert all(seeds == [1] for seeds, _, _ in ended)
