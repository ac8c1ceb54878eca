# SPDX-License-Identifier: Apache-2.0
"""`tile.nsa_select`: the blocks of keys that native sparse attention selects for each query."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from torch_tile.kernels import compute_dtype
from torch_tile.kernels.attention.args import NsaSelectArgs
from torch_tile.ops import checks
from torch_tile.ops.attention_common import check_heads, kv_head
from torch_tile.ops.checks import require, require_type, require_value
from torch_tile.ops.recomputed import no_gradient
from torch_tile.ops.registration import declare
from torch_tile.ops.registry import Shape
from torch_tile.ops.sharding_rule import Rule, Spec

OP = "nsa_select"


def _fake(args: NsaSelectArgs[Tensor]) -> Tensor:
    """Check the arguments of `tile.nsa_select` and make its empty result."""
    q, k, lse = args[:3]
    checks.check_floating(OP, q=q, k_cmp=k, lse=lse)
    checks.check_same_dtype(OP, q=q, k_cmp=k)
    checks.check_dims(OP, "q", q, 4, "[B, H, Sq, D]")
    checks.check_dims(OP, "k_cmp", k, 4, "[B, Hkv, Sc, D]")
    checks.check_dims(OP, "lse", lse, 3, "[B, H, Sq]")
    checks.check_size(OP, "k_cmp", k, 0, q.shape[0], "q's batch")
    checks.check_size(OP, "k_cmp", k, 3, q.shape[3], "q's head dimension")
    check_heads(OP, q.shape[1], k.shape[1])
    checks.check_sizes(OP, "lse", lse, q.shape[:3], "as q")
    sums = compute_dtype(q.dtype)
    require_type(lse.dtype == sums, lambda: f"tile.{OP}: lse has dtype {lse.dtype}; expected {sums}")
    for name in ("block", "length", "stride"):
        _check_size(name, getattr(args, name), args.stride)
    for name in ("top", "initial", "local"):
        _check_count(name, getattr(args, name))
    # The last compressed key ends with the keys.
    require(
        args.keys >= q.shape[2],
        lambda: (
            f"tile.{OP}: keys is {args.keys}; expected at least q's {q.shape[2]} queries, which are the last of them"
        ),
    )
    made: Tensor = q.new_empty((q.shape[0], k.shape[1], q.shape[2], args.top), dtype=torch.int32)
    return made


def _check_size(name: str, size: int, stride: int) -> None:
    """Check a number of positions."""
    require_value(
        stride > 0 and size > 0 and size % stride == 0,
        lambda: f"tile.{OP}: {name} is {size}; expected a positive multiple of stride, which is {stride}",
    )


def _check_count(name: str, count: int) -> None:
    """Check a number of blocks."""
    require_value(count >= 0, lambda: f"tile.{OP}: {name} is {count}; expected 0 or more")


def _sharding(args: NsaSelectArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.nsa_select` for sharding."""
    heads = args.k_cmp.shape[1]
    return Rule(
        outputs=[("batch", kv_head(heads), "query", "top")],
        inputs=[("batch", "head", "query", "d"), ("batch", kv_head(heads), "key", "d"), ("batch", "head", "query")],
        # One head of keys has the weights of all heads added up.
        free=("batch",) if heads == 1 else ("batch", "head"),
        even={} if heads == 1 else {"head": heads},
    )


def _flops(args: NsaSelectArgs[Shape]) -> int:
    """Count the operations of the products."""
    batch, heads, q_len, width = args.q
    return 2 * batch * heads * q_len * args.k_cmp[2] * width


nsa_select: Final = declare(
    OP,
    NsaSelectArgs[Tensor],
    Tensor,
    """List the blocks of keys that each query selects (native sparse attention, NSA, arXiv:2502.11089, section 3.3.2).

Attention over compressed keys gives each of them a weight, which is added up over the heads that share keys. A block's
score is the sum of the weights of the compressed keys that cover its runs of `stride` positions.

Args:
    q: `[B, H, Sq, D]`. The queries are the last Sq of `keys` positions.
    k_cmp: `[B, Hkv, Sc, D]`: key c stands for the positions from `c * stride` to `c * stride + length - 1`, and is
        visible to queries from its last position on.
    lse: `[B, H, Sq]` in float32 (float64 for float64): what attention over k_cmp returned, see `attention_lse`.
    keys: positions of the sequence.
    top: how many blocks a query gets.
    block: positions of a block that is selected, a multiple of stride.
    length: positions that a compressed key stands for, a multiple of stride.
    stride: positions from one compressed key to the next.
    initial: this many first blocks come before all others.
    local: and so do this many blocks up to a query's own.
    scale: of the scores, default `D ** -0.5`.

Returns:
    int32 `[B, Hkv, Sq, top]`: distinct blocks up to a query's own, and -1 where there are fewer. Which of equal scores
    come first is not said. Memory for all weights, `[B, Hkv, Sq, Sc]`, is needed. No gradient.
""",
    module="attention.nsa",
    fake=_fake,
    **no_gradient(OP, "Numbers of blocks are integers.", 0),
    sharding=_sharding,
    flops=_flops,
)
