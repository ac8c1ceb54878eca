# SPDX-License-Identifier: Apache-2.0
"""Attention over sequences of different lengths in plain torch: padded to one length, and masked.

This is the definition that kernels over ragged and paged sequences are tested against. It runs where these kernels do
not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torch_tile.kernels.attention import backward as dense_backward, forward as dense
from torch_tile.kernels.attention.args import AttentionArgs
from torch_tile.kernels.attention.arguments import bounded
from torch_tile.kernels.common import compute_dtype

Padded = AttentionArgs[torch.Tensor]


@dataclass(frozen=True, eq=False)
class Rows:
    """Ragged rows and their padded form: row ends `cu_seqlens` int32 `[B + 1]`, and `most` rows a sequence.
    `cu_seqlens` int32 `[B + 1]` says where they begin and end, and `most` how many rows one has at most.
    """

    cu_seqlens: torch.Tensor
    most: Any

    @property
    def lengths(self) -> torch.Tensor:
        """Return the number of rows of each sequence `[B]`."""
        return self.cu_seqlens.diff()

    @property
    def present(self) -> torch.Tensor:
        """Return a bool mask `[B, most]` of the padded rows that hold a row of a sequence."""
        return torch.arange(self.most, device=self.cu_seqlens.device) < self.lengths[:, None]

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """Pad ragged rows `[rows, H, ...]` with zeros to `[B, H, most, ...]`."""
        index = self.cu_seqlens[:-1, None].long() + torch.arange(self.most, device=x.device)
        found = x[index.clamp(0, max(x.shape[0] - 1, 0))] if x.shape[0] else x.new_zeros((*index.shape, *x.shape[1:]))
        here = self.present.reshape(*self.present.shape, *[1] * (x.dim() - 1))
        return torch.where(here, found, 0).transpose(1, 2)

    def unpad(self, x: torch.Tensor, count: Any, fill: float = 0.0) -> torch.Tensor:
        """Gather `[B, H, most, ...]` into `count` ragged rows `[count, H, ...]`. Rows behind the last get `fill`."""
        row = torch.arange(count, device=x.device)
        ends = self.cu_seqlens[1:].contiguous().to(row.dtype)
        sequence = torch.searchsorted(ends, row, right=True)
        inside = sequence < ends.shape[0]
        sequence = sequence.clamp(max=max(ends.shape[0] - 1, 0))
        if not (ends.shape[0] and self.most):
            return x.new_full((count, x.shape[1], *x.shape[3:]), fill)
        place = (row - self.cu_seqlens[sequence]).clamp(0, self.most - 1)
        found = x.transpose(1, 2)[sequence, place]
        return torch.where(inside.reshape(-1, *[1] * (found.dim() - 1)), found, fill)


def masked(args: Padded, queries: torch.Tensor, lengths: torch.Tensor, has_keys: torch.Tensor) -> Padded:
    """Return dense arguments with one mask for padding, causality and window; queries align with the end of the keys.

    `queries` and `lengths` `[B]` count the queries and the keys of each; `has_keys` bool `[B, Skv]`.
    """
    offset = (lengths - queries).long()[:, None, None, None]
    place = torch.arange(args.q.shape[2], device=args.q.device)[:, None] + offset
    key = torch.arange(args.k.shape[2], device=args.q.device)
    seen = has_keys[:, None, None, :].expand(-1, 1, args.q.shape[2], -1)
    if args.causal:
        seen = seen & (key <= place)
    if args.window:
        seen = seen & (key > place - bounded(args.window))
    q_offset: Any = offset  # scores count the positions of each sequence from its own offset
    return args._replace(mask=seen, causal=False, window=0, q_offset=q_offset)


def attend(args: Padded) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention and its log-sum-exp on dense padded arguments, in the dtype of sums."""
    compute = compute_dtype(args.q.dtype)
    return dense.reference(*args._replace(q=args.q.to(compute), k=args.k.to(compute), v=args.v.to(compute)))


def gradients(grad: torch.Tensor, args: Padded) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of `attend` in q, k and v, in the dtype of sums."""
    return dense_backward.gradients(grad, args)[:3]
