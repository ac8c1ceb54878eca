# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled by Inductor's worker processes: the same ones, found on disk, and none lost where that fails."""

import concurrent.futures
import logging
import time
import types

import pytest
import torch._inductor.config as inductor_config
from torch._inductor.async_compile import AsyncCompile, shutdown_compile_workers

import torch_tile
import torch_tile.language as T
from benchmarks import library
from torch_tile import lowering
from torch_tile.diagnostics.errors import TileError
from torch_tile.hardware import Target
from torch_tile.inductor import compat
from torch_tile.inductor.compile_ahead import workers
from torch_tile.ir.fingerprint import fingerprint
from torch_tile.ir.node import walk
from torch_tile.runtime import nvrtc

HOPPER = Target("cuda", 90)
pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture(scope="module")
def pool():
    """Inductor's own, started in another folder and with TORCH_TILE_VERIFY=1."""
    with inductor_config.patch(compile_threads=2, worker_start_method="subprocess"):
        until = time.monotonic() + 120
        while (found := compat.worker_pool(ready=True)) is None and time.monotonic() < until:
            time.sleep(0.05)
        assert found is not None
        yield found
        shutdown_compile_workers()


class Fake:
    """A pool that notes what it is sent, and then does as it is told."""

    def __init__(self, then=None):
        self.sent, self.then = [], then

    def submit(self, job, *args):
        self.sent.append((job, *args))
        if self.then is not None:
            raise self.then
        return concurrent.futures.Future()  # nobody will ever set it


def kernel():
    @T.prim_func
    def rows(x: T.Tensor((64, 128), "float16"), y: T.Tensor((64,), "float32")):
        with T.Kernel(4, threads=64) as i:
            tile, total = T.alloc_fragment((16, 128), "float32"), T.alloc_fragment((16,), "float32")
            T.copy(x[i * 16, 0], tile)
            T.reduce_sum(tile, total, dim=1)
            for r in T.Parallel(16):
                T.atomic_add(y[i * 16 + r], total[r])

    return rows


def compiled(func, pool):
    with workers.compiling_in(pool):
        return torch_tile.compile(func, target=HOPPER)


def contents(folder):
    """All that a cache holds, by name, but for the digest of our own files, which a process takes once."""
    return {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file() and ".txt" not in p.name}


def test_a_worker_leaves_what_this_process_would_have(pool, folder, tmp_path, monkeypatch):
    here = torch_tile.compile(kernel(), target=HOPPER)
    before = contents(folder)
    monkeypatch.setenv("TORCH_TILE_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setattr(lowering, "lower", lambda *args: pytest.fail("lowered in this process"))
    monkeypatch.setattr(nvrtc._Nvrtc, "compile", lambda *args: pytest.fail("NVRTC in this process"))
    there = compiled(kernel(), pool)
    assert contents(tmp_path / "other") == before and any(name.endswith(".cubin") for name in before)
    assert there.source == here.source and there.cubin.data == here.cubin.data and there.cubin.log == here.cubin.log
    assert repr(there.schedule) == repr(here.schedule)


def test_what_is_on_disk_is_not_sent():
    torch_tile.compile(kernel(), target=HOPPER)
    fake = Fake()
    compiled(kernel(), fake)
    assert not fake.sent


CASES = (
    "gemm fp16 swiglu", "dequant_gemm bf16 swiglu 16", "attention fp16 d128 cap", "attention_backward fp16 d64",
    "mla fp16 paged", "fused_norm fp32 modulated", "softmax fp64 columns",
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_programs_are_the_same_in_a_worker(pool, name):
    """Symbols are told apart by identity, so what is shared must stay shared."""
    cases = {case.name: case for case in library.catalogue()}
    for made in library.compiled(cases[name], HOPPER):
        assert pool.submit(fingerprint, made.program).result(60) == fingerprint(made.program)


@pytest.mark.parametrize("fake", [Fake(RuntimeError("closed")), Fake()], ids=["closed", "hung"])
def test_a_pool_that_fails_costs_nothing_but_time(monkeypatch, caplog, fake):
    monkeypatch.setattr(workers, "PATIENCE", 0.01)
    with caplog.at_level(logging.INFO, "torch_tile"):
        assert compiled(kernel(), fake).cubin.data
    assert len(fake.sent) == 1 and "no worker has compiled rows" in caplog.text


def test_a_program_that_cannot_be_sent(pool, caplog):
    func = kernel()
    (op,) = (node for node in walk(func.program) if type(node).__name__ == "ReduceSum")

    class Local(type(op)):
        """Which pickle does not find."""

    object.__setattr__(op, "__class__", Local)
    with caplog.at_level(logging.INFO, "torch_tile"):
        assert compiled(func, pool).cubin.data
    assert "no worker has compiled rows" in caplog.text


def test_an_error_is_that_of_the_kernel(pool, caplog):
    @T.prim_func
    def wrong(x: T.Tensor((8, 8), "float32")):
        with T.Kernel(1, threads=32):
            a, b = T.alloc_shared((8, 8), "float32"), T.alloc_shared((8, 4), "float32")
            T.copy(x, a)
            T.copy(a, b)

    with caplog.at_level(logging.INFO, "torch_tile"), pytest.raises(TileError, match=r"T\.copy\(a, b\)"):
        compiled(wrong, pool)
    assert "no worker has compiled wrong" in caplog.text and "SubprocException" in caplog.text


@pytest.mark.parametrize("name, value", [("TORCH_TILE_VERIFY", "1"), ("TORCH_TILE_DUMP", "stages")])
def test_what_is_watched_stays_here(monkeypatch, tmp_path, name, value):
    monkeypatch.setenv(name, value if value == "1" else str(tmp_path / value))
    fake = Fake()
    compiled(kernel(), fake)
    assert not fake.sent


def test_kernels_of_the_cpu_stay_here():
    @T.prim_func
    def ones(y: T.Tensor((8,), "float32")):
        with T.Kernel(1):
            T.fill(y, 1)

    fake = Fake()
    with workers.compiling_in(fake):
        torch_tile.compile(ones, target="cpu")
    assert not fake.sent


def test_every_worker_is_warmed_and_again_when_it_may_be_another(monkeypatch):
    fake, now = Fake(), 0.0
    monkeypatch.setattr(workers, "time", types.SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(compat, "worker_pool", lambda ready: fake)
    with inductor_config.patch(compile_threads=3):
        workers.warm()
        workers.warm()
        assert fake.sent == [(workers._import_compiler,)] * 3
        now = 60.0
        workers.warm()
    assert len(fake.sent) == 6


def test_one_compile_thread_means_no_workers(caplog):
    with inductor_config.patch(compile_threads=1), caplog.at_level(logging.INFO, "torch_tile"):
        assert workers.ready() is None
    assert "compiled in threads" in caplog.text


def test_workers_that_cannot_be_asked_for(monkeypatch, caplog):
    def fail(ready):
        raise AssertionError("daemonic processes are not allowed to have children")

    monkeypatch.setattr(compat, "worker_pool", fail)
    with caplog.at_level(logging.INFO, "torch_tile"):
        assert workers.ready() is None
        workers.warm()
    assert caplog.text.count("cannot be used") == 2


@pytest.mark.parametrize(
    "state, starting, started",
    [
        ({}, True, True),
        ({"use_process_pool": lambda: False}, True, False),
        ({"use_process_pool": lambda: False, "_ready_future": None}, False, False),
        ({"should_use_thread_workers": lambda: True}, False, False),
        ({"process_pool": lambda: types.SimpleNamespace(process=types.SimpleNamespace(poll=lambda: -9))}, False, False),
    ],
    ids=["ready", "starting", "none allowed", "threads", "killed"],
)
def test_which_workers_can_be_used(monkeypatch, state, starting, started):
    usual = {
        "use_process_pool": lambda: True,
        "_ready_future": object(),
        "should_use_thread_workers": lambda: False,
        "process_pool": object,
    }
    for name, value in (usual | state).items():
        monkeypatch.setattr(AsyncCompile, name, value, raising=False)
    assert (compat.worker_pool(ready=False) is not None) is starting
    assert (compat.worker_pool(ready=True) is not None) is started
