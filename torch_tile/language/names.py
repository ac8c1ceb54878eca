# SPDX-License-Identifier: Apache-2.0
"""What a kernel's source says of its names: which behave as variables, and which are read after a region binds them.

Python runs both branches of a device `if`, and the body of a device loop once. A name that is bound there and read
later needs care (branches.py, recorder.py); one that is only read where it was bound needs none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

Names = frozenset[str]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def mutable_names(tree: ast.FunctionDef) -> set[str]:
    """Names bound at one nesting level and bound again deeper inside a loop or branch: they behave as variables."""
    levels: dict[str, set[tuple[int, ...]]] = {}

    def visit(node: ast.AST, path: tuple[int, ...]) -> None:
        if isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef) and node is not tree:
            return
        for name in _assigned(node):
            levels.setdefault(name, set()).add(path)
        inner = (*path, id(node)) if isinstance(node, ast.For | ast.While | ast.If) else path
        for child in ast.iter_child_nodes(node):
            visit(child, inner)

    visit(tree, ())
    return {
        name for name, paths in levels.items()
        if any(a != b and b[: len(a)] == a for a in paths for b in paths)
    }  # fmt: skip


class Reads:
    """For each `if` of a function: the names that it binds, and whether each may be read after it.

    For each loop: the names that it binds and that may be read after it, or in a turn before they are bound there.
    """

    def __init__(self, tree: ast.FunctionDef):
        nested = [n for n in ast.walk(tree) if isinstance(n, _FUNCTIONS) and n is not tree]
        # Functions inside are called at any time.
        self.always: Names = frozenset(name for each in nested for name in _loaded(each))
        self.elsewhere = {
            name for n in ast.walk(tree) if isinstance(n, ast.Global | ast.Nonlocal) for name in n.names
        }  # fmt: skip
        self.after: dict[ast.If | ast.For | ast.While, Names] = {}
        self.at_start: dict[ast.For | ast.While, Names] = {}
        self.loops: list[tuple[Names, Names]] = []  # what is read after `continue`, and after `break`
        self._block(tree.body, frozenset())

    def of_branches(self, node: ast.If) -> list[tuple[str, bool]]:
        """The names bound in an `if`, and whether they may be read after it."""
        read = self.after[node] | self.always
        return [(name, name in read) for name in self._bound([*node.body, *node.orelse])]

    def of_loop(self, node: ast.For | ast.While) -> list[str]:
        """The names bound in a loop that may be read after it."""
        read = self.after[node] | self.always
        return [name for name in self._bound(node.body) if name in read]

    def carried(self, node: ast.For | ast.While) -> list[str]:
        """The names that an iteration binds and may read before that."""
        return [name for name in self._bound(node.body) if name in self.at_start[node]]

    def _bound(self, stmts: list[ast.stmt]) -> list[str]:
        return [name for name in dict.fromkeys(_bound(stmts)) if name not in self.elsewhere]

    def _block(self, stmts: list[ast.stmt], after: Names) -> Names:
        for stmt in reversed(stmts):
            after = self._before(stmt, after)
        return after

    def _before(self, stmt: ast.stmt, after: Names) -> Names:
        """The names that may be read from `stmt` on, before they are bound, given those of what follows it."""
        match stmt:
            case ast.If():
                self.after[stmt] = after
                return _loaded(stmt.test) | self._block(stmt.body, after) | self._block(stmt.orelse, after)
            case ast.For() | ast.While():
                return self._loop(stmt, after)
            case ast.With():
                names = {name for item in stmt.items if item.optional_vars for name in _stored(item.optional_vars)}
                items = (_loaded(each) for each in stmt.items)
                return (self._block(stmt.body, after) - names).union(*items)
            case ast.Break():
                return self.loops[-1][1]
            case ast.Continue():
                return self.loops[-1][0]
            case ast.Return() | ast.Raise():
                return _loaded(stmt)
            case ast.AugAssign(target=ast.Name(id=name)):
                return after | _loaded(stmt) | {name}
            case ast.FunctionDef() | ast.ClassDef():
                return after - {stmt.name} | _loaded(stmt)
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                return after - set(_assigned(stmt)) | _loaded(stmt)
        after = after | _loaded(stmt)  # whatever else there is may bind nothing, and leave its blocks at any time
        for part in (stmt, *getattr(stmt, "handlers", ()), *getattr(stmt, "cases", ())):
            for field in ("body", "orelse", "finalbody"):
                self._block(getattr(part, field, []), after)
        return after

    def _loop(self, loop: ast.For | ast.While, after: Names) -> Names:
        bound = frozenset(_stored(loop.target)) if isinstance(loop, ast.For) else frozenset()
        turn = self._block(loop.orelse, after)  # where it is decided whether there is another one
        self.after[loop] = turn | after
        if isinstance(loop, ast.While):
            turn |= _loaded(loop.test)
        while True:
            self.loops.append((turn, after))
            start = self._block(loop.body, turn) - bound
            self.loops.pop()
            if start <= turn:
                break
            turn |= start
        self.at_start[loop] = start
        return turn | _loaded(loop.iter) if isinstance(loop, ast.For) else turn


def _loaded(node: ast.AST) -> Names:
    return frozenset(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))


def _stored(target: ast.AST) -> Iterator[str]:
    yield from (n.id for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def _assigned(node: ast.AST) -> Iterator[str]:
    """The names that an assignment itself binds."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.AnnAssign) and node.value is not None):
        targets = [node.target]
    for target in targets:
        yield from _stored(target)


def _bound(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The names that statements bind in whatever way, without those of functions and comprehensions inside."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, _COMPREHENSIONS):
            yield from (n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr))
        elif not isinstance(node, _FUNCTIONS):
            yield from _bound(ast.iter_child_nodes(node))
