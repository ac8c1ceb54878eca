# SPDX-License-Identifier: Apache-2.0
"""Blocks as models in plain torch write them: everything that has a kernel is found, at static and dynamic sizes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_tile.inductor.compat import no_graph_caches
from torch_tile.inductor.dry_run import dry_run
from torch_tile.inductor.report.rows import collect

WIDTH, HEADS = 96, 4


def split_heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class FusedProjection(nn.Module):
    """q, k and v from one product: chunked, split or unbound."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.qkv(x)
        if self.how == "chunk":
            q, k, v = (split_heads(t) for t in y.chunk(3, -1))
        elif self.how == "split":
            q, k, v = (split_heads(t) for t in y.split(WIDTH, -1))
        else:
            q, k, v = y.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        p = F.softmax((q * 0.2) @ k.mT, dim=-1, dtype=torch.float32).to(q.dtype)
        return self.out((p @ v).transpose(1, 2).flatten(2))


class FoldedHeads(nn.Module):
    """Batch and heads in one dimension, scores by baddbmm, as diffusion models wrote it; keys of another sequence."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        context = x[:, ::2]
        q, k, v = (split_heads(m(t)).flatten(0, 1) for m, t in ((self.q, x), (self.k, context), (self.v, context)))
        empty = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype)
        p = torch.baddbmm(empty, q, k.transpose(1, 2), beta=0, alpha=0.2).softmax(-1)
        return self.out(torch.bmm(p, v).unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2))


class Spatial(nn.Module):
    """Attention over the pixels of an image, values on the left of the probabilities; group norm and convolutions."""

    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(8, WIDTH)
        self.q, self.k, self.v, self.out = (nn.Conv2d(WIDTH, WIDTH, 1) for _ in range(4))

    def forward(self, x):
        x = x.transpose(1, 2).unflatten(2, (2, -1))
        h = self.norm(x)
        q, k, v = (m(h).flatten(2) for m in (self.q, self.k, self.v))
        p = torch.softmax(torch.bmm(q.permute(0, 2, 1), k) * WIDTH**-0.5, dim=2)
        return x + self.out(torch.bmm(v, p.permute(0, 2, 1)).view_as(x))


class Modulated(nn.Module):
    """A transformer block whose norms have no weights: scale, shift and gate come from a condition."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
        self.attention = FusedProjection("unbind")
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        parts = self.modulation(F.silu(x[:, 0])).unsqueeze(1).chunk(6, -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        x = x + gate1 * self.attention(self.norm(x) * (1 + scale1) + shift1)
        h = self.norm(x) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(h), approximate="tanh"))


# Module: (attentions, products, norms) that must be found, and what may be missed.
BLOCKS = {
    "chunk": (lambda: FusedProjection("chunk"), (1, 2, 0), ""),
    "split": (lambda: FusedProjection("split"), (1, 2, 0), ""),
    "unbind": (lambda: FusedProjection("unbind"), (1, 2, 0), ""),
    "folded heads": (FoldedHeads, (1, 4, 0), ""),
    "spatial": (Spatial, (1, 0, 0), "GroupNorm"),
    "modulated": (Modulated, (1, 5, 2), ""),
    "encoder": (lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True), (1, 4, 2), ""),
}


def is_traced(block, x):
    """Whether torch itself makes one graph of a module with unknown sizes."""
    torch._dynamo.reset()
    try:
        with torch.no_grad():
            torch.compile(block, backend="eager", dynamic=True, fullgraph=True)(x)
    except torch._dynamo.exc.TorchDynamoException:
        return False
    return True


@pytest.mark.parametrize(("dtype", "dynamic"), [(torch.float32, None), (torch.float32, True), (torch.bfloat16, None)])
@pytest.mark.parametrize("name", BLOCKS)
def test_block(name, dtype, dynamic):
    make, counts, missed = BLOCKS[name]
    block, x = make().eval().to(dtype), torch.randn(3, 10, WIDTH, dtype=dtype)
    fast = torch.compile(
        block, backend=lambda gm, inputs: dry_run(gm, inputs, options={"select": "tile"}), dynamic=dynamic
    )
    with torch.no_grad(), no_graph_caches():
        with collect() as report:
            got = fast(x)
        eager, truth = block(x), copy.deepcopy(block).double()(x.double())
    if name == "encoder" and dynamic and not report.rows and not is_traced(block, x):
        pytest.skip("this torch runs its encoder layer in eager mode if sizes are unknown")
    found = tuple(len(report.replaced(family)) for family in ("attention", "gemm", "norm"))
    assert found == counts, report
    assert all(missed and missed in r.reason for r in report.missed()), report
    if dtype == torch.float32:
        torch.testing.assert_close(got, eager, rtol=1e-4, atol=1e-5)
    else:
        assert (got - truth).norm() <= 1.5 * (eager - truth).norm()
