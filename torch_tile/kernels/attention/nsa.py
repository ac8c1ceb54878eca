# SPDX-License-Identifier: Apache-2.0
"""Choose the blocks of keys that native sparse attention selects for each query (NSA, arXiv:2502.11089, section 3.3.2).

A kernel writes how much weight attention over compressed keys gives each of them, float32 for each query. It sums over
the heads that share keys. Torch adds these up for the blocks of the selection and chooses the largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.attention.args import NsaSelectArgs
from torch_tile.kernels.attention.forward import default_scale
from torch_tile.kernels.common import (
    LOG2_E,
    compute_dtype,
    dense_last,
    entry_function,
    machine_of,
    round_up,
    strided,
    vector_of,
)
from torch_tile.kernels.footprint import Footprint, Tile
from torch_tile.kernels.library_jit import library_jit

MOST_GROUPS = 128  # heads that share keys, all scores of which a block holds


def importance_reference(args: NsaSelectArgs[torch.Tensor]) -> torch.Tensor:
    """Compute the weights of compressed keys, summed over the heads of a group: `[B, Hkv, Sq, Sc]`, in the dtype of
    sums.

    Key c is of the positions from `c * stride` to `c * stride + length - 1`, and visible to queries from there on.
    """
    q, k, lse = args[:3]
    compute = compute_dtype(q.dtype)
    batch, heads, q_len, _ = q.shape
    grouped = q.to(compute).reshape(batch, k.shape[1], heads // max(k.shape[1], 1), q_len, q.shape[3])
    scale = default_scale(q.shape[3]) if args.scale is None else args.scale
    scores = torch.matmul(grouped * scale, k.to(compute).unsqueeze(2).mT)
    weights = torch.exp(scores - lse.to(compute).reshape(scores.shape[:-1]).unsqueeze(-1))
    last = torch.arange(k.shape[2], device=q.device) * args.stride + args.length - 1
    return weights.masked_fill(last > positions(args)[:, None], 0.0).sum(2)


def positions(args: NsaSelectArgs[Any]) -> torch.Tensor:
    """Return the positions of the queries, which are the last of `keys` positions."""
    q_len = args.q.shape[2]
    made: torch.Tensor = torch.arange(q_len, device=args.q.device) + (args.keys - q_len)
    return made


def sum_over_blocks(weights: torch.Tensor, args: NsaSelectArgs[Any]) -> torch.Tensor:
    """Add up the weights `[.., Sc]` of compressed keys for blocks of `block` positions: `[.., blocks]`.

    A run of `stride` positions gets the weights of all compressed keys that cover it. A block gets the weights of its
    runs.
    """
    blocks, runs = -(-args.keys // args.block), args.block // args.stride
    covering = args.length // args.stride
    behind = blocks * runs - weights.shape[-1]
    padded = torch.nn.functional.pad(weights, (covering - 1, max(behind, 0)))
    if covering > 1:
        padded = padded.unfold(-1, covering, 1).sum(-1)
    made: torch.Tensor = padded[..., : blocks * runs].unflatten(-1, (blocks, runs)).sum(-1)
    return made


def chosen(weights: torch.Tensor, args: NsaSelectArgs[Any]) -> torch.Tensor:
    """List the blocks that queries see: int32 `[.., Sq, top]`, -1 behind them.

    The first `initial` blocks and the last `local` ones up to a query's own come before all others.
    """
    made = sum_over_blocks(weights, args)
    block = torch.arange(made.shape[-1], device=made.device)
    own = (positions(args) // args.block)[:, None]
    always = (block < args.initial) | ((block > own - args.local) & (block <= own))
    made = made.masked_fill(always, float("inf")).masked_fill(block > own, float("-inf"))
    count = torch.sym_min(args.top, made.shape[-1])
    values, places = made.topk(count, dim=-1)
    listed = made.new_full((*made.shape[:-1], args.top), -1, dtype=torch.int32)
    listed[..., :count] = places.int().masked_fill(values == float("-inf"), -1)
    return listed


def reference(*given: Any, **named: Any) -> torch.Tensor:
    """Compute `tile.nsa_select` in plain torch, from the arguments of `NsaSelectArgs`."""
    args: NsaSelectArgs[torch.Tensor] = NsaSelectArgs(*given, **named)
    return chosen(importance_reference(args), args)


@dataclass(frozen=True)
class Config:
    """The tiling: a block computes the weights of one query and `keys` compressed keys, for `rows` heads at once."""

    rows: int
    keys: int = 64
    threads: int = 128


@library_jit
def importance(config: Config, dtype: torch.dtype, width: int, vector: int) -> Any:
    """Build the kernel that writes the weights of compressed keys."""
    rows, keys, accum = config.rows, config.keys, compute_dtype(dtype)
    batch, kv_heads, groups, q_len, length = T.dynamic("batch, kv_heads, groups, q_len, length")

    @T.prim_func
    def nsa_importance(
        q: strided("q", (batch, kv_heads, groups, q_len, width), dtype, multiple=vector),
        k: strided("k", (batch, kv_heads, length, width), dtype, multiple=vector),
        lse: strided("lse", (batch, kv_heads, groups, q_len), accum, unit=False),
        weights: T.Tensor((batch, kv_heads, q_len, length), accum),
        scale: accum,
        first: T.int32,
        stride: T.int32,
        size: T.int32,
    ):
        with T.Kernel(T.ceildiv(length, keys), q_len, batch * kv_heads, threads=config.threads) as (bx, query, bz):
            sequence, head = bz // kv_heads, bz % kv_heads
            q_tile = T.alloc_shared((rows, width), dtype)
            k_tile = T.alloc_shared((keys, width), dtype)
            products = T.alloc_fragment((rows, keys), accum)
            total = T.alloc_fragment((keys,), accum)
            for g, c in T.Parallel(rows, width):
                q_tile[g, c] = T.if_then_else(g < groups, q[sequence, head, T.min(g, groups - 1), query, c], 0.0)
            T.copy(k[sequence, head, bx * keys, 0], k_tile)
            T.gemm(q_tile, k_tile, products, transpose_B=True, clear_accum=True)
            for g, j in T.Parallel(rows, keys):
                own = lse[sequence, head, T.min(g, groups - 1), query]
                # A query that sees none has -inf, and nothing below is visible to it.
                weight = T.exp2((products[g, j] * scale - own) * LOG2_E)
                products[g, j] = T.if_then_else(g < groups, weight, 0.0)
            T.reduce_sum(products, total, dim=0)
            for j in T.Parallel(keys):
                key = bx * keys + j
                if key < length:
                    seen = key * stride + size - 1 <= first + query
                    weights[sequence, head, query, key] = T.if_then_else(seen, total[j], 0.0)

    return nsa_importance


@entry_function(
    NsaSelectArgs,
    reference,
    lambda args: args.q.new_empty((*args.k_cmp.shape[:2], args.q.shape[2], args.top), dtype=torch.int32),
)
def nsa_select(args: NsaSelectArgs[torch.Tensor], out: torch.Tensor) -> bool:
    """List blocks as `reference` does."""
    q, k, lse = args[:3]
    batch, kv_heads, length, width = k.shape
    groups = q.shape[1] // kv_heads if kv_heads else 1
    if not (q.numel() and k.numel()) or groups > MOST_GROUPS:
        return False
    machine = machine_of(q)
    q, k = dense_last(q), dense_last(k)
    config = Config(round_up(groups, 16))
    bits = 8 * q.dtype.itemsize
    if machine.is_gpu and not Footprint((Tile(config.rows, width, bits), Tile(config.keys, width, bits))).fits(
        machine.target
    ):
        return False
    vector = vector_of((q, k), (width,)) if machine.is_gpu else 1
    weights = q.new_empty((batch, kv_heads, q.shape[2], length), dtype=compute_dtype(q.dtype))
    scale = float(default_scale(width) if args.scale is None else args.scale)
    kernel = machine.kernel(importance)(config, q.dtype, width, vector)
    first = args.keys - q.shape[2]
    grouped = q.unflatten(1, (kv_heads, groups)), k, lse.unflatten(1, (kv_heads, groups))
    kernel(*grouped, weights, scale, first, args.stride, args.length)
    out.copy_(chosen(weights, args))
    return True
