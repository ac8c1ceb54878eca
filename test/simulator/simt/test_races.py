# SPDX-License-Identifier: Apache-2.0
"""Accesses at random against a model that keeps every access of an epoch."""

import numpy as np
import pytest

from torch_tile.hardware import WARP
from torch_tile.simulator.findings import Findings
from torch_tile.simulator.simt.races import NOTHING, Clock, OrderedTrace, Trace, VectorClock, merge_times


def test_races_are_those_of_a_list_of_accesses(seed):
    rng = np.random.default_rng(seed)
    for _ in range(60):
        clock, findings = Clock(), Findings()
        trace = Trace(6, clock, findings)
        history = []  # (place, thread, is a write, turn of its warp) since the last barrier
        turns = [0, 0, 0]
        for step in range(60):
            what = rng.choice(["read", "write", "barrier", "warp"], p=[0.35, 0.25, 0.1, 0.3])
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


@pytest.mark.parametrize("first", ["read", "write"])
@pytest.mark.parametrize("then", ["read", "write"])
def test_warp_barriers_before_a_block_barrier_order_nothing_behind_it(first, then):
    """Accesses of this epoch count its own warp barriers alone, at places with accesses of an earlier epoch, too."""
    clock, findings = Clock(), Findings()
    trace = Trace(1, clock, findings)
    zero, warp = np.zeros((1, 1), int), np.array([0])

    def access(kind, thread):
        if kind == "read":
            trace.read(zero, np.array([thread]), "m", None)
        else:
            trace.before_write(zero, np.array([thread]), "m", None)
            trace.wrote(zero, np.array([thread]))

    for _ in range(2):
        clock.warp_barrier(warp)
    access(first, 5)
    clock.barrier()
    access(first, 3)
    clock.warp_barrier(warp)
    access(then, 4)
    assert not findings.found
    clock.barrier()
    access(first, 3)
    access("write", 4)
    assert findings.found


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


def test_what_threads_hear_is_what_sets_of_events_say(seed):
    rng = np.random.default_rng(seed)
    for _ in range(30):
        clock, heard = VectorClock(64), [set() for _ in range(64)]
        events, notes = [], []  # (thread, its time), and (what was released, the events in it)
        for _ in range(40):
            ids = np.sort(rng.choice(64, rng.integers(1, 6), replace=False))
            what = rng.choice(["event", "release", "acquire", "warp", "meet"])
            if what == "event":
                for t in ids.tolist():
                    heard[t].add(len(events))
                    events.append((t, int(clock.epoch[t // 32])))
            elif what == "release":
                notes.append((clock.release(ids), set().union(*(heard[t] for t in ids))))
            elif what == "acquire" and notes:
                vector, known = notes[rng.integers(len(notes))]
                clock.acquire(ids, vector)
                for t in ids.tolist():
                    heard[t] |= known
            elif what in ("warp", "meet"):
                warp = int(ids[0]) // 32
                ids = np.arange(32 * warp, 32 * warp + 32) if what == "warp" else ids
                if what == "warp":
                    clock.warp_barrier(np.array([warp]))
                else:
                    clock.meet(ids)
                known = set().union(*(heard[t] for t in ids))
                for t in ids.tolist():
                    heard[t] |= known
            for t in range(64):
                assert {n for n, (u, when) in enumerate(events) if clock.known[t, u] >= when} == heard[t]


def test_fences_are_heard_of_as_events_are():
    clock = VectorClock(64)
    first, both = int(clock.epoch[0]), np.array([0, 1])
    clock.fence(np.array([0]))
    clock.acquire(np.array([40]), clock.release(both))
    view = clock.view(np.array([40]))
    column = np.array([[0, 1]])
    assert (view.seen(column) >= first).all()
    assert (view.seen(column, fenced=True) >= first).tolist() == [[True, False]]
    warp = np.array([[64]])  # warp 0 as a whole: thread 1 has no fence, and nobody heard of thread 2
    assert view.seen(warp)[0, 0] < first and view.seen(warp, fenced=True)[0, 0] < first
    clock.fence(np.arange(32))
    clock.barrier()
    view = clock.view(np.array([WARP + 1]))
    assert view.seen(warp)[0, 0] >= first and view.seen(warp, fenced=True)[0, 0] >= first


def test_agents():
    clock = VectorClock(32)
    columns = [clock.agent("copies", n) for n in range(200)]
    assert len(set(columns)) == 200 and clock.agent("copies", 7) == columns[7] and clock.names[columns[7]] == "copies"
    released = clock.release(np.array([0]))
    clock.learn(np.array([3]), columns[150], clock.time(2))
    assert clock.common_view(np.array([3]), 1).seen(np.array([[columns[150]]]))[0, 0] == clock.time(2)
    assert clock.common_view(np.array([3, 4]), 1).seen(np.array([[columns[150]]]))[0, 0] == 0
    clock.acquire(np.array([4]), merge_times(released[:3], released))
    last = clock.time(50)
    clock.start_block()
    assert clock.first > last and int(clock.epoch[0]) >= clock.first


def test_joined_knowledge():
    assert merge_times(np.array([1, 5]), np.array([2, 3, 4])).tolist() == [2, 5, 4]
    assert merge_times(NOTHING, np.array([2])).tolist() == [2]


def made(lanes=96, places=6):
    clock, findings = VectorClock(lanes), Findings()
    return OrderedTrace(places, clock, findings), clock, findings


def test_races_are_those_of_a_list_of_accesses_accesses(seed):
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
    assert one(findings) == ("missing_wait", "`m` is read while a copy to it is in flight")
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
