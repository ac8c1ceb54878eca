# SPDX-License-Identifier: Apache-2.0
"""The blocks that native sparse attention selects, against float64."""

import math

import pytest
import torch

from torch_tile.kernels.attention import forward, nsa
from torch_tile.kernels.attention.args import AttentionArgs, NsaSelectArgs
from torch_tile.kernels.attention.nsa import importance_reference, nsa_select, reference, sum_over_blocks


def problem(problems, dtype):
    batch, kv_heads, groups = problems.pick(1, 2), problems.pick(1, 2), problems.pick(1, 3, 16)
    width, stride = problems.pick(16, 32), problems.pick(4, 8)
    length, block = stride * problems.pick(1, 2), stride * problems.pick(1, 2, 3)
    keys = problems.random.randint(1, 150)
    queries = problems.pick(1, keys, problems.random.randint(1, keys))
    compressed = max(0, (keys - length) // stride + 1)
    q = problems.reordered(batch, kv_heads * groups, min(queries, 20), width, dtype=dtype)
    k = problems.reordered(batch, kv_heads, compressed, width, dtype=dtype)
    ends = torch.arange(compressed) * stride + length - 1
    seen = ends <= torch.arange(q.shape[2])[:, None] + keys - q.shape[2]
    _, lse = forward.softmax_with_lse(forward.scores(AttentionArgs(q.double(), k.double(), k, seen)))
    lse = lse.to(torch.float64 if dtype == torch.float64 else torch.float32)
    sizes = block, length, stride, problems.pick(0, 1), problems.pick(1, 2)
    return NsaSelectArgs(q, k, lse, keys, problems.pick(1, 4, 40), *sizes, problems.pick(None, 0.3))


def test_reference_is_the_definition(problems):
    """Weights as probabilities, and blocks of the largest sums, query by query."""
    args = problem(problems, torch.float64)._replace(scale=None)
    weights, lists = importance_reference(args), reference(*args)
    groups = args.q.shape[1] // args.k_cmp.shape[1]
    for b, h, t in torch.cartesian_prod(*map(torch.arange, lists.shape[:3])).tolist():
        position = args.keys - args.q.shape[2] + t
        seen = [c for c in range(args.k_cmp.shape[2]) if c * args.stride + args.length - 1 <= position]
        runs = [0.0] * (-(-args.keys // args.block) * args.block // args.stride)
        for head in range(h * groups, (h + 1) * groups):
            scores = [float(args.q[b, head, t] @ args.k_cmp[b, h, c]) * args.q.shape[3] ** -0.5 for c in seen]
            total = sum(map(math.exp, scores))
            for c, score in zip(seen, scores, strict=True):
                for run in range(c, c + args.length // args.stride):
                    runs[run] += math.exp(score) / total
        assert sum(weights[b, h, t]) == pytest.approx(groups if seen else 0.0)
        each, own = args.block // args.stride, position // args.block
        sums = [sum(runs[j * each : (j + 1) * each]) for j in range(own + 1)]
        always = [j for j in range(own + 1) if j < args.initial or j > own - args.local]
        rest = sorted((sums[j] for j in range(own + 1) if j not in always), reverse=True)
        named = [j for j in lists[b, h, t].tolist() if j >= 0]
        assert len(set(named)) == len(named) == min(args.top, own + 1)
        assert set(always) <= set(named) or len(always) > args.top
        found = sorted((sums[j] for j in named if j not in always), reverse=True)
        assert found == pytest.approx(rest[: len(found)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_random_problems(dtype, engine, problems, check, monkeypatch):
    """Weights as float64 has them; blocks are those of its largest sums."""
    seen = []

    def chosen(weights, args, original=nsa.chosen):
        seen.append(weights)
        return original(weights, args)

    monkeypatch.setattr(nsa, "chosen", chosen)
    args = problem(problems, dtype)
    got = nsa_select(*args)
    want = importance_reference(args._replace(q=args.q.double(), k_cmp=args.k_cmp.double(), lse=args.lse.double()))
    what = f"{tuple(args.q.shape)} {tuple(args.k_cmp.shape)} {args[3:]}"
    check(seen[0], want, what, torch.float32)
    assert got.dtype == torch.int32 and got.shape == (*want.shape[:3], args.top)
    sums = sum_over_blocks(want, args)
    for t in range(got.shape[2]):
        own = (args.keys - got.shape[2] + t) // args.block
        for lists, scores in zip(got[:, :, t].flatten(0, 1), sums[:, :, t].flatten(0, 1), strict=True):
            count = min(args.top, own + 1)
            named = lists[:count].long()
            assert (named >= 0).all() and (named <= own).all() and named.unique().numel() == count
            assert (lists[count:] == -1).all()
            always = [j for j in range(own + 1) if j < args.initial or j > own - args.local]
            free = [j for j in range(own + 1) if j not in always]
            found = scores[[j for j in named.tolist() if j not in always]].sort(descending=True).values
            best = scores[free].sort(descending=True).values[: len(found)]
            torch.testing.assert_close(found, best, rtol=1e-3, atol=1e-4, msg=what)
