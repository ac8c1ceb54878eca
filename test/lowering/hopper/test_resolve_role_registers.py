# SPDX-License-Identifier: Apache-2.0
"""Roles share the registers of their block: the greatest sum passes, and the next one is an error."""

import random
import re

import pytest

import torch_tile
import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import TileError
from torch_tile.hardware import Target
from torch_tile.lowering import lower_for_gpu

TENSOR = T.Tensor((64,), "float32")


def asking(threads, counts, blocks=1, form="ws", later=()):
    """A kernel whose warpgroups ask for these registers, 0 for none, and `later` behind a barrier for other ones."""

    @T.prim_func
    def kernel(A: TENSOR):
        with T.Kernel(1, threads=threads) as _:
            T.annotate_min_blocks_per_sm(blocks)
            tx = T.get_thread_binding()
            ready = T.alloc_barrier(128)  # branches of a kernel with mbarriers run at the same time
            for n, count in enumerate(counts):
                if form == "ws":
                    with T.ws(n, registers=count):
                        A[n] = 1.0
                elif form == "role":
                    with T.role(128 * n, 128, registers=count):
                        A[n] = 1.0
                elif tx >= 128 * n and tx < 128 * n + 128:
                    if count != 0:
                        T.set_max_nreg(count, count > 128)
                    T.clear(A)
                    T.barrier_arrive(ready)
            if later:
                T.sync_threads()
                for n, count in enumerate(later):
                    with T.ws(n, registers=count):
                        A[n + 8] = 1.0

    return kernel


def finishes(threads, blocks, *asked):
    """Whether every warpgroup gets its registers: each takes them from what the block has left, in some order."""
    share = 256
    while share * -(-threads // 128) * 128 * blocks > 65536:
        share -= 8
    held, left = [share] * (threads // 128), 0
    for counts in asked:
        waiting = {n: count for n, count in enumerate(counts) if count}
        while ready := [n for n, count in waiting.items() if count - held[n] <= left]:
            n = ready[0]
            left -= waiting[n] - held[n]
            held[n] = waiting.pop(n)
        if waiting:
            return False
    return True


def lowered(kernel):
    return lower_for_gpu(kernel.program, Build(Target("cuda", 90)))


def passes(*args, **how):
    try:
        lowered(asking(*args, **how))
    except TileError as problem:
        assert problem.code == "registers_of_roles", problem
        return False
    return True


@pytest.mark.parametrize("form", ["ws", "role", "branch"])
@pytest.mark.parametrize(("threads", "blocks"), [(160, 1), (256, 1), (256, 2), (288, 1), (384, 1), (512, 1), (640, 1)])
def test_the_greatest_sum_passes(form, threads, blocks, seed):
    random.seed(seed)
    groups = threads // 128
    most = max(n for n in range(24, 257, 8) if finishes(threads, blocks, [n] * groups))
    assert passes(threads, [most] * groups, blocks, form)
    for _ in range(4):
        rest = [random.randrange(24, 257, 8) for _ in range(groups - 1)]
        first = max((n for n in range(24, 257, 8) if finishes(threads, blocks, [n, *rest])), default=24)
        for asked in ([first, *rest], [first + 8, *rest]):
            if first + 8 <= 256:
                assert passes(threads, asked, blocks, form) == finishes(threads, blocks, asked), asked


def test_one_warpgroup_of_several_blocks():
    """Each block has its part of the multiprocessor's registers, and no other role to take some from."""
    assert passes(128, [128], 4) and passes(128, [120], 4) and not passes(128, [136], 4)


def test_a_role_takes_nothing_of_roles_behind_a_barrier():
    """The consumers ask before the producer gives: at a barrier between them it never comes to that."""

    def kernel(ordered):
        @T.prim_func
        def kernel(A: TENSOR):
            with T.Kernel(1, threads=384) as _:
                with T.ws(0, 1, registers=240):
                    A[0] = 1.0
                if ordered:
                    T.sync_threads()
                with T.ws(2, registers=24):
                    A[1] = 1.0

        return kernel

    lowered(kernel(False))
    with pytest.raises(TileError) as caught:
        lowered(kernel(True))
    assert caught.value.code == "registers_of_roles" and "168 in threads 256 to 383" in str(caught.value)


@pytest.mark.parametrize("later", [(240, 0, 24), (200, 240, 0), (24, 240, 240), (240, 248, 0), (0, 256, 0), (24, 0, 0)])
def test_registers_stay_behind_a_barrier(later):
    first = (240, 240, 24)
    assert passes(384, first, later=later) == finishes(384, 1, first, later)


def test_directions_follow_what_a_warpgroup_has():
    """It does not ask again for what it has."""
    source = torch_tile.compile(asking(384, (240, 200, 24), later=(200, 240, 24)), target="cuda:sm_90a").source
    found = re.findall(r"set_registers<(.*?)>", str(source))
    assert found == ["240, true", "200, true", "24, false", "200, false", "240, true"]


def test_the_error_names_roles_sum_and_limit():
    """Two consumers of 240 beside 32 take what a multiprocessor has, which is more than their block was given."""
    with pytest.raises(TileError) as caught:
        lowered(asking(384, (240, 240, 32)))
    text = str(caught.value)
    assert "240 in threads 0 to 255, 32 in threads 256 to 383 make 65536, and the block has 64512, 168 for" in text
    assert "ask for at most 232 registers in threads 0 to 127 and 128 to 255" in text
    assert text.count("of these 128 threads asks for") == 2
    assert passes(384, (232, 232, 32)) and passes(384, (240, 240, 24))


def test_no_advice_to_ask_for_fewer_than_there_can_be():
    with pytest.raises(TileError) as caught:
        lowered(asking(384, (256, 248, 248)))
    assert "at most" not in str(caught.value) and "let another role keep fewer" in str(caught.value)


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_103"])
def test_a_chip_that_moves_no_registers(target):
    """Its roles keep equal shares, whatever they ask for. The assembler refused the instruction."""
    made = torch_tile.compile(asking(384, (240, 240, 32)), target=target)
    assert "set_registers" not in str(made.source)
    assert [r.became for r in made.schedule.slow] == ["an equal share of the block's registers"] * 3
    assert all("cannot move registers" in r.why_not for r in made.schedule.slow)


@pytest.mark.parametrize("target", ["cuda:sm_90a", "cuda:sm_100a", "cuda:sm_120a"])
def test_chips_that_move_registers(target):
    assert str(torch_tile.compile(asking(384, (240, 240, 24)), target=target).source).count("set_registers<") == 3
