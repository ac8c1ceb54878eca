# SPDX-License-Identifier: Apache-2.0
"""Accesses at random against a model that keeps every access of an epoch."""

import numpy as np

from torch_tile.simulator.findings import Findings
from torch_tile.simulator.simt.race_epochs import Clock, Trace


def test_races_are_those_of_a_list_of_accesses(seed):
    rng = np.random.default_rng(seed)
    for _ in range(60):
        clock, findings = Clock(), Findings()
        trace = Trace(6, clock, findings)
        history = []  # (place, thread, is a write, turn of its warp) since the last barrier
        turns = [0, 0, 0]
        for step in range(12):
            what = rng.choice(["read", "write", "barrier", "warp"], p=[0.4, 0.3, 0.1, 0.2])
            if what == "barrier":
                clock.barrier()
                history, turns = [], [0, 0, 0]
                continue
            if what == "warp":
                warp = int(rng.integers(3))
                clock.warp_barrier(np.array([warp]))
                turns[warp] += 1
                continue
            who = np.sort(rng.choice(96, rng.integers(1, 5), replace=False))
            if what == "write":
                who = who[:1]
            places = rng.integers(0, 6, (len(who), 1))
            before = len(findings.found), sum(f.count for f in findings)
            if what == "read":
                trace.read(places, who, "m", None)
            else:
                trace.before_write(places, who, "m", None)
                trace.wrote(places, who)
            reported = sum(f.count for f in findings) > before[1]
            wrong = [
                (p, t) for (p,), t in zip(places, who, strict=True) for q, other, wrote, turn in history
                if p == q and t != other and (wrote or what == "write")
                and not (t // 32 == other // 32 and turn < turns[t // 32])
            ]  # fmt: skip
            if not wrong:
                assert not reported, (step, history)
            elif not reported:  # only the last write is remembered, and several readers as one
                assert len([h for h in history if h[0] in {p for p, _ in wrong}]) > 1
            history += [(int(p), int(t), what == "write", turns[t // 32]) for (p,), t in zip(places, who, strict=True)]


def test_what_is_remembered_of_readers():
    clock, findings = Clock(), Findings()
    trace = Trace(1, clock, findings)
    zero = np.zeros((1, 1), int)
    for thread in (3, 40, 3):
        trace.read(zero, np.array([thread]), "m", None)
    trace.before_write(zero, np.array([3]), "m", None)  # thread 40 read it
    assert "several warps" in findings.report()
    clock.barrier()
    findings.found.clear()
    for thread in (33, 34):
        trace.read(zero, np.array([thread]), "m", None)
    trace.before_write(zero, np.array([34]), "m", None)
    assert "warp 1" in findings.report()
