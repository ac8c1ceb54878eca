# SPDX-License-Identifier: Apache-2.0
"""Both ways of a branch on the thread run side by side: values that pass between them are an error at their line."""

import random
import textwrap
from functools import partial

import pytest
import torch
from emulate import emulate

import torch_tile
from torch_tile.diagnostics.errors import TileError

KERNEL = """
import torch_tile.language as T


@T.prim_func
def kernel(A: T.Tensor((128,), "int32"), B: T.Tensor((128,), "int32")):
    with T.Kernel(1, threads=128):
        tx = T.get_thread_binding()
        n = T.alloc_var("int32", 0)
        s = T.alloc_shared((128,), "int32")
        s[tx] = A[tx]
        T.sync_threads()
"""
RACES = {
    "read": "if tx < 64:\n    s[tx] = 1\nelse:\n    B[tx] = s[127 - tx]  # here",
    "write behind a read": "if tx < 64:\n    B[tx] = s[127 - tx]\nelse:\n    s[tx] = 1  # here",
    "two writes": "if tx < 64:\n    s[tx] = 1\nelse:\n    s[127 - tx] = 2  # here",
    "lanes": "if tx % 2 == 0:\n    s[tx] = 1\nelse:\n    B[tx] = s[tx - 1]  # here",
    "elif": "if tx < 32:\n    s[tx] = 1\nelif tx < 64:\n    n = 3\nelse:\n    B[tx] = s[tx - 64]  # here",
    "inner branches": """
        if tx < 64:
            if A[tx] > 0:
                s[tx] = 1
        else:
            for k in T.serial(2):
                B[tx] = s[tx - 64 + k]  # here""",
    "data": "if A[tx] > 0:\n    s[tx] = 1\nelse:\n    B[tx] = s[127 - tx]  # here",
    "variable": "n = tx // 64\nif n == 0:\n    s[tx] = 1\nelse:\n    B[tx] = s[127 - tx]  # here",
    "barrier of one way": """
        if tx < 64:
            s[tx] = 1
            T.sync_threads(1, 64)
            B[tx] = s[63 - tx]
        else:
            B[tx] = s[127 - tx]  # here""",
    "number of another barrier": """
        if tx < 64:
            s[tx] = 1
            T.sync_threads(1, 64)
        else:
            T.sync_threads(2, 64)
            B[tx] = s[127 - tx]  # here""",
    "return": "if tx < 64:\n    s[tx] = 1\n    T.thread_return()\nB[tx] = s[127 - tx]  # here",
    "loop": "for k in T.serial(3):\n    if tx < 64:\n        s[tx] = k\n    else:\n        B[tx] = s[127 - tx]  # here",
    "continue": """
        for k in T.serial(1):
            if tx < 64:
                s[tx] = 1
                continue
            B[tx] = s[127 - tx]  # here""",
    "break": """
        for k in T.serial(1):
            if tx < 64:
                s[tx] = 1
                break
            B[tx] = s[127 - tx]  # here""",
    "inner continue": """
        for k in T.serial(2):
            if tx < 64:
                if A[tx] > k:
                    s[tx] = 1
                    continue
            B[tx] = s[127 - tx]  # here""",
}
FINE = {
    "own places": ("if tx < 64:\n    s[tx] = 1\nelse:\n    s[tx] = 2\nB[tx] = s[127 - tx]", [2] * 64 + [1] * 64),
    "own places by data": ("if A[tx] > 0:\n    s[tx] = 1\nelse:\n    s[tx] = 1 - s[tx]\nB[tx] = s[tx]", None),
    "parts": ("if tx < 64:\n    s[63 - tx] = 1\nelse:\n    B[tx] = s[191 - tx]", None),
    "branch behind": ("if tx < 64:\n    s[tx] = 1\nif tx >= 64:\n    B[tx] = s[127 - tx]", [0] * 64 + [1] * 64),
    "all threads": (
        "for k in T.serial(2):\n    if k == 0:\n        s[tx] = 1\n    else:\n        B[tx] = s[127 - tx]",
        [1] * 128,
    ),
    "one number": ("if tx < 64:\n    s[0] = 1\nelse:\n    s[0] = 1\nB[tx] = s[0]", [1] * 128),
    "sums": ("if tx < 64:\n    T.atomic_add(s[0], 1)\nelse:\n    T.atomic_add(s[0], 2)", None),
    "barrier of both ways": (
        """
        if tx < 64:
            s[tx] = 1
            T.sync_threads(1, 128)
        else:
            T.sync_threads(1, 128)
            B[tx] = s[127 - tx]""",
        [0] * 64 + [1] * 64,
    ),
    "mbarrier": (
        """
        full = T.alloc_barrier(64)
        if tx < 64:
            s[tx] = 1
            T.mbarrier_arrive(full)
        else:
            T.mbarrier_wait_parity(full, 0)
            B[tx] = s[127 - tx]""",
        [0] * 64 + [1] * 64,
    ),
    "tiles of their own": (
        """
        if tx < 64:
            x = T.alloc_shared((64,), "int32")
            x[tx] = 1
            T.sync_threads(1, 64)
            B[tx] = x[63 - tx]
        else:
            y = T.alloc_shared((64,), "int32")
            y[tx - 64] = 2
            T.sync_threads(2, 64)
            B[tx] = y[127 - tx]""",
        [1] * 64 + [2] * 64,
    ),
}


def traced(body, path):
    path.write_text(KERNEL + textwrap.indent(textwrap.dedent(body).strip(), " " * 8) + "\n")
    space = {}
    exec(compile(path.read_text(), str(path), "exec"), space)
    return space["kernel"]


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
@pytest.mark.parametrize("name", RACES)
def test_values_between_both_ways_are_refused(name, target, tmp_path):
    kernel = traced(RACES[name], tmp_path / "kernel.py")
    with pytest.raises(TileError, match="divergent_hazard") as caught:
        torch_tile.compile(kernel, target=target)
    assert caught.value.span.source().endswith("# here")


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
@pytest.mark.parametrize("name", FINE)
def test_ways_that_do_not_meet_are_left_alone(name, target, tmp_path):
    body, want = FINE[name]
    if "mbarrier" in body and target == "cuda:sm_80":
        pytest.skip("has no mbarriers of the author")
    made = torch_tile.compile(traced(body, tmp_path / "kernel.py"), target=target)
    for run in (made.interpret, partial(emulate, made)):
        a, b = torch.randint(-9, 9, (128,), dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
        assert not run(a, b)
        assert want is None or b.tolist() == want


def touches(way, condition, holds):
    """What the threads of one way do: whether they write, the place, and the thread."""
    threads = [tx for tx in range(128) if bool(eval(condition, {"tx": tx})) == holds]
    return [(writes, eval(place, {"tx": tx}), tx) for tx in threads for writes, place in way]


def meet(some, others):
    """Whether different threads touch one place, and one of them writes it."""
    return any(p == q and a != b and (w or v) for w, p, a in some for v, q, b in others)


def test_random_ways_meet_where_their_places_say(seed, tmp_path):
    """Of random places of each way, the error says what a comparison of all threads says."""
    draw, seen = random.Random(seed), set()
    for number in range(30):
        condition = draw.choice(["tx < 64", "tx >= 32", "tx % 4 < 2", "tx % 64 < 16", "tx == 7", "tx // 32 % 2 == 1"])
        ways = [[], []]
        for way in ways:
            for _ in range(draw.randint(1, 2)):
                place = draw.choice(["tx", "127 - tx", "tx ^ {}", "(tx + {}) % 128", "tx % 32 + {}", "{} + tx // 2"])
                way.append((draw.random() < 0.5, place.format(draw.choice([0, 1, 16, 32, 64]))))
        lines = [[f"s[{p}] = tx + 3" if writes else f"B[tx] = B[tx] + s[{p}]" for writes, p in way] for way in ways]
        body = f"if {condition}:\n" + textwrap.indent("\n".join(lines[0]), "    ")
        body += "\nelse:\n" + textwrap.indent("\n".join(lines[1]), "    ")
        then, other = (touches(way, condition, n == 0) for n, way in enumerate(ways))
        meets, within = meet(then, other), meet(then, then) or meet(other, other)
        seen.add(meets)
        try:
            made = torch_tile.compile(traced(body, tmp_path / f"kernel{number}.py"), target="cuda:sm_80")
        except TileError as problem:
            assert problem.code == "divergent_hazard" and (meets or within), f"{body}\n{problem}"
            continue
        assert not meets, body
        findings = made.interpret(torch.zeros(128, dtype=torch.int32), torch.zeros(128, dtype=torch.int32))
        assert within or not findings, f"{body}\n{findings.report()}"
    assert seen == {True, False}
