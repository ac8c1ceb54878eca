# SPDX-License-Identifier: Apache-2.0
"""What a call costs before the GPU is at work: a kernel with four tensor arguments, native and in Python.

On a machine without a GPU the driver is replaced by functions that do nothing, and tensors lie on the CPU: then this is
the cost of everything but the driver. `python benchmarks/launch.py [--seconds S]`
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from timer import arguments

import torch_tile
import torch_tile.language as T
from torch_tile.runtime import cuda_launch, driver, native_launch
from torch_tile.runtime.host_compiler import compile_shared

STUB = """
#include <cstdint>
extern "C" {
int cuInit(unsigned) { return 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) { return *value = attribute == 75 ? 9 : 0, 0; }
int cuDevicePrimaryCtxRetain(uint64_t* context, int) { return *context = 1, 0; }
int cuCtxGetCurrent(uint64_t* context) { return *context = 1, 0; }
int cuCtxSetCurrent(uint64_t) { return 0; }
int cuThreadExchangeStreamCaptureMode(int*) { return 0; }
int cuModuleLoadData(uint64_t* module, const void*) { return *module = 1, 0; }
int cuModuleGetFunction(uint64_t* function, uint64_t, const char*) { return *function = 1, 0; }
int cuFuncSetAttribute(uint64_t, int, int) { return 0; }
int cuLaunchKernel(uint64_t, int, int, int, int, int, int, int, uint64_t, void**, void**) { return 0; }
}
"""
m, n = T.dynamic("m, n")


@T.prim_func
def four(x: T.Tensor((m, n), "float32"), y: T.Tensor((m, n), "float32"), z: T.Tensor((m, n), "float32"),
         out: T.Tensor((m, n), "float32")):  # fmt: skip
    with T.Kernel(m, threads=128) as b:
        for j in T.Parallel(128):
            out[b, j] = x[b, j] + y[b, j] * z[b, j]


def without_gpu() -> None:
    """Replace the driver, and let launchers take CPU tensors."""
    import ctypes

    stub = driver.Driver(ctypes.CDLL(str(compile_shared(STUB))))
    cuda_launch.driver = lambda: stub
    cuda_launch.current_stream = lambda device: 0
    cuda_launch.CudaLauncher.kind = "cpu"
    cuda_launch.CudaLauncher.index_of = lambda self, args: 0


def kernel(native: bool) -> Callable[..., Any]:
    """The kernel, launched the one way or the other."""
    os.environ["TORCH_TILE_NATIVE_LAUNCH"] = "1" if native else "0"
    native_launch.native.cache_clear()
    made = torch_tile.compile(four, target="auto" if torch.cuda.is_available() else "cuda:sm_90")
    made(*(torch.zeros(1, 128, device=device()) for _ in range(4)))
    return made


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def cost(call: Callable[[], object], seconds: float, burst: int = 200) -> list[float]:
    """Seconds of one call, in bursts that fit into the stream's queue; the GPU is waited for between them."""
    samples = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples) < 5:
        start = time.perf_counter()
        for _ in range(burst):
            call()
        samples.append((time.perf_counter() - start) / burst)
        if device() == "cuda":
            torch.cuda.synchronize()
    return samples


def main() -> None:
    options = arguments(__doc__)
    if device() == "cpu":
        print("no GPU: everything but the driver's own work")
        without_gpu()
    x, y, z, out = (torch.randn(1, 128, device=device()) for _ in range(4))
    native, python = kernel(True), kernel(False)
    rivals: dict[str, Callable[[], object]] = {
        "tile, native": lambda: native(x, y, z, out),
        "tile, Python": lambda: python(x, y, z, out),
        "torch.add(out=)": lambda: torch.add(x, y, out=out),
        "an empty function": lambda: empty(x, y, z, out),
    }
    for name, call in rivals.items():
        call()
        samples = cost(call, options.seconds)
        print(f"{name:20} {statistics.median(samples) * 1e6:7.2f} us, best {min(samples) * 1e6:7.2f}")


def empty(*args: Any) -> None:
    """What Python itself takes for a call."""


if __name__ == "__main__":
    main()
