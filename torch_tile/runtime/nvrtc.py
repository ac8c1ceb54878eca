# SPDX-License-Identifier: Apache-2.0
"""CUDA C++ to a cubin, by NVRTC in this process and through the cache on disk; what the assembler said of it is kept.

The text may include headers of csrc/ and nothing else: they are handed to NVRTC in memory. Everything that could change
the result is in the cache's key.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch_tile.compiler.context import PassOptions
from torch_tile.diagnostics.errors import InternalError
from torch_tile.hardware import Target
from torch_tile.runtime.cache import get_or_build, key_of
from torch_tile.runtime.find_nvrtc import NoNvrtcError, find_nvrtc
from torch_tile.runtime.host_compiler import csrc_dir

# No warning (549) of variables read before they are set: tiles hold garbage until written, and may be moved as a whole.
FLAGS = ("--std=c++17", "--ptxas-options=-v", "--no-source-include", "--diag-suppress=549")
_ERROR_LINES = 30
SHORT = re.compile(
    r"Insufficient registers \((?P<have>\d+)\).* in function (?P<name>\w+)\..*target of (?P<need>\d+) or higher"
)
_log = logging.getLogger("torch_tile")


class Resources(NamedTuple):
    """What one thread or block of a kernel takes: registers, and bytes of spills, stack and static shared memory."""

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
        """Lines of the log that cost speed or hint at a fault: the assembler's C75xx advice, and every warning."""
        if "warning" not in self.log and "(C" not in self.log:
            return []
        return [line.strip() for line in self.log.splitlines() if re.search(r"\(C\d{4}\)|\bwarning\b", line)]


class TooFewRegistersError(RuntimeError):
    """The assembler has not registers enough for an instruction of the entry function `name`."""

    def __init__(self, name: str, have: str, need: str):
        super().__init__(f"{name} has {have} registers for each thread and needs {need}")
        self.name, self.have, self.need = name, have, need


def compile_cubin(text: str, target: Target, options: PassOptions | None = None) -> Cubin:
    """The cubin of the CUDA C++ `text` for `target`, or the one found in the cache. Any thread may call it.

    Raises NoNvrtcError if there is no NVRTC or it does not know the chip, CacheError if the cache cannot be used,
    TooFewRegistersError if tiles ask for more than threads have, and InternalError if the text is refused for another
    reason, which then is a fault of the code generator.
    """
    library = find_nvrtc()
    flags = flags_for(target, options or PassOptions())
    headers = headers_of(text)
    key = key_of(text, library.identity, *flags, *(part for item in headers for part in item))
    made: list[tuple[bytes, str]] = []

    def result() -> tuple[bytes, str]:
        if not made:
            start = time.perf_counter()
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
    """NVRTC's options."""
    chosen = (f"--gpu-architecture={target.arch}", *FLAGS)
    return (*chosen, "--use_fast_math") if options.fast_math else chosen


def headers_of(text: str) -> tuple[tuple[str, bytes], ...]:
    """The headers of csrc/ that `text` includes, directly or through another, by name."""
    found: dict[str, bytes] = {}
    waiting = _included(text)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name], inner = _header(name)
            waiting += inner
    return tuple(sorted(found.items()))


def _included(text: str) -> list[str]:
    return re.findall(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', text, re.MULTILINE)


def _header(name: str) -> tuple[bytes, list[str]]:
    path = os.path.join(csrc_dir(), name)
    try:
        return _read_header(path, os.stat(path).st_mtime_ns)
    except OSError as problem:
        raise InternalError(f"generated CUDA includes {name!r}, which is not in {csrc_dir()}") from problem


@functools.lru_cache
def _read_header(path: str, changed: int) -> tuple[bytes, list[str]]:
    with open(path, "rb") as file:
        data = file.read()
    return data, _included(data.decode())


def resources_of(log: str) -> dict[str, Resources]:
    """What the verbose assembler said of each entry function."""
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
    """The number before the first `unit` in `text`; 0 if there is none."""
    before, _, _ = text.partition(f" {unit}")
    last = before.rsplit(None, 1)[-1] if before != text else ""
    return int(last) if last.isdecimal() else 0


class _Nvrtc:
    """The library, loaded. Its functions may run in several threads at once."""

    def __init__(self) -> None:
        found = find_nvrtc()
        self.path = found.path
        try:
            if found.builtins is not None:  # NVRTC asks for it by name, which finds one that is loaded
                ctypes.CDLL(str(found.builtins), mode=ctypes.RTLD_GLOBAL)
            self.library = ctypes.CDLL(str(found.path))
        except OSError as problem:
            raise NoNvrtcError(f"NVRTC at {found.path} cannot be loaded: {problem}") from problem
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def version(self) -> tuple[int, int]:
        """Major and minor."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return major.value, minor.value

    def compile(
        self, text: str, headers: Sequence[tuple[str, bytes]], flags: Sequence[str]
    ) -> tuple[bytes, str]:  # fmt: skip
        """Cubin and log. Raises what `compile_cubin` does."""
        lib, program = self.library, ctypes.c_void_p()
        if self.version() >= (13, 0):  # where the driver is, NVRTC has a cache of its own, which gives no log
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
                raise self._failure(status, log, flags)
            return self._bytes(program, "CUBIN"), log
        finally:
            lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self.library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _failure(self, status: int, log: str, flags: Sequence[str]) -> Exception:
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
        head = f"NVRTC {version} refused the generated CUDA ({self._error(status)}):"
        return InternalError("\n".join([head, *lines]))

    def _check(self, status: int) -> None:
        if status:
            raise InternalError(f"NVRTC: {self._error(status)}")

    def _error(self, status: int) -> str:
        return str(self.library.nvrtcGetErrorString(status).decode())


@functools.cache
def _nvrtc() -> _Nvrtc:
    return _Nvrtc()


def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of the NVRTC in use. Raises NoNvrtcError if there is none."""
    return _nvrtc().version()


def _strings(values: Sequence[bytes]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(values))(*values)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
