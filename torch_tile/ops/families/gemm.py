# SPDX-License-Identifier: Apache-2.0
"""`tile.gemm` and the two layers it makes: `tile.linear` and `tile.swiglu`.

The layers are an epilogue text each. All three share one backward: products are recomputed only where the epilogue's
derivative reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, NamedTuple

import torch
from torch import Tensor

from torch_tile.kernels import compute_dtype, kernels
from torch_tile.kernels.gemm.args import GemmArgs, GroupedGemmArgs
from torch_tile.ops import checks
from torch_tile.ops.checks import require, require_value, shape_of
from torch_tile.ops.layers import flattened, linear_as_gemm, linear_dtype, swiglu_text
from torch_tile.ops.matrix_units import ACTIVATIONS, is_left_to_torch
from torch_tile.ops.registration import declare, register
from torch_tile.ops.registry import Shape, V, op_gradients
from torch_tile.ops.saved_args import restored_args
from torch_tile.ops.sharding_rule import Dims, Rule, Spec, broadcast, if_given, row_names

AUX_KINDS = {"t": "[*batch, M, N]", "r": "[N]", "c": "[*batch, M, 1]", "s": "one element", "g": "[G, N]"}
PLAIN = ("", "ret acc0")  # epilogues that give the product itself


class LinearArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.linear`."""

    x: V
    weight: V
    bias: V | None = None
    residual: V | None = None
    activation: str = "none"


class SwigluArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.swiglu`."""

    x: V
    gate_weight: V
    up_weight: V
    activation: str = "silu"


def check_epilogue(
    op: str,
    a: Tensor,
    rows: Sequence[checks.Size],
    cols: checks.Size,
    products: int,
    aux: Sequence[Tensor],
    kinds: str,
    epilogue: str,
    groups: checks.Size | None = None,
) -> None:
    """Check the epilogue of products of shape `(*rows, cols)`, and its auxiliary operands by kind: `g` for groups."""
    allowed, named = ("trcs", "'t', 'r', 'c' or 's'") if groups is None else ("trcsg", "'t', 'r', 'c', 's' or 'g'")
    require_value(
        len(kinds) == len(aux) and set(kinds) <= set(allowed),
        lambda: f"tile.{op}: kinds is {kinds!r} for {len(aux)} aux operands; expected {named} for each",
    )
    for i, (x, kind) in enumerate(zip(aux, kinds, strict=True)):
        checks.check_auxiliary(op, f"aux[{i}]", x, "a", a)
        wanted: tuple[Any, ...] = {
            "t": (*rows, cols), "r": (cols,), "c": (*rows, 1), "s": x.shape, "g": (groups, cols)
        }[kind]  # fmt: skip
        ok = x.numel() == 1 if kind == "s" else x.dim() == len(wanted)
        require(
            ok,
            lambda: f"tile.{op}: aux[{i}] has shape {shape_of(x)}; kind {kind!r} expects {AUX_KINDS[kind]}",  # noqa: B023
        )
        checks.check_sizes(op, f"aux[{i}]", x, wanted, f"by kind {kind!r}: {AUX_KINDS[kind]}")
    from torch_tile.kernels.epilogue.program import parse

    parse(epilogue, products, len(aux), 0)


def _fake_gemm(args: GemmArgs[Tensor]) -> Tensor:
    """Check the arguments of `tile.gemm` and make its empty results."""
    a, bs, aux, kinds, epilogue, dtype = args
    require_value(len(bs) > 0, lambda: "tile.gemm: bs is empty; expected at least one matrix")
    checks.check_floating("gemm", a=a, **{f"bs[{i}]": b for i, b in enumerate(bs)})
    checks.check_same_dtype("gemm", a=a, **{f"bs[{i}]": b for i, b in enumerate(bs)})
    checks.check_result_dtype("gemm", dtype)
    require(
        a.dim() in (2, 3), lambda: f"tile.gemm: a has shape {shape_of(a)}; expected 2 or 3 dimensions: [*batch, M, K]"
    )
    for i, b in enumerate(bs):
        checks.check_dims("gemm", f"bs[{i}]", b, a.dim(), "[*batch, K, N], as a")
        checks.check_size("gemm", f"bs[{i}]", b, -2, a.shape[-1], "a's last dimension")
        checks.check_size("gemm", f"bs[{i}]", b, -1, bs[0].shape[-1], "as bs[0]")
        checks.check_broadcasts("gemm", f"bs[{i}]", b, (*a.shape[:-2], a.shape[-1], bs[0].shape[-1]))
    check_epilogue("gemm", a, a.shape[:-1], bs[0].shape[-1], len(bs), aux, kinds, epilogue)
    return a.new_empty((*a.shape[:-1], bs[0].shape[-1]), dtype=dtype)


class Multiply(NamedTuple):
    """A product of a and b, and from the gradient of that those of a and of b."""

    product: Callable[[Tensor, Tensor], Tensor]
    of_a: Callable[[Tensor, Tensor], Tensor]  # from the gradient, and b
    of_b: Callable[[Tensor, Tensor], Tensor]  # from a, and the gradient


MATMUL = Multiply(torch.matmul, lambda grad, b: torch.matmul(grad, b.mT), lambda a, grad: torch.matmul(a.mT, grad))


def gradients(
    args: GemmArgs[Tensor], grad: Tensor, needs_a: bool, needs_bs: Sequence[bool], multiply: Multiply = MATMUL
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """Compute gradients of a and bs, None where not needed, and of aux.

    Matrix products are in a's dtype, as eager torch has them; the rest is in float32 (float64).
    """
    from torch_tile.kernels.epilogue.autodiff import vjp
    from torch_tile.kernels.gemm.gemm import aux_views

    a, bs, aux, kinds, epilogue, _ = args
    compute = compute_dtype(a.dtype)
    inputs: dict[str, Any] = {f"acc{i}": lambda b=b: multiply.product(a, b).to(compute) for i, b in enumerate(bs)}
    inputs |= {f"x{i}": lambda x=x: x.to(compute) for i, x in enumerate(aux_views(aux, kinds))}
    grads = vjp(epilogue, inputs, grad.to(compute))
    grad_a: Tensor | None = None
    grad_bs: list[Tensor | None] = []
    for i, (b, needed) in enumerate(zip(bs, needs_bs, strict=True)):
        grad_b: Tensor | None = None
        if f"acc{i}" in grads:
            product = grads[f"acc{i}"].to(a.dtype)
            if needs_a:
                term = multiply.of_a(product, b)
                grad_a = term if grad_a is None else grad_a + term
            if needed:
                grad_b = multiply.of_b(a, product).sum_to_size(b.shape)
        grad_bs.append(grad_b)
    grad_aux: list[Tensor | None] = []
    for i, (x, view) in enumerate(zip(aux, aux_views(aux, kinds), strict=True)):
        full = grads.get(f"x{i}")
        if full is not None:
            full = full.expand_as(grad).sum_to_size(view.shape).reshape(x.shape).to(x.dtype)
        grad_aux.append(full)
    return grad_a, grad_bs, grad_aux


def _gemm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Compute the gradients of `tile.gemm`."""
    args, _ = restored_args(ctx)
    needs_a, needs_bs = ctx.needs_input_grad[:2]
    of_a, of_bs, of_aux = gradients(args, grad, needs_a, needs_bs)
    return op_gradients(GemmArgs, a=of_a, bs=of_bs, aux=of_aux)


def _gemm_sharding(args: GemmArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.gemm` for sharding."""
    batch = ("batch",) if len(args.a.shape) == 3 else ()
    return Rule(
        outputs=[(*batch, "m", "n")],
        inputs=[
            (*batch, "m", "k"),
            *(broadcast(b, (*batch, "k", "n")) for b in args.bs),
            *aux_dims(args.aux, args.kinds, batch),
        ],
        free=(*batch, "m", "n"),
        summed=("k",) if len(args.bs) == 1 and args.epilogue in PLAIN else (),
    )


def aux_dims(aux: Sequence[Spec], kinds: str, batch: Dims) -> list[Dims]:
    """Return the names of the dimensions of a product's auxiliary operands, for sharding."""
    dims: dict[str, Dims] = {"t": (*batch, "m", "n"), "r": ("n",), "c": (*batch, "m", ""), "g": ("group", "n")}
    return [dims.get(kind, ("",) * len(x.shape)) for x, kind in zip(aux, kinds, strict=True)]


def product_flops(args: GemmArgs[Shape] | GroupedGemmArgs[Shape]) -> int:
    """Count the operations of a product, dense or grouped."""
    return 2 * math.prod(args.a) * args.bs[0][-1] * len(args.bs)


def gemm(
    a: Tensor,
    bs: Sequence[Tensor],
    aux: Sequence[Tensor] = (),
    kinds: str = "",
    epilogue: str = "",
    *,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply one left operand by matrices, with a fused epilogue: `epilogue(a @ bs[0], a @ bs[1], ..., aux)`.

    Args:
        a: `[M, K]` or `[B, M, K]`.
        bs: each `[K, N]` beside a 2-D `a`, `[B, K, N]` or `[1, K, N]` beside a 3-D one; of a's dtype.
        aux: what the epilogue reads as `x0..`, of any floating dtype, or bool, which counts as 1 and 0.
        kinds: one letter for each aux: `t` `[M, N]` or `[B, M, N]`, `r` `[N]`, `c` `[M, 1]` or `[B, M, 1]`, `s` one
            element.
        epilogue: statements joined by `;` over `acc0..`, `x0..`, earlier names and numbers, ending in `ret NAME`, such
            as `"v0=add(acc0,x0);v1=relu(v0);ret v1"`; the functions are `kernels/epilogue/program.py`'s. Empty
            means `ret acc0`. Computed in float32 (float64), rounded once.
        dtype: of the result.

    Returns:
        `[M, N]` or `[B, M, N]`.
    """
    out: Tensor = torch.ops.tile.gemm.default(a, list(bs), list(aux), kinds, epilogue, dtype)
    return out


def _run_gemm(args: GemmArgs[Tensor], out: Tensor) -> None:
    """Launch `tile.gemm` into `out`, or let torch compute a product without an epilogue."""
    a, bs, _, _, epilogue, dtype = args
    if is_left_to_torch(a) and len(bs) == 1 and epilogue in PLAIN and dtype == a.dtype:
        torch.matmul(a, bs[0], out=out)
        return
    kernels("gemm.gemm").gemm(*args, out=out)


register(
    name="gemm",
    args=GemmArgs,
    module="gemm.gemm",
    run=_run_gemm,
    form=gemm,
    fake=_fake_gemm,
    backward=_gemm_backward,
    sharding=_gemm_sharding,
    flops=product_flops,
    lower_precision=("a", "bs"),
)


def _fake_linear(args: LinearArgs[Tensor]) -> Tensor:
    """Check the arguments of `tile.linear` and make its empty results."""
    x, weight, bias, residual, activation = args
    checks.check_floating("linear", x=x, weight=weight, bias=bias, residual=residual)
    checks.check_same_dtype("linear", x=x, weight=weight, bias=bias)
    require(x.dim() >= 1, lambda: "tile.linear: x has 0 dimensions; expected at least 1: [..., K]")
    checks.check_dims("linear", "weight", weight, 2, "[N, K]")
    checks.check_size("linear", "weight", weight, 1, x.shape[-1], "x's last dimension")
    checks.check_vector("linear", "bias", bias, weight.shape[0], "weight's first dimension")
    if residual is not None:
        checks.check_dims("linear", "residual", residual, x.dim(), "[..., N], as the result")
        checks.check_sizes("linear", "residual", residual, (*x.shape[:-1], weight.shape[0]), "as the result")
    checks.check_activation("linear", activation)
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=linear_dtype(x, residual))


def _save_linear(ctx: Any, args: LinearArgs[Tensor], output: Tensor) -> None:
    """Save for the gradient of `tile.linear` what it needs."""
    # The residual's values are never read by the backward; its dtype and presence are.
    ctx.activation, ctx.residual_dtype = args.activation, None if args.residual is None else args.residual.dtype
    ctx.save_for_backward(args.x, args.weight, args.bias)


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Compute the gradients of `tile.linear`."""
    x, weight, bias = ctx.saved_tensors
    grad_residual = None if ctx.residual_dtype is None else grad.to(ctx.residual_dtype)
    args = GemmArgs(*linear_as_gemm(x, weight, bias, None, ctx.activation), x.dtype)
    needs_x, needs_w = ctx.needs_input_grad[:2]
    grad_x, (grad_w,), grad_aux = gradients(args, flattened(grad), needs_x, [needs_w])
    grad_x = None if grad_x is None else grad_x.reshape(x.shape)
    of_weight, of_bias = None if grad_w is None else grad_w.mT, grad_aux[0] if grad_aux else None
    return op_gradients(LinearArgs, x=grad_x, weight=of_weight, bias=of_bias, residual=grad_residual)


def _linear_sharding(args: LinearArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.linear` for sharding."""
    rows = row_names(args.x)
    saved = [(*rows, "k"), ("n", "k"), if_given(args.bias, ("n",))]
    return Rule(
        outputs=[(*rows, "n")],
        inputs=[*saved, if_given(args.residual, (*rows, "n"))],
        free=(*rows, "n"),
        summed=("k",) if args.activation == "none" else (),
        saved=saved,
    )


def _linear_flops(args: LinearArgs[Shape]) -> int:
    """Count the operations of `linear`."""
    return 2 * math.prod(args.x) * args.weight[0]


def _run_linear(args: LinearArgs[Tensor], out: Tensor) -> None:
    """Launch `tile.linear` into `out`, or let torch compute it."""
    x, weight, bias, residual, activation = args
    product = torch.ops.mkldnn._linear_pointwise
    if is_left_to_torch(x) and residual is None:
        out.copy_(product(x, weight, bias, *ACTIVATIONS[activation]))
    elif is_left_to_torch(x) and residual is not None and residual.dtype == x.dtype and activation == "none":
        out.copy_(product.binary(x, residual, weight, bias, "add"))
    else:
        kernels("gemm.gemm").gemm(*linear_as_gemm(*args), out.dtype, out=flattened(out))


def _linear_reference(args: LinearArgs[Tensor]) -> Tensor:
    """Compute `tile.linear` in plain torch."""
    product: Tensor = kernels("gemm.gemm").reference(*linear_as_gemm(*args), linear_dtype(args.x, args.residual))
    return product.view(*args.x.shape[:-1], args.weight.shape[0])


linear: Final = declare(
    "linear",
    LinearArgs[Tensor],
    Tensor,
    """`activation(x @ weight.T + bias) + residual`.

Args:
    x: `[..., K]`.
    weight: `[N, K]`, of x's dtype.
    bias: `[N]`, of x's dtype.
    residual: `[..., N]`, of any floating dtype.
    activation: "none", "relu", "gelu" (erf), "gelu_tanh" or "silu".

Returns:
    `[..., N]`, in x's dtype promoted with the residual's.
""",
    fake=_fake_linear,
    run=_run_linear,
    reference=_linear_reference,
    setup_context=_save_linear,
    backward=_linear_backward,
    sharding=_linear_sharding,
    flops=_linear_flops,
    lower_precision=("x", "weight", "bias"),
)


def _fake_swiglu(args: SwigluArgs[Tensor]) -> Tensor:
    """Check the arguments of `tile.swiglu` and make its empty results."""
    x, gate_weight, up_weight, activation = args
    tensors = {"x": x, "gate_weight": gate_weight, "up_weight": up_weight}
    checks.check_floating("swiglu", **tensors)
    checks.check_same_dtype("swiglu", **tensors)
    require(x.dim() >= 1, lambda: "tile.swiglu: x has 0 dimensions; expected at least 1: [..., K]")
    for name in ("gate_weight", "up_weight"):
        checks.check_dims("swiglu", name, tensors[name], 2, "[N, K]")
        checks.check_size("swiglu", name, tensors[name], 1, x.shape[-1], "x's last dimension")
    checks.check_size("swiglu", "up_weight", up_weight, 0, gate_weight.shape[0], "as gate_weight")
    checks.check_activation("swiglu", activation)
    return x.new_empty((*x.shape[:-1], gate_weight.shape[0]))


def _swiglu_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Compute the gradients of `swiglu` by those of its epilogue."""
    args, _ = restored_args(ctx)
    x, weights = args.x, [args.gate_weight.mT, args.up_weight.mT]
    product = GemmArgs(flattened(x), weights, [], "", swiglu_text(args.activation), x.dtype)
    needs_x, *needs_weights = ctx.needs_input_grad[:3]
    grad_x, grads, _ = gradients(product, flattened(grad), needs_x, needs_weights)
    grad_x = None if grad_x is None else grad_x.reshape(x.shape)
    of_gate, of_up = (None if g is None else g.mT for g in grads)
    return op_gradients(SwigluArgs, x=grad_x, gate_weight=of_gate, up_weight=of_up)


def _swiglu_sharding(args: SwigluArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.swiglu` for sharding."""
    rows = row_names(args.x)
    return Rule(outputs=[(*rows, "n")], inputs=[(*rows, "k"), ("n", "k"), ("n", "k")], free=(*rows, "n"))


def _swiglu_flops(args: SwigluArgs[Shape]) -> int:
    """Count the operations of `tile.swiglu`."""
    return 4 * math.prod(args.x) * args.gate_weight[0]


def _swiglu_as_gemm(args: SwigluArgs[Tensor]) -> GemmArgs[Tensor]:
    """Return the arguments of `tile.gemm` that compute `swiglu`."""
    weights, text = [args.gate_weight.mT, args.up_weight.mT], swiglu_text(args.activation)
    return GemmArgs(flattened(args.x), weights, [], "", text, args.x.dtype)


def _run_swiglu(args: SwigluArgs[Tensor], out: Tensor) -> None:
    """Launch `tile.swiglu` into `out`, or, but for one row, let torch compute it, which rounds the gate, too."""
    x, gate_weight, up_weight, activation = args
    if is_left_to_torch(x) and x.numel() > x.shape[-1]:
        product = torch.ops.mkldnn._linear_pointwise
        gate = product(x, gate_weight, None, *ACTIVATIONS[activation])
        out.copy_(product.binary(x, gate, up_weight, None, "mul"))
        return
    kernels("gemm.gemm").gemm(*_swiglu_as_gemm(args), out=flattened(out))


def _swiglu_reference(args: SwigluArgs[Tensor]) -> Tensor:
    """Compute `tile.swiglu` in plain torch."""
    product: Tensor = kernels("gemm.gemm").reference(*_swiglu_as_gemm(args))
    return product.view(*args.x.shape[:-1], args.gate_weight.shape[0])


swiglu: Final = declare(
    "swiglu",
    SwigluArgs[Tensor],
    Tensor,
    """`activation(x @ gate_weight.T) * (x @ up_weight.T)`: a gated linear unit (arXiv:2002.05202).

Args:
    x: `[..., K]`.
    gate_weight: `[N, K]`, of x's dtype.
    up_weight: `[N, K]`, of x's dtype.
    activation: as for `linear`; "gelu_tanh" makes Gemma's GeGLU.

Returns:
    `[..., N]` in x's dtype.
""",
    fake=_fake_swiglu,
    run=_run_swiglu,
    reference=_swiglu_reference,
    backward=_swiglu_backward,
    sharding=_swiglu_sharding,
    flops=_swiglu_flops,
    lower_precision=("x", "gate_weight", "up_weight"),
)
