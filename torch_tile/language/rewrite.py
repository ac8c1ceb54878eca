# SPDX-License-Identifier: Apache-2.0
"""Rewrite a kernel's Python AST: redirect what Python cannot overload to the recorder. No other code touches the AST.

`if`, `while`, `for`, `and/or/not`, chained comparisons, `a if c else b`, `assert`, `break/continue`, `x = e` and
`range` become calls of a `Recorder` (trace.py). At run time the recorder asks if the value is Python's or the device's.
It acts at once on Python's values and records the device's. Positions are kept, so a frame of the rewritten function
still tells the author's line and columns.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Callable
from types import CellType, CodeType, FunctionType
from typing import Any

from torch_tile.diagnostics.errors import Span, error
from torch_tile.ir.idmap import IdMap
from torch_tile.language.branches import Reads, mutable_names
from torch_tile.language.syntax_nodes import fill_positions, nodes_of

RECORDER = "__tile__"
TRACED = "__traced__"
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
# By identity: codes are equal where only annotations inside of the functions differ: those of two files, or of a cell
# before and after an edit. Annotations of local names are not part of a code.
_COMPILED: IdMap[CodeType, CodeType] = IdMap()
_SOURCES: IdMap[CodeType, str] = IdMap()
_TREES: IdMap[CodeType, ast.FunctionDef] = IdMap()


def rewrite(function: FunctionType, make_recorder: Callable[[], Any]) -> Callable[..., Any]:
    """Redirect the constructs above in `function`. Every call asks `make_recorder` for its own recorder."""
    code = _COMPILED.get(function.__code__) or _compile(function)
    _COMPILED[function.__code__] = code
    author = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def run(*args: Any, **kwargs: Any) -> Any:
        # The author's own cells: a name that the enclosing function binds later is unbound here too.
        cells = author | {RECORDER: CellType(make_recorder())}
        closure = tuple(cells[name] for name in code.co_freevars)
        traced = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
        traced.__kwdefaults__ = function.__kwdefaults__
        return traced(*args, **kwargs)

    return run


def source_tree(function: FunctionType) -> ast.FunctionDef:
    """Return the function's AST with the positions of its file, to read only; `no_source` if it cannot be read."""
    tree = _TREES.get(function.__code__)
    if tree is None:
        tree = _TREES[function.__code__] = _parse(function)
    return tree


def _parse(function: FunctionType) -> ast.FunctionDef:
    """Return the function's AST as `source_tree` does, to change."""
    text = _SOURCES.get(function.__code__)
    if text is None:
        text = _SOURCES[function.__code__] = _source(function)
    tree = ast.parse(text).body[0]
    if isinstance(tree, ast.If):
        tree = tree.body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise error("no_source", None, name=function.__name__)
    return tree


def _source(function: FunctionType) -> str:
    """Return the text of a function with the positions of its file: inside of `if True:` if it is indented."""
    if function.__code__.co_name == "<lambda>":
        what, fix = "a lambda, which has no statements", "write the kernel by `def`"
        raise error("bad_function", None, decorator="torch_tile.jit", name="<lambda>", what=what, fix=fix)
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        raise error("no_source", None, name=function.__name__) from None
    # Not dedented, and behind as many lines as in the file: positions are those of the file, strings stay as they are.
    inside = lines[0][0].isspace()
    above = "\n" * (first - 2) + "if True:\n" if inside else "\n" * (first - 1)
    return above + "".join(lines)


def names_around(function: FunctionType) -> dict[str, Any]:
    """Return the values of a function's globals and of the variables around it that are bound."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {**function.__globals__, **{name: cell.cell_contents for name, cell in cells if _is_full(cell)}}


def parameter_span(function: FunctionType, name: str) -> Span | None:
    """Return the position of a parameter in the author's source."""
    for node in nodes_of(source_tree(function).args):
        if isinstance(node, ast.arg) and node.arg == name:
            end, stop = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset + 1
            return Span(function.__code__.co_filename, node.lineno, end, node.col_offset, stop)
    return None


def result_span(function: FunctionType) -> Span | None:
    """Return the position of a function's last `return`, or of its name if it has none."""
    tree = source_tree(function)
    nodes = nodes_of(tree)
    inner = {n for f in nodes if isinstance(f, _SCOPES) and f is not tree for n in nodes_of(f)}
    found = [n for n in nodes if isinstance(n, ast.Return) and n.value is not None and n not in inner]
    file = function.__code__.co_filename
    if not found:
        start = tree.col_offset + len("def ")
        return Span(file, tree.lineno, tree.lineno, start, start + len(tree.name))
    last = max(found, key=lambda n: n.lineno)
    return Span(file, last.lineno, last.end_lineno or last.lineno, last.col_offset, last.end_col_offset or 0)


def _compile(function: FunctionType) -> CodeType:
    """Compile the rewritten function; its free names are the author's and the recorder's."""
    tree = _parse(function)
    _refuse_signs(tree, function.__code__.co_filename)
    tree.body = _without_else([_WordsForCalls(function).visit(stmt) for stmt in tree.body])
    reads = Reads(tree)
    body = _Reroute(mutable_names(tree, reads), reads).rewrite_body(tree)
    inner = _function(
        TRACED, _without_annotations(tree.args), body or [ast.Pass()]
    )  # its own name is the author's: it may call itself
    names = [RECORDER, *function.__code__.co_freevars]
    outer = ast.arguments([], [ast.arg(n) for n in names], None, [], [], None, [])
    factory = _function("__factory__", outer, [inner])
    module = ast.Module([ast.copy_location(factory, tree)], [])
    ast.copy_location(inner, tree)
    fill_positions(module)
    try:
        code = compile(module, function.__code__.co_filename, "exec")
    except SyntaxError as problem:  # the author's own text was compiled before: only its calls of ours go too deep
        start, stop = (problem.offset or 1) - 1, (problem.end_offset or 2) - 1
        line = problem.lineno or tree.lineno
        span = Span(function.__code__.co_filename, line, problem.end_lineno or line, start, stop)
        raise error("nested_too_deep", span, name=tree.name) from None
    for _ in range(2):  # the factory, and in it the function
        code = next(c for c in code.co_consts if isinstance(c, CodeType))
    return code.replace(co_name=tree.name)


def _refuse_signs(tree: ast.FunctionDef, file: str) -> None:
    """Raise the error for `x =+ 1`: the sign stands beside `=` and apart from the operand, and `=` apart from `x`."""
    for node in (n for n in nodes_of(tree) if isinstance(n, ast.Assign)):
        value, target = node.value, node.targets[-1]
        if not isinstance(value, ast.UnaryOp) or not isinstance(value.op, ast.UAdd | ast.USub):
            continue
        line = linecache.getline(file, value.lineno).encode()  # positions count bytes
        between = line[target.end_col_offset : value.col_offset]
        if target.end_lineno == value.lineno and between == b" =" and line[value.col_offset + 1 :].startswith(b" "):
            sign = "+" if isinstance(value.op, ast.UAdd) else "-"
            start, stop = node.col_offset, node.end_col_offset or 0
            span = Span(file, node.lineno, node.end_lineno or node.lineno, start, stop)
            raise error("sign_behind_equals", span, name=ast.unparse(target), sign=sign)


def _function(name: str, args: ast.arguments, body: list[ast.stmt]) -> ast.FunctionDef:
    """Build the AST of a function."""
    function = ast.FunctionDef(name=name, args=args, body=body, decorator_list=[], returns=None)
    function.__dict__.setdefault("type_params", [])  # a field since Python 3.12
    return function


def _without_annotations(args: ast.arguments) -> ast.arguments:
    """Remove annotations and defaults from parameters (defaults are put back on the function object)."""
    for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg):
        if arg is not None:
            arg.annotation = None
    args.defaults = [ast.copy_location(ast.Constant(None), d) for d in args.defaults]
    args.kw_defaults = [ast.Constant(None) if d is not None else None for d in args.kw_defaults]
    return args


# Functions of Python's and NumPy's modules `random`.
DRAWS = frozenset(
    ("random", "randint", "uniform", "gauss", "normal", "normalvariate", "choice", "rand", "randn", "random_sample")
)


def _call(method: str, *args: ast.expr, at: ast.AST) -> ast.Call:
    """Build the AST of a call to the recorder."""
    recorder = ast.copy_location(ast.Name(RECORDER, ast.Load()), at)
    target = ast.copy_location(ast.Attribute(recorder, method, ast.Load()), at)
    return ast.copy_location(ast.Call(target, list(args), []), at)


def _lambda(body: ast.expr) -> ast.Lambda:
    """Build the AST of a lambda without parameters."""
    return ast.copy_location(ast.Lambda(ast.arguments([], [], None, [], [], None, []), body), body)


def _literal(values: tuple[Any, ...]) -> ast.expr:
    """Build the AST of a tuple of constants."""
    return ast.Tuple([ast.Constant(v) for v in values], ast.Load())


def _is_place(target: ast.expr) -> bool:
    """Return whether a target is `x.name` or `x[key]` with a plain key: no slice and no starred expression."""
    if isinstance(target, ast.Subscript):
        return not any(isinstance(n, ast.Slice | ast.Starred) for n in nodes_of(target.slice))
    return isinstance(target, ast.Attribute)


def _names(target: ast.expr) -> ast.expr:
    """Return the names in a target as a literal tuple of strings (None where it is not a plain name)."""
    if isinstance(target, ast.Tuple):
        return ast.Tuple([ast.Constant(e.id if isinstance(e, ast.Name) else None) for e in target.elts], ast.Load())
    return ast.Constant(target.id if isinstance(target, ast.Name) else None)


class _Reroute(ast.NodeTransformer):
    """Rewrite statements and expressions into calls of the recorder."""

    def __init__(self, mutable: set[str], reads: Reads):
        self.mutable, self.reads = mutable, reads
        self.loops: list[list[str]] = []  # for each loop around: the names bound in it and read after it
        self.shared: set[str] = set()  # names of `global` and `nonlocal`
        self.fresh = 0

    def rewrite_body(self, tree: ast.FunctionDef) -> list[ast.stmt]:
        """Rewrite the body of a function."""
        return self._block(tree.body)

    def _block(self, stmts: list[ast.stmt]) -> list[ast.stmt]:
        """Rewrite a list of statements."""
        out: list[ast.stmt] = []
        for stmt in stmts:
            new = self.visit(stmt)
            out.extend(new if isinstance(new, list) else [new])
        return out

    def _name(self) -> str:
        """Make a fresh name."""
        self.fresh += 1
        return f"__tile_{self.fresh}"

    # Nested functions and classes are helpers: plain Python unless decorated.
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Keep a nested class as it is."""
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    def visit_Assign(self, node: ast.Assign) -> Any:
        value = self.visit(node.value)
        if len(node.targets) > 1:  # a = b = e
            temp = self._name()
            stmts: list[ast.stmt] = [ast.copy_location(ast.Assign([ast.Name(temp, ast.Store())], value), node)]
            for target in node.targets:
                again = ast.copy_location(ast.Name(temp, ast.Load()), node)
                stmts += self._assign(target, again, node)
            return stmts
        return self._assign(node.targets[0], value, node)

    def _assign(self, target: ast.expr, value: ast.expr, at: ast.stmt) -> list[ast.stmt]:
        """Rewrite `target = value`."""
        if _is_place(target):
            made, place, _ = self._place(target)
            return [*made, self._assign_place(place, value, at)]
        if isinstance(target, ast.Name):
            value = self._bind(target.id, value, at)
        elif isinstance(target, ast.Tuple | ast.List) and not all(isinstance(e, ast.Name) for e in target.elts):
            return self._assign_each(target, value, at)
        elif isinstance(target, ast.Tuple) and all(isinstance(e, ast.Name) for e in target.elts):
            olds = [_lambda(ast.Name(e.id, ast.Load())) for e in target.elts if isinstance(e, ast.Name)]
            olds_tuple = ast.Tuple(list(olds), ast.Load())
            flags = _literal(tuple(isinstance(e, ast.Name) and e.id in self.mutable for e in target.elts))
            value = _call("bind_many", _names(target), value, olds_tuple, flags, at=at)
        else:
            target = self.visit(target)
        return [ast.copy_location(ast.Assign([target], value), at)]

    def _assign_each(self, target: ast.Tuple | ast.List, value: ast.expr, at: ast.stmt) -> list[ast.stmt]:
        """Rewrite `A[i], A[j] = values`: all values are read before the first is stored."""
        if any(isinstance(e, ast.Starred) for e in target.elts):  # plain Python
            return [ast.copy_location(ast.Assign([self.visit(target)], value), at)]
        temp = self._name()
        values = _call("values", value, ast.Constant(len(target.elts)), at=at)
        stmts: list[ast.stmt] = [ast.copy_location(ast.Assign([ast.Name(temp, ast.Store())], values), at)]
        for position, each in enumerate(target.elts):
            one = ast.Subscript(ast.Name(temp, ast.Load()), ast.Constant(position), ast.Load())
            stmts += self._assign(each, ast.copy_location(one, at), at)
        return stmts

    def _place(self, target: Any) -> tuple[list[ast.stmt], Any, Any]:
        """Split `x.name` or `x[key]` into statements that evaluate x and the key once, the target, and its value."""
        parts = {"value": self.visit(target.value)}
        if isinstance(target, ast.Subscript):
            parts["slice"] = self.visit(target.slice)
        made: list[ast.stmt] = []
        names = []
        for part in parts.values():
            names.append(self._name())
            found = ast.Assign([ast.Name(names[-1], ast.Store())], part)
            made.append(ast.copy_location(found, part))
        place, held = (
            ast.Attribute(ast.Name(names[0], ast.Load()), target.attr, context)
            if isinstance(target, ast.Attribute)
            else ast.Subscript(ast.Name(names[0], ast.Load()), ast.Name(names[1], ast.Load()), context)
            for context in (ast.Store(), ast.Load())
        )
        return made, ast.copy_location(place, target), ast.copy_location(held, target)

    def _assign_place(self, place: Any, value: ast.expr, at: ast.stmt) -> ast.stmt:
        """Assign to a place, unless the recorder stores the value in the variable that is there."""
        named = isinstance(place, ast.Attribute)
        which = ast.Constant(place.attr) if named else place.slice
        test = _call("keeps_attribute" if named else "keeps_item", place.value, which, value, at=at)
        kept = ast.Attribute(ast.Name(RECORDER, ast.Load()), "kept", ast.Load())
        put = ast.copy_location(ast.Assign([place], ast.copy_location(kept, at)), at)
        return ast.copy_location(ast.If(test, [put], []), at)

    def _bind(self, name: str, value: ast.expr, at: ast.AST) -> ast.expr:
        """Build the call that binds a name in the recorder."""
        old = _lambda(ast.copy_location(ast.Name(name, ast.Load()), at))
        if name in self.shared:
            value = _call("assign_nonlocal", ast.Constant(name), value, at=at)
        return _call("bind", ast.Constant(name), value, old, ast.Constant(name in self.mutable), at=at)

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        """Rewrite `x += e` so that the target is evaluated once."""
        value = self.visit(node.value)
        if _is_place(node.target):
            made, place, held = self._place(node.target)
            return [*made, self._assign_place(place, ast.copy_location(ast.BinOp(held, node.op, value), node), node)]
        if not isinstance(node.target, ast.Name):
            return ast.copy_location(ast.AugAssign(self.visit(node.target), node.op, value), node)
        total = ast.copy_location(ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, value), node)
        return self._assign(node.target, total, node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if not isinstance(node.target, ast.Name):
            return self.generic_visit(node)
        name, annotation = node.target.id, self.visit(node.annotation)
        if node.value is not None:
            value = _call("typed", annotation, self.visit(node.value), at=node)
            return self._assign(node.target, value, node)
        old = _lambda(ast.copy_location(ast.Name(name, ast.Load()), node))
        value = _call("annotate", ast.Constant(name), annotation, old, at=node.annotation)
        return ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], value), node)

    def visit_If(self, node: ast.If) -> Any:
        """Rewrite an `if`: one branch runs if Python knows the condition, else both are recorded."""
        names = self.reads.of_branches(node)
        test = self._condition(node.test)
        then, otherwise = self._block(node.body), self._block(node.orelse)
        bound = [name for name, _ in names]
        known = [_literal(tuple(column)) for column in zip(*names, strict=True)]  # the names, and which are read later
        known += _lookups(bound, node.test)
        end = _rebind("end_branch", bound, node.test)
        if _leaves_loop(node):
            return self._if_with_break(node, test, known, (then, otherwise), end)
        flag = self._name()
        choose = ast.copy_location(ast.If(ast.Name(flag, ast.Load()), then, otherwise), node)
        calls = _call("branches", test, *known, at=node.test)
        loop = ast.For(ast.Name(flag, ast.Store()), calls, [choose, *end], [])
        return ast.copy_location(loop, node)

    def _if_with_break(
        self,
        node: ast.If,
        test: ast.expr,
        known: list[ast.expr],
        bodies: tuple[list[ast.stmt], list[ast.stmt]],
        end: list[ast.stmt],
    ) -> Any:
        """Double the text of an `if` with a `break`, which must reach the author's loop, with none of ours between."""
        flag = self._name()
        name = ast.Name(flag, ast.Load())
        calls = _call("then", name, *known, at=node.test), _call("otherwise", at=node.test)
        recorded: list[ast.stmt] = [
            ast.With([ast.withitem(call)], [*body, *end] or [ast.Pass()])
            for call, body in zip(calls, bodies, strict=True)
        ]
        python: list[ast.stmt] = [ast.If(name, *bodies)]
        stmts = [
            ast.Assign([ast.Name(flag, ast.Store())], _call("condition", test, at=node.test)),
            ast.If(_call("is_device", name, at=node.test), recorded, python),
        ]
        return [ast.copy_location(s, node) for s in stmts]

    def visit_Try(self, node: ast.Try) -> Any:
        self.generic_visit(node)
        word = ast.copy_location(ast.Constant("try"), node)
        word.end_lineno, word.end_col_offset = node.lineno, node.col_offset + len("try")
        return [ast.copy_location(ast.Expr(_call("refuse_try", at=word)), word), node]

    def visit_Raise(self, node: ast.Raise) -> Any:
        self.generic_visit(node)
        return [ast.copy_location(ast.Expr(_call("refuse_raise", at=node)), node), node]

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> Any:
        self.shared.update(node.names)
        return node

    visit_Nonlocal = visit_Global

    def visit_While(self, node: ast.While) -> Any:
        if walrus := next((n for n in nodes_of(node.test) if isinstance(n, ast.NamedExpr)), None):
            return ast.copy_location(ast.Expr(_call("refuse_walrus", _names(walrus.target), at=walrus)), node)
        test, carried = _lambda(self._condition(node.test)), _literal(tuple(self.reads.carried(node)))
        calls = _call("whiles", test, carried, _tells_end(node), at=node)
        loop = ast.For(ast.Name(self._name(), ast.Store()), calls, *self._loop(node, node.test))
        return ast.copy_location(loop, node)

    def visit_Expr(self, node: ast.Expr) -> Any:
        """Check a statement that only computes a value."""
        value = self.visit(node.value)
        match node.value:
            case ast.Compare() | ast.BinOp() | ast.UnaryOp():
                value = _call("unused", value, at=node)
            case ast.Call(func=ast.Attribute(value=ast.Name()) as function):
                value = _call("unused", value, function, at=node)
        return ast.copy_location(ast.Expr(value), node)

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "print":
            texts = [part for each in node.args if isinstance(each, ast.JoinedStr) for part in each.values]
            formatted = [part.value for part in texts if isinstance(part, ast.FormattedValue)]
            node.func = _call("printing", node.func, *formatted, at=node.func)
        if isinstance(node.func, ast.Attribute) and node.func.attr in DRAWS:
            node.func = _call("drawing", node.func, at=node.func)
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop", "setdefault"):
            node.func = _call("checked_lookup", node.func, at=node.func)
        return node

    def visit_For(self, node: ast.For) -> Any:
        carried = _literal(tuple(self.reads.carried(node)))
        over = self.visit(node.iter)
        # Only `for i in range(...)` is a device loop; in comprehensions, zip and the like, range is Python's.
        if isinstance(over, ast.Call):
            over.func = _call("counter", over.func, at=over.func)
        # Python 3.11 takes turns at the place of the whole statement, 3.13 and later at that of this call.
        loop = _call("loop", over, _names(node.target), carried, _tells_end(node), at=node)
        new = ast.For(node.target, loop, *self._loop(node, node.iter))
        return ast.copy_location(new, node)

    def _loop(self, node: ast.For | ast.While, at: ast.expr) -> tuple[list[ast.stmt], list[ast.stmt]]:
        """Build a loop's body and the statements after its end."""
        self.loops.append(self.reads.of_loop(node))
        body = self._block(node.body)
        end = _rebind("end_loop", self.loops.pop(), at)
        return body, [*end, *self._block(node.orelse)]

    def visit_With(self, node: ast.With) -> Any:
        for item in node.items:
            item.context_expr = self.visit(item.context_expr)
            if item.optional_vars is not None:
                item.context_expr = _call("named", item.context_expr, _names(item.optional_vars), at=item.context_expr)
        node.body = self._block(node.body)
        return node

    def visit_Break(self, node: ast.Break | ast.Continue) -> Any:
        word = ast.Constant("break" if isinstance(node, ast.Break) else "continue")
        leave = ast.If(_call("leave", word, *_lookups(self.loops[-1], node), at=node), [node], [])
        return ast.copy_location(leave, node)

    visit_Continue = visit_Break

    def visit_Return(self, node: ast.Return) -> Any:
        value = self.visit(node.value) if node.value else ast.Constant(None)
        return ast.copy_location(ast.Return(_call("returns", value, at=node)), node)

    def visit_Assert(self, node: ast.Assert) -> Any:
        message = self.visit(node.msg) if node.msg else ast.Constant("")
        call = _call("asserts", self._condition(node.test), message, at=node)
        return ast.copy_location(ast.Expr(call), node)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        word = "last_of" if isinstance(node.op, ast.And) else "first_of"
        return _call(word, *(_lambda(self.visit(v)) for v in node.values), at=node)

    def _condition(self, node: ast.expr) -> Any:
        """Rewrite an expression that is only tested for truth: `and` and `or` need not choose among their operands."""
        if not isinstance(node, ast.BoolOp):
            return self.visit(node)
        word = "all_of" if isinstance(node.op, ast.And) else "any_of"
        return _call(word, *(_lambda(self._condition(v)) for v in node.values), at=node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.Not):
            return _call("negate", self._condition(node.operand), at=node)
        return ast.copy_location(ast.UnaryOp(node.op, self.visit(node.operand)), node)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        branches = (_lambda(self.visit(node.body)), _lambda(self.visit(node.orelse)))
        return _call("choose", self._condition(node.test), *branches, at=node)

    def visit_Compare(self, node: ast.Compare) -> Any:
        left, op = node.left, node.ops[0]
        asks_for_none = isinstance(op, ast.Is | ast.IsNot) and _is_none(node.comparators[0])
        if len(node.ops) == 1 and (asks_for_none or not isinstance(op, ast.Is | ast.IsNot)):
            self.generic_visit(node)
            if isinstance(op, ast.In | ast.NotIn):
                node.left = _call("member", node.left, at=node.left)
            elif asks_for_none and isinstance(left, ast.Subscript | ast.BinOp | ast.UnaryOp):
                holder = left.value if isinstance(left, ast.Subscript) else None
                holder = holder if isinstance(holder, ast.Name) else ast.Constant(None)
                node.left = _call("maybe_none", node.left, holder, at=node)
            return node
        ops = _literal(tuple(type(op).__name__ for op in node.ops))
        operands = [self.visit(x) for x in (left, *node.comparators)]
        return _call("chain", ops, *operands, at=node)

    def visit_Delete(self, node: ast.Delete) -> Any:
        """Refuse to delete tiles and elements; Python deletes its own objects."""
        bases = [x.value if isinstance(x, ast.Subscript) else x for x in node.targets]
        asked = [ast.Name(x.id, ast.Load()) for x in bases if isinstance(x, ast.Name)]
        checks = [ast.Expr(_call("delete", ast.copy_location(x, node), at=node)) for x in asked]
        return [*(ast.copy_location(x, node) for x in checks), self.generic_visit(node)]


def _is_none(node: ast.expr) -> bool:
    """Return whether an expression is the literal None."""
    return isinstance(node, ast.Constant) and node.value is None


def _lookups(names: list[str], at: ast.AST) -> list[ast.expr]:
    """Make for each name a function that looks it up."""
    return [_lambda(ast.copy_location(ast.Name(name, ast.Load()), at)) for name in names]


def _rebind(method: str, names: list[str], at: ast.expr) -> list[ast.stmt]:
    """Bind names to the recorder's values, if `method` returns true."""
    if not names:
        return []
    looked_up = ", ".join(f"{name}=lambda: {name}" for name in names)
    lines = [f"if {RECORDER}.{method}({looked_up}):"]
    for name in names:
        lines += [f"    {name} = {RECORDER}.now[{name!r}]", f"    if {name} is {RECORDER}.unbound: del {name}"]
    made = ast.parse("\n".join(lines)).body
    for each in (part for stmt in made for part in nodes_of(stmt)):
        if hasattr(each, "lineno"):
            ast.copy_location(each, at)
    return made


class _WordsForCalls(ast.NodeTransformer):
    """Replace the statement T.loop_break() inside a loop by `break`, and `with T.While(condition):` by `while`."""

    def __init__(self, function: FunctionType):
        self.names = names_around(function)
        self.loops = 0

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        """Replace a call that stands alone."""
        call = node.value
        if not isinstance(call, ast.Call) or call.args or call.keywords:
            return node
        if self.loops and getattr(self._meaning_of(call.func), "is_break", False):
            return ast.copy_location(ast.Break(), node)
        return node

    def visit_With(self, node: ast.With) -> ast.stmt:
        """Replace a loop that is written as a region."""
        first = node.items[0].context_expr
        if isinstance(first, ast.Call) and getattr(self._meaning_of(first.func), "is_while", False):
            return self._loop(ast.copy_location(ast.While(first, node.body, []), node))
        return self.generic_visit(node)  # type: ignore[return-value]

    def _meaning_of(self, function: ast.expr) -> Any:
        """Return what a name, or an attribute of a name, stands for; None if that is not known yet."""
        match function:
            case ast.Name(id=name):
                return self.names.get(name)
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                return getattr(self.names.get(name), "__dict__", {}).get(attribute)
        return None

    def _loop(self, node: ast.For | ast.While) -> ast.stmt:
        """Rewrite the body of a loop."""
        self.loops += 1
        node.body = [self.visit(stmt) for stmt in node.body]
        self.loops -= 1
        node.orelse = [self.visit(stmt) for stmt in node.orelse]
        return node

    visit_For = visit_While = _loop

    def _nested(self, node: ast.stmt) -> ast.stmt:
        """Leave a nested function unchanged."""
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _nested


def _is_full(cell: CellType) -> bool:
    """Return whether an enclosing function has bound the name by now."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _without_else(stmts: list[ast.stmt]) -> list[ast.stmt]:
    """Replace the `else` of a loop with a `break` by an `if` after it, which asks how the loop ended."""
    out: list[ast.stmt] = []
    for stmt in stmts:
        out.append(stmt)
        if isinstance(stmt, _SCOPES):
            continue
        for part in ("body", "orelse", "finalbody"):
            if isinstance(held := getattr(stmt, part, None), list):
                setattr(stmt, part, _without_else(held))
        for handler in getattr(stmt, "handlers", ()):
            handler.body = _without_else(handler.body)
        for case in getattr(stmt, "cases", ()):
            case.body = _without_else(case.body)
        if isinstance(stmt, ast.For | ast.While) and stmt.orelse and _breaks(stmt.body):
            at = stmt.iter if isinstance(stmt, ast.For) else stmt.test
            out.append(ast.copy_location(ast.If(_call("finished", at=at), stmt.orelse, []), stmt))
            stmt.orelse, stmt.__dict__["tells_end"] = [], True
    return out


def _breaks(stmts: list[ast.stmt]) -> bool:
    """Return whether a `break` among these statements leaves the loop around them."""
    for stmt in stmts:
        if isinstance(stmt, ast.Break):
            return True
        if isinstance(stmt, _SCOPES):
            continue
        parts = ("orelse",) if isinstance(stmt, ast.For | ast.While) else ("body", "orelse", "finalbody")
        inner = [getattr(stmt, part, []) for part in parts]
        inner += [held.body for part in ("handlers", "cases") for held in getattr(stmt, part, [])]
        if any(map(_breaks, inner)):
            return True
    return False


def _tells_end(node: ast.For | ast.While) -> ast.expr:
    """Return the AST constant that says whether a loop reports its end."""
    return ast.Constant(bool(node.__dict__.get("tells_end")))


def _leaves_loop(node: ast.If) -> bool:
    """Return whether a branch holds a break or continue of a loop around the `if`."""

    def search(stmts: list[ast.stmt]) -> bool:
        for stmt in stmts:
            if isinstance(stmt, ast.Break | ast.Continue):
                return True
            if isinstance(stmt, ast.If | ast.With) and (search(stmt.body) or search(getattr(stmt, "orelse", []))):
                return True
        return False

    return search(node.body) or search(node.orelse)
