# SPDX-License-Identifier: Apache-2.0
"""Print expressions as C++ text: names, literals, operators, conversions.

A value of a 16- or 8-bit floating type is held in a float that represents it exactly; operations round their result.
Variables, and names of values that are only moved, hold such a float as it is stored: NaN keeps its bits.
Signed integers made from indices, sizes and scalar parameters are int64_t. So is every step of an index or comparison,
so that a guard sees the index that it guards. Other integers from memory keep their type. Those of 8 and 16 bits and
unsigned ones wrap after each operation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from torch_tile.diagnostics.errors import FOREIGN, InternalError, error
from torch_tile.intrinsics import foreign, lookup
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.dtype import DType
from torch_tile.ir.expr import COMPARISONS, Address, Binary, Call, Cast, Const, Expr, Load, Select, Unary, Var, const
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Node, Visitor, children, contains, find
from torch_tile.ir.stmt import Let, Print
from torch_tile.ir.widths import SIGNED, IndexBits

STORAGE = {
    "bool": "bool", "float32": "float", "float64": "double", "float16": "tile::f16", "bfloat16": "tile::bf16",
    "float8_e4m3fn": "tile::e4m3", "float8_e5m2": "tile::e5m2",
} | {f"{u}int{b}": f"{u}int{b}_t" for u in ("", "u") for b in (8, 16, 32, 64)}  # fmt: skip
# Names that C++, the standard headers of generated text, or its own frame already use.
_WORDS = """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t char8_t class co_await
    co_return co_yield compl concept const const_cast consteval constexpr constinit continue decltype default delete do
    double dynamic_cast else enum explicit export extern false float for friend goto if inline int long mutable
    namespace new noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast
    requires return short signed sizeof static static_assert static_cast struct switch template this thread_local throw
    true try typedef typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq
    int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t size_t NULL EOF stdin stdout stderr errno
    aligned_alloc free printf fflush main typeof
"""
# Macros of standard headers and of csrc/, which hold in every scope; those that begin with an underscore aside.
_MACROS = re.compile(
    r"""
    TILE_\w+ | \w+_(MAX|MIN|WIDTH|C|ENDIAN) | (EXIT|SEEK|RENAME|FD|FE)_\w+ | [LP]_(ctermid|cuserid|tmpnam|tmpdir)
    | W[A-Z]{5,} | BUFSIZ | BYTE_ORDER | MB_CUR_MAX | NFDBITS | INFINITY | NAN | HUGE_VALF? | M_\w+ | assert | offsetof
    | alloca | (be|le)(16|32|64)toh | hto[bl]e(16|32|64) | strn?dupa | linux | unix | i386 | major | minor | makedev
    | NVRTC_\w+ | CUDA\w* | CUDART_\w+ | warpSize
    """,
    re.VERBOSE,
)


def storage(dtype: DType) -> str:
    """Return the C++ type of an element in memory."""
    return STORAGE[dtype.name]


def held(dtype: DType) -> str:
    """Return the C++ type of a value in a register."""
    return "float" if is_small(dtype) else storage(dtype)


def is_small(dtype: DType) -> bool:
    """Return whether values are held in a wider type than they are stored in."""
    return dtype.is_float and dtype.bits < 32


def identifier(name: str) -> str:
    """Turn a name into one that all C++ compilers take: plain letters, not reserved, no macro."""
    name = re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"v{name}" if re.match(r"[0-9]|__|_[A-Z]|$", name) else f"{name}_" if _MACROS.fullmatch(name) else name


def comment(text: str) -> str:
    """Return text for a comment of one line; unprintable characters are escaped, so that nothing ends the comment."""
    return "".join(c if c.isprintable() and c != "\\" else ascii(c)[1:-1] for c in text)


# CUDA's names of small floats. Text with these names gets pointers of these types.
FOREIGN_FLOATS = {
    "float16": ("__half", r"\b(__half2?|half2?)\b", "cuda_fp16.h"),
    "bfloat16": ("__nv_bfloat16", r"\b(__)?nv_bfloat162?\b", "cuda_bf16.h"),
    "float8_e4m3fn": ("__nv_fp8_e4m3", r"\b__nv_fp8\w*", "cuda_fp8.h"),
    "float8_e5m2": ("__nv_fp8_e5m2", r"\b__nv_fp8\w*", "cuda_fp8.h"),
}

# Names of C libraries that nvcc's own headers bring along, and NVRTC's do not.
SHORT_NAMES = {"uint": "unsigned int", "ushort": "unsigned short", "ulong": "unsigned long"}


def foreign_pointer(dtype: DType, text: str) -> str:
    """Return the conversion of a pointer for functions of `text`: empty if it has the kernels' own type."""
    kind, pattern, _ = FOREIGN_FLOATS.get(dtype.name, ("", "$^", ""))
    return f"({kind}*)" if re.search(pattern, text) else ""


def foreign_headers(text: str) -> list[str]:
    """Return the headers of CUDA that declare names in `text`."""
    return list(dict.fromkeys(h for _, pattern, h in FOREIGN_FLOATS.values() if re.search(pattern, text)))


def foreign_lines(kernels: Sequence[Sequence[Node]], is_cuda: bool) -> list[str]:
    """Return the authors' own texts that the nodes of kernels call, each once and unchanged."""
    calls = [n for nodes in kernels for n in nodes if isinstance(n, Call) and n.name == foreign.NAME]
    texts = list(dict.fromkeys(foreign.text_of(call, is_cuda) for call in calls))
    if not is_cuda and "" in texts:
        call = next(c for c in calls if not foreign.text_of(c, is_cuda))
        problem = "there is no C++ of it for CPUs"
        raise error("foreign_text", call.span, name=foreign.function_of(call), problem=problem)
    if not texts:
        return []
    whole = "\n".join(texts)
    headers = [f"#include <{header}>" for header in foreign_headers(whole) if is_cuda and f"<{header}>" not in whole]
    named = [f"typedef {kind} {name};" for name, kind in SHORT_NAMES.items() if re.search(rf"\b{name}\b", whole)]
    return [FOREIGN, *headers, *(named if is_cuda else ()), *texts, '#line 1 "kernel"', ""]


class Names:
    """The unique C++ names of symbols."""

    def __init__(self, reserved: Iterable[str] = ()):
        self.taken = set(_WORDS.split()) | set(reserved)
        self.by_symbol: IdMap[Var | Buffer, str] = IdMap()

    def release(self, symbol: Var | Buffer) -> None:
        """Close the symbol's scope: its name may be used again."""
        self.taken.discard(self.by_symbol.get(symbol, ""))

    def of(self, symbol: Var | Buffer) -> str:
        """Return the name of a symbol, made at its first use."""
        found = self.by_symbol.get(symbol)
        if found is None:
            base = identifier(symbol.name)
            found, n = base, 1
            while found in self.taken:
                found, n = f"{base}_{n}", n + 1
            self.taken.add(found)
            self.by_symbol[symbol] = found
        return found


# Precedence of C++ operators. `above` in the methods below is that of the operator around a value.
SHIFTS = ("<<", ">>")  # operators whose type in C++ is that of the left operand alone
PRECEDENCE = {
    "or": 1, "and": 2, "|": 3, "^": 4, "&": 5, "==": 6, "!=": 6, "<": 7, "<=": 7, ">": 7, ">=": 7, "<<": 8, ">>": 8,
    "+": 9, "-": 9, "*": 10, "/": 10, "//": 10, "%": 10,
}  # fmt: skip
PREFIX = 11
SPELLING = {"and": "&&", "or": "||", "//": "/"}


class Text(Visitor):
    """Print expressions as C++; `names` gives symbols their names."""

    def __init__(self, names: Names):
        self.names = names
        self.index_names: IdSet[Var] = IdSet()  # names bound to index values
        self.natural: IdSet[Var] = IdSet()  # loop variables that are never negative
        self.moved: IdSet[Var] = IdSet()  # names of small floats as they are stored
        self.bits = IndexBits()

    def is_index(self, expr: Expr) -> bool:
        """Return whether an integer is made from indices and sizes and therefore held in 64 bits."""
        if expr.dtype not in SIGNED:
            return False
        if isinstance(expr, Var):
            return expr.role in ("loop", "block", "dim", "param") or expr in self.index_names
        if isinstance(expr, Select):
            return self.is_index(expr.a) or self.is_index(expr.b)
        return not isinstance(expr, Load) and any(isinstance(c, Expr) and self.is_index(c) for c in children(expr))

    def is_natural(self, expr: Expr) -> bool:
        """Return whether an integer is visibly never negative."""
        if isinstance(expr, Const):
            return expr.value >= 0
        if isinstance(expr, Var):
            return expr.role in ("block", "dim") or expr in self.natural
        if isinstance(expr, Binary) and expr.op in ("+", "*", "//", "%", "min", "max"):
            return self.is_natural(expr.a) and self.is_natural(expr.b) and not self.bits.leaves_64(expr)
        return isinstance(expr, Cast) and expr.type in SIGNED and expr.a.dtype in SIGNED and self.is_natural(expr.a)

    def value(self, expr: Expr, wide: bool = False, above: int = 0) -> str:
        """Return the C++ text of a value, in parentheses where `above` binds tighter; `wide` for 64-bit integers."""
        text, own = self.term(expr, wide)
        return f"({text})" if own < above else text

    def term(self, expr: Expr, wide: bool) -> tuple[str, int]:
        """Return the C++ text of a value, and how tightly its outermost operator binds."""
        if wide and expr.dtype not in SIGNED:
            return f"(int64_t){self.value(expr, above=PREFIX)}", PREFIX
        return self.text_of(expr, wide)

    def text_of(self, expr: Expr, wide: bool) -> tuple[str, int]:
        """Return the C++ text of a value by its class, and how tightly its outermost operator binds."""
        method = self.method_of(expr)
        if method is None:
            raise InternalError(f"no C++ for {type(expr).__name__}", expr.span)
        return method(expr, wide)  # type: ignore[no-any-return]

    def index(self, expr: Expr, above: int = 0) -> str:
        """Return the C++ text of an index or size, in 64 bits."""
        return self.value(expr, wide=True, above=above)

    def element(self, buffer: Buffer, indices: tuple[Expr, ...]) -> str:
        """Return the C++ text of an element as it lies in memory."""
        name = self.names.of(buffer)
        return f"{name}[{self.index(indices[0])}]" if indices else name

    def read(self, load: Load) -> str:
        """Return the C++ text that reads an element as it lies in memory."""
        return self.element(load.buffer, load.indices)

    def assigned(self, expr: Expr, to: DType) -> str:
        """Return the C++ text of a value for a variable of type `to`."""
        return self.converted(expr, to) if is_small(to) else self.value(expr)

    def converted(self, expr: Expr, to: DType) -> str:
        """Return the C++ text of the element of type `to` that stores this value."""
        if is_small(to):
            kept = self.unchanged(expr)
            return f"tile::narrow<{storage(to)}>({self.unrounded(expr, to)})" if kept is None else kept
        if expr.dtype.is_integer and self.is_index(expr):
            return f"({storage(to)}){self.value(expr, above=PREFIX)}"
        return self.value(expr)

    def unchanged(self, expr: Expr) -> str | None:
        """Return the C++ text of a small float as stored, if it is +0 or `is_moved`; None if it has to be rounded."""
        if isinstance(expr, Const) and expr.value == 0 and math.copysign(1, expr.value) > 0:
            return f"{storage(expr.dtype)}{{}}"
        if not self.is_moved(expr):
            return None
        if isinstance(expr, Load | Var):
            return self.stored(expr)
        if isinstance(expr, Select):
            a, b = (self.converted(arm, expr.dtype) for arm in (expr.a, expr.b))
            return f"{self.value(expr.condition, above=1)} ? {a} : {b}"
        return self.reinterpreted(expr) if isinstance(expr, Call) else None

    def is_moved(self, expr: Expr) -> bool:
        """Return whether a small float lies in memory or is made from bits, so that NaN keeps its bits."""
        if isinstance(expr, Select):
            return self.is_moved(expr.a) or self.is_moved(expr.b)
        if isinstance(expr, Call):
            return expr.name == "reinterpret"
        return isinstance(expr, Load) or (isinstance(expr, Var) and expr in self.moved)

    def named(self, let: Let) -> tuple[str, str] | None:
        """Return the C++ type and text of a small float that a name holds as it is stored; None for any other value."""
        value = let.value
        if not is_small(value.dtype) or not self.is_moved(value):
            return None
        self.moved.add(let.var)
        return storage(value.dtype), self.converted(value, value.dtype)

    def stored(self, expr: Load | Var) -> str:
        """Return the C++ text of an element or name as it is stored."""
        return f"tile::copied({self.in_place(expr)})"

    def in_place(self, expr: Load | Var) -> str:
        """Return the C++ text that names an element or a name."""
        return self.names.of(expr) if isinstance(expr, Var) else self.read(expr)

    def reinterpreted(self, call: Call) -> str:
        """Return the C++ text of a value's bits as stored in another type. An element of memory is not decoded."""
        value, of = call.args[0], call.args[0].dtype
        if isinstance(value, Load):
            text = self.read(value)
        else:
            text = self.converted(value, of)
        return f"tile::reinterpret<{storage(call.type)}, {storage(of)}>({text})"

    def unrounded(self, expr: Expr, to: DType) -> str:
        """Return the C++ text of a float that gives `expr` once it is rounded to `to`."""
        (text, own), rounding = self.term(expr, False), f"tile::rounded<{storage(to)}>("
        return text.removeprefix(rounding)[:-1] if own == 99 and text.startswith(rounding) else text

    def update(self, call: Call) -> str:
        """Return the C++ text of an atomic update or load, whose value is the previous one in the element's type."""
        (dtype,) = (a.buffer.dtype for a in call.args if isinstance(a, Address))
        option, element = str(call.options[0]), storage(dtype)
        where, *given = (self.value(a) if isinstance(a, Address) else self.converted(a, dtype) for a in call.args)
        if given:
            return f"tile::atomic_{option}<{element}>({where}, {given[0]})"
        return f"tile::atomic_load<{element}, __ATOMIC_{option.upper()}>({where})"

    def print_call(self, node: Print) -> str:
        """Return the C++ text of a statement that prints a scalar."""
        value = node.value
        if value is None:
            return f'printf("%s\\n", {string(node.message)});'
        if not isinstance(value, Expr):
            raise InternalError("regions are printed element by element", node.span)
        form, kind = ("%g", "double") if value.dtype.is_float else ("%lld", "long long")
        message = node.message.replace("%", "%%")
        text = string(f"{message}: {form}\n" if message else f"{form}\n")
        return f"printf({text}, ({kind}){self.value(value, above=PREFIX)});"

    # Each method is `term` for one kind of node.

    def visit_Var(self, var: Var, wide: bool) -> tuple[str, int]:
        """Write a variable."""
        if var in self.moved:
            return f"tile::widen({self.names.of(var)})", 99
        if wide and not self.is_index(var):
            return f"(int64_t){self.names.of(var)}", PREFIX
        return self.names.of(var), 99

    def visit_Const(self, node: Const, wide: bool) -> tuple[str, int]:
        """Write a constant."""
        return literal(node), 99

    def visit_Load(self, load: Load, wide: bool) -> tuple[str, int]:
        """Write an element."""
        text = self.read(load)
        if is_small(load.dtype):
            return f"tile::widen({text})", 99
        return (f"(int64_t){text}", PREFIX) if wide else (text, 99)

    def visit_Address(self, node: Address, wide: bool) -> tuple[str, int]:
        """Write an address."""
        name, at = self.names.of(node.buffer), self.index(node.indices[0], PRECEDENCE["+"])
        return (name, 99) if at == "0" else (f"{name} + {at}", PRECEDENCE["+"])

    def visit_Unary(self, node: Unary, wide: bool) -> tuple[str, int]:
        """Write an operator with one operand."""
        inner = self.value(node.a, wide, PREFIX)
        if node.op == "not":
            return f"!{inner}", PREFIX
        inner = f" {inner}" if inner.startswith("-") else inner  # not the operator --
        return self._fit(node, f"{node.op}{inner}", PREFIX)

    def visit_Binary(self, node: Binary, wide: bool) -> tuple[str, int]:
        """Write an operator with two operands."""
        integer = node.a.dtype.is_integer
        if node.op in COMPARISONS:
            wide = node.a.dtype in SIGNED and (self._computes(node.a) or self._computes(node.b))
        if node.op in ("//", "%") and not integer:
            name, kind = "floordiv" if node.op == "//" else "floormod", held(node.dtype)
            return self._fit(node, f"tile::{name}<{kind}>({self.value(node.a)}, {self.value(node.b)})", 99)
        naturals = self.is_natural(node.a) and self.is_natural(node.b)
        wide_a, wide_b = (wide or (self.is_index(node) and self._wraps_alone(x)) for x in (node.a, node.b))
        if node.op in ("min", "max") or (node.op in ("//", "%") and not naturals):
            kind = f"<{'int64_t' if wide or self.is_index(node) else storage(node.a.dtype)}>" if integer else ""
            name = {"//": "floordiv", "%": "floormod"}.get(node.op, node.op)
            return f"tile::{name}{kind}({self.value(node.a, wide_a)}, {self.value(node.b, wide_b)})", 99
        if node.op == "+" and isinstance(node.b, Const) and integer and node.b.value < 0:
            opposite = const(-node.b.value, node.b.type)  # the least value of a type has none
            node = Binary("-", node.a, opposite) if opposite.value > 0 else node
        own = PRECEDENCE[node.op]
        a = self.typed(node.a) if node.op in SHIFTS else None  # whose type alone decides the width of the shift
        b = self.divisor(node.b, wide_b) if node.op in ("//", "%") else self.value(node.b, wide_b, own + 1)
        a = a or self.value(node.a, wide_a, own)
        if node.dtype == dt.uint16 and node.op in ("*", "<<"):  # C++ promotes it to int, whose values this may leave
            a = f"(unsigned){self.value(node.a, wide_a, PREFIX)}"
        return self._fit(node, f"{a} {SPELLING.get(node.op, node.op)} {b}", own)

    def divisor(self, expr: Expr, wide: bool) -> str:
        """Return the C++ text of a divisor of naturals: 1 instead of 0, on which a machine would stop."""
        if isinstance(expr, Const) and expr.value != 0:
            return self.value(expr, wide, PRECEDENCE["/"] + 1)
        kind = "int64_t" if wide or self.is_index(expr) else storage(expr.dtype)
        return f"tile::divisor<{kind}>({self.value(expr, wide)})"

    def typed(self, expr: Expr, wide: bool = False) -> str | None:
        """Return the C++ text of a literal that names its 64-bit type, as with `wide`; None if none is needed."""
        if not isinstance(expr, Const) or not expr.dtype.is_integer or not fits_int(expr):
            return None
        if expr.dtype.bits != 64 and not (wide and expr.dtype in SIGNED):
            return None
        return f"({storage(expr.dtype if expr.dtype.bits == 64 else dt.int64)}){literal(expr)}"

    def _wraps_alone(self, expr: Expr) -> bool:
        """Return whether an operand is computed from elements alone, and so would wrap but for the index beside it."""
        return isinstance(expr, Binary | Unary | Select) and not self.is_index(expr)

    def _computes(self, expr: Expr) -> bool:
        """Return whether a signed integer may leave its type on the way to a comparison."""
        return self.is_index(expr) or any(n.op in ("+", "-", "*", "<<") for n in find(expr, Binary))

    def _fit(self, node: Expr, text: str, own: int) -> tuple[str, int]:
        """Convert the result of an operation back into its type."""
        if is_small(node.dtype):
            return f"tile::rounded<{storage(node.dtype)}>({text})", 99
        if node.dtype.is_integer and node.dtype.bits < 32 and not self.is_index(node):
            return f"({storage(node.dtype)})({text})", PREFIX
        return text, own

    def visit_Cast(self, node: Cast, wide: bool) -> tuple[str, int]:
        """Write a conversion."""
        to, of = node.type, node.a.dtype
        if is_small(to) and not is_exact(of, to):
            source = self.value(node.a) if of.is_float else f"(float){self.value(node.a, above=PREFIX)}"
            if to == dt.float8_e5m2 and of != dt.float8_e4m3fn:  # which, unlike e4m3, rounds to infinities
                source = f"tile::finite<{storage(to)}>({source})"
            return f"tile::rounded<{storage(to)}>({source})", 99
        if (of, to) == (dt.int64, dt.int32) and self.is_index(node.a):
            return f"(int64_t)(int32_t){self.value(node.a, True, PREFIX)}", PREFIX
        if is_small(to) or (is_small(of) and to == dt.float32) or (to in SIGNED and self.is_index(node.a)):
            return self.term(node.a, wide)
        if wide and of.is_integer and (of.bits < 32 or (of, to) == (dt.int32, dt.int64)):
            return self.term(node.a, wide)
        if (of.is_float and to.is_integer) or to.kind == "bool":
            text = f"tile::convert<{storage(to)}>({self.value(node.a)})"
            return (f"(int64_t){text}", PREFIX) if wide else (text, 99)
        wide_a = (wide and of in SIGNED) or ((of, to) == (dt.int32, dt.int64) and self._wraps_alone(node.a))
        text = f"({storage(to)}){self.value(node.a, wide_a, PREFIX)}"
        return (f"(int64_t){text}" if wide and to != dt.int64 else text), PREFIX

    def visit_Select(self, node: Select, wide: bool) -> tuple[str, int]:
        """Write a choice."""
        a, b = self.value(node.a, wide, 1), self.value(node.b, wide, 1)
        if isinstance(node.b, Const) and (typed := self.typed(node.a, wide)):
            a = typed  # the type of two plain literals would be int, and so that of what is computed from them
        return f"{self.value(node.condition, above=1)} ? {a} : {b}", 0

    def visit_Call(self, node: Call, wide: bool) -> tuple[str, int]:
        """Write a call."""
        if node.name == "cpu_reduce":
            return self._reduce(node)
        if node.name == "reinterpret":
            return self._reinterpret(node, wide)
        if node.name in ("atomic", "atomic_load"):
            return self._atomic(node)
        if node.name == foreign.NAME:
            return self.foreign(node, foreign.text_of(node, is_cuda=False)), 99
        return self._fit(node, f"tile::{lookup(node.name).cpu}({', '.join(self.operands(node, wide))})", 99)

    def operands(self, call: Call, wide: bool) -> list[str]:
        """Return the C++ texts of a call's operands. Literals alone choose the overload, so they name their type."""
        are_literals = all(isinstance(a, Const) for a in call.args)
        return [(self.typed(a) if are_literals else None) or self.value(a, wide) for a in call.args]

    def foreign(self, node: Call, text: str) -> str:
        """Return the C++ text of a call of a function of the author's `text`; its value is held like others."""
        given = []
        for a in node.args:
            kind = foreign_pointer(a.buffer.dtype, text) if isinstance(a, Address) else ""
            plain = isinstance(a, Address) or is_small(a.dtype)
            given.append(f"{kind}{self.value(a, above=PREFIX if kind else 0)}" if plain else self.converted(a, a.dtype))
        called = f"{foreign.function_of(node)}({', '.join(given)})"
        return f"(float){called}" if is_small(node.dtype) else called

    def _reinterpret(self, node: Call, wide: bool) -> tuple[str, int]:
        """Write a reinterpretation of bits."""
        text = self.reinterpreted(node)
        if is_small(node.type):
            return f"tile::widen({text})", 99
        return (f"(int64_t){text}", PREFIX) if wide and node.type != dt.int64 else (text, 99)

    def _atomic(self, node: Call) -> tuple[str, int]:
        """Write an atomic update."""
        text = self.update(node)
        return (f"tile::widen({text})" if is_small(node.dtype) else text), 99

    def _reduce(self, node: Call) -> tuple[str, int]:
        """Write a reduction of a row."""
        kind, (row, count) = str(node.options[0]), node.args
        if not isinstance(row, Address):
            raise InternalError("cpu_reduce wants an address", node.span)
        source, to = row.buffer.dtype, node.type
        wide = "double" if "float64" in (source.name, to.name) else "float" if to.is_float else "int64_t"
        if source.name == to.name == "uint64":
            wide = "uint64_t"
        names = {
            "absmax": "AbsMax", "abssum": "AbsSum", "bitand": "BitAnd", "bitor": "BitOr", "bitxor": "BitXor",
            "fmax": "MaxNumber", "fmin": "MinNumber", "absfmax": "AbsMaxNumber",
        }  # fmt: skip
        op = names.get(kind, kind.capitalize())
        text = f"tile::reduce<tile::{op}, {wide}>({self.value(row)}, {self.index(count)})"
        if is_small(to):
            return self._fit(node, text, 99)
        return (text, 99) if wide == storage(to) else (f"({storage(to)}){text}", PREFIX)


def reads_memory(expr: Expr) -> bool:
    """Return whether a value depends on memory or variables, so that it may change later."""
    return contains(expr, Load) or contains(expr, Address)


def fits_int(node: Const) -> bool:
    """Return whether a literal of a 64-bit type is printed without a suffix, as an int of C++."""
    return abs(int(node.value)) < 2**31


def is_exact(of: DType, to: DType) -> bool:
    """Return whether one small float has every value of another one, so that a cast changes nothing."""
    return of == to or (of.name, to.name) in (("float8_e4m3fn", "float16"), ("float8_e5m2", "float16"))


def literal(node: Const) -> str:
    """Write a literal in C++."""
    value, to = node.value, node.type
    if to.kind == "bool":
        return "true" if value else "false"
    if to.is_float:
        return _float_literal(float(value), to)
    text = str(value)
    if value == -(2**63):
        return "INT64_MIN"
    if to.bits == 64 and abs(int(value)) >= 2**31:
        text += "ull" if to.kind == "uint" else "ll"
    elif to.kind == "uint" and to.bits == 32:
        text += "u"
    return f"({text})" if int(value) < 0 else text


def _float_literal(value: float, to: DType) -> str:
    """Write a floating constant."""
    double = to.bits == 64
    if math.isnan(value):
        return '__builtin_nan("")' if double else '__builtin_nanf("")'
    if math.isinf(value):
        text = "__builtin_inf()" if double else "__builtin_inff()"
        return f"(-{text})" if value < 0 else text
    text = repr(value) + ("" if double else "f")
    return f"({text})" if math.copysign(1, value) < 0 else text


def string(text: str) -> str:
    """Write a string literal in C++."""
    return '"' + "".join(c if " " <= c <= "~" and c not in '"\\' else _escaped(c) for c in text) + '"'


def _escaped(c: str) -> str:
    """Escape a character of a string literal."""
    known = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
    return known.get(c) or "".join(f"\\{byte:03o}" for byte in c.encode(errors="replace"))
