# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import pytest
import torch

from benchmarks import timer
from benchmarks.timer import Ceilings, Timing, measure, measure_ceilings


class FakeGpu:
    """A clock that only calls and flushes move, and a record of them."""

    def __init__(self):
        self.now, self.log = 0.0, []
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                self.time = None

            def record(self):
                self.time = gpu.now

            def elapsed_time(self, later):
                return 1e3 * (later.time - self.time)

        cuda = SimpleNamespace(Event=Event, synchronize=lambda: self.log.append("wait"))
        buffer = SimpleNamespace(zero_=lambda: self.call("flush", 7.0))
        self.torch = SimpleNamespace(cuda=cuda, int8=torch.int8, empty=lambda *args, **options: buffer)

    def call(self, name, seconds):
        self.log.append(name)
        self.now += seconds


def test_gpu_samples_are_interleaved_and_cold(monkeypatch):
    gpu = FakeGpu()
    monkeypatch.setattr(timer, "torch", gpu.torch)
    monkeypatch.setattr(timer, "rounds_for", lambda seconds, once: 12)
    times = {"a": 1.0, "b": 2.0, "c": 3.0}
    samples = timer.by_events({n: lambda n=n, t=t: gpu.call(n, t) for n, t in times.items()}, 1.0)
    assert samples == {name: [t] * 12 for name, t in times.items()}, "flushes are not part of a sample"
    for before, name in zip(gpu.log, gpu.log[1:], strict=False):
        assert name not in times or before == "flush"
    order = [name for name in gpu.log if name in times][2 * len(times) :]  # after the two rounds that warm up
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert rounds[:3] == ["abc", "bca", "cab"] and len(rounds) == 12
    assert gpu.log.count("wait") == 2 + 3, "one wait for each burst of five rounds"


def test_rounds_fit_into_the_time():
    assert timer.rounds_for(1.0, 0.1) == 10
    assert timer.rounds_for(1.0, 10.0) == timer.FEWEST
    assert timer.rounds_for(1.0, 0.0) == timer.MOST


def test_clock_counts_every_call():
    counts = {"a": 0, "b": 0}

    def count(name):
        counts[name] += 1

    found = measure({name: lambda name=name: count(name) for name in counts}, 0.001, "cpu")
    assert {name: t.count + 1 for name, t in found.items()} == counts
    assert all(0 < t.low <= t.median <= t.high for t in found.values())


def test_percentiles():
    timing = Timing.of([float(x) for x in range(11, 0, -1)])
    assert timing == Timing(6.0, 3.0, 9.0, 11) and timing.spread == pytest.approx(0.5)


def test_ceilings_say_what_bounds():
    limits = Ceilings(copy=10.0, read=20.0, products={"fp16": 100.0})
    assert limits.seconds(1000.0, 20.0, "fp16", "read") == (10.0, "flops")
    assert limits.seconds(50.0, 20.0, "fp16", "read") == (1.0, "bytes")
    assert limits.seconds(50.0, 20.0, "fp16", "copy") == (2.0, "bytes")
    assert limits.seconds(1000.0, 0.0, "fp64", "copy") == (10.0, "flops"), "a dtype that was not measured"


def test_ceilings_of_this_machine():
    limits = measure_ceilings("cpu", [torch.float32], 0.01)
    assert 1e8 < limits.copy <= limits.read < 1e14
    assert list(limits.products) == ["fp32"] and limits.products["fp32"] > 1e8
