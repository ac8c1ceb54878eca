# SPDX-License-Identifier: Apache-2.0

import time

import pytest
import torch

import torch_tile.language as T
from torch_tile.autotuner.trials import ROUNDS, made_by_seed, race, spare, written


class Timer:
    """Milliseconds of named calls, turn by turn; the last one repeats."""

    def __init__(self, **speeds):
        self.speeds, self.log = speeds, []

    def __call__(self, call, warmup, rep):
        name = call()
        self.log.append(name)
        round_ = self.log.count(name) - 1
        return self.speeds[name][min(round_, len(self.speeds[name]) - 1)]


def run(timer, **options):
    calls = [lambda name=name: name for name in timer.speeds]
    return dict(zip(timer.speeds, race(calls, timer=timer, **options), strict=True))


def test_the_slow_leave_after_two_turns():
    timer = Timer(slow=[2.0], best=[1.0], near=[1.2])
    found = run(timer)
    assert found["slow"].dropped and found["slow"].latency == 2.0 and len(found["slow"].times) == 2
    assert not found["best"].dropped and len(found["best"].times) == len(found["near"].times) == ROUNDS
    assert timer.log[:5] == ["slow", "best", "near", "near", "best"]  # there and back


def test_all_stay_without_early_stop():
    found = run(Timer(slow=[20.0], best=[1.0]), stop_factor=None)
    assert len(found["slow"].times) == ROUNDS and not found["slow"].dropped


def test_a_slow_moment_is_forgiven():
    """The best turn counts."""
    found = run(Timer(steady=[1.0], disturbed=[40.0, 0.8, 40.0]))
    assert found["disturbed"].latency == 0.8 and not found["disturbed"].dropped


def test_what_raises_is_out_and_the_others_go_on():
    def bad():
        raise RuntimeError("no")

    failures, ticks = [], []
    good, out = race(
        [lambda: None, bad], 1, 1, timer=lambda call, *_: (call(), 1.0)[1], tick=lambda: ticks.append(1),
        failed=lambda: failures.append(1),
    )  # fmt: skip
    assert good.latency == 1.0 and out.latency is None and str(out.failure) == "no"
    assert len(failures) == 1 and len(ticks) == ROUNDS + 1


def test_a_lost_machine_ends_the_race():
    def lost():
        raise OSError("the GPU is gone")

    def bad():
        raise RuntimeError("no")

    with pytest.raises(OSError, match="gone"):
        race([bad, lambda: None], timer=lambda call, *_: call() or 1.0, failed=lost)


def test_real_time():
    slow, fast = race([lambda: time.sleep(0.005), lambda: None], warmup=1, rep=8)
    assert slow.dropped and slow.latency >= 5 and fast.latency < slow.latency


def test_nothing_to_do():
    assert race([]) == []


def test_what_a_program_writes():
    @T.prim_func
    def main(x: T.Tensor((32,), "float32"), y: T.Tensor((32,), "float32"), z: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32) as _:
            tile = T.alloc_shared((32,), "float32")
            T.copy(x, tile)
            T.copy(tile, y)
            T.atomic_add(z[0], 1.0)

    program = main.program
    assert [p in written(program) for p in program.params] == [False, True, True]


def test_spare_tensors_have_the_same_strides_and_values():
    x = torch.arange(24.0).reshape(4, 6)
    for view in (x, x.T, x[:, ::2], x[1:3, 2:4], torch.tensor(3.0), x[:0]):
        made = spare(view)
        assert made.stride() == view.stride() and torch.equal(made, view)
        assert not view.numel() or made.data_ptr() != view.data_ptr()
    wide = torch.ones(1).expand(4)
    assert spare(wide) is wide and spare(3) == 3
    assert not spare(torch.ones(2, requires_grad=True)).requires_grad


def test_the_callers_random_numbers_go_on():
    torch.manual_seed(1)
    want = torch.rand(3)
    torch.manual_seed(1)
    with made_by_seed():
        first = torch.rand(2)
    assert torch.equal(torch.rand(3), want)
    with made_by_seed():
        assert torch.equal(torch.rand(2), first)
