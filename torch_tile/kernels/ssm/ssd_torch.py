# SPDX-License-Identifier: Apache-2.0
"""Mamba-2's scan and its gradient in plain torch, chunk by chunk; both may be differentiated by autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from torch_tile.kernels.common import compute_dtype
from torch_tile.kernels.ssm.args import GRADIENTS, SsdChunkScanArgs, SsdChunkScanBackwardArgs

REFERENCE_CHUNK = 64  # times


def steps_of(args: Any, compute: torch.dtype) -> torch.Tensor:
    """Compute the step sizes of the recurrence, `[B, L, H]`: dt with its bias, after softplus, within its limits."""
    dt = args.dt.to(compute)
    if args.dt_bias is not None:
        dt = dt + args.dt_bias.to(compute)
    if args.dt_softplus:
        dt = F.softplus(dt)
    found: torch.Tensor = dt.clamp(args.dt_min, args.dt_max)
    return found


def changes_of(seq_idx: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """Return whether a new sequence begins at a time, `[B, L]`: another number than just before, never at the first."""
    if seq_idx is None:
        return x.new_zeros(x.shape[:2], dtype=torch.int64)
    return F.pad((seq_idx[:, 1:] != seq_idx[:, :-1]).long(), (1, 0))[:, : x.shape[1]]


def reference(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `tile.ssd_chunk_scan` in plain torch, chunk by chunk, in float32 (float64 for float64)."""
    args: SsdChunkScanArgs[torch.Tensor] = SsdChunkScanArgs(*given, **named)
    out, states = scan_in_torch(args)
    return out.to(args.x.dtype).contiguous(), states.contiguous()


class Pieces:
    """Intermediate results of the chunked scan in plain torch, in the dtype of sums.

    logs: logarithms of the decay from the chunk's begin. decay: between two times of a chunk, 0 to earlier ones.
    to_end: from a time to the chunk's end. sofar: from the state before the chunk to a time. own: the first state and
    what each chunk adds. passed: the decay between the ends of chunks. states: before each chunk, and the last one.
    Decays from one sequence to the next are 0.
    """

    batch: Any
    length: Any
    b: torch.Tensor
    c: torch.Tensor

    def __init__(self, args: Any) -> None:
        compute, size = compute_dtype(args.x.dtype), REFERENCE_CHUNK
        self.batch, self.length, heads, head_dim = args.x.shape
        groups, states = args.B.shape[2:]
        self.chunks: Any = (self.length + size - 1) // size
        self.dt: torch.Tensor = steps_of(args, compute)
        shares = heads // groups if groups else 1
        keys = (self.chunked(t.to(compute)).repeat_interleave(shares, 3, output_size=heads) for t in (args.B, args.C))
        self.b, self.c = keys
        self.logs: torch.Tensor = self.chunked(self.dt * args.A.to(compute)).cumsum(2)
        self.inputs: torch.Tensor = self.chunked(args.x.to(compute) * self.dt[..., None])
        device = args.x.device
        lower = torch.ones(size, size, dtype=torch.bool, device=device).tril()[..., None]
        between = self.logs[:, :, :, None] - self.logs[:, :, None]
        marks = self.chunked(changes_of(args.seq_idx, args.x)).cumsum(2)
        seen = lower & (marks[:, :, :, None] == marks[:, :, None])[..., None]
        self.decay: torch.Tensor = torch.exp(between.masked_fill(~seen, -torch.inf))
        self.to_end: torch.Tensor = _decay(self.logs[:, :, -1:] - self.logs, marks == marks[:, :, -1:])
        self.sofar: torch.Tensor = _decay(self.logs, marks == 0)
        own = torch.einsum("zcshn,zcsh,zcshp->zchpn", self.b, self.to_end, self.inputs)
        first = args.initial_states
        first = own.new_zeros(self.batch, heads, head_dim, states) if first is None else first.to(compute)
        self.own: torch.Tensor = torch.cat([first[:, None], own], 1)
        ends = F.pad(self.logs[:, :, -1], (0, 0, 1, 0)).cumsum(1)
        before = torch.ones(self.chunks + 1, self.chunks + 1, dtype=torch.bool, device=device).tril()
        begun = F.pad(marks[:, :, -1], (1, 0)).cumsum(1)
        before = (before & (begun[:, :, None] == begun[:, None]))[..., None]
        self.passed: torch.Tensor = torch.exp((ends[:, :, None] - ends[:, None]).masked_fill(~before, -torch.inf))
        self.states: torch.Tensor = torch.einsum("zcsh,zshpn->zchpn", self.passed, self.own)

    def chunked(self, t: torch.Tensor) -> torch.Tensor:
        """Split the time dimension `[B, L, ...]` into chunks `[B, chunks, REFERENCE_CHUNK, ...]`, padded with zeros."""
        size, pad = REFERENCE_CHUNK, [0, 0] * (t.dim() - 2)
        whole = F.pad(t, (*pad, 0, self.chunks * size - self.length))
        return whole.reshape(self.batch, self.chunks, size, *t.shape[2:])


def _decay(logs: torch.Tensor, joined: torch.Tensor) -> torch.Tensor:
    """Return decays of logarithms `[..., H]`, 0 between times `[...]` that are not joined."""
    return torch.exp(logs.masked_fill(~joined[..., None], -torch.inf))


def scan_in_torch(args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the chunked scan in plain torch: outputs and final states in the dtype of sums."""
    compute, pieces = compute_dtype(args.x.dtype), Pieces(args)
    out = torch.einsum("zclhn,zcshn,zclsh,zcshp->zclhp", pieces.c, pieces.b, pieces.decay, pieces.inputs)
    out = out + torch.einsum("zclhn,zclh,zchpn->zclhp", pieces.c, pieces.sofar, pieces.states[:, :-1])
    out = out.flatten(1, 2)[:, : pieces.length]
    if args.D is not None:
        d = args.D.to(compute)
        out = out + args.x.to(compute) * (d[:, None] if d.dim() == 1 else d)
    if args.z is not None:
        out = out * F.silu(args.z.to(compute))
    return out, pieces.states[:, -1]


def gradient_reference(*given: Any, **named: Any) -> tuple[torch.Tensor, ...]:
    """Compute `tile.ssd_chunk_scan_backward` in plain torch. Autograd can differentiate it again.

    z: sequence, c: chunk, l and s: times of an output and of an input, h: head, p and n: of a state.
    """
    args: SsdChunkScanBackwardArgs[torch.Tensor] = SsdChunkScanBackwardArgs(*given, **named)
    compute = compute_dtype(args.x.dtype)
    batch, length, heads, _ = args.x.shape
    pieces = Pieces(args.forward)
    x, dt, grad, einsum = args.x.to(compute), pieces.dt, pieces.chunked(args.grad.to(compute)), torch.einsum
    own, sofar, c, b, decay = pieces.inputs, pieces.sofar, pieces.c, pieces.b, pieces.decay
    last = args.grad_states
    last = x.new_zeros(pieces.own[:, 0].shape) if last is None else last.to(compute)
    of_states = torch.cat([einsum("zclhp,zclhn,zclh->zchpn", grad, c, sofar), last[:, None]], 1)
    behind = einsum("zcsh,zchpn->zshpn", pieces.passed, of_states)
    of_initial, behind = behind[:, 0], behind[:, 1:]
    products, scores = einsum("zclhp,zcshp->zclsh", grad, own), einsum("zclhn,zcshn->zclsh", c, b)
    before = einsum("zclhp,zclh,zchpn->zclhn", grad, sofar, pieces.states[:, :-1])
    to_end = einsum("zcshn,zcsh,zchpn->zcshp", b, pieces.to_end, behind)
    of_own = to_end + einsum("zclsh,zclhp->zcshp", scores * decay, grad)
    dc = before + einsum("zclsh,zcshn->zclhn", products * decay, b)
    db = einsum("zclsh,zclhn->zcshn", products * decay, c)
    db = db + einsum("zcshp,zcsh,zchpn->zcshn", own, pieces.to_end, behind)
    # Of logarithms: each pair of times counts for those between them, and so do times with states, and states.
    pairs, states = products * scores * decay, (own * to_end).sum(-1)
    logs = pairs.sum(3) - pairs.sum(2) + (before * c).sum(-1) - states
    between = einsum("zcsh,zchpn,zshpn->zcsh", pieces.passed, of_states, pieces.own)
    ends = (between.sum(2) - between.sum(1)).flip(1).cumsum(1).flip(1)[:, 1:]
    decays = logs.flip(2).cumsum(2).flip(2) + (ends + states.sum(2))[:, :, None]

    def whole(t: torch.Tensor) -> torch.Tensor:
        """Join the chunks of a tensor and cut off the padding."""
        return t.flatten(1, 2)[:, :length]

    def grouped(t: torch.Tensor) -> torch.Tensor:
        """Sum a gradient over the heads of each group."""
        groups = args.B.shape[2]
        return whole(t).reshape(batch, length, groups, heads // groups, t.shape[-1]).sum(3)

    grad, of_own, decays = args.grad.to(compute), whole(of_own), whole(decays)
    found = {"x": of_own * dt[..., None], "B": grouped(db), "C": grouped(dc), "A": (decays * dt).sum((0, 1))}
    if args.D is not None:
        d = args.D.to(compute)
        found["x"] = found["x"] + grad * (d[:, None] if d.dim() == 1 else d)
        found["D"] = (grad * x).sum((0, 1, 3) if d.dim() == 1 else (0, 1))
    raw = args.dt.to(compute) if args.dt_bias is None else args.dt.to(compute) + args.dt_bias.to(compute)
    value = F.softplus(raw) if args.dt_softplus else raw
    slope = torch.sigmoid(raw) if args.dt_softplus else torch.ones_like(raw)
    inside = (value >= args.dt_min) & (value <= (torch.inf if args.dt_max is None else args.dt_max))
    found["dt"] = torch.where(inside, slope, 0.0) * (decays * args.A.to(compute) + (of_own * x).sum(-1))
    if args.dt_bias is not None:
        found["dt_bias"] = found["dt"].sum((0, 1))
    if args.initial_states is not None:
        found["initial_states"] = of_initial
    return tuple(
        found[name].to(getattr(args, name).dtype).contiguous() if name in found else args.x.new_empty(0)
        for name in GRADIENTS
    )
