# SPDX-License-Identifier: Apache-2.0
"""Compute products of warpgroups (wgmma) from the bytes that their descriptors address.

A product is computed when it starts. It counts as reading its operands in shared memory until its warps wait for its
group.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from torch_tile.hardware import WARPGROUP
from torch_tile.intrinsics import wgmma as tw
from torch_tile.intrinsics.matrix import Digits
from torch_tile.intrinsics.wgmma import Descriptor, M
from torch_tile.simulator.simt import values as va
from torch_tile.simulator.simt.bulk import CHUNK, of_thread, swizzled
from torch_tile.simulator.simt.calls import Handler, Place, Run
from torch_tile.simulator.simt.matmuls import Products
from torch_tile.simulator.simt.memory import Tile
from torch_tile.simulator.simt.races import Array

A_DIGITS = {16: tw.A_16, 8: tw.A_8, 32: tw.A_32}  # by bits of an element


def spread(digits: tuple[Digits, Digits], registers: int) -> tuple[Array, Array]:
    """Return the row and column of the instruction's element in each register of each thread, `[registers, 128]`."""
    register, thread = np.meshgrid(np.arange(registers), np.arange(WARPGROUP), indexing="ij")
    found = []
    for dim in digits:
        index = np.zeros_like(thread)
        for digit in dim:
            index = index * digit.size + (thread if digit.axis == "t" else register) // digit.stride % digit.size
        found.append(index)
    return found[0], found[1]


def accumulator(n: int) -> tuple[Array, Array]:
    """Return what `spread` returns, for an accumulator of `n` columns: blocks of 8 columns and 4 registers."""
    rows, columns = spread((tw.ROWS_D, tw.COLUMNS_D), 4)
    blocks = n // 8
    return np.tile(rows, (blocks, 1)), np.concatenate([columns + 8 * b for b in range(blocks)])


def walked(walk: Descriptor, start: int, rows: int, bytes_of_k: int) -> Array:
    """Return where wgmma reads an operand by its descriptor: addresses in units of 16 bytes.

    The shape is `[row, part of K]`, or `[step of K, part of rows]` if the operand is walked across. An element of an
    operand that is walked across has 2 bytes.
    """
    span = walk.swizzle or CHUNK
    if walk.across:
        k, part = np.meshgrid(np.arange(bytes_of_k // 2), np.arange(rows // 8) * CHUNK, indexing="ij")
        panel, group = (walk.leading, walk.stride) if walk.swizzle else (walk.stride, walk.leading)
        place = part // span * panel + k // 8 * group + k % 8 * span + part % span
    else:
        row, part = np.meshgrid(np.arange(rows), np.arange(bytes_of_k // CHUNK), indexing="ij")
        place = row // 8 * walk.stride + row % 8 * span + part * (CHUNK if walk.swizzle else walk.leading)
    return swizzled(start + place, walk.swizzle)


class _Product:
    """One `wgmma` in the program."""

    def __init__(self, p: Place):
        self.p = p
        self.n, *self.types = int(str(p.call.options[0])), *(str(t) for t in p.call.options[1:4])
        self.k = tw.PRODUCTS[self.types[0], self.types[1], self.types[2]]
        self.walks = tw.walks_of(p.call)
        self.result = accumulator(self.n)

    @property
    def products(self) -> Products:
        """Return the products in flight in the running block."""
        return self.p.calls.state(Products)

    def run(self) -> None:
        """Run the product for each whole warpgroup that is running."""
        for group in whole_groups(self.p):
            self.multiply(int(group))

    def multiply(self, group: int) -> None:
        """Compute one warpgroup's product and put it in flight."""
        p, lead = self.p, group * WARPGROUP
        ids = lead + np.arange(WARPGROUP)
        a = self.factor_in_registers(group, ids) if self.walks[0] is None else self.shared(1, self.walks[0], M, group)
        b = self.shared(2, self.walks[1], self.n, group)
        memory, start, count = p.registers(0)
        self.products.claim(memory, start, count, group, "results", p.span)
        found = a @ b.T
        rows, columns = self.result
        own = memory.values[start : start + count, ids]
        if bool(np.asarray(of_thread(p.operands[5](), lead))):
            memory.need(memory.written[start : start + count, ids], p.span)
            found[rows, columns] += own
        whole = found[rows, columns]
        memory.values[start : start + count, ids] = (
            va.rounded(whole, memory.dtype) if memory.dtype.is_float else whole.astype(np.int32)
        )
        memory.written[start : start + count, ids] = True
        self.products.last[group] = int(self.products.closed[group]) + 1, p.span

    def factor_in_registers(self, group: int, ids: Array) -> Array:
        """Return operand A from registers."""
        memory, start, count = self.p.registers(1)
        self.products.claim(memory, start, count, group, "factors", self.p.span)
        rows, columns = spread(A_DIGITS[memory.dtype.bits], count)
        found = np.zeros((M, self.k))
        found[rows, columns] = memory.values[start : start + count, ids]
        return self.wide(found, 0)

    def shared(self, operand: int, walk: Descriptor, rows: int, group: int) -> Array:
        """Return an operand from shared memory, `[row, k]`."""
        p, tile, lead = self.p, cast(Tile, self.p.behind(operand)), group * WARPGROUP
        dtype, products = tile.dtype, self.products
        index = np.array([of_thread(p.operands[operand](), lead)])
        start = int(tile.address(index)[0]) + of_thread(p.operands[operand + 2](), lead)
        span = walk.swizzle
        if start % CHUNK or (span and start % (8 * span) >= span):
            text = f"a product reads `{tile.name}` from byte {start}; not the first row of a pattern"
            p.threads.findings.add("misaligned", p.span, text)
        chunks = walked(walk, start, rows, self.k * dtype.itemsize)
        places = (chunks.ravel() - tile.start) // dtype.itemsize
        ok = tile.inside(places, CHUNK // dtype.itemsize, p.span)
        if ok is not None:
            return np.zeros((rows, self.k))
        started = p.calls.order.time(int(products.closed[group]) + 1)
        ids = lead + np.arange(WARPGROUP)
        raw = p.calls.shared.fetch(chunks.ravel(), CHUNK, ids, products.agents(group), started, tile.owner, p.span)
        found = va.decode(raw.view(tile.raw_type).reshape(len(chunks), -1), dtype)
        return self.wide(found.T if walk.across else found, operand - 1)

    def wide(self, values: Array, number: int) -> Array:
        """Convert operands to a type in which sums lose no bits; tf32 keeps 19 bits of each operand."""
        if self.types[number] == "tf32":
            bits = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
            values = bits.view(np.float32)
        return values.astype(np.float64 if self.types[2].startswith("float") else np.int64)


def whole_groups(p: Place) -> Array:
    """Return the warpgroups that run; report warpgroups of which only some threads run."""
    running = np.zeros((-(-p.threads.lanes // WARPGROUP), WARPGROUP), bool)
    running.ravel()[p.threads.active()] = True
    torn = running.any(axis=1) & ~running.all(axis=1)
    if torn.any():
        text = f"`{p.call.name}` is for whole warpgroups; {int(running[torn][0].sum())} threads"
        p.threads.findings.add("deadlock", p.span, text, int(torn.sum()))
    return np.flatnonzero(running.all(axis=1))


def _wgmma(p: Place) -> Run:
    """Compile a wgmma."""
    return _Product(p).run


def _fence(p: Place) -> Run:
    """Compile wgmma_fence."""

    def run() -> None:
        p.calls.state(Products).fences[whole_groups(p)] += 1

    return run


def _commit(p: Place) -> Run:
    """Compile wgmma_commit."""

    def run() -> None:
        p.calls.state(Products).closed[whole_groups(p)] += 1

    return run


def _wait(p: Place) -> Run:
    """Compile wgmma_wait: each warpgroup waits for its groups of products."""
    wait = tw.wait_of(p.call)
    assert wait is not None

    def run() -> None:
        for group in whole_groups(p).tolist():
            p.calls.state(Products).wait(group, wait.pending)

    return run


def _results(p: Place) -> Run:
    """Compile the marker after which the program may use a product's results."""

    def run() -> None:
        memory, start, count = p.registers(0)
        groups = np.unique(p.threads.active() // WARPGROUP)
        p.calls.state(Products).show(memory, start + np.arange(count)[:, None], groups, p.span)

    return run


def _hold(p: Place) -> Run:
    """Compile the marker that keeps arithmetic in front of a wait, which orders none here."""
    return lambda: None


WGMMA: dict[str, Handler] = {
    "wgmma": _wgmma, "wgmma_fence": _fence, "wgmma_commit": _commit, "wgmma_wait": _wait,
    "wgmma_results": _results, "wgmma_hold": _hold,
}  # fmt: skip
