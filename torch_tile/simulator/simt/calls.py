# SPDX-License-Identifier: Apache-2.0
"""Run thread-level intrinsics from their declarations: effects name the elements, meanings compute the results.

An asynchronous copy reads when it starts and lands when its thread waits for its group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import numpy as np

from torch_tile.diagnostics.errors import InternalError, Span
from torch_tile.intrinsics import lookup
from torch_tile.ir.buffer import TensorMap
from torch_tile.ir.expr import Address, Call, Expr
from torch_tile.simulator.simt import values as va
from torch_tile.simulator.simt.memory import Local, Memory, Owner, Shared, Threads, Tile
from torch_tile.simulator.simt.races import WHOLE_WARP, Array, Clock, VectorClock
from torch_tile.simulator.simt.roles import Tasks
from torch_tile.simulator.simt.values import Value

if TYPE_CHECKING:
    from torch_tile.simulator.simt.expressions import Expressions
    from torch_tile.simulator.simt.timeline import Untimed

Run = Callable[[], Value]
Handler = Callable[["Place"], Run]


class State(Protocol):
    """The state that intrinsics of one kind keep while a block runs."""

    def __init__(self, calls: Calls) -> None: ...

    def finish(self) -> None:
        """Report what the end of the block leaves undone."""


S = TypeVar("S", bound=State)


class Calls:
    """Runs the intrinsics of `table` for the running threads of one block."""

    threads: Threads
    shared: Shared
    clock: Clock
    tasks: Tasks
    table: Mapping[str, Handler]

    def __init__(
        self,
        threads: Threads,
        shared: Shared,
        clock: Clock,
        tasks: Tasks,
        table: Mapping[str, Handler],
        timeline: Untimed,
    ):
        self.threads, self.shared, self.clock, self.tasks, self.table = threads, shared, clock, tasks, table
        self.timeline = timeline
        self.reset()

    def reset(self) -> None:
        """Return to the state in which a block begins."""
        self.states: dict[type[State], State] = {}
        self.closed = np.zeros(self.threads.lanes, np.int64)  # groups of copies that each thread closed
        self.copies: list[tuple[Array, Array, Array, Array, Owner]] = []  # address, bytes, thread, its group, tile

    def compile(self, call: Call, expressions: Expressions) -> Run:
        """Return the function that runs `call`."""
        place = Place(self, call, expressions)
        run = self.table[call.name](place)
        return self.timeline.watch(place, run)

    def state(self, kind: type[S]) -> S:
        """Return the state of one kind of intrinsics; each block begins with a new one."""
        if kind not in self.states:
            self.states[kind] = kind(self)
        return cast(S, self.states[kind])

    def finish(self) -> None:
        """Report what each kind of intrinsics finds undone at the end of the block."""
        for state in self.states.values():
            state.finish()

    @property
    def order(self) -> VectorClock:
        """Return the vector clock of a kernel in which roles or engines work at the same time."""
        assert isinstance(self.clock, VectorClock)
        return self.clock

    def together(self, call: Call, span: Span | None) -> Array:
        """Return which warps run, `[warps]`; report warps of which only some threads arrive."""
        threads = self.threads
        if threads.mask is None:
            return np.ones(threads.lanes // 32, bool)
        here = threads.mask.reshape(-1, 32)
        want = np.ones_like(here) if threads.everyone is None else threads.everyone.reshape(-1, 32)
        some = here.any(axis=1)
        torn = some & (here != want).any(axis=1)
        if torn.any():
            warp = int(np.flatnonzero(torn)[0])
            text = f"`{call.name}` is for whole warps; {int(here[warp].sum())} threads of warp {warp}"
            threads.findings.add("deadlock", span, text, int(torn.sum()))
        return some

    def barrier(self, call: Call, span: Span | None) -> None:
        """Let all threads of the block meet; report threads that are missing."""
        threads = self.threads
        if threads.mask is not threads.everyone:
            here = len(threads.active())
            threads.findings.add(
                "deadlock", span, f"`barrier` is for the whole block; {here} of {threads.count} threads"
            )
        threads.findings.barriers += 1
        self.clock.barrier()
        self.timeline.wait(threads.ids, self.timeline.now(threads.ids), "barrier", span)

    def commit(self) -> None:
        """Close the current copy group of each running thread."""
        self.closed[self.threads.active()] += 1

    def wait(self, pending: int) -> None:
        """Land the copies that the running threads wait for: all groups but the newest `pending`."""
        running = np.zeros(self.threads.lanes, bool)
        running[self.threads.active()] = True
        kept = []
        for first, data, who, group, owner in self.copies:
            done = running[who] & (group < self.closed[who] - pending)
            if done.any():
                self.shared.land(first[done], data[done], who[done], owner)
            if not done.all():
                left = ~done
                kept.append((first[left], data[left], who[left], group[left], owner))
        self.copies = kept
        self.shared.flights = len(kept)


class Place:
    """One call in the program, with its operands compiled."""

    calls: Calls
    call: Call
    threads: Threads

    def __init__(self, calls: Calls, call: Call, expressions: Expressions):
        self.calls, self.call, self.threads = calls, call, calls.threads
        self.span: Span | None = call.span or expressions.span
        self.intrinsic = lookup(call.name)
        self.operands: list[Run] = []
        self.compile = expressions.compile
        self.memory: list[Memory | None] = []
        for a in call.args:
            is_address = isinstance(a, Address)
            self.memory.append(expressions.memory[a.buffer] if isinstance(a, Address | TensorMap) else None)
            compiled = (
                expressions.index if is_address else _no_value if isinstance(a, TensorMap) else expressions.compile
            )
            self.operands.append(compiled(a))
        self.counts: dict[int, int] = {access.operand: access.elements for access in self.intrinsic.effects(call)}

    def behind(self, operand: int) -> Memory:
        """Return the memory that an operand addresses."""
        found = self.memory[operand]
        if found is None:
            raise InternalError(f"operand {operand} of {self.call.name} is not an address", self.span)
        return found

    def registers(self, operand: int) -> tuple[Local, int, int]:
        """Return a local operand's memory, first register and count; they are the same for all threads."""
        memory, start = self.behind(operand), self.operands[operand]()
        count = self.counts[operand]
        if not isinstance(memory, Local) or isinstance(start, np.ndarray):
            raise InternalError(f"operand {operand} of {self.call.name} is not made of known registers", self.span)
        if not 0 <= start <= memory.size - count:
            memory.inside(np.array([start]), count, self.span)
            start = 0
        return memory, start, count

    def addresses(self, operand: int, ids: Array) -> Array:
        """Return the element index of each of the threads `ids`; report misaligned accesses."""
        index = self.threads.each(self.operands[operand](), ids)
        memory, count = self.behind(operand), self.counts[operand]
        if isinstance(memory, Local) and self.intrinsic.convergent:  # a matrix arrives in registers of 4 bytes
            count = max(1, 4 // memory.dtype.itemsize)
        memory.aligned(index, count, self.span)
        return index

    def meaning(self, *args: Array) -> Array:
        """Compute the intrinsic's result by its declared meaning."""
        f = self.intrinsic.meaning
        if f is None:
            raise InternalError(f"{self.call.name} has no meaning", self.span)
        return f(*args, self.call.options)


def _no_value(node: Expr) -> Run:
    """Return the value 0 for an operand that has none."""
    return lambda: 0


def _barrier(p: Place) -> Run:
    """Compile a block barrier."""
    return lambda: p.calls.barrier(p.call, p.span)


def _lanes_barrier(p: Place) -> Run:
    """Compile a barrier of the threads of each warp that come together."""
    return lambda: p.calls.clock.warp_barrier(np.unique(p.threads.active() // 32))


def _warp_barrier(p: Place) -> Run:
    """Compile a warp barrier."""
    return lambda: p.calls.clock.warp_barrier(np.flatnonzero(p.calls.together(p.call, p.span)))


def _vector_copy(p: Place) -> Run:
    """Compile vector_copy: each running thread copies several neighbouring elements."""

    def run() -> None:
        ids = p.threads.active()
        to, source = p.behind(0), p.behind(1)
        raw = source.rows(p.addresses(1, ids), p.counts[1], ids, p.span)
        to.put_rows(p.addresses(0, ids), np.ascontiguousarray(raw).view(to.raw_type), ids, p.span)

    return run


def _cp_async(p: Place) -> Run:
    """Compile cp_async: read now, and write to shared memory when the thread waits for the group."""
    size = cast(int, p.call.options[0])

    def run() -> None:
        ids = p.threads.active()
        tile, source, count = cast(Tile, p.behind(0)), p.behind(1), p.counts[1]
        valid = np.clip(p.threads.each(p.operands[2](), ids), 0, size) // source.dtype.itemsize
        data = np.zeros((len(ids), count), source.raw_type)
        index = p.addresses(1, ids)
        for length in np.unique(valid[valid > 0]):
            some = valid == length
            data[some, :length] = source.rows(index[some], int(length), ids[some], p.span)
        where = p.addresses(0, ids)
        ok = tile.inside(where, p.counts[0], p.span)
        if ok is not None:
            ids, where, data = ids[ok], where[ok], data[ok]
        if len(ids):
            first = tile.address(where)
            p.calls.shared.take_off(first, size, ids, tile.owner, p.span)
            tile.note(first, size, ids, "write", p.span)
            p.calls.copies.append((first, data.view(np.uint8), ids, p.calls.closed[ids], tile.owner))

    return run


def _commit(p: Place) -> Run:
    """Compile cp_async_commit."""
    return p.calls.commit


def _wait(p: Place) -> Run:
    """Compile cp_async_wait."""
    pending = cast(int, p.call.options[0])
    return lambda: p.calls.wait(pending)


def _ldmatrix(p: Place) -> Run:
    """Compile ldmatrix: each warp loads matrices from shared memory into registers."""
    lanes = 8 * cast(int, p.call.options[0])  # of each warp give an address

    def run() -> None:
        warps = p.calls.together(p.call, p.span)
        ids = p.threads.ids.reshape(-1, 32)[warps, :lanes].ravel()
        if not len(ids):
            return
        to, source = p.behind(0), cast(Tile, p.behind(1))
        raw = source.rows(p.addresses(1, ids), p.counts[1], ids, p.span, who=WHOLE_WARP + ids // 32)
        found = p.meaning(raw.reshape(-1, lanes, raw.shape[1]))
        who = p.threads.ids.reshape(-1, 32)[warps].ravel()
        flat = np.ascontiguousarray(found).reshape(len(who), -1)
        to.put_rows(p.addresses(0, who), flat.view(to.raw_type), who, p.span)

    return run


def _stmatrix(p: Place) -> Run:
    """Compile stmatrix: each warp stores matrices from registers to shared memory."""
    lanes = 8 * cast(int, p.call.options[0])

    def run() -> None:
        warps = p.calls.together(p.call, p.span)
        who = p.threads.ids.reshape(-1, 32)[warps].ravel()
        if not len(who):
            return
        tile, source = cast(Tile, p.behind(0)), p.behind(1)
        raw = source.rows(p.addresses(1, who), p.counts[1], who, p.span)
        found = np.ascontiguousarray(p.meaning(raw.reshape(-1, 32, raw.shape[1])))
        ids = p.threads.ids.reshape(-1, 32)[warps, :lanes].ravel()
        flat = found.reshape(len(ids), -1).view(tile.raw_type)
        tile.put_rows(p.addresses(0, ids), flat, ids, p.span, who=WHOLE_WARP + ids // 32)

    return run


def _mma(p: Place) -> Run:
    """Compile mma: each warp multiplies fragments in registers and adds the product to its accumulator."""

    def run() -> None:
        warps = p.calls.together(p.call, p.span)
        (d, at, count), *operands = (p.registers(n) for n in range(3))
        wide = np.float64 if d.dtype.is_float else np.int64
        d.need(d.written[at : at + count].reshape(count, -1, 32)[:, warps], p.span)
        a, b = (memory.fragment(start, n).astype(wide) for memory, start, n in operands)
        found = p.meaning(a, b, d.fragment(at, count).astype(wide))
        d.put_fragment(at, va.rounded(found, d.dtype) if d.dtype.is_float else found, warps)

    return run


def _exchange(p: Place) -> Run:
    """Compile a shuffle or vote; its operands have the shape `[warps, 32]`."""
    width = va.carrier(p.call.type)

    def run() -> Value:
        p.calls.together(p.call, p.span)
        args = [p.threads.each(o(), p.threads.ids).reshape(-1, 32) for o in p.operands]
        return np.ascontiguousarray(p.meaning(*args)).reshape(-1).astype(width, copy=False)

    return run


def _dp4a(p: Place) -> Run:
    """Compile a dot product of four bytes."""
    return lambda: p.meaning(*(p.threads.each(o(), p.threads.ids) for o in p.operands))


def _atomic(p: Place) -> Run:
    """Compile an atomic update, which returns the element's value before the update."""
    memory = p.behind(0)

    def run() -> Value:
        ids = p.threads.active()
        index = p.addresses(0, ids)
        value = p.threads.each(p.operands[1](), ids).astype(va.carrier(memory.dtype), copy=False)
        ok = memory.inside(index, 1, p.span)
        if ok is not None:
            index, value, ids = index[ok], value[ok], ids[ok]
        before = _update(p, memory, index, value, ids)
        if p.calls.clock.fenced:
            for n, where in zip(ids.tolist(), index.reshape(len(ids)).tolist(), strict=True):
                p.calls.clock.publish(n, (memory, where))
        return p.threads.spread(before, ids)

    return run


def _atomic_add_vector(p: Place) -> Run:
    """Compile atomic_add_vector: each running thread adds several neighbours, each of them atomically."""
    memory, source, count = p.behind(0), p.behind(1), p.counts[0]

    def run() -> None:
        ids = p.threads.active()
        values = va.decode(source.rows(p.addresses(1, ids), count, ids, p.span), source.dtype)
        index = p.addresses(0, ids)
        ok = memory.inside(index, count, p.span)
        if ok is not None:
            index, values, ids = index[ok], values[ok], ids[ok]
        for n in range(count):
            _update(p, memory, index + n, values[:, n], ids)

    return run


def _update(p: Place, memory: Memory, index: Array, value: Array, ids: Array) -> Array:
    """Update one element for each of the threads `ids`, and return the values before."""
    before = np.zeros(len(ids), va.carrier(memory.dtype))
    for round_ in _rounds(index):
        old = va.decode(memory.peek(index[round_]), memory.dtype)
        before[round_] = old
        memory.poke(index[round_], va.encode(p.meaning(old, value[round_]), memory.dtype))
    memory.touch(index, ids, p.span)
    return before


def _atomic_load(p: Place) -> Run:
    """Compile atomic_load: read one element for each running thread, with no record in the trace."""
    memory = p.behind(0)

    def run() -> Value:
        ids = p.threads.active()
        index = p.addresses(0, ids)
        ok = memory.inside(index, 1, p.span)
        if ok is not None:
            index, ids = index[ok], ids[ok]
        if p.call.options[0] != "relaxed":
            for where in np.unique(index).tolist():
                p.calls.clock.hear(ids[index.reshape(len(ids)) == where], (memory, where))
        return p.threads.spread(va.decode(memory.peek(index), memory.dtype), ids)

    return run


def _memory_fence(p: Place) -> Run:
    """Compile memory_fence: what comes before it is released by later atomic updates."""
    return lambda: p.calls.clock.fence_all(p.threads.active())


def _arrive_last(p: Place) -> Run:
    """Compile arrive_last: count an arrival in memory and tell the thread whether it was the last one."""
    memory = p.behind(0)

    def run() -> Value:
        ids = p.threads.active()
        index, count = p.addresses(0, ids), p.threads.each(p.operands[1](), ids)
        last = np.zeros(len(ids), bool)
        ok = memory.inside(index, 1, p.span)
        inside = range(len(ids)) if ok is None else np.flatnonzero(ok).tolist()
        for n in inside:
            where, final = index[n : n + 1], int(count[n]) - 1
            old = int(va.decode(memory.peek(where), memory.dtype)[0])
            memory.touch(where, ids[n : n + 1], p.span)
            memory.poke(where, va.encode(np.array([0 if old >= final else old + 1]), memory.dtype))
            last[n] = old == final
            p.calls.clock.arrive(ids[n : n + 1], (memory, int(where[0])), bool(last[n]))
        return p.threads.spread(last.astype(va.carrier(p.call.type)), ids)

    return run


def _nothing(p: Place) -> Run:
    """Compile an intrinsic without effect in the simulator."""
    return lambda: None


def _rounds(index: Array) -> list[Array]:
    """Split the positions of `index` into groups without equal indices, in order of appearance."""
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(index) else np.zeros(0, int)
    rank = np.arange(len(index)) - np.repeat(starts, np.diff(np.r_[starts, len(index)]))
    return [order[rank == r] for r in range(int(rank.max(initial=-1)) + 1)]


# Blocks that do not depend on each other; cluster.py has the others.
CLUSTER = "cluster_arrive", "cluster_arrive_relaxed", "cluster_wait"
CALLS: dict[str, Handler] = {
    "barrier": _barrier, "warp_barrier": _warp_barrier,
    "lanes_barrier": _lanes_barrier, "vector_copy": _vector_copy, "cp_async": _cp_async,
    "cp_async_commit": _commit, "cp_async_wait": _wait, "ldmatrix": _ldmatrix, "stmatrix": _stmatrix, "mma": _mma,
    "atomic": _atomic, "atomic_add_vector": _atomic_add_vector, "atomic_load": _atomic_load,
    "memory_fence": _memory_fence, "arrive_last": _arrive_last, "dp4a": _dp4a,
    **dict.fromkeys(("prefetch_map", "set_registers", "grid_wait", "grid_launch", *CLUSTER), _nothing),
    **dict.fromkeys(
        ("shuffle_xor", "shuffle", "shuffle_up", "shuffle_down", "ballot", "vote_any", "vote_all"), _exchange
    ),
}  # fmt: skip
