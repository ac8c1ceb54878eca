# SPDX-License-Identifier: Apache-2.0
"""Kernels under the names and signatures of `torch.ops.tile`, into results that are given: what Inductor's code calls.

Who calls has checked shapes and dtypes (eager.py; Inductor at compile time), and autograd and autocast are done, so
nothing is left to do but to choose and launch kernels; a `site` remembers even what was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torch_tile.kernels import kernels
from torch_tile.ops import layers
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


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str = "none",
    *,
    out: torch.Tensor,
) -> None:
    """`torch.ops.tile.linear`."""
    arguments = layers.linear_as_gemm(x, weight, bias, residual, activation)
    kernels("gemm").gemm(*arguments, out.dtype, out=layers.flattened(out))


def swiglu(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    activation: str = "silu",
    *,
    out: torch.Tensor,
) -> None:
    """`torch.ops.tile.swiglu`."""
    weights, text = [gate_weight.mT, up_weight.mT], layers.swiglu_text(activation)
    kernels("gemm").gemm(layers.flattened(x), weights, [], "", text, x.dtype, out=layers.flattened(out))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    q_offset: int = 0,
    aux: Sequence[torch.Tensor] | None = None,
    score: str = "",
    *,
    out: torch.Tensor,
) -> None:
    """`torch.ops.tile.attention`."""
    kernels("attention").attention(q, k, v, mask, causal, scale, window, q_offset, aux or (), score, out=out)


def attention_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    q_offset: int = 0,
    aux: Sequence[torch.Tensor] | None = None,
    score: str = "",
    *,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """`torch.ops.tile.attention_lse`."""
    run = kernels("attention").attention
    run(q, k, v, mask, causal, scale, window, q_offset, aux or (), score, out=out[0], lse=out[1])


def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    forward: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    q_offset: int = 0,
    *,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """`torch.ops.tile.attention_backward`."""
    run = kernels("attention_backward").attention_backward
    run(grad, q, k, v, forward, lse, mask, causal, scale, window, q_offset, results=out)


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


def mla_decode_lse(
    q: torch.Tensor,
    q_pe: torch.Tensor,
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    scale: float | None = None,
    num_splits: int = 0,
    *,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """`torch.ops.tile.mla_decode_lse`."""
    run = kernels("mla_decode").mla_decode
    run(q, q_pe, kv, k_pe, block_table, seq_lens, scale, num_splits, out=out[0], lse=out[1])


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
    "gemm", "dequant_gemm", "linear", "swiglu", "attention", "attention_lse", "attention_backward", "mla_decode",
    "mla_decode_lse", "rms_norm", "add_rms_norm", "layer_norm", "fused_norm", "softmax",
)  # fmt: skip
"""The ops, all of which have a direct form."""
