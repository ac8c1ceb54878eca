# SPDX-License-Identifier: Apache-2.0
"""csrc/launch.cpp as a Python module: built once per machine by the host compiler, loaded from the cache.

Without a compiler, Python's headers or torch's exchange table there is none, and launches go through Python.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import logging
import os
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

from .cache import get_or_build, key_of
from .host_compiler import csrc_dir, find_compiler

NAME = "torch_tile_launch"
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti")
_log = logging.getLogger("torch_tile")


@functools.cache
def native() -> ModuleType | None:
    """The module, or None where it cannot be had or TORCH_TILE_NATIVE_LAUNCH=0 forbids it."""
    if os.environ.get("TORCH_TILE_NATIVE_LAUNCH") == "0":
        return None
    try:
        return _load(_build())
    except (OSError, RuntimeError, ImportError) as problem:
        _log.info("launches go through Python, which takes some microseconds longer: %s", problem)
        return None


def _build() -> Path:
    source = csrc_dir() / "launch.cpp"
    compiler = find_compiler()
    include = sysconfig.get_path("include")
    if not (Path(include) / "Python.h").is_file():
        raise RuntimeError(f"there is no Python.h in {include}")
    command = [*compiler.command, *FLAGS, f"-I{include}", str(source)]
    key = key_of(source.read_bytes(), compiler.identity, *command)

    def build(output: Path) -> None:
        result = subprocess.run([*command, "-o", str(output)], capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"{compiler.command[0]} refused {source}: {result.stderr[:2000]}")

    return get_or_build(key, ".so", build)


def _load(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    if spec is None:
        raise ImportError(f"{path} is not an extension module")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
