# SPDX-License-Identifier: Apache-2.0
"""The loss of a linear layer and its backward, which scales the gradients of the forward in place."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from torch_tile.ops.losses import linear_cross_entropy_loss


class Results(TorchDispatchMode):
    """Note where the results of an operator lie."""

    def __init__(self):
        super().__init__()
        self.places = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.tile.linear_cross_entropy_gradients.default:
            self.places.append([x.data_ptr() for x in out])
        return out


def problem(biased=True, dtype=torch.float64):
    rows, width, classes = (int(torch.randint(2, 12, ())) for _ in range(3))
    made = torch.randn(rows, width), torch.randn(classes, width), torch.randn(classes) if biased else None
    target = torch.randint(classes, (rows,))
    leaves = [x if x is None else x.to(dtype).requires_grad_() for x in made]
    return leaves, target


def in_torch(leaves, target):
    x, w, b = leaves
    return F.cross_entropy(F.linear(x, w, b), target, label_smoothing=0.1)


def ours(leaves, target):
    x, w, b = leaves
    return linear_cross_entropy_loss(x, w, target, linear_bias=b, label_smoothing=0.1)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("factor", [1.0, -2.5])
@pytest.mark.parametrize("frozen", [None, 0, 1])
def test_each_backward_gives_torchs_gradients(biased, factor, frozen, seed):
    leaves, target = problem(biased)
    if frozen is not None:
        leaves[frozen].requires_grad_(False)
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    want = torch.autograd.grad(factor * in_torch(leaves, target), wanted)
    loss = ours(leaves, target)
    torch.testing.assert_close(loss, in_torch(leaves, target))
    for _ in range(3):  # the second one cannot take what the first one scaled
        got = torch.autograd.grad(factor * loss, wanted, retain_graph=True)
        torch.testing.assert_close(got, want)
        for x in got:
            x.fill_(float("nan"))  # they are the caller's


def test_gradients_of_gradients(seed):
    leaves, target = problem()

    def twice(loss):
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(sum((g**2).sum() for g in first), leaves)

    torch.testing.assert_close(twice(ours(leaves, target)), twice(in_torch(leaves, target)))


def test_backward_hands_over_what_the_forward_made(seed):
    (x, w, b), target = problem()
    with Results() as results:
        loss = ours((x, w, b), target)
    (loss * 3).backward()
    _, *places = results.places[0]
    assert [x.grad.data_ptr(), w.grad.data_ptr(), b.grad.data_ptr()] == places


def test_results_of_the_operator_stay_as_they_are(seed):
    (x, w, b), target = problem()
    given = torch.full(target.shape, 0.5, dtype=x.dtype), x, w, target, b
    loss, *made = torch.ops.tile.linear_cross_entropy_gradients(*given)
    before = [g.detach().clone() for g in made]
    (loss * 3).backward()
    torch.testing.assert_close([g.detach() for g in made], before, rtol=0, atol=0)
    torch.testing.assert_close(w.grad, 3 * before[1])


def test_under_transforms(seed):
    (x, w, _), target = problem(biased=False)
    got = torch.func.grad(lambda w: ours((x.detach(), w, None), target))(w.detach())
    torch.testing.assert_close(got, torch.autograd.grad(in_torch((x, w, None), target), w)[0])


def test_autocast_and_accumulation(seed):
    (x, w, _), target = problem(biased=False, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = ours((x, w, None), target)
    loss.backward()
    first = w.grad.clone()
    assert w.grad.dtype == torch.float32
    want = torch.autograd.grad(in_torch((x, w, None), target), w)[0]
    torch.testing.assert_close(first, want, rtol=0.1, atol=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        ours((x, w, None), target).backward()
    torch.testing.assert_close(w.grad, 2 * first)


@pytest.mark.parametrize("way", ["eager", "operator", "autocast"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_scaled_losses_have_gradients_in_float16(reduction, way, seed):
    """Not one of thousands of rows vanishes, and a scale beyond float16's largest number leaves no infinity."""
    rows, scale = 8192 + seed % 7, 2.0**17
    hidden, weight = torch.randn(rows, 5), torch.randn(9, 5) * 0.02
    target, wide = torch.randint(9, (rows,)), torch.float32 if way == "autocast" else torch.float16

    def gradients(f, dtype):
        leaves = [x.half().to(dtype, copy=True) for x in (hidden, weight)]
        if way == "operator":  # what torch.func and compiled graphs call
            return torch.func.grad(lambda pair: f(*pair))(leaves)
        return torch.autograd.grad(f(*(x.requires_grad_() for x in leaves)), leaves)

    def ours(x, w):
        with torch.autocast("cpu", torch.float16, enabled=way == "autocast"):
            loss = linear_cross_entropy_loss(x, w, target, reduction=reduction)
        return loss * (scale if reduction == "mean" else scale / rows)

    wanted = gradients(lambda x, w: F.cross_entropy(F.linear(x, w), target) * scale, torch.float64)
    for got, want in zip(gradients(ours, wide), wanted, strict=True):
        assert (got - want).norm() < 6e-4 * want.norm()
