# SPDX-License-Identifier: Apache-2.0
"""Attention over sequences of different lengths that lie one after the other, and its gradients.

The kernels are those of dense sequences (forward.py, backward.py), compiled for ragged ones (sequences.py): a plan on
the device cuts the rows of each sequence into tiles, so that no block works on padding.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_tile.kernels.attention import backward, forward, padded
from torch_tile.kernels.attention.args import AttentionArgs, VarlenArgs, VarlenBackwardArgs, dense_args
from torch_tile.kernels.attention.arguments import empty_beside, placed_beside
from torch_tile.kernels.attention.sequences import Layout, Sequences
from torch_tile.kernels.common import compute_dtype, entry_function, machine_of

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
RAGGED = Layout(ragged=True)


def reference(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `tile.attention_varlen_lse` in plain torch, in float32 (float64 for float64 inputs)."""
    args: VarlenArgs[torch.Tensor] = VarlenArgs(*given, **named)
    out, lse = padded.attend(_padded(args))
    rows = padded.Rows(args.cu_seqlens_q, args.max_seqlen_q)
    out, lse = rows.unpad(out, args.q.shape[0]), rows.unpad(lse, args.q.shape[0], float("-inf"))
    return placed_beside(out, args.q), lse.mT.contiguous()


def _padded(args: VarlenArgs[torch.Tensor]) -> padded.Padded:
    """Pad the ragged queries, keys and values, and return dense arguments with a mask of the present rows."""
    queries = padded.Rows(args.cu_seqlens_q, args.max_seqlen_q)
    keys = padded.Rows(args.cu_seqlens_k, args.max_seqlen_k)
    dense = dense_args(queries.pad(args.q), keys.pad(args.k), keys.pad(args.v), args)
    return padded.masked(dense, queries.lengths, keys.lengths, keys.present)


def gradients(grad: torch.Tensor, args: VarlenArgs[torch.Tensor]) -> Gradients:
    """Compute the gradients of `reference` in q, k and v in the dtype of sums."""
    queries = padded.Rows(args.cu_seqlens_q, args.max_seqlen_q)
    keys = padded.Rows(args.cu_seqlens_k, args.max_seqlen_k)
    dq, dk, dv = padded.gradients(queries.pad(grad), _padded(args))
    return (queries.unpad(dq, args.q.shape[0]), keys.unpad(dk, args.k.shape[0]), keys.unpad(dv, args.k.shape[0]))


def backward_reference(*given: Any, **named: Any) -> Gradients:
    """Compute `tile.attention_varlen_backward` in plain torch. It does not read `out` and `lse`."""
    args: VarlenBackwardArgs[torch.Tensor] = VarlenBackwardArgs(*given, **named)
    dq, dk, dv = gradients(args.grad, args.forward)
    return placed_beside(dq, args.q), placed_beside(dk, args.k), placed_beside(dv, args.v)


@entry_function(
    VarlenArgs,
    reference,
    lambda args: (
        empty_beside(args.q, args.v.shape[2]),
        args.q.new_empty((args.q.shape[1], args.q.shape[0]), dtype=compute_dtype(args.q.dtype)),
    ),
)
def attention_varlen(
    args: VarlenArgs[torch.Tensor], out: torch.Tensor, lse: torch.Tensor | None, config: Any = None
) -> bool:
    """Compute attention as `reference` does. `config` overrides the choice of a tiling."""
    if not (out if lse is None else lse).numel():
        return True
    sequences, log_sums = sequences_of(args), None if lse is None else lse[None]
    given = dense(args), by_head(out), log_sums, machine_of(args.q), config, 1, sequences
    return bool(sequences.count) and forward.run(*given)


def sequences_of(args: VarlenArgs[torch.Tensor]) -> Sequences:
    """Describe the call's ragged sequences for the attention kernel: layout and row ends."""
    ends = (x[1:] for x in (args.cu_seqlens_q, args.cu_seqlens_k))
    return Sequences(RAGGED, args.max_seqlen_q, args.max_seqlen_k, *ends)


def by_head(x: torch.Tensor) -> torch.Tensor:
    """Return rows `[rows, H, D]` as `[1, H, rows, D]`, a view."""
    return x.transpose(0, 1)[None]


def dense(args: VarlenArgs[torch.Tensor]) -> AttentionArgs[torch.Tensor]:
    """Return dense attention arguments that hold all sequences as one long sequence."""
    return dense_args(by_head(args.q), by_head(args.k), by_head(args.v), args)


@entry_function(VarlenBackwardArgs, backward_reference, lambda args: empty_results(args.q, args.k, args.v))
def attention_varlen_backward(args: VarlenBackwardArgs[torch.Tensor], results: Gradients, tilings: Any = None) -> bool:
    """Compute the gradients of attention as `backward_reference` does. `tilings` overrides the choice of tilings."""
    q, sequences = args.q, sequences_of(args.forward)
    if not (q.numel() and args.k.numel() and args.v.numel() and sequences.count):
        return False
    whole = dense(args.forward).backward(by_head(args.grad), by_head(args.out), args.lse[None])
    dq, dk, dv = map(by_head, results)
    return backward.run(whole, (dq, dk, dv, q.new_empty(0)), machine_of(q), tilings, sequences)


def empty_results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Gradients:
    """Allocate the tensors that `attention_varlen_backward` writes."""
    return empty_beside(q, q.shape[2]), empty_beside(k, k.shape[2]), empty_beside(v, v.shape[2])
