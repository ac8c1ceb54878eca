# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from torch_tile.inductor import compat
from torch_tile.inductor.compat import no_graph_caches
from torch_tile.inductor.dry_run import dry_run
from torch_tile.inductor.report.rows import collect
from torch_tile.inductor.select import benchmark, decide
from torch_tile.inductor.select.decide import Outcome, buckets


def fake(*sizes, dynamic=(0,)):
    mode = FakeTensorMode(shape_env=ShapeEnv())
    kinds = [DimDynamic.DYNAMIC if d in dynamic else DimDynamic.STATIC for d in range(len(sizes))]
    return mode.from_tensor(torch.empty(sizes), symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))


def shapes(value):
    found = []
    for sizes in buckets([value]):
        with compat.at_sizes(sizes):
            found.append(tuple(compat.empty_for(value).shape))
    return found


def test_a_smaller_and_a_larger_problem():
    assert shapes(fake(100, 7)) == [(8, 7), (512, 7)]
    assert shapes(fake(3, 7)) == [(2, 7), (16, 7)]
    assert shapes(fake(40, 50, dynamic=(0, 1))) == [(8, 16), (64, 128)]
    assert shapes(torch.empty(3, 4)) == []


def test_strides_and_products_follow():
    x = fake(100, 6, 4)
    y = x.reshape(-1, 4).t()
    (small, large) = buckets([x, y])
    for sizes, rows in ((small, 8), (large, 512)):
        with compat.at_sizes(sizes):
            assert tuple(compat.empty_for(y).shape) == (4, 6 * rows) and compat.size_hint(x.stride(0)) == 24
    assert compat.size_hint(x.shape[0]) == 100


def test_stays_in_its_range():
    x = fake(100, 7)
    torch._check(x.shape[0] <= 200)
    torch._check(x.shape[0] >= 50)
    assert shapes(x) == [(50, 7), (200, 7)]


def test_no_problem_is_too_large(monkeypatch):
    monkeypatch.setattr(decide, "MOST_BYTES", 100 * 7 * 4)
    assert shapes(fake(100, 7)) == [(8, 7)]


@pytest.mark.parametrize(
    ("others", "wins"),
    [((), True), ((("at s0=8", 3.0, 3.0),), True), ((("at s0=8", 1.0, 3.0), ("at s0=512", 9.0, 8.0)), False)],
)
def test_one_choice_slower_at_none(others, wins):
    outcome = Outcome(1.0, 2.0, others)
    assert outcome.tile_wins == wins
    assert str(outcome).startswith("tile 1.0 us, Inductor 2.0 us")
    assert all(sizes in str(outcome) for sizes, *_ in others)


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """The sizes of the first input of each contest; ours wins but at 4 rows."""
    rows = []

    def times(new, old, options):
        x = compat.empty_for(next(iter(new.graph.nodes)).meta["val"])
        rows.append(x.shape[-2])
        return (3.0, 2.0) if x.shape[-2] == 4 else (1.0, 2.0)

    monkeypatch.setattr(benchmark, "times", times)
    monkeypatch.setattr(decide, "_outcomes", {})
    monkeypatch.setenv("TORCH_TILE_CACHE_DIR", str(tmp_path))
    return rows


@pytest.mark.parametrize("dynamic", [True, False])
def test_attention_of_any_length(dynamic, timed):
    q = torch.randn(2, 4, 35, 8)
    torch._dynamo.mark_static(q, 0)
    for d in (1, 3):
        torch._dynamo.mark_static(q, d)
    with torch.no_grad(), no_graph_caches(), collect() as report:
        torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), backend=dry_run, dynamic=dynamic)(q)
    (row,) = report.select("attention")
    if not dynamic:
        assert timed == [35] and row.status == "replaced"
        return
    assert timed == [35, 4, 256] and row.status == "kept"
    assert "=4: 3.0 and 2.0 us; at " in row.reason, row.reason


def test_outcomes_of_all_sizes_are_remembered(timed):
    outcome = Outcome(1.0, 2.0, (("at s0=8", 3.0, 4.5),))
    decide._save("key", outcome)
    assert decide._load("key") == outcome
    decide._file("key").write_text('{"tile": 1, "inductor": 2, "others": [["x"]]}')
    assert decide._load("key") is None
