# SPDX-License-Identifier: Apache-2.0
"""Expressions: pure values without side effects.

Semantics. Integer `//` and `%` round to minus infinity; `/` gives a float. Index arithmetic does not wrap: targets
widen it as needed. `and`, `or` and `Select` evaluate only what they need, so a guard may protect a load. Comparisons
give bool. Arithmetic happens in the type of the result (`promote`). A plain Python number takes the type of the other
operand. Beside an integer of fewer bits it is an int32, as in C and TVM; an int64 if it does not fit. `==` builds a
comparison; compare nodes with `equal` or `alike`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar

from torch_tile.diagnostics.errors import Span, error
from torch_tile.ir import dtype as dt
from torch_tile.ir.dtype import DType, promote
from torch_tile.ir.node import Node, node_class

if TYPE_CHECKING:
    from torch_tile.ir.buffer import Buffer

Scalar = bool | int | float
COMPARISONS = {"==", "!=", "<", "<=", ">", ">="}
LOGICAL = {"and", "or"}
INTEGER_ONLY = {"<<", ">>", "&", "|", "^"}
_CONDITIONS = ((None, "`and` and `or` join conditions; beside & and | these need brackets: (x > 0) & (x < 1)"),)
_SHIFTS = ((None, "shifts move the bits of integers; of a float, write `x * 2.0` or `x * 0.5`, or T.cast it first"),)
_OF_BITS = {
    "^": ((None, "`^` is the exclusive or of bits; a power is `x ** 2`"),),
    "&": _CONDITIONS, "|": _CONDITIONS, "<<": _SHIFTS, ">>": _SHIFTS,
}  # fmt: skip
NARROW_RIGHT = {"//", "%", ">>"}  # by a plain integer these give what they would give in int32
NARROW_EITHER = {"&", "|", "^", "min", "max", "select"} | COMPARISONS  # these, too, with the integer on either side
_NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod, "min": min,
    "<<": operator.lshift, ">>": operator.rshift, "&": operator.and_, "|": operator.or_, "^": operator.xor, "max": max,
}  # fmt: skip
Operator = Callable[["Expr", Any], "Expr"]
Lanewise = Callable[["Vector", Any], "Vector"]


def _forward(op: str) -> Operator:
    """Return the method `self op other`."""
    return lambda self, other: binary(op, self, other)


def _backward(op: str) -> Operator:
    """Return the method `other op self`."""
    return lambda self, other: binary(op, other, self)


def _for_builtins(span: Span | None) -> str:
    """Return what to write for min() and max() of Python and for `match`, if one stands at the span; else empty."""
    source = span.source()[span.column :] if span else ""
    if span and span.source().lstrip().startswith("case "):
        return "write `if x == 0:`, `elif x == 1:` and `else:`, which the device runs: Python decides a `match`"
    if "sorted(" in source:
        return "order two values so: `a, b = T.min(a, b), T.max(a, b)`"
    return next((f"write T.{name}(x, y)" for name in ("min", "max") if source.startswith(f"{name}(")), "")


@node_class
class Expr(Node):
    """A value of one scalar type."""

    @property
    def dtype(self) -> DType:
        """Return the type of the value."""
        raise NotImplementedError

    def __bool__(self) -> bool:
        raise error("symbolic_condition", self.span, fix=_for_builtins(self.span))

    __add__: ClassVar[Operator] = _forward("+")
    __radd__: ClassVar[Operator] = _backward("+")
    __sub__: ClassVar[Operator] = _forward("-")
    __rsub__: ClassVar[Operator] = _backward("-")
    __mul__: ClassVar[Operator] = _forward("*")
    __rmul__: ClassVar[Operator] = _backward("*")
    __truediv__: ClassVar[Operator] = _forward("/")
    __rtruediv__: ClassVar[Operator] = _backward("/")
    __floordiv__: ClassVar[Operator] = _forward("//")
    __rfloordiv__: ClassVar[Operator] = _backward("//")
    __mod__: ClassVar[Operator] = _forward("%")
    __rmod__: ClassVar[Operator] = _backward("%")
    __lshift__: ClassVar[Operator] = _forward("<<")
    __rlshift__: ClassVar[Operator] = _backward("<<")
    __rshift__: ClassVar[Operator] = _forward(">>")
    __rrshift__: ClassVar[Operator] = _backward(">>")
    __and__: ClassVar[Operator] = _forward("&")
    __rand__: ClassVar[Operator] = _backward("&")
    __or__: ClassVar[Operator] = _forward("|")
    __ror__: ClassVar[Operator] = _backward("|")
    __xor__: ClassVar[Operator] = _forward("^")
    __rxor__: ClassVar[Operator] = _backward("^")
    __lt__: ClassVar[Operator] = _forward("<")
    __gt__: ClassVar[Operator] = _forward(">")
    __le__: ClassVar[Operator] = _forward("<=")
    __ge__: ClassVar[Operator] = _forward(">=")

    def __eq__(self, other: object) -> Expr:  # type: ignore[override]
        return binary("==", self, other)

    def __ne__(self, other: object) -> Expr:  # type: ignore[override]
        return binary("!=", self, other)

    def __pow__(self, other: Any) -> Expr:
        return _power(self, other)

    def __rpow__(self, other: Any) -> Expr:
        return _power(other, self)

    def __neg__(self) -> Expr:
        return unary("-", self)

    def __pos__(self) -> Expr:
        return self

    def __invert__(self) -> Expr:
        return unary("~", self)

    def __abs__(self) -> Expr:
        return Call("abs", (self,), self.dtype)

    __hash__: ClassVar[Callable[..., int]] = Node.__hash__

    def astype(self, dtype: object) -> Expr:
        """Convert this value to `dtype`."""
        return cast(self, dtype)


@node_class
class Var(Expr):
    """A symbol: loop variable, block index, dimension, or a name bound by `Let`. Compares by identity.

    `role` is "loop", "block", "let" or "thread", the index of the running thread in its block. Or it is "dim", a
    dimension bound from shapes, or "param", a scalar argument. `multiple` divides every value of a "dim".
    """

    is_symbol: ClassVar[bool] = True
    name: str
    type: DType = dt.int32
    role: str = "let"
    multiple: int = 1

    @property
    def dtype(self) -> DType:
        """Return the type of the value."""
        return self.type


@node_class
class Const(Expr):
    """A literal."""

    value: Scalar
    type: DType

    @property
    def dtype(self) -> DType:
        """Return the type of the value."""
        return self.type

    def __index__(self) -> int:
        """The integer, for Python and torch: `kernel.params[0].shape` is a size of theirs. TypeError for others."""
        if not isinstance(self.value, int):
            raise TypeError(f"{self.value!r} is no integer")
        return int(self.value)


@node_class
class Unary(Expr):
    """`-x`, `~x` or `not x`."""

    op: str
    a: Expr

    @property
    def dtype(self) -> DType:
        """Return the type of the value."""
        return dt.bool_ if self.op == "not" else self.a.dtype


@node_class
class Binary(Expr):
    """An operator between two values of one type (`binary` inserts the casts)."""

    op: str
    a: Expr
    b: Expr

    @property
    def dtype(self) -> DType:
        """Return the type of the value."""
        if "_dtype" not in self.__dict__:  # kept, as sums are deep
            self.__dict__["_dtype"] = dt.bool_ if self.op in COMPARISONS or self.op in LOGICAL else self.a.dtype
        found: DType = self.__dict__["_dtype"]
        return found


@node_class
class Cast(Expr):
    """A conversion: floats round to nearest even, float to integer truncates and saturates (`dt.truncated`)."""

    type: DType
    a: Expr

    @property
    def dtype(self) -> DType:
        """Return the type of the value."""
        return self.type


@node_class
class Select(Expr):
    """`a` where `condition`, else `b`; the other one is not evaluated."""

    condition: Expr
    a: Expr
    b: Expr

    @property
    def dtype(self) -> DType:
        """Return the type of the value."""
        return self.a.dtype


@node_class
class Load(Expr):
    """One element of a buffer. `policy` says how a GPU's caches keep its line; "" leaves it to them."""

    buffer: Buffer
    indices: tuple[Expr, ...]
    policy: str = ""

    @property
    def dtype(self) -> DType:
        """Return the type of the value."""
        return self.buffer.dtype


@node_class
class Address(Expr):
    """The address of an element of a buffer; an operand of target-level calls only."""

    buffer: Buffer
    indices: tuple[Expr, ...]

    @property
    def dtype(self) -> DType:
        """Return the type of the value."""
        return dt.int64


@node_class
class Call(Expr):
    """An intrinsic by name (see `torch_tile.intrinsics`), with static options after its operands."""

    name: str
    args: tuple[Expr, ...]
    type: DType
    options: tuple[object, ...] = ()

    @property
    def dtype(self) -> DType:
        """Return the type of the value."""
        return self.type


def const(value: Scalar, dtype: DType) -> Const:
    """Make a literal of `dtype`, converted as a cast would (floats round, integers wrap)."""
    if dtype.is_float:
        return Const(dt.rounded(float(value), dtype), dtype)
    if dtype.kind == "bool":
        return Const(bool(value), dtype)
    if isinstance(value, float) and not math.isfinite(value):
        raise error("bad_operand", None, op=f"T.{dtype}", got=repr(value))
    number = int(value)
    if dtype.kind == "uint":
        return Const(number & ((1 << dtype.bits) - 1), dtype)
    half = 1 << (dtype.bits - 1)
    return Const((number + half) % (2 * half) - half, dtype)


def natural(value: Scalar) -> Const:
    """Make a literal with the type that a Python number has on its own: bool, int32 (int64 if too wide) or float32."""
    if isinstance(value, bool):
        return Const(value, dt.bool_)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise error("bad_operand", None, op="an operator", got=f"{value}, outside int64")
        return Const(value, dt.int32 if -(2**31) <= value < 2**31 else dt.int64)
    return const(value, dt.float32)


def is_constant(e: Expr, value: float) -> bool:
    """Return whether an expression is the constant `value`."""
    return isinstance(e, Const) and e.value == value


def is_zero(e: Expr) -> bool:
    """Return whether an expression is the constant 0."""
    return is_constant(e, 0)


def is_number(value: object) -> bool:
    """Return whether `value` is a Python or NumPy number."""
    return isinstance(value, bool | int | float) or (
        type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0
    )


def to_number(value: Any) -> Scalar:
    """Convert a Python or NumPy number to a Python number."""
    return value if isinstance(value, bool | int | float) else value.item()


def to_expr(value: Any, like: DType | None = None, op: str = "an operator") -> Expr:
    """Convert `value` to an expression; a plain number takes the type `like` where that keeps its kind."""
    if isinstance(value, Expr):
        return value
    if is_number(value):
        number = to_number(value)
        if like is not None and like.kind != "bool" and (like.is_float or isinstance(number, int)):
            return const(number, like)
        return natural(number)
    if hasattr(value, "misused"):  # the indices of several sizes under one name
        raise value.misused()
    if hasattr(value, "requires_grad"):
        fix = "annotate it before its first use, `X: T.Tensor(shape, dtype)`; give one from outside as a parameter"
        raise error(
            "python_value", None, problem=f"{op} takes a tensor of torch, which the kernel does not know", fix=fix
        )
    kind = {"Handle": "the buffer", "Region": "the region"}.get(type(value).__name__)
    if kind:
        fix = "take elements, A[i, j] in T.Parallel; T.gemm multiplies tiles, and T.reduce_sum and the like fold them"
        raise error("bad_operand", None, op=op, got=f"{kind} {value!r}"[:80], fix=fix)
    raise error("bad_operand", None, op=op, got=f"{type(value).__name__} {value!r}"[:80])


def pair(a: Any, b: Any, op: str) -> tuple[Expr, Expr]:
    """Convert both operands to expressions of their common type."""
    if isinstance(a, Expr):
        b = to_expr(b, _type_beside(a, b, op), op)
    else:
        b = to_expr(b, op=op)
        a = to_expr(a, _type_beside(b, a, op), op)
    common = promote(a.dtype, b.dtype)
    return cast(a, common), cast(b, common)


OF_BITS = ("&", "|", "^")
MODULAR = ("+", "-", "*")  # whose lower bits depend on those of their operands only


def _type_beside(value: Expr, number: Any, op: str) -> DType | None:
    """Return the type that a plain number takes beside `value`; None for its own.

    A number outside of int32 makes an int64 of an int32. One outside of other types is an error, unless the operator
    needs its lower bits only.
    """
    if _widens(value, number):
        return None
    if not _leaves(number, value):
        return value.dtype
    bits_do = op in OF_BITS or (op in MODULAR and value.dtype.kind == "uint")
    if bits_do and has_bits(to_number(number), value.dtype):
        return value.dtype
    if value.dtype == dt.int32 and -(2**63) <= to_number(number) < 2**63:
        return None
    fix = f"convert the other operand first, T.cast(x, 'int64'), or take a number that {value.dtype} holds"
    raise error("bad_operand", value.span, op=op, got=f"{number}, outside {value.dtype}", fix=fix)


def has_bits(number: Scalar, dtype: DType) -> bool:
    """Return whether an integer is a value of an integer type, or of that with the other sign: 255 and -1 in 8 bits."""
    return -(1 << (dtype.bits - 1)) <= number < 1 << dtype.bits


def constant_to_store(value: Any, dtype: DType, op: str) -> Expr:
    """Convert what is stored into a place of `dtype`. A whole number such as 1.0 is an integer for a type of integers.
    Raises TileError for an integer that the type has no bits for.
    """
    if is_number(value) and dtype.is_integer:
        number = to_number(value)
        if isinstance(number, float) and number.is_integer():
            value = number = int(number)
        if isinstance(number, int) and not has_bits(number, dtype):
            fix = f"store a number that {dtype} holds, or choose a wider type for the buffer"
            raise error("bad_operand", None, op=op, got=f"{number}, outside {dtype}", fix=fix)
    if is_number(value) and dtype.name in dt.SATURATED:
        return cast(value, dtype)
    return to_expr(value, dtype, op)


def is_narrow(dtype: DType) -> bool:
    """Return whether plain integers make an int32 of integers of this type."""
    return dtype.is_integer and dtype.bits < dt.int32.bits


def _widens(value: Any, number: Any) -> bool:
    """Return whether `number` is a plain integer, and makes an int32 of `value`."""
    if not isinstance(value, Expr) or not is_narrow(value.dtype) or not is_number(number):
        return False
    return type(to_number(number)) is int


def _narrow_operands(op: str, a: Any, b: Any) -> tuple[Expr, Expr] | None:
    """Return both operands in the narrow type of one if `a op b` is the same there as in int32, else None.

    So `u8 & 15` is a conversion of 8 bits to 32. The conversion goes where the result is stored in 8 bits again.
    """
    if _widens(a, b) and (op in NARROW_RIGHT or op in NARROW_EITHER):
        value, number = a, to_number(b)
    elif _widens(b, a) and op in NARROW_EITHER:
        value, number = b, to_number(a)
    else:
        return None
    shifts_all, divides = op == ">>" and not 0 <= number < value.dtype.bits, op in ("//", "%")
    if shifts_all or (divides and number < 1) or _leaves(number, value):
        return None
    plain = const(number, value.dtype)
    return (a, plain) if value is a else (plain, b)


def binary(op: str, a: Any, b: Any) -> Expr:
    """Build `a op b` with Python's spelling of the operator, constants folded."""
    if op in LOGICAL:
        return _logical(op, truth(a), truth(b))
    if not (isinstance(a, Expr) and isinstance(b, Expr)):  # a plain number takes part
        if op in COMPARISONS and (told := _outside(op, a, b)) is not None:
            return told
        if (narrow := _narrow_operands(op, a, b)) is not None:
            found = binary(op, *narrow)
            return found if op in COMPARISONS else cast(found, dt.int32)
    if op in COMPARISONS and (told := _compare_signs(op, a, b)) is not None:
        return told
    x, y = pair(a, b, op)
    if op in INTEGER_ONLY and x.dtype.is_float:
        raise error("bad_operand", x.span or y.span, _OF_BITS.get(op, ()), op=op, got=f"a value of dtype {x.dtype}")
    if op == "/" and not x.dtype.is_float:
        x, y = cast(x, dt.float32), cast(y, dt.float32)
    if op not in COMPARISONS and x.dtype.kind == "bool" and op not in INTEGER_ONLY:
        x, y = cast(x, dt.int32), cast(y, dt.int32)
    if isinstance(x, Const) and isinstance(y, Const):
        folded = fold(op, x, y)
        if folded is not None:
            return folded
    return Binary(op, x, y)


def _leaves(value: Any, other: Any) -> bool:
    """Return whether `value` is an integer of Python's outside the integer type of the expression `other`."""
    if not isinstance(other, Expr) or not other.dtype.is_integer or other.dtype.kind == "bool" or not is_number(value):
        return False
    number = to_number(value)
    return isinstance(number, int) and const(number, other.dtype).value != number


def _outside(op: str, a: Any, b: Any) -> Expr | None:
    """Decide a comparison with an integer outside the other operand's type; None for other comparisons."""
    if _leaves(a, b):
        return _outside(_MIRRORED.get(op, op), b, a)
    if not _leaves(b, a):
        return None
    number = to_number(b)
    if a.dtype == dt.int32 and -(2**63) <= number < 2**63:  # index arithmetic may leave its type
        return binary(op, cast(a, dt.int64), number)
    return Const(_NUMBERS[op](0, number), dt.bool_)


_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def _signed_beside_uint64(a: Any, b: Any) -> tuple[Expr, Expr] | None:
    """Return the signed integer, as an int64, and the uint64 of two operands; None for other types."""
    if not isinstance(a, Expr) or not isinstance(b, Expr) or {a.dtype.kind, b.dtype.kind} != {"int", "uint"}:
        return None
    signed, unsigned = (a, b) if a.dtype.kind == "int" else (b, a)
    return (cast(signed, dt.int64), unsigned) if unsigned.dtype == dt.uint64 else None


def _compare_signs(op: str, a: Any, b: Any) -> Expr | None:
    """Compare a signed integer with a uint64, for which no type holds both; None for other comparisons."""
    if (found := _signed_beside_uint64(a, b)) is None:
        return None
    signed, unsigned = found
    op = op if a.dtype.kind == "int" else _MIRRORED.get(op, op)
    told = binary(op, cast(signed, dt.uint64), unsigned)
    return select(binary("<", signed, 0), Const(op in ("<", "<=", "!="), dt.bool_), told)


def fold(op: str, x: Const, y: Const) -> Const | None:
    """Compute `x op y` if it can be computed exactly here: integers, bools, comparisons."""
    a, b = x.value, y.value
    if op in COMPARISONS:
        return Const(_NUMBERS[op](a, b), dt.bool_)
    if x.dtype.is_float or not isinstance(a, int) or not isinstance(b, int):
        return None
    if (op in ("//", "%") and b == 0) or (op in ("<<", ">>") and not 0 <= b < x.dtype.bits):
        return None
    return const(_NUMBERS[op](a, b), x.dtype) if op in _NUMBERS else None


def _power(a: Any, b: Any) -> Expr:
    """Build `a ** b` as a floating call of `pow`."""
    x, y = pair(a, b, "**")
    to = x.dtype if x.dtype.is_float else dt.float32
    return Call("pow", (cast(x, to), cast(y, to)), to)


def _logical(op: str, a: Expr, b: Expr) -> Expr:
    """Build `a and b` or `a or b`; fold constants."""
    absorbing = op == "or"
    for x, y in ((a, b), (b, a)):
        if isinstance(x, Const):
            return x if bool(x.value) is absorbing else y
    return Binary(op, a, b)


def truth(value: Any, op: str = "a condition") -> Expr:
    """Convert `value` to a bool expression, as `if` reads it."""
    x = to_expr(value, op=op)
    if x.dtype.kind == "bool":
        return x
    return binary("!=", x, 0)


def unary(op: str, a: Any) -> Expr:
    """Build `-a`, `~a` or `not a`, constants folded."""
    x = truth(a) if op == "not" else to_expr(a)
    if op == "~" and x.dtype.is_float:
        raise error("bad_operand", x.span, op="~", got=f"a value of dtype {x.dtype}")
    if op == "~" and x.dtype.kind == "bool":
        op = "not"
    if isinstance(x, Const):
        if op == "not":
            return Const(not x.value, dt.bool_)
        if op == "-":
            return const(-x.value, x.dtype if x.dtype.kind != "bool" else dt.int32)
        return const(~int(x.value), x.dtype)
    return Unary(op, x)


def cast(value: Any, dtype: object) -> Expr:
    """Convert `value` to `dtype`; literals are converted here, a cast to the same type is the value itself."""
    if isinstance(value, Expr) and value.dtype is dtype:
        return value
    try:
        to = dt.to_dtype(dtype)
    except ValueError:
        raise error("bad_dtype", None, got=dtype) from None
    if is_number(value) and to.name in dt.SATURATED:
        value = const(float(value), dt.float64)
    x = to_expr(value, to if is_number(value) else None, f"T.{to}")
    if isinstance(x, Cast) and x.dtype == dt.int32 and is_narrow(x.a.dtype):
        x = x.a  # the int32 has the same value
    if x.dtype == to:
        return x
    if not isinstance(x, Const):
        return Cast(to, x)
    if x.dtype.is_float and to.is_integer:
        return Const(dt.truncated(x.value, to), to)
    return const(dt.saturated(x.value, to), to)


def select(condition: Any, a: Any, b: Any) -> Expr:
    """Build `a` where `condition` holds, else `b`."""
    if (narrow := _narrow_operands("select", a, b)) is not None:
        return cast(select(condition, *narrow), dt.int32)
    c = truth(condition)
    x, y = pair(a, b, "T.if_then_else")
    if isinstance(c, Const):
        return x if c.value else y
    return Select(c, x, y)


def minimum(a: Any, b: Any) -> Expr:
    """Build the smaller of two values: NaN if one is; -0.0 is below 0.0. A uint64 and a signed one give an int64."""
    return _extremum("min", a, b)


def maximum(a: Any, b: Any) -> Expr:
    """Build the larger of two values: NaN if one is; -0.0 is below 0.0. A uint64 and a signed one give a uint64."""
    return _extremum("max", a, b)


def _extremum(op: str, a: Any, b: Any) -> Expr:
    """Build `min(a, b)` or `max(a, b)`; fold infinities."""
    for value, other in ((a, b), (b, a)):
        if _leaves(value, other):
            number = to_number(value)
            if (number > 0) == (op == "min"):  # no value of the type lies beyond that end
                return cast(other, dt.int32) if _widens(other, value) else to_expr(other)
            if _widens(other, value):
                break
            raise error("bad_operand", other.span, op=f"T.{op}", got=f"{number}, outside {other.dtype}")
    if (narrow := _narrow_operands(op, a, b)) is not None:
        return cast(_extremum(op, *narrow), dt.int32)
    if (found := _signed_beside_uint64(a, b)) is not None:
        signed, unsigned = found
        if op == "max":  # never negative
            return _extremum(op, cast(maximum(signed, 0), dt.uint64), unsigned)
        return _extremum(op, signed, cast(minimum(unsigned, 2**63 - 1), dt.int64))
    x, y = pair(a, b, f"T.{op}")
    if isinstance(x, Const) and isinstance(y, Const):
        return const(extremum(op, x.value, y.value), x.dtype)
    return Binary(op, x, y)


def extremum(op: str, a: Any, b: Any) -> Any:
    """Compute the smaller or larger of two numbers, as IEEE 754-2019 has it: NaN if one is, and -0.0 is below 0.0."""
    for x in (a, b):
        if isinstance(x, float) and math.isnan(x):
            return x
    if isinstance(a, float) and isinstance(b, float) and a == b:
        return a if (math.copysign(1, a) < 0) == (op == "min") else b
    return min(a, b) if op == "min" else max(a, b)


# Vectors of scalars: what an author computes with by dtypes such as float32x4. Each lane is an expression of its own.
#
# The compiler knows scalars only. It makes wide accesses of neighbouring ones, written as vectors or not.


def _each(op: str) -> Lanewise:
    """Build the methods `a op b` and `b op a` of vectors."""
    return lambda self, other: lanewise(lambda a, b: binary(op, a, b), self, other)


def _each_backward(op: str) -> Lanewise:
    """Return the method `other op self`."""
    return lambda self, other: lanewise(lambda a, b: binary(op, b, a), self, other)


class Vector:
    """Some values of one dtype; operators and functions take them lane by lane, and numbers for all lanes."""

    def __init__(self, lanes: Sequence[Any]):
        values = [to_expr(lane) for lane in lanes]
        common = reduce(dt.promote, (v.dtype for v in values))
        self.lanes: tuple[Expr, ...] = tuple(cast(v, common) for v in values)

    @property
    def dtype(self) -> DType:
        """Return the type of the whole, such as float32x4."""
        return dt.vector_of(self.lanes[0].dtype, len(self.lanes))

    def __len__(self) -> int:
        return len(self.lanes)

    def __iter__(self) -> Iterator[Expr]:
        return iter(self.lanes)

    def __repr__(self) -> str:
        return f"T.{self.dtype}({', '.join(map(repr, self.lanes))})"

    def __getitem__(self, lane: Any) -> Any:
        """A lane; some lanes for a slice; the lane that an expression tells, which must be one of them."""
        if isinstance(lane, slice):
            return Vector(self.lanes[lane])
        if isinstance(lane, Expr) and not hasattr(lane, "value"):
            found = self.lanes[-1]
            for n in range(len(self) - 2, -1, -1):
                found = select(binary("==", lane, n), self.lanes[n], found)
            return found
        number = int(getattr(lane, "value", lane))
        if not -len(self) <= number < len(self):
            raise error("bad_operand", None, op="a lane", got=f"{number} of {self.dtype}")
        return self.lanes[number]

    def __bool__(self) -> bool:
        raise error("symbolic_condition", self.lanes[0].span)

    def map(self, function: Callable[[Expr], Any]) -> Vector:
        """Apply `function` to each lane."""
        return Vector([function(lane) for lane in self.lanes])

    def astype(self, dtype: object) -> Vector:
        """Return the lanes converted to a dtype, or to that of a vector of as many."""
        to = dt.to_dtype(dtype)
        if to.lanes not in (1, len(self)):
            raise error("bad_operand", None, op=f"T.{to}", got=f"a vector of {len(self)} lanes")
        return self.map(lambda lane: cast(lane, to.element))

    __add__: ClassVar[Lanewise] = _each("+")
    __radd__: ClassVar[Lanewise] = _each_backward("+")
    __sub__: ClassVar[Lanewise] = _each("-")
    __rsub__: ClassVar[Lanewise] = _each_backward("-")
    __mul__: ClassVar[Lanewise] = _each("*")
    __rmul__: ClassVar[Lanewise] = _each_backward("*")
    __truediv__: ClassVar[Lanewise] = _each("/")
    __rtruediv__: ClassVar[Lanewise] = _each_backward("/")
    __floordiv__: ClassVar[Lanewise] = _each("//")
    __rfloordiv__: ClassVar[Lanewise] = _each_backward("//")
    __mod__: ClassVar[Lanewise] = _each("%")
    __rmod__: ClassVar[Lanewise] = _each_backward("%")
    __lshift__: ClassVar[Lanewise] = _each("<<")
    __rlshift__: ClassVar[Lanewise] = _each_backward("<<")
    __rshift__: ClassVar[Lanewise] = _each(">>")
    __rrshift__: ClassVar[Lanewise] = _each_backward(">>")
    __and__: ClassVar[Lanewise] = _each("&")
    __rand__: ClassVar[Lanewise] = _each_backward("&")
    __or__: ClassVar[Lanewise] = _each("|")
    __ror__: ClassVar[Lanewise] = _each_backward("|")
    __xor__: ClassVar[Lanewise] = _each("^")
    __rxor__: ClassVar[Lanewise] = _each_backward("^")
    __lt__: ClassVar[Lanewise] = _each("<")
    __le__: ClassVar[Lanewise] = _each("<=")
    __gt__: ClassVar[Lanewise] = _each(">")
    __ge__: ClassVar[Lanewise] = _each(">=")

    def __eq__(self, other: object) -> Vector:  # type: ignore[override]
        return _each("==")(self, other)

    def __ne__(self, other: object) -> Vector:  # type: ignore[override]
        return _each("!=")(self, other)

    __hash__: ClassVar[Callable[..., int]] = object.__hash__

    def __neg__(self) -> Vector:
        return self.map(lambda lane: unary("-", lane))

    def __invert__(self) -> Vector:
        return self.map(lambda lane: unary("~", lane))

    def __abs__(self) -> Vector:
        return self.map(abs)


def lanewise(function: Callable[..., Any], *args: Any) -> Vector:
    """Apply `function` lane by lane to vectors of one length, and to scalars for all lanes."""
    lengths = {len(a) for a in args if isinstance(a, Vector)}
    if len(lengths) != 1:
        got = " and ".join(f"a vector of {n} lanes" for n in sorted(lengths))
        raise error("bad_operand", None, op="an operator", got=got)
    (count,) = lengths
    return Vector([function(*(a.lanes[k] if isinstance(a, Vector) else a for a in args)) for k in range(count)])


def converted_by_call(value: Any, dtype: DType) -> Any:
    """Compute `T.float32(value)`: T.let's name without a value, a vector of a tuple, else the converted value."""
    if value is None:
        return Var("x", dtype, "dim")
    if isinstance(value, Vector):
        return value.astype(dtype)
    if isinstance(value, tuple):
        if len(value) != dtype.lanes:
            why, fix = f"are {len(value)}", f"give {dtype.lanes}"
            raise error("bad_argument", None, op=f"T.{dtype}", name="lanes", why=why, fix=fix)
        return Vector([cast(lane, dtype.element) for lane in value])
    return cast(value, dtype) if dtype.lanes == 1 else Vector([cast(value, dtype.element)] * dtype.lanes)


dt.converters.append(converted_by_call)
