# SPDX-License-Identifier: Apache-2.0
import threading

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.autotuner import AutotunedFunction, get_autotune_inputs, set_autotune_inputs
from torch_tile.diagnostics.errors import TileError

BLOCKS = [{"block": 32}, {"block": 64}]


def tuned(function, configs=BLOCKS, **settings):
    return torch_tile.autotune(configs=configs, **{"prune": None, **settings})(function)


def test_a_lazy_kernel_is_found_once_for_each_size(lazy, clock):
    made = clock(2.0, 1.0)
    function = tuned(lazy)
    assert isinstance(function, AutotunedFunction) and function.__name__ == "scale"
    kernel = function(96)
    assert kernel.config == {"block": 64} and kernel.latency == 1.0
    calls = len(made.calls)
    assert function(96, __return_kernel=True) is kernel
    assert function(96) is kernel and function(n=96).config == {"block": 64} and len(made.calls) == calls
    x = torch.randn(96)
    torch.testing.assert_close(kernel(x), 2 * x)


def test_an_eager_kernel_runs_at_once(eager, clock):
    made = clock(2.0, 1.0)
    function = tuned(eager)
    a, b = torch.randn(100), torch.randn(100)
    for _ in range(2):
        torch.testing.assert_close(function(a, b), a + b)
    calls = len(made.calls)
    a, b = torch.randn(120), torch.randn(120)  # the same class of sizes: found, not timed
    torch.testing.assert_close(function(a, b), a + b)
    assert len(made.calls) == calls
    torch.testing.assert_close(function(torch.ones(300), torch.ones(300)), torch.full((300,), 2.0))
    assert len(made.calls) > calls


def test_what_an_eager_kernel_writes_is_written_once(clock):
    @torch_tile.jit
    def increase(x, block=32):
        n = T.const("n")
        x: T.Tensor((n,), "float32")
        with T.Kernel(T.ceildiv(n, block), threads=32) as bx:
            for i in T.Parallel(block):
                x[bx * block + i] = x[bx * block + i] + 1.0

    clock(2.0, 1.0)
    x = torch.zeros(64)
    tuned(increase)(x)
    assert torch.equal(x, torch.ones(64))


def test_tunable_arguments_that_are_given_stay(lazy, clock):
    made = clock(1.0, 1.0)
    function = tuned(lazy, [{"block": b, "threads": t} for b in (32, 64) for t in (32, 64)])
    assert function(96, 128, threads=64).config == {}
    assert not made.calls
    assert function(96, block=64).config["threads"] in (32, 64) and len(function.tune(96, block=64).trials) == 2
    assert {t.config.get("block") for t in function.tune(96, block=64).trials} == {None}


def test_configurations_made_from_the_arguments(lazy, clock):
    clock(2.0, 1.0)
    function = tuned(lazy, lambda n: [{"block": n // 4}, {"block": n // 2}])
    assert function(96).config == {"block": 48}


def test_the_table(lazy, clock):
    clock(2.0, 1.0)
    assert repr(tuned(lazy).tune(96)).splitlines()[2].endswith("block=64  <- best")


def test_arguments_that_start_no_new_search(lazy, clock):
    clock(2.0, 1.0)
    function = tuned(lazy, do_not_specialize=["factor"])
    assert function(96, factor=2.0) is function(96, factor=3.0)


def test_inputs_of_the_caller(lazy, clock):
    clock(1.0, 2.0)
    seen = []
    function = tuned(lazy, ref_prog=lambda x: seen.append(x[0].item()) or 2 * x)
    with set_autotune_inputs(torch.full((96,), 5.0)):
        function(96)
        (given,) = get_autotune_inputs()
        assert given[0] == 5.0
    assert get_autotune_inputs() is None
    with set_autotune_inputs([torch.full((64,), 6.0)]):
        function(64)
    assert set(seen) == {5.0, 6.0}


def test_threads_wait_for_one_search(lazy, clock):
    made = clock(2.0, 1.0)
    function = tuned(lazy)
    kernels = []
    threads = [threading.Thread(target=lambda: kernels.append(function(96))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(k) for k in kernels}) == 1 and len(made.order) == 2


def test_unhashable_arguments_and_many_forms(clock, monkeypatch):
    @torch_tile.jit(out_idx=[-1], target="cpu")
    def zeros(shape, block=32):
        @T.prim_func
        def main(y: T.Tensor(tuple(shape), "float32")):
            with T.Kernel(1, threads=block) as _:
                for i in T.Parallel(shape[0]):
                    y[i] = 0.0

        return main

    clock(2.0, 1.0)
    monkeypatch.setattr("torch_tile.autotuner.decorator.MOST_FORMS", 2)
    function = tuned(zeros)
    assert function([4]) is function([4])
    for n in range(5, 8):
        assert function([n])().shape == (n,)
    assert len(function.found) <= 2


def test_what_is_decorated(lazy):
    with pytest.raises(TileError, match=r"above @torch_tile\.jit"):
        torch_tile.autotune(configs=BLOCKS)(lambda n: n)
    with pytest.raises(TileError, match="did you mean warmup"):
        torch_tile.autotune(configs=BLOCKS, warmpu=3)
    assert isinstance(torch_tile.autotune(lazy, configs=BLOCKS), AutotunedFunction)
    with pytest.raises(TileError, match="argument `configs` is empty"):
        tuned(lazy, [])(96)


def test_calls_that_no_configuration_completes(lazy, clock):
    """Are the caller's mistake, not that of each configuration."""
    made = clock(2.0, 1.0)
    with pytest.raises(TypeError, match=r"scale\(\) missing a required argument: 'n'"):
        tuned(lazy)()
    with pytest.raises(TypeError, match=r"scale\(\) got an unexpected keyword argument 'blocks'"):
        tuned(lazy)(96, blocks=32)
    with pytest.raises(TileError, match=r"`configs` have \(64,\)"):
        tuned(lazy, [{"block": 32}, (64,)])(96)
    assert not made.calls


def test_sizes_by_name_are_tuned_without_tensors(clock):
    made = clock(2.0, 1.0)

    @torch_tile.jit(target="cpu")
    def shifted(a, block=16):
        N = T.const("N")
        a: T.Tensor[[N], T.float32]
        b = T.empty((N,), "float32")
        with T.Kernel(T.ceildiv(N, block), threads=32) as bx:
            for i in T.Parallel(block):
                b[bx * block + i] = a[bx * block + i] + 1
        return b

    function = tuned(shifted)
    kernel, calls = function.compile(N=96), len(made.calls)
    x = torch.randn(96)
    torch.testing.assert_close(kernel(x), x + 1)
    assert calls and function.compile(N=96) is kernel and len(made.calls) == calls
    assert kernel is shifted.compile(N=96, block=64) and kernel.config == {"block": 64}
    with pytest.raises(TypeError, match="needs the size `N`"):
        function.compile()


def test_inputs_of_the_caller_for_sizes_by_name(clock):
    clock(2.0, 1.0)

    @torch_tile.jit(target="cpu")
    def shifted(a, block=16):
        rows, N = T.dynamic("rows"), T.const("N")
        a: T.Tensor[[rows, N], T.float32]
        b = T.empty((rows, N), "float32")
        with T.Kernel(rows, threads=32) as by:
            for i in T.Parallel(N):
                b[by, i] = a[by, i] + 1
        return b

    seen = []
    function = tuned(shifted, ref_prog=lambda x: seen.append(x) or x + 1)
    x = torch.randn(5, 96)
    with set_autotune_inputs(x):
        kernel = function.compile(N=96)
    assert seen and all(each.shape == x.shape for each in seen) and kernel.config == {"block": 64}
    torch.testing.assert_close(kernel(x), x + 1)


def test_sizes_by_name_where_nothing_is_measured(monkeypatch):
    monkeypatch.setenv("TORCH_TILE_AUTOTUNE", "0")

    @torch_tile.jit(target="cpu")
    def ones(block=16):
        N = T.const("N")
        b = T.empty((N,), "float32")
        with T.Kernel(T.ceildiv(N, block), threads=32) as bx:
            for i in T.Parallel(block):
                b[bx * block + i] = 1
        return b

    assert torch.equal(tuned(ones).compile(N=70)(), torch.ones(70))


def test_positions_that_start_no_new_search(lazy, clock):
    made = clock(2.0, 1.0)
    function = tuned(lazy, do_not_specialize=[0])
    kernel, calls = function(96), len(made.calls)
    assert function(64) is kernel and len(made.calls) == calls


def test_tilelangs_names_of_the_cache_and_of_grouped_compilation(lazy, clock):
    clock(2.0, 1.0)
    function = tuned(lazy, enable_grouped_compile=True, group_compile_size=4)
    function(96)
    assert len(function._tuner_cache) == 1
    function._tuner_cache.clear()
    assert function(96).config == {"block": 64}
    with pytest.raises(TileError, match="did you mean early_stop"):
        tuned(lazy, early_stopp=True)
