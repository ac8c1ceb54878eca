# SPDX-License-Identifier: Apache-2.0
"""Run a kernel tile by tile on torch tensors; its results are the reference for every target.

Blocks run one after another, x fastest; linked blocks of a cluster run together. Statements run in order, tile ops
through their `evaluate`. A T.Parallel nest with independent iterations is computed side by side, each loop variable an
index tensor; other nests run in order (nests.py). Inside a nest, conditions become masks. Reads of global memory
outside its bounds give 0 and writes are dropped; on chip that is the error `out_of_bounds`. Each operation on scalars
gives a value of its own dtype (simulator/values.py); a store rounds to the buffer's dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_tile.diagnostics.errors import Diagnostic, TileError, diagnose, error
from torch_tile.intrinsics import foreign, lookup
from torch_tile.intrinsics.base import intrinsic_of
from torch_tile.intrinsics.traits import Sync
from torch_tile.ir import stmt as st
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.dtype import DType, int64, rounded_tensor
from torch_tile.ir.expr import Call, Expr, Load
from torch_tile.ir.node import Node, find, walk
from torch_tile.simulator.interpret import bind
from torch_tile.simulator.memory import Index, Storage, lane_ids, poisoned, tensor_at
from torch_tile.simulator.simt.cluster import concurrent_blocks
from torch_tile.simulator.tile.cluster import ClusterRun, at_rank, store_at_rank
from torch_tile.simulator.tile.expressions import Expressions, atomic, atomic_load, foreign_value
from torch_tile.simulator.tile.nests import Plan, Watch, is_nest, plan, written
from torch_tile.simulator.values import Value, both, some, wrap


def evaluate(program: Any, *args: Any, **named: Any) -> tuple[torch.Tensor, ...]:
    """Run a Program (or a T.prim_func) and return the tensors that it allocates and returns.

    Arguments are CPU tensors and numbers, in the order of the parameters or by name. One sequence or dict may hold all
    of them. Tensors that the kernel writes are changed in place. A written tensor must not overlap another argument.
    Raises LaunchError for unfit arguments. Raises TileError for faults of the kernel: `out_of_bounds`, `device_assert`,
    `unwritten`, and those that a tile op's check finds.
    """
    program = getattr(program, "program", program)
    given: Sequence[Any] | Mapping[str, Any] = args
    if len(args) == 1 and not named and isinstance(args[0], Mapping | list | tuple):
        given = args[0]
    elif named:
        given = {p.name: a for p, a in zip(program.params, args, strict=False)} | named
    return Tiles().run(program, given)


def _nothing(tensor: torch.Tensor) -> torch.Tensor:
    """Return the marks of a tensor of which no element was written."""
    return torch.zeros(tensor.shape, dtype=torch.bool)


def needs_threads(kernel: st.Kernel) -> list[Diagnostic]:
    """Return a diagnostic if a kernel names the running thread or has roles, as a tile has no threads."""
    target = "the interpreter of tiles"
    role = next(find(kernel, st.Role), None)
    if role is not None:
        what = "T.ws, or a branch by the thread's number," if role.by_hand else "T.role"
        fix = "let all threads do the same, or compile for a CUDA target and run its `interpret`"
        return [diagnose("unsupported_on_target", role.span, what=what, target=target, fix=fix)]
    if kernel.thread is None or not any(n is kernel.thread or _is_exchange(n) for n in walk(kernel.body)):
        return []
    fix = "write T.Parallel, or compile for a CUDA target and run its `interpret`"
    return [diagnose("unsupported_on_target", kernel.span, what="T.get_thread_binding", target=target, fix=fix)]


def _is_exchange(node: Node) -> bool:
    """Return whether a node exchanges values between the lanes of a warp."""
    intrinsic = lookup(node.name) if isinstance(node, Call) else None
    return intrinsic is not None and intrinsic.convergent == "warp" and intrinsic.meaning is not None


class _Break(Exception):
    """Raised by `break` and caught by the loop."""


class _Continue(Exception):
    """Raised by `continue` and caught by the loop."""


class _InOrder(Exception):
    """Raised while lanes run side by side, by a statement that needs one iteration after another."""


class Tiles(Expressions):
    """A run of a program; also the `Env` that tile ops see."""

    def __init__(self) -> None:
        super().__init__()
        self.loop_mask: torch.Tensor | None = None
        self.plans: dict[st.For, Plan] = {}
        self.undo: list[tuple[Storage, Index, torch.Tensor, torch.Tensor | None]] = []
        self.cluster_run: ClusterRun | None = None  # the cluster's blocks, where they run together

    def run(self, program: st.Program, args: Sequence[Any] | Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Check the tile ops, bind the arguments, run every kernel, return the outputs."""
        found = [d for n in walk(program) if isinstance(n, st.TileOp) for d in n.check()]
        found += [d for kernel in program.kernels for d in needs_threads(kernel)]
        if found:
            raise TileError(*found)
        tensors, self.values = bind(program, args)
        for param in (p for p in program.params if isinstance(p, Buffer)):
            self.memory[param] = Storage(param, tensors[param])
        for buffer in (*program.workspaces, *program.outputs):
            tensors[buffer] = poisoned([self.size(s) for s in buffer.shape], buffer.dtype)
            self.memory[buffer] = Storage(buffer, tensors[buffer], written=_nothing(tensors[buffer]))
        for view in program.views:
            assert view.base is not None
            shape, written = [self.size(n) for n in view.shape], self.memory[view.base].written
            written = None if written is None else written.view(shape)
            self.memory[view] = Storage(view, tensors[view.base].view(shape), written=written)
        for kernel in program.kernels:
            for points in concurrent_blocks(kernel, [self.size(n) for n in kernel.grid], None):
                blocks = [self._block_state(kernel, point) for point in points]
                if len(blocks) == 1:
                    blocks[0].block(kernel.body)
                else:
                    cluster_run = ClusterRun(blocks)
                    for block in blocks:
                        block.cluster_run = cluster_run
                    cluster_run.run(kernel.body)
        return tuple(tensors[buffer] for buffer in program.outputs)

    def _block_state(self, kernel: st.Kernel, point: Sequence[int]) -> Tiles:
        """Return the state of one block of the kernel before it runs."""
        block = Tiles()
        block.memory, block.plans, block.constants = dict(self.memory), self.plans, self.constants
        block.values = self.values | dict(zip(kernel.blocks, point, strict=True))
        return block

    # Env: what tile ops ask.

    def read(self, region: Region) -> torch.Tensor:
        """Copy a region, one dimension per buffer dimension; global elements outside the buffer read 0."""
        storage, starts, extents = self._box(region)
        if storage.lacks_box(starts, extents):
            self.unwritten(region.buffer, self.span)
        return storage.read_box(starts, extents)

    def write(self, region: Region, tile: torch.Tensor) -> None:
        """Overwrite the region with a tile of its shape; global elements outside the buffer are dropped."""
        storage, starts, _ = self._box(region)
        storage.write_box(starts, tile)

    def extents(self, region: Region) -> list[int]:
        """Return the region's extents, one per buffer dimension."""
        return [self.size(e) for e in region.extents]

    def value(self, expr: Expr) -> Any:
        """Compute a scalar expression as a Python number."""
        found = self.expr(expr)
        return found.item() if isinstance(found, torch.Tensor) else found

    def size(self, expr: Expr) -> int:
        """Compute an integer expression as a Python int."""
        (found,) = self.in_width(True, expr)
        if isinstance(found, torch.Tensor):
            raise _InOrder
        return int(found)

    def full(self, shape: Sequence[int], value: Any, dtype: DType) -> torch.Tensor:
        """Return a constant tile."""
        one = torch.tensor(value if dtype.is_float else wrap(int(value), int64), dtype=self.wide(dtype))
        rounded: torch.Tensor = rounded_tensor(one, dtype)
        return rounded.expand(tuple(shape)).clone()

    def wide(self, dtype: DType) -> torch.dtype:
        """Return the dtype in which values of a dtype are computed: float64 for floats, int64 for integers."""
        return torch.float64 if dtype.is_float else torch.int64

    def _box(self, region: Region) -> tuple[Storage, list[int], list[int]]:
        """Return the storage, starts and extents of a region."""
        storage = self.memory[region.buffer]
        starts, extents = [self.size(s) for s in region.starts], self.extents(region)
        if region.buffer.scope != "global":
            for dim, (start, extent, size) in enumerate(zip(starts, extents, storage.shape, strict=True)):
                if start < 0 or start + extent > size:
                    self.out_of_bounds(region.buffer, dim, f"{start}:{start + extent}", self.span or region.span)
        return storage, starts, extents

    # Statements.

    def block(self, block: st.Block) -> None:
        """Run statements in order."""
        for stmt in block.stmts:
            self.span = stmt.span
            if isinstance(stmt, st.TileOp):
                if self.lanes:
                    raise _InOrder
                stmt.evaluate(self)
            else:
                method = self.method_of(stmt)
                assert method is not None, f"the tile interpreter met {type(stmt).__name__}"
                method(stmt)

    visit_Block = block

    def visit_Let(self, node: st.Let) -> None:
        """Give a value a name."""
        if self.is_from_indices(node.value):
            self.is_from_indices.names.add(node.var)
        self.values[node.var] = self.expr(node.value)

    def visit_Alloc(self, node: st.Alloc) -> None:
        """Allocate a buffer, or find the tensor at an address."""
        if node.buffer.scope == "global":
            self._find_tensor(node)
            return
        shape = [*self.lanes, *(self.size(s) for s in node.buffer.shape)]
        fresh = poisoned(shape, node.buffer.dtype)
        has_values = node.init is not None or node.buffer.scope == "barrier"
        storage = Storage(node.buffer, fresh, self.lanes, None if has_values else _nothing(fresh))
        self.memory[node.buffer] = storage
        if node.init is not None:
            storage.raw[...] = storage.bits_of(self.expr(node.init))

    def _find_tensor(self, node: st.Alloc) -> None:
        """Find the tensor at the address that the kernel computes."""
        buffer = node.buffer
        if self.lanes or node.init is None:
            raise _InOrder
        shape = [self.size(n) for n in buffer.shape]
        steps = None if buffer.strides is None else [self.size(n) for n in buffer.strides]
        found = tensor_at(int(self.value(node.init)), shape, steps, buffer.dtype)
        self.memory[buffer] = Storage(buffer, found)

    def visit_Store(self, node: st.Store) -> None:
        """Run a store."""
        self.put(node, self.memory[node.buffer], self.expr(node.value))

    def put(self, node: Load | st.Store, storage: Storage, value: Value) -> None:
        """Write a value where `node` says, in the active lanes."""
        index, found = self._place(storage, node)
        active = both(self.mask, found)
        if some(True if active is None else active):
            self._write(node.buffer, storage, index, storage.bits_of(value), None if active is True else active)

    def _write(
        self, buffer: Buffer, storage: Storage, index: Index, bits: torch.Tensor, active: torch.Tensor | None
    ) -> None:
        """Write elements; while a nest is on trial, save the old values so that they can be restored."""
        if self.lanes:
            head = torch.as_tensor(index[0]).expand(self.lanes)
            index, bits = (head, *index[1:]), bits.expand(self.lanes)
            for watch in self.watches:
                if buffer in watch.targets:
                    watch.note(storage, index, self.lanes, active, write=True)
            if active is not None:
                active = active.expand(self.lanes)
                bits = bits[active]
                index = tuple(i.expand(self.lanes)[active] if isinstance(i, torch.Tensor) else i for i in index)
        if self.watches:
            marks = None if storage.written is None else storage.written[index].clone()
            self.undo.append((storage, index, storage.raw[index].clone(), marks))
        storage.raw[index] = bits
        if storage.written is not None:
            storage.written[index] = True

    def visit_Do(self, node: st.Do) -> None:
        """Run a call for its effect."""
        found = intrinsic_of(node)
        if found is None or not (found.idle or found.sync is Sync.FENCE):
            self.expr(node.call)
        elif found.name == "cluster_wait" and self.cluster_run is not None:
            self.cluster_run.wait()

    def visit_Call(self, node: Call) -> Value:
        """Compute a call."""
        if node.name == "at_rank" and self.cluster_run is not None:
            return at_rank(node, self.cluster_run, self)
        if node.name == "store_at_rank" and self.cluster_run is not None:
            if self.lanes:
                raise _InOrder
            return store_at_rank(node, self.cluster_run, self)
        if node.name == "atomic":
            if self.lanes:
                raise _InOrder
            return atomic(node, self)
        if node.name == "atomic_load":
            return atomic_load(node, self)
        if node.name == foreign.NAME:
            if self.lanes:
                raise _InOrder
            return foreign_value(node, self)
        return super().visit_Call(node)

    def visit_Assert(self, node: st.Assert) -> None:
        """Run an assertion."""
        holds = self.expr(node.condition)
        failed = both(self.mask, ~holds if isinstance(holds, torch.Tensor) else not holds)
        if some(failed):
            raise error("device_assert", node.span, message=node.message)

    def visit_Print(self, node: st.Print) -> None:
        """Run a print."""
        if self.lanes:
            raise _InOrder
        if node.value is None:
            print(node.message)
            return
        shown = self.read(node.value) if isinstance(node.value, Region) else self.value(node.value)
        print(f"{node.message}: {shown}" if node.message else shown)

    def visit_If(self, node: st.If) -> None:
        """Run a branch."""
        condition = self.expr(node.condition)
        if not isinstance(condition, torch.Tensor):
            self.block(node.then if condition else node.otherwise)
            return
        outer = self.mask
        for mask, body in ((both(outer, condition), node.then), (both(outer, ~condition), node.otherwise)):
            if body.stmts and some(mask):
                self._masked(mask, body)

    def _masked(self, mask: Value, body: st.Block) -> None:
        """Run a body for the lanes of a mask."""
        outer = self.mask
        self.mask = mask if isinstance(mask, torch.Tensor) else outer
        try:
            self.block(body)
        finally:
            self.mask = outer

    def visit_Break(self, node: st.Break) -> None:
        """Leave the loop."""
        self._leave(_Break)

    def visit_Continue(self, node: st.Continue) -> None:
        """End the iteration."""
        self._leave(_Continue)

    def _leave(self, word: type[Exception]) -> None:
        """Raise `word` if all lanes of the loop leave it together; else ask for a run in order."""
        raise word if self.mask is self.loop_mask else _InOrder

    # Loops.

    def visit_For(self, loop: st.For) -> None:
        """Run a loop."""
        if is_nest(loop):
            self._nest(loop)
            return
        start, stop = self.in_width(True, loop.starts[0], loop.stops[0])
        if not isinstance(start, torch.Tensor) and not isinstance(stop, torch.Tensor):
            for number in range(start, stop, loop.step):
                self.values[loop.vars[0]] = number
                if not self._iteration(loop.body, self.mask):
                    return
            return
        outer = self.mask
        for trip in itertools.count():  # each lane has its own bounds
            number = start + trip * loop.step
            active = both(outer, number < stop)
            self.values[loop.vars[0]] = number
            if not some(active) or not self._iteration(loop.body, active):
                return

    def visit_While(self, node: st.While) -> None:
        """Run a loop with a condition."""
        outer = self.mask
        while True:
            active = both(outer, self._under(outer, node.condition))  # type: ignore[arg-type]
            if not some(active) or not self._iteration(node.body, active):
                return
            outer = active if isinstance(active, torch.Tensor) else outer

    def _iteration(self, body: st.Block, mask: Value) -> bool:
        """Run a loop body once; return False if it breaks."""
        outer, outer_loop = self.mask, self.loop_mask
        self.mask = self.loop_mask = mask if isinstance(mask, torch.Tensor) else outer
        try:
            self.block(body)
        except _Continue:
            pass
        except _Break:
            return False
        finally:
            self.mask, self.loop_mask = outer, outer_loop
        return True

    def _nest(self, loop: st.For) -> None:
        """Run a T.Parallel nest: side by side if that gives the same results, else in order."""
        ranges = [range(self.size(a), self.size(b)) for a, b in zip(loop.starts, loop.stops, strict=True)]
        if not all(ranges):
            return
        how = self.plans.get(loop) or plan(loop)
        if how is not Plan.ORDERED and self._run_at_once(loop, ranges, how):
            self.plans[loop] = how
            return
        self.plans[loop] = Plan.ORDERED
        for point in itertools.product(*ranges):
            self.values |= zip(loop.vars, point, strict=True)
            if not self._iteration(loop.body, self.mask):
                return

    def _run_at_once(self, loop: st.For, ranges: Sequence[range], how: Plan) -> bool:
        """Run all iterations at once; return False, with nothing changed, if iterations depend on each other."""
        state = self.lanes, self.mask, self.loop_mask
        extents = [len(r) for r in ranges]
        ids = lane_ids(extents, after=len(self.lanes))
        self.values |= {v: i + r.start for v, i, r in zip(loop.vars, ids, ranges, strict=True)}
        watch = Watch(written(loop), extents, self.lanes) if how is Plan.UNSURE else None
        self.watches += [watch] if watch else []
        mark = len(self.undo)
        self.lanes = (*extents, *self.lanes)
        try:
            self.block(loop.body)
        except (_InOrder, _Break, _Continue, TileError):
            # Lanes side by side may meet an error that iterations in order would not; the run in order decides.
            if watch is None:
                raise
            fits = False
        else:
            fits = watch is None or not watch.found_conflict()
        finally:
            self.lanes, self.mask, self.loop_mask = state
            if watch:
                self.watches.remove(watch)
        if not fits:
            for storage, index, old, marks in reversed(self.undo[mark:]):
                storage.raw[index] = old
                if storage.written is not None and marks is not None:
                    storage.written[index] = marks
        if not fits or not self.watches:
            del self.undo[mark:]
        return fits
