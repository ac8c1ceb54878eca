# SPDX-License-Identifier: Apache-2.0
"""Each function at infinities, NaN, zeros and large values, as torch has it in float64."""

import functools
import math

import pytest
import torch

import torch_tile.language as T
from torch_tile.kernels.epilogue.autodiff import vjp
from torch_tile.kernels.epilogue.emit import apply
from torch_tile.kernels.epilogue.functions import FUNCTIONS, bind
from torch_tile.kernels.epilogue.program import parse

FIRST = (0.0, -0.0, 1e-6, -1e-6, 0.5, -0.5, 3.0, -3.0, 7.0, -7.0, 20.0, -20.0, 100.0, -100.0, 1e30, -1e30, math.inf,
         -math.inf, math.nan)  # fmt: skip
SECOND = (0.25, -2.0, 0.0, math.inf, math.nan)


def extremes(arity):
    """Operands that meet in every way, in float64, as far as float32 has them."""
    grids = torch.meshgrid(*map(torch.tensor, (FIRST, SECOND, SECOND)[:arity]), indexing="ij")
    return [x.flatten().float().double() for x in grids]


def text_of(name):
    return f"v={name}({','.join(['acc0', 'x0', 'x1'][: FUNCTIONS[name].arity])});ret v"


@functools.cache
def kernel_of(name, dtype, quick):
    program, arity = parse(text_of(name)), FUNCTIONS[name].arity
    n = len(extremes(arity)[0])

    @T.prim_func
    def kernel(xs: T.Tensor((arity, n), dtype), y: T.Tensor((n,), dtype)):
        with T.Kernel(T.ceildiv(n, 32), threads=32) as bx:
            for i in T.Parallel(32):
                if bx * 32 + i < n:
                    names = ("acc0", "x0", "x1")[:arity]
                    values = {name: xs[k, bx * 32 + i] for k, name in enumerate(names)}
                    y[bx * 32 + i] = apply(program, values, dtype, quick)

    return kernel


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_values(name, way):
    values = extremes(FUNCTIONS[name].arity)
    want = bind(FUNCTIONS[name].torch, torch)(*values)
    for dtype, torch_dtype, quick in ((T.float32, torch.float32, False), (T.float64, torch.float64, False)):
        got = torch.full_like(values[0], 7, dtype=torch_dtype)
        way(kernel_of(name, dtype, quick), torch.stack(values).to(torch_dtype), got)
        limits = {"rtol": 2e-5, "atol": 1e-6} if dtype == T.float32 else {"rtol": 1e-9, "atol": 1e-12}
        torch.testing.assert_close(got, want.to(torch_dtype), equal_nan=True, **limits)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_gradients_are_autograds(name):
    """Of finite operands, kinks and large values among them, wherever autograd's is finite."""
    values = extremes(FUNCTIONS[name].arity)
    finite = functools.reduce(torch.logical_and, [x.isfinite() for x in values])
    values = [x[finite].requires_grad_() for x in values]
    out = bind(FUNCTIONS[name].torch, torch)(*values)
    grad = torch.ones_like(out)
    if not out.requires_grad:
        assert not any(FUNCTIONS[name].gradient)
        return
    want = torch.autograd.grad(out, values, grad, allow_unused=True, materialize_grads=True)
    names = ["acc0", "x0", "x1"][: len(values)]
    got = vjp(text_of(name), dict(zip(names, values, strict=True)), grad)
    for key, expected in zip(names, want, strict=True):
        there = expected.isfinite()
        have = got.get(key, torch.zeros_like(grad))
        # torch's own has constants of float32 in it (hardsigmoid)
        torch.testing.assert_close(have[there], expected[there], rtol=1e-7, atol=1e-12)
