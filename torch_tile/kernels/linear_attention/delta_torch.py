# SPDX-License-Identifier: Apache-2.0
"""Linear attention in plain torch, with and without the delta rule, chunk by chunk; its gradient by autograd."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_tile.kernels.common import compute_dtype
from torch_tile.kernels.linear_attention.args import GRADIENTS, GatedDeltaRuleArgs, GatedDeltaRuleBackwardArgs, scale_of

REFERENCE_CHUNK = 64  # times
NORM_EPS = 1e-6


def normalized(x: torch.Tensor) -> torch.Tensor:
    """Divide rows by their length, `x / sqrt(sum(x^2) + 1e-6)`."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def reference(
    *given: Any, at_once: bool = False, reads: torch.Tensor | None = None, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `tile.gated_delta_rule` in plain torch, chunk by chunk, in float32 (float64 for float64).

    Without beta nothing is corrected: this is `tile.gated_linear_attention`.

    at_once: all times in one chunk, which needs memory for all pairs but has no loop that a tracer would unroll.
    reads: keys that errors come from, if not from k; then channels decay, and there is a beta.
    """
    args: GatedDeltaRuleArgs[torch.Tensor] = GatedDeltaRuleArgs(*given, **named)
    compute = compute_dtype(args.v.dtype)
    share = args.v.shape[2] // args.q.shape[2]
    q, k = (t.to(compute) for t in (args.q, args.k))
    if args.use_qk_l2norm:
        q, k = normalized(q), normalized(k)
    q, k = ((t if share == 1 else t.repeat_interleave(share, 2)) for t in (q * scale_of(args), k))
    tensors = [t.to(compute).transpose(1, 2) for t in (q, k, args.v)]
    g = args.g if args.g.dim() == 4 else args.g[..., None]
    tensors.append(g.to(compute).transpose(1, 2))
    if args.beta is not None:
        tensors.append(args.beta.to(compute).transpose(1, 2)[..., None])
    if reads is not None:
        tensors.append(reads.to(compute).transpose(1, 2))
    first = args.initial_state
    if first is not None:
        first = first.to(compute)
    if args.cu_seqlens is None:
        out, last = of_sequence(tensors, first, at_once)
    elif at_once:
        out, last = of_packed(tensors, first, args.cu_seqlens)
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


def of_sequence(
    tensors: list[torch.Tensor], state: torch.Tensor | None, at_once: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute outputs and the last state from q, k, v, g, beta, reads `[B, H, L, ...]`.

    The last ones may be missing. beta has a last size of 1, and g 1 or that of keys. at_once: all times in one chunk.
    """
    k, v = tensors[1:3]
    if state is None:
        state = v.new_zeros(*v.shape[:2], k.shape[3], v.shape[3])
    if at_once:
        return of_chunk(tensors, state)
    outs = []
    for begin in range(0, v.shape[2], REFERENCE_CHUNK):
        out, state = of_chunk([t[:, :, begin : begin + REFERENCE_CHUNK] for t in tensors], state)
        outs.append(out)
    return torch.cat([v[:, :, :0], *outs], 2), state


def of_chunk(tensors: list[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one chunk as `of_sequence` does, without loops. It has a time."""
    q, k, v, g, *more = tensors
    beta, reads = more[:1], more[1] if len(more) > 1 else k
    logs = g.cumsum(2)
    grown, seen = torch.exp(logs), _lower(logs.shape[2], v.device)
    errors = v if not beta else _errors(reads, k, v - (reads * grown) @ state, logs, beta[0], seen)
    out = (q * grown) @ state + _products(q, k, logs, seen) @ _times(errors, *beta)
    last = logs[:, :, -1:]
    return out, torch.exp(last).mT * state + (k * torch.exp(last - logs)).mT @ _times(errors, *beta)


def of_packed(
    tensors: list[torch.Tensor], states: torch.Tensor | None, cu_seqlens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute packed sequences `[1, H, L, ...]` from states `[N, H, K, V]`, all times at once and without loops."""
    q, k, v, g, *more = tensors
    beta, reads = more[:1], more[1] if len(more) > 1 else k
    length, starts = v.shape[2], cu_seqlens.long()
    sequence = torch.searchsorted(starts[1:].contiguous(), torch.arange(length, device=v.device), right=True)
    member = torch.nn.functional.one_hot(sequence, starts.shape[0] - 1).to(v.dtype).mT  # [N, L]
    sofar = torch.cat([torch.zeros_like(g[:, :, :1]), g.cumsum(2)], 2)[0]  # [H, L + 1, 1 or K]
    begins = sofar[:, starts]
    logs = (sofar[:, 1:] - begins[:, sequence])[None]
    if states is None:
        states = v.new_zeros(starts.shape[0] - 1, v.shape[1], k.shape[3], v.shape[3])

    def asked(x: torch.Tensor) -> torch.Tensor:
        """Multiply the rows of `x` by the first state of their sequence."""
        return torch.einsum("hlk,nl,nhkv->hlv", (x * torch.exp(logs))[0], member, states)

    inside = _lower(length, v.device) & (sequence[:, None] == sequence)
    errors = v if not beta else _errors(reads, k, v - asked(reads), logs, beta[0], inside)
    weighed = _times(errors, *beta)
    totals = (begins[:, 1:] - begins[:, :-1]).transpose(0, 1)  # [N, H, 1 or K]
    kept = torch.exp((totals[:, :, None] - logs[0]).masked_fill(member[:, None, :, None] == 0, -torch.inf))
    learned = torch.einsum("nhlk,hlv->nhkv", k[0] * kept, weighed[0])
    out = asked(q) + _products(q, k, logs, inside) @ weighed
    return out, torch.exp(totals)[..., None] * states + learned


def _lower(length: Any, device: torch.device) -> torch.Tensor:
    """Return which times `[L, L]` a time sees: those up to itself."""
    times = torch.arange(length, device=device)
    return times[:, None] >= times


def _products(left: torch.Tensor, k: torch.Tensor, logs: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Return products of rows with earlier keys `[B, H, L, L]`, with the decays between them; 0 where not seen."""
    if logs.shape[-1] == 1:
        return left @ k.mT * torch.exp((logs - logs.mT).masked_fill(~seen, -torch.inf))
    between = logs[..., :, None, :] - logs[..., None, :, :]
    decays = torch.exp(between.masked_fill(~seen[..., None], -torch.inf))
    return torch.einsum("bhik,bhjk,bhijk->bhij", left, k, decays)


def _times(errors: torch.Tensor, beta: torch.Tensor | None = None) -> torch.Tensor:
    """Return the share of the errors that is learned: all of them without beta."""
    return errors if beta is None else errors * beta


def _errors(
    reads: torch.Tensor,
    k: torch.Tensor,
    wanted: torch.Tensor,
    logs: torch.Tensor,
    beta: torch.Tensor,
    seen: torch.Tensor,
) -> torch.Tensor:
    """Return the errors that the state learns from `wanted` values."""
    pairs = _products(reads, k, logs, seen) * beta.mT
    solved: torch.Tensor = torch.linalg.solve_triangular(pairs, wanted, upper=False, unitriangular=True)
    return solved


@contextlib.contextmanager
def _recorded() -> Iterator[None]:
    """Let autograd record, also inside of an operator's kernel, where torch leaves its keys out."""
    left_out = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        left_out = left_out.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), left_out), torch.enable_grad():
        yield


def gradient_reference(*given: Any, **named: Any) -> tuple[torch.Tensor, ...]:
    """Compute `tile.gated_delta_rule_backward` by autograd of `reference`, itself differentiable."""
    args: GatedDeltaRuleBackwardArgs[Any] = GatedDeltaRuleBackwardArgs(*given, **named)
    names = tuple(name for name in GRADIENTS if name != "beta" or args.beta is not None)
    return gradients_in_torch(args, names, reference)


def _by_pullback(args: Any, names: tuple[str, ...], function: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Compute the gradients inside torch.func's transforms, where no tensor may be made to require one."""
    given = {name: t for name in names if (t := getattr(args.forward, name)) is not None}

    def computed(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        forward = args.forward._replace(**dict(zip(given, tensors, strict=True)))
        out, state = function(*forward, at_once=forward.v.shape[1] > 0)
        return (out,) if args.grad_state is None else (out, state)

    found: Any = torch.func.vjp(computed, *given.values())
    upstream = (args.grad, args.grad_state)[: len(found[0])]
    made = found[1](tuple(g.to(y.dtype) for g, y in zip(upstream, found[0], strict=True)))
    return dict(zip(given, made, strict=True))


def gradients_in_torch(args: Any, names: tuple[str, ...], function: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
    """Compute the gradients by the arguments `names` of a function with the parameter `at_once`, by autograd of it.

    args: gradients of the results, and then the function's arguments, as its `forward`.
    """
    forward = args.forward
    if torch._C._are_functorch_transforms_active():
        found = _by_pullback(args, names, function)
        return tuple(found[name].contiguous() if name in found else args.q.new_empty(0) for name in names)
    wanted = any(isinstance(t, torch.Tensor) and t.requires_grad for t in (args.grad, args.grad_state, *forward))
    twice = torch.is_grad_enabled() and wanted
    with torch.enable_grad() if twice else _recorded():
        leaves = {name: t for name in names if (t := getattr(forward, name)) is not None}
        # Views, as what one of them was computed from is no way for gradients here.
        leaves = {name: t.view_as(t) if twice else t.detach() for name, t in leaves.items()}
        leaves = {name: t if t.requires_grad else t.requires_grad_() for name, t in leaves.items()}
        out, state = function(*forward._replace(**leaves), at_once=twice and forward.v.shape[1] > 0)
        pairs = [(y, g.to(y.dtype)) for y, g in ((out, args.grad), (state, args.grad_state)) if g is not None]
        pairs = [(y, g) for y, g in pairs if y.requires_grad]  # no token: the state is that of before, or 0
        made: Any = (None,) * len(leaves)
        if pairs:
            results, upstream = [y for y, _ in pairs], [g for _, g in pairs]
            made = torch.autograd.grad(results, list(leaves.values()), upstream, create_graph=twice, allow_unused=True)
    found = dict(zip(leaves, made, strict=True))
    return tuple(
        args.q.new_empty(0)
        if name not in found
        else torch.zeros_like(leaves[name], memory_format=torch.contiguous_format)
        if found[name] is None
        else found[name].contiguous()
        for name in names
    )
