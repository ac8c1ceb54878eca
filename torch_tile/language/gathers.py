# SPDX-License-Identifier: Apache-2.0
"""Operations on tiles that are T.Parallel loops: convolutions' columns, transposes, any and all.

Every target has them, and every pass treats them as the author's own loops.
"""

from __future__ import annotations

from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.intrinsics import memory
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import Const, Expr, Load, binary, cast, const, select, to_expr
from torch_tile.ir.stmt import Alloc, For, Stmt, Store
from torch_tile.language.asynchronous import in_kernel
from torch_tile.language.reducers import split_updates
from torch_tile.language.trace import Tracer, make_variable
from torch_tile.tileop.base import (
    Scalar,
    Tile,
    conjunction,
    describe,
    describe_tile,
    identity_of,
    may_overlap,
    need_region,
    parallel,
    same_extents,
    serial,
)
from torch_tile.tileop.copy.op import Copy, policy_of
from torch_tile.tileop.fill import Fill


def transpose(src: Tile, dst: Tile) -> None:
    """Transpose the last two dimensions: `dst[..., j, i] = src[..., i, j]`, converted to dst's dtype.

    The last two dimensions are swapped, as by torch's `.mT`; the others agree. Raises TileError for other shapes.
    """
    at = in_kernel("T.transpose")
    a, b = need_region(src, "transpose", "src"), need_region(dst, "transpose", "dst")
    *outer, rows, columns = a.tile_shape if len(a.tile_shape) > 1 else (const(0, dt.int32),) * 2
    if len(a.tile_shape) < 2 or not same_extents((*outer, columns, rows), b.tile_shape):
        why = f"is {describe_tile(b)} for a source {describe_tile(a)}"
        fix = "give tiles of two dimensions or more, (..., m, n) and (..., n, m)"
        raise error("bad_argument", None, op="T.transpose", name="dst", why=why, fix=fix)

    if may_overlap(a, b):  # every element is read before any is written
        stage = Buffer(f"{a.buffer.name}_before", a.tile_shape, a.buffer.dtype, "fragment")
        if stage.static_shape is None:
            why, fix = "may overlap the source, whose size is not constant", "go by way of another tensor"
            raise error("bad_argument", None, op="T.transpose", name="dst", why=why, fix=fix)
        at.emit(Alloc(stage))
        at.own(stage)
        before = need_region(stage, "transpose", "src")
        at.emit(Copy(a, before))
        if a.buffer.scope == "global":
            at.emit(memory.barrier())
        a = before

    def move(point: tuple[Expr, ...]) -> Stmt:
        value = Load(a.buffer, _place(a, point))
        return Store(b.buffer, _place(b, (*point[:-2], point[-1], point[-2])), cast(value, b.buffer.dtype))

    at.emit(parallel(a.tile_shape, move))


def im2col(
    img: Tile,
    col: Tile,
    nhw_step: Scalar,
    c_step: Scalar,
    kernel: int,
    stride: int,
    dilation: int,
    pad: int,
    eviction_policy: str | None = None,
) -> None:
    """Copy a tile of a convolution's im2col matrix: its product with the weights is the convolution.

    `img` is a tensor (N, H, W, C) and `col` a tile (m, k). It is tile number `nhw_step` along the rows, one row for
    each pixel of the result (N * OH * OW). It is tile number `c_step` along the columns, one column for each weight
    (kernel * kernel * C). The window of the weights moves by `stride`, and its points lie `dilation` apart. Elements in
    the padding of `pad`, or past the last row or column, are 0. Where k divides C, copies run ahead in pipelined loops.
    `eviction_policy` is a hint of TileLang's without effect.
    """
    policy_of("im2col", eviction_policy)
    at = in_kernel("T.im2col")
    image, tile = _tensor(img), need_region(col, "im2col", "col")
    for name, value, least in (
        ("kernel", kernel, 1),
        ("stride", stride, 1),
        ("dilation", dilation, 1),
        ("pad", pad, 0),
    ):
        if not isinstance(value, int) or value < least:
            why, fix = f"is {value!r}", f"give a number of at least {least}"
            raise error("bad_argument", None, op="T.im2col", name=name, why=why, fix=fix)
    if len(tile.tile_shape) != 2 or not all(isinstance(n, Const) for n in tile.tile_shape):
        why, fix = f"has the shape {describe(tile.tile_shape)}", "give a tile of two dimensions, (m, k)"
        raise error("bad_argument", None, op="T.im2col", name="col", why=why, fix=fix)
    count, height, width, channels = image.shape
    rows, columns = tile.tile_shape
    reach = dilation * (kernel - 1) + 1 - 2 * pad
    out_h, out_w = ((size - reach) // stride + 1 for size in (height, width))
    first = to_expr(c_step) * columns
    # All columns of each tile belong to one weight position.
    one_tap = isinstance(channels, Const) and isinstance(columns, Const) and channels.value % columns.value == 0

    def fetch(point: tuple[Expr, ...]) -> Stmt:
        pixel, place = to_expr(nhw_step) * rows + point[0], first + point[1]
        tap = (first if one_tap else place) // channels
        channel = first % channels + point[1] if one_tap else place % channels
        y = pixel // out_w % out_h * stride + tap // kernel * dilation - pad
        x = pixel % out_w * stride + tap % kernel * dilation - pad
        inside = [tap < kernel * kernel, y >= 0, y < height, x >= 0, x < width, pixel // (out_h * out_w) < count]
        value = Load(image, (pixel // (out_h * out_w), y, x, channel))
        found = select(conjunction(inside), value, const(0, value.dtype))
        return Store(tile.buffer, _place(tile, point), cast(found, tile.buffer.dtype))

    at.emit(parallel(tile.tile_shape, fetch))


def _tensor(img: Any) -> Buffer:
    """Check the image argument of im2col."""
    region = need_region(img, "im2col", "img")
    if region.buffer.scope != "global" or region.buffer.rank != 4:
        why, fix = f"is a {region.buffer.scope} buffer of {region.buffer.rank} dimensions", "give a tensor (N, H, W, C)"
        raise error("bad_argument", None, op="T.im2col", name="img", why=why, fix=fix)
    return region.buffer


def any_of(buffer: Tile) -> Expr:
    """Test whether any element of a tile, tensor or region is not 0. All threads come here and get the same answer.

    For a thread's own array, T.alloc_local, each thread gets its own answer.
    """
    return _joined("any_of", buffer, "max")


def all_of(buffer: Tile) -> Expr:
    """Test whether all elements of a tile, tensor or region are not 0. All threads come here and get the same answer.

    For a thread's own array, T.alloc_local, each thread gets its own answer.
    """
    return _joined("all_of", buffer, "min")


def _joined(name: str, buffer: Any, op: str) -> Expr:
    """Combine the elements of a tile over all threads."""
    at, region = in_kernel(f"T.{name}"), need_region(buffer, name, "buffer")
    why, fix, argument = "", "", "buffer"
    if region.buffer.scope in ("local", "var"):
        return _joined_alone(at, name, region, op)
    if at.in_nest:
        why, fix = "is asked about inside T.Parallel", "ask before the loop: all threads answer together"
    elif at.doubtful:
        why, fix = f"is wanted only if {at.doubtful} asks for it", "ask in a line before"
    elif not all(isinstance(n, Const) for n in region.tile_shape):
        why, fix = f"has the shape {describe(region.tile_shape)}", "copy it to a tile of constant size"
    if why:
        raise error("bad_argument", None, op=f"T.{name}", name=argument, why=why, fix=fix)
    answer = Buffer(name, (const(1, dt.int32),), dt.int32, "fragment")
    zero = const(0, dt.int32)

    def fold(point: tuple[Expr, ...]) -> Stmt:
        flag = cast(binary("!=", Load(region.buffer, _place(region, point)), const(0, region.buffer.dtype)), dt.int32)
        return Store(answer, (zero,), binary(op, Load(answer, (zero,)), flag))

    at.emit(Alloc(answer))
    at.own(answer)
    at.emit(Fill.build(answer, identity_of(op, answer.dtype)))
    nest = parallel(region.tile_shape or (const(1, dt.int32),), fold)
    assert isinstance(nest, For)
    for one in split_updates(nest, {answer: op}):
        at.emit(one)
    return binary("!=", Load(answer, (zero,)), zero)


def _joined_alone(at: Tracer, name: str, region: Region, op: str) -> Expr:
    """Combine a thread's own elements, for that thread alone."""
    answer = make_variable(name, dt.bool_, const(op == "min", dt.bool_))

    def join(rest: tuple[Expr, ...], point: tuple[Expr, ...]) -> Stmt:
        if rest:
            return serial(rest[0], lambda index: join(rest[1:], (*point, index)))
        flag = binary("!=", Load(region.buffer, _place(region, point)), const(0, region.buffer.dtype))
        return Store(answer.buffer, (), binary("and" if op == "min" else "or", answer, flag))

    at.emit(join(region.tile_shape, ()))
    return answer


def _place(region: Region, point: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Return indices into the buffer for a point of the region."""
    steps = iter(point)
    return tuple(_from(r.start, next(steps)) if r.keep else r.start for r in region.ranges)


def _from(start: Expr, step: Expr) -> Expr:
    """Return `start + step`, without an addition where `start` is 0."""
    return step if isinstance(start, Const) and start.value == 0 else start + step
