# SPDX-License-Identifier: Apache-2.0
"""A driver that keeps a diary instead of a GPU."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import pytest

from torch_tile.runtime import cuda_launch, driver as driver_module, replay
from torch_tile.runtime.driver import Driver
from torch_tile.runtime.host_compiler import compile_shared

FAKE = Path(__file__).with_name("fake_cuda.cpp")
CONTEXT = 0x1000  # of device 0; each further device's is one more


class Map(ctypes.Structure):
    """A tensor map: what the driver was to make it from."""

    _fields_ = [
        ("address", ctypes.c_uint64), ("sizes", ctypes.c_uint64 * 5), ("strides", ctypes.c_uint64 * 4),
        ("boxes", ctypes.c_uint * 5), ("data_type", ctypes.c_uint8), ("rank", ctypes.c_uint8),
        ("swizzle", ctypes.c_uint8), ("promotion", ctypes.c_uint8), ("number", ctypes.c_uint64),
        ("rest", ctypes.c_uint64 * 2),
    ]  # fmt: skip


class Record(ctypes.Structure):
    """One launch, as the driver was asked for it."""

    _fields_ = [
        ("function", ctypes.c_uint64), ("context", ctypes.c_uint64), ("stream", ctypes.c_uint64),
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("cluster", ctypes.c_uint * 3), ("early", ctypes.c_uint), ("is_extended", ctypes.c_uint),
        ("slots", ctypes.c_uint64 * 16), ("maps", Map * 4),
    ]  # fmt: skip


class FakeCuda:
    """The stand-in for libcuda, its memory of what was asked for, and its settings."""

    def __init__(self, path: Path):
        self.library = ctypes.CDLL(str(path))
        self.driver = Driver(self.library)

    def number(self, name: str) -> ctypes.c_int:
        """A variable of the library: slots (arguments that a launch reads), refuse (the status of launches), ..."""
        return ctypes.c_int.in_dll(self.library, name)

    def reset(self) -> None:
        self.library.fake_reset()

    def launches(self) -> list[Record]:
        """All since the last time."""
        records = (Record * 64).in_dll(self.library, "records")
        found = [Record.from_buffer_copy(records[n]) for n in range(self.number("count").value)]
        self.number("count").value = 0
        return found

    def modules(self) -> list[int]:
        """The contexts that modules were loaded into."""
        count = self.number("modules").value
        return list((ctypes.c_uint64 * 64).in_dll(self.library, "module_contexts")[:count])

    def shared_allowed(self) -> list[int]:
        """What functions were allowed, in bytes."""
        return list((ctypes.c_int * 64).in_dll(self.library, "allowed")[: self.number("allowances").value])

    def current(self) -> int:
        """The current context."""
        context = ctypes.c_void_p()
        self.library.cuCtxGetCurrent(ctypes.byref(context))
        return context.value or 0


@functools.cache
def fake_library() -> FakeCuda:
    """Built once."""
    return FakeCuda(compile_shared(FAKE.read_text()))


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Make it the driver."""
    fake = fake_library()
    fake.reset()
    fake.driver.contexts.clear()
    for module in (driver_module, cuda_launch, replay):
        monkeypatch.setattr(module, "driver", lambda: fake.driver)
    monkeypatch.setattr(cuda_launch, "current_stream", lambda device: 0)
    return fake


def count_as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let launchers take CPU tensors for a GPU's."""
    monkeypatch.setattr(cuda_launch.CudaLauncher, "kind", "cpu")
    monkeypatch.setattr(cuda_launch.CudaLauncher, "index_of", lambda self, args: 0)


class OnCpu(cuda_launch.CudaLauncher):
    """Takes CPU tensors for a GPU's."""

    kind = "cpu"

    def index_of(self, args):
        return 0
