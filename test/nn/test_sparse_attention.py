# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention, forward and backward, against float64 attention under masks of all pairs."""

import math
import random

import pytest
import torch

from torch_tile.nn import parallel_nsa


def branch(q, k, v, seen):
    """Attention `[B, T, H, Dv]` under a mask that broadcasts to `[B, H, T, S]`, and its probabilities."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = (torch.einsum("bthd,bshd->bhts", q, k) * q.shape[3] ** -0.5).masked_fill(~seen, -math.inf)
    empty = (~seen).all(-1, keepdim=True)
    chances = scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
    return torch.einsum("bhts,bshd->bthd", chances, v), chances


def dense(q, k, v, k_cmp, v_cmp, gates, sizes, listed=None):
    """All branches, with the choice of blocks written out."""
    block, count, window, length, stride = sizes
    heads, kv_heads, keys = q.shape[2], k.shape[2], k.shape[1]
    position = (torch.arange(q.shape[1]) + keys - q.shape[1])[:, None]
    key, number = torch.arange(keys), torch.arange(-(-keys // block))
    end = torch.arange(k_cmp.shape[1]) * stride + length - 1
    out, chances = branch(q, k_cmp, v_cmp, (end <= position)[None, None])
    weights = chances.unflatten(1, (kv_heads, heads // kv_heads)).sum(2)
    # A block's share: how many runs of a compressed key lie in it.
    run = torch.arange(k_cmp.shape[1])[:, None] + torch.arange(length // stride)
    share = (run[..., None] * stride // block == number).sum(1).to(weights.dtype)
    sums, own = weights @ share, position // block
    sums = sums.masked_fill((number < 1) | ((number > own - 2) & (number <= own)), math.inf)
    values, places = sums.masked_fill(number > own, -math.inf).topk(min(count, len(number)), -1)
    chosen = torch.zeros_like(sums, dtype=torch.bool).scatter(-1, places, values > -math.inf)
    if listed is not None:
        chosen = torch.stack([(listed == n).any(-1) for n in number], -1).transpose(1, 2)
    seen = chosen.repeat_interleave(block, -1)[..., :keys] & (key <= position)
    selected, _ = branch(q, k, v, seen.repeat_interleave(heads // kv_heads, 1))
    near, _ = branch(q, k, v, ((key <= position) & (key > position - window))[None, None])
    return sum(part * gate[..., None] for part, gate in zip((out, selected, near), gates, strict=True))


class Problems:
    """Sizes and tensors from a seed."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def pick(self, *options):
        return self.random.choice(options)

    def tensor(self, *shape, dtype=torch.float32):
        """Normal numbers, dense or with their second and third dimensions turned."""
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64).to(dtype)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if self.pick(True, False) else x


@pytest.fixture
def problems(seed):
    return Problems(seed)


def problem(problems, dtype=torch.float32):
    kv_heads, groups = problems.pick(1, 2), problems.pick(1, 3, 16)
    batch, keys, width = problems.pick(1, 2), problems.random.randint(1, 120), problems.pick(8, 24)
    queries = problems.pick(keys, keys, problems.random.randint(1, keys))
    q = problems.tensor(batch, queries, kv_heads * groups, width, dtype=dtype)
    k, v = (problems.tensor(batch, keys, kv_heads, n, dtype=dtype) for n in (width, 16))
    gates = [torch.rand(batch, queries, kv_heads * groups, generator=problems.generator).to(dtype) for _ in range(3)]
    return [q, k, v, *gates], problems.pick(16, 32), problems.pick(1, 3, 9), problems.random.randint(1, 40)


def check(got, want, inputs, exact, tolerance):
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    grad = torch.randn_like(want)
    found = torch.autograd.grad(got, inputs, grad.to(got.dtype))
    for a, b in zip(found, torch.autograd.grad(want, exact, grad), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("compressed", [False, True])
def test_random_problems(compressed, problems):
    """Compressed keys as means of blocks, or given, of runs that overlap."""
    inputs, block, count, window = problem(problems)
    inputs = [x.detach().requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    length, stride = (16, 8) if compressed else (block, block)
    number = max(0, (inputs[1].shape[1] - length) // stride + 1)
    if not compressed:
        more, wide = [], [x[:, : number * block].unflatten(1, (number, block)).mean(2) for x in exact[1:3]]
    else:
        more = [problems.tensor(x.shape[0], number, *x.shape[2:]).requires_grad_() for x in inputs[1:3]]
        wide = [x.detach().double().requires_grad_() for x in more]
        more = [*more, length, stride]
    got = parallel_nsa(*inputs, None, count, block, window, None, None, *more)
    want = dense(*exact[:3], *wide, exact[3:], (block, count, window, length, stride))
    check(got, want, inputs + more[:2], exact + (wide if compressed else []), 1e-4)


def test_given_blocks(problems):
    """Lists with gaps, and gates that are left out."""
    inputs, block, _, _ = problem(problems, torch.float64)
    q, k, v = inputs[:3]
    position = torch.arange(q.shape[1]) + k.shape[1] - q.shape[1]
    listed = torch.arange(-(-k.shape[1] // block)).expand(q.shape[0], q.shape[1], k.shape[2], -1)
    keep = torch.rand(listed.shape, generator=problems.generator) < 0.6
    listed = listed.masked_fill(~keep | (listed * block > position[:, None, None]), -1)
    gates = [torch.zeros(q.shape[:3]), torch.ones(q.shape[:3]), torch.zeros(q.shape[:3])]
    want = dense(q, k, v, k[:, :0], v[:, :0], gates, (block, 1, 1, block, block), listed)
    torch.testing.assert_close(parallel_nsa(q, k, v, block_indices=listed.int(), block_size=block), want)


def test_refused():
    q = k = torch.zeros(1, 16, 1, 8)
    with pytest.raises(ValueError, match="cu_seqlens"):
        parallel_nsa(q, k, k, cu_seqlens=torch.zeros(2))
    with pytest.raises(ValueError, match="one of k_cmp and v_cmp is None"):
        parallel_nsa(q, k, k, k_cmp=k)
    with pytest.raises(ValueError, match="cmp_stride is 8"):
        parallel_nsa(q, k, k, cmp_length=16, cmp_stride=8)
    with pytest.raises(ValueError, match="block_kv is 8"):
        parallel_nsa(q, k, k, block_size=8)
