# SPDX-License-Identifier: Apache-2.0
import time

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import LaunchError
from torch_tile.profiler import TensorSupplyType, compare, do_bench


def test_do_bench_counts_milliseconds():
    for mode in ("median", "mean", "min", "max"):
        assert 2 <= do_bench(lambda: time.sleep(0.002), warmup=1, rep=10, return_mode=mode) < 1000  # not microseconds
    calls = []
    assert do_bench(lambda: calls.append(1), warmup=0, rep=0) >= 0
    assert len(calls) == 2
    with pytest.raises(ValueError, match="return_mode is 'best'; expected one of median, mean, min, max"):
        do_bench(lambda: None, rep=0, return_mode="best")
    with pytest.raises(ValueError, match="backend is 'sundial'; expected one of auto, event, wall"):
        do_bench(lambda: None, rep=0, backend="sundial")


def test_how_often_and_what_of_it():
    calls = []
    low, high = do_bench(lambda: calls.append(1), n_warmup=3, n_repeat=5, quantiles=(0.0, 1.0))
    assert len(calls) == 8 and 0 <= low <= high
    assert do_bench(lambda: time.sleep(0.002), warmup=0, n_repeat=3, quantiles=[0.5])[0] >= 2
    with pytest.raises(TypeError, match="unexpected keyword argument 'reps'"):
        do_bench(lambda: None, reps=3)


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


TYPES = ("float16", "float64", "float8_e4m3fn", "int8", "int32", "uint8", "bool")
# (least, greatest, mean, how far it may be off) of 4096 values of each type, as TileLang documents them. A mean may be
# off by six of its deviations or more.
INTEGERS = {
    "float8_e4m3fn": (-128, 128, -0.5, 8), "uint8": (0, 2, 1, 0.1), "bool": (0, 1, 0.5, 0.1)
}  # fmt: skip
WITHIN_TWO, WITHIN_ONE, NORMAL = (-2, 2, 0, 0.2), (-1, 1, 0, 0.1), (-7, 5, -1, 0.1)
DISTRIBUTIONS = {
    TensorSupplyType.Integer: dict.fromkeys(TYPES, WITHIN_TWO) | INTEGERS,
    TensorSupplyType.Auto: dict.fromkeys(TYPES, WITHIN_TWO) | INTEGERS | {"float16": WITHIN_ONE},
    TensorSupplyType.Uniform: dict.fromkeys(("float16", "float64", "float8_e4m3fn"), WITHIN_ONE)
    | {"int8": (1, 1, 1, 0), "int32": WITHIN_TWO},
    TensorSupplyType.Normal: dict.fromkeys(("float16", "float64", "float8_e4m3fn"), NORMAL) | {"int8": (1, 1, 1, 0)},
    TensorSupplyType.Randn: {"float16": (-6, 6, 0, 0.1), "int8": (-6, 6, 0, 0.1)},
    TensorSupplyType.Zero: dict.fromkeys(TYPES, (0, 0, 0, 0)),
    TensorSupplyType.One: dict.fromkeys(TYPES, (1, 1, 1, 0)),
}


@pytest.mark.parametrize("supply", TensorSupplyType)
def test_distributions_are_tilelangs(supply):
    wanted = DISTRIBUTIONS[supply]

    @T.prim_func
    def kernel(*xs: [T.Tensor((4096,), dtype) for dtype in wanted]):
        with T.Kernel(1) as _:
            xs[0][0] = xs[0][0]

    made = torch_tile.compile(kernel).get_profiler(supply).inputs()
    for x, (low, high, mean, off) in zip(made, wanted.values(), strict=True):
        x = x.double()
        assert x.min() >= low and x.max() <= high and abs(x.mean() - mean) <= off
        if off and (low, high) in ((-2, 2), (0, 2), (0, 1)):
            assert x.unique().tolist() == list(range(low, high + 1))


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


@pytest.fixture(scope="module")
def two_results():
    @torch_tile.jit(out_idx=[1, 2])
    def made(n):
        @T.prim_func
        def kernel(a: T.Tensor((n,), "float32"), b: T.Tensor((n,), "float32"), c: T.Tensor((n,), "float32")):
            with T.Kernel(1, threads=32) as _:
                for i in T.Parallel(n):
                    b[i] = a[i] + 1.0
                    c[i] = a[i] * 2.0

        return kernel

    return made(8).get_profiler()


def test_several_results(two_results):
    two_results.assert_allclose(lambda a: [a + 1, a * 2])
    with pytest.raises(AssertionError, match="the kernel gives 2 tensors and the reference 1 tensor"):
        two_results.assert_allclose(lambda a: a + 1)
    with pytest.raises(AssertionError, match="differ"):
        two_results.assert_allclose(lambda a: (a + 1, a * 3))


def test_comparisons_by_hand(two_results):
    seen = []
    two_results.manual_assert_close(lambda a: (a + 1, a * 2), manual_check_prog=lambda a, b: seen.append((a, b)))
    ((got, want),) = seen
    torch.testing.assert_close(got, list(want))
    with pytest.raises(TypeError, match="manual_check_prog"):
        two_results.manual_assert_close(lambda a: a)


def test_the_same_bits_each_time(two_results, monkeypatch):
    two_results.assert_consistent(repeat=3)
    kernel, calls = two_results.kernel, []

    def drifting(*args):
        calls.append(args)
        b, c = kernel(*args)
        return b, -c if len(calls) == 3 else c

    monkeypatch.setattr(two_results, "kernel", drifting)
    monkeypatch.setattr(two_results, "inputs", lambda: [torch.zeros(8)])  # 0.0 and -0.0 are equal, but not the same
    with pytest.raises(AssertionError, match="results of the same inputs differ"):
        two_results.assert_consistent(repeat=3)
    # Strides of dimensions of size 1 mean nothing.
    results = torch.zeros(()), torch.zeros(21).as_strided((3, 1), (1, 20)), torch.zeros(3, dtype=torch.half)
    monkeypatch.setattr(two_results, "kernel", lambda *_: results)
    two_results.assert_consistent(repeat=2)


def test_sizes_known_at_run_time_by_name():
    n = T.dynamic("n")

    @T.prim_func
    def main(A: T.Tensor((n, 3), "float32"), B: T.Tensor((2 * n,), "float32")):
        with T.Kernel(n, threads=32) as i:
            B[i] = A[i, 0] * 2.0

    profiler = torch_tile.compile(main, out_idx=[-1], target="cpu").get_profiler()
    assert profiler.do_bench(warmup=0, n_repeat=2, dynamic_symbolic_constraints={"n": 5}) > 0
    assert [x.shape for x in profiler._get_inputs(True, {"n": 5})] == [(5, 3), (10,)]
    with pytest.raises(LaunchError, match="has no compile-time shape"):
        profiler.do_bench(dynamic_symbolic_constraints={"m": 5})


def test_tilelangs_names_of_a_profilers_parts():
    @T.prim_func
    def main(A: T.Tensor((4,), "float32"), B: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32):
            T.copy(A, B)

    kernel = torch_tile.compile(main, out_idx=[-1], target="cpu")
    profiler, a = kernel.get_profiler(), torch.randn(4)
    assert profiler.func is kernel and profiler.result_idx == [1] and [p.name for p in profiler.params] == ["A", "B"]
    assert torch.equal(profiler(a), a) and kernel.run_once().shape == (4,) and kernel.prim_func is kernel.program
    calls = []
    torch_tile.do_bench(lambda: calls.append(1), warmup=0, _n_warmup=2, _n_repeat=3, backend="wall", device=None)
    assert len(calls) == 5
