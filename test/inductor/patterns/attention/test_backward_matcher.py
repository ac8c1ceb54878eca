# SPDX-License-Identifier: Apache-2.0
"""Gradients of a product are found by their form, and what only they need."""

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_tile.inductor.graph.axes import axes_of
from torch_tile.inductor.graph.nodes import Miss, aten, backward_of, shape
from torch_tile.inductor.patterns.attention.backward_matcher import is_gradient, of_product, only_for


def joint(f, *sizes, wanted=(True, True)):
    """The graph of a function of two tensors, forward and backward in one."""
    graphs = []

    def part(module, joint_inputs, **kwargs):
        from functorch.compile import default_partition

        graphs.append(module.graph)
        return default_partition(module, joint_inputs, **kwargs)

    compiled = aot_function(f, fw_compiler=lambda gm, _: make_boxed_func(gm.forward), partition_fn=part)
    compiled(*(torch.randn(n, requires_grad=w) for n, w in zip(sizes, wanted, strict=True))).sum().backward()
    return graphs[0]


def first_product(graph):
    return graph.find_nodes(op="call_function", target=aten.bmm.default)[0]


def found(graph):
    node = first_product(graph)
    inner = axes_of(shape(node.args[0])[-1:])[0]
    return of_product(node, axes_of(shape(node)), inner, backward_of(graph))


A, B = (2, 3, 4), (2, 4, 5)


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_both_formulas(wanted):
    graph = joint(lambda a, b: (a.sin() @ b.cos()).exp(), A, B, wanted=wanted)
    of = found(graph)
    assert shape(of.result) == (2, 3, 5)
    assert [x is not None for x in (of.left, of.right)] == list(wanted)
    for each, size in ((of.left, A), (of.right, B)):
        assert each is None or (shape(each) == size and of.result in each.args)


def test_square_products_are_told_apart():
    graph = joint(lambda a, b: (a @ b) @ (b @ a), (2, 4, 4), (2, 4, 4))
    products = graph.find_nodes(op="call_function", target=aten.bmm.default)
    backward = backward_of(graph)
    forward = [n for n in products if n not in backward]
    assert len(forward) == 3
    results = set()
    for node in forward:
        of = of_product(node, axes_of(shape(node)), axes_of((4,))[0], backward)
        assert of.left in backward and of.right in backward and of.left is not of.right
        results.add(of.result)
    assert len(results) == 3


def test_a_product_made_twice_is_ambiguous():
    with pytest.raises(Miss, match="there are 2"):
        found(joint(lambda a, b: (a @ b).sin() + (a @ b).cos(), A, B))


def test_forward_products_are_no_gradients():
    with pytest.raises(Miss, match="there are 0"):
        graph = joint(lambda a, b: (a @ b).detach() + b.sum() + a.sum(), A, B)
        found(graph)


def test_what_belongs_to_the_backward():
    graph = joint(lambda a, b: (a.sin() @ b).exp(), A, B)
    backward = backward_of(graph)
    names = {n.name for n in backward}
    assert any(name.startswith("tangents") for name in names)
    assert not {n for n in backward if n.op == "output" or n.name.startswith("primals")}
    assert first_product(graph) not in backward
    turned = [n for n in graph.nodes if n.target is aten.permute.default or n.target is aten.transpose.int]
    assert turned and all(n in backward for n in turned)  # of forward tensors, for the backward alone
    assert not backward_of(torch.fx.symbolic_trace(lambda x: x + 1).graph)


def test_what_is_computed_for_nodes_alone():
    graph = joint(lambda a, b: (a.sin() @ b).exp(), A, B)
    of = found(graph)
    alone = only_for([of.left, of.right])
    assert {of.left, of.right, of.result} <= alone and first_product(graph) not in alone
    assert only_for([of.left]) == {of.left, *(x for x in of.left.all_input_nodes if len(x.users) == 1)}


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
