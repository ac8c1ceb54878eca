# SPDX-License-Identifier: Apache-2.0
"""TIR's reduction over threads, as kernels that multiply a matrix with a vector have it."""

import random

import numpy as np
import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError


def gemv(N, K, block_n, reduce_threads, dtype="float16", accum_dtype="float"):
    """Each thread multiplies 16 bytes of a row at a time; `reduce_threads` of them share a row."""
    tile_k = 16 // T.dtype(dtype).itemsize
    block_k = reduce_threads * tile_k

    @T.prim_func
    def main(A: T.Tensor((K,), dtype), B: T.Tensor((N, K), dtype), C: T.Tensor((N,), dtype)):
        with T.Kernel(T.ceildiv(N, block_n), threads=(block_n, reduce_threads)) as bn:
            tn = T.get_thread_binding(0)
            tk = T.get_thread_binding(1)
            a = T.alloc_local((tile_k,), dtype)
            b = T.alloc_local((tile_k,), dtype)
            total = T.alloc_local((1,), accum_dtype)
            T.clear(total)
            for bk in T.serial(T.ceildiv(K, block_k)):
                for k in T.vectorized(tile_k):
                    a[k] = A[bk * block_k + tk * tile_k + k]
                    b[k] = B[bn * block_n + tn, bk * block_k + tk * tile_k + k]
                for k in T.serial(tile_k):
                    total[0] += a[k].astype(accum_dtype) * b[k].astype(accum_dtype)
            reduced = T.alloc_local((1,), accum_dtype)
            with T.attr(
                T.comm_reducer(lambda x, y: x + y, [T.Cast(accum_dtype, 0)]),
                "reduce_scope",
                T.reinterpret(T.uint64(0), dtype="handle"),
            ):
                T.evaluate(T.tvm_thread_allreduce(T.uint32(1), total[0], True, reduced[0], tk, dtype="handle"))
            C[bn * block_n + tn] = reduced[0]

    return main


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
@pytest.mark.parametrize(("block_n", "threads"), [(2, 32), (32, 4), (4, 8), (8, 6), (3, 5), (1, 64)])
def test_gemv(block_n, threads, target, seed):
    """Groups inside a warp, over several warps, of sizes that no shuffle knows; ragged rows and columns."""
    rng = random.Random(seed)
    n, k = rng.randint(1, 3 * block_n), 8 * rng.randint(1, 3 * threads)
    a, b, c = torch.randn(k).half(), torch.randn(n, k).half(), torch.full((n,), torch.nan).half()
    made = tilelang.compile(gemv(n, k, block_n, threads), target=target)
    findings = made.interpret(a, b, c)
    assert not findings, findings.report()
    assert made.cubin.data[:4] == b"\x7fELF" and not made.cubin.warnings
    torch.testing.assert_close(c.double(), b.double() @ a.double(), rtol=1e-2, atol=5e-2)


@pytest.mark.parametrize("shape", [(4, 8, 2), (16, 2, 4), (3, 7, 2)])
def test_several_indices_and_conditions(shape, seed):
    """Maxima over two of three indices, of what a condition lets pass; all threads of a group get one result."""
    count = int(np.prod(shape))

    @T.prim_func
    def kernel(A: T.Tensor((count,), "int32"), out: T.Tensor((2, count), "int32")):
        with T.Kernel(1, threads=shape):
            tx, ty, tz = T.get_thread_bindings()
            own = T.alloc_local((2,), "int32")
            place = (tz * shape[1] + ty) * shape[0] + tx
            value = A[place]
            for n in range(2):
                with T.attr(T.comm_reducer(lambda x, y: T.max(x, y), [-1000]), "reduce_scope", 0):
                    T.tvm_thread_allreduce(1, value * (n + 1), value < 50, own[n], tx, tz)
                out[n, place] = own[n]

    a, out = torch.randint(0, 100, (count,), dtype=torch.int32), torch.zeros(2, count, dtype=torch.int32)
    findings = tilelang.compile(kernel, target="cuda:sm_80").interpret(a, out)
    assert not findings, findings.report()
    x = a.reshape(shape[::-1])
    for n in range(2):
        want = torch.where(x < 50, x * (n + 1), -1000).amax((0, 2), keepdim=True).expand(x.shape)
        assert torch.equal(out[n].reshape(x.shape), want.int())


def outside_of_attr():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32):
            own = T.alloc_local((1,), "float32")
            T.tvm_thread_allreduce(1, A[0], True, own[0], T.get_thread_binding())  # here


def into_memory():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32), T.attr(T.comm_reducer(lambda x, y: x + y, [0]), "reduce_scope", 0):
            T.tvm_thread_allreduce(1, A[0], True, A[1], T.get_thread_binding())  # here


def over_no_index():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32):
            own = T.alloc_local((1,), "float32")
            with T.attr(T.comm_reducer(lambda x, y: x + y, [0]), "reduce_scope", 0):
                T.tvm_thread_allreduce(1, A[0], True, own[0], T.get_thread_binding() + 1)  # here


def another_attribute():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32), T.attr(A, "pragma_unroll", 4):  # here
            A[0] = 1


MISTAKES = {
    outside_of_attr: "T.tvm_thread_allreduce(1, A[0], True, own[0], T.get_thread_binding())",
    into_memory: "T.tvm_thread_allreduce(1, A[0], True, A[1], T.get_thread_binding())",
    over_no_index: "T.tvm_thread_allreduce(1, A[0], True, own[0], T.get_thread_binding() + 1)",
    another_attribute: 'T.attr(A, "pragma_unroll", 4)',
}


@pytest.mark.parametrize("case", MISTAKES, ids=lambda f: f.__name__)
def test_mistakes(case, refused):
    refused(case, "bad_argument", MISTAKES[case])


def test_one_value_at_a_time():
    for use in (lambda: T.comm_reducer(lambda x, y: x, [0, 1]), lambda: T.attr(None, "reduce_scope", 0)):
        with pytest.raises(TileError):
            use()
