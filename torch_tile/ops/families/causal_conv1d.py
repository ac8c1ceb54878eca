# SPDX-License-Identifier: Apache-2.0
"""`tile.causal_conv1d`, a depthwise convolution over earlier times, its gradient, and its step by one token."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from torch_tile.kernels import kernels
from torch_tile.kernels.ssm.args import CausalConv1dArgs, CausalConv1dBackwardArgs, CausalConv1dUpdateArgs
from torch_tile.ops import checks
from torch_tile.ops.checks import require, require_type, require_value
from torch_tile.ops.recomputed import by_autograd, by_operator
from torch_tile.ops.registration import declare
from torch_tile.ops.registry import Shape, in_torch
from torch_tile.ops.sharding_rule import Rule, Spec, if_given

ACTIVATIONS = ("none", "silu")
MOST_TAPS = 8


def _check_taps(op: str, weight: Tensor, bias: Tensor | None, channels: Any, activation: str) -> None:
    """Check the shapes of weight and bias, the number of taps and the activation."""
    checks.check_dims(op, "weight", weight, 2, "[D, W]")
    checks.check_size(op, "weight", weight, 0, channels, "x's last dimension")
    taps = weight.shape[1]
    require(1 <= taps <= MOST_TAPS, lambda: f"tile.{op}: weight has {taps} taps; expected 1 to {MOST_TAPS}: [D, W]")
    checks.check_vector(op, "bias", bias, channels, "x's last dimension")
    require_value(
        activation in ACTIVATIONS, lambda: f"tile.{op}: activation is {activation!r}; expected 'none' or 'silu'"
    )


def _check(op: str, args: CausalConv1dArgs[Tensor]) -> None:
    """Check the arguments of `tile.causal_conv1d`."""
    x, weight, bias, state, activation, seq_idx = args
    checks.check_floating(op, x=x, weight=weight, bias=bias, initial_state=state)
    checks.check_dims(op, "x", x, 3, "[B, L, D]")
    _check_taps(op, weight, bias, x.shape[2], activation)
    if state is not None:
        checks.check_dims(op, "initial_state", state, 3, "[B, W - 1, D]")
        for dim, size, wanted in ((0, x.shape[0], "as x"), (1, weight.shape[1] - 1, "W - 1"), (2, x.shape[2], "as x")):
            checks.check_size(op, "initial_state", state, dim, size, wanted)
    if seq_idx is not None:
        require_type(
            seq_idx.dtype in (torch.int32, torch.int64),
            lambda: f"tile.{op}: seq_idx has dtype {seq_idx.dtype}; expected int32 or int64",
        )
        checks.check_device(op, "seq_idx", seq_idx, "x", x)
        checks.check_dims(op, "seq_idx", seq_idx, 2, "[B, L]")
        checks.check_sizes(op, "seq_idx", seq_idx, x.shape[:2], "as x")
        require(state is None, lambda: f"tile.{op}: initial_state is given beside seq_idx; expected one of them")


def _fake(args: CausalConv1dArgs[Tensor]) -> Tensor:
    """Check the arguments of `tile.causal_conv1d` and make its empty results."""
    _check("causal_conv1d", args)
    return args.x.new_empty(args.x.shape)


def _fake_backward(args: CausalConv1dBackwardArgs[Tensor]) -> tuple[Tensor, ...]:
    """Check the arguments of `tile.causal_conv1d_backward` and make its empty results."""
    op = "causal_conv1d_backward"
    _check(op, args.forward)
    checks.check_floating(op, x=args.x, grad=args.grad)
    checks.check_same_dtype(op, x=args.x, grad=args.grad)
    checks.check_dims(op, "grad", args.grad, 3, "[B, L, D]")
    checks.check_sizes(op, "grad", args.grad, args.x.shape[:3], "as x")
    given = args.x, args.weight, args.bias, args.initial_state
    return tuple(args.x.new_empty(0) if t is None else t.new_empty(t.shape) for t in given)


def _fake_update(args: CausalConv1dUpdateArgs[Tensor]) -> tuple[Tensor, Tensor]:
    """Check the arguments of `tile.causal_conv1d_update` and make its empty results."""
    op = "causal_conv1d_update"
    x, state, weight, bias, activation = args
    checks.check_floating(op, x=x, state=state, weight=weight, bias=bias)
    checks.check_dims(op, "x", x, 2, "[B, D]")
    _check_taps(op, weight, bias, x.shape[1], activation)
    checks.check_dims(op, "state", state, 3, "[B, D, S]")
    checks.check_sizes(op, "state", state, x.shape[:2], "as x")
    require(
        state.shape[2] >= weight.shape[1] - 1,
        lambda: f"tile.{op}: state holds {state.shape[2]} times; expected at least {weight.shape[1] - 1}, W - 1",
    )
    return x.new_empty(x.shape), state.new_empty(state.shape)


X = ("batch", "time", "channel")


def _sharding(args: CausalConv1dArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.causal_conv1d` for sharding."""
    bias, state = if_given(args.bias, ("channel",)), if_given(args.initial_state, ("batch", "before", "channel"))
    index = if_given(args.seq_idx, X[:2])
    return Rule(outputs=[X], inputs=[X, ("channel", "tap"), bias, state, index], free=("batch", "channel"))


def _sharding_of_backward(args: CausalConv1dBackwardArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.causal_conv1d_backward` for sharding."""
    forward = _sharding(args.forward)
    outputs = [("none",) if dims is None else dims for dims in forward.inputs[:-1]]
    return Rule(outputs=outputs, inputs=[X, *forward.inputs], free=("channel",))


def _sharding_of_update(args: CausalConv1dUpdateArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.causal_conv1d_update` for sharding."""
    x, state = ("batch", "channel"), ("batch", "channel", "before")
    inputs = [x, state, ("channel", "tap"), if_given(args.bias, ("channel",))]
    return Rule(outputs=[x, state], inputs=inputs, free=("batch", "channel"))


def _flops(args: CausalConv1dArgs[Shape]) -> int:
    """Count the operations of `tile.causal_conv1d`."""
    batch, length, channels = args.x
    return 2 * batch * length * channels * args.weight[1]


causal_conv1d: Final = declare(
    "causal_conv1d",
    CausalConv1dArgs[Tensor],
    Tensor,
    """A convolution of each channel with its W latest times: `y[t] = act(bias + sum_k weight[k] x[t - W + 1 + k])`.

Times before the first are those of initial_state, or 0. Sums are in float32 (float64 for float64). The gradient is a
kernel, too. It is Mamba's short convolution (arXiv:2312.00752).

Args:
    x: `[B, L, D]`, of any strides; one whose channels are not dense is copied.
    weight: `[D, W]`, W from 1 to 8, of any floating dtype.
    bias: `[D]`.
    initial_state: `[B, W - 1, D]`, the times before the first.
    activation: "none" or "silu".
    seq_idx: int32 or int64 `[B, L]`, the sequence of each time: a time counts for outputs of its own one only. Times
        of a sequence lie one behind the other. Not beside initial_state.

Returns:
    `[B, L, D]` in x's dtype. The state behind it is the last W - 1 times of initial_state and x.
""",
    module="ssm.conv",
    fake=_fake,
    **by_operator("causal_conv1d", CausalConv1dArgs._fields[:4], "x"),
    sharding=_sharding,
    flops=_flops,
    lower_precision=("x", "weight", "bias", "initial_state"),
)
causal_conv1d_backward: Final = declare(
    "causal_conv1d_backward",
    CausalConv1dBackwardArgs[Tensor],
    tuple[Tensor, Tensor, Tensor, Tensor],
    """The gradients of `causal_conv1d`.

Args:
    grad: `[B, L, D]` in x's dtype, of the result.
    x: as `causal_conv1d`, like what follows.
    weight: `[D, W]`.
    bias: `[D]`.
    initial_state: `[B, W - 1, D]`.
    activation: "none" or "silu".
    seq_idx: `[B, L]`.

Returns:
    the gradients by x, weight, bias and initial_state, in their dtypes; `[0]` for what is not given.
""",
    returns=("dx", "dweight", "dbias", "dstate"),
    fake=_fake_backward,
    run=lambda args, out: kernels("ssm.conv").causal_conv1d_backward(*args, results=out),
    reference=in_torch("ssm.conv", "gradient_reference"),
    **by_autograd("ssm.conv", "gradient_reference"),
    sharding=_sharding_of_backward,
    flops=lambda args: 2 * _flops(args.forward),
)
causal_conv1d_update: Final = declare(
    "causal_conv1d_update",
    CausalConv1dUpdateArgs[Tensor],
    tuple[Tensor, Tensor],
    """`causal_conv1d` of one token behind a state.

Args:
    x: `[B, D]`, the token.
    state: `[B, D, S]`, the S latest times before it, S at least W - 1, of any floating dtype.
    weight: `[D, W]`.
    bias: `[D]`.
    activation: "none" or "silu".

Returns:
    the output `[B, D]` in x's dtype, and the new state `[B, D, S]`, whose last time is the token.
""",
    module="ssm.conv",
    returns=("out", "new_state"),
    fake=_fake_update,
    reference=in_torch("ssm.conv", "update_reference"),
    **by_autograd("ssm.conv", "update_reference"),
    sharding=_sharding_of_update,
    flops=lambda args: 2 * args.x[0] * args.x[1] * args.weight[1],
    lower_precision=("x", "weight", "bias"),
)
