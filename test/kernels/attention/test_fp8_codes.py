# SPDX-License-Identifier: Apache-2.0
"""Float8 weights from scores by their codes, against float64."""

import math

import pytest
import torch

import torch_tile.language as T
from torch_tile.hardware import Target
from torch_tile.kernel import JITKernel
from torch_tile.kernels.attention import forward, fp8
from torch_tile.kernels.attention.args import AttentionFp8Args
from torch_tile.kernels.attention.fp8 import encode_weights, key_at, widened
from torch_tile.kernels.attention.softmax import begin_rows
from torch_tile.kernels.common import Machine
from torch_tile.simulator.tile.interpreter import evaluate

E4M3 = torch.float8_e4m3fn
ROWS, KEYS, BLOCKS = 64, 32, 3
LARGEST_WEIGHT = 256
HOPPER, BLACKWELL = Machine(Target("cuda", 90), 132), Machine(Target("cuda", 120), 84)


@T.prim_func
def encode(
    X: T.Tensor((ROWS, BLOCKS * KEYS), "float32"),
    W: T.Tensor((ROWS, BLOCKS * KEYS), "float8_e4m3fn"),
    B: T.Tensor((BLOCKS, ROWS), "float32"),
    R: T.Tensor((BLOCKS, ROWS), "float32"),
    scale: T.float32,
    few: T.int32,
):
    """W: weights of blocks in the order of `key_at`; B: their bases; R: what earlier sums are worth."""
    with T.Kernel(1, threads=128) as _:
        scores = T.alloc_fragment((ROWS, KEYS), "float32")
        probs = T.alloc_fragment((ROWS, KEYS), "float8_e4m3fn")
        row_max, base, rescale = (T.alloc_fragment((ROWS,), "float32") for _ in range(3))
        begin_rows(row_max, base)
        for step in T.serial(BLOCKS):
            T.copy(X[0, step * KEYS], scores)
            encode_weights(scores, row_max, base, rescale, probs, scale, few != 0)
            T.copy(probs, W[0, step * KEYS])
            T.copy(base, B[step, :])
            T.copy(rescale, R[step, :])


def encoded(engine, x, scale, exact):
    """Return weights `[row, block, key]` in the order of keys, bases and factors `[row, block]`, all as float64."""
    w, b, r = torch.empty(x.shape, dtype=E4M3), torch.empty(BLOCKS, ROWS), torch.empty(BLOCKS, ROWS)
    if engine == "interpreter":
        evaluate(encode, x, w, b, r, scale, int(exact))
    else:
        from torch_tile.jit import compile

        compile(encode, target="cpu")(x, w, b, r, scale, int(exact))
    order = torch.tensor([key_at(n) for n in range(KEYS)])
    weights = torch.empty(ROWS, BLOCKS, KEYS, dtype=torch.float64)
    weights[..., order] = w.double().view(ROWS, BLOCKS, KEYS)
    return weights, b.T.double(), r.T.double()


def some_scores(scale):
    """Rows of small and wide spread, of -inf in whole blocks, with one large score, and of numbers far from 0."""
    x = torch.randn(ROWS, BLOCKS * KEYS) * torch.rand(ROWS, 1) * 40 / scale
    x[0], x[1, :KEYS], x[2, KEYS:], x[3, KEYS : 2 * KEYS] = (-math.inf,) * 4
    x[4:8, 0], x[8:12, -1] = 60 / scale, 60 / scale
    x[12:20] += torch.randn(8, 1) * 1000 / scale
    return x


@pytest.mark.parametrize("exact", [True, False])
def test_weights_are_near_powers_of_two(engine, exact):
    scale = float(torch.rand(()) + 0.05)
    x = some_scores(scale)
    weights, base, rescale = encoded(engine, x, scale, exact)
    exponents = x.double().view(ROWS, BLOCKS, KEYS) * torch.tensor(scale).double()
    top = exponents.amax(2).clamp_min(-1e30)
    run = top.cummax(1).values
    seen = run > -1e29
    want_base = torch.maximum(top, run - fp8.REACH)
    torch.testing.assert_close(base[seen], want_base[seen], rtol=1e-6, atol=1e-4)
    want = (exponents + 8 - base.clamp_min(-1e30)[..., None]).exp2()
    normal, error = want >= 2**-6, weights - want
    slack = 1e-3  # of exponents near 1000 in float32
    assert (error.abs() <= want * (0.0795 + slack))[normal].all()
    assert (error.abs() <= 2**-6.8)[~normal].all()
    assert (error / want)[normal].mean().abs() < 0.006  # 0.04 without the centre
    assert (error / want)[normal].pow(2).mean().sqrt() < 0.034
    largest = (top > -1e29) & (top >= run - fp8.REACH)
    assert (weights.amax(2)[largest] == LARGEST_WEIGHT).all()
    assert (weights[~(exponents > -1e29)] == 0).all()
    before = torch.cat([torch.full((ROWS, 1), torch.finfo(torch.float32).min).double(), base[:, :-1]], 1)
    torch.testing.assert_close(rescale, (before - base).exp2(), rtol=1e-3, atol=1e-30)


def test_large_scores_give_their_largest_alone(engine):
    """From 2 ** 23 on, exponents of neighbours among float32 numbers differ by 0.5 or more."""
    x = torch.randn(ROWS, BLOCKS * KEYS) + 2.0
    x *= torch.where(torch.rand(ROWS, 1) < 0.5, 2.0**30, -(2.0**26))
    x[0, :KEYS] = -math.inf
    weights, _, rescale = encoded(engine, x, 1.3, False)
    x = x.view(ROWS, BLOCKS, KEYS)
    top = x.amax(2)
    run = top.cummax(1).values
    leads = (top == run) & (top > -math.inf)
    first, large = (x == top[..., None]) & leads[..., None], (run * 1.3).abs() >= 2**23
    assert torch.equal(weights > 0, first)
    assert (weights[first & large[..., None]] == LARGEST_WEIGHT).all()
    assert ((weights[first] / LARGEST_WEIGHT).log2().abs() <= 0.5).all()  # as exponents are rounded there
    assert (rescale[~leads] >= 1).all() and not rescale.isnan().any()


def test_nan_stays_in_its_row(engine):
    x = some_scores(0.3)
    x[30, 5], x[31, -1] = math.nan, math.nan
    weights, base, _ = encoded(engine, x, 0.3, True)
    assert weights[30].isnan().all() and weights[31, 2].isnan().all() and base[30].isnan().all()
    assert not weights[32:].isnan().any() and not weights[:30].isnan().any() and not weights[31, :2].isnan().any()


@pytest.fixture
def by_threads(monkeypatch, request):
    """Run the kernels thread by thread, for the machine of the test's parameter."""
    monkeypatch.setattr(fp8, "machine_of", lambda x: request.getfixturevalue("machine"))

    def call(kernel, *args):
        assert not kernel.interpret(*args)

    monkeypatch.setattr(JITKernel, "__call__", call)


@pytest.mark.parametrize("machine", [HOPPER, BLACKWELL], ids=lambda m: m.target.arch)
@pytest.mark.parametrize("scale", [1e9, -1e9, 1e-37, 30.0])
def test_scales_of_any_size(by_threads, machine, scale, problems):
    q, k, v = (problems.tensor(1, h, n, 64, layout="dense").to(E4M3) for h, n in ((1, 70), (1, 150), (1, 150)))
    args = AttentionFp8Args(q, k, v, None, None, None, True, scale, 0, 80, torch.float32)
    out, lse = fp8.attention_fp8(*args)
    want, want_lse = forward.reference(*widened(args, torch.float64))
    # But at 30, weights are powers of two or 0, whose codes are exact.
    lse_bound, bound = (0.1, 0.5) if scale == 30 else (1e-4, 2e-2)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=lse_bound)
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=bound)


@pytest.mark.parametrize("machine", [HOPPER], ids=["sm_90a"])
def test_nan_of_operands(by_threads, machine, problems):
    q, k, v = (problems.tensor(1, h, n, 64, layout="dense") for h, n in ((1, 70), (1, 150), (1, 150)))
    q[0, 0, 3, 5], k[0, 0, 100, 0], v[0, 0, 5, 7] = math.nan, math.nan, math.nan
    args = AttentionFp8Args(*(x.to(E4M3) for x in (q, k, v)), causal=True, q_offset=80, dtype=torch.float32)
    out, lse = fp8.attention_fp8(*args)
    want, want_lse = forward.reference(*widened(args, torch.float64))
    assert torch.equal(lse.isnan(), want_lse.isnan())
    assert torch.equal(out.isnan(), want.isnan()) and not out.isnan().all()


@pytest.mark.parametrize("machine", [HOPPER, BLACKWELL], ids=lambda m: m.target.arch)
def test_equal_values_are_results(by_threads, machine, problems):
    """Sums are those of rounded weights, so that what all weights have in common cancels."""
    q, k = (problems.tensor(1, 2, n, 32, layout="dense").to(E4M3) for n in (40, 333))
    v = torch.full((1, 2, 333, 17), 1.75).to(E4M3)
    out, _ = fp8.attention_fp8(*AttentionFp8Args(q, k, v, dtype=torch.float32))
    torch.testing.assert_close(out, torch.full_like(out, 1.75), rtol=1e-5, atol=0)
