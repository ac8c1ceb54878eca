# SPDX-License-Identifier: Apache-2.0
"""`select="fastest"`: both sides are timed, the winner stays, and the outcome is remembered."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F

from torch_tile.inductor.backend import tile
from torch_tile.inductor.compat import no_graph_caches
from torch_tile.inductor.dry_run import dry_run
from torch_tile.inductor.report.rows import collect
from torch_tile.inductor.select import benchmark, decide
from torch_tile.inductor.select.decide import Outcome


@pytest.fixture(autouse=True)
def forget(monkeypatch, tmp_path):
    """No outcome from earlier, in memory or on disk."""
    monkeypatch.setattr(decide, "_outcomes", {})
    monkeypatch.setenv("TORCH_TILE_CACHE_DIR", str(tmp_path))


def block(x, w, v, g):
    h = F.rms_norm(torch.relu(x @ w), (12,), g)
    return F.scaled_dot_product_attention(h[None, None], h[None, None], torch.tanh(h @ v)[None, None], is_causal=True)


def operands():
    """Numbers of about 1: their size, to a power of 4, is part of an outcome's key."""
    return torch.randn(6, 8), torch.randn(8, 12), torch.randn(12, 4), torch.rand(12) + 0.5


def run(backend=dry_run):
    torch._dynamo.reset()
    args = operands()
    with torch.no_grad(), no_graph_caches(), collect() as report:
        got = torch.compile(block, backend=backend)(*args)
    torch.testing.assert_close(got, block(*args), rtol=1e-5, atol=1e-5)
    return report


@pytest.mark.parametrize(("outcome", "status"), [(Outcome(1, 2), "replaced"), (Outcome(2, 1), "kept")])
def test_the_winner_stays(outcome, status, monkeypatch):
    monkeypatch.setattr(decide, "_measure", lambda new, old, key, *_: outcome)
    report = run()
    assert {r.family for r in report.rows} == {"gemm", "norm", "attention"}
    assert {r.status for r in report.rows} == {status}
    assert all("us, Inductor" in r.reason for r in report.rows)


def test_losers_leave_no_tile_op(monkeypatch):
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setattr(decide, "_measure", lambda new, old, key, *_: Outcome(2, 1))
    with torch.no_grad(), no_graph_caches():
        _, (code,) = run_and_get_code(torch.compile(block, backend=tile), *operands())
    assert "torch_tile" not in code and "ops.tile" not in code
    assert "extern_kernels.mm" in code


def test_real_measurement_and_memory(monkeypatch):
    """The whole of it once: two sides compiled and timed, then remembered, then read from disk."""
    monkeypatch.setitem(benchmark.BUDGET, "cpu", 0.02)
    calls = []
    measure = decide._measure
    monkeypatch.setattr(decide, "_measure", lambda *args: calls.append(args[2]) or measure(*args))
    first = run(tile)
    assert len(calls) == len(set(calls)) == len(first.rows) >= 3
    assert all(r.status in ("replaced", "kept") for r in first.rows)
    run(tile)
    assert len(calls) == len(first.rows)
    decide._outcomes.clear()
    assert [(r.status, r.reason) for r in run(tile).rows] == [(r.status, r.reason) for r in first.rows]
    assert len(calls) == len(first.rows)


@pytest.mark.parametrize(("mode", "contests"), [(None, 0), ("max-autotune", 1)])
def test_plain_products_are_timed_on_request(mode, contests, monkeypatch):
    """Nobody is much faster than ATen at those, and finding out takes as long as compiling the model."""
    keys = []
    monkeypatch.setattr(decide, "_measure", lambda new, old, key, *_: keys.append(key) or Outcome(1, 2))
    with torch.no_grad(), no_graph_caches(), collect() as report:
        torch.compile(F.linear, backend=functools.partial(dry_run, mode=mode))(
            *(torch.randn(s) for s in ((3, 8), (4, 8), 4))
        )
    assert len(keys) == contests
    assert [r.status for r in report.rows] == ["replaced" if contests else "kept"]


def test_contests_leave_counters_and_saved_code_alone(monkeypatch):
    """A compilation with contests and one that remembers their outcomes look alike to Inductor's tools."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setitem(benchmark.BUDGET, "cpu", 0.02)
    contests, measure, found = [], decide._measure, []
    monkeypatch.setattr(decide, "_measure", lambda *args: contests.append(args[2]) or measure(*args))
    args = operands()
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        with torch.no_grad(), no_graph_caches():
            _, codes = run_and_get_code(torch.compile(block, backend=tile), *args)
        found.append((len(codes), {name: dict(counts) for name, counts in counters.items()}, len(contests)))
    assert found[0] == found[1]
    assert found[0][0] == 1 and contests


def test_a_damaged_file_is_measured_again(monkeypatch, tmp_path):
    monkeypatch.setattr(decide, "_measure", lambda new, old, key, *_: decide._save(key, Outcome(1, 2)) or Outcome(1, 2))
    run()
    files = list((tmp_path / "select").glob("*.json"))
    assert files
    for file in files:
        file.write_text('{"tile": ')
    decide._outcomes.clear()
    assert {r.status for r in run().rows} == {"replaced"}


def test_norms_in_training_are_left_to_inductor(monkeypatch):
    """There is no tile backward: what is captured would lose more behind than it wins in front."""
    monkeypatch.setattr(decide, "decide", lambda new, old, settings: Outcome(2, 1))
    args = [t.requires_grad_() for t in operands()]
    with no_graph_caches(), collect() as report:
        torch.compile(block, backend=functools.partial(dry_run, options={"families": ["attention", "norm"]}))(*args)
    captured = [(r.family, r.status) for r in report.rows if r.graph == "pre_grad"]
    assert captured == [("norm", "missed"), ("attention", "kept")]
    assert not report.replaced() and "training" in report.rows[0].reason


def test_key_sees_shapes_strides_and_dtypes(monkeypatch):
    keys = []
    monkeypatch.setattr(decide, "_measure", lambda new, old, key, *_: keys.append(key) or Outcome(1, 2))
    f = lambda a, b: torch.relu(a @ b)  # noqa: E731
    a, b = torch.randn(6, 8), torch.randn(8, 8)
    for x, y in ((a, b), (a, b.t()), (a.double(), b.double()), (a[:5], b), (a, b)):
        torch._dynamo.reset()
        with torch.no_grad(), no_graph_caches():
            torch.compile(f, backend=dry_run, dynamic=False)(x, y)
    assert len(keys) == len(set(keys)) == 4


def test_both_sides_are_the_subgraph_and_no_more(monkeypatch):
    """Graphs view one tensor twice instead of sharing the view; the rival must not start from the model's input."""
    sides = []
    monkeypatch.setattr(decide, "_measure", lambda new, old, key, *_: sides.append((new, old)) or Outcome(1, 2))

    def layer(x, norm, gate, up, down):
        h = F.rms_norm(x, (16,), norm)
        return x + (F.silu(h @ gate) * (h @ up)) @ down

    def model(x, *weights):
        return layer(layer(x, *weights), *weights)

    args = [torch.randn(s) for s in ((2, 5, 16), 16, (16, 24), (16, 24), (24, 16))]
    with torch.no_grad(), no_graph_caches():
        torch.compile(model, backend=dry_run)(*args)
    assert len(sides) == 3  # norm, gate and up, down: the second layer is the first one again
    for _, old in sides:
        calls = [str(n.target) for n in old.graph.nodes if n.op == "call_function"]
        assert sum("aten.mm" in c for c in calls) <= 2
        assert not any("ops.tile" in c or c.startswith("tile.") for c in calls)
        assert not ("aten.mm.default" in calls and "aten.rsqrt.default" in calls)


def test_a_norm_that_loses_with_its_activation_is_inductors(monkeypatch):
    asked = []
    monkeypatch.setattr(decide, "_measure", lambda new, old, key, *_: asked.append(key) or Outcome(2, 1))
    with torch.no_grad(), no_graph_caches(), collect() as report:
        args = torch.randn(4, 16), torch.rand(16)
        got = torch.compile(lambda x, w: F.silu(F.rms_norm(x, (16,), w)), backend=dry_run)(*args)
    torch.testing.assert_close(got, F.silu(F.rms_norm(args[0], (16,), args[1])))
    assert len(asked) == 1 and [r.status for r in report.rows] == ["kept", "kept"]


@pytest.mark.parametrize(("mode", "bars"), [(None, 0), ("max-autotune", 1)])
def test_a_thorough_search_shows_its_progress(mode, bars, monkeypatch):
    told, opened = [], []

    @contextlib.contextmanager
    def progress(total, what):
        opened.append(what)
        yield lambda: told.append(what)

    monkeypatch.setattr(decide, "progress", progress)
    monkeypatch.setattr(benchmark, "times", lambda new, old, options: (1.0, 2.0))
    report = run(functools.partial(dry_run, mode=mode))
    assert len(opened) == bars and len(told) == bars * len({r.what for r in report.rows})


def test_ranks_choose_alike(monkeypatch):
    """The second rank has measured nothing and finds the opposite on its disk."""
    store, measured = torch.distributed.HashStore(), []
    monkeypatch.setattr(decide.compat, "distributed_store", lambda: store)
    monkeypatch.setattr(decide, "_measure", lambda new, old, key, *_: measured.append(key) or Outcome(1, 2))
    first = run()
    count = len(measured)
    decide._outcomes.clear()
    monkeypatch.setattr(decide, "_load", lambda key: Outcome(2, 1))
    second = run()
    assert len(measured) == count
    assert [(r.status, r.reason) for r in first.rows] == [(r.status, r.reason) for r in second.rows]
