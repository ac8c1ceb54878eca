# SPDX-License-Identifier: Apache-2.0
"""Launches on a GPU: streams, graphs, threads, several GPUs, much shared memory. The kernel is CUDA by hand."""

import threading

import pytest
import torch

import torch_tile.language as T
from torch_tile.codegen.cuda import CudaSource, Entry
from torch_tile.diagnostics.errors import LaunchError
from torch_tile.hardware import Target, detected
from torch_tile.ir.stmt import dimensions
from torch_tile.runtime import cuda_launch
from torch_tile.runtime.cuda_launch import CudaLauncher
from torch_tile.runtime.native_launch import native
from torch_tile.runtime.nvrtc import compile_cubin

pytestmark = pytest.mark.cuda
THREADS = 128
TEXT = """
extern "C" __global__ void __launch_bounds__(128) scale(const float* x, float* out, int n, float factor) {
  extern __shared__ __align__(16) unsigned char memory[];
  float* kept = (float*)memory;
  int i = blockIdx.x * 128 + threadIdx.x;
  if (i < n) kept[threadIdx.x] = x[i] * factor;
  __syncthreads();
  if (i < n) out[i] = kept[threadIdx.x];
}
"""


@pytest.fixture(params=["native", "python"])
def make(request, monkeypatch):
    """Makes launchers that go the one way or the other."""
    if request.param == "python":
        monkeypatch.setattr(cuda_launch, "launch_function", lambda *_: None)
    else:
        assert native() is not None
    n = T.dynamic("n")

    @T.prim_func
    def scale(x: T.Tensor((n,), "float32"), out: T.Tensor((n,), "float32"), factor: T.float32):
        with T.Kernel(T.ceildiv(n, THREADS), threads=THREADS) as b:
            for i in T.Parallel(THREADS):
                out[b * THREADS + i] = x[b * THREADS + i] * factor

    def launcher(shared=512, capability=0, out_idx=()):
        program = scale.program
        target = Target("cuda", capability or detected())
        args = (0, 1, *dimensions(program), program.params[2])
        entry = Entry("scale", args, program.kernels[0].grid, THREADS, shared, None, "PPif")
        cubin = compile_cubin(TEXT, target)
        return CudaLauncher(program, CudaSource("", (entry,), (4, 4)), cubin.data, target, out_idx)

    return launcher


def pair(n=1000, device="cuda"):
    return torch.randn(n, device=device), torch.full((n,), float("nan"), device=device)


def test_results(make):
    launcher = make()
    for n in (1, 127, 128, 1000, 1000, 100_003, 0):
        x, out = pair(n)
        launcher.begin(x, out, 2.5)
        assert torch.equal(out, x * 2.5)
    made = make(out_idx=[1])
    assert torch.equal(made.begin(x, -1.0), -x)


def test_the_current_stream(make):
    """What was queued before is seen, and other streams are not waited for."""
    launcher, side = make(), torch.cuda.Stream()
    x, out = pair()
    launcher.begin(x, out, 1.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(3.0)
        launcher.begin(x, out, 2.0)
        assert not side.query()
    assert torch.cuda.current_stream().query()
    side.synchronize()
    assert (out == 6.0).all()


@pytest.mark.parametrize("known", [True, False])
def test_graphs(make, known):
    """Captured, also if the kernel was never launched before; replayed on new values."""
    launcher = make()
    x, out = pair()
    if known:
        launcher.begin(x, out, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher.begin(x, out, 2.0)
        launcher.begin(out, out, 2.0)
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert (out == 4 * value).all()


def test_much_shared_memory(make):
    launcher = make(shared=Target("cuda", detected()).shared_limit)
    x, out = pair()
    launcher.begin(x, out, 2.0)
    assert torch.equal(out, x * 2)
    with pytest.raises(LaunchError, match="cuFuncSetAttribute: CUDA_ERROR_INVALID_VALUE"):
        make(shared=300 * 1024).begin(x, out, 2.0)


def test_threads_without_a_context(make):
    launcher, wrong = make(), []

    def work(factor):
        x, out = pair()
        for _ in range(50):
            launcher.begin(x, out, factor)
        if not torch.equal(out, x * factor):
            wrong.append(factor)

    x, out = pair()

    def fresh():  # nothing of torch's before
        launcher.begin(x, out, 3.0)

    threads = [threading.Thread(target=work, args=(float(f),)) for f in range(4)] + [threading.Thread(target=fresh)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    torch.cuda.synchronize()
    assert not wrong and torch.equal(out, x * 3)


def test_refusals(make):
    launcher = make()
    x, out = pair()
    launcher.begin(x, out, 1.0)
    with pytest.raises(LaunchError, match="`x` must be on a CUDA device, got a tensor on cpu"):
        launcher.begin(x.cpu(), out, 1.0)
    with pytest.raises(LaunchError, match="`out` must be on a CUDA device, got a tensor on cpu"):
        launcher.begin(x, out.cpu(), 1.0)
    other = 80 if detected() >= 90 else 90
    with pytest.raises(LaunchError, match=rf"compiled for sm_{other}.*is an sm_{detected()}"):
        make(capability=other).begin(x, out, 1.0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_several_gpus(make):
    launcher = make()
    for device in (1, 0, 1):
        x, out = pair(device=f"cuda:{device}")
        launcher.begin(x, out, 2.0)
        assert torch.cuda.current_device() == 0
        assert torch.equal(out, x * 2)
    x, _ = pair(device="cuda:0")
    with pytest.raises(LaunchError, match="`out` must be on cuda:0, as `x` is, got a tensor on cuda:1"):
        launcher.begin(x, out, 1.0)
    with torch.cuda.device(1), torch.cuda.stream(torch.cuda.Stream(1)) as _:
        launcher.begin(out, out, 2.0)
        torch.cuda.current_stream().synchronize()
