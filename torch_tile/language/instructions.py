# SPDX-License-Identifier: Apache-2.0
"""PTX instructions by TIR's names, on pointers of T.access_ptr: for kernels of threads."""

from __future__ import annotations

from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.intrinsics import matrix, memory
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address, Const, cast, const, is_number, select, to_expr, truth
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Store
from torch_tile.language.asynchronous import in_kernel
from torch_tile.language.foreign import Pointer
from torch_tile.language.threads import thread_index
from torch_tile.tileop.base import Scalar, region_of

# TIR's names of operand types.
TYPES = {
    "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64", "int8": "int8", "uint8": "uint8",
    "int32": "int32", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "tf32": "tf32",
}  # fmt: skip
CP_ASYNC_BYTES = (4, 8, 16)


def ptx_cp_async(dst_access_ptr: Any, src_access_ptr: Any, num_elems: int, predicate: Scalar = None) -> None:
    """Start to copy `num_elems` neighbours from `src_access_ptr` to `dst_access_ptr`, in shared memory.

    Each thread that comes here makes a copy. The neighbours take 4, 8 or 16 bytes, and both ends are aligned to that.
    Where `predicate` does not hold they become 0. The copy belongs to the group that the next T.ptx_commit_group()
    closes; T.ptx_wait_group(n) waits.
    """
    what = "T.ptx_cp_async"
    at, (target, source) = in_kernel(what), (_pointer(what, p) for p in (dst_access_ptr, src_access_ptr))
    scopes, size = (target.buffer.scope, source.buffer.scope), source.buffer.dtype.itemsize
    count = simplify(to_expr(num_elems))
    bytes_ = int(count.value) * size if isinstance(count, Const) else 0
    why = ""
    if scopes != ("shared", "global") or target.buffer.dtype != source.buffer.dtype:
        types = f"{source.buffer.dtype} to {scopes[0]} {target.buffer.dtype}"
        name, why = "dst_access_ptr", f"goes from {scopes[1]} {types}"
        fix = "copy from global to shared memory of the same type"
    elif bytes_ not in CP_ASYNC_BYTES:
        name, why, fix = "num_elems", f"is {num_elems!r}, of {size} bytes each", "give elements of 4, 8 or 16 bytes"
    if why:
        raise error("bad_argument", None, op=what, name=name, why=why, fix=fix)
    full = const(bytes_, dt.int32)
    valid = full if predicate is None else select(truth(predicate), full, const(0, dt.int32))
    thread_index()
    at.emit(memory.cp_async(target, source, valid, bytes_))


def ptx_ldmatrix(trans: Any, num: int, src_access_ptr: Any, dst_access_ptr: Any) -> None:
    """Load `num` (1, 2, 4) matrices of 8 rows of 16 bytes from `src_access_ptr` to `dst_access_ptr`, arrays of a warp.

    Lane `l` gives the address of row `l % 8` of matrix `l // 8`. It receives of each matrix the 4 bytes at row `l //
    4`, place `l % 4`. With `trans`, for 16-bit elements only, the load transposes matrices.
    """
    what = "T.ptx_ldmatrix"
    at, (source, target) = in_kernel(what), (_pointer(what, p) for p in (src_access_ptr, dst_access_ptr))
    across = bool(trans.value) if isinstance(trans, Const) else bool(trans)
    why = ""
    if (source.buffer.scope, target.buffer.scope) != ("shared", "local"):
        name, why = "src_access_ptr", f"goes from {source.buffer.scope} to {target.buffer.scope} memory"
        fix = "load from T.alloc_shared to T.alloc_local"
    elif num not in (1, 2, 4):
        name, why, fix = "num", f"is {num!r}", "give 1, 2 or 4"
    elif across and source.buffer.dtype.bits != 16:
        name, why, fix = "trans", f"is asked for of {source.buffer.dtype}", "transpose elements of 16 bits"
    if why:
        raise error("bad_argument", None, op=what, name=name, why=why, fix=fix)
    thread_index()
    at.emit(matrix.ldmatrix(target, source, num, across))


def ptx_mma(
    dtype: Any,
    shape: str,
    A_layout: str,
    B_layout: str,
    A_dtype: str,
    B_dtype: str,
    C_dtype: str,
    multiplicand_a: Any,
    a_index: Scalar,
    multiplicand_b: Any,
    b_index: Scalar,
    accumulator: Any,
    c_index: Scalar,
    saturate: Any = False,
    operator: Any = None,
) -> None:
    """Multiply small matrices in a warp: add A times B to C, in local arrays.

    A begins at element `a_index` of `multiplicand_a`, B at `b_index` of `multiplicand_b`, C at `c_index` of
    `accumulator`. `shape` is "m16n8k16" and the like; `A_layout` is "row", `B_layout` "col". `A_dtype`, `B_dtype` and
    `C_dtype` are "fp16", "bf16", "fp32", "tf32", "int8", "e4m3", ... `dtype` is that of the sums. Where each lane's
    elements lie, PTX says. Raises TileError for products that tensor cores do not have, for sums that `saturate`, and
    for an `operator` of bits.
    """
    what = "T.ptx_mma"
    at = in_kernel(what)
    types = TYPES.get(A_dtype, A_dtype), TYPES.get(B_dtype, B_dtype), TYPES.get(C_dtype, C_dtype)
    if matrix.PRODUCTS.get(types) != shape or (A_layout, B_layout) != ("row", "col"):
        known = sorted({f"{name} of {a} and {b}" for (a, b, _), name in matrix.PRODUCTS.items()})
        why = f"is {shape!r} of {types[0]} and {types[1]}, {A_layout} and {B_layout}, with sums of {types[2]}"
        raise error("bad_argument", None, op=what, name="shape", why=why, fix=f"row and col, give {'; '.join(known)}")
    for option, value in (("saturate", saturate), ("operator", operator)):
        if value.value if isinstance(value, Const) else value is not None and value is not False:
            raise error("bad_argument", None, op=what, name=option, why=f"is {value!r}", fix="leave it out")
    given = ((accumulator, c_index), (multiplicand_a, a_index), (multiplicand_b, b_index))
    d, a, b = (_local(what, array, index) for array, index in given)
    for place, name in zip((d, a, b), (types[2], *types[:2]), strict=True):
        held = "float32" if name == "tf32" else name
        if place.buffer.dtype.name != held:
            why, fix = f"has an array of {place.buffer.dtype}", f"give one of {held}"
            raise error("bad_argument", None, op=what, name="multiplicand_a", why=why, fix=fix)
    thread_index()
    at.emit(matrix.mma(d, a, b, shape, types))


def mma_fill(dtype: Any, local_size: int, local_ptr: Any, offset: Scalar = 0) -> None:
    """Set `local_size` elements of the local array `local_ptr` to 0, from element `offset` on."""
    what = "T.mma_fill"
    at, place = in_kernel(what), _local(what, local_ptr, offset)
    for n in range(local_size):
        index = simplify(place.indices[0] + n)
        at.emit(Store(place.buffer, (index,), cast(const(0, dt.int32), place.buffer.dtype)))


def _local(what: str, array: Any, index: Scalar) -> Address:
    """Return an element of a local array, counted from where `array` begins."""
    place = _pointer(what, array)
    if place.buffer.scope != "local" or place.buffer.rank != 1:
        why, fix = f"is in `{place.buffer.name}`, in {place.buffer.scope} memory", "give T.alloc_local of one dimension"
        raise error("bad_argument", None, op=what, name="multiplicand_a", why=why, fix=fix)
    return Address(place.buffer, (simplify(place.indices[0] + to_expr(index)),))


def _pointer(what: str, given: Any) -> Address:
    """Return the address that an author gives as a pointer, an element, a slice or a buffer."""
    if isinstance(given, Pointer):
        return given.address
    if isinstance(given, Address):
        return given
    region = None if is_number(given) else region_of(given)
    if region is None or not isinstance(region.buffer, Buffer):
        why, fix = f"is {given!r}"[:80], "give a pointer of T.access_ptr, an element or a buffer"
        raise error("bad_argument", None, op=what, name="access_ptr", why=why, fix=fix)
    return Address(region.buffer, region.starts)


__all__ = ["mma_fill", "ptx_cp_async", "ptx_ldmatrix", "ptx_mma"]
