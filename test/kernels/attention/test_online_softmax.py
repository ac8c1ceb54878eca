# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

import torch_tile.language as T
from torch_tile.kernels.attention.online_softmax import exponentiate


def of_blocks(slack, lows=False):
    @T.prim_func
    def blockwise(
        X: T.Tensor((6, 24), "float32"),
        Y: T.Tensor((6, 24), "float32"),
        Z: T.Tensor((6,), "float32"),
        P: T.Tensor((3, 2, 6), "float32"),
    ):
        """Y: exponentials; Z: the denominators of a softmax in powers of two, from blocks; P: `peak` and `fade`."""
        with T.Kernel(1) as _:
            scores = T.alloc_fragment((6, 8), "float32")
            peak = T.alloc_fragment((6,), "float32")
            total = T.alloc_fragment((6,), "float32")
            fade = T.alloc_fragment((6,), "float32")
            T.fill(peak, -T.infinity("float32"))
            T.clear(total)
            for step in T.serial(3):
                T.copy(X[0, step * 8], scores)
                exponentiate(scores, peak, total, fade, 0.5, slack=slack, lows=lows)
                T.copy(scores, Y[0, step * 8])
                T.copy(peak, P[step, 0, :])
                T.copy(fade, P[step, 1, :])
            for i in T.Parallel(6):
                Z[i] = peak[i] * 0.5 + T.log2(total[i])

    return blockwise


def run(engine, slack, x, lows=False):
    from torch_tile.jit import compile
    from torch_tile.simulator.tile.interpreter import evaluate

    y, z, p = torch.empty(6, 24), torch.empty(6), torch.empty(3, 2, 6)
    launch = evaluate if engine == "interpreter" else lambda f, *args: compile(f, target="cpu")(*args)
    launch(of_blocks(slack, lows), x, y, z, p)
    want = torch.logsumexp(x.double() * 0.5 * math.log(2), 1) / math.log(2)
    torch.testing.assert_close(z.double(), want, rtol=1e-5, atol=1e-5)
    return y, p[:, 0].T, p[:, 1].T


def some_scores():
    x = torch.randn(6, 24) * 20
    x[0], x[1, :8], x[2, 8:] = -torch.inf, -torch.inf, -torch.inf
    return x


@pytest.mark.parametrize("lows", [False, True])
def test_blocks_make_the_whole(lows, engine):
    x = some_scores()
    if lows:
        x[3, :8], x[4, 8:], x[5] = (torch.finfo(torch.float32).min,) * 3
    y, peak, _ = run(engine, 0.0, x, lows)
    seen = x.view(6, 3, 8).amax(2).cummax(1).values
    assert torch.equal(peak, seen)
    want = ((x.double().view(6, 3, 8) - seen.masked_fill(seen.isneginf(), 0)[..., None]) * 0.5).exp2().view(6, 24)
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("slack", [3.0, 8.0])
def test_maxima_that_grow_little_are_not_followed(engine, slack):
    x = some_scores()
    x[3, :8], x[3, 8:16], x[3, 16:] = 0.0, 2 * slack - 0.5, 2 * slack + 0.5  # in powers of two half of that
    y, peak, fade = run(engine, slack, x)
    assert peak[3].tolist() == [0, 0, 2 * slack + 0.5]
    assert (y <= 2**slack).all() and y[3, 8] > 2 ** (slack - 1)
    before = torch.cat([torch.full((6, 1), -torch.inf), peak[:, :2]], 1)
    assert (fade[peak == before] == 1).all()
    torch.testing.assert_close(fade, ((before - peak) * 0.5).exp2().nan_to_num(nan=1.0), rtol=1e-5, atol=1e-7)
