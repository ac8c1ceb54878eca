# SPDX-License-Identifier: Apache-2.0
"""`explain` says what is found, where, and why not."""

import torch
import torch.nn.functional as F
from torch import nn

from torch_tile.inductor.explain import explain


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x))[:, None].chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        return x + self.mlp(x)


def test_rows_say_what_and_where():
    report = explain(Block(), torch.randn(2, 5, 16))
    where = {r.where.split()[0]: r.family for r in report.replaced()}
    assert where["norm"] == "norm"
    assert where["qkv"] == "gemm"
    assert {where[f"mlp.{i}"] for i in (0, 2)} == {"gemm"}
    (attention,) = report.replaced("attention")
    assert attention.where.endswith(f"test_explain.py:{Block.forward.__code__.co_firstlineno + 2}")
    assert report.graph_breaks == 0
    assert not report.missed()


def test_table():
    text = str(explain(Block(), torch.randn(2, 5, 16)))
    lines = text.splitlines()
    assert lines[0].split() == ["family", "status", "what", "where", "reason", "graph"]
    assert lines[-1] == "5 replaced"
    assert any("tile.layer_norm([" in line and " norm " in line for line in lines)


def test_near_misses_have_reasons():
    def f(q):
        return torch.softmax(torch.tanh(q @ q.mT), -1) @ q

    (row,) = explain(f, torch.randn(2, 3, 5, 8)).missed("attention")
    assert "tanh" in row.reason


def test_families_and_training():
    model, x = Block(), torch.randn(2, 5, 16)
    before = [p.grad for p in model.parameters()]
    report = explain(model, x, options={"select": "tile", "families": ["gemm"]}, backward=True)
    assert {r.family for r in report.rows} == {"gemm"}
    assert {r.graph for r in report.rows} == {"forward", "backward"}
    assert [p.grad for p in model.parameters()] == before


def test_graph_breaks_are_counted():
    def f(x):
        x = x @ x
        torch._dynamo.graph_break()
        return x @ x

    report = explain(f, torch.randn(4, 4))
    assert report.graph_breaks == 1
    assert len(report.replaced("gemm")) == 2
    assert str(report).endswith("1 graph breaks")


def test_twice_reports_twice():
    """Nothing comes from a cache, which would run no pass."""
    model, x = Block(), torch.randn(2, 5, 16)
    assert {len(explain(model, x).rows) for _ in range(10)} == {5}
