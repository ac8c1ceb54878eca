# SPDX-License-Identifier: Apache-2.0
"""`torch.compile(backend="tile")` on CUDA modules against float64, each compiled once for random sizes."""

import functools

import pytest
import torch
import torch.nn.functional as F

from torch_tile.inductor.backend import tile
from torch_tile.inductor.report.rows import collect

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("poisoned", "kernels_ran")]
TILE = functools.partial(tile, options={"select": "tile"})


def linear_gelu(x, w, b):
    return F.gelu(F.linear(x, w, b))


def swiglu(x, w, u):
    return F.silu(F.linear(x, w)) * F.linear(x, u)


def bias_residual(x, w, b, residual):
    return F.linear(x, w, b) + residual


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def grouped_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def add_rms_norm(x, residual, w):
    total = x + residual
    return F.rms_norm(total, (x.shape[-1],), w, 1e-6), total


def rms_norm_silu(x, w):
    return F.silu(F.rms_norm(x, (x.shape[-1],), w, 1e-6))


def layer_norm(x, w, b):
    return F.layer_norm(x, (x.shape[-1],), w, b)


def softmax(x):
    return torch.softmax(x, -1)


def matrices(problems, count):
    m, n, k = problems.random.randint(2, 300), problems.random.randint(2, 300), problems.random.randint(2, 300)
    return (m, k), *[(n, k)] * count, (n,)


def rows(problems, count):
    m, n = problems.random.randint(2, 100), problems.random.randint(2, 3000)
    return (m, n), *[(n,)] * count


def heads(problems):
    b, h, s = problems.random.randint(2, 3), problems.random.randint(2, 4), problems.random.randint(2, 400)
    return ((b, h, s, 64),) * 3


def grouped_heads(problems):
    b, h, s, keys = (problems.random.randint(2, most) for most in (3, 4, 300, 400))
    return (b, 4 * h, s, 64), (b, h, keys, 64), (b, h, keys, 64)


def with_residual(problems):
    x, w, b = matrices(problems, 1)
    return x, w, b, (x[0], w[0])


CASES = {
    linear_gelu: lambda p: matrices(p, 1),
    swiglu: lambda p: matrices(p, 2)[:3],
    bias_residual: with_residual,
    attention: heads,
    grouped_attention: grouped_heads,
    add_rms_norm: lambda p: (lambda x, w: (x, x, w))(*rows(p, 1)),
    rms_norm_silu: lambda p: rows(p, 1),
    layer_norm: lambda p: rows(p, 2),
    softmax: lambda p: rows(p, 0),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_random_sizes(function, dtype, problems, check, kernels_ran):
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=TILE, dynamic=True)
    met = set()
    with torch.no_grad(), collect() as report:
        for _ in range(problems.count):
            args = [problems.tensor(*shape, dtype=dtype, layout="dense") / 4 for shape in CASES[function](problems)]
            before = len(kernels_ran)
            got = compiled(*args)
            what = f"{function.__name__} {[tuple(x.shape) for x in args]}"
            # The third call with the same sizes is replayed, which nobody is told of.
            assert len(kernels_ran) > before or what in met, f"{what}: no tile kernel took part"
            met.add(what)
            check(got, function, args, what, dtype)
    assert report.replaced()
