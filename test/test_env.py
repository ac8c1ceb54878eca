# SPDX-License-Identifier: Apache-2.0
import logging
import os
from pathlib import Path

import pytest

import torch_tile
import torch_tile.language as T
from torch_tile import env
from torch_tile.runtime.cache import cache_dir


@T.prim_func
def kernel(A: T.Tensor((4,), "float32")):
    with T.Kernel(1):
        A[0] = 1.0


def test_kernels_are_kept_unless_the_cache_is_disabled(folder):
    torch_tile.compile(kernel, target="cpu")
    kept = sorted(folder.rglob("*"))
    assert kept and torch_tile.is_cache_enabled() and str(folder) == env.TILELANG_CACHE_DIR
    torch_tile.disable_cache()
    torch_tile.disable_cache()
    try:
        away = cache_dir()
        assert away != folder and not torch_tile.is_cache_enabled() and env.env.TILELANG_DISABLE_CACHE == "1"
        assert not list(away.rglob("*.so"))
        torch_tile.compile(kernel, target="cpu")
        assert list(away.rglob("*.so")) and sorted(folder.rglob("*")) == kept
    finally:
        torch_tile.enable_cache()
    torch_tile.enable_cache()
    assert cache_dir() == folder and not Path(away).exists()


def test_a_cache_in_its_usual_place_comes_back(monkeypatch):
    monkeypatch.delenv("TORCH_TILE_CACHE_DIR")
    torch_tile.disable_cache()
    assert "TORCH_TILE_CACHE_DIR" in os.environ
    torch_tile.enable_cache()
    assert "TORCH_TILE_CACHE_DIR" not in os.environ


def test_log_levels(monkeypatch):
    log = logging.getLogger("torch_tile")
    before = log.level
    try:
        for level, number in (("debug", 10), ("WARNING", 30), (logging.ERROR, 40)):
            torch_tile.set_log_level(level)
            assert log.level == number
        with pytest.raises(ValueError, match="level is 'loud'; expected one of"):
            torch_tile.set_log_level("loud")
    finally:
        log.setLevel(before)


def test_variables(monkeypatch):
    monkeypatch.setenv("TILELANG_SOMETHING", "x")
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    assert env.TILELANG_SOMETHING == "x" and env.TILELANG_OTHER == "" and env.CUDA_HOME == "/opt/cuda"
    with pytest.raises(AttributeError, match="NOTHING"):
        _ = env.NOTHING
