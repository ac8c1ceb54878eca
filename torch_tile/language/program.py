# SPDX-License-Identifier: Apache-2.0
"""From an author's function to a Program: T.prim_func and T.macro."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FunctionType
from typing import Any

from torch_tile.diagnostics.errors import Span, TileError, error
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.dtype import DType, to_dtype
from torch_tile.ir.expr import Expr, Load, Var
from torch_tile.ir.node import contains
from torch_tile.ir.stmt import Program
from torch_tile.language.recorder import Recorder
from torch_tile.language.rewrite import parameter_span, rewrite
from torch_tile.language.trace import Tracer, author_span, let, name_symbol, tracer, tracing
from torch_tile.language.values import Handle, TensorType


class PrimFunc:
    """A traced kernel function: `program` is its IR, `function` the author's Python."""

    def __init__(self, function: FunctionType, program: Program):
        self.function, self.program = function, program
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def __repr__(self) -> str:
        return repr(self.program)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Not to be called: a kernel has to be compiled first."""
        raise error("not_compiled", author_span(), name=self.__name__)

    def script(self) -> str:
        """The kernel as text in the language."""
        return repr(self.program)


def prim_func(
    function: Any = None, *, private: bool = False, check_well_formed: bool = True, eager_jit: bool = False
) -> Any:
    """Decorator: trace the function into a Program at once. Parameters are annotated with T.Tensor or scalar types.

    `*xs: types`, with a sequence of types, declares one parameter `xs_0, xs_1, ...` for each.
    `private` and `check_well_formed` are TileLang's, without effect. Raises TileError for `eager_jit`.
    """
    if eager_jit:
        why, fix = "is for kernels whose body declares its tensors", "decorate them with torch_tile.jit alone"
        raise error("bad_argument", author_span(), op="T.prim_func", name="eager_jit", why=why, fix=fix)
    if function is None:
        return lambda f: _prim_func(f, sys._getframe(1).f_locals)
    return _prim_func(function, sys._getframe(1).f_locals)


def _prim_func(function: FunctionType, scope: dict[str, Any]) -> PrimFunc:
    types, groups = {}, dict.fromkeys(annotations_of(function, scope), 1)
    for name, annotation in annotations_of(function, scope).items():
        if inspect.signature(function).parameters[name].kind is not inspect.Parameter.VAR_POSITIONAL:
            types[name] = param_type(name, annotation, function)
            continue
        groups[name] = len(annotation)
        types |= {f"{name}_{i}": param_type(name, a, function) for i, a in enumerate(annotation)}
    with tracing() as at:
        params = {name: make_param(name, kind) for name, kind in types.items()}
        args, kwargs = call_arguments(
            function, groups, [Handle(p) if isinstance(p, Buffer) else p for p in params.values()]
        )
        result = rewrite(function, lambda: Recorder(at))(*args, **kwargs)
        program = finish(at, function.__name__, tuple(params.values()), result)
    return PrimFunc(function, program)


def call_arguments(
    function: FunctionType, groups: dict[str, int], values: list[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """`values` as positional and keyword arguments; `*name` takes `groups[name]` of them, every other name one."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    rest = iter(values)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            kwargs[name] = next(rest)
        else:
            args += [next(rest) for _ in range(groups[name])]
    return args, kwargs


def annotations_of(function: FunctionType, scope: dict[str, Any]) -> dict[str, Any]:
    """Annotations of the parameters, evaluated; `scope` holds the names around the definition."""
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        found[name] = evaluated(function, name, parameter.annotation, scope)
    return found


def evaluated(function: FunctionType, name: str, annotation: Any, scope: dict[str, Any]) -> Any:
    """An annotation, which may have been kept as text; what is wrong in that is shown where the parameter stands."""
    if not isinstance(annotation, str) or isinstance(annotation, DType):
        return annotation
    try:
        return eval(annotation, function.__globals__, {**scope})
    except TileError as problem:
        span = parameter_span(function, name)
        raise TileError(*(replace(each, span=span) for each in problem.diagnostics)) from None


def param_type(name: str, annotation: Any, function: FunctionType | None) -> TensorType | DType:
    """A parameter's type from its annotation; `bad_annotation` otherwise."""
    if isinstance(annotation, TensorType):
        return annotation
    try:
        return to_dtype(annotation)
    except ValueError:
        got = "none" if annotation is inspect.Parameter.empty else repr(annotation)[:60]
        span = parameter_span(function, name) if function else None
        raise error("bad_annotation", span, name=name, got=got) from None


def make_param(name: str, kind: TensorType | DType) -> Buffer | Var:
    """The symbol of a parameter."""
    return kind.buffer(name) if isinstance(kind, TensorType) else Var(name, kind, "param")


def finish(at: Tracer, name: str, params: tuple[Buffer | Var, ...], result: Any, span: Span | None = None) -> Program:
    """The program recorded by `at`, whose function returned `result`, at `span`."""
    returned = () if result is None else result if isinstance(result, tuple | list) else (result,)
    for value in returned:
        if not (isinstance(value, Handle) and value.buffer.origin == "empty"):
            if isinstance(value, FunctionType):  # with T.Kernel in it, or this were taken for no kernel itself
                got, fix = f"the function `{value.__name__}`", f"decorate `{value.__name__}` with @T.prim_func"
                raise error("no_kernel", span, name=name, got=got, fix=fix)
            raise error("bad_return", span, got=repr(value)[:60])
    if not at.kernels:
        raise error("not_in_kernel", span, what=f"the body of `{name}`")
    outputs = tuple(value.buffer for value in returned)
    for n, buffer in enumerate(at.made):
        name_symbol(buffer, f"{buffer.origin}_{n}")
    workspaces = tuple(b for b in at.made if not any(b is o for o in outputs))
    for n, buffer in enumerate(at.views):
        name_symbol(buffer, f"view_{n}")
    return Program(name, params, tuple(at.kernels), workspaces, outputs, tuple(at.views))


class Ref:
    """Annotation of a macro's parameter that the macro may assign: `v: T.Ref`."""


def macro(function: Any = None, *, hygienic: bool = True) -> Any:
    """Decorator: a function that may use device control flow; each call is inlined where it stands.

    Names in it are its own: TileError for `hygienic=False`.
    """
    if not hygienic:
        why, fix = "would let it bind names of its callers", "return the values"
        raise error("bad_argument", author_span(), op="T.macro", name="hygienic", why=why, fix=fix)
    if function is None:
        return macro
    rewritten = rewrite_lazily(function, sys._getframe(1).f_locals)

    def inlined(*args: Any, **kwargs: Any) -> Any:
        return rewritten(*args, **kwargs)

    inlined.__name__, inlined.__doc__ = function.__name__, function.__doc__
    return inlined


def rewrite_lazily(function: FunctionType, scope: Mapping[str, Any]) -> Callable[..., Any]:
    """`rewrite` at the first call, when the names around a nested definition are bound."""

    def run(*args: Any, **kwargs: Any) -> Any:
        at = tracer(function.__name__)
        bound = inspect.signature(function).bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            if is_computed(value) and not takes_reference(function, name, scope):
                bound.arguments[name] = let(name, value)
        return rewrite(function, lambda: Recorder(at))(*bound.args, **bound.kwargs)

    return run


def is_computed(value: Any) -> bool:
    """Whether an argument is a value read from memory, and not a place: A[i, j] may be the head address of a copy."""
    if isinstance(value, Load):
        return value.buffer.scope == "var"
    return isinstance(value, Expr) and contains(value, Load)


def takes_reference(function: FunctionType, name: str, scope: Mapping[str, Any]) -> bool:
    """Whether a macro's parameter is annotated with T.Ref; `scope` holds the names around the definition."""
    annotation = function.__annotations__.get(name)
    if isinstance(annotation, str) and not isinstance(annotation, DType):  # kept as text
        try:
            annotation = eval(annotation, function.__globals__, dict(scope))
        except (NameError, AttributeError):  # what is there for type checkers only
            return False
    return annotation is Ref
