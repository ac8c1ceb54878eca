# SPDX-License-Identifier: Apache-2.0
"""Matrix products of one warpgroup (four warps): wgmma, with operands in shared memory or registers.

A product is asynchronous. It runs from `wgmma` until the `wgmma_wait` for its group. In that time nobody may touch its
accumulators, its registers of A, or the shared memory that it reads. The C++ of each shape is generated
(codegen/cuda_wgmma.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch_tile.hardware import HOPPER, WARPGROUP, Target
from torch_tile.intrinsics.base import Access, Intrinsic, declare, same
from torch_tile.intrinsics.matrix import Digits, digits_of
from torch_tile.intrinsics.traits import Engine, Sync
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Address, Call, cast, to_expr
from torch_tile.ir.node import Node
from torch_tile.ir.stmt import Do

M = 64  # rows of every shape
OWN_ROWS = "own_rows_begin", "own_rows_end"  # of a tile's rows those that the running warpgroup computes
LARGEST_N = 256

# Layouts of one instruction's operands in a warpgroup; columns of the accumulator in blocks of 8.
ROWS_D: Digits = digits_of("4:32t 2:2r 8:4t")
COLUMNS_D: Digits = digits_of("4:1t 2:1r")  # of one block; blocks are 4 registers apart
A_16: tuple[Digits, Digits] = digits_of("4:32t 2:2r 8:4t"), digits_of("2:4r 4:1t 2:1r")  # 64 x 16
A_8: tuple[Digits, Digits] = digits_of("4:32t 2:4r 8:4t"), digits_of("2:8r 4:1t 4:1r")  # 64 x 32
A_32: tuple[Digits, Digits] = digits_of("4:32t 2:1r 8:4t"), digits_of("2:2r 4:1t")  # 64 x 8, tf32

_FP8 = ("float8_e4m3fn", "float8_e5m2")
_INT8 = ("int8", "uint8")
# Products of wgmma: (a, b, d) -> elements of K in one instruction.
PRODUCTS = {
    ("float16", "float16", "float32"): 16,
    ("float16", "float16", "float16"): 16,
    ("bfloat16", "bfloat16", "float32"): 16,
    ("tf32", "tf32", "float32"): 8,
    **{(a, b, "float32"): 32 for a in _FP8 for b in _FP8},
    **{(a, b, "int32"): 32 for a in _INT8 for b in _INT8},
}


@dataclass(frozen=True)
class Descriptor:
    """The strides by which a wgmma walks an operand in shared memory, all in bytes.

    `swizzle` is the span of a row's panel (128, 64, 32; 0 for none). `across` says that memory runs along M (of A) or N
    (of B), not along K; 16-bit types only.

    Along K, groups of 8 rows are `stride` apart, and `leading` is not used. Without swizzle the two halves of K in one
    instruction are `leading` apart.

    Across, groups of 8 steps of K are `stride` apart, and panels along M or N are `leading` apart. Without swizzle it
    is the other way round, in panels of 16 bytes.
    """

    swizzle: int
    leading: int
    stride: int
    across: bool = False


def step_of(a: str, b: str, d: str, target: Target) -> int:
    """Return the elements of K that one instruction multiplies for these dtypes, or "tf32"; 0 for none."""
    return PRODUCTS.get((a, b, d), 0) if target.has_wgmma else 0


def allowed_n(n: int, a: str) -> bool:
    """Return whether an instruction may have `n` columns."""
    if a in _INT8:
        return n in (8, 24) or (n % 16 == 0 and 16 <= n <= LARGEST_N)
    return n % 8 == 0 and 8 <= n <= LARGEST_N


def wgmma(
    d: Address,
    a: Address,
    b: Address,
    n: int,
    types: tuple[str, str, str],
    a_walk: Descriptor | None,
    b_walk: Descriptor,
    a_step: Any = 0,
    b_step: Any = 0,
    keep: Any = True,
) -> Do:
    """Compute `d = a * b (+ d if keep)` for 64 x `n` accumulators from `d` on. `types` of a, b, d are a key of
    PRODUCTS.

    A is in registers if `a_walk` is None. `a_step` and `b_step` are bytes by which a step of K moves an operand's start
    before its swizzle. `a` and `b` name the first element of the operand's first row.
    """
    walks = tuple(() if w is None else (w.swizzle, w.leading, w.stride, w.across) for w in (a_walk, b_walk))
    steps = (cast(to_expr(x), dt.int32) for x in (a_step, b_step))
    return Do(Call("wgmma", (d, a, b, *steps, cast(to_expr(keep), dt.bool_)), dt.int32, (n, *types, *walks)))


def walks_of(call: Call) -> tuple[Descriptor | None, Descriptor]:
    """Return how a `wgmma` walks its operands; None for A in registers."""
    a, b = (Descriptor(*x) if isinstance(x, tuple) and x else None for x in call.options[4:6])
    assert b is not None
    return a, b


class Wait(NamedTuple):
    """The options of a `wgmma_wait`, as that takes them."""

    pending: int
    behind: bool = False


def wgmma_fence() -> Do:
    """Make ordinary writes to registers visible to the following products; needed before the first of a sequence."""
    return Do(Call("wgmma_fence", (), dt.int32))


def wgmma_commit() -> Do:
    """Close this warpgroup's group of products."""
    return Do(Call("wgmma_commit", (), dt.int32))


def wgmma_wait(pending: int, behind: bool = False) -> Do:
    """Wait until `pending` newest groups of products are in flight; with `behind`, after earlier arithmetic."""
    return Do(Call("wgmma_wait", (), dt.int32, (pending, True) if behind else (pending,)))


def wait_of(one: Node) -> Wait | None:
    """Return the options of a `wgmma_wait`, a call or the statement of one; None of other nodes."""
    call = one.call if isinstance(one, Do) else one
    if not isinstance(call, Call) or call.name != "wgmma_wait" or not call.options:
        return None
    pending, *behind = call.options
    assert isinstance(pending, int)
    return Wait(pending, behind == [True])


def wgmma_results(d: Address, count: int) -> Do:
    """Mark the `count` accumulators from `d` on as complete: reads of them stay behind this call.

    The C++ compiler does not know that wgmma is asynchronous. Without this call it may move arithmetic on results
    before their wait.
    """
    return Do(Call("wgmma_results", (d,), dt.int32, (count,)))


def wgmma_hold(value: Address) -> Do:
    """Keep the arithmetic that makes `value` in front of waits that follow.

    ptxas moves waits for products up across arithmetic that needs no result, which then runs beside no product.
    """
    return Do(Call("wgmma_hold", (value,), dt.int32))


# Names of types in PTX.
_PTX = {
    "float16": "f16", "bfloat16": "bf16", "tf32": "tf32", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "int8": "s8",
    "uint8": "u8", "float32": "f32", "int32": "s32",
}  # fmt: skip


class Shape(NamedTuple):
    """The columns and K elements of one instruction, and PTX's names of the types of a, b and d."""

    n: int
    k: int
    a: str
    b: str
    d: str


def shape_of(call: Call) -> Shape:
    """Return the sizes and types of one instruction."""
    n, a, b, d = int(str(call.options[0])), *(str(x) for x in call.options[1:4])
    return Shape(n, PRODUCTS[a, b, d], _PTX[a], _PTX[b], _PTX[d])


def product_name(call: Call) -> str:
    """Return the C++ function of a `wgmma`; "ss" or "rs" says whether A is in shared memory or in registers."""
    n, k, a, b, d = shape_of(call)
    return f"wgmma_m{M}n{n}k{k}_{d}_{a}_{b}_{'ss' if walks_of(call)[0] else 'rs'}"


def _spelling(call: Call) -> str:
    """Return the C++ template call of a wgmma."""
    given = (w for w in walks_of(call) if w is not None)
    walks = [f"tile::Walk<{w.swizzle}, {w.leading}, {w.stride}, {str(w.across).lower()}>" for w in given]
    return f"{product_name(call)}<{', '.join(walks)}>"


def accumulators(call: Call) -> int:
    """Return the elements of the accumulator that one thread holds."""
    return M * int(str(call.options[0])) // WARPGROUP


def a_registers(call: Call) -> int:
    """Return the elements of A that one thread holds."""
    a, b, d = (str(x) for x in call.options[1:4])
    return M * PRODUCTS[a, b, d] // WARPGROUP


def _effects(call: Call) -> tuple[Access, ...]:
    """Return the accesses. Operands in shared memory count as read whole: an instruction reads no run of elements."""
    in_registers = walks_of(call)[0] is None
    a = Access(1, "r", a_registers(call)) if in_registers else Access(1, "r", -1, True)
    return Access(0, "rw", accumulators(call)), a, Access(2, "r", -1, True)


_GROUP: dict[str, Any] = {
    "convergent": "warpgroup", "header": "wgmma.h", "arch": HOPPER, "only": True, "engine": Engine.WGMMA,
}  # fmt: skip
declare(Intrinsic("wgmma", 6, same, "", cuda=_spelling, effects=_effects, **_GROUP))
declare(Intrinsic("wgmma_fence", 0, same, "", cuda="wgmma_fence", **_GROUP, sync=Sync.FENCE))
declare(Intrinsic("wgmma_commit", 0, same, "", cuda="wgmma_commit", **_GROUP, sync=Sync.COMMIT))
declare(Intrinsic("wgmma_wait", 0, same, "", cuda="wgmma_wait", **_GROUP, sync=Sync.DRAIN, idle=True))
declare(
    Intrinsic(
        "wgmma_results", 1, same, "", cuda="wgmma_results",
        effects=lambda call: (Access(0, "rw", int(str(call.options[0]))),), header="wgmma.h", arch=HOPPER, only=True,
        engine=Engine.WGMMA, sync=Sync.PIN,
    )
)  # fmt: skip
declare(
    Intrinsic(
        "wgmma_hold", 1, same, "", cuda="wgmma_hold", effects=lambda call: (Access(0, "r", 1),), header="wgmma.h",
        arch=HOPPER, only=True, engine=Engine.WGMMA, sync=Sync.PIN,
    )
)  # fmt: skip
for _name in OWN_ROWS:  # lowering replaces them (resolve_own_rows); for the interpreter of tiles all rows are one's own
    _begins = _name == OWN_ROWS[0]
    declare(Intrinsic(_name, 1, same, _name, evaluate=(lambda rows: rows * 0) if _begins else (lambda rows: rows)))
