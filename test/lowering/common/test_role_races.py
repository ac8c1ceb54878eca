# SPDX-License-Identifier: Apache-2.0
"""Tiles that roles touch in no order: the finding names the read, and the interpreter of threads meets each race."""

import itertools
import warnings

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.lowering.common.role_races import role_races

STEPS = 3


def handed(waits, returns, arrives=True, box="row", outer=False, guarded=False, reader=1):
    """A kernel whose producer hands a tile to its consumer: the switches take parts of the protocol away."""
    writer = 1 - reader

    @T.prim_func
    def kernel(x: T.Tensor((STEPS, 256), "float32"), y: T.Tensor((STEPS, 256), "float32")):
        with T.Kernel(1, threads=256):
            s = T.alloc_shared((2, 256), "float32")
            full, empty = T.alloc_barrier(128), T.alloc_barrier(128)
            for _ in T.serial(1) if outer else (0,):
                with T.ws(writer):
                    for k in T.serial(STEPS):
                        if returns:
                            T.barrier_wait(empty, k % 2 ^ 1)
                        if box == "elements":
                            for i in T.Parallel(256):
                                s[0, i] = x[k, i]
                        else:
                            T.copy(x[k, :], s[0, :])
                        T.barrier_arrive(full)
                with T.ws(reader):
                    for k in T.serial(STEPS):
                        if waits:
                            T.barrier_wait(full, k % 2)
                        if guarded:
                            if x[k, 0] > 1e9:
                                T.copy(s[0, :], y[k, :])
                        elif box == "other":
                            T.copy(s[1, :], y[k, :])
                        elif box == "elements":
                            for i in T.Parallel(256):
                                y[k, i] = s[0, i]
                        elif box == "part":
                            T.copy(s[0, 100:200], y[k, 100:200])
                        else:
                            T.copy(s[0, :], y[k, :])
                        if arrives:
                            T.barrier_arrive(empty)  # so the tile may be written again

    return kernel


def races_of(kernel):
    """Whether the interpreter of threads meets a race, or a read of what nobody wrote yet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch_tile.compile(kernel, target="cuda:sm_90a")
    made = found.interpret(torch.randn(STEPS, 256), torch.zeros(STEPS, 256))
    return bool({kind for kind, *_ in made.found} & {"race", "unwritten"})


@pytest.mark.parametrize("box", ["row", "elements", "part"])
@pytest.mark.parametrize("waits, returns, reader", list(itertools.product((False, True), repeat=3)))
def test_each_protocol_with_a_race_is_named_or_met(waits, returns, reader, box):
    """A tile without waits is named. Where one role alone waits, some wait of it is for ever."""
    kernel = handed(waits, returns, box=box, reader=int(reader))
    named = role_races(kernel.program)
    assert bool(named) == (not waits and not returns)
    for each in named:
        assert each.code == "role_race" and "`s`" in each.message and each.span and each.notes[0][0]
    if returns != waits:
        with pytest.raises(TileError, match="stuck_wait"):
            races_of(kernel)
    else:
        assert races_of(kernel) == bool(named)


@pytest.mark.parametrize("options", [
    {"box": "other"},
    {"guarded": True},
    {"waits": True, "outer": True},
    {"returns": True, "arrives": False},
], ids=str)  # fmt: skip
def test_what_need_not_meet_is_not_named(options):
    """Other boxes, reads that data decide on, and roles of which one waits."""
    assert not role_races(handed(**({"waits": False, "returns": False} | options)).program)


def test_a_loop_around_roles_without_waits():
    kernel = handed(False, False, outer=True)
    assert role_races(kernel.program) and races_of(kernel)


def test_a_producer_that_waits_for_the_reader_is_in_order():
    """The first phase of `ready` ends when the reader has read."""

    @T.prim_func
    def kernel(x: T.Tensor((256,), "float32"), y: T.Tensor((256,), "float32")):
        with T.Kernel(1, threads=256):
            s, ready = T.alloc_shared((256,), "float32"), T.alloc_barrier(128)
            T.copy(x, s)
            with T.ws(0):
                T.barrier_wait(ready, 0)
                T.clear(s)
            with T.ws(1):
                T.copy(s, y)
                T.barrier_arrive(ready)

    assert not role_races(kernel.program)
    made = torch_tile.compile(kernel, target="cuda:sm_90a")
    x, y = torch.randn(256), torch.zeros(256)
    assert not made.interpret(x, y).found and torch.equal(x, y)


def test_the_author_is_warned():
    with pytest.warns(UserWarning, match="role_race"):
        torch_tile.compile(handed(False, False), target="cuda:sm_90a")
