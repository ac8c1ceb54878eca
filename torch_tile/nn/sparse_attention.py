# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention (NSA, arXiv:2502.11089) under fla's name and arguments, over `torch.ops.tile`."""

from __future__ import annotations

import functools

import torch

from torch_tile.diagnostics.arguments import explains_misfits
from torch_tile.nn.scans import refuse

Tensor = torch.Tensor
ROWS = 16  # of the smallest block of queries that lists may have
HIDES = "seen=le(i3,x0);v=where(seen,acc0,-inf);ret v"


@explains_misfits
def parallel_nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cmp: Tensor | None = None,
    g_slc: Tensor | None = None,
    g_swa: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_counts: int = 16,
    block_size: int = 64,
    window_size: int = 0,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    k_cmp: Tensor | None = None,
    v_cmp: Tensor | None = None,
    cmp_length: int | None = None,
    cmp_stride: int | None = None,
) -> Tensor:
    """Compute the gated sum of attention over compressed keys, selected blocks and a window.

    Every branch is causal. A query sees the compressed keys that end before or with it; of keys, the blocks that
    `nsa_select` lists, or `block_indices`; and in the window its own and the `window_size - 1` keys before it.

    Args:
        q: `[B, T, H, D]`: the last T of S positions.
        k: `[B, S, Hkv, D]`.
        v: `[B, S, Hkv, Dv]`.
        g_cmp: `[B, T, H]`, the factors of the compressed branch; None for 0.
        g_slc: the same of the selected branch; None for 1.
        g_swa: the same of the window; None for 0.
        block_indices: int32 `[B, T, Hkv, n]`, distinct blocks of `block_size` keys, and -1 for none.
        block_counts: how many blocks are selected for each query.
        block_size: keys of a block, a multiple of 16.
        window_size: keys of the window.
        scale: of the scores, default `D ** -0.5`.
        cu_seqlens: refused.
        k_cmp: `[B, Sc, Hkv, D]`, compressed keys as a model makes them. Default: means of whole blocks.
        v_cmp: `[B, Sc, Hkv, Dv]`, the same of values.
        cmp_length: positions that a compressed key stands for, default `block_size`.
        cmp_stride: positions from one compressed key to the next, default `cmp_length`.

    Returns:
        `[B, T, H, Dv]`, differentiable in q, k, v, the compressed ones and the gates. The choice of blocks is not.
    """
    refuse("parallel_nsa", cu_seqlens=cu_seqlens)
    if (k_cmp is None) != (v_cmp is None):
        raise ValueError("parallel_nsa: one of k_cmp and v_cmp is None; expected both or none")
    if g_cmp is None and block_indices is None and k_cmp is not None:
        raise ValueError("parallel_nsa: k_cmp is given, but g_cmp is None; expected block_indices, or factors")
    length = block_size if cmp_length is None else cmp_length
    stride = length if cmp_stride is None else cmp_stride
    queries, keys, values = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    offset = k.shape[1] - q.shape[1]
    parts: list[tuple[Tensor | None, Tensor]] = []
    if g_cmp is not None or block_indices is None:
        if k_cmp is None or v_cmp is None:
            if stride != length:
                raise ValueError(f"parallel_nsa: cmp_stride is {stride}; without k_cmp, expected cmp_length, {length}")
            k_cmp, v_cmp = (_means(x, length) for x in (k, v))
        compressed = k_cmp.transpose(1, 2), v_cmp.transpose(1, 2)
        ends = f"a=mul(i3,{float(stride)});b=add(a,{float(length - 1)});c=le(b,i2);v=where(c,acc0,-inf);ret v"
        out, lse = torch.ops.tile.attention_lse(queries, *compressed, None, False, scale, 0, offset, None, ends)
        if g_cmp is not None:
            parts.append((g_cmp, out))
        if block_indices is None:
            given = queries, compressed[0], lse, k.shape[1], block_counts, block_size, length, stride, 1, 2, scale
            block_indices = torch.ops.tile.nsa_select(*(x.detach() if isinstance(x, Tensor) else x for x in given))
            block_indices = block_indices.transpose(1, 2)
    selected = _selected(q, keys, values, block_indices, block_size, scale, offset)
    parts.append((g_slc, selected))
    if g_swa is not None:
        options = None, True, scale, window_size, offset
        seen = torch.ops.tile.attention(queries, keys, values, *options) if window_size else torch.zeros_like(selected)
        parts.append((g_swa, seen))
    total: Tensor = functools.reduce(torch.add, (_gated(part.transpose(1, 2), gate) for gate, part in parts))
    return total


def _gated(part: Tensor, gate: Tensor | None) -> Tensor:
    """Return a branch `[B, T, H, Dv]` times its factors."""
    return part if gate is None else part * gate.unsqueeze(-1).to(part.dtype)


def _means(x: Tensor, length: int) -> Tensor:
    """Return the means of whole runs of positions, `[B, S / length, H, D]`."""
    count = x.shape[1] // length
    made: Tensor = x[:, : count * length].unflatten(1, (count, length)).mean(2)
    return made


def _selected(
    q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, size: int, scale: float | None, offset: int
) -> Tensor:
    """Return attention `[B, H, T, Dv]` over listed blocks, those of a query's keys that are not behind it.

    The heads that share keys are the rows of a block of queries, of which 16 are the fewest.
    """
    batch, length, heads, width = q.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    rows = -(-groups // ROWS) * ROWS
    grouped = q.unflatten(2, (kv_heads, groups)).permute(0, 2, 1, 3, 4)
    padded = torch.nn.functional.pad(grouped, (0, 0, 0, rows - groups)).reshape(batch, kv_heads, length * rows, width)
    place = torch.arange(length, device=q.device, dtype=torch.float32) + offset
    place = place.repeat_interleave(rows)[:, None]
    listed = blocks.transpose(1, 2).int()
    # Lists name as many blocks as there are, the first ones.
    order = (listed < 0).to(torch.int8).argsort(dim=-1, stable=True)
    listed = listed.gather(-1, order).contiguous()
    counts = (listed >= 0).sum(-1, dtype=torch.int32)
    lists = counts, listed, None, None, rows, size
    out = torch.ops.tile.attention_block_sparse(
        padded, keys, values, *lists, False, scale, 0, 0, [place], HIDES
    )  # fmt: skip
    split: Tensor = out.unflatten(2, (length, rows))[:, :, :, :groups]
    return split.transpose(2, 3).reshape(batch, heads, length, out.shape[3])
