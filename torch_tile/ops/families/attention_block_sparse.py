# SPDX-License-Identifier: Apache-2.0
"""`tile.attention_block_sparse`, `_lse` and `_backward`: attention over lists of blocks of keys.

As with `tile.attention`, a call that wants a gradient is the second one, and its backward the third one.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from torch_tile.kernels import compute_dtype
from torch_tile.kernels.attention.args import BlockSparseArgs, BlockSparseBackwardArgs
from torch_tile.kernels.attention.arguments import empty_beside
from torch_tile.ops import checks
from torch_tile.ops.attention_common import (
    SCORES,
    Gradients,
    batched_sizes,
    check_batched,
    check_results,
    check_score,
    counted,
    declare_with_lse,
    kv_head,
    sharding_of_backward,
)
from torch_tile.ops.checks import require, require_value
from torch_tile.ops.registration import declare
from torch_tile.ops.registry import Shape
from torch_tile.ops.sharding_rule import Dims, Rule, Spec, broadcast

FAMILY = "attention_block_sparse"
GRADIENTS = Gradients(FAMILY, "attention.block_sparse", BlockSparseArgs, BlockSparseBackwardArgs)
LISTS = "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"
LEAST = 16  # rows of a block: tiles of kernels divide blocks


def _lists(args: BlockSparseArgs[Any]) -> list[tuple[str, Any, str, Any]]:
    """Return the lists that are given: the names and tensors of numbers and indices."""
    found = [(LISTS[n], getattr(args, LISTS[n]), LISTS[n + 1], getattr(args, LISTS[n + 1])) for n in (0, 2)]
    return [x for x in found if x[1] is not None or x[3] is not None]


def _check(args: BlockSparseArgs[Tensor]) -> None:
    """Check the arguments of `tile.attention_block_sparse`."""
    op, q, k = "attention_block_sparse", args.q, args.k
    check_batched(op, args)
    _check_block("block_q", args.block_q)
    _check_block("block_kv", args.block_kv)
    blocks = -(-q.shape[2] // args.block_q)
    for number_name, numbers, index_name, indices in _lists(args):
        _check_both(number_name, numbers, index_name, indices)
        checks.check_positions(op, number_name, numbers, 3, "[B or 1, H or 1, blocks of queries]", q=q)
        checks.check_positions(op, index_name, indices, 4, "[B or 1, H or 1, blocks of queries, n]", q=q)
        checks.check_sizes(op, index_name, indices, numbers.shape[:3], f"as {number_name}")
        checks.check_size(op, number_name, numbers, 2, blocks, f"q's blocks of {args.block_q} queries")
        checks.check_broadcasts(op, number_name, numbers, (q.shape[0], q.shape[1], blocks))
    check_score(op, args, (*q.shape[:3], k.shape[2]))


def _check_block(name: str, size: int) -> None:
    """Check the size of a block."""
    require_value(
        size > 0 and size % LEAST == 0,
        lambda: f"tile.attention_block_sparse: {name} is {size}; expected a multiple of {LEAST}",
    )


def _check_both(number_name: str, numbers: Any, index_name: str, indices: Any) -> None:
    """Check that numbers and indices of lists are given together."""
    require(
        numbers is not None and indices is not None,
        lambda: f"tile.attention_block_sparse: one of {number_name} and {index_name} is None; expected both or none",
    )


def _check_values(args: BlockSparseArgs[Tensor]) -> None:
    """Check the values of lists on the CPU: blocks that exist, none of them twice."""
    q, blocks = args.q, -(-args.k.shape[2] // args.block_kv)
    if q.device.type != "cpu" or not q.numel():
        return
    lists = _lists(args)
    times = sum(_times(*x, blocks) for x in lists)
    named = ", ".join(f"{indices} up to {numbers}" for numbers, _, indices, _ in lists)
    require(
        not bool((torch.as_tensor(times) > 1).any()),
        lambda: f"tile.attention_block_sparse: {named} have a block of keys twice; expected distinct ones for each row",
    )


def _times(number_name: str, numbers: Tensor, index_name: str, indices: Tensor, blocks: int) -> Tensor:
    """Count how often lists name each block; check that it exists."""
    op, most = "attention_block_sparse", indices.shape[3]
    require(
        bool(((numbers >= 0) & (numbers <= most)).all()),
        lambda: f"tile.{op}: {number_name} has numbers outside of 0 to {most}, the last size of {index_name}",
    )
    named = torch.arange(most) < numbers[..., None]
    used = indices[named]
    require(
        bool(((used >= 0) & (used < blocks)).all()),
        lambda: f"tile.{op}: {index_name} up to {number_name} has blocks outside of 0 to {blocks - 1}",
    )
    at = torch.where(named, indices, blocks).long()
    return torch.zeros((*at.shape[:-1], blocks + 1), dtype=torch.int32).scatter_add_(-1, at, named.int())[..., :blocks]


def _fake_with_lse(args: BlockSparseArgs[Tensor]) -> tuple[Tensor, Tensor]:
    """Check the arguments of `tile.attention_block_sparse` and make its empty results."""
    _check(args)
    q = args.q
    return empty_beside(q, args.v.shape[3]), q.new_empty(q.shape[:3], dtype=compute_dtype(q.dtype))


def _fake_backward(args: BlockSparseBackwardArgs[Tensor]) -> tuple[Tensor, ...]:
    """Check the arguments of `tile.attention_block_sparse_backward` and make its empty results."""
    _check(args.forward)
    sizes = batched_sizes(args)
    check_results(f"{FAMILY}_backward", args, ("[B, H, Sq, Dv]", sizes), ("[B, H, Sq]", sizes[:3]))
    return tuple(empty_beside(x, x.shape[3]) for x in (args.q, args.k, args.v))


def _sharding(args: BlockSparseArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.attention_block_sparse` for sharding."""
    heads = args.k.shape[1]
    hidden = counted(args.score)
    outputs: tuple[Dims, Dims] = ("batch", "head", "query", "v"), ("batch", "head", "query")
    inputs = (
        ("batch", "head", "query", "d"),
        ("batch", kv_head(heads), "key", "d"),
        ("batch", kv_head(heads), "key", "v"),
        *(broadcast(x, (*("batch", "head", "block"), *["index"] * (n % 2))) for n, x in enumerate(args[3:7])),
        *(broadcast(x, SCORES) for x in args.aux or ()),
    )
    return Rule(
        outputs=outputs,
        inputs=inputs,
        saved=(*inputs, *outputs),
        free=tuple(dim for dim in ("batch", "head") if dim not in hidden),
        even={} if heads == 1 else {"head": heads},
    )


def _products(args: BlockSparseArgs[Shape], over_d: int, over_v: int) -> int:
    """Count the operations of the products, as if each list named as many blocks as it has room for."""
    room = sum(indices[3] for indices in (args.kv_indices, args.full_kv_indices) if indices is not None)
    keys = min(room * args.block_kv, args.k[2])
    return 2 * math.prod(args.q[:3]) * keys * (over_d * args.q[3] + over_v * args.v[3])


attention_block_sparse, attention_block_sparse_lse = declare_with_lse(
    FAMILY,
    BlockSparseArgs[Tensor],
    """Scaled dot-product attention in which lists say which blocks of keys each block of queries sees.

`softmax(score(scale q k^T)) v` over the keys of the listed blocks (arXiv:1904.10509). No mask of all pairs is made.
The lists are those of flex_attention's `BlockMask`.

Args:
    q: `[B, H, Sq, D]`.
    k: `[B, Hkv, Skv, D]`; H must be a multiple of Hkv, and query head `h` reads key head `h // (H / Hkv)`.
    v: `[B, Hkv, Skv, Dv]`.
    kv_num_blocks: int32 `[B or 1, H or 1, ceil(Sq / block_q)]`: how many blocks a list names.
    kv_indices: int32, the same and one more dimension: the numbers of the blocks, in any order. What stands behind
        them is not read for values.
    full_kv_num_blocks: the same of further lists, as `BlockMask` keeps them of blocks that show all their keys.
    full_kv_indices: their numbers. No list of a block of queries names a block twice, nor do both.
    block_q: queries of a block, a multiple of 16.
    block_kv: keys of a block, a multiple of 16.
    causal: as in `attention`, and so are the options that follow; they hide keys of all listed blocks.
    scale: default `D ** -0.5`.
    window: 0 for none.
    q_offset: position of the first query.
    aux: operands of `score`, of a floating dtype or bool, each broadcastable to `[B, H, Sq, Skv]`. They have no
        gradient.
    score: a text that changes scores.

Returns:
    `[B, H, Sq, Dv]` in q's dtype, in q's memory order. A query that sees no key gives 0.

Values of lists are checked on the CPU only. Gradients are the same from run to run.
""",
    "`[B, H, Sq]`",
    module="attention.block_sparse",
    fake=_fake_with_lse,
    without_lse=GRADIENTS.without_lse,
    with_lse=GRADIENTS.with_lse,
    check_values=_check_values,
    sharding=_sharding,
    flops=lambda args: _products(args, 1, 1),
    lower_precision=("q", "k", "v", "aux"),
)
attention_block_sparse_backward: Final = declare(
    "attention_block_sparse_backward",
    BlockSparseBackwardArgs[Tensor],
    tuple[Tensor, Tensor, Tensor],
    """Gradients of `attention_block_sparse` in q, k and v, computed as in arXiv:2307.08691; the same from run to run.

Args:
    grad: `[B, H, Sq, Dv]`, of q's dtype: the gradient of `out`.
    out: what `attention_block_sparse_lse` returned first.
    lse: what it returned second.

All others are as for `attention_block_sparse`.

Returns:
    dq, dk and dv with the shapes and dtypes of q, k and v, dense, in their memory order.
""",
    **GRADIENTS.backward_fields,
    fake=_fake_backward,
    check_values=lambda args: _check_values(args.forward),
    sharding=lambda args: sharding_of_backward(args, _sharding(args.forward)),
    flops=lambda args: _products(args.forward, 3, 2),
)
