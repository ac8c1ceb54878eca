# SPDX-License-Identifier: Apache-2.0
"""Small programs after reports on other compilers: products of tiles: transposed and ragged operands, several products
of one operand, pipelines of products.

Numbers behind a name are those of the report.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from reported import Case, Cases, counts, whole, zeros

import torch_tile.language as T

case = Cases()
I8, I32 = torch.int8, torch.int32


@case
def two_products_of_one_operand_without_a_pipeline() -> Case:  # tilelang 2613, 666
    @T.prim_func
    def kernel(A: T.Tensor((64, 96), "float16"), B: T.Tensor((96, 128), "float16"), C: T.Tensor((64, 128), "float32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 64), "float16")
            d = T.alloc_shared((32, 64), "float16")
            x, y = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            T.clear(a)
            T.clear(b)
            T.clear(x)
            T.clear(y)
            for k in T.serial(3):
                T.copy(A[0:64, k * 32 : k * 32 + 32], a)
                T.copy(B[k * 32 : k * 32 + 32, 0:64], b)
                T.copy(B[k * 32 : k * 32 + 32, 64:128], d)
                T.gemm(a, b, x)
                T.gemm(a, d, y)
            T.copy(x, C[0:64, 0:64])
            T.copy(y, C[0:64, 64:128])

    a, b = whole(64, 96), whole(96, 128)
    return kernel, [a.half(), b.half(), zeros(64, 128)], {2: a @ b}


@case
def product_behind_a_cleared_pipeline() -> Case:  # tilelang 666
    @T.prim_func
    def kernel(A: T.Tensor((64, 160), "float16"), B: T.Tensor((160, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a, b, x = (
                T.alloc_shared((64, 32), "float16"),
                T.alloc_shared((32, 64), "float16"),
                T.alloc_fragment((64, 64), "float32"),
            )
            T.clear(a)
            T.clear(b)
            T.clear(x)
            for k in T.Pipelined(5, num_stages=3):
                T.copy(A[0:64, k * 32 : k * 32 + 32], a)
                T.copy(B[k * 32 : k * 32 + 32, 0:64], b)
                T.gemm(a, b, x)
            T.copy(x, C)

    a, b = whole(64, 160), whole(160, 64)
    return kernel, [a.half(), b.half(), zeros(64, 64)], {2: a @ b}


@case
def product_of_fragments_clears() -> Case:
    """Tile-ai/tilelang #2617: clear_accum was ignored, and #2381: the rest of K was dropped."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 24), "float16"), B: T.Tensor((24, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_fragment((64, 24), "float16"), T.alloc_fragment((24, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.fill(c, 1000.0)
            T.gemm(a, b, c, clear_accum=True)
            T.copy(c, C)

    a, b = whole(64, 24), whole(24, 64)
    return kernel, [a.half(), b.half(), torch.zeros(64, 64)], {2: a @ b}


@case
def product_over_blocks_that_a_mask_keeps() -> Case:  # block-sparse products
    @T.prim_func
    def kernel(
        A: T.Tensor((32, 128), "float16"), B: T.Tensor((128, 32), "float16"), mask: T.Tensor((4,), "bool"),
        C: T.Tensor((32, 32), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=64):
            a, b = T.alloc_shared((32, 32), "float16"), T.alloc_shared((32, 32), "float16")
            c = T.alloc_fragment((32, 32), "float32")
            T.clear(c)
            for k in T.Pipelined(4, num_stages=2):
                if mask[k]:
                    T.copy(A[0, k * 32], a)
                    T.copy(B[k * 32, 0], b)
                    T.gemm(a, b, c)
            T.copy(c, C)

    a, b, mask = whole(32, 128, dtype=torch.half), whole(128, 32, dtype=torch.half), counts(4, 2).bool()
    kept = a.float() * mask.repeat_interleave(32)
    return kernel, [a, b, mask, zeros(32, 32)], {3: kept @ b.float()}


@case
def parts_of_a_ragged_inner_size_added_at_once() -> Case:  # split k
    @T.prim_func
    def kernel(A: T.Tensor((17, 75), "float32"), B: T.Tensor((75, 9), "float32"), C: T.Tensor((17, 9), "float32")):
        with T.Kernel(3, threads=64) as part:
            a, b = T.alloc_shared((32, 32), "float32"), T.alloc_shared((32, 16), "float32")
            c = T.alloc_fragment((32, 16), "float32")
            T.copy(A[0, part * 32], a)
            T.copy(B[part * 32, 0], b)
            T.gemm(a, b, c, clear_accum=True)
            for i, j in T.Parallel(32, 16):
                if i < 17 and j < 9:
                    T.atomic_add(C[i, j], c[i, j])

    a, b, c = whole(17, 75), whole(75, 9), whole(17, 9)
    return kernel, [a, b, c.clone()], {2: c + a @ b}


@case
def both_operands_transposed() -> Case:
    @T.prim_func
    def kernel(A: T.Tensor((48, 32), "float16"), B: T.Tensor((24, 48), "float16"), C: T.Tensor((24, 32), "float32")):
        with T.Kernel(1, threads=64):
            a, b = T.alloc_shared((48, 32), "float16"), T.alloc_shared((24, 48), "float16")
            c, t = T.alloc_fragment((32, 24), "float32"), T.alloc_shared((24, 32), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, c, transpose_A=True, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(32, 24):
                t[j, i] = c[i, j]
            T.copy(t, C)

    a, b = whole(48, 32, dtype=torch.half), whole(24, 48, dtype=torch.half)
    return kernel, [a, b, zeros(24, 32)], {2: b.float() @ a.float()}


@case
def product_with_one_column_and_bias_row() -> Case:
    @T.prim_func
    def kernel(
        A: T.Tensor((33, 64), "bfloat16"),
        B: T.Tensor((64, 1), "bfloat16"),
        c: T.Tensor((1,), "float32"),
        O: T.Tensor((33, 1), "float32"),
    ):
        with T.Kernel(1, threads=64):
            a, b = T.alloc_shared((48, 64), "bfloat16"), T.alloc_shared((64, 8), "bfloat16")
            acc = T.alloc_fragment((48, 8), "float32")
            T.copy(A[0, 0], a)
            T.copy(B[0, 0], b)
            for i, j in T.Parallel(48, 8):
                acc[i, j] = c[0]
            T.gemm(a, b, acc)
            for i in T.Parallel(48):
                if i < 33:
                    O[i, 0] = acc[i, 0]

    a, b, c = whole(33, 64, dtype=torch.bfloat16), whole(64, 1, dtype=torch.bfloat16), whole(1)
    return kernel, [a, b, c, zeros(33, 1)], {3: a.float() @ b.float() + c}


@case
def int8_product_of_ragged_sizes() -> Case:
    @T.prim_func
    def kernel(A: T.Tensor((20, 70), "int8"), B: T.Tensor((25, 70), "int8"), O: T.Tensor((20, 25), "int32")):
        with T.Kernel(1, threads=64):
            a, b = T.alloc_shared((32, 32), "int8"), T.alloc_shared((32, 32), "int8")
            acc = T.alloc_fragment((32, 32), "int32")
            T.clear(acc)
            for k in T.Pipelined(3, num_stages=2):
                T.copy(A[0, k * 32], a)
                T.copy(B[0, k * 32], b)
                T.gemm(a, b, acc, transpose_B=True)
            T.copy(acc[0:20, 0:25], O)

    a, b = (torch.randint(-128, 128, s).to(I8) for s in ((20, 70), (25, 70)))
    return kernel, [a, b, zeros(20, 25, dtype=I32)], {2: a.int() @ b.int().t()}


@case
def product_into_columns_of_a_wider_tensor() -> Case:  # pytorch 134041
    @T.prim_func
    def kernel(A: T.Tensor((37, 24), "float16"), B: T.Tensor((24, 40), "float16"), C: T.Tensor((37, 100), "float32")):
        with T.Kernel(2, threads=128) as b:
            s, t = T.alloc_shared((32, 32), "float16"), T.alloc_shared((32, 40), "float16")
            c = T.alloc_fragment((32, 40), "float32")
            T.clear(c)
            T.copy(A[b * 32, 0], s)
            T.copy(B[0, 0], t)
            T.gemm(s, t, c)
            T.copy(c, C[b * 32 : b * 32 + 32, 33:73])

    a, b, c = whole(37, 24, dtype=torch.float16), whole(24, 40, dtype=torch.float16), whole(37, 100)
    wanted = c.clone()
    wanted[:, 33:73] = a.float() @ b.float()
    return kernel, [a, b, c], {2: wanted}


@case
def product_of_two_transposes() -> Case:  # triton 1666, 1840
    @T.prim_func
    def kernel(A: T.Tensor((48, 32), "float16"), B: T.Tensor((64, 48), "float16"), C: T.Tensor((32, 64), "float32")):
        with T.Kernel(1, threads=128):
            s, t = T.alloc_shared((16, 32), "float16"), T.alloc_shared((64, 16), "float16")
            c = T.alloc_fragment((32, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(3, num_stages=2):
                T.copy(A[k * 16, 0], s)
                T.copy(B[0, k * 16], t)
                T.gemm(s, t, c, transpose_A=True, transpose_B=True)
            T.copy(c, C)

    a, b = whole(48, 32, dtype=torch.float16), whole(64, 48, dtype=torch.float16)
    return kernel, [a, b, zeros(32, 64)], {2: a.float().T @ b.float().T}


@case
def quadratic_form_by_blocks() -> Case:  # triton 584, 375
    @T.prim_func
    def kernel(W: T.Tensor((48, 48), "float32"), X: T.Tensor((48, 20), "float32"), O: T.Tensor((20,), "float32")):
        with T.Kernel(1, threads=128):
            w, x = T.alloc_fragment((16, 16), "float32"), T.alloc_shared((16, 20), "float32")
            s, o, p = (
                T.alloc_fragment((16, 20), "float32"),
                T.alloc_fragment((20,), "float32"),
                T.alloc_fragment((20,), "float32"),
            )
            T.clear(o)
            ws = T.alloc_shared((16, 16), "float32")
            for ci in T.serial(3):
                T.clear(s)
                for cj in T.serial(ci, 3):
                    T.copy(W[ci * 16, cj * 16], w)
                    for i, j in T.Parallel(16, 16):
                        ws[i, j] = T.if_then_else(ci * 16 + i <= cj * 16 + j, w[i, j], 0.0)
                    T.copy(X[cj * 16, 0], x)
                    for k in T.serial(16):
                        for i, j in T.Parallel(16, 20):
                            s[i, j] += ws[i, k] * x[k, j]
                for i, j in T.Parallel(16, 20):
                    s[i, j] = s[i, j] * s[i, j]
                T.reduce_sum(s, p, dim=0)
                for j in T.Parallel(20):
                    o[j] += p[j]
            T.copy(o, O)

    w, x = whole(48, 48, most=2), whole(48, 20, most=2)
    return kernel, [w, x, zeros(20)], {2: (w.triu() @ x).square().sum(0)}


@case
def operands_of_a_product_copied_away() -> Case:  # tilelang 2954
    @T.prim_func
    def kernel(
        A: T.Tensor((64, 32), "float16"), B: T.Tensor((32, 64), "float16"), C: T.Tensor((64, 64), "float32"),
        P: T.Tensor((64, 32), "float16"), Q: T.Tensor((32, 64), "float16"),
    ):  # fmt: skip
        with T.Kernel(1, threads=128):
            a, s = T.alloc_fragment((64, 32), "float16"), T.alloc_shared((64, 32), "float16")
            b, t = T.alloc_shared((32, 64), "float16"), T.alloc_shared((32, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.clear(c)
            T.gemm(a, b, c)
            T.copy(a, s)
            T.copy(b, t)
            for i, j in T.Parallel(64, 32):
                P[i, j] = s[63 - i, j]
            for i, j in T.Parallel(32, 64):
                Q[i, j] = t[i, 63 - j]
            T.copy(c, C)

    a, b = whole(64, 32, dtype=torch.float16), whole(32, 64, dtype=torch.float16)
    args = [a, b, zeros(64, 64), zeros(64, 32, dtype=torch.float16), zeros(32, 64, dtype=torch.float16)]
    return kernel, args, {2: a.float() @ b.float(), 3: a.flip(0), 4: b.flip(1)}


test_reported_products = case.test()
