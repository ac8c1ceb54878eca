# SPDX-License-Identifier: Apache-2.0
"""RWKV-7's recurrence (arXiv:2503.14456): `S[t] = exp(g[t]) S[t-1] + b[t] (a[t]^T S[t-1]) + k[t] v[t]^T`.

It is a delta rule of two steps a time. The keys that read the state are not those that it learns. The first step decays
and reads `-exp(-g) a`, which is `-a` before the decay. It learns the error at b, with values of 0. The second one
learns v at k, reads nothing, and answers q. So the kernels of the delta rule run, over twice as many times.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_tile.kernels.common import compute_dtype, entry_function, into
from torch_tile.kernels.linear_attention import delta, delta_backward, delta_torch, step
from torch_tile.kernels.linear_attention.args import (
    RWKV7_GRADIENTS,
    GatedDeltaRuleArgs,
    Rwkv7Args,
    Rwkv7BackwardArgs,
    Rwkv7StepArgs,
    empty_gradients,
)


def two_steps(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor:
    """Put the tensors of first and second steps `[B, L, ...]` beside each other, `[B, 2 L, ...]`; None for 0."""
    given = second if first is None else first
    assert given is not None
    first, second = (torch.zeros_like(given) if t is None else t for t in (first, second))
    return torch.stack([first, second], 2).flatten(1, 2)


def rule_of(args: Any) -> tuple[GatedDeltaRuleArgs[Any], torch.Tensor]:
    """Return the arguments of the delta rule, and the keys that read the state."""
    wide = compute_dtype(args.v.dtype)
    reads = (-args.a.to(wide) * torch.exp(-args.g.to(wide))).to(args.v.dtype)
    beta = args.g.new_ones((1, 1, 1), dtype=wide).expand(args.v.shape[0], 2 * args.v.shape[1], args.v.shape[2])
    starts = None if args.cu_seqlens is None else 2 * args.cu_seqlens
    rule: GatedDeltaRuleArgs[Any] = GatedDeltaRuleArgs(
        q=two_steps(None, args.q),
        k=two_steps(args.b, args.k),
        v=two_steps(None, args.v),
        g=two_steps(args.g, None),
        beta=beta,
        initial_state=args.initial_state,
        cu_seqlens=starts,
        scale=float(args.scale),
    )
    return rule, two_steps(reads, None)


def reference(*given: Any, at_once: bool = False, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `tile.rwkv7` in plain torch, chunk by chunk, in float32 (float64 for float64)."""
    args: Rwkv7Args[torch.Tensor] = Rwkv7Args(*given, **named)
    rule, reads = rule_of(args)
    out, state = delta_torch.reference(*rule, reads=reads, at_once=at_once)
    return out[:, 1::2].contiguous(), state


def gradient_reference(*given: Any, **named: Any) -> tuple[torch.Tensor, ...]:
    """Compute `tile.rwkv7_backward` by autograd of `reference`. Autograd can differentiate it again."""
    args: Rwkv7BackwardArgs[Any] = Rwkv7BackwardArgs(*given, **named)
    return delta_torch.gradients_in_torch(args, RWKV7_GRADIENTS, reference)


@entry_function(Rwkv7Args, reference, delta.empty_results)
def rwkv7(args: Rwkv7Args[Any], out: torch.Tensor, final_state: torch.Tensor, config: Any = None) -> bool:
    """Compute the recurrence as `reference` does; options as those of `gated_delta_rule`."""
    if not delta.fits(args):
        return False
    rule, reads = rule_of(args)
    both = torch.empty_like(rule.v)
    delta.gated_delta_rule(*rule, config=config, out=both, final_state=final_state, reads=reads)
    out.copy_(both[:, 1::2].contiguous())
    return True


def rwkv7_backward(
    *given: Any, config: delta.Config | None = None, results: tuple[torch.Tensor, ...] | None = None, **named: Any
) -> tuple[torch.Tensor, ...]:
    """Compute the gradients as `gradient_reference` does; options as those of `gated_delta_rule_backward`."""
    args: Rwkv7BackwardArgs[Any] = Rwkv7BackwardArgs(*given, **named)
    results = results or empty_gradients(args, RWKV7_GRADIENTS)
    if not delta.fits(args):
        return into(results, gradient_reference(*args))
    rule, reads = rule_of(args.forward)
    of_reads = torch.empty_like(reads)
    made = delta_backward.gated_delta_rule_backward(
        two_steps(None, args.grad), args.grad_state, *rule, config=config, reads=reads, of_reads=of_reads
    )
    dq, dk, dv, dg, _, dinitial = made
    wide = compute_dtype(args.v.dtype)
    of_read, grown = of_reads[:, 0::2].to(wide), torch.exp(-args.g.to(wide))
    of_decay = dg[:, 0::2].to(wide) + of_read * args.a.to(wide) * grown
    found = dq[:, 1::2], dk[:, 1::2], dv[:, 1::2], of_decay, -of_read * grown, dk[:, 0::2], dinitial
    return into(results, found)


def step_reference(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `tile.rwkv7_step` in plain torch, token after token."""
    args: Rwkv7StepArgs[Any] = Rwkv7StepArgs(*given, **named)
    rule, reads = rule_of(args.recurrence)
    out, new_state = step.reference(args.state, *rule[:5], rule.scale, reads=reads)
    return out[:, 1::2].contiguous(), new_state


@entry_function(Rwkv7StepArgs, step_reference, step.empty_results)
def rwkv7_step(args: Rwkv7StepArgs[Any], out: torch.Tensor, new_state: torch.Tensor, config: Any = None) -> None:
    """Compute the tokens as `step_reference` does; options as those of `gated_delta_rule_step`."""
    rule, reads = rule_of(args.recurrence)
    both = torch.empty_like(rule.v)
    options = {"config": config, "out": both, "new_state": new_state, "reads": reads}
    step.gated_delta_rule_step(args.state, *rule[:5], rule.scale, **options)
    out.copy_(both[:, 1::2].contiguous())
