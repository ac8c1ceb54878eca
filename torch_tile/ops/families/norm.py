# SPDX-License-Identifier: Apache-2.0
"""`tile.rms_norm`, `tile.add_rms_norm` and `tile.layer_norm`, over the last dimension.

The forward runs the kernel; the backward is plain torch and recomputes the statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_tile.kernels import compute_dtype
from torch_tile.kernels.norm.args import AddRmsNormArgs, FusedNormArgs, LayerNormArgs, RmsNormArgs, SoftmaxArgs
from torch_tile.ops import checks
from torch_tile.ops.checks import require, require_type, require_value
from torch_tile.ops.registration import declare, register
from torch_tile.ops.registry import entry, in_torch, no_flops, op_gradients
from torch_tile.ops.saved_args import restored_args, save_args
from torch_tile.ops.sharding_rule import Dims, Rule, Spec, broadcast, if_given, row_names


def _check_rms_norm(op: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, activation: str) -> None:
    """Check the arguments of `tile.rms_norm`."""
    checks.check_floating(op, x=x, residual=residual, weight=weight)
    require(x.dim() >= 1, lambda: f"tile.{op}: x has 0 dimensions; expected at least 1: [..., N]")
    if residual is not None:
        checks.check_same_dtype(op, x=x, residual=residual)
        checks.check_dims(op, "residual", residual, x.dim(), "as x")
        checks.check_sizes(op, "residual", residual, x.shape, "as x")
    checks.check_vector(op, "weight", weight, x.shape[-1], "x's last dimension")
    checks.check_activation(op, activation)


def _rms_norm_dtype(x: Tensor, weight: Tensor | None, cast_first: bool) -> torch.dtype:
    """Return the dtype of `rms_norm`'s result."""
    return torch.promote_types(x.dtype, weight.dtype) if weight is not None and cast_first else x.dtype


def _fake_rms_norm(args: RmsNormArgs[Tensor]) -> Tensor:
    """Check the arguments of `tile.rms_norm` and make its empty results."""
    x, weight = args.x, args.weight
    _check_rms_norm("rms_norm", x, None, weight, args.activation)
    return x.new_empty(x.shape, dtype=_rms_norm_dtype(x, weight, args.cast_first))


def _fake_add_rms_norm(args: AddRmsNormArgs[Tensor]) -> tuple[Tensor, Tensor]:
    """Check the arguments of `tile.add_rms_norm` and make its empty results."""
    x, weight = args.x, args.weight
    _check_rms_norm("add_rms_norm", x, args.residual, weight, args.activation)
    return x.new_empty(x.shape, dtype=_rms_norm_dtype(x, weight, args.cast_first)), x.new_empty(x.shape)


def _rms_norm_gradients(args: RmsNormArgs[Tensor], grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of x (in the computing dtype) and of the weight (in its own)."""
    from torch_tile.kernels.epilogue.autodiff import vjp

    x, weight, activation = args.x, args.weight, args.activation
    compute = compute_dtype(x.dtype)
    s = x.to(compute)
    rstd = torch.rsqrt(s.square().mean(-1, keepdim=True) + args.eps)
    normalised = s * rstd
    factor = normalised.new_ones(()) if weight is None else weight.to(compute) + args.weight_offset
    upstream = grad.to(compute)
    if activation != "none":
        upstream = vjp(f"v0={activation}(acc0);ret v0", {"acc0": normalised * factor}, upstream)["acc0"]
    inner = upstream * factor
    grad_x = rstd * (inner - normalised * (inner * normalised).mean(-1, keepdim=True))
    if weight is None:
        return grad_x, None
    return grad_x, (upstream * normalised).sum_to_size(weight.shape).to(weight.dtype)


def _rms_norm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Compute the gradients of `tile.rms_norm`."""
    args, _ = restored_args(ctx)
    grad_x, grad_weight = _rms_norm_gradients(args, grad)
    return op_gradients(RmsNormArgs, x=grad_x.to(args.x.dtype), weight=grad_weight)


def _save_add_rms_norm(ctx: Any, args: AddRmsNormArgs[Tensor], output: tuple[Tensor, Tensor]) -> None:
    """Save for the gradient of `tile.add_rms_norm` what it needs."""
    save_args(ctx, args.norm._replace(x=output[1]))


def _add_rms_norm_backward(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None) -> tuple[Any, ...]:
    """Compute the gradients of `tile.add_rms_norm`."""
    args, _ = restored_args(ctx)  # of the norm, whose x is the sum
    grad_x: Tensor | None = grad_sum
    grad_weight: Tensor | None = None
    if grad is not None:
        inner, grad_weight = _rms_norm_gradients(args, grad)
        grad_x = (inner if grad_sum is None else inner + grad_sum).to(args.x.dtype)
    return op_gradients(AddRmsNormArgs, x=grad_x, residual=grad_x, weight=grad_weight)


def _rms_norm_sharding(args: RmsNormArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.rms_norm` for sharding."""
    rows = row_names(args.x)
    return Rule(outputs=[(*rows, "n")], inputs=[(*rows, "n"), if_given(args.weight, ("n",))], free=rows)


def _add_rms_norm_sharding(args: AddRmsNormArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.add_rms_norm` for sharding."""
    dims = (*row_names(args.x), "n")
    weight_dims = if_given(args.weight, ("n",))
    saved = [dims, weight_dims]  # the sum is saved, not its terms
    return Rule(outputs=[dims, dims], inputs=[dims, dims, weight_dims], free=dims[:-1], saved=saved)


def _rms_norm_as_aten(args: RmsNormArgs[Tensor]) -> Tensor:
    """Compute `tile.rms_norm` in ATen operations, for Inductor."""
    x, weight, offset = args.x, args.weight, args.weight_offset
    h = x if x.dtype == torch.float64 else x.float()
    y = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + args.eps)
    if weight is None:
        return y.to(x.dtype)
    if args.cast_first:
        return (weight + offset) * y.to(x.dtype) if offset else weight * y.to(x.dtype)
    scale = weight.to(h.dtype)
    return (y * (scale + offset if offset else scale)).to(x.dtype)


rms_norm: Final = declare(
    "rms_norm",
    RmsNormArgs[Tensor],
    Tensor,
    """`activation(x / sqrt(mean(x^2) + eps) * (weight + weight_offset))` over the last dimension (arXiv:1910.07467).

Args:
    x: `[..., N]`.
    weight: `[N]`, of any floating dtype.
    eps: added to the mean square.
    activation: as for `linear`.
    weight_offset: 1.0 for Gemma's norms.
    cast_first: True rounds the normalised row to x's dtype before the weight, as transformers' Llama does; False
        multiplies in float32 and rounds once, as `F.rms_norm` and Gemma do.

Returns:
    `[..., N]` in x's dtype; with `cast_first`, promoted with the weight's.
""",
    fake=_fake_rms_norm,
    module="norm.norm",
    reference=in_torch("norm.norm", "plain_rms_norm_reference"),
    backward=_rms_norm_backward,
    as_aten=_rms_norm_as_aten,
    sharding=_rms_norm_sharding,
    flops=no_flops,
    full_precision_cuda=True,
)
add_rms_norm: Final = declare(
    "add_rms_norm",
    AddRmsNormArgs[Tensor],
    tuple[Tensor, Tensor],
    """`rms_norm` of `x + residual`, and that sum.

Args:
    x: `[..., N]`.
    residual: as x, in shape and dtype.
    weight: as `rms_norm`, like what follows.
    eps: added to the mean square.
    activation: as for `linear`.
    weight_offset: 1.0 for Gemma's norms.
    cast_first: as `rms_norm`.

Returns:
    y as `rms_norm`, and the sum `[..., N]` in x's dtype, which is what y was computed from.
""",
    returns=("y", "sum"),
    fake=_fake_add_rms_norm,
    run=entry("norm.norm", "add_rms_norm", "out", "total"),
    reference=in_torch("norm.norm", "add_rms_norm_reference"),
    setup_context=_save_add_rms_norm,
    backward=_add_rms_norm_backward,
    sharding=_add_rms_norm_sharding,
    flops=no_flops,
    full_precision_cuda=True,
)


def _check_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    """Check the arguments of `tile.layer_norm`."""
    checks.check_floating("layer_norm", x=x, weight=weight, bias=bias)
    require(x.dim() >= 1, lambda: "tile.layer_norm: x has 0 dimensions; expected at least 1: [..., N]")
    checks.check_vector("layer_norm", "weight", weight, x.shape[-1], "x's last dimension")
    checks.check_vector("layer_norm", "bias", bias, x.shape[-1], "x's last dimension")


def _fake_layer_norm(args: LayerNormArgs[Tensor]) -> Tensor:
    """Check the arguments of `tile.layer_norm` and make its empty results."""
    _check_layer_norm(args.x, args.weight, args.bias)
    return args.x.new_empty(args.x.shape)


def _save_layer_norm(ctx: Any, args: LayerNormArgs[Tensor], output: Tensor) -> None:
    """Save for the gradient of `tile.layer_norm` what it needs."""
    ctx.eps, ctx.bias_dtype = args.eps, None if args.bias is None else args.bias.dtype
    ctx.save_for_backward(args.x, args.weight)


def _layer_norm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Compute the gradients of `tile.layer_norm`."""
    x, weight = ctx.saved_tensors
    compute = compute_dtype(x.dtype)
    centred = x.to(compute)
    centred = centred - centred.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + ctx.eps)
    normalised, upstream = centred * rstd, grad.to(compute)
    inner = upstream if weight is None else upstream * weight.to(compute)
    projection = normalised * (inner * normalised).mean(-1, keepdim=True)
    grad_x = rstd * (inner - inner.mean(-1, keepdim=True) - projection)
    last = x.shape[-1:]
    grad_weight = None if weight is None else (upstream * normalised).sum_to_size(last).to(weight.dtype)
    grad_bias = None if ctx.bias_dtype is None else upstream.sum_to_size(last).to(ctx.bias_dtype)
    return op_gradients(LayerNormArgs, x=grad_x.to(x.dtype), weight=grad_weight, bias=grad_bias)


def _layer_norm_sharding(args: LayerNormArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.layer_norm` for sharding."""
    rows = row_names(args.x)
    inputs = [(*rows, "n"), if_given(args.weight, ("n",)), if_given(args.bias, ("n",))]
    return Rule(outputs=[(*rows, "n")], inputs=inputs, free=rows, saved=inputs[:2])


def _layer_norm_as_aten(args: LayerNormArgs[Tensor]) -> Tensor:
    """Compute `tile.layer_norm` in ATen operations, for Inductor."""
    return F.layer_norm(args.x, (args.x.shape[-1],), args.weight, args.bias, args.eps)


layer_norm: Final = declare(
    "layer_norm",
    LayerNormArgs[Tensor],
    Tensor,
    """`(x - mean) / sqrt(variance + eps) * weight + bias` over the last dimension (arXiv:1607.06450).

Args:
    x: `[..., N]`.
    weight: `[N]`, of any floating dtype.
    bias: `[N]`, of any floating dtype.
    eps: added to the (biased) variance.

Returns:
    `[..., N]` in x's dtype.
""",
    module="norm.norm",
    fake=_fake_layer_norm,
    reference=in_torch("norm.norm", "layer_norm_reference"),
    setup_context=_save_layer_norm,
    backward=_layer_norm_backward,
    as_aten=_layer_norm_as_aten,
    sharding=_layer_norm_sharding,
    flops=no_flops,
    full_precision_cuda=True,
)


# `tile.fused_norm`: a norm over the last dimension between two texts in the language of gemm's epilogues. The backend
# makes it of norms and their neighbours. The forward runs the kernel, the backward is plain torch.

AUX_KINDS = {"t": "as x", "g": "[*leading of x, 1, ..., N]", "r": "[N]", "c": "[..., 1]", "s": "one element"}


def check_fused(op: str, args: FusedNormArgs[Tensor]) -> None:
    """Check the arguments of `tile.fused_norm`, or of an operator that has them, too."""
    x, aux, kinds, dtype = args.x, args.aux, args.kinds, args.dtype
    checks.check_floating(op, x=x)
    for i, v in enumerate(aux):
        checks.check_auxiliary(op, f"aux[{i}]", v, "x", x)
    checks.check_result_dtype(op, dtype)
    checks.require(x.dim() >= 1, lambda: f"tile.{op}: x has 0 dimensions; expected at least 1: [..., N]")
    require_value(
        len(kinds) == len(aux) and set(kinds) <= set(AUX_KINDS),
        lambda: f"tile.{op}: kinds is {kinds!r} for {len(aux)} aux operands; expected one of 'tgrcs' for each",
    )
    for i, (v, kind) in enumerate(zip(aux, kinds, strict=True)):
        name, what = f"aux[{i}]", f"by kind {kind!r}: {AUX_KINDS[kind]}"
        if kind == "s":
            checks.require(v.numel() == 1, lambda: f"tile.{op}: {name} has shape {checks.shape_of(v)}; {what}")  # noqa: B023
            continue
        sizes = {"t": x.shape, "r": x.shape[-1:], "c": (*x.shape[:-1], 1), "g": _runs(x, v)}[kind]
        checks.check_dims(op, name, v, len(sizes), what)
        checks.check_sizes(op, name, v, sizes, what)
    _check_same_runs(op, [v for v, kind in zip(aux, kinds, strict=True) if kind == "g"])
    from torch_tile.kernels.epilogue.program import parse

    parse(args.prologue, 1, len(aux), argument="prologue")
    parse(args.epilogue, 1, len(aux))


def _runs(x: Tensor, v: Tensor) -> tuple[checks.Size, ...]:
    """Return the shape of an operand of kind `g`: x's sizes up to the point from which its own sizes are all one."""
    if v.dim() != x.dim():
        return tuple(x.shape)
    outer = next((d for d in reversed(range(v.dim() - 1)) if not checks.known_one(v.shape[d])), -1) + 1
    return (*x.shape[:outer], *v.shape[outer:-1], x.shape[-1])


def _check_same_runs(op: str, operands: Sequence[Tensor]) -> None:
    """Check that all operands of kind `g` have one shape."""
    for v in operands[1:]:
        checks.check_sizes(op, "an aux of kind 'g'", v, operands[0].shape, "as the first of that kind")


def _fake(args: FusedNormArgs[Tensor]) -> tuple[Tensor, Tensor]:
    """Check the arguments of `tile.fused_norm` and make its empty results."""
    check_fused("fused_norm", args)
    x = args.x
    return x.new_empty(x.shape, dtype=args.dtype), x.new_empty(x.shape if args.keep else (0,))


def _save(ctx: Any, args: FusedNormArgs[Tensor], output: tuple[Tensor, Tensor]) -> None:
    """Save for the gradient of `tile.fused_norm` what it needs."""
    if not args.keep:
        ctx.mark_non_differentiable(output[1])
    save_args(ctx, args)


def _backward(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None) -> tuple[Any, ...]:
    """Compute the gradients of `tile.fused_norm`."""
    from torch_tile.kernels.epilogue.autodiff import vjp
    from torch_tile.kernels.epilogue.program import evaluate

    args, _ = restored_args(ctx)
    x, aux = args.x, args.aux
    compute = compute_dtype(x.dtype)
    operands = {f"x{i}": v.reshape(()) if k == "s" else v for i, (v, k) in enumerate(zip(aux, args.kinds, strict=True))}
    operands = {name: v.to(compute) for name, v in operands.items()}
    before = {"acc0": x.to(compute), **operands}
    s = evaluate(args.prologue, [before["acc0"]], [operands[f"x{i}"] for i in range(len(aux))])
    s = s.to(x.dtype).to(compute)
    upstream = s.new_zeros(()) if not args.keep or grad_sum is None else grad_sum.to(compute)
    found: list[dict[str, Tensor]] = []
    if grad is not None:
        centred = s - s.mean(-1, keepdim=True) if args.centred else s
        rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + args.eps)
        normalised = centred * rstd
        found.append(vjp(args.epilogue, {"acc0": normalised, **operands}, grad.to(compute)))
        inner = found[-1].pop("acc0", s.new_zeros(())).expand(x.shape)
        inner = inner - normalised * (inner * normalised).mean(-1, keepdim=True)
        upstream = upstream + rstd * (inner - inner.mean(-1, keepdim=True) if args.centred else inner)
    found.append(vjp(args.prologue, before, upstream.expand(x.shape)))
    grad_x = found[-1].pop("acc0", s.new_zeros(())).expand(x.shape).to(x.dtype)
    grads = []
    for i, v in enumerate(aux):
        terms = [g[f"x{i}"].expand(x.shape) for g in found if f"x{i}" in g]
        view = operands[f"x{i}"]
        grads.append(sum(terms).sum_to_size(view.shape).reshape(v.shape).to(v.dtype) if terms else None)  # type: ignore[union-attr]
    return op_gradients(FusedNormArgs, x=grad_x, aux=grads)


def fused_sharding(args: FusedNormArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.fused_norm` for sharding."""
    dims = (*row_names(args.x), "n")
    by_kind: dict[str, Dims] = {"t": dims, "r": ("n",), "c": (*dims[:-1], "")}
    operands = [
        by_kind.get(k) or (broadcast(v, dims) if k == "g" else ("",) * len(v.shape))
        for v, k in zip(args.aux, args.kinds, strict=True)
    ]
    return Rule(outputs=[dims, dims if args.keep else ("",)], inputs=[dims, *operands], free=dims[:-1])


register(
    name="fused_norm",
    args=FusedNormArgs,
    module="norm.fused",
    returns=("y", "sum"),
    fake=_fake,
    run=entry("norm.fused", "fused_norm", "out", "total"),
    setup_context=_save,
    backward=_backward,
    sharding=fused_sharding,
    flops=no_flops,
    full_precision_cuda=True,
)


# `tile.softmax`, over any one dimension.


def _fake_softmax(args: SoftmaxArgs[Tensor]) -> Tensor:
    """Check the arguments of `tile.softmax` and make its empty results."""
    x, dim, dtype = args
    checks.check_floating("softmax", x=x)
    rank = max(x.dim(), 1)
    if not -rank <= dim < rank:
        raise IndexError(f"tile.softmax: dim is {dim}; expected {-rank} to {rank - 1} for shape {checks.shape_of(x)}")
    require_type(
        dtype is None or dtype in checks.FLOATING,
        lambda: f"tile.softmax: dtype is {dtype}; expected float16, bfloat16, float32 or float64",
    )
    return x.new_empty(x.shape, dtype=x.dtype if dtype is None else dtype)


def _save_softmax(ctx: Any, args: SoftmaxArgs[Tensor], output: Tensor) -> None:
    """Save for the gradient of `tile.softmax` what it needs."""
    ctx.dim, ctx.input_dtype = args.dim, args.x.dtype
    ctx.save_for_backward(output)


def _backward_softmax(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Compute the gradient of `tile.softmax`."""
    (y,) = ctx.saved_tensors
    compute = torch.promote_types(torch.promote_types(y.dtype, ctx.input_dtype), torch.float32)
    p, upstream = y.to(compute), grad.to(compute)
    grad_x = p * (upstream - (upstream * p).sum(ctx.dim, keepdim=True))
    return op_gradients(SoftmaxArgs, x=grad_x.to(ctx.input_dtype))


def _sharding_softmax(args: SoftmaxArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.softmax` for sharding."""
    dims = tuple(f"row{i}" for i in range(len(args.x.shape)))
    whole = dims[args.dim] if dims else ""
    return Rule(outputs=[dims], inputs=[dims], free=tuple(d for d in dims if d != whole))


def _as_aten(args: SoftmaxArgs[Tensor]) -> Tensor:
    """Compute `tile.softmax` in ATen operations, for Inductor."""
    return F.softmax(args.x, args.dim, dtype=args.dtype)


softmax: Final = declare(
    "softmax",
    SoftmaxArgs[Tensor],
    Tensor,
    """`exp(x) / sum(exp(x))` over one dimension.

Args:
    x: any shape.
    dim: the dimension to sum over; counts from the end if negative.
    dtype: of the result; default x's.

Returns:
    x's shape.
""",
    module="norm.softmax",
    fake=_fake_softmax,
    setup_context=_save_softmax,
    backward=_backward_softmax,
    as_aten=_as_aten,
    sharding=_sharding_softmax,
    flops=no_flops,
    full_precision_cuda=True,
)
