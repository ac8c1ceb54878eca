# SPDX-License-Identifier: Apache-2.0
"""Maxima and minima of tiles that hold NaN: left out as TileLang does, kept where the author says so."""

import pytest
import torch

import torch_tile
import torch_tile.language as T

EXTREMA = ("max", "min", "absmax")
NOTHING = {"max": -torch.inf, "min": torch.inf, "absmax": 0.0}  # of no number at all
ROWS, COLUMNS = 48, 96


def kernel_of(kind, dim, scope, dtype, **options):
    """Row or column extrema of A, folded into B."""
    sizes = (ROWS, COLUMNS)[1 - dim]

    @T.prim_func
    def kernel(A: T.Tensor((ROWS, COLUMNS), dtype), B: T.Tensor((sizes,), "float32")):
        with T.Kernel(1, threads=128) as _:
            a = (T.alloc_fragment if scope == "fragment" else T.alloc_shared)((ROWS, COLUMNS), dtype)
            b = T.alloc_fragment((sizes,), "float32")
            T.copy(A, a)
            T.copy(B, b)
            getattr(T, f"reduce_{kind}")(a, b, dim=dim, **options)
            T.copy(b, B)

    return kernel


def extremum(kind, tensor, dim, keeps):
    tensor = tensor.abs() if kind == "absmax" else tensor
    if not keeps:
        tensor = torch.where(tensor.isnan(), NOTHING[kind], tensor)
    return tensor.amin(dim) if kind == "min" else tensor.amax(dim)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize(
    ("dim", "scope", "dtype"),
    [(1, "fragment", "float32"), (0, "shared", "float16"), (1, "shared", "bfloat16"), (0, "fragment", "float64")],
)
@pytest.mark.parametrize("kind", EXTREMA)
def test_extrema(way, kind, dim, scope, dtype, clear, keeps):
    a = torch.randn(ROWS, COLUMNS).to(getattr(torch, dtype))
    a[torch.rand(ROWS, COLUMNS) < 0.1] = torch.nan
    a[3], a[:, 5] = torch.nan, torch.nan  # a row and a column of nothing else
    a[4, 7], a[6, 9] = torch.inf, -torch.inf
    b = torch.randn((ROWS, COLUMNS)[1 - dim]).abs()
    b[::7] = torch.nan
    wanted = extremum(kind, a.double(), dim, keeps)
    if not clear:
        wanted = extremum(kind.removeprefix("abs"), torch.stack([b.double(), wanted]), 0, keeps)
    way(kernel_of(kind, dim, scope, dtype, clear=clear, nan_propagate=keeps), a, b)
    torch.testing.assert_close(b.double(), wanted, rtol=0, atol=0, equal_nan=True)


def test_leaving_out_is_the_default(way):
    a, b = torch.randn(ROWS, COLUMNS), torch.zeros(ROWS)
    a[:, 11] = torch.nan
    way(kernel_of("max", 1, "fragment", "float32"), a, b)
    torch.testing.assert_close(b, extremum("max", a, 1, False))


def test_integers_need_no_care():
    """Their text is the same whichever is asked for."""

    def text(keeps):
        @T.prim_func
        def kernel(A: T.Tensor((64, 64), "int32"), B: T.Tensor((64,), "int32")):
            with T.Kernel(1, threads=128) as _:
                a, b = T.alloc_fragment((64, 64), "int32"), T.alloc_fragment((64,), "int32")
                T.copy(A, a)
                T.reduce_max(a, b, dim=1, nan_propagate=keeps)
                T.copy(b, B)

        return [torch_tile.compile(kernel, target=t).get_kernel_source() for t in ("cpu", "cuda:sm_80", "cuda:sm_90a")]

    assert text(False) == text(True)


def test_fmax_and_fmin(way):
    """The functions that leave NaN out, of numbers and expressions."""

    @T.prim_func
    def kernel(A: T.Tensor((256,), "float32"), B: T.Tensor((256,), "float32"), C: T.Tensor((2, 256), "float32")):
        with T.Kernel(1, threads=128) as _:
            for i in T.Parallel(256):
                C[0, i] = T.fmax(A[i], B[i])
                C[1, i] = T.fmin(B[i], T.fmax(A[i], 0.5))

    a, b, c = torch.randn(256), torch.randn(256), torch.zeros(2, 256)
    a[::3], b[::5] = torch.nan, torch.nan
    way(kernel, a, b, c)
    wanted = torch.stack([torch.fmax(a, b), torch.fmin(b, torch.fmax(a, torch.tensor(0.5)))])
    torch.testing.assert_close(c, wanted, rtol=0, atol=0, equal_nan=True)
