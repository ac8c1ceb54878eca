# SPDX-License-Identifier: Apache-2.0
"""Expressions, regions and buffers as text of the language, and the names of symbols.

Names are the author's, made valid and unique among what is visible (`x`, `x_1`). Parentheses and types of literals
appear only where the language would otherwise read something else.
"""

from __future__ import annotations

import builtins
import json
import keyword
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch_tile.ir.buffer import Buffer, Range, Region
from torch_tile.ir.dtype import DType
from torch_tile.ir.expr import (
    COMPARISONS,
    Address,
    Binary,
    Call,
    Cast,
    Const,
    Expr,
    Load,
    Select,
    Unary,
    Var,
    natural,
    to_expr,
)
from torch_tile.ir.node import Node
from torch_tile.ir.tensor_map import TensorMap

PRECEDENCE = {
    "or": 1, "and": 2, "not": 3, "==": 4, "!=": 4, "<": 4, "<=": 4, ">": 4, ">=": 4, "|": 5, "^": 6, "&": 7, "<<": 8,
    ">>": 8, "+": 9, "-": 9, "*": 10, "/": 10, "//": 10, "%": 10,
}  # fmt: skip
UNARY, ATOM = 11, 12
TARGET_LEVEL: set[str] = set()  # calls that are no functions of the language; intrinsics add theirs
RESERVED = {"T", *keyword.kwlist, *dir(builtins)}


class Names:
    """One name per symbol. A loop variable gives its name back when its loop ends; other names are used once."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Node, str]] = {}
        self._visible: set[str] = set()
        self._used: set[str] = set()
        self._once: set[str] = set()

    def __call__(self, symbol: Var | Buffer) -> str:
        """The symbol's name; a symbol that was never bound gets one now."""
        known = self._of.get(id(symbol))
        return self.bind(symbol) if known is None else known[1]

    def bind(self, symbol: Var | Buffer) -> str:
        """A name for a symbol, not used by any other symbol of the text."""
        name = self._choose(symbol, self._used)
        self._once.add(name)
        return name

    @contextmanager
    def bound(self, symbols: Sequence[Var]) -> Iterator[tuple[str, ...]]:
        """Names for loop variables, free again afterwards."""
        names = tuple(self._choose(v, self._visible | self._once) for v in symbols)
        yield names
        self._visible.difference_update(names)

    def _choose(self, symbol: Var | Buffer, taken: set[str]) -> str:
        base = re.sub(r"\W", "_", symbol.name) or "x"
        base = f"_{base}" if base[0].isdigit() else f"{base}_" if base in RESERVED else base
        name, count = base, 0
        while name in taken:
            count += 1
            name = f"{base}_{count}"
        self._of[id(symbol)] = symbol, name
        self._visible.add(name)
        self._used.add(name)
        return name


class ExprPrinter:
    """Expressions and regions as strings."""

    def __init__(self) -> None:
        self.names = Names()

    def expr(self, e: Expr, need: int = 0) -> str:
        """An expression; in parentheses if it binds weaker than `need`."""
        text, precedence = self._expr(e)
        return f"({text})" if precedence < need else text

    def _expr(self, e: Expr) -> tuple[str, int]:
        if isinstance(e, Const):
            return self._const(e, None)
        if isinstance(e, Var):
            return self.names(e), ATOM
        if isinstance(e, Binary):
            return self._binary(e)
        if isinstance(e, Unary):
            precedence = PRECEDENCE["not"] if e.op == "not" else UNARY
            return f"{e.op}{' ' if e.op == 'not' else ''}{self.expr(e.a, precedence)}", precedence
        if isinstance(e, Cast):
            return f"T.cast({self.expr(e.a)}, {e.type!r})", ATOM
        if isinstance(e, Select):
            plain = all(isinstance(x, Const) and natural(x.value).type == x.type for x in (e.a, e.b))
            a, b = (self.expr(e.a), self.expr(e.b)) if plain else self._pair(e.a, e.b)
            return f"T.if_then_else({self.expr(e.condition)}, {a}, {b})", ATOM
        if isinstance(e, Load):
            return self.element(e.buffer, e.indices), ATOM
        if isinstance(e, Address):
            return f"T.address_of({self.element(e.buffer, e.indices)})", ATOM
        if isinstance(e, Call):
            return self._call(e), ATOM
        if isinstance(e, TensorMap):
            seen = f"{self.names(e.buffer)}, {self.shape(e.sizes)}, {self.shape(e.strides)}"
            return f"T.tensor_map({seen}, box={e.box!r}, swizzle={e.swizzle})", ATOM
        return f"<{type(e).__name__}>", ATOM

    def _binary(self, e: Binary) -> tuple[str, int]:
        if e.op in ("min", "max"):
            return f"T.{e.op}({', '.join(self._pair(e.a, e.b))})", ATOM
        if e.op == "//" and isinstance(e.a, Binary) and e.a.op == "+" and isinstance(e.b, Const) and e.b.value > 1:
            top = e.a.b
            if isinstance(top, Const) and top.value == e.b.value - 1 and not isinstance(e.a.a, Const):
                return f"T.ceildiv({', '.join(self._pair(e.a.a, e.b))})", ATOM
        precedence = PRECEDENCE.get(e.op, 0)
        if e.op not in COMPARISONS:
            a, b = self._pair(e.a, e.b, precedence, precedence + 1)
        else:  # a < b < c would be a chain, and 1 < x would be x > 1
            a = self.value(e.a, e.b.dtype, precedence + 1, typed=True)
            b = self.value(e.b, e.a.dtype, precedence + 1)
        return f"{a} {e.op} {b}", precedence

    def _pair(self, a: Expr, b: Expr, need_a: int = 0, need_b: int = 0) -> tuple[str, str]:
        """Two operands that must come to have their types again; a plain number takes the type of the other one."""
        both = isinstance(a, Const) and isinstance(b, Const)
        x = self.value(a, None if both else b.dtype, need_a, typed=both)
        return x, self.value(b, a.dtype, need_b)

    def value(self, e: Expr, like: DType | None, need: int = 0, typed: bool = False) -> str:
        """An expression where a plain number would take the type `like`."""
        if not isinstance(e, Const):
            return self.expr(e, need)
        text, precedence = self._const(e, like, typed)
        return f"({text})" if precedence < need else text

    def _const(self, c: Const, like: DType | None, typed: bool = False) -> tuple[str, int]:
        value = c.value
        if c.type.is_float and not math.isfinite(value):
            if value != value:
                return f'{c.type!r}(float("nan"))', ATOM
            return (f"T.infinity({c.type!r})", ATOM) if value > 0 else (f"-T.infinity({c.type!r})", UNARY)
        text = repr(float(value) if c.type.is_float else bool(value) if c.type.kind == "bool" else int(value))
        if not typed and to_expr(value, like).dtype == c.type:
            return text, UNARY if text[0] == "-" else ATOM
        return f"{c.type!r}({text})", ATOM

    def element(self, buffer: Buffer, indices: Sequence[Expr]) -> str:
        """`A[i, j]`; just the name for a T.alloc_var, which has no dimensions."""
        name = self.names(buffer)
        return f"{name}[{', '.join(self.expr(i) for i in indices)}]" if indices else name

    def _call(self, e: Call) -> str:
        if e.name == "reinterpret":
            return f"T.reinterpret({self.value(e.args[0], None, typed=True)}, {e.type!r})"
        if e.options or e.name in TARGET_LEVEL or any(isinstance(a, Address) for a in e.args):
            options = [f"dtype={e.type!r}"] + ([f"options={literal(e.options)}"] if e.options else [])
            return f"T.call({', '.join([quoted(e.name), *(self.value(a, None) for a in e.args), *options])})"
        args = [self.value(a, next((b.dtype for b in e.args if not isinstance(b, Const)), None)) for a in e.args]
        return f"T.{e.name}({', '.join(args)})"

    def region(self, r: Region) -> str:
        """A region as slices; just the name for a whole buffer."""
        name = self.names(r.buffer)
        whole = all(
            x.keep and is_zero(x.start) and _same_size(x.extent, size)
            for x, size in zip(r.ranges, r.buffer.shape, strict=True)
        )
        return name if whole else f"{name}[{', '.join(self.range(x) for x in r.ranges)}]"

    def range(self, r: Range) -> str:
        """`start:stop`, or the index alone."""
        if not r.keep:
            return self.expr(r.start)
        if isinstance(r.start, Const) and isinstance(r.extent, Const):
            return f"{r.start.value}:{r.start.value + r.extent.value}"
        if is_zero(r.start):
            return f"0:{self.expr(r.extent)}"
        return f"{self.expr(r.start)}:{self.expr(Binary('+', r.start, r.extent))}"

    def shape(self, sizes: Sequence[Expr]) -> str:
        """A tuple of sizes."""
        return tuple_text([self.expr(s) for s in sizes])

    def tensor_type(self, b: Buffer) -> str:
        """The annotation of a tensor parameter."""
        align = "" if b.align is None else f", align={b.align}"
        if b.strides is not None:
            return f"T.StridedTensor({self.shape(b.shape)}, {self.shape(b.strides)}, {b.dtype!r}{align})"
        return f"T.Tensor({self.shape(b.shape)}, {b.dtype!r}{align})"


def literal(value: Any) -> str:
    """An option of a call or tile op: a Python literal, or what `to_language` of an enumeration says."""
    if isinstance(value, tuple):
        return tuple_text([literal(item) for item in value])
    spelled = getattr(value, "to_language", None)
    return str(spelled()) if spelled else quoted(value) if isinstance(value, str) else repr(value)


def quoted(text: str) -> str:
    """A Python string literal."""
    return json.dumps(text, ensure_ascii=False)


def tuple_text(items: Sequence[str]) -> str:
    """A Python tuple of texts."""
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def is_zero(e: Expr) -> bool:
    """Whether `e` is the literal 0."""
    return isinstance(e, Const) and e.value == 0


def _same_size(a: Expr, b: Expr) -> bool:
    return a is b or (isinstance(a, Const) and isinstance(b, Const) and a.value == b.value)
