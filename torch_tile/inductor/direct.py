# SPDX-License-Identifier: Apache-2.0
"""What generated code calls: the kernels under the names and signatures of `torch.ops.tile`, without the dispatcher.

Inductor has checked shapes and dtypes at compile time, autograd and autocast are already in the graph, so a call is a
call: several microseconds less than through an op with an autograd key.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_tile.ops.registration import kernels


def gemm(
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    aux: Sequence[torch.Tensor],
    kinds: str,
    epilogue: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`torch.ops.tile.gemm`."""
    out: torch.Tensor = kernels("gemm").gemm(a, bs, aux, kinds, epilogue, dtype)
    return out


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    q_offset: int = 0,
) -> torch.Tensor:
    """`torch.ops.tile.attention`."""
    out: torch.Tensor = kernels("attention").attention(q, k, v, mask, causal, scale, window, q_offset)[0]
    return out


def mla_decode(
    q: torch.Tensor,
    q_pe: torch.Tensor,
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    scale: float | None = None,
    num_splits: int = 0,
) -> torch.Tensor:
    """`torch.ops.tile.mla_decode`."""
    run = kernels("mla_decode").mla_decode
    out: torch.Tensor = run(q, q_pe, kv, k_pe, block_table, seq_lens, scale, num_splits)[0]
    return out


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    activation: str = "none",
    weight_offset: float = 0.0,
    cast_first: bool = True,
) -> torch.Tensor:
    """`torch.ops.tile.rms_norm`."""
    out: torch.Tensor = kernels("norm").rms_norm(x, weight, None, eps, activation, weight_offset, cast_first)[0]
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    activation: str = "none",
    weight_offset: float = 0.0,
    cast_first: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`torch.ops.tile.add_rms_norm`."""
    y, _, total = kernels("norm").rms_norm(x, weight, residual, eps, activation, weight_offset, cast_first)
    return y, total


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """`torch.ops.tile.layer_norm`."""
    out: torch.Tensor = kernels("norm").layer_norm(x, weight, bias, eps)[0]
    return out


def softmax(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`torch.ops.tile.softmax`."""
    out: torch.Tensor = kernels("softmax").softmax(x, dim, dtype)
    return out


NAMES = ("gemm", "attention", "mla_decode", "rms_norm", "add_rms_norm", "layer_norm", "softmax")
"""The ops that have a direct form."""
