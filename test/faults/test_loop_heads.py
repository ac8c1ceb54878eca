# SPDX-License-Identifier: Apache-2.0
"""What a loop's condition or bounds read from tiles that threads share is ordered: all threads count alike."""

import pytest
import torch

import torch_tile
import torch_tile.language as T

THREADS = 64


@T.prim_func
def while_on_a_tile(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
    with T.Kernel(1, threads=THREADS):
        t = T.alloc_shared((64,), "int32")
        T.copy(A, t)
        w = T.alloc_var("int32", 0)
        while w < t[63]:
            w += 1
        for i in T.Parallel(64):
            O[i] = w


@T.prim_func
def bounds_from_a_tile(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
    with T.Kernel(1, threads=THREADS):
        t = T.alloc_shared((64,), "int32")
        T.copy(A, t)
        w = T.alloc_var("int32", 0)
        for j in T.serial(t[62], t[63] + 62):
            w += j - j + 1
        for i in T.Parallel(64):
            O[i] = w


@T.prim_func
def condition_changed_in_the_body(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
    with T.Kernel(1, threads=THREADS):
        t = T.alloc_shared((64,), "int32")
        T.copy(A, t)
        w = T.alloc_var("int32", 0)
        while t[0] < t[63]:
            w += 1
            if T.get_thread_binding() == 0:
                t[0] = t[0] + 1
        for i in T.Parallel(64):
            O[i] = w


@T.prim_func
def condition_changed_before_continue(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
    with T.Kernel(1, threads=THREADS):
        t = T.alloc_shared((64,), "int32")
        T.copy(A, t)
        w = T.alloc_var("int32", 0)
        while t[0] < t[63]:
            w += 1
            if T.get_thread_binding() == 0:
                t[0] = t[0] + 1
            if w > 3:
                continue
            w += 0
        for i in T.Parallel(64):
            O[i] = w


@T.prim_func
def bounds_of_an_inner_loop(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
    with T.Kernel(1, threads=THREADS):
        t = T.alloc_shared((64,), "int32")
        w = T.alloc_var("int32", 0)
        for _k in T.serial(3):
            for i in T.Parallel(64):
                t[i] = A[i] - 42
            for _ in T.serial(t[63]):
                w += 1
        for i in T.Parallel(64):
            O[i] = w


@T.prim_func
def bounds_of_a_loop_with_barriers(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
    with T.Kernel(1, threads=THREADS):
        t, u = T.alloc_shared((64,), "int32"), T.alloc_shared((64,), "int32")
        T.copy(A, t)
        for _ in T.serial(t[63] - 60):
            for i in T.Parallel(64):
                u[i] = A[i]
            for i in T.Parallel(64):
                O[i] = u[63 - i] + A[i]


def head_read_before_a_store(scope: str, head: str, body: str):
    """All threads read a loop's head; behind the loop some overwrite what it reads."""

    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=THREADS):
            s, u, f = T.alloc_shared((64,), "int32"), T.alloc_shared((8,), "int32"), T.alloc_fragment((8,), "int32")
            T.copy(A, s)
            T.fill(u, 1)
            T.fill(f, -5)
            w = T.alloc_var("int32", 0)
            t = s if scope == "shared" else A
            if head == "for":
                for _ in range(t[4] % 4 + 3):
                    w += 1
                    if body == "scan":
                        T.cumsum(u, dim=0)
                    else:
                        u[0] = u[7] + w
            else:
                while w < t[4] % 4 + 3:
                    w += 1
                    if body == "scan":
                        T.cumsum(u, dim=0)
                    else:
                        u[0] = u[7] + w
            T.copy(f, t[0:8])
            for i in T.Parallel(64):
                O[i] = t[i] + w

    return kernel


@pytest.mark.parametrize("body", ["scan", "store"])
@pytest.mark.parametrize("head", ["for", "while"])
@pytest.mark.parametrize("scope", ["shared", "global"])
def test_what_a_head_reads_is_not_overwritten_before(way, scope, head, body):
    a, out = torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    way(head_read_before_a_store(scope, head, body), a.clone(), out)
    assert torch.equal(out, torch.where(a < 8, -5, a) + 3)


BY_THREADS = (condition_changed_in_the_body, condition_changed_before_continue)  # only GPUs have threads
LEAVES = (bounds_from_a_tile, bounds_of_an_inner_loop)  # whose bounds are ordered with all that they do
PROGRAMS = {
    bounds_of_a_loop_with_barriers: 63,
    while_on_a_tile: 63,
    bounds_from_a_tile: 63,
    condition_changed_in_the_body: 63,
    condition_changed_before_continue: 63,
    bounds_of_an_inner_loop: 63,
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_all_threads_count_alike(way, program, request):
    if program in BY_THREADS and ("[cpu" in request.node.name or "[meaning" in request.node.name):
        pytest.skip("there are no threads to write by")
    out = torch.zeros(64, dtype=torch.int32)
    way(program, torch.arange(64, dtype=torch.int32), out)
    assert out.tolist() == [PROGRAMS[program]] * 64


@pytest.mark.parametrize("program", [p for p in PROGRAMS if p not in LEAVES], ids=lambda p: p.__name__)
def test_without_the_mend_it_is_found(program, monkeypatch):
    """The thread interpreter sees what is not ordered."""
    from torch_tile.lowering.sync import insert_barriers

    monkeypatch.setattr(insert_barriers.Walk, "_head", lambda self, loop: [])
    kernel = torch_tile.compile(program, target="cuda:sm_80")
    assert kernel.interpret(torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32))


def test_nothing_is_ordered_that_nobody_changes():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=THREADS):
            t = T.alloc_shared((64,), "int32")
            T.copy(A, t)
            w = T.alloc_var("int32", 0)
            for k in T.serial(5):
                while w < t[63] + k:
                    w += 1
            for i in T.Parallel(64):
                O[i] = w

    assert torch_tile.compile(kernel, target="cuda:sm_80").get_kernel_source().count("tile::barrier()") == 1
