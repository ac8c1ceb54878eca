# SPDX-License-Identifier: Apache-2.0
"""Copies and transposes inside one buffer give the old values, wherever source and destination overlap."""

import pytest
import torch

import torch_tile
import torch_tile.language as T

SHIFTS = [((0, 0), (1, 0)), ((2, 0), (0, 0)), ((0, 0), (0, 3)), ((0, 1), (0, 0)), ((3, 1), (1, 2)), ((0, 0), (0, 0))]


@pytest.mark.parametrize("scope", ["global", "shared", "fragment"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_shifted_copies(way, scope, dtype):
    @T.prim_func
    def kernel(A: T.Tensor((40, 72), dtype), D: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=64):
            if scope == "global":
                for (i, j), (k, n) in SHIFTS:
                    T.copy(A[i : i + 32, j : j + 64], A[k : k + 32, n : n + 64])
                T.copy(A[D[0] : D[0] + 16, 0:64], A[4:20, 0:64])
            elif scope == "shared":
                tile = T.alloc_shared((40, 72), dtype)
                T.copy(A, tile)
                for (i, j), (k, n) in SHIFTS:
                    T.copy(tile[i : i + 32, j : j + 64], tile[k : k + 32, n : n + 64])
                T.copy(tile[D[0] : D[0] + 16, 0:64], tile[4:20, 0:64])
                T.copy(tile, A)
            else:
                rows = T.alloc_shared((40, 72), dtype)
                whole = T.alloc_fragment((40, 72), dtype)
                T.copy(A, whole)
                T.copy(whole, whole)
                T.copy(whole, rows)
                T.copy(rows, A)

    a = torch.arange(40.0 * 72).reshape(40, 72).remainder(1999).to(getattr(torch, dtype))
    want = a.clone()
    if scope != "fragment":
        for (i, j), (k, n) in SHIFTS:
            want[k : k + 32, n : n + 64] = want[i : i + 32, j : j + 64].clone()
        want[4:20, 0:64] = want[5:21, 0:64].clone()
    way(kernel, a, torch.tensor([5], dtype=torch.int32))
    assert torch.equal(a, want)


@pytest.mark.parametrize("scope", ["global", "shared"])
def test_transposes_in_place(way, scope):
    @T.prim_func
    def kernel(A: T.Tensor((48, 48), "float32")):
        with T.Kernel(1, threads=64):
            if scope == "global":
                T.transpose(A[0:32, 0:48], A[0:48, 3:35])
                T.transpose(A, A)
            else:
                tile = T.alloc_shared((48, 48), "float32")
                T.copy(A, tile)
                T.transpose(tile[0:32, 0:48], tile[0:48, 3:35])
                T.transpose(tile, tile)
                T.copy(tile, A)

    a = torch.arange(48.0 * 48).reshape(48, 48)
    want = a.clone()
    want[0:48, 3:35] = want[0:32, 0:48].T.clone()
    want = want.T.contiguous()
    way(kernel, a)
    assert torch.equal(a, want)


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90a"])
def test_sizes_of_run_time(target):
    """No registers hold a tile whose size is not constant."""

    @T.prim_func
    def kernel(A: T.Tensor((T.dynamic("n"),), "float32")):
        with T.Kernel(1, threads=64):
            n = A.shape[0] - 1
            T.copy(A[0:n], A[1 : n + 1])

    with pytest.raises(torch_tile.TileError, match="may overlap the source"):
        torch_tile.compile(kernel, target=target)
