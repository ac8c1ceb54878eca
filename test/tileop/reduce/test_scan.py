# SPDX-License-Identifier: Apache-2.0
import random

import pytest
import torch

import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError


def scan(name, shape, dim, reverse, dtype, in_place):
    @T.prim_func
    def kernel(A: T.Tensor(shape, dtype), B: T.Tensor(shape, dtype)):
        with T.Kernel(1) as _:
            a = T.alloc_shared(shape, dtype)
            b = T.alloc_fragment(shape, dtype)
            T.copy(A, a)
            if in_place:
                getattr(T, name)(a, dim=dim, reverse=reverse)
                T.copy(a, B)
            else:
                getattr(T, name)(a, b, dim=dim, reverse=reverse)
                T.copy(b, B)

    return kernel


@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize("name", ["cumsum", "cummax"])
def test_scans(name, case, launch, seed):
    draw = random.Random(seed)
    shape = [draw.randint(1, 40) for _ in range(1 + case % 2)]
    dim, reverse, in_place = draw.randrange(len(shape)), draw.random() < 0.5, draw.random() < 0.5
    dtype = draw.choice(["float32", "float64", "int32"])
    a = (
        torch.randn(shape).to(getattr(torch, dtype))
        if "f" in dtype
        else torch.randint(-50, 50, shape, dtype=torch.int32)
    )
    b = torch.zeros_like(a)
    launch(scan(name, shape, dim, reverse, dtype, in_place), a, b)
    wide = a.double().flip(dim) if reverse else a.double()
    expected = wide.cumsum(dim) if name == "cumsum" else wide.cummax(dim).values
    expected = expected.flip(dim) if reverse else expected
    torch.testing.assert_close(b.double(), expected, rtol=1e-5, atol=1e-5)


def test_slices(launch):
    @T.prim_func
    def kernel(A: T.Tensor((4, 6), "float32"), B: T.Tensor((8, 8), "float32")):
        with T.Kernel(1) as _:
            T.cumsum(A[1:3, :], B[4:6, 1:7], dim=1)
            T.cumsum(A[:, 2], B[0:4, 0])

    a, b = torch.randn(4, 6), torch.zeros(8, 8)
    launch(kernel, a, b)
    expected = torch.zeros(8, 8)
    expected[4:6, 1:7], expected[0:4, 0] = a[1:3].cumsum(1), a[:, 2].cumsum(0)
    torch.testing.assert_close(b, expected, rtol=1e-5, atol=1e-5)


def test_shapes_must_agree(complaint):
    @T.prim_func
    def kernel(A: T.Tensor((4, 6), "float32"), B: T.Tensor((6, 4), "float32")):
        with T.Kernel(1) as _:
            T.cumsum(A, B, dim=1)  # here

    assert "(4, 6) and (6, 4) differ" in complaint(kernel, "scan_shape")


def test_dim_must_exist():
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((4, 6), "float32")):
            with T.Kernel(1) as _:
                T.cummax(A, dim=2)

    assert caught.value.code == "reduce_dim"
