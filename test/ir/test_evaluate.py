# SPDX-License-Identifier: Apache-2.0
import math
import random

import pytest

from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.evaluate import evaluate
from torch_tile.ir.expr import Load, Var, binary, cast, const, maximum, minimum, select, unary

M = Var("M", dt.int32, "dim")
K = Var("K", dt.int32, "dim")
x = Var("x", dt.float32)


def test_sizes_of_a_launch(seed):
    for _ in range(100):
        m, k = random.randint(1, 10**6), random.randint(1, 10**6)
        env = {M: m, K: k}
        assert evaluate((M + 127) // 128, env) == -(-m // 128)
        assert evaluate(minimum(M * K, M - K) % 7, env) == min(m * k, m - k) % 7
        assert evaluate(maximum(-M // 3, unary("~", K)), env) == max(-m // 3, ~k)
        assert evaluate(select(binary("and", M > 5, K >= M), M << 2, abs(M - K)), env) == (
            m << 2 if m > 5 and k >= m else abs(m - k)
        )


def test_index_types_do_not_wrap_and_others_do():
    assert evaluate(M * K, {M: 2**20, K: 2**20}) == 2**40
    byte = Var("b", dt.uint8)
    assert evaluate(byte + 1, {byte: 255}) == 0
    assert evaluate(-cast(byte, dt.int8), {byte: 128}) == -128
    assert evaluate(cast(M, dt.int8), {M: 200}) == -56


def test_floats_round_to_their_type():
    assert evaluate(x + 1, {x: 2.0**24}) == 2.0**24
    assert evaluate(cast(x, dt.float16), {x: 65520.0}) == math.inf
    assert evaluate(x / 0, {x: -1.0}) == -math.inf and math.isnan(evaluate(x / 0, {x: 0.0}))
    assert evaluate(cast(x, dt.int32), {x: -2.7}) == -2


def test_branches_not_taken_are_not_evaluated():
    assert evaluate(select(M > 0, M, M // 0), {M: 3}) == 3
    assert evaluate(binary("or", M > 0, M // 0 > 1), {M: 3}) is True


def test_what_has_no_value():
    with pytest.raises(ZeroDivisionError):
        evaluate(M // (K - K), {M: 1, K: 1})
    with pytest.raises(KeyError):
        evaluate(M + 1, {})
    with pytest.raises(ValueError, match="outside a kernel"):
        evaluate(Load(Buffer("A", (M,), dt.int32, "global"), (const(0, dt.int32),)), {M: 1})
    with pytest.raises(OverflowError):
        evaluate(cast(x, dt.int32), {x: math.inf})
