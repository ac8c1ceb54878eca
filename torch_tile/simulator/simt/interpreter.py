# SPDX-License-Identifier: Apache-2.0
"""Run a GPU kernel thread by thread on the CPU, and report races and missing waits or fences.

The interpreter runs the flat thread-level IR. All threads of a block run at once on NumPy arrays under a mask. Blocks
run one after another, x fastest. The threads of a role (thread_roles) run at once, roles by turns. Linked blocks of a
cluster are tasks like roles; their thread numbers and places of shared memory follow one another. Each node is compiled
once into a function. A mistake becomes a finding, and the run goes on, with the next block if threads wait for ever.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from torch_tile.diagnostics.errors import InternalError
from torch_tile.intrinsics import foreign
from torch_tile.ir import stmt as st
from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Expr, Var, binary
from torch_tile.ir.node import Visitor, walk
from torch_tile.simulator.findings import Findings
from torch_tile.simulator.memory import tensor_at
from torch_tile.simulator.simt.barriers import BARRIERS, MEETINGS, Barriers
from torch_tile.simulator.simt.bulk import BULK
from torch_tile.simulator.simt.calls import CALLS, Calls
from torch_tile.simulator.simt.cluster import CLUSTER, Cluster, concurrent_blocks, is_linked
from torch_tile.simulator.simt.expressions import Expressions, Fixed
from torch_tile.simulator.simt.foreign import run_foreign
from torch_tile.simulator.simt.matmuls import Accumulators
from torch_tile.simulator.simt.memory import Global, Local, Memory, Shared, Threads, Tile, Variable
from torch_tile.simulator.simt.prescan import (
    barrier_groups,
    is_concurrent,
    leaves,
    parts_warps,
    product_registers,
    shared_size,
    writes,
)
from torch_tile.simulator.simt.races import Clock, OrderedTrace, Trace, VectorClock
from torch_tile.simulator.simt.roles import Stuck, Task, Tasks
from torch_tile.simulator.simt.timeline import UNTIMED, Step, Untimed
from torch_tile.simulator.simt.values import Value
from torch_tile.simulator.simt.wgmma import WGMMA

CONCURRENT = MEETINGS | BARRIERS | BULK | WGMMA
MOST_ITERATIONS = 1_000_000  # of a `while`


def run_threads(
    program: st.Program,
    tensors: Mapping[Buffer, torch.Tensor],
    values: Mapping[Var, Any],
    blocks: Iterable[tuple[int, ...]] | None = None,
    timeline: Untimed = UNTIMED,
) -> Findings:
    """Run a program of stage FLAT on CPU tensors.

    `tensors` holds the tensors of buffers, `values` the values of dimensions and scalar parameters. `blocks` chooses
    blocks, x first; None runs all. With a `timeline`, which gives the events of one block times, races of tensors are
    not looked for. Tensors are written in place. Raises InternalError for IR of another stage.
    """
    findings = Findings()
    with np.errstate(all="ignore"):
        for kernel in program.kernels:
            machine = _Machine(program, kernel, tensors, values, findings, timeline)
            for together in concurrent_blocks(kernel, [int(evaluate(n, values)) for n in kernel.grid], blocks):
                machine.run(together)
    return findings


def _common_number(value: Any) -> int:
    """Return the number that all running threads have."""
    return int(value.flat[0]) if isinstance(value, np.ndarray) else int(value)


class _Machine(Visitor):
    """One kernel, compiled so that its blocks can run."""

    def __init__(
        self,
        program: st.Program,
        kernel: st.Kernel,
        tensors: Mapping[Buffer, torch.Tensor],
        values: Mapping[Var, Any],
        findings: Findings,
        timeline: Untimed = UNTIMED,
    ):
        self.kernel, self.findings, self.timeline = kernel, findings, timeline
        self.linked = is_linked(kernel)
        blocks = math.prod(kernel.cluster) if self.linked else 1
        self.threads = Threads(math.prod(kernel.threads), findings, blocks)
        concurrent = self.linked or is_concurrent(kernel)
        self.clock = VectorClock(self.threads.lanes, self.threads.of_block) if concurrent else Clock()
        self.shared = Shared(*shared_size(kernel), findings, self.trace, blocks)
        self.tasks = Tasks(self.saved, self.restore)
        table = CALLS | (CONCURRENT if concurrent else {}) | (CLUSTER if self.linked else {})
        table[foreign.NAME] = run_foreign
        self.calls = Calls(self.threads, self.shared, self.clock, self.tasks, table, timeline)
        timeline.begin(self.threads)
        self.products = set(product_registers(kernel))
        self.values: dict[Var, Value] = {**values}
        self.memory: dict[Buffer, Memory] = {}
        for buffer in (*program.params, *program.workspaces, *program.outputs):
            if isinstance(buffer, Buffer):
                self.memory[buffer] = self.tensor(buffer, tensors[buffer])
        self.expressions = Expressions(self.threads, self.calls, self.values, self.memory)
        self.expressions.thread = kernel.thread
        # Threads that have left the current iteration, and those among them that have left the loop.
        self.gone, self.broken = cast(Any, None), cast(Any, None)
        self.everyone = self.threads.everyone
        self.blocks_run = 0  # blocks that have run
        self.points: list[tuple[int, ...]] = []  # of the blocks that run
        self.body = self.block(kernel.body)
        self.variables: list[Variable] = self.known_variables()  # of which each task has its own values

    def known_variables(self) -> list[Variable]:
        """Return the variables of what has been compiled so far, in order."""
        return [m for m in self.memory.values() if isinstance(m, Variable)]

    def tensor(self, buffer: Buffer, data: torch.Tensor) -> Global:
        """Return the memory of a tensor; a tensor that the kernel writes gets a trace of its accesses."""
        found = Global(buffer, data, self.threads)
        if self.timeline.finds_races and any(writes(node, buffer) for node in walk(self.kernel.body)):
            found.trace = self.trace(found.size)
        return found

    def trace(self, count: int) -> Trace:
        """Return a trace for `count` places."""
        if isinstance(self.clock, VectorClock):
            return OrderedTrace(count, self.clock, self.findings)
        return Trace(count, self.clock, self.findings)

    def run(self, points: list[tuple[int, ...]]) -> None:
        """Run one block, or the blocks of one cluster together."""
        self.points = points
        self.clock.start_block()
        self.shared.reset()
        self.calls.reset()
        blocks = [functools.partial(self.one, n) for n in range(len(points))]
        try:
            self.tasks.run(list(map(Task, blocks))) if self.linked else blocks[0]()
            self.calls.finish()
        except Stuck:
            self.threads.everyone = self.everyone
        self.blocks_run += 1

    def one(self, block: int) -> None:
        """Run one of the blocks that run at the same time."""
        threads, point = self.threads, self.points[block]
        everyone = threads.in_block(block) if self.linked else threads.everyone
        place = dict(zip(self.kernel.blocks, point, strict=True))
        self.restore((everyone, everyone, None, None, block, place, [v.value for v in self.variables]))
        self.body()
        if self.linked:
            self.calls.state(Cluster).leave(block)

    def saved(self) -> Any:
        """Return the state that belongs to the running task: its mask, values and variables."""
        variables, threads = [v.value for v in self.variables], self.threads
        return threads.mask, threads.everyone, self.gone, self.broken, threads.block, dict(self.values), variables

    def restore(self, state: Any) -> None:
        """Make the task with this saved state the running one."""
        threads = self.threads
        threads.mask, threads.everyone, self.gone, self.broken, threads.block, values, variables = state
        self.findings.block = self.points[threads.block]
        self.values.update(values)
        for variable, value in zip(self.variables, variables, strict=True):
            variable.value = value

    # Statements become functions.

    def block(self, block: st.Block) -> Step:
        """Compile statements that run in order."""
        steps = []
        at = 0
        while at < len(block.stmts):
            found = self._parting(block.stmts, at)
            if found:
                roles = [one for one in found if isinstance(one, st.Role)]
                steps.append((self.roles(roles) if len(roles) == len(found) else self.branches(found), False))
            else:
                steps.append((self.stmt(block.stmts[at]), leaves(block.stmts[at])))
            at += max(len(found), 1)
        if any(early for _, early in steps):
            return self._leaving_block(steps)
        plain = [step for step, _ in steps]
        if len(plain) == 1:
            return plain[0]

        def run() -> None:
            for step in plain:
                step()

        return run

    def _leaving_block(self, steps: list[tuple[Step, bool]]) -> Step:
        """Compile statements of which some may end the iteration for all running threads."""
        threads = self.threads

        def run() -> None:
            for step, early in steps:
                step()
                if early and threads.mask is not None and not threads.mask.any():
                    return

        return run

    def stmt(self, node: st.Stmt) -> Step:
        """Return the function that runs one statement."""
        handler = self.method_of(node)
        if handler is None:
            raise InternalError(f"the thread interpreter met {type(node).__name__}", node.span)
        self.expressions.span = node.span
        return handler(node)  # type: ignore[no-any-return]

    def value(self, node: Expr) -> Callable[[], Value]:
        """Return the function that computes an expression."""
        return self.expressions.compile(node)

    visit_Block = block

    def visit_Let(self, node: st.Let) -> Step:
        """Compile a name for a value."""
        run, values, var = self.value(node.value), self.values, node.var
        if self.expressions.is_from_indices(node.value):
            self.expressions.is_from_indices.names.add(var)
        if isinstance(run, Fixed):
            self.expressions.lets[var] = run
            return lambda: None

        def let() -> None:
            values[var] = run()

        return self.timeline.timed(node, let)

    def visit_Alloc(self, node: st.Alloc) -> Step:
        """Compile the allocation of a variable, tile, barrier buffer or register array."""
        buffer, threads = node.buffer, self.threads
        if buffer.scope == "var":
            variable = self.memory[buffer] = Variable(buffer, threads)
            init = None if node.init is None else self.expressions.element(node.init)
            return variable.reset if init is None else lambda: variable.store(0, init(), node.span)
        if buffer.scope == "global":
            return self._tensor_at(node)
        shape = buffer.static_shape
        if shape is None or buffer.scope not in ("shared", "local", "barrier"):
            raise InternalError(f"`{buffer.name}` of scope {buffer.scope} at stage FLAT", node.span)
        if buffer.scope == "shared":
            self.memory[buffer] = Tile(buffer, math.prod(shape), threads, self.shared)
            return lambda: None
        if buffer.scope == "barrier":
            barriers = self.memory[buffer] = Barriers(buffer, math.prod(shape), self.calls)
            return barriers.reset
        local = self.memory[buffer] = (
            Accumulators(buffer, math.prod(shape), self.calls)
            if buffer in self.products
            else Local(buffer, math.prod(shape), threads)
        )
        return local.reset

    def _tensor_at(self, node: st.Alloc) -> Step:
        """Compile the search for the tensor at an address that the kernel computes."""
        buffer = node.buffer
        if node.init is None:
            raise InternalError(f"`{buffer.name}` has no address", node.span)
        memory = self.memory[buffer] = Global(buffer, torch.empty(0, dtype=buffer.dtype.as_torch()), self.threads)
        address, size = self.value(node.init), self.value(buffer.shape[0])
        is_written = any(writes(one, buffer) for one in walk(self.kernel.body))

        def place() -> None:
            memory.place(tensor_at(_common_number(address()), [_common_number(size())], None, buffer.dtype))
            memory.trace = self.trace(memory.size) if is_written else None

        return place

    def visit_Store(self, node: st.Store) -> Step:
        memory, span = self.memory[node.buffer], node.span
        index, value = self.expressions.index(node), self.expressions.element(node.value)
        return self.timeline.timed(node, lambda: memory.store(index(), value(), span))

    def visit_Do(self, node: st.Do) -> Step:
        """Compile a call for its effect."""
        return self.value(node.call)

    def visit_Assert(self, node: st.Assert) -> Step:
        """Compile an assertion, which reports the threads for which it fails."""
        condition, threads = self.value(node.condition), self.threads

        def check() -> None:
            ids = threads.active()
            failed = int((~threads.each(condition(), ids)).sum())
            if failed:
                self.findings.add("assertion", node.span, node.message, failed)

        return check

    def visit_Print(self, node: st.Print) -> Step:
        if node.value is None:
            return lambda: print(node.message)
        if not isinstance(node.value, Expr):
            raise InternalError("a region is printed at stage FLAT", node.span)
        value = self.value(node.value)
        return lambda: print(f"{node.message}: {value()}" if node.message else value())

    def visit_If(self, node: st.If) -> Step:
        """Compile a branch, which runs under a mask if threads disagree."""
        condition, threads = self.value(node.condition), self.threads
        then, otherwise = self.block(node.then), self.block(node.otherwise) if node.otherwise.stmts else None

        def branch(where: Any, body: Step) -> None:
            outer = threads.mask
            some, mask = threads.narrowed(where if self.gone is None else where & ~self.gone)
            if some:
                threads.mask = mask
                body()
                threads.mask = self.still(outer)

        def run() -> None:
            c = condition()
            if not isinstance(c, np.ndarray):
                if c:
                    then()
                elif otherwise is not None:
                    otherwise()
                return
            branch(c, then)
            if otherwise is not None:
                branch(~c, otherwise)

        return run

    def still(self, mask: Any) -> Any:
        """Remove from the mask the threads that have left the iteration."""
        if self.gone is None:
            return mask
        return ~self.gone if mask is None else mask & ~self.gone

    def visit_Break(self, node: st.Break) -> Step:
        def run() -> None:
            self.broken = self._added(self.broken)
            self._leave()

        return run

    def visit_Continue(self, node: st.Continue) -> Step:
        return self._leave

    def _leave(self) -> None:
        """Take the running threads out of the loop."""
        self.gone = self._added(self.gone)
        self.threads.mask = np.zeros(self.threads.lanes, bool)

    def _added(self, to: Any) -> Any:
        """Add the running threads to a mask of threads."""
        here = np.ones(self.threads.lanes, bool) if self.threads.mask is None else self.threads.mask
        return here if to is None else to | here

    # Roles.

    def _parts(self, one: st.Stmt) -> bool:
        """Return whether threads part in a statement: in a role, or in a branch in which whole warps wait."""
        if isinstance(one, st.Role):
            return True
        if not isinstance(one, st.If) or not isinstance(self.clock, VectorClock) or leaves(one):
            return False
        return parts_warps(one, self.expressions.fixed)

    def _parting(self, stmts: Sequence[st.Stmt], at: int) -> list[st.Stmt]:
        """Return the statements from `at` on in which threads part, with branches of threads that lie between them."""
        last = at
        for n in range(at, len(stmts)):
            one = stmts[n]
            if self._parts(one):
                last = n + 1
            elif (
                last == at
                or not isinstance(one, st.If)
                or leaves(one)
                or not isinstance(self.expressions.fixed(one.condition), np.ndarray)
            ):
                break
        return list(stmts[at:last])

    def _as_branch(self, one: st.Stmt) -> st.Stmt:
        """Return a role as the branch of its threads; another statement as it is."""
        if not isinstance(one, st.Role):
            return one
        thread = self.kernel.thread
        assert thread is not None, "a branch beside the role depends on it"
        inside = binary("and", thread >= one.first, thread < one.first + one.count)
        return st.If(inside, one.body, st.Block(()), span=one.span)

    def roles(self, roles: list[st.Role]) -> Step:
        """Compile roles as tasks that run at the same time, one task for each barrier group of a role."""
        outer = self.known_variables()
        parts = [(role, self.block(role.body)) for role in roles]
        return self._tasks(parts, outer, lambda mask, everyone: mask)

    def branches(self, branches: list[st.Stmt]) -> Step:
        """Compile branches, and roles beside them, as tasks for each group of warps that agree.

        Barriers of the block still meet all threads.
        """
        outer, branches = self.known_variables(), [self._as_branch(one) for one in branches]
        steps = [self.stmt(one) for one in branches]

        def body() -> None:
            for step in steps:
                step()

        whole = st.Role(0, self.threads.of_block, st.Block(tuple(branches)))
        return self._tasks([(whole, body)], outer, lambda mask, everyone: everyone)

    def _tasks(
        self, parts: list[tuple[st.Role, Step]], outer: list[Variable], meeting: Callable[[Any, Any], Any]
    ) -> Step:
        """Compile parts of a block to tasks, and write their values of `outer` variables back in the end.

        `meeting` returns the threads that a task meets at barriers of the block. In every other block the last task
        begins.
        """
        groups = [
            (mask, body)
            for role, body in parts
            for mask in barrier_groups(role, self.threads.of_block, self.expressions.fixed)
        ]

        def run() -> None:
            before, threads = self.saved(), self.threads
            after: list[tuple[Any, list[Value]]] = []

            def one(mask: Any, body: Step) -> None:
                self.restore((mask, meeting(mask, before[1]), None, None, *before[4:]))
                body()
                after.append((mask, self.saved()[-1]))

            here = [(m if before[0] is None else np.tile(m, threads.blocks) & before[0], body) for m, body in groups]
            tasks = [Task(functools.partial(one, *part)) for part in here if part[0].any()]
            self.tasks.run(tasks if (self.blocks_run + threads.block) % 2 else tasks[::-1])
            self.restore(before)
            for mask, values in after:
                for variable, first, last in zip(outer, before[-1], values, strict=False):
                    if last is not first:
                        variable.assign(mask, last)

        return run

    # Loops.

    def visit_For(self, node: st.For) -> Step:
        """Compile a loop over a range."""
        if len(node.vars) != 1:
            raise InternalError("a loop nest at stage FLAT", node.span)
        start, stop = self.value(node.starts[0]), self.value(node.stops[0])
        body, var, values = self.block(node.body), node.vars[0], self.values
        early, step = any(map(leaves, node.body.stmts)), node.step

        def run() -> None:
            a, b = start(), stop()
            if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
                self._iterate((a + trip * step for trip in itertools.count()), lambda n: n < b, var, body)
            elif early:
                self._iterate(iter(range(a, b, step)), lambda n: True, var, body)
            else:
                for n in range(a, b, step):
                    values[var] = n
                    body()

        return run

    def visit_While(self, node: st.While) -> Step:
        """Compile a loop with a condition."""
        condition, body = self.value(node.condition), self.block(node.body)

        def run() -> None:
            iterations = self._iterate(iter(range(MOST_ITERATIONS)), lambda n: condition(), None, body)
            if iterations == MOST_ITERATIONS:
                self.findings.add("endless", node.span, f"{MOST_ITERATIONS} turns")

        return run

    def _iterate(self, numbers: Any, goes_on: Callable[[Any], Value], var: Var | None, body: Step) -> int:
        """Run iterations that threads may leave at different times; return the number of iterations."""
        threads, outer = self.threads, (self.threads.mask, self.gone, self.broken)
        iterations = 0
        for n in numbers:
            if var is not None:
                self.values[var] = n
            wanted = goes_on(n)
            if isinstance(wanted, np.ndarray):
                some, threads.mask = threads.narrowed(wanted)
            else:
                some = wanted
            if not some:
                break
            alive, self.gone, self.broken = threads.mask, None, None
            body()
            threads.mask = alive
            iterations += 1
            if self.broken is not None:
                some, threads.mask = threads.narrowed(~self.broken)
                if not some:
                    break
        threads.mask, self.gone, self.broken = outer
        return iterations
