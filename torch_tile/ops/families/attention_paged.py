# SPDX-License-Identifier: Apache-2.0
"""`tile.attention_paged` and `_lse`: attention over keys and values in pages, as serving keeps them.

The forward runs the kernel; the backward is plain torch and recomputes the probabilities.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_tile.kernels import compute_dtype, kernels
from torch_tile.kernels.attention.args import PagedArgs
from torch_tile.kernels.attention.arguments import empty_beside
from torch_tile.ops import checks
from torch_tile.ops.attention_common import (
    SCORES,
    check_heads,
    check_most,
    check_pages,
    check_score,
    check_starts,
    check_window,
    counted,
    declare_with_lse,
    kv_head,
    none_of,
)
from torch_tile.ops.checks import require, require_type, require_value
from torch_tile.ops.registry import Shape, op_gradients
from torch_tile.ops.saved_args import needs_of, restored_args, save_args
from torch_tile.ops.sharding_rule import Dims, Rule, Spec, broadcast, if_given

FLOAT8 = torch.float8_e4m3fn


def check_page_dtypes(
    op: str, name: str, x: Tensor, k: Tensor, v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> None:
    """Check that pages have the dtype of x, or are float8_e4m3fn with scales, and check these."""
    checks.check_same_dtype(op, k_pages=k, v_pages=v)
    if k.dtype == FLOAT8:
        _check_scale(op, name, x, "k", k, k_scale)
        _check_scale(op, name, x, "v", v, v_scale)
        return
    checks.check_floating(op, **{name: x}, k_pages=k, v_pages=v)
    checks.check_same_dtype(op, **{name: x}, k_pages=k, v_pages=v)
    require_value(
        k_scale is None and v_scale is None,
        lambda: (
            f"tile.{op}: k_scale or v_scale is given, but pages have dtype {k.dtype}; expected {FLOAT8} with scales"
        ),
    )


def _check_scale(op: str, name: str, x: Tensor, of: str, pages: Tensor, scale: Tensor | None) -> None:
    """Check pages of float8 and their scales."""
    checks.check_device(op, f"{of}_pages", pages, name, x)
    if scale is None:
        raise ValueError(f"tile.{op}: {of}_scale is None; expected float32 scales, as {of}_pages has dtype {FLOAT8}")
    require_type(
        scale.dtype == torch.float32, lambda: f"tile.{op}: {of}_scale has dtype {scale.dtype}; expected torch.float32"
    )
    checks.check_device(op, f"{of}_scale", scale, name, x)
    checks.check_dims(op, f"{of}_scale", scale, 3, "[pages or 1, page or 1, Hkv or 1]")
    checks.check_broadcasts(op, f"{of}_scale", scale, pages.shape[:3], f"{of}_pages")


def _check_values(args: PagedArgs[Tensor]) -> None:
    """Check the values of the int32 tensors of `tile.attention_paged`, on the CPU only."""
    op, table = "attention_paged", ("block_tables", args.block_tables)
    check_pages(op, args.k_pages.shape[:2], table, ("lengths", args.lengths))
    if args.cu_seqlens_q is not None:
        check_starts(op, "cu_seqlens_q", args.cu_seqlens_q, args.max_seqlen_q, args.q.shape[0], "q")


def _fake_with_lse(args: PagedArgs[Tensor]) -> tuple[Tensor, Tensor]:
    """Check the arguments of `tile.attention_paged` and make its empty results."""
    op, q, k, v = "attention_paged", args.q, args.k_pages, args.v_pages
    ragged = args.cu_seqlens_q is not None
    checks.check_floating(op, q=q)
    check_page_dtypes(op, "q", q, k, v, args.k_scale, args.v_scale)
    checks.check_dims(op, "q", q, *((3, "[Tq, H, D], as cu_seqlens_q is given") if ragged else (4, "[B, Sq, H, D]")))
    checks.check_dims(op, "k_pages", k, 4, "[pages, page, Hkv, D]")
    checks.check_dims(op, "v_pages", v, 4, "[pages, page, Hkv, Dv]")
    checks.check_size(op, "k_pages", k, 3, q.shape[-1], "q's head dimension")
    for dim, what in enumerate(("k_pages' pages", "k_pages' page size", "k_pages' heads")):
        checks.check_size(op, "v_pages", v, dim, k.shape[dim], what)
    check_heads(op, q.shape[-2], k.shape[2], ": heads come last but one, q [B, Sq, H, D], pages [pages, rows, Hkv, D]")
    checks.check_positions(op, "block_tables", args.block_tables, 2, "[B, n]", q=q)
    checks.check_positions(op, "lengths", args.lengths, 1, "[B]", q=q)
    batch = args.lengths.shape[0]
    checks.check_size(op, "block_tables", args.block_tables, 0, batch, "as lengths")
    most = args.max_seqlen_q
    if args.cu_seqlens_q is not None:
        checks.check_positions(op, "cu_seqlens_q", args.cu_seqlens_q, 1, "[B + 1]", q=q)
        checks.check_size(op, "cu_seqlens_q", args.cu_seqlens_q, 0, batch + 1, "the sequences of lengths and one more")
        check_most(op, "max_seqlen_q", most)
    else:
        checks.check_size(op, "lengths", args.lengths, 0, q.shape[0], "q's batch")
        require_value(
            isinstance(most, int) and most == 0,
            lambda: f"tile.{op}: max_seqlen_q is {most}; expected 0, as cu_seqlens_q is not given",
        )
    checks.check_count_or_auto(op, "num_splits", args.num_splits)
    check_window(op, args.window)
    check_score(op, args, (batch, q.shape[-2], 1, 1))
    shape = (q.shape[1], q.shape[0]) if ragged else (q.shape[0], q.shape[2], q.shape[1])
    return empty_beside(q, v.shape[3]), q.new_empty(shape, dtype=compute_dtype(q.dtype))


def _save(ctx: Any, args: PagedArgs[Tensor], output: Any) -> None:
    """Save for the gradient of `tile.attention_paged` what it needs."""
    if isinstance(output, tuple):
        ctx.mark_non_differentiable(output[1])
    save_args(ctx, args)


def _backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None = None) -> tuple[Any, ...]:
    """Compute the gradients of `tile.attention_paged`."""
    args, _ = restored_args(ctx)
    needs = needs_of(ctx, PagedArgs)
    of_aux = none_of("attention_paged", needs.aux)
    require(
        args.k_scale is None or not (needs.k_pages or needs.v_pages or needs.k_scale or needs.v_scale),
        lambda: "tile.attention_paged: pages of float8 and their scales have no gradient; detach them",
    )
    found = kernels("attention.paged").gradients(grad, args)
    dq, dk, dv = (new.to(args.q.dtype) for new in found)
    if args.k_scale is not None:
        return op_gradients(PagedArgs, q=dq, aux=of_aux)
    return op_gradients(PagedArgs, q=dq, k_pages=dk, v_pages=dv, aux=of_aux)


def _sharding(args: PagedArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.attention_paged` for sharding."""
    heads = args.k_pages.shape[2]
    ragged = args.cu_seqlens_q is not None
    rows = ("query",) if ragged else ("batch", "query")
    lse: Dims = ("head", "query") if ragged else ("batch", "head", "query")
    inputs = [
        (*rows, "head", "d"),
        ("page", "key", kv_head(heads), "d"),
        ("page", "key", kv_head(heads), "v"),
        ("batch", "entry"),
        ("batch",),
        if_given(args.cu_seqlens_q, ("start",)),
    ]
    operands = [broadcast(x, SCORES) for x in args.aux or ()]
    scales = [broadcast(x, ("page", "key", kv_head(heads))) for x in (args.k_scale, args.v_scale)]
    free = ("head",) if ragged else ("batch", "head")
    return Rule(
        outputs=[(*rows, "head", "v"), lse],
        inputs=[*inputs, *operands, *scales],
        free=tuple(dim for dim in free if dim not in counted(args.score)),
        even={} if heads == 1 else {"head": heads},
    )


def _flops(args: PagedArgs[Shape]) -> int:
    """Count the operations of `tile.attention_paged`."""
    *rows, heads, width = args.q
    queries = 1
    for n in rows:
        queries *= n
    return 2 * queries * heads * args.block_tables[1] * args.k_pages[1] * (width + args.v_pages[3])


attention_paged, attention_paged_lse = declare_with_lse(
    "attention_paged",
    PagedArgs[Tensor],
    """Scaled dot-product attention over keys and values in pages: decoding, and prefilling by chunks.

`softmax(score(scale q k^T)) v` of each sequence. Its queries stand at the end of its keys, which include their own.

Args:
    q: `[B, Sq, H, D]`, or `[Tq, H, D]` with cu_seqlens_q, where sequences have different numbers of queries.
    k_pages: `[pages, page, Hkv, D]`; H must be a multiple of Hkv, and query head `h` reads key head `h // (H / Hkv)`.
        Pages of 16, 32, 64 or a multiple of 128 positions are copied as a whole or in parts, others row by row.
    v_pages: `[pages, page, Hkv, Dv]`.
    block_tables: int32 `[B, n]`: position `s` of sequence `b` lies in page `block_tables[b, s // page]`, row
        `s % page`. Entries past a sequence's end, and rows there, are not read for values.
    lengths: int32 `[B]`: the keys of each sequence, 0 or more, the new ones included.
    cu_seqlens_q: int32 `[B + 1]`: sequence b has the queries from `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]`.
    max_seqlen_q: the most queries that a sequence has, with cu_seqlens_q only. On a GPU only speed depends on it.
    causal: a query sees the keys up to its own place.
    scale: default `D ** -0.5`.
    window: if positive, a query sees only so many keys up to its own place.
    num_splits: into how many parts a kernel splits the keys of a sequence; 0 lets it choose. The result is the same.
    aux: operands of `score`, as in `attention_varlen`. They have no gradient.
    score: a text that changes scores, as in `attention_varlen`.
    k_scale: for pages of float8_e4m3fn, float32 `[pages or 1, page or 1, Hkv or 1]`: keys are `k_pages * k_scale`,
        rounded once to q's dtype. One scale for all is `[1, 1, 1]`, one for each head `[1, 1, Hkv]`.
    v_scale: the same of values. Beside others, or in bfloat16, one below 2^-80 may count as 0.

Rounding to float8_e4m3fn changes a key by at most 2^-4 of itself, or by 2^-10 scales if it is below 2^-6 scales. So
scores differ from those of unrounded keys by at most `2^-4 |scale| sum |q| |k|` and what such small keys add, and
results by at most 2^-4 of the weighted mean of |v| and what the weights change. `append_to_pages` makes such pages. A
cache that is not in pages has one page for each sequence: `block_tables = arange(B)[:, None]`.

Returns:
    `[B, Sq, H, Dv]` or `[Tq, H, Dv]` in q's dtype, dense; all dimensions but Dv lie in memory in the order they do in
    q. A query that sees no key, or belongs to no sequence, gives 0.

Values of block_tables, lengths and cu_seqlens_q are checked on the CPU only.
""",
    "`[B, H, Sq]` or `[H, Tq]`",
    module="attention.paged",
    fake=_fake_with_lse,
    check_values=_check_values,
    setup_context=_save,
    backward=_backward,
    sharding=_sharding,
    flops=_flops,
    lower_precision=("q", "k_pages", "v_pages", "aux"),  # pages of float8 stay as they are
)
