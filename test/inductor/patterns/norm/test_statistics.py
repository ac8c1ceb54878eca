# SPDX-License-Identifier: Apache-2.0
"""Views between a statistic and its use are read only where they put back, or repeat, the dimension it is over."""

import pytest
import torch
from torch.fx import Graph

from torch_tile.inductor.graph.nodes import aten
from torch_tile.inductor.patterns.norm.statistics import mean_of, one_per_row, per_row, puts_back


@pytest.fixture
def graph():
    return Graph()


def call(graph, target, x, *args):
    node = graph.call_function(target, (x, *args))
    node.meta["val"] = target(x.meta["val"], *args)
    return node


def tensor(graph, *sizes):
    node = graph.placeholder("x")
    node.meta["val"] = torch.empty(sizes, device="meta")
    return node


@pytest.mark.parametrize(
    ("target", "args", "ok"),
    [
        (aten.unsqueeze.default, (-1,), True),
        (aten.unsqueeze.default, (0,), False),
        (aten.reshape.default, ([6, 6, 1],), True),
        (aten.reshape.default, ([36],), False),
        (aten.expand.default, ([6, 6, 6],), False),
        (aten.permute.default, ([1, 0],), False),
    ],
)
def test_which_views_put_a_dimension_back(target, args, ok, graph):
    mean = call(graph, aten.mean.dim, tensor(graph, 6, 6, 6), [-1])
    view = call(graph, target, mean, *args)
    assert puts_back(view) is ok
    assert (per_row(view) is mean) is ok
    assert (mean_of(view) is mean.args[0]) is ok


def test_a_row_is_repeated_along_itself(graph):
    x = tensor(graph, 4, 6)
    kept = call(graph, aten.mean.dim, x, [-1], True)
    assert puts_back(call(graph, aten.expand.default, kept, [4, 6]))
    assert one_per_row(kept, x)
    assert not one_per_row(call(graph, aten.mean.dim, x, [0], True), x)
