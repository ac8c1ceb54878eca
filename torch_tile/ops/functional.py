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


def gemm(
    a: Tensor,
    bs: Sequence[Tensor],
    aux: Sequence[Tensor] = (),
    kinds: str = "",
    epilogue: str = "",
    *,
    dtype: torch.dtype,
) -> Tensor:
    """Matrix products of one left operand, joined by a fused epilogue: `epilogue(a @ bs[0], a @ bs[1], ..., aux)`.

    Args:
        a: `[M, K]` or `[B, M, K]`.
        bs: each `[K, N]` beside a 2-D `a`, `[B, K, N]` or `[1, K, N]` beside a 3-D one; of a's dtype.
        aux: what the epilogue reads as `x0..`, of any floating dtype.
        kinds: one letter for each aux: `t` `[M, N]` or `[B, M, N]`, `r` `[N]`, `c` `[M, 1]` or `[B, M, 1]`, `s` one
            element.
        epilogue: statements joined by `;` over `acc0..`, `x0..`, earlier names and numbers, ending in `ret NAME`, such
            as `"v0=add(acc0,x0);v1=relu(v0);ret v1"`; the functions are `torch_tile.kernels.epilogue.ARITY`'s. Empty
            means `ret acc0`. Computed in float32 (float64), rounded once.
        dtype: of the result.

    Returns:
        `[M, N]` or `[B, M, N]`.
    """
    out: Tensor = torch.ops.tile.gemm.default(a, list(bs), list(aux), kinds, epilogue, dtype)
    return out


def grouped_gemm(
    a: Tensor,
    bs: Sequence[Tensor],
    offsets: Tensor,
    aux: Sequence[Tensor] = (),
    kinds: str = "",
    epilogue: str = "",
    *,
    dtype: torch.dtype,
) -> Tensor:
    """`gemm` of runs of rows with a matrix each, as the experts of a mixture (arXiv:1701.06538, arXiv:2211.15841).

    `epilogue(a[rows of g] @ bs[0][g], a[rows of g] @ bs[1][g], ..., aux)` for each group g.

    Args:
        a: `[S, K]`, rows sorted by their group.
        bs: each `[G, K, N]`, of a's dtype.
        offsets: int32 `[G]`: group g has the rows from `offsets[g - 1]` (0 for the first) up to `offsets[g]`. On a GPU
            nobody reads them but the kernel; where they are not sorted or exceed S, results are of no use.
        aux: as for `gemm`, S rows.
        kinds: as for `gemm`.
        epilogue: as for `gemm`.
        dtype: of the result.

    Returns:
        `[S, N]`. Rows from `offsets[-1]` on have no matrices: their products are 0.
    """
    op = torch.ops.tile.grouped_gemm.default
    out: Tensor = op(a, list(bs), offsets, list(aux), kinds, epilogue, dtype)
    return out


def k_grouped_gemm(a: Tensor, b: Tensor, offsets: Tensor, *, dtype: torch.dtype) -> Tensor:
    """`a[rows of g].T @ b[rows of g]` for each group g: the gradients of the matrices of `grouped_gemm`.

    Args:
        a: `[S, M]`, rows sorted by their group.
        b: `[S, N]`, of a's dtype.
        offsets: int32 `[G]`, as for `grouped_gemm`.
        dtype: of the result.

    Returns:
        `[G, M, N]`, 0 for groups without rows.
    """
    out: Tensor = torch.ops.tile.k_grouped_gemm.default(a, b, offsets, dtype)
    return out


def dequant_gemm(
    a: Tensor,
    bs: Sequence[Tensor],
    scales: Sequence[Tensor] = (),
    zeros: Sequence[Tensor] = (),
    bits: int = 8,
    high_first: bool = False,
    offset: int = 0,
    aux: Sequence[Tensor] = (),
    kinds: str = "",
    epilogue: str = "",
    *,
    dtype: torch.dtype,
) -> Tensor:
    """`gemm` with right operands stored in few bits: `epilogue(a @ w0.T, a @ w1.T, ..., aux)`.

    `w = (b - offset - zero) * scale`, each b widened in registers: computed in float32 (float64 for float64 `a`),
    rounded to a's dtype at most once, before the product.

    Args:
        a: `[M, K]`.
        bs: each `[N, K * bits / 8]`, of int8, uint8, float8_e4m3fn or float8_e5m2, all alike.
        scales: none, or one for each b: `[N, G]`, of any floating dtype: for G runs of columns of equal length. G is
            1, or runs are of 16, 32 or a multiple of 64.
        zeros: none, or one for each b: `[N, G]`, floating or integer.
        bits: of a weight: 8, or 4, 2 or 1 of int8 (signed fields) and uint8 (unsigned ones).
        high_first: whether a byte's first column lies in its highest bits, not in its lowest.
        offset: what is subtracted from every weight, such as 8 for 4 unsigned bits.
        aux: as for `gemm`.
        kinds: as for `gemm`.
        epilogue: as for `gemm`.
        dtype: of the result.

    Returns:
        `[M, N]`. Words get no gradient; floating scales and zeros do.
    """
    op = torch.ops.tile.dequant_gemm.default
    out: Tensor = op(
        a, list(bs), list(scales), list(zeros), bits, high_first, offset, list(aux), kinds, epilogue, dtype
    )
    return out


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, activation: str = "none"
) -> Tensor:
    """`activation(x @ weight.T + bias) + residual`.

    Args:
        x: `[..., K]`.
        weight: `[N, K]`, of x's dtype.
        bias: `[N]`, of x's dtype.
        residual: `[..., N]`, of any floating dtype.
        activation: "none", "relu", "gelu" (erf), "gelu_tanh" or "silu".

    Returns:
        `[..., N]`, in x's dtype promoted with the residual's.
    """
    out: Tensor = torch.ops.tile.linear.default(x, weight, bias, residual, activation)
    return out


def swiglu(x: Tensor, gate_weight: Tensor, up_weight: Tensor, activation: str = "silu") -> Tensor:
    """`activation(x @ gate_weight.T) * (x @ up_weight.T)`: a gated linear unit (arXiv:2002.05202).

    Args:
        x: `[..., K]`.
        gate_weight: `[N, K]`, of x's dtype.
        up_weight: `[N, K]`, of x's dtype.
        activation: as for `linear`; "gelu_tanh" makes Gemma's GeGLU.

    Returns:
        `[..., N]` in x's dtype.
    """
    out: Tensor = torch.ops.tile.swiglu.default(x, gate_weight, up_weight, activation)
    return out


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
