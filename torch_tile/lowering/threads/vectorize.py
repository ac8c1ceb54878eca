# SPDX-License-Identifier: Apache-2.0
"""Turn vectorised loops into wide accesses to memory, and unrolled loops on local arrays.

A wide access copies neighbours between memory and a local array, or adds such an array to global memory. An access is
wide if neighbours in the loop are neighbours in memory and the first one is certainly aligned. Other accesses stay as
they are. Widths are powers of two up to 16 bytes. May assume one-dimensional local arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import Span
from torch_tile.hardware import VECTOR_BYTES
from torch_tile.intrinsics.memory import added, adds_at_once, atomic_add_vector, vector_copy
from torch_tile.ir import dtype as dt
from torch_tile.ir.arith_util import Substitute, terms_of
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import LOGICAL, Address, Binary, Call, Const, Expr, Load, Select, Var, binary, cast, const
from torch_tile.ir.idmap import IdMap, mentions
from torch_tile.ir.node import Rewriter, children, contains, equal, find, symbols, with_fields
from torch_tile.ir.scope_facts import Known
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Alloc, Block, Do, For, If, Let, LoopKind, Program, Stmt, Store
from torch_tile.lowering.analysis.clone import Instance
from torch_tile.lowering.common.flatten import linear
from torch_tile.tileop.base import aligned_run, strides_of

ON_CHIP = ("local", "var")
Access = Load | Store | Address


def vectorize(program: Program, build: Build) -> Program:
    """Replace every vectorised loop. Afterwards calls alone touch several elements at once."""
    return _Vectorize(build.target.capability)(program)  # type: ignore[no-any-return]


class _Vectorize(Known):
    """Replace the vectorised loops of a program by wide accesses and unrolled loops."""

    def __init__(self, capability: int):
        super().__init__()
        self.capability = capability

    def visit_For(self, loop: For) -> Stmt:
        """Replace a vectorised loop; it becomes a serial or unrolled loop if no access is wide."""
        if loop.kind is not LoopKind.VECTOR:
            return super().visit_For(loop)
        loop = replace(loop, kind=LoopKind.UNROLLED)
        count = loop.stops[0]
        if not isinstance(count, Const) or not isinstance(loop.starts[0], Const):
            return super().visit_For(replace(loop, kind=LoopKind.SERIAL))
        if loop.starts[0].value != 0 or loop.step != 1:
            return super().visit_For(loop)
        outer, self.ranges = self.ranges, self.entered(loop)
        new = _Loop(self, loop, int(count.value)).run()
        self.ranges = outer
        return super().visit_For(loop) if new is None else new


class _Loop:
    """Rewrite one loop of `count` steps, with its wide accesses taken out of it."""

    def __init__(self, known: _Vectorize, loop: For, count: int):
        self.known, self.loop, self.count = known, loop, count
        self.var, self.span = loop.vars[0], loop.span
        self.before: list[Stmt] = []
        self.after: list[Stmt] = []
        self.loaded: list[tuple[Load, Buffer]] = []
        self.inside: set[Var] = set()  # names whose value differs between steps

    def run(self) -> Stmt | None:
        """Return the statements that replace the loop; None if no access is wide."""
        body = _without_index_names(self.loop.body, self.var)
        if len(body.stmts) == 1 and isinstance(body.stmts[0], If):
            return self.hoisted(body.stmts[0])
        if not all(isinstance(s, Let) or _target(s) is not None for s in body.stmts) or not _is_ordered(body):
            return None
        if (moved := self.moved(body)) is not None:
            return moved
        written = {place.buffer for s in body.stmts if (place := _target(s)) is not None}
        new = []
        for s in body.stmts:
            if isinstance(s, Let) and not self.differs(s.value) and not any(n.buffer in written for n in _loads_of(s)):
                self.before.append(s)  # wide accesses before the loop may use the name
                continue
            if isinstance(s, Let):
                self.inside.add(s.var)
            new.append(self.statement(s))
        if not self.loaded and not self.after:
            return None
        compute = replace(self.loop, body=Block(tuple(new)))
        return Block((*self.before, compute, *self.after), span=self.span)

    def hoisted(self, node: If) -> Stmt | None:
        """Move a branch out of the loop, with a test in front if only some steps may take it."""
        written = {n.buffer for n in find(node, Store, Address)}
        read = (n for n in find(node.condition, Load))
        if any(n.buffer in written for n in read):
            return None
        found = in_all_steps(node.condition, self.var, self.count, self.known)
        if found is None or (not found[1] and node.otherwise.stmts):
            return None
        condition, same = found
        then = self.again(node.then, LoopKind.VECTOR)
        if same:
            otherwise = self.again(node.otherwise, LoopKind.VECTOR) if node.otherwise.stmts else node.otherwise
            return If(condition, Block((then,)), Block((otherwise,)), span=node.span)
        single = self.again(Block((node,)), LoopKind.UNROLLED)
        return If(condition, Block((then,)), Block((single,)), span=node.span)

    def again(self, body: Block, kind: LoopKind) -> Stmt:
        """Rewrite another loop of the same length."""
        loop = Instance(IdMap(), IdMap(), fresh=True)(replace(self.loop, kind=kind, body=body))
        return self.known(loop)  # type: ignore[no-any-return]

    def moved(self, body: Block) -> Stmt | None:
        """Turn a loop that only copies into wide copies, through a local array if neither end is one."""
        if len(body.stmts) != 1 or not isinstance(body.stmts[0], Store) or not isinstance(body.stmts[0].value, Load):
            return None
        store, load = body.stmts[0], body.stmts[0].value
        on_chip = [x.buffer.scope in ON_CHIP for x in (store, load)]
        widths = self.width(store), self.width(load)
        if all(on_chip) or min(widths) == 1:
            return None
        dst, src = self.at_start(store), self.at_start(load)
        read = partial(vector_copy, policy=load.policy)
        if any(on_chip):
            return self.copies(dst, src, min(widths), store.span, read)
        local = self.local(load.buffer)
        fetch = self.copies(_first_address(local), src, widths[1], store.span, read)
        put = self.copies(dst, _first_address(local), widths[0], store.span)
        return Block((*self.before, fetch, put), span=self.span)

    def statement(self, s: Stmt) -> Stmt:
        """Rewrite a statement of the loop with its wide accesses on local arrays."""
        if isinstance(s, Let):
            return replace(s, value=self.value(s.value))
        if (add := added(s)) is not None:
            return self.addition(s, add)
        assert isinstance(s, Store)
        value = self.value(s.value)
        indices = tuple(self.value(i) for i in s.indices)
        width = self.width(s) if s.buffer.scope not in ON_CHIP else 1
        if width == 1:
            return replace(s, value=value, indices=indices)
        local = self.local(s.buffer)
        self.after.append(self.copies(self.at_start(s), _first_address(local), width, s.span))
        return Store(local, (self.var,), value, span=s.span)

    def addition(self, s: Stmt, add: Call) -> Stmt:
        """Rewrite an atomic addition; a vector addition first collects its values in a local array."""
        place, value = add.args[0], self.value(add.args[1])
        assert isinstance(place, Address)
        dtype = place.buffer.dtype
        width = min(self.width(place), adds_at_once(dtype, self.known.capability))
        if width == 1:
            indices = tuple(self.value(i) for i in place.indices)
            return Do(replace(add, args=(replace(place, indices=indices), value)), span=s.span)
        local = self.local(place.buffer)
        self.after.append(self.copies(self.at_start(place), _first_address(local), width, s.span, atomic_add_vector))
        return Store(local, (self.var,), cast(value, dtype), span=s.span)

    def value(self, expr: Expr) -> Expr:
        """Replace the wide loads in a value by elements of local arrays."""
        return _Loads(self)(expr)  # type: ignore[no-any-return]

    def load(self, load: Load) -> Expr | None:
        """Return the element of a local array that replaces a load; None if the load is not wide."""
        for known, local in self.loaded:
            if equal(known, load):
                return Load(local, (self.var,), span=load.span)
        width = self.width(load)
        if width == 1:
            return None
        local = self.local(load.buffer)
        self.loaded.append((load, local))
        read = partial(vector_copy, policy=load.policy)
        self.before.append(self.copies(_first_address(local), self.at_start(load), width, load.span, read))
        return Load(local, (self.var,), span=load.span)

    def local(self, buffer: Buffer) -> Buffer:
        """Make a local array for the steps of the loop, and allocate it before the loop."""
        local = Buffer(f"{buffer.name}_vector", (const(self.count, dt.int32),), buffer.dtype, "local", span=self.span)
        self.before.append(Alloc(local, span=self.span))
        return local

    def differs(self, expr: Expr) -> bool:
        """Return whether a value may differ between steps."""
        return not symbols(expr).isdisjoint((self.var, *self.inside))

    def at_start(self, access: Access) -> Address:
        """Return the address of the first step's element."""
        zero = Substitute({self.var: const(0, self.var.type)})
        indices = tuple(simplify(zero(i), self.known.ranges) for i in access.indices)
        return Address(access.buffer, indices, span=access.span)

    def copies(
        self,
        dst: Address,
        src: Address,
        width: int,
        span: Span | None,
        copy: Callable[[Address, Address, int], Do] = vector_copy,
    ) -> Stmt:
        """Copy the elements of all steps, or add them, `width` at a time."""
        size = width * dst.buffer.dtype.itemsize
        if width == self.count:
            return replace(copy(dst, src, size), span=span)
        step = Var("chunk", dt.int32, "loop")
        at = binary("*", step, const(width, dt.int32))
        body = replace(copy(_address_after(dst, at), _address_after(src, at), size), span=span)
        stop = const(self.count // width, dt.int32)
        return For(LoopKind.UNROLLED, (step,), (const(0, dt.int32),), (stop,), Block((body,)), span=span)

    def width(self, access: Access) -> int:
        """Return the elements of one access: a power of two that divides the steps and the first element's place."""
        buffer = access.buffer
        if buffer.scope == "var" or not access.indices:
            return 1
        start = self.at_start(access)
        expand = self.known.values  # what names of indices stand for may show which digits a step can change
        if not (
            self.in_a_row(access.indices, start.indices[-1])
            or self.in_a_row(tuple(map(expand, access.indices)), expand(start.indices[-1]))
        ):
            return 1
        width = math.gcd(self.count, VECTOR_BYTES // buffer.dtype.itemsize, 1 << 10)
        while width > 1 and not self.is_aligned(start, width):
            width //= 2
        return width

    def in_a_row(self, indices: tuple[Expr, ...], first: Expr) -> bool:
        """Return whether only the last index differs between steps, by one from each to the next."""
        *others, last = (simplify(i, self.known.ranges) for i in indices)
        if any(self.differs(i) for i in others) or not self.inside.isdisjoint(symbols(last)):
            return False
        ahead = _WithoutRemainders()(binary("-", last, first))
        return equal(simplify(ahead, self.known.ranges), self.var)

    def is_aligned(self, start: Address, width: int) -> bool:
        """Return whether `width` elements from `start` on are contiguous, at a multiple of their size."""
        buffer = start.buffer
        if not buffer.may_start_at(width * buffer.dtype.itemsize):
            return False
        if buffer.layout is not None:
            return aligned_run(buffer) % width == 0 and self.known.divides(width, start.indices[-1])
        strides = strides_of(buffer)
        unit = isinstance(strides[-1], Const) and strides[-1].value == 1
        return unit and self.known.divides(width, linear(start.indices, strides))


class _Loads(Rewriter):
    """Replace the wide loads in a value, except on-chip loads that a condition protects."""

    def __init__(self, loop: _Loop):
        self.loop, self.protected = loop, False

    def visit_Load(self, load: Load) -> Expr:
        """Replace a wide load that no condition protects on chip."""
        new = self.children(load)
        scope = load.buffer.scope
        if new is not load or scope in ON_CHIP or (self.protected and scope != "global"):
            return new
        wide = self.loop.load(load)
        return load if wide is None else wide

    def visit_Select(self, node: Select) -> Expr:
        """Visit both values as protected by the condition."""
        condition = self(node.condition)
        outer, self.protected = self.protected, True
        a, b = self(node.a), self(node.b)
        self.protected = outer
        if condition is node.condition and a is node.a and b is node.b:
            return node
        return Select(condition, a, b, span=node.span)

    def visit_Binary(self, node: Binary) -> Expr:
        """Visit the second operand of `and` and `or` as protected by the first."""
        if node.op not in LOGICAL:
            return self.children(node)
        a = self(node.a)
        outer, self.protected = self.protected, True
        b = self(node.b)
        self.protected = outer
        return with_fields(node, a=a, b=b)


class _WithoutRemainders(Rewriter):
    """Rewrite `x % c` as `x - x // c * c`: floor divisions show that they stay the same in all steps."""

    def visit_Binary(self, node: Binary) -> Expr:
        new = self.children(node)
        if new.op != "%" or not isinstance(new.b, Const) or not new.dtype.is_integer:
            return new
        return binary("-", new.a, binary("*", binary("//", new.a, new.b), new.b))


def _first_address(local: Buffer) -> Address:
    """Return the address of a local array's first element."""
    return Address(local, (const(0, dt.int32),))


def _address_after(address: Address, by: Expr) -> Address:
    """Return the address `by` elements further."""
    last = simplify(binary("+", address.indices[-1], by))
    return replace(address, indices=(*address.indices[:-1], last))


def _without_index_names(body: Block, var: Var) -> Block:
    """Replace integer names that depend on the step by their values, so that indices show the step."""
    known: dict[Var, Expr] = {}
    inline = Substitute(known)
    stmts: list[Stmt] = []
    for s in body.stmts:
        new = inline(s)
        if (
            isinstance(new, Let)
            and new.var.dtype.is_integer
            and mentions(new.value, var)
            and not contains(new.value, Load)
        ):
            known[new.var] = new.value
        else:
            stmts.append(new)
    return Block(tuple(stmts), span=body.span)


def _is_ordered(body: Block) -> bool:
    """Return whether all loads may come before stores and additions: none of a written buffer, but at its place."""
    stores = [place for s in body.stmts if (place := _target(s)) is not None]
    stored = {place.buffer: place for place in stores}
    done: set[Buffer] = set()
    for s in body.stmts:
        for node in _loads_of(s):
            store = stored.get(node.buffer)
            if store is not None and (
                node.buffer in done or not all(equal(x, y) for x, y in zip(node.indices, store.indices, strict=True))
            ):
                return False
        if (place := _target(s)) is not None:
            done.add(place.buffer)
    return len(stored) == len(stores)


def _target(s: Stmt) -> Store | Address | None:
    """Return the place that a store or an atomic addition writes; None for other statements."""
    add = added(s)
    place = s if add is None else add.args[0]
    return place if isinstance(place, Store | Address) else None


def _loads_of(s: Stmt) -> Sequence[Load]:
    """Return the loads in a statement's values."""
    return [n for child in children(s) for n in find(child, Load)]


# Conditions inside vectorised loops: whether all steps agree on them, and when they hold in all steps.

ORDER = ("<", "<=", ">", ">=")


def in_all_steps(condition: Expr, var: Var, count: int, known: Known) -> tuple[Expr, bool] | None:
    """Return the condition that `condition` holds for all `var` in [0, count).

    Also return whether `condition` holds for no step otherwise. Return None if that is not known: only conjunctions of
    comparisons that are linear in `var` are understood.
    """
    whole: Expr | None = None
    same = True
    for term in terms_of("and", condition):
        found = _term(term, var, count, known)
        if found is None:
            return None
        whole = found[0] if whole is None else binary("and", whole, found[0])
        same = same and found[1]
    return None if whole is None else (whole, same)


def _term(term: Expr, var: Var, count: int, known: Known) -> tuple[Expr, bool] | None:
    """Return the answer of `in_all_steps` for one comparison."""
    if var not in symbols(term):
        return term, True
    if not isinstance(term, Binary) or term.op not in ORDER or contains(term, Load):
        return None
    if not term.a.dtype.is_integer:
        return None
    first, last = (_at_number(term, var, n, known) for n in (0, count - 1))
    gap = binary("-", term.b, term.a) if term.op in ("<", "<=") else binary("-", term.a, term.b)
    step = simplify(binary("-", _at_number(gap, var, 1, known), _at_number(gap, var, 0, known)), known.ranges)
    even = simplify(binary("-", gap, binary("+", _at_number(gap, var, 0, known), binary("*", step, var))), known.ranges)
    if not isinstance(step, Const) or not isinstance(even, Const) or even.value != 0:
        return None
    if step.value == -1 and term.op in ("<", ">") and known.divides(count, _at_number(gap, var, 0, known)):
        return first, True  # the gap is a multiple of `count` and closes by less than `count`
    return (last if step.value < 0 else first), False


def _at_number(expr: Expr, var: Var, value: int, known: Known) -> Expr:
    """Substitute a number for a variable, and simplify."""
    return simplify(Substitute({var: const(value, var.type)})(expr), known.ranges)
