# SPDX-License-Identifier: Apache-2.0
"""T.wgmma_gemm and T.wait_wgmma: products that the author leaves under way, and waits for.

What a wait completes is used only after it. Of products of which the wait leaves some under way nothing is said: to
touch their registers would make the assembler wait for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.intrinsics import memory, wgmma
from torch_tile.ir.buffer import Region
from torch_tile.ir.expr import Call, Const, Expr, truth
from torch_tile.ir.stmt import Block, Do, For, If, Role, Stmt, While
from torch_tile.language.trace import Tracer, tracer
from torch_tile.tileop.base import Annotations, Scalar, Tile
from torch_tile.tileop.fill import Fill
from torch_tile.tileop.gemm.op import Gemm, GemmWarpPolicy
from torch_tile.tileop.gemm.wgmma_results import WgmmaResults

MOST_PENDING = 7  # groups of products
# The fragments that products write, by identity: how many products began after the last one of each.
Ages = Mapping[int, tuple[int, Region]]


def gemm(
    A: Tile, B: Tile, C: Tile, transpose_A: bool = False, transpose_B: bool = False,
    policy: GemmWarpPolicy = GemmWarpPolicy.Square, clear_accum: Scalar = False, *, wg_wait: int = 0,
    wgmma: bool = False, k_pack: int = 1, mbar: Any = None, annotations: Annotations = None,
) -> None:  # fmt: skip
    """`C += A B`, of tiles in shared memory or fragments, summed in C's dtype.

    A is (M, K), or (K, M) with `transpose_A`; B is (K, N), or (N, K) with `transpose_B`; C is (M, N). Leading
    dimensions have size 1. Where `clear_accum` holds, a bool or an expression as in `k == 0`, C is set to 0 before.
    `policy` says how warps split C.

    With `wgmma` the product goes by wgmma or not at all; `wg_wait` groups of such products may stay under way. `k_pack`
    and `annotations` are hints of TileLang's without effect. Raises TileError for shapes and dtypes that have no
    product, and for `mbar`, which only products of sm_100 signal.
    """
    at = tracer("T.gemm")
    if mbar is not None:
        why, fix = "is signalled by products of sm_100 only", "leave it out: the product is complete after T.gemm"
        raise error("bad_argument", None, op="T.gemm", name="mbar", why=why, fix=fix)
    clears = _cleared(at, C, clear_accum)
    at.emit(Gemm.build(A, B, C, transpose_A, transpose_B, policy, clears, wg_wait=wg_wait, wgmma=wgmma))


def wgmma_gemm(
    A: Tile, B: Tile, C: Tile, transpose_A: bool = False, transpose_B: bool = False,
    policy: GemmWarpPolicy = GemmWarpPolicy.Square, clear_accum: Scalar = False, *, annotations: Annotations = None,
) -> None:  # fmt: skip
    """T.gemm by wgmma, which is not waited for: C is there, and A and B may be written, after T.wait_wgmma.

    Hopper only. An author error where wgmma cannot do it.
    """
    at = tracer("T.wgmma_gemm")
    made = Gemm.build(A, B, C, transpose_A, transpose_B, policy, _cleared(at, C, clear_accum))
    at.emit(replace(made, wg_wait=-1, wgmma=True))


def _cleared(at: Tracer, accumulator: Tile, condition: Scalar) -> bool:
    """Whether a product clears its accumulator itself; where only the device knows, an `if` before it does."""
    holds = truth(condition) if isinstance(condition, Expr) else condition
    if isinstance(holds, Expr) and not isinstance(holds, Const):
        at.emit(If(holds, Block((Fill.build(accumulator, 0),)), Block(())))
        return False
    return bool(holds.value if isinstance(holds, Const) else holds)


def wait_wgmma(pending: int = 0) -> None:
    """Wait until at most `pending` of this warpgroup's newest T.wgmma_gemm are under way."""
    at = tracer("T.wait_wgmma")
    if not isinstance(pending, int) or not 0 <= pending <= MOST_PENDING:
        fix = f"give a number from 0 to {MOST_PENDING}"
        raise error("bad_argument", None, op="T.wait_wgmma", name="pending", why=f"is {pending!r}", fix=fix)
    at.emit(wgmma.wgmma_wait(pending))


def pin_results(body: Block) -> Block:
    """Say after each wait which accumulators are complete; a body without waits stays as it is."""
    return _block(body, {})[0]


def _block(block: Block, ages: Ages) -> tuple[Block, Ages]:
    new: list[Stmt] = []
    stmts = block.stmts
    for n, one in enumerate(stmts):
        is_said = n + 1 < len(stmts) and isinstance(stmts[n + 1], WgmmaResults)
        made, ages = _stmt(one, ages)
        new.append(made)
        if (pending := _pending(one)) is not None:
            if not is_said:
                new += [WgmmaResults(c, span=one.span) for age, c in ages.values() if age >= pending]
            ages = {key: (age, c) for key, (age, c) in ages.items() if age < pending}
    same = len(new) == len(stmts) and all(a is b for a, b in zip(new, stmts, strict=True))
    return block if same else Block(tuple(new), span=block.span), ages


def _stmt(one: Stmt, ages: Ages) -> tuple[Stmt, Ages]:
    if isinstance(one, Gemm) and one.wg_wait:
        older = {key: (age + 1, c) for key, (age, c) in ages.items()}
        return one, {**older, id(one.C.buffer): (0, one.C)}
    if isinstance(one, Role):
        body, _ = _block(one.body, {})
        return (one if body is one.body else replace(one, body=body)), ages
    if isinstance(one, If):
        (then, a), (otherwise, b) = _block(one.then, ages), _block(one.otherwise, ages)
        same = then is one.then and otherwise is one.otherwise
        return (one if same else replace(one, then=then, otherwise=otherwise)), _joined(a, b)
    if isinstance(one, For | While):
        before: Ages | None = None
        while before is None or _numbers(before) != _numbers(ages):
            before = ages
            body, after = _block(one.body, ages)
            ages = _joined(ages, after)
        return (one if body is one.body else replace(one, body=body)), ages
    return one, ages


def _joined(a: Ages, b: Ages) -> Ages:
    """What may be under way where two ways meet: the newest product of each fragment counts."""
    return {key: min((x[key] for x in (a, b) if key in x), key=lambda found: found[0]) for key in {**a, **b}}


def _numbers(ages: Ages) -> dict[int, int]:
    return {key: age for key, (age, _) in ages.items()}


def _pending(one: Stmt) -> int | None:
    """What a wait leaves under way; None for other statements."""
    call = one.call if isinstance(one, Do) else None
    return memory.option(call) if isinstance(call, Call) and call.name == "wgmma_wait" and call.options else None
