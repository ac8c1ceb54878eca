# SPDX-License-Identifier: Apache-2.0
"""When a condition holds in all steps of a vectorised loop, against trying all of them."""

import random

from torch_tile.ir import dtype as dt
from torch_tile.ir.evaluate import evaluate
from torch_tile.ir.expr import Var, binary, const
from torch_tile.lowering.analysis.scope_facts import Known
from torch_tile.lowering.threads.vector_conditions import in_all_steps

v, t, n = Var("v", dt.int32, "loop"), Var("t", dt.int32, "thread"), Var("n", dt.int32, "dim", 4)
COUNT = 4


def known():
    found = Known()
    found.ranges = found.ranges.loop(t, 0, 16).loop(v, 0, COUNT)
    return found


def random_term():
    left = (
        t * random.choice([1, 2, 4, 4, 4])
        + v * random.choice([-2, -1, 0, 1, 1, 1, 3])
        + random.choice([0, 0, 4, 1, -3])
    )
    right = random.choice([n, n + 1, const(random.randrange(40), dt.int32)])
    return binary(random.choice(["<", "<=", ">", ">="]), *random.sample([left, right], 2))


def test_random_conditions():
    understood = alike = 0
    while understood < 200 or alike < 10:
        condition = random_term()
        if random.random() < 0.3:
            condition = binary("and", condition, random_term())
        found = in_all_steps(condition, v, COUNT, known())
        if found is None:
            continue
        understood += 1
        alike += found[1]
        for _ in range(20):
            env = {t: random.randrange(16), n: 4 * random.randrange(10)}
            steps = [bool(evaluate(condition, {**env, v: step})) for step in range(COUNT)]
            assert bool(evaluate(found[0], env)) == all(steps), condition
            assert not found[1] or all(steps) or not any(steps), condition


def test_not_understood():
    for condition in (v * v < n, binary("==", v, t), binary("or", v < n, t < n), v // 2 < n):
        assert in_all_steps(condition, v, COUNT, known()) is None
