# SPDX-License-Identifier: Apache-2.0
"""The arguments of norms, softmax and roundings, spelled once for kernels, operators and graphs.

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


class RmsNormArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.rms_norm`."""

    x: V
    weight: V | None = None
    eps: float = 1e-6
    activation: str = "none"
    weight_offset: float = 0.0
    cast_first: bool = True


class AddRmsNormArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.add_rms_norm`."""

    x: V
    residual: V
    weight: V | None = None
    eps: float = 1e-6
    activation: str = "none"
    weight_offset: float = 0.0
    cast_first: bool = True

    @property
    def norm(self) -> RmsNormArgs[V]:
        """Return the arguments of the norm alone, of x."""
        return RmsNormArgs(*(getattr(self, name) for name in RmsNormArgs._fields))


class LayerNormArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.layer_norm`."""

    x: V
    weight: V | None = None
    bias: V | None = None
    eps: float = 1e-5


class SoftmaxArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.softmax`."""

    x: V
    dim: int = -1
    dtype: torch.dtype | None = None


class QuantizeFp8Args(NamedTuple, Generic[V]):
    """Arguments of `tile.quantize_fp8`."""

    x: V
    group: int
    dtype: torch.dtype


class SiluMulQuantizeArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.silu_mul_quantize`."""

    gate: V
    up: V
    group: int
    dtype: torch.dtype
