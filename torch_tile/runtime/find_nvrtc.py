# SPDX-License-Identifier: Apache-2.0
"""Where NVRTC lies on this machine: the library that torch's own CUDA wheels bring, else a toolkit's.

Looking does not load it, because a kernel that is found in the cache needs no compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAJORS = (13, 12)  # CUDA versions whose NVRTC we know, best first


class NoNvrtcError(RuntimeError):
    """No NVRTC on this machine; the message says where it was looked for and how to get it."""


class NvrtcLibrary(NamedTuple):
    """The library's file, the library of built-ins that it opens itself, and a text that differs whenever they do."""

    path: Path
    builtins: Path | None
    identity: str


@functools.cache
def find_nvrtc() -> NvrtcLibrary:
    """The first of `$TORCH_TILE_NVRTC`, the CUDA wheels, torch's folder, the toolkits, and what the loader finds.

    Raises NoNvrtcError if there is none.
    """
    folders = []
    for place in _places():
        if place.is_file():
            return _library(place)
        folders.append(str(place))
        found = _newest(place)
        if found is not None:
            return _library(found)
    for major in MAJORS:
        name = f"libnvrtc.so.{major}"
        if (loaded := _load_by_name(name)) is not None:
            return _library(loaded)
    raise NoNvrtcError(
        "torch_tile compiles CUDA kernels with NVRTC and found no libnvrtc.so.12 or .13 in "
        f"{', '.join(dict.fromkeys(folders)) or 'any CUDA wheel or toolkit'}, nor through the loader. "
        "A CUDA build of torch brings it; else `pip install nvidia-cuda-nvrtc` (CUDA 13) or `nvidia-cuda-nvrtc-cu12`, "
        "or name the file in the environment variable TORCH_TILE_NVRTC."
    )


def _places() -> Iterator[Path]:
    """Files or folders to look at, most wanted first."""
    chosen = os.environ.get("TORCH_TILE_NVRTC")
    if chosen:
        path = Path(chosen).expanduser().absolute()
        if not path.exists():
            raise NoNvrtcError(f"TORCH_TILE_NVRTC names {path}, which does not exist")
        yield path
    wheels = {12: "cuda_nvrtc/lib", 13: "cu13/lib"}
    for major in sorted(MAJORS, key=lambda each: each != _torch_major()):  # torch's own, if there are several
        yield from (root / wheels[major] for root in _packages("nvidia"))  # a folder in each site-packages
    yield from (root / "lib" for root in _packages("torch"))
    for name in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"):
        if os.environ.get(name):
            yield from (Path(os.environ[name]) / sub for sub in ("lib64", "lib", "targets/x86_64-linux/lib"))
    yield Path("/usr/local/cuda/lib64")
    yield from sorted(Path("/usr/local").glob("cuda-*/lib64"), reverse=True)


def _torch_major() -> int:
    """The CUDA version that the torch in use is built for, which its driver runs for sure; 0 if it has none."""
    version = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    return int(str(version).split(".")[0]) if version else 0


def _packages(name: str) -> list[Path]:
    spec = importlib.util.find_spec(name)
    return [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]


def _newest(folder: Path) -> Path | None:
    """The library in a folder. Torch may rename its copy (libnvrtc-1a2b3c.so.12); the alternative build is not it."""
    known = [p for p in _libraries(folder) if _is_whole(p.name) and _major(p) in MAJORS]
    return max(known, key=lambda path: (_major(path), -len(path.name)), default=None)


def _major(path: Path) -> int:
    """The CUDA version in a file name, or in that of the file it links to; 0 if neither says."""
    number = path.name.partition(".so.")[2] or os.path.realpath(path).rpartition(".so.")[2]
    number = number.partition(".")[0]
    return int(number) if number.isdecimal() else 0


def _libraries(folder: Path) -> list[Path]:
    """The libraries of NVRTC in a folder, those that it opens itself among them."""
    with contextlib.suppress(OSError):
        return [folder / name for name in os.listdir(folder) if name.startswith("libnvrtc") and ".so" in name]
    return []


def _is_whole(name: str) -> bool:
    """Whether a file name is `libnvrtc.so`, with or without a version and the digest that a wheel adds."""
    stem, _, version = name.partition(".so")
    digest = stem.removeprefix("libnvrtc").removeprefix("-")
    return not digest.strip("0123456789abcdef") and all(map(str.isdecimal, version.split(".")[1:]))


def _load_by_name(name: str) -> Path | None:
    """The file that the loader takes for `name`."""
    try:
        ctypes.CDLL(name)
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    return next(
        (Path(line.split(maxsplit=5)[5]) for line in maps if "/libnvrtc" in line and "builtins" not in line), None
    )


def _library(path: Path) -> NvrtcLibrary:
    builtins = [p for p in _libraries(path.parent) if "-builtins" in p.name and ".alt." not in p.name]
    beside = max(builtins, key=lambda p: (_major(p) == _major(path), len(p.name)), default=None)
    sizes = [f"{p.name} {p.stat().st_size}" for p in (path.resolve(), *([beside.resolve()] if beside else []))]
    return NvrtcLibrary(path, beside, " ".join(sizes))
