# SPDX-License-Identifier: Apache-2.0
"""Emulate narrow types by types that every target has: int4, float4_e2m1fn, float8_e8m0fnu, ..., tfloat32.

A value of a narrow float is held as float32, one of a narrow integer as int8 or uint8. Conversions and operators round
to the nearest value of the type, halves to even (tfloat32: away from zero), and saturate. Integers wrap in narrow ones.
float4_e2m1fn has no NaN and takes its greatest value for it. float8_e8m0fnu has no sign and no zero: it takes the power
of two nearest to the magnitude.

Tiles hold narrow floats as float16, which has all of their values (float8_e8m0fnu as bfloat16, tfloat32 as float32).
Products use the instructions of those types. Tensors hold bytes. Types of 4 or 2 bits are packed along the last
dimension, the first element lowest. Copies out of tiles write whole bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Never

from torch_tile import intrinsics
from torch_tile.diagnostics.errors import TileError, error
from torch_tile.ir import dtype as dt
from torch_tile.ir.arith_util import divides
from torch_tile.ir.bits import reinterpret
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.dtype import NARROW_FORMATS, DType
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
    binary,
    cast,
    const,
    is_constant,
    is_zero,
    maximum,
    minimum,
    select,
    unary,
)
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Node, Rewriter, find, rebuilt, with_fields
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Alloc, Block, For, Kernel, Let, LoopKind, Program, Stmt, Store, TileOp
from torch_tile.language.trace import Replaced
from torch_tile.tileop.base import parallel, spread, squeezed
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.fill import Fill
from torch_tile.tileop.gemm.op import Gemm
from torch_tile.tileop.reduce.op import Reduce

ORDERED = ("max", "min", "absmax")  # reductions whose result is one of the elements


def is_narrow(dtype: DType) -> bool:
    """Return whether targets store a type in another one."""
    return dtype in dt.NARROW


def carrier(dtype: DType) -> DType:
    """Return the type in which values of a narrow type are computed."""
    return dt.float32 if dtype.is_float else dt.BY_NAME[f"{dtype.kind}8"]


def container(dtype: DType) -> DType:
    """Return the element type of the tile that stores a narrow type."""
    if not dtype.is_float or dtype == dt.tfloat32:
        return carrier(dtype)
    return dt.bfloat16 if dtype == dt.float8_e8m0fnu else dt.float16


def per_byte(dtype: DType) -> int:
    """Return how many elements share a byte of a tensor."""
    return max(1, 8 // dtype.bits)


# Values: rounded, read from bits, written as bits.


def rounded(x: Expr, dtype: DType) -> Expr:
    """Round `x`, a value of any type but a narrow one, to `dtype`, and return it in the carrier's type."""
    if not dtype.is_float:
        if x.dtype.is_float:
            first, last = dt.limits(dtype)
            return cast(minimum(maximum(cast(x, dt.int32), first), last), carrier(dtype))
        x, mask = cast(x, dt.int32), (1 << dtype.bits) - 1
        half = 1 << (dtype.bits - 1) if dtype.kind == "int" else 0
        return cast(((x + half) & mask) - half, carrier(dtype))
    x = cast(x, dt.float32)
    word = reinterpret(x, dt.uint32)
    size = word & 0x7FFFFFFF
    if dtype == dt.float8_e8m0fnu:
        return decoded(_exponent(size), dtype)
    digits, least, greatest = NARROW_FORMATS[dtype.name]
    drop, is_tf32 = 24 - digits, dtype == dt.tfloat32
    tie = (size >> drop) & 1 if not is_tf32 else const(1, dt.uint32)
    near = reinterpret(((size + ((1 << (drop - 1)) - 1) + tie) >> drop) << drop, dt.float32)
    if not is_tf32:
        step = math.ldexp(1.0, least - digits + 1)
        low = intrinsics.call("round", reinterpret(size, dt.float32) * (1 / step)) * step
        near = select(size < _power_bits(math.ldexp(1.0, least)), low, near)
        near = select(near > greatest, const(greatest, dt.float32), near)
    special = const(greatest, dt.float32) if dtype == dt.float4_e2m1fn else x  # of NaN
    signed = select((word >> 31) != 0, -near, near)
    if dtype.name.endswith("fnuz"):
        signed = select(binary("==", near, 0.0), const(0.0, dt.float32), signed)
    return select(size > 0x7F800000 if not is_tf32 else size >= 0x7F800000, special, signed)


def _exponent(size: Expr) -> Expr:
    """Encode a magnitude, given by its bits, as float8_e8m0fnu."""
    small = select(size >= 0x600000, const(1, dt.uint32), const(0, dt.uint32))
    code = select(size < 0x800000, small, (size + 0x400000) >> 23)
    code = select(code > 254, const(254, dt.uint32), code)
    return select(size >= 0x7F800000, const(255, dt.uint32), code)


def _power_bits(value: float) -> int:
    """Return the bits of a power of two as float32."""
    return (math.frexp(value)[1] + 126) << 23


def decoded(code: Expr, dtype: DType) -> Expr:
    """Decode the value whose bits are the lowest of `code`."""
    if not dtype.is_float:
        return rounded(code, dtype)
    code = cast(code, dt.uint32)
    if dtype == dt.float8_e8m0fnu:
        word = select(binary("==", code, 255), const(0x7FC00000, dt.uint32), code << 23)
        return reinterpret(select(binary("==", code, 0), const(0x400000, dt.uint32), word), dt.float32)
    digits, least, _ = NARROW_FORMATS[dtype.name]
    sign = dtype.bits - 1
    size = code & ((1 << sign) - 1)
    near = reinterpret((size << (24 - digits)) + ((126 + least) << 23), dt.float32)
    low = cast(size, dt.float32) * math.ldexp(1.0, least - digits + 1)
    near = select(size < (1 << (digits - 1)), low, near)
    signed = select(((code >> sign) & 1) != 0, -near, near)
    if dtype.name.endswith("fnuz"):
        signed = select(binary("==", code, 1 << sign), const(math.nan, dt.float32), signed)
    return signed


def encoded(value: Expr, dtype: DType) -> Expr:
    """Encode a value of `dtype` as bits in a uint32."""
    if not dtype.is_float:
        return cast(cast(value, dt.int32) & ((1 << dtype.bits) - 1), dt.uint32)
    word = reinterpret(value, dt.uint32)
    if dtype == dt.float8_e8m0fnu:
        return (word >> 23) & 255
    digits, least, _ = NARROW_FORMATS[dtype.name]
    size = word & 0x7FFFFFFF
    low = cast(reinterpret(size, dt.float32) * math.ldexp(1.0, digits - 1 - least), dt.uint32)
    high = (size >> (24 - digits)) - ((126 + least) << (digits - 1))
    code = select(size < _power_bits(math.ldexp(1.0, least)), low, high) | ((word >> 31) << (dtype.bits - 1))
    is_nan = dtype.name.endswith("fnuz")
    return select(size > 0x7F800000, const(0x80, dt.uint32), code) if is_nan else code


def widen(program: Program) -> Program:
    """Replace the narrow types of `program` by types of the target. Return the same object if it has none."""
    buffers = (*program.params, *program.workspaces, *program.outputs)
    used = any(isinstance(b, Buffer) and is_narrow(b.dtype) for b in buffers)
    if not used and not any(_uses(node) for node in find(program, Cast, Const, Call, Alloc, Let)):
        return program
    return _Wide().program(program)


def container_parameter(param: Buffer) -> Buffer:
    """Return the parameter that holds a narrow `param`: bytes for float4. Return other parameters as they are."""
    return _Wide().buffer(param)


def _uses(node: Node) -> bool:
    """Return whether a node has a narrow type."""
    if isinstance(node, Alloc):
        return is_narrow(node.buffer.dtype)
    return is_narrow(node.var.dtype if isinstance(node, Let) else node.dtype)  # type: ignore[attr-defined]


def _refuse(node: Node, what: str, dtype: DType, fix: str) -> Never:
    """Raise the error for a use of a narrow type that is not supported."""
    raise error("narrow_type", node.span, what=what, dtype=dtype, fix=fix)


class _Wide(Rewriter):
    """Rewrite expressions of narrow types to expressions of their carriers, and their buffers to containers."""

    def __init__(self) -> None:
        self.buffers = IdMap[Buffer, Buffer]()
        self.vars = IdMap[Var, Var]()
        self.nests: list[For] = []  # the T.Parallel loops around
        self.of_threads = IdSet[Var]()  # names of values that differ between threads
        self.named = IdMap[Var, Expr]()  # the values of the names around
        self.begins = IdMap[Var, Expr]()  # by variables of loops around: where these begin, and a step
        self.blocks = IdSet[Var]()  # the indices of several blocks

    def program(self, program: Program) -> Program:
        """Rewrite all kernels and their tensors."""
        params = tuple(self.buffer(p) if isinstance(p, Buffer) else self.visit_Var(p) for p in program.params)
        workspaces, outputs, views = (
            tuple(map(self.buffer, group)) for group in (program.workspaces, program.outputs, program.views)
        )
        kernels = tuple(self(kernel) for kernel in program.kernels)
        return replace(program, params=params, kernels=kernels, workspaces=workspaces, outputs=outputs, views=views)

    def buffer(self, old: Buffer) -> Buffer:
        """Return the buffer that stores the elements of `old`."""
        if not is_narrow(old.dtype) and old.base is None:
            return old
        if old not in self.buffers:
            self.buffers[old] = self._held(old)
        return self.buffers[old]

    def _held(self, old: Buffer) -> Buffer:
        """Return the buffer that stores a narrow buffer: packed bytes in memory, a wider type on chip."""
        base = None if old.base is None else self.buffer(old.base)
        if not is_narrow(old.dtype):
            return with_fields(old, base=base)
        if old.scope != "global":
            return replace(old, dtype=container(old.dtype))
        seen = None if base is not None else old.dtype
        if old.dtype == dt.tfloat32:
            return replace(old, dtype=dt.float32, seen_as=seen, base=base)
        count = per_byte(old.dtype)
        shape, strides = old.shape, old.strides
        if count > 1:
            if not shape or (strides is not None and not is_constant(strides[-1], 1)):
                why = f"is of {old.dtype}, of which {count} share a byte"
                fix = "give it a last dimension whose stride is 1"
                raise error("bad_argument", old.span, op="T.Tensor", name=f"`{old.name}`", why=why, fix=fix)
            last = shape[-1]
            length = simplify(last // count if divides(count, last) else (last + (count - 1)) // count)
            if not isinstance(length, Const):
                length = Binary("//", last, const(count, last.dtype))
            shape = (*shape[:-1], length)
            strides = None if strides is None else (*(simplify(s // count) for s in strides[:-1]), strides[-1])
        return replace(old, dtype=dt.uint8, shape=shape, strides=strides, seen_as=seen, base=base)

    def visit_Buffer(self, node: Buffer) -> Buffer:
        """Return the buffer that holds its elements."""
        return self.buffer(node)

    # Expressions.

    def visit_Var(self, node: Var) -> Var:
        """Return a name of the carrier's type."""
        if not is_narrow(node.dtype):
            return node
        if node not in self.vars:
            self.vars[node] = replace(node, type=carrier(node.dtype))
        return self.vars[node]

    def visit_Const(self, node: Const) -> Expr:
        """Return the literal in the carrier's type."""
        return const(node.value, carrier(node.type)) if is_narrow(node.type) else node

    def visit_Cast(self, node: Cast) -> Expr:
        """Convert the carrier, and round it to the narrow type."""
        value = self(node.a)
        if is_narrow(node.type):
            return value if node.a.dtype == node.type else rounded(value, node.type)
        return cast(value, node.type) if is_narrow(node.a.dtype) else rebuilt(node, a=value)

    def visit_Unary(self, node: Unary) -> Expr:
        """Apply the operator to the carrier, and round the result."""
        if not is_narrow(node.a.dtype):
            return self.children(node)
        found = unary(node.op, self(node.a))
        return rounded(found, node.dtype) if is_narrow(node.dtype) else found

    def visit_Binary(self, node: Binary) -> Expr:
        """Apply the operator to the carriers, and round the result."""
        if not is_narrow(node.a.dtype):
            return self.children(node)
        a, b = self(node.a), self(node.b)
        if node.op in COMPARISONS or node.op in LOGICAL or node.op in ("min", "max"):
            return binary(node.op, a, b)
        if not node.a.dtype.is_float:
            a, b = cast(a, dt.int32), cast(b, dt.int32)
        return rounded(binary(node.op, a, b), node.dtype)

    def visit_Select(self, node: Select) -> Expr:
        """Choose between carriers."""
        return rebuilt(node, condition=self(node.condition), a=self(node.a), b=self(node.b))

    def visit_Call(self, node: Call) -> Expr:
        """Call the function on carriers, and round its result. T.reinterpret reads and writes the bits."""
        narrow = [a.dtype for a in node.args if is_narrow(a.dtype)]
        args = tuple(map(self, node.args))
        if not narrow and not is_narrow(node.type):
            return self.children(node)
        if node.name == "reinterpret" and dt.tfloat32 not in (*narrow, node.type):
            code = encoded(args[0], narrow[0]) if narrow else cast(args[0], dt.uint32)
            if is_narrow(node.type):
                return decoded(code, node.type)
            if not node.type.is_float:
                return cast(code, node.type)
            return reinterpret(cast(code, dt.BY_NAME[f"uint{node.type.bits}"]), node.type)
        if not is_narrow(node.type):
            return rebuilt(node, args=args)
        return rounded(rebuilt(node, args=args, type=carrier(node.type)), node.type)

    def visit_Load(self, node: Load) -> Expr:
        """Load an element of a packed dtype, and decode its bits to the dtype that arithmetic uses."""
        old, indices = node.buffer, tuple(map(self, node.indices))
        held = Load(self.buffer(old), indices)
        if not is_narrow(old.dtype):
            return rebuilt(node, buffer=held.buffer, indices=indices)
        if old.scope != "global" or old.dtype == dt.tfloat32:
            return cast(held, carrier(old.dtype))
        count = per_byte(old.dtype)
        if count == 1:
            return decoded(held, old.dtype)
        byte = Load(held.buffer, (*indices[:-1], indices[-1] // count))
        place = cast(indices[-1] % count * old.dtype.bits, dt.uint32)
        return decoded((cast(byte, dt.uint32) >> place) & ((1 << old.dtype.bits) - 1), old.dtype)

    def visit_Address(self, node: Address) -> Expr:
        """Return the address of a byte of a tensor. Packed types and tiles in wider types have no such address."""
        old = node.buffer
        if is_narrow(old.dtype) and old.dtype != dt.tfloat32 and (old.scope != "global" or per_byte(old.dtype) > 1):
            _refuse(node, f"the address of an element of `{old.name}`", old.dtype, "view a tile of uint8 by T.view")
        return self.children(node)

    def _is_of_threads(self, index: Expr, body: Block | None = None) -> bool:
        """Return whether an index differs between threads, given the names of enclosing statements and of `body`."""
        names = [s for s in body.stmts if isinstance(s, Let)] if body is not None else []
        inside = Replaced(IdMap((s.var, s.value) for s in names))(index)
        return any(v.role == "thread" or v in self.of_threads for v in find(inside, Var))

    def _shares_bytes(self, index: Expr, count: int) -> bool:
        """Return whether several blocks may store to one byte of `count` elements, by the last index of a store."""
        full = Replaced(IdMap([*self.named.items(), *self.begins.items()]))(index)
        first = Replaced(IdMap((block, const(0, dt.int32)) for block in self.blocks))(full)
        moved = simplify(full - first)
        return not (is_zero(moved) or divides(count, moved))

    # Statements.

    def visit_Kernel(self, kernel: Kernel) -> Kernel:
        """Rewrite a kernel, whose grid says which block indices take several values."""
        several = (not is_constant(size, 1) for size in kernel.grid)
        self.blocks = IdSet(block for block, is_several in zip(kernel.blocks, several, strict=True) if is_several)
        new: Kernel = self.children(kernel)
        return new

    def visit_Let(self, node: Let) -> Let:
        """Name a value of the carrier's type."""
        self.named[node.var] = node.value
        if self._is_of_threads(node.value):
            self.of_threads.add(node.var)
        return rebuilt(node, var=self.visit_Var(node.var), value=self(node.value))

    def visit_Alloc(self, node: Alloc) -> Alloc:
        """Return a tile of the container's type."""
        held = self.buffer(node.buffer)
        at_address = node.buffer.scope == "global"
        init = None if node.init is None else self(node.init) if at_address else cast(self(node.init), held.dtype)
        return rebuilt(node, buffer=held, init=init)

    def visit_Store(self, node: Store) -> Stmt:
        """Store the value in the container's form."""
        old, value, indices = node.buffer, self(node.value), tuple(map(self, node.indices))
        held = self.buffer(old)
        if not is_narrow(old.dtype):
            return rebuilt(node, buffer=held, indices=indices, value=value)
        if old.scope != "global" or old.dtype == dt.tfloat32:
            return Store(held, indices, cast(value, held.dtype))
        count = per_byte(old.dtype)
        if count == 1:
            return Store(held, indices, cast(encoded(value, old.dtype), held.dtype))
        if self.nests or any(self._is_of_threads(index) for index in node.indices):
            fix = "write neighbours in one iteration of T.Parallel, or copy a tile by T.copy"
            _refuse(node, f"a store to `{old.name}` by threads side by side", old.dtype, fix)
        if self._shares_bytes(node.indices[-1], count):
            fix = f"let each block write whole bytes: {count} neighbours by a nest of T.Parallel, or a tile by T.copy"
            _refuse(node, f"a store to `{old.name}` by blocks side by side", old.dtype, fix)
        place, mask = indices[-1] % count * old.dtype.bits, (1 << old.dtype.bits) - 1
        at = (*indices[:-1], indices[-1] // count)
        place = cast(place, dt.uint32)
        rest = cast(Load(held, at), dt.uint32) & ~(const(mask, dt.uint32) << place)
        return Store(held, at, cast(rest | (encoded(value, old.dtype) << place), held.dtype))

    def visit_For(self, node: For) -> Stmt:
        """Rewrite a loop. If it stores packed elements beside other threads, one iteration writes whole bytes."""
        packed = [s for s in node.body.stmts if isinstance(s, Store) and _is_packed(s.buffer)]
        beside = node.kind is LoopKind.PARALLEL or bool(self.nests)
        if packed and (beside or any(self._is_of_threads(i, node.body) for s in packed for i in s.indices)):
            return self._by_bytes(node, packed)
        if node.kind is not LoopKind.PARALLEL:
            for var, start in zip(node.vars, node.starts, strict=True):
                self.begins[var] = start + Var(var.name, var.type, "loop")
            return self.children(node)
        self.nests.append(node)
        try:
            return self.children(node)
        finally:
            self.nests.pop()

    def _by_bytes(self, node: For, packed: Sequence[Store]) -> Stmt:
        """Group the iterations of a nest, so that one iteration handles all elements of a byte."""
        last, stop = node.vars[-1], node.stops[-1]
        counts = {per_byte(s.buffer.dtype) for s in packed}
        count = max(counts)
        inline = Replaced(IdMap((s.var, s.value) for s in node.body.stmts if isinstance(s, Let)))
        read = [load for load in find(node.body, Load) if any(load.buffer is s.buffer for s in packed)]
        at_zero = is_zero(node.starts[-1]) and node.step == 1
        whole = not read and len(counts) == 1 and at_zero and divides(count, stop)
        for store in packed:
            first = simplify(Replaced(self.named)(inline(store.indices[-1])) - last)
            whole = whole and divides(count, first) and not any(v is last for v in find(first, Var))
            whole = whole and not any(v is last for index in store.indices[:-1] for v in find(inline(index), Var))
        if not whole:
            fix = f"store {count} neighbours, of aligned bytes, by the last variable of the loop, or use T.copy"
            _refuse(packed[0], f"a loop that stores to `{packed[0].buffer.name}`", packed[0].buffer.dtype, fix)
        group = Var(last.name, last.type, "loop")
        stmts: list[Stmt] = []
        bytes_: IdMap[Stmt, Expr] = IdMap()
        self.nests.append(node)
        for lane in range(count):
            here = Replaced(IdMap([(last, group * count + lane)]))
            for one in node.body.stmts:
                if isinstance(one, Let):
                    continue
                moved = here(inline(one))
                if one not in bytes_ and not any(one is p for p in packed):
                    stmts.append(self(moved))
                    continue
                code = encoded(self(moved.value), moved.buffer.dtype) << (lane * moved.buffer.dtype.bits)
                bytes_[one] = code if lane == 0 else bytes_[one] | code
        self.nests.pop()
        for one in packed:
            first = Replaced(IdMap([(last, group * count)]))(inline(one))
            at = tuple(map(self, first.indices))
            place = (*at[:-1], simplify(at[-1] // count))
            stmts.append(Store(self.buffer(one.buffer), place, cast(bytes_[one], dt.uint8), span=one.span))
        stops = (*map(self, node.stops[:-1]), simplify(stop // count))
        return rebuilt(
            node, vars=(*node.vars[:-1], group), stops=stops, body=Block(tuple(stmts), span=node.body.span), layout=None
        )

    def visit_Copy(self, node: Copy) -> Stmt:
        """Copy the containers if that is the conversion; otherwise build a nest of moves."""
        a, b = node.src.buffer, node.dst.buffer
        if not is_narrow(a.dtype) and not is_narrow(b.dtype):
            return self.children(node)
        tiles = all(not is_narrow(x.dtype) or x.scope != "global" or x.dtype == dt.tfloat32 for x in (a, b))
        if tiles and (a.dtype == b.dtype or not is_narrow(b.dtype)):
            return self.children(node)
        if a.dtype == b.dtype and a.scope == b.scope == "global" and per_byte(a.dtype) == 1:
            return self.children(node)
        if found := node.check():
            raise TileError(*found)

        def move(point: Sequence[Expr]) -> Stmt:
            value = Load(a, spread(node.src, point))
            return Store(b, spread(node.dst, point), cast(value, b.dtype), span=node.span)

        return self._nest(squeezed(node.dst), move, node)

    def visit_Fill(self, node: Fill) -> Stmt:
        """Return a fill of the container; of a tensor a nest of stores."""
        to = node.dst.buffer
        if not is_narrow(to.dtype):
            return self.children(node)
        if to.scope != "global" or to.dtype == dt.tfloat32:
            return Fill(self(node.dst), cast(self(node.value), container(to.dtype)))
        return self._nest(squeezed(node.dst), lambda point: Store(to, spread(node.dst, point), node.value), node)

    def _nest(self, extents: Sequence[Expr], body: Any, node: Stmt) -> Stmt:
        """Build a parallel nest and widen it."""
        made = parallel(extents, body) if extents else body(())
        return self(rebuilt(made, span=node.span))  # type: ignore[no-any-return]

    def visit_TileOp(self, node: TileOp) -> Stmt:
        """Let products and selections act on containers as on the type. Refuse other ops: their author must widen."""
        narrow = [r.buffer for r in find(node, Region) if is_narrow(r.buffer.dtype)]
        if narrow:
            chosen = isinstance(node, Reduce) and node.kind in ORDERED
            tiles = all(b.scope != "global" or b.dtype == dt.tfloat32 for b in narrow)
            if not (tiles and (isinstance(node, Gemm) or chosen)):
                name = getattr(node, "op_name", "this")
                _refuse(node, f"T.{name}", narrow[0].dtype, "convert the tile: T.copy it to one of a wider type")
        return self.children(node)

    def visit_Region(self, node: Region) -> Region:
        """Return the region of the container with the same indices."""
        return rebuilt(node, buffer=self.buffer(node.buffer), ranges=tuple(map(self, node.ranges)))


def _is_packed(buffer: Buffer) -> bool:
    """Return whether a global buffer holds several elements in a byte."""
    return is_narrow(buffer.dtype) and buffer.scope == "global" and per_byte(buffer.dtype) > 1
