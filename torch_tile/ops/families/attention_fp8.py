# SPDX-License-Identifier: Apache-2.0
"""`tile.attention_fp8`: attention of float8 queries, keys and values, with a scale for each head."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from torch_tile.kernels import compute_dtype, kernels
from torch_tile.kernels.attention.args import AttentionFp8Args
from torch_tile.ops import checks
from torch_tile.ops.attention_common import check_shapes, check_window, kv_head
from torch_tile.ops.checks import FLOATING, require_type
from torch_tile.ops.recomputed import no_gradient
from torch_tile.ops.registration import declare
from torch_tile.ops.registry import Shape
from torch_tile.ops.sharding_rule import Rule, Spec, broadcast

OP = "attention_fp8"
FLOAT8 = torch.float8_e4m3fn


def _fake(args: AttentionFp8Args[Tensor]) -> tuple[Tensor, Tensor]:
    """Check the arguments of `tile.attention_fp8` and make its empty results."""
    q, k, v = args[:3]
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_float8(name, x)
        checks.check_device(OP, name, x, "q", q)
    check_shapes(OP, q, k, v)
    scales = (("q_scale", args.q_scale, q), ("k_scale", args.k_scale, k), ("v_scale", args.v_scale, v))
    for name, scale, x in scales:
        if scale is not None:
            checks.check_floating(OP, **{name: scale})
            checks.check_device(OP, name, scale, "q", q)
            checks.check_dims(OP, name, scale, 2, "[B or 1, H or 1]")
            checks.check_broadcasts(OP, name, scale, x.shape[:2])
    check_window(OP, args.window, args.q_offset)
    require_type(
        args.dtype is None or args.dtype in FLOATING,
        lambda: f"tile.{OP}: dtype is {args.dtype}; expected float16, bfloat16, float32 or float64",
    )
    out: Tensor = kernels("attention.fp8").empty_result(args)
    return out, q.new_empty(q.shape[:3], dtype=compute_dtype(out.dtype))


def _check_float8(name: str, x: Tensor) -> None:
    """Check the dtype of an operand."""
    require_type(x.dtype == FLOAT8, lambda: f"tile.{OP}: {name} has dtype {x.dtype}; expected {FLOAT8}")


def _sharding(args: AttentionFp8Args[Spec]) -> Rule:
    """Name the dimensions of `tile.attention_fp8` for sharding."""
    heads = args.k.shape[1]
    of_keys = kv_head(heads)
    return Rule(
        outputs=[("batch", "head", "query", "v"), ("batch", "head", "query")],
        inputs=[
            ("batch", "head", "query", "d"),
            ("batch", of_keys, "key", "d"),
            ("batch", of_keys, "key", "v"),
            broadcast(args.q_scale, ("batch", "head")),
            broadcast(args.k_scale, ("batch", of_keys)),
            broadcast(args.v_scale, ("batch", of_keys)),
        ],
        free=("batch", "head"),
        even={} if heads == 1 else {"head": heads},
    )


def _flops(args: AttentionFp8Args[Shape]) -> int:
    """Count the operations of both products."""
    return 2 * math.prod(args.q[:3]) * args.k[2] * (args.q[3] + args.v[3])


attention_fp8: Final = declare(
    OP,
    AttentionFp8Args[Tensor],
    tuple[Tensor, Tensor],
    """Scaled dot-product attention of float8 operands with a scale for each head (FlashAttention-3, arXiv:2407.08608).

`softmax(scale (q * q_scale) (k * k_scale)^T) (v * v_scale)`. Both products are of float8 on chips that multiply it.

Args:
    q: float8_e4m3fn `[B, H, Sq, D]`.
    k: float8_e4m3fn `[B, Hkv, Skv, D]`; H must be a multiple of Hkv, as in `attention`.
    v: float8_e4m3fn `[B, Hkv, Skv, Dv]`.
    q_scale: `[B or 1, H or 1]`, of a floating dtype, read as float32. Default 1.
    k_scale: the same of keys, `[B or 1, Hkv or 1]`.
    v_scale: the same of values.
    causal: as in `attention`, and so are scale, window and q_offset.
    scale: default `D ** -0.5`.
    window: 0 for none.
    q_offset: position of the first query.
    dtype: of the result, a floating one. Default bfloat16.

Returns:
    out `[B, H, Sq, Dv]` of `dtype`, in q's memory order, and lse `[B, H, Sq]`, the natural logarithm of each softmax's
    denominator, in float32. A query that sees no key gives 0 and `-inf`. Neither has a gradient. With a `dtype` of
    float64, both are computed in that, in plain torch.

Where float8 is multiplied, weights are rounded to it. Codes between powers of two are linear, where exponentials are
not (Schraudolph, Neural Computation 11, 1999). So a weight is within 8 % of itself, 3.1 % in the root mean square. A
smaller one than 2^-14 of the largest in its block of at most 224 keys is within 2^-14.8 of that. A block's largest
counts as at least 2^-14 of the row's. Sums are of rounded weights. So out differs from attention of the same operands
by at most `0.09 sum p |v - out|` (p: the weights of a row, which add up to 1) and what such small weights add. lse is
the logarithm of that sum, within 0.1 (0.025 was the most on an H200). Tensor cores of Hopper keep about 13 bits of a
product's sums, and a product sums up one block. Elsewhere (sm_80, CPUs), and for more than 128 columns of values,
`attention` computes with operands widened to float16, or float32 on CPUs. So weights and results have their bits, and
lse is that of float32. `quantize_fp8` makes operands with scales of rows; scales of heads are their largest magnitudes
over 448.
""",
    module="attention.fp8",
    returns=("out", "lse"),
    fake=_fake,
    **no_gradient(OP, "Call it under torch.no_grad(), or tile.attention", 1),
    sharding=_sharding,
    flops=_flops,
)
