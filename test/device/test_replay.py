# SPDX-License-Identifier: Apache-2.0
"""Compiled models on a GPU: calls that are replayed compute what the first ones did, on any stream, in CUDA graphs."""

import functools

import pytest
import torch
from torch._dynamo.utils import counters

from torch_tile.inductor.backend import tile
from torch_tile.ops import launchers

pytestmark = pytest.mark.cuda

TILE = functools.partial(tile, options={"select": "tile"})


class Block(torch.nn.Module):
    """Norms, products, attention: every site is met twice, since there are two layers."""

    def __init__(self, width=256, heads=4):
        super().__init__()
        make = functools.partial(torch.nn.Linear, bias=False)
        self.heads, self.norm, self.second_norm = heads, torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)
        self.qkv, self.o = make(width, 3 * width), make(width, width)
        self.gate, self.up, self.down = make(width, 2 * width), make(width, 2 * width), make(2 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.second_norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


@pytest.fixture
def model():
    torch.manual_seed(0)
    torch._dynamo.reset()
    return torch.nn.Sequential(Block(), Block()).eval().to("cuda", torch.bfloat16)


def check(run, model, x):
    got, want = run(x), model(x)
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)


def test_replayed_calls_compute_the_same(model, long_ways):
    run = torch.compile(model, backend=TILE)
    with torch.no_grad():
        for turn in range(6):
            check(run, model, torch.randn(2, 64, 256, device="cuda", dtype=torch.bfloat16))
            if turn == 1:
                met = len(long_ways)
    assert met > 0 and len(long_ways) == met


def test_sizes_that_come_back(model):
    run = torch.compile(model, backend=TILE, dynamic=True)
    with torch.no_grad():
        for length in (64, 40, 64, 7, 40, 64, 7, 7):
            check(run, model, torch.randn(2, length, 256, device="cuda", dtype=torch.bfloat16))


def test_cuda_graphs(model):
    counters.clear()
    run = torch.compile(model, backend=functools.partial(tile, mode="reduce-overhead", options={"select": "tile"}))
    with torch.no_grad():
        for _ in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            check(run, model, torch.randn(2, 64, 256, device="cuda", dtype=torch.bfloat16))
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_the_current_stream(model):
    run, x = torch.compile(model, backend=TILE), torch.randn(2, 64, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(3):
            want = run(x)
        side, busy = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
        late = torch.empty_like(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for _ in range(8):
                busy = busy @ busy * 1e-3
            late.copy_(x)  # a call that did not wait for this would read something else
            got = run(late)
        torch.cuda.synchronize()
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_workspaces(long_ways):
    """A decoding step of few queries splits the keys; its parts lie in a workspace that others write between calls."""
    q, k, v = (
        torch.randn(1, h, n, 128, device="cuda", dtype=torch.bfloat16) for h, n in ((32, 1), (8, 4096), (8, 4096))
    )
    out = torch.empty_like(q)
    site = launchers.site("tttt", lambda q, k, v, out: launchers.attention(q, k, v, out=out))
    for _ in range(6):
        q.normal_()
        site(q, k, v, out)
        torch.full((64 * 2**20,), float("nan"), device="cuda")
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        torch.testing.assert_close(out, want, rtol=0.02, atol=0.02)
    assert len(long_ways) == 2
