# SPDX-License-Identifier: Apache-2.0
"""Atomics lose no update when many threads meet on few places, and return what stood there."""

import pytest
import torch

TYPES = [torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.float16, torch.bfloat16]


def source(t: str) -> str:
    """Each thread applies x[i] to place i % places; `seen` gets the value that was returned."""
    loops = "".join(
        f'extern "C" void each_{f}(const {t}* x, {t}* y, {t}* seen, int64_t n, int64_t places) {{\n'
        "#pragma omp parallel for num_threads(4) schedule(static, 1)\n"
        f"for (int64_t i = 0; i < n; ++i) seen[i] = {f}(y + i % places, x[i]);\n}}\n"
        for f in ["atomic_add", "atomic_max", "atomic_min", "atomic_exchange"]
        + (["atomic_or", "atomic_and", "atomic_xor"] if "int" in t else [])
    )
    return f'#include "cpu_atomic.h"\nusing namespace tile;\n{loops}'


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_many_threads(dtype, library, c_names, seed):
    built = library(source(c_names[dtype]))
    n, places = 20_000, 3
    # Small integers: sums stay exact in every type, so that the order of the updates does not show.
    x = torch.zeros(n, dtype=torch.int64)
    x[torch.randperm(n)[:300]] = 1
    start = torch.tensor([1, 2, 3])
    groups = [x[p::places] for p in range(places)]
    want = {
        "atomic_add": [int(s + g.sum()) for s, g in zip(start, groups, strict=True)],
        "atomic_max": [max(int(s), int(g.max())) for s, g in zip(start, groups, strict=True)],
        "atomic_min": [min(int(s), int(g.min())) for s, g in zip(start, groups, strict=True)],
    }
    if not dtype.is_floating_point:
        want["atomic_or"] = [int(s) | int(g.max()) for s, g in zip(start, groups, strict=True)]
        want["atomic_and"] = [int(s) & int(g.min()) for s, g in zip(start, groups, strict=True)]
        want["atomic_xor"] = [int(s) ^ int(g.sum()) % 2 for s, g in zip(start, groups, strict=True)]
    for name, value in want.items():
        y, seen = start.clone().to(dtype), torch.empty(n, dtype=dtype)
        built(f"each_{name}", x.to(dtype), y, seen, n, places)
        assert y.tolist() == value, name
        if name == "atomic_add":
            # Every value that grew was seen exactly once by the thread that made it grow.
            for p in range(places):
                grew = seen[p::places][groups[p] != 0].double().sort().values
                assert grew.tolist() == [float(start[p] + i) for i in range(len(grew))]


def test_arrivals(library):
    """Of every `count` arrivals one is the last, and it sees what the others wrote before theirs."""
    text = """
#include "cpu_atomic.h"
extern "C" void arrivals(int32_t* counter, int32_t* parts, int64_t* sums, int64_t turns, int32_t count) {
#pragma omp parallel for num_threads(4) schedule(static, 1)
  for (int64_t i = 0; i < 4 * turns; ++i) {
    int64_t turn = i / count;  // four threads go round together, as far as they are able to
    parts[i] = int32_t(i);
    if (tile::cpu_arrive_last(counter + turn, count))
      for (int32_t n = 0; n < count; ++n) sums[turn] += parts[turn * count + n] + 1;
  }
}
"""
    turns, count = 30_000, 8
    counter, parts = torch.zeros(turns // 2, dtype=torch.int32), torch.full((4 * turns,), -1, dtype=torch.int32)
    sums = torch.zeros(turns // 2, dtype=torch.int64)
    library(text)("arrivals", counter, parts, sums, turns, count)
    assert not counter.any()
    assert torch.equal(sums, (torch.arange(4 * turns) + 1).view(-1, count).sum(1))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_exchange(dtype, library, c_names, seed):
    """What was put in comes out once each: the returned values and the last one are a permutation of all."""
    built = library(source(c_names[dtype]))
    x = torch.arange(1, 101)[torch.randperm(100)]
    y, seen = torch.zeros(1, dtype=dtype), torch.empty(100, dtype=dtype)
    built("each_atomic_exchange", x.to(dtype), y, seen, 100, 1)
    assert sorted(seen.tolist() + y.tolist()) == list(range(101))
