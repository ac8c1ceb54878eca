# SPDX-License-Identifier: Apache-2.0
"""Products and attention become wgmma of every type, without spills and without a complaint of the assembler.

It does not fail where it takes products out of their pipeline, but says so (C75xx): `Cubin.warnings` has these lines.
"""

from __future__ import annotations

import pytest

import torch_tile
import torch_tile.language as T


def product(dtype, block, stages, turned=(False, True), total="float32", out=None, threads=256, staged=False):
    (bm, bn, bk), size, out = block, 1024, out or dtype

    @T.prim_func
    def kernel(A: T.Tensor((size, size), dtype), B: T.Tensor((size, size), dtype), C: T.Tensor((size, size), out)):
        with T.Kernel(T.ceildiv(size, bn), T.ceildiv(size, bm), threads=threads) as (bx, by):
            a = T.alloc_shared((bk, bm) if turned[0] else (bm, bk), dtype)
            b = T.alloc_shared((bn, bk) if turned[1] else (bk, bn), dtype)
            c = T.alloc_fragment((bm, bn), total)
            T.clear(c)
            for ko in T.Pipelined(T.ceildiv(size, bk), num_stages=stages):
                if turned[0]:
                    T.copy(A[ko * bk, by * bm], a)
                else:
                    T.copy(A[by * bm, ko * bk], a)
                if turned[1]:
                    T.copy(B[bx * bn, ko * bk], b)
                else:
                    T.copy(B[ko * bk, bx * bn], b)
                T.gemm(a, b, c, transpose_A=turned[0], transpose_B=turned[1])
            if staged:
                s = T.alloc_shared((bm, bn), out)
                T.copy(c, s)
                T.copy(s, C[by * bm, bx * bn])
            else:
                T.copy(c, C[by * bm, bx * bn])

    return kernel


def attention(block, width, dtype="float16", threads=256, causal=False):
    (bm, bn), rows = block, 1024
    shape, whole = (2, 4, rows, width), T.GemmWarpPolicy.FullRow

    @T.prim_func
    def kernel(
        Q: T.Tensor(shape, dtype), K: T.Tensor(shape, dtype), V: T.Tensor(shape, dtype), O: T.Tensor(shape, dtype)
    ):
        with T.Kernel(rows // bm, 4, 2, threads=threads) as (bx, by, bz):
            q, k, v = (T.alloc_shared((n, width), dtype) for n in (bm, bn, bn))
            s, p = T.alloc_fragment((bm, bn), "float32"), T.alloc_fragment((bm, bn), dtype)
            o = T.alloc_fragment((bm, width), "float32")
            top, old, total, part = (T.alloc_fragment((bm,), "float32") for _ in range(4))
            T.copy(Q[bz, by, bx * bm, 0], q)
            T.clear(o)
            T.clear(total)
            T.fill(top, -T.infinity("float32"))
            for j in T.Pipelined(T.ceildiv((bx + 1) * bm, bn) if causal else rows // bn, num_stages=2):
                T.copy(K[bz, by, j * bn, 0], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True, policy=whole)
                if causal:
                    for x, y in T.Parallel(bm, bn):
                        s[x, y] = T.if_then_else(bx * bm + x >= j * bn + y, s[x, y], -T.infinity("float32"))
                T.copy(top, old)
                T.reduce_max(s, top, dim=1, clear=False)
                for x, y in T.Parallel(bm, bn):
                    s[x, y] = T.exp2(s[x, y] - top[x])
                T.reduce_sum(s, part, dim=1)
                for x in T.Parallel(bm):
                    total[x] = total[x] * T.exp2(old[x] - top[x]) + part[x]
                T.copy(s, p)
                for x, y in T.Parallel(bm, width):
                    o[x, y] *= T.exp2(old[x] - top[x])
                T.copy(V[bz, by, j * bn, 0], v)
                T.gemm(p, v, o, policy=whole)
            for x, y in T.Parallel(bm, width):
                o[x, y] /= total[x]
            T.copy(o, O[bz, by, bx * bm, 0])

    return kernel


BIG, SMALL, FP8 = (128, 256, 64), (128, 128, 64), "float8_e4m3fn"
CASES = {
    "float16 n x k": (product("float16", BIG, 3, staged=True), 168),
    "float16 k x n": (product("float16", BIG, 3, (False, False)), 168),
    "bfloat16 n x k": (product("bfloat16", SMALL, 4), 168),
    "bfloat16 m x k turned": (product("bfloat16", SMALL, 4, (True, False), staged=True), 168),
    "one warpgroup": (product("float16", (64, 256, 64), 3, threads=128), 160),
    "three warpgroups": (product("float16", (192, 128, 64), 3, threads=384), 128),
    "176 columns": (product("float16", (128, 176, 64), 3), 168),
    "float8": (product(FP8, (128, 256, 128), 3, out="bfloat16", staged=True), 168),
    "int8": (product("int8", (128, 128, 128), 4, total="int32", out="int32"), 168),
    "int8 wide": (product("int8", (128, 256, 128), 3, total="int32", out="int32"), 168),
    "tf32": (product("float32", (128, 128, 32), 4), 168),
    "attention": (attention((128, 128), 128), 168),
    "causal attention": (attention((128, 128), 128, causal=True), 168),
    "narrow attention": (attention((128, 128), 64, "bfloat16"), 168),
    "wide attention": (attention((128, 64), 256), 168),
    "attention of one warpgroup": (attention((64, 64), 128, threads=128), 168),
}


@pytest.mark.parametrize("name", CASES)
def test_compiles(name: str) -> None:
    """`registers` is what the assembler may give at the entry, of 65536 for all threads."""
    kernel, registers = CASES[name]
    made = torch_tile.compile(kernel, target="cuda:sm_90a", pass_configs={"tl.enable_tf32": name == "tf32"})
    (found,) = made.resources.values()
    assert not made.cubin.warnings, made.cubin.warnings
    assert not found.spills and found.registers <= registers, (found, made.schedule)
    assert "wgmma.mma_async" in made.source and "tile::mma_" not in made.source
    assert not made.schedule.slow, made.schedule
