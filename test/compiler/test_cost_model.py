# SPDX-License-Identifier: Apache-2.0
import functools

import pytest

import torch_tile
import torch_tile.language as T
from benchmarks import library
from torch_tile.compiler.cost_model import estimate
from torch_tile.hardware import Target
from torch_tile.ir.stmt import dimensions
from torch_tile.jit import JITFunction

HOPPER, CPU = Target("cuda", 90), Target("cpu")


def of(function, *args, target=HOPPER, num_sms=132, sizes=None, **config):
    program = function(*args, **config).program
    known = {v: sizes[v.name] for v in dimensions(program)} if sizes else None
    return estimate(program, target, num_sms, known)


def test_a_product_is_counted_exactly(product):
    found = of(product, 1024, 512, 2048, block_m=128, block_n=64, block_k=32, stages=3, threads=128)
    tiles = 8 * 8
    assert found.waves in [tiles / (132 * resident) for resident in range(1, 33)]
    moved = tiles * 2048 * (128 + 64) * 2 + 1024 * 512 * 2
    assert found.bytes == moved
    products = 2 * 1024 * 512 * 2048
    assert products <= found.flops < 1.1 * products  # and clearing and storing the sums
    assert found.shared == 3 * (128 * 32 + 32 * 64) * 2
    assert found.registers == 40 + 128 * 64 // 128


def test_waves(product):
    """64 tiles on 132 SMs are less than half a wave each; with 16 SMs, several blocks at a time."""
    many = of(product, 4096, 4096, 64, block_m=64, block_n=64)
    few = of(product, 4096, 4096, 64, block_m=64, block_n=64, num_sms=66)
    assert few.waves == 2 * many.waves and few.seconds >= many.seconds
    lone = of(product, 64, 64, 64)
    assert lone.waves < 0.01


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120, 75, 110])
def test_larger_tiles_win_where_there_are_many_and_small_ones_where_there_are_few(product, capability):
    target = Target("cuda", capability)
    large, small = ({"block_m": b, "block_n": b, "stages": 2, "threads": 128} for b in (128, 32))
    assert (
        of(product, 8192, 8192, 8192, target=target, **large).seconds
        < of(product, 8192, 8192, 8192, target=target, **small).seconds
    )
    assert (
        of(product, 128, 256, 8192, target=target, **small).seconds
        < of(product, 128, 256, 8192, target=target, **large).seconds
    )


def test_stages_hide_waiting(product):
    one, two, three = (of(product, 512, 512, 8192, stages=s).seconds for s in (1, 2, 3))
    assert one > two > three


def test_too_much_shared_memory_is_refused_and_too_many_registers_cost(product):
    found = of(product, 4096, 4096, 4096, block_m=256, block_n=256, block_k=128, stages=3)
    assert "bytes of shared memory; cuda:sm_90a has 232448" in found.refused
    assert of(product, 4096, 4096, 4096, block_m=256, block_n=256, block_k=128, stages=3, target=CPU).refused == ""
    fits, spills = (of(product, 4096, 4096, 4096, block_m=256, block_n=128, threads=t).seconds for t in (256, 64))
    assert spills > 2 * fits


def test_float32_takes_longer_on_gpus(product):
    half, single = (of(product, 4096, 4096, 4096, dtype=d).seconds for d in ("float16", "float32"))
    assert single > 3 * half
    assert of(product, 256, 256, 256, target=CPU, num_sms=2, dtype="float32").seconds > 0


def test_memory_bounds_copies_and_sizes_may_be_known_at_run_time():
    def copy(block):
        n = T.dynamic("n")

        @T.prim_func
        def main(x: T.Tensor((n,), "float32"), y: T.Tensor((n,), "float32")):
            with T.Kernel(T.ceildiv(n, block), threads=128) as bx:
                tile = T.alloc_fragment((block,), "float32")
                T.copy(x[bx * block], tile)
                T.copy(tile, y[bx * block])

        return main

    small, large = (of(copy, 1024, sizes={"n": n}) for n in (2**20, 2**28))
    assert large.bytes == 256 * small.bytes == 2**28 * 8
    assert large.seconds == pytest.approx(2**31 / 4e12, rel=0.5)
    assert of(copy, 1024).seconds > 0  # unknown sizes are guessed


def test_loops_over_part_of_the_range_count_at_their_middle(product):
    """A causal loop runs half of the steps on average."""

    def causal(whole):
        @T.prim_func
        def main(x: T.Tensor((4096, 64), "float16"), y: T.Tensor((64, 64), "float16")):
            with T.Kernel(64, threads=128) as bx:
                tile = T.alloc_shared((64, 64), "float16")
                for step in T.serial(64 if whole else bx + 1):
                    T.copy(x[step * 64, 0], tile)
                if bx < 32:
                    T.copy(tile, y[0, 0])

        return main

    whole, part = of(causal, True), of(causal, False)
    assert part.bytes == pytest.approx(whole.bytes / 2, rel=0.05)


def test_data_decides():
    @T.prim_func
    def main(x: T.Tensor((64,), "int32"), y: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32) as _:
            for i in T.serial(x[0]):
                first = i + 1
                if x[i] > 0:
                    y[i] = T.exp(y[i])
                else:
                    y[first] = 0.0
            while x[1] < 4:
                x[1] = x[1] + 1

    found = estimate(main.program, HOPPER, 132)
    assert found.seconds > 0 and found.bytes > 0 and found.flops > 0


PARTS = 6  # of the catalogue, for workers to take side by side; neighbours share kernels


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("target", [HOPPER, CPU], ids=str)
def test_the_librarys_kernels(target, part, monkeypatch):
    """Whatever they are made of, the model has a word on them, and they fit."""
    programs, traced_once = [], functools.cache(JITFunction)

    def traced(func, *_):
        programs.append(func.program)
        return lambda *args: None

    monkeypatch.setattr(torch_tile.jit, "_compile", traced)
    # One for each function keeps what it traced: most cases share kernels.
    monkeypatch.setattr(JITFunction, "on", lambda self, _: traced_once(self.function))
    cases = library.catalogue()
    size = -(-len(cases) // PARTS)
    for case in cases[part * size : (part + 1) * size]:
        library.compiled(case, target)
    assert len(programs) > 20
    high = {}  # kernels whose registers are estimated far beyond what a thread has
    for program in programs:
        found = estimate(program, target, 132)
        assert 0 < found.seconds < 10 and found.bytes > 0 and found.flops > 0 and not found.refused, program.name
        if found.registers >= 300 and target is not CPU:
            high[program.name] = max(found.registers, high.get(program.name, 0))
    assert not high


@pytest.mark.parametrize("works", ["first", "middle", "last", "none"])
def test_a_grid_is_judged_by_a_block_that_has_work(works):
    """As one of a triangle of blocks does."""
    at = {"first": 0, "middle": 4, "last": 7, "none": 9}[works]

    @T.prim_func
    def main(A: T.Tensor((8, 64), "float32"), B: T.Tensor((8, 64), "float32")):
        with T.Kernel(8, threads=32) as bx:
            if bx == at:
                T.copy(A[bx, :], B[bx, :])

    assert bool(estimate(main.program, HOPPER, 132).bytes) == (works != "none")
