# SPDX-License-Identifier: Apache-2.0
"""Keep the stage and the parity of a ring of tiles in variables, which iterations step by comparisons.

A ring is a shared tile with versions, or the mbarriers of its stages. Passes write its stage in closed form, as
`(turns + k) % 5`, and the parity that a wait asks for as `(turns + k) // 5 % 2`. So they may move a statement to
another iteration. A remainder by 5 is a chain of multiplications and shifts in front of each wait. A variable that
counts the stages costs an addition and a comparison, off that chain. Powers of two stay in closed form: one instruction
masks them.

Runs at stage THREAD behind all passes that compare stages. Afterwards no loop divides for a ring that it steps through.
Statements behind the loop find the ring where its last iteration left it. Values do not change.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch_tile.intrinsics.base import syncs
from torch_tile.intrinsics.traits import Sync
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.dtype import int32
from torch_tile.ir.expr import Address, Binary, Call, Const, Expr, Load, Var, binary, cast, const
from torch_tile.ir.idmap import IdSet
from torch_tile.ir.node import Rewriter, contains, find, rebuilt, symbols, with_fields
from torch_tile.ir.polynomial import Atoms, Monomial, Polynomial, number as constant
from torch_tile.ir.scope_facts import Known
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Alloc, Block, Break, Continue, For, Kernel, Let, LoopKind, Program, Stmt, Store

Terms = frozenset[tuple[Monomial, int]]
A = TypeVar("A", Load, Address, Store)


def count_stages(program: Program) -> Program:
    """Count stages and parities of rings in the serial loops that step through them."""
    return _Count()(program)  # type: ignore[no-any-return]


def is_counted(stages: int) -> bool:
    """Return whether loops count a ring of so many stages: a power of two has a mask, and no division."""
    return stages & (stages - 1) != 0


@dataclass(frozen=True)
class _Place:
    """A place of a ring: `ahead` positions behind `step * k + rest`, in numbers modulo `period`."""

    step: int
    rest: Terms
    ahead: int
    period: int

    @property
    def base(self) -> tuple[int, Terms, int]:
        """Return the place without its offset `ahead`: the places of a ring that a loop steps share it."""
        return self.step, self.rest, self.period

    def modulo(self, period: int) -> _Place:
        """Return the place modulo a divisor of the period."""
        rest = frozenset((m, c % period) for m, c in self.rest if c % period)
        return _Place(self.step % period, rest, self.ahead % period, period)


class _Forms:
    """The places of a ring as sums of what a loop does not change, and of its variable."""

    def __init__(self, atoms: Atoms):
        self.atoms = atoms

    def parity(self, parity: Expr, stages: int) -> Polynomial | None:
        """Return the position modulo `2 * stages` that a parity tells; None if it divides by another number."""
        if isinstance(parity, Binary) and parity.op == "%" and _number(parity.b) == 2:
            parity = parity.a
        ahead = 0
        if isinstance(parity, Binary) and parity.op == "+" and (found := _number(parity.b)) is not None:
            parity, ahead = parity.a, found
        size = _number(parity.b) if isinstance(parity, Binary) and parity.op == "//" else None
        if not size or not isinstance(parity, Binary) or stages % size:
            return None
        return self.atoms.of(parity.a).scaled(stages // size) + constant(ahead * stages)

    def place(self, position: Polynomial | None, k: Var | None, period: int) -> _Place | None:
        """Return the place that a position is, where `k` is the variable of the loop around."""
        if position is None:
            return None
        terms = {m: c % period for m, c in position.terms.items() if c % period}
        if any(self._is_computed(number) for m in terms for number in m):
            return None
        ahead, number = terms.pop((), 0), None if k is None else self.atoms.variable(k)
        step = 0 if number is None else terms.pop((number,), 0)
        return _Place(step, frozenset(terms.items()), ahead, period)

    def iteration(self, place: _Place, k: Expr) -> _Place | None:
        """Return the place that a place of a loop becomes where the loop's variable has the value `k`."""
        position = self.atoms.of(k).scaled(place.step) + Polynomial(dict(place.rest)) + constant(place.ahead)
        return self.place(position, None, place.period)

    def _is_computed(self, number: int) -> bool:
        """Return whether an atom has the value of a call, or of anything in memory but a variable."""
        expr = self.atoms.table[number].expr
        loads = () if expr is None else find(expr, Load)
        computed = (expr is not None and contains(expr, Call)) or any(load.buffer.scope != "var" for load in loads)
        return computed or any(map(self._is_computed, self.atoms.table[number].inner))

    def used(self, rest: Terms) -> frozenset[Var | Buffer]:
        """Return the symbols on which terms depend."""
        return frozenset(s for m, _ in rest for number in m for s in self._symbols(number))

    def _symbols(self, number: int) -> Iterator[Var | Buffer]:
        """Yield the symbols of an atom."""
        atom = self.atoms.table[number]
        if atom.expr is not None:
            yield from symbols(atom.expr)
        for inner in atom.inner:
            yield from self._symbols(inner)

    def expr(self, terms: Iterable[tuple[Monomial, int]]) -> Expr | None:
        """Return an expression for terms; None where one has none of type int32."""
        total: Expr = const(0, int32)
        for monomial, factor in sorted(terms):
            product: Expr = const(factor, int32)
            for number in monomial:
                atom = self._atom(number)
                if atom is None or atom.dtype != int32:
                    return None
                product = product * atom
            total = total + product
        return total

    def _atom(self, number: int) -> Expr | None:
        """Return the expression of an atom."""
        atom = self.atoms.table[number]
        if atom.expr is not None or atom.op not in ("//", "min", "max"):
            return atom.expr
        a, b = (self.expr(x.terms.items()) for x in atom.args)
        return None if a is None or b is None else binary(atom.op, a, b)


def _number(e: Expr) -> int | None:
    """Return the value of an integer constant."""
    return int(e.value) if isinstance(e, Const) else None


def _stages_of(buffer: Buffer) -> int:
    """Return the stages of a ring whose remainders cost a division; 0 for other buffers."""
    size = _number(buffer.shape[0]) if buffer.scope in ("shared", "barrier") and buffer.shape else None
    return size if size and is_counted(size) else 0


def _divides(e: Expr, k: Var | None) -> bool:
    """Return whether an expression divides, by `k` if that is given: a row `thread // 4 + 32 * k` is no stage."""
    return any(node.op in ("%", "//") and (k is None or k in symbols(node)) for node in find(e, Binary))


class _Places(Rewriter):
    """Visit all stages and parities of rings in a statement, and put `found` values into their places."""

    def __init__(self, forms: _Forms, k: Var | None):
        self.forms, self.k = forms, k
        self.stages: set[_Place] = set()
        self.parities: set[_Place] = set()

    def stage(self, place: _Place) -> Expr | None:
        """Return the value that replaces a stage."""
        self.stages.add(place)
        return None

    def parity(self, place: _Place) -> Expr | None:
        """Return the value that replaces a parity."""
        self.parities.add(place)
        return None

    def visit_Load(self, load: Load) -> Load:
        """Visit the stage of an element."""
        return self._access(load)

    def visit_Address(self, address: Address) -> Address:
        """Visit the stage of an address."""
        return self._access(address)

    def visit_Store(self, store: Store) -> Store:
        """Visit the stage of an element that is written."""
        return self._access(store)

    def _access(self, node: A) -> A:
        """Visit the stage of an access, which its first index names."""
        new: A = self.children(node)
        stages = _stages_of(new.buffer)
        if not stages or not _divides(new.indices[0], self.k):
            return new
        place = self.forms.place(self.forms.atoms.of(new.indices[0]), self.k, stages)
        value = None if place is None else self.stage(place)
        return new if value is None else rebuilt(new, indices=(value, *new.indices[1:]))

    def visit_Call(self, call: Call) -> Call:
        """Visit the parity of a wait."""
        new = self.children(call)
        if not syncs(call, Sync.WAIT) or len(call.args) < 2 or not isinstance(call.args[0], Address):
            return new
        stages = _stages_of(call.args[0].buffer)
        place = self.forms.place(self.forms.parity(call.args[1], stages), self.k, 2 * stages) if stages else None
        value = None if place is None else self.parity(place)
        return new if value is None else rebuilt(new, args=(new.args[0], value, *new.args[2:]))


@dataclass
class _Ring:
    """The variables that follow a ring through a loop: its `stage`, and `parity` if a wait asks for it.

    They stand at the position `first` ahead of `step * k + rest`, modulo `period`, and at `start` in front of the loop.
    """

    stages: int
    first: _Place
    start: Expr
    stage: Buffer
    parity: Buffer | None
    asked: frozenset[int] = frozenset()  # stages ahead that statements ask for
    names: dict[int, Var] = field(default_factory=dict)  # of stages by positions ahead, of parities below 0
    waiting: list[Stmt] = field(default_factory=list)

    def stage_at(self, ahead: int) -> Expr:
        """Return the stage so many positions behind the variables, by a name if it is another one."""
        ahead %= self.stages
        if not ahead:
            return Load(self.stage, ())
        if ahead not in self.names:
            near, far = self._before(ahead)
            self._name(ahead, "stage", (self.stage_at(near) + far) % self.stages)
        return self.names[ahead]

    def parity_at(self, ahead: int) -> Expr:
        """Return the parity so many positions behind the variables, by a name if it is another one."""
        assert self.parity is not None
        rounds, ahead = divmod(ahead % (2 * self.stages), self.stages)
        if rounds:
            return self.parity_at(ahead) ^ 1
        if not ahead:
            return Load(self.parity, ())
        if -ahead not in self.names:
            near, far = self._before(ahead)
            passed = binary("<", self.stage_at(ahead), const(far, int32))
            self._name(-ahead, "parity", self.parity_at(near) ^ cast(passed, int32))
        return self.names[-ahead]

    def _before(self, ahead: int) -> tuple[int, int]:
        """Return the last position asked for that is in front of another one, and how far."""
        near = max((n for n in self.asked if n < ahead), default=0)
        return near, ahead - near

    def _name(self, number: int, name: str, value: Expr) -> None:
        """Name a value in front of the statements under way."""
        self.names[number] = Var(name, int32, "let")
        self.waiting.append(Let(self.names[number], value))

    def taken(self) -> list[Stmt]:
        """Return the names that were asked for since the last call."""
        found, self.waiting = self.waiting, []
        return found

    def steps(self) -> list[Stmt]:
        """Return the statements at the end of an iteration that move the variables on."""
        moves = [Store(self.stage, (), self.stage_at(self.first.step))]
        if self.parity is not None:
            moves.append(Store(self.parity, (), self.parity_at(self.first.step)))
        return list(moves)


class _UseVariables(_Places):
    """Replace stages and parities by the variables that follow their rings."""

    def __init__(self, forms: _Forms, k: Var | None, rings: Mapping[Hashable, _Ring]):
        super().__init__(forms, k)
        self.rings = rings

    def stage(self, place: _Place) -> Expr | None:
        """Return the stage by a ring's variable, if one follows it."""
        ring = self.rings.get(place.base)
        return None if ring is None else ring.stage_at(place.ahead - ring.first.ahead)

    def parity(self, place: _Place) -> Expr | None:
        """Return the parity by a ring's variable, if one follows it."""
        ring = self.rings.get(place.base)
        return None if ring is None or ring.parity is None else ring.parity_at(place.ahead - ring.first.ahead)


class _Count(Known):
    """Rewrite loops after the loops inside them, and the statements behind them."""

    forms: _Forms

    def visit_Kernel(self, kernel: Kernel) -> Kernel:
        """Compare positions within one kernel."""
        self.forms = _Forms(Atoms())
        return super().visit_Kernel(kernel)

    def visit_Block(self, block: Block) -> Block:
        """Rewrite the loops of a block. Statements behind a loop find its rings where they stand."""
        new: Block = super().visit_Block(block)
        loops = [one for one in new.stmts if isinstance(one, For)]
        if not loops:
            return new
        outer, found, standing = self.ranges, list[Stmt](), dict[Hashable, _Ring]()
        for one in new.stmts:
            standing = self._left(standing, one)
            moved = _UseVariables(self.forms, None, standing)(one) if standing else one
            found += [name for ring in standing.values() for name in ring.taken()]
            if isinstance(moved, For) and (rings := self._rings(moved)):
                found += self._loop(moved, rings)
                standing |= self._behind(moved, rings)
            else:
                found.append(moved)
            if isinstance(one, Let):
                self.ranges = self.ranges.define(one.var, one.value)
        self.ranges = outer
        return with_fields(new, stmts=tuple(found))

    def _rings(self, loop: For) -> list[_Ring]:
        """Return the rings that a loop steps through, each with new variables."""
        if loop.kind is not LoopKind.SERIAL or loop.step != 1 or contains(loop.body, Break, Continue):
            return []
        seen = _Places(self.forms, loop.vars[0])
        seen(loop.body)
        changing = _changed_in(loop)
        stages, parities = (
            [place for place in places if place.step and changing.isdisjoint(self.forms.used(place.rest))]
            for places in (seen.stages, seen.parities)
        )
        by_base: dict[Hashable, list[_Place]] = {}
        for place in sorted(stages, key=lambda place: place.ahead):
            by_base.setdefault(place.base, []).append(place)
        rings = (self._ring(loop, same, parities) for same in by_base.values())
        return [ring for ring in rings if ring is not None]

    def _ring(self, loop: For, same: list[_Place], parities: Iterable[_Place]) -> _Ring | None:
        """Return the variables for places of one base, with those of the parities that waits there ask for.

        None if nothing tells where the loop begins.
        """
        size = same[0].period
        waits = sorted((p for p in parities if p.modulo(size).base == same[0].base), key=lambda p: p.ahead)
        waits = [p for p in waits if p.base == waits[0].base]
        step = waits[0].step if waits else same[0].step

        def asked(first: int) -> frozenset[int]:
            """Return which stages ahead an iteration asks for if its variables stand there."""
            return frozenset({(p.ahead - first) % size for p in (*same, *waits)} | {step % size}) - {0}

        best = min((p.ahead for p in same), key=lambda first: len(asked(first)))
        first = replace(waits[0] if waits else same[0], ahead=best)
        start = self._start(loop, first)
        if start is None:
            return None
        stage, parity = Buffer("stage", (), int32, "var", below=size), Buffer("parity", (), int32, "var", below=2)
        return _Ring(size, first, start, stage, parity if waits else None, asked(best))

    def _start(self, loop: For, first: _Place) -> Expr | None:
        """Return the position at which a loop's first iteration finds a ring; None if nothing tells it."""
        place = self.forms.iteration(first, loop.starts[0])
        total = None if place is None else self.forms.expr(place.rest)
        if place is None or total is None:
            return None
        return simplify((total + place.ahead) % first.period, self.ranges)

    def _loop(self, loop: For, rings: list[_Ring]) -> Iterator[Stmt]:
        """Yield a loop that steps rings, behind the allocation of their variables."""
        for ring in rings:
            yield Alloc(ring.stage, simplify(ring.start % ring.stages, self.ranges), span=loop.span)
            if ring.parity is not None:
                yield Alloc(ring.parity, simplify(ring.start // ring.stages, self.ranges), span=loop.span)
        body = _UseVariables(self.forms, loop.vars[0], _by_base(rings))(loop.body)
        steps = [step for ring in rings for step in ring.steps()]
        names = [name for ring in rings for name in ring.taken()]
        yield rebuilt(loop, body=Block((*names, *body.stmts, *steps)))

    def _behind(self, loop: For, rings: list[_Ring]) -> dict[Hashable, _Ring]:
        """Return the rings whose positions behind the loop are known, by their bases there."""
        start, stop = loop.starts[0], loop.stops[0]
        if not self.ranges.prove(binary("<=", start, stop)) or contains(stop, Load):
            return {}
        ends = ((ring, self.forms.iteration(ring.first, stop)) for ring in rings)
        return _by_base([replace(ring, first=end, names={}, waiting=[]) for ring, end in ends if end is not None])

    def _left(self, standing: dict[Hashable, _Ring], one: Stmt) -> dict[Hashable, _Ring]:
        """Return the rings whose positions still hold behind a statement."""
        written = IdSet(store.buffer for store in find(one, Store))
        return {base: ring for base, ring in standing.items() if not written & IdSet(self.forms.used(ring.first.rest))}


def _by_base(rings: Iterable[_Ring]) -> dict[Hashable, _Ring]:
    """Return rings by the bases of their parities and of their stages."""
    found: dict[Hashable, _Ring] = {}
    for ring in rings:
        found[ring.first.modulo(ring.stages).base] = found[ring.first.base] = ring
    return found


def _changed_in(loop: For) -> IdSet[Var | Buffer]:
    """Return what a loop binds or writes."""
    found: IdSet[Var | Buffer] = IdSet(loop.vars)
    for node in find(loop.body, For, Let, Store):
        found.update(node.vars if isinstance(node, For) else [node.var if isinstance(node, Let) else node.buffer])
    return found
