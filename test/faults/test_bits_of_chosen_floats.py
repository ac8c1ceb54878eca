# SPDX-License-Identifier: Apache-2.0
"""A small float that is only moved keeps its bits, also where a condition chooses it: NaN may carry a payload.

Pages of packed latents hold float32 scales in elements of bfloat16, so that a changed bit is a wrong scale.
"""

import pytest
import torch

import torch_tile.language as T

N = 64
STORED = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float8_e4m3fn: torch.int8}
STORED[torch.float8_e5m2] = torch.int8


def by_table(dtype):
    @T.prim_func
    def chosen(
        X: T.Tensor((N,), dtype), Z: T.Tensor((N,), dtype), At: T.Tensor((N,), "int32"), Y: T.Tensor((2, N), dtype)
    ):
        with T.Kernel(1, threads=N):
            for i in T.Parallel(N):
                Y[0, i] = T.if_then_else(At[i] < N, X[T.min(At[i], N - 1)], 0.0)
                Y[1, i] = T.if_then_else(At[i] < N // 2, X[T.min(At[i], N - 1)], Z[i])

    return chosen


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_bits_are_kept(dtype, way):
    like = STORED[dtype]
    last = 2 ** (8 * like.itemsize)
    kernel = by_table(dtype)
    # NaN of each payload that matters: lowest, highest and quiet bits, of both signs; and a few of all patterns.
    nan = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7C}[dtype]
    patterns = [sign | nan | low for sign in (0, last // 2) for low in (1, 2, 3)]
    patterns += torch.randint(0, last, (N - len(patterns),)).tolist()
    x, z = torch.tensor(patterns).to(like), torch.randint(0, last, (N,)).to(like)
    at = torch.randperm(2 * N)[:N].int()
    y = torch.zeros(2, N, dtype=like).view(dtype)
    way(kernel, x.view(dtype), z.view(dtype), at, y)
    of_x = x[at.clamp(max=N - 1).long()]
    want = torch.stack([torch.where(at < N, of_x, 0), torch.where(at < N // 2, of_x, z)])
    assert torch.equal(y.view(like), want)
