# SPDX-License-Identifier: Apache-2.0
"""`tile.dequant_gemm`: products with weights stored in few bits, and scales and zeros for runs of their columns.

Gradients flow to a, to the auxiliary operands and to floating scales and zeros; the words themselves are frozen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_tile.kernels import compute_dtype, kernels
from torch_tile.kernels.gemm.args import DequantGemmArgs, GemmArgs
from torch_tile.ops import checks
from torch_tile.ops.checks import require, require_type, require_value, shape_of
from torch_tile.ops.families import gemm
from torch_tile.ops.registration import register
from torch_tile.ops.registry import Shape, op_gradients
from torch_tile.ops.saved_args import restored_args
from torch_tile.ops.sharding_rule import Dims, Rule, Spec

OP = "dequant_gemm"
WHOLE = (torch.int8, torch.uint8)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = checks.FLOATING | {torch.float8_e8m0fnu, torch.float8_e4m3fn}
ZEROS = checks.FLOATING | {torch.int8, torch.uint8, torch.int16, torch.int32}


def check_weights(op: str, args: DequantGemmArgs[Tensor], grouped: bool = False) -> None:
    """Check a and the right operands with their scales and zeros: matrices, or one of each for every group."""
    a, bs, scales, zeros, bits, _, offset, format = (*args[:7], args.format)
    require_value(len(bs) > 0, lambda: f"tile.{op}: bs is empty; expected at least one matrix")
    checks.check_floating(op, a=a)
    checks.check_dims(op, "a", a, 2, "[S, K]" if grouped else "[M, K]")
    first, groups = bs[0], "G, " if grouped else ""
    require_type(
        first.dtype in WHOLE + FLOAT8,
        lambda: f"tile.{op}: bs[0] has dtype {first.dtype}; expected int8, uint8, float8_e4m3fn or float8_e5m2",
    )
    require_value(
        bits == 8 or (bits in (1, 2, 4) and first.dtype in WHOLE),
        lambda: f"tile.{op}: bits is {bits}, but bs[0] has dtype {first.dtype}; expected 8, or 1, 2 or 4 of int8",
    )
    if format:
        _check_format(op, format, first.dtype, bits, offset, len(zeros))
    for i, b in enumerate(bs):
        checks.check_device(op, f"bs[{i}]", b, "a", a)
        checks.check_same_dtype(op, **{"bs[0]": first, f"bs[{i}]": b})
        checks.check_dims(op, f"bs[{i}]", b, 2 + grouped, f"[{groups}N, K * bits / 8]")
        checks.check_sizes(op, f"bs[{i}]", b, first.shape[:-1], "as bs[0]")
        wanted = f"bs[{i}] has shape {shape_of(b)}; expected {bits} bits for each of a's {a.shape[1]} columns"
        require(b.shape[-1] * (8 // bits) == a.shape[1], lambda wanted=wanted: f"tile.{op}: {wanted}")  # type: ignore[misc]
    for name, factors, allowed in (("scales", scales, SCALES), ("zeros", zeros, ZEROS)):
        _check_factors(op, name, factors, allowed, a, bs, (*scales, *zeros)[:1])


def _check_format(op: str, format: str, words: torch.dtype, bits: int, offset: int, zeros: int) -> None:
    """Check that a number format comes without sign, offset and zeros, as its fields are indices."""
    known = kernels("gemm.dequant").FORMATS
    allowed = ", ".join(map(repr, known))
    require_value(format in known, lambda: f"tile.{op}: format is {format!r}; expected '' or one of {allowed}")
    require_value(
        bits == 4 and words == torch.uint8,
        lambda: f"tile.{op}: bits is {bits} of {words} for format {format!r}; expected 4 of uint8",
    )
    require_value(
        offset == 0 and zeros == 0,
        lambda: f"tile.{op}: offset is {offset}, and there are {zeros} zeros; format {format!r} has neither",
    )


def _check_factors(
    op: str,
    name: str,
    factors: Sequence[Tensor],
    allowed: frozenset[torch.dtype],
    a: Tensor,
    bs: Sequence[Tensor],
    first: Sequence[Tensor],
) -> None:
    """Check that scales or zeros are none or one `[N, G]` for each b. Steps along K must hold the group size.

    For groups of rows, whose b are `[G, N, words]`, it is `[G, N, runs]`.
    """
    require_value(
        len(factors) in (0, len(bs)),
        lambda: f"tile.{op}: {name} has {len(factors)} tensors; expected none, or one for each of {len(bs)} bs",
    )
    runs, shape = ("G", "[N, G]") if bs[0].dim() == 2 else ("runs", "[G, N, runs]")
    for i, x in enumerate(factors):
        what = f"{name}[{i}]"
        wanted = f"{what} has dtype {x.dtype}; expected one of {', '.join(sorted(map(str, allowed)))}"
        require_type(x.dtype in allowed, lambda wanted=wanted: f"tile.{op}: {wanted}")  # type: ignore[misc]
        checks.check_device(op, what, x, "a", a)
        checks.check_dims(op, what, x, bs[0].dim(), shape)
        for dim, size in enumerate(bs[0].shape[:-1]):
            checks.check_size(op, what, x, dim, size, "N, as the bs" if dim == x.dim() - 2 else "as the bs")
        checks.check_size(op, what, x, x.dim() - 1, first[0].shape[-1], f"{runs}, as all scales and zeros")
        k, groups = a.shape[1], x.shape[-1]
        if groups != 1:
            wanted = (
                f"{what} has {groups} groups for K = {k}; expected 1, or groups of 16, 32 or a multiple of 64 columns"
            )
            fits = groups > 0 and k % groups == 0 and supported_group(k // groups)
            require(fits, lambda wanted=wanted: f"tile.{op}: {wanted}")  # type: ignore[misc]


def supported_group(size: int) -> bool:
    """Return whether kernels exist for scales of groups of so many columns, fewer than all."""
    return size in (16, 32) or (size > 0 and size % 64 == 0)


def _fake(args: DequantGemmArgs[Tensor]) -> Tensor:
    """Check the arguments of `tile.dequant_gemm` and make its empty results."""
    a, bs, aux, kinds, epilogue, dtype = args.a, args.bs, args.aux, args.kinds, args.epilogue, args.dtype
    check_weights(OP, args)
    checks.check_result_dtype(OP, dtype)
    _check_norm(args)
    gemm.check_epilogue(OP, a, (a.shape[0],), bs[0].shape[0], len(bs), aux, kinds, epilogue)
    return a.new_empty((a.shape[0], bs[0].shape[0]), dtype=dtype)


def _check_norm(args: DequantGemmArgs[Tensor]) -> None:
    """Check the weight of a norm, which comes with its eps."""
    weight, eps = args.norm_weight, args.norm_eps
    if weight is not None:
        require_value(eps is not None, lambda: f"tile.{OP}: norm_weight has no norm_eps; expected a number")
        checks.check_auxiliary(OP, "norm_weight", weight, "a", args.a)
        checks.check_dims(OP, "norm_weight", weight, 1, "[K]")
        checks.check_sizes(OP, "norm_weight", weight, (args.a.shape[1],), "the columns of a")


def backward_of_weights(wide: Any, gradients: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Make the `backward` of a product with packed weights from the product with widened ones.

    Scales and zeros get their gradients from the weights' by groups. wide: the class of the arguments of the product
    with widened weights. gradients: computes its gradients, as `gemm.gradients` does.
    """

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        args, _ = restored_args(ctx)
        a, bs, scales, zeros = args[:4]
        fields = args.bits, args.high_first, args.offset
        shifted, matrices = widen(bs, scales, zeros, fields, args.format, a.dtype)
        needs_a, _, needs_scales, needs_zeros = ctx.needs_input_grad[:4]
        needs = [any(needs_scales) or any(needs_zeros)] * len(bs)
        product = wide(**{**{name: getattr(args, name) for name in wide._fields}, "bs": matrices})
        eps = getattr(args, "norm_eps", None)
        if eps is not None:
            product = product._replace(a=kernels("gemm.dequant").normalised(args).to(a.dtype))
            needs_a = True
        grad_a, grads, grad_aux = gradients(product, grad, needs_a, needs)
        grad_scales, grad_zeros = of_factors(grads, shifted, scales, zeros)
        found = {"a": grad_a, "bs": [None] * len(bs), "aux": grad_aux}
        if eps is not None:
            found["a"], found["norm_weight"] = _of_norm(a, args.norm_weight, eps, grad_a)
        return op_gradients(type(args), **found, scales=grad_scales, zeros=grad_zeros)

    return backward


def _of_norm(a: Tensor, weight: Tensor | None, eps: float, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of a and of the norm's weight from that of the normalised a."""
    compute = compute_dtype(a.dtype)
    x, g = a.to(compute), grad.to(compute)
    root = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    scaled = g if weight is None else g * weight.to(compute)
    grad_a = root * (scaled - x * root.square() * (scaled * x).mean(-1, keepdim=True))
    return grad_a.to(a.dtype), None if weight is None else (g * x * root).sum(0).to(weight.dtype)


def widen(
    bs: Sequence[Tensor],
    scales: Sequence[Tensor],
    zeros: Sequence[Tensor],
    fields: tuple[int, bool, int],
    format: str,
    dtype: torch.dtype,
) -> tuple[list[Tensor], list[Tensor]]:
    """Widen weights in plain torch: `[..., N, G, K / G]` in float32 (float64), and matrices `[..., K, N]`.

    `fields` are bits, high_first and offset.
    """
    compute, nothing = compute_dtype(dtype), [None] * len(bs)
    numbers = [kernels("gemm.dequant").dequantize(b, None, None, *fields, compute, format) for b in bs]
    widened = [_by_group(n, x) for n, x in zip(numbers, scales or zeros or nothing, strict=True)]
    shifted = [w - z.to(compute)[..., None] for w, z in zip(widened, zeros, strict=True)] if zeros else widened
    weights = [w * s.to(compute)[..., None] for w, s in zip(shifted, scales, strict=True)] if scales else shifted
    return shifted, [w.flatten(-2).to(dtype).mT for w in weights]


def of_factors(
    grads: Sequence[Tensor | None], shifted: Sequence[Tensor], scales: Sequence[Tensor], zeros: Sequence[Tensor]
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Compute gradients of scales and of zeros from those of the matrices that `widen` returns."""
    grad_scales: list[Tensor | None] = [None] * len(scales)
    grad_zeros: list[Tensor | None] = [None] * len(zeros)
    for i, g in enumerate(grads):
        if g is None:
            continue
        compute = shifted[i].dtype
        by_group = g.mT.to(compute).reshape(shifted[i].shape)
        if scales and scales[i].dtype in checks.FLOATING:
            grad_scales[i] = (by_group * shifted[i]).sum(-1).to(scales[i].dtype)
        if zeros and zeros[i].is_floating_point():
            slope = by_group * scales[i].to(compute)[..., None] if scales else by_group
            grad_zeros[i] = -slope.sum(-1).to(zeros[i].dtype)
    return grad_scales, grad_zeros


def _by_group(weights: Tensor, factors: Tensor | None) -> Tensor:
    """View `[..., N, K]` as `[..., N, G, K / G]`."""
    *shape, k = weights.shape
    groups = 1 if factors is None else factors.shape[-1]
    return weights.reshape(*shape, groups, k // groups)


def _sharding(args: DequantGemmArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.dequant_gemm` for sharding."""
    # Words and groups of columns need not end where a shard of the columns would.
    factors = [("n", "group")] * (len(args.scales) + len(args.zeros))
    inputs: list[Dims | None] = [("m", "k"), *[("n", "word")] * len(args.bs), *factors]
    inputs += [*gemm.aux_dims(args.aux, args.kinds, ()), None if args.norm_weight is None else ("k",)]
    return Rule(outputs=[("m", "n")], inputs=inputs, free=("m", "n"))


def _flops(args: DequantGemmArgs[Shape]) -> int:
    """Count the operations of `tile.dequant_gemm`."""
    return 2 * math.prod(args.a) * args.bs[0][0] * len(args.bs)


def dequant_gemm(
    a: Tensor,
    bs: Sequence[Tensor],
    scales: Sequence[Tensor] = (),
    zeros: Sequence[Tensor] = (),
    bits: int = 8,
    high_first: bool = False,
    offset: int = 0,
    aux: Sequence[Tensor] = (),
    kinds: str = "",
    epilogue: str = "",
    *,
    dtype: torch.dtype,
    format: str = "",
    norm_weight: Tensor | None = None,
    norm_eps: float | None = None,
) -> Tensor:
    """Compute `gemm` with right operands stored in few bits: `epilogue(a @ w0.T, a @ w1.T, ..., aux)`.

    `w = (b - offset - zero) * scale`, each b widened in registers: computed in float32 (float64 for float64 `a`),
    rounded to a's dtype at most once, before the product. With a format, `w = table[b] * scale`, and numbers of the
    table may be rounded to a's dtype before they are scaled. Powers of two as scales are those of the OCP Microscaling
    Formats (MX) specification 1.0.

    Fields of 1 or 2 bits, and of 8 bits with zeros: a weight of 16 bits is off by up to `2^-15 |scale|`. Scales from
    2^118 on may make it infinite or NaN. In float16, which holds no such weight but 0, those from 2^31 on may.

    Args:
        a: `[M, K]`.
        bs: each `[N, K * bits / 8]`, of int8, uint8, float8_e4m3fn or float8_e5m2, all alike.
        scales: none, or one for each b: `[N, G]`, of any floating dtype, float8_e8m0fnu or float8_e4m3fn: for G runs of
            columns of equal length. G is 1, or runs are of 16, 32 or a multiple of 64.
        zeros: none, or one for each b: `[N, G]`, floating or integer.
        bits: of a weight: 8, or 4, 2 or 1 of int8 (signed fields) and uint8 (unsigned ones).
        high_first: whether a byte's first column lies in its highest bits, not in its lowest.
        offset: what is subtracted from every weight, such as 8 for 4 unsigned bits.
        aux: as for `gemm`.
        kinds: as for `gemm`.
        epilogue: as for `gemm`.
        dtype: of the result.
        format: "nf4", "fp4" (both as bitsandbytes has them) or "e2m1" (of MXFP4 and NVFP4). The 4 bits of uint8 are
            then indices of the format's 16 numbers; "" for integers and float8. The scale of NVFP4's whole matrix is an
            operand of the epilogue.
        norm_weight: `[K]`, or None: that of the norm.
        norm_eps: with a number, the left operand is `a / sqrt(mean(a^2) + norm_eps) * norm_weight`, the RMS norm of a
            (arXiv:1910.07467). It is computed in float32, and rounded to 16 bits at most once. On Hopper one row of 16
            bits by weights of 4 bits is normalised in the product's kernel.

    Returns:
        `[M, N]`. Words and scales of float8 get no gradient; floating scales and zeros do.
    """
    fields = bits, high_first, offset
    op = torch.ops.tile.dequant_gemm.default
    norm = norm_weight, norm_eps
    out: Tensor = op(a, list(bs), list(scales), list(zeros), *fields, list(aux), kinds, epilogue, dtype, format, *norm)
    return out


register(
    name=OP,
    args=DequantGemmArgs,
    module="gemm.dequant",
    form=dequant_gemm,
    fake=_fake,
    backward=backward_of_weights(GemmArgs, gemm.gradients),
    sharding=_sharding,
    flops=_flops,
    lower_precision=("a",),
)
