# SPDX-License-Identifier: Apache-2.0
"""What generated code calls: kernels under the names and signatures of `torch.ops.tile`, into buffers of Inductor's.

Inductor has checked shapes and dtypes at compile time, autograd and autocast are already in the graph, so nothing is
left to do but to choose and launch kernels; a `site` remembers even what was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_tile.ops.registration import kernels
from torch_tile.runtime.replay import replayed


def site(kinds: str, call: Callable[..., object]) -> Callable[..., object]:
    """A place in generated code that makes this call; `kinds` as for `replayed`."""
    return replayed(kinds, call)


def view(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    """The elements of `x` in another form, from the one at `offset` on."""
    return x.as_strided(size, stride, x.storage_offset() + offset)


def gemm(
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    aux: Sequence[torch.Tensor],
    kinds: str,
    epilogue: str,
    dtype: torch.dtype,
    *,
    out: torch.Tensor,
) -> None:
    """`torch.ops.tile.gemm`."""
    kernels("gemm").gemm(a, bs, aux, kinds, epilogue, dtype, out=out)


def dequant_gemm(
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    zeros: Sequence[torch.Tensor],
    bits: int,
    high_first: bool,
    offset: int,
    aux: Sequence[torch.Tensor],
    kinds: str,
    epilogue: str,
    dtype: torch.dtype,
    *,
    out: torch.Tensor,
) -> None:
    """`torch.ops.tile.dequant_gemm`."""
    run = kernels("dequant_gemm").dequant_gemm
    run(a, bs, scales, zeros, bits, high_first, offset, aux, kinds, epilogue, dtype, out=out)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    q_offset: int = 0,
    *,
    out: torch.Tensor,
) -> None:
    """`torch.ops.tile.attention`."""
    kernels("attention").attention(q, k, v, mask, causal, scale, window, q_offset, out=out)


def mla_decode(
    q: torch.Tensor,
    q_pe: torch.Tensor,
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    scale: float | None = None,
    num_splits: int = 0,
    *,
    out: torch.Tensor,
) -> None:
    """`torch.ops.tile.mla_decode`."""
    kernels("mla_decode").mla_decode(q, q_pe, kv, k_pe, block_table, seq_lens, scale, num_splits, out=out)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    activation: str = "none",
    weight_offset: float = 0.0,
    cast_first: bool = True,
    *,
    out: torch.Tensor,
) -> None:
    """`torch.ops.tile.rms_norm`."""
    kernels("norm").rms_norm(x, weight, None, eps, activation, weight_offset, cast_first, out=out)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    activation: str = "none",
    weight_offset: float = 0.0,
    cast_first: bool = True,
    *,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """`torch.ops.tile.add_rms_norm`."""
    run = kernels("norm").rms_norm
    run(x, weight, residual, eps, activation, weight_offset, cast_first, out=out[0], total=out[1])


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: torch.Tensor,
) -> None:
    """`torch.ops.tile.layer_norm`."""
    kernels("norm").layer_norm(x, weight, bias, eps, out=out)


def fused_norm(
    x: torch.Tensor,
    aux: Sequence[torch.Tensor],
    kinds: str,
    prologue: str,
    epilogue: str,
    centred: bool,
    eps: float,
    keep: bool,
    dtype: torch.dtype,
    *,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """`torch.ops.tile.fused_norm`."""
    run = kernels("fused_norm").fused_norm
    run(x, aux, kinds, prologue, epilogue, centred, eps, keep, dtype, out=out[0], total=out[1])


def softmax(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, out: torch.Tensor) -> None:
    """`torch.ops.tile.softmax`."""
    kernels("softmax").softmax(x, dim, dtype, out=out)


NAMES = (
    "gemm", "dequant_gemm", "attention", "mla_decode", "rms_norm", "add_rms_norm", "layer_norm", "fused_norm",
    "softmax",
)  # fmt: skip
"""The ops that have a direct form."""


def reference(name: str, *args: Any, **kwargs: Any) -> Any:
    """What an op computes, in plain torch."""
    if name in ("rms_norm", "add_rms_norm"):
        x, *rest = args
        residual = rest.pop(0) if name == "add_rms_norm" else None
        weight = rest.pop(0) if rest else kwargs.pop("weight", None)
        y, _, total = kernels("norm").rms_norm_reference(x, weight, residual, *rest, **kwargs)
        return y if total is None else (y, total)
    if name == "layer_norm":
        return kernels("norm").layer_norm_reference(*args, **kwargs)[0]
    result = kernels(name).reference(*args, **kwargs)
    return result[0] if isinstance(result, tuple) else result
