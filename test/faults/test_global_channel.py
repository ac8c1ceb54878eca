# SPDX-License-Identifier: Apache-2.0
"""Global memory as a channel between the threads of a block: what NVRTC makes of the text keeps every access.

Between barriers other threads may write what a thread has read, or overwrite what it stored.
"""

import sys
from pathlib import Path

import pytest
import torch

import torch_tile
import torch_tile.language as T

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
from ptx import accesses, stale


@T.prim_func
def counter(S: T.Tensor((1,), "int32"), O: T.Tensor((128,), "int32")):
    with T.Kernel(1, threads=128):
        s = S[0]
        S[0] = s + 1
        for i in T.Parallel(128):
            O[i] = S[0]


@T.prim_func
def neighbour(S: T.Tensor((256,), "float32"), O: T.Tensor((128,), "float32"), P: T.Tensor((128,), "float32")):
    with T.Kernel(1, threads=128):
        for i in T.Parallel(128):
            O[i] = S[i]
        T.sync_threads()
        for i in T.Parallel(128):
            S[i + 128] = i
        T.sync_threads()
        for i in T.Parallel(128):
            P[i] = S[i]


@T.prim_func
def vectors(S: T.Tensor((1024,), "float32"), O: T.Tensor((512,), "float32"), P: T.Tensor((512,), "float32")):
    with T.Kernel(1, threads=128):
        for i in T.Parallel(512):
            O[i] = S[i]
        T.sync_threads()
        for i in T.Parallel(512):
            S[i + 512] = i
        T.sync_threads()
        for i in T.Parallel(512):
            P[i] = S[i]


@T.prim_func
def atomics(S: T.Tensor((1,), "int32"), O: T.Tensor((128,), "int32")):
    with T.Kernel(1, threads=128):
        for i in T.Parallel(128):
            O[i] = S[0]
        T.sync_threads()
        for _ in T.Parallel(128):
            T.atomic_add(S[0], 1)
        T.sync_threads()
        for i in T.Parallel(128):
            O[i] = O[i] * S[0]


@T.prim_func
def constants(X: T.Tensor((128,), "float64"), S: T.Tensor((128,), "float32")):
    with T.Kernel(1, threads=128):
        for i in T.Parallel(128):
            S[127 - i] = X[i]
        T.sync_threads()
        for i in T.Parallel(128):
            S[i] = S[i] + T.cast(X[127 - i], "float32")


@pytest.mark.parametrize("arch", ["cuda:sm_80", "cuda:sm_90a"])
@pytest.mark.parametrize("kernel", [counter, neighbour, vectors, atomics], ids=lambda k: k.program.name)
def test_what_was_read_is_read_again_behind_a_barrier(kernel, arch):
    text = torch_tile.compile(kernel, target=arch).get_kernel_source()
    parts = accesses(text, arch)
    assert len(parts) >= 3 or kernel is counter
    assert "ld" in parts[0] and "ld" in parts[-1], parts
    assert not any("ld.nc" in part for part in parts), parts


def test_only_what_no_thread_writes_is_read_as_a_constant():
    text = torch_tile.compile(constants, target="cuda:sm_90a").get_kernel_source()
    assert "const double* __restrict__ X, float* S" in text
    first, last = accesses(text, "cuda:sm_90a")[0], accesses(text, "cuda:sm_90a")[-1]
    assert first == ["ld.nc", "st"] and sorted(last) == ["ld", "ld.nc", "st"]


def test_no_store_leaves_a_loop_across_its_barrier():
    """The neighbour's store of the same iteration is the later one; sunk out of the loop, the own one would win."""

    @T.prim_func
    def turns(S: T.Tensor((129,), "int32"), n: T.int32):
        with T.Kernel(1, threads=128):
            for k in T.serial(n):
                for i in T.Parallel(128):
                    S[i] = k
                T.sync_threads()
                for i in T.Parallel(128):
                    S[i + 1] = k + 100
                T.sync_threads()

    text = torch_tile.compile(turns, target="cuda:sm_90a").get_kernel_source()
    parts = accesses(text, "cuda:sm_90a")
    assert not any("st" in part for part in parts[-1:]), parts


def choice(dtype: str, form: str):
    """An element that was just written, or one of a tensor that nobody writes."""

    @T.prim_func
    def kernel(A: T.Tensor((256,), dtype), W: T.Tensor((256,), dtype), M: T.Tensor((256,), "int64"), n: T.int32):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(256 if form == "vectors" else 64):
                W[i] = W[i] + T.cast(1, dtype)
                if form in ("select", "vectors"):
                    W[i] = T.if_then_else(M[i] > 0, W[i], A[i]) + T.cast(1, dtype)
                elif form == "branch":
                    v = T.alloc_var(dtype, T.cast(0, dtype))
                    if M[i] > 0:
                        v = W[i]
                    else:
                        v = A[i]
                    W[i] = v + T.cast(1, dtype)
                elif form == "loop":
                    for k in T.unroll(4):
                        W[i] = T.if_then_else(M[i] > k, W[i], A[(i + k) % 64]) + T.cast(1, dtype)
                elif form == "or":
                    W[i] = T.cast(
                        (T.reinterpret(W[i], "int32") if dtype == "float32" else W[i])
                        or (T.reinterpret(A[i], "int32") if dtype == "float32" else A[i]),
                        dtype,
                    )
                else:
                    W[i] = T.if_then_else(M[i] > 0, W[n], T.if_then_else(M[i] < -5, A[i], A[n])) + T.cast(1, dtype)

    return kernel


@pytest.mark.parametrize("form", ["select", "vectors", "branch", "loop", "or", "nested"])
@pytest.mark.parametrize("dtype", ["float32", "int32", "int64", "uint8"])
@pytest.mark.parametrize("arch", ["cuda:sm_80", "cuda:sm_90a"])
def test_what_was_written_is_not_read_as_a_constant(dtype, form, arch):
    """NVRTC makes one load of both arms of a choice, as if both came from memory that nobody writes."""
    text = torch_tile.compile(choice(dtype, form), target=arch).get_kernel_source()
    assert not stale(text, arch)
    assert "const int64_t* __restrict__ M" in text or dtype == "int64" or form == "or"


def test_the_check_finds_what_is_read_as_a_constant(monkeypatch):
    from torch_tile.codegen import cuda

    monkeypatch.setattr(cuda, "loaded_bits", lambda *_: set())
    text = torch_tile.compile(choice("float32", "select"), target="cuda:sm_90a").get_kernel_source()
    assert stale(text, "cuda:sm_90a")


@pytest.mark.cuda
@pytest.mark.parametrize("form", ["select", "vectors", "branch", "loop", "or", "nested"])
@pytest.mark.parametrize("dtype", ["float32", "int32", "int64", "uint8"])
def test_a_gpu_reads_what_was_written(dtype, form, seed):
    """The second pass finds in the cache of constants what the first one left there, if it looks."""
    torch.manual_seed(seed)
    kernel = choice(dtype, form)
    a, w = (torch.randint(0, 60, (256,)).to(getattr(torch, dtype)) for _ in range(2))
    m = torch.randint(-9, 10, (256,))
    wanted, there = w.clone(), [x.cuda() for x in (a, w, m)]
    for _ in range(2):
        torch_tile.compile(kernel, target="cpu")(a, wanted, m, 70)
        torch_tile.compile(kernel, target="cuda")(*there, 70)
    assert torch.equal(there[1].cpu(), wanted)


@pytest.mark.cuda
def test_a_gpu_counts_with_every_thread():
    """What neighbours stored behind a barrier is read, not what was there before."""
    there = torch.arange(256.0).cuda(), torch.zeros(128).cuda(), torch.zeros(128).cuda()
    torch_tile.compile(neighbour, target="cuda")(*there)
    assert torch.equal(there[1].cpu(), torch.arange(128.0)) and torch.equal(there[2].cpu(), torch.arange(128.0))
    assert torch.equal(there[0][128:].cpu(), torch.arange(128.0))
