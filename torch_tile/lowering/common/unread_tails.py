# SPDX-License-Identifier: Apache-2.0
"""Find the ends of tensors that a kernel leaves out, because its blocks or iterations are too few; swapped indices too.

Blocks or iterations take equal steps from the begin of a dimension. What is left behind the last one is shorter than a
step. Or some blocks begin behind the end of another dimension, as where counts are swapped. Each access counts
for the box that holds all of its elements, so that only certain gaps are reported. Only tensors of known sizes are
looked at. Windows whose results lie side by side, as those of pooling, may leave out a rest.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch_tile.diagnostics.errors import Diagnostic, Span, diagnose
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address, Binary, Cast, Const, Expr, Load, Var, is_zero
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.polynomial import structure
from torch_tile.ir.stmt import Alloc, For, Kernel, LoopKind, Program, Stmt, Store
from torch_tile.lowering.common.swapped_indices import swapped_indices
from torch_tile.lowering.common.written_boxes import ONE, InOrder, shifted
from torch_tile.tileop import RegisteredOp

LEAST_WINDOW = 32  # elements for one result; windows of fewer are pooled, and may leave out a rest
LEAST_ROW = 8  # elements between writes of two blocks; records of fewer fields are spelt so


@dataclass(frozen=True)
class Sweep:
    """Equal steps of one value through a dimension: `count` of `step` elements, from the first element on.

    `key` is equal for values of one meaning.
    """

    key: Hashable
    value: Expr
    step: int
    count: int


@dataclass(frozen=True)
class Reach:
    """Which elements one access takes in one dimension: from `begin` to before `end`, in one of these sweeps.

    `is_behind` says that its last box begins behind the end of the tensor.
    """

    begin: int
    end: int
    is_behind: bool
    span: Span | None
    sweeps: tuple[Sweep, ...]


class Ends:
    """How the kernels of a program reach the ends of tensors: whose ends are left out, and whose indices are swapped.

    `cut` has the parameters whose last elements some sweep leaves out, each with its diagnostic.
    """

    def __init__(self, program: Program) -> None:
        self.reads: IdMap[Buffer, list[tuple[Reach, ...]]] = IdMap()  # of each access, its reach in each dimension
        self.writes: IdMap[Buffer, list[tuple[Reach, ...]]] = IdMap()
        self.unknown: IdSet[Buffer] = IdSet()  # with views or pointers
        self.stored: dict[Hashable, int] = {}  # the largest factor by which a value moves writes
        self.counts: dict[Var, Span | None] = {}  # where a block index or a loop's variable has its count
        self.swapped: IdMap[Buffer, Diagnostic] = IdMap()
        self.cut: IdMap[Buffer, Diagnostic] = IdMap()
        self.behind: IdMap[Buffer, Diagnostic] = IdMap()  # reads that find nothing there
        for kernel in program.kernels:
            _Accesses(kernel, self)
        for buffer in program.params:
            if isinstance(buffer, Buffer) and (found := self.tail_of(buffer)) is not None:
                self.cut[buffer] = found

    def diagnostics(self) -> list[Diagnostic]:
        """Return a diagnostic for each tensor whose indices are swapped, or whose end another line leaves out."""
        lines = {each.span for each in self.swapped.values()}
        rest = *self.cut.values(), *self.behind.values()
        return [*self.swapped.values(), *(each for each in rest if each.span not in lines)]

    def tail_of(self, buffer: Buffer) -> Diagnostic | None:
        """Return a diagnostic for the first dimension of a tensor whose end an access leaves out.

        Another access may read the end, from the begin on: of two passes over a row, one is too short.
        """
        sizes = buffer.static_shape
        if sizes is None or 0 in sizes or buffer in self.unknown:
            return None
        is_written = buffer in self.writes
        reaches = (self.writes if is_written else self.reads).get(buffer, [])
        behind = [d for d in range(len(sizes)) if reaches and all(each[d].is_behind for each in reaches)]
        for dim, size in enumerate(sizes if reaches else ()):
            for last, sweep in ((each[dim], sweep) for each in reaches for sweep in each[dim].sweeps):
                end = last.end
                if any(each[dim].end > end and (each[dim].begin > 0 or is_written) for each in reaches):
                    continue  # another access takes the rest
                is_short = size - end < sweep.step and not self._may_end(sweep, is_written)
                if sweep.count * sweep.step == end < size and (is_short or behind):
                    part = (
                        f"{buffer.name}[{', '.join(f'{end}:{size}' if d == dim else ':' for d in range(len(sizes)))}]"
                    )
                    return self._diagnostic(part, last.span, sweep, size, is_written, behind)
        return None

    def _diagnostic(
        self, part: str, span: Span | None, sweep: Sweep, size: int, is_written: bool, behind: Sequence[int]
    ) -> Diagnostic:
        """Return the diagnostic for a part of a tensor that a sweep leaves out."""
        count = self.counts.get(sweep.value) if isinstance(sweep.value, Var) else None
        notes = [(count, f"`{sweep.value!r}` takes {sweep.count} values here")] if count else []
        beyond = "writes behind the end are dropped" if is_written else "reads behind the end give 0"
        fix = f"round the count of blocks or iterations up, T.ceildiv({size}, {sweep.step}): {beyond}; "
        fix += "or give the kernel the part that is meant"
        if behind:
            fix = f"others begin behind the end of dimension {behind[0]}: swap their counts, their names or the indices"
        return diagnose(
            "unread_tail", span, notes, part=part, verb="written" if is_written else "read", size=size,
            value=repr(sweep.value), count=sweep.count, step=sweep.step, fix=fix,
        )  # fmt: skip

    def _may_end(self, sweep: Sweep, is_written: bool) -> bool:
        """Return whether a sweep may mean to leave out a rest."""
        if is_written:
            return sweep.step < LEAST_ROW
        factor = self.stored.get(sweep.key)
        return factor is not None and sweep.step < LEAST_WINDOW * factor


class _Accesses(InOrder):
    """Add what one kernel reads and writes."""

    def __init__(self, kernel: Kernel, tensors: Ends) -> None:
        self.tensors = tensors
        self.runs = not any(is_zero(extent) for extent in kernel.grid)
        tensors.counts.update(dict.fromkeys(kernel.blocks, kernel.span))
        super().__init__(kernel)

    def visit_Alloc(self, node: Alloc) -> Stmt:
        """Pass by tiles."""
        return node

    def visit_Address(self, node: Address) -> Any:
        """Know nothing of what a pointer leads to."""
        self.tensors.unknown.add(node.buffer.base or node.buffer)
        return self.children(node)

    def visit_For(self, loop: For) -> Stmt:
        """Keep where the loop's variables have their counts."""
        self.tensors.counts.update(dict.fromkeys(loop.vars, loop.span))
        return super().visit_For(loop)

    def visit_RegisteredOp(self, op: RegisteredOp) -> Stmt:
        """Look at what a tile op reads and writes."""
        reads, writes = op.accesses()
        for region in reads:
            self._access(op.span, region.buffer, region.starts, region.extents, self.tensors.reads)
        for region in writes:
            self._access(op.span, region.buffer, region.starts, region.extents, self.tensors.writes)
        return self.children(op)

    def visit_Load(self, load: Load) -> Any:
        """Look at the read of an element."""
        self._access(load.span, load.buffer, load.indices, [ONE] * len(load.indices), self.tensors.reads)
        return self.children(load)

    def visit_Store(self, store: Store) -> Stmt:
        """Look at the write of an element."""
        self._access(store.span, store.buffer, store.indices, [ONE] * len(store.indices), self.tensors.writes)
        return self.children(store)

    def _access(
        self,
        span: Span | None,
        buffer: Buffer,
        starts: Sequence[Expr],
        extents: Sequence[Expr],
        kind: IdMap[Buffer, list[tuple[Reach, ...]]],
    ) -> None:
        """Keep the reach of an access to a tensor."""
        if buffer.scope != "global":
            return
        if buffer.base is not None:
            self.tensors.unknown.add(buffer.base)
        sizes = buffer.static_shape
        if sizes is None:
            return
        if self.runs and buffer not in self.tensors.swapped:
            found = swapped_indices(span, buffer, starts, extents, self)
            if found is not None:
                self.tensors.swapped[buffer] = found
        if self.runs and kind is self.tensors.reads and buffer not in self.tensors.behind:
            self._look_behind(span, buffer, starts, extents)
        box = self.outer.may_touch(starts, extents, sizes)
        reaches = []
        for start, extent, size, (low, end) in zip(starts, extents, sizes, box, strict=True):
            sweeps = tuple(self._sweeps(start)) if isinstance(extent, Const) else ()
            is_idle = any(sweep.count == 0 for sweep in sweeps)
            begin = sum((sweep.count - 1) * sweep.step for sweep in sweeps if sweep.step > 1)
            is_behind = begin >= size and self.is_exact(start) and not self.outer.ranges.prove(start < size)
            reaches.append(Reach(low, 0 if is_idle else end, is_behind and not is_idle, span, sweeps))
            if kind is self.tensors.writes:
                for sweep in sweeps:
                    self.tensors.stored[sweep.key] = max(self.tensors.stored.get(sweep.key, 0), sweep.step)
        kind.setdefault(buffer, []).append(tuple(reaches))

    def _look_behind(self, span: Span | None, buffer: Buffer, starts: Sequence[Expr], extents: Sequence[Expr]) -> None:
        """Report reads of an element behind the last one, and loops whose reads are half outside."""
        known, serial = self.outer.ranges, [loop for loop in self.outer.loops if loop.kind is not LoopKind.PARALLEL]
        for start, extent, size in zip(starts, extents, buffer.static_shape or (), strict=True):
            if not self.is_exact(start):
                continue
            text = repr(start)
            var, offset = shifted(start)
            is_next = offset > 0 and var is not None and known.interval(var).high == size - 1 and extent is ONE
            if is_next and buffer.dtype.is_integer and len(serial) == len(self.outer.loops):
                where = f"{var!r} = {size - 1}"
                self.tensors.behind[buffer] = diagnose(
                    "behind_end", span, buffer=buffer.name, index=text, where=where, size=size
                )
                return
            for sweep in self._sweeps(start):
                loop = next((each for each in serial if any(v is sweep.value for v in each.vars)), None)
                inside = max(-(-size // sweep.step), 1)
                if loop is not None and sweep.count >= 2 * inside and (sweep.count - 1) * sweep.step >= size:
                    self.tensors.behind[buffer] = diagnose(
                        "past_end", span, [(loop.span, "the loop begins here")], buffer=buffer.name, index=text,
                        value=repr(sweep.value), count=sweep.count, size=size, inside=inside,
                    )  # fmt: skip
                    return

    def _sweeps(self, start: Expr) -> Iterator[Sweep]:
        """Yield the values that move an index forward from 0 on."""
        factors: dict[Hashable, tuple[Expr, int]] = {}
        for value, factor in self._terms(start, 1):
            key = structure(self.values.get(value, value) if isinstance(value, Var) else value)
            factors[key] = value, factors.get(key, (value, 0))[1] + factor
        for key, (value, factor) in factors.items():
            known = self.outer.ranges.interval(value)
            if factor > 0 and known.low == 0 and isinstance(known.high, int):
                yield Sweep(key, value, factor, max(known.high + 1, 0))

    def _terms(self, value: Expr, factor: int) -> Iterator[tuple[Expr, int]]:
        """Yield the terms of an index, but for numbers, each with its constant factor."""
        if isinstance(value, Binary) and value.op in ("+", "-"):
            yield from self._terms(value.a, factor)
            yield from self._terms(value.b, factor if value.op == "+" else -factor)
        elif isinstance(value, Binary) and value.op == "*" and isinstance(value.b, Const):
            yield from self._terms(value.a, factor * int(value.b.value))
        elif isinstance(value, Binary) and value.op == "*" and isinstance(value.a, Const):
            yield from self._terms(value.b, factor * int(value.a.value))
        elif isinstance(value, Cast) and value.a.dtype.is_integer:
            yield from self._terms(value.a, factor)
        elif isinstance(value, Var) and _is_sum(self.values.get(value)):
            yield from self._terms(self.values[value], factor)
        elif not isinstance(value, Const):
            yield value, factor


def _is_sum(value: Expr | None) -> bool:
    """Return whether a value has terms of its own."""
    return isinstance(value, Var | Cast) or (isinstance(value, Binary) and value.op in ("+", "-", "*"))
