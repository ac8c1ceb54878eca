# SPDX-License-Identifier: Apache-2.0
"""Masks of attention in training become rules and texts, and copied heads are shared: both directions know of it."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from torch_tile.inductor import context
from torch_tile.inductor.backend import tile
from torch_tile.inductor.compat import no_caches
from torch_tile.inductor.dry_run import dry_run
from torch_tile.inductor.patterns.attention import joint_masks
from torch_tile.inductor.report.rows import collect

LOW = torch.finfo(torch.float32).min


def positions(q):
    return torch.arange(q.shape[2], device=q.device)


def causal(q, given):
    i = positions(q)
    return i[:, None] >= i[None, :]


def causal_and_padded(q, given):
    return causal(q, given) & given.bool()[:, None, None, :]


def window_and_padded(q, given):
    i = positions(q)
    return causal_and_padded(q, given) & (i[None, :] > i[:, None] - 4)


def added(q, given):
    return torch.zeros(q.shape[2], q.shape[2]).masked_fill(~causal(q, given), LOW)


def padded(q, given):
    return ((given - 1) * 1e9)[:, None, None, :].to(q.dtype)


def documents(q, given):
    return causal(q, given) & (given[:, None, :, None] == given[:, None, None, :])


MASKS = {  # what is said of it, in both directions
    causal: "causal)",
    causal_and_padded: "causal, score v0=where(x0,acc0,-inf);ret v0)",
    window_and_padded: "causal, window 4, score v0=where(x0,acc0,-inf);ret v0)",
    added: "causal)",
    padded: "mask)",
    documents: "causal, mask)",
}


def attend(q, k, v, given, mask):
    m = mask(q, given)
    return F.scaled_dot_product_attention(q.sin(), k, v, m.expand(q.shape[0], 1, *q.shape[2:3] * 2)).cos()


def operands(length=9):
    q, k, v = (torch.randn(2, 3, length, 16).requires_grad_() for _ in range(3))
    given = torch.ones(2, length, dtype=torch.int64)
    given[1, -2:] = 0
    return q, k, v, given


def run(f, *problems, dynamic=None, backend=dry_run, graphs=("forward", "backward")):
    """The rows of a function that is compiled once for all problems, whose gradients are eager's."""
    torch._dynamo.reset()
    compiled = torch.compile(
        f, backend=functools.partial(backend, options={"select": "tile", "families": ["attention"]}), dynamic=dynamic
    )
    with no_caches(), collect() as report:
        for args in problems:
            wanted = [x for x in args if x.requires_grad]
            found, want = (torch.autograd.grad(call(*args).square().sum(), wanted) for call in (compiled, f))
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    rows = report.replaced("attention")
    assert [r.graph for r in rows] == list(graphs)
    return [r.what for r in rows]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.__name__)
def test_what_is_said(mask, dynamic):
    lengths = (9, 12) if dynamic else (9,)
    rows = run(functools.partial(attend, mask=mask), *map(operands, lengths), dynamic=dynamic)
    assert all(row.endswith(MASKS[mask]) for row in rows), rows


def test_what_is_learned_stays():
    q, k, v, _ = operands()
    bias = torch.randn(3, 9, 9, requires_grad=True)

    def f(q, k, v, bias):
        return F.scaled_dot_product_attention(q, k, v, bias.masked_fill(~causal(q, None), -torch.inf))

    assert all(row.endswith("mask)") for row in run(f, (q, k, v, bias)))


def test_under_checkpoints():
    def f(*args):
        return checkpoint(attend, *args, causal_and_padded, use_reentrant=False)

    rows = run(f, operands(), graphs=("forward", "backward", "backward"))
    assert all(row.endswith(MASKS[causal_and_padded]) for row in rows)


def test_generated_code():
    rows = run(functools.partial(attend, mask=causal_and_padded), operands(), backend=tile)
    assert all(row.endswith(MASKS[causal_and_padded]) for row in rows)


@pytest.fixture
def heads(monkeypatch):
    """Whether keys have fewer heads than queries in the graphs that are compiled, in both directions."""
    found, read_masks = [], joint_masks.read_masks

    def noted(of):
        for target, place in ((joint_masks.LSE, 0), (joint_masks.BACKWARD, 1)):
            for node in of.graph.find_nodes(op="call_function", target=target):
                q, k = (x.meta["val"] for x in node.args[place : place + 2])
                found.append(bool(k.shape[1] < q.shape[1]))
        read_masks(of)

    (place,) = (key for key, step in context._registered.items() if step.run is read_masks)
    monkeypatch.setitem(context._registered, place, replace(context._registered[place], run=noted))
    return found


def expanded(x, groups):
    return x[:, :, None].expand(-1, -1, groups, -1, -1).reshape(x.shape[0], -1, *x.shape[2:])


def interleaved(x, groups):
    return x.repeat_interleave(groups, 1)


def behind_positions(x, groups):
    return x.transpose(1, 2).repeat_interleave(groups, 2).transpose(1, 2)


def of_one_head(x, groups):
    return x[:, :1].expand(-1, 6, -1, -1)


def stacked(x, groups):
    return torch.stack([x] * groups, 2).flatten(1, 2)  # gradients of copies are added one by one


def tiled(x, groups):
    return x.repeat(1, groups, 1, 1)  # a head of queries has every second one of keys


BOTH = [True, True]
COPIES = {
    expanded: BOTH, interleaved: BOTH, behind_positions: BOTH, of_one_head: BOTH,
    stacked: [True, False], tiled: [False, False],
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("copied", COPIES, ids=lambda f: f.__name__)
def test_heads_are_shared(copied, masked, dynamic, heads):
    def f(q, k, v, given):
        rule = {"attn_mask": causal_and_padded(q, given)} if masked else {"is_causal": True}
        return F.scaled_dot_product_attention(q, copied(k.sin(), 3), copied(v, 3), **rule)

    def problem(length):
        _, _, _, given = operands(length)
        q, k, v = (torch.randn(2, n, length, 16).requires_grad_() for n in (6, 2, 2))
        return q, k, v, given

    run(f, *map(problem, (9, 12) if dynamic else (9,)), dynamic=dynamic)
    assert heads == COPIES[copied]


def test_copies_whose_gradients_are_read_stay(heads):
    """Of keys a sum over copies, of values the gradient of each copy."""

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.arange(6.0)[:, None, None]

    def f(q, k, v):
        return F.scaled_dot_product_attention(q, expanded(k, 3), Spy.apply(expanded(v, 3)), is_causal=True)

    run(f, [torch.randn(2, n, 9, 16).requires_grad_() for n in (6, 2, 2)])
    assert heads == [True, False]
