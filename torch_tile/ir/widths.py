# SPDX-License-Identifier: Apache-2.0
"""Tell the int32 and int64 values that never wrap from those that do.

Arithmetic of indices and sizes is exact: targets compute it in 64 bits where it may leave 32. Arithmetic of elements
and variables alone wraps after each operation, as that of torch's tensors does. So does that of int64 arguments. It is
exact where its value is an operand of an index, a comparison or a cast to int64: `A[i] * 4 + b`, with a block index
`b`, never wraps. What leaves 64 bits wraps there, too.
"""

from __future__ import annotations

from collections.abc import Callable

from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Binary, Cast, Const, Expr, Load, Select, Unary, Var
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import children

SIGNED = (dt.int32, dt.int64)  # types of indices and sizes
WRAPPING = {"+": "add", "-": "sub", "*": "mul", "<<": "shl"}  # operations whose value may leave the operands' type
ROLES = ("loop", "block", "thread", "dim", "param")  # of variables that are indices or sizes
# Line of a C++ text whose signed integers wrap. clang does not know it: the host compiler's flags say it again.
WRAPS = '#pragma GCC optimize("wrapv")'
WORD = 63  # bits of the magnitude of an int64
INDEX_BITS = 12  # of an index or a size in the products that address memory: five of them fit a word


class IndexValues:
    """Tell which values are computed from indices and sizes: those of `names`, or with `elements` all others."""

    def __init__(self, names: IdSet[Var] | None = None, elements: IdSet[Var] | None = None):
        self.names: IdSet[Var] = IdSet[Var]() if names is None else names
        self.elements: IdSet[Var] | None = elements
        self.known: IdMap[Expr, bool] = IdMap()

    def __call__(self, expr: Expr) -> bool:
        """Return whether a signed integer is computed from indices or sizes, so that its arithmetic never wraps."""
        found = self.known.get(expr)
        if found is None:
            found = self.known[expr] = self._find(expr)
        return found

    def _find(self, expr: Expr) -> bool:
        """Search an expression for indices and sizes."""
        if expr.dtype not in SIGNED or isinstance(expr, Load):
            return False
        if isinstance(expr, Var):
            if expr.role == "param" and expr.type == dt.int64:
                return False  # no type holds what its arithmetic gives
            return expr.role in ROLES or (expr in self.names if self.elements is None else expr not in self.elements)
        return any(isinstance(c, Expr) and self(c) for c in children(expr))


# Which indices, or numbers that are compared, may leave the 64 bits in which targets compute them: bounds of the bits
# of magnitudes. An index or a size counts as INDEX_BITS, because memory holds their products.


class IndexBits:
    """Bound the bits of magnitudes where `known` are names with their bits."""

    def __init__(self) -> None:
        self.known: IdMap[Expr, int] = IdMap()

    def leaves_64(self, expr: Expr) -> bool:
        """Return whether a signed integer may leave 64 bits on the way to its value."""
        return expr.dtype in SIGNED and self(expr) > WORD

    def __call__(self, expr: Expr) -> int:
        """Bound the bits of an integer's magnitude: more than WORD once an operation on the way may leave 64 bits."""
        found = self.known.get(expr)
        if found is None:
            found = self.known[expr] = _bits(expr, [self(c) for c in children(expr) if isinstance(c, Expr)])
        return found


def leaves_64(expr: Expr) -> bool:
    """Return whether a signed integer may leave 64 bits on the way to its value, whatever its names stand for."""
    return expr.dtype in SIGNED and bits_of(expr) > WORD


def bits_of(expr: Expr) -> int:
    """Bound the bits of an integer's magnitude as IndexBits does without names; the result is kept with the node."""
    found: int | None = expr.__dict__.get("_bits")
    if found is None:
        found = expr.__dict__["_bits"] = _bits(expr, [bits_of(c) for c in children(expr) if isinstance(c, Expr)])
    return found


def _bits(expr: Expr, parts: list[int]) -> int:
    """Bound the bits of an integer's magnitude by those of its operands."""
    longest, own = max(parts, default=0), min(expr.dtype.bits - (expr.dtype in SIGNED), WORD)
    if isinstance(expr, Const):
        return min(abs(int(expr.value)).bit_length(), own) if expr.dtype.is_integer else 0
    if isinstance(expr, Var):
        return INDEX_BITS if expr.role in ROLES and expr.role != "param" else own
    if longest > WORD:
        return longest
    if isinstance(expr, Binary) and expr.dtype in SIGNED:
        return _bits_of_binary(expr, *parts)
    if isinstance(expr, Unary) and expr.op in ("-", "~"):
        return longest + 1
    if isinstance(expr, Cast) and expr.a.dtype.is_float:  # far beyond the bits of its type
        return own
    return min(own, longest) if isinstance(expr, Select | Cast) else own


def _bits_of_binary(expr: Binary, a: int, b: int) -> int:
    """Compute the bound of a signed operation from those of its operands."""
    if expr.op in ("+", "-"):
        return max(a, b) + 1
    if expr.op == "*":
        return a + b
    if expr.op == "<<":
        return a + (int(expr.b.value) if isinstance(expr.b, Const) else WORD)
    if expr.op == "&" and isinstance(expr.b, Const) and expr.b.value >= 0:
        return b
    if expr.op == "//" and isinstance(expr.b, Const) and expr.b.value > 1:
        return min(a, max(a - int(expr.b.value).bit_length() + 2, 1))  # rounded down, to a power of 2 at most
    return b if expr.op == "%" else max(a, b)


def is_compared_exactly(comparison: Binary) -> bool:
    """Return whether the operands of a comparison are exact: 64 bits hold them, and all numbers on the way to them."""
    return not (leaves_64(comparison.a) or leaves_64(comparison.b))


def may_wrap(expr: Expr, is_from_indices: IndexValues, fits: Callable[[Expr], bool]) -> bool:
    """Return whether a signed integer of elements may leave its type on the way to its value. It wraps there.

    Where the value is part of an index, a size or a comparison, it does not wrap after all. `fits` tells whether a
    value without wrapping lies in its type.
    """
    if expr.dtype not in SIGNED or not isinstance(expr, Binary | Unary | Select) or is_from_indices(expr):
        return False
    if isinstance(expr, Select):
        return any(may_wrap(arm, is_from_indices, fits) for arm in (expr.a, expr.b))
    if not fits(expr):
        return True
    return any(isinstance(c, Expr) and may_wrap(c, is_from_indices, fits) for c in children(expr))
