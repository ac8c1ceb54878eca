# SPDX-License-Identifier: Apache-2.0
"""The kernels of attention's gradients: blocks of queries sum up dq, blocks of keys dk and dv."""

from __future__ import annotations

from typing import Any

import torch_tile.language as T
from torch_tile.jit import jit
from torch_tile.kernels.attention.backward_spec import PADDING, cuts_queries, query_blocks, seen_by
from torch_tile.kernels.attention.forward import store_rows, store_staged
from torch_tile.kernels.attention.operands import Rows, hold, load
from torch_tile.kernels.attention.probabilities import weigh
from torch_tile.kernels.attention.spec import Config, Form
from torch_tile.kernels.common import LOG2_E, compute_dtype, dynamic, strided

# Fast: exp2 of what is below -126 is 0, which saves three instructions for each score.
FAST = {"tl.enable_fast_math": True}


@T.macro
def store_scaled(config: Config, sums: Any, factor: Any, target: Any, place: tuple[Any, ...], first: Any) -> None:
    """Sums times a factor as the rows from `first` on."""
    factors = T.alloc_fragment((sums.shape[0],), sums.dtype)
    T.fill(factors, factor)
    (store_staged if config.staged else store_rows)(sums, factors, target, place, first)


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

            T.copy(grad[(*here, block * rows, 0)], grad_tile)
            product = T.alloc_fragment((rows, form.tile_dv), accum)
            for i, c in T.Parallel(rows, form.tile_dv):
                product[i, c] = T.cast(grad_tile[i, c], accum) * T.cast(out[(*here, block * rows + i, c)], accum)
            T.reduce_sum(product, common, dim=1)
            for i in T.Parallel(rows):
                log_sum = lse[(*here, block * rows + i)]
                peak[i] = T.if_then_else(log_sum == -infinity, infinity, log_sum if form.lows else log_sum * LOG2_E)
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

            store_scaled(config, sums, scale, dq, here, block * rows)

    return query_gradients


@jit(pass_configs=FAST)  # type: ignore[untyped-decorator]
def key_gradients(config: Config, form: Form, sums: tuple[str, ...] = ("dk", "dv")) -> Any:
    """dk and dv of a block of keys, or one of them, of all heads that share them. Tiles of scores have a row for each
    key, so that they are left operands in registers of both sums.
    """
    queries, rows = config.block_q, config.block_kv
    accum = compute_dtype(form.dtype)
    alloc_weights = T.alloc_shared if config.shared_weights else T.alloc_fragment
    batch, kv_heads, q_len, kv_len = T.dynamic("batch, kv_heads, q_len, kv_len")
    padded = dynamic("padded", PADDING)
    groups = T.dynamic("groups") if form.grouped else 1
    d, dv = (form.tile_d, form.tile_dv) if form.exact else (dynamic("d", form.vector), dynamic("dv", form.vector))
    q_shape = (batch, kv_heads, groups, q_len)
    of_keys, of_values = "dk" in sums, "dv" in sums
    # dv is a sum of probabilities, dk of probabilities times slopes.
    apart = of_values and of_keys and form.slopes != [1.0]

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
            q_tile = T.alloc_shared((queries, form.tile_d), form.dtype)
            grad_tile = T.alloc_shared((queries, form.tile_dv), form.dtype)
            numbers = T.alloc_shared((2, queries), accum)
            p = T.alloc_fragment((rows, queries), accum)
            T.copy(k[sequence, head, first_key, 0], k_tile)
            if of_keys:
                v_tile = T.alloc_shared((rows, form.tile_dv), form.dtype)
                dp = T.alloc_fragment((rows, queries), accum)
                ds = alloc_weights((rows, queries), form.dtype)
                dk_sums = T.alloc_fragment((rows, form.tile_d), accum)
                T.copy(v[sequence, head, first_key, 0], v_tile)
                T.clear(dk_sums)
            if of_values:
                p_rounded = alloc_weights((rows, queries), form.dtype)
                dv_sums = T.alloc_fragment((rows, form.tile_dv), accum)
                T.clear(dv_sums)
            held = hold(form.operands, operands, (queries, rows), config.tiled, None)

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
                    if of_keys:
                        T.gemm(
                            v_tile, grad_tile, dp, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True
                        )
                    T.copy(statistics[(*here, 0, step * queries)], numbers)
                    for i, j in T.Parallel(rows, queries):
                        chance, found = weigh(form, p[i, j], scale, numbers[0, j], held, seers, j, i, first_key)
                        if apart:
                            p_rounded[i, j] = T.cast(chance, form.dtype)
                        p[i, j] = found[0] if of_keys else chance
                    if cuts_queries(form, config, step, first_key, q_offset, window, q_len):
                        for i, j in T.Parallel(rows, queries):
                            seen = seen_by(form, first_key + i, step * queries, j, queries, q_offset, window, q_len)
                            p[i, j] = T.if_then_else(seen, p[i, j], 0.0)
                            if apart:
                                p_rounded[i, j] = T.if_then_else(seen, p_rounded[i, j], T.cast(0.0, form.dtype))
                    if of_values and not apart:
                        T.copy(p, p_rounded)
                    if of_keys:
                        for i, j in T.Parallel(rows, queries):
                            ds[i, j] = T.cast(p[i, j] * (dp[i, j] - numbers[1, j]), form.dtype)
                    if of_values:
                        T.gemm(p_rounded, grad_tile, dv_sums, policy=T.GemmWarpPolicy.FullRow)
                    if of_keys:
                        T.gemm(ds, q_tile, dk_sums, policy=T.GemmWarpPolicy.FullRow)

            if of_values:
                store_scaled(config, dv_sums, 1.0, dv_out, (sequence, head), first_key)
            if of_keys:
                store_scaled(config, dk_sums, scale, dk, (sequence, head), first_key)

    return key_gradients
