# SPDX-License-Identifier: Apache-2.0
"""Run the generated CUDA text of a kernel on the host, without a GPU.

The thread simulator runs the lowered program. This module runs what the code generator printed: a C++ compiler builds
the text with the headers of csrc/emulated, which make each thread of a block a fiber. Threads take turns at random,
asynchronous copies land at random times, and every access outside of a tensor is reported.
"""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_tile.codegen.tensors import tensors_of
from torch_tile.compiler.binding import Sizes, held
from torch_tile.diagnostics.errors import InternalError, LaunchError
from torch_tile.ir.expr import Scalar, Var
from torch_tile.ir.node import find
from torch_tile.ir.stmt import Alloc
from torch_tile.runtime.aliases import extent
from torch_tile.runtime.cache import get_or_build, key_of
from torch_tile.runtime.cuda_launch import fitted, grid_of, passed_size, slot_of
from torch_tile.runtime.host_compiler import csrc_dir, find_compiler
from torch_tile.runtime.launch import BaseLauncher
from torch_tile.runtime.tensor_map import map_form

if TYPE_CHECKING:
    import torch

    from torch_tile.compiler.sources import CudaSource, Entry, MapArg
    from torch_tile.ir.stmt import Program
    from torch_tile.kernel import JITKernel

FLAGS = (
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-w",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-exceptions",
    "-fno-rtti",
)
# The compiler announces each access to memory, and integers that leave their type; csrc/emulated takes the calls.
INSTRUMENTED = ("-fsanitize=thread", "-fsanitize=signed-integer-overflow")
PAUSES = 16  # of 256 accesses to memory: how many let another thread go first
_INCLUDE = re.compile(r'^#include "(\w+)\.h"$', re.MULTILINE)
_PLAIN = ("cuda_grid",)  # headers that need nothing of a GPU: they are used as they are
_PRODUCTS = re.compile(
    r"\nnamespace tile \{\ntemplate.*?\}  // namespace tile\n", re.DOTALL
)  # cuda_wgmma.py makes them
_PRODUCT = re.compile(r"void (wgmma_m64n(\d+)k(\d+)_(f32|f16|s32)_([a-z0-9]+)_([a-z0-9]+)_(ss|rs)(_x(\d+))?)\(")
_TYPES = {
    "f32": "float", "f16": "f16", "bf16": "bf16", "tf32": "float", "e4m3": "e4m3", "e5m2": "e5m2", "s8": "int8_t",
    "u8": "uint8_t", "s32": "int32_t",
}  # fmt: skip
_one_at_a_time = threading.Lock()


class EmulationError(RuntimeError):
    """A fault of the printed text: a deadlock, an access outside of all tensors, a misaligned packet."""


class _Range(ctypes.Structure):
    """The C struct of an address range: begin and end of a tensor's memory."""

    _fields_ = (("begin", ctypes.c_void_p), ("end", ctypes.c_void_p))


class _Job(ctypes.Structure):
    """The C struct of one launch: kernel, arguments, grid, threads and shared memory."""

    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("args", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint),
        ("shared", ctypes.c_void_p),
        ("shared_bytes", ctypes.c_uint),
        ("tensors", ctypes.POINTER(_Range)),
        ("tensor_count", ctypes.c_uint),
        ("seed", ctypes.c_uint64),
        ("pause", ctypes.c_uint),
    )


def emulate(kernel: JITKernel, *args: Any, seed: int = 0, pauses: int = PAUSES) -> Any:
    """Run a CUDA kernel's text on CPU tensors; returns what a call of the kernel returns.

    `args` are those of a call. `seed` draws the order of threads. Of 256 accesses to memory, `pauses` let another
    thread go first. Tensors that the kernel allocates hold NaN, or -1, before it runs.

    Raises:
        EmulationError: the text does something that a GPU would not survive.
        LaunchError: the kernel is not compiled for CUDA, or the arguments do not fit.
    """
    if kernel.target.kind != "cuda":
        raise LaunchError(f"{kernel!r} has no CUDA text to run; compile it with target='cuda:sm_80'")
    launcher: Any = kernel.specialised(*args).launcher
    return EmulatedLauncher(launcher.program, launcher.source, launcher.out_idx, seed, pauses)(*args)


class EmulatedLauncher(BaseLauncher):
    """Calls the entries of a CUDA text that was built for the host."""

    source: CudaSource
    seed: int
    pauses: int
    library: Path | None

    def __init__(
        self, program: Program, source: CudaSource, out_idx: Sequence[int] = (), seed: int = 0, pauses: int = PAUSES,
        library: Path | None = None,
    ):  # fmt: skip
        """`library` is what `build` made of this source and others; by default the source is built alone."""
        super().__init__(program, out_idx)
        self.source, self.seed, self.pauses, self.library = source, seed, pauses, library

    def allocate(self, buffer: Any, values: dict[Var, Any], device: torch.device | str) -> torch.Tensor:
        """A result or scratch buffer whose bytes are all 255."""
        found = super().allocate(buffer, values, device)
        if found.numel():
            ctypes.memset(found.data_ptr(), 255, found.numel() * found.element_size())
        return found

    def call(self, tensors: list[Any], sizes: Sizes, scalars: dict[Var, Scalar]) -> None:
        """Run the entries one after the other."""
        for entry in self.source.entries:
            if entry.cluster != (1, 1, 1):
                raise LaunchError(f"{entry.name} runs in clusters of {entry.cluster} blocks, which are not emulated")
        scheduler = _scheduler()  # first: the text's calls find it
        library = ctypes.CDLL(str(self.library or build([self.source])))
        anywhere = any(n.buffer.scope == "global" for n in find(self.program, Alloc))  # at addresses in tensors
        names = [b.name for b in tensors_of(self.program)]
        tensors = [held(b, t, {}) if t is None else t for b, t in zip(tensors_of(self.program), tensors, strict=True)]
        for number, entry in enumerate(self.source.entries):
            grid = fitted(entry, grid_of(entry, {**sizes, **scalars}))
            if grid is not None:
                given = zip(entry.args, entry.kinds, strict=True)
                slots = [_slot(each, kind, tensors, names, sizes, scalars) for each, kind in given]
                _run(scheduler, library, entry, grid, slots, tensors, self.seed + number, self.pauses, anywhere)


def _slot(
    argument: int | Var | MapArg,
    kind: str,
    tensors: Sequence[torch.Tensor],
    names: Sequence[str],
    sizes: Sizes,
    scalars: dict[Var, Scalar],
) -> bytes:
    """Encode an argument of an entry as bytes."""
    if isinstance(argument, int):
        return struct.pack("q", tensors[argument].data_ptr())
    if isinstance(argument, Var):
        return (
            struct.pack("q", passed_size(argument, kind, sizes))
            if argument in sizes
            else struct.pack("Q", slot_of(argument, scalars[argument]))
        )
    form = map_form(argument, names[argument.position], {**sizes, **scalars})
    rank = len(form.sizes)
    pad = [0] * (5 - rank)
    return struct.pack(
        "q4q5I5I4B40x",
        tensors[argument.position].data_ptr(),
        *(*form.strides, *[0] * (5 - rank)),
        *(*form.sizes, *pad),
        *(*form.box, *pad),
        *(rank, argument.swizzle, argument.itemsize, form.data_type),
    )


def _run(
    scheduler: ctypes.CDLL,
    library: ctypes.CDLL,
    entry: Entry,
    grid: tuple[int, int, int],
    slots: Sequence[bytes],
    tensors: Sequence[torch.Tensor],
    seed: int,
    pauses: int,
    anywhere: bool,
) -> None:
    """Run one entry over its grid; it may access memory `anywhere`, or in tensors only."""
    memory = [ctypes.create_string_buffer(slot, max(len(slot), 8)) for slot in slots]
    pointers = (ctypes.c_void_p * len(memory))(*map(ctypes.addressof, memory))
    places = [(0, 2**64 - 1)] if anywhere else [extent(t) for t in tensors]
    ranges = (_Range * len(places))(*(_Range(*place) for place in places))
    job = _Job(
        ctypes.cast(getattr(library, f"emulated_{entry.name}"), ctypes.c_void_p),
        ctypes.cast(pointers, ctypes.c_void_p),
        (ctypes.c_uint * 3)(*grid),
        entry.threads,
        ctypes.addressof(ctypes.c_char.in_dll(library, "shared_memory")),
        entry.shared_bytes,
        ranges,
        len(places),
        seed,
        pauses,
    )
    run: Callable[..., bytes | None] = scheduler.emulated_run
    with _one_at_a_time:
        problem = run(ctypes.byref(job))
    if problem is not None:
        raise EmulationError(f"{entry.name}: {problem.decode()}")


def host_text(*sources: CudaSource) -> str:
    """Return the texts as C++ for the host: other headers, and a function that unpacks arguments for each entry."""
    included = dict.fromkeys(name for source in sources for name in _INCLUDE.findall(source.text))
    plain = "\n".join(
        re.sub(r"^#(include|pragma).*$", "", (csrc_dir() / f"{name}.h").read_text(), flags=re.MULTILINE)
        for name in included
        if name in _PLAIN
    )
    texts = [_PRODUCTS.sub(_products, _INCLUDE.sub("", source.text)) for source in sources]
    calls = [
        f'extern "C" EMULATED_OUTSIDE void emulated_{entry.name}(void** args) {{ emulated::call({entry.name}, args); }}'
        for source in sources
        for entry in source.entries
    ]
    return "\n".join(('#include "emulated/device.h"', plain, *texts, *calls, ""))


def _products(block: re.Match[str]) -> str:
    """Return the functions of generated products in a block of text, without their instructions."""
    lines = []
    for name, n, k, d, a, b, where, _, steps in _PRODUCT.findall(block[0]):
        walks = ("class A, class B", "A") if where == "ss" else ("class B", "InRegisters")
        types = f"{n}, {k}, {steps or 1}, {_TYPES[a]}, {_TYPES[b]}, {walks[1]}, B"
        lines += [
            f"template <{walks[0]}>",
            f"void {name}({_TYPES[d]}* d, const void* a, const void* b, int a_step, int b_step, bool keep) {{",
            f"  multiply_group<{types}>(d, a, b, a_step, b_step, keep);",
            "}",
        ]
    return "\n".join(["", "namespace tile {", *lines, "}  // namespace tile", ""])


def build(sources: Sequence[CudaSource]) -> Path:
    """Build the shared library of CUDA texts for the host, or find it in the cache."""
    text, compiler = host_text(*sources), find_compiler()
    patterns = ("emulated/*.h", "cpu_*.h", "ping_pong.h", "wrapping.h")
    headers = [path.read_bytes() for pattern in patterns for path in sorted(csrc_dir().glob(pattern))]

    def compile_text(output: Path) -> None:
        source_file, object_file = output.with_suffix(".emulated.cpp"), output.with_suffix(".emulated.o")
        source_file.write_text(text)
        try:
            _compile(*compiler.command, *FLAGS, *INSTRUMENTED, f"-I{csrc_dir()}", "-c", source_file, "-o", object_file)
            _compile(*compiler.command, "-shared", object_file, "-o", output)
        finally:
            source_file.unlink(missing_ok=True)
            object_file.unlink(missing_ok=True)

    return get_or_build(key_of(text, *headers, compiler.identity, *FLAGS, *INSTRUMENTED), ".so", compile_text)


def _scheduler_library() -> Path:
    """Build the thread scheduler of csrc/emulated, or find it in the cache."""
    compiler, folder = find_compiler(), csrc_dir() / "emulated"
    sources = [(folder / name).read_bytes() for name in ("scheduler.cpp", "scheduler.h")]

    def build(output: Path) -> None:
        flags = (*FLAGS, "-O2", "-fwrapv", "-U_FORTIFY_SOURCE", "-shared")
        _compile(*compiler.command, *flags, folder / "scheduler.cpp", "-o", output)

    return get_or_build(key_of(*sources, compiler.identity, *FLAGS), ".so", build)


def _scheduler() -> Any:
    """Load the scheduler's library, and declare its entry for ctypes."""
    library = ctypes.CDLL(str(_scheduler_library()), mode=ctypes.RTLD_GLOBAL)
    library.emulated_run.restype = ctypes.c_char_p
    return library


def _compile(*command: Any) -> None:
    """Run the C++ compiler. Raises InternalError with its message if it fails."""
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if result.returncode:
        raise InternalError(f"the printed text is no C++:\n{result.stderr[-4000:]}")
