# SPDX-License-Identifier: Apache-2.0
"""Attention in training under `select="fastest"`: both directions are timed together, before autograd."""

import functools

import pytest
import torch
import torch.nn.functional as F

from torch_tile.inductor.backend import tile
from torch_tile.inductor.compat import no_graph_caches
from torch_tile.inductor.context import AttentionOperands
from torch_tile.inductor.dry_run import dry_run
from torch_tile.inductor.report.rows import collect
from torch_tile.inductor.select import decide
from torch_tile.inductor.select.decide import Outcome
from torch_tile.inductor.select.training import compete_attention
from torch_tile.inductor.settings import Settings


def attend(q, k, v, mask=None):
    return F.scaled_dot_product_attention(q.sin(), k, v, mask, is_causal=mask is None, enable_gqa=True).cos()


def operands(kv_heads=2):
    shapes = (2, 4, 9, 16), (2, kv_heads, 9, 16), (2, kv_heads, 9, 16)
    return [torch.randn(shape).requires_grad_() for shape in shapes]


def run(f, args, backend, dynamic=None):
    torch._dynamo.reset()
    with no_graph_caches(), collect() as report:
        out = torch.compile(f, backend=backend, dynamic=dynamic)(*args)
        return torch.autograd.grad(out.square().sum(), [x for x in args if x.requires_grad]), report


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("wins", [False, True])
def test_the_winner_stays(monkeypatch, wins, dynamic):
    graphs = []

    def measure(new, old, *_):
        graphs.append([{str(n.target) for n in x.graph.nodes if n.op == "call_function"} for x in (new, old)])
        return Outcome(1, 2) if wins else Outcome(2, 1)

    monkeypatch.setattr(decide, "_measure", measure)
    monkeypatch.setattr(decide, "_outcomes", {})
    monkeypatch.setattr(decide, "_load", lambda key: None)
    backend = functools.partial(dry_run, options={"families": ["attention"]})
    args = operands()
    got, report = run(attend, args, backend, dynamic)
    want = torch.autograd.grad(attend(*args).square().sum(), args)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    found = {(r.status, r.graph) for r in report.rows}
    assert found == ({("replaced", "forward"), ("replaced", "backward")} if wins else {("kept", "pre_grad")})
    ((ours, theirs),) = graphs
    assert {"tile.attention_lse.default", "tile.attention_backward.default"} <= ours
    assert not any(name.startswith("tile.") for name in theirs) and any("backward" in name for name in theirs)


MASKS = {
    "none": lambda: None,
    "bool": lambda: torch.rand(9, 9) > 0.3,
    "learned": lambda: torch.randn(4, 9, 9, requires_grad=True),
}


@pytest.mark.parametrize("masked", MASKS)
def test_it_is_measured(masked, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_TILE_CACHE_DIR", str(tmp_path))
    decide._outcomes.clear()
    outcome = compete_attention(AttentionOperands(*operands(4), MASKS[masked]()), masked == "none", 0.3, Settings())
    assert outcome.tile > 0 and outcome.inductor > 0


@pytest.mark.parametrize("masked", MASKS)
def test_generated_code(masked):
    """Several outputs of one call, in buffers of Inductor's; a learned mask gets its gradient."""
    args = [*operands(), *([] if masked == "none" else [MASKS[masked]()])]
    got, report = run(attend, args, functools.partial(tile, options={"select": "tile"}))
    wanted = [x for x in args if x.requires_grad]
    torch.testing.assert_close(got, torch.autograd.grad(attend(*args).square().sum(), wanted), rtol=1e-4, atol=1e-4)
    assert [r.graph for r in report.replaced("attention")] == ["forward", "backward"]
