# SPDX-License-Identifier: Apache-2.0
"""What is cut out around a replacement, and that both cuts compute the same."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_tile.inductor.graph.extract import Ancestors, Descendants, rivals, without_views
from torch_tile.inductor.graph.nodes import Rewrite, aten, is_call, ordered
from torch_tile.inductor.select import benchmark, decide
from torch_tile.inductor.select.benchmark import is_called
from torch_tile.inductor.settings import Settings


def once_more(node):
    """A stand-in for a kernel: the same op once more, made by a rewrite."""
    rewrite = Rewrite(node)
    new = rewrite.call(node.target, *node.args)
    return rewrite, [(node, new)]


def words(part):
    return [n.target.__name__.split(".")[0] for n in part.graph.nodes if n.op == "call_function"]


def cut(f, target, *args):
    with FakeTensorMode() as mode, V.set_fake_mode(mode):
        fakes = [mode.from_tensor(x) for x in args]
        gm = make_fx(f, decomposition_table=select_decomp_table())(*fakes)
        rewrite, pairs = once_more(next(n for n in gm.graph.nodes if is_call(n, target)))
        return rivals(pairs, rewrite.inputs(), rewrite.nodes)


def same(new, old):
    """Both on the same random inputs, by the names of their placeholders."""
    names = {
        n.target: torch.randn(n.meta["val"].shape)
        for part in (new, old)
        for n in part.graph.find_nodes(op="placeholder")
    }
    results = [part(*(names[n.target] for n in part.graph.find_nodes(op="placeholder"))) for part in (new, old)]
    torch.testing.assert_close(*results)


def test_pointwise_readers_come_along():
    def f(x, w, scale):
        return torch.tanh(torch.mm(x, w)) * scale, scale + 1

    new, old = cut(f, aten.mm.default, torch.randn(4, 8), torch.randn(8, 16), torch.randn(16))
    assert words(old) == words(new) == ["mm", "tanh", "mul"]
    same(new, old)


def test_a_norm_behind_a_product_is_whole():
    """Cut in its middle it would write a wide tensor that no kernel of the model writes."""

    def f(x, w, y):
        total = torch.mm(x, w) + y
        return F.rms_norm(total, (16,), None, 1e-6)

    new, old = cut(f, aten.mm.default, torch.randn(4, 8), torch.randn(8, 16), torch.randn(4, 16))
    assert {"add", "mean", "rsqrt"} <= set(words(old)) and len(old(*map(torch.randn, [(4, 8), (8, 16), (4, 16)]))) == 1
    same(new, old)


def test_ends_where_least_is_written():
    """`y` is written anyway, for the other product: relu of it, written too, is a pass of its own in both."""

    def f(x, w, v):
        y = torch.mm(x, w)
        return torch.relu(y) + torch.mm(y, v)

    new, old = cut(f, aten.mm.default, torch.randn(4, 8), torch.randn(8, 8), torch.randn(8, 8))
    assert words(old) == ["mm"]
    same(new, old)


def test_what_makes_the_input_of_a_reduction_comes_along():
    def f(x, y):
        return (torch.relu(x) * y).mean(-1, True)

    new, old = cut(f, aten.mean.dim, torch.randn(4, 8), torch.randn(4, 8))
    assert words(old) == ["relu", "mul", "mean"]
    same(new, old)


@pytest.mark.parametrize("shared", [False, True])
def test_what_makes_the_input_of_a_product_does_not(shared):
    def f(x, w):
        h = torch.relu(x)
        return torch.mm(h, w), h if shared else x

    new, old = cut(f, aten.mm.default, torch.randn(4, 8), torch.randn(8, 8))
    assert words(old) == ["mm"] and is_called(old) and is_called(new)
    same(new, old)


def test_parts_of_a_tensor_are_inputs_themselves():
    def f(x, w, both):
        shift, scale = both.chunk(2)
        return torch.mm(x, w) * scale + shift

    new, old = cut(f, aten.mm.default, torch.randn(4, 8), torch.randn(8, 8), torch.randn(16))
    assert all(isinstance(n.meta["val"], torch.Tensor) for n in old.graph.find_nodes(op="placeholder"))
    same(new, old)


def test_attention_reads_what_is_in_memory():
    """No kernel of ATen's or ours takes along what makes its operands, so nobody compiles that."""

    def f(q, k, v):
        return torch.ops.tile.attention(q * 2, k, v)

    new, old = cut(f, torch.ops.tile.attention.default, *(torch.randn(1, 2, 8, 16) for _ in range(3)))
    assert words(new) == words(old) == ["attention"]
    same(new, old)


@pytest.mark.parametrize("repeat", range(20))
def test_who_depends_on_whom(repeat, seed):
    """Random graphs, against the sets that a walk over the whole graph finds."""
    pick = random.Random(f"{seed} {repeat}")
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(f"p{i}") for i in range(3)]
    for _ in range(40):
        nodes.append(graph.call_function(torch.add, tuple(pick.sample(nodes[-12:], 2))))
    position = ordered(graph)
    some = pick.sample(nodes, 3)
    above, below = set(), set(some)
    for node in reversed(nodes):
        if any(u in above or u in some for u in node.users):
            above.add(node)
    for node in nodes:
        if any(x in below for x in node.all_input_nodes):
            below.add(node)
    upwards, downwards = Ancestors(some, position), Descendants(some, position)
    for node in pick.sample(nodes, len(nodes)):
        assert (node in upwards) == (node in above) and (node in downwards) == (node in below)


def test_long_graphs_are_no_deep_recursion():
    graph = torch.fx.Graph()
    first = node = graph.placeholder("x")
    for _ in range(3000):
        node = graph.call_function(torch.neg, (node,))
    position = ordered(graph)
    assert node in Descendants([first], position) and first in Ancestors([node], position)


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
