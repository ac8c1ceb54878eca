# SPDX-License-Identifier: Apache-2.0
"""Compile kernels in Inductor's worker processes.

Our passes are Python: in threads they would hold Python's lock, which the main thread needs for the graph. So a traced
program is sent to a worker. The worker writes its text and machine code to the cache on disk, where this process finds
them. If a worker fails, this process compiles the kernel itself and reports any error.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator
from typing import Any

from torch_tile.compiler.context import Build, PassOptions
from torch_tile.compiler.source_cache import cuda_source, remote_compile
from torch_tile.hardware import Target
from torch_tile.inductor import compat
from torch_tile.inductor.report import rows as report
from torch_tile.ir.stmt import Program
from torch_tile.runtime.cache import cache_dir
from torch_tile.runtime.native_launch import build_ahead
from torch_tile.runtime.nvrtc import compile_cubin, nvrtc_version

PATIENCE = 60.0
"""Seconds to wait for a worker; a kernel takes 1 to 2 s."""
QUIET = 30.0
"""Seconds after which workers may be new: Inductor ends workers that were idle for twice as long."""


def ready() -> Any:
    """Return Inductor's workers if they are ready, else None."""
    try:
        found = compat.worker_pool(ready=True)
    except Exception:
        report.log.info("Inductor's workers cannot be used", exc_info=True)
        return None
    if found is None:
        report.log.info("Inductor has no workers that are ready: kernels are compiled in threads")
    return found


def warm() -> None:
    """Start Inductor's workers, which takes seconds, let them import the compiler, and build the launcher."""
    build_ahead()
    try:
        if (found := compat.worker_pool(ready=False)) is not None:
            _warm(found, int(time.monotonic() / QUIET))
    except Exception:
        report.log.info("Inductor's workers cannot be used", exc_info=True)


@functools.lru_cache(maxsize=1)
def _warm(pool: Any, when: int) -> None:
    """Let each worker import the compiler."""
    for _ in range(compat.worker_count()):  # each takes one, as importing takes longer than submitting
        pool.submit(_import_compiler)


def _import_compiler() -> None:
    """Import the compiler and NVRTC in a worker."""
    from torch_tile import lowering  # noqa: F401
    from torch_tile.codegen import cuda  # noqa: F401

    nvrtc_version()


@contextlib.contextmanager
def compiling_in(pool: Any) -> Iterator[None]:
    """Send GPU programs of this thread that are not on disk to a worker of `pool`; None sends nothing."""
    token = remote_compile.set(functools.partial(_send, pool))
    try:
        yield
    finally:
        remote_compile.reset(token)


def _send(pool: Any, program: Program, build: Build) -> None:
    """Let a worker compile `program`, and wait for the result."""
    if pool is None or build.target.kind != "cuda":
        return
    try:
        pool.submit(_compile, program, build.target, build.options, str(cache_dir())).result(PATIENCE)
    except Exception:
        report.log.info("no worker has compiled %s: this process does", program.name, exc_info=True)


def _compile(program: Program, target: Target, options: PassOptions, cache: str) -> None:
    """Compile in a worker and fill the sender's cache, which may differ from the cache of the worker."""
    os.environ |= {"TORCH_TILE_CACHE_DIR": cache, "TORCH_TILE_DUMP": "", "TORCH_TILE_VERIFY": "0"}
    source, _ = cuda_source(program, Build(target, options))
    compile_cubin(source.text, target, options)
