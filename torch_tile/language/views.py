# SPDX-License-Identifier: Apache-2.0
"""T.view and T.reshape: other names for the same memory, by another shape or dtype.

A tensor in global memory keeps its views of the same dtype; launchers point them at it. Tiles, and views of another
dtype, keep one name, the home. Uses of other names are rewritten to it: elements by their row-major number, regions if
the home has the same box. The home is the name that a product uses, else the one that a reduction uses. Without one it
is the name of the narrowest dtype. A store through a wider view then is several whole stores. A reduction of another
name goes through a fragment of its shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from operator import mul
from typing import Any

from torch_tile.diagnostics.errors import TileAssertionError, TileError, current_span, diagnose, error
from torch_tile.ir import dtype as dt
from torch_tile.ir.arith_util import divides
from torch_tile.ir.bits import reinterpret
from torch_tile.ir.buffer import Buffer, Range, Region
from torch_tile.ir.expr import Address, Const, Expr, Load, binary, cast, const, is_number, select, to_expr
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.node import Rewriter, find, rebuilt
from torch_tile.ir.polynomial import Atoms
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Alloc, Block, Program, Stmt, Store, TileOp
from torch_tile.language.trace import author_span, name_symbol, tracer
from torch_tile.language.values import Annotation, Handle, TensorType, dtype_of, shape_of
from torch_tile.tileop.base import (
    conjunction,
    describe,
    is_one,
    need_region,
    of_each,
    parallel,
    same_extents,
    spread,
    squeezed,
)
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.fill import Fill
from torch_tile.tileop.reduce.op import Reduce

Sizes = tuple[Expr, ...]


def view(src: Any, shape: Any = None, dtype: Any = None) -> Handle:
    """Give a tensor or tile a second name by another shape or dtype of as many bytes. Nothing moves.

    `src` is a whole buffer, contiguous if in global memory. Without `shape`, another dtype changes the last dimension.
    A kernel that writes to a tensor may use only names of one dtype for it; tiles may have several. A store through a
    wider dtype of a tile is several stores.
    """
    at, region = tracer("T.view"), need_region(src, "view", "src")
    base = region.buffer
    to = base.dtype if dtype is None else dtype_of(dtype)
    sizes = _default(base, to) if shape is None else shape_of(shape, "T.view's shape")
    name, why, fix = "src", "", "index it as it is, or T.copy it to a tile of the shape"
    if base.strides is not None:
        why, fix = "has strides", "only contiguous tensors have views: index it as it is, or T.copy it to a tile"
    elif base.scope in ("var", "barrier"):
        why = f"is a {base.scope} buffer"
    elif base.origin == "address":
        why, fix = "lies at an address", "T.make_tensor at the same address"
    elif not same_extents(region.extents, base.shape):
        why = "is a part of a buffer"
    elif dt.bool_ in (to, base.dtype) and to != base.dtype:
        name, why, fix = "dtype", f"is {to} for {base.dtype}, and bool has no bits", "take uint8"
    elif not _as_many((*sizes, to.bits), (*base.shape, base.dtype.bits)):
        name, fix = "shape", "give a shape of as many elements" if to == base.dtype else "give one of as many bytes"
        why = f"is {describe(sizes)} of {to}, and the memory is {describe(base.shape)} of {base.dtype}"
    if why:
        found = diagnose("bad_argument", current_span(), op="T.view", name=name, why=why, fix=fix)
        raise (TileAssertionError if name == "shape" else TileError)(found)
    root = base.base or base
    made = Buffer("", sizes, to, base.scope, None, base.origin, align=base.align, base=root)
    if base.scope == "global":
        at.views.append(made)
    else:
        at.own(made)
    return Handle(made)


def _default(base: Buffer, to: dt.DType) -> Sizes:
    """Return the shape by another dtype, as torch's `.view(dtype)` has it."""
    last = simplify(binary("//", base.shape[-1] * base.dtype.bits, to.bits)) if base.shape else const(1, dt.int32)
    return (*base.shape[:-1], last) if base.shape else ()


def reshape(src: Any, shape: Any) -> Handle:
    """View `src`, a tensor or tile, by another shape."""
    return view(src, shape)


def _as_many(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Return whether two lists of factors certainly have the same product."""
    atoms, one = Atoms(), const(1, dt.int32)
    return atoms.of(to_expr(reduce(mul, a, one))).key == atoms.of(to_expr(reduce(mul, b, one))).key


def resolve(program: Program) -> Program:
    """Rewrite `program` to one name for each tile, and to views of tensors with their own dtype only."""
    names = IdMap[Buffer, list[Buffer]]()  # by the memory
    for kernel in program.kernels:
        for node in find(kernel, Load, Store, Region, Address):
            buffer = node.buffer
            root = buffer.base or buffer
            if not any(known is buffer for known in names.setdefault(root, [root])):
                names[root].append(buffer)
    homes = IdMap[Buffer, Buffer]()
    ops = [op for k in program.kernels for op in find(k, TileOp) if not isinstance(op, Copy | Fill)]
    ops.sort(key=lambda op: isinstance(op, Reduce))  # a reduction of another name goes through a tile
    firm = [r.buffer for op in ops for r in find(op, Region)]
    for root, known in names.items():
        if root.scope == "global":
            homes.update((b, root) for b in known if b.dtype != root.dtype)
        elif len(known) > 1:
            home = _home(root, known, firm)
            homes.update((b, home) for b in known)
    if not homes:
        return program
    kernels = tuple(_Homes(homes)(kernel) for kernel in program.kernels)
    views = tuple(v for v in program.views if v not in homes)
    return replace(program, kernels=kernels, views=views)


def _home(root: Buffer, known: Sequence[Buffer], firm: Sequence[Buffer]) -> Buffer:
    """Choose the buffer that remains for a tile and all its views (the home)."""
    used = (f for f in firm if any(b is f for b in known))
    found = next(used, None) or min(known, key=lambda b: b.dtype.bits)
    if found is root:
        return root
    made = replace(found, base=None, name="")
    name_symbol(made, root.name or "tile")
    return made


class _Homes(Rewriter):
    """Rewrite uses of views to uses of the buffers that hold their memory (homes)."""

    def __init__(self, homes: IdMap[Buffer, Buffer]):
        self.homes = homes

    def visit_Alloc(self, node: Alloc) -> Alloc:
        """Allocate the memory under its home."""
        home = self.homes.get(node.buffer)
        return self.children(node) if home is None else rebuilt(node, buffer=home)

    def visit_Load(self, node: Load) -> Expr:
        """Load the view's element from the elements of the home that hold it."""
        view, indices = node.buffer, tuple(map(self, node.indices))
        home = self.homes.get(view)
        if home is None or home is view:
            return self.children(node)
        return inside(view, indices, _load_element(view, home, indices))

    def visit_Address(self, node: Address) -> Expr:
        """Return the element's address in the home."""
        home = self.homes.get(node.buffer)
        indices = tuple(map(self, node.indices))
        if home is None or home is node.buffer:
            return self.children(node)
        at, _ = _place(node.buffer, home, indices)
        return Address(home, at)

    def visit_Store(self, node: Store) -> Stmt:
        """Store the view's element to the elements of the home that hold it."""
        view, indices, value = node.buffer, tuple(map(self, node.indices)), self(node.value)
        home = self.homes.get(view)
        if home is None or home is view:
            return rebuilt(node, indices=indices, value=value)
        stmts = [Store(home, at, part, span=node.span) for at, part in _written(view, home, indices, value, node)]
        return stmts[0] if len(stmts) == 1 else Block(tuple(stmts))

    def visit_Copy(self, node: Copy) -> Stmt:
        """Copy boxes of the homes, or build a nest of moves."""
        return self._whole_or_nest(
            node, node.dst, lambda point: cast(Load(node.src.buffer, spread(node.src, point)), node.dst.buffer.dtype)
        )

    def visit_Fill(self, node: Fill) -> Stmt:
        """Fill a box of the home, or build a nest of stores."""
        return self._whole_or_nest(node, node.dst, lambda point: node.value)

    def _whole_or_nest(self, node: Any, dst: Region, value: Any) -> Stmt:
        """Keep an op on whole boxes, else write it as an element-wise nest."""
        regions = list(find(node, Region))
        if all(self.box(r) is not None for r in regions):
            return self.children(node)  # type: ignore[no-any-return]
        if found := node.check():
            raise TileError(*found)
        extents = squeezed(dst)

        def put(point: Sequence[Expr]) -> Stmt:
            return Store(dst.buffer, spread(dst, point), value(point), span=node.span)

        nest = of_each if any(r.buffer.scope == "local" for r in regions) else parallel
        made = nest(extents, put) if extents else put(())
        return self(rebuilt(made, span=node.span))  # type: ignore[no-any-return]

    def visit_Reduce(self, node: Reduce) -> Stmt:
        """Return the same reduction of the home, which lacks the view's dimensions of size 1."""
        box = self.box(node.src)
        if box is None and node.src.buffer.scope in ("shared", "fragment"):
            return self._through_a_tile(node)
        if box is None or len(box.tile_shape) == len(node.src.tile_shape):
            return self.children(node)
        sizes, dst = node.src.tile_shape, self(node.dst)
        gone = {d for d, size in enumerate(sizes) if is_one(size)}
        if node.dim in gone or len(sizes) - len(gone) != len(box.tile_shape):
            why, fix = f"is {node.dim}, a dimension of size 1 of a view", "T.copy the tile instead"
            raise error("bad_argument", node.span, op=f"T.{node.op_name}", name="dim", why=why, fix=fix)
        dropped = gone | ({node.dim} if len(dst.tile_shape) < len(sizes) else set())
        left = iter([d for d in range(len(sizes)) if d not in dropped - gone])
        ranges = [replace(r, keep=next(left) not in gone) if r.keep else r for r in dst.ranges]
        dim = node.dim - len([d for d in gone if d < node.dim])
        return rebuilt(node, src=box, dst=rebuilt(dst, ranges=tuple(ranges)), dim=dim)

    def _through_a_tile(self, node: Reduce) -> Stmt:
        """Copy a box that the home has not to a fragment, and reduce that. In registers threads keep what they have."""
        src = node.src
        tile = Buffer(src.buffer.name, src.tile_shape, src.buffer.dtype, "fragment")

        def put(point: Sequence[Expr]) -> Stmt:
            indices = iter(point)
            at = [r.start + next(indices) if r.keep else r.start for r in src.ranges]
            return Store(tile, tuple(point), Load(src.buffer, tuple(at)), span=node.span)

        copied = rebuilt(parallel(tile.shape, put), span=node.span)
        zero = const(0, dt.int32)
        whole = Region(tile, tuple(Range(zero, size) for size in tile.shape))
        return Block((Alloc(tile), self(copied), rebuilt(node, src=whole, dst=self(node.dst))))

    def visit_Region(self, node: Region) -> Region:
        """Return the same box of the home."""
        found = self.box(node)
        if found is None:
            view, home = node.buffer, self.homes[node.buffer]
            why = f"is {describe(node.extents)} of a view {describe(view.shape)}, and `{home.name}` has no such box"
            fix = "use one shape of it in products and reductions, and copy to another tile for the other"
            raise error("bad_argument", node.span, op="T.view", name="shape", why=why, fix=fix)
        return found

    def box(self, node: Region) -> Region | None:
        """Express a region in terms of the home; None if that has no such box."""
        view = node.buffer
        home = self.homes.get(view)
        if home is None or home is view:
            return rebuilt(node, ranges=tuple(map(self, node.ranges)))
        if home.dtype != view.dtype:
            return None
        if home.rank == view.rank and same_extents(home.shape, view.shape):  # its own dimensions, of size 1 as well
            return rebuilt(node, buffer=home, ranges=tuple(map(self, node.ranges)))
        ranges: list[Range] = []
        for mine, others in _groups(view, home):
            wide = [d for d in mine if not is_one(view.shape[d])]
            room = [d for d in others if not is_one(home.shape[d])]
            same = len(wide) == len(room) and all(
                same_extents((view.shape[a],), (home.shape[b],)) for a, b in zip(wide, room, strict=True)
            )
            if not same:
                return None
            rest = iter(wide)
            for d in others:
                one = Range(const(0, dt.int32), const(1, dt.int32), keep=False)
                ranges.append(self(node.ranges[next(rest)]) if not is_one(home.shape[d]) else one)
        return rebuilt(node, buffer=home, ranges=tuple(ranges))


def _groups(view: Buffer, home: Buffer) -> Iterator[tuple[list[int], list[int]]]:
    """Group the dimensions of both shapes into the smallest groups with equal products, from the first on."""
    a, b = list(range(view.rank)), list(range(home.rank))
    while a or b:
        mine, others = [a.pop(0)] if a else [], [b.pop(0)] if b else []
        while not _as_many([view.shape[d] for d in mine], [home.shape[d] for d in others]):
            product = [reduce(mul, (_size(x.shape[d]) for d in ds), 1) for x, ds in ((view, mine), (home, others))]
            if (product[0] < product[1] and a) or not b:
                mine.append(a.pop(0))
            else:
                others.append(b.pop(0))
        yield mine, others


def _size(size: Expr) -> float:
    """Return a constant size, else infinity."""
    return float(size.value) if isinstance(size, Const) else float("inf")


def inside(view: Buffer, indices: Sequence[Expr], value: Expr) -> Expr:
    """Return `value`, or 0 where the indices leave a tensor's view, as reads outside of tensors do."""
    if view.scope != "global":
        return value
    tests: list[Expr] = []
    for index, size in zip(indices, view.shape, strict=True):
        tests += [binary("<=", 0, index), binary("<", index, size)]
    return select(conjunction(tests), value, const(0, value.dtype)) if tests else value


def _place(view: Buffer, home: Buffer, indices: Sequence[Expr]) -> tuple[tuple[Expr, ...], Expr]:
    """Return the first element of the home that holds a part of a view's element, and that part's offset."""
    w, h = view.dtype.bits, home.dtype.bits
    if w == h:
        found: list[Expr] = []
        for mine, others in _groups(view, home):
            found += _coordinates(_flat_index(indices, view.shape, mine), tuple(home.shape[d] for d in others))
        return tuple(found), const(0, dt.int32)
    flat = _flat_index(indices, view.shape, range(view.rank))
    first, part = (flat * (w // h), const(0, dt.int32)) if w > h else (flat // (h // w), flat % (h // w))
    return tuple(_coordinates(first, home.shape)), simplify(part)


def _flat_index(indices: Sequence[Expr], shape: Sizes, dims: Sequence[int]) -> Expr:
    """Return the row-major number of an element, counted over `dims`."""
    total: Expr = const(0, dt.int32)
    for d in dims:
        total = total * shape[d] + indices[d]
    return simplify(total)


def _coordinates(index: Expr, shape: Sizes) -> list[Expr]:
    """Return the coordinates of element number `index` of a row-major box."""
    found: list[Expr] = []
    for d in range(len(shape) - 1, -1, -1):
        found.insert(0, simplify(index % shape[d]) if d else simplify(index))
        index = index // shape[d]
    return found


def _unsigned(bits: int) -> dt.DType:
    """Return the unsigned integer type of a width in bits."""
    return dt.BY_NAME[f"uint{bits}"]


def _load_element(view: Buffer, home: Buffer, indices: Sequence[Expr]) -> Expr:
    """Load a view's element from the buffer that holds it."""
    w, h = view.dtype.bits, home.dtype.bits
    at, part = _place(view, home, indices)
    if w == h:
        return reinterpret(Load(home, at), view.dtype)
    wide = dt.uint64 if max(w, h) == 64 else dt.uint32
    if w < h:
        word = cast(reinterpret(Load(home, at), _unsigned(h)), wide) >> cast(part * w, wide)
        return reinterpret(cast(word & ((1 << w) - 1), _unsigned(w)), view.dtype)
    parts = [cast(reinterpret(Load(home, one), _unsigned(h)), wide) << (h * k) for k, one in _next(home, at, w // h)]
    return reinterpret(cast(reduce(lambda a, b: a | b, parts), _unsigned(w)), view.dtype)


def _next(home: Buffer, at: Sequence[Expr], count: int) -> Iterator[tuple[int, tuple[Expr, ...]]]:
    """Return the next elements from a place on. They are in one row where `count` divides it."""
    if not divides(count, home.shape[-1]):
        why, fix = f"has rows of {describe(home.shape[-1:])} elements", f"make them multiples of {count}"
        raise error("bad_argument", None, op="T.view", name="src", why=why, fix=fix)
    for k in range(count):
        yield k, (*at[:-1], simplify(at[-1] + k))


def _written(
    view: Buffer, home: Buffer, indices: Sequence[Expr], value: Expr, node: Store
) -> Iterator[tuple[tuple[Expr, ...], Expr]]:
    """Return the stores for one store through a view."""
    w, h = view.dtype.bits, home.dtype.bits
    at, _ = _place(view, home, indices)
    if w < h:
        why = f"is {view.dtype}, and {h // w} elements share one of `{home.name}`, {home.dtype}"
        fix = "allocate the memory by the narrower dtype, and view it by the wider one"
        raise error("bad_argument", node.span, op="T.view", name="dtype", why=why, fix=fix)
    if w == h:
        yield at, reinterpret(value, home.dtype)
        return
    wide = dt.uint64 if w == 64 else dt.uint32
    word = cast(reinterpret(value, _unsigned(w)), wide)
    for k, one in _next(home, at, w // h):
        part = cast((word >> (h * k)) & ((1 << h) - 1), _unsigned(h))
        yield one, reinterpret(part, home.dtype)


@Annotation
def Tensor(shape: Any, dtype: Any = "float32", strides: Any = None, align: int | None = None) -> Any:
    """Annotate a parameter: `A: T.Tensor((M, K), T.float16)`. Sizes are integers, T.dynamic or T.const.

    The tensor's address is a multiple of `align` bytes: GPU kernels access it in no wider pieces. Without `align` they
    take the widest pieces that sizes and strides allow, and launches refuse addresses that do not.

    `T.Tensor(shape, dtype, A.data)` is T.view(A, shape, dtype).
    """
    if isinstance(strides, Handle):
        return view(strides, shape, dtype)
    if is_number(shape) and (is_number(dtype) or isinstance(dtype, Expr)):
        why = f"is the size {dtype!r}"
        fix = f"put all sizes into one pair of brackets: T.Tensor(({shape}, {dtype}), dtype)"
        raise error("bad_argument", author_span(), op="T.Tensor", name="dtype", why=why, fix=fix)
    given = None if strides is None else shape_of(strides, "strides")
    sizes = shape_of(shape, "a tensor's shape")
    if given is not None and len(given) != len(sizes):
        raise error("bad_shape", author_span(), what="strides", want=f"{len(sizes)} integers", got=repr(strides)[:60])
    if align is not None and (not isinstance(align, int) or align < 1):
        raise error("bad_shape", author_span(), what="align", want="a positive number of bytes", got=repr(align)[:60])
    return TensorType(sizes, dtype_of(dtype), given, align)


@Annotation
def StridedTensor(shape: Any, strides: Any, dtype: Any = "float32", align: int | None = None) -> TensorType:
    """Annotate a parameter as T.Tensor does, with strides in elements: integers or T.dynamic. `align` is as there."""
    return Tensor(shape, dtype, strides, align)  # type: ignore[no-any-return]
