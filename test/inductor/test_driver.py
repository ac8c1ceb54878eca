# SPDX-License-Identifier: Apache-2.0
"""What dynamic=True makes of a model's numbers: floats on the CPU among tensors of a GPU, and sizes that the graph does
not know. No GPU needed; that no family fails is checked behind every test (test/conftest.py).
"""

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_tile.inductor.driver import TilePass
from torch_tile.inductor.report.rows import collect
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


def run(f):
    """The rows of a graph whose last input alone is on the CPU; what replaces it can be computed, on one device."""
    with FakeTensorMode() as mode, V.set_fake_mode(mode), collect() as report:
        inputs = [torch.empty(*s, device="cuda") for s in ((16, 64), (64, 64), (1, 4, 16, 64))]
        inputs.append(torch.empty((), dtype=torch.float64))
        graph = make_fx(f, decomposition_table=select_decomp_table())(*inputs)
        TilePass("post_grad", Settings(select="tile")).run(graph.graph)
        graph.recompile()
        assert graph(*inputs).device.type == "cuda"
    return report


@pytest.mark.parametrize("name", FORMS)
def test_are_no_operands_of_kernels(name):
    f, family = FORMS[name]
    report = run(f)
    assert report.replaced(family) and not report.missed(), report


@pytest.mark.parametrize(
    "scores", [lambda scores, s: torch.tanh(scores / s) * s, lambda scores, s: scores + s], ids=["cap", "sum"]
)
def test_in_scores_are_told(scores):
    report = run(lambda x, w, q, s: torch.softmax(scores(q @ q.mT, s.float()), -1) @ q)
    assert "another device" in report.missed("attention")[0].reason, report


def swiglu(x, w, step):
    gate, up = step(F.linear(x, w)).chunk(2, -1)
    return F.silu(gate) * up


OPS = {  # what a value and a size are to each other
    "add": lambda y, n: y + n,
    "scaled add": lambda y, n: torch.add(y, y, alpha=n),
    "sub": lambda y, n: n - y,
    "mul": lambda y, n: n * y,
    "div": lambda y, n: y / n,
    "pow": lambda y, n: y.abs() ** (1 / n),
    "clamp": lambda y, n: y.clamp(-n, n),
    "compare": lambda y, n: torch.where(y < n / 100, y, n),
    "fill": lambda y, n: y.masked_fill(y > 0, n),
}
PLACES = {
    "epilogue": lambda x, w, f: F.gelu(f(x @ w)),
    "two products": lambda x, w, f: f(F.silu(x @ w)) * f(x @ w.mT),
    "columns": lambda x, w, f: swiglu(x, w, f),
    "bias": lambda x, w, f: F.relu(torch.addmm(f(w[0]), x[0], w)),
    "factors": lambda x, w, f: F.relu(torch.addmm(w[0], x[0], w, alpha=x.shape[1], beta=x.shape[1])),
    "front": lambda x, w, f: F.relu(f(x) @ w),
    "before a norm": lambda x, w, f: F.layer_norm(f(x), (16,), w[0], w[1]),
    "behind a norm": lambda x, w, f: f(F.rms_norm(x, (16,), w[0])),
    "weight of a norm": lambda x, w, f: F.rms_norm(x, (16,)) * f(w[0]),
    "int8 weight": lambda x, w, f: f(x @ f(w.round().to(torch.int8).float())),
    "scores": lambda x, w, f: f(x @ x.mT).softmax(-1) @ x,
    "queries": lambda x, w, f: (f(x) @ x.mT).softmax(-1) @ x,
    "factors of scores": lambda x, w, f: (
        torch.baddbmm(f(x[:, :, :7]), x, x.mT, alpha=x.shape[1], beta=x.shape[1]).softmax(-1) @ x
    ),
    "weights": lambda x, w, f: f((x @ x.mT).softmax(-1)) @ x,
    "latents": lambda x, w, f: f(x @ (2 * x).mT + (x + 1) @ w[:7].mT).softmax(-1) @ (2 * x),
    "softmax": lambda x, w, f: f(f(x * w[0]).softmax(-1)),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("op", OPS)
def test_sizes_leave_the_rest_to_be_found(op, place, agrees, generator):
    """Wherever a size takes part, the graph gives what eager gives, and no family fails."""
    x, w = torch.randn(3, 7, 16, generator=generator) / 4, torch.randn(16, 16, generator=generator) / 4

    def model(x, w):
        return PLACES[place](x, w, lambda y: OPS[op](y, x.shape[1])), F.gelu(x @ w)

    _, report = agrees(model, x, w, dynamic=True)
    assert report.replaced("gemm")
