# SPDX-License-Identifier: Apache-2.0
import threading

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_tile.inductor.compat import no_caches
from torch_tile.inductor.compile_ahead import kernels
from torch_tile.inductor.select import benchmark


def graph_of(f, *shapes):
    return make_fx(f, tracing_mode="fake")(*map(torch.randn, shapes))


@pytest.mark.parametrize(
    ("f", "options", "compiled"),
    [
        (torch.mm, {}, 0),
        (lambda a, b: torch.relu(a @ b), {}, 2),
        (torch.mm, {"max_autotune": True}, 2),  # Inductor's search may find a faster product
        (lambda a, b: torch.ops.tile.gemm(a, [b], [], "", "", a.dtype), {"max_autotune": True}, 0),
    ],
)
def test_calls_are_made_and_the_rest_is_compiled(f, options, compiled, monkeypatch):
    made = []
    compile_alone = benchmark.compat.compile_alone
    monkeypatch.setattr(benchmark.compat, "compile_alone", lambda *args: made.append(args) or compile_alone(*args))
    monkeypatch.setitem(benchmark.BUDGET, "cpu", 0.01)
    with no_caches():
        ours, theirs = benchmark.times(graph_of(f, (8, 8), (8, 8)), graph_of(f, (8, 8), (8, 8)), options)
    assert len(made) == compiled and ours > 0 and theirs > 0


def test_kernels_are_compiled_while_the_other_side_is_made_ready(monkeypatch):
    """All at a time, and before they are called."""
    together, order = threading.Barrier(3), []

    def prepare(op, *rest):
        together.wait(60)
        order.append(op)

    def ours(q, k, v):
        out, lse = torch.ops.tile.attention_lse(q, k, v)
        return torch.ops.tile.attention_backward(out, q, k, v, out, lse)[:3]

    made = make_fx(ours, tracing_mode="fake")(*(torch.randn(1, 2, 8, 16) for _ in "qkv"))
    run = benchmark._run
    monkeypatch.setattr(kernels, "prepare", prepare)
    monkeypatch.setattr(benchmark, "_run", lambda call, inputs: (order or together.wait(60), run(call, inputs)))
    monkeypatch.setitem(benchmark.BUDGET, "cpu", 0.01)
    benchmark.times(made, graph_of(torch.mm, (8, 8), (8, 8)), {})
    assert [op.name() for op in order] in (
        ["tile::attention_lse", "tile::attention_backward"],
        ["tile::attention_backward", "tile::attention_lse"],
    )


def test_the_slower_one_is_seen(monkeypatch):
    monkeypatch.setitem(benchmark.BUDGET, "cpu", 0.05)
    small, large = graph_of(torch.mm, (8, 8), (8, 8)), graph_of(torch.mm, (512, 512), (512, 512))
    ours, theirs = benchmark.times(large, small, {})
    assert ours > 3 * theirs
