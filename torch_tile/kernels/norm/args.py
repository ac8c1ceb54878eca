# SPDX-License-Identifier: Apache-2.0
"""The arguments of norms with texts, spelled once for kernels, operators and graphs.

Imports nothing but torch: the declaration of the operators asks for it before any kernel is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import torch

V = TypeVar("V")


class FusedNormArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.fused_norm`."""

    x: V
    aux: Sequence[V]
    kinds: str
    prologue: str
    epilogue: str
    centred: bool
    eps: float
    keep: bool
    dtype: torch.dtype


class FusedNormQuantizeArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.fused_norm_quantize`: those of `tile.fused_norm`, the columns of a scale, and a dtype."""

    x: V
    aux: Sequence[V]
    kinds: str
    prologue: str
    epilogue: str
    centred: bool
    eps: float
    keep: bool
    dtype: torch.dtype
    group: int
    out_dtype: torch.dtype

    @property
    def norm(self) -> FusedNormArgs[V]:
        """Return the arguments of the norm alone."""
        return FusedNormArgs(*(getattr(self, name) for name in FusedNormArgs._fields))
