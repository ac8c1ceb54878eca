# SPDX-License-Identifier: Apache-2.0
import ctypes

import pytest

from torch_tile.diagnostics.errors import LaunchError
from torch_tile.runtime import driver as module
from torch_tile.runtime.driver import Function, open_library

CUBIN = b"\x7fELF and the rest"


def test_functions_come_from_the_devices_own_context(fake_cuda):
    for device in (0, 2, 0):
        found = fake_cuda.driver.load(CUBIN, device, {"one": 0, "three": 0})
        assert [f.context for f in found.values()] == [0x1000 + device] * 2
        assert found["one"] == Function("one", found["one"].handle, 0x1000 + device)
        assert found["one"].handle != found["three"].handle
    assert fake_cuda.modules() == [0x1000, 0x1002, 0x1000]
    assert fake_cuda.current() == 0 and fake_cuda.number("capture_mode").value == 0


def test_much_shared_memory_is_asked_for(fake_cuda):
    fake_cuda.driver.load(CUBIN, 0, {"small": 48 * 1024, "large": 48 * 1024 + 16, "most": 227 * 1024})
    assert fake_cuda.shared_allowed() == [48 * 1024 + 16, 227 * 1024]
    with pytest.raises(LaunchError, match="cuFuncSetAttribute: CUDA_ERROR_FAKE"):
        fake_cuda.driver.load(CUBIN, 0, {"large": 228 * 1024})


@pytest.mark.parametrize("before", [0, 0x1001])
def test_the_threads_context_is_left_as_it_was(before, fake_cuda):
    fake_cuda.library.cuCtxSetCurrent(ctypes.c_void_p(before))
    fake_cuda.driver.load(CUBIN, 1, {"one": 0})
    assert fake_cuda.current() == before
    with pytest.raises(LaunchError, match=r"cuModuleLoadData: CUDA_ERROR_FAKE \(200\): it was asked to fail"):
        fake_cuda.driver.load(b"text", 1, {"one": 0})
    with pytest.raises(LaunchError, match="cuModuleGetFunction"):
        fake_cuda.driver.load(CUBIN, 1, {"?": 0})
    assert fake_cuda.current() == before and fake_cuda.number("capture_mode").value == 0


def test_launch(fake_cuda):
    fake_cuda.number("slots").value = 3
    with fake_cuda.driver.current(0x1000):
        fake_cuda.driver.launch(7, (2**31 - 1, 3, 4), 128, 99, 2**40, [2**64 - 1, 0, 5])
        fake_cuda.number("slots").value = 0
        fake_cuda.driver.launch(2**40, (1, 1, 1), 32, 0, 0, [])
    first, second = fake_cuda.launches()
    assert (first.function, first.stream, first.shared, first.context) == (7, 2**40, 99, 0x1000)
    assert list(first.grid) == [2**31 - 1, 3, 4] and list(first.block) == [128, 1, 1]
    assert first.slots[:3] == [2**64 - 1, 0, 5] and second.function == 2**40
    with pytest.raises(LaunchError, match=r"cuLaunchKernel: .*\(201\)"):
        fake_cuda.driver.launch(7, (1, 1, 1), 32, 0, 0, [])


def test_launches_with_attributes(fake_cuda):
    assert ctypes.sizeof(module._Config) == 56 and ctypes.sizeof(module._Attribute) == 72  # as cuda.h has them
    assert (module._Config.stream.offset, module._Config.count.offset, module._Attribute.value.offset) == (32, 48, 8)
    fake_cuda.number("slots").value, fake_cuda.number("map_slots").value = 3, 0b010
    memory = (ctypes.c_char * 128)(*range(128))
    with fake_cuda.driver.current(0x1000):
        fake_cuda.driver.launch(7, (4, 6, 8), 128, 99, 2**40, [1, memory, 5], (2, 1, 1))
        fake_cuda.driver.launch(8, (4, 6, 8), 128, 99, 2**40, [1, memory, 5], (1, 3, 2), early=True)
        fake_cuda.driver.launch(9, (4, 6, 8), 128, 99, 2**40, [1, memory, 5], early=True)
        fake_cuda.driver.launch(10, (4, 6, 8), 128, 99, 2**40, [1, memory, 5])
    found = fake_cuda.launches()
    assert [(r.function, tuple(r.cluster), r.early, r.is_extended) for r in found] == [
        (7, (2, 1, 1), 0, 1), (8, (1, 3, 2), 1, 1), (9, (1, 1, 1), 1, 1), (10, (1, 1, 1), 0, 0),
    ]  # fmt: skip
    for record in found:
        assert list(record.grid) == [4, 6, 8] and list(record.block) == [128, 1, 1]
        assert (record.shared, record.stream, record.context) == (99, 2**40, 0x1000)
        assert list(record.slots[:3]) == [1, 0, 5] and bytes(record.maps[0]) == bytes(range(128))


def test_an_old_driver(fake_cuda, monkeypatch):
    monkeypatch.setattr(fake_cuda.driver, "library", object())
    with pytest.raises(LaunchError, match="this machine has no cuLaunchKernelEx; a newer driver does"):
        fake_cuda.driver.launch(7, (1, 1, 1), 32, 0, 0, [], early=True)


def test_what_the_driver_tells(fake_cuda):
    assert fake_cuda.driver.version() == (13, 1)
    assert fake_cuda.driver.capability(3) == 90
    assert fake_cuda.driver.address("cuInit") > 0 and fake_cuda.driver.address("cuNothing") == 0
    with pytest.raises(LaunchError, match="cuDeviceGet"):
        fake_cuda.driver.context(4)


def test_no_driver(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(module.ctypes, "CDLL", missing)
    with pytest.raises(LaunchError, match=r"there is no NVIDIA driver on this machine \(libcuda\.so\.1: cannot open"):
        open_library()
