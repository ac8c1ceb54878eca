# SPDX-License-Identifier: Apache-2.0
"""Symbolic sizes: quotients cancel, and a size is computed from what the graph has."""

import operator

import pytest
import sympy
import torch
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from torch_tile.inductor.graph.symbolic_sizes import compute, expression, quotient


@pytest.fixture
def symbols():
    from torch._dynamo.source import ConstantSource

    env = ShapeEnv()
    return [
        env.create_symintnode(env.create_symbol(value, ConstantSource(name), DimDynamic.DYNAMIC), hint=value)
        for name, value in (("a", 6), ("b", 35))
    ]


def test_numbers_divide():
    assert quotient(12, 4) == 3
    assert expression(7) == sympy.Integer(7)


def test_what_cancels_leaves_no_division(symbols):
    a, b = symbols
    assert expression(quotient(a * b, a)) == b.node.expr
    assert expression(quotient(a * a * 4, a * 2)) == 2 * a.node.expr
    assert quotient(3 * a, a) == 3
    assert expression(quotient(a, 4)) == expression(a // 4)


def test_sizes_are_computed_from_nodes():
    a, b = sympy.symbols("a b", integer=True, positive=True)
    from torch.utils._sympy.functions import FloorDiv

    graph = Graph()
    nodes = {a: graph.placeholder("a"), b: graph.placeholder("b")}
    expr = a**2 * 3 + FloorDiv(b, a) * b - 5
    graph.output(compute(expr, nodes.get, lambda f, *args: graph.call_function(f, args)))
    assert GraphModule({}, graph)(6, 35) == 6**2 * 3 + 35 // 6 * 35 - 5
    words = {n.target for n in graph.nodes if n.op == "call_function"}
    assert words <= {operator.add, operator.mul, operator.floordiv}


def test_what_no_node_has_is_an_error():
    with pytest.raises(LookupError, match="has the size zz"):
        compute(sympy.Symbol("zz"), lambda expr: None, lambda f, *args: torch.fx.Graph().call_function(f, args))
