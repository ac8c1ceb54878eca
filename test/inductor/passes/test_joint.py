# SPDX-License-Identifier: Apache-2.0
"""Masks of attention in training become rules and texts, of which both directions know."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from torch_tile.inductor.backend import tile
from torch_tile.inductor.compat import no_caches
from torch_tile.inductor.dry_run import dry_run
from torch_tile.inductor.report import collect

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
