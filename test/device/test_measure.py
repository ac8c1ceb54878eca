# SPDX-License-Identifier: Apache-2.0
"""The bound on errors: plain torch in the same dtype keeps it, and mistakes of kernels do not. Needs no GPU."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

from torch_tile.kernels.norm.norm import rms_norm_reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.fixture
def device():
    return "cpu"


@pytest.fixture
def is_right(wrong):
    return lambda got, function, inputs: wrong(got, function, inputs, inputs[0].dtype) == [None]


def linear_gelu(x, w, b):
    return F.gelu(F.linear(x, w, b))


def norm_silu(x, w):
    return F.silu(F.rms_norm(x, x.shape[-1:], w, 1e-6))


def norm(x, w):
    return rms_norm_reference(x, w, None, 1e-6, "gelu", 1.0)[0]


def attention(q, k, v, window=10**9, causal=True):
    """Eagerly, with every step rounded to the operands' dtype."""
    s = q @ k.mT * q.shape[-1] ** -0.5
    i, j = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])
    s = s.masked_fill(((j > i) & causal) | (j <= i - window), -math.inf)
    return torch.softmax(s, -1) @ v


def products(problems):
    m, n, k = problems.size(90), 16 + problems.size(74), 16 + problems.size(584)  # one element may be lucky
    return (m, k), (n, k), (n,)


def rows(problems):
    n = 16 + problems.size(2984)
    return (problems.size(30), n), (n,)


def heads(problems):
    return ((2, problems.size(200), problems.pick(16, 40, 64)),) * 3


EAGER = {linear_gelu: products, norm_silu: rows, norm: rows, attention: heads}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", EAGER, ids=lambda f: f.__name__)
def test_plain_torch_is_right(function, dtype, problems, is_right):
    for _ in range(25):
        shapes = EAGER[function](problems)
        # Of slices, products of 16 bits in torch's CPU build read past the end on some processors, where NaN lies here.
        inputs = [problems.tensor(*shape, dtype=dtype, layout="dense") for shape in shapes]
        exact = function if function is not norm else functools.partial(with_rounded_weight, dtype)
        assert is_right(function(*inputs), exact, inputs), shapes


def with_rounded_weight(dtype, x, w):
    """The sum of weight and offset is rounded to the weight's dtype."""
    return rms_norm_reference(x, (w + 1).to(dtype).to(x.dtype), None, 1e-6, "gelu")[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mistakes_in_products(dtype, problems, is_right):
    a, b = problems.tensor(300, 900, dtype=dtype), problems.tensor(900, 200, dtype=dtype)
    right = a @ b
    assert is_right(right, torch.matmul, (a, b))
    without = a.clone()
    without[:, 320:336] = 0
    assert not is_right(without @ b, torch.matmul, (a, b))  # a step of K left out
    without = a.clone()
    without[:, 899] = 0
    assert not is_right(without @ b, torch.matmul, (a, b))  # its ragged end
    twice = a.clone()
    twice[64:128, 32:48] = a[64:128, :16]
    assert not is_right(twice @ b, torch.matmul, (a, b))  # a tile of a that was not there yet
    stale = right.clone()
    stale[16:24, 8:16] = right[:8, :8]
    assert not is_right(stale, torch.matmul, (a, b))  # one fragment of the result
    holed = right.clone()
    holed[299, 199] = math.nan
    assert not is_right(holed, torch.matmul, (a, b))  # an element that nobody wrote


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mistakes_in_attention(dtype, problems, is_right):
    q, k, v = (problems.tensor(2, 400, 64, dtype=dtype) for _ in "qkv")
    assert is_right(attention(q, k, v), attention, (q, k, v))
    assert not is_right(attention(q, k, v, causal=False), attention, (q, k, v))  # no mask
    windowed = functools.partial(attention, window=200)
    assert not is_right(attention(q, k, v, window=201), windowed, (q, k, v))  # one key too many
    late = v.clone()
    late[:, 128:192] = v[:, 64:128]
    assert not is_right(attention(q, k, late), attention, (q, k, v))  # a tile of v that was not there yet
    late = k.clone()
    late[1, 320:384] = k[1, 256:320]
    assert not is_right(attention(q, late, v), attention, (q, k, v))
    if dtype.itemsize > 2:
        half = attention(q.half().to(dtype), k.half().to(dtype), v.half().to(dtype))
        assert not is_right(half, attention, (q, k, v))  # computed in a smaller dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mistakes_in_rows(dtype, problems, is_right):
    x, w = problems.tensor(30, 2000, dtype=dtype), problems.tensor(2000, dtype=dtype)
    assert is_right(norm_silu(x, w), norm_silu, (x, w))
    assert not is_right(norm_silu(x[:, :1900], w[:1900]), norm_silu, (x, w))  # too short
    if dtype != torch.bfloat16:  # which has two digits only
        short = F.rms_norm(x, (2000,), None, 1e-6) * 0.95**-0.5
        assert not is_right(F.silu(short * w), norm_silu, (x, w))  # a tail left out of the mean
    assert not is_right(norm_silu(x, w.roll(8)), norm_silu, (x, w))
    assert not is_right(torch.softmax(x[:, :1000], -1), lambda x: torch.softmax(x, -1)[:, :1000], (x,))  # half a sum
