# SPDX-License-Identifier: Apache-2.0
import numpy as np

from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Load, Var, cast, const, minimum, select
from torch_tile.lowering.analysis.thread_values import Numbers, is_unsure

TX = Var("thread", dt.int32, "thread")
i, j = (Var(n, dt.int32, "loop") for n in "ij")
A = Buffer("A", (const(8, dt.int32),), dt.int32, "shared")
NUMBERS = Numbers({i: np.arange(3)[None, :]}, np.arange(32)[:, None])


def test_values_of_all_threads_and_turns():
    e = select((TX ^ i) % 4 < 2, cast(TX, dt.int64) // 8 + i * 16, minimum(TX, 5) << 1)
    wanted = [
        [t // 8 + n * 16 if (t ^ n) % 4 < 2 else min(t, 5) << 1 for n in range(3)] for t in range(32)
    ]  # fmt: skip
    assert NUMBERS.knows(e)
    assert NUMBERS(e).tolist() == wanted


def test_what_does_not_depend_on_a_loop_is_computed_once():
    assert NUMBERS(TX // 8 * 64).shape == (32, 1)
    assert NUMBERS(const(7, dt.int32)).shape == ()


def test_other_variables_and_memory_are_not_known():
    assert not NUMBERS.knows(TX + j) and not NUMBERS.touches(j + 1)
    assert not NUMBERS.knows(Load(A, (TX,))) and NUMBERS.touches(Load(A, (j,)))
    assert NUMBERS.touches(TX * 2) and NUMBERS.touches(j + i)
    assert is_unsure(TX) and not is_unsure(i)
