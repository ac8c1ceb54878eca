# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch.fx import Graph

from torch_tile.inductor.graph.pointwise import call_of, is_wordless
from torch_tile.kernels.epilogue.functions import Call

aten = torch.ops.aten


def node_of(target, *args, **kwargs):
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    given = [{"x": x, "y": y}.get(a, a) if isinstance(a, str) else a for a in args]
    return graph.call_function(target, tuple(given), kwargs), x, y


def said(call, x, y):
    if call is None:
        return None
    names = {x: "x", y: "y"}
    return call.reduce(lambda v: names.get(v, str(v)), lambda f, words: f"{f}({','.join(words)})")


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "want"),
    [
        (aten.add.Tensor, ("x", "y"), {}, "add(x,y)"),
        (aten.add.Tensor, ("x", "y"), {"alpha": 2}, "add(x,mul(y,2))"),
        (aten.add.Scalar, ("x", 1, 3), {}, "add(x,mul(1,3))"),
        (aten.div.Tensor, ("x", "y"), {}, "div(x,y)"),
        (aten.div.Tensor_mode, ("x", "y"), {"rounding_mode": None}, "div(x,y)"),
        (aten.div.Tensor_mode, ("x", "y"), {"rounding_mode": "floor"}, None),
        (aten.clamp.default, ("x", 0, 6), {}, "min(max(x,0),6)"),
        (aten.clamp.default, ("x",), {"max": 1.0}, "min(x,1.0)"),
        (aten.clamp.default, ("x",), {}, None),
        (aten.gelu.default, ("x",), {"approximate": "tanh"}, "gelu_tanh(x)"),
        (aten.gelu.default, ("x",), {}, "gelu(x)"),
        (aten.where.self, ("x", "y", 0.0), {}, "where(x,y,0.0)"),
        (aten.where.default, ("x",), {}, None),
        (aten.isnan.default, ("x",), {}, "ne(x,x)"),
        (aten.pow.Scalar, (2.0, "x"), {}, "pow(2.0,x)"),
        (aten.frac.default, ("x",), {}, None),
    ],
)
def test_calls(target, args, kwargs, want):
    node, x, y = node_of(target, *args, **kwargs)
    assert said(call_of(node), x, y) == want


def test_what_has_no_word():
    assert is_wordless(node_of(aten.frac.default, "x")[0])
    assert not is_wordless(node_of(aten.tanh.default, "x")[0])
    assert not is_wordless(node_of(aten.mm.default, "x", "y")[0])  # not pointwise
    assert call_of(node_of(aten.tanh.default, "x")[1]) is None
    assert isinstance(call_of(node_of(aten.tanh.default, "x")[0]), Call)
