# SPDX-License-Identifier: Apache-2.0
"""Bytes of shared memory, copies on their way, banks."""

import numpy as np
import pytest

from torch_tile.simulator.findings import Banks, Findings
from torch_tile.simulator.simt.memory import Owner, Shared, count_banks
from torch_tile.simulator.simt.races import Clock, Trace

M = Owner("m", 1)


def some(size=64, place=4):
    findings = Findings()
    return Shared(size, place, findings, lambda n: Trace(n, Clock(), findings)), findings


def test_bytes_and_poison():
    shared, findings = some()
    who = np.array([1, 2])
    shared.write(np.array([0, 8]), np.arange(8, dtype=np.uint8).reshape(2, 4), who, M, None)
    assert shared.read(np.array([0, 8]), 4, who, M, None).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert not findings
    assert np.isnan(shared.read(np.array([4]), 4, who[:1], M, None).view(np.float32)).all()
    assert findings.kinds == {"unwritten"}
    shared.reset()
    assert (shared.data == 255).all()


def test_a_copy_on_its_way():
    shared, findings = some()
    first, who, data = np.array([16]), np.array([5]), np.full((1, 8), 7, np.uint8)
    shared.take_off(first, 8, who, M, None)
    assert not findings and (shared.data == 255).all()
    shared.take_off(first + 4, 4, who, M, None)
    assert findings.kinds == {"missing_wait"}
    findings.found.clear()
    shared.land(first, data, who, M)
    assert (shared.read(first, 8, who, M, None) == 7).all() and not findings
    shared.read(first, 8, who + 1, M, None)
    assert findings.kinds == {"race"}


def test_two_views_of_the_same_bytes():
    shared, findings = some(place=2)
    shared.write(np.array([0]), np.zeros((1, 8), np.uint8), np.array([0]), M, None)
    shared.read(np.array([2]), 2, np.array([9]), Owner("narrow", 2), None)
    assert findings.kinds == {"race", "unwritten"} and "narrow" in findings.report()


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_banks_against_counting(size, seed):
    rng = np.random.default_rng(seed)
    first = rng.integers(0, 64, 64) * size
    banks = Banks()
    count_banks(banks, first, size, np.arange(64))
    group, phases, ideal = min(32, 128 // size), 0, 0
    for start in range(0, 64, group):
        words = {(int(a) + k) // 4 for a in first[start : start + group] for k in range(size)}
        phases += max(np.bincount([w % 32 for w in words]))
        ideal += 1
    assert (banks.phases, banks.ideal, banks.accesses) == (phases, ideal, 1)
