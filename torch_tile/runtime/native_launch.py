# SPDX-License-Identifier: Apache-2.0
"""Build csrc/launch.cpp as a Python module, once per machine with the host compiler, and load it from the cache.

Without a compiler, Python's headers or torch's exchange table there is none, and launches go through Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.machinery
import importlib.util
import logging
import os
import platform
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch_tile.runtime.cache import get_or_build, key_of
from torch_tile.runtime.host_compiler import csrc_dir, find_compiler

NAME = "torch_tile_launch"
SOURCES = ("launch.cpp", "launch_dlpack.h", "launch_driver.h")
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti")
IS_NEGATIVE = "_ZN2at6native6is_negERKNS_6TensorE"  # bool at::native::is_neg(const at::Tensor&)
MOST_INLINE = 5  # rank up to which torch keeps sizes inside a TensorImpl, as csrc/launch.cpp has it
MOST_OFFSET = 256  # bytes; a TensorImpl has about 200
_log = logging.getLogger("torch_tile")


@functools.cache
def native() -> ModuleType | None:
    """Return the native module; None if it cannot be built or TORCH_TILE_NATIVE_LAUNCH=0 forbids it."""
    if os.environ.get("TORCH_TILE_NATIVE_LAUNCH") == "0":
        return None
    try:
        return _load(_build())
    except (OSError, RuntimeError, ImportError) as problem:
        _log.info("launches go through Python, which takes some microseconds longer: %s", problem)
        return None


@functools.cache
def negative_test() -> tuple[int, int]:
    """Find torch's C++ test for lazily negated views, which csrc/launch.cpp calls without going through Python.

    Returns the function's address, and the distance in bytes from a TensorImpl to its sizes. The distance tells which
    tensor's sizes DLPack describes. Returns (0, 0) if either is missing; csrc/launch.cpp then calls `Tensor.is_neg`, 60
    ns for each tensor.
    """
    import torch

    module = native()
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if module is None or exchange is None:
        return 0, 0
    plain = [torch.empty((3,) * rank, device="cpu") for rank in range(1, MOST_INLINE + 1)]
    samples = [*plain, *map(torch._neg_view, plain)]
    try:
        library = ctypes.CDLL("libtorch_cpu.so", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        function = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.POINTER(ctypes.c_void_p))((IS_NEGATIVE, library))
    except (OSError, AttributeError):
        return 0, 0
    offsets = {module.sizes_of(exchange, each) - each._cdata for each in samples}
    answers = [function(ctypes.byref(ctypes.c_void_p(each._cdata))) == each.is_neg() for each in samples]
    is_sure = all(answers) and len(offsets) == 1 and 0 < min(offsets) < MOST_OFFSET
    return (ctypes.cast(function, ctypes.c_void_p).value or 0, offsets.pop()) if is_sure else (0, 0)


def launch_function(
    slow: Callable[..., Any],
    failed: Callable[[int], Any],
    driver: Sequence[int],
    kinds: str,
    masks: Sequence[int],
    scalars_matter: bool,
    low_bits: int,
    disjoint: Sequence[tuple[int, int]] = (),
) -> tuple[Callable[..., Any], Callable[[tuple[Any, ...], bytes], bool]] | None:
    """Return a function that follows plans, and `remember(arguments, packed plan)`, which adds a form's plan.

    The function calls `slow` for a form without a plan, and `failed` with the driver's status of a refused launch.
    driver: addresses of its functions, in the order of csrc/launch_driver.h. kinds: for each argument, "t" for a
    tensor, else the struct module's letter of a number. masks: bits of a tensor's address that must be 0. With
    `scalars_matter`, numbers are part of the form; so are the `low_bits` of addresses. If tensors
    of a pair of `disjoint` may overlap, `slow` decides. Returns None if there is no native launch.
    """
    import torch

    module = native()
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if module is None or exchange is None:
        return None
    held = (slow, failed, torch.Tensor.is_neg, torch.Tensor, torch.nn.Parameter)
    packed = struct.pack(f"{len(masks)}Q", *masks)
    made = module.make(
        exchange, held, tuple(driver), negative_test(), kinds.encode(), packed, scalars_matter, low_bits,
        bytes(n for pair in disjoint for n in pair),
    )  # fmt: skip
    return None if made is None else (made[0], functools.partial(module.remember, made[1]))


@functools.cache
def build_ahead() -> None:
    """Start building the native module in a thread; the build takes half a second on a machine's first day."""
    if os.environ.get("TORCH_TILE_NATIVE_LAUNCH") != "0":
        threading.Thread(target=_build_quietly, name="torch_tile builds", daemon=True).start()


def _build_quietly() -> None:
    """Build the native module; without one launches go through Python."""
    with contextlib.suppress(OSError, RuntimeError):  # whoever needs it says why there is none
        _build()


def _build() -> Path:
    """Build the native module, or find it in the cache; return its file."""
    source, *headers = (csrc_dir() / name for name in SOURCES)
    texts = [each.read_bytes() for each in (source, *headers)]
    # The key does not depend on the compiler, so a cached module needs no look for one.
    key = key_of(*texts, *FLAGS, sys.platform, platform.machine(), str(sys.implementation.cache_tag))

    def build(output: Path) -> None:
        import sysconfig

        compiler, include = find_compiler(), sysconfig.get_path("include")
        if not (Path(include) / "Python.h").is_file():
            raise RuntimeError(f"there is no Python.h in {include}")
        command = [*compiler.command, *FLAGS, f"-I{include}", str(source)]
        result = subprocess.run([*command, "-o", str(output)], capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"{compiler.command[0]} refused {source}: {result.stderr[:2000]}")

    return get_or_build(key, ".so", build)


def _load(path: Path) -> ModuleType:
    """Load the native module from its file."""
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    if spec is None:
        raise ImportError(f"{path} is not an extension module")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
