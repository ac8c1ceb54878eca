# SPDX-License-Identifier: Apache-2.0
"""Kernels under the names and arguments of `torch.ops.tile`, into results that are given: what Inductor's code calls.

Who calls has checked shapes and dtypes (eager.py; Inductor at compile time), and autograd and autocast are done, so
nothing is left to do but to choose and launch kernels; a `site` remembers even what was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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


Results = torch.Tensor | tuple[torch.Tensor, ...]


def _into(family: str, name: str, *results: str, **fixed: Any) -> Callable[..., None]:
    """Entry function `name` of a family, whose arguments are the op's and `fixed`; `results` are its parameters for
    what it makes.
    """

    def call(*args: Any, out: Results, **options: Any) -> None:
        given = out if isinstance(out, tuple) else (out,)
        getattr(kernels(family), name)(*args, **options, **fixed, **dict(zip(results, given, strict=True)))

    return call


gemm = _into("gemm", "gemm", "out")
grouped_gemm = _into("grouped_gemm", "grouped_gemm", "out")
k_grouped_gemm = _into("k_grouped_gemm", "k_grouped_gemm", "out")
dequant_gemm = _into("dequant_gemm", "dequant_gemm", "out")
attention = _into("attention", "attention", "out", needs_lse=False)
attention_lse = _into("attention", "attention", "out", "lse")
mla_decode = _into("mla_decode", "mla_decode", "out")
mla_decode_lse = _into("mla_decode", "mla_decode", "out", "lse")
mla_schedule = _into("mla_schedule", "mla_schedule", "out")
layer_norm = _into("norm", "layer_norm", "out")
fused_norm = _into("fused_norm", "fused_norm", "out", "total")
softmax = _into("softmax", "softmax", "out")


def attention_backward(*args: Any, out: tuple[torch.Tensor, ...], **options: Any) -> None:
    """All gradients at once."""
    kernels("attention_backward").attention_backward(*args, **options, results=out)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, *args: Any, out: torch.Tensor, **options: Any
) -> None:
    """Without a residual."""
    kernels("norm").rms_norm(x, weight, None, *args, **options, out=out)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, *args: Any,
    out: tuple[torch.Tensor, torch.Tensor], **options: Any,
) -> None:  # fmt: skip
    """With one; the sum is a result, too."""
    kernels("norm").rms_norm(x, weight, residual, *args, **options, out=out[0], total=out[1])


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
    activation: str = "none", *, out: torch.Tensor,
) -> None:  # fmt: skip
    """A product with an epilogue."""
    arguments = layers.linear_as_gemm(x, weight, bias, residual, activation)
    kernels("gemm").gemm(*arguments, out.dtype, out=layers.flattened(out))


def swiglu(
    x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, activation: str = "silu", *, out: torch.Tensor
) -> None:
    """Two products with an epilogue."""
    weights, text = [gate_weight.mT, up_weight.mT], layers.swiglu_text(activation)
    kernels("gemm").gemm(layers.flattened(x), weights, [], "", text, x.dtype, out=layers.flattened(out))


NAMES = (
    "gemm", "grouped_gemm", "k_grouped_gemm", "dequant_gemm", "linear", "swiglu", "attention", "attention_lse",
    "attention_backward", "mla_decode", "mla_decode_lse", "mla_schedule", "rms_norm", "add_rms_norm", "layer_norm",
    "fused_norm", "softmax",
)  # fmt: skip
"""The ops, all of which have a direct form."""
