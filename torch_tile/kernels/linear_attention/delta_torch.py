# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in plain torch, chunk by chunk, and its gradient by autograd."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from torch_tile.kernels.common import compute_dtype
from torch_tile.kernels.linear_attention.args import (
    GRADIENTS,
    GatedDeltaRuleArgs,
    GatedDeltaRuleBackwardArgs,
    scale_of,
)

REFERENCE_CHUNK = 64  # times
NORM_EPS = 1e-6


def normalized(x: torch.Tensor) -> torch.Tensor:
    """Divide rows by their length, `x / sqrt(sum(x^2) + 1e-6)`."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def reference(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `tile.gated_delta_rule` in plain torch, chunk by chunk, in float32 (float64 for float64)."""
    args: GatedDeltaRuleArgs[torch.Tensor] = GatedDeltaRuleArgs(*given, **named)
    compute = compute_dtype(args.v.dtype)
    share = args.v.shape[2] // args.q.shape[2]
    q, k = (t.to(compute) for t in (args.q, args.k))
    if args.use_qk_l2norm:
        q, k = normalized(q), normalized(k)
    q, k = ((t if share == 1 else t.repeat_interleave(share, 2)) for t in (q * scale_of(args), k))
    tensors = [t.to(compute).transpose(1, 2) for t in (q, k, args.v)]
    tensors += [t.to(compute).transpose(1, 2)[..., None] for t in (args.g, args.beta)]
    first = args.initial_state
    if first is not None:
        first = first.to(compute)
    if args.cu_seqlens is None:
        out, last = of_sequence(tensors, first)
    else:
        starts, outs, states = args.cu_seqlens.tolist(), [], []
        for n, (begin, end) in enumerate(itertools.pairwise(starts)):
            part = [t[:, :, begin:end] for t in tensors]
            one, state = of_sequence(part, None if first is None else first[n : n + 1])
            outs.append(one)
            states.append(state)
        out = torch.cat([tensors[2][:, :, :0], *outs], 2)
        last = torch.cat([tensors[1].new_empty(0, *args.v.shape[2:3], args.k.shape[3], args.v.shape[3]), *states])
    return out.transpose(1, 2).to(args.v.dtype).contiguous(), last.contiguous()


def of_sequence(tensors: list[torch.Tensor], state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute outputs and the last state from q, k, v, g, beta `[B, H, L, ...]`, the last two with a last size of 1."""
    q, k, v, g, beta = tensors
    if state is None:
        state = v.new_zeros(*v.shape[:2], k.shape[3], v.shape[3])
    outs = []
    for begin in range(0, v.shape[2], REFERENCE_CHUNK):
        part = slice(begin, begin + REFERENCE_CHUNK)
        qs, ks, vs, betas = (t[:, :, part] for t in (q, k, v, beta))
        logs = g[:, :, part].cumsum(2)
        lower = torch.ones(logs.shape[2], logs.shape[2], dtype=torch.bool, device=v.device).tril()
        decay = torch.exp((logs - logs.mT).masked_fill(~lower, -torch.inf)) * betas.mT
        system = ks @ ks.mT * decay
        errors = torch.linalg.solve_triangular(
            system, vs - torch.exp(logs) * (ks @ state), upper=False, unitriangular=True
        )
        outs.append(torch.exp(logs) * (qs @ state) + (qs @ ks.mT * decay) @ errors)
        last = logs[:, :, -1:]
        state = torch.exp(last) * state + (ks * torch.exp(last - logs) * betas).mT @ errors
    return torch.cat([v[:, :, :0], *outs], 2), state


def gradient_reference(*given: Any, **named: Any) -> tuple[torch.Tensor, ...]:
    """Compute `tile.gated_delta_rule_backward` by autograd of `reference`. Autograd can differentiate it again."""
    args: GatedDeltaRuleBackwardArgs[torch.Tensor] = GatedDeltaRuleBackwardArgs(*given, **named)
    twice, forward = torch.is_grad_enabled(), args.forward
    with torch.enable_grad():
        leaves = {name: t for name in GRADIENTS if (t := getattr(forward, name)) is not None}
        # Views, as what one of them was computed from is no way for gradients here.
        leaves = {name: t.view_as(t) if twice else t.detach() for name, t in leaves.items()}
        leaves = {name: t if t.requires_grad else t.requires_grad_() for name, t in leaves.items()}
        out, state = reference(*forward._replace(**leaves))
        results, upstream = [out], [args.grad]
        if args.grad_state is not None:
            results.append(state)
            upstream.append(args.grad_state.to(state.dtype))
        made = torch.autograd.grad(results, list(leaves.values()), upstream, create_graph=twice, allow_unused=True)
    found = dict(zip(leaves, made, strict=True))
    return tuple(
        args.q.new_empty(0)
        if name not in found
        else torch.zeros_like(leaves[name], memory_format=torch.contiguous_format)
        if found[name] is None
        else found[name].contiguous()
        for name in GRADIENTS
    )
