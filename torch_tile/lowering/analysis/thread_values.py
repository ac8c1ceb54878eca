# SPDX-License-Identifier: Apache-2.0
"""Evaluate integer expressions of the thread and of bounded loops with NumPy, for all threads and iterations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from torch_tile.hardware import WARP
from torch_tile.ir.arith_util import Substitute
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Binary, Call, Cast, Const, Expr, Load, Select, Unary, Var
from torch_tile.ir.node import Node, children, contains, find, symbols
from torch_tile.ir.simplify import Simplifier
from torch_tile.ir.stmt import Alloc, Block, Break, Continue, For, If, Kernel, Let, Stmt, Store, While
from torch_tile.ir.widths import SIGNED


def is_unsure(e: Expr) -> bool:
    """Return whether a value may differ between threads, by their index, memory or names of loaded values."""
    return contains(e, Load, Call) or any(var.role in ("thread", "let") for var in find(e, Var))


class Numbers:
    """Evaluate integer expressions of the thread and of some loop variables for all their values at once.

    The thread and each loop have an axis of their own. A part that does not depend on a loop is thus computed once.
    """

    values: Mapping[Var, Any]
    thread: Any

    def __init__(self, values: Mapping[Var, Any], thread: Any):
        self.values, self.thread = values, thread

    def knows(self, e: Expr) -> bool:
        """Return whether `e` can be computed; what wraps in an unsigned or narrow type is not."""
        if isinstance(e, Var):
            return e.role == "thread" or e in self.values
        known = isinstance(e, Const | Unary | Select) or (isinstance(e, Binary) and e.op in _operators())
        known = known or isinstance(e, Cast)
        exact = e.dtype in SIGNED or e.dtype.kind == "bool"
        return known and exact and all(self.knows(c) for c in children(e) if isinstance(c, Expr))

    def touches(self, e: Expr) -> bool:
        """Return whether `e` depends on the thread or on a loop, or may do so through memory."""
        return not symbols(e).isdisjoint(self.values) or is_unsure(e)

    def __call__(self, e: Expr) -> Any:
        """Return the values of `e`."""
        import numpy as np

        if isinstance(e, Var):
            return self.thread if e.role == "thread" else self.values[e]
        if isinstance(e, Const):
            return np.asarray(e.value)
        if isinstance(e, Cast):
            return self(e.a)
        if isinstance(e, Unary):
            a = self(e.a)
            return ~a if e.op in ("not", "~") else -a
        if isinstance(e, Select):
            return np.where(self(e.condition), self(e.a), self(e.b))
        assert isinstance(e, Binary)
        b = self(e.b)
        if e.op in ("//", "%"):
            b = np.where(b == 0, 1, b)
        return _operators()[e.op](self(e.a), b)


@cache
def _operators() -> dict[str, Any]:
    """Return the NumPy function of each binary operator."""
    import numpy as np

    return {
        "+": np.add, "-": np.subtract, "*": np.multiply, "//": np.floor_divide, "%": np.mod, "<<": np.left_shift,
        ">>": np.right_shift, "&": np.bitwise_and, "|": np.bitwise_or, "^": np.bitwise_xor, "min": np.minimum,
        "max": np.maximum, "==": np.equal, "!=": np.not_equal, "<": np.less, "<=": np.less_equal, ">": np.greater,
        ">=": np.greater_equal, "and": np.logical_and, "or": np.logical_or,
    }  # fmt: skip


# Divergence: the names that differ between the threads of a block, and the branches and loops that only some take.


class Divergence:
    """Find the names and variables of a kernel whose values differ between threads (`mixed`).

    With `arrays`, also find the arrays of threads with such a value, or with a value at such an index. With `cluster`,
    find those that differ between the threads of a cluster.
    """

    def __init__(self, kernel: Kernel, arrays: bool = False, cluster: bool = False):
        self.scopes = ("var", "local") if arrays else ("var",)
        threads = {n for n in symbols(kernel) if isinstance(n, Var) and n.role == "thread"}
        self.mixed: set[Var | Buffer] = {*threads}
        facts = Ranges()
        for thread in threads:
            facts = facts.loop(thread, 0, math.prod(kernel.threads))
        ranks: dict[Var, Expr] = {}  # block indices as numbers of a cluster and of a block in it
        for block, size in zip(kernel.blocks, kernel.cluster if cluster else (), strict=False):
            if size > 1:
                rank = replace(block)
                ranks[block], facts = replace(block) * size + rank, facts.loop(rank, 0, size)
                self.mixed |= {block, rank}
        self.by_rank: Substitute = Substitute(ranks)
        self.simplify: Simplifier = Simplifier(facts)
        size = -1
        while size != len(self.mixed):
            size = len(self.mixed)
            self._spread(kernel.body, False)

    def _spread(self, node: Node, divergent: bool) -> None:
        """Add the names and buffers that become divergent in a statement; `divergent` if only some threads run it."""
        if isinstance(node, Let) and self.is_divergent(node.value):
            self.mixed.add(node.var)
        elif isinstance(node, Alloc):
            if node.buffer.scope in self.scopes and node.init is not None and self.is_divergent(node.init):
                self.mixed.add(node.buffer)
        elif isinstance(node, Store) and node.buffer.scope in self.scopes:
            if divergent or any(map(self.is_divergent, (*node.indices, node.value))):
                self.mixed.add(node.buffer)
        elif isinstance(node, If):
            divergent = divergent or self.is_divergent(node.condition)
        elif isinstance(node, For | While):
            divergent = divergent or self.is_divergent_loop(node)
        for child in children(node):
            if isinstance(child, Stmt):
                self._spread(child, divergent)

    def is_divergent(self, e: Expr) -> bool:
        """Return whether threads of the block may see different values, as of registers in `mixed`."""
        return not self.mixed.isdisjoint(symbols(e)) and not self.mixed.isdisjoint(
            symbols(self.simplify(self.by_rank(e)))
        )

    def is_divergent_loop(self, loop: For | While) -> bool:
        """Return whether threads may be in different iterations of a loop, or leave it at different times."""
        return self.divergence_of(loop) is not None

    def divergence_of(self, loop: For | While) -> Expr | None:
        """Return the bound or condition by which threads get into different iterations of a loop, or leave it."""
        found = self.divergent_bound(loop)
        return self.divergent_exit(loop) if found is None else found

    def divergent_bound(self, loop: For | While) -> Expr | None:
        """Return the bound, or the condition of a while loop, that differs between threads."""
        bounds = (loop.condition,) if isinstance(loop, While) else (*loop.starts, *loop.stops)
        return next(filter(self.is_divergent, bounds), None)

    def divergent_exit(self, loop: For | While) -> Expr | None:
        """Return the condition in a loop's body under which only some threads leave the iteration."""
        return self._leaves(loop.body, None)

    def _leaves(self, one: Stmt, condition: Expr | None) -> Expr | None:
        """Return the condition under which some threads leave the iteration in `one`; `condition` is that around."""
        if isinstance(one, Break | Continue):
            return condition
        if isinstance(one, If) and condition is None and self.is_divergent(one.condition):
            condition = one.condition
        inside = [child for child in children(one) if isinstance(child, Stmt)] if isinstance(one, Block | If) else []
        return next((found for child in inside if (found := self._leaves(child, condition)) is not None), None)


def passing(conditions: Iterable[Expr], thread: Expr, count: int) -> tuple[int, ...]:
    """Return which of `count` threads take all these branches; none if that depends on data.

    `thread` is the running thread's number among them. Parts of a condition without the thread hold for all or none.
    """
    import numpy as np

    numbers = Numbers({}, np.arange(count) - Numbers({}, 0)(thread))
    found, waiting = np.ones(count, dtype=bool), list(conditions)
    while waiting:
        one = waiting.pop()
        if isinstance(one, Binary) and one.op == "and":
            waiting += [one.a, one.b]
        elif numbers.knows(one):
            found &= numbers(one) != 0
        elif is_unsure(one):
            return ()
    return tuple(np.flatnonzero(found).tolist())


class Guard(NamedTuple):
    """A condition around a statement, and its truth there; None for a condition that ends a loop for some threads.

    With `loop`, the condition is a bound of it that differs between threads.
    Each may run as many iterations all the same.
    """

    condition: Expr
    holds: bool | None
    loop: For | None = None


def comers(
    guards: Iterable[Guard], names: Mapping[Var, Expr], here: range
) -> tuple[tuple[int, ...] | None, Expr | None]:
    """Return which threads of `here` pass all guards, and the condition that certainly parts the lanes of a warp.

    The threads are None if that depends on data or on iterations. `names` holds the values of names.
    """
    import numpy as np

    threads = np.arange(here.start, here.stop)
    numbers, expand = Numbers({}, threads), Substitute(names)
    passing = np.ones(len(threads), dtype=bool)
    for condition, holds, loop in guards:
        needed = [expand(e) for e in ((condition,) if loop is None else (*loop.starts, *loop.stops))]
        if not all(map(numbers.knows, needed)):
            return None, None
        found = [np.broadcast_to(numbers(e), threads.shape) for e in needed]
        values = found[0] if loop is None else _iterations(found, loop.step)
        for warp in np.unique(threads[passing] // WARP):
            if len(np.unique(values[passing & (threads // WARP == warp)])) > 1:
                return None, condition
        if loop is not None and len(np.unique(values[passing])) <= 1:
            continue
        if holds is None:
            return None, None
        passing &= (values != 0) == holds
    return tuple(threads[passing].tolist()), None


def _iterations(bounds: Sequence[Any], step: int) -> Any:
    """Count the iterations of a loop nest by its starts, then its stops."""
    half = len(bounds) // 2
    count: Any = 1
    for start, stop in zip(bounds[:half], bounds[half:], strict=True):
        count = count * (-((start - stop) // step)).clip(min=0)
    return count
