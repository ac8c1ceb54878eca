# SPDX-License-Identifier: Apache-2.0
"""`tile.attention_varlen`, `_lse` and `_backward`: attention over sequences that lie one after the other.

As with `tile.attention`, a call that wants a gradient is the second one, and its backward the third one.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from torch_tile.kernels import compute_dtype
from torch_tile.kernels.attention.args import VarlenArgs, VarlenBackwardArgs
from torch_tile.kernels.attention.arguments import empty_beside
from torch_tile.ops import checks
from torch_tile.ops.attention_common import (
    SCORES,
    Gradients,
    check_heads,
    check_most,
    check_results,
    check_score,
    check_starts,
    check_window,
    counted,
    declare_with_lse,
    kv_head,
    sharding_of_backward,
)
from torch_tile.ops.checks import require
from torch_tile.ops.registration import declare
from torch_tile.ops.registry import Shape
from torch_tile.ops.sharding_rule import Dims, Rule, Spec, broadcast

GRADIENTS = Gradients("attention_varlen", "attention.varlen", VarlenArgs, VarlenBackwardArgs)


def _check(args: VarlenArgs[Tensor]) -> None:
    """Check the arguments of `tile.attention_varlen`."""
    op, (q, k, v) = "attention_varlen", args[:3]
    checks.check_floating(op, q=q, k=k, v=v)
    checks.check_same_dtype(op, q=q, k=k, v=v)
    checks.check_dims(op, "q", q, 3, "[Tq, H, D]")
    checks.check_dims(op, "k", k, 3, "[Tk, Hkv, D]")
    checks.check_dims(op, "v", v, 3, "[Tk, Hkv, Dv]")
    checks.check_size(op, "k", k, 2, q.shape[2], "q's head dimension")
    for dim, what in enumerate(("k's rows", "k's heads")):
        checks.check_size(op, "v", v, dim, k.shape[dim], what)
    check_heads(op, q.shape[1], k.shape[1], ": heads come second, [T, H, D]")
    starts = args.cu_seqlens_q
    checks.check_positions(op, "cu_seqlens_q", starts, 1, "[B + 1]", q=q)
    checks.check_positions(op, "cu_seqlens_k", args.cu_seqlens_k, 1, "[B + 1]", q=q)
    require(starts.shape[0] > 0, lambda: f"tile.{op}: cu_seqlens_q is empty; expected B + 1 numbers, the first one 0")
    checks.check_size(op, "cu_seqlens_k", args.cu_seqlens_k, 0, starts.shape[0], "as cu_seqlens_q")
    check_most(op, "max_seqlen_q", args.max_seqlen_q)
    check_most(op, "max_seqlen_k", args.max_seqlen_k)
    check_window(op, args.window)
    check_score(op, args, (starts.shape[0] - 1, q.shape[1], 1, 1))


def _check_values(args: VarlenArgs[Tensor]) -> None:
    """Check the values of the int32 tensors of `tile.attention_varlen`, on the CPU only."""
    op = "attention_varlen"
    check_starts(op, "cu_seqlens_q", args.cu_seqlens_q, args.max_seqlen_q, args.q.shape[0], "q")
    check_starts(op, "cu_seqlens_k", args.cu_seqlens_k, args.max_seqlen_k, args.k.shape[0], "k")


def _fake_with_lse(args: VarlenArgs[Tensor]) -> tuple[Tensor, Tensor]:
    """Check the arguments of `tile.attention_varlen` and make its empty results."""
    _check(args)
    q = args.q
    return empty_beside(q, args.v.shape[2]), q.new_empty((q.shape[1], q.shape[0]), dtype=compute_dtype(q.dtype))


def _fake_backward(args: VarlenBackwardArgs[Tensor]) -> tuple[Tensor, ...]:
    """Check the arguments of `tile.attention_varlen_backward` and make its empty results."""
    _check(args.forward)
    q, v = args.q, args.v
    rows, heads = (q.shape[0], "q's rows"), (q.shape[1], "q's heads")
    sizes = rows, heads, (v.shape[2], "v's head dimension")
    check_results("attention_varlen_backward", args, ("[Tq, H, Dv]", sizes), ("[H, Tq]", (heads, rows)))
    return tuple(empty_beside(x, x.shape[2]) for x in (q, args.k, v))


def _sharding(args: VarlenArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.attention_varlen` for sharding."""
    heads = args.k.shape[1]
    outputs: tuple[Dims, Dims] = ("query", "head", "v"), ("head", "query")
    inputs = (
        ("query", "head", "d"),
        ("key", kv_head(heads), "d"),
        ("key", kv_head(heads), "v"),
        ("start",),
        ("start",),
        *(broadcast(x, SCORES) for x in args.aux or ()),
    )
    return Rule(
        outputs=outputs,
        inputs=inputs,
        saved=(*inputs, *outputs),
        free=() if "head" in counted(args.score) else ("head",),
        even={} if heads == 1 else {"head": heads},
    )


def _products(args: VarlenArgs[Shape], over_d: int, over_v: int) -> int:
    """Count the operations of the products, as if each query saw the most keys that a sequence has."""
    rows, heads, width = args.q
    return 2 * rows * heads * int(args.max_seqlen_k) * (over_d * width + over_v * args.v[2])


attention_varlen, attention_varlen_lse = declare_with_lse(
    "attention_varlen",
    VarlenArgs[Tensor],
    """Scaled dot-product attention over sequences of different lengths that lie one after the other.

`softmax(score(scale q k^T)) v` of each sequence (arXiv:1706.03762, computed as in arXiv:2205.14135). The queries of a
sequence stand at the end of its keys: query i of n at key `m - n + i` of m.

Args:
    q: `[Tq, H, D]`: the queries of all sequences.
    k: `[Tk, Hkv, D]`; H must be a multiple of Hkv, and query head `h` reads key head `h // (H / Hkv)`.
    v: `[Tk, Hkv, Dv]`.
    cu_seqlens_q: int32 `[B + 1]`: sequence b has the queries from `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]`; the first
        number is 0. A sequence may be empty. Rows behind the last sequence belong to none.
    cu_seqlens_k: int32 `[B + 1]`: the same of keys.
    max_seqlen_q: the most queries that a sequence has. On a GPU only speed depends on it.
    max_seqlen_k: the most keys that a sequence has.
    causal: a query sees the keys up to its own place.
    scale: default `D ** -0.5`.
    window: if positive, a query sees only so many keys up to its own place, and with `causal` none behind it.
    aux: operands of `score`, of a floating dtype or bool, each broadcastable to `[B, H, 1, 1]`. They have no gradient.
    score: a text that changes scores, as in `attention`; `i0..i3` are the sequence, the head, and the places of query
        and key in it, the query's at the end of the keys.

Returns:
    `[Tq, H, Dv]` in q's dtype, dense; Tq and H lie in memory in the order they do in q. A query that sees no key, or
    belongs to no sequence, gives 0.

Values of cu_seqlens are checked on the CPU only. Gradients are the same from run to run.
""",
    "`[H, Tq]`",
    module="attention.varlen",
    fake=_fake_with_lse,
    without_lse=GRADIENTS.without_lse,
    with_lse=GRADIENTS.with_lse,
    check_values=_check_values,
    sharding=_sharding,
    flops=lambda args: _products(args, 1, 1),
    lower_precision=("q", "k", "v", "aux"),
)
attention_varlen_backward: Final = declare(
    "attention_varlen_backward",
    VarlenBackwardArgs[Tensor],
    tuple[Tensor, Tensor, Tensor],
    """Gradients of `attention_varlen` in q, k and v, computed as in arXiv:2307.08691; the same from run to run.

Args:
    grad: `[Tq, H, Dv]`, of q's dtype: the gradient of `out`.
    out: what `attention_varlen_lse` returned first.
    lse: what it returned second.

All others are as for `attention_varlen`.

Returns:
    dq, dk and dv with the shapes and dtypes of q, k and v, dense, in their memory order. Rows that belong to no
    sequence have 0.
""",
    **GRADIENTS.backward_fields,
    fake=_fake_backward,
    check_values=lambda args: _check_values(args.forward),
    sharding=lambda args: sharding_of_backward(args, _sharding(args.forward)),
    flops=lambda args: _products(args.forward, 3, 2),
)
