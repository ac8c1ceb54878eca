# SPDX-License-Identifier: Apache-2.0
"""Searches on a GPU: what is chosen is right and fast, and the cost model knows good from bad."""

import pytest
import shared_kernels
import torch

import torch_tile

pytestmark = pytest.mark.cuda

CONFIGS = [
    {"block_m": m, "block_n": n, "block_k": k, "stages": s}
    for m, n in ((32, 32), (64, 64), (64, 128), (128, 128))
    for k in (32, 64)
    for s in (1, 3)
]

add = torch_tile.jit(shared_kernels.add)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_TILE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("size", [(4096, 4096, 4096), (256, 512, 8192)], ids=str)
def test_products(product, size):
    """The model's order agrees with the clock's: Spearman's rank correlation over all configurations."""
    settings = {"warmup": 5, "rep": 40, "prune": None, "early_stop": False}
    function = torch_tile.jit(product, out_idx=[-1])
    tuned = torch_tile.autotune(configs=CONFIGS, ref_prog=lambda a, b: a @ b, **settings)(function)
    found = tuned.tune(*size)
    print(found)
    assert not any(each.note for each in found.trials), found
    times, estimates = ([getattr(each, name) for each in found.trials] for name in ("latency", "estimate"))
    assert found.latency == min(times) < 0.7 * max(times) and found.ref_latency < 2 * found.latency
    ranks = [torch.tensor(values).argsort().argsort().double() for values in (times, estimates)]
    correlation = float(torch.corrcoef(torch.stack(ranks))[0, 1])
    print(f"rank correlation of the model {correlation:.2f}")
    assert correlation > 0.4
    kept = [time for time, estimate in zip(times, estimates, strict=True) if estimate < 3 * min(estimates)]
    assert min(kept) < 1.2 * min(times)  # what pruning costs
    m, n, k = size
    a, b = torch.randn(m, k, device="cuda").half(), torch.randn(k, n, device="cuda").half()
    torch.testing.assert_close(found.kernel(a, b), a @ b, atol=0.5, rtol=1e-2)


def test_an_eager_kernel_and_a_graph():
    tuned = torch_tile.autotune(
        configs=[{"block": n, "threads": 128} for n in (32, 512, 2048)], warmup=2, rep=10, prune=None
    )(add)
    a, b = (torch.randn(2**22, device="cuda") for _ in range(2))
    torch.testing.assert_close(tuned(a, b), a + b)
    assert tuned.tune(a, b).config["block"] != 32
    fresh = torch_tile.autotune(configs=[{"block": n, "threads": 128} for n in (256, 1024)], prune=None)(add)
    add(a, b, 256, 128), add(a, b, 1024, 128)  # loaded, as capturing forbids
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fresh(a, b)  # by the model: nothing can be timed now
    graph.replay()
    torch.testing.assert_close(out, a + b)
