# SPDX-License-Identifier: Apache-2.0
"""Track names that the branches of a device `if` bind: their values in the other branch, and after the `if`.

Python runs both branches, one after the other. Each branch must see the state before the `if`, so the recorder resets
names between them. After the `if`, a name that the branches leave different becomes a choice between two values, if
that suffices. Else it becomes a variable, which each branch sets at its end. Some names can become
neither: one branch leaves them unbound, or binds them to no number. They are unbound after the `if`, and reading one is
an `out_of_scope` error of the author.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch_tile.intrinsics.base import is_pure
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Call, Expr, Load, Var, is_number, pair, select
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Alloc, Break, Continue, Let, Store
from torch_tile.language.syntax_nodes import nodes_of, parts_of
from torch_tile.language.trace import Replaced, Scope, Tracer

UNBOUND = object()


class Branches:
    """Record one device `if`, and merge the names that its branches bind.

    `live` tells for each name if it may be read after the `if`. `before` and `homes` hold its earlier values and their
    scopes.
    """

    tracer: Tracer
    condition: Expr
    names: Sequence[str]
    live: Sequence[bool]
    before: Sequence[Any]
    homes: Mapping[str, Scope | None]
    chosen: int

    def __init__(
        self,
        tracer: Tracer,
        condition: Expr,
        names: Sequence[str],
        live: Sequence[bool],
        before: Sequence[Any],
        homes: Mapping[str, Scope | None],
    ):
        self.tracer, self.condition = tracer, condition
        self.names, self.live, self.before, self.homes = names, live, before, homes
        self.scopes: list[Scope] = []  # of the branches
        self.ends: list[list[Any]] = []  # by branch and name; UNBOUND also for what can no longer be read
        self.left: Sequence[Any] = ()  # by the first branch
        self.variables: list[Buffer] = []
        self.chooses: bool = False  # whether both branches only compute values
        self.chosen = 0  # names that became a choice

    def end(self, values: Sequence[Any]) -> list[Any]:
        """End a branch whose names are bound to `values`, and return their bindings from there on."""
        self.ends.append([value if self._is_alive(value) else UNBOUND for value in values])
        self.chooses = len(self.ends) == 2 and all(map(_is_cheap, self.scopes))
        if len(self.ends) == 1:
            self.left = values
            return [self._in_second_branch(b, value) for b, value in zip(self.before, values, strict=True)]
        return [self._joined(position, value) for position, value in enumerate(values)]

    @property
    def is_over(self) -> bool:
        """Return whether both branches have ended."""
        return len(self.ends) == 2

    @property
    def is_done(self) -> bool:
        """Return whether selects replace the whole `if`, so that it need not be recorded."""
        return self.chosen > 0 and not self.variables

    def declare(self) -> None:
        """Record the variables that the `if` needs, in front of it."""
        for buffer in self.variables:
            self.tracer.emit(Alloc(buffer))
            self.tracer.own(buffer)

    def _is_alive(self, value: Any) -> bool:
        """Return whether all symbols of a value are still in scope."""
        return not isinstance(value, Expr) or not any(n.is_symbol and self.tracer.has_ended(n) for n in walk(value))

    @staticmethod
    def _in_second_branch(before: Any, value: Any) -> Any:
        """Return the value of a name in the second branch, which cannot read device values of the first branch."""
        return value if before is UNBOUND and isinstance(value, Expr) else before

    def _joined(self, position: int, value: Any) -> Any:
        """Join the values of a name from both branches."""
        name, ends = self.names[position], [(s, e[position]) for s, e in zip(self.scopes, self.ends, strict=True)]
        if not self.live[position]:
            return self.left[position] if value is UNBOUND else value
        if value is self.left[position]:
            return value
        ends = [(scope, end) for scope, end in ends if not _is_left(scope)] or ends
        first, last = ends[0][1], ends[-1][1]
        if is_same(first, last) and (len(ends) == 2 or not isinstance(first, Expr) or first is self.before[position]):
            return first
        if not (is_scalar(first) and is_scalar(last)):
            self.tracer.lost[name] = "if"
            return UNBOUND
        made = pair(first, last, f"`{name}`")
        if self.chooses and len(ends) == 2:
            return self._choice(name, made)
        variable = Buffer(name, (), made[0].dtype, "var")
        for (scope, _), end in zip(ends, made, strict=False):
            scope.stmts.append(Store(variable, (), end))
        self.variables.append(variable)
        return Load(variable, ())

    def _choice(self, name: str, ends: Sequence[Expr]) -> Expr:
        """Name, in front of the `if`, the value that the condition chooses."""
        known = IdMap((one.var, one.value) for scope in self.scopes for one in scope.stmts if isinstance(one, Let))
        value = select(self.condition, *(Replaced(known)(end) for end in ends))
        around = self.tracer.scopes[-2]
        made = Var(name, value.dtype, "let")
        around.stmts.append(Let(made, value))
        self.tracer.owner[made] = around
        self.chosen += 1
        return made


MOST_CHOSEN = 32  # nodes that a branch may compute for a choice, which spells them out


def _is_cheap(scope: Scope) -> bool:
    """Return whether a branch only names values, in so few nodes that both branches may be computed."""
    if not all(isinstance(stmt, Let) for stmt in scope.stmts):
        return False
    nodes = [node for stmt in scope.stmts for node in walk(stmt)]
    return len(nodes) <= MOST_CHOSEN and all(is_pure(node) for node in nodes if isinstance(node, Call))


def is_scalar(value: Any) -> bool:
    """Return whether a value is a number, or an expression of one."""
    return isinstance(value, Expr) or is_number(value)


def is_same(a: Any, b: Any) -> bool:
    """Return whether two values are the same object, or equal numbers, strings or tuples of such."""
    if type(a) is tuple and type(b) is tuple:
        return len(a) == len(b) and all(map(is_same, a, b))
    return a is b or (type(a) is type(b) and isinstance(a, bool | int | float | str) and repr(a) == repr(b))


def _is_left(scope: Scope) -> bool:
    """Return whether a branch always leaves the enclosing loop, so that nothing after the `if` follows it."""
    return bool(scope.stmts) and isinstance(scope.stmts[-1], Break | Continue)


# Which names of a kernel's source behave as variables, and which are read after a region binds them. Python runs both
# branches of a device `if`, and the body of a device loop once. A name that is bound there and read later needs care
# (branches.py, recorder.py). A name that is read only where it was bound needs none.

Names = frozenset[str]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def mutable_names(tree: ast.FunctionDef, reads: Reads) -> set[str]:
    """Find names that need a mutable variable: bound outside a loop and inside it, and read later or after it."""
    levels: dict[str, set[tuple[ast.AST, ...]]] = {}

    def visit(node: ast.AST, path: tuple[ast.AST, ...]) -> None:
        if isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef) and node is not tree:
            return
        for name in _assigned(node):
            levels.setdefault(name, set()).add(path)
        inner = (*path, node) if isinstance(node, ast.For | ast.While | ast.If) else path
        for child in parts_of(node):
            visit(child, inner)

    visit(tree, ())
    return {
        name for name, paths in levels.items()
        if any(b[: len(a)] == a and reads.outlives(name, b[len(a) :]) for a in paths for b in paths)
    }  # fmt: skip


class Reads:
    """Find the names that each `if` and loop of a function binds and that may be read afterwards.

    For an `if` these are all names that it binds, each with whether it may be read later. For a loop they are the names
    that may be read after it. Names that an iteration may read before it binds them count, too.
    """

    def __init__(self, tree: ast.FunctionDef):
        nodes = nodes_of(tree)
        nested = [n for n in nodes if isinstance(n, _FUNCTIONS) and n is not tree]
        self.loaded: dict[ast.AST, Names] = {}
        # Functions inside are called at any time.
        self.always: Names = frozenset(name for each in nested for name in self._loaded(each))
        self.elsewhere: set[str] = {
            name for n in nodes if isinstance(n, ast.Global | ast.Nonlocal) for name in n.names
        }  # fmt: skip
        self.after: dict[ast.If | ast.For | ast.While, Names] = {}
        self.at_start: dict[ast.For | ast.While, Names] = {}
        self.loops: list[tuple[Names, Names]] = []  # what is read after `continue`, and after `break`
        self._block(tree.body, frozenset())

    def of_branches(self, node: ast.If) -> list[tuple[str, bool]]:
        """Return the names bound in an `if`, and whether each may be read after it."""
        read = self.after[node] | self.always
        return [(name, name in read) for name in self._bound([*node.body, *node.orelse])]

    def of_loop(self, node: ast.For | ast.While) -> list[str]:
        """Return the names bound in a loop that may be read after it."""
        read = self.after[node] | self.always
        return [name for name in self._bound(node.body) if name in read]

    def outlives(self, name: str, around: tuple[ast.AST, ...]) -> bool:
        """Return whether a binding in these loops and branches may be read in another iteration, or after a loop."""
        loops = [node for node in around if isinstance(node, ast.For | ast.While)]
        return bool(loops) and (
            name in self.always
            or name in self.elsewhere
            or any(name in self.at_start[loop] | self.after[loop] for loop in loops)
            or any(isinstance(loop, ast.While) and name in self._loaded(loop.test) for loop in loops)
        )

    def carried(self, node: ast.For | ast.While) -> list[str]:
        """Return the names that an iteration binds and may read before it binds them."""
        return [name for name in self._bound(node.body) if name in self.at_start[node]]

    def _loaded(self, node: ast.AST) -> Names:
        """Return the names that a node reads."""
        found = self.loaded.get(node)
        if found is None:
            names = (n for n in nodes_of(node) if isinstance(n, ast.Name))
            found = self.loaded[node] = frozenset(n.id for n in names if isinstance(n.ctx, ast.Load))
        return found

    def _bound(self, stmts: list[ast.stmt]) -> list[str]:
        """Return the names that statements bind, without those bound elsewhere."""
        return [name for name in dict.fromkeys(_bound(stmts)) if name not in self.elsewhere]

    def _block(self, stmts: list[ast.stmt], after: Names) -> Names:
        """Return the names that are live in front of a block; `after` are those live behind it."""
        for stmt in reversed(stmts):
            after = self._live_before(stmt, after)
        return after

    def _live_before(self, stmt: ast.stmt, after: Names) -> Names:
        """Return the names that are live in front of `stmt`; `after` are those live behind it."""
        match stmt:
            case ast.If():
                self.after[stmt] = after
                return self._loaded(stmt.test) | self._block(stmt.body, after) | self._block(stmt.orelse, after)
            case ast.For() | ast.While():
                return self._loop(stmt, after)
            case ast.With():
                names = {name for item in stmt.items if item.optional_vars for name in _stored(item.optional_vars)}
                items = (self._loaded(each) for each in stmt.items)
                return (self._block(stmt.body, after) - names).union(*items)
            case ast.Break():
                return self.loops[-1][1]
            case ast.Continue():
                return self.loops[-1][0]
            case ast.Return() | ast.Raise():
                return self._loaded(stmt)
            case ast.AugAssign(target=ast.Name(id=name)):
                return after | self._loaded(stmt) | {name}
            case ast.FunctionDef() | ast.ClassDef():
                return after - {stmt.name} | self._loaded(stmt)
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                return after - set(_assigned(stmt)) | self._loaded(stmt)
        after = after | self._loaded(stmt)  # any other statement may bind nothing, and may leave its blocks at any time
        for part in (stmt, *getattr(stmt, "handlers", ()), *getattr(stmt, "cases", ())):
            for field in ("body", "orelse", "finalbody"):
                self._block(getattr(part, field, []), after)
        return after

    def _loop(self, loop: ast.For | ast.While, after: Names) -> Names:
        """Return the names that a loop reads before it binds them."""
        bound = frozenset(_stored(loop.target)) if isinstance(loop, ast.For) else frozenset()
        iteration = self._block(loop.orelse, after)  # where it is decided whether there is another one
        self.after[loop] = iteration | after
        if isinstance(loop, ast.While):
            iteration |= self._loaded(loop.test)
        while True:
            self.loops.append((iteration, after))
            start = self._block(loop.body, iteration) - bound
            self.loops.pop()
            if start <= iteration:
                break
            iteration |= start
        self.at_start[loop] = start
        return iteration | self._loaded(loop.iter) if isinstance(loop, ast.For) else iteration


def _stored(target: ast.AST) -> Iterator[str]:
    """Yield the names that an assignment target binds."""
    yield from (n.id for n in nodes_of(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def _assigned(node: ast.AST) -> Iterator[str]:
    """Return the names that an assignment itself binds."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.AnnAssign) and node.value is not None):
        targets = [node.target]
    for target in targets:
        yield from _stored(target)


def _bound(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Return the names that statements bind, without those inside functions and comprehensions."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, _COMPREHENSIONS):
            yield from (n.target.id for n in nodes_of(node) if isinstance(n, ast.NamedExpr))
        elif not isinstance(node, _FUNCTIONS):
            yield from _bound(parts_of(node))
