# SPDX-License-Identifier: Apache-2.0
"""`backend="tile"`: options, caches, and Inductor as it was where nothing matches."""

import functools
import importlib.metadata
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_tile.inductor import compat, context
from torch_tile.inductor.backend import split_options, tile
from torch_tile.inductor.compat import no_graph_caches
from torch_tile.inductor.compile_ahead import workers
from torch_tile.inductor.driver import TilePass
from torch_tile.inductor.report.rows import collect
from torch_tile.inductor.settings import FAMILIES, Settings
from torch_tile.runtime import source_digest

TILE = functools.partial(tile, options={"select": "tile"})


def mlp(x, w, v):
    return torch.relu(x @ w) @ v


def operands():
    return torch.randn(5, 8), torch.randn(8, 12), torch.randn(12, 4)


def test_workers_are_started_for_gpus_only(monkeypatch):
    warmed = []
    monkeypatch.setattr(workers, "warm", lambda: warmed.append(True))
    monkeypatch.setattr(compat, "compile_fx", lambda *args: None)
    with FakeTensorMode():
        on_cpu, on_gpu = torch.empty(2), torch.empty(2, device="cuda")
    tile(None, [3, on_cpu])
    assert not warmed
    tile(None, [3, on_gpu])
    assert warmed == [True]


def test_options_are_split():
    patches, settings = split_options(None, {"select": "tile", "families": ["norm", "gemm"], "epilogue-fusion": False})
    assert patches == {"epilogue_fusion": False}
    assert settings == Settings("tile", ("norm", "gemm"))
    assert split_options("default", None) == ({}, Settings("fastest", FAMILIES))
    assert split_options("max-autotune-no-cudagraphs", None)[0]["max_autotune"] is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bogus": 1}, r"unknown option 'bogus'.*select, families"),
        ({"select": "best"}, r"\"select\" must be one of 'fastest', 'tile', got 'best'"),
        ({"families": ["norm", "convs"]}, r"\"families\" may hold .*, got 'convs'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(RuntimeError, match=message):
        split_options(None, options)
    with pytest.raises(BackendCompilerFailed, match=message):
        torch.compile(mlp, backend=tile, options=options)(*operands())


def test_a_match_is_called_in_the_generated_code():
    args = operands()
    with torch.no_grad(), no_graph_caches():
        got, (code,) = run_and_get_code(torch.compile(mlp, backend=TILE), *args)
    torch.testing.assert_close(got, mlp(*args), rtol=1e-5, atol=1e-5)
    assert code.count("_torch_tile.gemm(") == 2 and code.count("    tile_gemm_") == 2
    assert "extern_kernels.mm" not in code


def test_without_a_match_the_code_is_inductors():
    def f(x):
        return x.sin() + 1

    x = torch.randn(6, 9)
    texts = []
    for backend in ("inductor", TILE):
        torch._dynamo.reset()
        with no_graph_caches():
            _, (code,) = run_and_get_code(torch.compile(f, backend=backend), x)
        texts.append([line for line in code.splitlines() if not line.startswith("#")])
    assert texts[0] == texts[1]


def test_families_not_wanted_are_inductors():
    args = operands()
    backend = functools.partial(tile, options={"select": "tile", "families": ["norm"]})
    with torch.no_grad(), no_graph_caches():
        _, (code,) = run_and_get_code(torch.compile(mlp, backend=backend), *args)
    assert "torch_tile" not in code and "ops.tile" not in code


class Count(CustomGraphPass):
    """A user's own pass."""

    calls = 0

    def __call__(self, graph):
        type(self).calls += 1

    def uuid(self):
        return "count"


def test_the_users_own_pass_runs_too():
    args = operands()
    before = Count.calls
    with torch.no_grad(), no_graph_caches(), torch._inductor.config.patch(post_grad_custom_pre_pass=Count()):
        torch.compile(mlp, backend=TILE)(*args)
    assert Count.calls == before + 1


def test_without_caches_passes_run_again_and_no_kernel_is_compiled_again():
    args, libraries, passes = operands(), [], Count.calls
    counted = torch._inductor.config.patch(post_grad_custom_pre_pass=Count())
    # A fresh cache also forgets what this process compiled.
    with torch.no_grad(), fresh_cache(), no_graph_caches(), counted:
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        for runs in (1, 2):
            torch._dynamo.reset()
            torch.compile(mlp)(*args)
            libraries.append({file: file.stat().st_mtime_ns for file in folder.rglob("*.so")})
            assert Count.calls == passes + runs
    assert libraries[0] and libraries[0] == libraries[1]


def test_caches_keep_working():
    args = operands()
    with fresh_cache(), torch.no_grad():
        for expected in (0, 1):
            torch._dynamo.reset()
            counters.clear()
            torch.testing.assert_close(torch.compile(mlp, backend=TILE)(*args), mlp(*args), rtol=1e-5, atol=1e-5)
            assert counters["aot_autograd"]["autograd_cache_hit"] == expected, counters
            assert counters["inductor"]["fxgraph_cache_bypass"] == 0


def test_uuid_tells_settings_apart():
    ids = [TilePass(stage, s).uuid() for stage in ("pre_grad", "post_grad") for s in (Settings(), Settings("tile"))]
    assert len({pickle.dumps(i) for i in ids}) == 4
    assert ids[0] == TilePass("pre_grad", Settings()).uuid()


def test_uuid_tells_sources_apart(tmp_path, monkeypatch):
    def fingerprint(kernel, header):
        for path, text in (("torch_tile/kernels/gemm/gemm.py", kernel), ("torch_tile/csrc/mma.h", header)):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        monkeypatch.setattr(source_digest, "__file__", str(tmp_path / "torch_tile/runtime/source_digest.py"))
        monkeypatch.setattr(source_digest, "csrc_dir", lambda: tmp_path / "torch_tile/csrc")
        return source_digest.source_digest.__wrapped__()

    assert len({fingerprint(k, h) for k in "12" for h in "12"}) == 4
    assert fingerprint("1", "1") == fingerprint("1", "1")


def test_a_pass_that_fails_leaves_the_graph(monkeypatch, failures):
    def broken(_):
        raise ZeroDivisionError("planted")

    monkeypatch.setitem(context._registered, ("post_grad", 0), context.Registered(None, "post_grad", 0, broken))
    args = operands()
    with torch.no_grad(), no_graph_caches(), collect() as report:
        got = torch.compile(mlp, backend=TILE)(*args)
    torch.testing.assert_close(got, mlp(*args), rtol=1e-5, atol=1e-5)
    assert len(failures) == 1 and "planted" in failures.pop()
    assert len(report.replaced("gemm")) == 2


def test_reset_hook():
    assert callable(tile.reset)
    torch._dynamo.reset()
    tile.reset()


def test_found_by_name_when_installed():
    try:
        importlib.metadata.distribution("torch_tile")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("torch_tile is not installed, so there is no entry point")
    assert "tile" in torch._dynamo.list_backends()
    args = operands()
    with torch.no_grad():
        got = torch.compile(mlp, backend="tile", options={"select": "tile"})(*args)
    torch.testing.assert_close(got, mlp(*args), rtol=1e-5, atol=1e-5)
