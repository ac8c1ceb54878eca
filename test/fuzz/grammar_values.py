# SPDX-License-Identifier: Apache-2.0
"""Typed expressions of random programs: as text of the language, and as plain Python that computes exact values.

Python's integers have no width: the reference wraps where a type does. int32 expressions of the language need not wrap
until they are stored, so that no operation here looks at their upper bits once they may have left the type.
"""

import math
import random
from dataclasses import dataclass, replace

import numpy as np

INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
EXACT = ("int32",)  # types whose expressions may leave them; those of int64 wrap
FLOATS = (0.0, -0.0, 1.0, -1.0, 2.5, -7.0, 1e30, -3e38, math.inf, -math.inf, math.nan)


def limits(dtype):
    """The least and the greatest integer of a type."""
    if dtype == "bool":
        return 0, 1
    bits = int(dtype.strip("uint"))
    return (0, 2**bits - 1) if dtype.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def promoted(a, b):
    """The type in which two values meet."""
    if a == b or b == "bool":
        return a
    if a == "bool":
        return b
    if "float32" in (a, b):
        return "float32"
    (signed, m), (other, n) = ((not t.startswith("u"), int(t.strip("uint"))) for t in (a, b))
    if signed == other:
        return a if m > n else b
    i, u = (m, n) if signed else (n, m)
    return f"int{i}" if i > u else f"int{min(64, 2 * u)}"


@dataclass(frozen=True)
class Value:
    """A scalar expression. Its integers lie between `low` and `high`; `loose` ones may have left their type."""

    text: str
    reference: str
    dtype: str
    low: int = 0
    high: int = 0
    loose: bool = False

    @property
    def is_float(self):
        return self.dtype == "float32"


def beside_number(dtype):
    """The type of an integer of type `dtype` and a plain number together: narrow ones become int32."""
    return dtype if limits(dtype)[1] >= limits("int32")[1] else "int32"


def number(value, dtype):
    """A plain number beside an operand of type `dtype`."""
    text = f"({value})" if value < 0 else str(value)
    return Value(text, text, beside_number(dtype), value, value)


def settled(text, reference, dtype, low, high):
    """The result of integer arithmetic, wrapped where it leaves its type."""
    least, greatest = limits(dtype)
    if least <= low and high <= greatest:
        return Value(text, reference, dtype, low, high)
    return Value(text, f"{dtype}({reference})", dtype, least, greatest, loose=dtype in EXACT)


def tight(value):
    """The value, or its lower bits where it may have left its type."""
    if not value.loose:
        return value
    mask = 0xFFFF if value.dtype == "int32" else 2**40 - 1
    return Value(f"({value.text} & {mask})", f"({value.reference} & {mask})", value.dtype, 0, mask)


def converted(value, dtype):
    """The value in another type, by a cast."""
    if value.dtype == dtype:
        return value
    value = value if dtype in INTS and limits(dtype)[1] <= limits(value.dtype)[1] else tight(value)
    return replace(_converted(value, dtype), text=f"T.cast({value.text}, {dtype!r})")


def _converted(value, dtype):
    """The same, without a word in the text."""
    if value.dtype == dtype:
        return value
    if dtype in ("bool", "float32"):
        return Value(value.text, f"{dtype}_({value.reference})", dtype, 0, 1)
    least, greatest = limits(dtype)
    if least <= value.low and value.high <= greatest:
        return replace(value, dtype=dtype)
    return Value(value.text, f"{dtype}({value.reference})", dtype, least, greatest)


def operands(a, b, exact):
    """Both in their common type; `exact` if the operation looks at more than the lower bits."""
    dtype = promoted(a.dtype, b.dtype)
    a, b = (tight(v) if exact or v.dtype != dtype else v for v in (a, b))
    return _converted(a, dtype), _converted(b, dtype)


def of_signs(a, b):
    """Whether a signed integer stands beside a uint64, for which no type holds both."""
    return "uint64" in (a.dtype, b.dtype) and any(v.dtype.startswith("int") for v in (a, b))


class Expressions:
    """Makes expressions from what is in scope: `self.atom(is_float)` gives something to begin with."""

    random: random.Random
    aside: random.Random  # for what was added later, so that other programs stay as they are

    def pick(self, *options):
        return self.random.choice(options)

    def chance(self, share):
        return self.random.random() < share

    def extreme(self, dtype):
        """An integer of a type, often an end of it."""
        least, greatest = limits(dtype)
        near = self.random.randint(max(least, -9), min(greatest, 9))
        return self.pick(least, greatest, least + 1, greatest - 1, near, near, self.random.randint(least, greatest))

    def literal(self, dtype=None):
        dtype = dtype or self.pick(*INTS)
        value = self.extreme(dtype)
        return replace(number(value, dtype), text=f"T.{dtype}({value})", dtype=dtype)

    def value(self, dtype, depth=3):
        """An expression of a type."""
        if dtype == "bool":
            return self.condition(depth)
        if dtype == "float32":
            return self.real(depth)
        made = self.integer(depth)
        return _converted(made, dtype) if self.chance(0.1) and not made.loose else converted(made, dtype)

    # -- integers ------------------------------------------------------------------------------------------------------
    def integer(self, depth):
        if depth <= 0 or self.chance(0.15):
            return self.literal() if self.chance(0.12) else self.atom(False)
        kinds = [self.arithmetic] * 4 + [self.bits] * 2 + [self.shift] * 2 + [self.quotient] * 2
        kinds += [self.extremum, self.choice, self.operand, self.cast, self.magnitude, self.clamped]
        return self.pick(*kinds)(depth - 1)

    def arithmetic(self, depth):
        a, op = self.integer(depth), self.pick("+", "-", "*")
        b = number(self.extreme(a.dtype), a.dtype) if self.chance(0.4) else self.integer(depth)
        a, b = operands(a, b, False)
        if self.chance(0.3):
            a, b = b, a
        compute = {"+": lambda x, y: x + y, "-": lambda x, y: x - y, "*": lambda x, y: x * y}[op]
        ends = [compute(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
        text, reference = f"({a.text} {op} {b.text})", f"({a.reference} {op} {b.reference})"
        made = settled(text, reference, a.dtype, min(ends), max(ends))
        return replace(made, loose=True) if (a.loose or b.loose) and a.dtype in EXACT else made

    def bits(self, depth):
        a = self.integer(depth)
        if self.chance(0.2):
            return replace(settled(f"(~{a.text})", f"(~{a.reference})", a.dtype, ~a.high, ~a.low), loose=a.loose)
        b = number(self.extreme(a.dtype), a.dtype) if self.chance(0.4) else self.integer(depth)
        a, b = operands(a, b, False)
        op = self.pick("&", "|", "^")
        made = Value(f"({a.text} {op} {b.text})", f"({a.reference} {op} {b.reference})", a.dtype, *limits(a.dtype))
        if op == "&" and min(a.low, b.low) >= 0:
            return replace(made, low=0, high=min(a.high, b.high))
        return replace(made, loose=a.loose or b.loose)

    def shift(self, depth):
        a = self.integer(depth) if self.chance(0.8) else self.literal(self.pick("int64", "uint64", "int32"))
        if self.chance(0.5):
            b, width = tight(self.integer(depth)), int(a.dtype.strip("uint")) - 1
            b = Value(f"({b.text} & {width})", f"({b.reference} & {width})", beside_number(b.dtype), 0, width)
            if promoted(a.dtype, b.dtype) != a.dtype:
                b = replace(b, text=f"T.cast({b.text}, {a.dtype!r})", dtype=a.dtype)
        else:
            to = beside_number(a.dtype)
            a, b = _converted(a, to), number(self.random.randint(0, int(to.strip("uint")) - 1), to)
        if self.chance(0.5):
            a = tight(a)
            ends = [x >> y for x in (a.low, a.high) for y in (b.low, b.high)]
            return Value(f"({a.text} >> {b.text})", f"({a.reference} >> {b.reference})", a.dtype, min(ends), max(ends))
        ends = [x << y for x in (a.low, a.high) for y in (b.low, b.high)]
        made = settled(f"({a.text} << {b.text})", f"({a.reference} << {b.reference})", a.dtype, min(ends), max(ends))
        return replace(made, loose=True) if a.loose else made

    def divisor(self, like, depth):
        """A number that is not 0, and the operand that it divides."""
        if self.chance(0.5):
            value = self.extreme(like.dtype) or 3
            return operands(like, number(value, like.dtype), True)
        b = tight(self.integer(depth))
        to = beside_number(b.dtype)
        return operands(like, Value(f"({b.text} | 1)", f"({b.reference} | 1)", to, *limits(to)), True)

    def quotient(self, depth):
        a, b = self.divisor(self.integer(depth), depth)
        kind = self.pick("//", "//", "%", "%", "ceildiv", "truncdiv", "truncmod")
        if kind == "%":
            ends = (0, max(b.high - 1, 0)) if b.low > 0 else limits(a.dtype)
            return settled(f"({a.text} % {b.text})", f"({a.reference} % {b.reference})", a.dtype, *ends)
        if kind == "//":
            text, reference = f"({a.text} // {b.text})", f"({a.reference} // {b.reference})"
        else:
            text, reference = f"T.{kind}({a.text}, {b.text})", f"{kind}({a.reference}, {b.reference})"
        least, greatest = limits(a.dtype)
        overflows = least < 0 and a.low == least and b.low <= -1 <= b.high
        return settled(text, reference, a.dtype, least, greatest + 1 if overflows else greatest)

    def extremum(self, depth):
        op, a = self.pick("max", "min"), self.integer(depth)
        if self.chance(0.3):  # one outside of the type, which decides nothing
            a, (least, greatest) = tight(a), limits(a.dtype)
            outside = self.random.randint(1, 2**66)
            end = least - outside if op == "max" else greatest + outside
            return Value(f"T.{op}({a.text}, {end})", a.reference, beside_number(a.dtype), a.low, a.high)
        b = self.integer(depth)
        if of_signs(a, b):
            a, b, choose, dtype = tight(a), tight(b), *{"max": (max, "uint64"), "min": (min, "int64")}[op]
            reference = f"{op}({a.reference}, {b.reference})"
            return Value(f"T.{op}({a.text}, {b.text})", reference, dtype, choose(a.low, b.low), choose(a.high, b.high))
        a, b = operands(a, b, True)
        low, high = min(a.low, b.low), max(a.high, b.high)
        name = self.pick(op, f"{op}imum") if a.dtype == b.dtype and "maximum" in self.functions else op
        return Value(f"T.{name}({a.text}, {b.text})", f"{op}({a.reference}, {b.reference})", a.dtype, low, high)

    functions = ()

    def choice(self, depth):
        a, b = self.alike(self.integer(depth), self.integer(depth))
        c = self.condition(depth - 1)
        low, high = min(a.low, b.low), max(a.high, b.high)
        form = self.pick("T.if_then_else({c}, {a}, {b})", "({a} if {c} else {b})")
        text = form.format(a=a.text, b=b.text, c=c.text)
        return Value(text, f"({a.reference} if {c.reference} else {b.reference})", a.dtype, low, high)

    @staticmethod
    def alike(a, b):
        """Both in one type, which the text says: Python chooses itself where it knows the condition."""
        dtype = promoted(a.dtype, b.dtype)
        return converted(tight(a), dtype), converted(tight(b), dtype)

    def operand(self, depth):
        """`and` and `or` give one of their operands."""
        a, b = self.alike(self.integer(depth), self.integer(depth))
        op = self.pick("and", "or")
        low, high = min(a.low, b.low, 0), max(a.high, b.high, 0)
        return Value(f"({a.text} {op} {b.text})", f"({a.reference} {op} {b.reference})", a.dtype, low, high)

    def cast(self, depth):
        if self.has_floats and self.chance(0.25):
            value, dtype = self.real(depth), self.pick(*INTS)
            return Value(f"T.cast({value.text}, {dtype!r})", f"{dtype}_of({value.reference})", dtype, *limits(dtype))
        return converted(self.integer(depth), self.pick(*INTS))

    def magnitude(self, depth):
        a = tight(self.integer(depth))
        if a.low == limits(a.dtype)[0] < 0:
            return a  # its magnitude has no place in the type
        return Value(f"T.abs({a.text})", f"abs({a.reference})", a.dtype, 0, max(abs(a.low), abs(a.high)))

    def clamped(self, depth):
        a = tight(self.integer(depth))
        low, high = sorted(self.extreme(a.dtype) for _ in range(2))
        to = beside_number(a.dtype)
        made = Value("", f"min(max({a.reference}, {low}), {high})", to, low, high)
        if self.chance(0.3):
            return replace(a, text=f"T.clamp({a.text}, {-(2**71)}, {2**71})", dtype=to)
        return replace(made, text=f"T.clamp({a.text}, {low}, {high})")

    # -- conditions ----------------------------------------------------------------------------------------------------
    def condition(self, depth=2):
        if depth > 0 and self.chance(0.3):
            a, b = self.condition(depth - 1), self.condition(depth - 1)
            op = self.pick("and", "or", "not")
            if op == "not":
                return Value(f"(not {a.text})", f"(not {a.reference})", "bool", 0, 1)
            return Value(f"({a.text} {op} {b.text})", f"({a.reference} {op} {b.reference})", "bool", 0, 1)
        if self.chance(0.15) and self.has_floats:
            a, b = self.real(depth - 1), self.real(depth - 1)
        else:
            a = tight(self.integer(depth - 1))
            b = tight(self.integer(depth - 1)) if self.chance(0.4) else self.compared(a)
            if a.dtype == "int64" and self.aside.random() < 0.3:  # a sum with itself, which wraps at the ends
                k = self.aside.choice((1, -1, 9, 2**40, -(2**62)))
                b = settled(f"({a.text} + ({k}))", f"({a.reference} + ({k}))", a.dtype, a.low + k, a.high + k)
            if not b.text.strip("(-)").isdigit() and not of_signs(a, b):
                a, b = operands(a, b, True)
        op = self.pick("<", "<=", ">", ">=", "==", "!=")
        return Value(f"({a.text} {op} {b.text})", f"({a.reference} {op} {b.reference})", "bool", 0, 1)

    def compared(self, a):
        """A number to compare with, perhaps none of the type."""
        if self.chance(0.15):
            return number(self.pick(-1, 256, 2**31, 2**32 + 7, -(2**31) - 1, 2**63, 2**64, -(2**70)), a.dtype)
        return number(self.pick(self.extreme(a.dtype), self.random.randint(0, 9)), a.dtype)

    # -- floats --------------------------------------------------------------------------------------------------------
    has_floats = False

    def real_literal(self):
        value = self.pick(*FLOATS)
        text = f"{value!r}" if math.isfinite(value) else f"float('{value}')"
        return Value(f"T.float32({text})", f"float32_({text})", "float32")

    def real(self, depth):
        """A float that no order of operations, contraction or other freedom of a compiler changes."""
        if depth <= 0 or self.chance(0.2):
            if not self.has_floats or self.chance(0.25):
                return self.real_literal()
            return self.atom(True)
        a = self.real(depth - 1)
        kind = self.pick("+", "-", "//", "%", "max", "min", "clamp", "negative", "choice", "or", "and", "cast", "abs")
        if kind == "negative":
            return Value(f"(-{a.text})", f"(-{a.reference})", "float32")
        if kind == "abs":
            return Value(f"T.abs({a.text})", f"abs({a.reference})", "float32")
        if kind == "cast":
            return converted(tight(self.integer(depth - 1)), "float32")
        b = self.real(depth - 1)
        if kind in ("+", "-", "or", "and"):
            reference = f"({a.reference} {kind} {b.reference})"
            reference = f"float32_({reference})" if kind in "+-" else reference
            return Value(f"({a.text} {kind} {b.text})", reference, "float32")
        if kind in ("//", "%"):
            name = {"//": "floor_divide", "%": "remainder"}[kind]
            return Value(f"({a.text} {kind} {b.text})", f"{name}({a.reference}, {b.reference})", "float32")
        if kind == "clamp":
            return Value(f"T.clamp({a.text}, -2.0, 3.5)", f"lesser(greater({a.reference}, -2.0), 3.5)", "float32")
        if kind == "choice":
            c = self.condition(0)
            reference = f"({a.reference} if {c.reference} else {b.reference})"
            return Value(f"T.if_then_else({c.text}, {a.text}, {b.text})", reference, "float32")
        name = {"max": "greater", "min": "lesser"}[kind]
        return Value(f"T.{kind}({a.text}, {b.text})", f"{name}({a.reference}, {b.reference})", "float32")


# -- what the reference's text calls ----------------------------------------------------------------------------------


def wrapping(dtype):
    """The function that brings an integer into a type."""
    least, greatest = limits(dtype)
    size = greatest - least + 1
    return lambda x: (int(x) - least) % size + least


def saturating(dtype):
    """The function that makes an integer of a float: truncated, the ends of the type for what is beyond, 0 for NaN."""
    least, greatest = limits(dtype)
    return lambda x: 0 if math.isnan(x) else least if x < least else greatest if x > greatest else int(x)


def float32_(x):
    """The nearest float32, once."""
    if isinstance(x, int):
        wide = np.uint64(x) if x >= 2**63 else np.int64(x)
        return float(wide.astype(np.float32))
    with np.errstate(all="ignore"):
        return float(np.float32(x))


def bits(x):
    """The bits of a float32 as an int32; those of one NaN stand for all."""
    return int(np.float32(x).view(np.int32))


def lesser(a, b):
    """NaN if one is, and -0.0 is below 0.0."""
    if a != a or b != b:
        return math.nan
    return min(a, b, key=lambda x: (x, math.copysign(1, x)))


def greater(a, b):
    return -lesser(-a, -b)


def remainder(a, b):
    """torch.remainder."""
    rest = math.nan if b == 0 or not math.isfinite(a) else math.fmod(a, b)
    return float32_(rest + b) if rest != 0 and (rest < 0) != (b < 0) and rest == rest else rest


def floor_divide(a, b):
    """torch.floor_divide."""
    import torch

    return float(torch.floor_divide(torch.tensor(a, dtype=torch.float32), torch.tensor(b, dtype=torch.float32)))


def truncdiv(a, b):
    quotient = abs(a) // abs(b)
    return -quotient if (a < 0) != (b < 0) else quotient


FUNCTIONS = {
    **{dtype: wrapping(dtype) for dtype in INTS}, **{f"{dtype}_of": saturating(dtype) for dtype in INTS},
    "float32_": float32_, "bits": bits, "bool_": bool, "lesser": lesser,
    "greater": greater, "remainder": remainder, "floor_divide": floor_divide, "truncdiv": truncdiv,
    "truncmod": lambda a, b: a - b * truncdiv(a, b), "ceildiv": lambda a, b: -(-a // b),
}  # fmt: skip
