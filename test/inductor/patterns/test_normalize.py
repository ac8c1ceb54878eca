# SPDX-License-Identifier: Apache-2.0
"""Every spelling becomes the one form that patterns read; what only resembles one stays; values do not change."""

import pytest
import torch
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_tile.inductor import compat
from torch_tile.inductor.graph.nodes import aten
from torch_tile.inductor.patterns.normalize import normalize_graph

X = torch.rand(3, 5) + 0.5
COUNT = aten.sum.dim_IntList, aten.div.Tensor


def normalized(written):
    """The graph of a function of x, normalized."""
    with FakeTensorMode() as mode, V.set_fake_mode(mode):
        made = compat.decomposed(written, [mode.from_tensor(X)])
        normalize_graph(made.graph)
    made.graph.lint()
    made.recompile()
    return made


def root(x):
    return x.square().mean(-1, keepdim=True).sqrt()


@pytest.mark.parametrize(
    ("written", "has", "lacks"),
    [
        (lambda x: x**2, [aten.mul.Tensor], [aten.pow.Tensor_Scalar]),
        (lambda x: x**0.5, [aten.sqrt.default], [aten.pow.Tensor_Scalar]),
        (lambda x: x**-0.5, [aten.rsqrt.default], [aten.pow.Tensor_Scalar]),
        (lambda x: 1 / x.sqrt(), [aten.rsqrt.default], [aten.sqrt.default, aten.reciprocal.default, aten.mul.Tensor]),
        (lambda x: x / root(x), [aten.rsqrt.default], [aten.sqrt.default, aten.div.Tensor]),
        (lambda x: x / root(x)[:, 0].unsqueeze(-1).expand(3, 5), [aten.div.Tensor], []),  # a select is no view of all
        (lambda x: (r := root(x)) + x / r, [aten.sqrt.default, aten.div.Tensor], [aten.rsqrt.default]),
        (lambda x: x / (x + 1).sqrt(), [aten.sqrt.default, aten.div.Tensor], [aten.rsqrt.default]),
        (lambda x: root(x) / x, [aten.sqrt.default, aten.div.Tensor], [aten.rsqrt.default]),
        (lambda x: x.sum(-1) / 5, [aten.mean.dim], COUNT),
        (lambda x: x.sum(-1)[:, None] * 0.2, [aten.mean.dim], [aten.sum.dim_IntList, aten.mul.Tensor]),
        (lambda x: x.sum((0, 1)) / 15, [aten.mean.dim], COUNT),
        (lambda x: x.sum(-1) / 4, COUNT, [aten.mean.dim]),
        (lambda x: aten.mul.Scalar(aten.add.Scalar(x, 2), 3), [aten.add.Tensor], [aten.add.Scalar, aten.mul.Scalar]),
    ],
)
def test_one_form(written, has, lacks):
    made = normalized(written)
    targets = {n.target for n in made.graph.nodes}
    assert targets >= set(has) and not targets & set(lacks), made.graph
    torch.testing.assert_close(made(X), written(X))


def test_equal_factors_become_one_node():
    made = normalized(lambda x: x.exp() * x.exp())
    (square,) = made.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    assert square.args[0] is square.args[1]
    assert len(made.graph.find_nodes(op="call_function", target=aten.exp.default)) == 1
