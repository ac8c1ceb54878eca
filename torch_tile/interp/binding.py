# SPDX-License-Identifier: Apache-2.0
"""A caller's tensors and numbers become the parameters of a Program; shapes and strides determine its dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..diagnostics import LaunchError
from ..ir.buffer import Buffer
from ..ir.expr import Const, Expr, Var
from ..ir.node import walk
from ..ir.stmt import Program
from .values import Value, constant

Evaluate = Callable[[Expr, dict[int, Value]], Value]
Equation = tuple[Expr, int, str]  # an expression, the number that it must be, and where that number comes from


def bind(
    program: Program, args: Sequence[Any] | Mapping[str, Any], evaluate: Evaluate
) -> tuple[dict[int, torch.Tensor], dict[int, Value]]:
    """Tensors by `id(buffer)`, and the values of scalar parameters and dimensions by `id(var)`.

    Raises LaunchError, naming the argument, for a wrong count, kind, dtype, rank, size or stride.
    """
    tensors: dict[int, torch.Tensor] = {}
    values: dict[int, Value] = {}
    equations: list[Equation] = []
    for param, given in zip(program.params, _in_order(program, args), strict=True):
        if isinstance(param, Var):
            values[id(param)] = _scalar(param, given)
        else:
            tensors[id(param)] = _tensor(param, given)
            equations += _sizes(param, given)
    solve(equations, values, evaluate)
    for param in program.params:
        if isinstance(param, Buffer) and param.strides is None and not tensors[id(param)].is_contiguous():
            raise LaunchError(f"argument `{param.name}` must be contiguous, got strides {tensors[id(param)].stride()}")
    return tensors, values


def solve(equations: Sequence[Equation], values: dict[int, Value], evaluate: Evaluate) -> None:
    """Add to `values` the dimensions that the equations determine; LaunchError if they disagree or leave one open.

    A dimension is found from an equation in which it is the only unknown and to which it is related linearly.
    """
    pending = list(equations)
    while pending:
        rest = [e for e in pending if not _use(e, values, evaluate)]
        if len(rest) == len(pending):
            expr, actual, where = rest[0]
            names = ", ".join(v.name for v in _unknowns(expr, values))
            raise LaunchError(f"{where} is {actual}, from which {names} of {expr!r} does not follow")
        pending = rest


def _use(equation: Equation, values: dict[int, Value], evaluate: Evaluate) -> bool:
    """Check an equation without unknowns, or solve one with a single unknown; False if it has to wait."""
    expr, actual, where = equation
    unknown = _unknowns(expr, values)
    if len(unknown) > 1:
        return False
    if unknown:
        key = id(unknown[0])
        at = [evaluate(expr, values | {key: x}) for x in (0, 1)]
        slope = at[1] - at[0]
        if slope == 0 or evaluate(expr, values | {key: (actual - at[0]) // slope}) != actual:
            return False
        values[key] = (actual - at[0]) // slope
        return True
    wanted = evaluate(expr, values)
    if wanted != actual:
        text = "" if isinstance(expr, Const) else f" ({expr!r})"
        raise LaunchError(f"{where} is {actual}, but must be {wanted}{text}")
    return True


def _unknowns(expr: Expr, values: Mapping[int, Value]) -> list[Var]:
    return list({id(n): n for n in walk(expr) if isinstance(n, Var) and id(n) not in values}.values())


def _in_order(program: Program, args: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
    names = [p.name for p in program.params]
    if isinstance(args, Mapping):
        if set(args) != set(names):
            raise LaunchError(f"`{program.name}` takes the arguments {names}, got {sorted(args)}")
        return [args[n] for n in names]
    if len(args) != len(names):
        raise LaunchError(f"`{program.name}` takes {len(names)} arguments ({', '.join(names)}), got {len(args)}")
    return list(args)


def _scalar(param: Var, given: Any) -> Value:
    if isinstance(given, torch.Tensor) and given.numel() == 1:
        given = given.item()
    if not isinstance(given, bool | int | float) or (isinstance(given, float) and not param.dtype.is_float):
        raise LaunchError(f"argument `{param.name}` must be a number of dtype {param.dtype}, got {given!r}")
    return constant(given, param.dtype)


def _tensor(param: Buffer, given: Any) -> torch.Tensor:
    if not isinstance(given, torch.Tensor):
        raise LaunchError(f"argument `{param.name}` must be a tensor, got {type(given).__name__}")
    if given.device.type != "cpu":
        raise LaunchError(f"argument `{param.name}` is on {given.device}; the interpreter takes CPU tensors")
    if given.dtype != param.dtype.as_torch():
        raise LaunchError(f"argument `{param.name}` must have dtype {param.dtype}, got {given.dtype}")
    if given.ndim != param.rank:
        raise LaunchError(f"argument `{param.name}` must have {param.rank} dimensions, got shape {tuple(given.shape)}")
    return given.detach()


def _sizes(param: Buffer, given: torch.Tensor) -> list[Equation]:
    found = [
        (e, n, f"size {d} of argument `{param.name}`")
        for d, (e, n) in enumerate(zip(param.shape, given.shape, strict=True))
    ]
    for d, (e, n) in enumerate(zip(param.strides or (), given.stride(), strict=False)):
        if given.shape[d] > 1 or _is_open(e):  # the stride of a single row means nothing, but may name a dimension
            found.append((e, n, f"stride {d} of argument `{param.name}`"))
    return found


def _is_open(expr: Expr) -> bool:
    return any(isinstance(n, Var) for n in walk(expr))
