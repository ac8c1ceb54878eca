# SPDX-License-Identifier: Apache-2.0
"""`tile.scaled_gemm`: products of float8 or int8 matrices with scales for matrices, rows and columns, or blocks.

It has no gradient: operands are results of a rounding, whose gradient the caller chooses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_tile.kernels.gemm.args import ScaledGemmArgs
from torch_tile.ops import checks
from torch_tile.ops.checks import require, require_type, require_value, shape_of
from torch_tile.ops.families import gemm
from torch_tile.ops.recomputed import no_gradient
from torch_tile.ops.registration import register
from torch_tile.ops.registry import Shape
from torch_tile.ops.sharding_rule import Rule, Spec

OP = "scaled_gemm"
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
GROUP = 128  # columns of a, or rows and columns of b, that share a scale where blocks have scales


def _check_fields(a: Tensor, b: Tensor, bits: int) -> None:
    """Check int8 activations and bytes of b that hold several fields."""
    require_value(bits in (1, 2, 4), lambda: f"tile.{OP}: bits is {bits}; expected 8, or 1, 2 or 4 beside int8 a")
    require_type(a.dtype == torch.int8, lambda: f"tile.{OP}: a has dtype {a.dtype} for {bits} bits; expected int8")
    require_type(
        b.dtype in (torch.int8, torch.uint8),
        lambda: f"tile.{OP}: b has dtype {b.dtype} for {bits} bits; expected int8 or uint8",
    )
    checks.check_dims(OP, "a", a, 2, "[M, K]")
    checks.check_dims(OP, "b", b, 2, "[K * bits / 8, N]")
    checks.check_device(OP, "b", b, "a", a)
    wanted = f"b has shape {shape_of(b)}; expected {bits} bits for each of a's {a.shape[1]} columns"
    require(b.shape[0] * (8 // bits) == a.shape[1], lambda: f"tile.{OP}: {wanted}")


ADVICE = (
    "Call it in a torch.autograd.Function whose backward multiplies by the operands before their rounding to float8, or"
    " quantises the gradient"
)


def check_operands(
    op: str, a: Tensor, b: Tensor, dims: tuple[str, str], allowed: Sequence[torch.dtype] = FLOAT8
) -> None:
    """Check dtypes and dimensions of both operands, whose K must agree; b may be one matrix or several."""
    for name, x, meaning in (("a", a, dims[0]), ("b", b, dims[1])):
        names = [str(dtype).removeprefix("torch.") for dtype in allowed]
        what = f"{name} has dtype {x.dtype}; expected {', '.join(names[:-1])} or {names[-1]}"
        require_type(x.dtype in allowed, lambda what=what: f"tile.{op}: {what}")  # type: ignore[misc]
        checks.check_dims(op, name, x, meaning.count(",") + 1, meaning)
    checks.check_device(op, "b", b, "a", a)
    checks.check_size(op, "b", b, b.dim() - 2, a.shape[-1], "K, as a")


def check_scale(
    op: str,
    name: str,
    scale: Tensor,
    a: Tensor,
    sizes: tuple[checks.Size, checks.Size],
    dims: str,
    groups: checks.Size | None = None,
    blocks: bool = True,
) -> None:
    """Check that scales are of the whole matrix, of rows or columns outside of K, or of runs of 128.

    Those of each of `groups` matrices have a dimension in front. Without `blocks`, no scale is of several rows.
    """
    checks.check_floating(op, **{name: scale})
    checks.check_device(op, name, scale, "a", a)
    checks.check_dims(op, name, scale, 2 + (groups is not None), dims)
    if groups is not None:
        checks.check_size(op, name, scale, 0, groups, "G, as b")
    outer = 0 if name == "scale_a" else 1
    for dim, (found, size) in enumerate(zip(scale.shape[-2:], sizes, strict=True)):
        runs = -(-size // GROUP)
        fits = found == 1 or (found == runs and (blocks or dim != outer)) or (dim == outer and found == size)
        what = f"{name} has shape {shape_of(scale)}; expected {dims}, rounded up, for {sizes[0]} x {sizes[1]} numbers"
        require(fits, lambda what=what: f"tile.{op}: {what}")  # type: ignore[misc]


def _fake(args: ScaledGemmArgs[Tensor]) -> Tensor:
    """Check the arguments of `tile.scaled_gemm` and make its empty results."""
    a, b, scale_a, scale_b, aux, kinds, epilogue, dtype, bits, offset = args
    if bits == 8:
        check_operands(OP, a, b, ("[M, K]", "[K, N]"), (*FLOAT8, torch.int8))
    else:
        _check_fields(a, b, bits)
    most = 0 if bits == 8 else 1 << (bits - 1)
    require_value(0 <= offset <= most, lambda: f"tile.{OP}: offset is {offset} for {bits} bits; expected 0 to {most}")
    both = bits < 8 or torch.int8 not in (a.dtype, b.dtype) or a.dtype == b.dtype
    require_type(both, lambda: f"tile.{OP}: a has dtype {a.dtype} and b {b.dtype}; expected both int8, or both float8")
    (m, k), n = a.shape, b.shape[1]
    check_scale(OP, "scale_a", scale_a, a, (m, k), "[1, M or M / 128, 1 or K / 128]")
    check_scale(OP, "scale_b", scale_b, a, (k, n), "[1 or K / 128, 1, N or N / 128]")
    checks.check_result_dtype(OP, dtype)
    gemm.check_epilogue(OP, a, (m,), n, 1, aux, kinds, epilogue)
    return a.new_empty((m, n), dtype=dtype)


def _sharding(args: ScaledGemmArgs[Spec]) -> Rule:
    # Runs of 128 need not end where a shard would: only what has one scale, or scales of its own, is sharded.
    """Name the dimensions of `tile.scaled_gemm` for sharding."""
    rows, columns = args.scale_a.shape[0], args.scale_b.shape[1]
    of_a = ("m" if rows == args.a.shape[0] else "block", "group")
    of_b = ("run", "n" if columns == args.b.shape[1] else "strip")
    free = [("m", rows in (1, args.a.shape[0])), ("n", columns in (1, args.b.shape[1]))]
    columns_of_b = "k" if args.bits == 8 else "word"
    inputs = [("m", "k"), (columns_of_b, "n"), of_a, of_b, *gemm.aux_dims(args.aux, args.kinds, ())]
    return Rule(outputs=[("m", "n")], inputs=inputs, free=tuple(name for name, fits in free if fits))


def _flops(args: ScaledGemmArgs[Shape]) -> int:
    """Count the operations of `tile.scaled_gemm`."""
    return 2 * math.prod(args.a) * args.b[1]


def scaled_gemm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    aux: Sequence[Tensor] = (),
    kinds: str = "",
    epilogue: str = "",
    bits: int = 8,
    offset: int = 0,
) -> Tensor:
    """Multiply float8 or int8 matrices with scales: `epilogue((a * scale_a) @ (b * scale_b), aux)`.

    Tensor cores sum runs of 128 columns, of int8 in int32 and so exactly. These sums are added up in float32
    (DeepSeek-V3, arXiv:2412.19437, 3.3.2; SmoothQuant, arXiv:2211.10438, for int8). Where the machine has no float8
    products, operands are widened, which is exact.

    Scales of the same kind, of runs or not, are multiplied first. Float32 must hold their product, and that of a run's
    sum and its scales. Where it does not, a result is infinite or NaN, also beside zeros. Below 2^-126 it loses bits.

    Args:
        a: `[M, K]`, float8_e4m3fn, float8_e5m2, or int8.
        b: `[K, N]`, float8 of either kind beside float8, int8, or fewer `bits`; best stored as `[N, K]`, so a
            transposed weight is a view.
        scale_a: of a floating dtype, taken as float32; for the whole matrix `[1, 1]`, for rows `[M, 1]`, for rows and
            runs of 128 columns `[M, K / 128]`. Blocks of 128 x 128 have `[M / 128, K / 128]`; divisions are rounded up.
        scale_b: likewise `[1, 1]`, `[1, N]`, `[K / 128, N]` or `[K / 128, N / 128]`.
        bias: `[N]`, added to the product; give it in `aux` where there is an epilogue.
        out_dtype: of the result.
        aux: as for `gemm`.
        kinds: as for `gemm`.
        epilogue: as for `gemm`.
        bits: of a number of b: 8, or 4 (W4A8), 2 (BitNet, arXiv:2402.17764) or 1 beside int8 a. Then b is
            `[K * bits / 8, N]`, int8 (signed fields) or uint8 (unsigned ones), the first of K in the lowest bits.
        offset: what is subtracted from each field of fewer than 8 bits: at most half of their range, such as 8 for 4
        unsigned bits. Ternary weights stored as 0, 1 and 2 have 1.

    Returns:
        `[M, N]`, without a gradient.

    Raises:
        ValueError: if there are a bias and an epilogue.
    """
    from torch_tile.kernels.epilogue.program import of_layer

    if bias is not None:
        require_value(not epilogue and not kinds, lambda: f"tile.{OP}: bias and epilogue are given; add it in epilogue")
        aux, kinds, epilogue = [bias], "r", of_layer("none", True, False)
    given = a, b, scale_a, scale_b, list(aux), kinds, epilogue, out_dtype, bits, offset
    out: Tensor = torch.ops.tile.scaled_gemm.default(*given)
    return out


register(
    name=OP,
    args=ScaledGemmArgs,
    module="gemm.scaled",
    form=scaled_gemm,
    fake=_fake,
    **no_gradient(OP, ADVICE),
    sharding=_sharding,
    flops=_flops,
)
