# SPDX-License-Identifier: Apache-2.0
import time

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics import LaunchError
from torch_tile.profiler import TensorSupplyType, compare, do_bench


def test_do_bench_counts_milliseconds():
    for mode in ("median", "mean", "min", "max"):
        assert 2 <= do_bench(lambda: time.sleep(0.002), warmup=1, rep=10, return_mode=mode) < 100
    calls = []
    assert do_bench(lambda: calls.append(1), warmup=0, rep=0) >= 0
    assert len(calls) == 2
    with pytest.raises(ValueError, match="one of median, mean, min, max, got 'best'"):
        do_bench(lambda: None, rep=0, return_mode="best")
    with pytest.raises(ValueError, match=r"one of auto, event, wall, .* got 'sundial'"):
        do_bench(lambda: None, rep=0, backend="sundial")


@pytest.mark.cuda
def test_do_bench_by_events():
    x = torch.randn(1 << 24, device="cuda")
    for flush in (True, False):
        assert 0.01 < do_bench(lambda: x.mul_(1.0), warmup=1, rep=5, fast_flush=flush) < 10


@pytest.fixture(scope="module")
def profiled():
    @T.prim_func
    def kernel(a: T.Tensor((4, 3), "float16"), b: T.Tensor((5,), "int8"), c: T.Tensor((4,), "bool"),
               d: T.Tensor((2,), "float8_e5m2")):  # fmt: skip
        with T.Kernel(1) as _:
            a[0, 0] = a[0, 0] + b[0]

    return torch_tile.compile(kernel)


@pytest.mark.parametrize("supply", TensorSupplyType)
def test_inputs(profiled, supply):
    a, b, c, d = profiled.get_profiler(supply).inputs()
    assert [(x.shape, x.dtype) for x in (a, b, c, d)] == [
        ((4, 3), torch.float16), ((5,), torch.int8), ((4,), torch.bool), ((2,), torch.float8_e5m2)
    ]  # fmt: skip
    if supply in (TensorSupplyType.Zero, TensorSupplyType.One):
        wanted = supply is TensorSupplyType.One
        assert all((x.float() == wanted).all() for x in (a, b, c, d))
    if supply is TensorSupplyType.Integer:
        assert torch.equal(a, a.round())
    if supply is TensorSupplyType.Uniform:
        assert a.abs().max() <= 1


def test_kernels_with_run_time_arguments_need_inputs():
    m = T.dynamic("m")

    @T.prim_func
    def kernel(x: T.Tensor((m,), "float32"), n: T.int32):
        with T.Kernel(m) as b:
            x[b] = x[b] + n

    made = torch_tile.compile(kernel)
    with pytest.raises(LaunchError, match="`x` has no compile-time shape: give the profiler its inputs"):
        made.get_profiler().do_bench()

    def reference(x, n):
        x += n

    inputs = [torch.zeros(7), 3]
    made.get_profiler().assert_allclose(reference, input_tensors=inputs)
    assert (inputs[0] == 3).all()
    assert made.get_profiler().do_bench(warmup=0, rep=1, input_tensors=inputs) > 0


def test_scalars_need_inputs():
    @T.prim_func
    def kernel(x: T.Tensor((4,), "float32"), n: T.int32):
        with T.Kernel(1) as _:
            x[n] = 1.0

    with pytest.raises(LaunchError, match="`n` is a scalar: give the profiler its inputs"):
        torch_tile.compile(kernel).get_profiler().run_once()


def test_compare():
    a = torch.tensor([1.0, 2.0, float("nan"), float("inf")])
    compare(a, a.clone(), 0, 0, 0)
    compare(a.half(), a.double(), 0, 0, 0)
    off = a + torch.tensor([0.0, 0.5, 0, 0])
    compare(off, a, 0, 0, 0.25)
    with pytest.raises(AssertionError, match=r"25\.00% of 4 elements differ"):
        compare(off, a, 0.1, 0, 0.24)
    with pytest.raises(AssertionError, match=r"shapes differ: \[1, 4\] and \[4\]"):
        compare(a[None], a, 0, 0, 0)
    compare(torch.zeros(0), torch.zeros(0), 0, 0, 0)
