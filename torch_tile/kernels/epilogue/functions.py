# SPDX-License-Identifier: Apache-2.0
"""The pointwise functions of epilogues, scores and prologues: one row says all that is known of a function.

Adding a function takes a row here and a row in the tests; every other table reads these rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Derivative = Callable[..., Any]


@dataclass(frozen=True)
class Function:
    """A pointwise function.

    `torch` names a function of torch, or is called with the module and the operands; `tile` and `quick` likewise with
    the tile language. `quick` takes fewer instructions, for results rounded to 16 bits or fewer, and for scores.
    `gradient` has one function per operand, of the upstream gradient, the operands and the result; None is zero.
    `aten` lists packets, or overloads where a name has a dot. `bounded` results are finite for all operands; `singular`
    ones may be infinite for finite operands.
    """

    name: str
    arity: int
    torch: str | Callable[..., Any]
    tile: str | Callable[..., Any]
    quick: str | Callable[..., Any] | None = None
    gradient: tuple[Derivative | None, ...] = ()
    aten: tuple[str, ...] = ()
    commutative: bool = False
    bounded: bool = False
    singular: bool = False


def bind(implementation: str | Callable[..., Any], module: Any) -> Callable[..., Any]:
    """The implementation as a function of the operands alone."""
    if isinstance(implementation, str):
        function: Callable[..., Any] = getattr(module, implementation)
        return function
    return functools.partial(implementation, module)


def _comparison(name: str, tile: Callable[[Any, Any], Any], commutative: bool = False) -> Function:
    return Function(
        name,
        2,
        torch=lambda t, a, b: getattr(t, name)(a, b).to(a.dtype),
        tile=lambda T, a, b: T.cast(tile(a, b), a.dtype),
        aten=(name,),
        commutative=commutative,
        bounded=True,
    )


def _same(g: Any, *_: Any) -> Any:
    return g


def _ties(g: Any, a: Any, b: Any) -> Any:
    """Gradient of `maximum(a, b)` in `a`: like torch's, a tie shares it evenly."""
    x, y = a.operand(), b.operand()
    return g * (g.tape.call("gt", x, y) + g.tape.call("eq", x, y) * 0.5)


def _silu(g: Any, a: Any, y: Any) -> Any:
    s = a.call("sigmoid")
    return g * s * (a * (-s + 1.0) + 1.0)


def _gelu(g: Any, a: Any, y: Any) -> Any:
    below = (a * math.sqrt(0.5)).call("erf") * 0.5 + 0.5
    return g * (below + a * (a * a * -0.5).call("exp") * (1 / math.sqrt(2 * math.pi)))


def _gelu_tanh(g: Any, a: Any, y: Any) -> Any:
    slope = math.sqrt(2 / math.pi)
    t = ((a + a * a * a * 0.044715) * slope).call("tanh")
    return g * (t * 0.5 + 0.5 + a * (-(t * t) + 1.0) * (a * a * (3 * 0.044715) + 1.0) * (0.5 * slope))


def _exponent(g: Any, a: Any, b: Any, y: Any) -> Any:
    return (g * y * a.call("log")).chosen(a.call("gt", 0.0))


def _power(g: Any, a: Any, b: Any, y: Any) -> Any:
    return g * b * a.tape.call("pow", a.operand(), (b + -1.0).operand())


# NaN passes through min, max and relu, as in torch: a comparison with NaN is false.
_ROWS = (
    Function("add", 2, "add", lambda T, a, b: a + b, gradient=(_same, _same), aten=("add",), commutative=True),
    Function("sub", 2, "sub", lambda T, a, b: a - b, gradient=(_same, lambda g, a, b, y: -g), aten=("sub",)),
    Function(
        "mul", 2, "mul", lambda T, a, b: a * b, commutative=True, aten=("mul",),
        gradient=(lambda g, a, b, y: g * b, lambda g, a, b, y: g * a),
    ),
    Function(
        "div", 2, "div", lambda T, a, b: a / b, aten=("div",),
        gradient=(lambda g, a, b, y: g / b, lambda g, a, b, y: -g * y / b),
    ),
    Function(
        "min", 2, "minimum", lambda T, a, b: T.if_then_else(T.logical_or(a < b, a != a), a, b), commutative=True,
        gradient=(lambda g, a, b, y: _ties(g, b, a), lambda g, a, b, y: _ties(g, a, b)), aten=("minimum", "clamp_max"),
    ),
    Function(
        "max", 2, "maximum", lambda T, a, b: T.if_then_else(T.logical_or(a > b, a != a), a, b), commutative=True,
        gradient=(lambda g, a, b, y: _ties(g, a, b), lambda g, a, b, y: _ties(g, b, a)), aten=("maximum", "clamp_min"),
    ),
    Function("pow", 2, "pow", "pow", gradient=(_power, _exponent), aten=("pow",), singular=True),
    _comparison("gt", lambda a, b: a > b),
    _comparison("ge", lambda a, b: a >= b),
    _comparison("lt", lambda a, b: a < b),
    _comparison("le", lambda a, b: a <= b),
    _comparison("eq", lambda a, b: a == b, commutative=True),
    _comparison("ne", lambda a, b: a != b, commutative=True),
    Function("neg", 1, "neg", lambda T, a: -a, gradient=(lambda g, a, y: -g,), aten=("neg.default",)),
    Function("exp", 1, "exp", "exp", gradient=(lambda g, a, y: g * y,), aten=("exp.default",), singular=True),
    Function("log", 1, "log", "log", gradient=(lambda g, a, y: g / a,), aten=("log.default",), singular=True),
    Function("sqrt", 1, "sqrt", "sqrt", gradient=(lambda g, a, y: g * 0.5 / y,), aten=("sqrt.default",), singular=True),
    Function(
        "rsqrt", 1, "rsqrt", "rsqrt", gradient=(lambda g, a, y: g * -0.5 * y / a,), aten=("rsqrt.default",),
        singular=True,
    ),
    Function(
        "sigmoid", 1, "sigmoid", "sigmoid", gradient=(lambda g, a, y: g * (y * (-y + 1.0)),),
        aten=("sigmoid.default",), bounded=True,
    ),
    Function(
        "tanh", 1, "tanh", "tanh", quick="quick_tanh", gradient=(lambda g, a, y: g * (-(y * y) + 1.0),),
        aten=("tanh.default",), bounded=True,
    ),
    Function(
        "erf", 1, "erf", "erf", aten=("erf.default",), bounded=True,
        gradient=(lambda g, a, y: g * (-(a * a)).call("exp") * (2 / math.sqrt(math.pi)),),
    ),
    Function(
        "erfc", 1, "erfc", "erfc", aten=("erfc.default",), bounded=True,
        gradient=(lambda g, a, y: g * (-(a * a)).call("exp") * (-2 / math.sqrt(math.pi)),),
    ),
    Function(
        "sin", 1, "sin", "sin", gradient=(lambda g, a, y: g * a.call("cos"),), aten=("sin.default",), bounded=True
    ),
    Function(
        "cos", 1, "cos", "cos", gradient=(lambda g, a, y: -g * a.call("sin"),), aten=("cos.default",), bounded=True
    ),
    Function(
        "abs", 1, "abs", "abs", aten=("abs.default",),
        gradient=(lambda g, a, y: g * (a.call("gt", 0.0) + -a.call("lt", 0.0)),),
    ),
    Function(
        "square", 1, "square", lambda T, a: a * a, gradient=(lambda g, a, y: g * a * 2.0,), aten=("square.default",)
    ),
    Function(
        "reciprocal", 1, "reciprocal", lambda T, a: 1.0 / a, gradient=(lambda g, a, y: -g * (y * y),),
        aten=("reciprocal.default",), singular=True,
    ),
    Function("floor", 1, "floor", "floor"),
    Function(
        "relu", 1, "relu", lambda T, a: T.if_then_else(a < 0.0, 0.0, a), aten=("relu.default",),
        gradient=(lambda g, a, y: g * a.call("gt", 0.0),),
    ),
    Function(
        "silu", 1, lambda t, a: t.nn.functional.silu(a), lambda T, a: a * T.sigmoid(a),
        quick=lambda T, a: a * T.quick_sigmoid(a), gradient=(_silu,), aten=("silu.default",),
    ),
    Function(
        "gelu", 1, lambda t, a: t.nn.functional.gelu(a),
        lambda T, a: 0.5 * a * (1.0 + T.erf(a * math.sqrt(0.5))),
        quick=lambda T, a: 0.5 * a * (1.0 + T.quick_erf(a * math.sqrt(0.5))), gradient=(_gelu,),
    ),
    Function(
        "gelu_tanh", 1, lambda t, a: t.nn.functional.gelu(a, approximate="tanh"),
        lambda T, a: 0.5 * a * (1.0 + T.tanh(math.sqrt(2.0 / math.pi) * (a + 0.044715 * a * a * a))),
        quick=lambda T, a: a * T.quick_sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (a + 0.044715 * a * a * a)),
        gradient=(_gelu_tanh,),
    ),
    Function(
        "where", 3, lambda t, c, a, b: t.where(c != 0, a, b), lambda T, c, a, b: T.if_then_else(c != 0.0, a, b),
        gradient=(
            None,
            lambda g, c, a, b, y: g.chosen(c.is_true()),
            lambda g, c, a, b, y: g.chosen(c.is_false()),
        ),
    ),
)  # fmt: skip

FUNCTIONS = {row.name: row for row in _ROWS}
"""Comparisons give 1.0 or 0.0; `where(c, a, b)` is `a` if `c != 0` else `b`; `min` and `max` pass NaN on."""
