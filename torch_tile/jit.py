# SPDX-License-Identifier: Apache-2.0
"""Take a kernel from Python to launch: specialise -> trace -> lower -> emit -> build -> launch, one call for each step.

`@jit` knows both of TileLang's styles. Lazy: the function returns a @T.prim_func, and calling it gives a JITKernel.
Eager: the function's body is the kernel, and calling it with tensors runs it.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import copyreg
import importlib
import inspect
import logging
import math
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Unpack

from torch_tile.compiler.binding import not_a_tensor
from torch_tile.compiler.context import Build, PassOptions
from torch_tile.compiler.garbage import collector_paused
from torch_tile.compiler.parallel import all_of
from torch_tile.diagnostics.arguments import explains_misfits, names_parameters
from torch_tile.diagnostics.errors import ForeignTextError, InternalError, LaunchError, TileError, diagnose, error
from torch_tile.diagnostics.kernel_warnings import collected_warnings, warn_of
from torch_tile.diagnostics.spelling import missing_attribute
from torch_tile.hardware import MOST_THREADS, PER_THREAD, Target, spelled
from torch_tile.intrinsics import foreign
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Call
from torch_tile.ir.fixed_sizes import fix_sizes, sizes_of_tiles
from torch_tile.ir.node import find
from torch_tile.ir.stmt import Alloc, Kernel, Program
from torch_tile.kernel import JITKernel, RefusingKernel, SizedKernel
from torch_tile.language.kernel_calls import MODELS, bind, check_function, given_tensors
from torch_tile.language.outside import Outside, exact_key, forget_dead, readers
from torch_tile.language.program import (
    EagerCall,
    PrimFunc,
    Specialisation,
    evaluated,
    run_time_names,
    specialise,
    specialise_sizes,
    trace_eager,
    with_declared_numbers,
)
from torch_tile.language.rewrite import parameter_span, result_span, source_tree
from torch_tile.language.syntax_nodes import nodes_of
from torch_tile.language.trace import is_tracing
from torch_tile.options import CompileOptions, pass_options
from torch_tile.profiler import Profiler, TensorSupplyType
from torch_tile.runtime.host_compiler import compile_shared, load_entry
from torch_tile.runtime.launch import Launcher
from torch_tile.tileop.results import unused_parameters, unwritten_results, writes_nothing
from torch_tile.tolerance import tolerant
from torch_tile.user_op import (
    assume_constant_result,
    from_dynamo_key,
    keep,
    keep_operator,
    kept,
    register_for_dynamo,
    results_of,
    same_as,
)  # fmt: skip

if TYPE_CHECKING:
    from torch_tile.compiler.sources import Entry
    from torch_tile.runtime.nvrtc import Cubin

__path__: list[str] = []  # TileLang's module of this name has modules inside: compat

_torch: Any = sys.modules.get("torch")  # None in a process that only compiles


def compile_program(
    program: Program, out_idx: Sequence[int] = (), target: object = "auto", options: PassOptions | None = None
) -> JITKernel:
    """Compile a traced program to a kernel that can be called.

    A kernel that only reads a tile before anything wrote it compiles, with a warning. Its calls raise the error;
    where files of TileLang's are served, such tiles begin at 0 (tolerance.py).
    """
    switches = dict.fromkeys(program.switches, True)  # of T.annotate_pass_configs
    build = Build(Target.of(target), replace(options or PassOptions(), **switches))
    warn_of_results(program, out_idx, build.options.strict)
    if build.target.kind == "cpu":
        warn_of_threads(program)
    sized = bool(sizes_of_tiles(program))
    if build.options.strict and not sized:
        warn_of_paths(program)
    step = _sized if sized else compile_cuda if build.target.kind == "cuda" else compile_cpu
    try:
        made = step(program, out_idx, build)
    except TileError as problem:
        if any(each.code not in ("unwritten", "unwritten_element") for each in problem.diagnostics):
            raise
        if sized and not tolerant():
            raise
        compiled = partial(step, out_idx=out_idx, build=build)
        return (_compile_cleared if tolerant() else _compile_to_refuse)(problem, compiled, program)
    if not out_idx:
        warn_of(writes_nothing(program))
    return made


def _sized(program: Program, out_idx: Sequence[int], build: Build) -> JITKernel:
    """Defer compilation to calls, which fix the sizes of shared tiles. Raise all other errors now."""
    from torch_tile.lowering.common.check import check_kernel

    check_kernel(program, known_later=sizes_of_tiles(program))
    return SizedKernel(
        program, out_idx, build,
        lambda sizes: compile_program(fix_sizes(program, sizes), out_idx, build.target, build.options),
    )  # fmt: skip


def _compile_cleared(problem: TileError, step: Callable[[Program], JITKernel], program: Program) -> JITKernel:
    """Compile a kernel whose unwritten tiles begin at 0, and warn of them."""
    from torch_tile.lowering.common.unwritten import cleared

    kernel = step(cleared(program))
    _warn_of_problem(problem, f"{program.name} runs, and what nothing wrote begins at 0")
    return kernel


def _compile_to_refuse(problem: TileError, step: Callable[[Program], JITKernel], program: Program) -> JITKernel:
    """Compile a kernel whose calls raise `problem`, and warn of it."""
    from torch_tile.lowering.common.unwritten import cleared

    try:
        kernel = RefusingKernel(step(cleared(program)), problem)
    except (TileError, InternalError):
        raise problem from None
    _warn_of_problem(problem, f"{program.name} compiles, but its calls raise this error")
    return kernel


def _warn_of_problem(problem: TileError, rest: str) -> None:
    """Warn of the findings of an error, each with what becomes of the kernel."""
    warn_of(replace(each, message=f"{each.message}; {rest}") for each in problem.diagnostics)


def compile_cpu(program: Program, out_idx: Sequence[int], build: Build) -> JITKernel:
    """Compile a program for the CPU."""
    from torch_tile.compiler.source_cache import cpu_source
    from torch_tile.compiler.sources import ENTRY

    source, lowered = cpu_source(program, build)  # passes and C++, unless they are on disk: source_cache.py
    with foreign_text(program):
        library = compile_shared(source.text)  # .so, from the cache if it was built before: runtime/host_compiler.py
    entry = load_entry(library, ENTRY)
    make = _variant_of(compile_cpu, out_idx, build)
    # checks and calls: runtime/launch.py
    launcher = Launcher(program, entry, source.asserts, out_idx, library, source.disjoint, make)
    return JITKernel(program, lowered, source.text, launcher, build)


def compile_cuda(program: Program, out_idx: Sequence[int], build: Build) -> JITKernel:
    """Compile a program for NVIDIA GPUs; this needs no GPU."""
    from torch_tile.compiler.postprocess import postprocessed
    from torch_tile.compiler.source_cache import cuda_source
    from torch_tile.runtime.cuda_launch import CudaLauncher
    from torch_tile.runtime.nvrtc import TooFewRegistersError, compile_cubin

    source, lowered = cuda_source(program, build)  # passes and CUDA C++, unless they are on disk: source_cache.py
    text = postprocessed(source.text, build.target)
    try:
        with foreign_text(program):
            cubin = compile_cubin(text, build.target, build.options)  # machine code, cached: runtime/nvrtc.py
    except TooFewRegistersError as short:
        span = next((entry.span for entry in source.entries if entry.name == short.name), None)
        raise error("too_few_registers", span, name=short.name, have=short.have, need=short.need) from None
    remark_costs(program.kernels, source.entries, cubin, build)
    if build.options.strict:
        refuse_slow(build)
    make = _variant_of(compile_cuda, out_idx, build)
    launcher = CudaLauncher(program, source, cubin.data, build.target, out_idx, make)  # runtime/cuda_launch.py
    return JITKernel(program, lowered, text, launcher, build, cubin)


def _variant_of(step: Callable[..., JITKernel], out_idx: Sequence[int], build: Build) -> Callable[[Program], JITKernel]:
    """Return a function that compiles a variant of a program without warnings: the program's kernel gave them."""

    def make(program: Program) -> JITKernel:
        with collected_warnings(), collector_paused():
            return step(program, out_idx, Build(build.target, build.options))

    return make


@contextlib.contextmanager
def foreign_text(program: Program) -> Iterator[None]:
    """Turn a compiler's complaint about an author's own text into an error of that author."""
    try:
        yield
    except ForeignTextError as problem:
        calls = [call for call in find(program, Call) if call.name == foreign.NAME]
        name = next((foreign.function_of(c) for c in calls if foreign.function_of(c) in str(problem)), "")
        call = next((c for c in calls if foreign.function_of(c) == name), calls[0])
        said = foreign.function_of(call), str(problem)
        raise error("foreign_text", call.span, name=said[0], problem=said[1]) from None


def remark_costs(kernels: Sequence[Kernel], entries: Sequence[Entry], cubin: Cubin, build: Build) -> None:
    """Add the assembler's notes on speed to the schedule report."""
    for kernel, entry in zip(kernels, entries, strict=True):
        found = cubin.resources.get(entry.name)
        if found is None:  # an older NVRTC, which found the code in its own cache, has no log
            continue
        spilled = f"{found.spills} bytes of registers spilled to memory{_too_large(kernel)}" if found.spills else ""
        blocks = build.target.blocks_at_once(entry.threads, found.registers, entry.shared_bytes)
        few = f"{kernel.min_blocks} blocks were asked for" if blocks < kernel.min_blocks else ""
        costs = f"{entry.name}: {found.registers} registers, {entry.shared_bytes} bytes of shared memory, "
        costs += f"{blocks} block{'s'[: blocks != 1]} on a multiprocessor"
        build.remark(entry.span, "T.Kernel", costs, "; ".join(filter(None, (spilled, few))))
    for line in cubin.warnings:
        build.remark(entries[0].span, "assembler", "slower code", line)
        if "Performance Loss" in line:  # products that wait for each other: worth more than a line of a report
            logging.getLogger("torch_tile").warning("%s: %s", entries[0].name, line)


def _too_large(kernel: Kernel) -> str:
    """Describe the fragments that need more registers than a thread has, and the remedy."""
    threads, large = math.prod(kernel.threads), []
    for tile in (n.buffer for n in find(kernel, Alloc) if n.buffer.scope == "fragment"):
        count = math.prod(tile.static_shape or (0,)) * tile.dtype.itemsize // (4 * threads)
        if count > PER_THREAD:
            large.append(f"`{tile.name}` alone takes {count} of the {PER_THREAD} registers of a thread")
    return f": {', '.join(large)}; take more threads or smaller tiles" if large else ""


def warn_of_paths(program: Program) -> None:
    """Warn of each tile that may be read where nothing was written; whether it is depends on the call."""
    from torch_tile.lowering.common.perhaps_unwritten import perhaps_unwritten

    warn_of(perhaps_unwritten(program))


def warn_of_results(program: Program, out_idx: Sequence[int], strict: bool) -> None:
    """Warn of unwritten results and unused parameters; with `strict` raise a TileError for the results."""
    found = unwritten_results(program, out_idx)
    if found and strict:
        raise TileError(*found)
    is_ours = any(kernel.span is not None and kernel.span.is_of_library for kernel in program.kernels)
    warn_of([*found, *(() if is_ours else unused_parameters(program, out_idx))])


def warn_of_threads(program: Program) -> None:
    """Warn of blocks of more threads than any GPU runs: a CPU computes them, as its blocks have no threads."""
    for kernel in program.kernels:
        if (count := math.prod(kernel.threads)) > MOST_THREADS:
            fix = f"give threads=... at most {MOST_THREADS}: each takes more elements of a tile"
            what = f"a block of {count} threads"
            warn_of([diagnose("unsupported_on_target", kernel.span, what=what, target="any GPU", fix=fix)])


def refuse_slow(build: Build) -> None:
    """Raise a TileError that lists all operations that could be faster, if there are any."""
    slow = [remark for remark in dict.fromkeys(build.remarks) if remark.why_not]
    if slow:
        raise TileError(*(diagnose("slow_schedule", n.span, op=n.op, became=n.became, why=n.why_not) for n in slow))


def compile(
    func: PrimFunc,
    out_idx: int | Sequence[int] | None = None,
    target: object = "auto",
    **options: Unpack[CompileOptions],
) -> JITKernel:
    """Compile a @T.prim_func.

    `out_idx` gives the positions of parameters that the kernel allocates and returns (negative: from the end). `target`
    is a GPU where there is one, else the CPU; it need not be in this machine. `strict=True` raises an error for
    everything that became slower than it could be. Other `options` are TileLang's (pass_configs, compile_flags,
    execution_backend, verbose, ...). Raises TileError for mistakes in the kernel or the options, NoCompilerError and
    NoNvrtcError where the target's compiler is missing.
    """
    return _compile(func, out_idx, target, pass_options("compile", **options))


@explains_misfits
def par_compile(
    funcs: Iterable[PrimFunc],
    out_idx: int | Sequence[int] | None = None,
    target: object = "auto",
    num_workers: int | None = None,
    ignore_error: bool = False,
    **options: Unpack[CompileOptions],
) -> list[JITKernel | None]:
    """Compile many kernels in parallel and return them in order; with `ignore_error`, failures give None."""
    one = funcs if isinstance(funcs, PrimFunc | JITFunction | JITKernel) else None
    if one is not None or not isinstance(funcs, Iterable) or isinstance(funcs, str | Mapping):
        why = f"is one kernel, {one.__name__}" if one is not None else f"is {type(funcs).__name__}"
        is_dict = isinstance(funcs, Mapping)
        fix = "give its kernels, funcs.values()" if is_dict else "give a list of kernels, or call torch_tile.compile"
        raise error("bad_argument", None, op="par_compile", name="funcs", why=why, fix=fix)
    pass_options("par_compile", None, ("num_workers", "ignore_error"), **options)
    jobs = [partial(compile, func, out_idx, target, **options) for func in funcs]
    return all_of(jobs, target, num_workers, ignore_error)


def _compile(func: PrimFunc, out_idx: int | Sequence[int] | None, target: object, options: PassOptions) -> JITKernel:
    """Trace and compile a function."""
    program = _traced(func, "compile").program
    if out_idx is not None and program.outputs:
        why, fix = "is given, and the kernel returns what T.empty made: Out index conflict", "leave one of both out"
        raise error("bad_argument", None, op="compile", name="out_idx", why=why, fix=fix)
    return compile_program(program, _positions(out_idx, program), target, options)


def _traced(func: object, op: str) -> PrimFunc:
    """Return `func` if it is a traced kernel; else raise an error."""
    if not isinstance(func, PrimFunc):
        fix = "decorate the kernel with @T.prim_func"
        if isinstance(func, JITFunction):
            fix = f"it compiles itself when it is called; {func.__name__}.compile(...) gives the kernel without a call"
        elif hasattr(func, "forward"):  # an nn.Module
            fix = MODELS
        why = f"is {type(func).__name__}" + (f" `{func.__name__}`" if inspect.isfunction(func) else "")
        raise error("bad_argument", None, op=op, name="func", why=why, fix=fix)
    return func


def jit(
    func: Callable[..., Any] | None = None,
    *,
    out_idx: int | Sequence[int] | None = None,
    target: object = "auto",
    **options: Unpack[CompileOptions],
) -> Any:
    """Decorate a kernel of either style for compilation; see `compile` for the options."""
    switches = pass_options("jit", **options)
    if func is None:
        return lambda f: JITFunction(f, out_idx, target, switches)
    return JITFunction(func, out_idx, target, switches)


class JITFunction:
    """A function decorated with @jit. It keeps the compiled kernels by their arguments."""

    out_idx: int | Sequence[int] | None
    target: object
    options: PassOptions
    __name__: Any

    def __init__(
        self,
        function: Any,
        out_idx: int | Sequence[int] | None = None,
        target: object = "auto",
        options: PassOptions | None = None,
    ):
        check_function(function, "torch_tile.jit")
        if next(iter(inspect.signature(function).parameters), "") in ("self", "cls"):
            why = "is a method's: a kernel that is kept would not see its attributes change"
            fix = "write @staticmethod above the decorator, and pass what the kernel depends on"
            raise error("bad_argument", parameter_span(function, "self"), op="jit", name="self", why=why, fix=fix)
        self.function: FunctionType = function
        self.out_idx, self.options = out_idx, options or PassOptions()
        self.target: object = spelled(target)  # kernels are found by it
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        self.signature: inspect.Signature = _signature(function)
        self.is_lazy: bool = _returns_prim_func(function)
        if not self.is_lazy:
            self.signature = with_declared_numbers(function, self.signature)
        self.names: tuple[str, ...] = tuple(self.signature.parameters)
        if out_idx is not None and not self.is_lazy:
            why, fix = (
                "is for functions that return a @T.prim_func",
                "leave it out: `return` says what the kernel gives",
            )
            raise error("bad_argument", result_span(function), op="jit", name="out_idx", why=why, fix=fix)
        loose = [str(p) for p in self.signature.parameters.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if loose and not self.is_lazy:
            why, fix = f"is `{loose[0]}`: the tensors of a kernel have names", "name each tensor, and annotate it"
            raise error(
                "bad_argument", parameter_span(function, loose[0].strip("*")), op="jit", name=loose[0], why=why, fix=fix
            )
        self.outside: Outside | None = None  # what it reads, found at the first call
        self.readers: tuple[FunctionType, ...] = ()  # of plain values among that, for Dynamo
        self.run_time_names: frozenset[str] = run_time_names(
            self.signature
        )  # of numbers that a compiled kernel is given
        self.on_targets: dict[Target, JITFunction] = {}  # the same function for other targets
        self._start_empty()

    def __copy__(self) -> JITFunction:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: object) -> JITFunction:
        """Return the function itself, so that copies share compiled kernels."""
        return self

    def __reduce__(self) -> Any:
        """Pickle the function by name, as functions are, with a target and switches that were chosen later."""
        found = _found(self.function.__module__, self.function.__qualname__)
        if not isinstance(found, JITFunction) or found.function is not self.function:
            name = f"{self.function.__module__}.{self.function.__qualname__}"
            raise pickle.PicklingError(f"no kernel function is found as {name}: define it at the top of a module")
        return _by_name, (self.function.__module__, self.function.__qualname__, self.target, self.options)

    def _start_empty(self) -> None:
        """Make the caches of kernels empty, and register this object, whose kernels are its own, for Dynamo."""
        self.kernels: dict[Any, JITKernel] = {}
        self.by_position: dict[Any, JITKernel] = {}  # the same, found without binding arguments to names
        self.specialisations: dict[Any, Specialisation] = {}
        self.lock: threading.RLock = threading.RLock()
        self.locks: dict[Any, threading.RLock] = {}  # of one kernel each: different ones are compiled side by side
        self.dynamo_key: str = register_for_dynamo(self)

    def on(self, target: object) -> JITFunction:
        """Return the same kernel function for another target; equal targets give the same object."""
        machine = Target.of(target)
        with self.lock:
            if machine not in self.on_targets:
                made = self.on_targets[machine] = copy.copy(self)
                made.target = machine
                made._start_empty()
            return self.on_targets[machine]

    def with_pass_configs(self, configs: Mapping[str, Any]) -> JITFunction:
        """Return the same kernel function with changed compiler switches; unnamed switches stay."""
        made = copy.copy(self)
        made.options = pass_options("jit", self.options, pass_configs=configs)
        made.on_targets = {}
        made._start_empty()
        return made

    def trace(self, *args: Any, **kwargs: Any) -> tuple[Program, list[Any]]:
        """Return the program for these arguments and an eager call's arguments; compile and keep nothing."""
        if self.is_lazy:
            return self.make(*args, **kwargs).program, []
        with_sizes = not kwargs.keys() <= self.signature.parameters.keys()
        call = (specialise_sizes if with_sizes else specialise)(self.function, self.signature, args, kwargs)
        program = trace_eager(call)[0]
        return program, call.passed(program)

    def make(self, *args: Any, **kwargs: Any) -> PrimFunc:
        """Return the traced kernel that a function of the lazy style returns."""
        bound = bind(self.__name__, self.signature, args, kwargs, self.is_lazy).arguments
        try:
            with collector_paused():
                made = self.function(*args, **kwargs)
        except (TileError, TypeError) as problem:
            raise given_tensors(self.__name__, bound, bool(_inner(source_tree(self.function)))) or problem from None
        if isinstance(made, PrimFunc):
            return made
        tree = source_tree(self.function)
        names, bare = kernels_in(tree), _undecorated(tree)
        fix = f"end it with `return {names[-1]}`" if names else "return the kernel, a function with @T.prim_func"
        if bare:
            fix = f"write @T.prim_func above `def {bare[-1]}`"
        got = "None" if made is None else f"an object of type {type(made).__name__}"
        raise error("no_kernel", result_span(self.function), name=self.__name__, got=got, fix=fix)

    def build(self, program: Program, target: object) -> JITKernel:
        """Return the kernel of a program from `trace`. Any thread may call it."""
        return compile_program(program, _positions(self.out_idx, program), target, self.options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the kernel for these arguments (lazy style), or run on these tensors (eager style)."""
        if _torch is not None and _torch.compiler.is_dynamo_compiling():
            return self._in_graph(args, kwargs)
        if is_tracing():
            raise error("kernel_in_kernel", None, name=self.__name__)
        if self.is_lazy:
            return self.compile(*args, **kwargs)
        call = specialise(self.function, self.signature, args, kwargs)
        kernel = self._eager_kernel(call)
        return kernel(*call.passed(kernel.program))

    def __getitem__(self, grid: object) -> Any:
        """Refuse Triton's `f[grid](...)`."""
        why = "is given in brackets"
        fix = f"T.Kernel(...) in the kernel has the grid: call {self.__name__}(...)"
        raise error("bad_argument", None, op=self.__name__, name="grid", why=why, fix=fix)

    def __getattr__(self, name: str) -> Any:
        """Name the call that compiles the kernel, for an attribute that compiled kernels have."""
        own = self.__dict__.get("__name__", "f")
        call = f"{own}(64)" if self.__dict__.get("is_lazy") else f"{own}.compile(M=1024)"
        raise missing_attribute(self, name, JITKernel, call)

    def read_outside(self) -> object:
        """Return an object that stands for what the function reads from outside, which may change between calls."""
        if self.outside is None:
            self.outside = Outside(self.function)
        return self.outside()

    def _eager_kernel(self, call: EagerCall) -> JITKernel:
        """Return the kernel for an eager call; trace and compile it at the first such call."""
        target, key = self.target_for(call.tensors), (call.key, self.read_outside())
        with self.lock:
            found = self.specialisations.get(key)
            kernel = None if found is None else self.kernels.get((target, key, found.values(call)))
            if kernel is None:
                with collector_paused():
                    program, found = trace_eager(call)
                kernel = compile_program(program, (), target, self.options)
                self._forget_dead()
                for each in (key, (call.key, self.read_outside())):  # a trace may have changed what it reads
                    self.specialisations[each] = found
                    self.kernels[target, each, found.values(call)] = kernel
        return kernel

    def _in_graph(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Handle a call while Dynamo traces a graph; an eager kernel is chosen by the tensors' known properties."""
        _prepare_readers(self.dynamo_key)
        reads: list[str] = []  # Dynamo guards the graph by what it gives to a function of constants
        for read in self.readers:
            reads += [value.hex() if isinstance(value, float) else f"{value!r}" for value in read()]
        if self.is_lazy:
            named = {name: _fixed(value) for name, value in kwargs.items()}
            return getattr(kept, _keep_compiled(self.dynamo_key, tuple(reads), *map(_fixed, args), **named))
        given = [*zip(self.names, args, strict=False), *kwargs.items()]
        from numpy import ndarray  # not before: a process that only compiles needs none

        known: list[tuple[str, Any]] = []
        passed = []
        for name, value in given:
            if isinstance(value, _torch.Tensor):
                known.append((name, (value.dtype, _fixed(tuple(value.shape)), _fixed(value.stride()), value.device)))
                passed.append(value)
            elif isinstance(value, ndarray):  # Dynamo has no constant for it
                raise LaunchError(not_a_tensor(name, value))
            elif name in self.run_time_names:
                known.append((name, 0))
                passed.append(value)
            else:
                known.append((name, _fixed(value)))
        operator = getattr(kept, _keep_eager_operator(self.dynamo_key, tuple(reads), tuple(known), same_as(passed)))
        return results_of(operator(*passed))

    def kernel_for_traced_call(self, known: Sequence[tuple[str, Any]]) -> JITKernel:
        """Return the kernel of an eager call in a traced graph; (dtype, shape, strides, device) stands for a tensor."""
        from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

        def example(value: Any) -> Any:
            if not (isinstance(value, tuple) and len(value) == 4 and isinstance(value[0], _torch.dtype)):
                return value
            dtype, shape, strides, device = value
            return _torch.empty_strided(shape, strides, dtype=dtype, device=device)

        with unset_fake_temporarily(), FakeTensorMode():  # the tensors take no memory, and their device may be missing
            call = specialise(self.function, self.signature, (), {name: example(value) for name, value in known})
        return self._eager_kernel(call)

    def target_for(self, tensors: Sequence[Any]) -> object:
        """Return the target of an eager kernel: its author's choice, else its first tensor's device."""
        if self.target != "auto":
            return self.target
        device = next((t.device for t in tensors if hasattr(t, "device") and t.device.type != "meta"), None)
        return "auto" if device is None else Target.of_device(device)

    def compile(self, *args: Any, **kwargs: Any) -> JITKernel:
        """Return the kernel for these compile-time arguments.

        Eager style: T.const sizes are given by name, and tensors may be left out: `f.compile(M=1024, N=1024)`. Raises
        TypeError where a size is missing.
        """
        if not self.is_lazy:
            return self._eager_kernel(specialise_sizes(self.function, self.signature, args, kwargs))
        if self.target == "auto" and (around := Target.current()) is not None:
            return self.on(around).compile(*args, **kwargs)
        # An exact key takes 0.2 ms. Equal arguments of the library's kernels need none: each field has one type.
        quick = None if kwargs else (args if self.options.measured else exact_key(args), self.read_outside())
        with contextlib.suppress(TypeError):  # an argument that cannot be hashed
            if quick in self.by_position:
                return self.by_position[quick]
        kernel = self._compile(*args, **kwargs)
        with contextlib.suppress(TypeError):
            if quick is not None:
                self.by_position[quick] = kernel
        return kernel

    def _forget_dead(self) -> None:
        """Drop the kernels that were compiled for objects which are no more."""
        for each in (self.kernels, self.by_position, self.specialisations, self.locks):
            forget_dead(each)

    def get_tir(self, *args: Any, **kwargs: Any) -> PrimFunc:
        """Return the traced kernel for the arguments of `compile`."""
        if self.is_lazy:
            return self.make(*args, **kwargs)
        call = specialise_sizes(self.function, self.signature, args, kwargs)
        return PrimFunc(self.function, trace_eager(call)[0])

    def get_kernel_source(self, *args: Any, **kwargs: Any) -> str:
        """Return the generated C++ or CUDA C++ for the arguments of `compile`."""
        return self.compile(*args, **kwargs).get_kernel_source()

    def get_profiler(self, *args: Any, tensor_supply_type: TensorSupplyType | None = None, **kwargs: Any) -> Profiler:
        """Return the profiler of the kernel for the arguments of `compile`."""
        return self.compile(*args, **kwargs).get_profiler(tensor_supply_type or TensorSupplyType.Auto)

    @names_parameters
    def par_compile(
        self,
        configs: Iterable[Sequence[Any] | Mapping[str, Any]],
        num_workers: int | None = None,
        ignore_error: bool = False,
    ) -> list[JITKernel | None]:
        """Compile kernels for many sets of compile-time arguments, each by position or by name, in parallel."""
        jobs = [partial(self.compile, **c) if isinstance(c, Mapping) else partial(self.compile, *c) for c in configs]
        return all_of(jobs, self.target, num_workers, ignore_error)

    def _compile(self, *args: Any, **kwargs: Any) -> JITKernel:
        """Return the kernel for these arguments; compile it at the first call, under a lock of its own."""
        bound = bind(self.__name__, self.signature, args, kwargs)
        bound.apply_defaults()
        given = tuple(bound.arguments.items())
        key = (exact_key(given), self.read_outside())
        with self.lock:
            lock = self.locks.setdefault(key, threading.RLock())
        with lock:
            if key not in self.kernels:
                made = self.make(*args, **kwargs)
                kernel = _compile(made, self.out_idx, self.target, self.options)
                self._forget_dead()
                for each in (key, (exact_key(given), self.read_outside())):  # a trace may have changed what it reads
                    self.kernels[each] = kernel
            return self.kernels[key]


def _fixed(value: Any) -> Any:
    """Return a value that a kernel is compiled for, with numbers in place of Dynamo's symbols, which it guards."""
    if isinstance(value, int | float):
        return _torch.fx.experimental.symbolic_shapes.guard_scalar(value)
    if type(value) in (tuple, list, _torch.Size):
        return type(value)([_fixed(each) for each in value])
    if type(value) is dict:
        return {name: _fixed(each) for name, each in value.items()}
    return value


@assume_constant_result
def _prepare_readers(key: str) -> str:
    """Find what the function with this Dynamo key reads from outside while a graph is traced."""
    function = from_dynamo_key(key)
    function.readers = readers(function.function)
    return ""


@assume_constant_result
def _keep_compiled(key: str, reads: tuple[str, ...], /, *args: Any, **kwargs: Any) -> str:
    """Compile and keep a kernel of the function with this Dynamo key; return its name in `kept`.

    `reads` are values that the function reads from outside. The graph is traced again where one of them changes.
    """
    return keep(from_dynamo_key(key).compile(*args, **kwargs))


@assume_constant_result
def _keep_eager_operator(
    key: str, reads: tuple[str, ...], known: Sequence[tuple[str, Any]], same: tuple[int, ...]
) -> str:
    """Keep the operator for an eager call of the function with this Dynamo key; return its name in `kept`.

    `reads` are as in `_keep_compiled`. `known` holds the arguments as `JITFunction.kernel_for_traced_call` takes them.
    `same` is what `same_as` says of the tensors.
    """
    return keep_operator(from_dynamo_key(key).kernel_for_traced_call(known).dynamo_key, same)


def _positions(out_idx: int | Sequence[int] | None, program: Program) -> list[int]:
    """Check `out_idx` and return the positions as non-negative numbers."""
    several = isinstance(out_idx, Iterable) and not isinstance(out_idx, str)
    given: list[Any] = [] if out_idx is None else list(out_idx) if several else [out_idx]  # type: ignore[arg-type]
    count, names = len(program.params), [p.name for p in program.params]
    for position in given:
        if type(position) is bool or not isinstance(position, int) or not -count <= position < count:
            known = f"{names.index(position)} is `{position}`" if position in names else f"-1 is `{names[-1]}`"
            fix = f"give positions among the {count} parameters of {program.name} ({', '.join(names)}): {known}"
            raise error("bad_argument", None, op="jit", name="out_idx", why=f"is {position!r}", fix=fix)
        if not isinstance(program.params[position], Buffer):
            why = f"names the scalar `{program.params[position].name}`"
            raise error(
                "bad_argument", None, op="jit", name="out_idx", why=why, fix="name tensors that the kernel writes"
            )
    if len({position % count for position in given}) < len(given):
        raise error("bad_argument", None, op="jit", name="out_idx", why=f"is {given}", fix="name each parameter once")
    return [p % count for p in given]


def _signature(function: FunctionType) -> inspect.Signature:
    """Return the signature; evaluate text annotations (`from __future__ import annotations`) where possible."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    try:
        return inspect.signature(function, locals={**frame.f_locals}, eval_str=True)
    except TileError:  # show the parameter
        for name, parameter in inspect.signature(function).parameters.items():
            evaluated(function, name, parameter.annotation, frame.f_locals)
        raise
    except NameError:  # an annotation for readers or type checkers only
        return inspect.signature(function)


def _returns_prim_func(function: FunctionType) -> bool:
    """Return whether a function's source defines a @T.prim_func inside."""
    tree = source_tree(function)
    return bool(kernels_in(tree) or _undecorated(tree)) or not (_opens_kernel(tree) or _declares_tensors(tree))


def kernels_in(tree: ast.FunctionDef) -> list[str]:
    """Return the names of the @T.prim_func that a function defines."""
    return [d.name for d in _inner(tree) if any("prim_func" in ast.dump(by) for by in d.decorator_list)]


def _undecorated(tree: ast.FunctionDef) -> list[str]:
    """Return the names of inner functions that open a kernel and declare its tensors, but have no decorator."""
    found = [d for d in _inner(tree) if not d.decorator_list and _opens_kernel(d)]
    return [d.name for d in found if any("Tensor" in ast.dump(a.annotation) for a in d.args.args if a.annotation)]


def _inner(tree: ast.FunctionDef) -> list[ast.FunctionDef]:
    """Return the functions that a function defines."""
    return [n for n in nodes_of(tree) if isinstance(n, ast.FunctionDef) and n is not tree]


def _opens_kernel(tree: ast.FunctionDef) -> bool:
    """Return whether a function's source opens a `T.Kernel`."""
    return any("Kernel" in ast.dump(i.context_expr) for n in nodes_of(tree) if isinstance(n, ast.With) for i in n.items)


def _declares_tensors(tree: ast.FunctionDef) -> bool:
    """Return whether a function annotates tensors, which makes it a kernel even without T.Kernel."""
    found = [n.annotation for n in nodes_of(tree) if isinstance(n, ast.arg | ast.AnnAssign) and n.annotation]
    return any(re.search(r"\bT\.(Strided)?Tensor\b", ast.unparse(each)) for each in found)


def _reduced(kernel: JITKernel) -> tuple[Any, ...]:
    """Pickle a kernel as its program, which the loading process compiles or finds in its cache."""
    chosen = {"config": kernel.config, "latency": kernel.latency, "ref_latency": kernel.ref_latency}
    given = kernel.program, tuple(kernel.out_idx), kernel.build.target, kernel.build.options
    return compile_program, given, chosen


copyreg.pickle(JITKernel, _reduced)


def _found(module: str, name: str) -> Any:
    """Return the object of a dotted name in a module, or None."""
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _by_name(module: str, name: str, target: object, options: PassOptions) -> JITFunction:
    """Return the kernel function of a name, for a target and with switches."""
    found: JITFunction = _found(module, name)
    if found.options != options:
        found = copy.copy(found)
        found.options, found.on_targets = options, {}
        found._start_empty()
    return found if found.target == target else found.on(target)


class _Decorator(ModuleType):
    """`torch_tile.jit` is this module and, called, the decorator."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return jit(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """The parameters of the decorator."""
        return inspect.signature(jit)


sys.modules[__name__].__class__ = _Decorator
