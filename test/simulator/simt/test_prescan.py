# SPDX-License-Identifier: Apache-2.0
"""What a kernel's text tells."""

import numpy as np
import pytest
import torch

from torch_tile.diagnostics.errors import InternalError
from torch_tile.intrinsics import bulk, memory as tm, wgmma
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Var, const
from torch_tile.ir.stmt import Break, Do
from torch_tile.simulator.simt.prescan import (
    barrier_groups,
    is_concurrent,
    leaves,
    product_registers,
    shared_size,
    writes,
)


@pytest.mark.parametrize(
    ("stmt", "concurrent"),
    [
        (tm.barrier(), False), (tm.cp_async_commit(), False), (bulk.grid_wait(), False),
        (bulk.named_barrier(1, 32), True), (bulk.fence_proxy_async(), True), (wgmma.wgmma_fence(), True),
    ],
)  # fmt: skip
def test_what_is_concurrent(build, stmt, concurrent):
    b = build(32)
    assert is_concurrent(b.program(stmt).kernels[0]) == concurrent
    b = build(32)
    assert is_concurrent(b.program(b.role(0, 32, stmt)).kernels[0])


def test_shared_memory_in_places_of_the_smallest_element(build):
    b = build(32)
    assert shared_size(b.program().kernels[0]) == (0, 16)
    b = build(32)
    b.shared("s", 100, "float32")
    b.shared("t", 10, "float16")
    b.barrier("bar", 4, 1)
    size, place = shared_size(b.program().kernels[0])
    assert size >= 1024 + 20 and place == 2


@pytest.mark.parametrize(("offset", "message"), [(0, "share"), (4, "multiple"), (24, "share"), (32, None)])
def test_mbarriers_share_no_memory(build, offset, message):
    b = build(32)
    b.shared("s", 8, "float32", 0)
    b._alloc(Buffer("bar", (const(2, dt.int32),), dt.uint64, "barrier", offset=offset, arrivals=1))
    if message is None:
        assert not b.run()
    else:
        with pytest.raises(InternalError, match=message):
            b.run()


def test_who_leaves(build):
    b = build(32)
    assert leaves(Break()) and leaves(b.when(b.thread < 3, tm.barrier(), otherwise=[Break()]))
    loop = b.loop(Var("n", dt.int32, "loop"), 0, 3, Break())
    assert not leaves(loop) and not leaves(tm.barrier())


def test_crews(build):
    def made(*stmts, first=0, count=128):
        role = b.role(first, count, *stmts)
        masks = barrier_groups(role, 256, lambda e: lambdas.get(e))
        assert (sum(masks) == ((np.arange(256) >= first) & (np.arange(256) < first + count))).all()
        return [np.flatnonzero(m)[::32].tolist() for m in masks]

    b, lambdas, warp = build(256), {}, np.arange(256) // 32

    def branch(values, *stmts):
        found = b.when(b.thread < 7, *stmts)
        lambdas[found.condition] = values
        return found

    wait, quiet = bulk.named_barrier(1, 32), bulk.fence_proxy_async()
    assert made(wait) == [[0, 32, 64, 96]]
    assert made(branch(warp == 1, quiet)) == [[0, 32, 64, 96]]
    assert made(branch(np.arange(256) == 3, wait)) == [[0, 32, 64, 96]]
    assert made(branch(warp == 1, wait)) == [[0, 64, 96], [32]]
    apart = branch(warp == 6, wait), branch(warp == 7, wait)
    assert sorted(made(*apart, first=128)) == [[128, 160], [192], [224]]
    product = wgmma.wgmma_fence(), branch(warp == 1, wait), wgmma_of(b)
    assert made(*product) == [[0, 32, 64, 96]]
    assert made(branch(warp < 4, wait), wgmma_of(b), count=256) == [[128, 160, 192, 224], [0, 32, 64, 96]]


def test_who_writes(build):
    b = build(32)
    x, y, s = (b.tensor(n, torch.zeros(64)) for n in "xyz")
    place = [const(0, dt.int32)]
    tile = b.shared("tile", 64)
    store = bulk.tma_store(b.map(y, (64,), (16,)), b.address(tile, 0), place)
    assert writes(b.store(x, 0, 1.0), x) and not writes(b.store(x, 0, 1.0), y)
    assert writes(store.call, y) and not writes(store.call, x)
    assert writes(Do(tm.atomic(b.address(s, 0), b.load(x, 0), "add")).call, s)


def wgmma_of(b):
    """A product of registers d and a."""
    d, a, s = b.local("d", 4), b.local("a", 8, "float16"), b.shared("s", 512, "float16")
    types, walk = ("float16", "float16", "float32"), wgmma.Descriptor(32, 16, 256)
    return wgmma.wgmma(b.address(d, 0), b.address(a, 0), b.address(s, 0), 8, types, None, walk)


def test_registers_of_products(build):
    b = build(128)
    do, other = wgmma_of(b), b.local("other", 4)
    kernel = b.program(do, b.store(other, 0, 1.0)).kernels[0]
    assert set(product_registers(kernel)) == {do.call.args[0].buffer, do.call.args[1].buffer}
