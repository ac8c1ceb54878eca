# SPDX-License-Identifier: Apache-2.0
"""What a call costs before the GPU is at work: a kernel with four tensor arguments, native, in Python, and in C alone.

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
from torch_tile.runtime import cuda_launch, driver, native_launch, replay
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
int cuLaunchKernelEx(const void*, uint64_t, void**, void**) { return 0; }
int cuTensorMapEncodeTiled(void*, int, unsigned, uint64_t, const void*, const void*, const void*, const void*, int, int,
                           int, int) { return 0; }
}
"""
ALONE = """
#include <cstdint>
extern "C" void again(long count, void* launch, uint64_t function, int x, int y, int z, int threads, int shared,
                      uint64_t stream, void** places) {
  using Launch = int (*)(uint64_t, int, int, int, int, int, int, int, uint64_t, void**, void**);
  while (count-- > 0) ((Launch)launch)(function, x, y, z, threads, 1, 1, shared, stream, places, 0);
}
"""
BURST = 200  # calls that fit into the stream's queue
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
    cuda_launch.driver = replay.driver = lambda: stub
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


def driver_alone(kernel: Any, tensors: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    """The same launches, BURST of them, by a loop in C: what no caller can save."""
    import ctypes

    launcher, machine = kernel.launcher, cuda_launch.driver()
    (plan,) = launcher.plans.values()
    (each,) = plan.launches
    values = [tensors[n].data_ptr() if kind == cuda_launch.TENSOR else n for kind, n in each.arguments]
    slots = (ctypes.c_uint64 * len(values))(*values)
    places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(slots) + 8 * n for n in range(len(values))))
    again = ctypes.CDLL(str(compile_shared(ALONE))).again
    again.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_uint64,
        *[ctypes.c_int] * 5,
        ctypes.c_uint64,
        ctypes.c_void_p,
    ]
    stream = cuda_launch.current_stream(plan.device)
    fixed = (machine.address("cuLaunchKernel"), each.function, *each.grid, each.threads, each.shared, stream, places)

    def call(keep: Any = slots) -> None:
        with machine.current(plan.context):
            again(BURST, *fixed)

    return call


def cost(call: Callable[[], object], seconds: float, burst: int = BURST) -> list[float]:
    """Seconds of one call, in bursts; the GPU is waited for between them."""
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
        report(name, samples)
    alone = cost(driver_alone(native, (x, y, z, out)), options.seconds, 1)
    report("cuLaunchKernel in C", [each / BURST for each in alone])


def report(name: str, samples: list[float]) -> None:
    """Print a line."""
    print(f"{name:20} {statistics.median(samples) * 1e6:7.2f} us, best {min(samples) * 1e6:7.2f}")


def empty(*args: Any) -> None:
    """What Python itself takes for a call."""


if __name__ == "__main__":
    main()
