# SPDX-License-Identifier: Apache-2.0
"""Gradients of scaled dot-product attention in q, k and v (FlashAttention-2, arXiv:2307.08691, section 3.1.2).

Probabilities are computed again from the forward's log-sum-exp, tile by tile. Two kernels: blocks of queries loop over
keys and sum up dq, blocks of keys loop over queries and sum up dk and dv, which for the widest heads are a kernel each.
Every sum is kept in registers by one block in one order, so that results are the same from run to run; one kernel for
all would save two products of seven, and have blocks add to dq in memory in any order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from torch_tile.kernels.attention import score_mod as score_text
from torch_tile.kernels.attention.args import AttentionArgs, AttentionBackwardArgs
from torch_tile.kernels.attention.backward_kernels import key_gradients, query_gradients
from torch_tile.kernels.attention.backward_spec import PADDING, Cuts, cuts_for
from torch_tile.kernels.attention.forward import default_scale, scores, softmax_with_lse
from torch_tile.kernels.attention.memory_order import empty_beside, placed_beside
from torch_tile.kernels.attention.operands import operands_of
from torch_tile.kernels.attention.positions import bounded
from torch_tile.kernels.attention.spec import Form, is_shifted
from torch_tile.kernels.attention.tiling import Problem
from torch_tile.kernels.common import (
    compute_dtype,
    dense_last,
    has_kernels,
    machine_of,
    round_up,
    vector_of,
)
from torch_tile.kernels.epilogue.autodiff import vjp

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def reference(*given: Any, **named: Any) -> Gradients:
    """Gradients of `attention`'s first result: `[B, H, Sq, D]`, `[B, Hkv, Skv, D]` and `[B, Hkv, Skv, Dv]`; and of the
    operands that `keep` names ("mask", "x0".., joined by commas), expanded to all scores, `[n, B, H, Sq, Skv]`.

    Takes the arguments of `AttentionBackwardArgs`: grad and out are `[B, H, Sq, Dv]`, lse is `[B, H, Sq]`; the others
    as in `attention.reference`. Summed in float32 (float64 for float64), each in its tensor's dtype and memory order.
    Does not read `out` and `lse`, so that it can be differentiated in what they were computed from.
    """
    args: AttentionBackwardArgs[torch.Tensor] = AttentionBackwardArgs(*given, **named)
    q, k, v = args.q, args.k, args.v
    dq, dk, dv, kept = gradients(args.grad, args.forward, args.keep)
    return placed_beside(dq, q), placed_beside(dk, k), placed_beside(dv, v), kept.to(q.dtype)


def names_in(keep: str) -> tuple[str, ...]:
    """The operands of which gradients are kept."""
    return tuple(keep.split(",")) if keep else ()


def empty_results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: str) -> Gradients:
    """Tensors for `reference`'s results."""
    kept = q.new_empty((len(names_in(keep)), *q.shape[:3], k.shape[2]))
    return empty_beside(q, q.shape[3]), empty_beside(k, k.shape[3]), empty_beside(v, v.shape[3]), kept


def gradients(grad: torch.Tensor, args: AttentionArgs[torch.Tensor], keep: str = "") -> Gradients:
    """`reference`'s in the dtype of the sums. A score that nobody sees has none, also where a slope is infinite."""
    q, k, v, score = args.q, args.k, args.v, args.score
    offset: Any = args.q_offset
    compute = compute_dtype(q.dtype)
    scale = default_scale(q.shape[3]) if args.scale is None else args.scale
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len, v_dim = v.shape[1:]
    shape = (batch, kv_heads, heads // kv_heads if kv_heads else 1, q_len, kv_len)
    qc, kc, vc = (t.to(compute) for t in (q, k, v))
    p, _ = softmax_with_lse(scores(args._replace(q=qc, k=kc)))
    p, grad = p.reshape(shape), grad.to(compute).reshape(*shape[:4], v_dim)
    dv = torch.matmul(p.mT, grad).sum(2)
    dp = torch.matmul(grad, vc.unsqueeze(2).mT)
    ds = p * (dp - (dp * p).sum(-1, keepdim=True))
    terms = {"acc0": ds, "mask": ds}
    if score:
        products = scores(AttentionArgs(qc, kc, vc, scale=scale))
        by_text = vjp(score, score_text.inputs(products, args.aux or (), offset), ds.reshape(products.shape))
        terms = {name: x.expand_as(products).reshape(shape).masked_fill(p == 0, 0) for name, x in by_text.items()}
        terms["mask"] = ds
    of_product, *kept = (terms.get(name, torch.zeros_like(ds)) for name in ("acc0", *names_in(keep)))
    dq = torch.matmul(of_product, kc.unsqueeze(2)).reshape(q.shape) * scale
    dk = torch.matmul(of_product.mT, qc.reshape(*shape[:4], head_dim)).sum(2) * scale
    stacked = torch.stack(kept) if kept else ds.new_empty(0, *shape)
    return dq, dk, dv, stacked.flatten(2, 3)


def attention_backward(
    *given: Any, cuts: Cuts | None = None, results: Gradients | None = None, **named: Any
) -> Gradients:
    """See `reference`; `cuts` overrides the choice of `cuts_for`.

    `results` may be given, laid out as those of `empty_results`.
    """
    args: AttentionBackwardArgs[torch.Tensor] = AttentionBackwardArgs(*given, **named)
    forward = score_text.as_mask(args.forward)
    args = args._replace(**forward._asdict())
    grad, out, lse, keep = args.grad, args.out, args.lse, args.keep
    q, k, v, mask, causal, scale, window, q_offset, aux, score = forward
    if results is None:
        results = empty_results(q, k, v, keep)
    if not has_kernels(q) or not (q.numel() and k.numel() and v.numel()):
        return _by_reference(results, args)
    batch, kv_heads, kv_len, head_dim = k.shape
    q_len, v_dim, groups = q.shape[2], v.shape[3], q.shape[1] // kv_heads
    tile_d, tile_dv = round_up(head_dim, 16), round_up(v_dim, 16)
    dense = [dense_last(x) for x in (q, k, v, grad, out)]
    machine = machine_of(q)
    forms, operands = operands_of([x for x in (mask, *(aux or ())) if x is not None], kv_heads, machine.is_gpu)
    form = Form(
        q.dtype, tile_d, tile_dv, (tile_d, tile_dv) == (head_dim, v_dim), causal, window > 0,
        None if mask is None else forms[0], groups > 1, True,
        vector_of((*dense, *results[:3]), (head_dim, v_dim)) if machine.is_gpu else 1,
        shifted=is_shifted(causal, window, q_offset), score=score, aux=forms[mask is not None :], keep=names_in(keep),
    )  # fmt: skip
    cuts = cuts or cuts_for(form, Problem(batch * kv_heads, groups * q_len, kv_len, groups), machine)
    if cuts is None:
        return _by_reference(results, args)
    shape = (batch, kv_heads, groups, q_len)

    def grouped(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x.unflatten(1, shape[1:3])
        return made

    statistics = lse.new_empty(*shape[:3], 2, round_up(q_len, PADDING))
    number = float(default_scale(head_dim) if scale is None else scale)
    options = (number, q_offset, bounded(window))
    queries, keys, values, grads, outs = dense
    tensors = grouped(queries), keys, values, *operands
    dq, dk, dv, all_kept = results
    # Of scores that nobody may see, no block stores gradients.
    kept = [grouped(x.zero_() if causal or window else x) for x in all_kept]
    machine.kernel(query_gradients)(cuts.dq, form)(
        *tensors, *kept, grouped(grads), grouped(outs), lse.contiguous().view(shape), grouped(dq), statistics, *options
    )
    for cut, sums in cuts.of_keys:
        machine.kernel(key_gradients)(cut, replace(form, keep=()), sums)(
            *tensors, grouped(grads), statistics, dk, dv, *options
        )
    return results


def _by_reference(results: Gradients, args: AttentionBackwardArgs[torch.Tensor]) -> Gradients:
    for result, value in zip(results, reference(*args), strict=True):
        result.copy_(value)
    return results
