# SPDX-License-Identifier: Apache-2.0
"""Linear attention with decays and without the delta rule (RetNet, lightning attention, Mamba-2's form, GLA).

`S[t] = exp(g[t]) S[t-1] + k[t] v[t]^T`: the gated delta rule whose values are learned as they are. So its kernels run,
compiled without errors and triangles.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_tile.kernels.common import entry_function
from torch_tile.kernels.linear_attention import delta, delta_backward, delta_torch, step
from torch_tile.kernels.linear_attention.args import (
    GatedLinearAttentionArgs,
    GatedLinearAttentionBackwardArgs,
    GatedLinearAttentionStepArgs,
)


def reference(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `tile.gated_linear_attention` in plain torch."""
    return delta_torch.reference(*GatedLinearAttentionArgs(*given, **named).rule)


def gradient_reference(*given: Any, **named: Any) -> tuple[torch.Tensor, ...]:
    """Compute `tile.gated_linear_attention_backward` in plain torch. Autograd can differentiate it again."""
    return delta_torch.gradient_reference(*GatedLinearAttentionBackwardArgs(*given, **named).rule)


def step_reference(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `tile.gated_linear_attention_step` in plain torch, token after token."""
    return step.reference(*GatedLinearAttentionStepArgs(*given, **named).rule)


@entry_function(GatedLinearAttentionArgs, reference, delta.empty_results)
def gated_linear_attention(
    args: GatedLinearAttentionArgs[Any], out: torch.Tensor, final_state: torch.Tensor, config: Any = None
) -> None:
    """Compute the attention as `reference` does; options as those of `gated_delta_rule`."""
    delta.gated_delta_rule(*args.rule, config=config, out=out, final_state=final_state)


def gated_linear_attention_backward(
    *given: Any, config: Any = None, results: tuple[torch.Tensor, ...] | None = None, **named: Any
) -> tuple[torch.Tensor, ...]:
    """Compute the gradients as `gradient_reference` does; options as those of `gated_delta_rule_backward`."""
    rule = GatedLinearAttentionBackwardArgs(*given, **named).rule
    return delta_backward.gated_delta_rule_backward(*rule, config=config, results=results)


@entry_function(GatedLinearAttentionStepArgs, step_reference, step.empty_results)
def gated_linear_attention_step(
    args: GatedLinearAttentionStepArgs[Any], out: torch.Tensor, new_state: torch.Tensor, config: Any = None
) -> None:
    """Compute the tokens as `step_reference` does; options as those of `gated_delta_rule_step`."""
    step.gated_delta_rule_step(*args.rule, config=config, out=out, new_state=new_state)
