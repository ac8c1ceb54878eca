# SPDX-License-Identifier: Apache-2.0
"""Contests that differ in the views at their edges only are one; what is computed stays."""

import pytest
import torch
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_tile.inductor.graph.extract import rivals
from torch_tile.inductor.graph.nodes import Rewrite, is_call
from torch_tile.inductor.graph.strip_edge_views import without_views
from torch_tile.inductor.select import benchmark, decide
from torch_tile.inductor.settings import Settings


def part(model, *shapes):
    """`model` of tensors of these shapes; its softmax is what is timed, once more beside itself."""
    with FakeTensorMode() as mode, V.set_fake_mode(mode):
        made = make_fx(model)(*(torch.empty(shape) for shape in shapes))
        node = next(n for n in made.graph.nodes if is_call(n, torch.ops.aten._softmax.default))
        rewrite = Rewrite(node)
        new = rewrite.call(node.target, *node.args)
        return rivals([(node, new)], rewrite.inputs(), rewrite.nodes)


def softmax(x):
    return torch.ops.aten._softmax.default(x, -1, False)


def views(module):
    return [n for n in module.graph.nodes if n.op == "call_function" and "view" in str(n.target)]


MODELS = {
    "none": (softmax, (12, 8)),
    "in front": (lambda x: softmax(x.view(12, 8)), (3, 4, 8)),
    "behind": (lambda x: softmax(x).view(3, 32), (12, 8)),
    "behind, twice": (lambda x: softmax(x).view(3, 32).view(96), (12, 8)),
    "on both sides": (lambda x: softmax(x.view(12, 8)).view(3, 4, 8), (3, 32)),
}


@pytest.mark.parametrize("model, shape", MODELS.values(), ids=MODELS)
def test_what_is_left_computes_the_same(model, shape):
    x = torch.randn(12, 8)
    for module in without_views(*part(model, shape)):
        assert not views(module)
        (got,) = module(x)
        assert torch.equal(got, torch.softmax(x, -1))


def test_they_are_one_contest(monkeypatch):
    held = []
    monkeypatch.setattr(benchmark, "times", lambda *args: held.append(args) or (1.0, 2.0))
    monkeypatch.setattr(decide, "_outcomes", {})
    monkeypatch.setattr(decide, "_load", lambda key: None)
    monkeypatch.setattr(decide, "_save", lambda *args: None)
    for model, shape in MODELS.values():
        with FakeTensorMode() as mode, V.set_fake_mode(mode):
            graph = make_fx(model)(torch.empty(shape)).graph
            node = next(n for n in graph.nodes if is_call(n, torch.ops.aten._softmax.default))
            rewrite = Rewrite(node)
            pairs = [(node, rewrite.call(node.target, *node.args))]
            decide.compete(rewrite, pairs, Settings())
    assert len(held) == 1


@pytest.mark.parametrize(
    "model",
    [
        lambda x: (y := softmax(x.t())).view(96) + y.sum(),  # what follows reads the result itself, too
        lambda x: softmax(x.t()).t().reshape(96),  # a copy
    ],
)
def test_other_edges_stay(model):
    x = torch.randn(8, 12)
    new, old = without_views(*part(model, (8, 12)))
    given = [x.t() if n.meta["val"].shape == (12, 8) else x for n in new.graph.find_nodes(op="placeholder")]
    for a, b in zip(new(*given), old(*given), strict=True):
        assert torch.equal(a, b)
