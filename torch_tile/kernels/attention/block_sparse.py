# SPDX-License-Identifier: Apache-2.0
"""Attention in which each block of queries sees the blocks of keys that lists name, and its gradients.

The kernels are those of dense attention (forward.py, backward.py), which walk the lists (block_lists.py) instead of a
range of keys. No mask is in memory.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_tile.kernels.attention import backward, forward
from torch_tile.kernels.attention.args import AttentionArgs, BlockSparseArgs, BlockSparseBackwardArgs, dense_args
from torch_tile.kernels.attention.arguments import placed_beside
from torch_tile.kernels.attention.block_lists import Listed, as_blocks, concatenated_lists
from torch_tile.kernels.common import entry_function, machine_of

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def reference(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `tile.attention_block_sparse` and its lse by `forward.reference`, under the mask of the lists."""
    args: BlockSparseArgs[torch.Tensor] = BlockSparseArgs(*given, **named)
    return forward.reference(*masked(args))


def listed(args: BlockSparseArgs[torch.Tensor]) -> Listed:
    """Return the lists of a call as one."""
    partial, full = (args.kv_num_blocks, args.kv_indices), (args.full_kv_num_blocks, args.full_kv_indices)
    return Listed(*concatenated_lists([partial, full]), args.block_q, args.block_kv)


def key_blocks(args: BlockSparseArgs[Any]) -> Any:
    """Return the number of blocks of keys."""
    return -(-args.k.shape[2] // args.block_kv)


def dense(args: BlockSparseArgs[torch.Tensor]) -> AttentionArgs[torch.Tensor]:
    """Return the arguments without the lists."""
    return dense_args(args.q, args.k, args.v, args)


def masked(args: BlockSparseArgs[torch.Tensor]) -> AttentionArgs[torch.Tensor]:
    """Return the arguments with a mask of all pairs in place of the lists."""
    lists = listed(args)
    seen = as_blocks(lists.counts, lists.indices, key_blocks(args))
    seen = seen.repeat_interleave(args.block_q, 2)[:, :, : args.q.shape[2]]
    return dense(args)._replace(mask=seen.repeat_interleave(args.block_kv, 3)[..., : args.k.shape[2]])


def backward_reference(*given: Any, **named: Any) -> Gradients:
    """Compute `tile.attention_block_sparse_backward` in plain torch. It does not read `out` and `lse`."""
    args: BlockSparseBackwardArgs[torch.Tensor] = BlockSparseBackwardArgs(*given, **named)
    dq, dk, dv = gradients(args.grad, args.forward)
    return placed_beside(dq, args.q), placed_beside(dk, args.k), placed_beside(dv, args.v)


def gradients(grad: torch.Tensor, args: BlockSparseArgs[torch.Tensor]) -> Gradients:
    """Compute the gradients of `reference` in q, k and v in the dtype of sums."""
    return backward.gradients(grad, masked(args))[:3]


@entry_function(BlockSparseArgs, reference, forward.empty_results)
def attention_block_sparse(
    args: BlockSparseArgs[torch.Tensor], out: torch.Tensor, lse: torch.Tensor | None, config: Any = None
) -> bool:
    """Compute attention as `reference` does. `config` overrides the choice of a tiling."""
    return not (out if lse is None else lse).numel() or forward.run(
        dense(args), out, lse, machine_of(args.q), config, 0, lists=listed(args)
    )


@entry_function(
    BlockSparseBackwardArgs, backward_reference, lambda args: backward.empty_results(args.q, args.k, args.v, "")[:3]
)
def attention_block_sparse_backward(
    args: BlockSparseBackwardArgs[torch.Tensor], results: Gradients, tilings: Any = None
) -> bool:
    """Compute the gradients as `backward_reference` does. `tilings` overrides the choice of tilings."""
    q, k, v = args.q, args.k, args.v
    if not (q.numel() and k.numel() and v.numel()):
        return False
    whole = dense(args.forward).backward(args.grad, args.out, args.lse)
    kept = q.new_empty((0, *q.shape[:3], k.shape[2]))
    return backward.run(whole, (*results, kept), machine_of(q), tilings, lists=listed(args.forward))
