# SPDX-License-Identifier: Apache-2.0
"""A second machine starts warm from `torch.compiler.save_cache_artifacts()`: no graph and no kernel is compiled."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.compiler._cache import CacheArtifactManager

from torch_tile.inductor.codegen.artifacts import TYPE, KernelArtifact, record_kernels
from torch_tile.runtime import cache

ROOT = Path(__file__).resolve().parents[3]
NAME = "a1" * 32 + ".so"

SCRIPT = """
import json, sys
import torch
import torch_tile
from torch._dynamo.utils import counters
from torch_tile.runtime import cache

artifacts = sys.argv[1]
loaded = None
try:
    loaded = torch.compiler.load_cache_artifacts(open(artifacts, "rb").read())
except FileNotFoundError:
    pass
built, build = [], cache._build
cache._build = lambda path, make: (built.append(path.name), build(path, make))

def f(x, w, v):
    return torch.relu(torch.nn.functional.rms_norm(x, (8,)) @ w) @ v

torch.manual_seed(0)
args = [torch.randn(5, 8), torch.randn(8, 12), torch.randn(12, 4)]
args = [a.requires_grad_() for a in args]
out = torch.compile(f, backend=torch_tile.tile, options={"select": "tile"})(*args)
grads = torch.autograd.grad(out.sum(), args)
torch.testing.assert_close(grads, torch.autograd.grad(f(*args).sum(), args), rtol=1e-4, atol=1e-4)
if loaded is None:
    data, info = torch.compiler.save_cache_artifacts()
    open(artifacts, "wb").write(data)
    loaded = info
print(json.dumps({
    "loaded": {kind: len(keys) for kind, keys in loaded.artifacts.items()},
    "built": [b for b in built if not b.endswith((".cpp", ".cu", ".txt"))],
    "hits": counters["aot_autograd"]["autograd_cache_hit"],
    "misses": counters["aot_autograd"]["autograd_cache_miss"],
    "bypasses": counters["inductor"]["fxgraph_cache_bypass"] + counters["aot_autograd"]["autograd_cache_bypass"],
}))
"""


def start(tmp_path, machine):
    """Run the script as a process on a `machine` of its own, which has no caches but those that it was sent."""
    places = {"TORCH_TILE_CACHE_DIR": "tile", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    environment = os.environ | {k: str(tmp_path / machine / v) for k, v in places.items()} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "artifacts")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_second_machine_starts_warm(tmp_path):
    first = start(tmp_path, "first")
    assert first["built"] and first["misses"] == 1 and first["bypasses"] == 0
    second = start(tmp_path, "second")
    assert second["loaded"] == first["loaded"] and second["loaded"][TYPE] == len(first["built"])
    assert second["built"] == [] and second["bypasses"] == 0
    assert (second["hits"], second["misses"]) == (1, 0)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_TILE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def entry(folder, content=b"machine code"):
    """A file and its artifact."""
    path = cache.get_or_build(NAME[:64], ".so", lambda p: p.write_bytes(content) and None)
    return path, KernelArtifact(NAME, cache.sealed(path))


def test_an_artifact_becomes_an_entry(folder, monkeypatch, tmp_path):
    _, artifact = entry(folder)
    monkeypatch.setenv("TORCH_TILE_CACHE_DIR", str(tmp_path / "other"))
    artifact.populate_cache()

    def refuse(path):
        raise AssertionError("built although it was loaded")

    assert cache.get_or_build(NAME[:64], ".so", refuse).read_bytes() == b"machine code"


@pytest.mark.parametrize(
    ("key", "damage"),
    [
        (NAME, lambda data: data[:-1]),
        (NAME, lambda data: data[:-1] + b"?"),
        (NAME, lambda data: b""),
        ("../" * 20 + "tmp/evil.so", lambda data: data),
        (NAME + "/../../x.so", lambda data: data),
        (NAME[:64] + ".py", lambda data: data),
        (NAME[1:], lambda data: data),
    ],
)
def test_what_is_no_sound_entry_is_left_out(key, damage, folder, monkeypatch, tmp_path, caplog):
    _, artifact = entry(folder)
    monkeypatch.setenv("TORCH_TILE_CACHE_DIR", str(tmp_path / "other"))
    KernelArtifact(key, damage(artifact.content)).populate_cache()
    assert not any(path.is_file() for path in (tmp_path / "other").rglob("*"))
    assert "not loaded" in caplog.text


def test_an_entry_that_is_there_stays(folder):
    path, artifact = entry(folder, b"old")
    path.unlink()
    path, _ = entry(folder, b"new")
    artifact.populate_cache()
    assert path.read_bytes() == b"new"


def test_what_was_used_before_is_recorded_too(folder, monkeypatch):
    monkeypatch.setattr(cache, "_used", {})
    monkeypatch.setattr(cache, "_listeners", [])
    with CacheArtifactManager.with_fresh_cache():
        entry(folder)
        cache.get_or_build(NAME[:64], ".cpp", lambda p: p.write_bytes(b"source") and None)
        record_kernels.__wrapped__()
        later = "b2" * 32
        for _ in range(2):
            cache.get_or_build(later, ".cubin", lambda p: p.write_bytes(b"later") and None)
        data, info = torch.compiler.save_cache_artifacts()
    assert info.artifacts[TYPE] == [NAME, later + ".cubin"]
    assert b"machine code" in data and b"source" not in data
