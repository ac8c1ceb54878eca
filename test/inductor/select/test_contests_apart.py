# SPDX-License-Identifier: Apache-2.0
"""What contests compile and time is seen by nobody: not in Inductor's counters, and not among the code that it saves."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from torch_tile.inductor.backend import tile
from torch_tile.inductor.compat import no_caches
from torch_tile.inductor.select import benchmark, decide


def block(x, w, g):
    return torch.nn.functional.rms_norm(torch.relu(x @ w), (12,), g)


@pytest.fixture(autouse=True)
def forget(monkeypatch, tmp_path):
    """No outcome from earlier, in memory or on disk."""
    monkeypatch.setattr(decide, "_outcomes", {})
    monkeypatch.setenv("TORCH_TILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(benchmark.BUDGET, "cpu", 0.02)


def test_counters_and_saved_code_are_those_of_the_graph(monkeypatch):
    contests, measure = [], decide._measure
    monkeypatch.setattr(decide, "_measure", lambda *args: contests.append(args[2]) or measure(*args))
    found, args = [], (torch.randn(6, 8), torch.randn(8, 12), torch.rand(12))
    for _ in range(2):  # the second compilation remembers all outcomes
        torch._dynamo.reset()
        counters.clear()
        with torch.no_grad(), no_caches():
            _, codes = run_and_get_code(torch.compile(block, backend=tile), *args)
        found.append((len(codes), {name: dict(counts) for name, counts in counters.items()}))
        assert contests
        seen = len(contests)
    assert len(contests) == seen
    assert found[0] == found[1] and found[0][0] == 1
