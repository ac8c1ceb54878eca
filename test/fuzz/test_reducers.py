# SPDX-License-Identifier: Apache-2.0
"""Random nests that fold into random places: a reducer holds what a fragment does whose nests run in order."""

import random

import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.simulator.tile.interpreter import evaluate


class Plan:
    """Nests of random extents; each folds what it reads into elements of `shape`, given by some of its variables."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.op = self.random.choice(["sum", "max", "min", "bitor", "bitxor"])
        self.shape = tuple(self.random.randint(1, 9) for _ in range(self.random.randint(1, 3)))
        self.threads = self.random.choice([32, 64, 96])
        self.turns = self.random.randint(1, 2)
        self.nests = [self.nest() for _ in range(self.random.randint(1, 3))]

    def nest(self):
        """Extents, the place of an update, whether it is under a condition, and how often it is made."""
        rank = self.random.randint(1, 3)
        extents = [self.random.randint(1, 12) for _ in range(rank)]
        free = list(range(rank))
        self.random.shuffle(free)
        place = []
        for size in self.shape:
            if free and self.random.random() < 0.6:
                var = free.pop()
                extents[var] = min(extents[var], size)
                place.append((var, self.random.randint(0, size - extents[var])))
            else:
                place.append((None, self.random.randint(0, size - 1)))
        return extents, place, self.random.random() < 0.4, self.random.choice([1, 1, 2])

    def kernel(self, reducer):
        plan, shape = self, self.shape

        @T.prim_func
        def main(A: T.Tensor((12, 12, 12), "int32"), out: T.Tensor(shape, "int32")):
            with T.Kernel(1, threads=plan.threads):
                acc = T.alloc_reducer(shape, "int32", plan.op) if reducer else T.alloc_fragment(shape, "int32")
                T.fill(acc, 5)
                for turn in T.serial(plan.turns):
                    for extents, place, masked, times in plan.nests:
                        for point in T.Parallel(*extents):
                            at = point if isinstance(point, tuple) else (point,)
                            value = A[(*at, *[turn] * (3 - len(at)))]
                            target = tuple(start if var is None else at[var] + start for var, start in place)
                            for _ in range(times):
                                if masked:
                                    if value > 0:
                                        plan.update(acc, target, value)
                                else:
                                    plan.update(acc, target, value)
                T.copy(acc, out)

        return main

    def update(self, acc, target, value):
        """One of the spellings."""
        folds = {
            "sum": lambda a: a + value, "max": lambda a: T.max(value, a), "min": lambda a: T.min(a, value),
            "bitor": lambda a: a | value, "bitxor": lambda a: value ^ a,
        }  # fmt: skip
        acc[target] = folds[self.op](acc[target])


@pytest.mark.parametrize("case", range(12))
def test_reducers(case, seed):
    plan = Plan(seed)
    a = torch.randint(-100, 100, (12, 12, 12), dtype=torch.int32)
    kernel = plan.kernel(True)
    want, out = (torch.zeros(plan.shape, dtype=torch.int32) for _ in range(2))
    evaluate(plan.kernel(False), a, want)
    evaluate(kernel, a, out)
    assert torch.equal(out, want), kernel
    out.zero_()
    tilelang.compile(kernel)(a, out)
    assert torch.equal(out, want), kernel
    out.zero_()
    findings = tilelang.compile(kernel, target=("cuda:sm_80", "cuda:sm_90a")[case % 2]).interpret(a, out)
    assert not findings and torch.equal(out, want), f"{findings.report()}\n{kernel}"
