# SPDX-License-Identifier: Apache-2.0
"""Define the operator that runs a user's kernel with an epilogue: what the backend puts for a kernel and what follows.

It names the kernel by its operator, and the epilogue by its text. So Inductor's caches may keep the call: the process
that finds it there compiles the fused kernel at the first call.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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


def split(kernel: JITKernel, args: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Sort the arguments of a kernel by the lists of the operator: tensors, integers and floats."""
    lists: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
    for param, value in zip(kernel.launcher.binding.given, args, strict=True):
        lists[_list_of(param)].append(value)
    return lists


def _list_of(param: Any) -> int:
    """Return the number of the list that holds the argument for a parameter."""
    return 0 if isinstance(param, Buffer) else 2 if param.dtype.is_float else 1


def _joined(kernel: JITKernel, *lists: Sequence[Any]) -> list[Any]:
    """Return the arguments of a kernel in their order, from the lists that `split` made."""
    sources = [iter(each) for each in lists]
    return [next(sources[_list_of(param)]) for param in kernel.launcher.binding.given]


def result_of(kernel: JITKernel) -> Buffer | None:
    """Return the one tensor that a kernel returns; None where it returns none or several."""
    results = [*(kernel.program.params[n] for n in kernel.out_idx), *kernel.program.outputs]
    return results[0] if len(results) == 1 and isinstance(results[0], Buffer) else None


def _known(operator: str) -> JITKernel:
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


def _run(
    operator: str, tensors: Sequence[torch.Tensor], ints: Sequence[int], floats: Sequence[float],
    aux: Sequence[torch.Tensor], kinds: str, epilogue: str, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Run the fused kernel. A kernel of the same name that takes no epilogue, in another process, is followed by it."""
    from torch_tile.kernels.epilogue.fuse_into_stores import CannotFuseError
    from torch_tile.kernels.epilogue.program import evaluate

    kernel = _known(operator)
    args = _joined(kernel, tensors, ints, floats)
    try:
        fused = with_epilogue(kernel, kinds, epilogue, tuple(x.dtype for x in aux), dtype)
    except CannotFuseError:
        value = kernel.run(*args)
        wide = torch.float64 if value.dtype == torch.float64 else torch.float32
        return evaluate(epilogue, [value.to(wide)], [x.to(wide) for x in aux]).to(dtype)
    result: torch.Tensor = fused.run(*args, *(x.contiguous() for x in aux))
    return result


def _fake(
    operator: str, tensors: Sequence[torch.Tensor], ints: Sequence[Any], floats: Sequence[float],
    aux: Sequence[torch.Tensor], kinds: str, epilogue: str, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Return the kernel's result, in the dtype of the epilogue, without data."""
    kernel = _known(operator)
    result: torch.Tensor = fake_results(kernel, [result_of(kernel)], _joined(kernel, tensors, ints, floats))
    return torch.empty_like(result, dtype=dtype)


_library.impl("with_epilogue", _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::with_epilogue", _fake, lib=_library)
