# SPDX-License-Identifier: Apache-2.0
"""The collector is paused while anything compiles, and as it was afterwards."""

import gc
import threading

import pytest

from torch_tile.compiler.garbage import collector_paused


@pytest.fixture(params=[True, False], ids=["on", "off"])
def before(request):
    enabled = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if enabled else gc.disable)()


def test_pauses_nest_and_end_with_errors(before):
    with pytest.raises(ValueError), collector_paused():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled() is before


def test_the_last_of_many_threads_ends_the_pause(before):
    inside, leave = threading.Barrier(4), threading.Event()

    def compiles():
        with collector_paused():
            inside.wait(10)
            leave.wait(10)

    threads = [threading.Thread(target=compiles) for _ in range(3)]
    for each in threads:
        each.start()
    with collector_paused():
        inside.wait(10)
    assert not gc.isenabled()
    leave.set()
    for each in threads:
        each.join()
    assert gc.isenabled() is before
