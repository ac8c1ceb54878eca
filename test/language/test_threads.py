# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import TileError
from torch_tile.hardware import Target
from torch_tile.ir.node import alike, walk
from torch_tile.ir.stmt import Do, Store
from torch_tile.lowering import cuda_passes, lower
from torch_tile.simulator.interpret import interpret
from torch_tile.simulator.tile.interpreter import evaluate


def test_thread_and_block_indices():
    seen = {}

    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32"), n: T.int32):
        with T.Kernel(3, n, threads=(32, 4)) as (bx, by):
            tx, ty, tz = T.get_thread_bindings()
            seen["extents"] = T.get_thread_extent(), T.get_thread_extents(), T.get_block_extent()
            seen["blocks"] = T.get_block_bindings() == (bx, by) and T.get_block_binding(1) is by
            seen["size"] = T.get_block_extent(1)
            A[tx] = ty + tz

    (block,) = kernel.program.kernels
    assert seen["extents"] == (32, (32, 4, 1), 3) and seen["blocks"] and seen["size"] is kernel.program.params[1]
    assert "thread % 32" in repr(kernel) and "thread // 32" in repr(kernel)
    assert block.thread is not None and any(n is block.thread for n in walk(block.body))

    @T.prim_func
    def plain(A: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64) as _:
            A[T.get_thread_binding()] = 1

    (store,) = (n for n in walk(plain.program) if isinstance(n, Store))
    assert store.indices == (plain.program.kernels[0].thread,)


def test_bindings_as_loops():
    """The spelling of TIR: each index is bound once, to what the kernel counts there."""
    seen = {}

    @T.prim_func
    def kernel(A: T.Tensor((12, 32), "int32"), n: T.int32):
        with T.Kernel(3, n, threads=(32, 4)) as (bx, by):
            for tx in T.thread_binding(0, 32, thread="threadIdx.x"):
                for ty in T.thread_binding(4, "threadIdx.y"):
                    for row in T.thread_binding(n, thread="blockIdx.y"):
                        seen["row"] = row is by
                        seen["extents"] = T.get_block_extents()
                        A[bx * 4 + ty, tx] = ty * 32 + tx

    assert seen["row"] and seen["extents"] == (3, kernel.program.params[1], 1)
    a = torch.zeros(12, 32, dtype=torch.int32)
    findings = tilelang.compile(kernel, target="cuda:sm_80").interpret(a, 1)
    assert not findings, findings.report()
    assert torch.equal(a, torch.arange(128, dtype=torch.int32).reshape(4, 32).repeat(3, 1))


def test_a_kernel_without_the_thread_has_none():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "int32")):
        with T.Kernel(1) as _:
            A[0] = 1

    assert kernel.program.kernels[0].thread is None


def synchronised(size):
    @T.prim_func
    def kernel(A: T.Tensor((size,), "float32"), B: T.Tensor((size,), "float32")):
        with T.Kernel(1, threads=32) as _:
            tile = T.alloc_shared((size,), "float32")
            T.async_copy(A, tile)
            T.ptx_commit_group()
            T.ptx_wait_group(0)
            T.sync_threads()
            T.sync_warp()
            T.copy(tile, B)

    return kernel


def test_ordering_is_recorded_and_changes_nothing_on_the_cpu():
    kernel = synchronised(37)
    calls = [n.call.name for n in walk(kernel.program) if isinstance(n, Do)]
    assert calls == ["cp_async_commit", "cp_async_commit", "cp_async_wait", "barrier", "warp_barrier"]
    x = torch.randn(37)
    for run in (lambda y: evaluate(kernel, x, y), lambda y: tilelang.compile(kernel, target="cpu")(x, y)):
        y = torch.full_like(x, float("nan"))
        run(y)
        assert torch.equal(x, y)
    assert not alike(synchronised(36).program, kernel.program)


def test_a_kernel_of_threads_is_for_gpus():
    @T.prim_func
    def kernel(A: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32) as _:
            A[T.get_thread_binding()] = 1

    for run in (lambda: tilelang.compile(kernel, target="cpu"), lambda: evaluate(kernel, torch.zeros(32))):
        with pytest.raises(TileError, match="get_thread_binding") as caught:
            run()
        assert caught.value.code == "unsupported_on_target"


@pytest.mark.parametrize(
    "use",
    [
        lambda: T.get_thread_binding(3),
        lambda: T.get_block_binding(2),
        lambda: T.get_thread_extent(-1),
        lambda: T.sync_threads(0),
        lambda: T.sync_threads(16, 64),
        lambda: T.sync_threads(1, 40),
        lambda: T.sync_threads(1, 256),
        lambda: T.sync_threads(None, 64),
        lambda: T.sync_threads(True, 64),
        lambda: T.sync_threads(T.get_block_binding(), 64),
        lambda: T.ptx_wait_group(-1),
        lambda: T.thread_binding(128, thread="warp.x"),
        lambda: T.thread_binding(128, thread="threadIdx.xy"),
        lambda: T.thread_binding(64),
        lambda: T.thread_binding(1, 128),
        lambda: T.thread_binding(128, "threadIdx.y"),
    ],
)
def test_wrong_arguments(use):
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((4,), "int32")):
            with T.Kernel(1) as _:
                use()

    assert caught.value.code == "bad_argument"


def test_outside_a_kernel():
    for use in (T.get_thread_binding, T.get_block_binding, T.sync_threads):
        with pytest.raises(TileError) as caught:
            use()
        assert caught.value.code == "not_in_kernel"


def test_threads_run_what_names_them():
    @T.prim_func
    def reverse(A: T.Tensor((96,), "float32"), B: T.Tensor((96,), "float32")):
        with T.Kernel(1, threads=(32, 3)) as _:
            tile = T.alloc_shared((96,), "float32")
            tx, ty, _ = T.get_thread_bindings()
            tile[ty * 32 + tx] = A[ty * 32 + tx]
            T.sync_threads()
            B[ty * 32 + tx] = tile[95 - ty * 32 - tx]

    flat = lower(reverse.program, cuda_passes(Build(Target.of("cuda:sm_80"))))
    barriers = [n for n in walk(flat) if isinstance(n, Do) and n.call.name == "barrier"]
    assert len(barriers) == 1  # the author's is enough
    x, y = torch.randn(96), torch.full((96,), float("nan"))
    assert not interpret(flat, reverse.program, (x, y), (), None).found
    assert torch.equal(y, x.flip(0))


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_who_touches_memory(target, seed):
    """Those who come by, where that is some threads; each, where what is added differs; else one for all."""
    counts, threads = torch.randint(0, 3, (96,)).int(), 96

    @T.prim_func
    def kernel(N: T.Tensor((threads,), "int32"), out: T.Tensor((6,), "int32")):
        with T.Kernel(1, threads=threads):
            tx = T.get_thread_binding()
            own = T.alloc_local((2,), "int32")
            shared = T.alloc_shared((1,), "int32")
            if tx == 5:
                out[0] = 7
                shared[0] = 30
            T.sync_threads()
            for _ in T.serial(N[tx]):
                T.atomic_add(out[1], 1)
                T.atomic_add(shared[0], 2)
            own[1] = N[tx] * 3
            T.atomic_add(out[2], own[1])
            T.atomic_add(out[3], 1)
            while own[1] > 3:
                own[1] = own[1] - 3
                T.atomic_max(out[4], own[1])
            T.sync_threads()
            if tx == threads - 1:
                out[5] = shared[0]

    out = torch.zeros(6, dtype=torch.int32)
    findings = tilelang.compile(kernel, target=target).interpret(counts, out)
    assert not findings, findings.report()
    total = int(counts.sum())
    assert out.tolist() == [7, total, 3 * total, 1, 3 if 2 in counts else 0, 30 + 2 * total]


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_lists_of_two_halves_that_threads_fill_in_turn(target):
    """A half is read where the other one, `turn ^ 1`, is written, under a condition; some threads meet by a number."""

    @T.prim_func
    def kernel(A: T.Tensor((96,), "int32"), out: T.Tensor((96,), "int32"), count: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=96):
            tx = T.get_thread_binding()
            kept = T.alloc_shared((2, 96), "int32")
            number = T.alloc_shared((2,), "int32")
            kept[0, tx] = A[tx]
            if tx < 64:
                T.sync_threads(3, 64)
                if tx == 0:
                    number[0] = 96
            for turn in T.serial(3):
                half = turn % 2
                T.sync_threads()
                if tx == 0:
                    number[half ^ 1] = 0
                T.sync_threads()
                if tx < number[half] and kept[half, tx] % (turn + 2) == 0:
                    place = T.atomic_add(number[half ^ 1], 1, return_prev=True)
                    kept[half ^ 1, place] = kept[half, tx]
            T.sync_threads()
            if tx < number[1]:
                out[tx] = kept[1, tx]
            if tx == 0:
                count[0] = number[1]

    a, out, count = torch.randint(0, 100, (96,)).int(), torch.zeros(96).int(), torch.zeros(1).int()
    findings = tilelang.compile(kernel, target=target).interpret(a, out, count)
    assert not findings, findings.report()
    assert sorted(out[: int(count)].tolist()) == sorted(x for x in a.tolist() if x % 12 == 0)


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
@pytest.mark.parametrize("pending", [0, 1, 2])
def test_each_asynchronous_copy_is_a_group(target, pending):
    """No commit is written; a wait that leaves one group too many is found by the simulator."""

    @T.prim_func
    def kernel(A: T.Tensor((4, 256), "float16"), B: T.Tensor((4, 256), "float16")):
        with T.Kernel(1, threads=32):
            tiles = T.alloc_shared((2, 2, 256), "float16")
            T.async_copy(A[0, :], tiles[0, 0, :])
            T.async_copy(A[1, :], tiles[0, 1, :])
            T.async_copy(A[2, :], tiles[1, 0, :])
            T.ptx_wait_group(pending)
            T.sync_threads()
            T.copy(tiles[0, :, :], B[0:2, :])
            T.ptx_wait_group(0)
            T.sync_threads()
            T.copy(tiles[1, 0, :], B[2, :])

    a, b = torch.randn(4, 256).half(), torch.zeros(4, 256).half()
    findings = tilelang.compile(kernel, target=target).interpret(a, b)
    assert bool(findings) is (pending == 2)
    assert pending == 2 or torch.equal(a[:3], b[:3])


def test_the_running_thread_by_tvms_name():
    @T.prim_func
    def kernel(A: T.Tensor((3, 64), "int32")):
        with T.Kernel(3, threads=64):
            bx = T.launch_thread("blockIdx.x", 3)
            tx = T.launch_thread("threadIdx.x", 64)
            A[bx, tx] = bx * 100 + tx

    a = torch.zeros(3, 64, dtype=torch.int32)
    tilelang.compile(kernel, target="cuda:sm_80").interpret(a)
    assert torch.equal(a, torch.arange(3, dtype=torch.int32)[:, None] * 100 + torch.arange(64, dtype=torch.int32))


@pytest.mark.parametrize("scope", ["shared", "shared.dyn", "global", "warp"])
def test_the_barrier_by_the_name_of_tir(scope):
    @T.prim_func
    def kernel(A: T.Tensor((32,), "int32"), B: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((32,), "int32")
            thread = T.get_thread_binding()
            tile[thread] = A[thread]
            T.tvm_storage_sync(scope)
            B[thread] = tile[31 - thread]

    a, b = torch.randint(0, 99, (32,), dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    assert not tilelang.compile(kernel, target="cuda:sm_80").interpret(a, b).kinds
    assert torch.equal(b, a.flip(0))


def test_a_barrier_of_no_scope():
    with pytest.raises(TileError, match="scope"):
        T.tvm_storage_sync("local")
