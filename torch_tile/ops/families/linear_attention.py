# SPDX-License-Identifier: Apache-2.0
"""`tile.gated_linear_attention`, whose state adds values and decays, its gradient, and its step of a few tokens.

Checks, empty results and rules are those of the delta rule without a beta.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from torch_tile.kernels.linear_attention.args import (
    LINEAR_GRADIENTS,
    GatedLinearAttentionArgs,
    GatedLinearAttentionBackwardArgs,
    GatedLinearAttentionStepArgs,
)
from torch_tile.ops.families import delta_rule
from torch_tile.ops.recomputed import by_operator
from torch_tile.ops.registration import declare

_ARGS = """    q: `[B, L, G, K]`, of any strides; head h of v has head `h // (H / G)` of q and k.
    k: `[B, L, G, K]` in q's dtype.
    v: `[B, L, H, V]` in q's dtype.
    g: `[B, L, H]`, of any floating dtype: the logarithm of the decay, at most 0 (constant for each head in RetNet and
        lightning attention, expanded); or `[B, L, H, K]`, where each channel of the keys decays by itself. G is H then.
"""
_SCALE = """    scale: the factor of q; None for `K ** -0.5`.
"""


gated_linear_attention = declare(
    "gated_linear_attention",
    GatedLinearAttentionArgs[Tensor],
    tuple[Tensor, Tensor],
    f"""Linear attention with decays (RetNet, arXiv:2307.08621; GLA, arXiv:2312.06635; lightning attention,
arXiv:2401.04658).

`S[t] = exp(g[t]) S[t-1] + k[t] v[t]^T`, `y[t] = scale S[t]^T q[t]`, with a state `[K, V]` for each head. Products run
on tensor cores in chunks of times; states and sums are in float32 (float64 for float64). The gradient is kernels, too.
K above 256 (64 for float64) runs as plain torch.

Args:
{_ARGS}{delta_rule.STATE}{_SCALE}
Returns:
    the output `[B, L, H, V]` in v's dtype, and the last state in float32 (float64 for float64).

Values of cu_seqlens are checked on the CPU only.
""",
    module="linear_attention.linear",
    returns=("out", "final_state"),
    fake=partial(delta_rule.fake, "gated_linear_attention"),
    check_values=partial(delta_rule.check_values, "gated_linear_attention"),
    **by_operator("gated_linear_attention", LINEAR_GRADIENTS, "v"),
    sharding=delta_rule.sharding,
    flops=delta_rule.flops,
    lower_precision=("q", "k", "v"),
)
gated_linear_attention_backward = delta_rule.declare_backward(
    "gated_linear_attention",
    GatedLinearAttentionBackwardArgs[Tensor],
    f"{_ARGS}{delta_rule.STATE}{_SCALE}",
    LINEAR_GRADIENTS,
    module="linear_attention.linear",
    sharding=delta_rule.sharding_of_gradients,
    flops=delta_rule.flops,
)
gated_linear_attention_step = delta_rule.declare_step(
    "gated_linear_attention",
    GatedLinearAttentionStepArgs[Tensor],
    f"{_ARGS}{_SCALE}",
    module="linear_attention.linear",
    reference="step_reference",
    sharding=delta_rule.sharding_of_step,
    flops=delta_rule.flops,
    lower_precision=("q", "k", "v"),
)
