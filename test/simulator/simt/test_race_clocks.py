# SPDX-License-Identifier: Apache-2.0
"""Clocks against a model in which each thread keeps the set of events that it has heard of."""

import numpy as np

from torch_tile.hardware import WARP
from torch_tile.simulator.simt.race_clocks import NOTHING, VectorClock, joined


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
    clock.acquire(np.array([4]), joined(released[:3], released))
    last = clock.time(50)
    clock.start_block()
    assert clock.first > last and int(clock.epoch[0]) >= clock.first


def test_joined_knowledge():
    assert joined(np.array([1, 5]), np.array([2, 3, 4])).tolist() == [2, 5, 4]
    assert joined(NOTHING, np.array([2])).tolist() == [2]
