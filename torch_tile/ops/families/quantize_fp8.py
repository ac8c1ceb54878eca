# SPDX-License-Identifier: Apache-2.0
"""`tile.quantize_fp8` and `tile.quantize_int8`: rows, or runs of their columns, rounded to float8 or int8 with a scale
each.

Neither has a gradient, as that of a rounding is 0: the caller chooses another.
"""

from __future__ import annotations

from typing import Generic, NamedTuple

import torch
from torch import Tensor

from torch_tile.kernels import kernels
from torch_tile.kernels.norm.args import QuantizeFp8Args
from torch_tile.ops import checks
from torch_tile.ops.checks import require, require_type, require_value, shape_of
from torch_tile.ops.recomputed import no_gradient
from torch_tile.ops.registration import register
from torch_tile.ops.registry import V, entry, in_torch, no_flops
from torch_tile.ops.sharding_rule import Rule, Spec, row_names

OP = "quantize_fp8"
ADVICE = "Call it in a torch.autograd.Function that passes the gradient on, or on x.detach()"
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class QuantizeInt8Args(NamedTuple, Generic[V]):
    """Arguments of `tile.quantize_int8`."""

    x: V
    group: int


def _fake(args: QuantizeFp8Args[Tensor]) -> tuple[Tensor, Tensor]:
    """Check the arguments of `tile.quantize_fp8` and make its empty results."""
    x, group, dtype = args
    require_type(
        dtype in FLOAT8, lambda: f"tile.{OP}: dtype is {dtype}; expected torch.float8_e4m3fn or torch.float8_e5m2"
    )
    return results(OP, x, group, dtype)


def results(op: str, x: Tensor, group: int, dtype: torch.dtype, name: str = "x") -> tuple[Tensor, Tensor]:
    """Check x, an argument of that name, and the group, and return empty values and scales."""
    checks.check_floating(op, **{name: x})
    require(
        x.dim() > 0 and x.shape[-1] > 0,
        lambda: f"tile.{op}: {name} has shape {shape_of(x)}; expected a last dimension that is not empty",
    )
    require_value(group >= 0, lambda: f"tile.{op}: group is {group}; expected a number of columns, or 0 for whole rows")
    scales: Tensor = kernels("norm.quantize").empty_scales(x, group)
    return x.new_empty(x.shape, dtype=dtype), scales


def _sharding(args: QuantizeFp8Args[Spec] | QuantizeInt8Args[Spec]) -> Rule:
    """Name the dimensions of `tile.quantize_fp8` and `tile.quantize_int8` for sharding."""
    dims = row_names(args.x)
    return Rule(outputs=[(*dims, "k"), (*dims, "run")], inputs=[(*dims, "k")], free=dims)


def quantize_fp8(x: Tensor, group: int = 128, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """Round runs of columns to float8 with a scale each: `x` is about `values * scale`.

    A scale is the largest magnitude of its run over the largest number of `dtype` (DeepSeek-V3, arXiv:2412.19437,
    3.3.1). The magnitude counts as at least 2^-100. Results are arguments of `scaled_gemm`. A run with NaN is NaN.

    Args:
        x: `[..., K]`, of any floating dtype.
        group: columns that share a scale; the last run may be shorter. 0: all of a row.
        dtype: float8_e4m3fn or float8_e5m2.

    Returns:
        values `[..., K]` of `dtype`, and float32 scales `[..., K / group]`, rounded up. Neither has a gradient. Scales
        of runs lie by columns, which begin at multiples of 16 bytes: so bulk copies of products can read them.
    """
    out: tuple[Tensor, Tensor] = torch.ops.tile.quantize_fp8.default(x, group, dtype)
    return out


register(
    name=OP,
    args=QuantizeFp8Args,
    module="norm.quantize",
    returns=("values", "scales"),
    form=quantize_fp8,
    fake=_fake,
    run=entry("norm.quantize", OP, "out", "scales"),
    **no_gradient(OP, ADVICE),
    as_aten=in_torch("norm.quantize"),
    sharding=_sharding,
    flops=no_flops,
)


def _fake_int8(args: QuantizeInt8Args[Tensor]) -> tuple[Tensor, Tensor]:
    """Check the arguments of `tile.quantize_int8` and make its empty results."""
    return results("quantize_int8", *args, torch.int8)


def quantize_int8(x: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """Round rows to int8 with a scale each: `x` is about `values * scale` (LLM.int8, arXiv:2208.07339, section 2.1).

    A scale is the largest magnitude of its row, at least 2^-100, over 127. Halves are rounded to even numbers. Results
    are arguments of `scaled_gemm`. The scale of a row with NaN is NaN, and its values are numbers of no meaning.

    Args:
        x: `[..., K]`, of any floating dtype.
        group: columns that share a scale; the last run may be shorter. 0: all of a row.

    Returns:
        values int8 `[..., K]`, and float32 scales `[..., K / group]`, rounded up. Neither has a gradient.
    """
    out: tuple[Tensor, Tensor] = torch.ops.tile.quantize_int8.default(x, group)
    return out


register(
    name="quantize_int8",
    args=QuantizeInt8Args,
    returns=("values", "scales"),
    form=quantize_int8,
    fake=_fake_int8,
    run=entry("norm.quantize", OP, "out", "scales", dtype=torch.int8),
    reference=in_torch("norm.quantize", dtype=torch.int8),
    **no_gradient("quantize_int8", ADVICE),
    as_aten=in_torch("norm.quantize", dtype=torch.int8),
    sharding=_sharding,
    flops=no_flops,
)
