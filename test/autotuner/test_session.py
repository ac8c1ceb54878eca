# SPDX-License-Identifier: Apache-2.0
"""Searches on the CPU, with kernels that really run and a clock that says what the test wants."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.autotuner import AutoTuner, session as module, trials
from torch_tile.autotuner.result import Settings
from torch_tile.autotuner.session import Session
from torch_tile.diagnostics.errors import LaunchError, TileError, error
from torch_tile.runtime.nvrtc import NoNvrtcError

BLOCKS = [{"block": 32}, {"block": 64}, {"block": 128}]


def search(function, configs=BLOCKS, args=(96,), inputs=None, **settings):
    return Session(function, configs, Settings(**{"prune": None, **settings}), args, {}, inputs).result()


def notes(result):
    return [each.note for each in result.trials]


def stored(folder):
    return [path for path in folder.rglob("*.json") if '"trials"' in path.read_text()]


def test_the_fastest_wins_and_the_table_says_what_became_of_the_others(lazy, clock):
    clock(1.2, 1.0, 9.0)
    found = search(lazy)
    assert found.config == {"block": 64} and found.latency == 1.0
    assert notes(found) == ["", "", "left early"] and [t.latency for t in found.trials] == [1.2, 1.0, 9.0]
    assert all(t.estimate > 0 for t in found.trials)


@pytest.fixture
def one_thread():
    """Kernels of several threads wait for whatever else the machine does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_real_kernels_on_a_real_clock(product, one_thread):
    """A block of one row at a time is far slower than one of 64."""
    function = torch_tile.jit(product, out_idx=[-1], target="cpu")
    configs = [{"block_m": 1, "block_n": 1, "block_k": 32}, {"block_m": 64, "block_n": 64, "block_k": 64}]
    found = search(function, configs, (128, 128, 128), warmup=10, rep=100)
    assert found.best == 1 and found.latency < found.trials[0].latency


def test_failures_are_skipped_and_listed(lazy, clock):
    clock(1.0)
    found = search(lazy, [{"block": 0}, {"block": "x"}, {"block": 32}, {"nonsense": 1}])
    assert found.best == 2
    assert [bool(n) for n in notes(found)] == [True, True, False, True]
    assert "nonsense" in notes(found)[3]


def test_a_compiler_error_is_a_failure_of_one_configuration(lazy, clock, monkeypatch):
    clock(1.0)
    original = type(lazy).build

    def build(self, program, target):
        if "range(128)" in repr(program) or "128" in repr(program):
            raise error("shared_memory", None, need=1, target="x", limit=0)
        return original(self, program, target)

    monkeypatch.setattr(type(lazy), "build", build)
    found = search(lazy, [{"block": 32}, {"block": 128}])
    assert found.best == 0 and "needs 1 bytes of shared memory" in notes(found)[1]


def test_all_failing_is_one_error_that_lists_the_reasons(lazy):
    with pytest.raises(TileError) as caught:
        search(lazy, [{"block": 0}, {"block": -1}])
    assert caught.value.code == "no_config"
    assert "none of the 2 configurations of `scale` works" in str(
        caught.value
    ) and "block=0: T.ceildiv: argument `b`" in str(caught.value)
    with pytest.raises(TileError, match="and 8 more"):
        search(lazy, [{"block": str(n)} for n in range(20)])


def test_what_each_configuration_fails_for_is_told_once_with_its_line(lazy):
    with pytest.raises(TileError) as caught:
        search(lazy, [{"block": 0, "threads": n} for n in range(20)])
    text = str(caught.value)
    assert text.count("argument `b`") == 1 and "threads=2; and 17 more: T.ceildiv" in text
    assert "T.ceildiv(" in caught.value.span.source() and "fix: divide by" in text


def test_a_missing_compiler_is_no_configurations_fault(lazy, monkeypatch):
    def build(self, program, target):
        raise NoNvrtcError("there is none")

    monkeypatch.setattr(type(lazy), "build", build)
    with pytest.raises(NoNvrtcError):
        search(lazy)


def test_launch_failures(lazy, monkeypatch):
    """What raises while it is timed is out; the device is asked whether it is still there."""
    asked, called = [], []
    monkeypatch.setattr(trials, "synchronize", asked.append)

    def timer(backend, call, warmup, rep):
        called.append(call)
        if call is called[0]:
            raise LaunchError("no")
        return 1.0

    monkeypatch.setattr(trials, "_timed", timer)
    found = search(lazy)
    assert found.best == 1 and notes(found) == ["LaunchError: no", "", ""] and len(asked) == 1

    def lost(target):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(trials, "synchronize", lost)
    called.clear()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        search(lazy, args=(64,))


def test_a_gpu(product, monkeypatch, folder):
    """The way of a GPU, which only the clock pretends to be: compiled for it, timed by its events, kept by its name."""
    monkeypatch.setattr(module, "can_measure", lambda target: True)
    monkeypatch.setattr(module, "device_name", lambda target: "NVIDIA H200")
    monkeypatch.setattr(module.Profiler, "inputs", lambda self: ["a", "b"])
    timed = []

    def timer(backend, call, warmup, rep):
        assert call.args == ("a", "b") and call.func.cubin.data[:4] == b"\x7fELF"
        timed.append((backend, warmup, rep))
        (resources,) = call.func.resources.values()
        return 1.0 if resources.registers > 64 else 2.0

    monkeypatch.setattr(trials, "_timed", timer)
    function = torch_tile.jit(product, out_idx=[-1], target="cuda:sm_90a")
    configs = [{"block_m": 256, "block_n": 256, "block_k": 128}, {"block_m": 32, "block_n": 32}, {"block_m": 128}]
    found = search(function, configs, (256, 256, 256), prune=10.0)
    assert found.best == 2 and notes(found)[1:] == ["left early", ""] and "shared memory" in notes(found)[0]
    assert set(timed) == {("event", 6.25, 25.0)} and len(timed) == 6
    assert search(function, configs, (256, 256, 256), prune=10.0) == found and len(timed) == 6
    monkeypatch.setattr(module, "device_name", lambda target: "NVIDIA H100 80GB HBM3")
    search(function, configs, (256, 256, 256), prune=10.0)
    assert len(timed) == 12


def test_wrong_results_are_out(lazy, clock):
    clock(1.0, 1.0)
    configs = [{"factor": 3.0}, {"factor": 2.0}]
    found = search(lazy, configs, ref_prog=lambda x: x * 2)
    assert found.best == 1 and "differs from ref_prog: AssertionError" in notes(found)[0]
    assert found.ref_latency == 1.0
    assert search(lazy, configs, ref_prog=lambda x: x * 2, skip_check=True, early_stop=False).best == 0

    def manual(got, want):
        assert torch.equal(got, want * 1.5)

    clock(1.0, 1.0)
    assert search(lazy, [*configs, {"factor": 5.0}], ref_prog=lambda x: x * 2, manual_check_prog=manual).best == 0


def test_the_model_prunes(product, clock):
    clock(1.0, 1.0)
    function = torch_tile.jit(product, out_idx=[-1], target="cpu")
    configs = [{"block_m": 1, "block_n": 1}, {"block_m": 64}, {"block_m": 32}]
    found = search(function, configs, (128, 128, 128), prune=3.0)
    assert "the model expects" in notes(found)[0] and found.trials[0].latency is None and found.best == 1


def test_without_measuring_the_model_chooses(product, monkeypatch, folder):
    """TORCH_TILE_AUTOTUNE=0; and a GPU that is not here: what does not fit in shared memory is out."""
    monkeypatch.setattr(trials, "race", None)
    function = torch_tile.jit(product, out_idx=[-1], target="cuda:sm_90a")
    configs = [{"block_m": 256, "block_n": 256, "block_k": 256}, {"block_m": 16, "block_n": 16}, {"block_m": 128}]
    found = search(function, configs, (4096, 4096, 4096), prune=3.0)
    assert found.best == 2 and found.latency is None and "shared memory" in notes(found)[0]
    monkeypatch.setenv("TORCH_TILE_AUTOTUNE", "0")
    function = torch_tile.jit(product, out_idx=[-1], target="cpu")
    assert search(function, configs[1:], (128, 128, 128)).best == 1
    assert not stored(folder)


def test_the_models_choice_must_compile(product, monkeypatch):
    monkeypatch.setenv("TORCH_TILE_AUTOTUNE", "0")
    function = torch_tile.jit(product, out_idx=[-1], target="cpu")
    original = type(function).build

    def build(self, program, target):
        if not refused or refused[0] is program:
            refused[:] = [program]
            raise RuntimeError("no")
        return original(self, program, target)

    refused = []
    monkeypatch.setattr(type(function), "build", build)
    assert search(function, [{"block_m": 64}, {"block_m": 16}], (128, 128, 128)).best == 1


def test_one_configuration_is_not_timed(lazy, clock):
    made = clock()
    assert search(lazy, [{"block": 64}]).config == {"block": 64} and not made.calls


def test_results_are_found_again(lazy, clock, folder, monkeypatch):
    made = clock(3.0, 1.0, 2.0)
    first = search(lazy)
    (path,) = stored(folder)
    assert json.loads(path.read_text())["best"] == 1
    calls = len(made.calls)
    again = search(lazy)
    assert again == first and len(made.calls) == calls
    search(lazy, args=(97,))  # another size
    assert len(stored(folder)) == 2
    search(lazy, BLOCKS[:2])  # other configurations
    assert len(stored(folder)) == 3
    search(lazy, early_stop=False)  # more effort
    assert len(stored(folder)) == 4
    calls = len(made.calls)
    monkeypatch.setenv("TORCH_TILE_AUTOTUNE_CACHE", "0")
    search(lazy)
    assert len(made.calls) > calls and len(stored(folder)) == 4


def test_another_machine_or_compiler_searches_again(lazy, clock, folder, monkeypatch):
    clock(1.0, 2.0, 3.0)
    search(lazy)
    monkeypatch.setattr(module, "device_name", lambda target: "another")
    search(lazy)
    monkeypatch.setattr(module, "surroundings", lambda target: ("another compiler",))
    search(lazy)
    assert len(stored(folder)) == 3


def test_lines_that_move_in_a_file_change_nothing(tmp_path, clock, folder):
    text = """import torch_tile, torch_tile.language as T
@torch_tile.jit(out_idx=[-1], target="cpu")
def double(n, block=32):
    @T.prim_func
    def main(x: T.Tensor((n,), "float32"), y: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, block), threads=32) as bx:
            for i in T.Parallel(block):
                y[bx * block + i] = x[bx * block + i] * FACTOR
    return main
"""
    clock(1.0, 2.0, 3.0)

    def at(name, text):
        import importlib.util

        (tmp_path / name).write_text(text)
        spec = importlib.util.spec_from_file_location(name[:-3], tmp_path / name)
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        return made.double

    search(at("one.py", text.replace("FACTOR", "2.0")))
    search(at("two.py", "# moved\n\n" + text.replace("FACTOR", "2.0")))
    assert len(stored(folder)) == 1
    search(at("three.py", text.replace("FACTOR", "3.0")))
    assert len(stored(folder)) == 2


def test_a_damaged_file_is_made_again(lazy, clock, folder):
    clock(2.0, 1.0, 3.0)
    first = search(lazy)
    (path,) = stored(folder)
    path.write_text(path.read_text()[:20])
    assert search(lazy).best == first.best and json.loads(path.read_text())["best"] == 1


RUN = """
import sys, time
sys.path[:0] = {folders!r}
import torch_tile, conftest
from torch_tile.autotuner import session, trials
from torch_tile.autotuner.result import Settings
def slow(backend, call, warmup, rep):
    print("timing", flush=True)
    time.sleep({pause})
    return 1.0
trials._timed = slow
session.surroundings = lambda target: ("the compiler as it was",)
function = torch_tile.jit(conftest.scale, out_idx=[-1], target="cpu")
print("best", session.Session(function, [{{"block": 32}}, {{"block": 64}}], Settings(prune=None), (96,)).result().best)
"""


def process(pause):
    text = RUN.format(folders=[str(folder) for folder in Path(__file__).parents[:2]], pause=pause)
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_processes_and_a_kill(folder):
    """One is killed in the middle of a search; two more search at once, and leave one sound result."""
    killed = process(60)
    assert killed.stdout.readline() == "timing\n"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    assert not stored(folder)
    both = [process(0.05), process(0.05)]
    assert [p.communicate(timeout=120)[0].splitlines()[-1] for p in both] == ["best 0", "best 0"]
    assert len(stored(folder)) == 1
    last = process(60)
    assert last.communicate(timeout=120)[0] == "best 0\n"  # found, not timed


def test_sizes_known_at_run_time(clock):
    def copy(block=32):
        n = T.dynamic("n")

        @T.prim_func
        def main(x: T.Tensor((n,), "float32"), y: T.Tensor((n,), "float32")):
            with T.Kernel(T.ceildiv(n, block), threads=32) as bx:
                for i in T.Parallel(block):
                    y[bx * block + i] = x[bx * block + i]

        return main

    clock(2.0, 1.0, 3.0)
    function = torch_tile.jit(copy, out_idx=[-1], target="cpu")
    with pytest.raises(TileError, match="`n` is known only at run time"):
        search(function, args=())
    asked = []

    def supply(params):
        asked.append([p.name for p in params])
        return [torch.ones(100)]

    assert search(function, args=(), supply_prog=supply).best == 1 and asked == [["x"]]
    assert search(function, args=(), inputs=[torch.ones(100)]).best == 1


def test_supply_prog_makes_inputs_of_known_sizes(lazy, clock):
    clock(2.0, 1.0, 3.0)
    seen = []
    search(
        lazy, supply_prog=lambda params: [torch.full((96,), 7.0)], ref_prog=lambda x: seen.append(x[0].item()) or x * 2
    )
    assert set(seen) == {7.0}


def test_inputs_are_the_same_for_all_and_the_callers_stream_goes_on(lazy, clock):
    clock(2.0, 1.0, 3.0)
    seen = []
    torch.manual_seed(3)
    want = torch.rand(1)
    torch.manual_seed(3)
    search(lazy, ref_prog=lambda x: seen.append(x.clone()) or x * 2)
    assert torch.equal(torch.rand(1), want) and all(torch.equal(x, seen[0]) for x in seen)


def test_pass_configs_are_tunable(lazy, clock):
    clock(2.0, 1.0)
    configs = [{"pass_configs": {"tl.enable_fast_math": fast}} for fast in (False, True)]
    found = search(lazy, configs)
    assert found.config == configs[1]


def test_compilation_may_take_too_long(lazy, clock, monkeypatch):
    clock(1.0, 1.0)
    original = type(lazy).build

    def build(self, program, target):
        if "128" in repr(program):
            time.sleep(6)
        return original(self, program, target)

    search(lazy, BLOCKS[:2])  # the host compiler is found, and torch's libraries are
    monkeypatch.setattr(type(lazy), "build", build)
    found = search(lazy, timeout=2.0, early_stop=False)
    assert notes(found)[2].startswith("TimeoutError: took longer than 2 seconds")


def plain(n=64, block=32):
    import torch_tile.language as T

    @T.prim_func
    def main(x: T.Tensor((n,), "float32"), y: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, block), threads=32) as bx:
            for i in T.Parallel(block):
                y[bx * block + i] = x[bx * block + i] + 1.0

    return main


def test_tilelangs_chain(clock):
    clock(2.0, 1.0)
    tuner = AutoTuner.from_kernel(plain, configs=[{"block": 32}, {"block": 64}])
    tuner.set_compile_args(out_idx=[-1], target="cpu", strict=False)
    found = tuner.set_profile_args(prune=None, ref_prog=lambda x: x + 1).run(warmup=1, rep=2)
    assert found.config == {"block": 64} and found.latency == 1.0 and tuner.settings.rep == 2
    x = torch.randn(64)
    torch.testing.assert_close(found.kernel(x), x + 1)
    assert found.kernel.config == found.config and found.kernel.latency == 1.0 and found.kernel.ref_latency == 1.0


def test_arguments_and_inputs(clock):
    clock(2.0, 1.0)
    tuner = AutoTuner.from_kernel(plain, [{"block": 32}, {"block": 64}]).set_compile_args([-1], "cpu")
    found = tuner.set_profile_args(prune=None).run(args=(96,), inputs=[torch.ones(96)])
    assert found.kernel(torch.ones(96)).shape == (96,)


def test_without_configurations():
    with pytest.raises(TileError, match="argument `configs` is empty"):
        AutoTuner.from_kernel(plain, [])
    with pytest.raises(TileError, match="did you mean warmup"):
        AutoTuner.from_kernel(plain, [{}]).set_profile_args(warmpu=3)


def test_settings_given_to_run(clock):
    clock(2.0, 1.0)
    tuner = AutoTuner.from_kernel(plain, [{"block": 32}, {"block": 64}]).set_compile_args([-1], "cpu")
    tuner.set_profile_args(prune=None, enable_grouped_compile=True)
    found = tuner.run(early_stop=False, early_stop_factor=2.0, enable_grouped_compile=True)
    assert found.config == {"block": 64}
    assert not tuner.settings.early_stop and tuner.settings.early_stop_factor == 2.0
    with pytest.raises(TileError, match="did you mean early_stop"):
        tuner.run(early_stopp=True)
