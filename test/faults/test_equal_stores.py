# SPDX-License-Identifier: Apache-2.0
"""Threads that store equal values to one place are no race; stores of different values, and reads beside stores, are.

The compiler repeats stores itself: all threads run a store outside of nests, and copies of fragments hold each element
in several threads.
"""

import pytest
import torch

import torch_tile
import torch_tile.language as T


def _alone(place):
    """All threads of a block repeat stores, and read what they stored."""

    @T.prim_func
    def kernel(X: T.Tensor((64,), "int32"), Y: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((64,), "int32")
            t = {"shared": s, "global": Y}[place]
            t[0] = X[0]
            t[0] = X[1]
            t[1] = t[0] + 1
            for k in range(3):
                t[2] = k
                t[3] = t[2] + t[1]
            Y[4] = t[3]

    return kernel


def _copies():
    """Several threads hold each element of a small fragment, and store it twice."""

    @T.prim_func
    def kernel(X: T.Tensor((64,), "int32"), Y: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=128):
            f = T.alloc_fragment((16,), "int32")
            T.copy(X[0:16], f)
            T.copy(f, Y[0:16])
            for i in T.Parallel(16):
                f[i] = f[i] + 1
                Y[i] = f[i]
                Y[i] = Y[i] + f[i]
            T.copy(f, Y[16:32])

    return kernel


def _threads(value):
    """Iterations that the author calls independent meet at places that the data say."""

    @T.prim_func
    def kernel(X: T.Tensor((64,), "int32"), Y: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64, independent=True):
                Y[X[i] // 8] = {"equal": 5, "other": i}[value]

    return kernel


def _blocks(value):
    @T.prim_func
    def kernel(X: T.Tensor((64,), "int32"), Y: T.Tensor((64,), "int32")):
        with T.Kernel(3, threads=32) as b:
            Y[0] = {"equal": 5, "other": b}[value]

    return kernel


def _read_beside(value):
    """Every block reads what another one may store at this moment, whatever the value."""

    @T.prim_func
    def kernel(X: T.Tensor((64,), "int32"), Y: T.Tensor((64,), "int32")):
        with T.Kernel(3, threads=32) as b:
            Y[0] = {"equal": 5, "other": b}[value]
            X[b] = Y[0]

    return kernel


def _kinds(kernel, arch):
    return torch_tile.compile(kernel, target=f"cuda:{arch}").interpret(
        torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    ).kinds  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_equal_values_are_no_race(arch):
    for kernel in (
        _alone("shared"), _alone("global"), _copies(), _threads("equal"), _blocks("equal"),
    ):  # fmt: skip
        assert not _kinds(kernel, arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    "kernel",
    [_threads("other"), _blocks("other"), _read_beside("equal"), _read_beside("other")],
    ids=["threads", "blocks", "read of equal values", "read of others"],
)
def test_other_values_are_a_race(kernel, arch):
    assert _kinds(kernel, arch) == {"race"}
