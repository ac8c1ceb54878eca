# SPDX-License-Identifier: Apache-2.0
"""`Miss`: every reason that a pass can give comes with what to write instead."""

import ast
from pathlib import Path

import pytest
import torch

from torch_tile.inductor import patterns
from torch_tile.inductor.graph.nodes import Miss, name_of

CLASSES = ("Miss", "NoMatch", "NotCaptured")


def reasons():
    for path in sorted(Path(patterns.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES:
                yield pytest.param(node, id=f"{path.stem}:{node.lineno}")


@pytest.mark.parametrize("call", list(reasons()))
def test_every_reason_says_what_to_write_instead(call):
    assert len(call.args) == 2, ast.unparse(call)
    for text in call.args:
        assert not ast.unparse(text).rstrip("'\"").endswith("."), "reason and fix are joined to one sentence"


def test_names_are_those_that_users_know():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    assert name_of(x) == "an input of the graph"
    assert name_of(graph.call_function(torch.ops.aten.tanh.default, (x,))) == "aten.tanh"
    assert name_of(graph.call_method("softmax", (x,))) == "softmax"
    assert name_of(3.0) == "3.0"


def test_a_miss_knows_its_node():
    x = torch.fx.Graph().placeholder("x")
    assert Miss("odd", "write even", at=x).at is x
    assert Miss("odd", "write even", at=2).at is None
    assert str(Miss("odd", "write even")) == "odd"
