# SPDX-License-Identifier: Apache-2.0
"""Chains of views are read back exactly: rebuilding an operand from its root gives the operand."""

import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from torch_tile.inductor.graph.axes import (
    Axis,
    arrange,
    axes_of,
    extent,
    leaves,
    regroup,
    trace,
    unify,
)
from torch_tile.inductor.graph.nodes import Rewrite, aten, shape


def factors(rng, n):
    """A random way to write n as a product."""
    out = []
    while n > 1:
        d = rng.choice([d for d in range(2, n + 1) if n % d == 0])
        out.append(d)
        n //= d
    for _ in range(rng.randrange(2)):
        out.insert(rng.randrange(len(out) + 1), 1)
    return out or [1]


def random_view(rng, x, graph, node):
    """One random view of `x`, done on the tensor and in the graph."""
    sizes = list(x.shape)
    kind = rng.choice(["permute", "reshape", "unsqueeze", "squeeze", "expand", "clone", "transpose"])
    if kind == "permute":
        order = rng.sample(range(x.dim()), x.dim())
        call = aten.permute.default, (order,)
    elif kind == "transpose":
        call = aten.transpose.int, (rng.randrange(x.dim()), -1)
    elif kind == "reshape":
        call = aten.reshape.default, (factors(rng, x.numel()),)
    elif kind == "unsqueeze":
        call = aten.unsqueeze.default, (rng.randrange(-1, x.dim() + 1),)
    elif kind == "squeeze" and 1 in sizes:
        call = aten.squeeze.dim, (sizes.index(1),)
    elif kind == "expand" and 1 in sizes and x.numel() < 500:
        sizes[sizes.index(1)] = rng.choice([2, 3])
        call = aten.expand.default, (sizes,)
    else:
        call = aten.clone.default, ()
    target, args = call
    new = graph.call_function(target, (node, *args))
    y = target(x, *args)
    new.meta["val"] = torch.empty(y.shape, device="meta")
    return y, new


def test_shared_heads_are_read():
    """reshape(expand(unsqueeze(k, 2))): the root lacks the inner part of the head dimension."""
    graph = Graph()
    k = graph.placeholder("k")
    k.meta["val"] = torch.empty(2, 3, 5, 8, device="meta")
    node = k
    for target, arg in ((aten.unsqueeze, 2), (aten.expand, [2, 3, 4, 5, 8]), (aten.reshape, [2, 12, 5, 8])):
        value = target.default(node.meta["val"], arg)
        node = graph.call_function(target.default, (node, arg))
        node.meta["val"] = value
    groups = axes_of(shape(node))
    root, have = trace(node, groups)
    assert root is k
    heads = leaves(groups[1])
    assert [a.size for a in heads] == [3, 4]
    assert [a in have[1] for a in heads] == [True, False]


@pytest.mark.parametrize("case", range(30))
def test_round_trip(case, seed):
    rng = random.Random(seed)
    x = torch.randn(rng.choice([(12,), (4, 6), (2, 3, 4), (1, 6, 2)]))
    graph = Graph()
    node = first = graph.placeholder("x")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        first.meta["val"] = torch.empty(x.shape)
    y = x
    for _ in range(rng.randrange(1, 6)):
        y, node = random_view(rng, y, graph, node)
    groups = axes_of(y.shape)
    root, have = trace(node, groups)
    graph.output(node)
    from torch._inductor.virtualized import V

    with V.set_fake_mode(mode):
        rewrite = Rewrite(next(iter(graph.find_nodes(op="output"))))
        rebuilt = arrange(rewrite, root, have, groups)
    assert rebuilt is not None
    graph.output_node().args = (rebuilt,)
    torch.testing.assert_close(GraphModule({}, graph)(x), y, rtol=0, atol=0)


def test_regroup_cuts_where_it_must():
    axis = Axis(12)
    groups = regroup([axis], [2, 6])
    assert [[a.size for a in g] for g in groups] == [[2], [6]]
    assert [a.size for a in leaves([axis])] == [2, 6]
    assert regroup([Axis(6), Axis(4)], [8, 3]) is None
    assert regroup([Axis(6)], [5]) is None


def test_unify_refines_both():
    assert not unify([Axis(2), Axis(3)], [Axis(3), Axis(2)])
    a, b = [Axis(2), Axis(6)], [Axis(4), Axis(3)]
    assert unify(a, b)
    assert [x.size for x in leaves(a)] == [2, 2, 3]
    a, b = [Axis(2), Axis(6)], [Axis(12)]
    assert unify(a, b)
    assert leaves(a) == leaves(b)
    assert extent(leaves(b)) == 12


def test_arrange_refuses_to_drop_an_axis():
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, 3, device="meta")
    out = graph.output(x)
    groups = axes_of(shape(x))
    assert arrange(Rewrite(out), x, groups, groups[:1]) is None
