# SPDX-License-Identifier: Apache-2.0
"""`tile.gated_delta_rule`, linear attention that corrects its state, its gradient, and its step of a few tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_tile.kernels import compute_dtype, kernels
from torch_tile.kernels.linear_attention.args import (
    GRADIENTS,
    GatedDeltaRuleArgs,
    GatedDeltaRuleBackwardArgs,
    GatedDeltaRuleStepArgs,
    empty_gradients,
    sequences_of,
)
from torch_tile.ops import checks
from torch_tile.ops.attention_common import check_starts
from torch_tile.ops.checks import require, require_type
from torch_tile.ops.recomputed import by_autograd, by_operator
from torch_tile.ops.registration import declare
from torch_tile.ops.registry import P, in_torch
from torch_tile.ops.sharding_rule import Rule, Spec, if_given


def check(op: str, args: Any, state: Tensor | None, name: str, sequences: Any) -> None:
    """Check the arguments of linear attention, with the delta rule if they have a beta."""
    q, k, v, beta = args.q, args.k, args.v, getattr(args, "beta", None)
    checks.check_floating(op, q=q, k=k, v=v, g=args.g, beta=beta, **{name: state})
    checks.check_same_dtype(op, q=q, k=k, v=v)
    checks.check_dims(op, "q", q, 4, "[B, L, G, K]")
    checks.check_dims(op, "k", k, 4, "[B, L, G, K]")
    checks.check_dims(op, "v", v, 4, "[B, L, H, V]")
    checks.check_sizes(op, "k", k, q.shape, "as q")
    checks.check_sizes(op, "v", v, q.shape[:2], "as q")
    groups, heads, channels = q.shape[2], v.shape[2], args.g.dim() == 4
    require(
        args.g.dim() in (3, 4),
        lambda: f"tile.{op}: g has shape {list(args.g.shape)}; expected [B, L, H], or [B, L, H, K] for its channels",
    )
    if beta is not None:
        checks.check_dims(op, "beta", beta, 3, "[B, L, H]")
    for n, t in (("g", args.g), *([] if beta is None else [("beta", beta)])):
        checks.check_sizes(op, n, t, v.shape[:3], "as v")
    if channels:
        checks.check_size(op, "g", args.g, 3, q.shape[3], "as q")
        checks.check_size(op, "q", q, 2, heads, "as v where g has channels")
    require(groups >= 1, lambda: f"tile.{op}: q has {groups} heads; expected at least 1")
    require(heads % groups == 0, lambda: f"tile.{op}: v has {heads} heads; expected a multiple of q's {groups} heads")
    if state is not None:
        checks.check_dims(op, name, state, 4, "[B, H, K, V]")
        wanted = "[q's batch or sequences of cu_seqlens, heads of v, size of q, size of v]"
        checks.check_sizes(op, name, state, (sequences, heads, q.shape[3], v.shape[3]), wanted)


def check_sequences(op: str, args: Any) -> None:
    """Check the arguments of whole sequences, packed or not."""
    starts = args.cu_seqlens
    if starts is not None:
        require_type(
            starts.dtype in (torch.int32, torch.int64),
            lambda: f"tile.{op}: cu_seqlens has dtype {starts.dtype}; expected int32 or int64",
        )
        checks.check_device(op, "cu_seqlens", starts, "q", args.q)
        checks.check_dims(op, "cu_seqlens", starts, 1, "[sequences + 1]")
        require(starts.shape[0] > 0, lambda: f"tile.{op}: cu_seqlens is empty; expected the first times of sequences")
        checks.check_size(op, "q", args.q, 0, 1, "as sequences are packed by cu_seqlens")
    check(op, args, args.initial_state, "initial_state", sequences_of(args))


def check_values(op: str, args: Any) -> None:
    """Check on the CPU that the sequences are one behind the other and leave no time out."""
    starts, length = args.cu_seqlens, args.v.shape[1]
    if starts is None or starts.device.type != "cpu":
        return
    check_starts(op, "cu_seqlens", starts, length, length, "v")
    last = int(starts[-1])
    require(last == length, lambda: f"tile.{op}: cu_seqlens ends with {last}; expected {length}, the times of v")


def _state_shape(args: Any) -> tuple[Any, ...]:
    """Return the shape of the recurrent state: sequences, heads, size of a key, size of a value."""
    return sequences_of(args), args.v.shape[2], args.q.shape[3], args.v.shape[3]


def fake(op: str, args: Any) -> tuple[Tensor, Tensor]:
    """Check the arguments of whole sequences, and allocate the results."""
    check_sequences(op, args)
    return args.v.new_empty(args.v.shape), args.v.new_empty(_state_shape(args), dtype=compute_dtype(args.v.dtype))


def fake_backward(op: str, args: Any, names: tuple[str, ...]) -> tuple[Tensor, ...]:
    """Check the arguments of a gradient, and allocate the results, those of the arguments `names`."""
    check_sequences(op, args)
    checks.check_floating(op, v=args.v, grad=args.grad, grad_state=args.grad_state)
    checks.check_same_dtype(op, v=args.v, grad=args.grad)
    for name, t, shape in (("grad", args.grad, args.v.shape), ("grad_state", args.grad_state, _state_shape(args))):
        if t is not None:
            checks.check_dims(op, name, t, 4, "as the rule's result")
            checks.check_sizes(op, name, t, shape, "as the rule's result")
    return empty_gradients(args, names)


def fake_step(op: str, args: Any) -> tuple[Tensor, Tensor]:
    """Check the arguments of a few tokens, and allocate the results."""
    check(op, args, args.state, "state", args.v.shape[0])
    return args.v.new_empty(args.v.shape), args.state.new_empty(args.state.shape)


def _names(q: Spec, g: Spec) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the names of q's dimensions, and the heads that ranks must share evenly to hold them with v's heads."""
    heads = q.shape[2]
    if len(g.shape) == 4:  # each head of v has its own keys
        return ("batch", "time", "head", "k"), {"head": heads}
    return ("batch", "time", "" if heads == 1 else "head", "k"), {} if heads == 1 else {"head": heads}


def dims_of_decays(g: Spec) -> tuple[str, ...]:
    """Return the names of the dimensions of g, the decays."""
    return ("batch", "time", "head", "k")[: len(g.shape)]


def sharding(args: Any) -> Rule:
    """Return the rule of whole sequences."""
    (q, even), v, state = _names(args.q, args.g), ("batch", "time", "head", "v"), ("batch", "head", "k", "v")
    packed = args.cu_seqlens is not None
    state = ("sequence", *state[1:]) if packed else state
    numbers = [dims_of_decays(args.g), *([v[:3]] if hasattr(args, "beta") else [])]
    inputs = [q, q, v, *numbers, if_given(args.initial_state, state), if_given(args.cu_seqlens, ("start",))]
    return Rule(outputs=[v, state], inputs=inputs, free=("head",) if packed else ("batch", "head"), even=even)


def sharding_of_backward(args: Any, rule: Rule) -> Rule:
    """Return the rule of the gradient of whole sequences, from that of the forward."""
    grads = [rule.outputs[0], if_given(args.grad_state, tuple(rule.outputs[1]))]
    outputs = [("none",) if dims is None else dims for dims in rule.inputs[:-1]]
    return Rule(outputs=outputs, inputs=[*grads, *rule.inputs], free=rule.free, even=rule.even)


def sharding_of_gradients(args: Any) -> Rule:
    """Return the rule of the gradient of sequences whose heads share keys: one head of q sums up the heads of v."""
    rule = sharding(args.forward)
    free = tuple(name for name in rule.free if name == "batch" or rule.even)
    return sharding_of_backward(args, replace(rule, free=free))


def sharding_of_step(args: Any) -> Rule:
    """Return the rule of a few tokens."""
    (q, even), v, state = _names(args.q, args.g), ("batch", "time", "head", "v"), ("batch", "head", "k", "v")
    numbers = [dims_of_decays(args.g), *([v[:3]] if hasattr(args, "beta") else [])]
    return Rule(outputs=[v, state], inputs=[state, q, q, v, *numbers], free=("batch", "head"), even=even)


def flops(args: Any) -> int:
    """Count the operations of the recurrence itself: updates of states, their reads by queries and by keys."""
    batch, length, heads, values = args.v
    return int((6 if hasattr(args, "beta") else 4) * batch * length * heads * values * args.q[3])


def declare_backward(
    name: str,
    args: Callable[P, Any],
    arguments: str,
    names: tuple[str, ...],
    *,
    module: str,
    sharding: Callable[[Any], Rule],
    flops: Callable[[Any], int],
    check_more: Callable[[str, Any], None] | None = None,
) -> Callable[P, tuple[Tensor, ...]]:
    """Declare `name_backward`, the gradients of a recurrence over whole sequences. Return its documented form.

    arguments: the documentation of the recurrence's arguments. names: those with gradients. module: the kernels and the
    reference. flops: those of the recurrence. check_more: checks arguments that the delta rule lacks.
    """
    op = f"{name}_backward"
    doc = f"""The gradients of `{name}`.

Args:
    grad: `[B, L, H, V]` in v's dtype, of the output.
    grad_state: of the last state; None for 0.
{arguments}
Returns:
    the gradients by {", ".join(names[:-1])} and {names[-1]}, in their dtypes; `[0]` for a state that is not given.
"""

    def fake(given: Any) -> tuple[Tensor, ...]:
        """Check the arguments, and allocate the results."""
        if check_more is not None:
            check_more(op, given)
        return fake_backward(op, given, names)

    return declare(
        op,
        args,
        tuple[Tensor, ...],
        doc,
        returns=tuple(f"d{each}" for each in names),
        fake=fake,
        check_values=partial(check_values, op),
        run=lambda given, out: getattr(kernels(module), op)(*given, results=out),
        reference=in_torch(module, "gradient_reference"),
        **by_autograd(module, "gradient_reference"),
        sharding=sharding,
        flops=lambda given: 2 * flops(given),
    )


def declare_step(
    name: str,
    args: Callable[P, Any],
    arguments: str,
    *,
    module: str,
    reference: str,
    check_more: Callable[[str, Any], None] | None = None,
    **declaration: Any,
) -> Callable[P, tuple[Tensor, Tensor]]:
    """Declare `name_step`, a few tokens of a recurrence. Return its documented form.

    arguments: the documentation of the arguments behind the state. module: the kernels, and `reference`, a function.
    check_more: checks arguments that the delta rule lacks. declaration: all else, as for `declare`.
    """
    op = f"{name}_step"
    doc = f"""A few tokens of `{name}`, one after the other: for decoding.

Args:
    state: `[B, H, K, V]`, of any floating dtype.
{arguments}
Returns:
    the output `[B, L, H, V]` in v's dtype, and the new state in state's dtype.
"""

    def fake(given: Any) -> tuple[Tensor, Tensor]:
        """Check the arguments, and allocate the results."""
        if check_more is not None:
            check_more(op, given)
        return fake_step(op, given)

    fields = {"module": module, "returns": ("out", "new_state"), "fake": fake, "reference": in_torch(module, reference)}
    return declare(op, args, tuple[Tensor, Tensor], doc, **fields, **by_autograd(module, reference), **declaration)


_ARGS = """    q: `[B, L, G, K]`, of any strides; head h of v has head `h // (H / G)` of q and k.
    k: `[B, L, G, K]` in q's dtype; it should have a length of at most 1, or `use_qk_l2norm`.
    v: `[B, L, H, V]` in q's dtype.
    g: `[B, L, H]`, of any floating dtype: the logarithm of the decay, at most 0; or `[B, L, H, K]`, where each channel
        of the keys decays by itself (Kimi delta attention, arXiv:2510.26692). G is H then.
    beta: `[B, L, H]`, of any floating dtype: the share of the error that is learned.
"""
_OPTIONS = """    scale: the factor of q; None for `K ** -0.5`.
    use_qk_l2norm: whether q and k are divided by their lengths first, `x / sqrt(sum(x^2) + 1e-6)`.
"""
STATE = """    initial_state: `[B, H, K, V]`, of any floating dtype; 0 if not given.
    cu_seqlens: int32 or int64 `[N + 1]`, the first times of N sequences packed into one row (B is 1), and L. States
        are then `[N, H, K, V]`.
"""


gated_delta_rule = declare(
    "gated_delta_rule",
    GatedDeltaRuleArgs[Tensor],
    tuple[Tensor, Tensor],
    f"""The gated delta rule (Gated DeltaNet, arXiv:2412.06464), whose state is a matrix `[K, V]` for each head.

`S[t] = exp(g[t]) S[t-1] + beta[t] k[t] (v[t] - exp(g[t]) S[t-1]^T k[t])^T`, `y[t] = scale S[t]^T q[t]`. Products run on
tensor cores in chunks of times; states and sums are in float32 (float64 for float64). The gradient is kernels, too.
K above 256 (64 for float64) runs as plain torch.

Args:
{_ARGS}{STATE}{_OPTIONS}
Returns:
    the output `[B, L, H, V]` in v's dtype, and the last state in float32 (float64 for float64).

Values of cu_seqlens are checked on the CPU only.
""",
    module="linear_attention.delta",
    returns=("out", "final_state"),
    fake=partial(fake, "gated_delta_rule"),
    check_values=partial(check_values, "gated_delta_rule"),
    **by_operator("gated_delta_rule", GRADIENTS, "v"),
    sharding=sharding,
    flops=flops,
    lower_precision=("q", "k", "v"),
)
gated_delta_rule_backward = declare_backward(
    "gated_delta_rule",
    GatedDeltaRuleBackwardArgs[Tensor],
    f"{_ARGS}{STATE}{_OPTIONS}",
    GRADIENTS,
    module="linear_attention.delta_backward",
    sharding=sharding_of_gradients,
    flops=flops,
)
gated_delta_rule_step = declare_step(
    "gated_delta_rule",
    GatedDeltaRuleStepArgs[Tensor],
    f"{_ARGS}{_OPTIONS}",
    module="linear_attention.step",
    reference="reference",
    sharding=sharding_of_step,
    flops=flops,
    lower_precision=("q", "k", "v"),
)
