# SPDX-License-Identifier: Apache-2.0
"""Estimate the run time of a traced program: the number of waves of blocks, times one block's work.

The model ranks configurations of one kernel, so that hopeless ones are neither compiled nor run. Its times are no
predictions. Work is counted on stage TILE: products, scalar operations, bytes between global memory and blocks, and a
block's memory. If a loop's bounds depend on outer variables or block indices, these count at the middle of their range.
A grid whose block in the middle has nothing to do is judged by its first or last one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch_tile.hardware import PER_THREAD, Rates, Target, equal_share
from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import Binary, Call, Cast, Expr, Load, Scalar, Select, Unary, Var
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.node import Node, children, walk
from torch_tile.ir.stmt import Alloc, For, If, Kernel, Let, LoopKind, Program, Store
from torch_tile.lowering.analysis.liveness import most_alive
from torch_tile.lowering.pipelining.copy_plan import filling
from torch_tile.tileop import RegisteredOp
from torch_tile.tileop.gemm.op import Gemm

UNKNOWN_TRIPS = 8  # iterations of a loop whose bounds depend on data
OTHER_REGISTERS = 40  # addresses, counters and operands, beside the fragments
WARPS_AT_FULL_RATE = 8  # that keep the tensor cores of an SM busy


@dataclass
class Work:
    """The work of one block: flops of products (as 16-bit ones), scalar operations, bytes, loop iterations."""

    products: float = 0.0
    product_flops: float = 0.0  # of products as they are, whatever their operands
    scalars: float = 0.0
    shared_bytes: float = 0.0  # read by products
    moved: IdMap[Buffer, float] = field(default_factory=IdMap)  # bytes of each global buffer
    steps: float = 0.0
    waits: float = 0.0  # steps that nothing overlaps
    held: int = 0  # bytes of shared memory, at the least
    fragments: int = 0  # bytes of registers of all threads, the most that are alive at once

    @property
    def bytes(self) -> float:
        """Return all bytes between global memory and the block."""
        return sum(self.moved.values())


@dataclass(frozen=True)
class Estimate:
    """The model's estimate of a program. `refused` says why it cannot run, "" if it can.

    `shared` bytes of a block at the least, `registers` of a thread, `waves` of blocks, and all `flops` and `bytes`.
    """

    seconds: float
    waves: float
    shared: int
    registers: int
    flops: float
    bytes: float
    product_flops: float = 0.0  # of products alone, not weighted by the dtypes of their operands
    refused: str = ""


def estimate(program: Program, target: Target, num_sms: int, sizes: Mapping[Var, Scalar] | None = None) -> Estimate:
    """Estimate the time of `program` on a machine of `num_sms` SMs or cores. `sizes` are run-time sizes, if known."""
    rates = target.rates
    parts = [_estimate_kernel(kernel, program, target, rates, num_sms, dict(sizes or {})) for kernel in program.kernels]
    return Estimate(
        sum(p.seconds for p in parts),
        sum(p.waves for p in parts),
        max(p.shared for p in parts),
        max(p.registers for p in parts),
        sum(p.flops for p in parts),
        sum(p.bytes for p in parts),
        sum(p.product_flops for p in parts),
        next((p.refused for p in parts if p.refused), ""),
    )


def _estimate_kernel(
    kernel: Kernel, program: Program, target: Target, rates: Rates, num_sms: int, values: dict[Var, Scalar]
) -> Estimate:
    """Estimate the time of one launch of a kernel."""
    grid = [max(1, number(extent, values, UNKNOWN_TRIPS)) for extent in kernel.grid]
    count, threads = math.prod(grid), math.prod(kernel.threads)
    work = typical_work(kernel, grid, values, target)
    registers = OTHER_REGISTERS + work.fragments // (4 * threads)
    resident = 1
    refused = ""
    if target.kind == "cuda":
        given = min(registers, PER_THREAD, equal_share(threads, kernel.min_blocks))
        resident = max(1, target.blocks_at_once(threads, given, work.held))
        if work.held > target.shared_limit:
            refused = f"needs {work.held} bytes of shared memory; {target} has {target.shared_limit}"
    waves = count / (num_sms * resident)
    full, rest = divmod(count, num_sms * resident)
    waves_work = full * _wave(work, resident, threads, target, rates)
    waves_work += _wave(work, math.ceil(rest / num_sms), threads, target, rates)
    seconds = max(waves_work, _distinct(work, program, count, values) / rates.memory) + rates.launch
    seconds *= max(1.0, registers / PER_THREAD) ** 2 if target.kind == "cuda" else 1.0  # spilled registers
    flops, moved = count * (work.products + work.scalars), count * work.bytes
    return Estimate(seconds, waves, work.held, registers, flops, moved, count * work.product_flops, refused)


def typical_work(kernel: Kernel, grid: Sequence[int], values: dict[Var, Scalar], target: Target) -> Work:
    """Count the work of the block in the middle of a grid. If that one touches no memory, count the first or last one.

    Set the indices of that block in `values`.
    """
    middle, first, last = [n // 2 for n in grid], [0] * len(grid), [n - 1 for n in grid]
    found = []
    for indices in (middle, first, last):
        here = values | dict(zip(kernel.blocks, indices, strict=True))
        work = work_of(kernel, here, target)
        found.append((work, here))
        if work.bytes:
            break
    work, here = next((one for one in found if one[0].bytes), found[0])
    values |= here
    return work


def _wave(work: Work, resident: int, threads: int, target: Target, rates: Rates) -> float:
    """Estimate the seconds that one SM or core takes for `resident` blocks side by side."""
    if not resident:
        return 0.0
    busy = min(1.0, resident * threads / 32 / WARPS_AT_FULL_RATE) if target.kind == "cuda" else 1.0
    compute = max(work.products / rates.product, work.shared_bytes / rates.shared) / busy + work.scalars / rates.scalar
    traffic = work.bytes / rates.traffic
    alone = max(compute, traffic) + rates.step * (1 + work.waits)
    return max(resident * max(compute, traffic), alone)


def _distinct(work: Work, program: Program, count: int, values: Mapping[Var, Scalar]) -> float:
    """Count the bytes that must move to or from memory at least once: no more of a buffer than its size."""
    total = 0.0
    for buffer in (*program.params, *program.workspaces, *program.outputs, *program.views):
        if isinstance(buffer, Buffer) and buffer in work.moved:
            held = math.prod(number(size, values, 1) for size in buffer.shape) * buffer.dtype.bits / 8
            total += min(held, count * work.moved[buffer])
    return total


def work_of(kernel: Kernel, values: dict[Var, Scalar], target: Target) -> Work:
    """Count the work of the block with these indices. `values` has the indices and the run-time sizes."""
    counter = WorkCounter(kernel, values, target)
    counter.visit(kernel.body, 1.0)
    counter.work.held = max(counter.held, max(counter.shared.values(), default=0))
    counter.work.fragments = most_alive(kernel.body, math.prod(kernel.threads), counter.in_registers)
    return counter.work


class WorkCounter:
    """Walk a kernel's body and sum up the work, each part times its number of runs."""

    def __init__(self, kernel: Kernel, values: dict[Var, Scalar], target: Target):
        self.work: Work = Work()
        self.values: dict[Var, Scalar] = values
        self.target: Target = target
        self.warps: int = max(1, math.prod(kernel.threads) // 32)
        self.shared: IdMap[Buffer, int] = IdMap()  # bytes of each tile
        self.held: int = 0  # bytes of the tiles that a loop fills, all versions of them

    def visit(self, node: Node, times: float) -> None:
        """Count `node`, which runs `times` times."""
        if isinstance(node, For):
            self.loop(node, times)
        elif isinstance(node, If):
            self.scalars(node.condition, times)
            holds = _known_value(node.condition, self.values)
            if holds is None or holds:
                self.visit(node.then, times)
            if not holds:
                self.visit(node.otherwise, times)
        elif isinstance(node, Alloc):
            self.alloc(node.buffer)
        elif isinstance(node, RegisteredOp):
            self.op(node, times)
        elif isinstance(node, Store):
            self.move(node.buffer, times)
            self.scalars(node, times)
        elif isinstance(node, Expr):
            self.scalars(node, times)
        else:
            for child in children(node):
                self.visit(child, times)
            if isinstance(node, Let):
                self.bind(node.var, node.value)

    def loop(self, loop: For, times: float) -> None:
        """Count a loop, with its variables at the middle of their range."""
        trips = 1.0
        for var, start, stop in zip(loop.vars, loop.starts, loop.stops, strict=True):
            first = number(start, self.values, 0)
            last = number(stop, self.values, first + UNKNOWN_TRIPS * loop.step)
            trips *= max(0, math.ceil((last - first) / loop.step))
            self.values[var] = (first + last) // 2
        if loop.kind is LoopKind.PIPELINED:
            tiles = [f.region.buffer for n in walk(loop.body) if (f := filling(n)) is not None]
            versions = max(1, loop.stages)
            self.held = max(self.held, sum(versions * _bytes(b) for b in IdMap((b, b) for b in tiles).values()))
        if loop.kind in (LoopKind.PIPELINED, LoopKind.SERIAL) and any(isinstance(n, RegisteredOp) for n in walk(loop)):
            self.work.steps += times * trips
            self.work.waits += times * trips / max(1, loop.stages) ** 2
        self.visit(loop.body, times * trips)

    def bind(self, var: Var, value: Expr) -> None:
        """Remember a name's value if it follows from known values."""
        found = _known_value(value, self.values)
        if found is not None:
            self.values[var] = found

    def alloc(self, buffer: Buffer) -> None:
        """Count a tile that is allocated."""
        if buffer.scope == "shared":
            self.shared[buffer] = _bytes(buffer)

    def in_registers(self, buffer: Buffer) -> int:
        """Return the bytes of registers that a buffer takes of all threads together."""
        each = {"fragment": 1, "local": 32 * self.warps}.get(buffer.scope, 0)
        return each and each * _bytes(buffer)

    def op(self, op: RegisteredOp, times: float) -> None:
        """Count a tile op: its accesses to global memory, and its computation."""
        read, written = op.accesses()
        for region in (*read, *written):
            self.move(region.buffer, times * self.elements(region))
        if isinstance(op, Gemm):
            m, n = (self.size(e) for e in op.C.tile_shape[-2:])
            k = self.elements(op.A) / m
            flops = times * 2.0 * m * n * k
            self.work.product_flops += flops
            self.work.products += flops * self.cost(op)
            # Each warp reads the rows and columns of its own part of the result.
            self.work.shared_bytes += times * k * (m + n) * math.sqrt(self.warps) * op.A.buffer.dtype.bits / 8
        else:
            self.work.scalars += times * max((self.elements(r) for r in (*read, *written)), default=0.0)

    def cost(self, op: Gemm) -> float:
        """Return the cost of a product relative to one of 16-bit operands."""
        bits = max(op.A.buffer.dtype.bits, op.B.buffer.dtype.bits)
        if self.target.kind == "cpu":
            return max(1.0, bits / 32)
        return 0.5 if bits <= 8 else 1.0 if bits <= 16 else 16.0 * bits / 32

    def scalars(self, node: Node, times: float) -> None:
        """Count operations and global loads of scalar expressions."""
        for each in walk(node):
            if isinstance(each, Load):
                self.move(each.buffer, times)
            elif isinstance(each, Binary | Call | Cast | Select | Unary):
                self.work.scalars += times

    def move(self, buffer: Buffer, elements: float) -> None:
        """Count the elements that are read from or written to a buffer. On-chip buffers cost nothing here."""
        if buffer.scope == "global":
            moved = self.work.moved
            moved[buffer] = moved.get(buffer, 0.0) + elements * buffer.dtype.bits / 8

    def elements(self, region: Region) -> float:
        """Return the number of elements of a region."""
        return math.prod(self.size(extent) for extent in region.extents)

    def size(self, extent: Expr) -> float:
        """Evaluate an extent, as a number of at least 1."""
        return float(max(1, number(extent, self.values, 1)))


def _bytes(tile: Buffer) -> int:
    """Return the bytes of an on-chip tile."""
    return math.prod(tile.static_shape or (1,)) * tile.dtype.bits // 8


def _known_value(expr: Expr, values: Mapping[Var, Scalar]) -> Scalar | None:
    """Return an expression's value, or None where it does not follow from `values`."""
    try:
        return evaluate(expr, values)
    except (KeyError, ValueError, ZeroDivisionError, OverflowError):
        return None


def number(expr: Expr, values: Mapping[Var, Scalar], otherwise: int) -> int:
    """Evaluate an integer expression, or return `otherwise`."""
    found = _known_value(expr, values)
    return otherwise if found is None else int(found)
