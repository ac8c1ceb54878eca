# SPDX-License-Identifier: Apache-2.0
"""The arguments of products, spelled once for kernels, operators and graphs.

Those of groups of rows are those of one product, `dense`, and where groups end. Imports nothing but torch: the
declaration of the operators asks for it before any kernel is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import torch

V = TypeVar("V")


class GemmArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.gemm`."""

    a: V
    bs: Sequence[V]
    aux: Sequence[V]
    kinds: str
    epilogue: str
    dtype: torch.dtype


class GroupedGemmArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.grouped_gemm`."""

    a: V
    bs: Sequence[V]
    offsets: V
    aux: Sequence[V]
    kinds: str
    epilogue: str
    dtype: torch.dtype


class DequantGemmArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.dequant_gemm`, which its documentation explains; V stands for a tensor."""

    a: V
    bs: Sequence[V]
    scales: Sequence[V]
    zeros: Sequence[V]
    bits: int
    high_first: bool
    offset: int
    aux: Sequence[V]
    kinds: str
    epilogue: str
    dtype: torch.dtype
    format: str = ""
    norm_weight: V | None = None
    norm_eps: float | None = None

    @property
    def fields(self) -> tuple[int, bool, int]:
        """Return how words hold weights: bits, whether the high ones come first, and the offset."""
        return self.bits, self.high_first, self.offset


class GroupedDequantGemmArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.grouped_dequant_gemm`; bs, scales and zeros have a dimension of groups in front."""

    a: V
    bs: Sequence[V]
    scales: Sequence[V]
    zeros: Sequence[V]
    offsets: V
    bits: int
    high_first: bool
    offset: int
    aux: Sequence[V]
    kinds: str
    epilogue: str
    dtype: torch.dtype
    format: str = ""

    @property
    def dense(self) -> DequantGemmArgs[V]:
        """Return the arguments besides the ends of groups."""
        return DequantGemmArgs(*(getattr(self, name) for name in DequantGemmArgs._fields if name in self._fields))


class ScaledGemmArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.scaled_gemm`."""

    a: V
    b: V
    scale_a: V
    scale_b: V
    aux: Sequence[V]
    kinds: str
    epilogue: str
    dtype: torch.dtype
    bits: int = 8
    offset: int = 0


class GroupedScaledGemmArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.grouped_scaled_gemm`; b and scale_b have a dimension of groups in front."""

    a: V
    b: V
    scale_a: V
    scale_b: V
    offsets: V
    aux: Sequence[V]
    kinds: str
    epilogue: str
    dtype: torch.dtype

    @property
    def dense(self) -> ScaledGemmArgs[V]:
        """Return the arguments besides the ends of groups."""
        common = (name for name in ScaledGemmArgs._fields if name in self._fields)
        return ScaledGemmArgs(*(getattr(self, name) for name in common))


class KGroupedScaledGemmArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.k_grouped_scaled_gemm`; groups are runs of a's columns."""

    a: V
    b: V
    scale_a: V
    scale_b: V
    offsets: V
    dtype: torch.dtype


class MaskedScaledGemmArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.masked_scaled_gemm`; a, b and their scales have a dimension of groups in front."""

    a: V
    b: V
    scale_a: V
    scale_b: V
    counts: V
    aux: Sequence[V]
    kinds: str
    epilogue: str
    dtype: torch.dtype


def flattened(args: MaskedScaledGemmArgs[torch.Tensor]) -> ScaledGemmArgs[torch.Tensor]:
    """Flatten a product of groups into one of all rows, group after group; the counts are left out."""
    (groups, rows, _), scale = args.a.shape, args.scale_a
    scale = scale.expand(groups, rows, scale.shape[2])
    return ScaledGemmArgs(args.a.flatten(0, 1), args.b, scale.flatten(0, 1), args.scale_b, *args[5:])


class KGroupedGemmArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.k_grouped_gemm`."""

    a: V
    b: V
    offsets: V
    dtype: torch.dtype
