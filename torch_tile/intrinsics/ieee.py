# SPDX-License-Identifier: Apache-2.0
"""Sums, products, quotients and roots with IEEE 754 rounding in a given direction.

Compilers never fuse them with neighbouring operations. float32 and float64 have all directions. The C++ is in
csrc/cuda_ieee.h and csrc/cpu_ieee.h.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

from torch_tile.intrinsics.base import Intrinsic, declare, same

MODES = ("rn", "rz", "ru", "rd")  # to nearest even, to zero, up, down
ARITY = {"add": 2, "sub": 2, "mul": 2, "fmaf": 3, "frcp": 1, "fsqrt": 1, "frsqrt": 1, "fdiv": 2}

# The float64 result of each, and by how much the exact result is more. For float32 operands the float64 result of a
# product or quotient is exact or very close. Rounding it again is right.
Parts = Callable[..., tuple[Any, Any]]


def _sum(a: Any, b: Any) -> tuple[Any, Any]:
    """Return a float64 sum and its rounding error (two-sum)."""
    total = a + b
    shifted = total - a
    return total, (a - (total - shifted)) + (b - shifted)


def _exact(value: Any) -> tuple[Any, Any]:
    """Return an exact value with a rounding error of zero."""
    return value, value * 0


PARTS: dict[str, Parts] = {
    "add": _sum, "sub": lambda a, b: _sum(a, -b), "mul": lambda a, b: _exact(a * b),
    "fmaf": lambda a, b, c: _sum(a * b, c), "frcp": lambda a: _exact(1 / a), "fsqrt": lambda a: _exact(a.sqrt()),
    "frsqrt": lambda a: _exact(1 / a.sqrt()), "fdiv": lambda a, b: _exact(a / b),
}  # fmt: skip


def _evaluate(name: str, mode: str, *args: Any) -> Any:
    """Compute an operation with the given rounding mode, the meaning of the intrinsic."""
    import torch

    if args[0].dtype == torch.float64:
        if name == "frsqrt":
            return PARTS[name](*args)[0]
        args = tuple(torch.broadcast_tensors(*args))
        points = zip(*(a.flatten().tolist() for a in args), strict=True)
        results = [_round_exact_result(name, mode, *point) for point in points]
        return torch.tensor(results, dtype=torch.float64).reshape(args[0].shape)
    total, rest = PARTS[name](*(a.double() for a in args))
    bits = total.view(torch.int64)
    uneven = torch.where((rest > 0) == (total > 0), bits + 1, bits - 1)  # rounded to odd, it may be rounded again
    exact = torch.where((rest == 0) | (bits & 1 == 1) | ~total.isfinite() | rest.isnan(), bits, uneven)
    found = _directed(exact.view(torch.float64), mode)
    if mode == "rd" and name in ("add", "sub", "fmaf"):  # x - x is -0
        zero = (total == 0) & ~_are_positive_zeros(name, *args)
        found = torch.where(zero, torch.full_like(found, -0.0), found)
    return found


EXACT: dict[str, Callable[..., Fraction]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "fmaf": lambda a, b, c: a * b + c,
    "frcp": lambda a: 1 / a, "fdiv": lambda a, b: a / b,
}  # fmt: skip


def _round_exact_result(name: str, mode: str, *args: float) -> float:
    """Compute one float64 operation by exact fractions."""
    import torch

    divides = name in ("frcp", "fdiv") and args[-1] == 0
    if divides or not all(map(math.isfinite, args)) or (name == "fsqrt" and args[0] <= 0):
        operands = [torch.tensor(a, dtype=torch.float64) for a in args]
        plain = operands[0] * operands[1] + operands[2] if name == "fmaf" else PARTS[name](*operands)[0]
        return float(plain)
    if name == "fsqrt":
        near, square = math.sqrt(args[0]), Fraction(args[0])
        side = (square > Fraction(near) ** 2) - (square < Fraction(near) ** 2)
    else:
        exact = EXACT[name](*map(Fraction, args))
        if exact == 0:
            return _signed_zero(name, mode, *args)
        try:
            near = float(exact)
            side = (exact > Fraction(near)) - (exact < Fraction(near))
        except OverflowError:
            near, side = (math.inf, -1) if exact > 0 else (-math.inf, 1)
        if near == 0:
            near = 0.0 if exact > 0 else -0.0
    goal = {"rn": near, "ru": math.inf, "rd": -math.inf, "rz": 0.0}[mode]
    is_wrong = {"rn": False, "ru": side > 0, "rd": side < 0, "rz": side * near < 0}[mode]
    return math.nextafter(near, goal) if is_wrong else near


def _signed_zero(name: str, mode: str, *args: float) -> float:
    """Return the zero that an exact result of 0 is."""
    if name in ("mul", "fdiv", "frcp"):
        return math.prod(math.copysign(1.0, a) for a in args) * 0.0
    first, second = (args[0] * args[1], args[2]) if name == "fmaf" else args
    second = -second if name == "sub" else second
    if first == 0 and second == 0 and math.copysign(1.0, first) == math.copysign(1.0, second):
        return first
    return -0.0 if mode == "rd" else 0.0


def _are_positive_zeros(name: str, *args: Any) -> Any:
    """Return where an exact result of zero has a positive sign."""
    first, second = (args[0] * args[1], args[2]) if name == "fmaf" else args
    second = -second if name == "sub" else second
    return (first == 0) & (second == 0) & ~first.signbit() & ~second.signbit()


def _directed(value: Any, mode: str) -> Any:
    """Round float64 to float32 in a rounding mode."""
    import torch

    near = value.float()
    if mode == "rn":
        return near
    bits = near.view(torch.int32)
    found, is_below = near.double(), near.signbit()
    away, back = (step.view(torch.float32) for step in (bits + 1, bits - 1))
    if mode == "rz":
        return torch.where(found.abs() > value.abs(), back, near)
    if mode == "ru":
        return torch.where(found < value, torch.where(is_below, back, away), near)
    return torch.where(found > value, torch.where(is_below, away, back), near)


for _name, _arity in ARITY.items():
    for _mode in MODES if _name != "frsqrt" else ("rn",):
        declare(
            Intrinsic(
                f"ieee_{_name}_{_mode}", _arity, same, f"ieee_{_name}<{MODES.index(_mode)}>",
                partial(_evaluate, _name, _mode), cuda=f"ieee_{_name}_{_mode}", header="cuda_ieee.h",
            )
        )  # fmt: skip
