# SPDX-License-Identifier: Apache-2.0
"""Roles and warps that wait for each other: what compiles never hangs, and what is refused does.

Random protocols of two kinds of parties: roles, and branches of warps. They meet at numbers, hand over by mbarriers or
by arrivals at numbers, and have barriers of their own. Some are mistaken: an order, a loop, or an arrival that lacks.
"""

import functools
import random
import re
import textwrap

import pytest
import torch

import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import TileError
from torch_tile.hardware import Target
from torch_tile.lowering import cuda_passes, lower
from torch_tile.lowering.analysis import run_waits
from torch_tile.lowering.common import check
from torch_tile.lowering.sync import insert_barriers
from torch_tile.simulator.interpret import interpret
from torch_tile.simulator.simt import interpreter

# By the form: the threads of the block, and each party's statement with the number of its threads.
FORMS = {
    "roles": (384, [(f"with T.ws({n}):", 128) for n in range(3)]),
    "warps": (128, [(f"if tx // 32 == {n}:", 32) for n in range(4)]),
    "warps of a role": (256, [("with T.ws(0):", 128)] + [(f"if tx // 32 == {n}:", 32) for n in (4, 5, 6)]),
}
MISTAKES = "none", "none", "order", "turns", "missing"


def protocol(draw, counts):
    """What each party does in a turn, in an order that works, and the arrivals of each mbarrier."""
    done, numbers, arrivals = [[] for _ in counts], iter(range(1, 12)), []

    def handed(a, b):
        """Let party `a` hand over to `b` by an mbarrier."""
        arrivals.append(counts[a])
        done[a].append(f"T.mbarrier_arrive(bars[{len(arrivals) - 1}])")
        done[b].append(f"T.mbarrier_wait_parity(bars[{len(arrivals) - 1}], k % 2)")

    def told(a, b):
        """Let party `a` hand over to `b` by an arrival at a number."""
        number, count = next(numbers), counts[a] + counts[b]
        done[a].append(f"T.named_barrier_arrive({number}, {count})")
        done[b].append(f"T.sync_threads({number}, {count})")

    for _ in range(draw.randint(1, 3)):
        kind = draw.choice(["number", "mbarrier", "arrival", "own", "mixed"])
        a, b, *rest = draw.sample(range(len(counts)), len(counts))
        if kind == "number":
            met = [a, b, *rest[: draw.randint(0, 1)]]
            number = next(numbers)
            for party in met:
                done[party].append(f"T.sync_threads({number}, {sum(counts[n] for n in met)})")
        elif kind == "own":
            done[a].append("T.sync_threads()" if counts[a] == 128 else "T.sync_warp()")
        else:
            ways = {"mbarrier": (handed, handed), "arrival": (told, told), "mixed": (handed, told)}[kind]
            ways[0](a, b)
            ways[1](b, a)
    return done, arrivals


def mistaken(draw, mistake, done, turns):
    """Put a mistake into a protocol, if there is room for it."""
    waits = [n for n, steps in enumerate(done) if len(set(steps)) > 1]
    if mistake == "order" and waits:
        steps = done[draw.choice(waits)]
        at = draw.randrange(len(steps) - 1)
        steps[at], steps[at + 1] = steps[at + 1], steps[at]
    if mistake == "turns":
        turns[draw.choice([n for n, steps in enumerate(done) if steps] or [0])] += " + 1"
    arriving = [(n, at) for n, steps in enumerate(done) for at, s in enumerate(steps) if "arrive" in s]
    if mistake == "missing" and arriving:
        n, at = draw.choice(arriving)
        del done[n][at]


def may_hang(done, turns, counts, arrivals):
    """Whether some order of all warps' steps leaves some of them waiting, by trying all orders.

    A warp passes a wait for an mbarrier that another warp of its party has passed. None says that too many orders do
    not let all be tried.
    """
    number = {"3": 3, "5": 5, "T.ceildiv(n, 128)": 6}
    steps = []
    for party, lines in enumerate(done):
        count, _, more = turns[party].partition(" + ")
        steps.append([])
        for k in range(number[count] + int(more or 0)):
            for line in lines:
                what, *given = re.findall(r"(?<=T\.)\w+|\d+", line.replace("k % 2", str(k % 2)))
                if what == "sync_threads" and not given:
                    given = [-1 - party, counts[party]]  # the barrier of the party's warps
                if what != "sync_warp":
                    steps[-1].append((what, *map(int, given)))
    of = [party for party, count in enumerate(counts) for _ in range(count // 32)]  # the party of each warp
    seen, left = set(), [(((0, -1),) * len(of), ())]
    while left:
        state = left.pop()
        if state in seen:
            continue
        if len(seen) == 200_000:
            return None
        seen.add(state)
        warps, counted = state
        moved = False
        for warp, (at, turned) in enumerate(warps):
            if at == len(steps[of[warp]]) or (warp and of[warp] == of[warp - 1] and warps[warp] == warps[warp - 1]):
                continue
            what, name, *rest = steps[of[warp]][at]
            place, known = (what.startswith("mbarrier"), name), dict(counted)
            complete, come = known.get(place, (0, 0))
            next_turn = -1
            if what == "mbarrier_wait_parity":
                if complete % 2 == rest[0] and all(of[n] != of[warp] or w[0] <= at for n, w in enumerate(warps)):
                    continue
            elif what == "sync_threads" and turned >= 0:
                if complete == turned:
                    continue
            else:
                needed = arrivals[name] if place[0] else rest[0]
                come += 32
                known[place] = complete + come // needed, come % needed
                next_turn = complete if what == "sync_threads" else -1
            moved = True
            went = [*warps]
            went[warp] = at + (next_turn < 0), next_turn
            ordered = sorted(zip(of, went, strict=True))  # warps of a party do the same
            left.append((tuple(each for _, each in ordered), tuple(sorted(known.items()))))
        if not moved and any(at < len(steps[of[warp]]) for warp, (at, _) in enumerate(warps)):
            return True
    return False


def kernel_of(draw, form, mistake, path):
    """A kernel of random parties, and whether it may hang. Where each party stores, numbers in memory say."""
    threads, parties = FORMS[form]
    done, arrivals = protocol(draw, [count for _, count in parties])
    count = draw.choice(["3", "T.ceildiv(n, 128)", "5"])
    turns = [count] * len(parties)
    mistaken(draw, mistake, done, turns)
    stores = draw.random() < 0.7
    body, inside = [], False
    for n, ((head, _), steps) in enumerate(zip(parties, done, strict=True)):
        at = draw.randint(0, len(steps))
        put = [f"C[bx, I[k * 4 + {n}], tx % 32] = k + {n}"] if stores else []
        lines = [head, f"    for k in T.serial({turns[n]}):", *(" " * 8 + s for s in [*steps[:at], *put, *steps[at:]])]
        if not steps and not put:
            continue
        if form == "warps of a role" and n and not inside:
            body.append("with T.ws(1):")
            inside = True
        body += textwrap.indent("\n".join(lines), "    " * inside).split("\n")
    made = f"bars = [{', '.join(f'T.alloc_barrier({a})' for a in arrivals)}]"
    head = """
    @T.prim_func
    def kernel(I: T.Tensor((64,), "int32"), C: T.Tensor((2, 64, 32), "int32"), D: T.Tensor((n,), "int32")):
        with T.Kernel(2, threads=%d) as bx:
            tx = T.get_thread_binding()
    """
    text = textwrap.dedent(head % threads) + textwrap.indent("\n".join([made, *body, "D[bx] = 1"]), " " * 8) + "\n"
    path.write_text(text)
    space = {"T": T, "n": T.dynamic("n")}
    exec(compile(text, str(path), "exec"), space)
    return space["kernel"].program, text, functools.partial(may_hang, done, turns, [c for _, c in parties], arrivals)


def two_stores(n):
    """A kernel of two warps that store in loops, between which a barrier would stop both: a role meets them in turn."""

    @T.prim_func
    def kernel(I: T.Tensor((64,), "int32"), C: T.Tensor((2, 64, 32), "int32"), D: T.Tensor((n,), "int32")):
        with T.Kernel(2, threads=256) as bx:
            tx = T.get_thread_binding()
            with T.ws(0):
                for _ in T.serial(T.ceildiv(n, 128)):
                    T.sync_threads(1, 160)
                    T.sync_threads(2, 160)
            with T.ws(1):
                for w in [0, 1]:
                    if tx // 32 == 4 + w:
                        for k in T.serial(T.ceildiv(n, 128)):
                            T.sync_threads(1 + w, 160)
                            C[bx, I[k * 4 + w], tx % 32] = k + w
            D[bx] = 1

    return kernel.program


@pytest.mark.parametrize("size", ["n", 700])
def test_no_barrier_is_placed_that_stops_warps_by_way_of_a_role(size, monkeypatch):
    """Such a barrier stood between two loops of attention's gradients, and waited for ever from the third step on."""
    program, passes = two_stores(T.dynamic("n") if size == "n" else size), cuda_passes(Build(Target.of("cuda:sm_90a")))
    assert not findings_of(program, lower(program, passes))
    monkeypatch.setattr(insert_barriers, "_stopping", lambda *kernels: [])
    assert {one.kind for one in findings_of(program, lower(program, passes))} == {"deadlock"}


def met_too_early(k):
    """A kernel of a role that meets warp 4 in each turn. Warp 4 arrives for the next one when three warps have come."""

    @T.prim_func
    def kernel(C: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            told = T.alloc_barrier(128)
            with T.ws(0):
                for _ in T.serial(k):
                    T.mbarrier_arrive(told)
                    T.sync_threads(1, 160)
            with T.ws(1):
                if tx // 32 == 4:
                    for i in T.serial(k):
                        T.named_barrier_arrive(1, 160)
                        T.mbarrier_wait_parity(told, i % 2)
            C[0] = 1

    return kernel.program


def missed_phase(k):
    """A kernel of two warps. Warp 1 may be so slow that warp 0 completes two phases before it looks."""

    @T.prim_func
    def kernel(C: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            bars = [T.alloc_barrier(32), T.alloc_barrier(32)]
            if tx // 32 == 0:
                for i in T.serial(k):
                    T.mbarrier_arrive(bars[0])
                    T.mbarrier_wait_parity(bars[1], i % 2)
            if tx // 32 == 1:
                for i in T.serial(k):
                    T.mbarrier_arrive(bars[1])
                    T.mbarrier_wait_parity(bars[0], i % 2)
            C[0] = 1

    return kernel.program


def waiting_with_one(k):
    """A kernel of a producer whose first thread fills, while all its warps wait. Nobody waits for the other warps."""

    @T.prim_func
    def kernel(C: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            full, empty = T.alloc_barrier(1), T.alloc_barrier(128)
            with T.ws(0):
                for i in T.serial(k):
                    T.mbarrier_wait_parity(empty, i % 2 ^ 1)
                    if tx == 0:
                        T.mbarrier_arrive(full)
            with T.ws(1):
                for i in T.serial(k):
                    T.mbarrier_wait_parity(full, i % 2)
                    T.mbarrier_arrive(empty)
            C[0] = 1

    return kernel.program


def test_warps_that_only_wait_beside_others_keep_up():
    """They might miss a phase, but all producers of TileLang's wait so."""
    assert lower(waiting_with_one(5), cuda_passes(Build(Target.of("cuda:sm_90a"))))


@pytest.mark.parametrize("kernel", [met_too_early, missed_phase])
def test_one_slow_warp_is_enough_to_wait_for_ever(kernel, monkeypatch):
    """All warps of a role counted as one, so that no order of steps showed what a slow one of them does."""
    program, passes = kernel(5), cuda_passes(Build(Target.of("cuda:sm_90a")))
    with pytest.raises(TileError) as problem:
        lower(program, passes)
    assert {one.code for one in problem.value.diagnostics} <= {"stuck_wait", "stuck_barrier"}
    assert lower(kernel(1), passes)
    monkeypatch.setattr(run_waits, "_schedules", lambda lists: [[range(lists[-1][-1] + 1)]])
    assert lower(program, passes)


def findings_of(program, flat):
    """What the interpreter of threads finds for a size that takes several turns. Other warps begin in each block."""
    places, out, size = torch.randperm(64, dtype=torch.int32), torch.zeros(2, 64, 32, dtype=torch.int32), 700
    return interpret(flat, program, (places, out, torch.zeros(size, dtype=torch.int32)))


@pytest.mark.parametrize("form", FORMS)
def test_what_compiles_never_hangs_and_what_is_refused_does(form, seed, tmp_path, monkeypatch):
    monkeypatch.setattr(interpreter, "MOST_ITERATIONS", 1000)
    draw, passes = random.Random(f"{form} {seed}"), cuda_passes(Build(Target.of("cuda:sm_90a")))
    refused, worked = 0, 0
    for _ in range(8):
        mistake = draw.choice(MISTAKES)
        program, text, hangs = kernel_of(draw, form, mistake, tmp_path / "kernel.py")
        try:
            findings = findings_of(program, lower(program, passes))
            assert not findings and not hangs(), f"{mistake}: {findings.report()}\n{text}"
            worked += 1
        except TileError as problem:
            codes = {each.code for each in problem.diagnostics}
            assert mistake != "none", f"{problem}\n{text}"
            if codes <= {"bad_argument", "endless_wait"}:  # too few threads come, whatever the loops
                continue
            assert codes <= {"stuck_wait", "stuck_barrier"}, f"{problem}\n{text}"
            with monkeypatch.context() as patch:
                patch.setattr(check, "stuck_waits", lambda program: ([], []))
                findings = findings_of(program, lower(program, passes))
            # The interpreter runs each warp until it waits, which hides what a slow warp would do.
            found = any(one.kind in ("deadlock", "barrier") for one in findings)
            assert hangs() is not False and (found or mistake == "order"), f"{mistake}: {problem}\n{text}"
            refused += 1
    assert worked and worked + refused > 1
