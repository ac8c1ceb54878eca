# SPDX-License-Identifier: Apache-2.0
"""Compile CUDA C++ to a cubin with NVRTC in this process, through the cache on disk; keep the assembler's log.

The text may include headers of csrc/ and nothing else: they are handed to NVRTC in memory. Everything that could change
the result is in the cache's key.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch_tile.compiler.context import PassOptions
from torch_tile.diagnostics.errors import FOREIGN, ForeignTextError, InternalError
from torch_tile.diagnostics.progress import waiting
from torch_tile.hardware import Target
from torch_tile.runtime.cache import get_or_build, key_of
from torch_tile.runtime.host_compiler import csrc_dir

# No warning (549) of variables read before they are set: tiles hold garbage until written, and may be moved as a whole.
FLAGS = ("--std=c++17", "--ptxas-options=-v", "--no-source-include", "--diag-suppress=549")
_ERROR_LINES = 30
SHORT = re.compile(
    r"Insufficient registers \((?P<have>\d+)\).* in function (?P<name>\w+)\..*target of (?P<need>\d+) or higher"
)
_log = logging.getLogger("torch_tile")


class Resources(NamedTuple):
    """Resources of a kernel: registers of a thread, and bytes of spills, stack and static shared memory."""

    registers: int = 0
    spills: int = 0  # bytes stored and loaded again because registers ran out
    stack: int = 0
    shared: int = 0
    barriers: int = 0


class Cubin(NamedTuple):
    """A compiled module: its bytes, the compiler's log, and the resources of each entry by name."""

    data: bytes
    log: str
    resources: dict[str, Resources]
    path: Path

    @property
    def warnings(self) -> list[str]:
        """Return the log lines about speed or faults: the assembler's C75xx advice, and every warning."""
        if "warning" not in self.log and "(C" not in self.log:
            return []
        return [line.strip() for line in self.log.splitlines() if re.search(r"\(C\d{4}\)|\bwarning\b", line)]


class TooFewRegistersError(RuntimeError):
    """Raised if the assembler lacks registers for an instruction of the entry function `name`."""

    name: str
    have: str
    need: str

    def __init__(self, name: str, have: str, need: str):
        super().__init__(f"{name} has {have} registers for each thread and needs {need}")
        self.name, self.have, self.need = name, have, need


def compile_cubin(text: str, target: Target, options: PassOptions | None = None) -> Cubin:
    """Return the cubin of the CUDA C++ `text` for `target`, built or from the cache. Any thread may call it.

    Raises NoNvrtcError if there is no NVRTC or it does not know the chip. Raises CacheError if the cache cannot be
    used. Raises TooFewRegistersError if tiles need more registers than threads have. Raises ForeignTextError if an
    author's own text may be at fault. Raises InternalError if the text is refused for another reason: then the code
    generator is at fault.
    """
    library = find_nvrtc()
    flags = (*flags_for(target, options or PassOptions()), *include_paths(text))
    headers = headers_of(text)
    key = key_of(text, library.identity, *flags, *(part for item in headers for part in item))
    made: list[tuple[bytes, str]] = []

    def result() -> tuple[bytes, str]:
        if not made:
            start = time.perf_counter()
            with waiting(f"compiling a kernel for {target}"):
                made.append(_nvrtc().compile(text, headers, flags))
            _log.debug("NVRTC compiled %s for %s in %.2f s", key, target, time.perf_counter() - start)
        return made[0]

    def build(output: Path) -> None:
        get_or_build(key, ".cu", lambda path: _write(path, text))  # to read, and for tools that want a source
        output.write_bytes(result()[0])

    path = get_or_build(key, ".cubin", build)
    log = get_or_build(key, ".log", lambda output: _write(output, result()[1])).read_text()
    return Cubin(path.read_bytes(), log, resources_of(log), path)


def flags_for(target: Target, options: PassOptions) -> tuple[str, ...]:
    """Return NVRTC's options for a target."""
    chosen = (f"--gpu-architecture={target.arch}", *FLAGS)
    return (*chosen, "--use_fast_math") if options.fast_math else chosen


def include_paths(text: str) -> tuple[str, ...]:
    """Return the options that name CUDA's header folders, for authors' texts with such headers."""
    if FOREIGN not in text or not re.search(r"^[ \t]*#[ \t]*include[ \t]*<", text, re.MULTILINE):
        return ()
    found = [folder for folder in _include_folders() if (folder / "cuda_fp16.h").is_file()]
    return tuple(f"--include-path={folder}" for folder in found[:1])


def _include_folders() -> Iterator[Path]:
    """Yield the folders that may hold CUDA's headers, most wanted first."""
    for root in _packages("nvidia"):
        yield from (root / "cu13/include", root / "cuda_runtime/include")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name]) / "include"
    yield Path("/usr/local/cuda/include")
    yield from sorted(Path("/usr/local").glob("cuda-*/include"), reverse=True)


def headers_of(text: str) -> tuple[tuple[str, bytes], ...]:
    """Return the csrc/ headers that `text` includes, directly or through another header, with their names."""
    found: dict[str, bytes] = {}
    waiting = _included(text)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name], inner = _header(name)
            waiting += inner
    return tuple(sorted(found.items()))


def _included(text: str) -> list[str]:
    """Return the headers that a text includes."""
    return re.findall(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', text, re.MULTILINE)


def _header(name: str) -> tuple[bytes, list[str]]:
    """Read a header of csrc, with the headers that it includes."""
    path = os.path.join(csrc_dir(), name)
    try:
        return _read_header(path, os.stat(path).st_mtime_ns)
    except OSError as problem:
        raise InternalError(f"generated CUDA includes {name!r}, which is not in {csrc_dir()}") from problem


@functools.lru_cache
def _read_header(path: str, changed: int) -> tuple[bytes, list[str]]:
    """Read a header; cached by its time of change."""
    with open(path, "rb") as file:
        data = file.read()
    return data, _included(data.decode())


def resources_of(log: str) -> dict[str, Resources]:
    """Parse the verbose assembler's log into the resources of each entry function."""
    found: dict[str, Resources] = {}
    for part in log.split("Compiling entry function '")[1:]:
        name, _, said = part.partition("'")
        found[name] = Resources(
            registers=_number(said, "registers"),
            spills=_number(said, "bytes spill stores") + _number(said, "bytes spill loads"),
            stack=_number(said, "bytes stack frame"),
            shared=_number(said, "bytes smem"),
            barriers=_number(said, "barriers"),
        )
    return found


def _number(text: str, unit: str) -> int:
    """Return the number before the first `unit` in `text`; 0 if there is none."""
    before, _, _ = text.partition(f" {unit}")
    last = before.rsplit(None, 1)[-1] if before != text else ""
    return int(last) if last.isdecimal() else 0


class _Nvrtc:
    """The loaded NVRTC library. Its functions may run in several threads at once."""

    def __init__(self) -> None:
        found = find_nvrtc()
        self.path = found.path
        try:
            if found.builtins is not None:  # NVRTC asks for it by name, and finds a loaded one
                ctypes.CDLL(str(found.builtins), mode=ctypes.RTLD_GLOBAL)
            self.library = ctypes.CDLL(str(found.path))
        except OSError as problem:
            raise NoNvrtcError(
                f"NVRTC at {found.path} cannot be loaded: {problem}. Name another library by TORCH_TILE_NVRTC, or run "
                "pip install nvidia-cuda-nvrtc"
            ) from problem
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def version(self) -> tuple[int, int]:
        """Return NVRTC's major and minor version."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return major.value, minor.value

    def compile(self, text: str, headers: Sequence[tuple[str, bytes]], flags: Sequence[str]) -> tuple[bytes, str]:
        """Compile `text`; return the cubin and the log. Raises the errors of `compile_cubin`."""
        lib, program = self.library, ctypes.c_void_p()
        if self.version() >= (13, 0):  # NVRTC has a cache of its own beside the driver, which gives no log
            flags = (*flags, "--no-cache")
        self._check(
            lib.nvrtcCreateProgram(
                ctypes.byref(program), text.encode(), b"kernel.cu", len(headers),
                _strings([data for _, data in headers]), _strings([name.encode() for name, _ in headers]),
            )
        )  # fmt: skip
        try:
            status = lib.nvrtcCompileProgram(program, len(flags), _strings([flag.encode() for flag in flags]))
            log = self._bytes(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            log = re.sub(r".*Compile time = .*\n?", "", log)  # so that equal builds have equal logs
            if status:
                raise self._failure(status, log, flags, text)
            return self._bytes(program, "CUBIN"), log
        finally:
            lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        """Read an output of an NVRTC program."""
        size = ctypes.c_size_t()
        self._check(getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self.library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _failure(self, status: int, log: str, flags: Sequence[str], text: str) -> Exception:
        """Return the exception for a failed compilation."""
        version = "{}.{}".format(*self.version())
        if "gpu-architecture" in log:
            return NoNvrtcError(
                f"NVRTC {version} at {self.path} does not know the chip of {flags[0]}; a newer CUDA does"
            )
        if short := SHORT.search(log):
            return TooFewRegistersError(short["name"], short["have"], short["need"])
        lines = log.strip().splitlines()
        if len(lines) > _ERROR_LINES:
            lines[_ERROR_LINES:] = [f"... and {len(lines) - _ERROR_LINES} more lines"]
        if FOREIGN in text:
            return ForeignTextError("\n".join(lines))
        head = f"NVRTC {version} refused the generated CUDA ({self._error(status)}):"
        return InternalError("\n".join([head, *lines]))

    def _check(self, status: int) -> None:
        """Raise InternalError for an NVRTC error code."""
        if status:
            raise InternalError(f"NVRTC: {self._error(status)}")

    def _error(self, status: int) -> str:
        """Return NVRTC's text for an error code."""
        return str(self.library.nvrtcGetErrorString(status).decode())


@functools.cache
def _nvrtc() -> _Nvrtc:
    """Load NVRTC once."""
    return _Nvrtc()


def nvrtc_version() -> tuple[int, int]:
    """Return the major and minor version of the NVRTC in use. Raises NoNvrtcError if there is none."""
    return _nvrtc().version()


def _strings(values: Sequence[bytes]) -> ctypes.Array[ctypes.c_char_p]:
    """Convert strings to a C array."""
    return (ctypes.c_char_p * len(values))(*values)


def _write(path: Path, text: str) -> None:
    """Write a text file."""
    path.write_text(text)


# The place of NVRTC on this machine: the library of torch's own CUDA wheels, else a toolkit's. Looking does not load
# it, because a kernel from the cache needs no compiler.

MAJORS = (13, 12)  # CUDA versions whose NVRTC we know, best first


class NoNvrtcError(RuntimeError):
    """Raised if this machine has no NVRTC; the message lists the searched places and how to get it."""


class NvrtcLibrary(NamedTuple):
    """NVRTC's file, the library of built-ins that it opens itself, and a text that identifies both."""

    path: Path
    builtins: Path | None
    identity: str


@functools.cache
def find_nvrtc() -> NvrtcLibrary:
    """Find NVRTC in `$TORCH_TILE_NVRTC`, wheels, torch's folder, toolkits or by the loader, else NoNvrtcError."""
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
    """Yield the files and folders to search for NVRTC, most wanted first."""
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
    """Return the CUDA major version of the torch in use, which its driver can run; 0 if torch has none."""
    version = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    return int(str(version).split(".")[0]) if version else 0


def _packages(name: str) -> list[Path]:
    """Return the folders of a Python package."""
    spec = importlib.util.find_spec(name)
    return [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]


def _newest(folder: Path) -> Path | None:
    """Return a folder's newest NVRTC, perhaps renamed by torch (libnvrtc-1a2b3c.so.12), not the alternative build."""
    known = [p for p in _libraries(folder) if _is_whole(p.name) and _major(p) in MAJORS]
    return max(known, key=lambda path: (_major(path), -len(path.name)), default=None)


def _major(path: Path) -> int:
    """Return the CUDA major version in a file name or in the name of its link's target; 0 if neither has one."""
    number = path.name.partition(".so.")[2] or os.path.realpath(path).rpartition(".so.")[2]
    number = number.partition(".")[0]
    return int(number) if number.isdecimal() else 0


def _libraries(folder: Path) -> list[Path]:
    """List a folder's NVRTC libraries, including those that NVRTC opens itself."""
    with contextlib.suppress(OSError):
        return [folder / name for name in os.listdir(folder) if name.startswith("libnvrtc") and ".so" in name]
    return []


def _is_whole(name: str) -> bool:
    """Return whether a file name is `libnvrtc.so`, with or without a version and a wheel's digest."""
    stem, _, version = name.partition(".so")
    digest = stem.removeprefix("libnvrtc").removeprefix("-")
    return not digest.strip("0123456789abcdef") and all(map(str.isdecimal, version.split(".")[1:]))


def _load_by_name(name: str) -> Path | None:
    """Load the library `name` through the loader and return its file."""
    try:
        ctypes.CDLL(name)
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    return next(
        (Path(line.split(maxsplit=5)[5]) for line in maps if "/libnvrtc" in line and "builtins" not in line), None
    )


def _library(path: Path) -> NvrtcLibrary:
    """Load an NVRTC library, with its builtins beside it."""
    builtins = [p for p in _libraries(path.parent) if "-builtins" in p.name and ".alt." not in p.name]
    beside = max(builtins, key=lambda p: (_major(p) == _major(path), len(p.name)), default=None)
    sizes = [f"{p.name} {p.stat().st_size}" for p in (path.resolve(), *([beside.resolve()] if beside else []))]
    return NvrtcLibrary(path, beside, " ".join(sizes))
