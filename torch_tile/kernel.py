# SPDX-License-Identifier: Apache-2.0
"""Define a compiled kernel as its user holds it: callable, and open to inspection."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_tile.compiler.context import Build, Schedule
from torch_tile.compiler.size_check import SizeCheck
from torch_tile.diagnostics.arguments import names_parameters
from torch_tile.diagnostics.errors import LaunchError, TileError
from torch_tile.diagnostics.spelling import missing_attribute
from torch_tile.hardware import Target
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Scalar, Var
from torch_tile.ir.fixed_sizes import sizes_of_tiles
from torch_tile.ir.stmt import Program
from torch_tile.profiler import Profiler, TensorSupplyType
from torch_tile.runtime.launch import MOST_FORMS, BaseLauncher, computes_in_python
from torch_tile.user_op import (
    is_transformed,
    keep_operator,
    kept,
    lacking_gradient,
    register_for_dynamo,
    results_of,
    same_as,
    with_delayed_error,
)

if TYPE_CHECKING:
    from torch_tile.compiler.line_times import LineTimes
    from torch_tile.runtime.nvrtc import Cubin, Resources
    from torch_tile.simulator.findings import Findings

_torch: Any = sys.modules.get("torch")  # None in a process that only compiles


class Compiled(type):
    """The class of JITKernel, which lets `JITKernel(func, target=...)` compile a @T.prim_func as TileLang's does."""

    @property
    def __signature__(cls) -> inspect.Signature:
        """The parameters of torch_tile.compile."""
        return inspect.signature(sys.modules["torch_tile"].compile)

    def __call__(cls, program: Any, *args: Any, **named: Any) -> Any:
        """Make a kernel of a program, or compile one of a function."""
        if isinstance(program, Program | JITKernel):
            return super().__call__(program, *args, **named)
        return sys.modules["torch_tile"].compile(program, *args, **named)  # jit.py, which imports this file


class JITKernel(metaclass=Compiled):
    """A compiled kernel; call it with the tensors and scalars of its signature (without those of out_idx).

    `JITKernel(func, out_idx=None, target="auto", ...)` compiles a @T.prim_func, as torch_tile.compile does.

    Raises LaunchError for arguments that the kernel cannot take, or where its target is missing. In grad mode, results
    for tensors that require gradients raise an error in the backward pass; `torch_tile.custom_op` gives a gradient.
    """

    program: Program
    source: str
    launcher: BaseLauncher
    build: Build
    cubin: Cubin | None
    run: Callable[..., Any]  # a call outside of torch.compile
    config: Mapping[str, Any] | None  # what the autotuner chose, and its milliseconds
    latency: float | None
    ref_latency: float | None

    def __init__(
        self,
        program: Program,
        lowered: Callable[[], Program],
        source: str,
        launcher: BaseLauncher,
        build: Build,
        cubin: Cubin | None = None,
    ):
        self.program, self.source = program, source
        self._lowered = lowered
        self.launcher, self.build, self.cubin = launcher, build, cubin
        launcher.watch = SizeCheck(program, launcher.out_idx)
        self.config = self.latency = self.ref_latency = None
        self.__name__: str = program.name
        self.run = self._first_call
        self.dynamo_key: str = register_for_dynamo(self)

    def __copy__(self) -> JITKernel:
        """Return the kernel itself, because a kernel is never changed."""
        return self

    def __deepcopy__(self, memo: object) -> JITKernel:
        """Return the kernel itself, because a kernel is never changed."""
        return self

    def __getattr__(self, name: str) -> Any:
        """Name the nearest attribute."""
        raise missing_attribute(self, name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run on `args`; return the result that the kernel allocates, or a list if there are several.

        A kernel has no gradient: of results for arguments that require one, it is an error.
        """
        if _torch is not None:
            if _torch.compiler.is_dynamo_compiling() or is_transformed(_torch):
                return results_of(getattr(kept, keep_operator(self.dynamo_key, same_as(args)))(*args, **named))
            if _torch.is_grad_enabled() and (text := lacking_gradient(self, args)):
                return with_delayed_error(self._run(*args, **named), args, text)
        return self._run(*args, **named)

    def _run(self, *args: Any, **named: Any) -> Any:
        """Run outside of torch's dispatcher; leave tensors that compute in Python to the kernel's operator."""
        try:
            return self.run(*args, **named)
        except LaunchError:
            if not any(map(computes_in_python, args)):
                raise
        return results_of(getattr(kept, keep_operator(self.dynamo_key, same_as(args)))(*args, **named))

    def _first_call(self, *args: Any, **named: Any) -> Any:
        """Run the first call, and choose the shortest way for later calls."""
        if named:
            self.launcher.binding.refuse_names(named)
        result = self.launcher.begin(*args)
        self.run = self.launcher.begin
        return result

    def specialised(self, *args: Any) -> JITKernel:
        """Return the kernel that runs for these arguments: itself, or one for exact aliases among the arguments.

        Where tiles have sizes that a call brings, it is the kernel for those.
        """
        made = self.launcher.variant_for(args)
        return self if made is None else made

    def __repr__(self) -> str:
        return f"<JITKernel {self.__name__} for {self.target}>"

    @property
    def target(self) -> Target:
        """Return the target that the kernel was compiled for."""
        return self.build.target

    @property
    def params(self) -> tuple[Any, ...]:
        """Return the buffers and scalars of the signature."""
        return self.program.params

    @property
    def out_idx(self) -> list[int]:
        """Return the positions of the parameters that the kernel allocates."""
        return self.launcher.out_idx

    @property
    def prim_func(self) -> Program:
        """Return the traced kernel, by TileLang's name."""
        return self.program

    @names_parameters
    def run_once(self, func: Callable[..., Any] | None = None) -> Any:
        """Run the kernel, or `func`, once on inputs that the profiler makes."""
        return self.get_profiler().run_once(func)

    @property
    def lowered(self) -> Program:
        """Return the program after the passes; they run now if the kernel was found on disk."""
        return self._lowered()

    @property
    def schedule(self) -> Schedule:
        """Return the schedule report: what each operation became, and why nothing faster. It prints as a table."""
        return self.build.schedule(self.__name__)

    @property
    def resources(self) -> dict[str, Resources]:
        """Return registers, spilled bytes, stack and shared memory of each entry of a CUDA kernel; empty on the CPU."""
        return {} if self.cubin is None else self.cubin.resources

    @property
    def n_regs(self) -> int:
        """Return how many registers a thread has, the most of all entries of a CUDA kernel; 0 on the CPU."""
        return max((each.registers for each in self.resources.values()), default=0)

    @property
    def n_spills(self) -> int:
        """Return how many bytes a thread spills because registers ran out, the most of all entries."""
        return max((each.spills for each in self.resources.values()), default=0)

    def script(self) -> str:
        """Return the kernel in the language, as traced."""
        return repr(self.program)

    @names_parameters
    def get_kernel_source(self, kernel_only: bool = True) -> str:
        """Return the generated C++ or CUDA C++."""
        return self.source

    def get_host_source(self) -> str:
        """Return the generated C++; torch_tile has no other host code for a kernel."""
        return self.source

    @names_parameters
    def show_source(self, which: str = "kernel") -> None:
        """Print the generated C++. `which` is TileLang's, "kernel", "host" or "both", and changes nothing."""
        if which not in ("kernel", "host", "both"):
            raise ValueError(f"show_source: which is {which!r}; expected 'kernel', 'host' or 'both'")
        print(self.source)

    @names_parameters
    def print_source_code(self, which: str = "kernel", file: str | Path | None = None) -> None:
        """Print the generated C++, or write it to a file."""
        if file is None:
            self.show_source(which)
        else:
            self.export_sources(file)

    @names_parameters
    def export_sources(self, kernel_path: str | Path, host_path: str | Path | None = None) -> None:
        """Write the generated C++ to a file."""
        Path(kernel_path).write_text(self.source)

    @names_parameters
    def export_cubin(self, path: str | Path) -> None:
        """Write the machine code of a CUDA kernel to a file, for the tools of the CUDA toolkit."""
        if self.cubin is None:
            raise LaunchError(f"{self!r} has no cubin; compile it with target='cuda'")
        Path(path).write_bytes(self.cubin.data)

    @names_parameters
    def interpret(self, *args: Any, blocks: Any = None) -> Findings:
        """Run what the kernel's threads do on CPU tensors, without a GPU, and report what they do wrong.

        `args` are those of a call, tensors are written in place; what the kernel allocates is in `outputs` of
        the result. `blocks` chooses blocks, as (x, y, z); None runs all. CUDA kernels only: for the others
        torch_tile.simulator.tile.interpreter.evaluate says what they compute.
        """
        if self.target.kind != "cuda":
            raise LaunchError(f"{self!r} has no threads to interpret; compile it with target='cuda'")
        if (kernel := self.specialised(*args)) is not self:
            return kernel.interpret(*args, blocks=blocks)
        from torch_tile.simulator.interpret import interpret

        return interpret(self.lowered, self.program, args, self.out_idx, blocks)

    @names_parameters
    def profile(self, sizes: Mapping[str, int] | None = None) -> LineTimes:
        """Estimate the time of each line of the kernel; it prints as a table.

        Where its device is there, the kernel is timed on made-up inputs. The lines share that time as the cost model
        weighs their work. Elsewhere all times are the model's. `sizes` has sizes known only at run time, by
        name: {"m": 1024}. Raises LaunchError where one is missing and the kernel is timed.
        """
        from torch_tile.compiler.line_times import line_times

        def measure() -> float:
            return float(self.get_profiler().do_bench(dynamic_symbolic_constraints=sizes))

        is_here = self.target.kind == "cpu" or (_torch is not None and _torch.cuda.is_available())
        return line_times(self.program, self.target, sizes, measure if is_here else None)

    @names_parameters
    def get_profiler(self, tensor_supply_type: TensorSupplyType = TensorSupplyType.Auto) -> Profiler:
        """Return a profiler, which times and compares on made-up inputs; all sizes must be known."""
        return Profiler(self, tensor_supply_type)


class RefusingKernel(JITKernel):
    """A kernel whose text can be looked at, and whose calls raise an error."""

    def __init__(self, kernel: JITKernel, problem: TileError):
        self.problem = problem
        super().__init__(kernel.program, kernel._lowered, kernel.source, kernel.launcher, kernel.build, kernel.cubin)

    def _first_call(self, *args: Any, **named: Any) -> Any:
        """Raise the error, in each call."""
        raise self.problem

    @names_parameters
    def interpret(self, *args: Any, blocks: Any = None) -> Findings:
        """Raise the error."""
        raise self.problem


class SizedKernel(JITKernel):
    """A kernel whose shared tiles have sizes that calls bring. It is compiled once for each value of these sizes."""

    tile_sizes: list[Var]

    def __init__(
        self, program: Program, out_idx: Sequence[int], build: Build, make: Callable[[Mapping[Var, Scalar]], JITKernel]
    ):
        self.tile_sizes = sizes_of_tiles(program)
        names = ", ".join(var.name for var in self.tile_sizes)
        text = f"// {program.name} is compiled at calls, for the sizes {names} of their tiles.\n"
        super().__init__(program, lambda: program, text, _SizedLauncher(program, out_idx, self), build)
        self.make = make
        self.made: dict[tuple[Scalar, ...], JITKernel] = {}

    def specialised(self, *args: Any) -> JITKernel:
        """Return the kernel for the sizes of these arguments; compile it where none of them was given before."""
        binding = self.launcher.binding
        given = binding.in_order(args)
        tensors = [a for p, a in zip(binding.given, given, strict=True) if isinstance(p, Buffer)]
        kind = next((t.device.type for t in tensors if hasattr(t, "device")), self.target.kind)
        values = {**binding.sizes_of(given, kind), **binding.scalars_of(given)}
        key = tuple(values[var] for var in self.tile_sizes)
        found = self.made.get(key)
        if found is None:
            if len(self.made) >= MOST_FORMS:
                self.made.clear()
            found = self.made[key] = self.make(dict(zip(self.tile_sizes, key, strict=True)))
        return found.specialised(*args)


class _SizedLauncher(BaseLauncher):
    """Hand each call to the kernel for its sizes."""

    def __init__(self, program: Program, out_idx: Sequence[int], kernel: SizedKernel):
        super().__init__(program, out_idx)
        self.kernel = kernel
        self.begin = self.__call__

    @property
    def kind(self) -> str:  # type: ignore[override]
        """Return the device of the arguments."""
        return self.kernel.target.kind

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the kernel for the sizes of the arguments."""
        if named:
            self.binding.refuse_names(named)
        return self.kernel.specialised(*args).launcher.begin(*args)
