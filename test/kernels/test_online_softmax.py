# SPDX-License-Identifier: Apache-2.0
import torch

import torch_tile.language as T
from torch_tile.kernels.online_softmax import exponentiate


@T.prim_func
def blockwise(X: T.Tensor((6, 24), "float32"), Y: T.Tensor((6, 24), "float32"), Z: T.Tensor((6,), "float32")):
    """Y: exponentials relative to the maxima so far; Z: the denominators of a softmax in powers of two, from blocks."""
    with T.Kernel(1) as _:
        scores = T.alloc_fragment((6, 8), "float32")
        peak = T.alloc_fragment((6,), "float32")
        total = T.alloc_fragment((6,), "float32")
        fade = T.alloc_fragment((6,), "float32")
        T.fill(peak, -T.infinity("float32"))
        T.clear(total)
        for step in T.serial(3):
            T.copy(X[0, step * 8], scores)
            exponentiate(scores, peak, total, fade, 0.5)
            T.copy(scores, Y[0, step * 8])
        for i in T.Parallel(6):
            Z[i] = peak[i] * 0.5 + T.log2(total[i])


def test_blocks_make_the_whole(engine):
    from torch_tile.interp.tiles import evaluate
    from torch_tile.jit import compile

    x = torch.randn(6, 24) * 20
    x[0], x[1, :8], x[2, 8:] = -torch.inf, -torch.inf, -torch.inf
    y, z = torch.empty(6, 24), torch.empty(6)
    run = evaluate if engine == "interpreter" else lambda f, *args: compile(f, target="cpu")(*args)
    run(blockwise, x, y, z)
    torch.testing.assert_close(z.double(), (x.double() * 0.5).exp2().sum(1).log2(), rtol=1e-5, atol=1e-5)
    seen = x.view(6, 3, 8).amax(2).cummax(1).values
    want = ((x.view(6, 3, 8) - seen.masked_fill(seen.isneginf(), 0)[..., None]) * 0.5).exp2().view(6, 24)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-6)
