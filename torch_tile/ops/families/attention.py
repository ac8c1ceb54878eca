# SPDX-License-Identifier: Apache-2.0
"""`tile.attention`, `tile.attention_lse` and `tile.attention_backward`: scaled dot-product attention.

If a gradient is wanted, `attention` runs `attention_lse`, which also keeps the log-sum-exp. `attention_backward`
computes the probabilities again from both. It stores the gradient of each score if a mask or an operand of a score
function needs a gradient. Gradients of gradients are plain torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_tile.kernels import compute_dtype, kernels
from torch_tile.kernels.attention.args import AttentionArgs, AttentionBackwardArgs
from torch_tile.kernels.attention.arguments import empty_beside
from torch_tile.ops import checks
from torch_tile.ops.attention_common import (
    SCORES,
    Gradients,
    batched_sizes,
    check_batched,
    check_results,
    check_score,
    counted,
    declare_with_lse,
    kv_head,
)
from torch_tile.ops.checks import require_type, require_value
from torch_tile.ops.recomputed import gradients_of
from torch_tile.ops.registration import register
from torch_tile.ops.registry import Shape, as_listed, op_gradients
from torch_tile.ops.saved_args import needs_of, restored_args
from torch_tile.ops.sharding_rule import Rule, Spec, broadcast

GRADIENTS = Gradients("attention", "attention.backward", AttentionArgs, AttentionBackwardArgs)


def _check(args: AttentionArgs[Tensor]) -> None:
    """Check the arguments of `tile.attention`."""
    op, (q, k, _, mask) = "attention", args[:4]
    check_batched(op, args)
    shape = *q.shape[:3], k.shape[2]
    if mask is not None:
        require_type(
            mask.dtype == torch.bool or mask.dtype in checks.FLOATING,
            lambda: f"tile.{op}: mask has dtype {mask.dtype}; expected bool (True: visible) or a floating dtype",
        )
        checks.check_device(op, "mask", mask, "q", q)
        checks.check_broadcasts(op, "mask", mask, shape)
    check_score(op, args, shape)


def _fake_with_lse(args: AttentionArgs[Tensor]) -> tuple[Tensor, Tensor]:
    """Check the arguments of `tile.attention` and make its empty results."""
    _check(args)
    q = args.q
    lse_dtype = compute_dtype(q.dtype)
    return empty_beside(q, args.v.shape[3]), q.new_empty(q.shape[:3], dtype=lse_dtype)


def _gradients(ctx: Any, grad: Tensor, grad_lse: Tensor | None = None) -> tuple[Any, ...]:
    """Compute the gradients of `tile.attention`."""
    args, (out, lse) = restored_args(ctx)
    needs = needs_of(ctx, AttentionArgs)
    wanted = {"mask": (args.mask, args.mask is not None and needs.mask)}
    if args.aux is not None:
        wanted |= {f"x{n}": each for n, each in enumerate(zip(args.aux, needs.aux or (), strict=True))}
    keep = [name for name, (x, needed) in wanted.items() if needed and x is not None and x.is_floating_point()]
    # Gradients of gradients are computed from the inputs alone.
    given = args.backward(grad, out.detach(), lse.detach(), ",".join(keep))
    dq, dk, dv, kept = torch.ops.tile.attention_backward.default(*given)
    of = {name: _summed(full, wanted[name][0]) for name, full in zip(keep, kept, strict=True)}
    of_aux = None if args.aux is None else [of.get(f"x{n}") for n in range(len(args.aux))]
    return op_gradients(AttentionArgs, q=dq, k=dk, v=dv, mask=of.get("mask"), aux=of_aux)


def _summed(full: Tensor, like: Any) -> Tensor:
    """Sum the gradient of an expanded operand to the operand's own shape."""
    return full.to(torch.promote_types(full.dtype, like.dtype)).sum_to_size(like.shape).to(like.dtype)


def _fake_backward(args: AttentionBackwardArgs[Tensor]) -> tuple[Tensor, ...]:
    """Check the arguments of `tile.attention_backward` and make its empty results."""
    _check(args.forward)
    mask, keep = args.mask, args.keep
    known = [*(["mask"] if mask is not None else []), *(f"x{n}" for n in range(len(args.aux or ())))]
    require_value(
        not keep or set(keep.split(",")) <= set(known),
        lambda: f"tile.attention_backward: keep is {keep!r}; expected some of {known}, joined by commas",
    )
    sizes = batched_sizes(args)
    check_results("attention_backward", args, ("[B, H, Sq, Dv]", sizes), ("[B, H, Sq]", sizes[:3]))
    made: tuple[Tensor, ...] = kernels("attention.backward").empty_results(args.q, args.k, args.v, args.keep)
    return made


def _save_backward(ctx: Any, args: AttentionBackwardArgs[Tensor], output: Any) -> None:
    """Save for the gradient of `tile.attention_backward` what it needs."""
    GRADIENTS.save_backward(ctx, args, output)
    ctx.keep = args.keep


def _gradients_of_gradients(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    """Compute gradients of gradients by autograd of the reference, which recomputes `out` and `lse`."""

    def computed(*tensors: Any) -> list[Tensor]:
        args, (grad,) = restored_args(ctx, tensors)
        *found, kept = kernels("attention.backward").gradients(grad, args, ctx.keep)
        found = [new.to(x.dtype) for new, x in zip(found, args[:3], strict=True)]
        return [*found, kept.to(found[0].dtype)]

    needs = needs_of(ctx, AttentionBackwardArgs)
    needed = needs.q, needs.k, needs.v, needs.mask, *(needs.aux or ()), needs.grad
    q, k, v, mask, *aux, grad = gradients_of(computed, ctx.saved_tensors, needed, grads)
    of_aux = None if ctx.args.aux is None else aux
    return op_gradients(AttentionBackwardArgs, grad=grad, q=q, k=k, v=v, mask=mask, aux=of_aux)


def _sharding(args: AttentionArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.attention` for sharding."""
    heads = args.k.shape[1]
    hidden = counted(args.score) | ({"query"} if args.causal or args.window else set())
    outputs = ("batch", "head", "query", "v"), ("batch", "head", "query")
    inputs = (
        ("batch", "head", "query", "d"),
        ("batch", kv_head(heads), "key", "d"),
        ("batch", kv_head(heads), "key", "v"),
        *(broadcast(x, SCORES) for x in (args.mask, *(args.aux or ()))),
    )
    return Rule(
        outputs=outputs,
        inputs=inputs,
        saved=(*inputs, *outputs),
        free=tuple(dim for dim in ("batch", "head", "query") if dim not in hidden),
        # Query heads are where their head of keys is only if every rank has as many of those.
        even={} if heads == 1 else {"head": heads},
    )


def _sharding_of_backward(args: AttentionBackwardArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.attention_backward` for sharding."""
    forward = _sharding(args.forward)
    q_dims, k_dims, v_dims, *operands = forward.inputs
    out_dims, lse_dims = forward.outputs
    # Gradients of keys are summed over queries, and over the heads that share one of keys.
    free = ("batch", "head") if k_dims and "head" in k_dims else ("batch",)
    return Rule(
        outputs=[
            *(dims for dims in (q_dims, k_dims, v_dims) if dims is not None),
            ("", "batch", "head", "query", "key"),
        ],
        inputs=[out_dims, q_dims, k_dims, v_dims, out_dims, lse_dims, *operands],
        free=tuple(dim for dim in free if dim in forward.free),
        even=forward.even,
        saved=[*forward.inputs, out_dims],
    )


def _products(args: AttentionArgs[Shape], pairs: int, over_d: int, over_v: int) -> int:
    """Count the operations of so many products over each head dimension, for pairs of a query and a key."""
    return 2 * math.prod(args.q[:2]) * pairs * (over_d * args.q[3] + over_v * args.v[3])


def _visible(args: AttentionArgs[Shape]) -> int:
    """Count the pairs of a query and a key that a causal rule leaves. Without one, count all pairs."""
    queries, keys, offset, window = args.q[2], args.k[2], int(args.q_offset), args.window
    if not args.causal:
        return queries * keys
    ends = (min(keys, max(0, i + offset + 1)) for i in range(queries))
    starts = (max(0, i + offset + 1 - window) if window else 0 for i in range(queries))
    return sum(max(0, end - start) for start, end in zip(starts, ends, strict=True))


def _as_sdpa(args: AttentionArgs[Tensor]) -> Tensor:
    """Compute attention as `F.scaled_dot_product_attention`, or written out where scores are modified."""
    q, k, v = args.q, args.k, args.v
    mask: Any = args.mask
    at_zero = isinstance(args.q_offset, int) and args.q_offset == 0
    plain_causal = args.causal and not args.window and at_zero and mask is None and not args.score
    if not plain_causal and (args.causal or args.window):
        keys = torch.arange(k.shape[2], device=q.device)
        queries = torch.arange(q.shape[2], device=q.device)[:, None] + args.q_offset
        keep: Any = keys <= queries if args.causal else keys == keys
        if args.window:
            keep = keep & (keys > queries - args.window)
        if mask is None:
            mask = keep
        elif mask.dtype == torch.bool:
            mask = mask & keep
        else:
            mask = torch.where(keep, mask, -torch.inf)
    if args.score:
        return _with_scores(args._replace(mask=mask))
    heads = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, plain_causal, scale=args.scale, **heads)


def _with_scores(args: AttentionArgs[Tensor]) -> Tensor:
    """Compute attention with modified scores by plain torch operators. The mask holds the causal rule, too."""
    from torch_tile.kernels.attention.forward import default_scale
    from torch_tile.kernels.attention.score_mod import modified

    q, mask = args.q, args.mask
    offset: Any = args.q_offset
    groups = q.shape[1] // args.k.shape[1]
    k, v = (x if groups == 1 else x.repeat_interleave(groups, 1) for x in (args.k, args.v))
    scale = default_scale(q.shape[3]) if args.scale is None else args.scale
    s = torch.matmul(q, k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
    s = modified(args.score, s, args.aux or (), offset)
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
    empty = (s == -torch.inf).all(-1, keepdim=True)
    return torch.matmul(torch.softmax(s, -1).masked_fill(empty, 0.0).to(v.dtype), v)


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    q_offset: int | torch.SymInt = 0,
    aux: Sequence[Tensor] | None = None,
    score: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of `attention` in q, k and v, as in arXiv:2307.08691.

    They are the same from run to run, except dq over 512 keys or more on Hopper (arXiv:2407.08608). Float32 atomics
    add up its sums there. Under `torch.use_deterministic_algorithms` dq is the same, too.

    Args:
        grad: `[B, H, Sq, Dv]`, of q's dtype: the gradient of `out`.
        q: as for `attention`.
        k: `[B, Hkv, Skv, D]`.
        v: `[B, Hkv, Skv, Dv]`.
        out: what `attention_lse` returned first.
        lse: what it returned second.
        mask: as for `attention`; it gets no gradient here.
        causal: as for `attention`, like all that follow.
        scale: see there.
        window: see there.
        q_offset: see there.
        aux: see there; no gradient here.
        score: see there.

    Returns:
        dq, dk and dv with the shapes and dtypes of q, k and v, dense, in their memory order.
    """
    given = AttentionArgs(q, k, v, mask, causal, scale, window, q_offset, aux, score).backward(grad, out, lse)
    dq, dk, dv, _ = torch.ops.tile.attention_backward.default(*map(as_listed, given))
    return dq, dk, dv


attention, attention_lse = declare_with_lse(
    "attention",
    AttentionArgs[Tensor],
    """Scaled dot-product attention, `softmax(score(scale q k^T) + mask) v`.

arXiv:1706.03762, computed as in arXiv:2205.14135.

Args:
    q: `[B, H, Sq, D]`.
    k: `[B, Hkv, Skv, D]`; H must be a multiple of Hkv, and query head `h` reads key head `h // (H / Hkv)`.
    v: `[B, Hkv, Skv, Dv]`.
    mask: broadcastable to `[B, H, Sq, Skv]`; bool (True: visible) or floating (added to the scaled scores).
    causal: query `i` sees the keys `j <= i + q_offset`.
    scale: default `D ** -0.5`.
    window: if positive, query `i` sees only the keys `j > i + q_offset - window`, with or without `causal`.
    q_offset: position of the first query, `-2**29` to `2**29`: 0 is `is_causal` of torch, `Skv - Sq` aligns the
        ends.
    aux: operands of `score`, of a floating dtype or bool, each broadcastable to `[B, H, Sq, Skv]`.
    score: a text of `gemm`'s epilogue language that changes scores before the mask: `acc0` is the scaled product,
        `x0..` are `aux`, and `i0..i3` the numbers of the batch, the head, the query plus `q_offset`, and the key.
        `"v0=sub(i3,i2);v1=mul(x0,v0);v2=add(acc0,v1);ret v2"` adds `x0 * (key - query)`, which is ALiBi.

Returns:
    `[B, H, Sq, Dv]` in q's dtype, dense. B, H and Sq lie in memory in the order they do in q, by falling stride,
    with Dv innermost: of a q that is a view of `[B, Sq, H, D]`, `out.transpose(1, 2)` is contiguous. A query that
    sees no key gives 0.
""",
    "`[B, H, Sq]`",
    module="attention.forward",
    fake=_fake_with_lse,
    without_lse={**GRADIENTS.without_lse, "as_aten": _as_sdpa},
    with_lse={**GRADIENTS.with_lse, "backward": _gradients},
    sharding=_sharding,
    flops=lambda args: _products(args, args.q[2] * args.k[2], 1, 1),
    least_flops=lambda args: _products(args, _visible(args), 1, 1),
    lower_precision=("q", "k", "v", "mask", "aux"),
)
register(
    name="attention_backward",
    args=AttentionBackwardArgs,
    module="attention.backward",
    returns=("dq", "dk", "dv", "kept"),
    form=attention_backward,
    fake=_fake_backward,
    run=lambda args, out: kernels("attention.backward").attention_backward(*args, results=out),
    setup_context=_save_backward,
    backward=_gradients_of_gradients,
    sharding=_sharding_of_backward,
    flops=lambda args: _products(args.forward, args.q[2] * args.k[2], 3, 2),
    least_flops=lambda args: _products(args.forward, _visible(args.forward), 3, 2),
)
