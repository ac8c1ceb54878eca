# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.nn.functional as F

from torch_tile.kernels.gemm import reference


def rand(*shape):
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("m, k, n", [(5, 7, 9), (1, 33, 2), (16, 1, 16), (0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_product(m, k, n):
    a, b = rand(m, k), rand(n, k)
    got = reference(a, [b.mT], [], "", "", torch.float64)
    torch.testing.assert_close(got, a @ b.mT)
    assert got.is_contiguous()


@pytest.mark.parametrize("batch", [1, 3])
def test_batches_and_every_kind(batch):
    a, b, c = rand(3, 5, 7), rand(batch, 7, 9), rand(3, 7, 9)
    full, row, column, scalar = rand(3, 5, 9), rand(9), rand(3, 5, 1), rand()
    text = "g=silu(acc0);u=mul(g,acc1);v=add(u,x0);w=mul(v,x1);y=sub(w,x2);z=div(y,x3);ret z"
    got = reference(a, [b, c], [full, row, column, scalar], "trcs", text, torch.float64)
    torch.testing.assert_close(got, ((F.silu(a @ b) * (a @ c) + full) * row - column) / scalar)


def test_rounds_once():
    a, b, r = (torch.randn(n).bfloat16() for n in ((8, 64), (64, 8), (8, 8)))
    got = reference(a, [b], [r], "t", "v=add(acc0,x0);ret v", torch.bfloat16)
    torch.testing.assert_close(got, (a.float() @ b.float() + r.float()).bfloat16(), rtol=0, atol=0)
    assert reference(a, [b], [], "", "", torch.float32).dtype == torch.float32


def test_result_does_not_alias():
    a, b, t = rand(2, 3), rand(3, 4), rand(2, 4)
    got = reference(a, [b], [t], "t", "ret x0", torch.float64)
    assert torch.equal(got, t) and got.data_ptr() != t.data_ptr()
