# SPDX-License-Identifier: Apache-2.0
"""Numbers on the CPU among tensors of a GPU: what dynamic=True makes of a model's floats. No GPU needed."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_tile.inductor.passes.manager import TilePass
from torch_tile.inductor.report import collect
from torch_tile.inductor.settings import Settings

FORMS = {
    "epilogue": (lambda x, w, q, s: F.silu(x @ w * s.float()).sin(), "gemm"),
    "two products": (lambda x, w, q, s: F.silu(x @ w) * s.float() * (x @ w.mT), "gemm"),
    "around a norm": (lambda x, w, q, s: F.layer_norm(x + x * s.float(), (64,)) * (1 + s.float()), "norm"),
    "weight": (lambda x, w, q, s: x @ (w.to(torch.int8).float() * s), "dequant"),
    "weight of scaled rows": (lambda x, w, q, s: x @ (w.to(torch.int8).float() * w.sum(0) * s).mT.mT, "dequant"),
    "scores": (lambda x, w, q, s: torch.softmax(q @ q.mT * s, -1) @ q, "attention"),
    "queries": (lambda x, w, q, s: torch.softmax((q * s) @ q.mT, -1) @ q, "attention"),
}


def run(f, caplog):
    """The rows of a graph whose last input alone is on the CPU; what replaces it can be computed, on one device."""
    caplog.set_level(logging.ERROR, "torch_tile.inductor")
    with FakeTensorMode() as mode, V.set_fake_mode(mode), collect() as report:
        inputs = [torch.empty(*s, device="cuda") for s in ((16, 64), (64, 64), (1, 4, 16, 64))]
        inputs.append(torch.empty((), dtype=torch.float64))
        graph = make_fx(f, decomposition_table=select_decomp_table())(*inputs)
        TilePass("post_grad", Settings(select="tile")).run(graph.graph)
        graph.recompile()
        assert graph(*inputs).device.type == "cuda"
    assert not caplog.records
    return report


@pytest.mark.parametrize("name", FORMS)
def test_are_no_operands_of_kernels(name, caplog):
    f, family = FORMS[name]
    report = run(f, caplog)
    assert report.replaced(family) and not report.missed(), report


@pytest.mark.parametrize(
    "scores", [lambda scores, s: torch.tanh(scores / s) * s, lambda scores, s: scores + s], ids=["cap", "sum"]
)
def test_in_scores_are_told(scores, caplog):
    report = run(lambda x, w, q, s: torch.softmax(scores(q @ q.mT, s.float()), -1) @ q, caplog)
    assert "another device" in report.missed("attention")[0].reason, report
