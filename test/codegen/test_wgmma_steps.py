# SPDX-License-Identifier: Apache-2.0
"""Loops along K become one product only where their instructions do what the steps of one product do."""

import pytest
from flat_kernels import at, loop, tensor
from hypothesis import given, strategies as st

from torch_tile.codegen.wgmma_steps import Steps, joined
from torch_tile.intrinsics import wgmma
from torch_tile.intrinsics.wgmma import Descriptor
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Var, binary, const

WALK = Descriptor(128, 16, 1024)
TYPES = ("bfloat16", "bfloat16", "float32")
A, B = tensor("a", (64, 128), "bfloat16", "shared"), tensor("b", (128, 128), "bfloat16", "shared")
X, D = tensor("x", (64,), "bfloat16", "local"), tensor("d", (256,), "float32", "local")
warpgroup = Var("w", dt.int32, "thread")


def product(k, a=None, d=0, keep=True, a_step=None, a_walk=WALK):
    """64 x 128, of the step that begins `k` x 16 columns into panels of 64."""
    moved = k * 16 // 64 * 8192 + k * 16 % 64 * 2
    a_step = moved + warpgroup * 4096 if a_step is None else a_step
    return wgmma.wgmma(
        at(D, d), at(A, 0, 0) if a is None else a, at(B, 0, 0), 128, TYPES, a_walk, WALK, a_step, moved, keep
    )


def test_steps_through_panels():
    found = joined(loop(8, lambda k: product(k, keep=binary(">", k, const(0, dt.int32)))))
    assert found.count == 8 and found.steps == (Steps(32, 4, 8192),) * 2
    assert [repr(x) for x in found.call.args[3:]] == ["w * 4096", "0", "False"]
    assert found.name == "wgmma_m64n128k16_f32_bf16_bf16_ss_x8"
    walk = "tile::Walk<128, 16, 1024, false, 32, 4, 8192>"
    assert found.spelling == f"{found.name}<{walk}, {walk}>"


def test_registers_of_a_follow_each_other():
    found = joined(loop(8, lambda k: product(k, at(X, k * 8), a_step=0, a_walk=None)))
    assert found.count == 8 and found.name.endswith("_rs_x8") and repr(found.call.args[1]) == repr(at(X, 0))
    assert joined(loop(8, lambda k: product(k, at(X, k * 4), a_step=0, a_walk=None))) is None
    assert joined(loop(4, lambda k: product(k, at(X, k * k), a_step=0, a_walk=None))) is None


@pytest.mark.parametrize(
    "body",
    [
        lambda k: product(k, keep=False),  # each step starts afresh
        lambda k: product(k, keep=binary(">", warpgroup, const(0, dt.int32))),
        lambda k: product(k, d=k * 64),
        lambda k: product(k, at(A, k, 0)),
        lambda k: product(k, a_step=k * warpgroup),
        lambda k: product(k, a_step=k * k * 16),
        lambda k: (product(k), product(k)),
    ],
)
def test_others_stay_loops(body):
    assert joined(loop(4, lambda k: product(k))) is not None
    assert joined(loop(4, body)) is None


def test_bounds():
    assert joined(loop(1, lambda k: product(k))) is None
    assert joined(loop(4, lambda k: product(k), start=1)) is None
    assert joined(loop(8, lambda k: product(k), step=2)) is None
    assert joined(loop(Var("n", dt.int32, "dim"), lambda k: product(k))) is None


@given(near=st.integers(1, 9), run=st.integers(1, 5), far=st.integers(0, 99), count=st.integers(2, 12))
def test_steps_are_found(near, run, far, count):
    starts = [i % run * near * 16 + i // run * far * 16 for i in range(count)]
    steps = Steps.of(starts)
    assert steps is not None and [steps.start(i) for i in range(count)] == starts


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_steps_say_what_they_are(starts):
    steps = Steps.of([0, *starts])
    assert steps is None or [steps.start(i) for i in range(len(starts) + 1)] == [0, *starts]
