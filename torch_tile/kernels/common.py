# SPDX-License-Identifier: Apache-2.0
"""Helpers of all kernel families: the dtype of sums, parameter types of any stride, and the machine that
runs kernels.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import torch_tile.language as T
from torch_tile.hardware import Target
from torch_tile.kernels import compute_dtype as compute_dtype  # light: operators import it without the language
from torch_tile.runtime.launch_plan import address_function, current_plan
from torch_tile.runtime.machine import Machine as Machine
from torch_tile.runtime.nvrtc import NoNvrtcError, find_nvrtc

if TYPE_CHECKING:
    from torch_tile.language import TensorType

LOG2_E = math.log2(math.e)
KEPT_CHOICES = 4096  # tilings that a family remembers: to choose one takes longer than to launch a kernel
Problem = TypeVar("Problem")
R = TypeVar("R")


def has_kernels(x: torch.Tensor) -> bool:
    """Return whether the compiler has a target for the tensor's device; else the families run their reference."""
    kind = x.device.type
    return kind == "cpu" or (kind == "cuda" and (planned_machine() is not None or _is_ready(x.device.index)))


def machine_of(x: torch.Tensor) -> Machine:
    """Return the machine that holds a tensor, or the machine that launches are planned for."""
    if planned := planned_machine():
        return planned
    if x.device.type == "cuda":
        return _gpu(x.device.index)
    return Machine(Target("cpu"), torch.get_num_threads())


def planned_machine() -> Machine | None:
    """Return the machine that launches are planned for, which need not hold the tensors; None outside a plan."""
    plan = current_plan()
    return None if plan is None else plan.machine


def _target_of(index: int) -> Target:
    """Return the target of a GPU of this process."""
    return Target.of_device(torch.device("cuda", index))


@cache
def _is_ready(index: int) -> bool:
    """Return whether kernels can be compiled for a GPU: Ampere or later, with NVRTC. Warns if that is missing."""
    if torch.version.hip or not _target_of(index).is_supported:
        return False
    try:
        find_nvrtc()
    except NoNvrtcError as missing:
        warnings.warn(f"torch_tile's operators run as plain torch on GPUs: {missing}", stacklevel=3)
        return False
    return True


@cache
def _gpu(index: int) -> Machine:
    """Describe a GPU of this process."""
    num_sms = torch.cuda.get_device_properties(index).multi_processor_count
    return Machine(_target_of(index), num_sms)


def strided(
    name: str, shape: Sequence[Any], dtype: torch.dtype, unit: bool = True, multiple: int = 1, align: int | None = None
) -> TensorType:
    """Return the type of a parameter whose strides are known at run time only. With `unit` its last dimension is dense.

    The other strides are multiples of `multiple`; the address is a multiple of `align` bytes (see T.Tensor).
    """
    strides: list[Any] = [dynamic(f"{name}_stride{d}", multiple) for d in range(len(shape))]
    if unit:
        strides[-1] = 1
    return T.StridedTensor(shape, strides, dtype, align)


def dynamic(names: str, multiple: int = 1) -> Any:
    """Declare sizes or strides with `T.dynamic` that are multiples of `multiple`."""
    return T.dynamic(names) if multiple == 1 else T.dynamic(names, multiple_of=multiple)


def vector_of(tensors: Iterable[torch.Tensor], sizes: Iterable[int]) -> int:
    """Return how many elements 16 bytes hold, if all rows and `sizes` are multiples of that; else 1.

    All rows must start at multiples of 16 bytes. The last dimension of each tensor must be dense. The stride of a
    dimension of size 1 may be any number.
    """
    tensors, address = list(tensors), address_function()
    width = max(16 // x.element_size() for x in tensors)
    steps = (step for x in tensors for step in zip(x.shape[:-1], x.stride()[:-1], strict=True))
    # A symbol is not compared with 1, since it may have no value yet.
    rows = all(s % width == 0 or (isinstance(n, int) and n <= 1) for n, s in steps)
    aligned = all(address(x) % 16 == 0 for x in tensors)
    return width if rows and aligned and all(n % width == 0 for n in sizes) else 1


def view_as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `x.view(dtype)`, also where `Tensor.view` refuses the stride of a dimension of size 1."""
    single = [isinstance(n, int) and n <= 1 for n in x.shape]
    if any(single):
        steps = [dtype.itemsize if one else s for one, s in zip(single, x.stride(), strict=True)]
        x = x.as_strided(x.shape, [*steps[:-1], 1])
    return x.view(dtype)


def into(out: R | None, results: R) -> R:
    """Copy `results` into `out` if that is given, a tensor or several; return what holds them. None stays None."""
    if out is None:
        return results
    outs: Any = out if isinstance(out, tuple) else (out,)
    values: Any = results if isinstance(out, tuple) else (results,)
    for one, value in zip(outs, values, strict=True):
        if one is not None:
            one.copy_(value)
    return out


def entry_function(
    args_class: Callable[..., Any], reference: Callable[..., Any], empty: Callable[[Any], R]
) -> Callable[[Callable[..., bool | None]], Callable[..., R]]:
    """Decorate `function(args, *results, **options)`, which launches the kernels of an operator.

    The decorated function takes the fields of `args_class`, and results and options by name. It allocates each result
    that is not given as `empty(args)` does, and returns all. Given results are laid out as those; None asks for no such
    result. If the function returns False, or the device has no compiler, `reference` computes the results.
    """

    def decorate(function: Callable[..., bool | None]) -> Callable[..., R]:
        """Wrap an entry function."""
        _, *parameters = inspect.signature(function).parameters.values()
        names = [each.name for each in parameters if each.default is each.empty]
        options = [each.name for each in parameters if each.default is not each.empty]

        @functools.wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            outs = {name: named.pop(name) for name in names if name in named}
            chosen = {name: named.pop(name) for name in options if name in named}
            args = args_class(*given, **named)
            if len(outs) < len(names):
                made: Any = empty(args)
                outs = dict(zip(names, made if len(names) > 1 else (made,), strict=True)) | outs
            results = tuple(outs[name] for name in names)
            found = results if len(names) > 1 else results[0]
            if not has_kernels(args[0]) or function(args, *results, **chosen) is False:
                into(found, reference(*args))
            return found

        return call

    return decorate


def is_unit(x: torch.Tensor) -> bool:
    """Return whether the last dimension has stride 1."""
    return x.shape[-1] <= 1 or x.stride(-1) == 1


def dense_last(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, or a copy whose last dimension is dense."""
    return x if is_unit(x) else x.contiguous()


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Return `x` as `[rows, N]` with dense rows: a view if the strides allow it, else a copy. `x` may be 0-d."""
    return dense_last(x.reshape(-1, x.shape[-1] if x.dim() else 1) if x.numel() else x.reshape(0, 1))


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is not below `value`, and at least `multiple`."""
    return max(1, -(-value // multiple)) * multiple


def power_of_two(value: int) -> int:
    """Return the least power of two that is not below `value`."""
    return 1 << max(0, value - 1).bit_length()


def power_within(most: int) -> int:
    """Return the greatest power of two up to `most`; 0 for 0."""
    return 1 << most.bit_length() >> 1


def typical(problem: Problem) -> Problem:
    """Replace symbolic sizes of a dataclass by their typical values, for choices on which only speed depends."""
    hints = {name: x.node.hint for name, x in vars(problem).items() if isinstance(x, torch.SymInt)}
    return replace(problem, **hints) if hints else problem  # type: ignore[type-var]


@T.macro
def start_early() -> None:
    """Begin a kernel while the one before it ends, and let the next one do so. Call it before anything else.

    A kernel waits here until the one before has ended, which waited as well. So no order of kernels meets a hazard.
    """
    T.pdl_sync()
    T.pdl_trigger()


@T.macro
def dot_rows(a: Any, b: Any, out: Any) -> None:
    """Set `out` to the dot products of the rows of two tiles, computed in the type of `a`, a fragment."""
    product = T.alloc_fragment(a.shape, a.dtype)
    for i, j in T.Parallel(*a.shape):
        product[i, j] = a[i, j] * T.cast(b[i, j], a.dtype)
    T.reduce_sum(product, out, dim=1)
