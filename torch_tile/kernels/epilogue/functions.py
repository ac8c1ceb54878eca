# SPDX-License-Identifier: Apache-2.0
"""The table of pointwise functions of epilogues, scores and prologues. One row states all facts about a function.

Adding a function takes a row here and a row in the tests; every other table reads these rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Derivative = Callable[..., Any]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Call:
    """A call of a function of the table. Operands are other calls, numbers, or values of the reader (nodes)."""

    function: str
    operands: tuple[Any, ...]

    def leaves(self) -> Iterator[Any]:
        """Yield the operands that are no calls, in order."""
        for x in self.operands:
            yield from x.leaves() if isinstance(x, Call) else (x,)

    def reduce(self, leaf: Callable[[Any], Value], apply: Callable[[str, Sequence[Value]], Value]) -> Value:
        """Evaluate the call: `leaf` values leaves in order, and `apply` takes a function's name and operand values."""
        values = [x.reduce(leaf, apply) if isinstance(x, Call) else leaf(x) for x in self.operands]
        return apply(self.function, values)


Binder = Callable[..., Call | None]


@dataclass(frozen=True)
class Spelling:
    """One ATen operator that may spell a row. `bind` maps its arguments to a call, or to None if no row computes it."""

    packet: str
    bind: Binder


@dataclass(frozen=True)
class Function:
    """A pointwise function.

    Attributes:
        name: its word in epilogue texts.
        arity: the number of its operands.
        torch: names a function of torch, or is called with the module and the operands. This is the reference.
        tile: likewise with the tile language.
        quick: a form with fewer instructions, for results rounded to 16 bits or fewer, and for scores.
        gradient: one function per operand, of the upstream gradient, the operands and the result; None is zero.
        aten: packets that have the row's operands and no other argument; `Spelling` says others.
        written: epilogue texts of `acc0` and the other operands `x0..` that become a call; what a text leaves out is 1.
        index: likewise with `inductor/graph/index_expr.py`, on sympy expressions; None leaves the call unevaluated.
        commutative: whether the two operands may change places.
        bounded: whether results are finite for all operands.
        singular: whether results may be infinite for finite operands.
        truth: whether results are 1 or 0.
    """

    name: str
    arity: int
    torch: str | Callable[..., Any]
    tile: str | Callable[..., Any]
    quick: str | Callable[..., Any] | None = None
    gradient: tuple[Derivative | None, ...] = ()
    aten: tuple[str | Spelling, ...] = ()
    written: tuple[str, ...] = ()
    index: str | Callable[..., Any] | None = None
    commutative: bool = False
    bounded: bool = False
    singular: bool = False
    truth: bool = False

    def spellings(self) -> tuple[Spelling, ...]:
        """Return the ATen operators that compute the function."""
        return tuple(x if isinstance(x, Spelling) else Spelling(x, self._plain) for x in self.aten)

    def _plain(self, *operands: Any, **others: Any) -> Call | None:
        """Return the call for operands of the function's arity, None for other arguments."""
        return Call(self.name, operands) if len(operands) == self.arity and not others else None


def bind(implementation: str | Callable[..., Any], module: Any) -> Callable[..., Any]:
    """Return the implementation as a function of the operands alone."""
    if isinstance(implementation, str):
        function: Callable[..., Any] = getattr(module, implementation)
        return function
    return functools.partial(implementation, module)


def _comparison(
    name: str, tile: Callable[[Any, Any], Any], commutative: bool = False, more: tuple[Spelling, ...] = ()
) -> Function:
    """Build the table row of a comparison."""
    return Function(
        name,
        2,
        torch=lambda t, a, b: getattr(t, name)(a, b).to(a.dtype),
        tile=lambda T, a, b: T.cast(tile(a, b), a.dtype),
        aten=(name, *more),
        index=name,
        commutative=commutative,
        bounded=True,
        truth=True,
    )


def _sum(name: str) -> Spelling:
    """Return the spelling of `add` or `sub`, which may scale the second operand."""
    return Spelling(name, lambda a, b, alpha=1: Call(name, (a, b if alpha == 1 else Call("mul", (b, alpha)))))


def _quotient(a: Any, b: Any, rounding_mode: str | None = None) -> Call | None:
    """Read `aten.div` without rounding."""
    return Call("div", (a, b)) if rounding_mode is None else None


def _gelu_of(a: Any, approximate: str = "none") -> Call:
    """Read `aten.gelu` in its exact or tanh form."""
    return Call("gelu_tanh" if approximate == "tanh" else "gelu", (a,))


def _of_truths(name: str) -> Binder:
    """Build the reader of a logical operator, which asks whether each operand is not 0. Bitwise operators count as
    logical, as no kernel computes with integers.
    """
    return lambda a, b: Call(name, (Call("ne", (a, 0.0)), Call("ne", (b, 0.0))))


def _is_zero(packet: str) -> Spelling:
    """Read an operator that tests whether its operand is 0."""
    return Spelling(packet, lambda a: Call("eq", (a, 0.0)))


def _clamp(a: Any, min: Any = None, max: Any = None) -> Call | None:
    """Read `aten.clamp` as min and max."""
    below = None if min is None else Call("max", (a, min))
    return below if max is None else Call("min", (below or a, max))


def _same(g: Any, *_: Any) -> Any:
    """Return the gradient unchanged."""
    return g


def _ties(g: Any, a: Any, b: Any) -> Any:
    """Compute the gradient of `maximum(a, b)` in `a`. As in torch, a tie shares it evenly."""
    x, y = a.operand(), b.operand()
    return g * (g.tape.call("gt", x, y) + g.tape.call("eq", x, y) * 0.5)


def _silu(g: Any, a: Any, y: Any) -> Any:
    """Compute the gradient of silu."""
    s = a.call("sigmoid")
    return g * s * (a * (-s + 1.0) + 1.0)


def _gelu(g: Any, a: Any, y: Any) -> Any:
    """Compute the gradient of gelu."""
    below = (a * math.sqrt(0.5)).call("erf") * 0.5 + 0.5
    return g * (below + a * (a * a * -0.5).call("exp") * (1 / math.sqrt(2 * math.pi)))


def _gelu_tanh(g: Any, a: Any, y: Any) -> Any:
    """Compute the gradient of gelu's tanh form."""
    slope = math.sqrt(2 / math.pi)
    t = ((a + a * a * a * 0.044715) * slope).call("tanh")
    return g * (t * 0.5 + 0.5 + a * (-(t * t) + 1.0) * (a * a * (3 * 0.044715) + 1.0) * (0.5 * slope))


def _exponent(g: Any, a: Any, b: Any, y: Any) -> Any:
    """Compute the gradient of a power in its exponent."""
    return (g * y * a.call("log")).chosen(a.call("gt", 0.0))


def _power(g: Any, a: Any, b: Any, y: Any) -> Any:
    """Compute the gradient of `pow(a, b)` in `a`. As in torch, it is 0 where the exponent is 0."""
    slope = g * b * a.tape.call("pow", a.operand(), (b + -1.0).operand())
    return slope if b.name is None else slope.chosen(b.is_true())


def _softplus(a: Any, beta: float = 1.0, threshold: float = 20.0) -> Call:
    """Read `aten.softplus` with its beta and threshold."""
    if beta == 1 and threshold == 20:
        return Call("softplus", (a,))
    scaled = Call("mul", (a, beta))
    curve = Call("div", (Call("log1p", (Call("exp", (scaled,)),)), beta))
    return Call("where", (Call("gt", (scaled, threshold)), a, curve))


def _tile_mish(T: Any, a: Any) -> Any:
    """Compute mish, a n / (n + 2) for n = e (e + 2), where e = exp(a). From a = 40 on the quotient is 1."""
    e = T.exp(T.if_then_else(a > 40.0, 40.0, a))
    n = e * (e + 2.0)
    return a * (n / (n + 2.0))


def _mish(g: Any, a: Any, y: Any) -> Any:
    """Compute the gradient of mish."""
    t = a.call("softplus").call("tanh")
    return g * (t + a * a.call("sigmoid") * (-(t * t) + 1.0))


def _on_sides(a: Any, positive: Any, other: Any) -> Any:
    """Choose one operand where `a` is positive, and the other elsewhere."""
    return a.tape.call("where", a.call("gt", 0.0).operand(), positive, other)


def _elu(a: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Call:
    """Read `aten.elu` with its scales."""
    if scale == input_scale == 1:
        return Call("elu", (a, alpha))
    curve = Call("mul", (Call("expm1", (Call("mul", (a, input_scale)),)), alpha * scale))
    return Call("where", (Call("gt", (a, 0.0)), Call("mul", (a, scale)), curve))


def _clipped(T: Any, a: Any) -> Any:
    """Compute `min(max(a + 3, 0), 6)`. NaN passes."""
    b = a + 3.0
    return T.if_then_else(b < 0.0, 0.0, T.if_then_else(b > 6.0, 6.0, b))


def _hardswish(g: Any, a: Any, y: Any) -> Any:
    """Compute the gradient of hardswish."""
    slope = (a * (1 / 3) + 0.5).chosen(a.call("gt", -3.0))
    return g * a.tape.call("where", a.call("ge", 3.0).operand(), 1.0, slope.operand())


# NaN passes through min, max and relu, as in torch: a comparison with NaN is false.
_ROWS = (
    Function(
        "add", 2, "add", lambda T, a, b: a + b, gradient=(_same, _same), aten=(_sum("add"),), index="add",
        commutative=True,
    ),
    Function(
        "sub", 2, "sub", lambda T, a, b: a - b, gradient=(_same, lambda g, a, b, y: -g), aten=(_sum("sub"),),
        index="sub",
    ),
    Function(
        "mul", 2, "mul", lambda T, a, b: a * b, commutative=True, index="mul",
        aten=("mul", Spelling("bitwise_and", _of_truths("mul")), Spelling("logical_and", _of_truths("mul"))),
        gradient=(lambda g, a, b, y: g * b, lambda g, a, b, y: g * a),
    ),
    Function(
        "div", 2, "div", lambda T, a, b: a / b, index="div",
        aten=(Spelling("div", _quotient),),
        gradient=(lambda g, a, b, y: g / b, lambda g, a, b, y: -g * y / b),
    ),
    Function(
        "min", 2, "minimum", lambda T, a, b: T.if_then_else(T.logical_or(a < b, a != a), a, b), commutative=True,
        gradient=(lambda g, a, b, y: _ties(g, b, a), lambda g, a, b, y: _ties(g, a, b)), aten=("minimum", "clamp_max"),
    ),
    Function(
        "max", 2, "maximum", lambda T, a, b: T.if_then_else(T.logical_or(a > b, a != a), a, b), commutative=True,
        gradient=(lambda g, a, b, y: _ties(g, a, b), lambda g, a, b, y: _ties(g, b, a)),
        aten=(
            *("maximum", "clamp_min", Spelling("clamp", _clamp)),
            *(Spelling("bitwise_or", _of_truths("max")), Spelling("logical_or", _of_truths("max"))),
        ),
    ),
    Function("pow", 2, "pow", "pow", gradient=(_power, _exponent), aten=("pow",), index="power", singular=True),
    _comparison("gt", lambda a, b: a > b),
    _comparison("ge", lambda a, b: a >= b),
    _comparison("lt", lambda a, b: a < b),
    _comparison("le", lambda a, b: a <= b),
    _comparison(
        "eq", lambda a, b: a == b, commutative=True, more=(_is_zero("logical_not"), _is_zero("bitwise_not"))
    ),
    _comparison(
        "ne", lambda a, b: a != b, commutative=True, more=(Spelling("isnan", lambda a: Call("ne", (a, a))),)
    ),
    Function("neg", 1, "neg", lambda T, a: -a, gradient=(lambda g, a, y: -g,), aten=("neg",), index="negative"),
    Function("exp", 1, "exp", "exp", gradient=(lambda g, a, y: g * y,), aten=("exp",), singular=True),
    Function("expm1", 1, "expm1", "expm1", gradient=(lambda g, a, y: g * (y + 1.0),), aten=("expm1",), singular=True),
    Function("log", 1, "log", "log", gradient=(lambda g, a, y: g / a,), aten=("log",), singular=True),
    Function("log1p", 1, "log1p", "log1p", gradient=(lambda g, a, y: g / (a + 1.0),), aten=("log1p",), singular=True),
    Function("sqrt", 1, "sqrt", "sqrt", gradient=(lambda g, a, y: g * 0.5 / y,), aten=("sqrt",), singular=True),
    Function(
        "rsqrt", 1, "rsqrt", "rsqrt", gradient=(lambda g, a, y: g * -0.5 * y / a,), aten=("rsqrt",),
        singular=True,
    ),
    Function(
        "sigmoid", 1, "sigmoid", "sigmoid", gradient=(lambda g, a, y: g * (y * (-y + 1.0)),),
        aten=("sigmoid",), bounded=True,
    ),
    Function(
        "softplus", 1, lambda t, a: t.nn.functional.softplus(a),
        lambda T, a: T.if_then_else(a > 20.0, a, T.log1p(T.exp(a))),
        gradient=(lambda g, a, y: g * a.call("sigmoid"),), aten=(Spelling("softplus", _softplus),),
        written=("a=exp(acc0);b=log1p(a);c=gt(acc0,20.0);d=where(c,acc0,b);ret d",),
    ),
    Function(
        "logsigmoid", 1, lambda t, a: t.nn.functional.logsigmoid(a),
        lambda T, a: T.if_then_else(a > 0.0, 0.0, a) - T.log1p(T.exp(-T.abs(a))),
        gradient=(lambda g, a, y: g * (-a).call("sigmoid"),), aten=("log_sigmoid",),
        written=("a=abs(acc0);b=neg(a);c=exp(b);d=log1p(c);e=min(acc0,0.0);f=sub(e,d);ret f",),
    ),
    Function(
        "tanh", 1, "tanh", "tanh", quick="quick_tanh", gradient=(lambda g, a, y: g * (-(y * y) + 1.0),),
        aten=("tanh",), bounded=True,
    ),
    Function(
        "erf", 1, "erf", "erf", aten=("erf",), bounded=True,
        gradient=(lambda g, a, y: g * (-(a * a)).call("exp") * (2 / math.sqrt(math.pi)),),
    ),
    Function(
        "erfc", 1, "erfc", "erfc", aten=("erfc",), bounded=True,
        gradient=(lambda g, a, y: g * (-(a * a)).call("exp") * (-2 / math.sqrt(math.pi)),),
    ),
    Function(
        "sin", 1, "sin", "sin", gradient=(lambda g, a, y: g * a.call("cos"),), aten=("sin",), bounded=True
    ),
    Function(
        "cos", 1, "cos", "cos", gradient=(lambda g, a, y: -g * a.call("sin"),), aten=("cos",), bounded=True
    ),
    Function(
        "abs", 1, "abs", "abs", aten=("abs",),
        gradient=(lambda g, a, y: g * (a.call("gt", 0.0) + -a.call("lt", 0.0)),),
    ),
    Function(
        "sign", 1, "sign", lambda T, a: T.cast(a > 0.0, a.dtype) - T.cast(a < 0.0, a.dtype), aten=("sign",),
        bounded=True,
    ),
    Function(
        "square", 1, "square", lambda T, a: a * a, gradient=(lambda g, a, y: g * a * 2.0,), aten=("square",),
        index=lambda s, a: s.mul(a, a),
    ),
    Function(
        "reciprocal", 1, "reciprocal", lambda T, a: 1.0 / a, gradient=(lambda g, a, y: -g * (y * y),),
        aten=("reciprocal",), singular=True,
    ),
    Function("floor", 1, "floor", "floor", aten=("floor",), index="floor"),
    Function(
        "relu", 1, "relu", lambda T, a: T.if_then_else(a < 0.0, 0.0, a), aten=("relu",),
        gradient=(lambda g, a, y: g * a.call("gt", 0.0),),
    ),
    Function(
        "leaky_relu", 2, lambda t, a, b: t.where(a > 0, a, a * b), lambda T, a, b: T.if_then_else(a > 0.0, a, a * b),
        gradient=(
            lambda g, a, b, y: g * _on_sides(a, 1.0, b.operand()),
            lambda g, a, b, y: (g * a).chosen(a.call("le", 0.0)),
        ),
        aten=(Spelling("leaky_relu", lambda a, negative_slope=0.01: Call("leaky_relu", (a, negative_slope))),),
        written=("a=gt(acc0,0.0);b=mul(acc0,x0);c=where(a,acc0,b);ret c",),
    ),
    Function(
        "elu", 2, lambda t, a, b: t.where(a > 0, a, b * t.expm1(a)),
        lambda T, a, b: T.if_then_else(a > 0.0, a, b * T.expm1(a)),
        gradient=(
            lambda g, a, b, y: g * _on_sides(a, 1.0, (b * a.call("exp")).operand()),
            lambda g, a, b, y: (g * a.call("expm1")).chosen(a.call("le", 0.0)),
        ),
        aten=(Spelling("elu", _elu), Spelling("celu", lambda a, alpha=1.0: _elu(a, alpha, 1.0, 1.0 / alpha))),
        written=(
            "a=gt(acc0,0.0);b=expm1(acc0);c=where(a,acc0,b);ret c",
            "a=gt(acc0,0.0);b=expm1(acc0);c=mul(b,x0);d=where(a,acc0,c);ret d",
        ),
    ),
    Function(
        "silu", 1, lambda t, a: t.nn.functional.silu(a), lambda T, a: a * T.sigmoid(a),
        quick=lambda T, a: a * T.quick_sigmoid(a), gradient=(_silu,), aten=("silu",),
    ),
    Function(
        "mish", 1, lambda t, a: t.nn.functional.mish(a), _tile_mish, gradient=(_mish,), aten=("mish",),
        written=("a=softplus(acc0);b=tanh(a);c=mul(acc0,b);ret c",),
    ),
    Function(
        "gelu", 1, lambda t, a: t.nn.functional.gelu(a),
        lambda T, a: 0.5 * a * (1.0 + T.erf(a * math.sqrt(0.5))),
        quick=lambda T, a: 0.5 * a * (1.0 + T.quick_erf(a * math.sqrt(0.5))), gradient=(_gelu,),
        aten=(Spelling("gelu", _gelu_of),),
    ),
    Function(
        "gelu_tanh", 1, lambda t, a: t.nn.functional.gelu(a, approximate="tanh"),
        lambda T, a: 0.5 * a * (1.0 + T.tanh(math.sqrt(2.0 / math.pi) * (a + 0.044715 * a * a * a))),
        quick=lambda T, a: a * T.quick_sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (a + 0.044715 * a * a * a)),
        gradient=(_gelu_tanh,),
    ),
    Function(
        "hardsigmoid", 1, lambda t, a: t.nn.functional.hardsigmoid(a), lambda T, a: _clipped(T, a) * (1.0 / 6.0),
        gradient=(lambda g, a, y: (g * (1 / 6)).chosen(a.call("gt", -3.0) * a.call("lt", 3.0)),),
        aten=("hardsigmoid",), bounded=True,
        written=("a=add(acc0,3.0);b=relu(a);c=min(b,6.0);d=div(c,6.0);ret d",),
    ),
    Function(
        "hardswish", 1, lambda t, a: t.nn.functional.hardswish(a), lambda T, a: a * (_clipped(T, a) * (1.0 / 6.0)),
        gradient=(_hardswish,), aten=("hardswish",),
        written=(
            "a=add(acc0,3.0);b=relu(a);c=min(b,6.0);d=mul(acc0,c);e=div(d,6.0);ret e",
            "a=hardsigmoid(acc0);b=mul(acc0,a);ret b",
        ),
    ),
    Function(
        "where", 3, lambda t, c, a, b: t.where(c != 0, a, b), lambda T, c, a, b: T.if_then_else(c != 0.0, a, b),
        gradient=(
            None,
            lambda g, c, a, b, y: g.chosen(c.is_true()),
            lambda g, c, a, b, y: g.chosen(c.is_false()),
        ),
        aten=("where",), index="choose",
    ),
)  # fmt: skip

FUNCTIONS = {row.name: row for row in _ROWS}
"""Comparisons give 1.0 or 0.0; `where(c, a, b)` is `a` if `c != 0` else `b`; `min` and `max` pass NaN on."""
