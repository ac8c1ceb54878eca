# SPDX-License-Identifier: Apache-2.0
"""The lightning indexer of DeepSeek-V3.2 (DSA): score all positions for each query, and list those of the top scores.

A kernel writes the scores, float32 for each query and position; torch chooses the largest of each row. The scores alone
serve models that hide positions by a mask of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import (
    compute_dtype,
    dense_last,
    entry_function,
    machine_of,
    power_of_two,
    strided,
    vector_of,
)
from torch_tile.kernels.footprint import Footprint, Tile
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.mla.args import IndexScoresArgs, LightningIndexArgs
from torch_tile.kernels.mla.decode import visible

MOST_HEADS = 128  # of which a block holds all scores of a tile


def scores_reference(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, seq_lens: torch.Tensor | None = None, causal: bool = True
) -> torch.Tensor:
    """Compute `sum over h of weights[h] relu(q[h] . k)` for each query and position; if causal, -inf for hidden ones.

    q `[B, Sq, H, D]`, k `[B, S, D]`, weights `[B, Sq, H]`. The queries are the last Sq of `seq_lens[b]` positions
    (default S), and see those up to their own. Returns `[B, Sq, S]` in the dtype of sums.
    """
    compute = compute_dtype(q.dtype)
    used, keep = k.to(compute), None
    if causal:
        keep = visible(q.shape[1], k.shape[1], seq_lens, q.device)
        used = torch.where(keep.any(1).unsqueeze(-1), used, 0.0)  # memory past the end may hold NaN
    products = torch.einsum("bthd,bsd->bths", q.to(compute), used).relu()
    scores = torch.einsum("bths,bth->bts", products, weights.to(compute))
    return scores if keep is None else scores.masked_fill(~keep, float("-inf"))


def all_scores_reference(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute scores as `scores_reference` does without causality."""
    return scores_reference(q, k, weights, causal=False)


def reference(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, top: int, seq_lens: torch.Tensor | None = None
) -> torch.Tensor:
    """List the positions of the `top` largest scores of each query: int32 `[B, Sq, top]`, falling, -1 for none."""
    return listed(scores_reference(q, k, weights, seq_lens), top)


def listed(scores: torch.Tensor, top: int) -> torch.Tensor:
    """Return the places of the largest scores, largest first, and -1 where fewer are visible."""
    count = torch.sym_min(top, scores.shape[-1])
    values, places = scores.topk(count, dim=-1)
    made = scores.new_full((*scores.shape[:-1], top), -1, dtype=torch.int32)
    made[..., :count] = places.int().masked_fill(values == float("-inf"), -1)
    return made


@dataclass(frozen=True)
class Config:
    """The tiling of scores: a block computes those of one query and `keys` positions, for `heads` heads at once."""

    heads: int
    keys: int
    threads: int = 128


@library_jit
def score_positions(
    config: Config, dtype: torch.dtype, weight_dtype: torch.dtype, width: int, vector: int, whole: bool, causal: bool
) -> Any:
    """Build the kernel of the scores. `whole`: all positions are in use."""
    heads, keys, accum = config.heads, config.keys, compute_dtype(dtype)
    batch, q_len, count, length = T.dynamic("batch, q_len, count, length")
    length_types = [] if whole else [strided("seq_lens", (batch,), torch.int32, unit=False, align=4)]

    @T.prim_func
    def index_scores(
        q: strided("q", (batch, q_len, count, width), dtype, multiple=vector),
        k: strided("k", (batch, length, width), dtype, multiple=vector),
        weights: strided("weights", (batch, q_len, count), weight_dtype, unit=False),
        *lengths: length_types,
        scores: T.Tensor((batch, q_len, length), accum),
    ):
        with T.Kernel(T.ceildiv(length, keys), q_len, batch, threads=config.threads) as (bx, query, sequence):
            q_tile = T.alloc_shared((heads, width), dtype)
            k_tile = T.alloc_shared((keys, width), dtype)
            products = T.alloc_fragment((heads, keys), accum)
            total = T.alloc_fragment((keys,), accum)
            T.copy(q[sequence, query, 0, 0], q_tile)
            T.copy(k[sequence, bx * keys, 0], k_tile)
            T.gemm(q_tile, k_tile, products, transpose_B=True, clear_accum=True)
            for h, j in T.Parallel(heads, keys):
                weight = T.cast(weights[sequence, query, T.min(h, count - 1)], accum)
                # NaN of memory past the end stays apart in its column, which is hidden below.
                positive = T.if_then_else(products[h, j] < 0.0, 0.0, products[h, j])
                products[h, j] = T.if_then_else(h < count, positive * weight, 0.0)
            T.reduce_sum(products, total, dim=0)
            end = T.clamp(lengths[0][sequence], 0, length) if lengths else length
            for j in T.Parallel(keys):
                position = bx * keys + j
                if position < length:
                    seen = position <= end - q_len + query if causal else True
                    scores[sequence, query, position] = T.if_then_else(seen, total[j], -T.infinity(accum))

    return index_scores


def _empty_scores(args: IndexScoresArgs[torch.Tensor] | LightningIndexArgs[torch.Tensor]) -> torch.Tensor:
    """Allocate the scores of all positions."""
    return args.q.new_empty((*args.q.shape[:2], args.k.shape[1]), dtype=compute_dtype(args.q.dtype))


@entry_function(IndexScoresArgs, all_scores_reference, _empty_scores)
def index_scores(args: IndexScoresArgs[torch.Tensor], out: torch.Tensor) -> bool:
    """Compute scores as `all_scores_reference` does."""
    return _scored(*args, None, False, out)


@entry_function(
    LightningIndexArgs,
    reference,
    lambda args: args.q.new_empty((*args.q.shape[:2], args.top), dtype=torch.int32),
)
def lightning_index(args: LightningIndexArgs[torch.Tensor], out: torch.Tensor) -> bool:
    """List positions as `reference` does."""
    scores = _empty_scores(args)
    if not _scored(args.q, args.k, args.weights, args.seq_lens, True, scores):
        return False
    out.copy_(listed(scores, args.top))
    return True


def _scored(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor | None,
    causal: bool,
    scores: torch.Tensor,
) -> bool:
    """Launch the kernel into `scores`, if there is one for these tensors. Return whether there is."""
    heads, width = q.shape[2], q.shape[3]
    if not (q.numel() and k.numel()) or heads > MOST_HEADS:
        return False
    machine = machine_of(q)
    q, k = dense_last(q), dense_last(k)
    config = Config(max(16, power_of_two(heads)), 64)
    bits = 8 * q.dtype.itemsize
    tiles = Footprint((Tile(config.heads, width, bits), Tile(config.keys, width, bits)))
    if machine.is_gpu and not tiles.fits(machine.target):
        return False
    vector = vector_of((q, k), (width,)) if machine.is_gpu else 1
    lengths = [] if seq_lens is None else [seq_lens]
    kernel = machine.kernel(score_positions)(config, q.dtype, weights.dtype, width, vector, seq_lens is None, causal)
    kernel(q, k, weights, *lengths, scores)
    return True
