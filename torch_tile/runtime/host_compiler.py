# SPDX-License-Identifier: Apache-2.0
"""Compile C++ source to a shared library with the compiler that Inductor would use, through the cache on disk.

The library uses torch's own OpenMP run time, so kernels and torch share one pool of threads. Neither torch nor Inductor
is imported: both only say which compiler to take, and cost a second.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch_tile.diagnostics.errors import FOREIGN, ForeignTextError, InternalError
from torch_tile.diagnostics.progress import waiting
from torch_tile.ir.widths import WRAPS
from torch_tile.runtime.cache import CacheError, get_or_build, key_of

# No -ffast-math, even where CXX has it: kernels promise infinities, NaN and signed zeros. A library that is linked with
# it also flushes subnormal numbers in threads of the process. Given up are only errno and traps.
# With AVX-512, g++ 12 fuses a product with a masked difference that only takes other lanes from it: wrong numbers, or
# an internal error. Only -ffp-contract=fast does that, so headers spell out the fused products that they want.
# Keeping traps would cure it too, but makes exp 3 times slower.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fno-fast-math",
    "-fno-unsafe-math-optimizations",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fno-exceptions",
    "-fno-rtti",
)
# The functions of csrc/miscompilations.cpp, and what it means that one of them returns 0.
MISCOMPILATIONS = {
    "branches": "branches on an index of a loop store wrong numbers",
    "rounded_products": "products are not rounded before they are added",
    "special_numbers": "NaN, infinities or signs of zeros get lost, as by -ffast-math",
}
_ERROR_LINES = 20
_SAYS_ERROR = re.compile(r"\berror: |\bld: |: undefined reference")  # of the compiler, and of the linker
_log = logging.getLogger("torch_tile")


class NoCompilerError(RuntimeError):
    """Raised if this machine has no usable C++ compiler; the message tells how to get one."""


@dataclass(frozen=True)
class HostCompiler:
    """A C++ compiler with its flags; `identity` differs whenever its output could, and names no folder."""

    command: tuple[str, ...]
    flags: tuple[str, ...]
    link: tuple[str, ...]
    identity: str

    @property
    def name(self) -> str:
        """Return the command, as the user would write it."""
        return shlex.join(self.command)

    @property
    def key(self) -> tuple[str, ...]:
        """Return what of the compiler and its flags is part of a library's key: the OpenMP library by its name."""
        link = [part for part in self.link if not part.startswith("-Wl,-rpath,")]
        return (self.identity, *self.flags, *(os.path.basename(part) for part in link))

    def arguments(self, source: Path, output: Path, *flags: str) -> list[str]:
        """Return the command line that builds `output` from `source`, with `flags` of this text."""
        return [*self.command, *self.flags, *flags, f"-I{csrc_dir()}", str(source), "-o", str(output), *self.link]


def compile_shared(source: str) -> Path:
    """Return the shared library of the C++ text `source`, built or from the cache. Any thread may call it.

    The first text that a process builds also shows whether the compiler has a known miscompilation: then it warns.

    Raises NoCompilerError if there is no compiler, or if it stops at a fault of its own. Raises CacheError if the cache
    cannot be used. Raises ForeignTextError if the compiler refuses a text with an author's own in it. Raises
    InternalError if it refuses another text: then the code generator is at fault.
    """
    compiler = find_compiler()
    key = key_of(source, headers_digest(), *compiler.key)

    def build(output: Path) -> None:
        text = get_or_build(key, ".cpp", lambda path: _write(path, source))
        start = time.perf_counter()
        with waiting("compiling a kernel"):
            flags = ("-fwrapv",) if WRAPS in source else ()
            result = _run(compiler.arguments(text, output, *flags))
        if result.returncode != 0:
            _check_machine(text, output, result)
            if "internal compiler error" in result.stderr.lower() or "PLEASE submit a bug report" in result.stderr:
                fix = f"{compiler.name} stopped at a fault of its own; name another version or compiler in CXX"
                raise NoCompilerError(f"{fix}: {_failure(text, result)}")
            if FOREIGN in source:
                raise ForeignTextError(result.stderr.strip())
            raise InternalError(_failure(text, result))
        _log.debug("%s compiled %s in %.2f s", compiler.command[0], text, time.perf_counter() - start)
        _warn_of_miscompilations(compiler)

    return get_or_build(key, ".so", build)


def miscompilations(compiler: HostCompiler) -> list[str]:
    """Return what a compiler is known to get wrong, by a trial kept in the cache; CacheError if it fails."""
    source = csrc_dir() / "miscompilations.cpp"

    def build(output: Path) -> None:
        result = _run(compiler.arguments(source, output))
        if result.returncode != 0:
            raise CacheError(_failure(source, result))

    library = load_library(get_or_build(key_of(source.read_bytes(), *compiler.key), ".so", build))
    return [text for name, text in MISCOMPILATIONS.items() if not library[name]()]


@functools.cache
def _warn_of_miscompilations(compiler: HostCompiler) -> None:
    """Warn where a compiler gets kernels wrong; once in a process."""
    try:
        found = miscompilations(compiler)
    except CacheError as error:
        found = [f"its check did not work ({error})"]
    if found:
        warnings.warn(
            f"{compiler.name} miscompiles CPU kernels: {'; '.join(found)}. Their numbers may be wrong. Name another "
            "compiler in CXX, or take such options out of it; `python -m torch_tile doctor` repeats this check.",
            RuntimeWarning,
            stacklevel=2,
        )


@functools.cache
def csrc_dir() -> Path:
    """Return the folder of the headers: `csrc/` inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "csrc", package.parent / "csrc"):
        if (folder / "cpu_types.h").is_file():
            return folder
    raise InternalError(f"the C++ headers are neither in {package} nor beside it")


@functools.cache
def headers_digest() -> str:
    """Return a digest of the headers that generated CPU kernels may include; read once per process."""
    return key_of(*(part for path in sorted(csrc_dir().glob("cpu_*.h")) for part in (path.name, path.read_bytes())))


@functools.cache
def find_compiler() -> HostCompiler:
    """Return the first working compiler of Inductor's setting, `$CXX`, g++ and clang++, else NoCompilerError."""
    tried = []
    for command in _candidates():
        if command in tried:
            continue
        tried.append(command)
        for machine in _machine_flags():
            flags = FLAGS + machine + (("-Xpreprocessor", "-fopenmp") if sys.platform == "darwin" else ("-fopenmp",))
            # The predefined macros show version, instruction sets and that the flags are known, all at once.
            result = _run([*command, *flags, "-dM", "-E", "-x", "c++", os.devnull])
            if result.returncode == 0:
                is_clang = "__clang__" in result.stdout
                link = _openmp_link(is_clang)
                if is_clang and not link and not _links([*command, *flags]):
                    break
                _warn_of_other(command, tried)
                names = shlex.join(os.path.basename(word) for word in command)
                return HostCompiler(command, flags, link, key_of(names, result.stdout))
    names = ", ".join(shlex.join(command) for command in tried)
    raise NoCompilerError(
        f"torch_tile needs a C++17 compiler with OpenMP to build CPU kernels; none of these works: {names}. "
        "Install one (Debian, Ubuntu: `apt install g++`; Fedora: `dnf install gcc-c++`; conda: `conda install gxx`; "
        "macOS: `xcode-select --install`) or name one in the environment variable CXX. clang needs an OpenMP library "
        "of its own (Debian, Ubuntu: `apt install libomp-dev`)."
    )


def _warn_of_other(found: tuple[str, ...], tried: list[tuple[str, ...]]) -> None:
    """Warn where CXX names a compiler that was tried and does not work, since another one is used then."""
    named = os.environ.get("CXX", "").strip()
    if named and any(command != found and shlex.join(command) == named for command in tried):
        _log.warning("CXX names %r, which does not work here: %s compiles CPU kernels", named, shlex.join(found))


def _links(command: list[str]) -> bool:
    """Return whether a compiler finds its OpenMP library, which clang may be installed without."""
    with tempfile.TemporaryDirectory(prefix="torch_tile_") as folder:
        return _run([*command, "-x", "c++", os.devnull, "-o", str(Path(folder) / "empty.so")]).returncode == 0


def _candidates() -> Iterator[tuple[str, ...]]:
    """Yield the commands of compilers to try, in order."""
    # If Inductor's settings are not loaded, nobody changed them, and their default is $CXX or g++.
    chosen = getattr(getattr(sys.modules.get("torch._inductor.config"), "cpp", None), "cxx", ())
    first = chosen if isinstance(chosen, (tuple, list)) else (chosen,)
    for name in (*first, os.environ.get("CXX"), "g++", "clang++"):
        if isinstance(name, str) and name.strip():
            try:
                yield tuple(shlex.split(name))
            except ValueError:  # a quotation that does not end: shown among the commands that do not work
                yield (name,)


def _machine_flags() -> Iterator[tuple[str, ...]]:
    """Yield flags that enable this machine's instruction sets, best first; compilers know different flags."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        yield ("-march=native", "-mprefer-vector-width=512")
    yield ("-march=native",)
    yield ("-mcpu=native",)
    yield ()


def _openmp_link(clang: bool) -> tuple[str, ...]:
    """Return the flags that link torch's OpenMP library; --as-needed then drops the compiler's own."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ()
    package = Path(spec.origin).parent
    names = ["libomp*.dylib", "libiomp5*.dylib"] if sys.platform == "darwin" else ["libiomp5*.so*", "libomp*.so*"]
    if not clang:
        names.insert(0, "libgomp*.so*")  # clang's calls are not in libgomp
    for folder in (package / "lib", package.parent / "torch.libs"):
        for name in names:
            for library in sorted(folder.glob(name)):
                needed = ("-Wl,--no-as-needed", str(library), "-Wl,--as-needed")
                return ((str(library),) if sys.platform == "darwin" else needed) + (f"-Wl,-rpath,{folder}",)
    return ()


def _write(path: Path, text: str) -> None:
    """Write a text file."""
    path.write_text(text)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command with English messages."""
    environment = os.environ | {"LC_ALL": "C"}
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def _check_machine(source: Path, output: Path, result: subprocess.CompletedProcess[str]) -> None:
    """Raise CacheError if the machine, and not the source text, made the compiler fail."""
    said = result.stderr.lower()
    if "no space left" in said or "disk quota" in said:
        fix = f"Free some space in {output.parent} and {tempfile.gettempdir()}, or set TORCH_TILE_CACHE_DIR and TMPDIR"
    elif "file too large" in said or "file size limit" in said:
        fix = f"Raise the limit of a file's size (ulimit -f) for {output.parent} and {tempfile.gettempdir()}"
    elif result.returncode < 0 or "killed" in said or "out of memory" in said or "cannot allocate" in said:
        fix = "Free some memory, or build fewer kernels at once"
    elif "read-only file system" in said or "permission denied" in said:
        fix = f"Check that {output.parent} and {tempfile.gettempdir()} can be written, or set TORCH_TILE_CACHE_DIR"
    elif "cannot find -lomp" in said or "cannot find -lgomp" in said or "'omp.h' file not found" in said:
        fix = "Install the compiler's OpenMP run time (libomp-dev for clang on Debian), or set CXX to another compiler"
    else:
        return
    raise CacheError(f"{fix}: {_failure(source, result).replace('refused', 'could not build')}")


def _failure(source: Path, result: subprocess.CompletedProcess[str]) -> str:
    """Build the error of a failed compilation, from the compiler's first error on: warnings may stand before it."""
    lines = (result.stderr or result.stdout).strip().splitlines()
    first = next((n for n, line in enumerate(lines) if _SAYS_ERROR.search(line)), 0)
    lines = lines[max(first - 1, 0) :] if first else lines  # the line before names the function or the file
    if len(lines) > _ERROR_LINES:
        lines[_ERROR_LINES:] = [f"... and {len(lines) - _ERROR_LINES} more lines"]
    head = f"the host compiler refused {source} (exit status {result.returncode}):"
    return "\n".join([head, *lines, shlex.join(result.args)])


# Loads the shared library of a compiled program.


def load_library(path: Path) -> ctypes.CDLL:
    """Load a shared library of the cache. Raises CacheError where the system does not allow it to run."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        hint = ""
        if hasattr(os, "statvfs") and os.statvfs(path.parent).f_flag & os.ST_NOEXEC:
            hint = f"{path.parent} lies on a file system that is mounted noexec. "
        raise CacheError(
            f"{path} cannot be loaded: {error}. {hint}Set TORCH_TILE_CACHE_DIR to a folder from which code may be run, "
            "or remove the file if another machine built it."
        ) from error


def load_entry(path: Path, name: str) -> Callable[..., int]:
    """Return the function `name`: (pointers, numbers) -> 0, or the failed assertion's number. It releases the GIL."""
    entry = load_library(path)[name]
    entry.restype = ctypes.c_int64
    entry.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return entry
