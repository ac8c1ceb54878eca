# SPDX-License-Identifier: Apache-2.0
"""Where a node says it comes from."""

import pytest
import torch

from torch_tile.inductor.graph.source import Frame, frames_of, module_of, place


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
