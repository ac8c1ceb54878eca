# SPDX-License-Identifier: Apache-2.0
"""Define the context in which a tile op is laid out and lowered for the threads of a block.

`Demand` is an op's demand on a buffer. `Layouts` holds the decisions so far, `ThreadContext` is the group of threads
that runs the op.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import Span
from torch_tile.hardware import Target
from torch_tile.ir import dtype as dt
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.dtype import DType
from torch_tile.ir.expr import Expr, Var, const
from torch_tile.ir.layout import Layout
from torch_tile.ir.stmt import For, Role


@dataclass(frozen=True)
class Demand:
    """A tile op's demand that `buffer` has `layout`, by reason `why`; `required` if it has no other way."""

    buffer: Buffer
    layout: Layout
    required: bool
    why: str
    span: Span | None = None


class Layouts:
    """The layouts decided so far, each with the demand that decided it. Buffers are looked up by identity."""

    def __init__(self) -> None:
        self._decided: dict[Buffer, Demand] = {}

    def get(self, buffer: Buffer) -> Layout | None:
        """Return the layout of `buffer`, or None if it is still open."""
        decided = self._decided.get(buffer)
        return buffer.layout if decided is None else decided.layout

    def reason(self, buffer: Buffer) -> Demand | None:
        """Return the demand that decided the layout of `buffer`."""
        return self._decided.get(buffer)

    def decide(self, demand: Demand) -> None:
        """Fix a layout; a later demand for the same buffer replaces an earlier one."""
        self._decided[demand.buffer] = demand

    def __iter__(self) -> Iterator[Demand]:
        """Iterate over all decisions, in the order in which they were first made."""
        return iter(self._decided.values())


def role_context(role: Role, build: Build, thread: Expr, ranges: Ranges, values: Mapping[Var, Expr]) -> ThreadContext:
    """Return the context of a role's threads, counted from 0; `thread` is the running thread's index in the block."""
    own = thread - role.first if role.first else thread
    return ThreadContext(build, own, role.count, ranges, values, asynchronous=role.first % 128 == 0)


@dataclass
class ThreadContext:
    """The group of `count` threads that runs an op: `thread` is the running thread's index in it.

    `ranges` is what is known of variables where the op stands, `values` are the integer names bound there.
    `asynchronous` threads are a role beside one that copies: what they multiply comes by bulk copies.
    `unrolled` are the unrolled loops around. `parted` says that only some of the threads come by:
    `comers`, if these are known before the kernel runs.
    """

    build: Build
    thread: Expr
    count: int
    ranges: Ranges
    values: Mapping[Var, Expr] = field(default_factory=dict)
    _registers: dict[Buffer, Buffer] = field(default_factory=dict)
    asynchronous: bool = False
    unrolled: tuple[For, ...] = ()
    parted: bool = False
    comers: tuple[int, ...] = ()

    @property
    def target(self) -> Target:
        """Return the target that is compiled for."""
        return self.build.target

    def registers(self, fragment: Buffer) -> Buffer:
        """Return this thread's part of `fragment`, a 1-D local array indexed by the layout's "r" offset."""
        found = self._registers.get(fragment)
        if found is None:
            assert fragment.layout is not None, f"`{fragment.name}` has no layout"
            found = self.local(fragment.name, fragment.layout.extent("r"), fragment.dtype)
            shape = fragment.static_shape
            if shape is not None and shape != fragment.layout.shape:
                found = replace(found, padding=fragment.layout.padding(shape))
            self._registers[fragment] = found
        return found

    def at(self, ranges: Ranges, values: Mapping[Var, Expr]) -> ThreadContext:
        """Return the same threads at another point of the kernel."""
        return replace(self, ranges=ranges, values=values)

    def local(self, name: str, size: int, dtype: DType) -> Buffer:
        """Create a fresh array of each thread; the caller puts its Alloc into the statements it returns."""
        return Buffer(name, (const(size, dt.int32),), dtype, "local")

    def shared(self, name: str, shape: tuple[int, ...], dtype: DType) -> Buffer:
        """Create a fresh row-major tile in shared memory; the caller puts its Alloc into the statements it returns."""
        return Buffer(name, tuple(const(size, dt.int32) for size in shape), dtype, "shared")
