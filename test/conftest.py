# SPDX-License-Identifier: Apache-2.0
"""What every test may assume: seeded generators, caches of its own session, its share of the cores, no GPU."""

import contextlib
import functools
import gc
import hashlib
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import unittest.mock
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for shared_kernels.py

SEED = "TORCH_TILE_TEST_SEED"
CACHES = {"TORCH_TILE_CACHE_DIR": "kernels", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
WHOLE_SUITE = 8000  # tests, from which on a session is sampled; TORCH_TILE_ALL_WAYS=1 runs all
ALL_CUBINS = 1000  # tests with a chip, from which on a session is sampled
SHARES = {1: 4, 4: 8}  # number of cases of a test function -> one of so many is in a sample
SAMPLE = Path(__file__).parents[1] / ".ci" / "sample"  # the number of the sample, raised by each landing
ASSEMBLED = 4  # one of so many tests whose kernels run on simulators makes machine code of them, too
SAMPLED = {  # one value of these in a sample, others of the same parameters always
    "way": ("cuda:sm_80", "cuda:sm_90a", "text"),
    "engine": ("interpreter", "threads", "text"),
    "chip": ("sm_80", "sm_90a", "sm_120a"),
}
_made: list[str] = []  # the session's temporary folder, in the process that made it


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment before anything imports torch; pytest-xdist's workers inherit it."""
    os.environ.setdefault(SEED, str(int.from_bytes(os.urandom(4), "little")))
    workers = getattr(config.option, "numprocesses", None) or 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // int(workers))))
    os.environ.setdefault("TORCH_TILE_VERIFY", "1")  # every stage is checked
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # starting a pool of compilers takes seconds
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # trials of each fresh cache take 5 to 13 s
    missing = [name for name in CACHES if name not in os.environ]
    if missing:
        _made.append(tempfile.mkdtemp(prefix="torch_tile_test_"))
        os.environ.update({name: os.path.join(_made[0], CACHES[name]) for name in missing})
    with contextlib.suppress(ImportError):  # machines with a GPU may not have hypothesis
        from hypothesis import HealthCheck, settings

        # On a busy machine an example may take more than 0.2 s, and drawing the first ten more than a second.
        settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("busy")
    config.pluginmanager.register(_NameFailures(config))


class _NameFailures:
    """Names each failure when it happens, so that a session that is ended early has told which tests failed."""

    def __init__(self, config: pytest.Config):
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")  # which workers do not have
        if report.failed and terminal is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message if crash is not None else report.longreprtext
            line = reason.strip().partition("\n")[0]
            terminal.write_line(f"\n{report.when} of {report.nodeid} failed: {line[:200]}")


def pytest_unconfigure() -> None:
    for folder in _made:
        shutil.rmtree(folder, ignore_errors=True)


def pytest_report_header() -> str:
    return f"{SEED}={os.environ[SEED]}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Repeat the seed beside failures: `-q` hides the header."""
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"repeat this session's random inputs with {SEED}={os.environ[SEED]}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not os.environ.get("TORCH_TILE_ALL_WAYS"):
        kept = set(map(id, _sample(items)))
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
        items[:] = [item for item in items if id(item) in kept]
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def _params(item: pytest.Item) -> dict[str, Any]:
    """The parameters of a test, by their names."""
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec is not None else {}


@functools.cache
def _number() -> int:
    """The number of the sample that this session runs."""
    return int(SAMPLE.read_text()) if SAMPLE.exists() else 0


def _turn(name: str, count: int) -> int:
    """A number below `count` that follows from a name and goes up by one from each sample to the next, in a circle."""
    return (hashlib.sha256(name.encode()).digest()[0] + _number()) % count


def _is_drawn(item: pytest.Item) -> bool:
    """Whether this session runs a test for its simulator, text or chip: by turns, one of those that SAMPLED names."""
    params = _params(item)
    for name, values in SAMPLED.items():
        value = params.get(name)
        if value in values:
            return values[_turn(item.nodeid.replace(value, ""), len(values))] == value
    return True


def _sample(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests of a session: all of a few, a sample of the whole suite, one in six of all cubins.

    The samples of twenty-four numbers in a row hold every test, those of six numbers every cubin.
    """
    whole = len(items) > WHOLE_SUITE
    if not whole and sum("chip" in _params(item) for item in items) <= ALL_CUBINS:
        return items
    drawn = [item for item in items if _is_drawn(item)]
    if not whole:
        return [item for item in drawn if "chip" not in _params(item) or _turn(f"half {item.nodeid}", 2) == 0]
    cases = Counter(item.nodeid.partition("[")[0] for item in drawn)
    return [item for item in drawn if _is_kept(item, cases[item.nodeid.partition("[")[0]])]


def _is_kept(item: pytest.Item, cases: int) -> bool:
    """Whether a sampled session runs a test, whose function has so many cases: all that lie directly in test/ or are
    marked for every sample, and by turns a share of the others. Of slow tests it is half as many.
    """
    if item.path.parent == Path(__file__).parent or item.get_closest_marker("every_sample"):
        return True
    share = max(share for least, share in SHARES.items() if cases >= least)
    slow = item.get_closest_marker("slow") is not None
    return _turn(item.nodeid, min(share * (1 + slow), max(SHARES.values()))) == 0


def pytest_collection_finish() -> None:
    """What was imported stays: each look at it by the garbage collector would take a quarter of a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A number that is new in every session and test, and the same again under the same TORCH_TILE_TEST_SEED."""
    text = f"{os.environ[SEED]} {request.node.nodeid}"
    value = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
    print(f"seed {value} ({SEED}={os.environ[SEED]})")
    return value


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own, and nobody who watches the passes."""
    monkeypatch.setenv("TORCH_TILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_TILE_VERIFY", "0")
    monkeypatch.delenv("TORCH_TILE_DUMP", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Forget the host's compiler that was found, before and after."""
    from torch_tile.runtime.host_compiler import find_compiler

    find_compiler.cache_clear()
    yield
    find_compiler.cache_clear()


@pytest.fixture
def assembler(request: pytest.FixtureRequest) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """`with assembler():` compiles kernels for GPUs up to their text, as simulators need no more.

    The kernels of one test in four, by turns, become machine code, too: so NVRTC accepts what tests draw.
    """
    from torch_tile.runtime import nvrtc

    if _turn(f"assembled {request.node.nodeid}", ASSEMBLED) == 0:
        return contextlib.nullcontext
    nothing = nvrtc.Cubin(b"", "", {}, Path())
    return lambda: unittest.mock.patch.object(nvrtc, "compile_cubin", lambda *_: nothing)


@pytest.fixture
def product() -> Callable[..., Any]:
    """A function that makes the product of M x K by K x N by tiles."""
    from shared_kernels import matmul

    return matmul


@pytest.fixture
def two_ranks(tmp_path: Path) -> Callable[..., None]:
    """`two_ranks(script, *arguments)`: run a script as two processes, as `script rank store *arguments`.

    They meet through gloo at the file `store`; if one fails, what both printed is shown.
    """

    def run(script: str, *arguments: str) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        here = [sys.executable, script]
        ranks = []
        for rank in "01":
            with open(tmp_path / rank, "w") as out:
                command = [*here, rank, str(tmp_path / "store"), *arguments]
                ranks.append(subprocess.Popen(command, stdout=out, stderr=out, env=environment))
        try:
            codes = [process.wait(300) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        ends = zip("01", codes, strict=True)
        told = [f"rank {n} ended with {code}:\n{(tmp_path / n).read_text()[-6000:]}" for n, code in ends]
        assert not any(codes), "\n".join(told)

    return run


@pytest.fixture(
    params=["meaning", "cpu", "cuda:sm_80", "cuda:sm_90a", "text", pytest.param("gpu", marks=pytest.mark.cuda)]
)
def way(
    request: pytest.FixtureRequest, assembler: Callable[[], contextlib.AbstractContextManager[Any]]
) -> Callable[..., None]:
    """`way(kernel, *args)` runs a T.prim_func, which changes its arguments in place: by the meaning of its operations,
    compiled for the CPU, thread by thread as on a GPU, where nothing must be found, by the printed CUDA text on the
    host, or on a GPU if there is one.
    """
    import torch
    from emulate import emulate

    import torch_tile
    from torch_tile.simulator.tile.interpreter import evaluate

    def on_gpu(a: torch.Tensor) -> torch.Tensor:
        """Copy a tensor; `cuda()` closes gaps between its rows."""
        return torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="cuda").copy_(a)

    def run(kernel: Any, *args: Any) -> None:
        if request.param == "meaning":
            evaluate(kernel, *args)
            return
        target = {"gpu": "cuda", "text": "cuda:sm_80"}.get(request.param, request.param)
        with contextlib.nullcontext() if request.param == "gpu" else assembler():
            run_compiled(torch_tile.compile(kernel, target=target), *args)

    def run_compiled(compiled: Any, *args: Any) -> None:
        if request.param == "cpu":
            compiled(*args)
        elif request.param == "text":
            emulate(compiled, *args)
        elif request.param == "gpu":
            copies = {id(a): on_gpu(a) for a in args if isinstance(a, torch.Tensor)}  # one for a tensor given twice
            there = [copies.get(id(a), a) for a in args]
            compiled(*there)
            for here, result in zip(args, there, strict=True):
                if isinstance(here, torch.Tensor):
                    here.copy_(result)
        else:
            findings = compiled.interpret(*args)
            assert not findings, findings.report()

    return run


@pytest.fixture
def refused() -> Callable[..., Any]:
    """`refused(case, code, text)` runs `case`, which must fail with `code` at `text` in the line marked `# here`.

    Returns the error. `text` None means that the error has no place.
    """
    from torch_tile.diagnostics.errors import TileError

    def check(case: Callable[[], Any], code: str, text: str | None) -> Any:
        with pytest.raises(TileError) as caught:
            case()
        problem = caught.value
        assert problem.code == code, str(problem)
        if text is None:
            assert problem.span is None
            return problem
        span = problem.span
        assert span.file == case.__code__.co_filename
        assert span.source().endswith("# here"), span.source()
        assert span.source()[span.column :].startswith(text)
        if span.end_line == span.line:
            assert span.source()[span.column : span.end_column] == text
        assert f"error[{code}]" in str(problem) and f":{span.line}:{span.column + 1}" in str(problem)
        return problem

    return check


class _Failures(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(logging.Formatter().format(record))


@pytest.fixture(autouse=True)
def failures() -> Iterator[list[str]]:
    """What the backend's passes logged as errors, with which a graph goes on without kernels: nothing must be left."""
    handler, log = _Failures(), logging.getLogger("torch_tile.inductor")
    log.addHandler(handler)
    yield handler.found
    log.removeHandler(handler)
    assert not handler.found, "\n".join(handler.found)


@pytest.fixture(autouse=True)
def _isolated(seed: int) -> Iterator[None]:
    """Seed the global generators, and leave no compiled graph behind. Tests that do not use torch do not pay for it."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
    yield
    if "torch._dynamo" in sys.modules:
        try:
            sys.modules["torch._dynamo"].reset()
        except RuntimeError:  # a finalizer changed what it walks over
            sys.modules["torch._dynamo"].reset()
