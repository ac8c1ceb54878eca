# SPDX-License-Identifier: Apache-2.0
"""What bulk copies, mbarriers and named barriers say that they touch, and how they are called."""

import pytest

from torch_tile.intrinsics import bulk, lookup
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, TensorMap
from torch_tile.ir.expr import Address, const

zero = const(0, dt.int32)
A = Buffer("A", (const(64, dt.int32),) * 2, dt.float16, "global")
tile = Address(Buffer("tile", (const(4096, dt.int32),), dt.float16, "shared"), (zero,))
ready = Address(Buffer("ready", (const(2, dt.int32),), dt.uint64, "barrier", arrivals=1), (zero,))
boxes = TensorMap(A, A.shape, (const(64, dt.int32), const(1, dt.int32)), (16, 64), 128)


def effects(call):
    return [(e.operand, e.kind, e.elements, e.asynchronous) for e in lookup(call.name).effects(call)]


def test_boxes():
    load, store = bulk.tma_load(tile, boxes, (zero, zero), ready).call, bulk.tma_store(boxes, tile, (zero, zero)).call
    assert bulk.box_elements(load) == bulk.box_elements(store) == 16 * 64
    assert effects(load) == [(0, "w", 1024, True)] and effects(store) == [(1, "r", 1024, True)]
    assert load.args[1] is boxes and store.args[0] is boxes


@pytest.mark.parametrize(
    ("statement", "spelling"),
    [
        (bulk.tma_load(tile, boxes, (zero, zero), ready), "tma_load"),
        (bulk.tma_load(tile, boxes, (zero, zero), ready, "evict_first"), "tma_load_evict_first"),
        (bulk.tma_load(tile, boxes, (zero, zero), ready, "", zero), "tma_load_multicast"),
        (bulk.tma_load(tile, boxes, (zero, zero), ready, "evict_last", zero), "tma_load_multicast_evict_last"),
        (bulk.tma_store(boxes, tile, (zero, zero), "add"), "tma_store_add"),
        (bulk.mbarrier_arrive(ready), "mbarrier_arrive"),
        (bulk.mbarrier_arrive(ready, zero), "mbarrier_arrive"),
        (bulk.mbarrier_init(ready, 8), "mbarrier_init<8>"),
        (bulk.mbarrier_wait(ready, 1), "mbarrier_wait"),
        (bulk.bulk_wait(1), "bulk_wait<1, true>"),
        (bulk.bulk_wait(0, False), "bulk_wait<0, false>"),
        (bulk.named_barrier(2, 256), "named_barrier<2, 256>"),
        (bulk.set_registers(24, False), "set_registers<24, false>"),
    ],
)
def test_spelling(statement, spelling):
    assert lookup(statement.call.name).spelling(statement.call) == spelling


def test_what_reaches_other_blocks():
    place = (zero, zero)
    own = bulk.tma_load(tile, boxes, place, ready), bulk.mbarrier_arrive(ready), bulk.warp_arrive(ready)
    others = (
        bulk.tma_load(tile, boxes, place, ready, "", zero), bulk.mbarrier_arrive(ready, zero),
        bulk.warp_arrive(ready, zero),
    )  # fmt: skip
    assert not any(bulk.reaches_others(s.call) for s in (*own, bulk.mbarrier_wait(ready, 1)))
    assert all(bulk.reaches_others(s.call) for s in others)
    load = others[0].call
    assert effects(load) == [(0, "w", 1024, True)] and load.args[3:] == (zero, zero, zero)


def test_who_calls_together():
    together = {"warp_arrive": "warp", "named_barrier": "role", "named_barrier_arrive": "warp", "tma_load": ""}
    assert {name: lookup(name).convergent for name in together} == together


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_chips(capability):
    assert lookup("tma_load").exists_on(capability) == (capability >= 90)
    assert lookup("wgmma").exists_on(capability) == (capability == 90)
    assert lookup("tma_load").where == "sm_90 or later" and lookup("wgmma").where == "sm_90a"
