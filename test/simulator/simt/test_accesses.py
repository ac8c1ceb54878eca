# SPDX-License-Identifier: Apache-2.0
"""Accesses at random against a model that keeps every access and who has heard of it."""

import numpy as np

from torch_tile.hardware import WARP
from torch_tile.simulator.findings import Findings
from torch_tile.simulator.simt.accesses import OrderedTrace
from torch_tile.simulator.simt.race_clocks import VectorClock


def made(lanes=96, places=6):
    clock, findings = VectorClock(lanes), Findings()
    return OrderedTrace(places, clock, findings), clock, findings


def test_races_are_those_of_a_list_of_accesses(seed):
    rng = np.random.default_rng(seed)
    for _ in range(100):
        trace, clock, findings = made()
        history, heard = [], [set() for _ in range(96)]  # (place, thread, is a write); what each thread knows of
        for _ in range(14):
            what = rng.choice(["read", "write", "meet", "warp"], p=[0.4, 0.3, 0.2, 0.1])
            who = np.sort(rng.choice(96, rng.integers(1, 5), replace=False))
            if what in ("meet", "warp"):
                if what == "warp":
                    clock.warp_barrier(np.array([who[0] // 32]))
                    who = who[0] // 32 * 32 + np.arange(32)
                else:
                    clock.meet(who)
                known = set().union(*(heard[t] for t in who))
                for t in who.tolist():
                    heard[t] = set(known)
                continue
            if what == "write":
                who = who[:1]
            places = rng.integers(0, 6, (len(who), 1))
            before = sum(f.count for f in findings)
            if what == "read":
                trace.read(places, who, "m", None)
            else:
                trace.before_write(places, who, "m", None)
                trace.wrote(places, who)
            reported = sum(f.count for f in findings) > before
            wrong = [
                (q, n) for (p,), t in zip(places, who, strict=True) for n, (q, other, wrote) in enumerate(history)
                if p == q and t != other and (wrote or what == "write") and n not in heard[t]
            ]  # fmt: skip
            if reported and not wrong:  # several readers of a warp count as the warp
                assert what == "write" and any(len({t // 32 for q, t, w in history if q == p}) for (p,) in places)
                assert sum(1 for q, t, w in history if q in places and not w) > 1
            if wrong and not reported:  # only the last write is remembered
                assert any(w for q, t, w in history if q in places)
            for (p,), t in zip(places, who, strict=True):
                heard[t].add(len(history))
                history.append((int(p), int(t), what == "write"))


def one(findings):
    (found,) = findings
    findings.found.clear()
    return found.kind, found.message


def test_a_copy_under_way():
    trace, clock, findings = made()
    agent, zero, three = clock.agent("copies"), np.zeros((1, 1), int), np.array([3])
    trace.written_by_agent(zero, agent, clock.time(1))
    trace.read(zero, three, "m", None)
    assert one(findings) == ("missing_wait", "`m` is read while a copy to it is under way")
    trace.before_write(zero, three, "m", None, harmless=np.array([[True]]))
    assert one(findings)[0] == "missing_wait"
    clock.learn(three, agent, clock.time(1))
    trace.read(zero, three, "m", None)
    assert not findings


def test_an_agent_that_reads():
    trace, clock, findings = made()
    agents, zero = (clock.agent("a product", 0), clock.agent("a product", 1)), np.zeros((1, 1), int)
    trace.read_by_agents(zero, np.arange(2), agents, clock.time(4), "m", None)
    for agent in agents:  # both must be done
        trace.before_write(zero, np.array([40]), "m", None)
        assert one(findings) == ("race", "`m` is overwritten while a product may still read it")
        clock.learn(np.array([40]), agent, clock.time(4))
    trace.before_write(zero, np.array([40]), "m", None)
    assert not findings


def test_agents_read_what_was_fenced():
    for fenced, met, kinds in ((True, True, set()), (False, True, {"missing_fence"}), (True, False, {"race"})):
        trace, clock, findings = made()
        zero, ids = np.zeros((1, 1), int), np.arange(64)
        trace.wrote(zero, np.array([WARP + 1]))
        if fenced:
            clock.fence(ids)
        if met:
            clock.meet(ids)
        trace.read_by_agents(zero, ids, (clock.agent("a product"),), clock.time(1), "m", None)
        assert findings.kinds == kinds


def test_other_blocks_and_atomic_updates():
    trace, clock, findings = made()
    zero = np.zeros((1, 1), int)
    for thread in (3, 40):
        trace.before_write(zero, np.array([thread]), "m", None, atomic=True)
        trace.wrote(zero, np.array([thread]), atomic=True)
    assert not findings
    trace.read(zero, np.array([40]), "m", None)
    clock.start_block()
    trace.read(zero, np.array([3]), "m", None)
    assert "another block" in one(findings)[1]
