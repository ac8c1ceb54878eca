# SPDX-License-Identifier: Apache-2.0
"""`tile.dequant_gemm`: products with weights stored in few bits, and scales and zeros for runs of their columns.

Gradients flow to a, to the auxiliary operands and to floating scales and zeros; the words themselves are frozen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from torch_tile.kernels import kernels
from torch_tile.ops import checks
from torch_tile.ops.checks import require, require_type, require_value, shape_of
from torch_tile.ops.families import gemm
from torch_tile.ops.registration import register

OP = "dequant_gemm"
WHOLE = (torch.int8, torch.uint8)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
ZEROS = checks.FLOATING | {torch.int8, torch.uint8, torch.int16, torch.int32}


def _check(
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    zeros: Sequence[torch.Tensor],
    bits: int,
    aux: Sequence[torch.Tensor],
    kinds: str,
    epilogue: str,
    dtype: Any,
) -> None:
    require_value(len(bs) > 0, lambda: f"tile.{OP}: bs is empty; expected at least one matrix")
    checks.check_floating(OP, a=a)
    checks.check_dims(OP, "a", a, 2, "[M, K]")
    first = bs[0]
    require_type(
        first.dtype in WHOLE + FLOAT8,
        lambda: f"tile.{OP}: bs[0] has dtype {first.dtype}; expected int8, uint8, float8_e4m3fn or float8_e5m2",
    )
    require_value(
        bits == 8 or (bits in (1, 2, 4) and first.dtype in WHOLE),
        lambda: f"tile.{OP}: bits is {bits} for {first.dtype}; expected 8, or 1, 2 or 4 of int8 or uint8",
    )
    for i, b in enumerate(bs):
        checks.check_device(OP, f"bs[{i}]", b, "a", a)
        checks.check_same_dtype(OP, **{"bs[0]": first, f"bs[{i}]": b})
        checks.check_dims(OP, f"bs[{i}]", b, 2, "[N, K * bits / 8]")
        checks.check_size(OP, f"bs[{i}]", b, 0, first.shape[0], "as bs[0]")
        wanted = f"bs[{i}] has shape {shape_of(b)}; expected {bits} bits for each of a's {a.shape[1]} columns"
        require(b.shape[1] * (8 // bits) == a.shape[1], lambda wanted=wanted: f"tile.{OP}: {wanted}")  # type: ignore[misc]
    for name, factors, allowed in (("scales", scales, checks.FLOATING), ("zeros", zeros, ZEROS)):
        _check_factors(name, factors, allowed, a, bs, (*scales, *zeros)[:1])
    require_type(dtype in checks.FLOATING, lambda: f"tile.{OP}: dtype is {dtype}; expected a floating dtype")
    gemm.check_epilogue(OP, a, (a.shape[0],), first.shape[0], len(bs), aux, kinds, epilogue)


def _check_factors(
    name: str,
    factors: Sequence[torch.Tensor],
    allowed: frozenset[torch.dtype],
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    first: Sequence[torch.Tensor],
) -> None:
    """`[N, G]` for each b or none at all; groups are such that steps along K hold whole ones, or lie in one."""
    require_value(
        len(factors) in (0, len(bs)),
        lambda: f"tile.{OP}: {name} has {len(factors)} tensors; expected none, or one for each of {len(bs)} bs",
    )
    for i, x in enumerate(factors):
        what = f"{name}[{i}]"
        wanted = f"{what} has dtype {x.dtype}; expected one of {', '.join(sorted(map(str, allowed)))}"
        require_type(x.dtype in allowed, lambda wanted=wanted: f"tile.{OP}: {wanted}")  # type: ignore[misc]
        checks.check_device(OP, what, x, "a", a)
        checks.check_dims(OP, what, x, 2, "[N, G]")
        checks.check_size(OP, what, x, 0, bs[0].shape[0], "N, as the bs")
        checks.check_size(OP, what, x, 1, first[0].shape[1], "G, as all scales and zeros")
        k, groups = a.shape[1], x.shape[1]
        if groups != 1:
            wanted = (
                f"{what} has {groups} groups for K = {k}; expected 1, or groups of 16, 32 or a multiple of 64 columns"
            )
            fits = groups > 0 and k % groups == 0 and supported_group(k // groups)
            require(fits, lambda wanted=wanted: f"tile.{OP}: {wanted}")  # type: ignore[misc]


def supported_group(size: int) -> bool:
    """Whether there are kernels for scales of so many columns, fewer than all."""
    return size in (16, 32) or (size > 0 and size % 64 == 0)


def _fake(
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
) -> torch.Tensor:
    _check(a, bs, scales, zeros, bits, aux, kinds, epilogue, dtype)
    return a.new_empty((a.shape[0], bs[0].shape[0]), dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, bs, scales, zeros, *ctx.fields, aux, ctx.kinds, ctx.epilogue, _ = inputs
    ctx.counts = len(bs), len(scales), len(zeros)
    ctx.save_for_backward(a, *bs, *scales, *zeros, *aux)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """As of a product with the widened weights, from which scales and zeros get theirs by groups."""
    (a, *rest), (count, num_scales, num_zeros) = ctx.saved_tensors, ctx.counts
    bs, rest = rest[:count], rest[count:]
    scales, rest = rest[:num_scales], rest[num_scales:]
    zeros, aux = rest[:num_zeros], rest[num_zeros:]
    from torch_tile.kernels.common import compute_dtype

    compute = compute_dtype(a.dtype)
    numbers = [kernels(OP).dequantize(b, None, None, *ctx.fields, compute) for b in bs]
    widened = [_by_group(n, x) for n, x in zip(numbers, scales or zeros or [None] * count, strict=True)]
    shifted = [w - z.to(compute)[..., None] for w, z in zip(widened, zeros, strict=True)] if zeros else widened
    weights = [w * s.to(compute)[..., None] for w, s in zip(shifted, scales, strict=True)] if scales else shifted
    matrices = [w.flatten(1).to(a.dtype).mT for w in weights]
    needs_a, _, needs_scales, needs_zeros = ctx.needs_input_grad[:4]
    needs = [any(needs_scales) or any(needs_zeros)] * count
    grad_a, grads, grad_aux = gemm.gradients(
        a, matrices, aux, ctx.kinds, ctx.epilogue, grad, needs_a, needs
    )  # fmt: skip
    grad_scales: list[torch.Tensor | None] = [None] * num_scales
    grad_zeros: list[torch.Tensor | None] = [None] * num_zeros
    for i, g in enumerate(grads):
        if g is None:
            continue
        by_group = g.mT.to(compute).reshape(shifted[i].shape)
        if scales:
            grad_scales[i] = (by_group * shifted[i]).sum(-1).to(scales[i].dtype)
        if zeros and zeros[i].is_floating_point():
            slope = by_group * scales[i].to(compute)[..., None] if scales else by_group
            grad_zeros[i] = -slope.sum(-1).to(zeros[i].dtype)
    return grad_a, [None] * count, grad_scales, grad_zeros, None, None, None, grad_aux, None, None, None


def _by_group(weights: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    """`[N, K]` as `[N, G, K / G]`."""
    n, k = weights.shape
    groups = 1 if factors is None else factors.shape[1]
    return weights.reshape(n, groups, k // groups)


def _flops(a: Sequence[int], bs: Sequence[Sequence[int]], *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * math.prod(a) * bs[0][0] * len(bs)


register(
    OP,
    fake=_fake,
    backward=_backward,
    setup_context=_save,
    lower_precision=("a",),
    flops=_flops,
)
