# SPDX-License-Identifier: Apache-2.0
"""A gradient of scores is told from what is like it by a few numbers, whatever it is written as."""

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_tile.inductor.graph.axes import axes_of
from torch_tile.inductor.graph.nodes import Miss, shape
from torch_tile.inductor.patterns.attention.gradient_check import is_gradient

SIZES = 3, 5, 7


def hidden(scores):
    return torch.arange(scores.shape[1])[:, None] < torch.arange(scores.shape[2])


def masked(scores):
    return scores.masked_fill(hidden(scores), -torch.inf).softmax(-1)


def capped(scores):
    return (torch.tanh(scores / 2) * 2).softmax(-1)


def viewed(scores):
    return scores.view(3, 1, 5, 7).transpose(1, 2).softmax(-1).transpose(1, 2).reshape(3, 5, 7)


def written(scores):
    e = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    return e / e.sum(-1, keepdim=True)


def rounded(scores):
    return scores.to(torch.bfloat16).float().softmax(-1)


def modulated(scores):
    return (scores.sin() * 3 + 0.5 * torch.arange(7.0)).softmax(-1)


FORWARDS = [masked, capped, viewed, written, rounded, modulated]


def graph_of(forward, change=lambda grad, scores, weights: grad):
    """The graph of `forward` and of its gradient, changed, and three of its nodes: weights, and both gradients."""

    def both(scores, grad):
        with torch.enable_grad():
            given = scores.detach().requires_grad_()
            weights = forward(given)
            (found,) = torch.autograd.grad(weights, given, grad)
        return weights, change(found, given.detach(), weights.detach())

    with FakeTensorMode():
        given = [torch.empty(SIZES) for _ in range(2)]
        graph = make_fx(both, decomposition_table=select_decomp_table())(*given).graph
    scores, grad = graph.find_nodes(op="placeholder")
    weights, found = next(n for n in graph.nodes if n.op == "output").args[0]
    return found, scores, grad, weights


def told(forward, *change, keys=-1):
    found, scores, grad, weights = graph_of(forward, *change)
    dims = axes_of(shape(scores))
    return is_gradient(found, (scores, dims), (grad, dims), (weights, dims), dims[keys])


@pytest.mark.parametrize("forward", FORWARDS)
def test_gradients(forward):
    assert told(forward)


CHANGES = {
    "halved": lambda grad, scores, weights: grad * 0.5,
    "a little more": lambda grad, scores, weights: grad * 1.0001,
    "clamped": lambda grad, scores, weights: grad.clamp(-0.01, 0.01),
    "clamped where large": lambda grad, scores, weights: grad.clamp(-1e6, 1e6),
    "0 where small": lambda grad, scores, weights: torch.where(grad.abs() < 1e-8, 0.0, grad),
    "without NaN": lambda grad, scores, weights: grad.nan_to_num(),
    "not of large scores": lambda grad, scores, weights: torch.where(scores > 2, 0.0, grad),
    "not of low scores": lambda grad, scores, weights: torch.where(scores < -2, 0.0, grad),
    "not of far keys": lambda grad, scores, weights: torch.where(torch.arange(7) < 1000, grad, 0.0),
    "less of far keys": lambda grad, scores, weights: grad * (1000 - torch.arange(7)).clamp(0, 1),
    "dropped out": lambda grad, scores, weights: grad * (torch.rand_like(grad) < 2),
    "sum kept": lambda grad, scores, weights: grad + weights * 0.1,
    "of some": lambda grad, scores, weights: torch.where(scores > 0, grad, 0.0),
    "of another row": lambda grad, scores, weights: grad.roll(1, 1),
    "none": lambda grad, scores, weights: torch.zeros_like(grad),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("forward", FORWARDS)
def test_others(forward, change):
    assert not told(forward, change)


def test_unknowns_are_constants():
    """What is no pointwise operation is a number, the same in both directions, but not where it hides the scores."""
    assert told(lambda scores: (scores * torch.arange(14.0).roll(3)[:7]).softmax(-1))
    assert not told(lambda scores: scores.cumsum(-1).softmax(-1))


def test_weights_that_do_not_depend():
    found, scores, grad, _ = graph_of(masked)
    dims = axes_of(shape(scores))
    assert not is_gradient(found, (scores, dims), (grad, dims), (grad, dims), dims[-1])


def test_keys_of_several_dimensions():
    found, scores, grad, weights = graph_of(masked)
    dims = axes_of(shape(scores))
    with pytest.raises(Miss, match="several dimensions"):
        is_gradient(found, (scores, dims), (grad, dims), (weights, dims), [*dims[1], *dims[2]])
