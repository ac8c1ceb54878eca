# SPDX-License-Identifier: Apache-2.0
"""An epilogue as tile expressions: what `epilogue.torch_functions` means on tensors, here on the elements of a kernel.

Assumes a parsed epilogue. One named value is recorded for each statement, so nothing is computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch_tile.language as T
from torch_tile.kernels.epilogue.program import Epilogue, Statement


def _gelu_tanh(x: Any) -> Any:
    return 0.5 * x * (1.0 + T.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


def _compare(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: T.cast(function(a, b), a.dtype)


# NaN passes through min, max and relu, as in torch: a comparison with NaN is false.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "min": lambda a, b: T.if_then_else(T.logical_or(a < b, a != a), a, b),
    "max": lambda a, b: T.if_then_else(T.logical_or(a > b, a != a), a, b),
    "pow": T.pow,
    "gt": _compare(lambda a, b: a > b),
    "ge": _compare(lambda a, b: a >= b),
    "lt": _compare(lambda a, b: a < b),
    "le": _compare(lambda a, b: a <= b),
    "eq": _compare(lambda a, b: a == b),
    "ne": _compare(lambda a, b: a != b),
    "neg": lambda a: -a,
    "exp": T.exp,
    "log": T.log,
    "sqrt": T.sqrt,
    "rsqrt": T.rsqrt,
    "sigmoid": T.sigmoid,
    "tanh": T.tanh,
    "erf": T.erf,
    "abs": T.abs,
    "square": lambda a: a * a,
    "reciprocal": lambda a: 1.0 / a,
    "floor": T.floor,
    "relu": lambda a: T.if_then_else(a < 0.0, 0.0, a),
    "silu": lambda a: a * T.sigmoid(a),
    "gelu": lambda a: 0.5 * a * (1.0 + T.erf(a * math.sqrt(0.5))),
    "gelu_tanh": _gelu_tanh,
    "where": lambda c, a, b: T.if_then_else(c != 0.0, a, b),
}


# The same with fewer instructions, for results that are rounded to 16 bits or fewer, and for scores.
QUICK: dict[str, Callable[..., Any]] = {
    **FUNCTIONS,
    "tanh": T.quick_tanh,
    "silu": lambda a: a * T.quick_sigmoid(a),
    "gelu": lambda a: 0.5 * a * (1.0 + T.quick_erf(a * math.sqrt(0.5))),
    "gelu_tanh": lambda a: a * T.quick_sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (a + 0.044715 * a * a * a)),
}


@T.macro
def apply(epilogue: Epilogue, inputs: Mapping[str, Any], dtype: Any, quick: bool = False) -> Any:
    """The value of an epilogue at one element; the others as for `values_of`."""
    return values_of(epilogue, inputs, dtype, quick)[epilogue.result]


@T.macro
def values_of(epilogue: Epilogue, inputs: Mapping[str, Any], dtype: Any, quick: bool = False) -> dict[str, Any]:
    """The values of all names at one element; `inputs` maps `acc0..`, `x0..`, `i0..` to expressions of type `dtype`.

    `quick` if results are rounded to 16 bits or fewer, or are scores.
    """
    functions = QUICK if quick else FUNCTIONS
    values = dict(inputs)
    for statement in epilogue.statements:
        operands = [values[o] if isinstance(o, str) else T.cast(o, dtype) for o in statement.operands]
        value = _quotient(statement, operands) if quick else None
        value = functions[statement.function](*operands) if value is None else value
        values[statement.name] = value
    return values


def _quotient(statement: Statement, operands: Sequence[Any]) -> Any:
    """A quotient by a literal as a product, which is within 1 ulp of it; None for other statements."""
    divisor = statement.operands[-1]
    if statement.function != "div" or not isinstance(divisor, float) or not 1e-30 < abs(divisor) < 1e30:
        return None
    return operands[0] * T.cast(1.0 / divisor, operands[0].dtype)


@T.macro
def activate(name: str, value: Any, quick: bool = False) -> Any:
    """An activation of `epilogue.ACTIVATIONS` at one element; `quick` if the result is rounded to 16 bits or fewer."""
    x = value
    return x if name == "none" else (QUICK if quick else FUNCTIONS)[name](x)
