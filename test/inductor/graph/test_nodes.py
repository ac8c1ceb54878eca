# SPDX-License-Identifier: Apache-2.0
"""`Miss`: every reason that a pass can give comes with what to write instead."""

import ast
import operator
from pathlib import Path

import pytest
import sympy
import torch
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from torch_tile.inductor import patterns
from torch_tile.inductor.graph.nodes import (
    Frame,
    Miss,
    Rewrite,
    compute,
    constant,
    expression,
    frames_of,
    look_through,
    module_of,
    name_of,
    nodes_under,
    place,
    quotient,
)

aten = torch.ops.aten

CLASSES = ("Miss", "NoMatch", "NotCaptured")


def reasons():
    for path in sorted(Path(patterns.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES:
                yield f"{path.stem}:{node.lineno}: {ast.unparse(node)}", [ast.unparse(arg) for arg in node.args]


def test_every_reason_says_what_to_write_instead():
    alone = [where for where, texts in reasons() if len(texts) != 2]
    ended = [where for where, texts in reasons() if any(text.rstrip("'\"").endswith(".") for text in texts)]
    assert alone == [], "each takes a reason and a fix"
    assert ended == [], "reason and fix are joined to one sentence"


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


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("L['self'].model.layers.0.q_proj", "model.layers.0.q_proj"),
        ("L['self']._modules['model']._modules['layers']._modules['0']", "model.layers.0"),
        ("L['self'].blocks[1]['attn']", "blocks.1.attn"),
    ],
)
def test_place(path, name):
    node = torch.fx.Graph().placeholder("x")
    assert place(node) == "x" and module_of(node) == "" and frames_of(node) == ()
    node.meta["nn_module_stack"] = {"outer": ("L['self']", object), "inner": (path, object)}
    assert place(node) == module_of(node) == name
    node.meta["stack_trace"] = (
        'File "/a/b/first.py", line 1, in f\n    y = g(x)\n  File "/a/b/model.py", line 42, in g\n    x @ y'
    )
    assert place(node) == f"{name} model.py:42"
    assert frames_of(node) == (Frame("/a/b/first.py", 1, "f"), Frame("/a/b/model.py", 42, "g"))


class Everything(torch.nn.Module):
    """Layers and functions whose own code torch keeps in the stack traces of their operators."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [torch.nn.Linear(8, 8), torch.nn.RMSNorm(8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Softmax(-1)]
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.rms_norm(x, (8,)) + torch.nn.functional.layer_norm(x, (8,))


def test_places_are_lines_of_the_model():
    places = []

    def backend(graph, inputs):
        places.extend((place(n), n) for n in graph.graph.nodes if n.op in ("call_function", "call_module"))
        return graph

    torch.compile(Everything(), backend=backend)(torch.randn(4, 8))
    assert len(places) >= 7
    for where, node in places:
        assert Path(__file__).name in where, (where, node.meta["stack_trace"])


def test_excerpt(tmp_path):
    path = tmp_path / "model.py"
    path.write_text("def f(x):\n\n    y = x @ x\n    if y:\n        z = y\n    return y\n")
    frame = Frame(str(path), 3, "f")
    assert frame.text == "y = x @ x"
    assert frame.excerpt() == [(1, "def f(x):"), (2, ""), (3, "    y = x @ x"), (4, "    if y:"), (5, "        z = y")]
    assert Frame(str(path), 5).excerpt(1) == [(4, "if y:"), (5, "    z = y"), (6, "return y")]
    assert Frame(str(path), 6).excerpt(0) == [(6, "return y")]


def test_a_file_that_cannot_be_read():
    frame = Frame("<stdin>", 3)
    assert frame.text == "" and frame.excerpt() == [] and str(frame) == "<stdin>:3"


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


@pytest.fixture
def chain():
    """`chain(*calls)` -> (x, nodes): calls on each other, the first on a tensor x; a call is (target, *arguments)."""

    def make(*calls, x=None):
        mode = FakeTensorMode()
        graph = Graph()
        node = root = graph.placeholder("x")
        root.meta["val"] = mode.from_tensor(torch.randn(3, 1, 4) if x is None else x)
        anchor = graph.output(root)
        nodes = []
        with V.set_fake_mode(mode):
            for target, *args in calls:
                first = () if target is aten.full.default else (node,)
                node = Rewrite(anchor).call(target, *first, *args)
                nodes.append(node)
        return root, nodes

    return make


CAST, FULL = torch.ops.prims.convert_element_type.default, aten.full.default


@pytest.mark.parametrize(
    ("kinds", "calls"),
    [
        ("casts", [(CAST, torch.float16), (aten._to_copy.default,), (CAST, torch.float64)]),
        ("views", [(aten.view.default, [12]), (aten.unsqueeze.default, 0), (aten.squeeze.dims, [0])]),
        ("copies", [(aten.clone.default,), (aten.alias.default,)]),
        ("broadcasts", [(aten.expand.default, [3, 5, 4])]),
        ("views copies", [(aten.clone.default,), (aten.view.default, [3, 4])]),
        (
            "casts views broadcasts",
            [(aten.unsqueeze.default, 0), (aten.expand.default, [2, 3, 1, 4]), (CAST, torch.float16)],
        ),
    ],
)
def test_looks_through_the_kinds_asked_for(kinds, calls, chain):
    x, nodes = chain(*calls)
    asked = dict.fromkeys(kinds.split(), True)
    assert look_through(nodes[-1], **asked) is x
    assert list(nodes_under(nodes[-1], **asked)) == [*nodes[::-1], x]
    assert look_through(nodes[-1]) is nodes[-1] and look_through(2.0, **asked) == 2.0
    for kind in asked:
        assert look_through(nodes[-1], **(asked | {kind: False})) is not x


@pytest.mark.parametrize(
    "call",
    [(aten.permute.default, [2, 1, 0]), (aten.tanh.default,), (CAST, torch.int32), (aten.slice.Tensor, 0, 1, 3)],
)
def test_does_not_look_through_what_moves_or_changes_values(call, chain):
    _, (node,) = chain(call)
    assert look_through(node, casts=True, views=True, copies=True, broadcasts=True) is node


@pytest.mark.parametrize(
    ("calls", "want"),
    [
        ([(FULL, [2, 1], 1.5), (aten.expand.default, [2, 3]), (CAST, torch.float16)], 1.5),
        ([(FULL, [4], -1.5), (CAST, torch.int32), (aten.view.default, [2, 2]), (CAST, torch.float32)], -1.0),
        ([(FULL, [4], 0.5), (CAST, torch.bool), (CAST, torch.float32)], 1.0),
        ([(FULL, [4], 2), (aten.slice.Tensor, 0, 1, 3), (aten.clone.default,)], 2.0),
        ([(aten.clone.default,)], None),
    ],
)
def test_constants(calls, want, chain):
    _, nodes = chain(*calls)
    assert constant(nodes[-1]) == want
