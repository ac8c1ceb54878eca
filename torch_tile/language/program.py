# SPDX-License-Identifier: Apache-2.0
"""From an author's function to a Program: T.prim_func and T.macro."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

from torch_tile.compiler.binding import Fact, Sizes, facts_of, learn, not_a_tensor, unsolved_error
from torch_tile.diagnostics.errors import LaunchError, Span, TileError, error
from torch_tile.diagnostics.spelling import did_you_mean
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.dtype import DType, to_dtype
from torch_tile.ir.expr import Address, Expr, Load, Var
from torch_tile.ir.idmap import IdSet
from torch_tile.ir.node import Rewriter, contains, find, symbols, walk
from torch_tile.ir.stmt import SWITCH_KEYS, Alloc, Block, Kernel as KernelNode, Program, Role, Stmt, Store, TileOp
from torch_tile.language.bindings import BoundKernel
from torch_tile.language.equal_elements import enlarge_equal
from torch_tile.language.kernel_calls import bind, check_function
from torch_tile.language.narrow import container_parameter, widen
from torch_tile.language.outside import exact_key
from torch_tile.language.pointers import Pointer, PointerType
from torch_tile.language.recorder import Recorder
from torch_tile.language.rewrite import names_around, parameter_span, result_span, rewrite, source_tree
from torch_tile.language.syntax_nodes import nodes_of
from torch_tile.language.trace import Tracer, author_span, is_tracing, let, name_symbol, tracer, tracing
from torch_tile.language.values import Handle, TensorType
from torch_tile.language.views import resolve
from torch_tile.language.wrap_indices import wrap_indices
from torch_tile.options import KNOWN as KNOWN_OPTIONS

HOST_SCOPES = ("var", "local")  # limit for memory of a function without T.Kernel


class PrimFunc:
    """A traced kernel function: `program` is its IR, `function` the author's Python."""

    program: Program
    __name__: str

    def __init__(self, function: FunctionType, program: Program, compile_flags: Iterable[str] = ()):
        self.function: FunctionType = function
        self.program = program
        self.compile_flags: tuple[str, ...] = tuple(compile_flags)
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def __repr__(self) -> str:
        return repr(self.program)

    def __deepcopy__(self, memo: object) -> PrimFunc:
        """Return the function itself, as it is never changed."""
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse the call: a kernel has to be compiled first."""
        span = author_span()
        returned = span is not None and span.source().lstrip().startswith("return ")
        fix = f"write `return {self.__name__}`" if returned else f"torch_tile.compile({self.__name__})(...)"
        raise error("not_compiled", span, name=self.__name__, fix=fix)

    @property
    def attrs(self) -> dict[str, Any]:
        """Return what TileLang keeps beside a function: its name, the positions of its results, options in the body."""
        found: dict[str, Any] = {"global_symbol": self.__name__}
        if self.program.outputs:
            found["tilelang_out_idx"] = list(range(-len(self.program.outputs), 0))
        if self.program.switches:
            found["tilelang_pass_configs"] = {SWITCH_KEYS[name]: True for name in self.program.switches}
        if self.compile_flags:
            found["tilelang_compile_flags"] = list(self.compile_flags)
        return found

    def script(self) -> str:
        """Print the kernel as text in the language."""
        return repr(self.program)


def prim_func(
    function: Any = None, *, private: bool = False, check_well_formed: bool = True, eager_jit: bool = False
) -> Any:
    """Decorate a function to trace it into a Program at once. Parameters are annotated with T.Tensor or scalar types.

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
    """Trace a function to a program."""
    check_function(function, "T.prim_func")
    types: dict[str, Any] = {}  # None: declared in the body, `A: T.Tensor(...)`
    groups = dict.fromkeys(annotations_of(function, scope), 1)
    for name, annotation in annotations_of(function, scope).items():
        kind = inspect.signature(function).parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            why, fix = f"is `**{name}`: the tensors of a kernel have names", "name each parameter, and annotate it"
            span = parameter_span(function, name)
            raise error("bad_argument", span, op="T.prim_func", name=f"**{name}", why=why, fix=fix)
        if kind is not inspect.Parameter.VAR_POSITIONAL:
            later = annotation is inspect.Parameter.empty and name in declared_in(function)
            types[name] = None if later else param_type(name, annotation, function)
            continue
        groups[name] = len(annotation)
        types |= {f"{name}_{i}": param_type(name, a, function) for i, a in enumerate(annotation)}

    flags: list[str] = []

    def placed(name: str, param: Buffer | Var) -> Buffer | Var:
        return replace(param, span=parameter_span(function, name) or param.span)

    def run(around: contextlib.AbstractContextManager[Any], at: Tracer) -> Program:
        at.compile_flags = flags
        params = {name: None if kind is None else placed(name, make_param(name, kind)) for name, kind in types.items()}
        at.params = [p for p in params.values() if p is not None]

        def annotate(name: str, annotation: Any, value: Any) -> Any:
            if name not in types or types[name] is not None or params[name] is not None:
                return value
            params[name] = made = make_param(name, param_type(name, annotation, function))
            at.params = [p for p in params.values() if p is not None]
            return author_view(made)

        views = [None if p is None else author_view(p) for p in params.values()]
        args, kwargs = call_arguments(function, groups, views)
        with around:
            result = rewrite(function, lambda: Recorder(at, annotate))(*args, **kwargs)
        for name, param in params.items():  # declared on a path that Python did not take
            if param is None:
                raise error("bad_annotation", parameter_span(function, name), name=name, got="none")
        span = None if result is None else result_span(function)
        return finish(at, function.__name__, tuple(p for p in params.values() if p is not None), result, span)

    return PrimFunc(function, _traced(run, function), dict.fromkeys(flags))


def _does_nothing(function: FunctionType) -> bool:
    """Return whether the author wrote `pass`, and nothing beside a docstring."""
    body = source_tree(function).body
    is_text = [isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) for s in body]
    return any(isinstance(s, ast.Pass) for s in body) and all(
        text or isinstance(s, ast.Pass) for s, text in zip(body, is_text, strict=True)
    )


def _traced(
    run: Callable[[contextlib.AbstractContextManager[Any], Tracer], Program], function: FunctionType | None = None
) -> Program:
    """Record what `run` does. A function without T.Kernel is one block of one thread, or what T.thread_binding says."""
    try:
        with tracing() as at:
            return run(contextlib.nullcontext(), at)
    except TileError as problem:
        if problem.code != "not_in_kernel" or at.launch is not None:
            raise
        first, launch = problem, None
    try:
        with tracing() as at:
            launch = BoundKernel()
            program = run(launch, at)
        if launch.threads != (1,):
            with tracing() as at:
                program = run(BoundKernel(launch.threads), at)
    except TileError:
        if launch is not None and launch.is_bound:
            raise
        raise first from None
    if launch.is_bound:
        return program
    on_chip = any(n.buffer.scope not in HOST_SCOPES for n in find(program, Alloc))
    is_empty = not any(kernel.body.stmts for kernel in program.kernels)
    is_forgotten = is_empty and (function is None or not _does_nothing(function))
    if is_forgotten or on_chip or any(isinstance(n, TileOp | Role) for n in walk(program)):  # which a block is for
        raise first
    return program


def call_arguments(
    function: FunctionType, groups: dict[str, int], values: list[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Split `values` into positional and keyword arguments; `*name` takes `groups[name]`, other names one."""
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
    """Evaluate the annotations of the parameters; `scope` holds the names around the definition."""
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        found[name] = evaluated(function, name, parameter.annotation, scope)
    return found


def evaluated(function: FunctionType, name: str, annotation: Any, scope: dict[str, Any]) -> Any:
    """Evaluate an annotation, which may be kept as text. Errors in it are shown at the parameter."""
    if not isinstance(annotation, str) or isinstance(annotation, DType):
        return annotation
    try:
        return eval(annotation, function.__globals__, {**scope})
    except TileError as problem:
        span = parameter_span(function, name)
        raise TileError(*(replace(each, span=span) for each in problem.diagnostics)) from None


def param_type(name: str, annotation: Any, function: FunctionType | None) -> TensorType | PointerType | DType:
    """Return a parameter's type from its annotation; raise `bad_annotation` for anything else."""
    if isinstance(annotation, TensorType | PointerType):
        return annotation
    if isinstance(annotation, Var):  # T.int32()
        return annotation.dtype
    try:
        return to_dtype(annotation)
    except ValueError:
        got = "none" if annotation is inspect.Parameter.empty else repr(annotation)[:60]
        span = parameter_span(function, name) if function else None
        raise error("bad_annotation", span, name=name, got=got) from None


def make_param(name: str, kind: TensorType | PointerType | DType) -> Buffer | Var:
    """Make the symbol of a parameter."""
    return Var(name, kind, "param") if isinstance(kind, DType) else kind.buffer(name)


def author_view(symbol: Buffer | Var) -> Any:
    """Return what the traced function receives for a parameter: a Var, a Pointer or a Handle."""
    if isinstance(symbol, Var):
        return symbol
    return Pointer(symbol) if symbol.origin == "pointer" else Handle(symbol)


def finish(at: Tracer, name: str, params: tuple[Buffer | Var, ...], result: Any, span: Span | None = None) -> Program:
    """Build the program that `at` recorded; the traced function returned `result`, at `span`."""
    returned = () if result is None else result if isinstance(result, tuple | list) else (result,)
    for value in returned:
        if not (isinstance(value, Handle) and value.buffer.origin == "empty"):
            if isinstance(value, FunctionType):  # T.Kernel itself must not be taken for a kernel
                got, fix = f"the function `{value.__name__}`", f"decorate `{value.__name__}` with @T.prim_func"
                raise error("no_kernel", span, name=name, got=got, fix=fix)
            fix = (
                f"leave the `return` out if the kernel writes it in place; T.copy({value.buffer.name}, Y) copies it "
                f"into a result Y of T.empty, while `Y = {value.buffer.name}` only gives it another name"
                if isinstance(value, Handle) and value.buffer.origin == "param"
                else f"T.copy({value.buffer.name}, Y) copies the tile into a result Y = T.empty(shape, dtype); "
                f"`Y = {value.buffer.name}` only gives the tile another name"
                if isinstance(value, Handle)
                else ""
            )
            raise error("bad_return", span, got=repr(value)[:60], fix=fix)
    if not at.kernels:
        raise error("not_in_kernel", span, what=f"the body of `{name}`")
    outputs = tuple(value.buffer for value in returned)
    for n, buffer in enumerate(at.made):
        name_symbol(buffer, f"{buffer.origin}_{n}")
    workspaces = tuple(b for b in at.made if not any(b is o for o in outputs))
    for n, buffer in enumerate(at.views):
        name_symbol(buffer, f"view_{n}")
    for buffer, problem in at.rebound:
        if not any(buffer in symbols(kernel) for kernel in at.kernels):
            raise problem
    kernels = tuple(map(_without_empty_tiles, at.kernels))
    views = tuple(v for v in at.views if any(v in symbols(kernel) for kernel in kernels))
    switches, assumed = tuple(sorted(at.switches)), tuple(at.assumed)
    program = Program(name, params, kernels, workspaces, outputs, views, switches, assumed)
    return widen(resolve(enlarge_equal(wrap_indices(program))))


def _without_empty_tiles(kernel: KernelNode) -> KernelNode:
    """Drop tiles of no elements that nothing uses, as an author's option may leave them."""
    empty = [a for a in find(kernel, Alloc) if 0 in (a.buffer.static_shape or ())]
    used = {node.buffer for node in find(kernel, Load, Store, Region, Address)} if empty else set()
    unused = {a.buffer for a in empty} - used
    return _Without(unused)(kernel) if unused else kernel


class _Without(Rewriter):
    """Drop allocations of these tiles."""

    def __init__(self, tiles: set[Buffer]):
        self.tiles = tiles

    def visit_Alloc(self, node: Alloc) -> Stmt:
        """Return nothing for an unused tile."""
        return Block(()) if node.buffer in self.tiles else node


class Ref:
    """The annotation `v: T.Ref` of a macro's parameter that the macro may assign."""


def macro(function: Any = None, *, hygienic: bool = True) -> Any:
    """Decorate a function that may use device control flow, and inline each call where it stands.

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
    inlined.__wrapped__ = function  # type: ignore[attr-defined]
    inlined.is_macro = True  # type: ignore[attr-defined]
    return inlined


MOST_INLINED = 48  # calls of a macro inside of itself: each takes some frames of Python's


def meta_class(cls: type) -> type:
    """Decorate a class, `cls`, whose methods are macros in a traced kernel, and plain functions elsewhere."""
    for name, value in list(vars(cls).items()):
        if isinstance(value, FunctionType) and not hasattr(value, "is_macro"):
            setattr(cls, name, _method(value, sys._getframe(1).f_locals))
    return cls


def _method(function: FunctionType, scope: dict[str, Any]) -> Callable[..., Any]:
    """Wrap a method of a class in use by kernels, so that its rewritten form runs in a trace."""
    rewritten = rewrite_lazily(function, scope)

    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        return (rewritten if is_tracing() else function)(*args, **kwargs)

    return method


def rewrite_lazily(function: FunctionType, scope: Mapping[str, Any]) -> Callable[..., Any]:
    """Rewrite a function at its first call, when the names around a nested definition are bound."""

    def run(*args: Any, **kwargs: Any) -> Any:
        at = tracer(function.__name__)
        signature = inspect.signature(function)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as problem:
            fix = f"its parameters are {', '.join(signature.parameters)}"
            raise error("bad_kernel_call", author_span(), name=function.__name__, why=str(problem), fix=fix) from None
        references = {}
        for name, value in bound.arguments.items():
            if isinstance(value, Load) and takes_reference(function, name, scope):
                references[name] = value
            elif is_computed(value):
                bound.arguments[name] = let(name, value)
        if at.inlining.count(function.__code__) >= MOST_INLINED:
            raise error("endless_macro", author_span(), name=function.__name__, count=MOST_INLINED)
        at.inlining.append(function.__code__)
        try:
            return rewrite(function, lambda: Recorder(at, references=references))(*bound.args, **bound.kwargs)
        finally:
            at.inlining.pop()

    return run


def is_computed(value: Any) -> bool:
    """Return whether an argument is a value read from memory, not a place. A[i, j] may begin a copy's region."""
    if isinstance(value, Load):
        return value.buffer.scope == "var"
    return isinstance(value, Expr) and contains(value, Load)


def takes_reference(function: FunctionType, name: str, scope: Mapping[str, Any]) -> bool:
    """Return whether a macro's parameter is annotated with T.Ref. `scope` holds the names around the definition."""
    annotation = function.__annotations__.get(name)
    if isinstance(annotation, str) and not isinstance(annotation, DType):  # kept as text
        try:
            annotation = eval(annotation, function.__globals__, dict(scope))
        except (NameError, AttributeError):  # names for type checkers only
            return False
    return annotation is Ref


# Eager kernels: the decorated function's body is the kernel. Its tensors are annotated in the signature or in the body.
# With T.const, a call is traced in two steps. The first run only learns the constants from the annotations. The second
# runs with plain integers in their place, so that Python's own control flow may use them. A call that only compiles may
# leave tensors out: it gives the constants by name.


class Absent:
    """The stand-in for a tensor that a call left out."""


ABSENT = Absent()


@dataclass
class EagerCall:
    """One call of an eager kernel with the facts known before tracing. `sizes` are constants given by name."""

    function: FunctionType
    signature: inspect.Signature
    arguments: dict[str, Any]
    tensors: list[Any]
    key: Any
    sizes: dict[str, int] = field(default_factory=dict)

    def passed(self, program: Program) -> list[Any]:
        """Return what the kernel of `program` takes: tensors, numbers, and None for tensors that it does not use."""
        if all(value is not None for value in self.arguments.values()):
            return self.tensors
        return [self.arguments[param.name] for param in program.params if param.name in self.arguments]


@dataclass
class Specialisation:
    """The constants of a kernel, and the argument, dimension or stride that each comes from."""

    spots: list[tuple[str, int, bool]] = field(default_factory=list)

    def values(self, call: EagerCall) -> tuple[int, ...]:
        """Read the constants from the arguments of a call."""
        found = []
        for name, dim, is_stride in self.spots:
            tensor = call.arguments[name]
            if dim >= tensor.dim():
                return ()
            found.append(int(tensor.stride(dim) if is_stride else tensor.shape[dim]))
        return tuple(found)


class _Learnt(Exception):
    """Raised to stop the first run once all constants are known."""


def run_time_names(signature: inspect.Signature) -> frozenset[str]:
    """Return the parameters whose numbers are passed to a compiled kernel, not compiled into it."""
    return frozenset(name for name, each in signature.parameters.items() if _is_scalar_param(each.annotation))


def with_declared_numbers(function: FunctionType, signature: inspect.Signature) -> inspect.Signature:
    """Annotate the parameters that the body of an eager kernel declares as numbers (`by: T.float32`)."""
    names = names_around(function)
    declared = {n.target.id: n.annotation for n in declarations(function) if isinstance(n.target, ast.Name)}
    parameters = []
    for name, each in signature.parameters.items():
        place = declared.get(name)
        if each.annotation is inspect.Parameter.empty and isinstance(place, ast.Name | ast.Attribute):
            with contextlib.suppress(NameError, AttributeError):  # a name that is known in the body only
                annotation = eval(ast.unparse(place), names)
                each = each.replace(annotation=annotation) if _is_scalar_param(annotation) else each
        parameters.append(each)
    return signature.replace(parameters=parameters)


def specialise(function: FunctionType, signature: inspect.Signature, args: Any, kwargs: Any) -> EagerCall:
    """Split the arguments of a call into tensors and compile-time values."""
    import torch

    bound = bind(function.__name__, signature, args, kwargs, makes_kernel=False)
    bound.apply_defaults()
    key: list[Any] = []
    tensors = []
    for name, value in bound.arguments.items():
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            key.append((name, value.dtype, value.dim()))
        elif _is_scalar_param(signature.parameters[name].annotation):
            tensors.append(value)
            key.append((name, "scalar"))
        else:
            key.append((name, exact_key(value)))
    return EagerCall(function, signature, dict(bound.arguments), tensors, tuple(key))


def specialise_sizes(
    function: FunctionType, signature: inspect.Signature, args: Any, kwargs: Mapping[str, Any]
) -> EagerCall:
    """Describe a call that only compiles: constants may be given by name, and tensors as types, or left out.

    Raises TypeError for other arguments that are missing, and for sizes that are no integers.
    """
    sizes = {name: value for name, value in kwargs.items() if name not in signature.parameters}
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            fix = did_you_mean(name, signature.parameters)
            if name in KNOWN_OPTIONS:
                fix = f": `{name}` is an option of the decorator, @torch_tile.jit({name}={value!r})"
            raise TypeError(f"{function.__name__}.compile() takes a size as `{name}`, got {value!r}{fix}")
    named = {name: value for name, value in kwargs.items() if name in signature.parameters}
    bound = signature.bind_partial(*args, **named).arguments
    places = declared_in(function)
    given: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        is_symbol = name in places or isinstance(parameter.annotation, TensorType | DType)
        if name in bound:
            given[name] = _described(bound[name])
        elif parameter.default is not inspect.Parameter.empty:
            given[name] = parameter.default
        elif is_symbol:
            given[name] = ABSENT
        else:
            raise TypeError(f"{function.__name__}.compile() is missing the argument `{name}`")
    call = specialise(function, signature, (), given)
    absent = tuple(name for name, value in given.items() if value is ABSENT)
    call.tensors = [t for t in call.tensors if t is not ABSENT]
    call.sizes, call.key = sizes, ("compile", call.key, absent, tuple(sorted(sizes.items())))
    return call


def declared_in(function: FunctionType) -> set[str]:
    """Return the names that the body of an eager kernel annotates."""
    return {n.target.id for n in declarations(function) if isinstance(n.target, ast.Name)}


def declarations(function: FunctionType) -> list[ast.AnnAssign]:
    """Return the annotations without a value in a function's body."""
    return [n for n in nodes_of(source_tree(function)) if isinstance(n, ast.AnnAssign) and n.value is None]


def _described(value: Any) -> Any:
    """Return a tensor without data for a T.Tensor type of known sizes. Return any other value itself."""
    if not isinstance(value, TensorType):
        return value
    import torch

    shape = TensorType.buffer(value, "").static_shape
    if shape is None:
        raise TypeError(
            f"compile() takes tensor types of known sizes, got {value}; give numbers, T.Tensor((1024, 64), ...)"
        )
    return torch.empty(shape, dtype=value.dtype.as_torch(), device="meta")


def _is_scalar_param(annotation: Any) -> bool:
    """Return whether a parameter is passed at run time: its annotation is a dtype of the language, not Python's int."""
    return isinstance(annotation, DType | Var)  # T.int32, or T.int32()


def trace_eager(call: EagerCall) -> tuple[Program, Specialisation]:
    """Trace an eager call; return the program, and where its constants came from."""
    learner = _Run(call, None)
    with contextlib.suppress(_Learnt):
        program = learner.run()
    waiting, sizes = learner.learn()
    if strange := call.sizes.keys() - learner.asked:
        known = ", ".join(sorted(learner.asked)) or "none"
        raise TypeError(f"{call.function.__name__}.compile() got the size `{min(strange)}`; T.const names {known}")
    unknown = [symbol.name for symbol in learner.symbols if symbol.name not in learner.values]
    if unknown and (none := next((n for n in learner.params if call.arguments[n] is None), None)) is not None:
        raise LaunchError(not_a_tensor(none, None))
    if unknown:
        learner.refuse_other_kinds()
    if unknown and any(value is ABSENT for value in call.arguments.values()):
        raise TypeError(f"{call.function.__name__}.compile() needs the size `{unknown[0]}`, or a tensor that has it")
    if unknown and waiting:
        raise unsolved_error(waiting, sizes)
    if learner.symbols:
        program = _Run(call, learner.values).run()
    return program, Specialisation(learner.spots)


class _Run:
    """One tracing run of an eager kernel's function."""

    def __init__(self, call: EagerCall, values: dict[str, int] | None):
        import torch

        self.call = call
        self.values: dict[str, int] = dict(values or {})
        self.learning = values is None
        self.asked: set[str] = set()  # the names that T.const was given
        self.symbols: list[Var] = []  # what T.const gave while learning
        self.facts: list[Fact] = []  # the sizes and strides of the call's tensors
        self.spots: list[tuple[str, int, bool]] = []
        self.params: dict[str, Buffer | Var] = {}
        self.wanted = [n for n, v in call.arguments.items() if isinstance(v, torch.Tensor | Absent)]

    def run(self) -> Program:
        return _traced(self._run)

    def _run(self, around: contextlib.AbstractContextManager[Any], at: Tracer) -> Program:
        """Trace the function of an eager call with its arguments."""
        function, arguments = self.call.function, dict(self.call.arguments)
        at.consts = self.consts
        with around:
            for name, parameter in self.call.signature.parameters.items():
                annotation = parameter.annotation
                if isinstance(annotation, TensorType | PointerType) or _is_scalar_param(annotation):
                    arguments[name] = self.annotate(name, annotation, arguments[name])
            recorder = Recorder(at, self.annotate)
            try:
                result = rewrite(function, lambda: recorder)(**arguments)
            except (TileError, TypeError, AttributeError, LookupError) as problem:
                if (told := self._unannotated(declared_in(function), problem)) is not None:
                    raise told from problem
                raise
            if (told := self._unannotated(self.params, None)) is not None:
                raise told
        params = tuple(self.params[n] for n in self.call.arguments if n in self.params)
        return finish(at, function.__name__, params, result, result_span(function))

    def _unannotated(self, declared: Container[str], problem: Exception | None) -> TileError | None:
        """Return the error for the first tensor that is not declared: it is why the kernel fails."""
        if isinstance(problem, TileError) and problem.code in ("type_as_tensor", "kernel_in_kernel"):
            return None
        missing = [name for name in self.wanted if name not in self.params and name not in declared]
        if not missing:
            return None
        default = inspect.signature(self.call.function).parameters[missing[0]].default
        fix = f"the call gives a tensor for `{missing[0]}`: leave it out, or give a value as its default, {default!r}"
        is_plain = isinstance(default, bool | int | float | str)
        span = parameter_span(self.call.function, missing[0])
        return error("tensor_not_annotated", span, name=missing[0], fix=fix if is_plain else "")

    def consts(self, names: str) -> Any:
        """Make the names of T.const: symbols while learning, integers afterwards."""
        found: list[Any] = []
        for name in (n.strip() for n in names.split(",")):
            self.asked.add(name)
            if self.learning and name in self.call.sizes:
                self.values[name] = self.call.sizes[name]
                found.append(self.values[name])
            elif self.learning:
                found.append(Var(name, to_dtype("int32"), "dim"))
                self.symbols.append(found[-1])
            elif name in self.values:
                found.append(self.values[name])
            else:
                none = next((each for each, value in self.call.arguments.items() if value is None), "")
                fix = f"the call gives None for `{none}`: give a tensor, if `{name}` is one of its dimensions"
                raise error("unbound_const", None, name=name, fix=fix if none else "")
        return tuple(found) if len(found) > 1 else found[0]

    def annotate(self, name: str, annotation: Any, value: Any) -> Any:
        """Return the symbol of an annotated tensor or scalar argument."""
        if name not in self.call.arguments or isinstance(self.params.get(name), Var):  # known from the signature
            return value
        kind = param_type(name, annotation, None)
        symbol = self.params[name] = make_param(name, kind)
        tracer().params.append(symbol)
        if isinstance(symbol, Var):
            return symbol
        if self.learning and isinstance(kind, TensorType):
            self._learn(name, kind, symbol)
        return author_view(symbol)

    def _learn(self, name: str, kind: TensorType, symbol: Buffer) -> None:
        """Note what a tensor of the call tells about its sizes. Stop where all tensors have told."""
        tensor, rank = self.call.arguments[name], len(kind.shape)
        if tensor is None:  # which the kernel may not use: its launch tells
            return
        if name not in self.wanted:
            raise LaunchError(not_a_tensor(name, tensor))
        if tensor is not ABSENT and tensor.dim() != rank:
            raise LaunchError(f"argument `{name}` must have {rank} dimensions, got shape {list(tensor.shape)}")
        if tensor is not ABSENT:
            self.facts += facts_of(container_parameter(symbol), tensor)
        if self.symbols and all(n in self.params for n in self.wanted):
            raise _Learnt

    def learn(self) -> tuple[list[Fact], Sizes]:
        """Compute the sizes named by T.const from those of the call's tensors; return the facts left open, and sizes.

        Facts that mention another size, one known only at run time, take no part.
        """
        sizes: Sizes = {}
        names = IdSet(self.symbols)
        facts = [f for f in self.facts if (found := list(find(f.wanted, Var))) and all(v in names for v in found)]
        sources, waiting = learn(facts, sizes)
        self.spots = [(f.name, f.dim, f.is_stride) for f in facts if f.is_stride or any(f is s for s in sources)]
        for symbol in self.symbols:
            if symbol in sizes:
                self.values.setdefault(symbol.name, int(sizes[symbol]))
        return waiting, sizes

    def refuse_other_kinds(self) -> None:
        """Raise for an argument of which the kernel would learn sizes, and which is no tensor."""
        for note in declarations(self.call.function):
            name = note.target.id if isinstance(note.target, ast.Name) else ""
            value = self.call.arguments.get(name)
            if value is not None and name not in self.wanted and "Tensor" in ast.unparse(note.annotation):
                raise LaunchError(not_a_tensor(name, value))
