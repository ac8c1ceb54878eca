# SPDX-License-Identifier: Apache-2.0
"""Define the operator that runs a user's kernel with an epilogue: what the backend puts for a kernel and what follows.

It names the kernel by its operator, and the epilogue by its text. So Inductor's caches may keep the call: the process
that finds it there compiles the fused kernel at the first call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torch_tile.diagnostics.errors import LaunchError
from torch_tile.ir.buffer import Buffer
from torch_tile.user_op import NAMESPACE, fake_results, kernel_of

if TYPE_CHECKING:
    from torch_tile.kernel import JITKernel

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define(
    "with_epilogue(str operator, Tensor[] tensors, SymInt[] ints, float[] floats, Tensor[] aux, str kinds, "
    "str epilogue, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class EpilogueCall(NamedTuple):
    """The arguments of the operator: a kernel's operator and arguments by type, then the epilogue and its operands."""

    operator: str
    tensors: Sequence[torch.Tensor]
    ints: Sequence[Any]
    floats: Sequence[float]
    aux: Sequence[torch.Tensor]
    kinds: str
    epilogue: str
    dtype: torch.dtype


def by_type(kernel: JITKernel, args: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Sort the arguments of a kernel into the lists of the operator: tensors, integers and floats."""
    lists: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
    for (kind, _), value in zip(_places(kernel), args, strict=True):
        lists[kind].append(value)
    return lists


def _places(kernel: JITKernel) -> list[tuple[int, int]]:
    """Return, for each argument of a kernel, the number of its list in `by_type` and its index there."""
    counts, places = [0, 0, 0], []
    for param in kernel.launcher.binding.given:
        kind = 0 if isinstance(param, Buffer) else 2 if param.dtype.is_float else 1
        places.append((kind, counts[kind]))
        counts[kind] += 1
    return places


def _in_order(call: EpilogueCall, places: Sequence[tuple[int, int]]) -> list[Any]:
    """Return the arguments of the kernel in their order."""
    lists = call.tensors, call.ints, call.floats
    return [lists[kind][index] for kind, index in places]


def result_of(kernel: JITKernel) -> Buffer | None:
    """Return the one tensor that a kernel returns; None where it returns none or several."""
    results = [*(kernel.program.params[n] for n in kernel.out_idx), *kernel.program.outputs]
    return results[0] if len(results) == 1 and isinstance(results[0], Buffer) else None


def _kernel_of(operator: str) -> JITKernel:
    """Return the kernel of an operator; raise LaunchError where this process has none of that name."""
    kernel = kernel_of(operator)
    if kernel is None:
        raise LaunchError(f"no kernel of this process has the operator {operator}: compile the model anew")
    return kernel


@functools.cache
def with_epilogue(
    kernel: JITKernel, kinds: str, epilogue: str, aux: tuple[torch.dtype, ...], dtype: torch.dtype
) -> JITKernel:
    """Compile a kernel whose result passes through an epilogue. It takes the kernel's arguments, then the operands.

    Raises CannotFuseError where its stores take no epilogue, and TileError where the compiler refuses the whole.
    """
    from torch_tile.ir.dtype import to_dtype
    from torch_tile.jit import compile_program
    from torch_tile.kernel import SizedKernel
    from torch_tile.kernels.epilogue.fuse_into_stores import CannotFuseError, fuse_into_stores
    from torch_tile.kernels.epilogue.program import parse

    result = result_of(kernel)
    if result is None:
        raise CannotFuseError("it returns several tensors, or none")
    if isinstance(kernel, SizedKernel):
        raise CannotFuseError("the sizes of its shared tiles come with each call")
    operands = [(kind, to_dtype(of)) for kind, of in zip(kinds, aux, strict=True)]
    program = fuse_into_stores(kernel.program, result, parse(epilogue, 1, len(aux), 0), operands, to_dtype(dtype))
    return compile_program(program, kernel.out_idx, kernel.target, kernel.build.options)


@functools.cache
def _compiled_call(
    operator: str, kinds: str, epilogue: str, dtype: torch.dtype, *aux: torch.dtype
) -> Callable[[EpilogueCall], torch.Tensor]:
    """Compile the fused kernel, and return a function that runs it, or else PyTorch's epilogue after it."""
    from torch_tile.kernels.epilogue.fuse_into_stores import CannotFuseError
    from torch_tile.kernels.epilogue.program import evaluate

    kernel = _kernel_of(operator)
    places = _places(kernel)

    def in_two_steps(call: EpilogueCall) -> torch.Tensor:
        value = kernel.run(*_in_order(call, places))
        wide = torch.float64 if value.dtype == torch.float64 else torch.float32
        return evaluate(epilogue, [value.to(wide)], [x.to(wide) for x in call.aux]).to(dtype)

    def in_one(call: EpilogueCall) -> torch.Tensor:
        result: torch.Tensor = run(*_in_order(call, places), *[x.contiguous() for x in call.aux])
        return result

    try:
        run = with_epilogue(kernel, kinds, epilogue, aux, dtype).run
    except CannotFuseError:
        return in_two_steps
    return in_one


def _run(*given: Any) -> torch.Tensor:
    """Run the fused kernel."""
    call = EpilogueCall(*given)
    return _compiled_call(call.operator, call.kinds, call.epilogue, call.dtype, *[x.dtype for x in call.aux])(call)


def _fake(*given: Any) -> torch.Tensor:
    """Return the kernel's result, in the dtype of the epilogue, without data."""
    call = EpilogueCall(*given)
    kernel = _kernel_of(call.operator)
    result: torch.Tensor = fake_results(kernel, [result_of(kernel)], _in_order(call, _places(kernel)))
    return torch.empty_like(result, dtype=call.dtype)


_library.impl("with_epilogue", _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::with_epilogue", _fake, lib=_library)
