# SPDX-License-Identifier: Apache-2.0
"""Kernels whose authors order warps by hand: what they become, that they are right, and need all that orders them."""

import hand_written
import pytest
import torch
from mutation import removals
from traced_stages import stages, traces_back

import torch_tile
import torch_tile.language as T
from torch_tile.codegen.cuda import emit_cuda
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.ir.expr import Call
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Role
from torch_tile.lowering import cuda_passes, lower
from torch_tile.runtime.nvrtc import compile_cubin
from torch_tile.simulator.interpret import interpret
from torch_tile.simulator.tile.interpreter import evaluate

HOPPER = Target.of("cuda:sm_90a")
TURNS = 5
NAMES = (*hand_written.GEMMS, "attention")


def kernel_of(name):
    """A kernel for one block, its arguments, and what it shall give."""
    if name == "attention":
        kernel = hand_written.attention(128, 64 * TURNS)
        q, k, v = (torch.randn(n, 64).half() for n in (128, 64 * TURNS, 64 * TURNS))
        weights = torch.exp2(q.double() @ k.double().T)
        return kernel, (q, k, v), weights / weights.sum(-1, keepdim=True) @ v.double()
    size = 64 if name == "block_gemm" else 128
    a, b = torch.randn(size, 64 * TURNS).half(), torch.randn(64 * TURNS, size).half()
    return hand_written.GEMMS[name](size, size, 64 * TURNS), (a, b), a.double() @ b.double()


def run(program, kernel, inputs, want):
    """What the thread interpreter finds; the result must be right if it finds nothing."""
    out = torch.full(want.shape, float("nan"), dtype=torch.float16)
    findings = interpret(program, kernel.program, (*inputs, out))
    if not findings.found:
        torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)
    return findings.found


@pytest.mark.parametrize("name", NAMES)
def test_the_assembler_has_no_advice(name):
    kernel, _, _ = kernel_of(name)
    compiled = torch_tile.compile(kernel, target="cuda:sm_90a")
    log = compile_cubin(compiled.get_kernel_source(), HOPPER).log
    assert "C75" not in log and " 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log, log


@pytest.mark.parametrize("name", NAMES)
def test_values(name):
    kernel, inputs, want = kernel_of(name)
    flat = lower(kernel.program, cuda_passes(Build(HOPPER)))
    assert any(isinstance(n, Call) and n.name == "wgmma" for n in walk(flat))
    assert not run(flat, kernel, inputs, want)


# A kernel's first iterations are released for nobody where its loop ends; the assembler wants fences between products
# anyway.
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_wait_and_arrival_is_needed(name):
    kernel, inputs, want = kernel_of(name)
    flat = lower(kernel.program, cuda_passes(Build(HOPPER)))
    missed = [r for r in removals(flat) if not run(r.program, kernel, inputs, want)]
    assert {r.name for r in missed} <= {"wgmma_fence"}, [f"{r.name} at {r.span}" for r in missed]


@pytest.mark.parametrize("name", NAMES)
def test_every_stage_traces_back(name):
    program = kernel_of(name)[0].program
    for step, made in stages(program, Build(HOPPER)):
        traces_back(step, made)


def test_what_a_role_says_stays_as_it_is():
    """Products are waited for and tiles release where their author says so."""
    kernel, _, _ = kernel_of("tma_gemm")
    flat = lower(kernel.program, cuda_passes(Build(HOPPER)))
    consumer = next(n for n in walk(flat) if isinstance(n, Role))
    calls = [n.name for n in walk(consumer) if isinstance(n, Call)]
    order = [n for n in calls if n not in ("vector_copy", "narrow_pair")]
    assert order == [
        "mbarrier_wait", "wgmma_fence", "wgmma", "wgmma_commit", "wgmma_wait", "wgmma_results", "mbarrier_arrive"
    ]  # fmt: skip


def test_a_copy_of_a_role_is_a_copy_of_its_threads():
    kernel, _, _ = kernel_of("copied_gemm")
    flat = lower(kernel.program, cuda_passes(Build(HOPPER)))
    names = {n.name for n in walk(flat) if isinstance(n, Call)}
    assert "vector_copy" in names and not {"tma_load", "cp_async"} & names


def added_up(dtype="float32", combine="add", rows=128):
    """Each block adds its tile of A to all rows of C, which it has in common with the other blocks."""

    @T.prim_func
    def main(A: T.Tensor((rows, 64), dtype), C: T.Tensor((64, 64), dtype)):
        with T.Kernel(rows // 64, threads=128) as bx:
            a = T.alloc_shared((64, 64), dtype)
            T.copy(A[bx * 64, 0], a)
            T.tma_copy(a, C[0, 0], combine=combine)

    return main


@pytest.mark.parametrize("way", ["add float32", "add bfloat16", "min int32", "max int32"])
def test_blocks_combine_tiles_in_memory(way):
    combine, dtype = way.split()
    made = torch_tile.compile(added_up(dtype, combine), target="cuda:sm_90a")
    assert f"tma_store_{combine}" in made.source
    a = torch.randint(-50, 50, (128, 64)).to(getattr(torch, dtype))
    start = torch.randint(-50, 50, (64, 64)).to(a.dtype)
    parts = torch.stack([start, a[:64], a[64:]])
    want = {"add": parts.sum(0), "min": parts.amin(0), "max": parts.amax(0)}[combine]
    threads, tiles = start.clone(), start.clone()
    assert not made.interpret(a, threads)
    assert torch.equal(threads, want.to(a.dtype))
    evaluate(added_up(dtype, combine), a, tiles)
    assert torch.equal(tiles, want.to(a.dtype))


def test_what_cannot_be_combined_is_named():
    for dtype, combine in (("float32", "min"), ("int8", "add")):
        with pytest.raises(torch_tile.TileError, match=f"`combine` is '{combine}' of {dtype}"):
            torch_tile.compile(added_up(dtype, combine), target="cuda:sm_90a")
    with pytest.raises(torch_tile.TileError, match="give one of None, 'add'"):
        added_up(combine="xor")
    with pytest.raises(torch_tile.TileError):
        torch_tile.compile(added_up(), target="cpu")


def test_what_the_author_has_shown_is_not_shown_again():
    """One fence after the weights are written, though more arrivals follow; one more where they are written again."""

    def kernel_of(again):
        @T.prim_func
        def kernel(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
            with T.Kernel(1, threads=128) as _:
                a, b = (T.alloc_shared((64, 64), "float16") for _ in range(2))
                c = T.alloc_fragment((64, 64), "float32")
                first, second = T.alloc_barrier(128), T.alloc_barrier(128)
                with T.ws(0):
                    T.copy(A, a)
                    T.copy(A, b)
                    T.fence_proxy_async()
                    T.mbarrier_arrive(first)
                    if again:
                        T.copy(A, b)
                    T.mbarrier_arrive(second)
                    T.mbarrier_wait_parity(first, 0)
                    T.mbarrier_wait_parity(second, 0)
                    T.gemm(a, b, c, clear_accum=True)
                    T.copy(c, C)

        return kernel

    for again in (False, True):
        made = torch_tile.compile(kernel_of(again), target="cuda:sm_90a")
        a, c = torch.randn(64, 64).half(), torch.empty(64, 64)
        assert not made.interpret(a, c)
        torch.testing.assert_close(c.double(), a.double() @ a.double(), rtol=2e-2, atol=2e-2)
        assert made.get_kernel_source().count("fence_proxy_async") == 1 + again


def test_products_that_wait_for_each_other_are_told_of(caplog):
    """Sums that are in flight where a loop begins again make the assembler wait for each product: users hear of it."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32"), turns: T.int32):
        with T.Kernel(1, threads=128) as _:
            a = T.alloc_shared((64, 64), "float16")
            c, d = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.sync_threads()
            T.clear(c)
            for _ in T.serial(turns):
                T.wgmma_gemm(a, a, d, clear_accum=True)
                T.wait_wgmma(1)
                for i, j in T.Parallel(64, 64):
                    c[i, j] += 1
                T.wait_wgmma(0)
                T.wgmma_gemm(a, a, c)
            T.wait_wgmma(0)
            for i, j in T.Parallel(64, 64):
                C[i, j] = c[i, j] + d[i, j]

    made = torch_tile.compile(kernel, target="cuda:sm_90a")
    assert any("serialized" in line for line in made.cubin.warnings), made.cubin.warnings
    assert "kernel_kernel: ptxas" in caplog.text and "serialized" in caplog.text
    assert "serialized" in str(made.schedule)


@pytest.mark.parametrize("missing", ["arrival", "wait"])
def test_a_barrier_that_nobody_arrives_at_or_waits_for(missing):
    @T.prim_func
    def kernel(A: T.Tensor((128, 64), "float16"), B: T.Tensor((128, 64), "float16")):
        with T.Kernel(1, threads=256) as _:
            a = T.alloc_shared((128, 64), "float16")
            ready = T.alloc_barrier(128)
            with T.ws(1):
                T.tma_copy(A, a, barrier=ready[0])
                if missing != "arrival":
                    T.mbarrier_arrive(ready)
            with T.ws(0):
                if missing != "wait":
                    T.mbarrier_wait_parity(ready, 0)  # here
                T.copy(a, B)

    if missing == "arrival":
        with pytest.raises(torch_tile.TileError, match=r"no arrival at `ready\[0\]` is left") as refused:
            torch_tile.compile(kernel, target="cuda:sm_90a")
        assert "T.mbarrier_wait_parity(ready, 0)  # here" in str(refused.value)
        return
    x = torch.randn(128, 64).half()
    report = torch_tile.compile(kernel, target="cuda:sm_90a").interpret(x, torch.empty_like(x)).report()
    assert "T.copy(a, B)" in report and "T.tma_copy(A, a, barrier=ready[0])" in report


def test_clusters_and_early_starts():
    @T.prim_func
    def kernel(A: T.Tensor((4, 64), "float32"), C: T.Tensor((4, 64), "float32")):
        with T.Kernel(4, threads=64, cluster_dims=2) as bx:
            T.pdl_sync()
            for i in T.Parallel(64):
                C[bx, i] = A[bx, i] + T.block_rank_in_cluster() * 10 + T.get_cluster_id()
            T.cluster_sync()
            T.pdl_trigger()

    build = Build(HOPPER)
    flat = lower(kernel.program, cuda_passes(build))
    source = emit_cuda(flat, build, kernel.program)
    assert [(e.cluster, e.early) for e in source.entries] == [((2, 1, 1), True)]
    assert compile_cubin(source.text, HOPPER).log
    x, y = torch.randn(4, 64), torch.empty(4, 64)
    assert not interpret(flat, kernel.program, (x, y)).found
    torch.testing.assert_close(y, x + torch.tensor([0.0, 10, 1, 11])[:, None])
