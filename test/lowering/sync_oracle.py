# SPDX-License-Identifier: Apache-2.0
"""Runs all threads of a block together, and looks at what lies between two barriers."""

from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.expr import Load
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Break, Continue, Do, For, If, Let, Store


def is_barrier(stmt):
    return isinstance(stmt, Do) and stmt.call.name == "barrier"


def races(made, without=None):
    """Whether in some interval between barriers one thread touches what another one writes."""
    kernel = made.kernels[0]
    run = Run(kernel.thread, kernel.threads[0], without)
    run.block(kernel.body, list(range(run.count)), {})
    return run.found


class Run:
    """A run of a kernel; `statement` gives the threads that go on after it."""

    def __init__(self, thread, count, without):
        self.thread, self.count, self.without = thread, count, without
        self.found, self.names = False, {}
        self.touched = {}  # byte -> {(thread, writes)}
        self.groups = {}  # thread -> list of groups of bytes; the last one is open
        self.continued = []

    def touch(self, thread, buffer, indices, env, writes):
        if buffer.scope != "shared":
            return
        place = 0
        for index, size in zip(indices, buffer.shape, strict=True):
            place = place * size.value + evaluate(index, env)
        key = (buffer, place) if buffer.offset is None else buffer.offset + 4 * place
        seen = self.touched.setdefault(key, set())
        self.found |= any(t != thread and (w or writes) for t, w in seen)
        seen.add((thread, writes))

    def block(self, block, active, env):
        for s in block.stmts:
            if s is not self.without and active:
                active = self.statement(s, active, env)
        return active

    def statement(self, s, active, env):
        if is_barrier(s):
            assert len(active) == self.count, "a barrier where not all threads come by"
            self.touched.clear()
        elif isinstance(s, Let):
            self.names[s.var] = s.value
        elif isinstance(s, Break | Continue):
            self.continued += active if isinstance(s, Continue) else []
            return []
        elif isinstance(s, For):
            self.loop(s, active, env)
        elif isinstance(s, If):
            true = [t for t in active if evaluate(s.condition, self.env(t, env))]
            false = [t for t in active if t not in true]
            return sorted(self.block(s.then, true, env) + self.block(s.otherwise, false, env))
        elif isinstance(s, Do):
            for t in active:
                self.call(s.call, t, env)
        elif isinstance(s, Store):
            for t in active:
                for n in walk(s.value):
                    if isinstance(n, Load):
                        self.touch(t, n.buffer, n.indices, self.env(t, env), False)
                self.touch(t, s.buffer, s.indices, self.env(t, env), True)
        return active

    def loop(self, s, active, env):
        outer = self.continued
        for turn in range(int(s.stops[0].value)):
            self.continued = []
            active = sorted(self.block(s.body, active, {**env, s.vars[0]: turn}) + self.continued)
        self.continued = outer

    def env(self, thread, env):
        full = {**env, self.thread: thread}
        for name, value in self.names.items():
            full[name] = evaluate(value, full)
        return full

    def call(self, call, thread, env):
        groups = self.groups.setdefault(thread, [[]])
        if call.name == "cp_async":
            to = call.args[0]
            now = self.env(thread, env)
            self.touch(thread, to.buffer, to.indices, now, True)
            groups[-1].append((to.buffer, to.indices, now))
        elif call.name == "cp_async_commit":
            groups.append([])
        elif call.name == "cp_async_wait":
            closed = groups[:-1]
            done = len(closed) - call.options[0]
            for group in closed[: max(done, 0)]:
                for buffer, indices, now in group:
                    self.touch(thread, buffer, indices, now, True)  # it may land as late as here
                group.clear()
