# SPDX-License-Identifier: Apache-2.0
import itertools
import re

import pytest

import torch_tile
import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.simulator.simt.timeline import COPIES, MOST_EVENTS, PRODUCTS, Event
from torch_tile.tools.show import lowered
from torch_tile.tools.timeline import events_of, picture

HOPPER, AMPERE = "cuda:sm_90a", "cuda:sm_80"


def product(steps: int = 6, stages: int = 3, threads: int = 128, size: int = 64) -> T.PrimFunc:
    K = 64 * steps

    @T.prim_func
    def multiply(A: T.Tensor((size, K), "float16"), B: T.Tensor((K, size), "float16"), C: T.Tensor((size, size))):
        with T.Kernel(1, threads=threads) as _:
            a, b = T.alloc_shared((size, 64), "float16"), T.alloc_shared((64, size), "float16")
            c = T.alloc_fragment((size, size), "float32")
            T.clear(c)
            for k in T.Pipelined(steps, num_stages=stages):
                T.copy(A[0, k * 64], a)
                T.copy(B[k * 64, 0], b)
                T.gemm(a, b, c)
            T.copy(c, C)

    return multiply


def events(kernel, target: str) -> list[Event]:
    build = Build(Target.of(target))
    return events_of(kernel.program, lowered(kernel.program, build, [])[1], build.target)


def of(found: list[Event], row: str) -> list[Event]:
    return [e for e in found if e.row == row]


def lap(one: list[Event], other: list[Event]) -> float:
    """The seconds in which an event of each list goes on."""
    return sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in one for b in other)


@pytest.mark.parametrize("target", [HOPPER, AMPERE])
def test_products_come_after_their_copies(target: str):
    found = events(product(), target)
    copies, products = of(found, COPIES), of(found, PRODUCTS)
    assert copies and products and all(e.start < e.end for e in found)
    assert products[0].start >= min(e.end for e in copies)
    # the products of a step wait for one more pair of copies than those of the step before
    assert max(e.end for e in products) > max(e.end for e in copies)


def test_roles_are_rows_of_their_own():
    found = events(product(steps=12), HOPPER)
    (loads,) = {e.by for e in of(found, COPIES) if "C" not in e.what}
    (multiplies,) = {e.by for e in of(found, PRODUCTS)}
    assert loads != multiplies
    waits = {row: [e for e in of(found, row) if e.kind == "wait"] for row in (loads, multiplies)}
    assert waits[multiplies], "the consumer waits for the first tiles"
    assert waits[loads], "the producer waits until a stage is free"
    drawn = picture(found)
    assert f"{loads}, producer" in drawn and f"{multiplies}, consumer" in drawn


@pytest.mark.parametrize("target", [HOPPER, AMPERE])
def test_stages_hide_the_waits(target: str):
    """With more stages copies go on beside each other and beside products, and the block ends sooner."""
    ends, beside = [], []
    for stages in (1, 2, 4) if target == HOPPER else (2, 3, 4):
        found = events(product(steps=8, stages=stages), target)
        ends.append(max(e.end for e in found))
        beside.append(lap(of(found, COPIES), of(found, PRODUCTS)))
    assert ends[0] > ends[1] > ends[2]
    assert beside[0] < beside[1]


def test_an_engine_does_one_thing_at_a_time():
    found = events(product(threads=256, size=128), HOPPER)
    products = sorted(of(found, PRODUCTS), key=lambda e: e.start)
    for first, second in itertools.pairwise(products):
        assert second.start >= first.end * (1 - 1e-9)


def test_a_long_kernel_is_cut_and_a_huge_one_left_out():
    assert len(events(product(steps=4096), HOPPER)) == MOST_EVENTS

    @T.prim_func
    def huge(A: T.Tensor((1 << 20, 1 << 12), "float32")):
        with T.Kernel(1, threads=128) as _:
            for i in T.Parallel(128):
                A[i, 0] = 1.0

    assert events(huge, HOPPER) == [] and picture([]) == ""
    assert "No call could be made up" in torch_tile.show(huge).html()


def test_sizes_known_at_run_time_are_made_up():
    n = T.dynamic("n")

    @T.prim_func
    def scale(A: T.Tensor((n,), "float32"), factor: T.float32):
        with T.Kernel(T.ceildiv(n, 256), threads=128) as bx:
            for i in T.Parallel(256):
                A[bx * 256 + i] = A[bx * 256 + i] * factor

    assert {e.kind for e in events(scale, AMPERE)} == {"compute"}


def test_bars_of_a_line_lie_beside_each_other():
    drawn = picture(events(product(steps=10), HOPPER))
    bars = re.findall(r'<rect class="\w+" x="([\d.]+)" y="(\d+)" width="([\d.]+)"', drawn)
    lines: dict[str, list[tuple[float, float]]] = {}
    for x, y, width in bars:
        lines.setdefault(y, []).append((float(x), float(x) + float(width)))
    assert len(lines) > 4
    for line in lines.values():
        line.sort()
        for first, second in itertools.pairwise(line):
            assert second[0] >= first[1] - 0.6
