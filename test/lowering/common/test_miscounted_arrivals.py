# SPDX-License-Identifier: Apache-2.0
"""mbarriers that wait for another number than arrives are found, with the line that makes them; no others are."""

import pytest

import torch_tile.language as T
from torch_tile.lowering.common.check import _Check


def staged(full_count, empty_count, arrives=True, stages=1, waits=1):
    """Hand over tiles by mbarriers: 128 threads of a producer, 128 of a consumer."""

    @T.prim_func
    def kernel(A: T.Tensor((256, 64), "float16"), C: T.Tensor((256, 64), "float16")):
        with T.Kernel(1, threads=256) as _:
            a = T.alloc_shared((stages, 64, 64), "float16")
            full = T.alloc_barrier(full_count, (stages,))
            empty = T.alloc_barrier(empty_count, (stages,))
            with T.ws(0):
                for k in T.serial(4):
                    T.mbarrier_wait_parity(empty[k % stages], (k // stages + 1) % 2)
                    T.tma_copy(A[k * 64 : k * 64 + 64, :], a[k % stages, :, :], barrier=full[k % stages])
                    if arrives == "one":
                        if T.get_thread_binding() == 0:
                            T.mbarrier_arrive(full[k % stages])
                    elif arrives:
                        T.mbarrier_arrive(full[k % stages])
            with T.ws(1):
                out = T.alloc_fragment((64, 64), "float16")
                for k in T.serial(4):
                    T.mbarrier_wait_parity(full[k % stages], k // stages % 2)
                    if waits == 2:
                        T.mbarrier_wait_parity(full[k % stages], k // stages % 2)
                    T.copy(a[k % stages, :, :], out)
                    T.mbarrier_arrive(empty[k % stages])
                    T.copy(out, C[k * 64, 0])

    return kernel.program


def found_in(program):
    check = _Check()
    check(program)
    assert not check.found
    return [each for each in check.warnings if each.code == "miscounted"]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("arrives, come", [(True, 128), ("one", 1)])
def test_right_counts(stages, arrives, come):
    assert not found_in(staged(come, 128, arrives, stages))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("full, empty, arrives", [(1, 128, True), (256, 128, True), (64, 128, True), (128, 128, "one")])
def test_wrong_counts_of_the_producer(full, empty, arrives, stages):
    (found,) = found_in(staged(full, empty, arrives, stages))
    come = 128 if arrives is True else 1
    assert f"`full` waits for {full} arrivals in each phase, and {come} come" in found.message
    assert "alloc_barrier(full_count" in found.span.source() and "T.mbarrier_arrive" in found.notes[0][0].source()


@pytest.mark.parametrize("empty", [1, 64, 127, 129, 256])
def test_wrong_counts_of_the_consumer(empty):
    (found,) = found_in(staged(128, empty))
    assert f"`empty` waits for {empty} arrivals" in found.message


def test_two_phases_of_an_iteration():
    assert not found_in(staged(64, 128, waits=2))


def test_bulk_copies_do_not_arrive():
    (found,) = found_in(staged(128, 128, arrives=False))
    assert "`full` waits for 128 arrivals in each phase, and 0 come" in found.message and "T.tma_copy" in found.fix
