# SPDX-License-Identifier: Apache-2.0
"""Expressions as C++ text: names, literals, operators, conversions.

A value of a 16- or 8-bit floating type is held in a float that is exactly representable; operations round their result.
Integers made from indices and sizes are int64_t; integers from memory keep their type, except inside an index.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from ..diagnostics import InternalError
from ..intrinsics import lookup
from ..ir import dtype as dt
from ..ir.buffer import Buffer
from ..ir.dtype import DType
from ..ir.expr import Address, Binary, Call, Cast, Const, Expr, Load, Select, Unary, Var
from ..ir.node import walk

STORAGE = {
    "bool": "bool", "float32": "float", "float64": "double", "float16": "tile::f16", "bfloat16": "tile::bf16",
    "float8_e4m3fn": "tile::e4m3", "float8_e5m2": "tile::e5m2",
} | {f"{u}int{b}": f"{u}int{b}_t" for u in ("", "u") for b in (8, 16, 32, 64)}  # fmt: skip
_KEYWORDS = set(
    "alignas auto bool break case catch char class const continue default delete do double else enum explicit extern false "
    "float for friend goto if inline int long mutable namespace new operator private protected public register return short "
    "signed sizeof static struct switch template this throw true try typedef union unsigned using virtual void volatile while "
    "and or not xor tile main arena".split()
)


def storage(dtype: DType) -> str:
    """The C++ type of an element in memory."""
    return STORAGE[dtype.name]


def held(dtype: DType) -> str:
    """The C++ type of a value in a register."""
    return "float" if is_small(dtype) else storage(dtype)


def is_small(dtype: DType) -> bool:
    """Whether values are held in a wider type than they are stored in."""
    return dtype.is_float and dtype.bits < 32


class Names:
    """Unique C++ names of symbols."""

    def __init__(self, reserved: Iterable[str] = ()):
        self.taken = set(_KEYWORDS) | set(reserved)
        self.by_symbol: dict[int, str] = {}
        self.keep: list[object] = []

    def of(self, symbol: Var | Buffer) -> str:
        """The name of a symbol, made at its first use."""
        found = self.by_symbol.get(id(symbol))
        if found is None:
            base = re.sub(r"\W", "_", symbol.name) or "v"
            base = f"v{base}" if base[0].isdigit() or base.startswith("__") else base
            found, n = base, 1
            while found in self.taken:
                found, n = f"{base}_{n}", n + 1
            self.taken.add(found)
            self.by_symbol[id(symbol)] = found
            self.keep.append(symbol)
        return found


class Text:
    """Prints expressions; `names` gives symbols their names."""

    def __init__(self, names: Names):
        self.names = names
        self.index_names: set[int] = set()  # names bound to index values

    def is_index(self, expr: Expr) -> bool:
        """Whether an integer is made from indices and sizes and therefore held in 64 bits."""
        return any(
            isinstance(n, Var) and (n.role in ("loop", "block", "dim") or id(n) in self.index_names) for n in walk(expr)
        )

    def value(self, expr: Expr, wide: bool = False) -> str:
        """C++ text of a value, parenthesised where it is not atomic; `wide` computes integers in 64 bits."""
        method = getattr(self, f"_{type(expr).__name__.lower()}")
        return method(expr, wide)  # type: ignore[no-any-return]

    def index(self, expr: Expr) -> str:
        """C++ text of an index or size, in 64 bits and without outer parentheses."""
        text = self.value(expr, wide=True)
        return text[1:-1] if text.startswith("(") and _closes_at_end(text) and not text.startswith("(int64_t)") else text

    def element(self, buffer: Buffer, indices: tuple[Expr, ...]) -> str:
        """C++ text of an element as it lies in memory."""
        name = self.names.of(buffer)
        return f"{name}[{self.index(indices[0])}]" if indices else name

    def converted(self, expr: Expr, to: DType) -> str:
        """C++ text of the element of type `to` that stores this value."""
        text = self.value(expr)
        if is_small(to):
            return f"tile::narrow<{storage(to)}>({_bare(text)})"
        return f"({storage(to)}){text}" if expr.dtype.is_integer and self.is_index(expr) else _bare(text)

    def _var(self, var: Var, wide: bool) -> str:
        narrow = wide and var.dtype.is_integer and not self.is_index(var)
        return f"(int64_t){self.names.of(var)}" if narrow else self.names.of(var)

    def _const(self, const: Const, wide: bool) -> str:
        return literal(const)

    def _load(self, load: Load, wide: bool) -> str:
        text = self.element(load.buffer, load.indices)
        if is_small(load.dtype):
            return f"tile::widen({text})" if load.buffer.scope != "var" else text
        return f"(int64_t){text}" if wide and load.dtype.is_integer else text

    def _address(self, node: Address, wide: bool) -> str:
        name, at = self.names.of(node.buffer), self.index(node.indices[0])
        return name if at == "0" else f"({name} + {at})"

    def _unary(self, node: Unary, wide: bool) -> str:
        inner = self.value(node.a, wide)
        if node.op == "not":
            return f"(!{inner})"
        return f"({node.op}{inner})" if node.dtype.is_float or node.dtype.bits >= 32 else self._fit(node, f"({node.op}{inner})")

    def _binary(self, node: Binary, wide: bool) -> str:
        wide = wide and node.a.dtype.is_integer
        a, b = self.value(node.a, wide), self.value(node.b, wide)
        op = {"and": "&&", "or": "||"}.get(node.op, node.op)
        if op in ("min", "max", "//", "%") and node.a.dtype.is_integer:
            kind = "int64_t" if wide or self.is_index(node) else storage(node.a.dtype)
            name = {"//": "floordiv", "%": "floormod"}.get(op, op)
            return f"tile::{name}<{kind}>({_bare(a)}, {_bare(b)})"
        if op in ("min", "max"):
            return f"tile::{op}({_bare(a)}, {_bare(b)})"
        if op in ("//", "%"):
            return self._floor_float(node, op, a, b)
        return self._fit(node, f"({a} {op} {b})")

    def _floor_float(self, node: Binary, op: str, a: str, b: str) -> str:
        quotient = f"tile::floor({a} / {b})"
        return self._fit(node, quotient if op == "//" else f"({a} - {quotient} * {b})")

    def _fit(self, node: Expr, text: str) -> str:
        """The result of an operation brought back into its type."""
        if is_small(node.dtype):
            return f"tile::rounded<{storage(node.dtype)}>({_bare(text)})"
        if node.dtype.is_integer and node.dtype.bits < 32 and not self.is_index(node):
            return f"({storage(node.dtype)}){text}"
        return text

    def _cast(self, node: Cast, wide: bool) -> str:
        text = self.value(node.a, wide and node.a.dtype.is_integer)
        to, of = node.type, node.a.dtype
        if is_small(to):
            exact = is_small(of) and (of.name, to.name) in (("float8_e4m3fn", "float16"), ("float8_e5m2", "float16"))
            source = text if of.is_float else f"(float){text}"
            return text if exact else f"tile::rounded<{storage(to)}>({_bare(source)})"
        if is_small(of) and to == dt.float32:
            return text
        if to.is_integer and of.is_integer and self.is_index(node.a) and to.bits >= 32:
            return text
        if of.is_float and to.is_integer or to.kind == "bool":
            return f"tile::convert<{storage(to)}>({_bare(text)})"
        return f"({storage(to)}){text}"

    def _select(self, node: Select, wide: bool) -> str:
        wide = wide and node.dtype.is_integer
        return f"({self.value(node.condition)} ? {self.value(node.a, wide)} : {self.value(node.b, wide)})"

    def _call(self, node: Call, wide: bool) -> str:
        if node.name == "cpu_reduce":
            return self._reduce(node)
        args = ", ".join(_bare(self.value(a)) for a in node.args)
        return self._fit(node, f"tile::{lookup(node.name).cpu}({args})")

    def _reduce(self, node: Call) -> str:
        kind, (row, count) = str(node.options[0]), node.args
        if not isinstance(row, Address):
            raise InternalError("cpu_reduce wants an address", node.span)
        source, to = row.buffer.dtype, node.type
        wide = "double" if "float64" in (source.name, to.name) else "float" if to.is_float else "int64_t"
        op = {"absmax": "AbsMax", "abssum": "AbsSum", "bitand": "BitAnd", "bitor": "BitOr", "bitxor": "BitXor"}.get(
            kind, kind.capitalize()
        )
        text = f"tile::reduce<tile::{op}, {wide}>({_bare(self.value(row))}, {self.index(count)})"
        return self._fit(node, text) if to.is_float else f"({storage(to)}){text}"


def literal(const: Const) -> str:
    """A literal in C++."""
    value, to = const.value, const.type
    if to.kind == "bool":
        return "true" if value else "false"
    if to.is_float:
        return _float_literal(float(value), to)
    if to.bits == 64:
        return f"{value}{'ull' if to.kind == 'uint' else 'll'}" if abs(int(value)) >= 2**31 else f"{value}"
    text = f"{value}u" if to.kind == "uint" and to.bits == 32 else str(value)
    return f"({text})" if int(value) < 0 else text


def _float_literal(value: float, to: DType) -> str:
    if math.isnan(value):
        return '__builtin_nanf("")' if to.bits < 64 else '__builtin_nan("")'
    if math.isinf(value):
        text = "__builtin_inff()" if to.bits < 64 else "__builtin_inf()"
        return f"(-{text})" if value < 0 else text
    text = repr(value) + ("f" if to.bits < 64 else "")
    text = f"({text})" if math.copysign(1, value) < 0 else text
    return f"tile::rounded<{storage(to)}>({text})" if is_small(to) else text


def _closes_at_end(text: str) -> bool:
    """Whether the first parenthesis is closed by the last character."""
    depth = 0
    for at, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return at == len(text) - 1
    return False


def _bare(text: str) -> str:
    """Text without parentheses around the whole."""
    return text[1:-1] if text.startswith("(") and _closes_at_end(text) else text
