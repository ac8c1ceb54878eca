# SPDX-License-Identifier: Apache-2.0
"""`tile.gemm` and the two layers it makes: `tile.linear` and `tile.swiglu`.

The layers are an epilogue text each. All three share one backward: products are recomputed only where the epilogue's
derivative reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torch_tile.kernels.epilogue import program as language
from torch_tile.kernels.epilogue.autodiff import vjp
from torch_tile.ops import checks
from torch_tile.ops.checks import require, require_type, require_value, shape_of
from torch_tile.ops.layers import flattened, linear_as_gemm, linear_dtype, swiglu_text
from torch_tile.ops.registration import register

AUX_KINDS = {"t": "[*batch, M, N]", "r": "[N]", "c": "[*batch, M, 1]", "s": "one element"}


def _check_gemm(
    a: torch.Tensor, bs: Sequence[torch.Tensor], aux: Sequence[torch.Tensor], kinds: str, epilogue: str, dtype: Any
) -> None:
    require_value(len(bs) > 0, lambda: "tile.gemm: bs is empty; expected at least one matrix")
    checks.check_floating("gemm", a=a, **{f"bs[{i}]": b for i, b in enumerate(bs)})
    checks.check_same_dtype("gemm", a=a, **{f"bs[{i}]": b for i, b in enumerate(bs)})
    require_type(dtype in checks.FLOATING, lambda: f"tile.gemm: dtype is {dtype}; expected a floating dtype")
    require(
        a.dim() in (2, 3), lambda: f"tile.gemm: a has shape {shape_of(a)}; expected 2 or 3 dimensions: [*batch, M, K]"
    )
    for i, b in enumerate(bs):
        checks.check_dims("gemm", f"bs[{i}]", b, a.dim(), "[*batch, K, N], as a")
        checks.check_size("gemm", f"bs[{i}]", b, -2, a.shape[-1], "a's last dimension")
        checks.check_size("gemm", f"bs[{i}]", b, -1, bs[0].shape[-1], "as bs[0]")
        checks.check_broadcasts("gemm", f"bs[{i}]", b, (*a.shape[:-2], a.shape[-1], bs[0].shape[-1]))
    check_epilogue("gemm", a, a.shape[:-1], bs[0].shape[-1], len(bs), aux, kinds, epilogue)


def check_epilogue(
    op: str, a: torch.Tensor, rows: Sequence[checks.Size], cols: checks.Size, products: int,
    aux: Sequence[torch.Tensor], kinds: str, epilogue: str,
) -> None:  # fmt: skip
    """The epilogue of products of shape `(*rows, cols)`, and its auxiliary operands by kind."""
    require_value(
        len(kinds) == len(aux) and set(kinds) <= set(AUX_KINDS),
        lambda: f"tile.{op}: kinds is {kinds!r} for {len(aux)} aux operands; expected 't', 'r', 'c' or 's' for each",
    )
    for i, (x, kind) in enumerate(zip(aux, kinds, strict=True)):
        checks.check_auxiliary(op, f"aux[{i}]", x, "a", a)
        wanted: tuple[Any, ...] = {"t": (*rows, cols), "r": (cols,), "c": (*rows, 1), "s": x.shape}[kind]
        ok = x.numel() == 1 if kind == "s" else x.dim() == len(wanted)
        require(
            ok,
            lambda: f"tile.{op}: aux[{i}] has shape {shape_of(x)}; kind {kind!r} expects {AUX_KINDS[kind]}",  # noqa: B023
        )
        for dim, size in enumerate(wanted):
            checks.check_size(op, f"aux[{i}]", x, dim, size, f"by kind {kind!r}: {AUX_KINDS[kind]}")
    language.parse(epilogue, products, len(aux), 0)


def _fake_gemm(
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    aux: Sequence[torch.Tensor],
    kinds: str,
    epilogue: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    _check_gemm(a, bs, aux, kinds, epilogue, dtype)
    return a.new_empty((*a.shape[:-1], bs[0].shape[-1]), dtype=dtype)


class Multiply(NamedTuple):
    """A product of a and b, and from the gradient of that those of a and of b."""

    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    of_a: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # from the gradient, and b
    of_b: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # from a, and the gradient


MATMUL = Multiply(torch.matmul, lambda grad, b: torch.matmul(grad, b.mT), lambda a, grad: torch.matmul(a.mT, grad))


def gradients(
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    aux: Sequence[torch.Tensor],
    kinds: str,
    epilogue: str,
    grad: torch.Tensor,
    needs_a: bool,
    needs_bs: Sequence[bool],
    multiply: Multiply = MATMUL,
) -> tuple[torch.Tensor | None, list[torch.Tensor | None], list[torch.Tensor | None]]:
    """Gradients of a and bs, None where not needed, and of aux.

    Matrix products are in a's dtype, as eager torch has them; the rest is in float32 (float64).
    """
    from torch_tile.kernels.gemm.gemm import aux_views, compute_dtype

    compute = compute_dtype(a.dtype)
    inputs: dict[str, Any] = {f"acc{i}": lambda b=b: multiply.product(a, b).to(compute) for i, b in enumerate(bs)}
    inputs |= {f"x{i}": lambda x=x: x.to(compute) for i, x in enumerate(aux_views(aux, kinds))}
    grads = vjp(epilogue, inputs, grad.to(compute))
    grad_a: torch.Tensor | None = None
    grad_bs: list[torch.Tensor | None] = []
    for i, (b, needed) in enumerate(zip(bs, needs_bs, strict=True)):
        grad_b: torch.Tensor | None = None
        if f"acc{i}" in grads:
            product = grads[f"acc{i}"].to(a.dtype)
            if needs_a:
                term = multiply.of_a(product, b)
                grad_a = term if grad_a is None else grad_a + term
            if needed:
                grad_b = multiply.of_b(a, product).sum_to_size(b.shape)
        grad_bs.append(grad_b)
    grad_aux: list[torch.Tensor | None] = []
    for i, (x, view) in enumerate(zip(aux, aux_views(aux, kinds), strict=True)):
        full = grads.get(f"x{i}")
        if full is not None:
            full = full.expand_as(grad).sum_to_size(view.shape).reshape(x.shape).to(x.dtype)
        grad_aux.append(full)
    return grad_a, grad_bs, grad_aux


def _save_gemm(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, bs, aux, ctx.kinds, ctx.epilogue, _ = inputs
    ctx.num_products = len(bs)
    ctx.save_for_backward(a, *bs, *aux)


def _gemm_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, *rest = ctx.saved_tensors
    bs, aux = rest[: ctx.num_products], rest[ctx.num_products :]
    needs_a, needs_bs = ctx.needs_input_grad[:2]
    return (*gradients(a, bs, aux, ctx.kinds, ctx.epilogue, grad, needs_a, needs_bs), None, None, None)


def flops(a: Sequence[int], bs: Sequence[Sequence[int]], *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Of the products of a `[..., K]` and bs `[..., N]`."""
    return 2 * math.prod(a) * bs[0][-1] * len(bs)


register(
    "gemm",
    fake=_fake_gemm,
    backward=_gemm_backward,
    setup_context=_save_gemm,
    lower_precision=("a", "bs"),
    flops=flops,
)


def _check_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
) -> None:
    checks.check_floating("linear", x=x, weight=weight, bias=bias, residual=residual)
    checks.check_same_dtype("linear", x=x, weight=weight, bias=bias)
    require(x.dim() >= 1, lambda: "tile.linear: x has 0 dimensions; expected at least 1: [..., K]")
    checks.check_dims("linear", "weight", weight, 2, "[N, K]")
    checks.check_size("linear", "weight", weight, 1, x.shape[-1], "x's last dimension")
    checks.check_vector("linear", "bias", bias, weight.shape[0], "weight's first dimension")
    if residual is not None:
        checks.check_dims("linear", "residual", residual, x.dim(), "[..., N], as the result")
        for dim, size in enumerate((*x.shape[:-1], weight.shape[0])):
            checks.check_size("linear", "residual", residual, dim, size, "as the result")
    checks.check_activation("linear", activation)


def _fake_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str = "none",
) -> torch.Tensor:
    _check_linear(x, weight, bias, residual, activation)
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=linear_dtype(x, residual))


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, residual, ctx.activation = inputs
    # The residual's values are never read by the backward; its dtype and presence are.
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.save_for_backward(x, weight, bias)


def _linear_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, weight, bias = ctx.saved_tensors
    grad_residual = None if ctx.residual_dtype is None else grad.to(ctx.residual_dtype)
    arguments = linear_as_gemm(x, weight, bias, None, ctx.activation)
    needs_x, needs_w = ctx.needs_input_grad[:2]
    grad_x, (grad_w,), grad_aux = gradients(*arguments, flattened(grad), needs_x, [needs_w])
    grad_x = None if grad_x is None else grad_x.reshape(x.shape)
    return grad_x, None if grad_w is None else grad_w.mT, grad_aux[0] if grad_aux else None, grad_residual, None


def _linear_flops(x: Sequence[int], weight: Sequence[int], *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * math.prod(x) * weight[0]


register(
    "linear",
    fake=_fake_linear,
    backward=_linear_backward,
    setup_context=_save_linear,
    lower_precision=("x", "weight", "bias"),
    flops=_linear_flops,
)


def _check_swiglu(x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, activation: str) -> None:
    tensors = {"x": x, "gate_weight": gate_weight, "up_weight": up_weight}
    checks.check_floating("swiglu", **tensors)
    checks.check_same_dtype("swiglu", **tensors)
    require(x.dim() >= 1, lambda: "tile.swiglu: x has 0 dimensions; expected at least 1: [..., K]")
    for name in ("gate_weight", "up_weight"):
        checks.check_dims("swiglu", name, tensors[name], 2, "[N, K]")
        checks.check_size("swiglu", name, tensors[name], 1, x.shape[-1], "x's last dimension")
    checks.check_size("swiglu", "up_weight", up_weight, 0, gate_weight.shape[0], "as gate_weight")
    checks.check_activation("swiglu", activation)


def _fake_swiglu(
    x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, activation: str = "silu"
) -> torch.Tensor:
    _check_swiglu(x, gate_weight, up_weight, activation)
    return x.new_empty((*x.shape[:-1], gate_weight.shape[0]))


def _save_swiglu(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _swiglu_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, gate_weight, up_weight = ctx.saved_tensors
    weights = [gate_weight.mT, up_weight.mT]
    text = swiglu_text(ctx.activation)
    needs_x, *needs_weights = ctx.needs_input_grad[:3]
    grad_x, grads, _ = gradients(flattened(x), weights, [], "", text, flattened(grad), needs_x, needs_weights)
    grad_x = None if grad_x is None else grad_x.reshape(x.shape)
    return grad_x, *(None if g is None else g.mT for g in grads), None


def _swiglu_flops(x: Sequence[int], gate: Sequence[int], *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 4 * math.prod(x) * gate[0]


register(
    "swiglu",
    fake=_fake_swiglu,
    backward=_swiglu_backward,
    setup_context=_save_swiglu,
    lower_precision=("x", "gate_weight", "up_weight"),
    flops=_swiglu_flops,
)
