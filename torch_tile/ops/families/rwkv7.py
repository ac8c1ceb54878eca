# SPDX-License-Identifier: Apache-2.0
"""`tile.rwkv7`, the recurrence of RWKV-7, its gradient, and its step of a few tokens.

Checks and empty results are those of the delta rule whose channels decay. The keys a and b have some more.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from torch_tile.kernels.linear_attention.args import RWKV7_GRADIENTS, Rwkv7Args, Rwkv7BackwardArgs, Rwkv7StepArgs
from torch_tile.ops import checks
from torch_tile.ops.checks import require
from torch_tile.ops.families import delta_rule
from torch_tile.ops.recomputed import by_operator
from torch_tile.ops.registration import declare
from torch_tile.ops.sharding_rule import Rule, if_given


def _check_keys(op: str, args: Any) -> None:
    """Check that g, a and b have the shape of k."""
    require(args.g.dim() == 4, lambda: f"tile.{op}: g has shape {list(args.g.shape)}; expected [B, L, H, K]")
    checks.check_same_dtype(op, k=args.k, a=args.a, b=args.b)
    for name, t in (("a", args.a), ("b", args.b)):
        checks.check_device(op, name, t, "k", args.k)
        checks.check_dims(op, name, t, 4, "[B, L, H, K]")
        checks.check_sizes(op, name, t, args.k.shape, "as k")


def _fake(args: Rwkv7Args[Tensor]) -> tuple[Tensor, Tensor]:
    """Check the arguments of `tile.rwkv7` and make its empty results."""
    _check_keys("rwkv7", args)
    return delta_rule.fake("rwkv7", args)


KEYS, VALUES, STATE = ("batch", "time", "head", "k"), ("batch", "time", "head", "v"), ("batch", "head", "k", "v")


def _sharding(args: Any) -> Rule:
    """Name the dimensions of `tile.rwkv7` for sharding."""
    packed = args.cu_seqlens is not None
    state = ("sequence", *STATE[1:]) if packed else STATE
    inputs: list[Any] = [KEYS, KEYS, VALUES, KEYS, KEYS, KEYS]
    inputs += [if_given(args.initial_state, state), if_given(args.cu_seqlens, ("start",))]
    return Rule(outputs=[VALUES, state], inputs=inputs, free=("head",) if packed else ("batch", "head"))


def _sharding_of_step(args: Any) -> Rule:
    """Name the dimensions of `tile.rwkv7_step` for sharding."""
    return Rule(outputs=[VALUES, STATE], inputs=[STATE, KEYS, KEYS, VALUES, KEYS, KEYS, KEYS], free=("batch", "head"))


def _flops(args: Any) -> int:
    """Count the operations of the recurrence itself: two updates of states, their reads by a and by queries."""
    batch, length, heads, values = args.v
    return int(8 * batch * length * heads * values * args.q[3])


_ARGS = """    q: `[B, L, H, K]`, of any strides (r of the paper).
    k: `[B, L, H, K]` in q's dtype.
    v: `[B, L, H, V]` in q's dtype.
    g: `[B, L, H, K]`, of any floating dtype: the logarithm of the decay (w of fla), at most 0. RWKV-7's is above -0.61;
        `exp(-g) a` must be finite.
    a: `[B, L, H, K]` in q's dtype, by which the state is read; RWKV-7's is minus the normalized key.
    b: `[B, L, H, K]` in q's dtype, where what was read is added; RWKV-7's is the normalized key times its rate.
"""
_SCALE = """    scale: the factor of q.
"""


rwkv7: Final = declare(
    "rwkv7",
    Rwkv7Args[Tensor],
    tuple[Tensor, Tensor],
    f"""The recurrence of RWKV-7 (arXiv:2503.14456), a delta rule with a diagonal and a matrix of rank 1.

`S[t] = exp(g[t]) S[t-1] + b[t] (a[t]^T S[t-1]) + k[t] v[t]^T`, `y[t] = scale S[t]^T q[t]`, with a state `[K, V]` for
each head. Products run on tensor cores in chunks of times; states and sums are in float32 (float64 for float64). The
gradient is kernels, too. K above 256 (64 for float64) runs as plain torch.

Args:
{_ARGS}{delta_rule.STATE}{_SCALE}
Returns:
    the output `[B, L, H, V]` in v's dtype, and the last state in float32 (float64 for float64).

Values of cu_seqlens are checked on the CPU only.
""",
    module="linear_attention.rwkv7",
    returns=("out", "final_state"),
    fake=_fake,
    check_values=lambda args: delta_rule.check_values("rwkv7", args),
    **by_operator("rwkv7", RWKV7_GRADIENTS, "v"),
    sharding=_sharding,
    flops=_flops,
    lower_precision=("q", "k", "v", "a", "b"),
)
rwkv7_backward: Final = delta_rule.declare_backward(
    "rwkv7",
    Rwkv7BackwardArgs[Tensor],
    f"{_ARGS}{delta_rule.STATE}{_SCALE}",
    RWKV7_GRADIENTS,
    module="linear_attention.rwkv7",
    sharding=lambda args: delta_rule.sharding_of_backward(args, _sharding(args.forward)),
    flops=_flops,
    check_more=_check_keys,
)
rwkv7_step: Final = delta_rule.declare_step(
    "rwkv7",
    Rwkv7StepArgs[Tensor],
    f"{_ARGS}{_SCALE}",
    module="linear_attention.rwkv7",
    reference="step_reference",
    check_more=_check_keys,
    sharding=_sharding_of_step,
    flops=_flops,
    lower_precision=("q", "k", "v", "a", "b"),
)
