# SPDX-License-Identifier: Apache-2.0
"""Gradients of a product are found by their form, and what only they need."""

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func

from torch_tile.inductor.graph.axes import axes_of
from torch_tile.inductor.graph.nodes import Miss, aten, shape
from torch_tile.inductor.patterns.attention.backward_matcher import (
    backward_of,
    of_product,
    only_for,
)


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
