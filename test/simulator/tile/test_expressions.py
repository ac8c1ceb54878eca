# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.diagnostics.errors import InternalError
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Address, Expr, const
from torch_tile.simulator.tile.expressions import Expressions
from torch_tile.simulator.tile.interpreter import evaluate

N = 40
ELEMENTWISE = {
    "arithmetic": lambda x, y, i: (x + y) * x - y / (x * x + 1.0),
    "quotients": lambda x, y, i: (i // 7) * 1.5 + (i % 5) - ((-i) // 3) + ((-i) % 4) + x // 0.5 + x % 0.75,
    "bits": lambda x, y, i: (((i << 3) ^ (i >> 1)) & 21) | 8,
    "extrema": lambda x, y, i: T.max(T.min(x, y), T.cast(i, "float32") / 40),
    "choice": lambda x, y, i: T.if_then_else(x > y, x, T.if_then_else(i > 20, y, -y)),
    "logic": lambda x, y, i: T.if_then_else(T.logical_or(T.logical_and(x > 0, y > 0), i == 3), 1.0, 2.0),
    "functions": lambda x, y, i: T.exp(x) + T.sqrt(T.abs(y)) + T.tanh(x) * T.erf(y) + T.floor(x * 3),
    "casts": lambda x, y, i: T.cast(T.cast(x * 10, "int32"), "float16") + T.cast(y, "bfloat16"),
    "low precision": lambda x, y, i: T.cast(x, "bfloat16") * T.cast(y, "bfloat16") + T.cast(x, "bfloat16"),
    "unsigned": lambda x, y, i: T.cast(i, "uint8") * T.cast(37, "uint8") - T.cast(200, "uint8"),
    "power": lambda x, y, i: T.pow(T.abs(x), y) + x**2,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_lanes_compute_what_single_iterations_compute(name):
    """One iteration at a time in Python numbers, all at once in tensors: the same bits; and what the CPU computes."""
    body = ELEMENTWISE[name]

    @T.prim_func
    def kernel(x: T.Tensor((N,), "float32"), y: T.Tensor((N,), "float32"), out: T.Tensor((2, N), "float32")):
        with T.Kernel(1) as _:
            for i in T.Parallel(N):
                out[0, i] = T.cast(body(x[i], y[i], i), "float32")
            for i in T.serial(N):
                out[1, i] = T.cast(body(x[i], y[i], i), "float32")

    x, y, out = torch.randn(N), torch.randn(N), torch.full((2, N), math.nan)
    target = torch.full((2, N), math.nan)
    evaluate(kernel, x, y, out)
    tilelang.compile(kernel)(x, y, target)
    torch.testing.assert_close(target, out, rtol=1e-6, atol=1e-6)
    # Vectorised and scalar forms of exp, erf, tanh and pow may differ in their last bit.
    tolerance = 1e-6 if name in ("functions", "power") else 0
    torch.testing.assert_close(out[0], out[1], rtol=tolerance, atol=tolerance)


def test_functions_against_torch():
    @T.prim_func
    def kernel(x: T.Tensor((N,), "float64"), out: T.Tensor((4, N), "float64")):
        with T.Kernel(1) as _:
            for i in T.Parallel(N):
                out[0, i] = T.exp2(x[i]) + T.log(x[i] + 1.0)
                out[1, i] = T.sigmoid(x[i]) * T.rsqrt(x[i] + 0.5)
                out[2, i] = T.atan2(x[i], 0.5) + T.fmod(x[i], 0.3)
                out[3, i] = T.round(x[i] * 10) + T.ceil(x[i]) + T.trunc(-x[i] * 3)

    x, out = torch.rand(N, dtype=torch.float64), torch.zeros(4, N, dtype=torch.float64)
    evaluate(kernel, x, out)
    half = torch.full_like(x, 0.5)
    wanted = torch.stack([
        torch.exp2(x) + torch.log(x + 1), torch.sigmoid(x) * torch.rsqrt(x + 0.5),
        torch.atan2(x, half) + torch.fmod(x, 0.3), torch.round(x * 10) + torch.ceil(x) + torch.trunc(-x * 3),
    ])  # fmt: skip
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)


def test_guards_protect_what_they_guard():
    """Neither a hidden branch of a Select nor the right side of `and` and `or` is looked at."""

    @T.prim_func
    def kernel(n: T.int32, out: T.Tensor((4, 8), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((4,), "float32")
            T.fill(tile, 3.0)
            for i in T.Parallel(8):
                out[0, i] = T.if_then_else(i < 4, tile[i], -1.0)
                out[1, i] = T.if_then_else(i >= 4, -1.0, tile[i])
                out[2, i] = T.if_then_else(i < 4 and tile[i] == 3.0, 1.0, 0.0)
                out[3, i] = T.if_then_else(i >= 4 or tile[i] == 0.0, 1.0, 0.0)
            if n < 4 and tile[n] == 3.0:
                out[0, 0] = 5.0
            if n >= 4 or tile[n] == 3.0:
                out[0, 1] = 6.0

    out = torch.zeros(4, 8)
    evaluate(kernel, 9, out)
    assert out[0].tolist() == [3, 6, 3, 3, -1, -1, -1, -1]
    assert out[1].tolist() == [3, 3, 3, 3, -1, -1, -1, -1]
    assert out[2].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert out[3].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_gather_with_guarded_indices():
    @T.prim_func
    def kernel(table: T.Tensor((6,), "int32"), data: T.Tensor((10, 3), "float32"), out: T.Tensor((6, 3), "float32")):
        with T.Kernel(1) as _:
            for i, j in T.Parallel(6, 3):
                out[i, j] = data[table[i], j]

    table, data, out = torch.tensor([3, -1, 9, 10, 0, 3], dtype=torch.int32), torch.randn(10, 3), torch.zeros(6, 3)
    evaluate(kernel, table, data, out)
    wanted = torch.where(((table >= 0) & (table < 10))[:, None], data[table.clamp(0, 9).long()], 0)
    assert torch.equal(out, wanted)


def test_empty_tensors_read_zero():
    m = T.dynamic("m")

    @T.prim_func
    def kernel(a: T.Tensor((m,), "float32"), out: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            for i in T.Parallel(4):
                out[i] = a[i] + 1.0

    out = torch.zeros(4)
    evaluate(kernel, torch.zeros(0), out)
    assert out.tolist() == [1] * 4


def test_names_are_values_at_their_definition():
    @T.prim_func
    def kernel(a: T.Tensor((4,), "float32"), out: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            first = a[0]
            a[0] = 9.0
            out[0] = first
            for i in T.Parallel(4):
                before = a[i]
                a[i] = 0.0
                out[i] = before + first

    out = torch.zeros(4)
    evaluate(kernel, torch.tensor([1.0, 2, 3, 4]), out)
    assert out.tolist() == [10, 3, 4, 5]


def test_nodes_of_lowered_kernels_are_refused():
    class Strange(Expr):
        dtype = dt.int32

    for node in (Strange(), Address(None, (const(0, dt.int32),))):
        with pytest.raises(InternalError, match=type(node).__name__):
            Expressions().expr(node)
