# SPDX-License-Identifier: Apache-2.0
"""A small float that is only moved keeps its bits: copied, chosen by a condition, named, in a variable, transposed.

NaN may carry a payload. Pages of packed latents hold float32 scales in elements of bfloat16, so that a changed bit is a
wrong scale. Each test moves every pattern of the type.
"""

import pytest
import torch

import torch_tile.language as T

STORED = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float8_e4m3fn: torch.int8}
STORED[torch.float8_e5m2] = torch.int8
PART = 256  # elements of a block


@pytest.fixture(params=STORED, ids=str)
def dtype(request):
    return request.param


def patterns(dtype):
    """Every pattern of bits in a random order, as integers."""
    like = STORED[dtype]
    last = 2 ** (8 * like.itemsize)
    return torch.randperm(last).to(like)


def bits_of(number, dtype):
    return torch.tensor(number).to(dtype).view(STORED[dtype])


def chosen(n, dtype):
    """Rows: chosen against +0, another element, a number, -0, the element's double, by two conditions, as last arm."""

    @T.prim_func
    def kernel(
        X: T.Tensor((n,), dtype), Z: T.Tensor((n,), dtype), At: T.Tensor((n,), "int32"), Y: T.Tensor((7, n), dtype)
    ):
        with T.Kernel(T.ceildiv(n, PART), threads=128) as b:
            for k in T.Parallel(PART):
                i = b * PART + k
                Y[0, i] = T.if_then_else(At[i] < n, X[T.min(At[i], n - 1)], 0.0)
                Y[1, i] = T.if_then_else(At[i] < n // 2, X[T.min(At[i], n - 1)], Z[i])
                Y[2, i] = T.if_then_else(At[i] < n, X[T.min(At[i], n - 1)], 1.0)
                Y[3, i] = T.if_then_else(At[i] < n, X[T.min(At[i], n - 1)], -0.0)
                Y[4, i] = T.if_then_else(At[i] < n, X[i], Z[i] + Z[i])
                Y[5, i] = T.if_then_else(At[i] < n, T.if_then_else(At[i] < n // 2, X[i], 2.0), T.cast(At[i], dtype))
                Y[6, i] = T.if_then_else(At[i] < n, 0.5, X[i])

    return kernel


def test_a_chosen_float_keeps_its_bits(dtype, way):
    x, z = patterns(dtype), patterns(dtype)
    n = len(x)
    at = torch.randperm(2 * n)[:n].int()
    y = torch.zeros(7, n, dtype=x.dtype).view(dtype)
    way(chosen(n, dtype), x.view(dtype), z.view(dtype), at, y)
    got, inside, number = y.view(x.dtype), at < n, lambda v: bits_of(v, dtype)
    of_x = x[at.clamp(max=n - 1).long()]
    for row, want in enumerate([
        torch.where(inside, of_x, 0), torch.where(at < n // 2, of_x, z), torch.where(inside, of_x, number(1.0)),
        torch.where(inside, of_x, number(-0.0)),
    ]):  # fmt: skip
        assert torch.equal(got[row], want), row
    assert torch.equal(got[4][inside], x[inside])
    assert torch.equal(got[5][at < n // 2], x[at < n // 2])
    assert (got[5][inside & (at >= n // 2)] == number(2.0)).all()
    assert torch.equal(got[6], torch.where(inside, number(0.5), x))


def named(n, dtype):
    """Rows: a name, a variable, a variable that is chosen, a name that is used and moved, the bits of a name."""
    word = f"uint{8 * dtype.itemsize}"

    @T.prim_func
    def kernel(X: T.Tensor((n,), dtype), Y: T.Tensor((4, n), dtype), Bits: T.Tensor((n,), word)):
        with T.Kernel(T.ceildiv(n, PART), threads=64) as b:
            for k in T.Parallel(PART):
                x = X[b * PART + k]
                Y[0, b * PART + k] = x
                Y[1, b * PART + k] = T.if_then_else(x > 1.0, x, T.if_then_else(x < 1.0, x, x))
                Bits[b * PART + k] = T.reinterpret(x, word)
            v = T.alloc_var(dtype)
            for k in T.serial(PART):
                v = X[b * PART + k]
                if k % 2 == 1:
                    v = X[b * PART + k - 1]
                Y[2, b * PART + k] = v
                Y[3, b * PART + k] = T.if_then_else(k % 3 == 0, v, 1.0)

    return kernel


def test_a_named_float_keeps_its_bits(dtype, way):
    x = patterns(dtype)[: 16 * PART]
    x[:6] = bits_of(float("nan"), dtype) ^ torch.tensor([0, 1, 0, 1, 0, 1]).to(x.dtype)
    n, y, bits = len(x), torch.zeros(4, len(x), dtype=x.dtype).view(dtype), torch.zeros_like(x)
    way(named(n, dtype), x.view(dtype), y, bits.view(getattr(torch, f"uint{8 * dtype.itemsize}")))
    got, k = y.view(x.dtype), torch.arange(n)
    assert torch.equal(got[0], x) and torch.equal(got[1], x) and torch.equal(bits, x)
    before = x[k - k % 2]
    assert torch.equal(got[2], before)
    assert torch.equal(got[3], torch.where(k % PART % 3 == 0, before, bits_of(1.0, dtype)))


def copied(rows, columns, dtype, scope):
    """A ragged matrix by tiles that its sides do not divide, as it is and transposed."""

    @T.prim_func
    def kernel(
        X: T.Tensor((rows, columns), dtype), Y: T.Tensor((rows, columns), dtype), Z: T.Tensor((columns, rows), dtype)
    ):
        with T.Kernel(T.ceildiv(columns, 32), T.ceildiv(rows, 32), threads=64) as (bx, by):
            tile = T.alloc_shared((32, 32), dtype) if scope == "shared" else T.alloc_fragment((32, 32), dtype)
            turned = T.alloc_shared((32, 32), dtype)
            T.copy(X[by * 32, bx * 32], tile)
            T.copy(tile, Y[by * 32, bx * 32])
            T.copy(tile, turned)
            for i, j in T.Parallel(32, 32):
                if bx * 32 + i < columns and by * 32 + j < rows:
                    Z[bx * 32 + i, by * 32 + j] = turned[j, i]

    return kernel


@pytest.mark.parametrize("scope", ["shared", "fragment"])
def test_a_ragged_copy_keeps_bits(dtype, scope, way):
    x = patterns(dtype)
    columns = 15 if len(x) == 256 else 251
    rows = len(x) // columns
    x = x[: rows * columns].reshape(rows, columns)
    y, z = torch.zeros_like(x), torch.zeros_like(x.t().contiguous())
    way(copied(rows, columns, dtype, scope), x.view(dtype), y.view(dtype), z.view(dtype))
    assert torch.equal(y, x) and torch.equal(z, x.t())
