# SPDX-License-Identifier: Apache-2.0
"""Kernels that tests of several folders compile, time or count, and the modules of the library's own."""

import importlib
import pkgutil

import torch_tile.kernels
import torch_tile.language as T


def modules_of_kernels():
    """Import the modules of the library's kernels that ask what machine a tensor lies on."""
    found = pkgutil.walk_packages(torch_tile.kernels.__path__, "torch_tile.kernels.")
    modules = [importlib.import_module(each.name) for each in found]
    return [m for m in modules if hasattr(m, "machine_of") and m.machine_of.__module__ != m.__name__]


def matmul(m, n, k, block_m=64, block_n=64, block_k=32, stages=2, threads=128, dtype="float16"):
    """Multiply M x K by K x N, tile by tile."""

    @T.prim_func
    def main(a: T.Tensor((m, k), dtype), b: T.Tensor((k, n), dtype), c: T.Tensor((m, n), dtype)):
        with T.Kernel(T.ceildiv(n, block_n), T.ceildiv(m, block_m), threads=threads) as (bx, by):
            left, right = T.alloc_shared((block_m, block_k), dtype), T.alloc_shared((block_k, block_n), dtype)
            total = T.alloc_fragment((block_m, block_n), "float32")
            T.clear(total)
            for step in T.Pipelined(T.ceildiv(k, block_k), num_stages=stages):
                T.copy(a[by * block_m, step * block_k], left)
                T.copy(b[step * block_k, bx * block_n], right)
                T.gemm(left, right, total)
            T.copy(total, c[by * block_m, bx * block_n])

    return main


def add(a, b, block=32, threads=32):
    """Add two vectors."""
    n = T.dynamic("n")
    a: T.Tensor((n,), "float32")
    b: T.Tensor((n,), "float32")
    out = T.empty((n,), "float32")
    with T.Kernel(T.ceildiv(n, block), threads=threads) as bx:
        for i in T.Parallel(block):
            out[bx * block + i] = a[bx * block + i] + b[bx * block + i]
    return out
