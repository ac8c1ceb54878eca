# SPDX-License-Identifier: Apache-2.0
"""Operations that are loops: against torch, of ragged sizes, on every target; and whole kernels that use them."""

import random

import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T


def convolution(shape, filters, K, S, D, P, block, stages=2, threads=128, dtype="float16"):
    """A convolution as a product of columns and weights; weights are (K * K * C, F)."""
    N, H, W, C = shape
    OH, OW = ((size + 2 * P - D * (K - 1) - 1) // S + 1 for size in (H, W))
    bm, bn, bk = block

    @T.prim_func
    def main(
        data: T.Tensor(shape, dtype), kernel: T.Tensor((K * K * C, filters), dtype),
        out: T.Tensor((N * OH * OW, filters), "float32"),
    ):  # fmt: skip
        with T.Kernel(T.ceildiv(filters, bn), T.ceildiv(N * OH * OW, bm), threads=threads) as (bx, by):
            columns = T.alloc_shared((bm, bk), dtype)
            weights = T.alloc_shared((bk, bn), dtype)
            acc = T.alloc_fragment((bm, bn), "float32")
            T.clear(acc)
            for k in T.Pipelined(T.ceildiv(K * K * C, bk), num_stages=stages):
                T.c2d_im2col(data, columns, by, k, K, S, D, P)
                T.copy(kernel[k * bk, bx * bn], weights)
                T.gemm(columns, weights, acc)
            T.copy(acc, out[by * bm, bx * bn])

    return main


def expected(data, kernel, K, S, D, P):
    weights = kernel.double().reshape(K, K, data.shape[-1], -1).permute(3, 2, 0, 1)
    found = torch.conv2d(data.double().permute(0, 3, 1, 2), weights, stride=S, padding=P, dilation=D)
    return found.permute(0, 2, 3, 1).reshape(-1, weights.shape[0])


@pytest.mark.parametrize("channels", [32, 24, 3])
def test_convolutions(channels, way, seed):
    """Tiles inside one weight, tiles over parts of several, and a few channels only."""
    rng = random.Random(seed)
    shape, filters = (rng.randint(1, 2), rng.randint(5, 8), rng.randint(5, 8), channels), rng.randint(1, 20)
    how = (rng.choice([1, 2, 3]), rng.randint(1, 2), rng.randint(1, 2), rng.randint(0, 2))
    kernel = convolution(shape, filters, *how, (32, 32, 32))
    data, weights = torch.randn(shape).half(), torch.randn(how[0] ** 2 * channels, filters).half()
    want = expected(data, weights, *how)
    out = torch.full(want.shape, float("nan"))
    way(kernel, data, weights, out)
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=5e-2)


def test_columns_are_copied_ahead():
    """Where a tile lies inside one weight, threads copy runs of 16 bytes by cp.async, as T.copy does."""
    kernel = convolution((8, 32, 32, 64), 128, 3, 1, 1, 1, (64, 64, 32), stages=3)
    made = tilelang.compile(kernel, target="cuda:sm_80")
    assert "cp.async of 16 bytes" in str(made.schedule) and "not copied ahead" not in str(made.schedule)


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
@pytest.mark.parametrize("channels", [64, 48])
def test_machine_code(channels, target):
    made = tilelang.compile(convolution((8, 32, 32, channels), 128, 3, 1, 1, 1, (128, 128, 32), 3), target=target)
    (found,) = made.resources.values()
    assert not made.cubin.warnings and not found.spills, made.schedule


def test_transposes(way, seed):
    """Shared tiles, fragments, regions, memory; converted on the way."""
    rng = random.Random(seed)
    m, n = rng.randint(1, 40), rng.randint(1, 40)

    @T.prim_func
    def kernel(
        A: T.Tensor((m, n), "float32"), B: T.Tensor((n, m), "float16"), C: T.Tensor((2, m), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=64):
            a, b = T.alloc_shared((m, n), "float32"), T.alloc_shared((n, m), "float32")
            c, d = T.alloc_fragment((n, m), "float16"), T.alloc_fragment((m, 1), "float32")
            T.copy(A, a)
            T.transpose(a, b)
            T.copy(b, c)
            T.copy(c, B)
            T.transpose(A[:, 0:1], C[1:2, :])
            T.transpose(b[0:1, :], d)
            T.transpose(d, C[0:1, :])

    a, b, c = torch.randn(m, n), torch.full((n, m), torch.nan).half(), torch.full((2, m), torch.nan)
    way(kernel, a, b, c)
    assert torch.equal(b, a.T.half()) and torch.equal(c, torch.stack([a[:, 0], a[:, 0]]))


@pytest.mark.parametrize("dtype", ["bool", "float32", "int32"])
def test_any_and_all(dtype, way, seed):
    """Rows of blocks that are skipped where nothing is to be done, as in sparse attention."""
    masks = torch.zeros(6, 9, 7)
    masks[1], masks[2, 4, 3], masks[3, :, 6], masks[5] = 1, -1, 1, 1
    masks[5, 8, 6] = 0
    masks = masks.to(getattr(torch, dtype))

    @T.prim_func
    def kernel(M: T.Tensor((6, 9, 7), dtype), out: T.Tensor((6, 6), "int32")):
        with T.Kernel(6, threads=64) as b:
            tile, own = T.alloc_shared((9, 7), dtype), T.alloc_fragment((9, 7), dtype)
            T.copy(M[b, 0, 0], tile)
            T.copy(tile, own)
            out[b, 0] = T.cast(T.any_of(tile), "int32")
            out[b, 1] = T.cast(T.all_of(own), "int32")
            if T.any_of(tile[4, :]):
                T.fill(out[b, 2:3], 1)
            else:
                T.fill(out[b, 2:3], 0)
            last = T.all_of(tile[:, 6:7])
            out[b, 3] = T.if_then_else(last, 1, 0)
            out[b, 4] = T.cast(T.any_of(M[b, :, :]), "int32")
            out[b, 5] = T.cast(T.all_of(tile[8, 6]), "int32")

    out = torch.full((6, 6), -1, dtype=torch.int32)
    way(kernel, masks, out)
    flags = masks != 0
    want = [
        flags.flatten(1).any(1), flags.flatten(1).all(1), flags[:, 4].any(1), flags[:, :, 6].all(1),
        flags.flatten(1).any(1), flags[:, 8, 6],
    ]  # fmt: skip
    assert torch.equal(out, torch.stack(want, 1).int())


def transposed_shape():
    @T.prim_func
    def kernel(A: T.Tensor((4, 6), "float32"), B: T.Tensor((4, 6), "float32")):
        with T.Kernel(1):
            T.transpose(A, B)  # here


def image_of_three_dimensions():
    @T.prim_func
    def kernel(A: T.Tensor((4, 6, 8), "float16")):
        with T.Kernel(1):
            tile = T.alloc_shared((16, 16), "float16")
            T.im2col(A, tile, 0, 0, 3, 1, 1, 1)  # here


def columns_of_one_dimension():
    @T.prim_func
    def kernel(A: T.Tensor((1, 4, 6, 8), "float16")):
        with T.Kernel(1):
            tile = T.alloc_shared((16,), "float16")
            T.im2col(A, tile, 0, 0, 3, 1, 1, 1)  # here


def no_stride():
    @T.prim_func
    def kernel(A: T.Tensor((1, 4, 6, 8), "float16")):
        with T.Kernel(1):
            tile = T.alloc_shared((16, 16), "float16")
            T.im2col(A, tile, 0, 0, 3, 0, 1, 1)  # here


def asked_in_a_nest():
    @T.prim_func
    def kernel(A: T.Tensor((4, 6), "bool"), B: T.Tensor((4,), "bool")):
        with T.Kernel(1):
            for i in T.Parallel(4):
                B[i] = T.any_of(A[i, :])  # here


MISTAKES = {
    transposed_shape: "T.transpose(A, B)",
    image_of_three_dimensions: "T.im2col(A, tile, 0, 0, 3, 1, 1, 1)",
    columns_of_one_dimension: "T.im2col(A, tile, 0, 0, 3, 1, 1, 1)",
    no_stride: "T.im2col(A, tile, 0, 0, 3, 0, 1, 1)",
    asked_in_a_nest: "T.any_of(A[i, :])",
}


@pytest.mark.parametrize("case", MISTAKES, ids=lambda f: f.__name__)
def test_mistakes(case, refused):
    refused(case, "bad_argument", MISTAKES[case])
