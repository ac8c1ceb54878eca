# SPDX-License-Identifier: Apache-2.0
"""Gradients of scaled dot-product attention in q, k and v (FlashAttention-2, arXiv:2307.08691, section 3.1.2).

Probabilities are computed again from the forward's log-sum-exp, tile by tile. Two kernels: blocks of queries loop over
keys and sum up dq, blocks of keys loop over queries and sum up dk and dv. Every sum is kept in registers by one block
in one order, so that results are the same from run to run; one kernel for all would save two products of seven, and
have blocks add to dq in memory in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.jit import jit
from torch_tile.kernels import score as score_text
from torch_tile.kernels.attention import default_scale, scores, softmax_with_lse, store_rows, store_staged
from torch_tile.kernels.attention_backward_form import (
    PADDING,
    Cuts,
    cuts_for,
    cuts_queries,
    query_blocks,
    seen_by,
)
from torch_tile.kernels.attention_config import Problem
from torch_tile.kernels.attention_form import Config, Form, is_shifted
from torch_tile.kernels.attention_weights import weigh
from torch_tile.kernels.common import (
    LOG2_E,
    compute_dtype,
    dense_last,
    dynamic,
    has_kernels,
    machine_of,
    round_up,
    strided,
    vector_of,
)
from torch_tile.kernels.epilogue_gradient import vjp
from torch_tile.kernels.memory_order import empty_beside, placed_beside
from torch_tile.kernels.positions import bounded
from torch_tile.kernels.score_operands import Rows, hold, load, operands_of

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def reference(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    q_offset: int = 0,
    keep: str = "",
    aux: Sequence[torch.Tensor] = (),
    score: str = "",
) -> Gradients:
    """Gradients of `attention`'s first result: `[B, H, Sq, D]`, `[B, Hkv, Skv, D]` and `[B, Hkv, Skv, Dv]`; and of the
    operands that `keep` names ("mask", "x0".., joined by commas), expanded to all scores, `[n, B, H, Sq, Skv]`.

    grad and out are `[B, H, Sq, Dv]`, lse is `[B, H, Sq]`; the others as in `attention.reference`. Summed in float32
    (float64 for float64), each in its tensor's dtype and memory order. Does not read `out` and `lse`, so that it can be
    differentiated in what they were computed from.
    """
    dq, dk, dv, kept = gradients(grad, q, k, v, mask, causal, scale, window, q_offset, keep, aux, score)
    return placed_beside(dq, q), placed_beside(dk, k), placed_beside(dv, v), kept.to(q.dtype)


def names_in(keep: str) -> tuple[str, ...]:
    """The operands of which gradients are kept."""
    return tuple(keep.split(",")) if keep else ()


def empty_results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: str) -> Gradients:
    """Tensors for `reference`'s results."""
    kept = q.new_empty((len(names_in(keep)), *q.shape[:3], k.shape[2]))
    return empty_beside(q, q.shape[3]), empty_beside(k, k.shape[3]), empty_beside(v, v.shape[3]), kept


def gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    window: int,
    q_offset: int,
    keep: str = "",
    aux: Sequence[torch.Tensor] = (),
    score: str = "",
) -> Gradients:
    """`reference`'s in the dtype of the sums. A score that nobody sees has none, also where a slope is infinite."""
    compute = compute_dtype(q.dtype)
    scale = default_scale(q.shape[3]) if scale is None else scale
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len, v_dim = v.shape[1:]
    shape = (batch, kv_heads, heads // kv_heads if kv_heads else 1, q_len, kv_len)
    qc, kc, vc = (t.to(compute) for t in (q, k, v))
    p, _ = softmax_with_lse(scores(qc, kc, mask, causal, scale, window, q_offset, aux, score))
    p, grad = p.reshape(shape), grad.to(compute).reshape(*shape[:4], v_dim)
    dv = torch.matmul(p.mT, grad).sum(2)
    dp = torch.matmul(grad, vc.unsqueeze(2).mT)
    ds = p * (dp - (dp * p).sum(-1, keepdim=True))
    terms = {"acc0": ds, "mask": ds}
    if score:
        products = scores(qc, kc, None, False, scale, 0, 0)
        by_text = vjp(score, score_text.inputs(products, aux, q_offset), ds.reshape(products.shape))
        terms = {name: x.expand_as(products).reshape(shape).masked_fill(p == 0, 0) for name, x in by_text.items()}
        terms["mask"] = ds
    of_product, *kept = (terms.get(name, torch.zeros_like(ds)) for name in ("acc0", *names_in(keep)))
    dq = torch.matmul(of_product, kc.unsqueeze(2)).reshape(q.shape) * scale
    dk = torch.matmul(of_product.mT, qc.reshape(*shape[:4], head_dim)).sum(2) * scale
    stacked = torch.stack(kept) if kept else ds.new_empty(0, *shape)
    return dq, dk, dv, stacked.flatten(2, 3)


# Fast: exp2 of what is below -126 is 0, which saves three instructions for each score.
FAST = {"tl.enable_fast_math": True}


@jit(pass_configs=FAST)  # type: ignore[untyped-decorator]
def query_gradients(config: Config, form: Form) -> Any:
    """dq of a block of queries, two numbers of each query for `key_gradients`, in rows of whole blocks, and what is
    kept of each score that it may see.

    The first number is what `probability` takes, infinite for a query that sees no key; the second is the sum of
    grad * out, which is what all probabilities' gradients of a query have in common.
    """
    rows, keys = config.block_q, config.block_kv
    accum = compute_dtype(form.dtype)
    alloc_weights = T.alloc_shared if config.shared_weights else T.alloc_fragment
    infinity = T.infinity(accum)
    batch, kv_heads, q_len, kv_len = T.dynamic("batch, kv_heads, q_len, kv_len")
    padded = dynamic("padded", PADDING)
    groups = T.dynamic("groups") if form.grouped else 1
    d, dv = (form.tile_d, form.tile_dv) if form.exact else (dynamic("d", form.vector), dynamic("dv", form.vector))
    q_shape = (batch, kv_heads, groups, q_len)
    operand_types = form.operand_types(q_shape[0], q_shape[1:3], q_shape[3], kv_len)
    kept_types = [T.Tensor((*q_shape, kv_len), form.dtype)] * len(form.keep)
    slopes = form.slopes

    @T.prim_func
    def query_gradients(
        q: strided("q", (*q_shape, d), form.dtype, multiple=form.vector),
        k: strided("k", (batch, kv_heads, kv_len, d), form.dtype, multiple=form.vector),
        v: strided("v", (batch, kv_heads, kv_len, dv), form.dtype, multiple=form.vector),
        *operands: [*operand_types, *kept_types],
        grad: strided("grad", (*q_shape, dv), form.dtype, multiple=form.vector),
        out: strided("out", (*q_shape, dv), form.dtype, multiple=form.vector),
        lse: T.Tensor(q_shape, accum),
        dq: strided("dq", (*q_shape, d), form.dtype, multiple=form.vector),
        statistics: T.Tensor((*q_shape[:3], 2, padded), accum),
        scale: accum,
        q_offset: T.int32,
        window: T.int32,
    ):
        blocks = padded // rows
        with T.Kernel(*config.grid(blocks, kv_heads * groups, batch, 1), threads=config.threads) as (bx, by, bz):
            T.annotate_min_blocks_per_sm(config.blocks)
            block, any_head, sequence, _ = config.place(bx, by, bz, blocks, kv_heads * groups, 1)
            head, member = any_head // groups, any_head % groups
            here = (sequence, head, member)
            q_tile = T.alloc_shared((rows, form.tile_d), form.dtype)
            grad_tile = T.alloc_shared((rows, form.tile_dv), form.dtype)
            k_tile = T.alloc_shared((keys, form.tile_d), form.dtype)
            v_tile = T.alloc_shared((keys, form.tile_dv), form.dtype)
            queries = Rows(block * rows, q_len, q_len, False, *here, groups, q_offset)
            held = hold(form.operands, operands[: len(operand_types)], (rows, keys), config.tiled, queries)
            common = T.alloc_fragment((rows,), accum)
            peak = T.alloc_fragment((rows,), accum)
            weight = T.alloc_fragment((rows,), accum)

            T.copy(grad[(*here, block * rows, 0)], grad_tile)
            product = T.alloc_fragment((rows, form.tile_dv), accum)
            for i, c in T.Parallel(rows, form.tile_dv):
                product[i, c] = T.cast(grad_tile[i, c], accum) * T.cast(out[(*here, block * rows + i, c)], accum)
            T.reduce_sum(product, common, dim=1)
            for i in T.Parallel(rows):
                log_sum = lse[(*here, block * rows + i)]
                peak[i] = T.if_then_else(log_sum == -infinity, infinity, log_sum if form.lows else log_sum * LOG2_E)
            T.fill(weight, scale)
            T.copy(peak, statistics[(*here, 0, block * rows)])
            T.copy(common, statistics[(*here, 1, block * rows)])

            T.copy(q[(*here, block * rows, 0)], q_tile)
            p = T.alloc_fragment((rows, keys), accum)
            dp = T.alloc_fragment((rows, keys), accum)
            ds = alloc_weights((rows, keys), form.dtype)
            # For each slope the probabilities times it, and later the gradients: the first are those of products.
            weights = [p, *[T.alloc_fragment((rows, keys), accum) for _ in slopes[1:]]]
            grads = [ds, *[T.alloc_fragment((rows, keys), form.dtype) for _ in slopes[1:]]]
            sums = T.alloc_fragment((rows, form.tile_d), accum)
            T.clear(sums)
            extremes = (block * rows, T.min(block * rows + rows - 1, q_len - 1))
            first, end = form.key_blocks(config, extremes, q_offset, window, kv_len, 1, 0)
            for turn in T.Pipelined(end - first, num_stages=config.stages):
                step = end - 1 - turn if form.backwards(config) else first + turn
                load(held, queries, step * keys)
                T.copy(k[sequence, head, step * keys, 0], k_tile)
                T.gemm(q_tile, k_tile, p, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                T.copy(v[sequence, head, step * keys, 0], v_tile)
                T.gemm(grad_tile, v_tile, dp, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                for i, j in T.Parallel(rows, keys):
                    found = weigh(form, p[i, j], scale, peak[i], held, queries, i, j, step * keys)[1]
                    for weight_of, value in zip(weights, found, strict=True):
                        weight_of[i, j] = value
                if form.cut(config, turn, step, extremes, q_offset, window, kv_len):
                    for i, j in T.Parallel(rows, keys):
                        seen = form.sees(block * rows + i, step * keys, j, keys, q_offset, window, kv_len)
                        for weight_of in weights:
                            weight_of[i, j] = T.if_then_else(seen, weight_of[i, j], 0.0)
                for i, j in T.Parallel(rows, keys):
                    for weight_of, grad_of in zip(weights, grads, strict=True):
                        grad_of[i, j] = T.cast(weight_of[i, j] * (dp[i, j] - common[i]), form.dtype)
                for name, all_grads in zip(form.keep, operands[len(operand_types) :], strict=True):
                    T.copy(grads[slopes.index(form.slope(name))], all_grads[(*here, block * rows, step * keys)])
                T.gemm(ds, k_tile, sums, policy=T.GemmWarpPolicy.FullRow)

            (store_staged if config.staged else store_rows)(sums, weight, dq, here, block * rows)

    return query_gradients


@jit(pass_configs=FAST)  # type: ignore[untyped-decorator]
def key_gradients(config: Config, form: Form) -> Any:
    """dk and dv of a block of keys, of all heads that share them. Tiles of scores have a row for each key, so that
    they are left operands in registers of both sums.
    """
    queries, rows = config.block_q, config.block_kv
    accum = compute_dtype(form.dtype)
    alloc_weights = T.alloc_shared if config.shared_weights else T.alloc_fragment
    batch, kv_heads, q_len, kv_len = T.dynamic("batch, kv_heads, q_len, kv_len")
    padded = dynamic("padded", PADDING)
    groups = T.dynamic("groups") if form.grouped else 1
    d, dv = (form.tile_d, form.tile_dv) if form.exact else (dynamic("d", form.vector), dynamic("dv", form.vector))
    q_shape = (batch, kv_heads, groups, q_len)

    @T.prim_func
    def key_gradients(
        q: strided("q", (*q_shape, d), form.dtype, multiple=form.vector),
        k: strided("k", (batch, kv_heads, kv_len, d), form.dtype, multiple=form.vector),
        v: strided("v", (batch, kv_heads, kv_len, dv), form.dtype, multiple=form.vector),
        *operands: form.operand_types(q_shape[0], q_shape[1:3], q_shape[3], kv_len),
        grad: strided("grad", (*q_shape, dv), form.dtype, multiple=form.vector),
        statistics: T.Tensor((*q_shape[:3], 2, padded), accum),
        dk: strided("dk", (batch, kv_heads, kv_len, d), form.dtype, multiple=form.vector),
        dv_out: strided("dv_out", (batch, kv_heads, kv_len, dv), form.dtype, multiple=form.vector),
        scale: accum,
        q_offset: T.int32,
        window: T.int32,
    ):
        blocks = T.ceildiv(kv_len, rows)
        with T.Kernel(*config.grid(blocks, kv_heads, batch, 1), threads=config.threads) as (bx, by, bz):
            T.annotate_min_blocks_per_sm(config.blocks)
            place, head, sequence, _ = config.place(bx, by, bz, blocks, kv_heads, 1)
            block = blocks - 1 - place if config.heavy_first else place  # the first keys are the heavy ones
            first_key = block * rows
            k_tile = T.alloc_shared((rows, form.tile_d), form.dtype)
            v_tile = T.alloc_shared((rows, form.tile_dv), form.dtype)
            q_tile = T.alloc_shared((queries, form.tile_d), form.dtype)
            grad_tile = T.alloc_shared((queries, form.tile_dv), form.dtype)
            numbers = T.alloc_shared((2, queries), accum)
            p = T.alloc_fragment((rows, queries), accum)
            dp = T.alloc_fragment((rows, queries), accum)
            p_rounded = alloc_weights((rows, queries), form.dtype)
            sloped = form.slopes != [1.0]  # dv is a sum of probabilities, dk of probabilities times slopes
            ds = alloc_weights((rows, queries), form.dtype)
            dk_sums = T.alloc_fragment((rows, form.tile_d), accum)
            dv_sums = T.alloc_fragment((rows, form.tile_dv), accum)
            held = hold(form.operands, operands, (queries, rows), config.tiled, None)

            T.copy(k[sequence, head, first_key, 0], k_tile)
            T.copy(v[sequence, head, first_key, 0], v_tile)
            T.clear(dk_sums)
            T.clear(dv_sums)
            first, end = query_blocks(form, config, first_key, q_offset, window, q_len)
            for member in T.serial(groups) if form.grouped else (0,):
                here = (sequence, head, member)
                for turn in T.Pipelined(end - first, num_stages=config.stages):
                    step = first + turn
                    seers = Rows(step * queries, q_len, q_len, False, *here, groups, q_offset)
                    load(held, seers, first_key)
                    T.copy(q[(*here, step * queries, 0)], q_tile)
                    T.gemm(k_tile, q_tile, p, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                    T.copy(grad[(*here, step * queries, 0)], grad_tile)
                    T.gemm(v_tile, grad_tile, dp, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                    T.copy(statistics[(*here, 0, step * queries)], numbers)
                    for i, j in T.Parallel(rows, queries):
                        chance, found = weigh(form, p[i, j], scale, numbers[0, j], held, seers, j, i, first_key)
                        if sloped:
                            p_rounded[i, j] = T.cast(chance, form.dtype)
                        p[i, j] = found[0]
                    if cuts_queries(form, config, step, first_key, q_offset, window):
                        for i, j in T.Parallel(rows, queries):
                            seen = seen_by(form, first_key + i, step * queries, j, queries, q_offset, window)
                            p[i, j] = T.if_then_else(seen, p[i, j], 0.0)
                            if sloped:
                                p_rounded[i, j] = T.if_then_else(seen, p_rounded[i, j], T.cast(0.0, form.dtype))
                    if not sloped:
                        T.copy(p, p_rounded)
                    for i, j in T.Parallel(rows, queries):
                        ds[i, j] = T.cast(p[i, j] * (dp[i, j] - numbers[1, j]), form.dtype)
                    T.gemm(p_rounded, grad_tile, dv_sums, policy=T.GemmWarpPolicy.FullRow)
                    T.gemm(ds, q_tile, dk_sums, policy=T.GemmWarpPolicy.FullRow)

            ones = T.alloc_fragment((rows,), accum)
            scales = T.alloc_fragment((rows,), accum)
            T.fill(ones, 1.0)
            T.fill(scales, scale)
            store = store_staged if config.staged else store_rows
            store(dv_sums, ones, dv_out, (sequence, head), first_key)
            store(dk_sums, scales, dk, (sequence, head), first_key)

    return key_gradients


def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    q_offset: int = 0,
    keep: str = "",
    aux: Sequence[torch.Tensor] | None = None,
    score: str = "",
    cuts: Cuts | None = None,
    results: Gradients | None = None,
) -> Gradients:
    """See `reference`; `cuts` overrides the choice of `cuts_for`.

    `results` may be given, laid out as those of `empty_results`.
    """
    mask, aux, score = score_text.as_mask(mask, aux or (), score)
    given = (grad, q, k, v, out, lse, mask, causal, scale, window, q_offset, keep, aux, score)
    if results is None:
        results = empty_results(q, k, v, keep)
    if not has_kernels(q) or not (q.numel() and k.numel() and v.numel()):
        return _by_reference(results, *given)
    batch, kv_heads, kv_len, head_dim = k.shape
    q_len, v_dim, groups = q.shape[2], v.shape[3], q.shape[1] // kv_heads
    tile_d, tile_dv = round_up(head_dim, 16), round_up(v_dim, 16)
    dense = [dense_last(x) for x in (q, k, v, grad, out)]
    machine = machine_of(q)
    forms, operands = operands_of([x for x in (mask, *aux) if x is not None], kv_heads, machine.is_gpu)
    form = Form(
        q.dtype, tile_d, tile_dv, (tile_d, tile_dv) == (head_dim, v_dim), causal, window > 0,
        None if mask is None else forms[0], groups > 1, True,
        vector_of((*dense, *results[:3]), (head_dim, v_dim)) if machine.is_gpu else 1,
        shifted=is_shifted(causal, window, q_offset), score=score, aux=forms[mask is not None :], keep=names_in(keep),
    )  # fmt: skip
    cuts = cuts or cuts_for(form, Problem(batch * kv_heads, groups * q_len, kv_len, groups), machine)
    if cuts is None:
        return _by_reference(results, *given)
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
        *tensors, *kept, grouped(grads), grouped(outs), lse.reshape(shape), grouped(dq), statistics, *options
    )
    machine.kernel(key_gradients)(cuts.dkv, replace(form, keep=()))(
        *tensors, grouped(grads), statistics, dk, dv, *options
    )
    return results


def _by_reference(results: Gradients, *args: Any) -> Gradients:
    for result, value in zip(results, reference(*args), strict=True):
        result.copy_(value)
    return results
