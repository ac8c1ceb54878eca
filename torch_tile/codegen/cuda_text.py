# SPDX-License-Identifier: Apache-2.0
"""Print expressions as CUDA C++: index arithmetic in 32 bits wherever its range fits, in 64 bits where it may not.

Dimensions passed as `int` lie below 2^31, block indices below their grid, loop variables inside their bounds. The range
of an expression that follows decides its width: row * stride is widened, row is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from torch_tile.codegen.c_text import (
    PRECEDENCE,
    PREFIX,
    SHIFTS,
    SPELLING,
    Names,
    Text,
    held,
    is_small,
    literal,
    storage,
)
from torch_tile.hardware import WARPGROUP
from torch_tile.intrinsics import foreign, lookup
from torch_tile.ir import dtype as dt
from torch_tile.ir.bits import reinterpret
from torch_tile.ir.bounds import Interval, binary_interval, dtype_interval, load_interval
from torch_tile.ir.buffer import TensorMap
from torch_tile.ir.dtype import DType
from torch_tile.ir.expr import (
    COMPARISONS,
    LOGICAL,
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
    const,
)
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import children, equal, find
from torch_tile.ir.simplify import divides_by_size, simplify
from torch_tile.ir.widths import SIGNED, WRAPPING, IndexValues, may_wrap

INT = dtype_interval(dt.int32)


class CudaText(Text):
    """Print expressions; `bind` records the ranges of variables."""

    def __init__(self, names: Names):
        super().__init__(names)
        self.known: IdMap[Var, Interval] = IdMap()
        self.intervals: IdMap[Expr, Interval] = IdMap()
        # Ranges of block indices whose extent is a product.
        self.parts: IdMap[Expr, tuple[tuple[Expr, Expr], ...]] = IdMap()
        # Of loop variables below a quotient, its divisor, and the most of their product with it, the last one included.
        self.steps: IdMap[Var, list[tuple[Expr, float]]] = IdMap()
        self.is_from_indices: IndexValues = IndexValues(self.index_names)
        self.leaving: IdSet[Expr] = IdSet()  # what wraps to 64 bits
        self.given: IdSet[Var] = IdSet()  # names of what `is_given`
        self.headers: set[str] = set()
        self.maps: list[tuple[TensorMap, str]] = []  # with their names
        self.warpgroup: tuple[Var, Var] | None = None  # the thread's index, and the name of that over 128

    def bind(self, var: Var, interval: Interval) -> None:
        """Record that `var` lies in `interval`."""
        self.known[var] = interval

    def bind_loop(self, var: Var, start: Expr, stop: Expr) -> None:
        """Record the range of a loop variable, and of its products with what divides the loop's end."""
        low, high = self.interval(start).low, self.interval(stop).high
        self.bind(var, Interval(low, max(low, high - 1)))
        self.steps[var] = list(self._steps_below(stop))

    def _steps_below(self, stop: Expr) -> Iterator[tuple[Expr, float]]:
        """Yield each divisor `d` of a quotient `x // d` that bounds a loop, and the largest `i * d` for `i <= stop`."""
        if isinstance(stop, Binary) and stop.op == "min":
            yield from self._steps_below(stop.a)
            yield from self._steps_below(stop.b)
        elif isinstance(stop, Binary) and divides_by_size(stop) and not self.wraps(stop.a):
            yield stop.b, max(self.interval(stop.a).high, 0)

    def map_name(self, tensor_map: TensorMap) -> str:
        """Return the parameter that holds a tensor map; equal maps share one parameter."""
        found = next((name for known, name in self.maps if equal(known, tensor_map)), None)
        if found is None:
            found = self.names.of(Var(f"{tensor_map.buffer.name}_map", tensor_map.dtype))
            self.maps.append((tensor_map, found))
        return found

    def bind_block(self, var: Var, extent: Expr, most: int = 2**31 - 1) -> None:
        """Record that `var` is a block index below `extent`, which is from 1 to `most` in a running kernel."""
        self.positive(extent)
        limit = self.interval(extent).high
        self.bind(var, Interval(0, min(limit, most) - 1))
        if isinstance(extent, Binary) and extent.op == "*":  # then var // one factor is below the other
            self.parts[var] = ((extent.a, extent.b), (extent.b, extent.a))

    def positive(self, extent: Expr) -> None:
        """Record that an extent is at least 1. So is each factor of a product whose other factor is not negative."""
        if isinstance(extent, Var):
            self.bind(extent, self.interval(extent) & Interval(low=1))
            self.intervals.clear()
        elif isinstance(extent, Binary) and extent.op == "*":
            for one, other in ((extent.a, extent.b), (extent.b, extent.a)):
                if self.is_natural(other):
                    self.positive(one)

    def interval(self, expr: Expr) -> Interval:
        """Bound an integer or bool expression. The numbers do not wrap if its type does not, up to 64 bits."""
        found = self.intervals.get(expr)
        if found is None:
            found = self._find(expr)
            if not found.within(dtype_interval(dt.int64)) and self.bits.leaves_64(expr):
                self.leaving.add(expr)
                found = dtype_interval(dt.int64)
            wraps = expr.dtype not in SIGNED and not expr.dtype.is_float
            if wraps and not found.within(dtype_interval(expr.dtype)):
                found = dtype_interval(expr.dtype)
            self.intervals[expr] = found
        return found

    def _find(self, expr: Expr) -> Interval:
        """Compute the interval of an integer or bool expression from its parts."""
        if expr.dtype.is_float:
            return Interval()
        if isinstance(expr, Const):
            return Interval(int(expr.value), int(expr.value))
        if isinstance(expr, Var):
            return self.known.get(expr, dtype_interval(expr.dtype))
        if isinstance(expr, Load):
            return load_interval(expr)
        if isinstance(expr, Binary) and expr.op not in COMPARISONS and expr.op not in LOGICAL:
            a, b = self.interval(expr.a), self.interval(expr.b)
            if expr.op in ("//", "%") and b.low == 0:
                b = Interval(1, max(b.high, 1))  # 1 stands for a divisor of 0
            found = binary_interval(expr.op, a, b)
            others = self.parts.get(expr.a, ()) if expr.op == "//" else ()
            for other in (p for d, p in others if equal(d, expr.b)):
                found = found & Interval(0, self.interval(other).high - 1)
            return found & self._of_steps(expr) if expr.op == "*" else found
        if isinstance(expr, Select):
            return self.interval(expr.a) | self.interval(expr.b)
        if isinstance(expr, Unary) and expr.op == "-":
            return -self.interval(expr.a)
        if isinstance(expr, Unary) and expr.op == "~" and expr.dtype in SIGNED:
            return -self.interval(expr.a) + Interval(-1, -1)
        if isinstance(expr, Cast) and expr.a.dtype.is_integer:
            inner = self.interval(expr.a)
            return inner if inner.within(dtype_interval(expr.type)) else dtype_interval(expr.type)
        if isinstance(expr, Call) and expr.name == "here":
            return self.interval(expr.args[0])
        return dtype_interval(expr.dtype)

    def _of_steps(self, expr: Binary) -> Interval:
        """Bound `(i + c) * d` for a loop variable `i` below a quotient by `d`."""
        for one, d in ((expr.a, expr.b), (expr.b, expr.a)):
            var, ahead = (one.a, one.b) if isinstance(one, Binary) and one.op == "+" else (one, const(0, dt.int32))
            if isinstance(var, Var) and isinstance(ahead, Const):
                for most in (most for divisor, most in self.steps.get(var, ()) if equal(divisor, d)):
                    return Interval(high=most) + self.interval(d) * self.interval(ahead)
        return Interval()

    def is_long(self, expr: Expr, exact: bool) -> bool:
        """Return whether the text of a value has 64 bits; `exact` as for `term`."""
        if expr.dtype == dt.int32:
            return (exact or self.is_from_indices(expr)) and not self.interval(expr).within(INT)
        return expr.dtype.is_integer and expr.dtype.bits == 64 and not isinstance(expr, Const)

    def is_index(self, expr: Expr) -> bool:
        """Return whether an int32 is held in 64 bits."""
        return expr.dtype == dt.int32 and self.is_long(expr, False)

    def typed(self, expr: Expr, wide: bool = False) -> str | None:
        """Return the C++ text of a literal of a 64-bit type, else None: intervals find each int32 that needs 64."""
        return super().typed(expr)

    def is_natural(self, expr: Expr) -> bool:
        """Return whether an integer is never negative."""
        return self.interval(expr).low >= 0

    def wraps(self, expr: Expr) -> bool:
        """Return whether an integer of elements may wrap on the way to its value, so that its interval is wrong."""
        return may_wrap(expr, self.is_from_indices, lambda e: self._fits(e, e.dtype))

    def _fits(self, expr: Expr, dtype: DType) -> bool:
        """Return whether a type holds an integer's exact value."""
        return self.interval(expr).within(dtype_interval(dtype)) and expr not in self.leaving

    def leaves_64(self, expr: Expr) -> bool:
        """Return whether an integer may leave 64 bits, and so wraps even where it comes from indices."""
        self.interval(expr)
        return expr in self.leaving

    def term(self, expr: Expr, wide: bool) -> tuple[str, int]:
        """Return the C++ text of a value, and how tightly its outermost operator binds.

        With `wide` int32 arithmetic does not wrap: what may leave 32 bits is computed in 64.
        """
        return self.text_of(expr, wide)

    def converted(self, expr: Expr, to: DType) -> str:
        """Return the C++ text of the element of type `to` that stores this value."""
        if not is_small(to):
            return self.assigned(expr, to)
        return super().converted(expr, to)

    def stored(self, expr: Load | Var) -> str:
        """Return the C++ text of an element or name as it is stored."""
        return self.in_place(expr)

    def assigned(self, expr: Expr, to: DType) -> str:
        """Return the C++ text of a value for a variable of type `to`."""
        if to == dt.int32 and self.is_long(expr, False):
            return f"(int){self.value(expr, above=PREFIX)}"
        return super().assigned(expr, to)

    def call(self, call: Call) -> str:
        """Return the C++ text of a call, memory operands as pointers."""
        intrinsic = lookup(call.name)
        if call.name == foreign.NAME:
            return self.foreign(call, foreign.text_of(call, is_cuda=True))
        if intrinsic.header:
            self.headers.add(intrinsic.header)
        name = intrinsic.spelling(call) if intrinsic.cuda else intrinsic.cpu
        return f"tile::{name}({self.arguments(call)})"

    def arguments(self, call: Call) -> str:
        """Return the C++ text of a call's arguments."""
        into = call.args[0] if call.args else None
        operands = self.operands(call, False)
        if call.name in ("atomic", "store_at_rank") and isinstance(into, Address):
            operands[1] = self._operand(call.args[1], into.buffer.dtype)
        return ", ".join(operands)

    def _operand(self, expr: Expr, to: DType) -> str:
        """Print an operand whose C++ type must be exactly `to`'s."""
        if not to.is_integer or (isinstance(expr, Load) and expr.dtype == to):
            return self.converted(expr, to)
        # C++ may compute it in another type: in 64 bits below `&`, in `int` from literals.
        text, own = self.term(expr, False)
        kind = f"({storage(to)})"
        if own == PREFIX and text.startswith(kind):
            return text
        return f"{kind}{text}" if own >= PREFIX else f"{kind}({text})"

    # Each method is `term` for one kind of node.

    def visit_Var(self, var: Var, wide: bool) -> tuple[str, int]:
        """Write a variable."""
        return super().visit_Var(var, False)

    def visit_Const(self, node: Const, wide: bool) -> tuple[str, int]:
        """Write a constant."""
        if node.dtype.is_float and not math.isfinite(node.value):
            value = f"{'-' if node.value < 0 else ''}tile::{'nan' if math.isnan(node.value) else 'infinity'}()"
            return (f"(double){value}" if node.dtype.bits == 64 else value), PREFIX
        return literal(node), 99

    def read(self, load: Load) -> str:
        """Return the C++ text that reads an element as it lies in memory, by its policy."""
        text = super().read(load)
        if not load.policy:
            return text
        self.headers.add("memory.h")
        return f"tile::load<tile::Line::{load.policy}>(&{text})"

    def visit_Load(self, load: Load, wide: bool) -> tuple[str, int]:
        """Write an element."""
        buffer = load.buffer
        paired = buffer.scope == "local" and (buffer.static_shape or (1,))[0] % 2 == 0
        if paired and load.dtype in (dt.bfloat16, dt.float16, dt.float8_e4m3fn):
            return f"tile::widen({self.names.of(buffer)}, {self.index(load.indices[0])})", 99
        return super().visit_Load(load, False)

    def visit_TensorMap(self, node: TensorMap, wide: bool) -> tuple[str, int]:
        """Write a tensor map."""
        return f"&{self.map_name(node)}", PREFIX

    def visit_Unary(self, node: Unary, wide: bool) -> tuple[str, int]:
        """Write an operator with one operand."""
        text, own = super().visit_Unary(node, wide)
        if self.is_long(node, wide) and not self.is_long(node.a, wide):
            return f"-(int64_t){self.value(node.a, wide, PREFIX)}", PREFIX
        if node.op == "-" and node.dtype in SIGNED and self._overflows(node, wide):
            return f"tile::wrapping_sub<{self._int_type(node, wide)}>(0, {self.value(node.a, wide)})", 99
        return text, own

    def visit_Binary(self, node: Binary, wide: bool) -> tuple[str, int]:
        """Write an operator with two operands."""
        if node.a.dtype not in SIGNED:
            return super().visit_Binary(node, False)
        if self.warpgroup is not None and is_warpgroup(node, self.warpgroup[0]):
            return self.names.of(self.warpgroup[1]), 99
        wide = wide or node.op in COMPARISONS or self.is_from_indices(node)
        if node.op == "+" and isinstance(node.b, Const) and node.b.value < 0:
            node = self._negated(node)
        whole, a, b = (self.is_long(x, wide) for x in (node, node.a, node.b))
        if self._wraps_once(node) and not a:
            return f"tile::wrapped<{node.b}>({self.value(node.a, wide)})", 99
        if self._divides_once(node) and not a:
            return f"(int)({self.value(node.a, wide, PRECEDENCE['>='])} >= {node.b})", PREFIX
        if node.op in ("min", "max") or (node.op in ("//", "%") and not self._naturals(node, wide)):
            kind = "int64_t" if whole or a or b else "int"
            name = {"//": "floordiv", "%": "floormod"}.get(node.op, node.op)
            text = f"tile::{name}<{kind}>({self.value(node.a, wide)}, {self.value(node.b, wide)})"
            return (f"(int){text}", PREFIX) if (a or b) and not whole and node.dtype == dt.int32 else (text, 99)
        if node.op in WRAPPING and self._overflows(node, wide):
            text = f"{self.value(node.a, wide)}, {self.value(node.b, wide)}"
            return f"tile::wrapping_{WRAPPING[node.op]}<{self._int_type(node, wide)}>({text})", 99
        own = PRECEDENCE[node.op]
        left = self.value(node.a, wide, PREFIX if whole and not (a or b) else own)
        if node.op in SHIFTS and (typed := self.typed(node.a)):
            left = typed
        elif whole and not (a or b):
            left = f"(int64_t){left}"
        # From left to right, so that neighbours of an address differ by a constant added last.
        flat = whole and a and node.op == "+" and isinstance(node.b, Binary) and node.b.op in ("+", "-")
        flat = flat and (b or self.interval(node.b).within(INT))
        is_quotient = node.op in ("//", "%")
        right = self.divisor(node.b, wide) if is_quotient else self.value(node.b, wide, own if flat else own + 1)
        return f"{left} {SPELLING.get(node.op, node.op)} {right}", own

    def _overflows(self, node: Binary | Unary, wide: bool) -> bool:
        """Return whether a signed operation may wrap: undefined in C++, and NVRTC optimises by that."""
        if self.is_from_indices(node):
            return self.leaves_64(node)
        exact = wide and node.dtype == dt.int32 and self._fits(node, dt.int64)
        return not exact and self.wraps(node)

    def _int_type(self, node: Expr, wide: bool) -> str:
        """Return the C++ type in which a signed element wraps."""
        return int_type(node.dtype, self.is_long(node, wide))

    def divisor(self, expr: Expr, wide: bool) -> str:
        """Print a divisor of naturals, with 1 in place of 0."""
        found = self.interval(expr)
        if found.low > 0 or found.high < 0 or (found.high > 0 and self.is_given(expr)):
            return self.value(expr, wide, PRECEDENCE["/"] + 1)
        kind = int_type(expr.dtype, self.is_long(expr, wide))
        return f"tile::divisor<{kind}>({self.value(expr, wide)})"

    def is_given(self, expr: Expr) -> bool:
        """Return whether an integer is made from sizes and scalar parameters alone, unknown to NVRTC."""
        if isinstance(expr, Var):
            return expr.role in ("dim", "param") or expr in self.given
        if isinstance(expr, Binary | Unary | Cast):
            return all(isinstance(c, Const) or self.is_given(c) for c in children(expr) if isinstance(c, Expr))
        return False

    def _negated(self, node: Binary) -> Binary:
        """Write `a + c` with a negative constant c as `a - |c|`; keep any other sum."""
        assert isinstance(node.b, Const)
        new = Binary("-", node.a, const(-node.b.value, node.b.type))
        return new if new.b.value > 0 else node  # type: ignore[attr-defined]

    def _wraps_once(self, node: Binary) -> bool:
        """Return whether an expression is a remainder of less than twice its divisor, such as the next version.

        A remainder is slow, and NVRTC 13.0 miscompiles some. It takes `(step % 3 + 2) % 3` for a difference that never
        falls below 0, although it moved the 2 out of it. Where it holds the remainder in 8 bits, it then writes a
        megabyte past the tile.
        """
        if node.op != "%" or not isinstance(node.b, Const) or int(node.b.value).bit_count() == 1 or self.wraps(node.a):
            return False
        return self.interval(node.a).within(Interval(0, 2 * int(node.b.value) - 1))

    def _divides_once(self, node: Binary) -> bool:
        """Return whether an expression is a quotient of 0 or 1 by no power of two: a comparison gives it at once."""
        if node.op != "//" or not isinstance(node.b, Const) or int(node.b.value).bit_count() == 1 or self.wraps(node.a):
            return False
        return node.dtype == dt.int32 and self.interval(node.a).within(Interval(0, 2 * int(node.b.value) - 1))

    def _naturals(self, node: Binary, wide: bool) -> bool:
        """Return whether both operands are non-negative."""
        wraps = self.wraps(node.a) or self.wraps(node.b)
        if wraps and not (wide and node.a.dtype == dt.int32):
            return False
        return self.is_natural(node.a) and self.is_natural(node.b)

    def visit_Cast(self, node: Cast, wide: bool) -> tuple[str, int]:
        """Write a conversion."""
        if node.type in SIGNED and node.a.dtype in SIGNED:
            if node.type == dt.int64:
                if self.is_long(node.a, True):
                    return self.term(node.a, True)
                return f"(int64_t){self.value(node.a, True, PREFIX)}", PREFIX
            return f"(int){self.value(node.a, wide, PREFIX)}", PREFIX
        return super().visit_Cast(node, False)

    def visit_Call(self, node: Call, wide: bool) -> tuple[str, int]:
        """Write a call."""
        if node.name in ("atomic", "atomic_load", "at_rank"):  # the element as it is stored
            text = self.call(node)
            return (f"tile::widen({text})" if is_small(node.dtype) else text), 99
        if node.name == "reinterpret":
            return self._reinterpret(node, False)
        if node.name == foreign.NAME:
            return self.call(node), 99
        return self._fit(node, self.call(node), 99)


def is_warpgroup(node: Binary, thread: Var) -> bool:
    """Return whether an expression is the number of the warpgroup that `thread` belongs to."""
    return node.op == "//" and node.a is thread and isinstance(node.b, Const) and node.b.value == WARPGROUP


def int_type(dtype: DType, is_long: bool) -> str:
    """Return the C++ type of a named value."""
    if dtype == dt.int32:
        return "int64_t" if is_long else "int"
    return held(dtype)


# Two neighbouring numbers of 4 bits widened together: a third of the instructions of two conversions. Applies to
# `nibble(word, byte, upper)`, less a small number, which is exact in 16 bits. Applies to that less or times a number of
# the wanted type, too. There it is rounded once, as floats are when they are narrowed; a rounded value may be used
# further.

LARGEST = 64  # number taken off a field that csrc/fields.h has room for beside it in a mantissa
Order = Callable[[Expr, Expr], bool | None]  # of neighbours' operands `upper`: whether the first is 1, if they differ


def field_pair(first: Expr, second: Expr, to: DType, order: Order, text: CudaText) -> str | None:
    """Print both values as one register of two `to`; None if they are not neighbours of that kind."""
    if to not in (dt.float16, dt.bfloat16):
        return None
    found = _Pair(to, order, text).of(_inner(first, to), _inner(second, to))
    if found is not None:
        text.headers.add("fields.h")
    return found


class _Pair:
    """Write two values of 16 bits as one packed value."""

    def __init__(self, to: DType, order: Order, text: CudaText):
        self.to, self.order, self.text = to, order, text

    def of(self, a: Expr, b: Expr) -> str | None:
        """Print the values `a` and `b`, rounded once."""
        if isinstance(a, Call) and isinstance(b, Call) and a.name == b.name == "fma":
            return self.fused(a, b)
        if not (isinstance(a, Binary) and isinstance(b, Binary)) or a.op != b.op or a.op not in ("-", "*"):
            return self.fields(a, b)
        rounded = [_inner(x.a, self.to) if isinstance(x, Cast) and x.type == dt.float32 else None for x in (a.a, b.a)]
        other = self.common(a.b, b.b)
        if other is None and a.op == "*" and _is_table(rounded[0]):
            other = self.text.value(a.b) if a.b.dtype == dt.float32 and equal(a.b, b.b) else None
        if other is None:
            return self.fields(a, b)
        if rounded[0] is not None and rounded[1] is not None:
            inner = self.of(rounded[0], rounded[1])
        else:
            inner = self.fields(a.a, b.a)
        name = "pair_less" if a.op == "-" else "pair_times"
        return None if inner is None else f"tile::{name}<{storage(self.to)}>({inner}, {other})"

    def fused(self, a: Call, b: Call) -> str | None:
        """Print `x * factor + y`, where values of the wanted type are x and y and both share the factor."""
        (x, factor, y), (other_x, other_factor, other_y) = a.args, b.args
        found = self.widened(x, other_x), self.common(factor, other_factor), self.widened(y, other_y)
        if None in found:
            return None
        product, shared, addend = found
        return f"tile::pair_fma<{storage(self.to)}>({product}, tile::pair_of({shared}), {addend})"

    def widened(self, a: Expr, b: Expr) -> str | None:
        """Print values that are widened from the wanted type, as they were before."""
        if not (isinstance(a, Cast) and isinstance(b, Cast) and a.type == b.type == dt.float32):
            return None
        first, second = _inner(a.a, self.to), _inner(b.a, self.to)
        is_narrow = first is not a.a or first.dtype == self.to
        return self.of(first, second) if is_narrow and (second is not b.a or second.dtype == self.to) else None

    def common(self, a: Expr, b: Expr) -> str | None:
        """Print a number of the wanted type as it lies in memory, if both values share it."""
        a, b = (x.a if isinstance(x, Cast) and x.type == dt.float32 else x for x in (a, b))
        return self.text.unchanged(a) if a.dtype == self.to and equal(a, b) else None

    def fields(self, a: Expr, b: Expr) -> str | None:
        """Print two numbers that are 4-bit fields of one byte, or both less a small number."""
        surplus: int | None = 0
        if isinstance(a, Binary) and isinstance(b, Binary) and a.op == b.op == "-":
            surplus = _small(a.b) if equal(a.b, b.b) else None
            a, b = a.a, b.a
        if isinstance(a, Load) and isinstance(b, Load):
            return self.entry(a, b)
        if surplus is None or not (isinstance(a, Call) and isinstance(b, Call) and a.name == b.name):
            return None
        if a.name == "nibble_in_place":
            return None if surplus or self.to != dt.float16 else self.in_place(a, b)
        if a.name != "nibble" and (a.name != "table_nibble" or surplus):
            return None
        same = [*zip(a.args[:2], b.args[:2], strict=True), *zip(a.args[3:], b.args[3:], strict=True)]
        together = all(equal(simplify(x), simplify(y)) for x, y in same)
        if not together or (upper_first := self.order(a.args[2], b.args[2])) is None:
            return None
        first = str(upper_first).lower()
        word, single = a.args[0], _is_single(a.args[1])
        if a.args[3:]:
            name, options = "table_pair", [first, *_bytes(a.args[3:], self.to)]
        else:
            word, flips = _flipped(word) if single else (word, 0)  # once a word is cheaper for all of its bytes
            name, options = "nibble_pair", [str(surplus), first, hex(flips), str(single).lower()]
        operands = f"{self.text.value(word)}, {self.text.value(a.args[1])}"
        return f"tile::{name}<{', '.join([storage(self.to), *options])}>({operands})"

    def in_place(self, a: Call, b: Call) -> str | None:
        """Print the same field of both halves of a word, the lower half's first; None if they are not such."""
        same = all(equal(simplify(x), simplify(y)) for x, y in zip(a.args[:2], b.args[:2], strict=True))
        if not same or self.order(a.args[2], b.args[2]) is not False:
            return None
        word, flips = _flipped(a.args[0])
        return f"tile::pair_in_place<{hex(flips)}>({self.text.value(word)}, {self.text.value(a.args[1])})"

    def entry(self, a: Load, b: Load) -> str | None:
        """Print one load of two neighbouring table entries that a byte selects, or return None."""
        if a.buffer is not b.buffer or a.dtype != self.to or not (is_entry(a) and is_entry(b)):
            return None
        first, second = a.indices[0], b.indices[0]
        assert isinstance(first, Call) and isinstance(second, Call)
        word, byte, lane, part = first.args
        same = all(equal(simplify(x), simplify(y)) for x, y in zip(first.args[:3], second.args[:3], strict=True))
        if not same or self.order(part, second.args[3]) is not False:
            return None
        operands = ", ".join(map(self.text.value, (word, byte, lane)))
        return f"tile::pair_at({self.text.value(Address(a.buffer, (const(0, dt.int32),)))}, {operands})"


def _is_single(byte: Expr) -> bool:
    """Return whether a thread takes one byte of a word alone. A loop over bytes, which is unrolled, takes all."""
    return any(var.role != "loop" for var in find(byte, Var))


def _flipped(word: Expr) -> tuple[Expr, int]:
    """Split off the bits that are turned over in each byte of a word alike; 0 if there are none."""
    if isinstance(word, Binary) and word.op == "^" and isinstance(word.b, Const):
        flips = int(word.b.value) & 255
        if int(word.b.value) & 0xFFFFFFFF == flips * 0x01010101:
            return word.a, flips
    return word, 0


def _is_table(expr: Expr | None) -> bool:
    """Return whether a value is looked up in a table."""
    return is_entry(expr) or (isinstance(expr, Call) and expr.name == "table_nibble")


def is_entry(expr: Expr | None) -> bool:
    """Return whether a value is read from a table of pairs in shared memory."""
    place = expr.indices[0] if isinstance(expr, Load) and expr.buffer.scope == "shared" and expr.indices else None
    return isinstance(place, Call) and place.name == "table_place"


def _inner(expr: Expr, to: DType) -> Expr:
    """Return the value that is narrowed."""
    return expr.a if isinstance(expr, Cast) and expr.type == to else expr


def _bytes(table: Sequence[Expr], to: DType) -> list[str]:
    """Return the 16 numbers of a table rounded to `to`: their lower bytes, then the upper ones, four to a word."""
    words = []
    for bits in table:
        number = reinterpret(bits, dt.float32)
        assert isinstance(number, Const), "tables are literals"
        word = reinterpret(const(dt.rounded(float(number.value), to), to), dt.uint16)
        words.append(int(word.value) if isinstance(word, Const) else 0)
    found = [word >> shift & 255 for shift in (0, 8) for word in words]
    return [f"0x{int.from_bytes(found[at : at + 4], 'little'):08x}" for at in range(0, 32, 4)]


def _small(expr: Expr) -> int | None:
    """Return a literal small natural number."""
    if isinstance(expr, Const) and float(expr.value).is_integer() and 0 <= expr.value <= LARGEST:
        return int(expr.value)
    return None
