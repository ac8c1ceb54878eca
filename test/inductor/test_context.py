# SPDX-License-Identifier: Apache-2.0
"""Families register themselves: which there are, in which order, and that nothing needs a list of them."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_tile.inductor import context, patterns
from torch_tile.inductor.context import Context, Select, families, family
from torch_tile.inductor.graph.nodes import Rewrite
from torch_tile.inductor.report.rows import Outcome, collect
from torch_tile.inductor.select.policy import Always, Fastest, policy_of
from torch_tile.inductor.settings import FAMILIES, Settings

STAGES = ("pre_grad", "written_out", "joint", "post_grad", "settle")


@pytest.fixture
def loaded():
    for stage in ("pre_grad", "post_grad"):
        patterns.load(stage)


def names(stage, settings=None):
    return [f"{f.__module__.rpartition('.')[2]}.{f.__name__}" for f in families(stage, settings or Settings())]


def test_the_order_that_the_phases_promise(loaded):
    order = names("post_grad")
    for first, then in [
        ("cleanup.skip_views", "softmax.recognise"),
        ("softmax.recognise", "mla.match"),
        ("mla.match", "flex.match"),
        ("flex.match", "rewrite.match"),
        ("rewrite.match", "rewrite.refine"),
        ("rewrite.refine", "norm.match"),
        ("norm.match", "fused_norm.match"),
        ("fused_norm.match", "norm.fuse_activation"),
        ("norm.fuse_activation", "dequant.match"),
        ("dequant.match", "push_through_chunk.compute"),
        ("push_through_chunk.compute", "grouped.match"),
        ("grouped.match", "gemm.match"),
        ("gemm.match", "norm.fuse_residual"),
        ("norm.fuse_residual", "fused_norm.fuse_front"),
    ]:
        assert order.index(first) < order.index(then)
    assert names("settle") == ["finalize.settle", "finalize.report_missed"]


def test_families_that_are_not_wanted_do_not_run(loaded):
    assert {r.name for r in context._registered.values()} == {None, *FAMILIES}
    for name in FAMILIES:
        for stage in STAGES:
            every, rest = names(stage), names(stage, Settings(families=tuple(f for f in FAMILIES if f != name)))
            gone = {r.run for r in context._registered.values() if r.stage == stage and r.name == name}
            assert len(every) - len(rest) == len(gone)


def test_every_function_of_a_context_alone_that_is_a_step_is_found(loaded):
    """A decorated function in any file of the package is registered once its stage is loaded."""
    root = Path(context.__file__).parent
    written = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for each in getattr(node, "decorator_list", ()):
                if isinstance(each, ast.Call) and ast.unparse(each.func) == "family":
                    written.add((path.stem, node.name))
    found = {(r.run.__module__.rpartition(".")[2], r.run.__name__) for r in context._registered.values()}
    assert found == written


def test_two_steps_in_one_place_are_refused(monkeypatch):
    monkeypatch.setattr(context, "_registered", {})

    def one(context):
        pass

    def two(context):
        pass

    family(None, "joint", 1)(one)
    family(None, "joint", 1)(one)  # a module that is loaded anew
    with pytest.raises(ValueError, match=r"joint step 1 is .*\.one already"):
        family(None, "joint", 1)(two)


def test_pre_grad_imports_no_more_than_its_room():
    code = """
import sys, torch
from torch_tile.inductor import driver, patterns
patterns.load("pre_grad")
found = [m for m in sys.modules if m.startswith("torch_tile.inductor.")]
assert "torch_tile.inductor.patterns.pre_grad.sdpa" in found
later = "patterns.gemm.", "patterns.attention.matcher", "select.decide", "compile_ahead.", "finalize"
for part in later:
    assert not [m for m in found if m.startswith("torch_tile.inductor." + part)], part
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class Says(Select):
    """A selection that is told what to say."""

    times = True

    def __init__(self, outcome=None, refusal=""):
        self.outcome, self.refusal = outcome, refusal

    def refused(self, nodes):
        return self.refusal

    def of_rewrite(self, rewrite, pairs):
        return self.outcome


@pytest.mark.parametrize(
    ("select", "status"),
    [
        (Select(), "replaced"),
        (Says(Outcome(1, 2)), "replaced"),
        (Says(Outcome(2, 1)), "kept"),
        (Says(Outcome(1, 2), "not here"), "kept"),
    ],
)
def test_a_context_does_what_the_selection_says(select, status):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    fake = FakeTensorMode()
    with fake:
        x.meta["val"] = torch.empty(2)
    old = graph.call_function(torch.ops.aten.relu.default, (x,))
    old.meta["val"] = x.meta["val"]
    out = graph.output(old)
    context = Context(graph, Settings(), "inference", select)
    with V.set_fake_mode(fake), collect() as report:
        rewrite = Rewrite(old)
        new = rewrite.call(torch.ops.aten.abs.default, x)
        changed = context.replace(rewrite, "gemm", [(old, new)], "it", old)
    assert [r.status for r in report.rows] == [status] and changed == (status == "replaced")
    assert out.args[0] is (new if changed else old)


def test_policies():
    assert isinstance(policy_of(Settings()), Fastest) and policy_of(Settings()).times
    assert type(policy_of(Settings("tile"))) is Always and not policy_of(Settings("tile")).times
