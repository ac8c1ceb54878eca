# SPDX-License-Identifier: Apache-2.0
"""The number of iterations of a loop is settled before its first iteration, whatever the body changes."""

import re

import pytest
import torch

import torch_tile
import torch_tile.language as T


def by_variable(dtype):
    @T.prim_func
    def kernel(N: T.Tensor((1,), dtype), O: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=32):
            v = T.alloc_var(dtype, 0)
            turns = T.alloc_var("int32", 0)
            v = N[0]
            for _ in range(v):
                turns += 1
                v = v - 1
            O[0] = turns
            turns = 0
            v = N[0]
            for t in T.serial(1, v % 8 + 1, 2):
                turns += 1
                v = t
            O[1] = turns

    return kernel


@T.prim_func
def by_fragment(N: T.Tensor((1,), "int32"), O: T.Tensor((2,), "int32")):
    with T.Kernel(1, threads=32):
        count = T.alloc_local((1,), "int32")
        count[0] = N[0]
        for _ in range(count[0]):
            O[0] += 1
            count[0] = count[0] - 1
        count[0] = N[0]
        for t in range(1, count[0] % 8 + 1, 2):
            O[1] += 1
            count[0] = t


@T.prim_func
def by_memory(N: T.Tensor((1,), "int32"), O: T.Tensor((2,), "int32")):
    with T.Kernel(1, threads=1):
        for _ in range(N[0]):
            O[0] += 1
            N[0] = N[0] - 1
        N[0] = O[0]
        for t in range(1, N[0] % 8 + 1, 2):
            O[1] += 1
            N[0] = t


KERNELS = {
    **{dtype: (by_variable(dtype), dtype) for dtype in ("int32", "int64", "uint8", "int16")},
    "fragment": (by_fragment, "int32"),
    "memory": (by_memory, "int32"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_turns_are_counted_once(way, name):
    kernel, dtype = KERNELS[name]
    n, o = torch.tensor([6], dtype=getattr(torch, dtype)), torch.zeros(2, dtype=torch.int32)
    way(kernel, n, o)
    assert o.tolist() == [6, 3]


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_80", "cuda:sm_90a"])
@pytest.mark.parametrize("name", KERNELS)
def test_heads_read_no_memory(name, target):
    """The simulator runs the program, so the text itself is looked at."""
    text = torch_tile.compile(KERNELS[name][0], target=target).get_kernel_source(False)
    heads = [line for line in text.splitlines() if line.strip().startswith("for (") and "block" not in line]
    assert len(heads) == 2
    for head in heads:
        assert re.search(r"; \w+ < (\(int64_t\))?stop\w*; ", head), head


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_80"])
def test_settled_bounds_stay_in_the_head(target):
    m = T.dynamic("m")

    @T.prim_func
    def kernel(O: T.Tensor((m,), "int32"), n: T.int32):
        with T.Kernel(1, threads=1):
            for i in range(n):
                for j in range(m):
                    O[j] += i

    text = torch_tile.compile(kernel, target=target).get_kernel_source(False)
    assert "< n; " in text and "< m; " in text and "stop" not in text


def stepping(dtype, step):
    """Count the turns of a loop between arguments, and keep its last index."""

    @T.prim_func
    def kernel(O: T.Tensor((2,), dtype), start: dtype, stop: dtype):
        with T.Kernel(1, threads=32):
            turns, last = T.alloc_var(dtype, 0), T.alloc_var(dtype, 0)
            for i in T.serial(start, stop, step):
                turns += 1
                last = i
            O[0] = turns
            O[1] = last

    return kernel


@pytest.mark.parametrize("step", [2, 3, 1000, 2**31 - 1, -2, -7, -1000])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_steps_that_leave_the_type_end_the_loop(dtype, step, way):
    """The next index would lie beyond the greatest number, or below the least one."""
    limits = torch.iinfo(getattr(torch, dtype))
    kernel = stepping(getattr(T, dtype), step)
    for far in (0, 1, abs(step), 3 * abs(step) + 1):
        for end in (0, 1):
            stop = limits.max - end if step > 0 else limits.min + end
            start = max(limits.min, stop - far) if step > 0 else min(limits.max, stop + far)
            turns = range(start, stop, step)
            out = torch.zeros(2, dtype=getattr(torch, dtype))
            way(kernel, out, start, stop)
            assert out.tolist() == [len(turns), turns[-1] if turns else 0]
