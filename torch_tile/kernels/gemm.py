# SPDX-License-Identifier: Apache-2.0
"""Matrix products with a fused epilogue: `epilogue(a @ b0, a @ b1, ..., aux)`.

Assumes that `ops` checked shapes and dtypes; takes tensors of any stride and returns a fresh contiguous one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_tile.kernels.epilogue import evaluate


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are kept in: float64 for float64 operands, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def aux_views(aux: Sequence[torch.Tensor], kinds: str) -> list[torch.Tensor]:
    """The auxiliary operands in shapes that broadcast to the product: kind `s` becomes 0-d, the others do already."""
    return [x.reshape(()) if kind == "s" else x for x, kind in zip(aux, kinds, strict=True)]


def reference(
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    aux: Sequence[torch.Tensor],
    kinds: str,
    epilogue: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`epilogue(a @ b0, ..., aux)` in float32 (float64 for float64 `a`), rounded once to `dtype`.

    a `[*batch, M, K]`, each b `[*batch or 1, K, N]`; aux by kind: `t` `[*batch, M, N]`, `r` `[N]`, `c`
    `[*batch, M, 1]`, `s` one element. Returns `[*batch, M, N]`.
    """
    compute = compute_dtype(a.dtype)
    products = [torch.matmul(a.to(compute), b.to(compute)) for b in bs]
    out = evaluate(epilogue, products, [x.to(compute) for x in aux_views(aux, kinds)])
    return out.to(dtype).clone(memory_format=torch.contiguous_format)


def gemm(
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    aux: Sequence[torch.Tensor],
    kinds: str,
    epilogue: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """See `reference`."""
    return reference(a, bs, aux, kinds, epilogue, dtype)
