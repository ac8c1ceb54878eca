# SPDX-License-Identifier: Apache-2.0
"""`tile.lightning_index`: the positions that sparse latent attention reads for each query. `tile.index_scores`: what it
chooses them by.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from torch_tile.kernels import compute_dtype
from torch_tile.kernels.mla.args import IndexScoresArgs, LightningIndexArgs
from torch_tile.ops import checks
from torch_tile.ops.checks import require, require_value
from torch_tile.ops.recomputed import no_gradient
from torch_tile.ops.registration import declare
from torch_tile.ops.registry import Shape, in_torch
from torch_tile.ops.sharding_rule import Rule, Spec, if_given

OP = "lightning_index"
SCORES = "index_scores"


def _check_operands(op: str, q: Tensor, k: Tensor, weights: Tensor) -> None:
    """Check what both operators take."""
    checks.check_floating(op, q=q, k=k, weights=weights)
    checks.check_same_dtype(op, q=q, k=k)
    checks.check_dims(op, "q", q, 4, "[B, Sq, H, D]")
    checks.check_dims(op, "k", k, 3, "[B, S, D]")
    checks.check_dims(op, "weights", weights, 3, "[B, Sq, H]")
    checks.check_size(op, "k", k, 0, q.shape[0], "q's batch")
    checks.check_size(op, "k", k, 2, q.shape[3], "q's last dimension")
    checks.check_sizes(op, "weights", weights, q.shape[:3], "as q")


def _fake_scores(args: IndexScoresArgs[Tensor]) -> Tensor:
    """Check the arguments of `tile.index_scores` and make its empty result."""
    _check_operands(SCORES, *args)
    return args.q.new_empty((*args.q.shape[:2], args.k.shape[1]), dtype=compute_dtype(args.q.dtype))


def _fake(args: LightningIndexArgs[Tensor]) -> Tensor:
    """Check the arguments of `tile.lightning_index` and make its empty result."""
    q, k, weights, top, seq_lens = args
    _check_operands(OP, q, k, weights)
    if seq_lens is not None:
        checks.check_positions(OP, "seq_lens", seq_lens, 1, "[B]", q=q)
        checks.check_size(OP, "seq_lens", seq_lens, 0, q.shape[0], "q's batch")
    require_value(top >= 0, lambda: f"tile.{OP}: top is {top}; expected 0 or more")
    return q.new_empty((q.shape[0], q.shape[1], top), dtype=torch.int32)


def _check_values(args: LightningIndexArgs[Tensor]) -> None:
    """Check that lengths fit the keys. Only on the CPU, since a GPU would have to wait."""
    lengths, capacity = args.seq_lens, args.k.shape[1]
    if lengths is None or lengths.device.type != "cpu" or not lengths.numel():
        return
    low, high = (int(n) for n in lengths.aminmax())
    require(
        low >= 0 and high <= capacity,
        lambda: f"tile.{OP}: seq_lens has values from {low} to {high}; expected 0 to {capacity}, by k",
    )


def _sharding(args: LightningIndexArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.lightning_index` for sharding."""
    return Rule(
        outputs=[("batch", "query", "top")],
        inputs=[
            ("batch", "query", "head", "d"),
            ("batch", "key", "d"),
            ("batch", "query", "head"),
            if_given(args.seq_lens, ("batch",)),
        ],
        free=("batch",),
    )


def _sharding_of_scores(args: IndexScoresArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.index_scores` for sharding."""
    return Rule(
        outputs=[("batch", "query", "key")],
        inputs=[("batch", "query", "head", "d"), ("batch", "key", "d"), ("batch", "query", "head")],
        free=("batch", "query", "key"),
    )


def _flops(args: LightningIndexArgs[Shape] | IndexScoresArgs[Shape]) -> int:
    """Count the operations of the products."""
    batch, q_len, heads, width = args.q
    return 2 * batch * q_len * heads * args.k[1] * width


lightning_index: Final = declare(
    OP,
    LightningIndexArgs[Tensor],
    Tensor,
    """List the positions of the largest index scores of each query (the lightning indexer of DeepSeek-V3.2, DSA).

The score of a query and a position is the sum over heads of `weights[h] * relu(q[h] . k)`, in float32 (float64 for
float64). Positive factors of all scores, such as `D ** -0.5`, change no list.

Args:
    q: `[B, Sq, H, D]`, the indexer's queries.
    k: `[B, S, D]`, its keys, which all heads share.
    weights: `[B, Sq, H]`, of any floating dtype.
    top: how many positions a query gets (2048 in DeepSeek-V3.2).
    seq_lens: int32 `[B]`: positions in use, the new ones included; default S. The queries are the last Sq of them, and
        see those up to their own.

Returns:
    int32 `[B, Sq, top]`, largest score first, -1 where fewer positions are visible: `indices` of `mla_sparse` and of
    `mla_decode_fp8`. Which of equal scores come first is not said. Memory for all scores, `[B, Sq, S]`, is needed.
    No gradient.
""",
    module="mla.indexer",
    fake=_fake,
    check_values=_check_values,
    **no_gradient(OP, "Positions are integers", 0),
    sharding=_sharding,
    flops=_flops,
)

index_scores: Final = declare(
    SCORES,
    IndexScoresArgs[Tensor],
    Tensor,
    """Compute the index scores of all positions for each query: `sum over h of weights[h] * relu(q[h] . k)`.

`lightning_index` lists the largest of them under causality. This one hides nothing, for models with a mask of their
own. Products of all heads are not in memory.

Args:
    q: `[B, Sq, H, D]`, the indexer's queries.
    k: `[B, S, D]`, its keys, which all heads share.
    weights: `[B, Sq, H]`, of any floating dtype.

Returns:
    `[B, Sq, S]` in float32 (float64 for float64). No gradient.
""",
    module="mla.indexer",
    fake=_fake_scores,
    reference=in_torch("mla.indexer", "all_scores_reference"),
    **no_gradient(SCORES, "Choose positions by it, which have none"),
    sharding=_sharding_of_scores,
    flops=_flops,
)
