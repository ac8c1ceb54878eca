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
    """Whether some order of all parties' steps leaves some of them waiting, by trying all orders."""
    number = {"3": 3, "5": 5, "T.ceildiv(n, 128)": 6}
    steps = []
    for party, lines in enumerate(done):
        count, _, more = turns[party].partition(" + ")
        steps.append([])
        for k in range(number[count] + int(more or 0)):
            for line in lines:
                what, *given = re.findall(r"(?<=T\.)\w+|\d+", line.replace("k % 2", str(k % 2)))
                if given:  # barriers of a party alone stop nobody
                    steps[-1].append((what, *map(int, given)))
    seen, left = set(), [((0,) * len(done), (None,) * len(done), ())]
    while left:
        state = left.pop()
        if state in seen:
            continue
        assert len(seen) < 300_000
        seen.add(state)
        places, turned, counted = state
        moved = False
        for party, at in enumerate(places):
            if at == len(steps[party]):
                continue
            what, name, *rest = steps[party][at]
            place, known = (what.startswith("mbarrier"), name), dict(counted)
            complete, come = known.get(place, (0, 0))
            next_turn = None
            if what == "mbarrier_wait_parity":
                if complete % 2 == rest[0]:
                    continue
            elif what == "sync_threads" and turned[party] is not None:
                if complete == turned[party]:
                    continue
            else:
                needed = arrivals[name] if place[0] else rest[0]
                come += counts[party]
                known[place] = complete + come // needed, come % needed
                next_turn = complete if what == "sync_threads" else None
            moved = True
            went = [*places]
            went[party] += next_turn is None
            others = [*turned]
            others[party] = next_turn
            left.append((tuple(went), tuple(others), tuple(sorted(known.items()))))
        if not moved and any(at < len(steps[n]) for n, at in enumerate(places)):
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
            assert hangs() and (found or mistake == "order"), f"{mistake}: {problem}\n{text}"
            refused += 1
    assert worked and worked + refused > 1
