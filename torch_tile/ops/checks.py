# SPDX-License-Identifier: Apache-2.0
"""Argument checks of the eager and fake forms of all operators, and the texts of their errors.

Each message names the op and the argument, says what was got and what is wanted. Shapes may be symbolic: relations go
through `torch._check`, so that under tracing they become facts or guards and not recompilations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

FLOATING = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))

Size = int | torch.SymInt


def require(condition: bool | torch.SymBool, message: Callable[[], str]) -> None:
    """Raise `RuntimeError(message())` unless `condition` holds."""
    if torch.compiler.is_dynamo_compiling():  # which takes no message that reads a tensor, and would end the graph
        if not condition:
            raise RuntimeError(message())
    elif condition is not True:
        torch._check(condition, message)


def require_type(condition: bool, message: Callable[[], str]) -> None:
    """Raise `TypeError(message())` unless `condition` holds: for dtypes."""
    if not condition:
        raise TypeError(message())


def require_value(condition: bool, message: Callable[[], str]) -> None:
    """Raise `ValueError(message())` unless `condition` holds: for strings and numbers."""
    if not condition:
        raise ValueError(message())


def check_tensors(op: str, **given: object) -> None:
    """Raise TypeError unless every argument is a tensor; name what makes one of an array, a list or a number."""
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            continue
        kind = type(value).__name__
        made = {"ndarray": f": torch.from_numpy({name})", "NoneType": ""}.get(kind, f": torch.tensor({name})")
        raise TypeError(f"{op}: {name} is {'None' if value is None else f'of type {kind}'}; expected a tensor{made}")


def shape_of(tensor: torch.Tensor) -> str:
    """Return the shape as messages show it."""
    return str(list(tensor.shape))


def check_floating(op: str, **tensors: torch.Tensor | None) -> None:
    """Check that every tensor is strided, of a supported floating dtype and on the first one's device."""
    given = _given(tensors)
    for name, t in given:
        if t.dtype not in FLOATING:
            raise TypeError(f"tile.{op}: {name} has dtype {t.dtype}; expected float16, bfloat16, float32 or float64")
        check_device(op, name, t, *given[0])


def check_auxiliary(op: str, name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Check an epilogue's auxiliary operand: strided, floating or bool (1 and 0), on another tensor's device."""
    if tensor.dtype not in (*FLOATING, torch.bool):
        expected = "expected float16, bfloat16, float32, float64 or bool"
        raise TypeError(f"tile.{op}: {name} has dtype {tensor.dtype}; {expected}")
    check_device(op, name, tensor, other_name, other)


def check_device(op: str, name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Check that both tensors are on one device, and the first is strided."""
    if tensor.device != other.device:
        raise RuntimeError(f"tile.{op}: {name} is on {tensor.device}; expected {other.device}, as {other_name}")
    if tensor.layout != torch.strided:
        raise RuntimeError(f"tile.{op}: {name} has layout {tensor.layout}; expected torch.strided")


def check_same_dtype(op: str, **tensors: torch.Tensor | None) -> None:
    """Check that every tensor has the first one's dtype."""
    given = _given(tensors)
    for name, t in given[1:]:
        first_name, first = given[0]
        if t.dtype != first.dtype:
            raise TypeError(f"tile.{op}: {name} has dtype {t.dtype}; expected {first.dtype}, as {first_name}")


def check_result_dtype(op: str, dtype: torch.dtype) -> None:
    """Check the dtype that a result is asked for."""
    require_type(dtype in FLOATING, lambda: f"tile.{op}: dtype is {dtype}; expected a floating dtype")


def _given(tensors: dict[str, torch.Tensor | None]) -> list[tuple[str, torch.Tensor]]:
    """Drop the absent tensors."""
    return [(name, t) for name, t in tensors.items() if t is not None]


def check_dims(op: str, name: str, tensor: torch.Tensor, dims: int, meaning: str) -> None:
    """Check that the tensor has `dims` dimensions. `meaning` names them in the message, for instance `[B, H, S, D]`."""
    if tensor.dim() != dims:
        raise RuntimeError(
            f"tile.{op}: {name} has {tensor.dim()} dimensions {shape_of(tensor)}; expected {dims}: {meaning}"
        )


def check_size(op: str, name: str, tensor: torch.Tensor, dim: int, size: Size, wanted: str) -> None:
    """Check that dimension `dim` of the tensor is `size`. `wanted` says in the message where that size comes from."""
    condition = tensor.size(dim) == size
    if condition is not True:  # False or symbolic; the message's closure is made only here, off the common path
        _refuse_size(condition, op, name, tensor, dim, size, wanted)


def check_sizes(op: str, name: str, tensor: torch.Tensor, sizes: Iterable[Size], wanted: str) -> None:
    """Check that the first dimensions of the tensor are `sizes`, as `check_size` does."""
    for dim, size in enumerate(sizes):
        check_size(op, name, tensor, dim, size, wanted)


def _refuse_size(
    condition: bool | torch.SymBool, op: str, name: str, tensor: torch.Tensor, dim: int, size: Size, wanted: str
) -> None:
    """Raise for a dimension of the wrong size, unless the condition holds."""
    require(
        condition,
        lambda: (
            f"tile.{op}: {name} has size {tensor.shape[dim]} in dimension {dim} (shape {shape_of(tensor)}); "
            f"expected {size}, {wanted}{_transposed(name, tensor, dim, size)}"
        ),
    )


def _transposed(name: str, tensor: torch.Tensor, dim: int, size: Size) -> str:
    """Return what to write for a matrix whose other dimension has the size, and for a batch of one."""
    if tensor.dim() > 2 and dim == 0 and known_one(tensor.shape[0]):
        return f": {name}.expand({size}{', -1' * (tensor.dim() - 1)})?"
    return f": {name}.mT?" if tensor.dim() == 2 and tensor.shape[1 - dim % 2] == size else ""


def check_vector(op: str, name: str, tensor: torch.Tensor | None, size: Size, wanted: str) -> None:
    """Check that the tensor, if given, is 1-D and `size` long."""
    if tensor is not None:
        check_dims(op, name, tensor, 1, "[N]")
        check_size(op, name, tensor, 0, size, wanted)


def check_positions(op: str, name: str, tensor: torch.Tensor, dims: int, meaning: str, **beside: torch.Tensor) -> None:
    """Check a tensor of positions or numbers: int32, of so many dimensions, on the device of the tensor `beside`."""
    require_type(
        tensor.dtype == torch.int32, lambda: f"tile.{op}: {name} has dtype {tensor.dtype}; expected torch.int32"
    )
    check_dims(op, name, tensor, dims, meaning)
    for other_name, other in beside.items():
        check_device(op, name, tensor, other_name, other)


def check_broadcasts(op: str, name: str, tensor: torch.Tensor, shape: Sequence[Size], of: str = "") -> None:
    """Check that the tensor broadcasts to exactly `shape`. `of` names the tensor that has this shape."""
    wanted = lambda: (  # noqa: E731
        f"tile.{op}: {name} has shape {shape_of(tensor)}, which does not broadcast to {list(shape)}{of and ', as '}{of}"
        + (f": {name}[:, None, None]?" if _is_of_rows(tensor, shape) else "")
    )
    require(tensor.dim() <= len(shape), wanted)
    for got, full in zip(reversed(tensor.shape), reversed(shape), strict=False):
        if not known_one(got):
            require(got == full, wanted)


def _is_of_rows(mask: torch.Tensor, shape: Sequence[Size]) -> bool:
    """Return whether a tensor has the first and the last of four dimensions, as masks of padding have."""
    return len(shape) == 4 and mask.dim() == 2 and list(mask.shape) == [shape[0], shape[-1]]


def known_one(size: Size) -> bool:
    """Return whether the size is known to be 1. An unknown symbol counts as another number."""
    if isinstance(size, int):
        return size == 1
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # imports sympy

    return guard_or_false(size == 1)


def check_activation(op: str, activation: str) -> None:
    """Check that the activation is a known one."""
    from torch_tile.kernels.epilogue.program import ACTIVATIONS

    require_value(
        activation in ACTIVATIONS,
        lambda: f"tile.{op}: activation is {activation!r}; expected one of {', '.join(map(repr, ACTIVATIONS))}",
    )


def check_count_or_auto(op: str, name: str, count: int) -> None:
    """Check how many splits or blocks a caller asks for; 0 lets the kernel choose."""
    from torch_tile.hardware import GRID_LIMITS

    most = GRID_LIMITS[1]
    require_value(0 <= count <= most, lambda: f"tile.{op}: {name} is {count}; expected 0 (automatic) to {most}")
