# SPDX-License-Identifier: Apache-2.0
"""What check_kernel says of random nests around tiles is what their runs meet."""

import random

import pytest
import torch

import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.ir import dtype as dt
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.expr import Var
from torch_tile.lowering.analysis.reachability import BUDGET, Path
from torch_tile.lowering.common.check import check_kernel
from torch_tile.simulator.tile.interpreter import evaluate

COUNT = 100


class Nests:
    """Texts of random kernels. With `unknown` there are also values of memory, sizes, and loops that are left."""

    def __init__(self, seed, unknown):
        self.random, self.unknown, self.made = random.Random(seed), unknown, 0

    def text(self):
        lines = [
            "@T.prim_func",
            "def kernel(A: T.Tensor((4,), 'int32'), n: T.int32):",
            f"    with T.Kernel({self.random.choice(['n', '3'] if self.unknown else ['1', '3'])}) as b:",
            f"        x = T.alloc_shared(({self.random.randint(4, 12)},), 'int32')",
            "        T.fill(x, 1)",
            *self.body(8, ["b"], 0, False),
        ]
        return "\n".join(lines) + "\n"

    def body(self, indent, names, depth, inside):
        """One to three statements; `inside` a T.Parallel."""
        pad, found = " " * indent, []
        for _ in range(self.random.randint(1, 3)):
            pick = self.random.random()
            if depth == 3 or pick < 0.25:
                found += [pad + line for line in self.access(names, inside)]
            elif pick < 0.65:
                self.made += 1
                name = f"i{self.made}"
                head, parallel = self.loop(names, inside)
                found += [f"{pad}for {name} in {head}:"]
                if self.unknown and not (inside or parallel) and self.random.random() < 0.3:
                    leave = self.random.choice(["break", "continue"])
                    found += [f"{pad}    if {self.condition([name])}:", f"{pad}        {leave}"]
                found += self.body(indent + 4, [*names, name], depth + 1, inside or parallel)
            else:
                found += [f"{pad}if {self.condition(names)}:", *self.body(indent + 4, names, depth + 1, inside)]
                if self.random.random() < 0.4:
                    found += [f"{pad}else:", *self.body(indent + 4, names, depth + 1, inside)]
        return found

    def loop(self, names, inside):
        stop = self.random.choice([*"123", f"{self.random.choice(names)} + 1", f"3 - {self.random.choice(names)}"])
        if self.unknown and self.random.random() < 0.2:
            stop = self.random.choice(["n", "A[0]", "T.min(n, 2)"])
        if not inside and self.random.random() < 0.4:
            return f"T.Parallel({stop})", True
        start, step = self.random.choice(["0", "0", "1", self.random.choice(names)]), self.random.randint(1, 2)
        return f"T.serial({start}, {stop}, {step})", False

    def access(self, names, inside):
        e = self.index(names)
        kinds = [
            f"x[{e}] = 1",
            f"A[0] = T.if_then_else({self.condition(names)}, x[{e}], 0)",
            f"A[2] = T.if_then_else({self.condition(names)} or x[{e}] > 0, 0, 1)",
        ]
        if not inside:
            kinds += [f"T.fill(x[{e}:{e} + {self.random.randint(1, 3)}], 0)", f"T.fill(x[0:1], x[{e}])"]
        return [self.random.choice(kinds)]

    def index(self, names):
        a, b = self.random.choice(names), self.random.choice(names)
        return self.random.choice([
            f"{a} + {self.random.randint(-1, 9)}", f"{a} * {self.random.randint(1, 4)} + {b}", f"{a} - {b}",
            f"T.min({a} * 4, {self.random.randint(3, 12)})", f"({a} * 3 + {b}) % {self.random.randint(3, 13)}",
            f"T.if_then_else({self.condition(names)}, {a}, {a} + 7)", f"T.abs({a} - 2) + {b} // 2",
        ])  # fmt: skip

    def condition(self, names):
        a, op = self.random.choice(names), self.random.choice(["<", ">=", "==", "!="])
        known = f"{a} {op} {self.random.choice(['0', '1', '2', self.random.choice(names)])}"
        if self.unknown and self.random.random() < 0.3:
            known = self.random.choice(["A[0] > 0", f"{a} < n", f"x[0] == {a}"])
        return self.random.choice(
            [known, known, f"not ({known})", f"({known} and {a} % 2 == 1)", f"({known} or b > 1)"]
        )


def traced(text, path):
    path.write_text(text)
    space = {"T": T}
    exec(compile(text, str(path), "exec"), space)
    return space["kernel"]


def refused(run):
    """The codes of a run's findings."""
    try:
        run()
    except TileError as problem:
        return {d.code for d in problem.diagnostics}
    return set()


@pytest.mark.parametrize("unknown", [False, True])
def test_what_is_said_is_met(unknown, tmp_path):
    said = quiet = 0
    for seed in range(COUNT):
        text = Nests(seed, unknown).text()
        kernel = traced(text, tmp_path / f"kernel{seed}.py")
        found = refused(lambda kernel=kernel: check_kernel(kernel.program))
        assert found <= {"leaves_tile", "out_of_bounds"}, text
        arguments = torch.full((4,), 3, dtype=torch.int32), 3
        met = refused(lambda kernel=kernel, arguments=arguments: evaluate(kernel, *arguments))
        assert met or "leaves_tile" not in found, f"is said, but not met:\n{text}"
        assert found or unknown or not met, f"is met, but not said:\n{text}"
        said, quiet = said + bool(found), quiet + (not found)
    assert min(said, quiet) > COUNT // 10


def loops(*extents):
    """Variables of loops from 0, the path inside all of them, and what is known there."""
    path, ranges, variables = Path(), Ranges(), []
    for n, extent in enumerate(extents):
        variables.append(Var(f"i{n}", dt.int32, "loop"))
        path, ranges = path.iterations(variables[-1], 0, extent), ranges.loop(variables[-1], 0, extent)
    return path, ranges, *variables


def test_ends_of_wide_ranges_are_tried_as_conditions_narrow_them():
    path, ranges, i, j = loops(4 * BUDGET, 4 * BUDGET)
    assert path.where(i + j >= 8 * BUDGET - 2, (i, j), ranges) == ([2047, 2047], {"i0": 2047, "i1": 2047})
    assert path.where(i + j >= 8 * BUDGET - 1, (i, j), ranges) is None
    inner, known = path.assume(i < 1000).assume(i >= 7), ranges.assume(i < 1000).assume(i >= 7)
    assert inner.where(i + j >= 999 + 2047, (i,), known) == ([999], {"i0": 999, "i1": 2047})
    assert inner.where(i - j >= 993, (i - j,), known) == ([999], {"i0": 999, "i1": 0})
    assert inner.where(i - j <= 7 - 2047, (j,), known) == ([2047], {"i0": 7, "i1": 2047})
    assert path.assume(i % 2 == 1).assume(i % 2 == 0).where(i >= 0, (i,), ranges) is None


def test_each_value_of_narrow_ranges_is_tried():
    path, ranges, i, _ = loops(16, 4 * BUDGET)
    assert path.where(i * 5 % 16 == 3, (i,), ranges) == ([7], {"i0": 7})
    assert path.iterations(Var("k"), 0, i).where(i < 1, (i,), ranges) is None  # a loop inside has no turn then
    assert path.iterations(Var("k"), 0, i).where(i < 2, (i,), ranges) == ([1], {"i0": 1})
    twice = Var("twice")
    assert path.define(twice, i * 2).where(twice >= 30, (twice + 1,), ranges) == ([31], {"i0": 15})


def test_of_what_sizes_end_the_first_turn_is_known():
    n, k, extra = Var("n", dt.int32, "dim"), Var("k", dt.int32, "loop"), Var("j", dt.int32, "loop")
    path, ranges, i = loops(4)
    assert path.iterations(k, 2, n).where(k + i >= 5, (k,), ranges) == ([2], {"i0": 3, "k": 2})
    for lost in (path.iterations(k, n, 9), path.iterations(k, 0, n * i), path.iterations(k, i, n), path.assume(i < n)):
        assert lost.steps is None and lost.iterations(extra, 0, 9).where(extra > 3, (extra,), ranges) is None
    assert path.define(extra, n + 1).where(extra + i > 2, (i,), ranges) is None
