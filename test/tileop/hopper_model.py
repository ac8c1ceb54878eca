# SPDX-License-Identifier: Apache-2.0
"""What Hopper's asynchronous instructions read and write, written down from the instruction set's definition alone.

Shared memory is modelled as the element that each byte address holds, for one buffer at a multiple of 1024 bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np

from torch_tile.intrinsics.wgmma import Descriptor, allowed_n, walks_of
from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.buffer import Buffer, Region, TensorMap
from torch_tile.ir.expr import Address, Call, Expr, Var
from torch_tile.ir.layout import Layout, row_major
from torch_tile.ir.stmt import Block, Do, For, If, Stmt, Store
from torch_tile.tileop.gemm.op import Gemm

CHUNKS = {0: 0, 32: 1, 64: 3, 128: 7}  # of 16 bytes that a swizzle over so many bytes exchanges, as a mask


def calls(stmt: Stmt, values: dict[Var, int]) -> Iterator[tuple[str, tuple[object, ...], Call]]:
    """Every call of one thread in order, with its operands' values: addresses as (buffer, indices)."""
    if isinstance(stmt, Block):
        for one in stmt.stmts:
            yield from calls(one, values)
    elif isinstance(stmt, If):
        yield from calls(stmt.then if evaluate(stmt.condition, values) else stmt.otherwise, values)
    elif isinstance(stmt, For):
        for i in range(int(evaluate(stmt.stops[0], values))):
            yield from calls(stmt.body, {**values, stmt.vars[0]: i})
    elif isinstance(stmt, Do):
        assert isinstance(stmt.call, Call)
        yield stmt.call.name, tuple(_value(a, values) for a in stmt.call.args), stmt.call
    else:
        assert isinstance(stmt, Store)
        at = tuple(int(evaluate(i, values)) for i in stmt.indices)
        yield "store", (stmt.buffer, at, evaluate(stmt.value, values)), stmt


def _value(a: Expr, values: dict[Var, int]) -> object:
    if isinstance(a, Address):
        return a.buffer, tuple(int(evaluate(i, values)) for i in a.indices)
    return a if isinstance(a, TensorMap) else int(evaluate(a, values))


def place_of(layout: Layout, thread: int, register: int) -> tuple[int, ...]:
    """The element that a register of a thread holds."""
    found = []
    for digits in layout.dims:
        index = 0
        for d in digits:
            index = index * d.size + (thread if d.axis == "t" else register) // d.stride % d.size
        found.append(index)
    return tuple(found)


def start_of(buffer: Buffer, indices: tuple[int, ...]) -> int:
    """The byte of an element without the swizzle, which is 0 in the first row of a pattern."""
    layout = buffer.layout or row_major(buffer.static_shape)
    return dataclasses.replace(layout, swizzle=None).apply(indices)["m"] * buffer.dtype.itemsize


def swizzled(address: int, span: int) -> int:
    """Where a byte goes: bits 4 to 6 of the address are changed by bits 7 to 9."""
    return address ^ (address >> 7 & CHUNKS[span]) << 4


def places_of(buffer: Buffer) -> dict[int, tuple[int, ...]]:
    """Every element at the byte where the layout puts it."""
    layout, size = buffer.layout or row_major(buffer.static_shape), buffer.dtype.itemsize
    indices = itertools.product(*map(range, buffer.static_shape))
    return {layout.apply(index)["m"] * size: index for index in indices}


@dataclasses.dataclass(frozen=True)
class Operand:
    """A tile that wgmma reads."""

    buffer: Buffer
    places: dict[int, tuple[int, ...]]

    @staticmethod
    def holding(buffer: Buffer) -> Operand:
        """A buffer that is filled by its layout."""
        return Operand(buffer, places_of(buffer))

    def start(self, indices: tuple[int, ...]) -> int:
        """The byte that a descriptor with no step begins at."""
        return start_of(self.buffer, indices)

    def matrix(self, start: int, walk: Descriptor, rows: int, k: int) -> np.ndarray:
        """The elements that an instruction finds, `[rows, k, rank]`: `rows` of A, or columns of B."""
        size = self.buffer.dtype.itemsize
        found = np.zeros((rows, k, self.buffer.rank), int)
        for i, j in itertools.product(range(rows), range(k)):
            if walk.across:
                panel = walk.swizzle // size
                at = i // panel * walk.leading + j // 8 * walk.stride + j % 8 * walk.swizzle + i % panel * size
            else:
                at = i // 8 * walk.stride + i % 8 * walk.swizzle + j * size
            found[i, j] = self.places[swizzled(start + at, walk.swizzle)]
        return found


def expected(region: Region, turned: bool, rows: int, k: int, i: int, j: int) -> np.ndarray:
    """Indices of the operand's elements from row (column of B) `i` and step `j` on, `[rows, k, rank]`."""
    starts = [int(evaluate(s, {})) for s in region.starts]
    found = np.zeros((rows, k, len(starts)), int)
    found += starts
    row, column = (-1, -2) if turned else (-2, -1)
    found[..., row] += i + np.arange(rows)[:, None]
    found[..., column] += j + np.arange(k)[None, :]
    return found


def check_operands(op: Gemm, run, case) -> None:
    """Each warpgroup multiplies the rows of A and columns of B that its accumulators stand for, once.

    `case` is of test_gemm_wgmma.py.
    """
    layout = op.C.buffer.layout
    step = 256 // case.types[0].bits
    width = 0
    for group in range(case.threads // 128):
        seen: set[tuple[int, int, int]] = set()
        for name, args, call in calls(op.lower_cuda(run.ctx), {run.thread: 128 * group}):
            if name != "wgmma":
                continue
            (_, (first,)), (a, a_at), (b, b_at), a_step, b_step, keep = args
            n = int(str(call.options[0]))
            i, j = (int(x) for x in place_of(layout, 128 * group, first))
            inner = next(k for k in itertools.count(0, step) if (i, j, k) not in seen)
            seen.add((i, j, inner))
            assert keep == (not (case.clear and inner == 0 and case.k > step))
            a_walk, b_walk = walks_of(call)
            if a_walk is None:
                t, v = place_of(op.A.buffer.layout, 128 * group, a_at[0])
                assert (t, v) == (i, inner)
            else:
                memory = Operand.holding(a)
                got = memory.matrix(memory.start(a_at) + a_step, a_walk, 64, step)
                np.testing.assert_array_equal(got, expected(op.A, op.transpose_A, 64, step, i, inner))
            memory = Operand.holding(b)
            got = memory.matrix(memory.start(b_at) + b_step, b_walk, n, step)
            np.testing.assert_array_equal(got, expected(op.B, not op.transpose_B, n, step, j, inner))
            assert allowed_n(n, case.types[0].name)
            width = n
        steps = case.k // step
        assert len(seen) % steps == 0
        p = op.C.buffer.layout.extent("r")
        assert len(seen) // steps * 32 * width // 64 == p  # every accumulator gets its product


def box_places(buffer: Buffer, first: tuple[int, ...], box: TensorMap) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Byte in the tile, and offset in the tensor from the box's corner, of each element that a bulk copy moves."""
    size, start = buffer.dtype.itemsize, start_of(buffer, first)
    assert start % (8 * box.swizzle or 128) == 0 and box.box[-1] * size % 16 == 0
    assert box.swizzle in (0, box.box[-1] * size) and all(1 <= n <= 256 for n in box.box)
    for number, offset in enumerate(itertools.product(*map(range, box.box))):
        yield swizzled(start + number * size, box.swizzle), offset


def box_bytes(box: TensorMap) -> int:
    """What an mbarrier counts for a box."""
    return math.prod(box.box) * box.buffer.dtype.itemsize
