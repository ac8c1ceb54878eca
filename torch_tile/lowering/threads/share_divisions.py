# SPDX-License-Identifier: Apache-2.0
"""Let each lane of a warp find the place of another tile of a persistent block.

A role's loop over tiles finds each tile by divisions, one after the other. All lanes of a warp compute the same, while
no product runs. Here each lane computes the values of another iteration, 32 at once. An iteration asks its lane for
them. Assumes stage THREAD, with all barriers: whether warps go together is seen from values, not from exchanges.

A block begins with cold code, and with loads from cold memory. The place of its first tile may take fewer divisions
than others. Then a role that copies finds that place only, and its lanes divide behind the first copies. A role that
multiplies divides before it waits for the first operands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile

from torch_tile.hardware import WARP
from torch_tile.intrinsics.base import intrinsic_of
from torch_tile.intrinsics.memory import shuffle
from torch_tile.intrinsics.traits import Sync
from torch_tile.ir.bounds import Interval, Ranges, dtype_interval
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.dtype import int32
from torch_tile.ir.expr import Address, Binary, Call, Const, Expr, Load, Var, binary, const, is_zero
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import children, contains, find, symbols
from torch_tile.ir.scope_facts import Known
from torch_tile.ir.stmt import Alloc, Block, Do, For, If, Kernel, Let, LoopKind, Program, Role, Stmt, Store
from torch_tile.lowering.analysis.clone import Instance
from torch_tile.lowering.analysis.first_iteration import FirstIteration

LEAST = 3  # divisions one after the other: the code that shares fewer takes longer to load than it saves
ZERO = const(0, int32)


def share_divisions(program: Program) -> Program:
    """Divide once for 32 iterations in the outermost loops of roles that the compiler made, where turns are taken."""
    return _Share()(program)  # type: ignore[no-any-return]


class _Share(Known):
    """Rewrite loops that whole warps run together."""

    inside = False  # whether the visitor is in a role that the compiler made

    def __init__(self) -> None:
        super().__init__()
        self.firsts: IdMap[Stmt, list[Stmt]] = IdMap()  # what comes before loops, in their blocks

    def visit_Kernel(self, kernel: Kernel) -> Kernel:
        """Visit kernels whose warpgroups take turns. Other ones may lack the registers that keep what lanes found."""
        calls = (intrinsic_of(one) for one in find(kernel.body, Do))
        ordered = any(traits is not None and traits.sync is Sync.TURN for traits in calls)
        return super().visit_Kernel(kernel) if ordered else kernel

    def visit_Role(self, role: Role) -> Stmt:
        """Visit the loops of a role that the compiler made, not of a role of the author."""
        self.inside = not role.by_hand
        new = super().visit_Role(role)
        self.inside = False
        return new

    def visit_If(self, node: If) -> Stmt:
        """Look only into branches that all lanes of a warp take."""
        test = node.condition
        number = test.a if isinstance(test, Binary) and test.op == "==" and isinstance(test.b, Const) else test
        if not isinstance(number, Binary) or number.op != "//" or number.a is not self.thread:
            return node
        whole = isinstance(number.b, Const) and int(number.b.value) % WARP == 0
        return super().visit_If(node) if whole else node

    def visit_Block(self, block: Block) -> Block:
        """Rewrite the loops of a block, and put what comes before one behind the last name that it needs."""
        new: Block = super().visit_Block(block)
        stmts: list[Stmt] = []
        for one in new.stmts:
            first = self.firsts.pop(one, None)
            if first is not None:
                needed = IdSet(x for s in first for x in symbols(s))
                last = [n for n, s in enumerate(stmts) if isinstance(s, Let) and s.var in needed]
                stmts[last[-1] + 1 if last else 0 : 0] = first
            stmts.append(one)
        return new if len(stmts) == len(new.stmts) else replace(new, stmts=tuple(stmts))

    def visit_For(self, loop: For) -> Stmt:
        """Rewrite an outermost loop."""
        counts = loop.kind is LoopKind.SERIAL and len(loop.vars) == 1 and loop.step == 1 and is_zero(loop.starts[0])
        if not self.inside or not counts or self.thread is None or not self._is_same(loop.stops[0], IdMap()):
            return loop
        pure = self._pure_lets(loop.body.stmts)
        first, new = _by_lanes(loop, self.thread, pure, self.entered(loop))
        if first:
            self.firsts[new] = first
        return new

    def _pure_lets(self, stmts: Iterable[Stmt]) -> IdMap[Var, Let]:
        """Return the names at the start of a loop whose values are the same in all lanes of a warp."""
        found: IdMap[Var, Let] = IdMap()
        for let in takewhile(lambda one: isinstance(one, Let), stmts):
            assert isinstance(let, Let)
            if self._is_same(let.value, found):
                found[let.var] = let
        return found

    def _is_same(self, value: Expr, found: IdMap[Var, Let]) -> bool:
        """Return whether all lanes surely compute one value: from sizes, the block, iterations and such names."""
        wide = self.values(value)
        names = (var for var in find(wide, Var) if var.role in ("thread", "let"))
        return not contains(wide, Load, Call, Address) and all(var in found for var in names)


def _by_lanes(loop: For, thread: Var, pure: IdMap[Var, Let], ranges: Ranges) -> tuple[list[Stmt], Stmt]:
    """Build the loop whose lanes divide for each other, and what comes before it.

    Return nothing and the same loop if that saves nothing. `pure` are the names at its start that all lanes compute
    alike.
    """
    iteration = loop.vars[0]
    divided, deepest = _divided(iteration, pure)
    rest = [one for one in loop.body.stmts if not (isinstance(one, Let) and one.var in pure)]
    used = IdSet(x for one in rest for x in symbols(one))
    shared = [let for let in pure.values() if let.var in divided and let.var in used]
    if deepest < LEAST or not shared or any(let.var.type != int32 for let in shared):
        return [], loop
    kept = _before((let for let in pure.values() if let.var not in divided and let.var in used), pure)
    needed = _before(shared, pure)
    chain = [let for let in pure.values() if let.var in needed]
    values = IdMap((let.var, Buffer(let.var.name, (), int32, "var")) for let in shared)
    first = _at_first(chain, values, iteration, ranges)
    is_short = _count(first) < _count(chain)  # else an iteration finds its place behind the start of the loop
    multiplies = any(traits is not None and traits.sync is Sync.TURN for traits in map(intrinsic_of, find(loop, Do)))
    begin = 1 if is_short and not multiplies else 0  # the first iteration whose place a lane finds
    again = binary("==", iteration % WARP, const(begin, int32))
    if is_short and multiplies:
        first = _by_each_lane(chain, values, loop, thread, ZERO)
        again = binary("and", again, binary("<", ZERO, iteration))
    lanes = Block(tuple(_by_each_lane(chain, values, loop, thread, iteration)))
    body: list[Stmt] = [If(again, lanes, Block(()))]
    lane = (iteration + (WARP - 1)) % WARP if begin else iteration % WARP
    for one in loop.body.stmts:
        if isinstance(one, Let) and one.var in values:
            value = _within(shuffle(Load(values[one.var], ()), lane), ranges.interval(one.value))
            body.append(Let(one.var, value, span=one.span))
        elif not isinstance(one, Let) or one.var not in pure or one.var in kept:
            body.append(one)
        ranges = ranges.define(one.var, one.value) if isinstance(one, Let) else ranges
    allocs = [Alloc(buffer, ZERO, span=loop.span) for buffer in values.values()]
    made = replace(loop, body=Block(tuple(body)))
    if not is_short:
        return [], Block((*allocs, made))
    return [*allocs, If(binary("<", ZERO, loop.stops[0]), Block(tuple(first)), Block(()))], made


def _by_each_lane(
    chain: Sequence[Let], values: IdMap[Var, Buffer], loop: For, thread: Var, iteration: Expr
) -> list[Stmt]:
    """Return the statements by which each lane finds the place of another iteration, from `iteration` on."""
    # At least 0, as the compiler divides what may be negative twice: once for the quotient, once for the rest.
    own = binary("max", binary("min", iteration + thread % WARP, loop.stops[0] - 1), ZERO)
    copies = Instance(IdMap([(loop.vars[0], own)]), IdMap(), fresh=True)
    made = [copies(let) for let in chain]
    return [*made, *(Store(buffer, (), copies(var)) for var, buffer in values.items())]


def _at_first(chain: Sequence[Let], values: IdMap[Var, Buffer], iteration: Var, ranges: Ranges) -> list[Stmt]:
    """Return the statements by which all lanes find the place of the first iteration, without what it does not need."""
    first = FirstIteration(Instance(IdMap([(iteration, ZERO)]), IdMap(), fresh=True), ranges)
    made = IdMap((new.var, new) for let in chain for new in first.named(let))
    stores = [Store(buffer, (), first.copies(var)) for var, buffer in values.items()]
    needed = _before((let for let in made.values() if any(let.var in symbols(s) for s in stores)), made)
    return [*(let for let in made.values() if let.var in needed), *stores]


def _within(value: Expr, known: Interval) -> Expr:
    """Clamp a value to its known range: later passes know no range for the value of another lane."""
    if dtype_interval(int32).low < known.low:
        value = binary("max", value, const(int(known.low), int32))
    return binary("min", value, const(int(known.high), int32)) if known.high < dtype_interval(int32).high else value


def _divided(iteration: Var, pure: IdMap[Var, Let]) -> tuple[IdSet[Var], int]:
    """Return the names behind divisions, by no constants, that change with the iteration, and the longest such chain.

    A chain is of divisions one after the other. Those that do not change count, as registers do not keep them.
    """
    changing, found, depths = IdSet([iteration]), IdSet[Var](), IdMap[Var, int]()
    for let in pure.values():
        depths[let.var] = _depth(let.value, depths)
        if changing.any_in(let.value):
            changing.add(let.var)
            if depths[let.var]:
                found.add(let.var)
    return found, max((depths[var] for var in found), default=0)


def _depth(value: Expr, known: IdMap[Var, int]) -> int:
    """Count the divisions one after the other in a value, those behind its names among them."""
    if isinstance(value, Var):
        return known.get(value, 0)
    below = max((_depth(x, known) for x in children(value) if isinstance(x, Expr)), default=0)
    divides = isinstance(value, Binary) and value.op in ("//", "%") and not isinstance(value.b, Const)
    return below + divides


def _count(stmts: Iterable[Stmt]) -> int:
    """Count the divisions by no constants in statements."""
    return sum(x.op in ("//", "%") and not isinstance(x.b, Const) for one in stmts for x in find(one, Binary))


def _before(wanted: Iterable[Let], pure: IdMap[Var, Let]) -> IdSet[Var]:
    """Return the names that some values are computed from, and these themselves."""
    found = IdSet(let.var for let in wanted)
    for let in reversed(list(pure.values())):
        if let.var in found:
            found |= IdSet(symbols(let.value))
    return found
