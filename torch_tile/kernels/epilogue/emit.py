# SPDX-License-Identifier: Apache-2.0
"""Translation of an epilogue into tile expressions, with the meaning of `epilogue.torch_functions`.

Assumes a parsed epilogue. One named value is recorded for each statement, so nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch_tile.language as T
from torch_tile.kernels.epilogue import functions as epilogue_functions
from torch_tile.kernels.epilogue.functions import bind
from torch_tile.kernels.epilogue.program import Epilogue, Statement

FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: bind(row.tile, T) for name, row in epilogue_functions.FUNCTIONS.items()
}

# The same with fewer instructions, for results that are rounded to 16 bits or fewer, and for scores.
QUICK: dict[str, Callable[..., Any]] = {
    name: bind(row.quick or row.tile, T) for name, row in epilogue_functions.FUNCTIONS.items()
}


@T.macro
def apply(epilogue: Epilogue, inputs: Mapping[str, Any], dtype: Any, quick: bool = False) -> Any:
    """Compute the value of an epilogue at one element. Arguments are as for `values_of`."""
    return values_of(epilogue, inputs, dtype, quick)[epilogue.result]


@T.macro
def values_of(epilogue: Epilogue, inputs: Mapping[str, Any], dtype: Any, quick: bool = False) -> dict[str, Any]:
    """Compute the values of all names at an element from `inputs` of type `dtype`; `quick` for 16-bit results."""
    functions = QUICK if quick else FUNCTIONS
    values = dict(inputs)
    for statement in epilogue.statements:
        operands = [values[o] if isinstance(o, str) else T.cast(o, dtype) for o in statement.operands]
        value = _quotient(statement, operands) if quick else None
        value = functions[statement.function](*operands) if value is None else value
        values[statement.name] = value
    return values


def _quotient(statement: Statement, operands: Sequence[Any]) -> Any:
    """Turn a quotient by a literal into a product, which is within 1 ulp of it. Return None for other statements."""
    divisor = statement.operands[-1]
    if statement.function != "div" or not isinstance(divisor, float) or not 1e-30 < abs(divisor) < 1e30:
        return None
    return operands[0] * T.cast(1.0 / divisor, operands[0].dtype)


@T.macro
def activate(name: str, value: Any, quick: bool = False) -> Any:
    """Apply an activation of `epilogue.ACTIVATIONS` to one element; `quick` for results of at most 16 bits."""
    x = value
    return x if name == "none" else (QUICK if quick else FUNCTIONS)[name](x)
