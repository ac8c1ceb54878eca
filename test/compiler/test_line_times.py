# SPDX-License-Identifier: Apache-2.0
import linecache

import pytest
import torch

import torch_tile
import torch_tile.language as T


@T.prim_func
def product(A: T.Tensor((512, 256), "float16"), B: T.Tensor((256, 512), "float16"), C: T.Tensor((512, 512), "float32")):
    with T.Kernel(8, 8, threads=128) as (bx, by):
        a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 64), "float16")
        c = T.alloc_fragment((64, 64), "float32")
        T.clear(c)
        for k in T.Pipelined(8, num_stages=2):
            T.copy(A[by * 64, k * 32], a)
            T.copy(B[k * 32, bx * 64], b)
            T.gemm(a, b, c)
        for i, j in T.Parallel(64, 64):
            C[by * 64 + i, bx * 64 + j] = T.max(c[i, j], 0)


def by_text(found) -> dict[str, float]:
    return {linecache.getline(*place).strip(): ms for place, ms in found.lines.items()}


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90a"])
def test_lines_share_the_time(target: str) -> None:
    found = torch_tile.compile(product, target=target).profile()
    lines = by_text(found)
    assert found.measured == (target == "cpu" or torch.cuda.is_available())
    assert sum(lines.values()) == pytest.approx(found.total) and min(lines.values()) > 0
    assert {"T.clear(c)", "T.gemm(a, b, c)", "T.copy(A[by * 64, k * 32], a)"} <= lines.keys()
    # the operands are copied eight times, and both take the same time
    assert lines["T.copy(A[by * 64, k * 32], a)"] == pytest.approx(lines["T.copy(B[k * 32, bx * 64], b)"])
    assert lines["T.gemm(a, b, c)"] > lines["T.clear(c)"]
    text = repr(found)
    assert text.splitlines()[0].startswith("product: ") and "T.gemm(a, b, c)" in text


def test_sizes_of_a_call() -> None:
    rows = T.dynamic("rows")

    @T.prim_func
    def double(A: T.Tensor((rows, 64), "float32"), B: T.Tensor((rows, 64), "float32")):
        with T.Kernel(rows, threads=64) as bx:
            for i in T.Parallel(64):
                B[bx, i] = A[bx, i] * 2

    kernel = torch_tile.compile(double, target="cpu")
    found = kernel.profile({"rows": 30})
    assert list(by_text(found)) == ["B[bx, i] = A[bx, i] * 2"]
    with pytest.raises(torch_tile.LaunchError, match="profile: the size `rows` is known only at run time"):
        kernel.profile()
