# SPDX-License-Identifier: Apache-2.0
"""`tile.route`, the choice of experts for each token, and `tile.group_tokens`, which sorts tokens by their expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_tile.kernels import compute_dtype, kernels
from torch_tile.kernels.moe.args import GroupTokensArgs, RouteArgs
from torch_tile.ops import checks
from torch_tile.ops.checks import require, require_type, require_value
from torch_tile.ops.recomputed import gradients_of
from torch_tile.ops.registration import declare
from torch_tile.ops.registry import no_flops, op_gradients
from torch_tile.ops.sharding_rule import Rule, Spec, if_given, row_names

SCORES = ("softmax", "sigmoid")
MOST_EXPERTS = 1024
INDICES = (torch.int32, torch.int64)


def _fake(args: RouteArgs[Tensor]) -> tuple[Tensor, Tensor]:
    """Check the arguments of `tile.route` and make its empty results."""
    op, logits, k, groups = "route", args.logits, args.k, args.groups
    checks.check_floating(op, logits=logits, bias=args.bias)
    require(logits.dim() >= 1, lambda: f"tile.{op}: logits has 0 dimensions; expected at least 1: [..., experts]")
    n = logits.shape[-1]
    require(n <= MOST_EXPERTS, lambda: f"tile.{op}: logits has {n} experts; expected at most {MOST_EXPERTS}")
    checks.check_vector(op, "bias", args.bias, n, "logits' last dimension")
    require_value(args.score in SCORES, lambda: f"tile.{op}: score is {args.score!r}; expected 'softmax' or 'sigmoid'")
    require_value(groups >= 1, lambda: f"tile.{op}: groups is {groups}; expected at least 1")
    require(n % groups == 0, lambda: f"tile.{op}: groups is {groups}; expected a divisor of {n} experts")
    require_value(
        1 <= args.top_groups <= groups,
        lambda: f"tile.{op}: top_groups is {args.top_groups}; expected 1 to {groups}, the number of groups",
    )
    require_value(args.group_sum >= 1, lambda: f"tile.{op}: group_sum is {args.group_sum}; expected at least 1")
    choices = n // groups * args.top_groups
    require_value(k >= 1, lambda: f"tile.{op}: k is {k}; expected at least 1")
    require(k <= choices, lambda: f"tile.{op}: k is {k}; expected at most {choices}, the experts to choose from")
    shape = *logits.shape[:-1], k
    return logits.new_empty(shape, dtype=compute_dtype(logits.dtype)), logits.new_empty(shape, dtype=torch.int64)


def _save(ctx: Any, args: RouteArgs[Tensor], output: tuple[Tensor, Tensor]) -> None:
    """Save for the gradient of `tile.route` what it needs."""
    ctx.mark_non_differentiable(output[1])
    ctx.score, ctx.normalise, ctx.scale = args.score, args.normalise, args.scale
    ctx.save_for_backward(args.logits, output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    """Differentiate the weights of the experts that were chosen: the choice is constant."""
    logits, experts = ctx.saved_tensors

    def computed(logits: Tensor) -> tuple[Tensor]:
        family = kernels("moe.route")
        return (family.weights_of(family.scores_of(logits, ctx.score), experts, ctx.normalise, ctx.scale),)

    (found,) = gradients_of(computed, (logits,), (True,), (grad,))
    return op_gradients(RouteArgs, logits=found)


def _sharding(args: RouteArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.route` for sharding."""
    rows = row_names(args.logits)
    result = (*rows, "k")
    dims = (*rows, "n")
    return Rule(outputs=[result, result], inputs=[dims, if_given(args.bias, ("n",))], free=rows, saved=[dims, result])


def _fake_groups(args: GroupTokensArgs[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Check the arguments of `tile.group_tokens` and make its empty results."""
    op, experts, count = "group_tokens", args.experts, args.num_experts
    require_type(
        experts.dtype in INDICES, lambda: f"tile.{op}: experts has dtype {experts.dtype}; expected int64 or int32"
    )
    require(
        experts.layout == torch.strided, lambda: f"tile.{op}: experts has layout {experts.layout}; expected strided"
    )
    require_value(
        0 <= count <= MOST_EXPERTS, lambda: f"tile.{op}: num_experts is {count}; expected 0 to {MOST_EXPERTS} experts"
    )
    return (
        experts.new_empty((experts.numel(),), dtype=torch.int32),
        experts.new_empty(experts.shape, dtype=torch.int32),
        experts.new_empty((count,), dtype=torch.int32),
    )


def _sharding_of_groups(args: GroupTokensArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.group_tokens` for sharding."""
    # Places count the pairs of all tokens, so no shard knows its own.
    dims = tuple(f"row{i}" for i in range(len(args.experts.shape)))
    return Rule(outputs=[("pair",), dims, ("expert",)], inputs=[dims], free=())


route = declare(
    "route",
    RouteArgs[Tensor],
    tuple[Tensor, Tensor],
    """Choose `k` experts for each token from the logits of a router, and their weights (arXiv:1701.06538).

Scores are `softmax(logits)` or `sigmoid(logits)`, in float32 (float64 for float64). The experts of the largest scores
are chosen; of equal ones the first. `bias` is added to the scores for the choice alone (DeepSeek-V3, arXiv:2412.19437).
With groups, only experts of the `top_groups` best groups are chosen. A group's score is the sum of its `group_sum`
largest scores with bias.

Args:
    logits: `[..., N]`, N at most 1024 experts, of any strides.
    bias: `[N]`, of any floating dtype, or None. It has no gradient.
    k: how many experts a token gets.
    score: "softmax" or "sigmoid".
    groups: of N / groups neighbouring experts each.
    top_groups: how many groups a token chooses from; all if it is `groups`.
    group_sum: how many scores make a group's.
    normalise: whether weights are divided by their sum (and 1e-20).
    scale: the factor of the weights.

Returns:
    the weights `[..., k]` in float32 (float64 for float64), largest choice first, and the experts, int64 `[..., k]`.
""",
    module="moe.route",
    returns=("weights", "experts"),
    fake=_fake,
    setup_context=_save,
    backward=_backward,
    sharding=_sharding,
    flops=no_flops,
)
group_tokens = declare(
    "group_tokens",
    GroupTokensArgs[Tensor],
    tuple[Tensor, Tensor, Tensor],
    """Sort pairs of token and expert by their expert: rows for `grouped_gemm`. Pairs of one expert keep their order.

Args:
    experts: `[...]` int64 or int32, the expert of each pair, as `route` returns. Pairs of experts below 0 or
        from `num_experts` on come last.
    num_experts: how many experts there are, at most 1024.

Returns:
    all int32: for each sorted row its pair, `[pairs]`; for each pair its row, `[...]`; where each expert's rows end,
    `[num_experts]`.
""",
    module="moe.group",
    returns=("order", "place", "offsets"),
    fake=_fake_groups,
    sharding=_sharding_of_groups,
    flops=no_flops,
)
