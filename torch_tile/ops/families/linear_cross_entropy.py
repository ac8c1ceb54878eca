# SPDX-License-Identifier: Apache-2.0
"""`tile.linear_cross_entropy` is the loss of a linear layer whose logits are never stored together.
`tile.linear_cross_entropy_gradients` computes the weighted sum of the losses and its gradients in one pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torch_tile.kernels import compute_dtype, kernels
from torch_tile.kernels.loss.args import LinearCrossEntropyArgs, LinearCrossEntropyGradientsArgs
from torch_tile.ops import checks
from torch_tile.ops.checks import require, require_type, require_value
from torch_tile.ops.families import cross_entropy
from torch_tile.ops.recomputed import gradients_of
from torch_tile.ops.registration import declare
from torch_tile.ops.registry import Shape, in_torch, op_gradients
from torch_tile.ops.saved_args import restored_args, save_args
from torch_tile.ops.sharding_rule import Rule, Spec, if_given, row_names


def _check(op: str, args: LinearCrossEntropyArgs[Tensor]) -> None:
    """Check the arguments of both operators."""
    hidden, weight = args.hidden, args.weight
    checks.check_floating(op, hidden=hidden, weight=weight, bias=args.bias, class_weight=args.class_weight)
    checks.check_same_dtype(op, hidden=hidden, weight=weight)
    require(hidden.dim() >= 1, lambda: f"tile.{op}: hidden has 0 dimensions; expected at least 1: [..., K]")
    checks.check_dims(op, "weight", weight, 2, "[N, K]")
    checks.check_size(op, "weight", weight, 1, hidden.shape[-1], "hidden's last dimension")
    cross_entropy.check_targets(op, args.target, "hidden", hidden)
    checks.check_vector(op, "bias", args.bias, weight.shape[0], "weight's first dimension")
    checks.check_vector(op, "class_weight", args.class_weight, weight.shape[0], "weight's first dimension")
    cross_entropy.check_smoothing(op, args.label_smoothing)
    cap = args.softcap
    require_value(
        cap is None or 0.0 < cap < math.inf, lambda: f"tile.{op}: softcap is {cap}; expected None or a positive number"
    )


def _fake(args: LinearCrossEntropyArgs[Tensor]) -> tuple[Tensor, Tensor]:
    """Check the arguments of `tile.linear_cross_entropy` and make its empty results."""
    _check("linear_cross_entropy", args)
    loss = args.hidden.new_empty(args.target.shape, dtype=compute_dtype(args.hidden.dtype))
    return loss, torch.empty_like(loss)


def _fake_gradients(args: LinearCrossEntropyGradientsArgs[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Check the arguments of `tile.linear_cross_entropy_gradients` and make its empty results."""
    op, hidden, weight, bias = "linear_cross_entropy_gradients", args.hidden, args.weight, args.bias
    sums = compute_dtype(hidden.dtype)
    _check(op, args.forward)
    cross_entropy.check_rows(op, "grad", args.grad, "hidden", hidden)
    require_type(args.grad.dtype == sums, lambda: f"tile.{op}: grad has dtype {args.grad.dtype}; expected {sums}")
    like, of_bias = weight if bias is None else bias, args.of_weight and bias is not None
    return (
        hidden.new_empty((), dtype=sums),
        hidden.new_empty(hidden.shape if args.of_hidden else (0,)),
        weight.new_empty(weight.shape if args.of_weight else (0,)),
        like.new_empty(weight.shape[:1] if of_bias else (0,)),
    )


def _refuse_class_weight(args: Any) -> None:
    """Raise NotImplementedError if a gradient of class_weight is wanted."""
    if args.class_weight is not None and args.class_weight.requires_grad:
        raise NotImplementedError("tile.linear_cross_entropy: class_weight has no gradient; pass class_weight.detach()")


def _save(ctx: Any, args: LinearCrossEntropyArgs[Tensor], output: tuple[Tensor, Tensor]) -> None:
    """Save for the gradient of `tile.linear_cross_entropy` what it needs."""
    _refuse_class_weight(args)
    ctx.mark_non_differentiable(output[1])
    save_args(ctx, args)


def _backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None) -> tuple[Any, ...]:
    """Compute the chunks again, since weights of rows are known only now."""
    of_hidden, of_weight, _, of_bias = (*ctx.needs_input_grad, False)[:4]  # shorter if defaults were left out
    args, _ = restored_args(ctx)
    options = {"of_hidden": of_hidden, "of_weight": of_weight or of_bias}
    given = LinearCrossEntropyGradientsArgs(grad=grad, **args._asdict(), **options)
    _, dhidden, dweight, dbias = torch.ops.tile.linear_cross_entropy_gradients.default(*given)
    return _given(LinearCrossEntropyArgs, ctx.needs_input_grad, dhidden, dweight, dbias)


def _given(args: Any, needed: Any, dhidden: Any, dweight: Any, dbias: Any) -> tuple[Any, ...]:
    """Return the gradients that autograd needs, in the order of an operator's arguments."""
    found = {"hidden": dhidden, "weight": dweight, "bias": dbias}
    wanted = [name for name, wants in zip(args._fields, needed, strict=False) if wants]
    return op_gradients(args, **{name: found[name] for name in wanted if name in found})


def _save_gradients(ctx: Any, args: LinearCrossEntropyGradientsArgs[Tensor], output: tuple[Tensor, ...]) -> None:
    """Save what `_backward_of_gradients` needs: the arguments, and the gradients that the kernel computed."""
    _refuse_class_weight(args)
    ctx.set_materialize_grads(False)
    save_args(ctx, args, *output[1:])


def _backward_of_gradients(ctx: Any, upstream: Tensor | None, *seconds: Tensor | None) -> tuple[Any, ...]:
    """Scale the saved gradients by `upstream`. Recompute them in plain torch if second derivatives are needed."""
    *tensors, dhidden, dweight, dbias = ctx.saved_tensors
    needed = (*ctx.needs_input_grad, False, False)
    if all(x is None for x in seconds) and not needed[0] and upstream is not None:
        scaled = ((x.to(upstream.dtype) * upstream).to(x.dtype) for x in (dhidden, dweight, dbias))
        return _given(LinearCrossEntropyGradientsArgs, needed, *scaled)

    def computed(*given: Tensor | None) -> Any:
        return kernels("loss.linear_cross_entropy").gradients_reference(*given, *ctx.args[6:])

    made = gradients_of(computed, tensors, needed[:6], (upstream, *seconds))
    return (*made, *[None] * len(ctx.args[6:]))


def _sharding(args: LinearCrossEntropyArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.linear_cross_entropy` for sharding."""
    rows = row_names(args.hidden)
    inputs = [(*rows, "k"), ("n", "k"), rows, if_given(args.bias, ("n",)), if_given(args.class_weight, ("n",))]
    return Rule(outputs=[rows, rows], inputs=inputs, free=rows)


def _sharding_of_gradients(args: LinearCrossEntropyGradientsArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.linear_cross_entropy_gradients` for sharding."""
    # The sums over rows are of no one linear operand: parts of rows would be parts of a sum.
    rows = row_names(args.hidden)
    inputs = [
        *(rows, (*rows, "k"), ("n", "k"), rows),
        *(if_given(args.bias, ("n",)), if_given(args.class_weight, ("n",))),
    ]
    nothing = ("",)
    of_hidden, of_weight = (*rows, "k") if args.of_hidden else nothing, ("n", "k") if args.of_weight else nothing
    of_bias = ("n",) if args.of_weight and args.bias is not None else nothing
    return Rule(outputs=[(), of_hidden, of_weight, of_bias], inputs=inputs, free=(),
                saved=[*inputs, of_hidden, of_weight, of_bias])  # fmt: skip


def _flops(args: LinearCrossEntropyArgs[Shape]) -> int:
    """Count the operations of `tile.linear_cross_entropy`."""
    return 2 * math.prod(args.hidden) * args.weight[0]


def _flops_of_gradients(args: LinearCrossEntropyGradientsArgs[Shape]) -> int:
    """Count the operations of `tile.linear_cross_entropy_gradients`."""
    return _flops(args.forward) * (1 + args.of_hidden + args.of_weight)


def _check_classes(op: str, args: LinearCrossEntropyArgs[Tensor] | LinearCrossEntropyGradientsArgs[Tensor]) -> None:
    """Refuse targets on the CPU that are no class."""
    cross_entropy.check_classes(op, args.target, args.ignore_index, args.weight.shape[0])


linear_cross_entropy = declare(
    "linear_cross_entropy",
    LinearCrossEntropyArgs[Tensor],
    tuple[Tensor, Tensor],
    """`cross_entropy` of `hidden @ weight.T + bias`, whose logits are computed in chunks of rows and not kept.

Logits are rounded to hidden's dtype, as a linear layer rounds them. The gradient computes the chunks again; where the
weights of rows are known before, `linear_cross_entropy_gradients` computes both in one pass.

Args:
    hidden: `[..., K]`, of any strides.
    weight: `[N, K]` of hidden's dtype, N classes.
    target: `[...]` int64 or int32, a class for each row. One that is no class and not `ignore_index`
        raises IndexError on the CPU and gives NaN on a GPU.
    bias: `[N]`, of any floating dtype.
    class_weight: `[N]`, of any floating dtype. It has no gradient: one that requires it is refused.
    ignore_index: rows of this target cost 0 and get no gradient.
    label_smoothing: 0.0 to 1.0, as for `cross_entropy`.
    z_loss: the factor of the squared log-sum-exp, as for `cross_entropy`.
    softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2, arXiv:2408.00118). None for no cap.

Returns:
    loss and log-sum-exp, `[...]` in float32 (float64 for float64). The log-sum-exp has no gradient.
""",
    module="loss.linear_cross_entropy",
    returns=("loss", "lse"),
    fake=_fake,
    check_values=lambda args: _check_classes("linear_cross_entropy", args),
    setup_context=_save,
    backward=_backward,
    sharding=_sharding,
    flops=_flops,
    lower_precision=("hidden", "weight", "bias"),
)
linear_cross_entropy_gradients = declare(
    "linear_cross_entropy_gradients",
    LinearCrossEntropyGradientsArgs[Tensor],
    tuple[Tensor, Tensor, Tensor, Tensor],
    """The sum of the losses of `linear_cross_entropy`, each times its `grad`, and the gradients of that sum.

A chunk of rows goes through the product, the loss and the products of the gradients before the next one. The largest
tensor beside the results is a chunk of logits. The gradient of the head is added up in its own dtype, 32 times at most.
In float16 it is added up in float32, which takes 4 bytes per weight: sums of some chunks may leave float16's range.
Where the losses are summed or averaged, the derivative of the sum returned is a product with these gradients.

Args:
    grad: `[...]` in float32 (float64 for float64), the weight of each row's loss in the sum.
    hidden: `[..., K]`, as for `linear_cross_entropy`, like what follows.
    weight: `[N, K]`.
    target: `[...]`.
    bias: `[N]`.
    class_weight: `[N]`.
    ignore_index: rows of this target count nothing.
    label_smoothing: 0.0 to 1.0.
    z_loss: the factor of the squared log-sum-exp.
    softcap: bound of the logits, or None.
    of_hidden: whether the gradient of hidden is wanted; if not, it is empty.
    of_weight: whether the gradients of weight and bias are wanted; if not, they are empty.

Returns:
    the sum, in float32 (float64 for float64), and the gradients of hidden, weight and bias (empty without), in their
    dtypes.
""",
    module="loss.linear_cross_entropy",
    returns=("loss", "dhidden", "dweight", "dbias"),
    fake=_fake_gradients,
    check_values=lambda args: _check_classes("linear_cross_entropy_gradients", args),
    reference=in_torch("loss.linear_cross_entropy", "gradients_reference"),
    setup_context=_save_gradients,
    backward=_backward_of_gradients,
    sharding=_sharding_of_gradients,
    flops=_flops_of_gradients,
    lower_precision=("hidden", "weight", "bias"),
)
