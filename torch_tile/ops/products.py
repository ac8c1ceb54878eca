# SPDX-License-Identifier: Apache-2.0
"""The documented Python form of the products among `torch.ops.tile.*`; what is common to all ops: functional.py."""

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
        aux: what the epilogue reads as `x0..`, of any floating dtype, or bool, which counts as 1 and 0.
        kinds: one letter for each aux: `t` `[M, N]` or `[B, M, N]`, `r` `[N]`, `c` `[M, 1]` or `[B, M, 1]`, `s` one
            element.
        epilogue: statements joined by `;` over `acc0..`, `x0..`, earlier names and numbers, ending in `ret NAME`, such
            as `"v0=add(acc0,x0);v1=relu(v0);ret v1"`; the functions are `kernels/epilogue/program.py`'s. Empty
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
