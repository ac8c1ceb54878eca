# SPDX-License-Identifier: Apache-2.0
"""The documented Python form of `torch.ops.tile.*`.

Common to all: tensors are float16, bfloat16, float32 or float64, of any strides, on one device; sums are kept in
float32 (float64 for float64); results are fresh and, but for attention's, contiguous; empty tensors give empty or zero
results. All have gradients; log-sum-exps have none. Refused arguments raise RuntimeError (shapes, devices), TypeError
(dtypes, None for a tensor), ValueError (strings and numbers) or IndexError (`dim`), and name the argument, what was
got and what is wanted. Under autocast, products follow its dtype as `F.linear` does, norms and softmax run in float32
on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    q_offset: int = 0,
    aux: Sequence[Tensor] = (),
    score: str = "",
) -> Tensor:
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
    """
    out: Tensor = torch.ops.tile.attention.default(
        q, k, v, mask, causal, scale, window, q_offset, list(aux) or None, score
    )
    return out


def attention_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    q_offset: int = 0,
    aux: Sequence[Tensor] = (),
    score: str = "",
) -> tuple[Tensor, Tensor]:
    """`attention`, and the natural logarithm of each softmax's denominator.

    Returns:
        out as `attention`, lse `[B, H, Sq]` in float32 (float64 for float64), `-inf` for a query that sees no key. lse
        is not differentiable.
    """
    out: tuple[Tensor, Tensor] = torch.ops.tile.attention_lse.default(
        q, k, v, mask, causal, scale, window, q_offset, list(aux) or None, score
    )
    return out


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
    q_offset: int = 0,
    aux: Sequence[Tensor] = (),
    score: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention` in q, k and v, computed as in arXiv:2307.08691; the same from run to run.

    Args:
        grad: `[B, H, Sq, Dv]`, of q's dtype: the gradient of `out`.
        q: as for `attention`, like those that follow.
        k: `[B, Hkv, Skv, D]`.
        v: `[B, Hkv, Skv, Dv]`.
        out: what `attention_lse` returned first.
        lse: what it returned second.
        mask: as for `attention`, like those that follow; it gets no gradient here.
        causal: as for `attention`.
        scale: as for `attention`.
        window: as for `attention`.
        q_offset: as for `attention`.
        aux: as for `attention`; they get no gradients here.
        score: as for `attention`.

    Returns:
        dq, dk and dv with the shapes and dtypes of q, k and v, dense, in their memory order.
    """
    options = mask, causal, scale, window, q_offset, "", list(aux) or None, score
    dq, dk, dv, _ = torch.ops.tile.attention_backward.default(grad, q, k, v, out, lse, *options)
    return dq, dk, dv


def mla_decode(
    q: Tensor,
    q_pe: Tensor,
    kv: Tensor,
    k_pe: Tensor,
    block_table: Tensor | None = None,
    seq_lens: Tensor | None = None,
    scale: float | None = None,
    num_splits: int = 0,
    schedule: Tensor | None = None,
) -> Tensor:
    """A decoding step of multi-head latent attention with absorbed weights (DeepSeek-V2, arXiv:2405.04434).

    `softmax(scale (q kv^T + q_pe k_pe^T)) kv` for every head; all heads share the cached latent `kv` (C is 512 in
    DeepSeek-V2 and V3) and its rotary part `k_pe` (R is 64).

    Args:
        q: `[B, Sq, H, C]`: queries already multiplied into the latent space.
        q_pe: `[B, Sq, H, R]`: their rotary part.
        kv: `[B, S, C]`, or `[pages, page, C]` with a block_table.
        k_pe: `[B, S, R]`, or `[pages, page, R]`.
        block_table: int32 `[B, n]`: position `s` of sequence `b` lies in page `block_table[b, s // page]`, row
            `s % page`. Entries past the sequence's end are not read.
        seq_lens: int32 `[B]`: positions in use, the new ones included; default all of the cache.
        scale: default `(C + R) ** -0.5`. Absorbing does not change a model's own scale, so pass it: DeepSeek-V3's is
            `(128 + 64) ** -0.5`.
        num_splits: into how many parts at most a kernel splits a sequence; 0 lets it choose. The result is the same.
        schedule: what `mla_schedule` made of seq_lens, for sequences that differ in length.

    Returns:
        `[B, Sq, H, C]` in q's dtype, dense; B, Sq and H lie in memory in the order they do in q, with C innermost. The
        Sq queries are the last Sq positions of their sequence and causal among themselves; one that sees no position
        (Sq beyond the length) gives 0.

    Values of seq_lens, block_table and schedule are checked on the CPU only, where reading them is free.
    """
    options = scale, num_splits, schedule
    out: Tensor = torch.ops.tile.mla_decode.default(q, q_pe, kv, k_pe, block_table, seq_lens, *options)
    return out


def mla_decode_lse(
    q: Tensor,
    q_pe: Tensor,
    kv: Tensor,
    k_pe: Tensor,
    block_table: Tensor | None = None,
    seq_lens: Tensor | None = None,
    scale: float | None = None,
    num_splits: int = 0,
    schedule: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`mla_decode`, and the natural logarithm of each softmax's denominator.

    Returns:
        out as `mla_decode`, lse `[B, Sq, H]` in float32 (float64 for float64), `-inf` for a query that sees no
        position. lse is not differentiable.
    """
    out: tuple[Tensor, Tensor] = torch.ops.tile.mla_decode_lse.default(
        q, q_pe, kv, k_pe, block_table, seq_lens, scale, num_splits, schedule
    )
    return out


def mla_schedule(seq_lens: Tensor, rows: int, units: int = 0) -> Tensor:
    """Which positions of which sequences each unit of a GPU decodes, so that all work equally long.

    Sequences of different lengths would otherwise leave most of a GPU to wait for the longest. The plan is made on the
    device, without a look from the host, once for all layers of a step: it depends on the lengths only.

    Args:
        seq_lens: int32 `[B]`, as for `mla_decode`. Negative ones are refused on the CPU, and count as 0 elsewhere.
        rows: Sq * H: how many rows of queries each sequence has.
        units: how many there are, up to 65535; 0 for as many as the GPU runs at a time.

    Returns:
        int32 `[units + B, 4]`. For each unit the first sequence, the first block of 64 positions in it, the last
        sequence and the end of the blocks in it; then for each sequence the first unit, the last unit, and zeros.
    """
    schedule: Tensor = torch.ops.tile.mla_schedule.default(seq_lens, rows, units)
    return schedule


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    activation: str = "none",
    weight_offset: float = 0.0,
    cast_first: bool = True,
) -> Tensor:
    """`activation(x / sqrt(mean(x^2) + eps) * (weight + weight_offset))` over the last dimension (arXiv:1910.07467).

    Args:
        x: `[..., N]`.
        weight: `[N]`, of any floating dtype.
        eps: added to the mean square.
        activation: as for `linear`.
        weight_offset: 1.0 for Gemma's norms.
        cast_first: True rounds the normalised row to x's dtype before the weight, as transformers' Llama does; False
            multiplies in float32 and rounds once, as `F.rms_norm` and Gemma do.

    Returns:
        `[..., N]` in x's dtype; with `cast_first`, promoted with the weight's.
    """
    out: Tensor = torch.ops.tile.rms_norm.default(x, weight, eps, activation, weight_offset, cast_first)
    return out


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    activation: str = "none",
    weight_offset: float = 0.0,
    cast_first: bool = True,
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of `x + residual`, and that sum.

    Args:
        x: `[..., N]`.
        residual: as x, in shape and dtype.
        weight: as `rms_norm`, like what follows.
        eps: added to the mean square.
        activation: as for `linear`.
        weight_offset: 1.0 for Gemma's norms.
        cast_first: as `rms_norm`.

    Returns:
        y as `rms_norm`, and the sum `[..., N]` in x's dtype, which is what y was computed from.
    """
    out: tuple[Tensor, Tensor] = torch.ops.tile.add_rms_norm.default(
        x, residual, weight, eps, activation, weight_offset, cast_first
    )
    return out


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """`(x - mean) / sqrt(variance + eps) * weight + bias` over the last dimension (arXiv:1607.06450).

    Args:
        x: `[..., N]`.
        weight: `[N]`, of any floating dtype.
        bias: `[N]`, of any floating dtype.
        eps: added to the (biased) variance.

    Returns:
        `[..., N]` in x's dtype.
    """
    out: Tensor = torch.ops.tile.layer_norm.default(x, weight, bias, eps)
    return out


def softmax(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """`exp(x) / sum(exp(x))` over one dimension.

    Args:
        x: any shape.
        dim: the dimension to sum over; counts from the end if negative.
        dtype: of the result; default x's.

    Returns:
        x's shape.
    """
    out: Tensor = torch.ops.tile.softmax.default(x, dim, dtype)
    return out
