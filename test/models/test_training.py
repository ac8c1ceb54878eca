# SPDX-License-Identifier: Apache-2.0
"""What training does around a model: checkpoints, autocast, compiled autograd, accumulated gradients."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import torch_tile
from torch_tile.inductor.compat import graph_breaks
from torch_tile.inductor.dry_run import dry_run
from torch_tile.inductor.report.rows import collect
from torch_tile.kernels import kernels

tile = torch.ops.tile


def block(x, norm, inner, outer):
    """A decoder's block in plain torch; x `[B, S, 16]`."""
    q, k, v = (F.rms_norm(x, (16,), norm) @ inner).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return x + F.silu(y.transpose(1, 2).reshape(x.shape) @ outer)


def tiled(x, norm, inner, outer):
    """The same of our ops."""
    q, k, v = (tile.rms_norm(x, norm, 1e-6) @ inner).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
    y = tile.attention(q, k, v, None, True)
    return tile.linear(y.transpose(1, 2).reshape(x.shape), outer.mT, None, None, "silu") + x


def operands(dtype=torch.float32):
    shapes = (2, 6, 16), (16,), (16, 48), (16, 16)
    return [(torch.randn(s) * 0.5).to(dtype).requires_grad_() for s in shapes]


def compiled(f):
    return torch.compile(f, backend=functools.partial(dry_run, options={"select": "tile"}), fullgraph=True)


def saving(*ops):
    """A policy that keeps what these ops give and recomputes the rest."""

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def graphs(report, family):
    return [row.graph for row in report.replaced(family) if row.graph != "pre_grad"]


@pytest.mark.parametrize("selective", [False, True], ids=["all", "selective"])
def test_checkpoints_are_looked_into(selective):
    """The body of a checkpoint has the ops of a model without one; a policy says which run again behind."""
    options = {"context_fn": saving(tile.attention_lse.default)} if selective else {}

    def f(*args):
        return checkpoint(block, *args, use_reentrant=False, **options).square().sum()

    args = operands()
    with collect() as report:
        got = torch.autograd.grad(compiled(f)(*args), args)
    torch.testing.assert_close(got, torch.autograd.grad(block(*args).square().sum(), args), rtol=1e-3, atol=1e-4)
    assert graphs(report, "norm") == ["forward", "backward"]
    again = [] if selective else ["backward"]
    assert graphs(report, "attention") == ["forward", *again, "backward"]


def counting(monkeypatch):
    """How often kernels run from here on, by name."""
    calls = {}
    for place, name in (("attention.forward", "attention"), ("norm.norm", "rms_norm"), ("gemm.gemm", "gemm")):
        module, original = kernels(place), getattr(kernels(place), name)

        def run(*args, name=name, original=original, **given):
            calls[name] = calls.get(name, 0) + 1
            return original(*args, **given)

        monkeypatch.setattr(module, name, run)
    return calls


@pytest.mark.parametrize("selective", [False, True], ids=["all", "selective"])
def test_checkpoints_in_eager(selective, monkeypatch):
    calls = counting(monkeypatch)
    options = {"context_fn": saving(tile.attention_lse.default)} if selective else {}
    args = operands()
    y = checkpoint(tiled, *args, use_reentrant=False, **options)
    assert calls == {"attention": 1, "rms_norm": 1, "gemm": 1}
    got = torch.autograd.grad(y.square().sum(), args)
    assert calls["attention"] == (1 if selective else 2) and calls["rms_norm"] == 2
    torch.testing.assert_close(got, torch.autograd.grad(tiled(*args).square().sum(), args))


def test_autocast_in_training():
    def f(*args):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return block(*args)

    args = operands()
    with collect() as report:
        y = compiled(f)(*args)
        got = torch.autograd.grad(y.float().square().sum(), args)
    truth = block(*(a.detach().double().requires_grad_() for a in args))
    want = f(*args)
    assert y.dtype == want.dtype and {g.dtype for g in got} == {torch.float32}
    eager = torch.autograd.grad(want.float().square().sum(), args)
    doubles = [a.detach().double().requires_grad_() for a in args]
    exact = torch.autograd.grad(block(*doubles).square().sum(), doubles)
    assert (y.double() - truth).abs().max() < 2 * (want.double() - truth).abs().max() + 1e-3
    for ours, theirs, best in zip(got, eager, exact, strict=True):
        assert (ours.double() - best).norm() < 2 * (theirs.double() - best).norm() + 1e-3 * best.norm()
    for family in ("attention", "gemm", "norm"):
        assert "forward" in graphs(report, family), report


def test_compiled_autograd():
    args = operands()
    before = graph_breaks()
    with torch._dynamo.config.patch(compiled_autograd=True), collect() as report:
        f = compiled(lambda *a: block(*a).square().sum())
        f(*args).backward()
    got = [a.grad for a in args]
    torch.testing.assert_close(got, list(torch.autograd.grad(block(*args).square().sum(), args)), rtol=1e-3, atol=1e-4)
    assert graph_breaks() == before
    assert "forward" in graphs(report, "attention") and len(graphs(report, "gemm")) > 2


def test_gradients_accumulate():
    args = operands()
    f = compiled(lambda *a: block(*a).square().sum())
    steps = [operands()[0] for _ in range(3)]
    for x in steps:
        f(x, *args[1:]).backward()
    got, wanted = [a.grad.clone() for a in args[1:]], args[1:]
    total = sum(block(x, *wanted).square().sum() for x in steps)
    torch.testing.assert_close(got, list(torch.autograd.grad(total, wanted)), rtol=1e-3, atol=1e-4)


def test_replaced_layers_train_as_the_ones_before():
    model = torch.nn.Sequential(torch.nn.RMSNorm(16), torch.nn.Linear(16, 24), torch.nn.LayerNorm(24))
    x = torch.randn(3, 16)
    model(x).square().mean().backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch_tile.replace_layers(model)
    model(x).square().mean().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], want)
