# SPDX-License-Identifier: Apache-2.0
"""Matrix products as printed in articles on TileLang: changed are imports, white space, and what a comment says."""

import math

import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.language import make_swizzled_layout as make_swizzle_layout


# "Writing High-Performance Kernels in TileLang, from GEMM to MLA" (Atlas Cloud), as printed.
@tilelang.jit
def matmul_relu(M, N, K, block_M, block_N, block_K, dtype="float16", accum_dtype="float"):

    @T.prim_func
    def matmul_relu_kernel(
        A: T.Tensor((M, K), dtype),
        B: T.Tensor((K, N), dtype),
        C: T.Tensor((M, N), dtype),
    ):
        # grid dims: (#blocks along N, #blocks along M); 128 threads per block
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            # Say where each tile lives, explicitly.
            A_shared = T.alloc_shared((block_M, block_K), dtype)  # shared memory
            B_shared = T.alloc_shared((block_K, block_N), dtype)
            C_local = T.alloc_fragment((block_M, block_N), accum_dtype)  # register accumulator

            T.use_swizzle(panel_size=4, order="col")  # optional: better L2 reuse
            T.clear(C_local)  # zero the accumulator

            for ko in T.Pipelined(T.ceildiv(K, block_K), num_stages=3):
                T.copy(A[by * block_M, ko * block_K], A_shared)  # global -> shared
                T.copy(B[ko * block_K, bx * block_N], B_shared)
                T.gemm(A_shared, B_shared, C_local)  # tile-level MMA

            for i, j in T.Parallel(block_M, block_N):  # fused ReLU
                C_local[i, j] = T.max(C_local[i, j], 0)

            T.copy(C_local, C[by * block_M, bx * block_N])  # write back

    return matmul_relu_kernel


# README of TileLang, "Simple GEMM Example": the indentation, which the copy lost, is put back.
def matmul_simple(M, N, K, block_M, block_N, block_K, dtype="float16", accum_dtype="float"):
    @T.prim_func
    def main(
        A: T.Buffer((M, K), dtype),
        B: T.Buffer((K, N), dtype),
        C: T.Buffer((M, N), dtype),
    ):
        # Define a grid with enough blocks to cover M×N
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            # Allocate shared memory for the current tile of A and B
            A_shared = T.alloc_shared((block_M, block_K), dtype)
            B_shared = T.alloc_shared((block_K, block_N), dtype)
            # Allocate a local (register) fragment for partial accumulations
            C_local = T.alloc_fragment((block_M, block_N), accum_dtype)
            # Initialize the local accumulation buffer to zero
            T.clear(C_local)
            # Loop over the K dimension in block_K chunks, using a 3-stage pipeline
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=3):
                # Copy from global memory to shared memory
                T.copy(A[by * block_M, k * block_K], A_shared)
                T.copy(B[k * block_K, bx * block_N], B_shared)
                # Perform a matrix multiply-accumulate on the tile
                T.gemm(A_shared, B_shared, C_local)
            # Copy the accumulated result from local memory (C_local) to global memory (C)
            T.copy(C_local, C[by * block_M, bx * block_N])

    return main


# README of TileLang, "Enhanced GEMM Example with Annotations": indentation put back.
def matmul_enhanced(M, N, K, block_M, block_N, block_K, dtype="float16", accum_dtype="float"):
    @T.prim_func
    def main(
        A: T.Buffer((M, K), dtype),
        B: T.Buffer((K, N), dtype),
        C: T.Buffer((M, N), dtype),
    ):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            # Allocate shared and local fragments
            A_shared = T.alloc_shared((block_M, block_K), dtype)
            B_shared = T.alloc_shared((block_K, block_N), dtype)
            C_local = T.alloc_fragment((block_M, block_N), accum_dtype)
            # Annotate memory layout
            T.annotate_layout(
                {
                    A_shared: make_swizzle_layout(A_shared),
                    B_shared: make_swizzle_layout(B_shared),
                }
            )
            # Enable swizzle-based rasterization for better L2 locality
            T.use_swizzle(panel_size=10, enable=True)
            # Clear the local accumulation buffer
            T.clear(C_local)
            # Pipelined iteration over K dimension
            for idx in T.Pipelined(T.ceildiv(K, block_K), num_stages=3):
                # Copy tile of A
                T.copy(A[by * block_M, idx * block_K], A_shared)
                # Parallel copy tile of B
                for ko, j in T.Parallel(block_K, block_N):
                    B_shared[ko, j] = B[idx * block_K + ko, bx * block_N + j]
                # Perform local GEMM on the shared-memory tiles
                T.gemm(A_shared, B_shared, C_local)
            # Copy the result tile back
            T.copy(C_local, C[by * block_M, bx * block_N])

    return main


# "TileLang Code Examples", as printed but for the target (there "cuda").
@tilelang.jit(target="cpu", out_idx=[2])
def matmul_kernel(M, N, K, block_M, block_N, block_K):
    """
    Compute C = A @ B where:
    - A: (M, K) matrix
    - B: (K, N) matrix
    - C: (M, N) matrix

    Block sizes typically: 128x128x32 or 64x64x32
    """

    @T.prim_func
    def main(A: T.Buffer((M, K), "float16"), B: T.Buffer((K, N), "float16"), C: T.Buffer((M, N), "float16")):
        # 1. Define grid and block dimensions
        # Grid covers the output matrix C in tiles
        with T.Kernel(
            T.ceildiv(N, block_N),  # Grid X dimension
            T.ceildiv(M, block_M),  # Grid Y dimension
            threads=128,
        ) as (bx, by):
            # 2. Allocate shared memory (L1 cache)
            A_shared = T.alloc_shared((block_M, block_K), "float16")
            B_shared = T.alloc_shared((block_K, block_N), "float16")

            # 3. Allocate accumulator in registers
            # Use float32 for accumulation to avoid overflow
            C_local = T.alloc_fragment((block_M, block_N), "float32")

            # 4. Apply swizzle layout to eliminate bank conflicts
            # This is CRITICAL for performance
            T.annotate_layout({A_shared: T.make_swizzled_layout(A_shared), B_shared: T.make_swizzled_layout(B_shared)})

            # 5. Initialize accumulator to zero
            T.clear(C_local)

            # 6. Main computation loop with 3-stage pipelining
            # Overlaps memory transfer and computation
            num_k_tiles = T.ceildiv(K, block_K)
            for k in T.Pipelined(num_k_tiles, num_stages=3):
                # Load tiles from global memory to shared memory
                # Compiler will automatically use cp.async or TMA
                T.copy(A[by * block_M, k * block_K], A_shared)
                T.copy(B[k * block_K, bx * block_N], B_shared)

                # Compute using Tensor Cores
                # C_local += A_shared @ B_shared
                T.gemm(A_shared, B_shared, C_local, transpose_B=False)

            # 7. Write results back to global memory
            T.copy(C_local, C[by * block_M, bx * block_N])

    return main


# The TileLang paper, Fig. 16. The figure leaves out the shapes and types of the tensors, and the types of the tiles
# and the parentheses around their shapes; they are filled in.
def matmul_of_the_paper(M, N, K, block_M, block_N, block_K, dtype="float16", accum_dtype="float", threads=128):
    def Matmul(A: T.Tensor((M, K), dtype), B: T.Tensor((K, N), dtype), C: T.Tensor((M, N), dtype)):
        with T.Kernel(N // block_N, M // block_M, threads=threads) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), dtype)
            B_shared = T.alloc_shared((block_K, block_N), dtype)
            C_local = T.alloc_fragment((block_M, block_N), accum_dtype)

            T.clear(C_local)
            for k in T.Pipelined(K // block_K, num_stages=2):
                T.copy(A[by * block_M, k * block_K], A_shared)
                T.copy(B[k * block_K, bx * block_N], B_shared)
                T.gemm(A_shared, B_shared, C_local)

            T.copy(C_local, C[by * block_M, bx * block_N])

    return Matmul


WHOLE, RAGGED = (64, 96, 48), (50, 70, 33)
CASES = [
    (make, shape) for make in (matmul_relu, matmul_simple, matmul_enhanced, matmul_kernel) for shape in (WHOLE, RAGGED)
] + [(matmul_of_the_paper, WHOLE)]  # the figure's grid has whole blocks only


@pytest.mark.parametrize(("make", "shape"), CASES)
def test_product(make, shape, launch):
    M, N, K = shape
    a, b = torch.randn(M, K).half(), torch.randn(K, N).half()
    c = torch.full((M, N), math.nan).half()
    launch(make(M, N, K, 32, 32, 16), a, b, c)
    exact = a.double() @ b.double()
    wanted = exact.relu() if make is matmul_relu else exact
    torch.testing.assert_close(c.double(), wanted, rtol=1e-3, atol=2e-3)


def test_inspection_as_printed():
    """The calls that the articles make on a kernel."""
    kernel = matmul_relu(64, 64, 32, block_M=32, block_N=32, block_K=16)
    assert "gemm" in kernel.get_kernel_source()
    assert "T.gemm" in str(matmul_simple(64, 64, 32, 32, 32, 16))
    profiler = kernel.get_profiler(tensor_supply_type=tilelang.TensorSupplyType.Normal)
    assert profiler.do_bench() > 0
