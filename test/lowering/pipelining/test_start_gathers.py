# SPDX-License-Identifier: Apache-2.0
"""Rows that a table names come by cp.async in loops that nothing pipelines."""

import pytest
import torch

import torch_tile
import torch_tile.language as T

TARGETS = ["cuda:sm_80", "cuda:sm_90a"]


def gathered(rows=16, width=64, between="nothing", shift=0):
    """Sum products of two gathered tiles over steps; `between` stands between both gathers."""

    @T.prim_func
    def kernel(
        A: T.Tensor((40, width), "float16"), B: T.Tensor((40, width), "float16"), Rows: T.Tensor((3, rows), "int32"),
        C: T.Tensor((rows, rows), "float32"), D: T.Tensor((rows, width), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=64):
            a, b = T.alloc_shared((rows, width), "float16"), T.alloc_shared((rows, width), "float16")
            c, d = T.alloc_fragment((rows, rows), "float32"), T.alloc_fragment((rows, width), "float32")
            T.clear(c)
            T.clear(d)
            for step in T.serial(3):
                for i, j in T.Parallel(rows, width):
                    a[i, j] = A[Rows[step, i] + shift, j]
                if between == "reads of the first":
                    for i, j in T.Parallel(rows, width):
                        d[i, j] += a[i, j]
                if between == "reads of the second":
                    for i, j in T.Parallel(rows, width):
                        d[i, j] += T.if_then_else(step > 0, b[i, j], 0)
                if between == "an end" and Rows[step, 0] > 100:
                    break
                for i, j in T.Parallel(rows, width):
                    b[i, j] = T.if_then_else(Rows[step, i] < 20, B[Rows[step, i], j], 0)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C)
            T.copy(d, D)

    return kernel


def wanted(a, b, rows, between, shift):
    a = torch.cat([a, torch.zeros(8, a.shape[1]).half()]).double()
    c, d = 0, torch.zeros(rows.shape[1], a.shape[1], dtype=torch.float64)
    held = torch.zeros_like(d)
    for one in rows:
        left = a[one.long() + shift]
        right = b[one.long()].double() * (one < 20)[:, None]
        d += left if between == "reads of the first" else held if between == "reads of the second" else 0
        c, held = c + left @ right.T, right
    return c, d


@pytest.mark.parametrize("shift", [0, 5])  # 5: some rows lie outside and are 0
@pytest.mark.parametrize("between", ["nothing", "reads of the first", "reads of the second", "an end"])
def test_values(between, shift, way, seed):
    torch.manual_seed(seed)
    a, b = torch.randn(40, 64).half(), torch.randn(40, 64).half()
    rows = torch.randint(0, 40, (3, 16), dtype=torch.int32)
    c, d = torch.zeros(16, 16), torch.zeros(16, 64)
    way(gathered(between=between, shift=shift), a, b, rows, c, d)
    for got, want in zip((c, d), wanted(a, b, rows, between, shift), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("between", "waits"),
    [
        ("nothing", [0]),
        ("reads of the first", [1, 0]),  # the second begins beside the first
        ("reads of the second", [0]),  # the second begins behind the reads
        ("an end", [0, 0]),
    ],
)
def test_where_threads_wait(between, waits, target):
    text = torch_tile.compile(gathered(between=between), target=target).get_kernel_source()
    body = text[text.index("__global__") :]
    assert body.count("cp_async<16>") == 2
    assert [int(n) for n in body.replace("cp_async_wait<", "\0").split("\0")[1:] for n in n[0]] == waits


def copied_ahead(width=64):
    @T.prim_func
    def kernel(A: T.Tensor((40, width), "float16"), R: T.Tensor((16,), "int32"), C: T.Tensor((16, width), "float16")):
        with T.Kernel(1, threads=64):
            a, b = T.alloc_shared((16, width), "float16"), T.alloc_shared((16, width), "float16")
            T.async_copy(A[0:16, :], b)
            for _ in T.serial(2):
                for i, j in T.Parallel(16, width):
                    a[i, j] = A[R[i], j]
                T.copy(a, C)
            T.ptx_wait_group(0)

    return kernel


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_that_count_groups_are_left_alone(target):
    text = torch_tile.compile(copied_ahead(), target=target).get_kernel_source()
    assert text.count("cp_async<16>") == 1 and text.count("cp_async_wait<") == 1


@pytest.mark.parametrize("target", TARGETS)
def test_rows_of_odd_lengths_are_ordinary_loops(target):
    text = torch_tile.compile(gathered(width=33), target=target).get_kernel_source()
    assert "cp_async<" not in text and "cp_async_wait<" not in text and "cp_async_commit()" not in text
