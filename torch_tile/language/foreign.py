# SPDX-License-Identifier: Apache-2.0
"""The author's own text: functions in CUDA and C++, and PTX instructions, compiled as they stand.

The text is trusted as the kernel is. The compiler does not look inside. A pointer with a declared access,
T.access_ptr(tile[i], "r", 8), tells it the reads and writes. Behind other pointers it assumes both.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.intrinsics.foreign import foreign_call, register_meaning
from torch_tile.ir import dtype as dt
from torch_tile.ir.bits import reinterpret
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.dtype import DType
from torch_tile.ir.expr import Address, Const, Expr, Var, cast, is_number, to_expr
from torch_tile.ir.layout import row_major
from torch_tile.ir.node import find
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Do, Store
from torch_tile.language.asynchronous import in_kernel
from torch_tile.language.rounding import cast_rounded
from torch_tile.language.scopes import Kernel
from torch_tile.language.trace import make_variable, tracer
from torch_tile.language.values import Handle, dtype_of
from torch_tile.tileop.base import Scalar, Tile, region_of

LONGEST_PATH = 4096
ENTRY = r"__global__[^;{]*?\b(\w+)\s*\([^;{]*\)\s*{"
MASKS = {1: "r", 2: "w", 3: "rw"}
VOID = ("handle", "void", "")  # results of calls for their effect
TARGETS = ("cuda", "cpu")
_CONSTRAINTS = {"float32": "f", "float64": "d", "int64": "l", "uint64": "l", "int16": "h", "uint16": "h"}
_HELD = {"float32": "float", "float64": "double", "bool": "bool"} | {
    f"{sign}int{bits}": f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)
}


# Functions of CUDA's headers that convert a value, or name its bits: source and result types, and the rounding.
_TO_HALF, _TO_BFLOAT = ((dt.float32, dt.float16), (dt.float32, dt.bfloat16))
CONVERSIONS: dict[str, tuple[DType, DType, str]] = {
    "__float2half": (*_TO_HALF, "rn"),
    "__float2bfloat16": (*_TO_BFLOAT, "rn"),
    "__half2float": (dt.float16, dt.float32, "rn"),
    "__bfloat162float": (dt.bfloat16, dt.float32, "rn"),
    "__float_as_int": (dt.float32, dt.int32, "bits"),
    "__float_as_uint": (dt.float32, dt.uint32, "bits"),
    "__int_as_float": (dt.int32, dt.float32, "bits"),
    "__uint_as_float": (dt.uint32, dt.float32, "bits"),
    "__half_as_ushort": (dt.float16, dt.uint16, "bits"),
    "__half_as_short": (dt.float16, dt.int16, "bits"),
    "__ushort_as_half": (dt.uint16, dt.float16, "bits"),
    "__short_as_half": (dt.int16, dt.float16, "bits"),
}
CONVERSIONS |= {f"__float2half_{how}": (*_TO_HALF, how) for how in ("rn", "rz", "ru", "rd")}
CONVERSIONS |= {f"__float2bfloat16_{how}": (*_TO_BFLOAT, how) for how in ("rn", "rz", "ru", "rd")}


@dataclass(frozen=True, eq=False)
class Pointer:
    """A pointer argument of a foreign call, with the access that the call makes there: "r", "w" or "rw", and a count
    of elements (-1: any).
    """

    address: Address
    kind: str
    elements: int


def access_ptr(
    base: Tile,
    access_type: str | int = "r",
    *extents: Any,
    offset: Scalar = 0,
    extent: int | None = None,
    ignore_last_ndim: int = 0,
) -> Pointer:
    """Make a pointer for T.call_extern and T.ptx_...: to `base`, an element, or the first of a slice or buffer.

    The call reads or writes `extent` elements from there on, by `access_type`: "r" (1), "w" (2), or "rw" (3) for both.
    With `extents` it is as many as their product. Without them that is the slice, or the one element. `offset` elements
    are skipped. `ignore_last_ndim` has to be 0.
    """
    region, kind = region_of(base), MASKS.get(access_type, access_type) if isinstance(access_type, int) else access_type
    why = ""
    if region is None:
        name, why, fix = "base", f"is {base!r}"[:80], "give an element A[i, j], a slice or a buffer"
    elif kind not in MASKS.values():
        name, why, fix = "access_type", f"is {access_type!r}", 'give "r", "w" or "rw"'
    elif ignore_last_ndim:
        name, why, fix = "ignore_last_ndim", f"is {ignore_last_ndim!r}", "give the element that the pointer begins at"
    if why:
        raise error("bad_argument", None, op="T.access_ptr", name=name, why=why, fix=fix)
    assert region is not None
    sizes = extents[0] if len(extents) == 1 and isinstance(extents[0], tuple | list) else extents
    count = [extent] if extent is not None else list(sizes) or list(region.extents)
    return Pointer(_advanced(Address(region.buffer, region.starts), offset), str(kind), _product(count))


def tvm_access_ptr(ptype: Any, data: Tile, offset: Scalar, extent: Scalar, rw_mask: str | int) -> Pointer:
    """Return `T.access_ptr` as TIR spells it: `offset` and `extent` count elements from the first one of `data`.

    `rw_mask` is 1 to read, 2 to write, 3 for both; `ptype` gives the type of the elements.
    """
    return access_ptr(data, rw_mask, offset=offset, extent=extent)


def _product(sizes: Sequence[Any]) -> int:
    """Return the number of elements, or -1 if only the device knows it."""
    total = 1
    for size in sizes:
        value = simplify(to_expr(size))
        if not isinstance(value, Const):
            return -1
        total *= int(value.value)
    return total


def _advanced(address: Address, offset: Scalar) -> Address:
    """Advance an address by some elements, row by row."""
    if is_number(offset) and offset == 0:
        return address
    *outer, last = address.indices
    if len(outer) and not all(isinstance(i, Const) and i.value == 0 for i in address.indices):
        return Address(address.buffer, (*outer, simplify(last + offset)))
    rest, indices = to_expr(offset), []
    for size in reversed(address.buffer.shape[1:]):
        indices.append(simplify(rest % size))
        rest = rest // size
    first = simplify(rest + last) if not outer else simplify(rest)
    return Address(address.buffer, (first, *reversed(indices)))


def import_source(source: str | None = None, target: str = "cuda") -> None:
    """Add `source`, CUDA or C++ text, in front of the kernel; T.call_extern can call its functions.

    `target` is "cuda" or "cpu". The text is compiled as it stands, in front of the kernels of this function that call
    something of it. Types of 16 and 8 bits are CUDA's own where the text names them (`__half`, `__nv_bfloat16`), else
    `tile::f16` and `tile::bf16`.
    """
    at = tracer("T.import_source")
    if source is None:
        return
    for name, value, good, fix in (
        ("source", source, isinstance(source, str), "give text"),
        ("target", target, target in TARGETS, 'give "cuda" or "cpu"'),
    ):
        if not good:
            raise error("bad_argument", None, op="T.import_source", name=name, why=f"is {value!r}"[:80], fix=fix)
    if source not in at.sources.setdefault(target, []):
        at.sources[target].append(source)


def call_extern(
    *operands: Any,
    dtype: Any = None,
    func_name: Any = None,
    effects: dict[int, str] | None = None,
    evaluate: Callable[..., Any] | None = None,
) -> Expr | None:
    """Call the function `func_name` of T.import_source's text, once by each thread that comes here.

    `T.call_extern(dtype, func_name, *operands)`, or either of the first two by name and the others in this order.

    Conversions of CUDA's headers, such as `__float2half_rz`, need no text.

    Arguments are numbers, expressions and pointers. T.access_ptr(A[i], "r", 8) declares the access. Behind T.address_of
    and buffers anything may be read and written. `effects` declares accesses by the argument's number: `{0: "w"}` of
    any elements, `{1: "r 4"}` of four. The call gives a value of `dtype`. It gives None if that is "handle" or the text
    declares the function as `void`.

    `evaluate(*operands)` is the call's meaning for the interpreters, which cannot look inside. It takes numbers, and
    for each pointer a NumPy array of its elements. Types of 16 and 8 bits come as float32. It returns the value.
    """
    given = list(operands)
    dtype = given.pop(0) if dtype is None and given else dtype
    func_name = given.pop(0) if func_name is None and given else func_name
    return _call("T.call_extern", dtype, func_name, given, effects, evaluate)


def call_pure_extern(
    dtype: Any, func_name: Any = None, *operands: Any, evaluate: Callable[..., Any] | None = None
) -> Expr | None:
    """Call T.call_extern's `func_name` on `operands`, a function that writes nothing. `evaluate` is as there.

    Behind pointers with no declared access it only reads."""
    given = [Pointer(a.address, "r", a.elements) if isinstance(a, Pointer) else a for a in map(_argument, operands)]
    return _call("T.call_pure_extern", dtype, func_name, given, None, evaluate)


def _call(
    what: str,
    dtype: Any,
    name: Any,
    args: Sequence[Any],
    effects: dict[int, str] | None,
    evaluate: Callable[..., Any] | None,
) -> Expr | None:
    """Record a call of a function of the author's text."""
    at = in_kernel(what)
    if isinstance(dtype, str) and not isinstance(name, str) and dtype not in dt.BY_NAME and dtype not in VOID:
        args, name, dtype = ([] if name is None else [name, *args]), dtype, "handle"  # the name alone
    if not isinstance(name, str) or not re.fullmatch(r"[\w:<>, ]+", name):
        why, fix = f"is {name!r}"[:80], "give the name of a function in the text of T.import_source"
        raise error("bad_argument", None, op=what, name="func_name", why=why, fix=fix)
    cuda, cpu = ("\n".join(at.sources.get(target, [])) for target in TARGETS)
    if name in CONVERSIONS and not re.search(rf"\b{name}\b", cuda + cpu):
        return _converted(what, name, args, dtype)
    return emit_call(what, name, args, dtype, cuda, cpu, effects, evaluate)


def _converted(what: str, name: str, args: Sequence[Any], dtype: Any) -> Expr:
    """Return the value of a conversion of CUDA's, which needs no text and means the same on every target."""
    of, to, how = CONVERSIONS[name]
    if len(args) != 1:
        why, fix = f"are {len(args)} for `{name}`", "give the one value to convert"
        raise error("bad_argument", None, op=what, name="args", why=why, fix=fix)
    value = cast(to_expr(args[0], op=what), of)
    return cast(reinterpret(value, to) if how == "bits" else cast_rounded(value, to, how, None, None), dtype_of(dtype))


def emit_call(
    what: str,
    name: str,
    args: Sequence[Any],
    dtype: Any,
    cuda: str,
    cpu: str,
    effects: dict[int, str] | None,
    evaluate: Callable[..., Any] | None,
) -> Expr | None:
    """Record the call of a function of foreign text; gives its value by name."""
    at = in_kernel(what)
    if at.doubtful:
        why, fix = f"is wanted only if {at.doubtful} asks for it", "write it in a line before"
        raise error("bad_argument", None, op=what, name="func_name", why=why, fix=fix)
    operands, accesses = [], []
    for number, given in enumerate(map(_argument, args)):
        if isinstance(given, Pointer):
            kind, elements = _declared(what, (effects or {}).get(number), given)
            operands.append(given.address)
            accesses.append(f"{kind} {elements}")
        else:
            operands.append(given)
            accesses.append("")
    declared = rf"\bvoid\s+{re.escape(name.partition('<')[0])}\s*\("
    is_void = (isinstance(dtype, str) and dtype in VOID) or re.search(declared, cuda or cpu) is not None
    result = dt.int32 if is_void else dtype_of(dtype)
    call = foreign_call(name, operands, result, accesses, cuda, cpu)
    if evaluate is not None:
        register_meaning(call, evaluate)
    if is_void:
        at.emit(Do(call))
        return None
    found = make_variable("found", result, None)
    at.emit(Store(found.buffer, (), call))
    return found


def _declared(what: str, text: str | None, given: Pointer) -> tuple[str, int]:
    """Return the access that an author declares for a pointer."""
    if text is None:
        return given.kind, given.elements
    found = re.fullmatch(r"(r|w|rw)(?: (\d+))?", str(text))
    if found is None:
        fix = 'give "r", "w" or "rw", and a number of elements after a space if it is known'
        raise error("bad_argument", None, op=what, name="effects", why=f"has {text!r}", fix=fix)
    return found[1], int(found[2] or -1)


def _argument(given: Any) -> Any:
    """Convert an argument to a pointer or a value."""
    if isinstance(given, Pointer):
        _lay_out_row_major(given.address.buffer)
        return given
    if isinstance(given, Address):
        _lay_out_row_major(given.buffer)
        return Pointer(given, "rw", -1)
    if isinstance(given, Expr) or is_number(given):  # an element is its value, as C has it
        return to_expr(given)
    region = region_of(given)
    if region is None:
        fix = "give numbers, expressions, buffers, and pointers of T.access_ptr or T.address_of"
        raise error("bad_argument", None, op="T.call_extern", name="operands", why=f"has {given!r}"[:80], fix=fix)
    _lay_out_row_major(region.buffer)
    return Pointer(Address(region.buffer, region.starts), "rw", -1)


def _lay_out_row_major(buffer: Buffer) -> None:
    """Give a tile that foreign text reads a row-major layout, unless its author asks for another layout."""
    if buffer.scope == "fragment":
        why = f"is in `{buffer.name}`, a fragment, whose elements the compiler shares out among threads"
        fix = "give what T.alloc_local or T.alloc_shared makes"
        raise error("bad_argument", None, op="T.call_extern", name="operands", why=why, fix=fix)
    shape = buffer.static_shape
    if buffer.scope == "shared" and buffer.layout is None and shape:
        object.__setattr__(buffer, "layout", row_major(shape))


# Kernels that are text as a whole.


def CUDASourceCodeKernel(
    *blocks: Any,
    threads: int | Sequence[int] | None = None,
    source_code_or_path: str | os.PathLike[str],
    entry_name: str | None = None,
    cluster_dims: int | Sequence[int] | None = None,
    prelude: str | None = None,
) -> None:
    """Launch the function `entry_name` of `source_code_or_path`, a CUDA text or file, in place of T.Kernel.

    Without a name it is the text's only function, or "main_kernel".

    It takes the parameters of the function around in their order, tensors as pointers, then those of T.empty. Behind
    them it may take the sizes that T.dynamic names in their shapes, each once, as int. `blocks`,
    `threads` and `cluster_dims` are T.Kernel's; `prelude` is text to go before. It declares its shared memory itself,
    with a size. Tensors that it takes as `const` pointers are only read. GPUs only; interpreters cannot run it.
    """
    what, at = "T.CUDASourceCodeKernel", tracer("T.CUDASourceCodeKernel")
    text = str(source_code_or_path)
    if "\n" not in text and len(text) < LONGEST_PATH and Path(text).is_file():
        text = Path(text).read_text()
    text = re.sub(r"__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)", "", text)
    entries = re.findall(ENTRY, text)
    if entry_name is None:
        entry_name = entries[0] if len(entries) == 1 else "main_kernel"
    found = re.search(rf"\b{re.escape(str(entry_name))}\s*\(([^()]*)\)\s*{{", text)
    if entry_name not in entries or found is None:
        why, known = f"is {entry_name!r}", ", ".join(entries) or "none"
        fix = f"give one of the text's `__global__` functions. Available entries: {known}"
        raise error("bad_argument", None, op=what, name="entry_name", why=why, fix=fix)
    given = [*at.params, *at.made]
    declared = [part.strip() for part in found[1].split(",") if part.strip()]
    sizes = list(dict.fromkeys(n for b in given if isinstance(b, Buffer) for e in b.shape for n in find(e, Var)))
    if len(declared) == len(given) + len(sizes):
        given += sizes
    if len(declared) != len(given):
        why = f"takes {len(declared)} parameters, and the function around has {len(given)}"
        fix = f"declare {', '.join(p.name for p in given)}, in this order"
        raise error("bad_argument", None, op=what, name="source_code_or_path", why=why, fix=fix)
    effects = {n: "r" if re.match(r"const\b[^*]*\*", part) else "rw" for n, part in enumerate(declared)}
    # The launched function is the compiler's own; it calls this one, which becomes an ordinary function for that.
    function = re.sub(r"\b__global__\b", "__device__", text)
    whole = "\n".join([*([prelude] if prelude else []), function])
    with Kernel(*blocks, threads=threads, cluster_dims=cluster_dims):
        args = [Handle(p) if isinstance(p, Buffer) else p for p in given]
        emit_call(what, str(entry_name), args, "handle", whole, "", effects, None)


# Instructions of PTX.


def ptx(
    instruction: str,
    *operands: Any,
    dtype: Any = "handle",
    effects: dict[int, str] | None = None,
    evaluate: Callable[..., Any] | None = None,
) -> Expr | None:
    """Run PTX, `instruction`, on `operands` in each thread that comes here.

    An example is `T.ptx("ex2.approx.f32 %0, %1;", x, dtype="float32")`.

    `%0` is the result of type `dtype`, if there is one, and the arguments follow it. Pointers are 64-bit registers of
    global memory, 32-bit ones of shared memory; arrays of T.alloc_local are not given. `effects` and `evaluate` are as
    for T.call_extern. GPUs only.
    """
    what = "T.ptx"
    is_void = isinstance(dtype, str) and dtype in VOID
    result = None if is_void else dtype_of(dtype)
    if not isinstance(instruction, str):
        why, fix = f"is {instruction!r}"[:80], "give text of PTX"
        raise error("bad_argument", None, op=what, name="instruction", why=why, fix=fix)
    given = [_argument(a) for a in operands]
    inputs, parameters = [], []
    for n, one in enumerate(given):
        if isinstance(one, Pointer):
            shared = one.address.buffer.scope == "shared"
            if one.address.buffer.scope not in ("shared", "global"):
                why, fix = "has an array of registers", "give its elements"
                raise error("bad_argument", None, op=what, name="operands", why=why, fix=fix)
            parameters.append(f"const void* a{n}")
            inputs.append(f'"r"((unsigned)__cvta_generic_to_shared(a{n}))' if shared else f'"l"(a{n})')
        else:
            parameters.append(f"{_held(what, one.dtype)} a{n}")
            inputs.append(f'"{_constraint(one.dtype)}"(a{n})')
    name = f"ptx_{hashlib.sha256(f'{instruction}{parameters}{result}'.encode()).hexdigest()[:8]}"
    quoted = '"' + instruction.replace("\\", "\\\\").replace('"', '\\"').replace("\n", '\\n"\n"') + '"'
    held = "void" if result is None else _held(what, result)
    output = "" if result is None else f'"={_constraint(result)}"(found)'
    lines = [
        f"__device__ __forceinline__ {held} {name}({', '.join(parameters)}) {{",
        *([] if result is None else [f"  {held} found;"]),
        f'  asm volatile({quoted} : {output} : {", ".join(inputs)} : "memory");',
        *([] if result is None else ["  return found;"]),
        "}",
    ]
    return emit_call(what, name, given, dtype, "\n".join(lines), "", effects, evaluate)


def _constraint(dtype: DType) -> str:
    """Return the inline-assembly constraint of a dtype."""
    return _CONSTRAINTS.get(dtype.name, "r")


def _held(what: str, dtype: DType) -> str:
    """Return the C++ type of an operand."""
    if dtype.name not in _HELD:
        why, fix = f"is of {dtype}", "give its bits, by T.reinterpret(x, 'uint16')"
        raise error("bad_argument", None, op=what, name="operands", why=why, fix=fix)
    return _HELD[dtype.name]


__all__ = [
    "CUDASourceCodeKernel", "Pointer", "access_ptr", "call_extern", "call_pure_extern", "import_source", "ptx",
    "tvm_access_ptr",
]  # fmt: skip
