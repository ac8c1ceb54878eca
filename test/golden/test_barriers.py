# SPDX-License-Identifier: Apache-2.0
"""How many barriers and waits typical kernels end up with: a step of a product has one, of attention two, of norms one
for each reduction over several warps."""

import collections

import pytest

import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.ir.node import children
from torch_tile.ir.stmt import Do, For, While
from torch_tile.lowering import cuda_passes, lower


def calls(kernel, arch="sm_80"):
    """How often each ordering call stands outside loops, and in them."""
    program = lower(kernel.program, cuda_passes(Build(Target.of(f"cuda:{arch}"))))
    found = collections.Counter()

    def count(node, depth):
        if isinstance(node, Do) and node.call.name in ("barrier", "cp_async_wait"):
            found[node.call.name, depth] += 1
        for child in children(node):
            count(child, depth + isinstance(node, For | While))

    count(program, 0)
    return dict(found)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_product(stages):
    m, n = T.dynamic("m, n")
    k = T.dynamic("k", multiple_of=8)

    @T.prim_func
    def kernel(a: T.Tensor((m, k), "float16"), b: T.Tensor((n, k), "float16"), c: T.Tensor((m, n), "float16")):
        with T.Kernel(T.ceildiv(n, 64), T.ceildiv(m, 64), threads=128) as (bx, by):
            a_tile = T.alloc_shared((64, 32), "float16")
            b_tile = T.alloc_shared((64, 32), "float16")
            total = T.alloc_fragment((64, 64), "float32")
            T.clear(total)
            for step in T.Pipelined(T.ceildiv(k, 32), num_stages=stages):
                T.copy(a[by * 64, step * 32], a_tile)
                T.copy(b[bx * 64, step * 32], b_tile)
                T.gemm(a_tile, b_tile, total, transpose_B=True)
            T.copy(total, c[by * 64, bx * 64])

    once = {("cp_async_wait", 0): 1, ("barrier", 0): 1}  # the operands of the first step are loaded before the loop
    assert calls(kernel) == {("cp_async_wait", 1): 1, ("barrier", 1): 1, **once}


def test_plain_product():
    """Without stages a tile is filled, used, and must have been used before it is filled again."""

    @T.prim_func
    def kernel(a: T.Tensor((64, 256), "float16"), b: T.Tensor((256, 64), "float16"), c: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as _:
            a_tile = T.alloc_shared((64, 32), "float16")
            b_tile = T.alloc_shared((32, 64), "float16")
            total = T.alloc_fragment((64, 64), "float32")
            T.clear(total)
            for step in T.serial(8):
                T.copy(a[0, step * 32], a_tile)
                T.copy(b[step * 32, 0], b_tile)
                T.gemm(a_tile, b_tile, total)
            T.copy(total, c)

    assert calls(kernel) == {("barrier", 1): 2}


@pytest.mark.parametrize("stages", [2, 3])
def test_attention(stages):
    """One wait and barrier for the keys, one for the values; rows belong to warps, so softmax needs none."""
    n = T.dynamic("n")

    @T.prim_func
    def kernel(q: T.Tensor((64, 64), "float16"), k: T.Tensor((n, 64), "float16"), v: T.Tensor((n, 64), "float16"),
               out: T.Tensor((64, 64), "float32")):  # fmt: skip
        with T.Kernel(1, threads=128) as _:
            q_tile = T.alloc_shared((64, 64), "float16")
            k_tile = T.alloc_shared((64, 64), "float16")
            v_tile = T.alloc_shared((64, 64), "float16")
            s = T.alloc_fragment((64, 64), "float32")
            p = T.alloc_fragment((64, 64), "float16")
            o = T.alloc_fragment((64, 64), "float32")
            peak = T.alloc_fragment((64,), "float32")
            T.copy(q, q_tile)
            T.clear(o)
            for step in T.Pipelined(T.ceildiv(n, 64), num_stages=stages):
                T.copy(k[step * 64, 0], k_tile)
                T.gemm(q_tile, k_tile, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                T.reduce_max(s, peak, dim=1)
                for i, j in T.Parallel(64, 64):
                    s[i, j] = T.exp2(s[i, j] - peak[i])
                T.copy(s, p)
                T.copy(v[step * 64, 0], v_tile)
                T.gemm(p, v_tile, o, policy=T.GemmWarpPolicy.FullRow)
            T.copy(o, out)

    assert calls(kernel) == {("cp_async_wait", 1): 2, ("barrier", 1): 2}


def test_norm():
    """A row over four warps: their parts meet in shared memory once."""

    @T.prim_func
    def kernel(x: T.Tensor((8, 1024), "float32"), out: T.Tensor((8, 1024), "float32")):
        with T.Kernel(8, threads=128) as row:
            values = T.alloc_fragment((1024,), "float32")
            squares = T.alloc_fragment((1024,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.copy(x[row, 0], values)
            for j in T.Parallel(1024):
                squares[j] = values[j] * values[j]
            T.reduce_sum(squares, total, dim=0)
            for j in T.Parallel(1024):
                out[row, j] = values[j] * T.rsqrt(total[0] / 1024.0 + 1e-6)

    assert calls(kernel) == {("barrier", 0): 1}
