# SPDX-License-Identifier: Apache-2.0
"""Kernels to tune, a cache of each test's own, and a clock that tells what the test wants."""

import pytest
from shared_kernels import add

import torch_tile
import torch_tile.language as T
from torch_tile.kernel import JITKernel


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_TILE_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("TORCH_TILE_AUTOTUNE", "TORCH_TILE_AUTOTUNE_CACHE", "TORCH_TILE_AUTOTUNE_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


def scale(n, block=32, factor=2.0, threads=32):
    @T.prim_func
    def main(x: T.Tensor((n,), "float32"), y: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, block), threads=threads) as bx:
            for i in T.Parallel(block):
                y[bx * block + i] = x[bx * block + i] * factor

    return main


@pytest.fixture
def lazy():
    """scale(n) for the CPU, undecorated by autotune."""
    return torch_tile.jit(scale, out_idx=[-1], target="cpu")


@pytest.fixture
def eager():
    return torch_tile.jit(add)


class Clock:
    """A timer that runs each call once. `speeds` are the milliseconds of kernels in the order in which they first come,
    again and again; a function that is no kernel takes 1 ms.
    """

    def __init__(self, *speeds):
        self.speeds, self.order, self.calls = speeds, [], []

    def __call__(self, call, warmup, rep):
        call()
        self.calls.append(call)
        if not isinstance(call.func, JITKernel):
            return 1.0
        if call not in self.order:
            self.order.append(call)
        return self.speeds[self.order.index(call) % len(self.speeds)]


@pytest.fixture
def clock(monkeypatch):
    """`clock(3.0, 1.0)`: from now on the first kernel that is timed takes 3 ms, the second 1 ms, the third 3 ms ..."""

    def install(*speeds):
        made = Clock(*speeds)
        monkeypatch.setattr("torch_tile.autotuner.trials._timed", lambda backend, *args: made(*args))
        return made

    return install
