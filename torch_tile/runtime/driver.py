# SPDX-License-Identifier: Apache-2.0
"""Call the CUDA driver through ctypes: load cubins into a device's primary context, and launch functions.

No call here waits for a device or allocates on one. All calls are allowed while a CUDA graph is captured.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch_tile.diagnostics.errors import LaunchError
from torch_tile.hardware import SHARED_WITHOUT_ASKING

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_CLUSTER, _SERIALIZATION = 4, 6  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, .._PROGRAMMATIC_STREAM_SERIALIZATION
NO_CLUSTER = (1, 1, 1)


class Function(NamedTuple):
    """A kernel that is ready to be launched in `context`; both are the driver's handles."""

    name: str
    handle: int
    context: int


class _Value(ctypes.Union):
    """A ctypes union of 64 bytes for values that the driver fills."""

    _fields_ = [("room", ctypes.c_uint64 * 8), ("words", ctypes.c_uint * 3)]


class _Attribute(ctypes.Structure):
    """The struct CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_uint), ("value", _Value)]


class _Config(ctypes.Structure):
    """The struct CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    ]  # fmt: skip


class Driver:
    """The CUDA driver (libcuda). Any thread may call its methods; they restore the thread's current context."""

    def __init__(self, library: ctypes.CDLL):
        self.library = library
        self.contexts: dict[int, int] = {}
        self.lock = threading.Lock()
        self._check("cuInit", 0)

    def address(self, name: str) -> int:
        """Return the address of a driver function, for callers outside Python; 0 if the driver lacks it."""
        function = getattr(self.library, name, None)
        return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0

    def version(self) -> tuple[int, int]:
        """Return the newest CUDA version that the driver supports."""
        number = ctypes.c_int()
        self._check("cuDriverGetVersion", ctypes.byref(number))
        return number.value // 1000, number.value % 1000 // 10

    def capability(self, device: int) -> int:
        """Return a device's compute capability as one number, such as 90 for 9.0."""
        major, minor = (self.attribute(a, device) for a in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR))
        return 10 * major + minor

    def context(self, device: int) -> int:
        """Return the primary context of a device, created if torch has not; it lives until the process ends."""
        with self.lock:
            if device not in self.contexts:
                handle, context = ctypes.c_int(), ctypes.c_void_p()
                self._check("cuDeviceGet", ctypes.byref(handle), device)
                self._check("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
                self.contexts[device] = context.value or 0
            return self.contexts[device]

    def load(self, cubin: bytes, device: int, shared: dict[str, int]) -> dict[str, Function]:
        """Load a cubin and return the functions in `shared`, each with its bytes of dynamic shared memory allowed.

        The module stays loaded until the process ends, because launches may be in flight or in captured graphs.
        """
        context, module = self.context(device), ctypes.c_void_p()
        functions: dict[str, Function] = {}
        with self.current(context), self._capture_allowed():
            self._check("cuModuleLoadData", ctypes.byref(module), cubin)
            for name, size in shared.items():
                function = ctypes.c_void_p()
                self._check("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
                if size > SHARED_WITHOUT_ASKING:
                    self._check("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, size)
                functions[name] = Function(name, function.value or 0, context)
        return functions

    def launch(
        self,
        function: int,
        grid: Sequence[int],
        threads: int,
        shared: int,
        stream: int,
        slots: Sequence[int | ctypes.Array[ctypes.c_char]],
        cluster: tuple[int, int, int] = NO_CLUSTER,
        early: bool = False,
    ) -> None:
        """Start a kernel of the current context on `stream`.

        Each slot is one argument: the 8 bytes that hold it, or all its bytes. Blocks come in groups of `cluster`; an
        `early` kernel may begin before the one ahead of it has ended, and waits where it must.
        """
        numbers = [0 if isinstance(s, ctypes.Array) else s for s in slots]
        values = (ctypes.c_uint64 * max(1, len(slots)))(*numbers)
        start = ctypes.addressof(values)
        found = (ctypes.addressof(s) if isinstance(s, ctypes.Array) else start + 8 * n for n, s in enumerate(slots))
        places = (ctypes.c_void_p * max(1, len(slots)))(*found)
        kernel, queue = ctypes.c_void_p(function), ctypes.c_void_p(stream)
        attributes = ([(_CLUSTER, cluster)] if cluster != NO_CLUSTER else []) + (
            [(_SERIALIZATION, (1,))] if early else []
        )
        if not attributes:
            self._check("cuLaunchKernel", kernel, *grid, threads, 1, 1, shared, queue, places, None)
            return
        asked = (_Attribute * len(attributes))(*(_Attribute(kind, _Value(words=words)) for kind, words in attributes))
        config = _Config(tuple(grid), (threads, 1, 1), shared, queue, asked, len(asked))
        self._check("cuLaunchKernelEx", ctypes.byref(config), kernel, places, None)

    def encode_tiled(
        self,
        into: int,
        data_type: int,
        address: int,
        sizes: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        swizzle: int,
        promotion: int,
    ) -> None:
        """Write the tensor map of a tensor at `address` to the 128 bytes at `into`, a multiple of 64.

        Numbers are the driver's; the innermost dimension comes first; `strides`, of all others, are in bytes. What is
        outside the tensor reads as 0.
        """
        rank = len(sizes)
        places = (ctypes.c_void_p(into), data_type, rank, ctypes.c_void_p(address))
        tensor = (ctypes.c_uint64 * rank)(*sizes), (ctypes.c_uint64 * rank)(*strides)
        boxes = (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank)
        no_interleave, zero_fill = 0, 0
        self._check("cuTensorMapEncodeTiled", *places, *tensor, *boxes, no_interleave, swizzle, promotion, zero_fill)

    @contextmanager
    def current(self, context: int) -> Iterator[None]:
        """Make a context current in this thread, and afterwards the one that was."""
        before = ctypes.c_void_p()
        self._check("cuCtxGetCurrent", ctypes.byref(before))
        if before.value == context:
            yield
            return
        self._check("cuCtxSetCurrent", ctypes.c_void_p(context))
        try:
            yield
        finally:
            self._check("cuCtxSetCurrent", before)

    @contextmanager
    def _capture_allowed(self) -> Iterator[None]:
        """Let this thread load modules although a stream is being captured."""
        mode = ctypes.c_int(_RELAXED)
        self._check("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            self._check("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def attribute(self, attribute: int, device: int) -> int:
        """Return an attribute of a device, by the driver's number."""
        handle, value = ctypes.c_int(), ctypes.c_int()
        self._check("cuDeviceGet", ctypes.byref(handle), device)
        self._check("cuDeviceGetAttribute", ctypes.byref(value), attribute, handle)
        return value.value

    def _check(self, name: str, *args: object) -> None:
        """Call a function of the driver. Raises LaunchError if it fails."""
        function = getattr(self.library, name, None)
        if function is None:
            raise LaunchError(f"NVIDIA's driver on this machine has no {name}; a newer driver does")
        status = function(*args)
        if status:
            raise LaunchError(f"{name}: {self.error(status)}")

    def error(self, status: int) -> str:
        """Return the driver's name and description of a status."""
        texts = []
        for ask in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            getattr(self.library, ask)(status, ctypes.byref(text))
            texts.append((text.value or b"unknown").decode())
        return f"{texts[0]} ({status}): {texts[1]}"


def open_library() -> ctypes.CDLL:
    """Open libcuda, which comes with NVIDIA's driver. Raises LaunchError where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as problem:
        raise LaunchError(f"there is no NVIDIA driver on this machine ({problem})") from problem


@functools.cache
def driver() -> Driver:
    """Return the driver of this machine, opened once. Raises LaunchError if there is none or it finds no device."""
    return Driver(open_library())
