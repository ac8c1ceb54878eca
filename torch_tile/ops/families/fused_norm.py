# SPDX-License-Identifier: Apache-2.0
"""`tile.fused_norm`: a norm over the last dimension between two texts in the language of gemm's epilogues.

What the backend makes of norms and what stands around them; the forward runs the kernel, the backward is plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from torch_tile.kernels.epilogue import program as language
from torch_tile.kernels.epilogue.autodiff import vjp
from torch_tile.ops import checks
from torch_tile.ops.checks import require_type, require_value
from torch_tile.ops.registration import register
from torch_tile.ops.registry import V, entry, in_torch, no_flops, op_gradients, without_tensors
from torch_tile.ops.sharding_rule import Dims, Rule, Spec, broadcast, row_names

AUX_KINDS = {"t": "as x", "g": "[*leading of x, 1, ..., N]", "r": "[N]", "c": "[..., 1]", "s": "one element"}


class FusedNormArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.fused_norm`."""

    x: V
    aux: Sequence[V]
    kinds: str
    prologue: str
    epilogue: str
    centred: bool
    eps: float
    keep: bool
    dtype: torch.dtype


def _check(args: FusedNormArgs[Tensor]) -> None:
    x, aux, kinds, dtype = args.x, args.aux, args.kinds, args.dtype
    op = "fused_norm"
    checks.check_floating(op, x=x)
    for i, v in enumerate(aux):
        checks.check_auxiliary(op, f"aux[{i}]", v, "x", x)
    require_type(dtype in checks.FLOATING, lambda: f"tile.{op}: dtype is {dtype}; expected a floating dtype")
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
        for dim, size in enumerate(sizes):
            checks.check_size(op, name, v, dim, size, what)
    _check_same_runs([v for v, kind in zip(aux, kinds, strict=True) if kind == "g"])
    language.parse(args.prologue, 1, len(aux))
    language.parse(args.epilogue, 1, len(aux))


def _runs(x: Tensor, v: Tensor) -> tuple[checks.Size, ...]:
    """The shape that an operand of kind `g` has: x's sizes up to where its own are one for good."""
    if v.dim() != x.dim():
        return tuple(x.shape)
    outer = next((d for d in reversed(range(v.dim() - 1)) if not checks.known_one(v.shape[d])), -1) + 1
    return (*x.shape[:outer], *v.shape[outer:-1], x.shape[-1])


def _check_same_runs(operands: Sequence[Tensor]) -> None:
    for v in operands[1:]:
        for dim, size in enumerate(operands[0].shape):
            checks.check_size("fused_norm", "an aux of kind 'g'", v, dim, size, "as the first of that kind")


def _fake(args: FusedNormArgs[Tensor]) -> tuple[Tensor, Tensor]:
    _check(args)
    x = args.x
    return x.new_empty(x.shape, dtype=args.dtype), x.new_empty(x.shape if args.keep else (0,))


def _save(ctx: Any, args: FusedNormArgs[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.args = without_tensors(args)
    if not args.keep:
        ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(args.x, *args.aux)


def _backward(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None) -> tuple[Any, ...]:
    from torch_tile.kernels.common import compute_dtype

    x, *aux = ctx.saved_tensors
    args: FusedNormArgs[Any] = ctx.args
    compute = compute_dtype(x.dtype)
    operands = {f"x{i}": v.reshape(()) if k == "s" else v for i, (v, k) in enumerate(zip(aux, args.kinds, strict=True))}
    operands = {name: v.to(compute) for name, v in operands.items()}
    before = {"acc0": x.to(compute), **operands}
    s = language.evaluate(args.prologue, [before["acc0"]], [operands[f"x{i}"] for i in range(len(aux))])
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


def _sharding(args: FusedNormArgs[Spec]) -> Rule:
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
    returns=("y", "sum"),
    fake=_fake,
    run=entry("fused_norm", "fused_norm", "out", "total"),
    reference=in_torch("fused_norm"),
    setup_context=_save,
    backward=_backward,
    sharding=_sharding,
    flops=no_flops,
    full_precision_cuda=True,
)
