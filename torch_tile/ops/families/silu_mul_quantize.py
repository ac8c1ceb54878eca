# SPDX-License-Identifier: Apache-2.0
"""`tile.silu_mul_quantize`: SwiGLU's product of two halves, rounded to float8 or int8 with scales.

It has no gradient, as that of a rounding is 0: the caller chooses another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_tile.kernels.norm.args import SiluMulQuantizeArgs
from torch_tile.ops import checks
from torch_tile.ops.checks import require, require_type, shape_of
from torch_tile.ops.families.quantize_fp8 import FLOAT8, results
from torch_tile.ops.recomputed import no_gradient
from torch_tile.ops.registration import register
from torch_tile.ops.registry import entry, in_torch, no_flops
from torch_tile.ops.sharding_rule import Rule, Spec, row_names

OP = "silu_mul_quantize"
ADVICE = "Call F.silu(gate) * up and tile.quantize_fp8 in a torch.autograd.Function that passes the gradient on"


def _fake(args: SiluMulQuantizeArgs[Tensor]) -> tuple[Tensor, Tensor]:
    """Check the arguments of `tile.silu_mul_quantize` and make its empty results."""
    gate, up, group, dtype = args
    checks.check_floating(OP, gate=gate, up=up)
    checks.check_same_dtype(OP, gate=gate, up=up)
    require(
        gate.shape == up.shape,
        lambda: f"tile.{OP}: gate has shape {shape_of(gate)} and up {shape_of(up)}; expected the same shape",
    )
    require_type(
        dtype in (*FLOAT8, torch.int8),
        lambda: f"tile.{OP}: dtype is {dtype}; expected float8_e4m3fn, float8_e5m2 or int8",
    )
    return results(OP, gate, group, dtype, "gate")


def _sharding(args: SiluMulQuantizeArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.silu_mul_quantize` for sharding."""
    dims = row_names(args.gate)
    return Rule(outputs=[(*dims, "k"), (*dims, "run")], inputs=[(*dims, "k")] * 2, free=dims)


def silu_mul_quantize(
    gate: Tensor, up: Tensor, group: int = 128, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Round `silu(gate) * up` to float8 or int8 with a scale for each run of columns (SwiGLU, arXiv:2002.05202).

    Values and scales are `quantize_fp8(y, group, dtype)` (`quantize_int8` for int8) of the product y. It is computed in
    float32 (float64 for float64 gate) and rounded once to the dtype of gate. One kernel reads both halves and stores
    only the rounded values. The backend makes this call of `F.silu(gate) * up` and the rounding behind it.

    Args:
        gate: `[..., K]`, of any floating dtype. Halves of one matrix, as `chunk` gives them, are read in place.
        up: as gate, of the same shape and dtype.
        group: columns that share a scale; the last run may be shorter. 0: all of a row.
        dtype: float8_e4m3fn, float8_e5m2 or int8.

    Returns:
        values `[..., K]` of `dtype`, and float32 scales `[..., K / group]`, rounded up. Neither has a gradient.
    """
    out: tuple[Tensor, Tensor] = torch.ops.tile.silu_mul_quantize.default(gate, up, group, dtype)
    return out


register(
    name=OP,
    args=SiluMulQuantizeArgs,
    returns=("values", "scales"),
    form=silu_mul_quantize,
    fake=_fake,
    run=entry("norm.quantize", OP, "out", "scales"),
    reference=in_torch("norm.quantize", "silu_mul_reference"),
    **no_gradient(OP, ADVICE),
    as_aten=in_torch("norm.quantize", "silu_mul_reference"),
    sharding=_sharding,
    flops=no_flops,
)
